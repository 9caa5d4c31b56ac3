// row_sum: checks the call, and chooses the backend.
#include "eaves/row_sum.h"

#include "core/check.h"
#include "ops/row_sum/row_sum_backend.h"
#include "runtime/backend.h"

namespace eaves {
namespace {

using check::Argument;

constexpr const char* kForward = "row_sum_forward";

RowSumForwardProblem make_problem(const RowSumForwardArgs& args) {
  const Argument x{kForward, "x", args.x};
  const Argument out{kForward, "out", args.out};
  check::is_valid(x);
  check::has_dtype(x, {DType::float32, DType::float64, DType::float16, DType::bfloat16}, "a floating-point type");
  const int rank = args.x.shape.size();
  if (rank == 0) check::fail(x, "has no axes, expected at least one");
  AxisSet last_axis;
  last_axis.contains[rank - 1] = true;

  check::is_valid(out);
  check::is_on(out, args.x.device, "x");
  check::has_shape(out, reduced_shape(args.x.shape, last_axis, false), "`x` without its last axis");
  check::has_dtype(out, {args.x.dtype}, "as `x`");
  check::is_writable(out);
  check::do_not_overlap(out, x);

  const Dims out_strides = spread_strides(args.out.strides, rank, last_axis, false);
  return {
      .view = make_row_view<2, 4>(args.x.shape, last_axis, {args.x.strides, args.x.strides, out_strides, out_strides}),
      .device = args.x.device,
      .dtype = args.x.dtype,
      .x = args.x.data,
      .out = args.out.data};
}

}  // namespace

void row_sum_forward(const RowSumForwardArgs& args, const ExecutionContext& context) {
  const RowSumForwardProblem problem = make_problem(args);
  if (problem.view.row_count == 0) return;
  if (problem.device.type == DeviceType::cpu) return cpu::row_sum_forward(problem, context);
  require_cuda(kForward, problem.device);
  if constexpr (kHasCuda) cuda::row_sum_forward(problem, context);
}

}  // namespace eaves
