// Checks the arguments of cross_entropy and converts them to a problem in rows and columns. The backends get legal
// problems only.
#include "ops/cross_entropy/cross_entropy_problem.h"

#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/dispatch.h"
#include "core/loss_checks.h"
#include "core/rows.h"

namespace eaves::cross_entropy_calls {
namespace {

using check::Argument;
using check::LossArguments;
using namespace cross_entropy_tensors;

struct InputArgs {
  const TensorView& logits;
  const TensorView& targets;
  const TensorView& class_weight;
  const TensorView& row_weight;
  int class_axis;
  const CrossEntropyOptions& options;
  std::int64_t first_class = 0;
  std::int64_t classes = 0;
  bool overwrites_logits = false;
};

/// Is `grad_logits` a gradient of 16 bits over float32 logits?
bool is_narrower(const TensorView& grad_logits, const TensorView& logits) {
  return logits.dtype == DType::float32 && size_of(grad_logits.dtype) == 2 && grad_logits.data == logits.data;
}

/// The caller has checked shape and device.
void check_narrow_gradient(const Argument& grad_logits, const TensorView& logits, int class_axis) {
  check::has_dtype(grad_logits, {DType::float16, DType::bfloat16}, "a gradient of 16 bits over `logits` in float32");
  check::has_dtype({grad_logits.op, "logits", logits}, {DType::float32}, "`grad_logits` has 16 bits");
  if (logits.element_count() == 0) return;  // an empty tensor may have any strides
  const int rank = logits.shape.size();
  const auto is_aligned = [](std::uint64_t bytes) { return bytes % 16 == 0; };
  bool fits = grad_logits.view.data == logits.data && class_axis + 1 == (class_axis < 0 ? 0 : rank) && rank > 0 &&
              is_aligned(reinterpret_cast<std::uintptr_t>(logits.data));
  for (int axis = 0; fits && axis < rank; ++axis) {
    if (logits.shape[axis] == 1 && axis + 1 < rank) continue;  // the stride of an axis of size 1 does not matter
    const std::int64_t stride = logits.strides[axis];
    fits = axis + 1 == rank
               ? (stride == 1 || logits.shape[axis] <= 1) && grad_logits.view.strides[axis] == stride
               : grad_logits.view.strides[axis] == 2 * stride && is_aligned(static_cast<std::uint64_t>(stride) * 4);
  }
  if (!fits) {
    check::fail(
        grad_logits,
        std::string("has dtype ") + name_of(grad_logits.view.dtype) + " and strides " +
            check::to_string(grad_logits.view.strides) + " over `logits` with strides " +
            check::to_string(logits.strides) +
            "; a gradient of 16 bits over `logits` in float32 needs the address of `logits`, classes on the last "
            "axis with unit stride, rows that start at multiples of 16 bytes, and twice the other strides of "
            "`logits`");
  }
}

/// Soft targets need unit stride along the classes, as the logits have.
void check_narrow_layout(const CrossEntropyInputs& inputs, const Argument& targets) {
  const bool is_empty = inputs.view.row_count == 0 || inputs.view.column_count == 0;  // an empty view has no layout
  if (is_empty || inputs.view.layout == RowLayout::contiguous) return;
  check::fail(targets, "has probabilities with strides " + check::to_string(targets.view.strides) +
                           ", expected unit stride along the classes (`grad_logits` has 16 bits)");
}

/// `inputs` comes first: it reads the row shape from `checked` before `checked` is moved.
struct CheckedInputs {
  CrossEntropyInputs inputs;
  LossArguments checked;
};

LossPlan plan_of(const CrossEntropyOptions& options, bool is_soft, bool has_weight) {
  const bool has_smoothing = options.label_smoothing > 0.0;
  return {.has_transform = options.scale != 1.0 || options.softcap != 0.0,
          .has_logit_sum = is_soft || has_smoothing,
          .has_factors = is_soft || (has_weight && has_smoothing)};
}

/// `grad_logits` and `grad_loss` are absent in the forward.
CheckedInputs check_inputs(const char* op, const InputArgs& args, const TensorView& grad_logits,
                           const TensorView& grad_loss) {
  const Argument logits{op, "logits", args.logits};
  const Argument targets{op, "targets", args.targets};
  const Argument class_weight{op, "class_weight", args.class_weight};
  check::is_valid(logits);
  check::has_dtype(logits, {DType::float32, DType::float64, DType::float16, DType::bfloat16},
                   "logits are floating-point numbers");
  const int rank = args.logits.shape.size();
  const int class_axis = check::axis(logits, "class_axis", args.class_axis);
  check::loss_options(op, args.options);
  AxisSet axes;
  axes.contains[class_axis] = true;
  const std::int64_t columns = args.logits.shape[class_axis];

  LossArguments checked{.op = op,
                        .row_shape = reduced_shape(args.logits.shape, axes, false),
                        .result_dtype = accumulator_dtype(args.logits.dtype),
                        .device = args.logits.device,
                        .reference = "logits"};
  check::is_valid(targets);
  check::is_on(targets, args.logits.device, "logits");
  const bool is_soft = is_floating_point(args.targets.dtype);
  if (is_soft) {
    check::has_dtype(targets, {args.logits.dtype, DType::float32}, "soft targets: as `logits`, or float32");
    check::has_shape(targets, args.logits.shape, "soft targets: as `logits`");
  } else {
    check::has_dtype(targets, {DType::int64, DType::int32}, "classes; soft targets have a floating-point type");
    if (args.targets.shape != checked.row_shape) {  // has_shape() alone would build the text in every call
      check::has_shape(targets, checked.row_shape, checked.per_row_shape() + " " + check::to_string(args.logits.shape));
    }
  }
  checked.inputs.reserve(6);
  checked.take_input(targets);
  if (check::is_given(class_weight)) {
    check::is_on(class_weight, args.logits.device, "logits");
    check::has_shape(class_weight, {columns}, "one per class of `logits`");
    check::has_dtype(class_weight, {args.logits.dtype, DType::float32}, "as `logits`, or float32");
    check::is_contiguous(class_weight);
    checked.take_input(class_weight);
  }
  const void* row_weight = checked.per_row({op, "row_weight", args.row_weight}, false);
  if (grad_loss.is_present || grad_loss.data != nullptr) {
    checked.has_loss_gradient({op, "grad_loss", grad_loss}, args.logits.dtype, args.options.reduction);
    checked.take_input({op, "grad_loss", grad_loss});
  }
  args.overwrites_logits ? checked.take_output(logits) : checked.take_input(logits);
  const std::int64_t classes = args.classes == 0 ? columns : args.classes;
  if (args.first_class < 0 || args.classes < 0 || args.first_class > classes - columns) {
    check::fail(logits, "begins with class " + std::to_string(args.first_class) + " and has " +
                            std::to_string(columns) + " classes, expected a part of " + std::to_string(classes) +
                            " classes");
  }
  // Without classes only ignore_index is a legal target, and a GPU reports an illegal one by a NaN only.
  if (classes == 0 && !is_soft && args.targets.element_count() > 0) {
    check::fail(logits, "has shape " + check::to_string(args.logits.shape) + ", expected at least one class");
  }

  const auto row_strides = [&](const TensorView& tensor) { return spread_strides(tensor.strides, rank, axes, false); };
  const bool has_row_losses = grad_loss.is_present && args.options.reduction == Reduction::none;
  return {{.view = make_row_view<3, 6>(
               args.logits.shape, axes,
               {args.logits.strides, grad_logits.is_present ? grad_logits.strides : args.logits.strides,
                is_soft ? args.targets.strides : args.logits.strides,
                is_soft ? zero_strides(rank) : row_strides(args.targets),
                spread_strides(contiguous_strides(checked.row_shape), rank, axes, false),
                has_row_losses ? row_strides(grad_loss) : zero_strides(rank)}),
           .device = args.logits.device,
           .logits_dtype = args.logits.dtype,
           .logits = args.logits.data,
           .targets = {args.targets.data, args.targets.dtype},
           .weight = {args.class_weight.is_present ? args.class_weight.data : nullptr, args.class_weight.dtype},
           .row_weight = row_weight,
           .first_class = args.first_class,
           .classes = classes,
           .options = args.options,
           .plan = plan_of(args.options, is_soft, args.class_weight.is_present),
           .row_shape = checked.row_shape},
          std::move(checked)};
}

CrossEntropyForwardProblem make_forward_problem(const char* op, const CrossEntropyForwardArgs& args,
                                                const TensorView& grad_loss = {}, const TensorView& grad_logits = {},
                                                bool overwrites_logits = false) {
  auto [inputs, checked] = check_inputs(op,
                                        {args.logits, args.targets, args.class_weight, args.row_weight, args.class_axis,
                                         args.options, 0, 0, overwrites_logits},
                                        grad_logits, grad_loss);
  if (grad_logits.is_present) check_narrow_layout(inputs, {op, "targets", args.targets});
  CrossEntropyForwardProblem problem{
      .inputs = inputs,
      .skips_ignored = args.skips_ignored || overwrites_logits,
      .normalizer = checked.mean_scalar({op, "normalizer", args.normalizer}, args.options.reduction, false),
      .outputs = {}};
  LossPlan& plan = problem.inputs.plan;
  problem.outputs = check::loss_outputs(checked, args, args.options.reduction, !plan.has_factors);
  plan.has_moment = problem.outputs.entropy != nullptr;
  plan.has_square = problem.outputs.sum_sq != nullptr;
  plan.has_best = problem.outputs.argmax != nullptr;
  plan.has_logit_sum = plan.has_logit_sum || problem.outputs.mean_logit != nullptr;
  return problem;
}

}  // namespace

CrossEntropyForwardProblem make_problem(const CrossEntropyForwardArgs& args) {
  return make_forward_problem(kForward, args);
}

CrossEntropyBackwardProblem make_problem(const CrossEntropyBackwardArgs& args) {
  const Argument grad_logits{kBackward, "grad_logits", args.grad_logits};
  const Reduction reduction = args.options.reduction;
  check::is_valid({kBackward, "logits", args.logits});
  check::is_valid(grad_logits);
  check::is_on(grad_logits, args.logits.device, "logits");
  check::has_shape(grad_logits, args.logits.shape, "as `logits`");
  const bool is_narrow = is_narrower(args.grad_logits, args.logits);
  if (is_narrow) {
    check_narrow_gradient(grad_logits, args.logits, args.class_axis);
  } else {
    check::has_dtype(grad_logits, {args.logits.dtype}, "as `logits`");
  }
  check::is_valid({kBackward, "grad_loss", args.grad_loss});
  // The gradient may be written over the logits; otherwise it must not overlap any input.
  const bool is_in_place =
      is_narrow || (args.grad_logits.data == args.logits.data && args.grad_logits.strides == args.logits.strides);

  auto [inputs, checked] = check_inputs(kBackward,
                                        {args.logits, args.targets, args.class_weight, args.row_weight, args.class_axis,
                                         args.options, args.first_class, args.classes, is_in_place},
                                        args.grad_logits, args.grad_loss);

  if (is_narrow) check_narrow_layout(inputs, {kBackward, "targets", args.targets});
  const Argument lse{kBackward, "lse", args.lse};
  const Argument entropy{kBackward, "entropy", args.entropy};
  const Argument target_mass{kBackward, "target_mass", args.target_mass};
  const Argument divisor{kBackward, "divisor", args.divisor};
  check::is_required(lse, "the forward's output");
  if (args.grad_entropy.is_present)
    check::is_required(entropy, "the forward's output, because `grad_entropy` is given");
  if (inputs.has_soft_targets()) check::is_required(target_mass, "the forward's output, because the targets are soft");
  if (inputs.plan.has_factors && !inputs.has_soft_targets()) {
    check::is_required(target_mass, "the forward's output, because `class_weight` and `label_smoothing` are given");
  }
  // A shard without the target does not know the target's weight.
  if (inputs.weight.data != nullptr && inputs.classes != inputs.view.column_count) {
    check::is_required(target_mass,
                       "the merge's output, because `class_weight` is given and `logits` has a part of the classes");
  }
  if (reduction == Reduction::mean) check::is_required(divisor, "the forward's output, because `reduction` is mean");

  inputs.plan.has_moment = args.grad_entropy.is_present;
  CrossEntropyBackwardProblem problem{
      .inputs = inputs,
      .grad_loss = {args.grad_loss.data, args.grad_loss.dtype},
      .grad_lse = checked.per_row({kBackward, "grad_lse", args.grad_lse}, false),
      .grad_entropy = checked.per_row({kBackward, "grad_entropy", args.grad_entropy}, false),
      .lse = checked.lse(lse, false),
      .entropy = checked.per_row(entropy, false),
      .target_mass = checked.per_row(target_mass, false),
      .divisor = checked.mean_scalar(divisor, reduction, false),
      .grad_dtype = args.grad_logits.dtype,
      .grad_logits = args.grad_logits.data};
  if (!is_in_place) checked.take_output(grad_logits);
  return problem;
}

CrossEntropyInPlaceProblem make_problem(const CrossEntropyForwardBackwardArgs& args) {
  const TensorView& logits = args.forward.logits;
  const Argument grad_logits{kForwardBackward, "grad_logits", args.grad_logits};
  const bool is_given = check::is_given(grad_logits);
  if (is_given) {
    check::is_valid({kForwardBackward, "logits", logits});
    check::is_on(grad_logits, logits.device, "logits");
    check::has_shape(grad_logits, logits.shape, "as `logits`");
    check_narrow_gradient(grad_logits, logits, args.forward.class_axis);
  }
  return {.forward = make_forward_problem(kForwardBackward, args.forward, args.grad_loss, args.grad_logits, true),
          .grad_dtype = is_given ? args.grad_logits.dtype : logits.dtype,
          .grad_loss = {args.grad_loss.data, args.grad_loss.dtype}};
}

CrossEntropyRescaleProblem make_problem(const CrossEntropyRescaleArgs& args) {
  const Argument grad_logits{kRescale, "grad_logits", args.grad_logits};
  const Argument grad_loss{kRescale, "grad_loss", args.grad_loss};
  check::is_valid(grad_logits);
  check::has_dtype(grad_logits, {DType::float32, DType::float64, DType::float16, DType::bfloat16},
                   "gradients are floating-point numbers");
  AxisSet axes;
  axes.contains[check::axis(grad_logits, "class_axis", args.class_axis)] = true;
  LossArguments checked{.op = kRescale,
                        .row_shape = reduced_shape(args.grad_logits.shape, axes, false),
                        .result_dtype = accumulator_dtype(args.grad_logits.dtype),
                        .device = args.grad_logits.device,
                        .reference = "grad_logits",
                        .rows_of = "logits"};
  const bool is_one_number = args.grad_loss.element_count() == 1;
  checked.has_loss_gradient(grad_loss, args.grad_logits.dtype, is_one_number ? Reduction::sum : Reduction::none);
  checked.take_input(grad_loss);
  checked.take_output(grad_logits);
  const int rank = args.grad_logits.shape.size();
  const Dims& strides = args.grad_logits.strides;
  const Dims factors = is_one_number ? zero_strides(rank) : spread_strides(args.grad_loss.strides, rank, axes, false);
  return {
      .view = make_row_view<3, 6>(args.grad_logits.shape, axes, {strides, strides, strides, factors, factors, factors}),
      .device = args.grad_logits.device,
      .dtype = args.grad_logits.dtype,
      .grad_logits = args.grad_logits.data,
      .grad_loss = {args.grad_loss.data, args.grad_loss.dtype}};
}

namespace {

/// On the CPU statistics may be float64 with float32 results.
void check_statistics_dtype(const LossArguments& checked, const Argument& statistics) {
  const bool is_wider = checked.device.type == DeviceType::cpu && statistics.view.dtype == DType::float64;
  if (!is_wider) checked.has_result_dtype(statistics);
}

}  // namespace

CrossEntropyShardProblem make_problem(const CrossEntropyShardArgs& args) {
  auto [inputs, checked] = check_inputs(
      kShardForward,
      {args.logits, args.targets, args.class_weight, {}, args.class_axis, args.options, args.first_class, args.classes},
      {}, {});
  const Argument statistics{kShardForward, "statistics", args.statistics};
  check::is_valid(statistics);
  Dims expected = checked.row_shape;
  expected.push_back(kCrossEntropyStatistics);
  check::has_shape(statistics, expected, "the statistics of each row of `logits`");
  check_statistics_dtype(checked, statistics);
  check::is_contiguous(statistics);
  checked.take_output(statistics);
  LossPlan& plan = inputs.plan;
  plan.has_moment = plan.has_square = plan.has_best = true;
  plan.has_logit_sum = plan.has_logit_sum || args.is_for_mean_logit;
  return {.inputs = inputs, .statistics = args.statistics.data, .statistics_dtype = args.statistics.dtype};
}

CrossEntropyMergeProblem make_problem(const CrossEntropyMergeArgs& args) {
  const Argument statistics{kMerge, "statistics", args.statistics};
  const Argument targets{kMerge, "targets", args.targets};
  check::is_valid(statistics);
  check::has_dtype(statistics, {DType::float32, DType::float64}, "the statistics of the shards");
  check::is_contiguous(statistics);
  check::loss_options(kMerge, args.options);
  const Dims& shape = args.statistics.shape;
  const int rank = shape.size();
  const std::int64_t shards = rank == 0 ? 0 : shape[0];
  Dims row_shape = args.targets.shape;
  if (args.has_soft_targets) {
    if (args.targets.is_present) check::fail(targets, "is given beside `has_soft_targets`, expected one of them");
    for (int axis = 1; axis + 1 < rank; ++axis) row_shape.push_back(shape[axis]);
  } else {
    check::is_valid(targets);
    check::is_on(targets, args.statistics.device, "statistics");
    check::has_dtype(targets, {DType::int64, DType::int32}, "classes");
  }
  Dims expected;
  expected.push_back(shards);
  for (const std::int64_t size : row_shape) expected.push_back(size);
  expected.push_back(kCrossEntropyStatistics);
  check::has_shape(statistics, expected, "the statistics of each shard and each row");
  if (args.classes < 1) {
    check::fail(kMerge, "classes",
                "is " + std::to_string(args.classes) + ", expected the number of classes of all shards");
  }
  LossArguments checked{.op = kMerge,
                        .row_shape = row_shape,
                        .result_dtype = args.loss.is_present ? args.loss.dtype : args.statistics.dtype,
                        .device = args.statistics.device,
                        .reference = "statistics",
                        .rows_of = "logits"};
  check_statistics_dtype(checked, statistics);
  checked.take_input(statistics);
  if (!args.has_soft_targets) checked.take_input(targets);
  const Dims rows = contiguous_strides(row_shape);
  const Dims& target_strides = args.has_soft_targets ? rows : args.targets.strides;
  CrossEntropyMergeProblem problem{
      .inputs = {.view = make_row_view<3, 6>(row_shape, {}, {rows, rows, rows, target_strides, rows, rows}),
                 .device = args.statistics.device,
                 .logits_dtype = checked.result_dtype,
                 .logits = nullptr,
                 .targets = {args.targets.data, args.has_soft_targets ? checked.result_dtype : args.targets.dtype},
                 .weight = {},
                 .row_weight = checked.per_row({kMerge, "row_weight", args.row_weight}, false),
                 .first_class = 0,
                 .classes = args.classes,
                 .options = args.options,
                 .plan = {},
                 .row_shape = row_shape},
      .has_weight = args.has_class_weight,
      .skips_ignored = args.skips_ignored,
      .shards = shards,
      .statistics = args.statistics.data,
      .statistics_dtype = args.statistics.dtype,
      .normalizer = checked.mean_scalar({kMerge, "normalizer", args.normalizer}, args.options.reduction, false),
      .outputs = {}};
  const bool has_unit_factors =
      !args.has_soft_targets && (!args.has_class_weight || args.options.label_smoothing == 0.0);
  problem.outputs = check::loss_outputs(checked, args, args.options.reduction, has_unit_factors);
  return problem;
}

}  // namespace eaves::cross_entropy_calls
