// logsumexp: is the call legal, and where does it run. Arguments become a problem in rows and columns; empty problems
// end here; the backends never see a bad one.
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
  return keepdim ? "x with its reduced axes of size 1" : "x without its reduced axes";
}

/// What an lse may be kept as.
constexpr std::initializer_list<DType> kKept = {DType::float32, DType::float64}, kKeptOfFloat64 = {DType::float64};
constexpr const char* kKeptDtypes = "where x is float64, that alone";

std::initializer_list<DType> kept_dtypes(DType x) { return x == DType::float64 ? kKeptOfFloat64 : kKept; }

void check_x(const Argument& x) {
  check::is_valid(x);
  check::has_dtype(x, {DType::float32, DType::float64, DType::float16, DType::bfloat16}, "convert other types first");
}

LogsumexpForwardProblem make_problem(const LogsumexpForwardArgs& args) {
  const Argument x{kForward, "x", args.x};
  const Argument out{kForward, "out", args.out};
  const Argument lse{kForward, "lse", args.lse};
  check_x(x);
  const AxisSet axes = check::axes(x, args.axes);
  if (!args.out.is_present && !args.lse.is_present) check::fail(out, "and lse are both missing, expected at least one");

  const auto check_output = [&](const Argument& output, std::initializer_list<DType> dtypes, const char* why) {
    if (!check::is_given(output)) return;
    check::is_on(output, args.x.device, "x");
    check::has_shape(output, reduced_shape(args.x.shape, axes, args.keepdim), reason_of(args.keepdim));
    check::has_dtype(output, dtypes, why);
    check::is_writable(output);
    check::do_not_overlap(output, x);
  };
  check_output(out, {args.x.dtype, DType::float32}, "that of x, or float32");
  check_output(lse, kept_dtypes(args.x.dtype), kKeptDtypes);
  if (args.out.is_present && args.lse.is_present) check::do_not_overlap(out, lse);

  // An absent output walks along with the other one.
  const TensorView& out_view = args.out.is_present ? args.out : args.lse;
  const TensorView& lse_view = args.lse.is_present ? args.lse : args.out;
  const auto row_strides = [&](const TensorView& tensor) {
    return spread_strides(tensor.strides, args.x.shape.size(), axes, args.keepdim);
  };
  return {.view = make_row_view<2, 4>(args.x.shape, axes,
                                      {args.x.strides, args.x.strides, row_strides(lse_view), row_strides(out_view)}),
          .device = args.x.device,
          .x_dtype = args.x.dtype,
          .out_dtype = out_view.dtype,
          .x = args.x.data,
          .out = args.out.data,
          .lse = args.lse.data,
          .lse_dtype = lse_view.dtype};
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
  check::has_dtype(grad_out, {args.x.dtype, DType::float32}, "that of x, or float32");

  check::is_valid(lse);
  check::is_on(lse, args.x.device, "x");
  check::has_shape(lse, row_shape, shape_reason);
  check::has_dtype(lse, kept_dtypes(args.x.dtype), kKeptDtypes);

  check::is_valid(grad_x);
  check::is_on(grad_x, args.x.device, "x");
  check::has_shape(grad_x, args.x.shape, "that of x");
  check::has_dtype(grad_x, {args.x.dtype}, "that of x");
  check::is_writable(grad_x);
  check::do_not_overlap(grad_x, x);
  check::do_not_overlap(grad_x, lse);
  check::do_not_overlap(grad_x, grad_out);

  const auto row_strides = [&](const TensorView& tensor) {
    return spread_strides(tensor.strides, args.x.shape.size(), axes, args.keepdim);
  };
  return {
      .view = make_row_view<2, 4>(
          args.x.shape, axes, {args.x.strides, args.grad_x.strides, row_strides(args.lse), row_strides(args.grad_out)}),
      .device = args.x.device,
      .x_dtype = args.x.dtype,
      .grad_out_dtype = args.grad_out.dtype,
      .x = args.x.data,
      .lse = {args.lse.data, args.lse.dtype},
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
  // A row without columns still has a result, -inf: only no rows at all is nothing to do.
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
