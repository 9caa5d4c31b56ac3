// linear_cross_entropy for torch: allocates outputs from torch's allocator, then calls the core. The gradients are in
// python/eaves/_autograd, the fake implementations and batching rules are in _torch/linear_cross_entropy_rules.py.
//
// The gradients of hidden, head and bias are a set of bits, as outputs are. If a call returns both, the gradients
// follow the outputs in the list.
#include "eaves/linear_cross_entropy.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
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

constexpr const char* kOp = "linear_cross_entropy";

// _small_workspace() of python/eaves/_calls/linear_cross_entropy.py has the same numbers.
static_assert(linear_cross_entropy_small_workspace(65536) == std::size_t{160} << 20 &&
              linear_cross_entropy_small_workspace(1 << 20) == (std::size_t{24} << 20) + (std::size_t{1} << 30));

/// python/eaves/_torch/linear_cross_entropy_rules.py has the same numbers.
namespace gradients {
constexpr std::int64_t kHidden = 1;
constexpr std::int64_t kHead = 2;
constexpr std::int64_t kBias = 4;
constexpr std::int64_t kWideHead = 8;  ///< no gradient: the head's gradient has the dtype of the loss
}  // namespace gradients

#define EAVES_INPUTS \
  "Tensor hidden, Tensor head, Tensor? bias, Tensor targets, Tensor? class_weight, Tensor? row_weight"
#define EAVES_CALL EAVES_OPTIONS ", bool skip_ignored, SymInt workspace_limit"

struct Inputs {
  Tensor hidden, head;
  OptionalTensor bias;
  Tensor targets;
  OptionalTensor class_weight, row_weight;

  static Inputs read(Arguments& arguments) {
    return {arguments.read<Tensor>(), arguments.read<Tensor>(),         arguments.read<OptionalTensor>(),
            arguments.read<Tensor>(), arguments.read<OptionalTensor>(), arguments.read<OptionalTensor>()};
  }
};

struct CallOptions {
  Options of_loss;
  bool skips_ignored;
  std::int64_t workspace_limit;

  static CallOptions read(Arguments& arguments) {
    return {arguments.read<Options>(), arguments.read<bool>(), arguments.read<std::int64_t>()};
  }
};

LinearCrossEntropyInputs inputs_of(const Inputs& inputs, const CallOptions& options) {
  return {.hidden = input(inputs.hidden, {kOp, "hidden"}),
          .head = input(inputs.head, {kOp, "head"}),
          .bias = optional_input(inputs.bias, {kOp, "bias"}),
          .targets = input(inputs.targets, {kOp, "targets"}),
          .class_weight = optional_input(inputs.class_weight, {kOp, "class_weight"}),
          .row_weight = optional_input(inputs.row_weight, {kOp, "row_weight"}),
          .options = options.of_loss,
          .skips_ignored = options.skips_ignored,
          .workspace_limit = static_cast<std::size_t>(std::max<std::int64_t>(options.workspace_limit, 0))};
}

Dims row_shape_of(const TensorView& hidden) {
  if (hidden.shape.size() == 0) check::fail({kOp, "hidden", hidden}, "has no axis, expected [..., features]");
  AxisSet features;
  features.contains[hidden.shape.size() - 1] = true;
  return reduced_shape(hidden.shape, features, false);
}

std::vector<Tensor> make_outputs(LinearCrossEntropyForwardArgs& args, std::int64_t wanted) {
  const TensorView& hidden = args.inputs.hidden;
  return make_loss_outputs(args.outputs, args.inputs.options.reduction, row_shape_of(hidden),
                           accumulator_dtype(hidden.dtype), hidden.device, wanted);
}

DType bias_gradient_dtype(const LinearCrossEntropyInputs& inputs) {
  return inputs.bias.is_present && inputs.bias.dtype == inputs.hidden.dtype ? inputs.hidden.dtype
                                                                            : accumulator_dtype(inputs.hidden.dtype);
}

/// Makes the gradients that `wanted` names, appends them to `tensors`, and returns their views.
LinearCrossEntropyGradients make_gradients(const Tensor& hidden, const LinearCrossEntropyInputs& inputs,
                                           std::int64_t wanted, std::vector<Tensor>& tensors) {
  LinearCrossEntropyGradients gradients;
  const auto take = [&](TensorView& view, NewTensor made) {
    tensors.push_back(std::move(made.tensor));
    view = made.view;
  };
  const DType wide = accumulator_dtype(inputs.hidden.dtype);
  const Device device = inputs.hidden.device;
  if (wanted & gradients::kHidden) take(gradients.grad_hidden, empty_like(hidden, inputs.hidden));
  if (wanted & gradients::kHead) {
    const DType dtype = wanted & gradients::kWideHead ? wide : inputs.head.dtype;
    take(gradients.grad_head, empty_output(inputs.head.shape, dtype, device));
  }
  if (wanted & gradients::kBias) {
    take(gradients.grad_bias, empty_output(inputs.bias.shape, bias_gradient_dtype(inputs), device));
  }
  return gradients;
}

/// Scratch memory is torch's, also on the CPU, so that torch's memory counters include it. For a few numbers the
/// question for its size would cost more than the memory.
template <auto* function, auto workspace_bytes, typename Args>
void run_counted(const Args& args, const LinearCrossEntropyInputs& inputs) {
  constexpr std::int64_t kFew = 1 << 16;
  const Device device = inputs.hidden.device;
  std::int64_t logits = inputs.head.shape[0];
  for (const std::int64_t size : row_shape_of(inputs.hidden)) logits *= size;
  const bool are_few = logits < kFew && inputs.hidden.element_count() < kFew;
  if (device.type == DeviceType::cpu && are_few) return run<function>(args, device);
  run<function, workspace_bytes, true>(args, device);
}

std::vector<Tensor> forward(Inputs inputs, OptionalTensor normalizer, CallOptions options, std::int64_t wanted) {
  LinearCrossEntropyForwardArgs args{.inputs = inputs_of(inputs, options),
                                     .normalizer = optional_input(normalizer, {kOp, "normalizer"})};
  std::vector<Tensor> tensors = make_outputs(args, wanted);
  run_counted<linear_cross_entropy_forward, &linear_cross_entropy_forward_workspace_bytes>(args, args.inputs);
  return tensors;
}

/// Returns the outputs, and behind them the tensor that the forward keeps for backward_kept(), of at most `most_bytes`;
/// a negative `most_bytes` keeps all rows.
std::vector<Tensor> forward_keep(Inputs inputs, OptionalTensor normalizer, CallOptions options, std::int64_t wanted,
                                 std::int64_t most_bytes) {
  LinearCrossEntropyForwardArgs args{.inputs = inputs_of(inputs, options),
                                     .normalizer = optional_input(normalizer, {kOp, "normalizer"})};
  std::vector<Tensor> tensors = make_outputs(args, wanted);
  const LinearCrossEntropyKept kept = linear_cross_entropy_kept(
      args, most_bytes < 0 ? std::numeric_limits<std::size_t>::max() : static_cast<std::size_t>(most_bytes));
  NewTensor made = empty_output({kept.rows, kept.columns}, kept.dtype, args.inputs.hidden.device);
  args.kept = made.view;
  tensors.push_back(std::move(made.tensor));
  run_counted<linear_cross_entropy_forward, &linear_cross_entropy_forward_workspace_bytes>(args, args.inputs);
  return tensors;
}

/// Returns the outputs of the forward, and behind them the gradients.
std::vector<Tensor> forward_backward(Inputs inputs, OptionalTensor normalizer, CallOptions options, std::int64_t wanted,
                                     std::int64_t wanted_gradients) {
  LinearCrossEntropyForwardBackwardArgs args{
      .forward = {.inputs = inputs_of(inputs, options), .normalizer = optional_input(normalizer, {kOp, "normalizer"})}};
  std::vector<Tensor> tensors = make_outputs(args.forward, wanted);
  args.gradients = make_gradients(inputs.hidden, args.forward.inputs, wanted_gradients, tensors);
  run_counted<linear_cross_entropy_forward_backward, &linear_cross_entropy_forward_backward_workspace_bytes>(
      args, args.forward.inputs);
  return tensors;
}

LinearCrossEntropyBackwardArgs backward_args(const Upstream& upstream, const Inputs& inputs, const Saved& saved,
                                             const CallOptions& options) {
  LinearCrossEntropyBackwardArgs args{.inputs = inputs_of(inputs, options)};
  put(args, upstream, saved, kOp);
  return args;
}

void run_backward(const LinearCrossEntropyBackwardArgs& args) {
  run_counted<linear_cross_entropy_backward, &linear_cross_entropy_backward_workspace_bytes>(args, args.inputs);
}

/// Gradients that the caller did not ask for have no elements: torch's older batching (is_grads_batched) takes no
/// lists.
std::tuple<Tensor, Tensor, Tensor> gradients_of(LinearCrossEntropyBackwardArgs& args, const Inputs& inputs,
                                                std::int64_t wanted_gradients) {
  std::vector<Tensor> made;
  args.gradients = make_gradients(inputs.hidden, args.inputs, wanted_gradients, made);
  run_backward(args);
  std::size_t next = 0;
  const auto take = [&](std::int64_t bit) {
    return (wanted_gradients & bit) != 0 ? made[next++]
                                         : empty({0}, args.inputs.hidden.dtype, args.inputs.hidden.device);
  };
  Tensor grad_hidden = take(gradients::kHidden);
  Tensor grad_head = take(gradients::kHead);
  Tensor grad_bias = take(gradients::kBias);
  return {std::move(grad_hidden), std::move(grad_head), std::move(grad_bias)};
}

std::tuple<Tensor, Tensor, Tensor> backward(Upstream upstream, Inputs inputs, Saved saved, CallOptions options,
                                            std::int64_t wanted_gradients) {
  LinearCrossEntropyBackwardArgs args = backward_args(upstream, inputs, saved, options);
  return gradients_of(args, inputs, wanted_gradients);
}

std::tuple<Tensor, Tensor, Tensor> backward_kept(Tensor kept, Upstream upstream, Inputs inputs, Saved saved,
                                                 CallOptions options, std::int64_t wanted_gradients) {
  LinearCrossEntropyBackwardArgs args = backward_args(upstream, inputs, saved, options);
  args.kept = output(kept);
  return gradients_of(args, inputs, wanted_gradients);
}

/// Adds the gradient of the head to the caller's tensor. torch.compile needs a fixed number of results from an operator
/// that writes an argument, so gradients that the caller did not ask for have no elements.
std::tuple<Tensor, Tensor> backward_accumulate(Tensor grad_head, Upstream upstream, Inputs inputs, Saved saved,
                                               CallOptions options, std::int64_t wanted_gradients,
                                               OptionalTensor kept) {
  LinearCrossEntropyBackwardArgs args = backward_args(upstream, inputs, saved, options);
  if (kept.has_value()) args.kept = output(*kept);
  const Device device = args.inputs.hidden.device;
  NewTensor grad_hidden = wanted_gradients & gradients::kHidden ? empty_like(inputs.hidden, args.inputs.hidden)
                                                                : empty_output({0}, args.inputs.hidden.dtype, device);
  const bool has_bias = (wanted_gradients & gradients::kBias) != 0;
  NewTensor grad_bias =
      empty_output(has_bias ? args.inputs.bias.shape : Dims{0}, bias_gradient_dtype(args.inputs), device);
  if (wanted_gradients & gradients::kHidden) args.gradients.grad_hidden = grad_hidden.view;
  if (has_bias) {
    torch::stable::zero_(grad_bias.tensor);  // `accumulates` covers head and bias, so the core adds to this one too
    args.gradients.grad_bias = grad_bias.view;
  }
  args.gradients.grad_head = output(grad_head);
  args.gradients.accumulates = true;
  run_backward(args);
  return {std::move(grad_hidden.tensor), std::move(grad_bias.tensor)};
}

// ---- shards: for python/eaves/_parallel/linear_cross_entropy.py, which exchanges their statistics -------------------

#define EAVES_SHARD \
  "SymInt first_class, SymInt classes, SymInt most_classes, bool is_for_mean_logit, bool is_for_argmax_or_sum_sq"
#define EAVES_WRITTEN "Tensor(a!)? grad_hidden, Tensor(b!)? grad_head, Tensor(c!)? grad_bias"

struct Shard {
  std::int64_t first_class, classes, most_classes;
  bool is_for_mean_logit, is_for_argmax_or_sum_sq;

  static Shard read(Arguments& arguments) {
    return {arguments.read<std::int64_t>(), arguments.read<std::int64_t>(), arguments.read<std::int64_t>(),
            arguments.read<bool>(), arguments.read<bool>()};
  }

  LinearCrossEntropyShard of_core() const {
    return {.first_class = first_class,
            .classes = classes,
            .most_classes = most_classes,
            .is_for_mean_logit = is_for_mean_logit,
            .is_for_argmax_or_sum_sq = is_for_argmax_or_sum_sq};
  }
};

/// A function made by Python's ctypes, by its address; 0: none.
std::function<void(std::int64_t, std::int64_t)> callback(std::int64_t address) {
  if (address == 0) return {};
  return reinterpret_cast<void (*)(std::int64_t, std::int64_t)>(address);
}

struct Written {
  OptionalTensor grad_hidden, grad_head, grad_bias;

  static Written read(Arguments& arguments) {
    return {arguments.read<OptionalTensor>(), arguments.read<OptionalTensor>(), arguments.read<OptionalTensor>()};
  }

  LinearCrossEntropyGradients views() const {
    const auto view = [](const OptionalTensor& tensor) { return tensor.has_value() ? output(*tensor) : TensorView{}; };
    return {.grad_hidden = view(grad_hidden), .grad_head = view(grad_head), .grad_bias = view(grad_bias)};
  }
};

void shard_forward(Inputs inputs, CallOptions options, Shard shard, Tensor statistics) {
  const LinearCrossEntropyShardForwardArgs args{
      .inputs = inputs_of(inputs, options), .shard = shard.of_core(), .statistics = output(statistics)};
  run<linear_cross_entropy_shard_forward, &linear_cross_entropy_shard_forward_workspace_bytes, true>(
      args, args.inputs.hidden.device);
}

/// The gradients for an upstream gradient of 1. The loss follows from the statistics.
void shard_forward_backward(Written written, Inputs inputs, OptionalTensor normalizer, CallOptions options, Shard shard,
                            std::int64_t shards, Tensor statistics, Tensor gathered, std::int64_t gather,
                            std::int64_t finish_gather, std::int64_t grad_hidden_is_complete) {
  LinearCrossEntropyForwardBackwardArgs args{
      .forward = {.inputs = inputs_of(inputs, options), .normalizer = optional_input(normalizer, {kOp, "normalizer"})},
      .gradients = written.views(),
      .shard = shard.of_core()};
  const std::vector<Tensor> outputs =
      make_outputs(args.forward, outputs::kLse | outputs::kSplitLse | outputs::kTargetMass);
  args.shard.shards = shards;
  args.shard.statistics = output(statistics);
  args.shard.gathered = output(gathered);
  args.shard.gather = callback(gather);
  args.shard.finish_gather = callback(finish_gather);
  args.shard.grad_hidden_is_complete = callback(grad_hidden_is_complete);
  run<linear_cross_entropy_forward_backward, &linear_cross_entropy_forward_backward_workspace_bytes, true>(
      args, args.forward.inputs.hidden.device);
}

void shard_backward(Written written, bool accumulates, Upstream upstream, Inputs inputs, Saved saved,
                    CallOptions options, Shard shard, std::int64_t grad_hidden_is_complete) {
  LinearCrossEntropyBackwardArgs args = backward_args(upstream, inputs, saved, options);
  args.gradients = written.views();
  args.gradients.accumulates = accumulates;
  args.shard = shard.of_core();
  args.shard.grad_hidden_is_complete = callback(grad_hidden_is_complete);
  run<linear_cross_entropy_backward, &linear_cross_entropy_backward_workspace_bytes, true>(args,
                                                                                           args.inputs.hidden.device);
}

void rescale(Written written, Tensor grad_loss) {
  const LinearCrossEntropyRescaleArgs args{.gradients = written.views(),
                                           .grad_loss = input(grad_loss, {kOp, "grad_loss"})};
  run<linear_cross_entropy_rescale>(args, args.grad_loss.device);  // needs no workspace
}

void implement(Library& library) {
  library.impl("linear_cross_entropy_forward", EAVES_BOX(forward));
  library.impl("linear_cross_entropy_forward_keep", EAVES_BOX(forward_keep));
  library.impl("linear_cross_entropy_backward_kept", EAVES_BOX(backward_kept));
  library.impl("linear_cross_entropy_forward_backward", EAVES_BOX(forward_backward));
  library.impl("linear_cross_entropy_backward", EAVES_BOX(backward));
  library.impl("linear_cross_entropy_backward_accumulate", EAVES_BOX(backward_accumulate));
  library.impl("linear_cross_entropy_shard_forward", EAVES_BOX(shard_forward));
  library.impl("linear_cross_entropy_shard_forward_backward", EAVES_BOX(shard_forward_backward));
  library.impl("linear_cross_entropy_shard_backward", EAVES_BOX(shard_backward));
  library.impl("linear_cross_entropy_rescale", EAVES_BOX(rescale));
}

}  // namespace
}  // namespace eaves::binding

STABLE_TORCH_LIBRARY_FRAGMENT(eaves, library) {
  library.def("linear_cross_entropy_forward(" EAVES_INPUTS ", Tensor? normalizer, " EAVES_CALL
              ", int outputs) -> Tensor[]");
  library.def("linear_cross_entropy_forward_backward(" EAVES_INPUTS ", Tensor? normalizer, " EAVES_CALL
              ", int outputs, int gradients) -> Tensor[]");
  library.def("linear_cross_entropy_backward(" EAVES_UPSTREAM ", " EAVES_INPUTS ", " EAVES_SAVED ", " EAVES_CALL
              ", int gradients) -> (Tensor, Tensor, Tensor)");
  library.def("linear_cross_entropy_forward_keep(" EAVES_INPUTS ", Tensor? normalizer, " EAVES_CALL
              ", int outputs, SymInt most_bytes) -> Tensor[]");
  library.def("linear_cross_entropy_backward_kept(Tensor(a!) kept, " EAVES_UPSTREAM ", " EAVES_INPUTS ", " EAVES_SAVED
              ", " EAVES_CALL ", int gradients) -> (Tensor, Tensor, Tensor)");
  library.def("linear_cross_entropy_backward_accumulate(Tensor(a!) grad_head, " EAVES_UPSTREAM ", " EAVES_INPUTS
              ", " EAVES_SAVED ", " EAVES_CALL ", int gradients, Tensor(b!)? kept=None) -> (Tensor, Tensor)");
  library.def("linear_cross_entropy_shard_forward(" EAVES_INPUTS ", " EAVES_CALL ", " EAVES_SHARD
              ", Tensor(a!) statistics) -> ()");
  library.def("linear_cross_entropy_shard_forward_backward(" EAVES_WRITTEN ", " EAVES_INPUTS
              ", Tensor? normalizer, " EAVES_CALL ", " EAVES_SHARD
              ", SymInt shards, Tensor(d!) statistics, Tensor(e!) gathered, int gather, "
              "int finish_gather, int grad_hidden_is_complete) -> ()");
  library.def("linear_cross_entropy_shard_backward(" EAVES_WRITTEN ", bool accumulates, " EAVES_UPSTREAM
              ", " EAVES_INPUTS ", " EAVES_SAVED ", " EAVES_CALL ", " EAVES_SHARD
              ", int grad_hidden_is_complete) -> ()");
  library.def("linear_cross_entropy_rescale(" EAVES_WRITTEN ", Tensor grad_loss) -> ()");
}
EAVES_IMPLEMENT(eaves::binding::implement)
