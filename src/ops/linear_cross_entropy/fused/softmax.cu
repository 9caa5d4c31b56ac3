// The loss alone by an online softmax (fused.h): the product finds the shift of each tile, and merge_tiles() merges the
// tiles of a row.
#include <cmath>

#include "cuda/softmax.cuh"
#include "ops/linear_cross_entropy/fused/sums.cuh"

namespace eaves::cuda {
namespace {

/// One thread per row.
__global__ void __launch_bounds__(kThreads)
    find_targets(const __grid_constant__ Targets targets, std::int64_t count, std::int32_t* to) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row < count) to[row] = targets.column(row);
}

/// One lane per row; the warps of a block share the tiles of their 32 rows. It finds a row's largest shift, then adds
/// up the tiles relative to that shift. Rows beyond the last one are read but not stored.
__global__ void __launch_bounds__(kThreads)
    merge_tiles(const __grid_constant__ GradientOfRows rows, const __grid_constant__ SumsOfTiles tiles,
                std::int64_t count, float* statistics) {
  static_assert(kExpProductRows % 32 == 0);  // the sums have rows up to a whole tile
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t row = std::int64_t{blockIdx.x} * 32 + lane;
  __shared__ float shared_largest[kWarps][32];
  __shared__ double shared_sums[kWarps][32];
  __shared__ double shared_moments[kWarps][32];
  float largest = -infinity<float>();
#pragma unroll 4
  for (std::int64_t tile = warp; tile < tiles.tiles; tile += kWarps) largest = fmaxf(largest, tiles.shift(tile, row));
  shared_largest[warp][lane] = largest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) largest = fmaxf(largest, shared_largest[i][lane]);
  Sums sums;
#pragma unroll 4
  for (std::int64_t tile = warp; tile < tiles.tiles; tile += kWarps) {
    const auto sum = double(tiles.sum(tile, row));
    if (sum == 0.0) continue;  // the tile's shift may then be any number
    const double up = double(softmax_anchor(tiles.shift(tile, row))) - double(softmax_anchor(largest));
    const double factor = exp2(up);
    sums.sum += factor * sum;
    if (tiles.moments != nullptr) sums.moment += factor * fma(up, sum, double(tiles.moment(tile, row)));
  }
  shared_sums[warp][lane] = sums.sum;
  shared_moments[warp][lane] = sums.moment;
  __syncthreads();
  if (warp != 0 || row >= count) return;
#pragma unroll
  for (int i = 1; i < kWarps; ++i) {
    sums.sum += shared_sums[i][lane];
    sums.moment += shared_moments[i][lane];
  }
  ClassStatistics<float> state;
  if (rows.targets.is_ignored(row)) {
    // The statistics of an ignored row are not used.
  } else if (fabsf(largest) < infinity<float>()) {
    state = statistics_of_sums(sums, largest, rows.transform);
  } else {
    state.softmax = {largest, static_cast<float>(sums.sum)};
    state.moment = 0.0f * state.softmax.sum;  // 0 if all logits are -infinity, else NaN
  }
  store_row_statistics(rows, row, state, statistics);
}

}  // namespace

void write_online_statistics(const FusedRows& rows, float* statistics) {
  const FusedMemory& memory = rows.memory;
  void* stream = rows.context.stream;
  launch(rows.op, find_targets, {.blocks = ceil_divide(rows.rows, kThreads), .threads = kThreads, .stream = stream},
         Targets(rows), rows.rows, memory.target);
  exp_product(rows.op, product_of(rows), ExpProductSoftmax{memory.tile_shifts, memory.sums, memory.moments},
              rows.context);
  launch(rows.op, merge_tiles, {.blocks = ceil_divide(rows.rows, 32), .threads = kThreads, .stream = stream},
         gradient_of(rows, {}), SumsOfTiles(rows), rows.rows, statistics);
}

}  // namespace eaves::cuda
