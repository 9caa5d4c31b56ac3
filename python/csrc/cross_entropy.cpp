// cross_entropy for torch: outputs from torch's allocator, then the call. Autograd, fake implementations, batching
// rules and the public functions are in python/eaves/_cross_entropy.py.
#include "eaves/cross_entropy.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/dispatch.h"
#include "core/rows.h"
#include "loss_arguments.h"
#include "torch_binding.h"

namespace eaves::binding {
namespace {

constexpr const char* kOp = "cross_entropy";

TensorView optional_input(const OptionalTensor& tensor, const char* argument) {
  return optional_input(tensor, Name{kOp, argument});
}

/// Beyond an int there is no axis; the core says so.
int axis_of(std::int64_t axis) {
  return static_cast<int>(
      std::clamp<std::int64_t>(axis, std::numeric_limits<int>::min(), std::numeric_limits<int>::max()));
}

Dims row_shape_of(const TensorView& logits, int class_axis) {
  AxisSet axes;
  axes.contains[check::axis({kOp, "logits", logits}, "class_axis", class_axis)] = true;
  return reduced_shape(logits.shape, axes, false);
}

/// The outputs that `wanted` names, made and put into `args`.
template <typename Args>
std::vector<Tensor> make_outputs(Args& args, const Dims& row_shape, DType dtype, Device device, std::int64_t wanted) {
  return make_loss_outputs(args, args.options.reduction, row_shape, dtype, device, wanted);
}

CrossEntropyForwardArgs forward_args(const Tensor& logits, const Tensor& targets, const OptionalTensor& weight,
                                     const OptionalTensor& normalizer, std::int64_t class_axis,
                                     const CrossEntropyOptions& options, std::int64_t wanted) {
  return {.logits = input(logits, {kOp, "logits"}),
          .targets = input(targets, {kOp, "targets"}),
          .weight = optional_input(weight, "weight"),
          .normalizer = optional_input(normalizer, "normalizer"),
          .class_axis = axis_of(class_axis),
          .options = options,
          .reads_ignored_rows = (wanted & outputs::kOfIgnoredRows) != 0};
}

std::vector<Tensor> forward(Tensor logits, Tensor targets, OptionalTensor weight, OptionalTensor normalizer,
                            std::int64_t class_axis, std::int64_t ignore_index, std::int64_t reduction,
                            double label_smoothing, double scale, double softcap, double z_loss_weight,
                            std::int64_t wanted) {
  CrossEntropyForwardArgs args =
      forward_args(logits, targets, weight, normalizer, class_axis,
                   options_of(ignore_index, reduction, label_smoothing, scale, softcap, z_loss_weight), wanted);
  std::vector<Tensor> tensors = make_outputs(args, row_shape_of(args.logits, args.class_axis),
                                             accumulator_dtype(args.logits.dtype), args.logits.device, wanted);
  run<cross_entropy_forward, &cross_entropy_forward_workspace_bytes>(args, args.logits.device);
  return tensors;
}

/// torch.compile only takes a fixed number of results where an argument is written: (loss, lse, argmax, entropy,
/// z_loss), those that were not asked for without elements.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward_backward(Tensor logits, Tensor targets,
                                                                    OptionalTensor weight, OptionalTensor normalizer,
                                                                    std::int64_t class_axis, std::int64_t ignore_index,
                                                                    std::int64_t reduction, double label_smoothing,
                                                                    double scale, double softcap, double z_loss_weight,
                                                                    std::int64_t wanted) {
  CrossEntropyForwardBackwardArgs args{
      .forward =
          forward_args(logits, targets, weight, normalizer, class_axis,
                       options_of(ignore_index, reduction, label_smoothing, scale, softcap, z_loss_weight), wanted)};
  args.forward.logits = output(logits);
  args.forward.reads_ignored_rows = false;
  const TensorView& view = args.forward.logits;
  const DType dtype = accumulator_dtype(view.dtype);
  std::vector<Tensor> tensors =
      make_outputs(args.forward, row_shape_of(view, args.forward.class_axis), dtype, view.device,
                   wanted & (outputs::kLse | outputs::kArgmax | outputs::kEntropy | outputs::kZLoss));
  run<cross_entropy_forward_backward, &cross_entropy_forward_backward_workspace_bytes>(args, view.device);
  std::size_t next = 1;
  const auto take = [&](std::int64_t bit, DType of) {
    return (wanted & bit) != 0 ? tensors[next++] : empty({0}, of, view.device);
  };
  Tensor lse = take(outputs::kLse, dtype);
  Tensor argmax = take(outputs::kArgmax, DType::int64);
  Tensor entropy = take(outputs::kEntropy, dtype);
  Tensor z_loss = take(outputs::kZLoss, dtype);
  return {tensors[0], std::move(lse), std::move(argmax), std::move(entropy), std::move(z_loss)};
}

/// The arguments that a backward into a new tensor and one over the logits share.
CrossEntropyBackwardArgs backward_args(const Tensor& grad_loss, const TensorView& logits, const Tensor& targets,
                                       const OptionalTensor& weight, const Tensor& lse,
                                       const OptionalTensor& target_mass, const OptionalTensor& divisor,
                                       std::int64_t class_axis, const CrossEntropyOptions& options,
                                       const TensorView& grad_logits) {
  return {.grad_loss = input(grad_loss, {kOp, "grad_loss"}),
          .logits = logits,
          .targets = input(targets, {kOp, "targets"}),
          .weight = optional_input(weight, "weight"),
          .class_axis = axis_of(class_axis),
          .options = options,
          .lse = input(lse, {kOp, "lse"}),
          .target_mass = optional_input(target_mass, "target_mass"),
          .divisor = optional_input(divisor, "divisor"),
          .grad_logits = grad_logits};
}

Tensor backward(Tensor grad_loss, OptionalTensor grad_lse, OptionalTensor grad_entropy, Tensor logits, Tensor targets,
                OptionalTensor weight, Tensor lse, OptionalTensor entropy, OptionalTensor target_mass,
                OptionalTensor divisor, std::int64_t class_axis, std::int64_t ignore_index, std::int64_t reduction,
                double label_smoothing, double scale, double softcap, double z_loss_weight, std::int64_t first_class,
                std::int64_t classes) {
  const TensorView view = input(logits, {kOp, "logits"});
  NewTensor grad_logits = empty_like(logits, view);
  CrossEntropyBackwardArgs args = backward_args(
      grad_loss, view, targets, weight, lse, target_mass, divisor, class_axis,
      options_of(ignore_index, reduction, label_smoothing, scale, softcap, z_loss_weight), grad_logits.view);
  args.grad_lse = optional_input(grad_lse, "grad_lse");
  args.grad_entropy = optional_input(grad_entropy, "grad_entropy");
  args.entropy = optional_input(entropy, "entropy");
  args.first_class = first_class;
  args.classes = classes;
  run<cross_entropy_backward>(args, args.logits.device);  // needs no workspace
  return std::move(grad_logits.tensor);
}

void backward_in_place(Tensor grad_loss, Tensor logits, Tensor targets, OptionalTensor weight, Tensor lse,
                       OptionalTensor target_mass, OptionalTensor divisor, std::int64_t class_axis,
                       std::int64_t ignore_index, std::int64_t reduction, double label_smoothing, double scale,
                       double softcap, double z_loss_weight) {
  const TensorView view = output(logits);
  const CrossEntropyBackwardArgs args =
      backward_args(grad_loss, view, targets, weight, lse, target_mass, divisor, class_axis,
                    options_of(ignore_index, reduction, label_smoothing, scale, softcap, z_loss_weight), view);
  run<cross_entropy_backward>(args, args.logits.device);  // needs no workspace
}

void rescale(Tensor grad_logits, Tensor grad_loss, std::int64_t class_axis) {
  const CrossEntropyRescaleArgs args{.grad_logits = output(grad_logits),
                                     .grad_loss = input(grad_loss, {kOp, "grad_loss"}),
                                     .class_axis = axis_of(class_axis)};
  run<cross_entropy_rescale>(args, args.grad_logits.device);  // needs no workspace
}

Tensor shard_forward(Tensor logits, Tensor targets, OptionalTensor weight, std::int64_t class_axis,
                     std::int64_t ignore_index, double label_smoothing, double scale, double softcap,
                     double z_loss_weight, std::int64_t first_class, std::int64_t classes) {
  CrossEntropyShardArgs args{.logits = input(logits, {kOp, "logits"}),
                             .targets = input(targets, {kOp, "targets"}),
                             .weight = optional_input(weight, "weight"),
                             .class_axis = axis_of(class_axis),
                             .options = options_of(ignore_index, 0, label_smoothing, scale, softcap, z_loss_weight),
                             .first_class = first_class,
                             .classes = classes};
  Dims shape = row_shape_of(args.logits, args.class_axis);
  shape.push_back(kCrossEntropyStatistics);
  NewTensor statistics = empty_output(shape, accumulator_dtype(args.logits.dtype), args.logits.device);
  args.statistics = statistics.view;
  run<cross_entropy_shard_forward, &cross_entropy_shard_forward_workspace_bytes>(args, args.logits.device);
  return std::move(statistics.tensor);
}

std::vector<Tensor> merge(Tensor statistics, Tensor targets, OptionalTensor normalizer, std::int64_t ignore_index,
                          std::int64_t reduction, double label_smoothing, double scale, double softcap,
                          double z_loss_weight, std::int64_t classes, bool has_weight, std::int64_t wanted) {
  CrossEntropyMergeArgs args{
      .statistics = input(statistics, {kOp, "statistics"}),
      .targets = input(targets, {kOp, "targets"}),
      .normalizer = optional_input(normalizer, "normalizer"),
      .options = options_of(ignore_index, reduction, label_smoothing, scale, softcap, z_loss_weight),
      .classes = classes,
      .has_weight = has_weight};
  std::vector<Tensor> tensors =
      make_outputs(args, args.targets.shape, args.statistics.dtype, args.statistics.device, wanted);
  run<cross_entropy_merge, &cross_entropy_merge_workspace_bytes>(args, args.statistics.device);
  return tensors;
}

void implement(Library& library) {
  library.impl("cross_entropy_forward", EAVES_BOX(forward));
  library.impl("cross_entropy_forward_backward", EAVES_BOX(forward_backward));
  library.impl("cross_entropy_backward", EAVES_BOX(backward));
  library.impl("cross_entropy_backward_in_place", EAVES_BOX(backward_in_place));
  library.impl("cross_entropy_rescale", EAVES_BOX(rescale));
  library.impl("cross_entropy_shard_forward", EAVES_BOX(shard_forward));
  library.impl("cross_entropy_merge", EAVES_BOX(merge));
}

}  // namespace
}  // namespace eaves::binding

STABLE_TORCH_LIBRARY_FRAGMENT(eaves, library) {
  // The defaults are those of eaves.cross_entropy, in which most calls leave them: an argument that is passed costs
  // 0.15 us of the host's time (PyTorch 2.13, AMD EPYC), and one that is left out almost nothing. SymInt, because
  // torch.compile compiles again for each value of an int. The floats are everywhere all that _loss.numbers_of gives,
  // those that an operator does not read among them.
  library.def(
      "cross_entropy_forward(Tensor logits, Tensor targets, Tensor? weight=None, Tensor? normalizer=None, "
      "int class_axis=-1, SymInt ignore_index=-100, int reduction=2, float label_smoothing=0, float scale=1, "
      "float softcap=0, float z_loss_weight=0, int outputs=0) -> Tensor[]");
  library.def(
      "cross_entropy_forward_backward(Tensor(a!) logits, Tensor targets, Tensor? weight, Tensor? normalizer, "
      "int class_axis, SymInt ignore_index, int reduction, float label_smoothing, float scale, float softcap, "
      "float z_loss_weight, int outputs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "cross_entropy_backward(Tensor grad_loss, Tensor? grad_lse, Tensor? grad_entropy, Tensor logits, "
      "Tensor targets, Tensor? weight, Tensor lse, Tensor? entropy, Tensor? target_mass, Tensor? divisor, "
      "int class_axis, SymInt ignore_index, int reduction, float label_smoothing, float scale, float softcap, "
      "float z_loss_weight, SymInt first_class, SymInt classes) -> Tensor");
  library.def(
      "cross_entropy_backward_in_place(Tensor grad_loss, Tensor(a!) logits, Tensor targets, Tensor? weight, "
      "Tensor lse, Tensor? target_mass, Tensor? divisor, int class_axis, SymInt ignore_index, int reduction, "
      "float label_smoothing, float scale, float softcap, float z_loss_weight) -> ()");
  library.def("cross_entropy_rescale(Tensor(a!) grad_logits, Tensor grad_loss, int class_axis) -> ()");
  library.def(
      "cross_entropy_shard_forward(Tensor logits, Tensor targets, Tensor? weight, int class_axis, SymInt ignore_index, "
      "float label_smoothing, float scale, float softcap, float z_loss_weight, SymInt first_class, SymInt classes) -> "
      "Tensor");
  library.def(
      "cross_entropy_merge(Tensor statistics, Tensor targets, Tensor? normalizer, SymInt ignore_index, int reduction, "
      "float label_smoothing, float scale, float softcap, float z_loss_weight, SymInt classes, bool has_weight, "
      "int outputs) -> Tensor[]");
}
EAVES_IMPLEMENT(eaves::binding::implement)
