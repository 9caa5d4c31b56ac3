// logsumexp for torch: outputs from torch's allocator, then the call. Autograd, fake implementations and the public
// function are in python/eaves/_logsumexp.py.
#include "eaves/logsumexp.h"

#include <tuple>
#include <vector>

#include "core/check.h"
#include "core/rows.h"
#include "torch_binding.h"

namespace eaves::binding {
namespace {

constexpr Name kX{"logsumexp", "x"};

struct Problem {
  LogsumexpForwardArgs args;
  Dims row_shape;
};

Problem make_problem(const Tensor& x, const std::vector<std::int64_t>& axes, bool keepdim) {
  Problem problem{.args = {.x = input(x, kX), .axes = dims_of(axes), .keepdim = keepdim}, .row_shape = {}};
  const check::Argument argument{kX.op, kX.argument, problem.args.x};
  problem.row_shape = reduced_shape(problem.args.x.shape, check::axes(argument, problem.args.axes), keepdim);
  return problem;
}

void run(const LogsumexpForwardArgs& args) {
  Call call(args.x.device);
  call.take_workspace(logsumexp_forward_workspace_bytes(args, call.context()));
  logsumexp_forward(args, call.context());
}

Tensor forward(Tensor x, std::vector<std::int64_t> axes, bool keepdim, ScalarType dtype) {
  Problem problem = make_problem(x, axes, keepdim);
  Tensor out = empty(problem.row_shape, dtype_of(dtype, {"logsumexp", "dtype"}), problem.args.x);
  problem.args.out = output(out, {"logsumexp", "out"});
  run(problem.args);
  return out;
}

std::tuple<Tensor, Tensor> forward_lse(Tensor x, std::vector<std::int64_t> axes, bool keepdim, ScalarType dtype) {
  Problem problem = make_problem(x, axes, keepdim);
  const DType lse_dtype = problem.args.x.dtype == DType::float64 ? DType::float64 : DType::float32;
  Tensor out = empty(problem.row_shape, dtype_of(dtype, {"logsumexp", "dtype"}), problem.args.x);
  Tensor lse = empty(problem.row_shape, lse_dtype, problem.args.x);
  problem.args.out = output(out, {"logsumexp", "out"});
  problem.args.lse = output(lse, {"logsumexp", "lse"});
  run(problem.args);
  return {std::move(out), std::move(lse)};
}

Tensor backward(Tensor grad_out, Tensor x, Tensor lse, std::vector<std::int64_t> axes, bool keepdim) {
  Tensor grad_x = empty_like(x);
  const LogsumexpBackwardArgs args{.grad_out = input(grad_out, {"logsumexp", "grad_out"}),
                                   .x = input(x, kX),
                                   .lse = input(lse, {"logsumexp", "lse"}),
                                   .axes = dims_of(axes),
                                   .keepdim = keepdim,
                                   .grad_x = output(grad_x, {"logsumexp", "grad_x"})};
  Call call(args.x.device);
  call.take_workspace(logsumexp_backward_workspace_bytes(args, call.context()));
  logsumexp_backward(args, call.context());
  return grad_x;
}

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("logsumexp_forward", EAVES_BOX(forward));
  m.impl("logsumexp_forward_lse", EAVES_BOX(forward_lse));
  m.impl("logsumexp_backward", EAVES_BOX(backward));
}

}  // namespace
}  // namespace eaves::binding

STABLE_TORCH_LIBRARY_FRAGMENT(eaves, m) {
  m.def("logsumexp_forward(Tensor x, int[] axes, bool keepdim, ScalarType dtype) -> Tensor");
  m.def("logsumexp_forward_lse(Tensor x, int[] axes, bool keepdim, ScalarType dtype) -> (Tensor, Tensor)");
  m.def("logsumexp_backward(Tensor grad_out, Tensor x, Tensor lse, int[] axes, bool keepdim) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(eaves, CPU, m) { eaves::binding::implement(m); }
STABLE_TORCH_LIBRARY_IMPL(eaves, CUDA, m) { eaves::binding::implement(m); }
