// cutlass/weight_gradient.h: the promises of core/gemm.h, and the products that use the kernel.
#include "cuda/cutlass/weight_gradient.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "core/build_config.h"
#include "cuda/gemm.h"
#include "eaves/system.h"
#include "testing/cases.h"
#include "testing/devices.h"
#include "testing/gemm_test_case.h"

namespace eaves::testing {
namespace {

constexpr GemmDTypes kBfloat16{DType::bfloat16, DType::bfloat16};

class WeightGradient : public OnGpu {
 protected:
  void SetUp() override {
    OnGpu::SetUp();
    if (IsSkipped()) return;
    const GpuInfo gpu = system_info().gpus.at(0);
    if (!EAVES_HAVE_CUTLASS || gpu.compute_capability_major != 9)
      GTEST_SKIP() << "this GPU, or this build, has no such product";
  }

  static void multiply(const Gemm& product) {
    if constexpr (EAVES_HAVE_CUTLASS) {
      cuda::weight_gradient("gemm", product, system_info().gpus.at(0).multiprocessors, nullptr);
    }
  }
  static bool takes(const Gemm& product) {
    if constexpr (EAVES_HAVE_CUTLASS) return cuda::takes_weight_gradient(product, 0);
    return false;
  }
  static GemmCase gradient(std::int64_t classes, std::int64_t features, std::int64_t rows) {
    return {.m = classes, .n = features, .k = rows, .is_a_transposed = true, .accumulates = true};
  }
};

TEST_F(WeightGradient, IsRightAtEverySizeOfWholeVectors) {
  for (const GemmCase& sizes : {
           gradient(1, 8, 1),        // one vector
           gradient(192, 128, 64),   // a tile
           gradient(193, 136, 65),   // one more than a tile in each direction
           gradient(391, 264, 700),  // tiles of both warpgroups and clusters, and more rows than are loaded at once
       }) {
    for (const auto& [has_alpha, padding] : combine<bool, bool>({false, true}, {false, true})) {
      GemmCase test = sizes;
      test.has_alpha = has_alpha;
      test.padding_of_a = kGemmVector - sizes.m % kGemmVector + (padding ? kGemmVector : 0);
      test.padding = padding ? 2 * kGemmVector : 0;
      check_gemm(kCuda, kBfloat16, test, multiply);
    }
  }
}

TEST_F(WeightGradient, AddsInFloat32AndRoundsOnce) {
  // 1 + 2^-8 + 2^-17 lies above the middle of two bfloat16 numbers and rounds up. 1 + 2^-8 is that middle and rounds to
  // 1. The sum 2^-8 + 2^-17, rounded before it is added, is 2^-8.
  GemmCase test = gradient(192, 128, 2);
  test.a = [](std::int64_t, std::int64_t p) { return p == 0 ? 0x1p-8 : 0x1p-17; };
  test.b = [](std::int64_t, std::int64_t) { return 1.0; };
  GemmRun run(kCuda, kBfloat16, test);
  run.c.fill([](std::int64_t) { return 1.0; });
  run.run(multiply);
  EXPECT_EQ(run.c_at(0, 0), 1.0 + 0x1p-7);
  EXPECT_EQ(run.c_at(191, 127), 1.0 + 0x1p-7);
}

TEST_F(WeightGradient, PassesNanAndInfinitiesOn) {
  GemmCase test = gradient(200, 136, 70);
  test.padding_of_a = kGemmVector;
  test.a = [](std::int64_t i, std::int64_t p) { return p != 69 ? 1.0 : i == 3 ? NAN : i == 4 ? INFINITY : 1.0; };
  test.b = [](std::int64_t p, std::int64_t j) { return p == 69 && j == 5 ? -1.0 : 1.0; };
  GemmRun run(kCuda, kBfloat16, test);
  run.run(multiply);
  EXPECT_TRUE(std::isnan(run.c_at(3, 0)));
  EXPECT_EQ(run.c_at(4, 5), -INFINITY);
  EXPECT_EQ(run.c_at(4, 6), INFINITY);
  EXPECT_EQ(run.c_at(5, 5), 68.0);
}

TEST_F(WeightGradient, IsTakenByLargeSumsThatAreAddedWithAnAlpha) {
  float alpha = 1.0f;
  alignas(16) std::byte memory[16];
  const Gemm large{.m = 16384,
                   .n = 4096,
                   .k = 2048,
                   .dtype = DType::bfloat16,
                   .a = {memory, 16384, true},
                   .b = {memory, 4096},
                   .c_dtype = DType::bfloat16,
                   .c = memory,
                   .c_stride = 4096,
                   .alpha = &alpha,
                   .accumulates = true};
  EXPECT_TRUE(takes(large));
  const auto expect_not = [&](auto change) {
    Gemm other = large;
    change(other);
    EXPECT_FALSE(takes(other));
  };
  expect_not([](Gemm& product) { product.alpha = nullptr; });
  expect_not([](Gemm& product) { product.accumulates = false; });
  expect_not([](Gemm& product) { product.dtype = product.c_dtype = DType::float16; });
  expect_not([](Gemm& product) { product.c_dtype = DType::float32; });
  expect_not([](Gemm& product) { product.m = 8192; });
  expect_not([](Gemm& product) { product.k = 1023; });
  expect_not([](Gemm& product) { product.n = 4092; });
  expect_not([](Gemm& product) { product.a.is_transposed = false; });
  expect_not([](Gemm& product) { product.b.is_transposed = true; });
  expect_not([](Gemm& product) { product.a.stride = 16385; });
}

}  // namespace
}  // namespace eaves::testing
