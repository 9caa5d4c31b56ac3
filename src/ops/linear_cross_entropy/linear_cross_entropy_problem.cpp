// The arguments of linear_cross_entropy: checks that a call is legal, and translates it to rows, features and classes.
// The backends never see a bad argument.
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "core/check.h"
#include "core/dispatch.h"
#include "core/loss_checks.h"
#include "core/rows.h"
#include "eaves/error.h"
#include "eaves/linear_cross_entropy.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_backend.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_memory.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_policy.h"

namespace eaves {
namespace {

using check::Argument;
using check::LossArguments;
using namespace linear_cross_entropy_tensors;
using Mode = LinearCrossEntropyMode;

constexpr const char* kForward = "linear_cross_entropy_forward";
constexpr const char* kBackward = "linear_cross_entropy_backward";
constexpr const char* kForwardBackward = "linear_cross_entropy_forward_backward";
constexpr const char* kShardForward = "linear_cross_entropy_shard_forward";

struct Checked {
  LinearCrossEntropyProblem problem;
  LossArguments arguments;
};

TypedNumbers numbers_of(const TensorView& view) {
  return {view.is_present ? static_cast<const void*>(view.data) : nullptr, view.dtype};
}

/// An optional tensor with a number for each class, contiguous.
TypedNumbers check_per_class(LossArguments& arguments, const Argument& argument, std::int64_t classes, DType dtype) {
  if (!check::is_given(argument)) return {};
  check::is_on(argument, arguments.device, "hidden");
  check::has_shape(argument, {classes}, "one per class of `head`");
  check::has_dtype(argument, {dtype, DType::float32}, "as `hidden`, or float32");
  check::is_contiguous(argument);
  arguments.take_input(argument);
  return numbers_of(argument.view);
}

/// A matrix with unit stride along one of its axes.
GemmMatrix check_head(const Argument& head, DType dtype, Device device, std::int64_t features, bool is_shard) {
  check::is_valid(head);
  check::is_on(head, device, "hidden");
  check::has_dtype(head, {dtype}, "as `hidden`; convert one of them");
  const Dims& shape = head.view.shape;
  if (shape.size() != 2 || shape[1] != features) {
    check::has_shape(head, {shape.size() == 2 ? shape[0] : 1, features}, "[classes, features of `hidden`]");
  }
  if (shape[0] == 0 && !is_shard) check::fail(head, "has no classes, expected at least one");
  const Dims& strides = head.view.strides;
  // An axis of size 1 may have any stride.
  const bool is_row_major = (strides[1] == 1 || features == 1) && (strides[0] >= features || shape[0] == 1);
  const bool is_column_major = (strides[0] == 1 || shape[0] == 1) && (strides[1] >= shape[0] || features == 1);
  if (is_row_major) return {head.view.data, shape[0] == 1 ? features : strides[0], false};
  if (is_column_major) return {head.view.data, features == 1 ? shape[0] : strides[1], true};
  check::fail(head,
              "has strides " + check::to_string(strides) +
                  ", expected unit stride along one axis, and along the other axis at least the size of the first");
}

/// Returns the distance between the rows of soft targets.
std::int64_t check_soft_targets(const Argument& targets, const Dims& row_shape, std::int64_t classes, DType result) {
  Dims expected = row_shape;
  expected.push_back(classes);
  check::has_dtype(targets, {result, DType::float32}, "soft targets: float32, or float64 if `hidden` is float64");
  check::has_shape(targets, expected, "soft targets: one distribution per row of `hidden`");
  AxisSet axes;
  axes.contains[row_shape.size()] = true;
  const Dims& strides = targets.view.strides;
  Dims rows = contiguous_strides(row_shape);
  rows.push_back(0);
  const auto view = make_row_view<2, 5>(targets.view.shape, axes, {strides, strides, rows, rows, rows});
  const bool is_matrix = view.rows.rank <= 1 && (view.rows.rank == 0 || view.rows.strides[kPerRow][0] == 1) &&
                         (view.columns.rank == 0 || (view.columns.rank == 1 && view.columns.strides[0][0] == 1));
  if (!is_matrix && targets.view.element_count() != 0) {
    check::fail(targets, "has probabilities with strides " + check::to_string(strides) +
                             ", expected unit stride along the classes and one distance between rows");
  }
  return view.rows.rank == 0 ? classes : view.rows.strides[0][0];
}

/// The checks that all calls share. `grad_hidden` and `grad_loss` are absent in the forward.
Checked check_inputs(Mode mode, const char* op, const LinearCrossEntropyInputs& args, const TensorView& grad_hidden,
                     const TensorView& grad_loss, const LinearCrossEntropyShard& shard = {}) {
  const Argument hidden{op, "hidden", args.hidden};
  const Argument targets{op, "targets", args.targets};
  check::is_valid(hidden);
  check::has_dtype(hidden, {DType::float32, DType::float64, DType::float16, DType::bfloat16},
                   "hidden states are floating-point numbers");
  const int rank = args.hidden.shape.size();
  if (rank == 0) check::fail(hidden, "has no axis, expected [..., features]");
  const std::int64_t features = args.hidden.shape[rank - 1];
  if (features == 0)
    check::fail(hidden, "has shape " + check::to_string(args.hidden.shape) + ", expected at least one feature");
  const bool is_shard = shard.classes != 0;
  const GemmMatrix head =
      check_head({op, "head", args.head}, args.hidden.dtype, args.hidden.device, features, is_shard);
  const std::int64_t classes = args.head.shape[0];
  check::loss_options(op, args.options);
  if (is_shard && (shard.first_class < 0 || shard.classes < 0 || shard.first_class > shard.classes - classes)) {
    check::fail(op, "head",
                "begins with class " + std::to_string(shard.first_class) + " and has " + std::to_string(classes) +
                    " classes, expected a part of " + std::to_string(shard.classes) + " classes");
  }

  AxisSet axes;
  axes.contains[rank - 1] = true;
  LossArguments arguments{.op = op,
                          .row_shape = reduced_shape(args.hidden.shape, axes, false),
                          .result_dtype = accumulator_dtype(args.hidden.dtype),
                          .device = args.hidden.device,
                          .reference = "hidden"};
  arguments.take_input(hidden);
  arguments.take_input({op, "head", args.head});
  check::is_valid(targets);
  check::is_on(targets, args.hidden.device, "hidden");
  std::int64_t soft_target_stride = 0;
  const bool is_soft = is_floating_point(args.targets.dtype);
  if (is_soft) {
    soft_target_stride = check_soft_targets(targets, arguments.row_shape, classes, arguments.result_dtype);
  } else {
    check::has_dtype(targets, {DType::int64, DType::int32}, "classes; soft targets have a floating-point type");
    if (args.targets.shape != arguments.row_shape) {
      check::has_shape(targets, arguments.row_shape,
                       arguments.per_row_shape() + " " + check::to_string(args.hidden.shape));
    }
  }
  arguments.take_input(targets);
  const TypedNumbers bias = check_per_class(arguments, {op, "bias", args.bias}, classes, args.hidden.dtype);
  const TypedNumbers class_weight =
      check_per_class(arguments, {op, "class_weight", args.class_weight}, classes, args.hidden.dtype);
  const void* row_weight = arguments.per_row({op, "row_weight", args.row_weight}, false);
  const bool has_row_gradients = grad_loss.is_present && args.options.reduction == Reduction::none;
  if (grad_loss.is_present || grad_loss.data != nullptr) {
    arguments.has_loss_gradient({op, "grad_loss", grad_loss}, args.hidden.dtype, args.options.reduction);
    arguments.take_input({op, "grad_loss", grad_loss});
  }
  if (grad_hidden.is_present) {
    const Argument argument{op, "grad_hidden", grad_hidden};
    check::is_valid(argument);
    check::is_on(argument, args.hidden.device, "hidden");
    check::has_shape(argument, args.hidden.shape, "as `hidden`");
    if (is_shard && grad_hidden.dtype != args.hidden.dtype) {
      check::has_dtype(argument, {arguments.result_dtype}, "as `hidden`, or as the loss");
    } else {
      check::has_dtype(argument, {args.hidden.dtype}, "as `hidden`");
    }
  }

  const auto row_strides = [&](const TensorView& tensor) { return spread_strides(tensor.strides, rank, axes, false); };
  const LinearCrossEntropyView view =
      make_row_view<2, 5>(args.hidden.shape, axes,
                          {args.hidden.strides, grad_hidden.is_present ? grad_hidden.strides : args.hidden.strides,
                           is_soft ? zero_strides(rank) : row_strides(args.targets),
                           spread_strides(contiguous_strides(arguments.row_shape), rank, axes, false),
                           has_row_gradients ? row_strides(grad_loss) : zero_strides(rank)});
  const bool is_cpu = args.hidden.device.type == DeviceType::cpu;
  return {.problem = {.mode = mode,
                      .op = op,
                      .view = view,
                      .device = args.hidden.device,
                      .dtype = args.hidden.dtype,
                      .hidden = args.hidden.data,
                      .head = head,
                      .classes = classes,
                      .bias = bias,
                      .targets = numbers_of(args.targets),
                      .soft_target_stride = soft_target_stride,
                      .class_weight = class_weight,
                      .row_weight = row_weight,
                      .options = args.options,
                      .row_shape = arguments.row_shape,
                      .skips_ignored = is_cpu || args.skips_ignored,
                      .workspace_limit = args.workspace_limit,
                      .grad_loss = numbers_of(grad_loss),
                      .grad_hidden = grad_hidden.is_present ? grad_hidden.data : nullptr,
                      .grad_hidden_dtype = grad_hidden.is_present ? grad_hidden.dtype : args.hidden.dtype,
                      .shard = is_shard ? &shard : nullptr},
          .arguments = std::move(arguments)};
}

void check_gradients(Checked& checked, const LinearCrossEntropyGradients& gradients, const TensorView& head) {
  LinearCrossEntropyProblem& problem = checked.problem;
  LossArguments& arguments = checked.arguments;
  const Argument grad_hidden{problem.op, "grad_hidden", gradients.grad_hidden};
  const Argument grad_head{problem.op, "grad_head", gradients.grad_head};
  const Argument grad_bias{problem.op, "grad_bias", gradients.grad_bias};
  if (gradients.grad_hidden.is_present) arguments.take_output(grad_hidden);
  if (check::is_given(grad_head)) {
    check::is_on(grad_head, problem.device, "hidden");
    check::has_shape(grad_head, head.shape, "as `head`");
    check::has_dtype(grad_head, {problem.dtype, problem.accumulator()}, "as `head`, or as the loss");
    const Dims& strides = gradients.grad_head.strides;
    const bool has_unit_stride = strides[1] == 1 || problem.features() == 1;
    if (!has_unit_stride || (strides[0] < problem.features() && problem.classes != 1)) {
      check::fail(
          grad_head,
          "has strides " + check::to_string(strides) +
              ", expected unit stride along the features, and along the classes at least the number of features");
    }
    arguments.take_output(grad_head);
    problem.grad_head = gradients.grad_head.data;
    problem.grad_head_dtype = gradients.grad_head.dtype;
    problem.grad_head_stride = problem.classes == 1 ? problem.features() : strides[0];
  }
  if (check::is_given(grad_bias)) {
    check::is_on(grad_bias, problem.device, "hidden");
    check::has_shape(grad_bias, {problem.classes}, "one per class of `head`");
    check::has_dtype(grad_bias, {problem.dtype, problem.accumulator()}, "as `hidden`, or as the loss");
    check::is_contiguous(grad_bias);
    arguments.take_output(grad_bias);
    problem.grad_bias = gradients.grad_bias.data;
    problem.grad_bias_dtype = gradients.grad_bias.dtype;
  }
  problem.accumulates = gradients.accumulates;
}

void check_outputs(Checked& checked, const TensorView& normalizer, const LinearCrossEntropyOutputs& outputs) {
  LinearCrossEntropyProblem& problem = checked.problem;
  LossArguments& arguments = checked.arguments;
  const char* op = problem.op;
  const Reduction reduction = problem.options.reduction;
  problem.normalizer = arguments.mean_scalar({op, "normalizer", normalizer}, reduction, false);
  const bool is_weighted = problem.class_weight.data != nullptr && problem.options.label_smoothing != 0.0;
  problem.outputs = check::loss_outputs(arguments, outputs, reduction, !problem.has_soft_targets() && !is_weighted);
}

/// Loss and gradients of a shard at once: checks the tensors that the ranks exchange, and the inputs of the merge.
void check_exchange(Checked& checked, const LinearCrossEntropyForwardBackwardArgs& args) {
  LinearCrossEntropyProblem& problem = checked.problem;
  const Argument statistics{problem.op, "shard.statistics", args.shard.statistics};
  const Argument gathered{problem.op, "shard.gathered", args.shard.gathered};
  std::int64_t elements = problem.rows() * kCrossEntropyStatistics;
  for (const Argument& argument : {statistics, gathered}) {
    check::is_valid(argument);
    check::is_on(argument, problem.device, "hidden");
    check::has_dtype(argument, {problem.accumulator()}, "as the loss");
    check::is_contiguous(argument);
    if (argument.view.element_count() < elements) {
      check::fail(argument, "has " + std::to_string(argument.view.element_count()) + " elements, expected at least " +
                                std::to_string(elements));
    }
    checked.arguments.take_output(argument);
    elements *= args.shard.shards;
  }
  if (args.shard.gather == nullptr)
    check::fail(problem.op, "shard.gather",
                "is missing, expected a function that gathers the statistics of all shards");
  const LinearCrossEntropyOutputs& outputs = args.forward.outputs;
  check::is_required({problem.op, "lse", outputs.lse}, "an output for the gradients of a shard");
  if (problem.class_weight.data != nullptr || problem.has_soft_targets()) {
    check::is_required({problem.op, "target_mass", outputs.target_mass},
                       "an output for the gradients of a shard with class weights or soft targets");
  }
  const bool weighs_classes = problem.class_weight.data != nullptr && !problem.has_soft_targets();
  if (problem.options.reduction == Reduction::mean && weighs_classes) {
    check::is_required({problem.op, "normalizer", args.forward.normalizer},
                       "the divisor of the mean, because a shard has only its part of `class_weight`");
  }
  problem.statistics = args.shard.statistics.data;
}

std::int64_t kept_stride(const LinearCrossEntropyProblem& problem, DType dtype) {
  return dtype == DType::bfloat16 ? kept_exps_stride(problem.classes) : logits_stride(problem.classes);
}

/// True if the order of the computed rows is that of the per-row tensors, for any strides of the other tensors.
bool has_rows_in_order(const LinearCrossEntropyView& view) {
  std::int64_t stride = 1;
  for (int axis = view.rows.rank - 1; axis >= 0; --axis) {
    if (view.rows.strides[kPerRow][axis] != stride) return false;
    stride *= view.rows.sizes[axis];
  }
  return true;
}

/// Checks `kept`, which decides whether the call takes the fused path. A backward ignores `kept` if its rows have
/// another order than the forward's.
void check_kept(Checked& checked, const TensorView& view) {
  LinearCrossEntropyProblem& problem = checked.problem;
  const Argument kept{problem.op, "kept", view};
  const bool is_in_order = has_rows_in_order(problem.view);
  if (!check::is_given(kept) || (problem.mode == Mode::backward && !is_in_order)) {
    problem.is_fused = suits_fused_path(problem);
    return;
  }
  if (problem.shard != nullptr) check::fail(kept, "is given beside a shard, expected one of them");
  check::is_on(kept, problem.device, "hidden");
  const bool are_exps = view.dtype == DType::bfloat16;
  if (!are_exps) check::has_dtype(kept, {problem.accumulator()}, "bfloat16, or as the loss");
  if (are_exps && !suits_kept_exps(problem)) {
    check::fail(kept, "has dtype bfloat16, but this call cannot keep exponentials; expected the dtype of the loss");
  }
  check::has_shape(kept, {view.shape.size() == 2 ? view.shape[0] : 0, kept_stride(problem, view.dtype)},
                   "the shape that linear_cross_entropy_kept() returns");
  check::is_contiguous(kept);
  if (view.shape[0] != 0 && !is_in_order) {
    check::fail(
        kept,
        "has rows, but the rows of `hidden` lie in memory in another order than in its shape; expected no rows, or a "
        "contiguous `hidden`");
  }
  if (are_exps && reinterpret_cast<std::uintptr_t>(view.data) % 16 != 0) {
    check::fail(kept, "is not aligned, expected an address divisible by 16");
  }
  checked.arguments.take_output(kept);
  problem.kept = {view.data, view.dtype, std::min(view.shape[0], problem.rows()), view.shape[1]};
  problem.is_fused = are_exps;
}

}  // namespace

LinearCrossEntropyProblem make_problem(const LinearCrossEntropyForwardArgs& args) {
  Checked checked = check_inputs(Mode::forward, kForward, args.inputs, {}, {});
  check_outputs(checked, args.normalizer, args.outputs);
  check_kept(checked, args.kept);
  return checked.problem;
}

LinearCrossEntropyKept linear_cross_entropy_kept(const LinearCrossEntropyForwardArgs& args, std::size_t most_bytes) {
  LinearCrossEntropyForwardArgs without = args;
  without.kept = {};
  const LinearCrossEntropyProblem problem = make_problem(without);
  const DType dtype = suits_kept_exps(problem) ? DType::bfloat16 : problem.accumulator();
  const std::int64_t columns = kept_stride(problem, dtype);
  const std::size_t row_bytes = static_cast<std::size_t>(columns) * size_of(dtype);
  const std::size_t all = static_cast<std::size_t>(problem.rows());
  std::size_t rows = has_rows_in_order(problem.view) ? std::min(most_bytes / row_bytes, all) : 0;
  // A proper part of the rows has whole tiles of a product.
  if (rows < all && problem.device.type == DeviceType::cuda) rows -= rows % policy_of(problem.device).row_tile;
  return {dtype, static_cast<std::int64_t>(rows), columns};
}

LinearCrossEntropyProblem make_problem(const LinearCrossEntropyForwardBackwardArgs& args) {
  const LinearCrossEntropyForwardArgs& forward = args.forward;
  Checked checked = check_inputs(Mode::forward_backward, kForwardBackward, forward.inputs, args.gradients.grad_hidden,
                                 args.grad_loss, args.shard);
  check_outputs(checked, forward.normalizer, forward.outputs);
  check_gradients(checked, args.gradients, forward.inputs.head);
  if (checked.problem.shard != nullptr) {
    check_exchange(checked, args);
  } else if (!checked.problem.wants_gradients()) {
    checked.problem.mode = Mode::forward;
  }
  checked.problem.is_fused = suits_fused_path(checked.problem);
  return checked.problem;
}

LinearCrossEntropyProblem make_problem(const LinearCrossEntropyBackwardArgs& args) {
  const char* op = kBackward;
  const LinearCrossEntropyInputs& inputs = args.inputs;
  check::is_valid({op, "grad_loss", args.grad_loss});
  Checked checked = check_inputs(Mode::backward, op, inputs, args.gradients.grad_hidden, args.grad_loss, args.shard);
  LinearCrossEntropyProblem& problem = checked.problem;
  LossArguments& arguments = checked.arguments;
  const Argument lse{op, "lse", args.lse};
  const Argument entropy{op, "entropy", args.entropy};
  const Argument target_mass{op, "target_mass", args.target_mass};
  const Argument divisor{op, "divisor", args.divisor};
  check::is_required(lse, "the forward's output");
  if (args.grad_entropy.is_present)
    check::is_required(entropy, "the forward's output, because `grad_entropy` is given");
  if (problem.has_soft_targets()) check::is_required(target_mass, "the forward's output, because the targets are soft");
  if (problem.class_weight.data != nullptr) {
    check::is_required(target_mass, "the forward's output, because `class_weight` is given");
  }
  if (problem.options.reduction == Reduction::mean) {
    check::is_required(divisor, "the forward's output, because `reduction` is mean");
  }
  problem.grad_lse = arguments.per_row({op, "grad_lse", args.grad_lse}, false);
  problem.grad_entropy = arguments.per_row({op, "grad_entropy", args.grad_entropy}, false);
  problem.outputs.lse = arguments.lse(lse, false);
  problem.outputs.entropy = arguments.per_row(entropy, false);
  problem.outputs.target_mass = arguments.per_row(target_mass, false);
  problem.outputs.divisor = arguments.mean_scalar(divisor, problem.options.reduction, false);
  check_gradients(checked, args.gradients, inputs.head);
  check_kept(checked, args.kept);
  return problem;
}

LinearCrossEntropyProblem make_problem(const LinearCrossEntropyShardForwardArgs& args) {
  if (args.shard.classes == 0)
    check::fail(kShardForward, "shard.classes", "is 0, expected the number of classes of all shards");
  Checked checked = check_inputs(Mode::forward, kShardForward, args.inputs, {}, {}, args.shard);
  const Argument statistics{kShardForward, "statistics", args.statistics};
  check::is_valid(statistics);
  Dims expected = checked.problem.row_shape;
  expected.push_back(kCrossEntropyStatistics);
  check::has_shape(statistics, expected, "the statistics of each row of `hidden`");
  checked.arguments.has_result_dtype(statistics);
  check::is_contiguous(statistics);
  checked.arguments.take_output(statistics);
  checked.problem.statistics = args.statistics.data;
  checked.problem.is_fused = suits_fused_path(checked.problem);
  return checked.problem;
}

}  // namespace eaves
