// Checks a call of logsumexp, makes a problem in rows and columns of it, and runs it on its device. Problems without
// results end here; the backends get legal problems only.
#include "eaves/logsumexp.h"

#include "core/check.h"
#include "core/dispatch.h"
#include "ops/logsumexp/logsumexp_backend.h"
#include "runtime/backend.h"

namespace eaves {
namespace {

using check::Argument;
using namespace logsumexp_tensors;

constexpr const char* kForward = "logsumexp_forward";
constexpr const char* kBackward = "logsumexp_backward";

const char* reason_of(bool keepdim) {
  return keepdim ? "`x` with its reduced axes of size 1" : "`x` without its reduced axes";
}

void check_x(const Argument& x) {
  check::is_valid(x);
  check::has_dtype(x, {DType::float32, DType::float64, DType::float16, DType::bfloat16}, "a floating-point type");
}

/// An lse has one number for each row, in the shape of out, or two numbers, in a last axis behind the axes of the rows.
/// With two numbers it has no reduced axes of size 1, so that x may have the largest rank.
KeptLse check_lse(const Argument& lse, const TensorView& x, const AxisSet& axes, bool keepdim) {
  const TensorView& view = lse.view;
  const Dims rows = reduced_shape(x.shape, axes, false);
  Dims expected = reduced_shape(x.shape, axes, keepdim);
  const bool is_split = check::has_two_numbers(view, rows);
  if (is_split) {
    expected = rows;
    expected.push_back(2);
  }
  check::is_on(lse, x.device, "x");
  check::has_shape(lse, expected, reason_of(keepdim && !is_split));
  check::has_dtype(lse, {accumulator_dtype(x.dtype)}, "float32, or float64 where `x` is float64");
  if (is_split && view.strides[rows.size()] != 1) {
    check::fail(lse, "has strides " + check::to_string(view.strides) + ", expected unit stride along its last axis");
  }
  return {view.data, is_split};
}

LogsumexpForwardProblem make_problem(const LogsumexpForwardArgs& args) {
  const Argument x{kForward, "x", args.x};
  const Argument out{kForward, "out", args.out};
  const Argument lse{kForward, "lse", args.lse};
  check_x(x);
  const AxisSet axes = check::axes(x, args.axes);
  if (!args.out.is_present && !args.lse.is_present)
    check::fail(out, "and `lse` are both missing, expected at least one");

  const Dims row_shape = reduced_shape(args.x.shape, axes, args.keepdim);
  const auto check_output = [&](const Argument& output) {
    check::is_writable(output);
    check::do_not_overlap(output, x);
  };
  if (check::is_given(out)) {
    check::is_on(out, args.x.device, "x");
    check::has_shape(out, row_shape, reason_of(args.keepdim));
    check::has_dtype(out, {args.x.dtype, DType::float32}, "as `x`, or float32");
    check_output(out);
  }
  KeptLse kept;
  if (check::is_given(lse)) {
    kept = check_lse(lse, args.x, axes, args.keepdim);
    check_output(lse);
  }
  if (args.out.is_present && args.lse.is_present) check::do_not_overlap(out, lse);

  // An absent output gets the strides of the other one.
  const int rank = args.x.shape.size();
  const auto of_out = [&] { return spread_strides(args.out.strides, rank, axes, args.keepdim); };
  const auto of_lse = [&] { return spread_strides(args.lse.strides, rank, axes, args.keepdim && !kept.is_split); };
  const TensorView& out_view = args.out.is_present ? args.out : args.lse;
  return {.view = make_row_view<2, 4>(args.x.shape, axes,
                                      {args.x.strides, args.x.strides, args.lse.is_present ? of_lse() : of_out(),
                                       args.out.is_present ? of_out() : of_lse()}),
          .device = args.x.device,
          .x_dtype = args.x.dtype,
          .out_dtype = out_view.dtype,
          .x = args.x.data,
          .out = args.out.data,
          .lse = kept};
}

LogsumexpBackwardProblem make_problem(const LogsumexpBackwardArgs& args) {
  const Argument grad_out{kBackward, "grad_out", args.grad_out};
  const Argument x{kBackward, "x", args.x};
  const Argument lse{kBackward, "lse", args.lse};
  const Argument grad_x{kBackward, "grad_x", args.grad_x};
  check_x(x);
  const AxisSet axes = check::axes(x, args.axes);
  const Dims row_shape = reduced_shape(args.x.shape, axes, args.keepdim);
  const char* shape_reason = reason_of(args.keepdim);

  check::is_valid(grad_out);
  check::is_on(grad_out, args.x.device, "x");
  check::has_shape(grad_out, row_shape, shape_reason);
  check::has_dtype(grad_out, {args.x.dtype, DType::float32}, "as `x`, or float32");

  check::is_valid(lse);
  const KeptLse kept = check_lse(lse, args.x, axes, args.keepdim);

  check::is_valid(grad_x);
  check::is_on(grad_x, args.x.device, "x");
  check::has_shape(grad_x, args.x.shape, "as `x`");
  check::has_dtype(grad_x, {args.x.dtype}, "as `x`");
  check::is_writable(grad_x);
  check::do_not_overlap(grad_x, x);
  check::do_not_overlap(grad_x, lse);
  check::do_not_overlap(grad_x, grad_out);

  const auto row_strides = [&](const TensorView& tensor, bool keepdim) {
    return spread_strides(tensor.strides, args.x.shape.size(), axes, keepdim);
  };
  return {.view = make_row_view<2, 4>(
              args.x.shape, axes,
              {args.x.strides, args.grad_x.strides, row_strides(args.lse, args.keepdim && !kept.is_split),
               row_strides(args.grad_out, args.keepdim)}),
          .device = args.x.device,
          .x_dtype = args.x.dtype,
          .grad_out_dtype = args.grad_out.dtype,
          .x = args.x.data,
          .lse = kept,
          .grad_out = args.grad_out.data,
          .grad_x = args.grad_x.data};
}

std::size_t workspace_bytes(const LogsumexpForwardProblem& problem) {
  if (problem.device.type == DeviceType::cpu || problem.view.row_count == 0) return 0;
  require_cuda(kForward, problem.device);
  if constexpr (kHasCuda) return cuda::logsumexp_forward_workspace_bytes(problem);
  return 0;
}

}  // namespace

void logsumexp_forward(const LogsumexpForwardArgs& args, const ExecutionContext& context) {
  check::threads(kForward, context.threads);
  const LogsumexpForwardProblem problem = make_problem(args);
  // A row without columns has the result -inf, so a call has nothing to do only if it has no rows.
  if (problem.view.row_count == 0) return;
  if (problem.device.type == DeviceType::cpu) return cpu::logsumexp_forward(problem, context);
  const Scratch scratch(kForward, problem.device, workspace_bytes(problem), context);
  if constexpr (kHasCuda) cuda::logsumexp_forward(problem, scratch.context());
}

void logsumexp_backward(const LogsumexpBackwardArgs& args, const ExecutionContext& context) {
  check::threads(kBackward, context.threads);
  const LogsumexpBackwardProblem problem = make_problem(args);
  if (problem.view.row_count == 0 || problem.view.column_count == 0) return;
  if (problem.device.type == DeviceType::cpu) return cpu::logsumexp_backward(problem, context);
  require_cuda(kBackward, problem.device);
  if constexpr (kHasCuda) cuda::logsumexp_backward(problem, context);
}

std::size_t logsumexp_forward_workspace_bytes(const LogsumexpForwardArgs& args, const ExecutionContext&) {
  return workspace_bytes(make_problem(args));
}

std::size_t logsumexp_backward_workspace_bytes(const LogsumexpBackwardArgs& args, const ExecutionContext&) {
  make_problem(args);
  return 0;
}

}  // namespace eaves
