// lrpe_cosine for torch: allocates outputs from torch's allocator, then calls the core. The derivatives are in
// python/eaves/_autograd, the fake implementations and batching rules are in _torch/lrpe_cosine_rules.py.
//
// Torch's tensors are [B, N, H, D], or [B, H, N, D] with heads_first. The core reads either through its strides.
#include "eaves/lrpe_cosine.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/dispatch.h"
#include "torch_binding.h"

namespace eaves::binding {
namespace {

constexpr const char* kOp = "lrpe_cosine";

/// python/eaves/_autograd/lrpe_cosine.py, jax/_lrpe_cosine.py and cli/run_operators.cpp have the same numbers.
static_assert(static_cast<int>(Activation::none) == 0 && static_cast<int>(Activation::relu) == 1 &&
              static_cast<int>(Activation::sigmoid) == 2 && static_cast<int>(Activation::silu) == 3 &&
              static_cast<int>(Activation::softmax) == 4);

/// Swaps positions and heads: from torch's order of the axes to the core's, or back.
void swap_axes(Dims& dims) { std::swap(dims[1], dims[2]); }

/// The view as [B, H, N, D]. A view with another number of axes stays as it is, and the core refuses it.
TensorView heads_first_view(TensorView view, bool heads_first) {
  if (heads_first || view.shape.size() != 4) return view;
  swap_axes(view.shape);
  swap_axes(view.strides);
  return view;
}

/// A new tensor of `shape`, [B, H, N, D], in torch's order of the axes. Its view is in the core's order.
NewTensor new_output(const Dims& shape, DType dtype, Device device, bool heads_first) {
  Dims in_order = shape;
  if (!heads_first) swap_axes(in_order);
  NewTensor made = empty_output(in_order, dtype, device);
  made.view = heads_first_view(made.view, heads_first);
  return made;
}

/// A number for an enum or an int of the core, clamped: a larger one would wrap. The core refuses the ends of the
/// range.
template <typename Narrow>
Narrow clamped(std::int64_t value) {
  return static_cast<Narrow>(
      std::clamp<std::int64_t>(value, std::numeric_limits<Narrow>::min(), std::numeric_limits<Narrow>::max()));
}

// SymInt: torch.compile keeps these numbers as variables, and would compile once for each value of an int. A kernel
// gets plain numbers.
#define EAVES_CALL                                                                                                   \
  "Tensor? offsets=None, Tensor? positions=None, Tensor? cu_seqlens=None, SymInt[] grid=[], SymInt extra_tokens=0, " \
  "SymInt offset=0, int activation=0, int activation_dim=-1, bool heads_first=False"

/// The arguments behind theta.
struct CallOptions {
  OptionalTensor offsets, positions, cu_seqlens;
  std::vector<std::int64_t> grid;
  std::int64_t extra_tokens, offset, activation, activation_dim;
  bool heads_first;

  static CallOptions read(Arguments& in) {
    return {in.read<OptionalTensor>(),
            in.read<OptionalTensor>(),
            in.read<OptionalTensor>(),
            in.read<std::vector<std::int64_t>>(),
            in.read<std::int64_t>(),
            in.read<std::int64_t>(),
            in.read<std::int64_t>(),
            in.read<std::int64_t>(),
            in.read<bool>()};
  }

  template <typename Args>
  void put_into(Args& args, const Tensor& theta) const {
    args.angles = {.theta = input(theta, {kOp, "theta"}),
                   .grid = dims_of(grid),
                   .extra_tokens = extra_tokens,
                   .offset = offset,
                   .offsets = optional_input(offsets, {kOp, "offsets"}),
                   .positions = optional_input(positions, {kOp, "positions"}),
                   .cu_seqlens = optional_input(cu_seqlens, {kOp, "cu_seqlens"})};
    args.activation = static_cast<Activation>(clamped<std::uint8_t>(activation));
    args.activation_dim = clamped<int>(activation_dim);
  }
};

void has_four_axes(const TensorView& view, const char* name) {
  if (view.shape.size() == 4) return;
  check::fail({kOp, name, view}, "has shape " + check::to_string(view.shape) + ", expected four axes");
}

/// The arguments of a forward without lse, and its tensor out.
std::pair<LrpeCosineForwardArgs, NewTensor> forward_args(const Tensor& x, const Tensor& theta,
                                                         const CallOptions& options) {
  LrpeCosineForwardArgs args{.x = heads_first_view(input(x, {kOp, "x"}), options.heads_first)};
  options.put_into(args, theta);
  has_four_axes(args.x, "x");
  const Dims& shape = args.x.shape;
  NewTensor out =
      new_output({shape[0], shape[1], shape[2], 2 * shape[3]}, args.x.dtype, args.x.device, options.heads_first);
  args.out = out.view;
  return {args, std::move(out)};
}

Tensor forward(Tensor x, Tensor theta, CallOptions options) {
  auto [args, out] = forward_args(x, theta, options);
  run<lrpe_cosine_forward, &lrpe_cosine_forward_workspace_bytes>(args, args.x.device);
  return std::move(out.tensor);
}

std::tuple<Tensor, Tensor> forward_lse(Tensor x, Tensor theta, CallOptions options) {
  auto [args, out] = forward_args(x, theta, options);
  const Dims& shape = args.x.shape;
  NewTensor lse = empty_output({shape[0], shape[1], 2, shape[3]}, accumulator_dtype(args.x.dtype), args.x.device);
  args.lse = lse.view;
  run<lrpe_cosine_forward, &lrpe_cosine_forward_workspace_bytes>(args, args.x.device);
  return {std::move(out.tensor), std::move(lse.tensor)};
}

/// Returns the gradients that are wanted; the other has no elements. grad_x may have the other order of axes than x: if
/// x is a transposed view, grad_x then lies in memory like x.
std::tuple<Tensor, Tensor> backward(Tensor grad_out, OptionalTensor x, Tensor theta, OptionalTensor lse,
                                    CallOptions options, bool grad_heads_first, bool wants_x, bool wants_theta) {
  LrpeCosineBackwardArgs args{.grad_out = heads_first_view(input(grad_out, {kOp, "grad_out"}), options.heads_first),
                              .x = heads_first_view(optional_input(x, {kOp, "x"}), options.heads_first),
                              .lse = optional_input(lse, {kOp, "lse"})};
  options.put_into(args, theta);
  has_four_axes(args.grad_out, "grad_out");
  const Dims& shape = args.grad_out.shape;
  const Device device = args.grad_out.device;
  NewTensor grad_x =
      wants_x ? new_output({shape[0], shape[1], shape[2], shape[3] / 2}, args.grad_out.dtype, device, grad_heads_first)
              : empty_output({0}, args.grad_out.dtype, device);
  NewTensor grad_theta = empty_output(wants_theta ? args.angles.theta.shape : Dims{0}, args.angles.theta.dtype, device);
  if (wants_x) args.grad_x = grad_x.view;
  if (wants_theta) args.grad_theta = grad_theta.view;
  run<lrpe_cosine_backward, &lrpe_cosine_backward_workspace_bytes>(args, device);
  return {std::move(grad_x.tensor), std::move(grad_theta.tensor)};
}

void implement(Library& library) {
  library.impl("lrpe_cosine_forward", EAVES_BOX(forward));
  library.impl("lrpe_cosine_forward_lse", EAVES_BOX(forward_lse));
  library.impl("lrpe_cosine_backward", EAVES_BOX(backward));
}

}  // namespace
}  // namespace eaves::binding

STABLE_TORCH_LIBRARY_FRAGMENT(eaves, library) {
  library.def("lrpe_cosine_forward(Tensor x, Tensor theta, " EAVES_CALL ") -> Tensor");
  library.def("lrpe_cosine_forward_lse(Tensor x, Tensor theta, " EAVES_CALL ") -> (Tensor, Tensor)");
  library.def("lrpe_cosine_backward(Tensor grad_out, Tensor? x, Tensor theta, Tensor? lse, " EAVES_CALL
              ", bool grad_heads_first=False, bool wants_x=True, bool wants_theta=False) -> (Tensor, Tensor)");
}
EAVES_IMPLEMENT(eaves::binding::implement)
