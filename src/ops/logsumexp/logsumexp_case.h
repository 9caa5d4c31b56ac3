// One call of logsumexp in a test or a self-test: its inputs, its buffers between canaries, and the comparison with the
// oracle.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "eaves/logsumexp.h"
#include "ops/logsumexp/logsumexp_reference.h"
#include "testing/runs.h"
#include "testing/tensor.h"
#include "testing/tolerance.h"

namespace eaves::testing {

struct LogsumexpCase {
  Device device = device_of_test();
  DType dtype = DType::float32;
  Dims shape = {};
  Dims axes = {};
  bool keepdim = false;
  Placement x_placement = {};
  Placement out_placement = {};
  Placement lse_placement = {};
  Placement grad_out_placement = {};
  Placement grad_x_placement = {};
  std::optional<DType> out_dtype = {};       ///< the dtype of x unless given
  std::optional<DType> grad_out_dtype = {};  ///< the dtype of x unless given
  bool has_backward = true;
  bool has_split_lse = false;                 ///< lse is written as two numbers
  std::function<double(std::int64_t)> value;  ///< of element i of x, in row-major order
};

/// The buffers of one call, forward and backward.
class LogsumexpRun : public CallsOf<LogsumexpRun> {
 public:
  explicit LogsumexpRun(const LogsumexpCase& test_case)
      : case_(test_case),
        axes_(check::axes({"test", "x", TensorView::contiguous(static_cast<void*>(nullptr), case_.dtype, case_.shape)},
                          case_.axes)),
        x(case_.device, case_.dtype, case_.shape, case_.x_placement),
        out(case_.device, case_.out_dtype.value_or(case_.dtype), row_shape(), case_.out_placement),
        lse(case_.device, accumulator_dtype(case_.dtype),
            case_.has_split_lse ? with_axis_of_2(reduced_shape(case_.shape, axes_, false)) : row_shape(),
            case_.lse_placement),
        grad_out(case_.device, case_.grad_out_dtype.value_or(case_.dtype), row_shape(), case_.grad_out_placement),
        grad_x(case_.device, case_.dtype, case_.shape, case_.grad_x_placement) {
    x.fill(case_.value);
    grad_out.fill([](std::int64_t i) { return random_normal(3, static_cast<std::uint64_t>(i)); });
  }

  LogsumexpForwardArgs forward_args() const {
    return {.x = x.view(), .axes = case_.axes, .keepdim = case_.keepdim, .out = out.view(), .lse = lse.view()};
  }
  LogsumexpBackwardArgs backward_args() const {
    return {.grad_out = grad_out.view(),
            .x = x.view(),
            .lse = lse.view(),
            .axes = case_.axes,
            .keepdim = case_.keepdim,
            .grad_x = grad_x.view()};
  }

  void launch(const ExecutionContext& context = {}) {
    logsumexp_forward(forward_args(), context);
    if (case_.has_backward) logsumexp_backward(backward_args(), context);
  }
  std::vector<TestTensor*> inputs() { return {&x, &grad_out}; }
  std::vector<std::pair<const char*, TestTensor*>> outputs() {
    return {{"out", &out}, {"lse", &lse}, {"grad_x", &grad_x}};
  }

  /// Are all results equal bit by bit?
  bool results_equal(const LogsumexpRun& other) const {
    return out.bytes() == other.out.bytes() && lse.bytes() == other.lse.bytes() &&
           grad_x.bytes() == other.grad_x.bytes();
  }

  /// lse - anchor of a row. With two numbers it has more digits than one number for lse.
  double lse_of(std::int64_t row, double anchor = 0.0) const {
    return case_.has_split_lse ? (lse.get(2 * row) - anchor) + lse.get(2 * row + 1) : lse.get(row) - anchor;
  }

  const LogsumexpCase& test_case() const { return case_; }
  const AxisSet& axes() const { return axes_; }

 private:
  Dims row_shape() const { return reduced_shape(case_.shape, axes_, case_.keepdim); }

  LogsumexpCase case_;
  AxisSet axes_;

 public:
  TestTensor x, out, lse, grad_out, grad_x;
};

/// The worst errors of one call, as shares of the errors that testing/tolerance.h allows.
struct LogsumexpShares {
  std::string failure = {};  ///< on the first result outside of the contract; empty: all are within it
  double lse = 0.0;
  double out = 0.0;
  double gradient = 0.0;

  void raise(const LogsumexpShares& other) {
    if (failure.empty()) failure = other.failure;
    lse = std::max(lse, other.lse);
    out = std::max(out, other.out);
    gradient = std::max(gradient, other.gradient);
  }
  double worst() const { return std::max({lse, out, gradient}); }
};

/// Compares the downloaded results of a run with the oracle.
inline LogsumexpShares compare_results(const LogsumexpRun& run) {
  const LogsumexpCase& test_case = run.test_case();
  LogsumexpShares shares;
  const auto expect = [&](DType dtype, double actual, double exact, double scale, double& share, const char* what,
                          std::int64_t at) {
    const std::string text = difference(dtype, actual, exact, scale);
    if (!text.empty()) shares.failure = what + std::to_string(at) + ": " + text;
    const double error = std::abs(actual - exact);
    // A result that overflows in the oracle too has no share.
    const bool has_share = error > 0.0 && (std::isfinite(error) || !text.empty());
    if (has_share) share = std::max(share, error / allowed_error(dtype, exact, scale));
    return text.empty();
  };
  const reference::LogsumexpRows exact = reference::logsumexp(run.x.host(), run.axes());
  const bool is_split = test_case.has_split_lse;
  // Two numbers are as exact as the logarithm of the row's sum, however large its elements are.
  const auto anchor_of = [&](std::size_t row) {
    return is_split && std::isfinite(exact.max[row]) ? exact.max[row] : 0.0;
  };
  for (std::size_t row = 0; row < exact.lse.size(); ++row) {
    const auto at = static_cast<std::int64_t>(row);
    const double scale = logsumexp_scale(exact.lse[row], exact.max[row]);
    const double lse = is_split ? exact.lse_minus_anchor[row] : exact.lse[row];
    if (!expect(accumulator_dtype(test_case.dtype), run.lse_of(at, anchor_of(row)), lse,
                is_split ? logsumexp_scale(lse, 0.0) : scale, shares.lse, "lse of row ", at) ||
        !expect(run.out.view().dtype, run.out.get(at), exact.lse[row], scale, shares.out, "out of row ", at)) {
      return shares;
    }
  }
  if (!test_case.has_backward) return shares;

  // The oracle of the backward takes the rounded lse that the backward gets, unless it has two numbers.
  std::vector<double> gradients(exact.row_of.size());
  std::vector<double> scales(exact.lse.size(), 0.0);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const auto row = static_cast<std::size_t>(exact.row_of[i]);
    gradients[i] = reference::logsumexp_gradient(run.x.get(static_cast<std::int64_t>(i)),
                                                 is_split ? exact.lse_minus_anchor[row] : run.lse_of(exact.row_of[i]),
                                                 run.grad_out.get(exact.row_of[i]), anchor_of(row));
    scales[row] = std::max(scales[row], std::abs(gradients[i]));  // a NaN does not raise it
  }
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    if (!expect(test_case.dtype, run.grad_x.get(at), gradients[i], scales[static_cast<std::size_t>(exact.row_of[i])],
                shares.gradient, "gradient of element ", at)) {
      return shares;
    }
  }
  return shares;
}

inline std::string description_of(const LogsumexpCase& c) {
  return std::string(name_of(c.dtype)) + " " + check::to_string(c.shape) + ", axes " + check::to_string(c.axes) +
         (c.keepdim ? ", keepdim" : "");
}

/// Runs forward and backward, and compares every element with the oracle and every byte around the elements with its
/// canary.
inline LogsumexpShares compare_logsumexp(const LogsumexpCase& test_case) {
  LogsumexpRun run(test_case);
  LogsumexpShares shares{.failure = damage_by_run(run)};
  if (shares.failure.empty()) shares = compare_results(run);
  if (!shares.failure.empty()) shares.failure = description_of(test_case) + ": " + shares.failure;
  return shares;
}

}  // namespace eaves::testing
