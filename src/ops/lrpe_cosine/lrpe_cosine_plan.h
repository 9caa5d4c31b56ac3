// How a call of lrpe_cosine will go on a GPU: which kernel, how the work is cut, how much scratch memory. The one
// source of both the launches and the workspace.
#pragma once

#include <algorithm>
#include <string>

#include "ops/lrpe_cosine/lrpe_cosine_device.cuh"

namespace eaves::cuda {

struct LrpePlan {
  LrpeKind kind = LrpeKind::none;
  bool is_shared = false;           ///< the angles of a token serve the whole batch
  bool has_vectors = false;         ///< a thread has a 16-byte vector of features, not one element
  bool has_row_per_warp = false;    ///< lrpe_cosine_row_per_warp.cuh: any strides, any features, float64
  std::int64_t warps_per_head = 0;  ///< where it has
  bool has_whole_columns = false;   ///< backward of a softmax over the sequence: a block reads whole columns, once
  bool has_dependent_launch = false;
  LrpeTiling tiling;
  LrpeTiling columns;               ///< of a softmax over the sequence: "heads" are heads of all batch entries
  std::int64_t theta_partials = 0;  ///< sums of each head on the way to grad_theta; 0 without it
  std::size_t columns_bytes = 0;    ///< of the workspace's first part
  std::size_t workspace_bytes = 0;
};

// Blocks of a launch that fill a GPU many times over, so that the last ones matter little.
inline constexpr std::int64_t kLrpeBlocksPerMultiprocessor = 32;
// Of each kind of scratch memory: few enough bytes to stay in the cache, more than enough partials.
inline constexpr std::int64_t kLrpeMostPartialBytes = 2 << 20;
inline constexpr std::int64_t kLrpeColumnsAtATime = 8;

/// Batch entries with shared angles that a thread loads before it uses the first: of one vector each in the forward,
/// two or three in the backward. H200, [12, 12, n, d] bf16, gradient without an activation, 2 and 4 entries, time over
/// limit: n = 1024 and d = 128 0.96 and 0.93, 8192 and 96 1.00 and 0.93, 8 x 8 x 8 and 128 1.21 and 1.10; with silu and
/// theta's gradient 32768 0.97 and 0.94; with a softmax over the features 256 1.19 and 1.25, 8192 0.94 and 0.93.
inline constexpr int kLrpeSlots = 4;
/// Batch entries with shared angles whose columns a block of the backward sums.
inline constexpr int kLrpeColumnBatches = 4;
/// Of a block that has whole columns: threads of a token, tokens of a thread, threads. H100, [12, 12, n, 128] bf16, n =
/// 256 and 512: 25.8 and 45.8 us, in three kernels 38.0 and 60.8. H200, of an earlier kernel: half as many tokens of a
/// thread were 10 % slower. Other lanes and shapes were not measured.
inline constexpr int kLrpeWholeColumnLanes = 4;
inline constexpr int kLrpeWholeColumnTokens = 4;
inline constexpr int kLrpeMostWholeColumnThreads = 512;
/// Tokens that a thread of the forward loads before it uses the first, where angles are not shared.
inline constexpr int kLrpeTokens = 2;
// H200, bf16: batch 1, 131072 tokens of 12 heads, forward: 2 tokens 0.344 ms, 1 token 0.352. A softmax over a sequence
// of 32768, batch 12, backward: 4 batch entries a block 2.06 ms, 2 2.07, 3 2.23. The other numbers are first choices.

/// What a plan depends on.
struct LrpeCall {
  const char* op;
  Device device;
  DType dtype;
  LrpeCosineShape shape;
  const LrpeCosineAngles& angles;
  LrpeKind kind;
  bool has_vectors;                       ///< of all tensors
  const LrpeCosineStrides& main_strides;  ///< of the tensor that is read
  bool is_backward;
  bool has_theta_gradient = false;
  bool needs_columns = false;  ///< the columns of a softmax over the sequence go to the workspace
};

/// Where a call's numbers lie in the workspace: the columns of a softmax over the sequence (an lse that the caller
/// does not keep, [B, H, 2, D], or the sums of the backward, [B, H, D]), and what they or the sums of theta are merged
/// from.
struct LrpeScratch {
  void* columns;
  void* partials;

  LrpeScratch(const Workspace& workspace, const LrpePlan& plan)
      : columns(workspace.data), partials(static_cast<char*>(workspace.data) + plan.columns_bytes) {}
};

/// Lanes and row blocks, `rows_at_a_time` rows of a thread in each step.
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
                              " features, a GPU takes 2147483647 heads and as many features");
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
  // The lanes of a softmax over the features are of one warp.
  plan.has_row_per_warp = !has_vectors || (kind == LrpeKind::feature_softmax && tiling.lanes() > 32);

  // A batch is shared where there are enough tokens for the lanes of a block.
  plan.is_shared = has_vectors && shape.batch > 1 && angles.are_shared_by_batch() &&
                   shape.positions >= static_cast<std::int64_t>(tiling.block_rows());
  const std::int64_t rows = plan.is_shared ? shape.positions : shape.batch * shape.positions;
  const std::int64_t most_partials = std::max<std::int64_t>(
      1, kLrpeMostPartialBytes / std::max<std::int64_t>(1, shape.heads * shape.features * accumulator_bytes));
  // A thread of more tokens loads its theta for all of them. Where the angles are shared, encode() has one step.
  std::int64_t most_blocks =
      plan.is_shared ? INT32_MAX : ceil_divide(2 * wanted_blocks, std::max<std::int64_t>(1, shape.heads));
  if (has_theta_gradient) {
    most_blocks = std::min(most_partials, ceil_divide(wanted_blocks, std::max<std::int64_t>(1, shape.heads)));
  }
  cut_rows(tiling, rows, is_backward || plan.is_shared ? 1 : kLrpeTokens, most_blocks);
  tiling.chunk = shape.batch;
  if (plan.is_shared) {
    // At least two rounds of loads in a block: it computes its angles before the first is used.
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
    sum_bytes = 8;  // a warp adds up many rows: in float64
  }

  // Enough tokens and features for the threads of a block. The same with and without theta's gradient, which must not
  // change a bit of that of x; its partials are those of the batch entries.
  const std::int64_t column_threads = ceil_divide(shape.positions, kLrpeWholeColumnTokens) * kLrpeWholeColumnLanes;
  plan.has_whole_columns = is_backward && has_vectors && kind == LrpeKind::sequence_softmax &&
                           tiling.vectors >= kLrpeWholeColumnLanes && shape.batch <= most_partials &&
                           column_threads >= 32 && column_threads <= kLrpeMostWholeColumnThreads;
  if (plan.has_whole_columns && has_theta_gradient) plan.theta_partials = shape.batch;

  std::size_t partial_bytes = static_cast<std::size_t>(plan.theta_partials * shape.heads * shape.features * sum_bytes);
  // A backward without grad_x has no use for the sums of the columns.
  if (kind == LrpeKind::sequence_softmax && !plan.has_whole_columns && (needs_columns || !is_backward)) {
    // The backward's block has several batch entries where their angles are shared.
    const std::int64_t block_batches = is_backward && plan.is_shared ? kLrpeColumnBatches : 1;
    LrpeTiling& columns = plan.columns;
    columns = tiling;
    columns.heads = static_cast<std::uint32_t>(ceil_divide(shape.batch, block_batches) * shape.heads);
    columns.chunks = 1;
    // The columns are read from the first token to the last, all heads side by side, and used from the last to the
    // first: what was read last is still in the cache.
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
    // The sums of the sequence are merged before those of theta begin.
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
