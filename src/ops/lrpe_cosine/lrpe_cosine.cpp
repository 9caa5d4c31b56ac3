// Checks a call of lrpe_cosine, makes a problem of it, and runs it on its device. Tensors become strides over batch,
// heads, positions and features; LrpeCosineAngles describes the positions, however they are given. A problem without
// results ends here.
#include "eaves/lrpe_cosine.h"

#include <algorithm>
#include <initializer_list>
#include <string>

#include "core/check.h"
#include "core/dispatch.h"
#include "ops/lrpe_cosine/lrpe_cosine_backend.h"
#include "runtime/backend.h"

namespace eaves {
namespace {

using check::Argument;

constexpr const char* kForward = "lrpe_cosine_forward";
constexpr const char* kBackward = "lrpe_cosine_backward";
constexpr std::initializer_list<DType> kFloatingPoint = {DType::float32, DType::float64, DType::float16,
                                                         DType::bfloat16};

/// Fails unless the tensor has four axes; `names` are their names in the message.
void has_four_axes(const Argument& argument, const char* names) {
  if (argument.view.shape.size() == 4) return;
  check::fail(argument, "has shape " + check::to_string(argument.view.shape) + ", expected four axes (" + names + ")");
}

LrpeCosineStrides strides_of(const TensorView& view) {
  return {view.strides[0], view.strides[1], view.strides[2], view.strides[3]};
}

LrpeKind check_activation(const char* op, Activation activation, int activation_dim) {
  if (activation > Activation::softmax) {
    check::fail(op, "activation",
                "is " + std::to_string(static_cast<int>(activation)) + ", expected one of enum Activation");
  }
  if (activation_dim != -1 && activation_dim != -2) {
    check::fail(op, "activation_dim",
                "is " + std::to_string(activation_dim) + ", expected -1 (the features) or -2 (the sequence)");
  }
  if (activation == Activation::none) return LrpeKind::none;
  if (activation != Activation::softmax) return LrpeKind::elementwise;
  return activation_dim == -1 ? LrpeKind::feature_softmax : LrpeKind::sequence_softmax;
}

/// Checks a tensor of positions, offsets or cu_seqlens.
IntegerList check_integers(const Argument& argument, Device device, const char* reference) {
  check::is_on(argument, device, reference);
  check::has_dtype(argument, {DType::int64, DType::int32}, "positions are integers");
  return {argument.view.data, argument.view.dtype == DType::int64};
}

void check_grid(const char* op, const LrpeAngles& args, std::int64_t positions, LrpeCosineAngles& angles) {
  if (args.extra_tokens < 0 || args.extra_tokens > positions) {
    check::fail(op, "extra_tokens",
                "is " + std::to_string(args.extra_tokens) + ", expected 0 to the number of positions, " +
                    std::to_string(positions));
  }
  const std::int64_t cells = positions - args.extra_tokens;
  angles.extra_tokens = args.extra_tokens;
  if (args.grid.empty()) {
    angles.axes = 1;
    angles.grid[0] = cells;
    angles.cells_behind[0] = 1;
    return;
  }
  const auto refuse = [&] {
    check::fail(op, "grid",
                "is " + check::to_string(args.grid) + ", expected sizes whose product is " + std::to_string(cells) +
                    " (" + std::to_string(positions) + " positions, of which " + std::to_string(args.extra_tokens) +
                    " are extra tokens)");
  };
  angles.axes = args.grid.size();
  std::int64_t product = 1;
  for (int axis = angles.axes - 1; axis >= 0; --axis) {
    const std::int64_t size = args.grid[axis];
    angles.grid[axis] = size;
    angles.cells_behind[axis] = product;
    if (size < 0 || __builtin_mul_overflow(product, size, &product)) refuse();
  }
  if (product != cells) refuse();
}

/// For tensors on the CPU, because the host can read their contents.
void check_starts(const Argument& cu_seqlens, const LrpeCosineAngles& angles, std::int64_t positions) {
  std::int64_t previous = 0;
  for (std::int64_t i = 0; i <= angles.sequences; ++i) {
    const std::int64_t start = angles.cu_seqlens[i];
    if (start < previous || (i == 0 && start != 0) || (i == angles.sequences && start != positions)) {
      check::fail(cu_seqlens, "has " + std::to_string(start) + " at index " + std::to_string(i) +
                                  ", expected numbers that do not decrease from 0 to the number of positions, " +
                                  std::to_string(positions));
    }
    previous = start;
  }
}

/// `reference`, x or grad_out, has the device and the dtype that the other tensors must have.
LrpeCosineAngles check_angles(const char* op, const LrpeAngles& args, const LrpeCosineShape& shape,
                              const Argument& reference, LrpeKind kind) {
  const Argument theta{op, "theta", args.theta};
  const Argument offsets{op, "offsets", args.offsets};
  const Argument positions{op, "positions", args.positions};
  const Argument cu_seqlens{op, "cu_seqlens", args.cu_seqlens};
  const Device device = reference.view.device;

  check::is_valid(theta);
  check::is_on(theta, device, reference.name);
  check::has_dtype(theta, {reference.view.dtype, DType::float32},
                   std::string("as `") + reference.name + "`, or float32");
  if (args.theta.shape.size() != 2) {
    check::fail(theta, "has shape " + check::to_string(args.theta.shape) + ", expected two axes (heads, features)");
  }
  const std::int64_t theta_heads = args.theta.shape[0];
  if (theta_heads != shape.heads && theta_heads != 1) {
    check::fail(theta, "has " + std::to_string(theta_heads) + " heads, expected " + std::to_string(shape.heads) +
                           " (as `" + reference.name + "`) or 1");
  }
  LrpeCosineAngles angles;
  check_grid(op, args, shape.positions, angles);
  angles.theta = args.theta.data;
  angles.theta_dtype = args.theta.dtype;
  angles.theta_heads = theta_heads;
  angles.theta_features = args.theta.shape[1];
  angles.theta_head_stride = theta_heads == 1 ? 0 : args.theta.strides[0];
  const bool is_one_angle = angles.theta_features == 1 && angles.axes == 1;
  angles.theta_feature_stride = angles.theta_features == 1 ? 0 : args.theta.strides[1];
  // Without angles no feature has an axis. `axis_features` is at least 1, because the backends divide by it.
  if (angles.theta_features == 0) angles.axes = 0;
  angles.axis_features =
      is_one_angle ? std::max<std::int64_t>(shape.features, 1) : std::max<std::int64_t>(angles.theta_features, 1);

  constexpr std::int64_t kLargestOffset = std::int64_t{1} << 62;
  if (args.offset < -kLargestOffset || args.offset > kLargestOffset) {
    check::fail(op, "offset", "is " + std::to_string(args.offset) + ", expected -2^62 to 2^62");
  }
  angles.offset = args.offset;
  const bool has_offsets = check::is_given(offsets);
  if (has_offsets) {
    angles.offsets = check_integers(offsets, device, reference.name);
    if (args.offsets.element_count() == 1) {
      angles.offset_stride = 0;
    } else {
      check::has_shape(offsets, Dims{shape.batch}, "one for each batch entry, or one for all");
      angles.offset_stride = args.offsets.strides[0];
    }
  }
  const bool has_positions = check::is_given(positions);
  const bool has_cu_seqlens = check::is_given(cu_seqlens);
  const auto belongs_to_a_sequence = [&](const Argument& argument) {
    if (angles.axes > 1) {
      check::fail(argument, "is given with a `grid` " + check::to_string(args.grid) + ", expected a grid of one axis");
    }
    if (args.offset != 0 || has_offsets) {
      check::fail(argument, "is given beside an `offset`, expected one of them");
    }
  };
  if (has_positions) {
    belongs_to_a_sequence(positions);
    angles.positions = check_integers(positions, device, reference.name);
    if (args.positions.shape.size() == 1) {
      check::has_shape(positions, Dims{shape.positions}, "one for each token");
      angles.position_stride = args.positions.strides[0];
    } else {
      check::has_shape(positions, Dims{shape.batch, shape.positions},
                       "one for each token, or for each token of each batch entry");
      angles.position_batch_stride = shape.batch == 1 ? 0 : args.positions.strides[0];
      angles.position_stride = args.positions.strides[1];
    }
  }
  if (has_cu_seqlens) {
    belongs_to_a_sequence(cu_seqlens);
    if (has_positions) check::fail(cu_seqlens, "is given beside `positions`, expected one of them");
    if (args.extra_tokens != 0) check::fail(cu_seqlens, "is given with extra tokens, expected none");
    angles.cu_seqlens = check_integers(cu_seqlens, device, reference.name);
    if (args.cu_seqlens.shape.size() != 1 || args.cu_seqlens.shape[0] < 1) {
      check::fail(cu_seqlens, "has shape " + check::to_string(args.cu_seqlens.shape) +
                                  ", expected one axis with one entry more than there are sequences");
    }
    check::is_contiguous(cu_seqlens);
    angles.sequences = args.cu_seqlens.shape[0] - 1;
    if (device.type == DeviceType::cpu) check_starts(cu_seqlens, angles, shape.positions);
    if (kind == LrpeKind::sequence_softmax) {
      throw Unsupported(op,
                        "`cu_seqlens` is given with a softmax over the sequence, which would mix the packed sequences; "
                        "give `positions` for a softmax over the whole axis, or call once for each sequence");
    }
  }
  angles.computes_positions = !has_offsets && !has_positions && !has_cu_seqlens && shape.positions <= INT32_MAX;
  if (angles.computes_positions && shape.positions > args.extra_tokens) {
    for (int axis = 0; axis < angles.axes; ++axis) {
      angles.by_grid[axis] = Divider(static_cast<std::uint32_t>(angles.grid[axis]));
      angles.by_cells_behind[axis] = Divider(static_cast<std::uint32_t>(angles.cells_behind[axis]));
    }
  }
  return angles;
}

/// Fails if `output` overlaps an input.
void overlaps_no_input(const Argument& output, std::initializer_list<Argument> inputs) {
  for (const Argument& input : inputs) {
    if (input.view.is_present) check::do_not_overlap(output, input);
  }
}

/// The lse of a softmax over the sequence, or nullptr.
void* check_lse(const Argument& lse, const LrpeCosineShape& shape, const Argument& reference, LrpeKind kind) {
  if (!check::is_given(lse)) return nullptr;
  if (kind != LrpeKind::sequence_softmax) {
    check::fail(lse, "is given, but only a softmax over the sequence has an lse; leave it out");
  }
  check::is_on(lse, reference.view.device, reference.name);
  check::has_shape(lse, Dims{shape.batch, shape.heads, 2, shape.features},
                   "for each column of `x` the logsumexp and its rounding error");
  check::has_dtype(lse, {accumulator_dtype(reference.view.dtype)}, "float32, or float64 where `x` is float64");
  check::is_contiguous(lse);
  return lse.view.data;
}

Dims out_shape(const LrpeCosineShape& shape) {
  return Dims{shape.batch, shape.heads, shape.positions, 2 * shape.features};
}

constexpr const char* kOutShape = "`x` with twice its features";

LrpeCosineForwardProblem make_problem(const LrpeCosineForwardArgs& args) {
  const Argument x{kForward, "x", args.x};
  const Argument out{kForward, "out", args.out};
  const Argument lse{kForward, "lse", args.lse};
  const LrpeKind kind = check_activation(kForward, args.activation, args.activation_dim);
  check::is_valid(x);
  check::has_dtype(x, kFloatingPoint, "a floating-point type");
  has_four_axes(x, "batch, heads, positions, features");
  const LrpeCosineShape shape{args.x.shape[0], args.x.shape[1], args.x.shape[2], args.x.shape[3]};
  const LrpeCosineAngles angles = check_angles(kForward, args.angles, shape, x, kind);

  check::is_valid(out);
  check::is_on(out, args.x.device, "x");
  check::has_shape(out, out_shape(shape), kOutShape);
  check::has_dtype(out, {args.x.dtype}, "as `x`");
  check::is_writable(out);
  const std::initializer_list<Argument> inputs = {x,
                                                  {kForward, "theta", args.angles.theta},
                                                  {kForward, "offsets", args.angles.offsets},
                                                  {kForward, "positions", args.angles.positions},
                                                  {kForward, "cu_seqlens", args.angles.cu_seqlens}};
  overlaps_no_input(out, inputs);
  void* const lse_data = check_lse(lse, shape, x, kind);
  if (args.lse.is_present) {
    overlaps_no_input(lse, inputs);
    check::do_not_overlap(lse, out);
  }
  return {.device = args.x.device,
          .dtype = args.x.dtype,
          .shape = shape,
          .angles = angles,
          .kind = kind,
          .activation = args.activation,
          .x = args.x.data,
          .x_strides = strides_of(args.x),
          .out = args.out.data,
          .out_strides = strides_of(args.out),
          .lse = lse_data};
}

LrpeCosineBackwardProblem make_problem(const LrpeCosineBackwardArgs& args) {
  const Argument grad_out{kBackward, "grad_out", args.grad_out};
  const Argument x{kBackward, "x", args.x};
  const Argument lse{kBackward, "lse", args.lse};
  const Argument grad_x{kBackward, "grad_x", args.grad_x};
  const Argument grad_theta{kBackward, "grad_theta", args.grad_theta};
  const LrpeKind kind = check_activation(kBackward, args.activation, args.activation_dim);
  check::is_valid(grad_out);
  check::has_dtype(grad_out, kFloatingPoint, "a floating-point type");
  has_four_axes(grad_out, "batch, heads, positions, twice the features");
  const Dims& grad_shape = args.grad_out.shape;
  if (grad_shape[3] % 2 != 0) {
    check::fail(grad_out, "has shape " + check::to_string(grad_shape) + ", expected an even number of features (" +
                              kOutShape + ")");
  }
  const LrpeCosineShape shape{grad_shape[0], grad_shape[1], grad_shape[2], grad_shape[3] / 2};
  const Dims x_shape{shape.batch, shape.heads, shape.positions, shape.features};
  const LrpeCosineAngles angles = check_angles(kBackward, args.angles, shape, grad_out, kind);

  const bool has_grad_x = check::is_given(grad_x);
  const bool has_grad_theta = check::is_given(grad_theta);
  if (!has_grad_x && !has_grad_theta) check::fail(grad_x, "and `grad_theta` are both missing, expected at least one");

  const bool needs_x = args.activation != Activation::none || has_grad_theta;
  const bool has_x = check::is_given(x);
  if (needs_x && !has_x) check::fail(x, "is missing, but an `activation` and `grad_theta` need it");
  if (has_x) {
    check::is_on(x, args.grad_out.device, "grad_out");
    check::has_shape(x, x_shape, "`grad_out` with half its features");
    check::has_dtype(x, {args.grad_out.dtype}, "as `grad_out`");
  }
  void* const lse_data = check_lse(lse, shape, grad_out, kind);
  if (kind == LrpeKind::sequence_softmax && lse_data == nullptr && !args.lse.is_present) {
    check::fail(lse, "is missing, expected the forward's output, because the softmax is over the sequence");
  }

  const std::initializer_list<Argument> inputs = {grad_out,
                                                  x,
                                                  lse,
                                                  {kBackward, "theta", args.angles.theta},
                                                  {kBackward, "offsets", args.angles.offsets},
                                                  {kBackward, "positions", args.angles.positions},
                                                  {kBackward, "cu_seqlens", args.angles.cu_seqlens}};
  if (has_grad_x) {
    check::is_on(grad_x, args.grad_out.device, "grad_out");
    check::has_shape(grad_x, x_shape, "`grad_out` with half its features");
    check::has_dtype(grad_x, {args.grad_out.dtype}, "as `grad_out`");
    check::is_writable(grad_x);
    overlaps_no_input(grad_x, inputs);
  }
  if (has_grad_theta) {
    check::is_on(grad_theta, args.grad_out.device, "grad_out");
    check::has_shape(grad_theta, args.angles.theta.shape, "as `theta`");
    check::has_dtype(grad_theta, {args.angles.theta.dtype}, "as `theta`");
    check::is_writable(grad_theta);
    overlaps_no_input(grad_theta, inputs);
    if (has_grad_x) check::do_not_overlap(grad_theta, grad_x);
  }
  return {.device = args.grad_out.device,
          .dtype = args.grad_out.dtype,
          .shape = shape,
          .angles = angles,
          .kind = kind,
          .activation = args.activation,
          .grad_out = args.grad_out.data,
          .grad_out_strides = strides_of(args.grad_out),
          .x = needs_x ? args.x.data : nullptr,
          .x_strides = needs_x ? strides_of(args.x) : LrpeCosineStrides{},
          .lse = lse_data,
          .grad_x = args.grad_x.data,
          .grad_x_strides = has_grad_x ? strides_of(args.grad_x) : LrpeCosineStrides{},
          .grad_theta = args.grad_theta.data,
          .grad_theta_head_stride = has_grad_theta ? args.grad_theta.strides[0] : 0,
          .grad_theta_feature_stride = has_grad_theta ? args.grad_theta.strides[1] : 0};
}

bool is_empty(const LrpeCosineShape& shape) {
  return shape.batch == 0 || shape.heads == 0 || shape.positions == 0 || shape.features == 0;
}

/// Is there nothing to write? An empty problem still writes an lse, -inf for an empty sequence, and a gradient of
/// theta, which is 0.
bool is_done(const LrpeCosineForwardProblem& problem) {
  if (!is_empty(problem.shape)) return false;
  return problem.lse == nullptr || problem.shape.batch * problem.shape.heads * problem.shape.features == 0;
}

bool is_done(const LrpeCosineBackwardProblem& problem) {
  const bool has_theta = problem.angles.theta_heads * problem.angles.theta_features != 0;
  return is_empty(problem.shape) && (problem.grad_theta == nullptr || !has_theta);
}

std::size_t workspace_bytes(const LrpeCosineForwardProblem& problem) {
  if (problem.device.type == DeviceType::cpu || is_done(problem)) return 0;
  require_cuda(kForward, problem.device);
  if constexpr (kHasCuda) return cuda::lrpe_cosine_forward_workspace_bytes(problem);
  return 0;
}

std::size_t workspace_bytes(const LrpeCosineBackwardProblem& problem) {
  if (problem.device.type == DeviceType::cpu || is_done(problem)) return 0;
  require_cuda(kBackward, problem.device);
  if constexpr (kHasCuda) return cuda::lrpe_cosine_backward_workspace_bytes(problem);
  return 0;
}

}  // namespace

void lrpe_cosine_forward(const LrpeCosineForwardArgs& args, const ExecutionContext& context) {
  check::threads(kForward, context.threads);
  const LrpeCosineForwardProblem problem = make_problem(args);
  if (is_done(problem)) return;
  if (problem.device.type == DeviceType::cpu) return cpu::lrpe_cosine_forward(problem, context);
  const Scratch scratch(kForward, problem.device, workspace_bytes(problem), context);
  if constexpr (kHasCuda) cuda::lrpe_cosine_forward(problem, scratch.context());
}

void lrpe_cosine_backward(const LrpeCosineBackwardArgs& args, const ExecutionContext& context) {
  check::threads(kBackward, context.threads);
  const LrpeCosineBackwardProblem problem = make_problem(args);
  if (is_done(problem)) return;
  if (problem.device.type == DeviceType::cpu) return cpu::lrpe_cosine_backward(problem, context);
  const Scratch scratch(kBackward, problem.device, workspace_bytes(problem), context);
  if constexpr (kHasCuda) cuda::lrpe_cosine_backward(problem, scratch.context());
}

std::size_t lrpe_cosine_forward_workspace_bytes(const LrpeCosineForwardArgs& args, const ExecutionContext&) {
  return workspace_bytes(make_problem(args));
}

std::size_t lrpe_cosine_backward_workspace_bytes(const LrpeCosineBackwardArgs& args, const ExecutionContext&) {
  return workspace_bytes(make_problem(args));
}

}  // namespace eaves
