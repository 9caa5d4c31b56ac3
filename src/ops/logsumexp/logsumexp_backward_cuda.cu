// The backward of logsumexp on a GPU: g * exp(x - lse), elementwise, so every kernel only has to find a row's two
// numbers once and stream its elements:
//
//   lanes_gradient     short rows, many in a block      (unit stride)
//   piece_gradient     long rows, a block a piece       (unit stride)
//   column_gradient    rows side by side                (reduced along another axis)
//   element_gradient   anything else
#include <algorithm>
#include <cstdint>

#include "core/dispatch.h"
#include "cuda/columns.cuh"
#include "cuda/device.h"
#include "cuda/launch.cuh"
#include "cuda/math.cuh"
#include "cuda/row_policy.h"
#include "cuda/vector.cuh"
#include "ops/logsumexp/logsumexp_backend.h"

namespace eaves::cuda {
namespace {

constexpr const char* kOp = "logsumexp_backward";

using namespace logsumexp_tensors;

constexpr int kLanes = 8;         // that share a short row
constexpr int kLanesBlock = 128;  // threads of a block of short rows
// A block of long rows. H200, bf16, [4096, 131072] and [4096, 1024]: 32 x 4 0.504 ms and 7.6 us, 64 x 2 0.501 and 8.1,
// 128 x 2 0.501 and 9.1, 64 x 4 0.509 and 8.3, 32 x 2 0.639 and 9.4, 128 x 1 0.618 and 9.5; a plain copy 0.511 and 6.8.
constexpr int kGradientThreads = 32;
constexpr int kVectors = 4;        // that a thread loads before it stores the first
constexpr int kColumnWarps = 8;    // warps of a block that walk down columns side by side
constexpr int kColumns = 4;        // columns that a thread loads before it stores the first
constexpr int kColumnBlocks = 32;  // blocks for each multiprocessor: nothing is merged, so many and short ones

template <typename A, typename View = ShortRowView>
struct BackwardRows {
  View view;
  const void* x;
  const A* lse;
  const void* grad_out;
  DType grad_out_dtype;
  void* grad_x;
};

template <typename A>
struct RowGradient {
  A lse;
  A grad_out;

  /// g * exp(x - lse). The difference is taken before the product with log2(e): near 0, where the result is largest,
  /// it is exact, and a rounded lse * log2(e) would not be.
  __device__ A operator()(A x) const { return lse == -infinity<A>() ? A(0) : grad_out * exponential(x - lse); }
};

template <typename T, typename A, typename View>
__device__ RowGradient<A> load_row(const BackwardRows<A, View>& p, std::int64_t lse_offset,
                                   std::int64_t grad_out_offset) {
  // Of the type of x, or float32.
  const A grad_out = p.grad_out_dtype == kDTypeOf<T>
                         ? load_as_accumulator(static_cast<const T*>(p.grad_out)[grad_out_offset])
                         : static_cast<const float*>(p.grad_out)[grad_out_offset];
  return {p.lse[lse_offset], grad_out};
}

/// Short rows: kLanes lanes a row.
template <typename T>
__global__ void __launch_bounds__(kLanesBlock) lanes_gradient(BackwardRows<Accumulator<T>> p) {
  const std::int64_t row = (std::int64_t{blockIdx.x} * kLanesBlock + threadIdx.x) / kLanes;
  if (row >= p.view.row_count) return;
  const auto at = p.view.rows.offsets(row);
  transform<kVectors>(static_cast<const T*>(p.x) + at.of[kX], static_cast<T*>(p.grad_x) + at.of[kGradX],
                      p.view.column_count, 0, INT32_MAX, threadIdx.x % kLanes, kLanes,
                      [&] { return load_row<T>(p, at.of[kLse], at.of[kGradOut]); });
}

/// Long rows: a block a piece, and a piece is one batch of vectors for each thread.
template <typename T>
__global__ void __launch_bounds__(kGradientThreads) piece_gradient(BackwardRows<Accumulator<T>> p, unsigned pieces) {
  const unsigned row = blockIdx.x / pieces;
  const auto at = p.view.rows.offsets(row);
  transform<kVectors>(static_cast<const T*>(p.x) + at.of[kX], static_cast<T*>(p.grad_x) + at.of[kGradX],
                      p.view.column_count, blockIdx.x - row * pieces, kGradientThreads * kVectors, threadIdx.x,
                      kGradientThreads, [&] { return load_row<T>(p, at.of[kLse], at.of[kGradOut]); });
}

/// As row_per_column: each thread owns kLaneRows neighbouring rows and walks down their columns.
template <typename T, int kLaneRows>
__global__ void __launch_bounds__(32 * kColumnWarps)
    column_gradient(BackwardRows<Accumulator<T>> p, TransposedTiles tiles) {
  using A = Accumulator<T>;
  const Tile tile = find_tile<32 * kLaneRows>(p.view, tiles);
  const std::int64_t lane_row = tile.lane_row + threadIdx.x * kLaneRows;
  if (lane_row >= tile.lane_axis_size) return;
  const auto at = p.view.rows.offsets(tile.outer_row + lane_row);
  const int lane_axis = p.view.rows.rank - 1;
  RowGradient<A> gradients[kLaneRows];
#pragma unroll
  for (int r = 0; r < kLaneRows; ++r) {
    gradients[r] = load_row<T>(p, at.of[kLse] + r * p.view.rows.strides[kLse][lane_axis],
                               at.of[kGradOut] + r * p.view.rows.strides[kGradOut][lane_axis]);
  }
  const T* x = static_cast<const T*>(p.x) + at.of[kX];
  T* grad_x = static_cast<T*>(p.grad_x) + at.of[kGradX];
  transform_columns<kColumns, Side<T, kLaneRows>, kLaneRows>(
      x, p.view.column_strides[kX], grad_x, p.view.column_strides[kGradX], tile.first_column + threadIdx.y,
      tile.last_column, kColumnWarps, [&](A value, int r) { return gradients[r](value); });
}

/// A thread an element, wherever it lies.
template <typename T>
__global__ void __launch_bounds__(256) element_gradient(BackwardRows<Accumulator<T>, RowView> p) {
  const std::int64_t elements = p.view.row_count * p.view.column_count;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += step) {
    const std::int64_t row = divide(i, p.view.column_count);
    const auto row_at = p.view.rows.offsets(row);
    const auto column_at = p.view.columns.offsets(i - row * p.view.column_count);
    const RowGradient<Accumulator<T>> gradient = load_row<T>(p, row_at.of[kLse], row_at.of[kGradOut]);
    const T x = static_cast<const T*>(p.x)[row_at.of[kX] + column_at.of[kX]];
    static_cast<T*>(p.grad_x)[row_at.of[kGradX] + column_at.of[kGradX]] = round_to<T>(gradient(load_as_accumulator(x)));
  }
}

template <typename T>
void launch_lanes_gradient(const BackwardRows<Accumulator<T>>& p, void* stream) {
  launch(kOp, lanes_gradient<T>,
         {.blocks = ceil_divide(p.view.row_count, kLanesBlock / kLanes), .threads = kLanesBlock, .stream = stream}, p);
}

template <typename T>
void launch_piece_gradient(const BackwardRows<Accumulator<T>>& p, void* stream) {
  // Of whole vectors, wherever the first one starts.
  const std::int64_t vectors = p.view.column_count / Vector<T>::kSize;
  const std::int64_t pieces = std::max<std::int64_t>(1, ceil_divide(vectors, kGradientThreads * kVectors));
  launch(kOp, piece_gradient<T>, {.blocks = p.view.row_count * pieces, .threads = kGradientThreads, .stream = stream},
         p, static_cast<unsigned>(pieces));
}

template <typename T>
void backward(const LogsumexpBackwardProblem& problem, const ExecutionContext& context) {
  using A = Accumulator<T>;
  const RowView& view = problem.view;
  const auto element_bytes = static_cast<std::int64_t>(sizeof(T));
  const auto arguments = [&]<typename View>(const View& rows) {
    return BackwardRows<A, View>{
        rows, problem.x, static_cast<const A*>(problem.lse), problem.grad_out, problem.grad_out_dtype, problem.grad_x};
  };
  const std::int64_t row_bytes = view.column_count * element_bytes;

  if (ShortRowView::fits(view) && view.layout == RowLayout::contiguous && row_bytes >= 64 &&
      lie_alike(view, problem.x, problem.grad_x, element_bytes)) {
    const BackwardRows<A> p = arguments(ShortRowView(view));
    return row_bytes <= 512 ? launch_lanes_gradient<T>(p, context.stream) : launch_piece_gradient<T>(p, context.stream);
  }
  if (ShortRowView::fits(view) && view.layout == RowLayout::transposed) {
    const BackwardRows<A> p = arguments(ShortRowView(view));
    const std::int64_t lane_axis_size = view.rows.sizes[view.rows.rank - 1];
    const bool is_aligned = columns_are_aligned(view, kX, problem.x, element_bytes) &&
                            columns_are_aligned(view, kGradX, problem.grad_x, element_bytes);
    const int lane_rows = is_aligned ? Vector<T>::kSize : 1;
    const TransposedTiles tiles =
        tile_transposed(view.row_count / lane_axis_size, lane_axis_size, view.column_count, 32 * lane_rows,
                        properties(problem.device).multiprocessors, kColumnBlocks);
    const LaunchShape shape{
        .blocks = tiles.tiles * tiles.pieces, .threads = dim3(32, kColumnWarps), .stream = context.stream};
    return is_aligned ? launch(kOp, column_gradient<T, Vector<T>::kSize>, shape, p, tiles)
                      : launch(kOp, column_gradient<T, 1>, shape, p, tiles);
  }
  // Enough blocks to fill any GPU; the rest by steps.
  const std::int64_t blocks = std::min<std::int64_t>(ceil_divide(view.row_count * view.column_count, 256), 1 << 20);
  launch(kOp, element_gradient<T>, {.blocks = blocks, .threads = 256, .stream = context.stream}, arguments(view));
}

}  // namespace

void logsumexp_backward(const LogsumexpBackwardProblem& problem, const ExecutionContext& context) {
  const DeviceGuard guard(problem.device);
  dispatch_floating_point(problem.x_dtype, [&]<typename T>() { backward<T>(problem, context); });
}

}  // namespace eaves::cuda
