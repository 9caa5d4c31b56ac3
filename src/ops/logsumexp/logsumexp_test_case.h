// One call of logsumexp in a test: its inputs, its buffers between canaries, and the comparison with the oracle.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>

#include "core/check.h"
#include "eaves/logsumexp.h"
#include "ops/logsumexp/logsumexp_reference.h"
#include "runtime/runtime.h"
#include "testing/devices.h"
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
class LogsumexpRun {
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
  void download() {
    runtime::synchronize(case_.device);
    for (TestTensor* tensor : {&x, &out, &lse, &grad_out, &grad_x}) tensor->download();
  }
  void run(const ExecutionContext& context = {}) {
    launch(context);
    download();
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

/// Runs forward and backward, and compares every element with the oracle and every byte around the elements with its
/// canary.
inline void check_logsumexp(const LogsumexpCase& test_case) {
  SCOPED_TRACE(std::string(name_of(test_case.dtype)) + " " + check::to_string(test_case.shape) + ", axes " +
               check::to_string(test_case.axes) + (test_case.keepdim ? ", keepdim" : ""));
  LogsumexpRun run(test_case);
  const std::vector<unsigned char> x_before = run.x.bytes();
  const std::vector<unsigned char> grad_out_before = run.grad_out.bytes();
  run.run();
  EXPECT_EQ(run.x.bytes(), x_before) << "x was modified";
  EXPECT_EQ(run.grad_out.bytes(), grad_out_before) << "grad_out was modified";
  EXPECT_EQ(run.out.canary_damage(), "") << "around out";
  EXPECT_EQ(run.lse.canary_damage(), "") << "around lse";
  EXPECT_EQ(run.grad_x.canary_damage(), "") << "around grad_x";

  const reference::LogsumexpRows exact = reference::logsumexp(run.x.host(), run.axes());
  const auto row_count = static_cast<std::int64_t>(exact.lse.size());
  for (std::int64_t row = 0; row < row_count; ++row) {
    const double lse = exact.lse[static_cast<std::size_t>(row)];
    const double max = exact.max[static_cast<std::size_t>(row)];
    const double scale = logsumexp_scale(lse, max);
    // Two numbers are as exact as the logarithm of the row's sum, however large its elements are.
    const bool is_split = test_case.has_split_lse;
    const double anchor = is_split && std::isfinite(max) ? max : 0.0;
    const double exact_lse = is_split ? exact.lse_minus_anchor[static_cast<std::size_t>(row)] : lse;
    ASSERT_EQ(difference(accumulator_dtype(test_case.dtype), run.lse_of(row, anchor), exact_lse,
                         is_split ? logsumexp_scale(exact_lse, 0.0) : scale),
              "")
        << "lse of row " << row;
    ASSERT_EQ(difference(run.out.view().dtype, run.out.get(row), lse, scale), "") << "out of row " << row;
  }
  if (!test_case.has_backward) return;

  // The oracle of the backward takes the rounded lse that the backward gets, unless it has two numbers.
  std::vector<double> gradients(exact.row_of.size());
  std::vector<double> scales(exact.lse.size(), 0.0);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const std::int64_t row = exact.row_of[i];
    const auto at = static_cast<std::size_t>(row);
    const bool is_split = test_case.has_split_lse;
    const double anchor = is_split && std::isfinite(exact.max[at]) ? exact.max[at] : 0.0;
    gradients[i] = reference::logsumexp_gradient(run.x.get(static_cast<std::int64_t>(i)),
                                                 is_split ? exact.lse_minus_anchor[at] : run.lse_of(row),
                                                 run.grad_out.get(row), anchor);
    double& scale = scales[static_cast<std::size_t>(row)];
    scale = std::max(scale, std::abs(gradients[i]));  // a NaN does not raise it
  }
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const auto row = static_cast<std::size_t>(exact.row_of[i]);
    ASSERT_EQ(difference(test_case.dtype, run.grad_x.get(static_cast<std::int64_t>(i)), gradients[i], scales[row]), "")
        << "gradient of element " << i << " (row " << row << ")";
  }
}

}  // namespace eaves::testing
