// Tests the contract of core/gemm.h on every device. cpu/gemm_test.cpp tests how the CPU divides a product.
#include "core/gemm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "runtime/runtime.h"
#include "testing/cases.h"
#include "testing/devices.h"
#include "testing/gemm_test_case.h"

namespace eaves::testing {
namespace {

/// Every device adds a bias to accumulators; only the CPU adds one to other types.
bool may_have_bias(GemmDTypes dtypes) { return size_of(dtypes.c) != 2; }

class MatrixProduct : public OnEachDevice {
 protected:
  void check(GemmDTypes dtypes, const GemmCase& test_case) {
    check_gemm(device(), dtypes, test_case,
               [&](const Gemm& product) { runtime::matrix_product(device(), product, {}); });
  }

  /// Calls `body` with each factor row-major and transposed.
  template <typename Body>
  static void for_each_layout(const Body& body) {
    for (const bool is_a_transposed : {false, true}) {
      for (const bool is_b_transposed : {false, true}) body(is_a_transposed, is_b_transposed);
    }
  }
};
EAVES_EACH_DEVICE(MatrixProduct);

TEST_P(MatrixProduct, IsRightInEveryLayoutAtEveryAlignment) {
  for (const GemmDTypes dtypes : gemm_dtypes()) {
    for_each_layout([&](bool is_a_transposed, bool is_b_transposed) {
      for (const bool has_alpha : {false, true}) {
        GemmCase test{13, 71, 37, is_a_transposed, is_b_transposed, has_alpha};  // odd strides
        check(dtypes, test);
        test.misalignment = 1;  // no address has more than an element's alignment
        check(dtypes, test);
        test.padding = 5;  // even strides, longer than the rows
        check(dtypes, test);
        test = {48, 64, 32, is_a_transposed, is_b_transposed, has_alpha};  // multiples of 16 bytes throughout
        check(dtypes, test);
        test = {13, 69, 37, is_a_transposed, is_b_transposed, has_alpha};
        test.padding = 3;  // rows start at multiples of 16 bytes, but have no whole number of vectors
        check(dtypes, test);
        test = {48, 64, 32, is_a_transposed, is_b_transposed, has_alpha};
        test.padding = 8;  // rows start at multiples of 16 bytes, with gaps
        check(dtypes, test);
        test.misalignment = 1;
        check(dtypes, test);
        test.padding = 1;  // each row has another offset from a multiple of 16 bytes
        check(dtypes, test);
      }
    });
  }
}

TEST_P(MatrixProduct, AddsABiasToEachRow) {
  for (const GemmDTypes dtypes : gemm_dtypes()) {
    if (!may_have_bias(dtypes)) continue;
    for_each_layout([&](bool is_a_transposed, bool is_b_transposed) {
      for (const bool has_alpha : {false, true}) {
        GemmCase test{64, 96, 48, is_a_transposed, is_b_transposed, has_alpha, true};
        check(dtypes, test);
        test.padding = 3;
        test.misalignment = 1;
        check(dtypes, test);
        test = {61, 93, 45, is_a_transposed, is_b_transposed, has_alpha, true};
        test.padding = 3;  // rows start at multiples of 16 bytes, but have no whole number of vectors
        check(dtypes, test);
        test.misalignment = 1;
        test.m = 1100;  // more rows than a launch has blocks
        test.n = 257;   // one column more than a block has threads
        test.k = 5;
        check(dtypes, test);
      }
    });
  }
}

TEST_P(MatrixProduct, AccumulatesIntoWhatIsThere) {
  for (const GemmDTypes dtypes : gemm_dtypes()) {
    for_each_layout([&](bool is_a_transposed, bool is_b_transposed) {
      for (const auto& [has_alpha, padding] : combine<bool, std::int64_t>({false, true}, {0, 3})) {
        check(dtypes, {64, 96, 48, is_a_transposed, is_b_transposed, has_alpha, false, true, padding});
        check(dtypes, {61, 93, 45, is_a_transposed, is_b_transposed, has_alpha, false, true, padding});
        check(dtypes, {7, 66, 600, is_a_transposed, is_b_transposed, has_alpha, false, true, padding, 1});
      }
    });
  }
}

TEST_P(MatrixProduct, TakesAnySize) {
  struct Sizes {
    std::int64_t m, n, k;  // each with its reason
  };
  constexpr Sizes kSizes[] = {
      {1, 1, 1},       // one product
      {1, 1, 1031},    // two vectors
      {1, 257, 64},    // a vector and a matrix
      {257, 1, 64},    // a matrix and a vector
      {31, 37, 1},     // a column and a row
      {1, 2, 4099},    // a long sum for few elements: a device may split it
      {2, 3, 8200},    // likewise, and even
      {127, 131, 67},  // primes around a tile of 128
      {129, 257, 61},  // one more than a multiple of a tile
      {521, 17, 129},  // many rows, few columns
      {17, 521, 129},  // the other way around
  };
  for (const GemmDTypes dtypes : gemm_dtypes()) {
    for (const auto& [m, n, k] : kSizes) {
      check(dtypes, {m, n, k});
      check(dtypes, {m, n, k, true, false, true, false, true});
      check(dtypes, {m, n, k, false, true, true, may_have_bias(dtypes)});
    }
  }
}

TEST_P(MatrixProduct, OfASumOverNothingIsZeroTheBiasOrWhatWasThere) {
  for (const GemmDTypes dtypes : gemm_dtypes()) {
    for_each_layout([&](bool is_a_transposed, bool is_b_transposed) {
      for (const bool has_alpha : {false, true}) {
        check(dtypes, {3, 5, 0, is_a_transposed, is_b_transposed, has_alpha, false, false, 1});
        check(dtypes, {3, 5, 0, is_a_transposed, is_b_transposed, has_alpha, false, true, 1});
        if (!may_have_bias(dtypes)) continue;
        check(dtypes, {3, 5, 0, is_a_transposed, is_b_transposed, has_alpha, true, false, 1});
      }
    });
  }
}

TEST_P(MatrixProduct, PassesNanAndInfinitiesOn) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  // Row 1 of a has a NaN. Row 2 has an infinity, which b multiplies by 1, 0 and -infinity.
  const auto a = [](std::int64_t i, std::int64_t p) {
    return p != 2 || i == 0 || i == 3 ? 1.0 : i == 1 ? NAN : INFINITY;
  };
  const auto b = [](std::int64_t p, std::int64_t j) { return p != 2 || j == 0 ? 1.0 : j == 1 ? 0.0 : -INFINITY; };
  for (const GemmDTypes dtypes : gemm_dtypes()) {
    SCOPED_TRACE(std::string(name_of(dtypes.factors)) + " to " + name_of(dtypes.c));
    GemmRun run(device(), dtypes, {.m = 4, .n = 3, .k = 5, .a = a, .b = b});
    run.run([&](const Gemm& product) { runtime::matrix_product(device(), product, {}); });
    const double expected[4][3] = {
        {5.0, 4.0, -kInfinity}, {NAN, NAN, NAN}, {kInfinity, NAN, -kInfinity}, {5.0, 4.0, -kInfinity}};
    for (const auto& [i, j] : combine<int, int>({0, 1, 2, 3}, {0, 1, 2})) {
      EXPECT_EQ(difference_beyond(0.0, dtypes.c, run.c_at(i, j), expected[i][j]), "") << i << ", " << j;
    }
  }
}

TEST_P(MatrixProduct, IsTheSameBitByBitEachTime) {
  for (const GemmDTypes dtypes : gemm_dtypes()) {
    const GemmCase test{.m = 65, .n = 130, .k = 4099, .has_alpha = true, .padding = 1};
    GemmRun first(device(), dtypes, test), second(device(), dtypes, test);
    for (GemmRun* run : {&first, &second}) {
      run->run([&](const Gemm& product) { runtime::matrix_product(device(), product, {}); });
    }
    EXPECT_TRUE(first.c.bytes() == second.c.bytes()) << description_of(dtypes, test);
  }
}

class MatrixProductOnGpu : public OnGpu {};

TEST_F(MatrixProductOnGpu, IsCapturedFromTheCallersStream) {
  const runtime::Stream stream(kCuda);
  for (const GemmDTypes dtypes : gemm_dtypes()) {
    const GemmCase test{.m = 64, .n = 96, .k = 48, .has_alpha = true, .has_bias = may_have_bias(dtypes)};
    const auto multiply = [&](const Gemm& product) {
      runtime::matrix_product(kCuda, product, {.stream = stream.handle()});
    };
    check_gemm(kCuda, dtypes, test, multiply);  // the first call loads kernels, and no graph can capture a load
    check_gemm(kCuda, dtypes, test, [&](const Gemm& product) {
      runtime::capture_and_replay(
          kCuda, stream.handle(), [&] { multiply(product); }, 1);
    });
  }
}

}  // namespace
}  // namespace eaves::testing
