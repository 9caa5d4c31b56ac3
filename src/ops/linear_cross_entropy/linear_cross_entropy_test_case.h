// A call of linear_cross_entropy in a test: a result outside of the contract fails the test.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>

#include "cuda/exp_product.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_case.h"
#include "runtime/backend.h"
#include "testing/calls.h"
#include "testing/devices.h"

namespace eaves::testing {

/// Runs on GPUs with the fused path, and lets calls take it from few classes on.
class OnGpuWithFusedPath : public OnGpu {
 protected:
  void TearDown() override { unsetenv("EAVES_FUSED_PRODUCT"); }
  void SetUp() override {
    OnGpu::SetUp();
    if (IsSkipped()) return;
    setenv("EAVES_FUSED_PRODUCT", "1", 1);
    bool has_fused_path = false;
    if constexpr (kHasCuda) has_fused_path = cuda::has_exp_product(kCuda);
    if (!has_fused_path) GTEST_SKIP() << "this GPU, or this build, has no product that ends in exponentials";
  }
};

/// compare_linear_cross_entropy(), which must have no failure.
inline LinearCrossEntropyShares check_linear_cross_entropy(const LinearCrossEntropyCase& test_case) {
  const LinearCrossEntropyShares shares = compare_linear_cross_entropy(test_case);
  EXPECT_EQ(shares.failure, "");
  return shares;
}

}  // namespace eaves::testing
