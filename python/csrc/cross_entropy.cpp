// cross_entropy for torch: allocates outputs from torch's allocator, then calls the core. The gradient is in
// python/eaves/_autograd, the fake implementations and batching rules are in _torch/cross_entropy_rules.py.
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

/// No axis is beyond an int; the core refuses the clamped number.
int axis_of(std::int64_t axis) {
  return static_cast<int>(
      std::clamp<std::int64_t>(axis, std::numeric_limits<int>::min(), std::numeric_limits<int>::max()));
}

#define EAVES_LOGITS "Tensor logits, Tensor targets, Tensor? class_weight"

/// The tensors that every call but merge and rescale takes, one behind the other.
struct Logits {
  Tensor logits, targets;
  OptionalTensor class_weight;

  static Logits read(Arguments& arguments) {
    return {arguments.read<Tensor>(), arguments.read<Tensor>(), arguments.read<OptionalTensor>()};
  }

  /// Fills the members of `args` that these calls share. In place, the logits are written.
  template <typename Args>
  void put_into(Args& args, std::int64_t class_axis, const Options& options, bool is_in_place = false) const {
    args.logits = is_in_place ? output(logits) : input(logits, {kOp, "logits"});
    args.targets = input(targets, {kOp, "targets"});
    args.class_weight = optional_input(class_weight, {kOp, "class_weight"});
    args.class_axis = axis_of(class_axis);
    args.options = options;
  }
};

Dims row_shape_of(const TensorView& logits, int class_axis) {
  AxisSet axes;
  axes.contains[check::axis({kOp, "logits", logits}, "class_axis", class_axis)] = true;
  return reduced_shape(logits.shape, axes, false);
}

/// Makes the outputs that `wanted` names, and puts their views into `args`.
template <typename Args>
std::vector<Tensor> make_outputs(Args& args, const Dims& row_shape, DType dtype, Device device, std::int64_t wanted) {
  return make_loss_outputs(args, args.options.reduction, row_shape, dtype, device, wanted);
}

std::vector<Tensor> forward(Logits logits, OptionalTensor row_weight, OptionalTensor normalizer,
                            std::int64_t class_axis, Options options, std::int64_t wanted) {
  CrossEntropyForwardArgs args{.row_weight = optional_input(row_weight, {kOp, "row_weight"}),
                               .normalizer = optional_input(normalizer, {kOp, "normalizer"}),
                               .skips_ignored = (wanted & outputs::kOfIgnoredRows) == 0};
  logits.put_into(args, class_axis, options);
  std::vector<Tensor> tensors = make_outputs(args, row_shape_of(args.logits, args.class_axis),
                                             accumulator_dtype(args.logits.dtype), args.logits.device, wanted);
  run<cross_entropy_forward, &cross_entropy_forward_workspace_bytes>(args, args.logits.device);
  return tensors;
}

/// torch.compile needs a fixed number of results if an argument is written: (loss, lse, argmax, entropy, z_loss,
/// sum_sq, mean_logit). Results that the caller did not ask for have no elements.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward_backward(
    Logits logits, OptionalTensor row_weight, OptionalTensor normalizer, std::int64_t class_axis, Options options,
    std::int64_t wanted) {
  CrossEntropyForwardBackwardArgs args{.forward = {.row_weight = optional_input(row_weight, {kOp, "row_weight"}),
                                                   .normalizer = optional_input(normalizer, {kOp, "normalizer"}),
                                                   .skips_ignored = true}};
  logits.put_into(args.forward, class_axis, options, true);
  const TensorView& view = args.forward.logits;
  const DType dtype = accumulator_dtype(view.dtype);
  std::vector<Tensor> tensors =
      make_outputs(args.forward, row_shape_of(view, args.forward.class_axis), dtype, view.device,
                   wanted & (outputs::kLse | outputs::kArgmax | outputs::kEntropy | outputs::kZLoss | outputs::kSumSq |
                             outputs::kMeanLogit));
  run<cross_entropy_forward_backward, &cross_entropy_forward_backward_workspace_bytes>(args, view.device);
  std::size_t next = 1;
  const auto take = [&](std::int64_t bit, DType of) {
    return (wanted & bit) != 0 ? tensors[next++] : empty({0}, of, view.device);
  };
  Tensor lse = take(outputs::kLse, dtype);
  Tensor argmax = take(outputs::kArgmax, DType::int64);
  Tensor entropy = take(outputs::kEntropy, dtype);
  Tensor z_loss = take(outputs::kZLoss, dtype);
  Tensor sum_sq = take(outputs::kSumSq, dtype);
  Tensor mean_logit = take(outputs::kMeanLogit, dtype);
  return {tensors[0],        std::move(lse),    std::move(argmax),    std::move(entropy),
          std::move(z_loss), std::move(sum_sq), std::move(mean_logit)};
}

Tensor backward(Upstream upstream, Logits logits, OptionalTensor row_weight, Saved saved, std::int64_t class_axis,
                Options options, std::int64_t first_class, std::int64_t classes) {
  CrossEntropyBackwardArgs args{
      .row_weight = optional_input(row_weight, {kOp, "row_weight"}), .first_class = first_class, .classes = classes};
  logits.put_into(args, class_axis, options);
  put(args, upstream, saved, kOp);
  NewTensor grad_logits = empty_like(logits.logits, args.logits);
  args.grad_logits = grad_logits.view;
  run<cross_entropy_backward>(args, args.logits.device);  // needs no workspace
  return std::move(grad_logits.tensor);
}

void backward_in_place(Upstream upstream, Logits logits, OptionalTensor row_weight, Saved saved,
                       std::int64_t class_axis, Options options, std::int64_t first_class, std::int64_t classes) {
  CrossEntropyBackwardArgs args{
      .row_weight = optional_input(row_weight, {kOp, "row_weight"}), .first_class = first_class, .classes = classes};
  logits.put_into(args, class_axis, options, true);
  put(args, upstream, saved, kOp);
  args.grad_logits = args.logits;
  run<cross_entropy_backward>(args, args.logits.device);  // needs no workspace
}

void rescale(Tensor grad_logits, Tensor grad_loss, std::int64_t class_axis) {
  const CrossEntropyRescaleArgs args{.grad_logits = output(grad_logits),
                                     .grad_loss = input(grad_loss, {kOp, "grad_loss"}),
                                     .class_axis = axis_of(class_axis)};
  run<cross_entropy_rescale>(args, args.grad_logits.device);  // needs no workspace
}

Tensor shard_forward(Logits logits, std::int64_t class_axis, Options options, std::int64_t first_class,
                     std::int64_t classes, bool is_for_mean_logit) {
  CrossEntropyShardArgs args{.first_class = first_class, .classes = classes, .is_for_mean_logit = is_for_mean_logit};
  logits.put_into(args, class_axis, options);
  Dims shape = row_shape_of(args.logits, args.class_axis);
  shape.push_back(kCrossEntropyStatistics);
  NewTensor statistics = empty_output(shape, accumulator_dtype(args.logits.dtype), args.logits.device);
  args.statistics = statistics.view;
  run<cross_entropy_shard_forward, &cross_entropy_shard_forward_workspace_bytes>(args, args.logits.device);
  return std::move(statistics.tensor);
}

std::vector<Tensor> merge(Tensor statistics, OptionalTensor targets, OptionalTensor row_weight,
                          OptionalTensor normalizer, Options options, std::int64_t classes, bool has_class_weight,
                          std::int64_t wanted) {
  CrossEntropyMergeArgs args{.statistics = input(statistics, {kOp, "statistics"}),
                             .targets = optional_input(targets, {kOp, "targets"}),
                             .row_weight = optional_input(row_weight, {kOp, "row_weight"}),
                             .normalizer = optional_input(normalizer, {kOp, "normalizer"}),
                             .options = options,
                             .classes = classes,
                             .has_class_weight = has_class_weight,
                             .has_soft_targets = !targets.has_value(),
                             .skips_ignored = (wanted & outputs::kOfIgnoredRows) == 0};
  const Dims& shape = args.statistics.shape;
  Dims rows;
  for (int axis = 1; axis + 1 < shape.size(); ++axis) rows.push_back(shape[axis]);
  std::vector<Tensor> tensors = make_outputs(args, rows, args.statistics.dtype, args.statistics.device, wanted);
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
  // The defaults are the ones of eaves.cross_entropy, and most calls leave them: an argument that is passed costs 0.15
  // us of the host's time (PyTorch 2.13, AMD EPYC), a default almost nothing.
  library.def(
      "cross_entropy_forward(Tensor logits, Tensor targets, Tensor? class_weight=None, Tensor? row_weight=None, "
      "Tensor? normalizer=None, int class_axis=-1, SymInt ignore_index=-100, int reduction=2, float[] numbers=[], int "
      "outputs=0) -> Tensor[]");
  library.def(
      "cross_entropy_forward_backward(Tensor(a!) logits, Tensor targets, Tensor? class_weight, Tensor? row_weight, "
      "Tensor? normalizer, int class_axis, " EAVES_OPTIONS
      ", int outputs) -> (Tensor, Tensor, Tensor, Tensor, "
      "Tensor, Tensor, Tensor)");
  library.def("cross_entropy_backward(" EAVES_UPSTREAM ", " EAVES_LOGITS ", Tensor? row_weight, " EAVES_SAVED
              ", int class_axis, " EAVES_OPTIONS ", SymInt first_class=0, SymInt classes=0) -> Tensor");
  library.def("cross_entropy_backward_in_place(" EAVES_UPSTREAM
              ", Tensor(a!) logits, Tensor targets, Tensor? class_weight, Tensor? row_weight, " EAVES_SAVED
              ", int class_axis, " EAVES_OPTIONS ", SymInt first_class=0, SymInt classes=0) -> ()");
  library.def("cross_entropy_rescale(Tensor(a!) grad_logits, Tensor grad_loss, int class_axis) -> ()");
  library.def("cross_entropy_shard_forward(" EAVES_LOGITS ", int class_axis, " EAVES_OPTIONS
              ", SymInt first_class, SymInt classes, bool is_for_mean_logit=False) -> Tensor");
  library.def(
      "cross_entropy_merge(Tensor statistics, Tensor? targets, Tensor? row_weight, Tensor? normalizer, " EAVES_OPTIONS
      ", SymInt classes, bool has_class_weight, int outputs) -> Tensor[]");
}
EAVES_IMPLEMENT(eaves::binding::implement)
