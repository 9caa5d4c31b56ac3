// How rows of unit stride meet the grid: the row or piece of each block, the kernel of each shape of the policy, and
// the joining of pieces. Every operator that reduces rows uses it.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/row_policy.h"

namespace eaves::cuda {

/// Threads of a block that has a piece of a row. A heavy operator handles part of a batch vector by vector, so its
/// batch, of 4 vectors a thread, is as large as the smallest piece (split_rows).
template <bool kIsHeavy>
inline constexpr int kPieceBlock = kIsHeavy ? 256 : kPieceThreads.threads;

/// Calls `function.operator()<kThreads, kVectors>(threads)` for the shape that the policy chose; every shape that
/// row_threads() returns is listed. A heavy operator has two kernels, one for lanes and one for blocks, with `threads`
/// as an argument, because its kernels take long to compile. H100, cross entropy of [4096, 32768] bf16 with soft
/// targets and with softcap: 64 threads 204.1 and 106.7 us, 128 threads 207.7 and 108.3.
template <bool kIsHeavy, typename Function>
void dispatch_row_threads(RowThreads shape, bool is_cut, Function function) {
  const auto call = [&]<int kThreads, int kVectors>() { function.template operator()<kThreads, kVectors>(kThreads); };
  if constexpr (kIsHeavy) {
    if (shape.threads <= 32) return function.template operator()<32, 2>(shape.threads <= 8 ? 8 : 32);
    return function.template operator()<kPieceBlock<true>, 4>(is_cut ? kPieceBlock<true> : 64);
  } else {
    if (shape == RowThreads{2, 1}) return call.template operator()<2, 1>();
    if (shape == RowThreads{2, 4}) return call.template operator()<2, 4>();
    if (shape == RowThreads{4, 4}) return call.template operator()<4, 4>();
    if (shape == RowThreads{8, 4}) return call.template operator()<8, 4>();
    if (shape == RowThreads{32, 4}) return call.template operator()<32, 4>();
    if (shape == RowThreads{128, 4}) return call.template operator()<128, 4>();
    if (shape == RowThreads{256, 4}) return call.template operator()<256, 4>();
    if (shape == RowThreads{512, 4}) return call.template operator()<512, 4>();
    throw std::logic_error("row_policy.h has a shape that row_launch.cuh does not know");
  }
}

/// Blocks that a multiprocessor holds at once, which bounds a kernel's registers. Kernels with much arithmetic get
/// fewer. They still spill some registers; the spills cost less than the added threads gain. H100, cross entropy of
/// [4096, 32768] bf16: 1024 threads 99.8 us with label smoothing, 108.0 with softcap, 103.3 with argmax; 768 threads
/// 102.0, 112.3, 105.9.
template <typename T, int kThreads, bool kIsHeavy>
inline constexpr int kBlocksPerMultiprocessor = (sizeof(T) == 8 ? 512
                                                 : kIsHeavy     ? 1024
                                                                : 1536) /
                                                kThreads;

struct Piece {
  std::int64_t row;
  std::int64_t piece;
};

/// Neighbouring blocks take neighbouring memory: pieces of one row, or else whole rows.
__device__ inline Piece find_piece(const RowSplit& split) {
  if (split.pieces > 1) return {blockIdx.y, blockIdx.x};
  return {blockIdx.x, 0};
}

/// The grid for find_piece. Rows are cut only if they are few, and then fit the grid's y axis.
inline LaunchShape shape_of(const RowSplit& split, std::int64_t rows, int threads, void* stream) {
  const bool is_cut = split.pieces > 1;
  return {.blocks = is_cut ? split.pieces : rows,
          .blocks_y = is_cut ? rows : 1,
          .threads = threads,
          .cluster_blocks = split.is_cluster ? static_cast<int>(split.pieces) : 1,
          .stream = stream};
}

/// Joins the states `pieces`, [piece_count, row_count], of 32 rows. A lane has a row, and the kWarps warps of the block
/// share its pieces. Calls `finish(row, state)` in one thread for each row.
template <int kWarps, typename State, typename Merge, typename Finish>
__device__ void reduce_pieces(const State* pieces, std::int64_t row_count, std::int64_t piece_count, Merge merge,
                              Finish finish) {
  const std::int64_t first_row = std::int64_t{blockIdx.x} * 32;
  State state{};
  if (first_row + threadIdx.x < row_count) {
#pragma unroll 8  // the loads do not wait for each other
    for (std::int64_t piece = threadIdx.y; piece < piece_count; piece += kWarps) {
      state = merge(state, pieces[piece * row_count + first_row + threadIdx.x]);
    }
  }
  __shared__ alignas(State) unsigned char storage[32 * (kWarps + 1) * sizeof(State)];
  auto* states = reinterpret_cast<State(*)[kWarps + 1]>(storage);
  states[threadIdx.x][threadIdx.y] = state;
  __syncthreads();
  // Transposed: kWarps neighbouring lanes have a row.
  const int thread = static_cast<int>(threadIdx.y * 32 + threadIdx.x);
  state = reduce_lanes<kWarps>(states[thread / kWarps][thread % kWarps], merge);
  const std::int64_t row = first_row + thread / kWarps;
  if (thread % kWarps == 0 && row < row_count) finish(row, state);
}

}  // namespace eaves::cuda
