// The plan of a call of lrpe_cosine on a GPU: its kernel, its tiling and its scratch memory. Both the launches and the
// size of the workspace come from this plan.
#pragma once

#include <algorithm>
#include <string>

#include "ops/lrpe_cosine/lrpe_cosine_device.cuh"

namespace eaves::cuda {

struct LrpePlan {
  LrpeKind kind = LrpeKind::none;
  bool is_shared = false;           ///< the angles of a token serve the whole batch
  bool has_vectors = false;         ///< a thread has a 16-byte vector of features, not one element
  bool has_row_per_warp = false;    ///< takes lrpe_cosine_row_per_warp.cuh: any strides, any features, float64
  std::int64_t warps_per_head = 0;  ///< with has_row_per_warp
  bool has_whole_columns = false;   ///< backward of a softmax over the sequence: a block reads whole columns once
  bool has_dependent_launch = false;
  LrpeTiling tiling;
  LrpeTiling columns;               ///< for a softmax over the sequence; its heads are heads of all batch entries
  std::int64_t theta_partials = 0;  ///< partial sums of grad_theta for each head; 0 without grad_theta
  std::size_t columns_bytes = 0;    ///< of the workspace's first part
  std::size_t workspace_bytes = 0;
};

// Blocks of a launch for each multiprocessor: they fill a GPU many times over, so that the last ones matter little.
inline constexpr std::int64_t kLrpeBlocksPerMultiprocessor = 32;
// The limit of each kind of scratch memory: it stays in the cache, and is more than enough for the partials.
inline constexpr std::int64_t kLrpeMostPartialBytes = 2 << 20;
inline constexpr std::int64_t kLrpeColumnsAtATime = 8;

/// Batch entries with shared angles that a thread loads before it uses the first: one vector of each entry in the
/// forward, two or three in the backward. H200, [12, 12, n, d] bf16, backward without an activation, time divided by
/// the limit with 2 and with 4 entries: 0.96 and 0.93 for n = 1024 and d = 128, 1.00 and 0.93 for 8192 and 96, 1.21
/// and 1.10 for 8 x 8 x 8 and 128. With silu and theta's gradient 0.97 and 0.94 for n = 32768; with a softmax over the
/// features 1.19 and 1.25 for 256, 0.94 and 0.93 for 8192.
inline constexpr int kLrpeSlots = 4;
/// Batch entries with shared angles in a block that sums the columns of the backward.
inline constexpr int kLrpeColumnBatches = 4;
/// A block with whole columns: threads for each token, tokens of each thread, most threads. H100, [12, 12, n, 128]
/// bf16, n = 256 and 512: 25.8 and 45.8 us, in three kernels 38.0 and 60.8. H200, an earlier kernel: half as many
/// tokens for each thread were 10 % slower. Other lanes and shapes were not measured.
inline constexpr int kLrpeWholeColumnLanes = 4;
inline constexpr int kLrpeWholeColumnTokens = 4;
inline constexpr int kLrpeMostWholeColumnThreads = 512;
/// Tokens that a thread of the forward loads before it uses the first, if angles are not shared.
inline constexpr int kLrpeTokens = 2;
// H200, bf16: batch 1, 131072 tokens of 12 heads, forward: 2 tokens 0.344 ms, 1 token 0.352. A softmax over a sequence
// of 32768, batch 12, backward: 4 batch entries a block 2.06 ms, 2 2.07, 3 2.23. The other numbers are first choices.

/// The inputs of make_plan().
struct LrpeCall {
  const char* op;
  Device device;
  DType dtype;
  LrpeCosineShape shape;
  const LrpeCosineAngles& angles;
  LrpeKind kind;
  bool has_vectors;                       ///< for all tensors
  const LrpeCosineStrides& main_strides;  ///< of the tensor that is read
  bool is_backward;
  bool has_theta_gradient = false;
  bool needs_columns = false;  ///< the workspace holds the columns of a softmax over the sequence
};

/// The parts of the workspace. `columns` of a softmax over the sequence: an lse that the caller does not keep, [B, H,
/// 2, D], or the sums of the backward, [B, H, D]. `partials`: the partial results of these columns, and later of
/// theta's gradient.
struct LrpeScratch {
  void* columns;
  void* partials;

  LrpeScratch(const Workspace& workspace, const LrpePlan& plan)
      : columns(workspace.data), partials(static_cast<char*>(workspace.data) + plan.columns_bytes) {}
};

/// Cuts `rows` into row blocks and steps: a thread takes `rows_at_a_time` rows in each step.
inline void cut_rows(LrpeTiling& tiling, std::int64_t rows, std::int64_t rows_at_a_time, std::int64_t most_blocks) {
  const std::int64_t step_rows = rows_at_a_time * tiling.block_rows();
  const std::int64_t steps = std::max<std::int64_t>(1, ceil_divide(rows, step_rows));
  tiling.rows = rows;
  tiling.steps =
      static_cast<std::uint32_t>(ceil_divide(steps, std::min(steps, std::max<std::int64_t>(1, most_blocks))));
  tiling.row_blocks = static_cast<std::uint32_t>(ceil_divide(steps, tiling.steps));
}

inline LrpePlan make_plan(const LrpeCall& call) {
  const auto& [op, device, dtype, shape, angles, kind, has_vectors, main_strides, is_backward, has_theta_gradient,
               needs_columns] = call;
  if (shape.batch * shape.heads > INT32_MAX || shape.features > INT32_MAX) {
    throw Unsupported(op, "has " + std::to_string(shape.batch) + " x " + std::to_string(shape.heads) + " heads of " +
                              std::to_string(shape.features) +
                              " features, but a GPU takes at most 2147483647 heads and 2147483647 features");
  }
  const DeviceProperties& gpu = properties(device);
  const auto accumulator_bytes = static_cast<std::int64_t>(size_of(accumulator_dtype(dtype)));
  const std::int64_t wanted_blocks = gpu.multiprocessors * kLrpeBlocksPerMultiprocessor;
  LrpePlan plan;
  plan.kind = kind;
  plan.has_vectors = has_vectors;
  plan.has_dependent_launch = gpu.compute_capability >= 90;
  const std::int64_t width = has_vectors ? 16 / static_cast<std::int64_t>(size_of(dtype)) : 1;
  LrpeTiling& tiling = plan.tiling;
  tiling.vectors = static_cast<std::uint32_t>(shape.features / width);
  tiling.log2_lanes = log2_lanes_for(tiling.vectors);
  tiling.heads = static_cast<std::uint32_t>(shape.heads);
  tiling.takes_heads_first = std::abs(main_strides[1]) < std::abs(main_strides[2]);
  // A softmax over the features needs all lanes of a token in one warp.
  plan.has_row_per_warp = !has_vectors || (kind == LrpeKind::feature_softmax && tiling.lanes() > 32);

  // Batch entries share their angles if there are enough tokens for a block.
  plan.is_shared = has_vectors && shape.batch > 1 && angles.are_shared_by_batch() &&
                   shape.positions >= static_cast<std::int64_t>(tiling.block_rows());
  const std::int64_t rows = plan.is_shared ? shape.positions : shape.batch * shape.positions;
  const std::int64_t most_partials = std::max<std::int64_t>(
      1, kLrpeMostPartialBytes / std::max<std::int64_t>(1, shape.heads * shape.features * accumulator_bytes));
  // Few blocks, so that a thread loads its theta once for many tokens. With shared angles encode() has one step.
  std::int64_t most_blocks =
      plan.is_shared ? INT32_MAX : ceil_divide(2 * wanted_blocks, std::max<std::int64_t>(1, shape.heads));
  if (has_theta_gradient) {
    most_blocks = std::min(most_partials, ceil_divide(wanted_blocks, std::max<std::int64_t>(1, shape.heads)));
  }
  cut_rows(tiling, rows, is_backward || plan.is_shared ? 1 : kLrpeTokens, most_blocks);
  tiling.chunk = shape.batch;
  if (plan.is_shared) {
    // A block has at least two rounds of loads, because it computes its angles before it uses the first round.
    const std::int64_t worthwhile_chunks = ceil_divide(shape.batch, 2 * kLrpeSlots);
    const std::int64_t most_chunks =
        has_theta_gradient ? std::clamp<std::int64_t>(most_partials / tiling.row_blocks, 1, worthwhile_chunks)
                           : worthwhile_chunks;
    const std::int64_t chunks =
        std::clamp<std::int64_t>(wanted_blocks / std::max<std::int64_t>(1, blocks_of(tiling)), 1, most_chunks);
    tiling.chunk = ceil_divide(ceil_divide(shape.batch, chunks), kLrpeSlots) * kLrpeSlots;
    tiling.chunks = static_cast<std::uint32_t>(ceil_divide(shape.batch, tiling.chunk));
  }
  std::int64_t sum_bytes = accumulator_bytes;
  if (has_theta_gradient) plan.theta_partials = std::int64_t{tiling.row_blocks} * tiling.chunks;
  if (plan.has_row_per_warp) {
    constexpr std::int64_t kMostWarps = 1 << 22;
    plan.warps_per_head = std::min(
        rows, has_theta_gradient ? plan.theta_partials
                                 : std::max<std::int64_t>(1, kMostWarps / std::max<std::int64_t>(1, shape.heads)));
    if (has_theta_gradient) plan.theta_partials = plan.warps_per_head;
    sum_bytes = 8;  // float64, because a warp adds up many rows
  }

  // Whole columns need enough tokens and features for the threads of a block. The choice is the same with and without
  // theta's gradient, which must not change a bit of the gradient of x. theta has one partial for each batch entry
  // then.
  const std::int64_t column_threads = ceil_divide(shape.positions, kLrpeWholeColumnTokens) * kLrpeWholeColumnLanes;
  plan.has_whole_columns = is_backward && has_vectors && kind == LrpeKind::sequence_softmax &&
                           tiling.vectors >= kLrpeWholeColumnLanes && shape.batch <= most_partials &&
                           column_threads >= 32 && column_threads <= kLrpeMostWholeColumnThreads;
  if (plan.has_whole_columns && has_theta_gradient) plan.theta_partials = shape.batch;

  std::size_t partial_bytes = static_cast<std::size_t>(plan.theta_partials * shape.heads * shape.features * sum_bytes);
  // A backward without grad_x does not need the sums of the columns.
  if (kind == LrpeKind::sequence_softmax && !plan.has_whole_columns && (needs_columns || !is_backward)) {
    // A block of the backward takes several batch entries if they share their angles.
    const std::int64_t block_batches = is_backward && plan.is_shared ? kLrpeColumnBatches : 1;
    LrpeTiling& columns = plan.columns;
    columns = tiling;
    columns.heads = static_cast<std::uint32_t>(ceil_divide(shape.batch, block_batches) * shape.heads);
    columns.chunks = 1;
    // The first kernel reads the columns from the first token to the last, all heads side by side. The second kernel
    // goes from the last token to the first, because the last ones are still in the cache.
    columns.takes_heads_first = true;
    tiling.takes_heads_first = true;
    tiling.is_reversed = true;
    // A state of the forward is two numbers, a sum of the backward one.
    const std::int64_t state_bytes = is_backward ? accumulator_bytes : 2 * accumulator_bytes;
    const std::int64_t column_bytes = shape.batch * shape.heads * shape.features * state_bytes;
    const std::int64_t most =
        std::max<std::int64_t>(1, kLrpeMostPartialBytes / std::max<std::int64_t>(1, column_bytes));
    cut_rows(columns, shape.positions, is_backward ? 1 : kLrpeColumnsAtATime,
             std::min(most, ceil_divide(wanted_blocks, std::max<std::int64_t>(1, columns.heads))));
    const auto column_partials = static_cast<std::size_t>(columns.row_blocks * column_bytes);
    // The partials of the columns and of theta share memory: the columns are merged before theta's sums begin.
    partial_bytes = std::max(partial_bytes, column_partials);
    // An lse has two numbers for each column.
    const std::int64_t numbers = is_backward ? 1 : 2;
    const auto bytes =
        static_cast<std::size_t>(shape.batch * shape.heads * shape.features * numbers * accumulator_bytes);
    if (needs_columns) plan.columns_bytes = (bytes + 255) / 256 * 256;
  }
  plan.workspace_bytes = plan.columns_bytes + partial_bytes;
  return plan;
}

inline LrpePlan plan_forward(const char* op, const LrpeCosineForwardProblem& problem) {
  const auto bytes = static_cast<std::int64_t>(size_of(problem.dtype));
  const bool lse_is_aligned = reinterpret_cast<std::uintptr_t>(problem.lse) % 16 == 0;
  const bool vectors = has_vectors(problem.x, problem.x_strides, problem.shape, bytes) &&
                       has_vectors(problem.out, problem.out_strides, problem.shape, bytes) && lse_is_aligned;
  return make_plan({.op = op,
                    .device = problem.device,
                    .dtype = problem.dtype,
                    .shape = problem.shape,
                    .angles = problem.angles,
                    .kind = problem.kind,
                    .has_vectors = vectors,
                    .main_strides = problem.x_strides,
                    .is_backward = false,
                    .needs_columns = problem.lse == nullptr});
}

inline LrpePlan plan_backward(const char* op, const LrpeCosineBackwardProblem& problem) {
  const auto bytes = static_cast<std::int64_t>(size_of(problem.dtype));
  const bool lse_is_aligned = reinterpret_cast<std::uintptr_t>(problem.lse) % 16 == 0;
  const bool vectors =
      has_vectors(problem.grad_out, problem.grad_out_strides, problem.shape, bytes) &&
      (problem.x == nullptr || has_vectors(problem.x, problem.x_strides, problem.shape, bytes)) &&
      (problem.grad_x == nullptr || has_vectors(problem.grad_x, problem.grad_x_strides, problem.shape, bytes)) &&
      lse_is_aligned;
  return make_plan({.op = op,
                    .device = problem.device,
                    .dtype = problem.dtype,
                    .shape = problem.shape,
                    .angles = problem.angles,
                    .kind = problem.kind,
                    .has_vectors = vectors,
                    .main_strides = problem.grad_out_strides,
                    .is_backward = true,
                    .has_theta_gradient = problem.grad_theta != nullptr,
                    .needs_columns = problem.grad_x != nullptr});
}

/// Calls `function.operator()<kKind, kIsShared>()` for the kernel that the plan chose.
template <typename Function>
void dispatch_plan(const LrpePlan& plan, Function function) {
  const auto with_kind = [&]<bool kIsShared>() {
    switch (plan.kind) {
      case LrpeKind::none:
        return function.template operator()<LrpeKind::none, kIsShared>();
      case LrpeKind::elementwise:
        return function.template operator()<LrpeKind::elementwise, kIsShared>();
      case LrpeKind::feature_softmax:
        return function.template operator()<LrpeKind::feature_softmax, kIsShared>();
      case LrpeKind::sequence_softmax:
        return function.template operator()<LrpeKind::sequence_softmax, kIsShared>();
    }
  };
  plan.is_shared ? with_kind.template operator()<true>() : with_kind.template operator()<false>();
}

}  // namespace eaves::cuda
