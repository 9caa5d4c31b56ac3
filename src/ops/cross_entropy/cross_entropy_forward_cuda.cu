// The forward of cross_entropy on a GPU: one pass over the logits, and a small kernel that adds up the rows if the loss
// is reduced. The pass is PlainLoss, the pass of logsumexp, or FullLoss of cross_entropy_full.cuh.
#include "core/dispatch.h"
#include "cuda/device.h"
#include "ops/cross_entropy/cross_entropy_backend.h"
#include "ops/cross_entropy/cross_entropy_plain.cuh"

namespace eaves::cuda {
namespace {

constexpr const char* kOp = "cross_entropy_forward";

ReductionPlan plan_of(const CrossEntropyInputs& inputs) {
  return plan_reduction(inputs.view, inputs.logits, inputs.logits_dtype, true, inputs.device);
}

LossWorkspace workspace_of(const CrossEntropyForwardProblem& problem) {
  const CrossEntropyInputs& inputs = problem.inputs;
  const std::int64_t rows = inputs.view.row_count;
  return {inputs.options.reduction, rows, size_of(accumulator_dtype(inputs.logits_dtype)),
          suits_plain_loss(inputs) ? plan_of(inputs).workspace_bytes(rows, sizeof(SoftmaxState<float>))
                                   : full_workspace_bytes(inputs)};
}

template <typename T>
void forward(const CrossEntropyForwardProblem& problem, const ExecutionContext& context) {
  using A = Accumulator<T>;
  const CrossEntropyInputs& inputs = problem.inputs;
  const LossWorkspace workspace = workspace_of(problem);
  void* const memory = context.workspace.data;
  void* const states = workspace.other(memory);
  const RowOutputs<A> outputs =
      row_outputs<A>(problem.outputs, inputs.options.reduction, inputs.view.row_count, workspace.arrays(memory));
  if (inputs.view.row_count > 0 && !suits_plain_loss(inputs)) {
    reduce_full<T>(kOp, inputs, problem.skips_ignored, outputs, nullptr, states, context.stream);
  } else if (inputs.view.row_count > 0) {
    if constexpr (!std::is_same_v<T, double>) {
      reduce_rows<T>(kOp, plan_of(inputs), inputs.view, inputs.device, states, context.stream,
                     [&]<typename View>(const View& view) {
                       return PlainLoss<T, View>{{LossInputs<T, View>(view, inputs), outputs, !problem.skips_ignored}};
                     });
    }
  }
  reduce_losses<A>(kOp, inputs, outputs, problem.normalizer, problem.outputs, workspace.sums(memory), context.stream);
}

}  // namespace

std::size_t cross_entropy_workspace_bytes(const CrossEntropyForwardProblem& problem) {
  return workspace_of(problem).bytes();
}

void cross_entropy(const CrossEntropyForwardProblem& problem, const ExecutionContext& context) {
  const DeviceGuard guard(problem.inputs.device);
  dispatch_floating_point(problem.inputs.logits_dtype, [&]<typename T>() { forward<T>(problem, context); });
}

}  // namespace eaves::cuda
