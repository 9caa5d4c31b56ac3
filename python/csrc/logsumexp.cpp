// logsumexp for torch: allocates outputs from torch's allocator, then calls the core. The derivatives, fake
// implementations and batching rules are in python/eaves/_autograd/logsumexp.py.
#include "eaves/logsumexp.h"

#include <tuple>
#include <vector>

#include "core/check.h"
#include "core/dispatch.h"
#include "core/rows.h"
#include "torch_binding.h"

namespace eaves::binding {
namespace {

constexpr Name kX{"logsumexp", "x"};
constexpr Name kDType{"logsumexp", "dtype"};

/// The arguments without the outputs, and the shape of the outputs.
struct Inputs {
  LogsumexpForwardArgs args;
  Dims row_shape;
};

Inputs inputs(const Tensor& x, const std::vector<std::int64_t>& axes, bool keepdim) {
  const LogsumexpForwardArgs args{.x = input(x, kX), .axes = dims_of(axes), .keepdim = keepdim};
  const AxisSet reduced = check::axes({kX.op, kX.argument, args.x}, args.axes);
  return {args, reduced_shape(args.x.shape, reduced, keepdim)};
}

Tensor forward(Tensor x, std::vector<std::int64_t> axes, bool keepdim, ScalarType dtype) {
  auto [args, row_shape] = inputs(x, axes, keepdim);
  Tensor out = empty(row_shape, dtype_of(dtype, kDType), args.x.device);
  args.out = output(out);
  run<logsumexp_forward, &logsumexp_forward_workspace_bytes>(args, args.x.device);
  return out;
}

std::tuple<Tensor, Tensor> forward_lse(Tensor x, std::vector<std::int64_t> axes, bool keepdim, ScalarType dtype) {
  auto [args, row_shape] = inputs(x, axes, keepdim);
  Tensor out = empty(row_shape, dtype_of(dtype, kDType), args.x.device);
  Dims lse_shape = reduced_shape(args.x.shape, check::axes({kX.op, kX.argument, args.x}, args.axes), false);
  lse_shape.push_back(2);
  Tensor lse = empty(lse_shape, accumulator_dtype(args.x.dtype), args.x.device);
  args.out = output(out);
  args.lse = output(lse);
  run<logsumexp_forward, &logsumexp_forward_workspace_bytes>(args, args.x.device);
  return {std::move(out), std::move(lse)};
}

Tensor backward(Tensor grad_out, Tensor x, Tensor lse, std::vector<std::int64_t> axes, bool keepdim) {
  const TensorView x_view = input(x, kX);
  NewTensor grad_x = empty_like(x, x_view);
  const LogsumexpBackwardArgs args{.grad_out = input(grad_out, {"logsumexp", "grad_out"}),
                                   .x = x_view,
                                   .lse = input(lse, {"logsumexp", "lse"}),
                                   .axes = dims_of(axes),
                                   .keepdim = keepdim,
                                   .grad_x = grad_x.view};
  run<logsumexp_backward, &logsumexp_backward_workspace_bytes>(args, args.x.device);
  return std::move(grad_x.tensor);
}

void implement(Library& library) {
  library.impl("logsumexp_forward", EAVES_BOX(forward));
  library.impl("logsumexp_forward_lse", EAVES_BOX(forward_lse));
  library.impl("logsumexp_backward", EAVES_BOX(backward));
}

}  // namespace
}  // namespace eaves::binding

STABLE_TORCH_LIBRARY_FRAGMENT(eaves, library) {
  library.def("logsumexp_forward(Tensor x, int[] axes, bool keepdim, ScalarType dtype) -> Tensor");
  library.def("logsumexp_forward_lse(Tensor x, int[] axes, bool keepdim, ScalarType dtype) -> (Tensor, Tensor)");
  library.def("logsumexp_backward(Tensor grad_out, Tensor x, Tensor lse, int[] axes, bool keepdim) -> Tensor");
}
EAVES_IMPLEMENT(eaves::binding::implement)
