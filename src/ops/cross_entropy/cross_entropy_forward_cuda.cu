// The forward of cross_entropy on a GPU: one pass over the logits, a small kernel that adds up the rows where the loss
// is reduced. Also the two halves of a forward over shards, which are the same pass and the same end.
#include <algorithm>

#include "core/dispatch.h"
#include "cuda/device.h"
#include "ops/cross_entropy/cross_entropy_backend.h"
#include "ops/cross_entropy/cross_entropy_rows.cuh"

namespace eaves::cuda {
namespace {

constexpr const char* kForward = "cross_entropy_forward";
constexpr const char* kShardForward = "cross_entropy_shard_forward";
constexpr const char* kMerge = "cross_entropy_merge";

ReductionPlan plan_of(const CrossEntropyInputs& inputs) {
  return plan_reduction(inputs.view, inputs.logits, inputs.logits_dtype, inputs.logits_dtype != DType::float64,
                        inputs.device);
}

std::size_t state_bytes(DType dtype, bool is_plain) {
  if (is_plain) return sizeof(SoftmaxState<float>);
  return dtype == DType::float64 ? sizeof(ClassStatistics<double>) : sizeof(ClassStatistics<float>);
}

LossWorkspace workspace_of(const CrossEntropyForwardProblem& problem, const ReductionPlan& plan) {
  const CrossEntropyInputs& inputs = problem.inputs;
  const std::int64_t rows = inputs.view.row_count;
  const std::size_t pieces = plan.workspace_bytes(rows, state_bytes(inputs.logits_dtype, is_plain(problem)));
  return {inputs.options.reduction, rows, size_of(accumulator_dtype(inputs.logits_dtype)), pieces};
}

// ---- rows that share the weights of the classes ---------------------------------------------------------------------

/// How many rows a block takes at a time, so that it loads each weight once for all of them: the weights of every row
/// by itself would be as many bytes from L2 as the logits.
constexpr int kWeightedRows = 2;
constexpr int kWeightedVectors = 2;  // of each of them, that a thread takes at a time; the kernel is written for 2
constexpr int kWeightedThreads = 256;
constexpr int kWeightedSlots = 4;                    // for batches, of which all but one are on their way
constexpr int kWeightedBlocks = 3;                   // of a multiprocessor
constexpr std::int64_t kFewestWeightedBytes = 8192;  // of a row: that many threads have work

template <typename T>
using WeightedRing = VectorRing<T, kWeightedThreads, kWeightedRows * kWeightedVectors, kWeightedSlots>;

template <typename T, typename View, bool kIsCapped>
__global__ void __launch_bounds__(kWeightedThreads, kWeightedBlocks)
    weighted_rows(const __grid_constant__ FullLoss<T, View> loss) {
  using Loss = FullLoss<T, View>;
  constexpr int kRows = kWeightedRows;
  constexpr int kVectors = kWeightedVectors;
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kStep = kWeightedThreads * kSize;
  let_next_kernel_start();
  const LossInputs<T, View>& in = loss.rows.in;
  const std::int64_t first_row = std::int64_t{blockIdx.x} * kRows;
  const int row_count = static_cast<int>(min(std::int64_t{kRows}, in.view.row_count - first_row));
  std::int64_t logits_rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    // Rows behind the last are copies of it, and are not written.
    logits_rows[r] = in.view.rows.offsets(first_row + min(r, row_count - 1)).of[kLogits];
  }
  // A ring of batches of all rows, in each the vectors of one row after those of the other. What is not there is not
  // copied.
  extern __shared__ uint4 storage[];
  WeightedRing<T> ring(storage);
  const Vector<T>* next[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    next[r] = reinterpret_cast<const Vector<T>*>(in.logits + logits_rows[r]) + threadIdx.x;
  }
  const int vectors = static_cast<int>(in.view.column_count / kSize);
  int left_to_send = vectors - static_cast<int>(threadIdx.x);
  const auto send = [&] {
    ring.send([&](auto address) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (left_to_send <= v * kWeightedThreads) return;
#pragma unroll
        for (int r = 0; r < kRows; ++r) copy_ahead(address(r * kVectors + v), next[r] + v * kWeightedThreads);
      }
    });
    left_to_send -= kVectors * kWeightedThreads;
#pragma unroll
    for (int r = 0; r < kRows; ++r) next[r] += kVectors * kWeightedThreads;
  };

  typename Loss::Running running[kRows];
  const auto take = [&]<int kTaken>(int column, std::integral_constant<int, kTaken>) {
    float u[kTaken][kSize];
    float masses[kTaken];
#pragma unroll
    for (int v = 0; v < kTaken; ++v) {
      in.weight.load_aligned(column + v * kStep, u[v]);
      masses[v] = total_of(u[v]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Vector<T> batch[kTaken];
#pragma unroll
      for (int v = 0; v < kTaken; ++v) batch[v] = ring.read(r * kVectors + v);
      const auto loaded = [&](int v, float(&to)[kSize]) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) to[i] = u[v][i];
        return masses[v];
      };
      if (!take_whole<kIsCapped, Measure::loaded>(running[r], batch, column, kStep, in.terms, loss.wanted, loaded)) {
        loss.template take_again<kIsCapped, Measure::loaded>(running[r], BatchPlace{column, kStep, kTaken, kSize},
                                                             logits_rows[r], 0);
      }
    }
  };
#pragma unroll
  for (int i = 0; i < kWeightedSlots - 1; ++i) send();
  int column = static_cast<int>(threadIdx.x) * kSize;
  const int whole = vectors * kSize;
#pragma unroll 1
  for (; column < whole; column += kVectors * kStep) {
    ring.wait();
    send();
    if (column + (kVectors - 1) * kStep < whole) {
      take(column, std::integral_constant<int, kVectors>{});
    } else {
      take(column, std::integral_constant<int, 1>{});  // all that is there: kVectors is 2
    }
    ring.go_on();
  }
  if (whole + threadIdx.x < in.view.column_count) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      loss.template take_again<kIsCapped, Measure::loaded>(running[r], BatchPlace{whole + threadIdx.x, 1, 1, 1},
                                                           logits_rows[r], 0);
    }
  }

  ClassStatistics<float> mine;  // of row `threadIdx.x`
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r > 0) __syncthreads();  // the memory of the reduction before is free again
    const ClassStatistics<float> state =
        reduce_block<kWeightedThreads>(finished(running[r], in.terms), MergeStatistics{});
    if (threadIdx.x == r) mine = state;
  }
  if (threadIdx.x < row_count) loss.finish(first_row + threadIdx.x, mine, loss.prepare(first_row + threadIdx.x));
}

/// Can `weighted_rows` take them?
bool share_weights(const CrossEntropyForwardProblem& problem, const ReductionPlan& plan) {
  const CrossEntropyInputs& inputs = problem.inputs;
  const auto element_bytes = static_cast<std::int64_t>(size_of(inputs.logits_dtype));
  if (inputs.logits_dtype == DType::float64 || !wanted_statistics(problem).linear || inputs.weight == nullptr ||
      inputs.has_soft_targets() || plan.layout != RowLayout::contiguous || plan.split.pieces > 1 ||
      inputs.view.column_count * element_bytes < kFewestWeightedBytes || inputs.view.column_count > INT32_MAX / 2) {
    return false;
  }
  // Vectors of the logits and of the weights start at the same columns, in every row.
  if (reinterpret_cast<std::uintptr_t>(inputs.logits) % 16 != 0 ||
      reinterpret_cast<std::uintptr_t>(inputs.weight) % 16 != 0) {
    return false;
  }
  const auto& rows = inputs.view.rows;
  return std::all_of(rows.strides[kLogits], rows.strides[kLogits] + rows.rank,
                     [&](std::int64_t stride) { return stride * element_bytes % 16 == 0; });
}

template <typename T, typename View>
void launch_weighted_rows(const FullLoss<T, View>& loss, void* stream) {
  const LaunchShape shape{.blocks = ceil_divide(loss.view().row_count, kWeightedRows),
                          .threads = kWeightedThreads,
                          .shared_bytes = WeightedRing<T>::kVectorCount * sizeof(Vector<T>),
                          .stream = stream};
  loss.rows.in.terms.softcap != 0.0f ? launch(kForward, weighted_rows<T, View, true>, shape, loss)
                                     : launch(kForward, weighted_rows<T, View, false>, shape, loss);
}

// ---- all of them ----------------------------------------------------------------------------------------------------

template <typename T>
void forward(const CrossEntropyForwardProblem& problem, const ExecutionContext& context) {
  using A = Accumulator<T>;
  const CrossEntropyInputs& inputs = problem.inputs;
  const ReductionPlan plan = plan_of(inputs);
  const LossWorkspace workspace = workspace_of(problem, plan);
  void* const memory = context.workspace.data;
  const RowOutputs<A> outputs =
      row_outputs<A>(problem.outputs, inputs.options.reduction, inputs.view.row_count, workspace.arrays(memory));
  const auto rows = [&]<typename View>(const View& view) {
    return LossRows<T, View>{LossInputs<T, View>(view, inputs), outputs, problem.reads_ignored_rows};
  };
  if (inputs.view.row_count > 0) {
    const auto reduce = [&](auto make) {
      reduce_rows<T>(kForward, plan, inputs.view, inputs.device, workspace.other(memory), context.stream, make);
    };
    if constexpr (!std::is_same_v<T, double>) {
      if (is_plain(problem)) reduce([&]<typename View>(const View& view) { return PlainLoss<T, View>{rows(view)}; });
    }
    const auto full = [&]<typename View>(const View& view) {
      return FullLoss<T, View>(rows(view), wanted_statistics(problem));
    };
    if (!std::is_same_v<T, double> && share_weights(problem, plan)) {
      if constexpr (!std::is_same_v<T, double>) {
        launch_weighted_rows(full(ShortRowView<3, 6>(inputs.view)), context.stream);
      }
    } else if (!is_plain(problem)) {
      reduce(full);
    }
  }
  reduce_losses<A>(kForward, inputs, outputs, problem.normalizer, problem.outputs, workspace.sums(memory),
                   context.stream);
}

// ---- shards --------------------------------------------------------------------------------------------------------

template <typename T>
void shard_forward(const CrossEntropyShardProblem& problem, const ExecutionContext& context) {
  using A = Accumulator<T>;
  const CrossEntropyInputs& inputs = problem.inputs;
  reduce_rows<T>(kShardForward, plan_of(inputs), inputs.view, inputs.device, context.workspace.data, context.stream,
                 [&]<typename View>(const View& view) {
                   const LossRows<T, View> rows{LossInputs<T, View>(view, inputs), {}, true};
                   return FullLoss<T, View>(
                       rows, {.linear = inputs.options.label_smoothing > 0.0, .moment = true, .best = true},
                       static_cast<StoredStatistics<A>*>(problem.statistics));
                 });
}

/// A thread a row: merges what the shards have of it, in their order.
template <typename A, typename View>
__global__ void __launch_bounds__(128)
    merge_shards(LossInputs<A, View> in, const StoredStatistics<A>* statistics, std::int64_t shards,
                 bool reads_ignored_rows, RowOutputs<A> outputs) {
  let_next_kernel_start();
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= in.view.row_count) return;
  const auto at = in.view.rows.offsets(row);
  ClassStatistics<A> merged;
  TargetClass<A> target_class;
  for (std::int64_t shard = 0; shard < shards; ++shard) {
    const StoredStatistics<A>& part = statistics[shard * in.view.row_count + at.of[kPerRow]];
    merged = MergeStatistics{}(merged, part.unpacked());
    target_class.logit += part.target_logit;
    target_class.weight += part.target_weight;
  }
  const std::int64_t target = in.target_at(at.of[kTargets]);
  if (!in.terms.is_ignored(target) && !in.terms.is_in_range(target)) target_class.weight = A(1);
  write_row<A>(outputs, at.of[kPerRow], merged, target, target_class, in.terms,
               reads_ignored_rows || !in.terms.is_ignored(target));
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
           static_cast<const StoredStatistics<A>*>(problem.statistics), problem.shards, problem.reads_ignored_rows,
           outputs);
  }
  reduce_losses<A>(kMerge, inputs, outputs, problem.normalizer, problem.outputs, workspace.sums(memory),
                   context.stream);
}

}  // namespace

std::size_t cross_entropy_forward_workspace_bytes(const CrossEntropyForwardProblem& problem) {
  return workspace_of(problem, plan_of(problem.inputs)).bytes();
}

void cross_entropy_forward(const CrossEntropyForwardProblem& problem, const ExecutionContext& context) {
  const DeviceGuard guard(problem.inputs.device);
  dispatch_floating_point(problem.inputs.logits_dtype, [&]<typename T>() { forward<T>(problem, context); });
}

std::size_t cross_entropy_shard_forward_workspace_bytes(const CrossEntropyShardProblem& problem) {
  const CrossEntropyInputs& inputs = problem.inputs;
  return plan_of(inputs).workspace_bytes(inputs.view.row_count, state_bytes(inputs.logits_dtype, false));
}

void cross_entropy_shard_forward(const CrossEntropyShardProblem& problem, const ExecutionContext& context) {
  const DeviceGuard guard(problem.inputs.device);
  dispatch_floating_point(problem.inputs.logits_dtype, [&]<typename T>() { shard_forward<T>(problem, context); });
}

std::size_t cross_entropy_merge_workspace_bytes(const CrossEntropyMergeProblem& problem) {
  const CrossEntropyInputs& inputs = problem.inputs;
  return LossWorkspace(inputs.options.reduction, inputs.view.row_count, size_of(inputs.logits_dtype), 0).bytes();
}

void cross_entropy_merge(const CrossEntropyMergeProblem& problem, const ExecutionContext& context) {
  const DeviceGuard guard(problem.inputs.device);
  if (problem.inputs.logits_dtype == DType::float64) return merge_all<double>(problem, context);
  merge_all<float>(problem, context);
}

}  // namespace eaves::cuda
