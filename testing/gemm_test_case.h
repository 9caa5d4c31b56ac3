// A matrix product in a test: an element outside of the contract fails the test.
#pragma once

#include <gtest/gtest.h>

#include "testing/gemm_case.h"

namespace eaves::testing {

/// compare_gemm(), which must have no failure.
template <typename Multiply>
void check_gemm(Device device, GemmDTypes dtypes, const GemmCase& test_case, const Multiply& multiply) {
  EXPECT_EQ(compare_gemm(device, dtypes, test_case, multiply).failure, "");
}

}  // namespace eaves::testing
