// The forward of logsumexp on a GPU, one kernel for each way that rows lie in memory:
//
//   row_per_lanes      short rows, many in a block         (unit stride)
//   row_per_block      long rows, or pieces of longer ones (unit stride)
//   row_per_column     rows side by side                   (reduced along another axis, read in place)
//   row_per_stride     anything else
//   merge_pieces       second step where a row was cut into pieces that do not share a cluster
//
// One idea in all of them: what threads hold are SoftmaxStates, which merge in any grouping. Where vectors fit, a
// thread takes many elements into its state at once (cuda/softmax.cuh, cuda/columns.cuh).
#include <algorithm>

#include "core/dispatch.h"
#include "cuda/columns.cuh"
#include "cuda/device.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/row_launch.cuh"
#include "cuda/row_policy.h"
#include "cuda/softmax.cuh"
#include "cuda/vector.cuh"
#include "ops/logsumexp/logsumexp_backend.h"

namespace eaves::cuda {
namespace {

constexpr const char* kOp = "logsumexp_forward";

using namespace logsumexp_tensors;

constexpr int kLanesBlock = 128;    // threads of a block whose rows take at most a warp
constexpr int kColumnWarps = 8;     // warps of a block that walk down columns side by side
constexpr int kColumnsAtATime = 8;  // columns that a thread loads before it uses the first
// Blocks of a multiprocessor; columns are cut into as many pieces as run at once. H200, [131072, 1024] bf16, reduced
// over the first axis: 8 warps with 8 columns each, 2 blocks 71.9 us, 3 blocks 73.5; 16 warps with 4, 2 blocks 72.8.
constexpr int kColumnBlocks = 2;

// ---- what every kernel does with its result ------------------------------------------------------------------------

template <typename A>
struct ForwardOutputs {
  DType out_dtype;
  void* out;
  A* lse;
  SoftmaxState<A>* pieces;  ///< [pieces, rows], where rows are cut; then out and lse are not written
};

template <typename A, typename Rows>
__device__ void write_result(const ForwardOutputs<A>& outputs, const Rows& rows, std::int64_t row,
                             const SoftmaxState<A>& state) {
  const auto at = rows.offsets(row);
  const A lse = state.lse();
  if (outputs.lse != nullptr) outputs.lse[at.of[kLse]] = lse;
  if (outputs.out == nullptr) return;
  const std::int64_t offset = at.of[kOut];
  switch (outputs.out_dtype) {
    case DType::bfloat16:
      static_cast<bfloat16*>(outputs.out)[offset] = round_to<bfloat16>(lse);
      break;
    case DType::float16:
      static_cast<float16*>(outputs.out)[offset] = round_to<float16>(lse);
      break;
    case DType::float64:
      static_cast<double*>(outputs.out)[offset] = lse;
      break;
    default:
      static_cast<float*>(outputs.out)[offset] = static_cast<float>(lse);
  }
}

template <typename A, typename Rows>
__device__ void write_piece_or_result(const ForwardOutputs<A>& outputs, const Rows& rows, std::int64_t row_count,
                                      std::int64_t row, std::int64_t piece, const SoftmaxState<A>& state) {
  if (outputs.pieces != nullptr) {
    outputs.pieces[piece * row_count + row] = state;
  } else {
    write_result(outputs, rows, row, state);
  }
}

template <typename A, typename View = ShortRowView>
struct ForwardRows {
  View view;
  const void* x;
  ForwardOutputs<A> outputs;
  RowSplit split;
};

template <typename T, int kLanes, int kVectors>
__global__ void __launch_bounds__(kLanesBlock) row_per_lanes(ForwardRows<Accumulator<T>> p) {
  const std::int64_t row = (std::int64_t{blockIdx.x} * kLanesBlock + threadIdx.x) / kLanes;
  SoftmaxState<Accumulator<T>> state;
  if (row < p.view.row_count) {
    const T* x = static_cast<const T*>(p.x) + p.view.rows.offsets(row).of[kX];
    for_each_batch<kVectors>(x, p.view.column_count, threadIdx.x % kLanes, kLanes, minus_infinity<T>(),
                             [&](const auto& batch) { accumulate(state, batch); });
  }
  state = reduce_lanes<kLanes>(state, MergeSoftmax{});  // outside of the branch: all lanes of the warp take part
  if (row < p.view.row_count && threadIdx.x % kLanes == 0) write_result(p.outputs, p.view.rows, row, state);
}

template <typename T, int kThreads, int kVectors, bool kIsCluster>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor<T, kThreads, kVectors>)
    row_per_block(ForwardRows<Accumulator<T>> p) {
  let_next_kernel_start();
  const auto [row, piece] = find_piece(p.split);
  const std::int64_t first = piece * p.split.piece_columns;
  const std::int64_t count = min(p.split.piece_columns, p.view.column_count - first);
  const T* x = static_cast<const T*>(p.x) + p.view.rows.offsets(row).of[kX] + first;
  SoftmaxState<Accumulator<T>> state;
  for_each_batch<kVectors>(x, count < 0 ? 0 : count, threadIdx.x, kThreads, minus_infinity<T>(),
                           [&](const auto& batch) { accumulate(state, batch); });
  state = reduce_block<kThreads>(state, MergeSoftmax{});
#if __CUDA_ARCH__ >= 900
  if constexpr (kIsCluster) state = reduce_cluster(state, MergeSoftmax{});
#endif
  if (threadIdx.x == 0 && !(kIsCluster && piece != 0)) {
    write_piece_or_result(p.outputs, p.view.rows, p.view.row_count, row, piece, state);
  }
}

template <typename A>
struct ForwardColumns {
  ShortRowView view;
  const void* x;
  ForwardOutputs<A> outputs;
  TransposedTiles tiles;
};

/// Each thread owns kLaneRows neighbouring rows and walks down their columns; the warps of a block take turns.
template <typename T, int kLaneRows>
__global__ void __launch_bounds__(32 * kColumnWarps, kColumnBlocks) row_per_column(ForwardColumns<Accumulator<T>> p) {
  using A = Accumulator<T>;
  constexpr int kTileRows = 32 * kLaneRows;
  let_next_kernel_start();
  const Tile tile = find_tile<kTileRows>(p.view, p.tiles);
  const std::int64_t lane_row = tile.lane_row + threadIdx.x * kLaneRows;
  SoftmaxState<A> states[kLaneRows];
  A anchors[kLaneRows] = {};
  if (lane_row < tile.lane_axis_size) {  // kLaneRows divides the axis: a lane has all of its rows or none
    const T* x = static_cast<const T*>(p.x) + p.view.rows.offsets(tile.outer_row + lane_row).of[kX];
    for_each_batch_of_columns<kColumnsAtATime, Side<T, kLaneRows>>(
        x, p.view.column_strides[kX], tile.first_column + threadIdx.y, tile.last_column, kColumnWarps,
        [&](const Side<T, kLaneRows>(&batch)[kColumnsAtATime]) { accumulate(states, anchors, batch); });
  }

  __shared__ alignas(SoftmaxState<A>) unsigned char storage[kColumnWarps * kTileRows * sizeof(SoftmaxState<A>)];
  auto* warp_states = reinterpret_cast<SoftmaxState<A>(*)[kTileRows]>(storage);
#pragma unroll
  for (int r = 0; r < kLaneRows; ++r) warp_states[threadIdx.y][threadIdx.x * kLaneRows + r] = states[r];
  __syncthreads();
  for (int r = threadIdx.y * 32 + threadIdx.x; r < kTileRows; r += 32 * kColumnWarps) {
    if (tile.lane_row + r >= tile.lane_axis_size) continue;
    SoftmaxState<A> state = warp_states[0][r];
    for (int warp = 1; warp < kColumnWarps; ++warp) state = MergeSoftmax{}(state, warp_states[warp][r]);
    write_piece_or_result(p.outputs, p.view.rows, p.view.row_count, tile.outer_row + tile.lane_row + r, tile.piece,
                          state);
  }
}

/// Elements are found one by one from the loops of the view, by a warp for each piece of a row; also serves every dtype
/// that is only promoted.
template <typename T>
__global__ void __launch_bounds__(kLanesBlock) row_per_stride(ForwardRows<Accumulator<T>, RowView> p) {
  let_next_kernel_start();
  const std::int64_t step = std::int64_t{gridDim.x} * (kLanesBlock / 32);
  for (std::int64_t warp = (std::int64_t{blockIdx.x} * kLanesBlock + threadIdx.x) / 32;
       warp < p.view.row_count * p.split.pieces; warp += step) {
    const std::int64_t row = divide(warp, p.split.pieces);
    const std::int64_t piece = warp - row * p.split.pieces;
    const std::int64_t first = piece * p.split.piece_columns;
    const std::int64_t last = min(first + p.split.piece_columns, p.view.column_count);
    const T* x = static_cast<const T*>(p.x) + p.view.rows.offsets(row).of[kX];
    SoftmaxState<Accumulator<T>> state;
    // In runs that are summed by themselves: a row of millions of columns must not become one running sum.
    constexpr std::int64_t kRunColumns = 32 * 256;
    for (std::int64_t begin = first; begin < last; begin += kRunColumns) {
      SoftmaxState<Accumulator<T>> run;
      const std::int64_t end = min(begin + kRunColumns, last);
      for (std::int64_t column = begin + threadIdx.x % 32; column < end; column += 32) {
        accumulate(run, load_as_accumulator(x[p.view.columns.offsets(column).of[kX]]));
      }
      state = MergeSoftmax{}(state, run);
    }
    state = reduce_lanes<32>(state, MergeSoftmax{});
    if (threadIdx.x % 32 == 0) write_piece_or_result(p.outputs, p.view.rows, p.view.row_count, row, piece, state);
  }
}

template <typename A, int kWarps>
__global__ void __launch_bounds__(32 * kWarps) merge_pieces(StridedLoop<kRowTensors> rows, std::int64_t row_count,
                                                            ForwardOutputs<A> outputs, std::int64_t pieces) {
  wait_for_previous_kernel();
  reduce_pieces<kWarps>(
      outputs.pieces, row_count, pieces, MergeSoftmax{},
      [&](std::int64_t row, const SoftmaxState<A>& state) { write_result(outputs, rows, row, state); });
}

// ---- host ---------------------------------------------------------------------------------------------------------

/// How the forward will go: which kernel, and how rows are cut. The one source of both the launch and the workspace.
struct ForwardPlan {
  RowLayout layout;
  RowSplit split;         ///< contiguous, strided
  TransposedTiles tiles;  ///< transposed
  int lane_rows = 1;      ///< transposed: rows of one thread
  RowThreads threads;
  std::int64_t pieces = 1;  ///< states per row in the workspace; 1 where none are needed
};

ForwardPlan plan_forward(const LogsumexpForwardProblem& problem) {
  const RowView& view = problem.view;
  const DeviceProperties& device = properties(problem.device);
  const auto element_bytes = static_cast<std::int64_t>(size_of(problem.x_dtype));
  ForwardPlan plan;
  plan.layout = is_floating_point(problem.x_dtype) && ShortRowView::fits(view) ? view.layout : RowLayout::strided;
  if (plan.layout == RowLayout::transposed) {
    const std::int64_t lane_axis_size = view.rows.sizes[view.rows.rank - 1];
    if (columns_are_aligned(view, kX, problem.x, element_bytes)) plan.lane_rows = static_cast<int>(16 / element_bytes);
    plan.tiles = tile_transposed(view.row_count / lane_axis_size, lane_axis_size, view.column_count,
                                 32 * plan.lane_rows, device.multiprocessors, kColumnBlocks);
    plan.pieces = plan.tiles.pieces;
    return plan;
  }
  const bool is_contiguous = plan.layout == RowLayout::contiguous;
  plan.threads = row_threads(view.column_count * element_bytes);
  plan.split = {1, view.column_count, false};
  if (plan.threads.threads > 32) {
    plan.split = split_rows(view.row_count, view.column_count, element_bytes, device.multiprocessors,
                            device.compute_capability >= 90 && is_contiguous);
    if (plan.split.pieces > 1) plan.threads = kPieceThreads;
  }
  plan.pieces = plan.split.is_cluster ? 1 : plan.split.pieces;
  return plan;
}

std::size_t workspace_bytes(const ForwardPlan& plan, const LogsumexpForwardProblem& problem) {
  if (plan.pieces == 1) return 0;
  const std::size_t state_bytes =
      problem.x_dtype == DType::float64 ? sizeof(SoftmaxState<double>) : sizeof(SoftmaxState<float>);
  return static_cast<std::size_t>(plan.pieces * problem.view.row_count) * state_bytes;
}

template <typename T, int kLanes, int kVectors>
void launch_row_per_lanes(const ForwardRows<Accumulator<T>>& p, void* stream) {
  launch(kOp, row_per_lanes<T, kLanes, kVectors>,
         {.blocks = ceil_divide(p.view.row_count, kLanesBlock / kLanes), .threads = kLanesBlock, .stream = stream}, p);
}

template <typename T, int kThreads, int kVectors, bool kIsCluster = false>
void launch_row_per_block(const ForwardRows<Accumulator<T>>& p, void* stream) {
  launch(kOp, row_per_block<T, kThreads, kVectors, kIsCluster>, shape_of(p.split, p.view.row_count, kThreads, stream),
         p);
}

template <typename T>
void launch_contiguous(const ForwardPlan& plan, const ForwardRows<Accumulator<T>>& p, void* stream) {
  if (plan.split.is_cluster) {
    return launch_row_per_block<T, kPieceThreads.threads, kPieceThreads.vectors, true>(p, stream);
  }
  dispatch_row_threads(plan.threads, [&]<int kThreads, int kVectors>() {
    if constexpr (kThreads <= 32) {
      launch_row_per_lanes<T, kThreads, kVectors>(p, stream);
    } else {
      launch_row_per_block<T, kThreads, kVectors>(p, stream);
    }
  });
}

template <typename T, int kLaneRows>
void launch_transposed(const ForwardPlan& plan, const LogsumexpForwardProblem& problem,
                       const ForwardOutputs<Accumulator<T>>& outputs, void* stream) {
  launch(kOp, row_per_column<T, kLaneRows>,
         {.blocks = plan.tiles.tiles * plan.tiles.pieces, .threads = dim3(32, kColumnWarps), .stream = stream},
         ForwardColumns<Accumulator<T>>{ShortRowView(problem.view), problem.x, outputs, plan.tiles});
}

template <typename T>
void forward(const LogsumexpForwardProblem& problem, const ExecutionContext& context) {
  using A = Accumulator<T>;
  const ForwardPlan plan = plan_forward(problem);
  const bool is_cut = plan.pieces > 1;
  ForwardOutputs<A> outputs{problem.out_dtype, problem.out, static_cast<A*>(problem.lse), nullptr};
  if (is_cut) outputs.pieces = static_cast<SoftmaxState<A>*>(context.workspace.data);

  if (plan.layout == RowLayout::strided) {
    const std::int64_t blocks = ceil_divide(problem.view.row_count * plan.split.pieces, kLanesBlock / 32);
    launch(kOp, row_per_stride<T>,
           {.blocks = std::min<std::int64_t>(blocks, 1 << 20), .threads = kLanesBlock, .stream = context.stream},
           ForwardRows<A, RowView>{problem.view, problem.x, outputs, plan.split});
  } else if constexpr (kIsFloatingPoint<T>) {
    if (plan.layout == RowLayout::contiguous) {
      launch_contiguous<T>(plan, {ShortRowView(problem.view), problem.x, outputs, plan.split}, context.stream);
    } else if (plan.lane_rows > 1) {
      launch_transposed<T, Vector<T>::kSize>(plan, problem, outputs, context.stream);
    } else {
      launch_transposed<T, 1>(plan, problem, outputs, context.stream);
    }
  }
  if (!is_cut) return;
  const auto merge = [&](auto kernel, int warps) {
    launch(kOp, kernel,
           {.blocks = ceil_divide(problem.view.row_count, 32),
            .threads = dim3(32, warps),
            .starts_before_previous_ends = properties(problem.device).compute_capability >= 90,
            .stream = context.stream},
           problem.view.rows, problem.view.row_count, outputs, plan.pieces);
  };
  plan.pieces <= 64 ? merge(merge_pieces<A, 8>, 8) : merge(merge_pieces<A, 32>, 32);
}

}  // namespace

std::size_t logsumexp_forward_workspace_bytes(const LogsumexpForwardProblem& problem) {
  return workspace_bytes(plan_forward(problem), problem);
}

void logsumexp_forward(const LogsumexpForwardProblem& problem, const ExecutionContext& context) {
  const DeviceGuard guard(problem.device);
  dispatch_any(problem.x_dtype, [&]<typename T>() { forward<T>(problem, context); });
}

}  // namespace eaves::cuda
