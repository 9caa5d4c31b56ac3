// lrpe_cosine for torch: outputs from torch's allocator, then the call. Autograd, fake implementations, batching rules,
// the public function and the module are in python/eaves/_lrpe_cosine.py.
//
// Torch's tensors are [B, N, H, D] or, with heads_first, [B, H, N, D]: the core reads either through its strides.
#include "eaves/lrpe_cosine.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/dispatch.h"
#include "torch_binding.h"

namespace eaves::binding {
namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr const char* kOp = "lrpe_cosine";

/// python/eaves/_lrpe_cosine.py has the same numbers.
static_assert(static_cast<int>(Activation::none) == 0 && static_cast<int>(Activation::relu) == 1 &&
              static_cast<int>(Activation::sigmoid) == 2 && static_cast<int>(Activation::silu) == 3 &&
              static_cast<int>(Activation::softmax) == 4);

TensorView optional_input(const OptionalTensor& tensor, const char* argument) {
  return tensor.has_value() ? input(*tensor, {kOp, argument}) : TensorView{};
}

/// Swaps positions and heads: from torch's order of the axes to that of the core, or back.
void swap_axes(Dims& dims) { std::swap(dims[1], dims[2]); }

/// As [B, H, N, D]. Another number of axes is left for the core to refuse.
TensorView heads_first_view(TensorView view, bool heads_first) {
  if (heads_first || view.shape.size() != 4) return view;
  swap_axes(view.shape);
  swap_axes(view.strides);
  return view;
}

/// A new tensor of `shape`, [B, H, N, D], in torch's order of the axes; its view is in that of the core.
NewTensor new_output(const Dims& shape, DType dtype, Device device, bool heads_first) {
  Dims in_order = shape;
  if (!heads_first) swap_axes(in_order);
  NewTensor made = empty_output(in_order, dtype, device);
  made.view = heads_first_view(made.view, heads_first);
  return made;
}

/// What the core has an enum or an int for: a number beyond its type would wrap into it, and the core refuses the ends.
template <typename Narrow>
Narrow clamped(std::int64_t value) {
  return static_cast<Narrow>(
      std::clamp<std::int64_t>(value, std::numeric_limits<Narrow>::min(), std::numeric_limits<Narrow>::max()));
}

Activation activation_of(std::int64_t number) { return static_cast<Activation>(clamped<std::uint8_t>(number)); }

LrpeAngles angles_of(const Tensor& theta, const OptionalTensor& offsets, const OptionalTensor& positions,
                     const OptionalTensor& cu_seqlens, const std::vector<std::int64_t>& grid, std::int64_t extra_tokens,
                     std::int64_t offset) {
  return {.theta = input(theta, {kOp, "theta"}),
          .grid = dims_of(grid),
          .extra_tokens = extra_tokens,
          .offset = offset,
          .offsets = optional_input(offsets, "offset"),
          .positions = optional_input(positions, "positions"),
          .cu_seqlens = optional_input(cu_seqlens, "cu_seqlens")};
}

/// The arguments of a forward but for the outputs, and the shape of out.
struct Forward {
  LrpeCosineForwardArgs args;
  NewTensor out;
};

Forward forward_of(const Tensor& x, LrpeAngles angles, std::int64_t activation, std::int64_t activation_dim,
                   bool heads_first) {
  LrpeCosineForwardArgs args{.x = heads_first_view(input(x, {kOp, "x"}), heads_first),
                             .angles = angles,
                             .activation = activation_of(activation),
                             .activation_dim = clamped<int>(activation_dim)};
  const Dims& shape = args.x.shape;
  if (shape.size() != 4) {
    check::fail({kOp, "x", args.x}, "has shape " + check::to_string(shape) + ", expected four axes");
  }
  NewTensor out = new_output({shape[0], shape[1], shape[2], 2 * shape[3]}, args.x.dtype, args.x.device, heads_first);
  args.out = out.view;
  return {args, std::move(out)};
}

Tensor forward(Tensor x, Tensor theta, OptionalTensor offsets, OptionalTensor positions, OptionalTensor cu_seqlens,
               std::vector<std::int64_t> grid, std::int64_t extra_tokens, std::int64_t offset, std::int64_t activation,
               std::int64_t activation_dim, bool heads_first) {
  auto [args, out] = forward_of(x, angles_of(theta, offsets, positions, cu_seqlens, grid, extra_tokens, offset),
                                activation, activation_dim, heads_first);
  run<lrpe_cosine_forward, &lrpe_cosine_forward_workspace_bytes>(args, args.x.device);
  return std::move(out.tensor);
}

std::tuple<Tensor, Tensor> forward_lse(Tensor x, Tensor theta, OptionalTensor offsets, OptionalTensor positions,
                                       OptionalTensor cu_seqlens, std::vector<std::int64_t> grid,
                                       std::int64_t extra_tokens, std::int64_t offset, std::int64_t activation,
                                       std::int64_t activation_dim, bool heads_first) {
  auto [args, out] = forward_of(x, angles_of(theta, offsets, positions, cu_seqlens, grid, extra_tokens, offset),
                                activation, activation_dim, heads_first);
  const Dims& shape = args.x.shape;
  NewTensor lse = empty_output({shape[0], shape[1], 2, shape[3]}, accumulator_dtype(args.x.dtype), args.x.device);
  args.lse = lse.view;
  run<lrpe_cosine_forward, &lrpe_cosine_forward_workspace_bytes>(args, args.x.device);
  return {std::move(out.tensor), std::move(lse.tensor)};
}

/// Which gradients a backward computes. That of x may have the axes in the other order than x, so that it lies in
/// memory as x does where that is a transposed view.
enum class Wanted { x, theta, both };

struct Gradients {
  std::optional<Tensor> x;
  std::optional<Tensor> theta;
};

template <Wanted wanted>
Gradients gradients(const Tensor& grad_out, const OptionalTensor& x, const OptionalTensor& lse, LrpeAngles angles,
                    std::int64_t activation, std::int64_t activation_dim, bool heads_first, bool grad_heads_first) {
  LrpeCosineBackwardArgs args{.grad_out = heads_first_view(input(grad_out, {kOp, "grad_out"}), heads_first),
                              .x = heads_first_view(optional_input(x, "x"), heads_first),
                              .angles = angles,
                              .activation = activation_of(activation),
                              .activation_dim = clamped<int>(activation_dim),
                              .lse = optional_input(lse, "lse")};
  const Dims& shape = args.grad_out.shape;
  if (shape.size() != 4) {
    check::fail({kOp, "grad_out", args.grad_out}, "has shape " + check::to_string(shape) + ", expected four axes");
  }
  const Device device = args.grad_out.device;
  Gradients made;
  if constexpr (wanted != Wanted::theta) {
    NewTensor grad_x =
        new_output({shape[0], shape[1], shape[2], shape[3] / 2}, args.grad_out.dtype, device, grad_heads_first);
    args.grad_x = grad_x.view;
    made.x = std::move(grad_x.tensor);
  }
  if constexpr (wanted != Wanted::x) {
    NewTensor grad_theta = empty_output(angles.theta.shape, angles.theta.dtype, device);
    args.grad_theta = grad_theta.view;
    made.theta = std::move(grad_theta.tensor);
  }
  run<lrpe_cosine_backward, &lrpe_cosine_backward_workspace_bytes>(args, device);
  return made;
}

Tensor backward(Tensor grad_out, OptionalTensor x, Tensor theta, OptionalTensor lse, OptionalTensor offsets,
                OptionalTensor positions, OptionalTensor cu_seqlens, std::vector<std::int64_t> grid,
                std::int64_t extra_tokens, std::int64_t offset, std::int64_t activation, std::int64_t activation_dim,
                bool heads_first, bool grad_heads_first) {
  return *gradients<Wanted::x>(grad_out, x, lse,
                               angles_of(theta, offsets, positions, cu_seqlens, grid, extra_tokens, offset), activation,
                               activation_dim, heads_first, grad_heads_first)
              .x;
}

Tensor backward_theta(Tensor grad_out, Tensor x, Tensor theta, OptionalTensor lse, OptionalTensor offsets,
                      OptionalTensor positions, OptionalTensor cu_seqlens, std::vector<std::int64_t> grid,
                      std::int64_t extra_tokens, std::int64_t offset, std::int64_t activation,
                      std::int64_t activation_dim, bool heads_first, bool grad_heads_first) {
  return *gradients<Wanted::theta>(grad_out, x, lse,
                                   angles_of(theta, offsets, positions, cu_seqlens, grid, extra_tokens, offset),
                                   activation, activation_dim, heads_first, grad_heads_first)
              .theta;
}

std::tuple<Tensor, Tensor> backward_both(Tensor grad_out, Tensor x, Tensor theta, OptionalTensor lse,
                                         OptionalTensor offsets, OptionalTensor positions, OptionalTensor cu_seqlens,
                                         std::vector<std::int64_t> grid, std::int64_t extra_tokens, std::int64_t offset,
                                         std::int64_t activation, std::int64_t activation_dim, bool heads_first,
                                         bool grad_heads_first) {
  Gradients made = gradients<Wanted::both>(grad_out, x, lse,
                                           angles_of(theta, offsets, positions, cu_seqlens, grid, extra_tokens, offset),
                                           activation, activation_dim, heads_first, grad_heads_first);
  return {std::move(*made.x), std::move(*made.theta)};
}

void implement(Library& library) {
  library.impl("lrpe_cosine_forward", EAVES_BOX(forward));
  library.impl("lrpe_cosine_forward_lse", EAVES_BOX(forward_lse));
  library.impl("lrpe_cosine_backward", EAVES_BOX(backward));
  library.impl("lrpe_cosine_backward_theta", EAVES_BOX(backward_theta));
  library.impl("lrpe_cosine_backward_both", EAVES_BOX(backward_both));
}

// SymInt: torch.compile keeps these numbers as variables; for an int it would compile once for each value. A kernel
// only ever sees the numbers.
#define EAVES_ANGLES                                                                                                 \
  "Tensor? offsets=None, Tensor? positions=None, Tensor? cu_seqlens=None, SymInt[] grid=[], SymInt extra_tokens=0, " \
  "SymInt offset=0, "

}  // namespace
}  // namespace eaves::binding

STABLE_TORCH_LIBRARY_FRAGMENT(eaves, library) {
  library.def("lrpe_cosine_forward(Tensor x, Tensor theta, " EAVES_ANGLES
              "int activation=0, int activation_dim=-1, bool heads_first=False) -> Tensor");
  library.def("lrpe_cosine_forward_lse(Tensor x, Tensor theta, " EAVES_ANGLES
              "int activation=0, int activation_dim=-1, bool heads_first=False) -> (Tensor, Tensor)");
  library.def(
      "lrpe_cosine_backward(Tensor grad_out, Tensor? x, Tensor theta, Tensor? lse, " EAVES_ANGLES
      "int activation=0, int activation_dim=-1, bool heads_first=False, bool grad_heads_first=False) -> Tensor");
  library.def(
      "lrpe_cosine_backward_theta(Tensor grad_out, Tensor x, Tensor theta, Tensor? lse, " EAVES_ANGLES
      "int activation=0, int activation_dim=-1, bool heads_first=False, bool grad_heads_first=False) -> Tensor");
  library.def("lrpe_cosine_backward_both(Tensor grad_out, Tensor x, Tensor theta, Tensor? lse, " EAVES_ANGLES
              "int activation=0, int activation_dim=-1, bool heads_first=False, bool grad_heads_first=False) -> "
              "(Tensor, Tensor)");
}
EAVES_IMPLEMENT(eaves::binding::implement)
