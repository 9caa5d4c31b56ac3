// One matrix product in a test or a self-test: its operands on any device, and the comparison with float64 loops. The
// caller says which function computes the product.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/dispatch.h"
#include "core/gemm.h"
#include "runtime/runtime.h"
#include "testing/tensor.h"
#include "testing/tolerance.h"

namespace eaves::testing {

struct GemmDTypes {
  DType factors;
  DType c;
};

/// Every dtype of the factors with every dtype that c may have.
inline const std::vector<GemmDTypes>& gemm_dtypes() {
  static const std::vector<GemmDTypes> dtypes = {
      {DType::float32, DType::float32}, {DType::float64, DType::float64},   {DType::float16, DType::float16},
      {DType::float16, DType::float32}, {DType::bfloat16, DType::bfloat16}, {DType::bfloat16, DType::float32},
  };
  return dtypes;
}

struct GemmCase {
  std::int64_t m;
  std::int64_t n;
  std::int64_t k;
  bool is_a_transposed = false;
  bool is_b_transposed = false;
  bool has_alpha = false;
  bool has_bias = false;
  bool accumulates = false;
  std::int64_t padding = 0;       ///< of every stride
  std::int64_t misalignment = 0;  ///< of every matrix, in elements
  std::int64_t padding_of_a = 0;  ///< in addition to `padding`
  /// The numbers of element [i, p] of a, and of element [p, j] of b; absent: normal numbers.
  std::function<double(std::int64_t, std::int64_t)> a = {};
  std::function<double(std::int64_t, std::int64_t)> b = {};
};

/// The worst error of one product, as a share of the error that testing/tolerance.h allows.
struct GemmShares {
  std::string failure = {};  ///< on the first element outside of the contract; empty: all are within it
  double c = 0.0;
  double worst() const { return c; }
};

/// The tensors of one product. Elements that must not be read have numbers too: between the rows of a and b normal
/// numbers, and in c NaN unless the product accumulates.
class GemmRun {
 public:
  GemmRun(Device device, GemmDTypes dtypes, const GemmCase& test_case)
      : case_(test_case),
        dtypes_(dtypes),
        device_(device),
        a_stride_((case_.is_a_transposed ? case_.m : std::max<std::int64_t>(case_.k, 1)) + case_.padding +
                  case_.padding_of_a),
        b_stride_((case_.is_b_transposed ? std::max<std::int64_t>(case_.k, 1) : case_.n) + case_.padding),
        c_stride_(case_.n + case_.padding),
        a(device, dtypes.factors, {case_.is_a_transposed ? case_.k : case_.m, a_stride_}, at_misalignment()),
        b(device, dtypes.factors, {case_.is_b_transposed ? case_.n : case_.k, b_stride_}, at_misalignment()),
        c(device, dtypes.c, {case_.m, c_stride_}, at_misalignment()),
        alpha(device, accumulator(), {}),
        bias(device, accumulator(), {case_.n}) {
    fill(a, a_stride_, case_.is_a_transposed, case_.a, 1);
    fill(b, b_stride_, case_.is_b_transposed, case_.b, 2);
    c.fill([&](std::int64_t at) {
      const bool is_between_rows = at % c_stride_ >= case_.n;
      return case_.accumulates || is_between_rows ? random_normal(3, static_cast<std::uint64_t>(at))
                                                  : std::numeric_limits<double>::quiet_NaN();
    });
    alpha.fill([](std::int64_t) { return -1.25; });
    bias.fill([](std::int64_t j) { return random_normal(4, static_cast<std::uint64_t>(j)); });
    for (std::int64_t at = 0; at < case_.m * c_stride_; ++at) before_.push_back(c.get(at));
  }

  Gemm product() const {
    return {.m = case_.m,
            .n = case_.n,
            .k = case_.k,
            .dtype = dtypes_.factors,
            .a = {a.view().data, a_stride_, case_.is_a_transposed},
            .b = {b.view().data, b_stride_, case_.is_b_transposed},
            .c_dtype = dtypes_.c,
            .c = c.view().data,
            .c_stride = c_stride_,
            .alpha = case_.has_alpha ? alpha.view().data : nullptr,
            .bias = case_.has_bias ? bias.view().data : nullptr,
            .accumulates = case_.accumulates};
  }

  /// Computes the product by `multiply`, and downloads all tensors.
  template <typename Multiply>
  void run(const Multiply& multiply) {
    multiply(product());
    runtime::synchronize(device_);
    for (TestTensor* tensor : {&a, &b, &c, &alpha, &bias}) tensor->download();
  }

  double c_at(std::int64_t i, std::int64_t j) const { return c.get(i * c_stride_ + j); }

  /// Has a failure for the first element that differs from the formula, or the first gap that was written.
  GemmShares compare() const {
    GemmShares shares{.failure = c.canary_damage()};
    const auto fail = [&](const std::string& what, std::int64_t i, std::int64_t j) {
      shares.failure = what + " at " + check::to_string(Dims{i, j});
      return shares;
    };
    const std::vector<double> of_a = numbers(a, case_.m, case_.k, a_stride_, case_.is_a_transposed);
    const std::vector<double> of_b = numbers(b, case_.k, case_.n, b_stride_, case_.is_b_transposed);
    const double factor = case_.has_alpha ? alpha.get(0) : 1.0;
    std::vector<double> sums(static_cast<std::size_t>(case_.n)), scales(sums.size());
    for (std::int64_t i = 0; i < case_.m; ++i) {
      for (std::int64_t j = 0; j < case_.n; ++j) {
        const auto at = static_cast<std::size_t>(j);
        sums[at] = case_.has_bias ? bias.get(j) : case_.accumulates ? before_at(i, j) : 0.0;
        scales[at] = std::abs(sums[at]);
      }
      for (std::int64_t p = 0; p < case_.k; ++p) {
        const double of_row = factor * of_a[static_cast<std::size_t>(i * case_.k + p)];
        const double* row = &of_b[static_cast<std::size_t>(p * case_.n)];
        for (std::size_t j = 0; j < sums.size(); ++j) {
          sums[j] += of_row * row[j];
          scales[j] += std::abs(of_row * row[j]);
        }
      }
      for (std::int64_t j = 0; j < case_.n; ++j) {
        const auto at = static_cast<std::size_t>(j);
        double allowed = allowed_product_error(dtypes_.c, sums[at], scales[at], case_.k);
        if (case_.accumulates && rounds_before_adding(device_, dtypes_.c)) {
          allowed += 0.5 * unit_in_last_place(dtypes_.c, sums[at] - before_at(i, j));
        }
        const std::string text = difference_beyond(allowed, dtypes_.c, c_at(i, j), sums[at]);
        if (!text.empty()) return fail(text, i, j);
        const double error = std::abs(c_at(i, j) - sums[at]);
        if (error > 0.0 && std::isfinite(error)) shares.c = std::max(shares.c, error / allowed);
      }
      for (std::int64_t j = case_.n; j < c_stride_; ++j) {
        if (c_at(i, j) != before_at(i, j)) return fail("a gap between rows was written", i, j);
      }
    }
    return shares;
  }

 private:
  DType accumulator() const { return accumulator_dtype(dtypes_.factors); }
  Placement at_misalignment() const { return contiguous_at(case_.misalignment); }
  double before_at(std::int64_t i, std::int64_t j) const {
    return before_[static_cast<std::size_t>(i * c_stride_ + j)];
  }

  static void fill(TestTensor& matrix, std::int64_t stride, bool is_transposed,
                   const std::function<double(std::int64_t, std::int64_t)>& value, std::uint64_t seed) {
    matrix.fill([&](std::int64_t at) {
      if (!value) return random_normal(seed, static_cast<std::uint64_t>(at));
      return is_transposed ? value(at % stride, at / stride) : value(at / stride, at % stride);
    });
  }

  /// The numbers in row-major order, without the gaps between rows.
  static std::vector<double> numbers(const TestTensor& matrix, std::int64_t rows, std::int64_t columns,
                                     std::int64_t stride, bool is_transposed) {
    std::vector<double> values;
    values.reserve(static_cast<std::size_t>(rows * columns));
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) {
        values.push_back(matrix.get(is_transposed ? j * stride + i : i * stride + j));
      }
    }
    return values;
  }

  GemmCase case_;
  GemmDTypes dtypes_;
  Device device_;
  std::int64_t a_stride_, b_stride_, c_stride_;
  std::vector<double> before_;  ///< of c

 public:
  TestTensor a, b, c, alpha, bias;
};

inline std::string description_of(GemmDTypes dtypes, const GemmCase& c) {
  std::string text = std::string(name_of(dtypes.factors)) + " to " + name_of(dtypes.c) + " " +
                     check::to_string(Dims{c.m, c.k}) + " x " + check::to_string(Dims{c.k, c.n}) + ", padding " +
                     std::to_string(c.padding) + ", misalignment " + std::to_string(c.misalignment);
  if (c.is_a_transposed) text += ", a^T";
  if (c.is_b_transposed) text += ", b^T";
  if (c.has_alpha) text += ", alpha";
  if (c.has_bias) text += ", bias";
  if (c.accumulates) text += ", accumulates";
  return text;
}

/// Computes a product by `multiply`, a function of a Gemm, and compares every element with the formula.
template <typename Multiply>
GemmShares compare_gemm(Device device, GemmDTypes dtypes, const GemmCase& test_case, const Multiply& multiply) {
  GemmRun run(device, dtypes, test_case);
  run.run(multiply);
  GemmShares shares = run.compare();
  if (!shares.failure.empty()) shares.failure = description_of(dtypes, test_case) + ": " + shares.failure;
  return shares;
}

}  // namespace eaves::testing
