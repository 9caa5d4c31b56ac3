// Reduces rows, whatever the operator: one kernel for each layout of rows in memory, and the plan that chooses among
// them.
//
//   row_per_lanes      short rows, many in a block         (unit stride)
//   row_per_block      long rows, or pieces of longer ones (unit stride)
//   row_per_column     rows side by side                   (reduced along another axis, read in place)
//   row_per_stride     anything else
//   merge_pieces       the second step of a row that was cut into pieces outside of a cluster
//
// One idea in all of them: threads hold states, and states merge in any grouping. An operator describes its state and
// its use as a struct that kernels take by value:
//
//   struct Operation {            // for elements of type T, template of the view's type
//     using Element = T;
//     using State = ...;          // its default-constructed value is neutral
//     using Prepared = ...;       // the result of prepare(); default-constructed if it was not called
//     using Merge = ...;          // __device__ State operator()(const State&, const State&)
//     const View& view() const;   // ShortRowView, or RowView for row_per_stride
//
//     // elements [first, first + count) of a row of unit stride, shared by `threads` threads; thread 0 also loads
//     // `prepared`, which finish() needs beside the state
//     template <int kVectors> State reduce(row, first, count, thread, threads, prepared) const;
//     // columns first, first + step, ... below `last` of the kLaneRows rows side by side that begin with `row`;
//     // a heavy operator has 1 row
//     template <int kColumns, int kLaneRows> void reduce_columns(states, row, first, last, step) const;
//     // columns first, first + step, ... below `last` of a row in any layout
//     State reduce_strided(row, first, last, step) const;
//     Prepared prepare(row) const;    // loads what finish() needs beside the state
//     void finish(row, state, prepared) const;  // in one thread for each row
//   };
//
// Operations that differ from most are specialised in kIsHeavy (row_policy.h) and kHasVectors (below).
#pragma once

#include <algorithm>
#include <utility>

#include "core/environment.h"
#include "core/numeric.h"
#include "core/rows.h"
#include "cuda/columns.cuh"
#include "cuda/device.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/row_launch.cuh"
#include "cuda/row_policy.h"
#include "eaves/context.h"

namespace eaves::cuda {

/// False: every row is reduced by row_per_stride.
template <typename Operation>
inline constexpr bool kHasVectors = true;

inline constexpr int kLanesBlock = 128;    // threads of a block whose rows take at most a warp
inline constexpr int kColumnWarps = 8;     // warps of a block that walk down columns side by side
inline constexpr int kColumnsAtATime = 8;  // columns that a thread loads before it uses the first
// Blocks of a multiprocessor. Columns are cut into as many pieces as run at once. H200, logsumexp of [131072, 1024]
// bf16 over the first axis: 8 warps with 8 columns each, 2 blocks 71.9 us, 3 blocks 73.5; 16 warps with 4 columns each,
// 2 blocks 72.8.
inline constexpr int kColumnBlocks = 2;

// ---- kernels -------------------------------------------------------------------------------------------------------

/// `pieces` is [pieces, rows] if rows are cut; nullptr if a state is the whole row's.
template <typename Operation>
__device__ void write_piece_or_finish(const Operation& operation, typename Operation::State* pieces, std::int64_t row,
                                      std::int64_t piece, const typename Operation::State& state,
                                      const typename Operation::Prepared& prepared) {
  if (pieces != nullptr) {
    pieces[piece * operation.view().row_count + row] = state;
  } else {
    operation.finish(row, state, prepared);
  }
}

/// `some_lanes` is kLanes; a heavy operator may pass 8.
template <typename Operation, int kLanes, int kVectors>
__global__ void __launch_bounds__(kLanesBlock)
    row_per_lanes(const __grid_constant__ Operation operation, int some_lanes) {
  const unsigned lanes = kIsHeavy<Operation> ? some_lanes : kLanes;
  let_next_kernel_start();
  const std::int64_t row = std::int64_t{blockIdx.x} * (kLanesBlock / lanes) + threadIdx.x / lanes;
  const int lane = threadIdx.x % lanes;
  typename Operation::State state;
  typename Operation::Prepared prepared;
  if (row < operation.view().row_count) {
    state = operation.template reduce<kVectors>(row, 0, operation.view().column_count, lane, lanes, prepared);
  }
  // Outside of the branch, because all lanes of the warp take part.
  state = lanes == kLanes ? reduce_lanes<kLanes>(state, typename Operation::Merge{})
                          : reduce_lanes<8>(state, typename Operation::Merge{});
  if (row < operation.view().row_count && lane == 0) operation.finish(row, state, prepared);
}

/// A block has kThreads threads; a heavy operator may have fewer.
template <typename Operation, int kThreads, int kVectors>
__global__ void __launch_bounds__(kThreads,
                                  kBlocksPerMultiprocessor<typename Operation::Element, kThreads, kIsHeavy<Operation>>)
    row_per_block(const __grid_constant__ Operation operation, RowSplit split, typename Operation::State* pieces) {
  const int threads = kIsHeavy<Operation> ? static_cast<int>(blockDim.x) : kThreads;
  let_next_kernel_start();
  const auto [row, piece] = find_piece(split);
  const std::int64_t first = piece * split.piece_columns;
  const std::int64_t count = min(split.piece_columns, operation.view().column_count - first);
  typename Operation::Prepared prepared;
  auto state = operation.template reduce<kVectors>(row, first, count < 0 ? 0 : count, threadIdx.x, threads, prepared);
  state = reduce_block<kThreads>(state, typename Operation::Merge{}, threads);
#if __CUDA_ARCH__ >= 900
  if constexpr (kThreads == kPieceBlock<kIsHeavy<Operation>>) {  // other kernels never have a piece
    if (split.is_cluster) state = reduce_cluster(state, typename Operation::Merge{});
  }
#endif
  if (threadIdx.x == 0 && !(split.is_cluster && piece != 0))
    write_piece_or_finish(operation, pieces, row, piece, state, prepared);
}

/// Each thread owns kLaneRows neighbouring rows and walks down their columns; the warps of a block take turns.
template <typename Operation, int kLaneRows>
__global__ void __launch_bounds__(32 * kColumnWarps, kColumnBlocks)
    row_per_column(const __grid_constant__ Operation operation, TransposedTiles tiles,
                   typename Operation::State* pieces) {
  using State = typename Operation::State;
  constexpr int kTileRows = 32 * kLaneRows;
  let_next_kernel_start();
  const Tile tile = find_tile<kTileRows>(operation.view(), tiles);
  const std::int64_t lane_row = tile.lane_row + threadIdx.x * kLaneRows;
  State states[kLaneRows];
  if (lane_row < tile.lane_axis_size) {  // kLaneRows divides the axis: a lane has all of its rows or none
    operation.template reduce_columns<kColumnsAtATime, kLaneRows>(
        states, tile.outer_row + lane_row, tile.first_column + threadIdx.y, tile.last_column, kColumnWarps);
  }

  // The upper half of the warps hands its states to the lower half, until one warp is left.
  __shared__ alignas(State) unsigned char storage[kColumnWarps / 2 * kTileRows * sizeof(State)];
  auto* warp_states = reinterpret_cast<State(*)[kTileRows]>(storage);
#pragma unroll
  for (int half = kColumnWarps / 2; half > 0; half /= 2) {
    if (threadIdx.y >= half && threadIdx.y < 2 * half) {
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) warp_states[threadIdx.y - half][r * 32 + threadIdx.x] = states[r];
    }
    __syncthreads();
    if (threadIdx.y < half) {
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        states[r] = typename Operation::Merge{}(states[r], warp_states[threadIdx.y][r * 32 + threadIdx.x]);
      }
    }
    __syncthreads();  // before the next round overwrites the states just read
  }
  if (threadIdx.y != 0 || lane_row >= tile.lane_axis_size) return;
#pragma unroll
  for (int r = 0; r < kLaneRows; ++r) {
    const std::int64_t row = tile.outer_row + lane_row + r;
    write_piece_or_finish(operation, pieces, row, tile.piece, states[r], operation.prepare(row));
  }
}

/// A warp has a piece of a row and finds its elements one by one from the loops of the view. Operations without
/// kHasVectors use no other kernel.
template <typename Operation>
__global__ void __launch_bounds__(kLanesBlock)
    row_per_stride(const __grid_constant__ Operation operation, RowSplit split, typename Operation::State* pieces) {
  using State = typename Operation::State;
  using Merge = typename Operation::Merge;
  let_next_kernel_start();
  const std::int64_t step = std::int64_t{gridDim.x} * (kLanesBlock / 32);
  for (std::int64_t warp = (std::int64_t{blockIdx.x} * kLanesBlock + threadIdx.x) / 32;
       warp < operation.view().row_count * split.pieces; warp += step) {
    const std::int64_t row = divide(warp, split.pieces);
    const std::int64_t piece = warp - row * split.pieces;
    const std::int64_t first = piece * split.piece_columns;
    const std::int64_t last = min(first + split.piece_columns, operation.view().column_count);
    State state;
    // A row is read in runs, each summed on its own, or a row of millions of columns would become one running sum.
    constexpr std::int64_t kRunColumns = 32 * 256;
    for (std::int64_t begin = first; begin < last; begin += kRunColumns) {
      const std::int64_t end = min(begin + kRunColumns, last);
      state = Merge{}(state, operation.reduce_strided(row, begin + threadIdx.x % 32, end, 32));
    }
    state = reduce_lanes<32>(state, Merge{});
    if (threadIdx.x % 32 == 0) write_piece_or_finish(operation, pieces, row, piece, state, operation.prepare(row));
  }
}

template <typename Operation, int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
    merge_pieces(const __grid_constant__ Operation operation, const typename Operation::State* pieces,
                 std::int64_t piece_count) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  reduce_pieces<kWarps>(pieces, operation.view().row_count, piece_count, typename Operation::Merge{},
                        [&](std::int64_t row, const typename Operation::State& state) {
                          operation.finish(row, state, operation.prepare(row));
                        });
}

// ---- host ----------------------------------------------------------------------------------------------------------

/// The course of a reduction: its kernel, and how rows are cut. Launch and workspace both follow from it.
struct ReductionPlan {
  RowLayout layout;
  RowSplit split;         ///< contiguous, strided
  TransposedTiles tiles;  ///< transposed
  int lane_rows = 1;      ///< transposed: rows of one thread
  RowThreads threads;
  std::int64_t pieces = 1;  ///< states per row in the workspace; 1: no workspace

  /// Bytes of the states of `rows` rows.
  std::size_t workspace_bytes(std::int64_t rows, std::size_t state_bytes) const {
    return pieces == 1 ? 0 : static_cast<std::size_t>(pieces * rows) * state_bytes;
  }
};

/// Plans a reduction of the view's tensor 0, whose elements begin at `x`. `has_vectors` and `is_heavy` are kHasVectors
/// and kIsHeavy of the operation.
template <typename View>
ReductionPlan plan_reduction(const View& view, const void* x, DType dtype, bool has_vectors, Device device,
                             bool is_heavy = false) {
  const DeviceProperties& gpu = properties(device);
  const auto element_bytes = static_cast<std::int64_t>(size_of(dtype));
  const bool fits = ShortRowView<View::kColumns, View::kAll>::fits(view);
  ReductionPlan plan;
  plan.layout = has_vectors && fits ? view.layout : RowLayout::strided;
  if (plan.layout == RowLayout::transposed) {
    const std::int64_t lane_axis_size = view.rows.sizes[view.rows.rank - 1];
    if (!is_heavy && columns_are_aligned(view, 0, x, element_bytes))
      plan.lane_rows = static_cast<int>(16 / element_bytes);
    plan.tiles = tile_transposed(view.row_count / lane_axis_size, lane_axis_size, view.column_count,
                                 32 * plan.lane_rows, gpu.multiprocessors, kColumnBlocks);
    plan.pieces = plan.tiles.pieces;
    return plan;
  }
  const bool is_contiguous = plan.layout == RowLayout::contiguous;
  plan.threads = row_threads(view.column_count * element_bytes);
  plan.split = {1, view.column_count, false};
  if (plan.threads.threads > 32) {
    constexpr std::int64_t kEnoughForAnyGpu = std::int64_t{1} << 31;  // then only a row of more than 16 GiB is cut
    plan.split = split_rows(is_batch_invariant() ? kEnoughForAnyGpu : view.row_count, view.column_count, element_bytes,
                            gpu.multiprocessors, gpu.compute_capability >= 90 && is_contiguous);
    if (plan.split.pieces > 1) plan.threads = kPieceThreads;
  }
  plan.pieces = plan.split.is_cluster ? 1 : plan.split.pieces;
  return plan;
}

template <typename Operation>
void launch_contiguous(const char* op, const ReductionPlan& plan, const Operation& operation,
                       typename Operation::State* pieces, void* stream) {
  dispatch_row_threads<kIsHeavy<Operation>>(
      plan.threads, plan.split.pieces > 1, [&]<int kThreads, int kVectors>(int threads) {
        if constexpr (kThreads <= 32) {
          launch(op, row_per_lanes<Operation, kThreads, kVectors>,
                 {.blocks = ceil_divide(operation.view().row_count, kLanesBlock / threads),
                  .threads = kLanesBlock,
                  .stream = stream},
                 operation, threads);
        } else {
          launch(op, row_per_block<Operation, kThreads, kVectors>,
                 shape_of(plan.split, operation.view().row_count, threads, stream), operation, plan.split, pieces);
        }
      });
}

template <typename Operation>
void launch_merge(const char* op, const Operation& operation, const typename Operation::State* pieces,
                  std::int64_t piece_count, Device device, void* stream) {
  const auto merge = [&](auto kernel, int warps) {
    launch(op, kernel,
           {.blocks = ceil_divide(operation.view().row_count, 32),
            .threads = dim3(32, warps),
            .starts_before_previous_ends = properties(device).compute_capability >= 90,
            .stream = stream},
           operation, pieces, piece_count);
  };
  // As many warps as have room for their states in shared memory. For few pieces 8 warps, in a kernel with more
  // registers a thread. H200, classes of [4, 32768, 1024] bf16 side by side: 0.0833 ms, and 0.0859 ms with 8 warps of
  // the larger kernel.
  constexpr int kMostWarps = 32 * 33 * sizeof(typename Operation::State) <= (48 << 10) ? 32 : 16;
  piece_count <= 64 ? merge(merge_pieces<Operation, 8>, 8) : merge(merge_pieces<Operation, kMostWarps>, kMostWarps);
}

/// Reduces every row. `make(view)` returns the operation for either type of view, on elements of type T. `workspace`
/// has the plan's workspace_bytes().
template <typename T, typename View, typename MakeOperation>
void reduce_rows(const char* op, const ReductionPlan& plan, const View& view, Device device, void* workspace,
                 void* stream, MakeOperation make) {
  const auto run = [&](const auto& operation, auto launch_it) {
    using State = typename std::remove_cvref_t<decltype(operation)>::State;
    State* pieces = plan.pieces > 1 ? static_cast<State*>(workspace) : nullptr;
    launch_it(pieces);
    if (pieces != nullptr) launch_merge(op, operation, pieces, plan.pieces, device, stream);
  };
  if (plan.layout == RowLayout::strided) {
    const auto operation = make(view);
    const std::int64_t blocks = ceil_divide(view.row_count * plan.split.pieces, kLanesBlock / 32);
    return run(operation, [&](auto* pieces) {
      launch(op, row_per_stride<std::remove_cvref_t<decltype(operation)>>,
             {.blocks = std::min<std::int64_t>(blocks, 1 << 20), .threads = kLanesBlock, .stream = stream}, operation,
             plan.split, pieces);
    });
  }
  using Operation = decltype(make(std::declval<ShortRowView<View::kColumns, View::kAll>>()));
  if constexpr (kHasVectors<Operation>) {
    const Operation operation = make(ShortRowView<View::kColumns, View::kAll>(view));
    run(operation, [&](auto* pieces) {
      if (plan.layout == RowLayout::contiguous) return launch_contiguous(op, plan, operation, pieces, stream);
      const LaunchShape shape{
          .blocks = plan.tiles.tiles * plan.tiles.pieces, .threads = dim3(32, kColumnWarps), .stream = stream};
      if constexpr (!kIsHeavy<Operation>) {  // the code of several rows would be too long
        if (plan.lane_rows > 1) {
          return launch(op, row_per_column<Operation, Vector<T>::kSize>, shape, operation, plan.tiles, pieces);
        }
      }
      launch(op, row_per_column<Operation, 1>, shape, operation, plan.tiles, pieces);
    });
  }
}

}  // namespace eaves::cuda
