// The two halves of a forward over shards of the vocabulary: the statistics of a shard, and the loss from the
// statistics of all shards.
#include "core/dispatch.h"
#include "cuda/device.h"
#include "ops/cross_entropy/cross_entropy_backend.h"
#include "ops/cross_entropy/cross_entropy_loss.cuh"
#include "ops/cross_entropy/cross_entropy_statistics.cuh"

namespace eaves::cuda {
namespace {

constexpr const char* kShardForward = "cross_entropy_shard_forward";
constexpr const char* kMerge = "cross_entropy_merge";

/// One thread for each row merges the statistics of the shards, in the order of the shards.
template <typename A, typename View>
__global__ void __launch_bounds__(128) merge_shards(LossInputs<A, View> in, const A* statistics, std::int64_t shards,
                                                    bool reads_ignored, RowOutputs<A> outputs) {
  let_next_kernel_start();
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= in.view.row_count) return;
  const auto at = in.view.rows.offsets(row);
  ClassStatistics<A> merged;
  TargetClass<A> target_class;
  for (std::int64_t shard = 0; shard < shards; ++shard) {
    const A* from = statistics + (shard * in.view.row_count + at.of[kPerRow]) * kCrossEntropyStatistics;
    merged = MergeStatistics{}(merged, stored_statistics<A>(from));
    target_class.logit += from[int(CrossEntropyStatistic::target_logit)];
    target_class.weight += from[int(CrossEntropyStatistic::target_weight)];
  }
  const std::int64_t target = in.target_at(at.of[kTargets]);
  if (!in.terms.is_ignored(target) && !in.terms.is_in_range(target)) target_class.weight = A(1);
  write_row(outputs, at.of[kPerRow], merged, target, target_class, in, reads_ignored || !in.terms.is_ignored(target));
}

template <typename A>
void merge_all(const CrossEntropyMergeProblem& problem, const ExecutionContext& context) {
  const CrossEntropyInputs& inputs = problem.inputs;
  const std::int64_t rows = inputs.view.row_count;
  const LossWorkspace workspace(inputs.options.reduction, rows, sizeof(A), 0);
  void* const memory = context.workspace.data;
  const RowOutputs<A> outputs =
      row_outputs<A>(problem.outputs, inputs.options.reduction, rows, workspace.arrays(memory));
  if (rows > 0) {
    LossInputs<A, CrossEntropyView> in(inputs.view, inputs);
    in.terms.has_weight = problem.has_weight;
    launch(kMerge, merge_shards<A, CrossEntropyView>,
           {.blocks = ceil_divide(rows, 128), .threads = 128, .stream = context.stream}, in,
           static_cast<const A*>(problem.statistics), problem.shards, !problem.skips_ignored, outputs);
  }
  reduce_losses<A>(kMerge, inputs, outputs, problem.normalizer, problem.outputs, workspace.sums(memory),
                   context.stream);
}

}  // namespace

std::size_t cross_entropy_workspace_bytes(const CrossEntropyShardProblem& problem) {
  return full_workspace_bytes(problem.inputs);
}

void cross_entropy(const CrossEntropyShardProblem& problem, const ExecutionContext& context) {
  const DeviceGuard guard(problem.inputs.device);
  dispatch_floating_point(problem.inputs.logits_dtype, [&]<typename T>() {
    reduce_full<T>(kShardForward, problem.inputs, false, {}, problem.statistics, context.workspace.data,
                   context.stream);
  });
}

std::size_t cross_entropy_workspace_bytes(const CrossEntropyMergeProblem& problem) {
  const CrossEntropyInputs& inputs = problem.inputs;
  return LossWorkspace(inputs.options.reduction, inputs.view.row_count, size_of(inputs.logits_dtype), 0).bytes();
}

void cross_entropy(const CrossEntropyMergeProblem& problem, const ExecutionContext& context) {
  const DeviceGuard guard(problem.inputs.device);
  if (problem.inputs.logits_dtype == DType::float64) return merge_all<double>(problem, context);
  merge_all<float>(problem, context);
}

}  // namespace eaves::cuda
