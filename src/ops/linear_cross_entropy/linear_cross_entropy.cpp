// linear_cross_entropy: chooses the path of a call, its block and its device.
#include "eaves/linear_cross_entropy.h"

#include <algorithm>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/dispatch.h"
#include "core/environment.h"
#include "core/loss_checks.h"
#include "core/rows.h"
#include "cuda/exp_product.h"
#include "eaves/error.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_backend.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_plan.h"
#include "runtime/backend.h"

namespace eaves {
namespace {

using check::Argument;
using check::LossArguments;
using namespace linear_cross_entropy_tensors;
using Mode = LinearCrossEntropyMode;

constexpr const char* kRescale = "linear_cross_entropy_rescale";

// ---- the fused path ------------------------------------------------------------------------------------------------

/// True if the device has the kernels, and they take hidden and the head.
bool suits_exp_product(const LinearCrossEntropyProblem& problem) {
  if constexpr (kHasCuda) {
    // A hidden that is no matrix is copied to memory that suits the kernels.
    const auto& rows = problem.view.rows;
    const std::int64_t stride = rows.rank == 0 ? problem.features() : rows.strides[kHidden][0];
    const GemmMatrix hidden =
        is_matrix(problem.view) ? GemmMatrix{problem.hidden, stride} : GemmMatrix{nullptr, problem.features()};
    return cuda::has_exp_product(problem.device) &&
           cuda::takes_exp_product(problem.dtype, hidden, problem.head, problem.features());
  }
  return false;
}

/// The product's tanh has an error of 2.4e-7 of 1, which the soft cap multiplies: beyond a cap of 50 the call keeps its
/// logits in memory, with a more exact tanh. The other bounds keep scale / softcap and its inverse, which are float32
/// factors, within float32's range.
bool has_usual_softcap(const CrossEntropyOptions& options) {
  if (options.softcap == 0.0) return true;
  return options.softcap > 1e-6 && options.softcap <= 50.0 && options.scale / options.softcap > 1e-6 &&
         options.scale / options.softcap < 1e6;
}

/// True for any number of classes that the kernels take.
bool can_take_fused_path(const LinearCrossEntropyProblem& problem) {
  const CrossEntropyOptions& options = problem.options;
  const LossOutputs& outputs = problem.outputs;
  if (fused_product() == FusedProduct::never) return false;
  if (problem.has_soft_targets() || options.label_smoothing != 0.0) return false;
  if (!has_usual_softcap(options)) return false;
  if (outputs.argmax != nullptr || outputs.sum_sq != nullptr || outputs.mean_logit != nullptr) return false;
  if (problem.mode != Mode::forward && problem.dtype != DType::bfloat16) return false;
  if (problem.shard != nullptr && problem.mode != Mode::backward) {
    if (problem.shard->is_for_mean_logit || problem.shard->is_for_argmax_or_sum_sq) return false;
    if (problem.mode == Mode::forward_backward && problem.class_weight.data != nullptr) return false;
  }
  if (problem.classes > kMostFusedClasses || problem.rows() > kMostFusedRows) return false;
  // With fewer rows than a tile, the steps around the product take longer than passes over logits in memory.
  if (problem.rows() < cuda::kExpProductRows && !is_batch_invariant()) return false;
  return suits_exp_product(problem);
}

}  // namespace

/// float16 takes the fused path for the loss alone: its gradients and exps would leave the range of float16. A shard
/// with class weights does not take it for loss and gradients at once: the exps are written before it is known which
/// rows count for nothing.
bool suits_fused_path(const LinearCrossEntropyProblem& problem) {
  if (!can_take_fused_path(problem) || problem.classes < kLeastFusedClasses) return false;
  if (fused_product() == FusedProduct::wherever_possible) return true;
  // Loss and gradients at once read logits in memory twice for a shard, and once without shards.
  const bool is_whole = problem.shard == nullptr;
  if (is_whole && problem.mode == Mode::forward && !is_batch_invariant()) {
    const std::int64_t rows = problem.rows();
    return rows >= cuda::kExpProductClusterRows && rows * problem.classes >= kLeastFusedLogits;
  }
  const bool is_whole_at_once = is_whole && problem.mode == Mode::forward_backward;
  return problem.classes >= (is_whole_at_once ? kFasterFusedClassesAtOnce : kFasterFusedClasses);
}

/// Exps with a soft cap include the derivative of its tanh; the gradient of the entropy cannot be computed from them.
bool suits_kept_exps(const LinearCrossEntropyProblem& problem) {
  const bool has_entropy = problem.outputs.entropy != nullptr || problem.grad_entropy != nullptr;
  return problem.dtype == DType::bfloat16 && problem.classes >= kLeastFusedClasses &&
         !(problem.options.softcap != 0.0 && has_entropy) && can_take_fused_path(problem);
}

namespace {

// ---- calls ---------------------------------------------------------------------------------------------------------

/// The given gradients. All are checked before any is written.
std::vector<TensorView> check_rescaled(const LinearCrossEntropyRescaleArgs& args) {
  const Argument grad_loss{kRescale, "grad_loss", args.grad_loss};
  check::is_valid(grad_loss);
  check::has_one_element(grad_loss);
  if (args.gradients.accumulates) {
    check::fail(kRescale, "accumulates", "is set, but rescaling needs the gradients of one call alone; leave it out");
  }
  std::vector<TensorView> gradients;
  LossArguments arguments{.op = kRescale, .device = args.grad_loss.device, .reference = "grad_loss"};
  arguments.take_input(grad_loss);
  for (const Argument& gradient : {Argument{kRescale, "grad_hidden", args.gradients.grad_hidden},
                                   Argument{kRescale, "grad_head", args.gradients.grad_head},
                                   Argument{kRescale, "grad_bias", args.gradients.grad_bias}}) {
    if (!check::is_given(gradient)) continue;
    check::is_on(gradient, args.grad_loss.device, "grad_loss");
    check::has_dtype(gradient, {DType::float32, DType::float64, DType::float16, DType::bfloat16},
                     "gradients are floating-point numbers");
    check::has_dtype(grad_loss, {accumulator_dtype(gradient.view.dtype)},
                     std::string("float32, or float64 where `") + gradient.name + "` is float64");
    if (gradient.view.shape.empty()) check::fail(gradient, "has no axis, expected at least one");
    arguments.take_output(gradient);
    gradients.push_back(gradient.view);
  }
  return gradients;
}

bool is_cpu(const LinearCrossEntropyProblem& problem) { return problem.device.type == DeviceType::cpu; }

/// The size of the caller's workspace, or else the caller's limit. Shards may have different workspaces, so for shards
/// the limit alone counts.
std::size_t limit_of(const LinearCrossEntropyShape& shape, const ExecutionContext& context) {
  if (context.workspace.data != nullptr && !shape.is_shard) return context.workspace.bytes;
  return limit_without_workspace(shape);
}

/// The block of a call. On every shard it has the same rows.
LinearCrossEntropyBlock block_of(const LinearCrossEntropyShape& shape, const ExecutionContext& context) {
  const LinearCrossEntropyShape planned = shape.of_largest_shard();
  LinearCrossEntropyBlock block = plan_block(planned, limit_of(planned, context));
  block.classes = std::clamp<std::int64_t>(shape.classes, 1, block.classes);
  return block;
}

/// The bytes that the context's workspace should have, regardless of its actual size.
std::size_t stated_bytes(const LinearCrossEntropyProblem& problem) {
  if (!is_cpu(problem)) require_cuda(problem.op, problem.device);
  return workspace_bytes(problem, block_of(problem, {}));
}

void run(const LinearCrossEntropyProblem& problem, const ExecutionContext& context) {
  check::threads(problem.op, context.threads);
  if (problem.mode == Mode::backward && !problem.wants_gradients()) return;
  if (!is_cpu(problem)) require_cuda(problem.op, problem.device);
  if (!problem.has_soft_targets() && problem.rows() != 0) {
    check_targets(problem.op, problem.device, {problem.view, kTargets, kPerRow, problem.targets}, problem.row_shape,
                  problem.all_classes(), problem.options.ignore_index, context);
  }
  if (is_cpu(problem)) check::normalizer_is_not_negative(problem.op, {problem.normalizer, problem.accumulator()});
  const LinearCrossEntropyBlock block = block_of(problem, context);
  const Scratch scratch(problem.op, problem.device, workspace_bytes(problem, block), context);
  if (is_cpu(problem)) return cpu::linear_cross_entropy(problem, block, scratch.context());
  if constexpr (kHasCuda) cuda::linear_cross_entropy(problem, block, scratch.context());
}

}  // namespace

void linear_cross_entropy_forward(const LinearCrossEntropyForwardArgs& args, const ExecutionContext& context) {
  run(make_problem(args), context);
}

void linear_cross_entropy_backward(const LinearCrossEntropyBackwardArgs& args, const ExecutionContext& context) {
  run(make_problem(args), context);
}

void linear_cross_entropy_forward_backward(const LinearCrossEntropyForwardBackwardArgs& args,
                                           const ExecutionContext& context) {
  run(make_problem(args), context);
}

void linear_cross_entropy_shard_forward(const LinearCrossEntropyShardForwardArgs& args,
                                        const ExecutionContext& context) {
  run(make_problem(args), context);
}

void linear_cross_entropy_rescale(const LinearCrossEntropyRescaleArgs& args, const ExecutionContext& context) {
  check::threads(kRescale, context.threads);
  for (const TensorView& gradient : check_rescaled(args)) {
    cross_entropy_rescale({.grad_logits = gradient, .grad_loss = args.grad_loss}, context);
  }
}

std::size_t linear_cross_entropy_forward_workspace_bytes(const LinearCrossEntropyForwardArgs& args,
                                                         const ExecutionContext&) {
  return stated_bytes(make_problem(args));
}

std::size_t linear_cross_entropy_backward_workspace_bytes(const LinearCrossEntropyBackwardArgs& args,
                                                          const ExecutionContext&) {
  return stated_bytes(make_problem(args));
}

std::size_t linear_cross_entropy_forward_backward_workspace_bytes(const LinearCrossEntropyForwardBackwardArgs& args,
                                                                  const ExecutionContext&) {
  return stated_bytes(make_problem(args));
}

std::size_t linear_cross_entropy_shard_forward_workspace_bytes(const LinearCrossEntropyShardForwardArgs& args,
                                                               const ExecutionContext&) {
  return stated_bytes(make_problem(args));
}

LinearCrossEntropyAlgorithm linear_cross_entropy_algorithm(const LinearCrossEntropyAlgorithmArgs& args) {
  using enum LinearCrossEntropyAlgorithm;
  if (args.features < 1 || args.classes < 1 || !is_floating_point(args.dtype)) {
    check::fail("linear_cross_entropy_algorithm", "hidden",
                "has " + std::to_string(args.features) + " features in " + name_of(args.dtype) + " for " +
                    std::to_string(args.classes) +
                    " classes, expected a floating-point type and at least one feature and one class");
  }
  const bool has_one_factor = args.reduction != Reduction::none || args.has_grad_hidden_alone;
  const bool is_possible = has_one_factor && args.dtype != DType::float16;
  if (!is_possible || args.has_output_gradients || args.accumulates) return recompute;
  if (args.is_shard || args.rows < 0) return args.workspace_limit == 0 ? speed : recompute;
  LinearCrossEntropyProblem problem{.mode = Mode::forward_backward};
  problem.view.row_count = args.rows;
  problem.view.column_count = args.features;
  problem.device = args.device;
  problem.dtype = problem.grad_hidden_dtype = problem.grad_head_dtype = args.dtype;
  problem.head = {nullptr, args.is_head_transposed ? args.classes : args.features, args.is_head_transposed};
  problem.classes = args.classes;
  problem.targets.dtype = args.has_soft_targets ? problem.accumulator() : DType::int64;
  problem.options.reduction = Reduction::sum;
  problem.skips_ignored = is_cpu(problem);
  problem.workspace_limit = args.workspace_limit;
  problem.is_fused = suits_fused_path(problem);
  LinearCrossEntropyShape shape = problem;
  shape.has_grad_hidden = true;
  const std::int64_t enough = std::min(shape.rows, policy_of(shape.device).few_rows);
  return workspace_bytes(shape, {enough, shape.classes}) <= limit_without_workspace(shape) ? speed : recompute;
}

}  // namespace eaves
