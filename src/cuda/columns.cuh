// Rows that lie side by side (RowLayout::transposed). A warp covers neighbouring rows and walks down their columns: it
// reads whole lines of memory without a transposed copy.
#pragma once

#include "core/rows.h"
#include "cuda/row_policy.h"
#include "cuda/softmax.cuh"
#include "cuda/vector.cuh"

namespace eaves::cuda {

/// The elements of neighbouring rows in one column: a vector of T, or a single element if vectors do not fit.
template <typename T, int kLaneRows>
struct Side {
  using A = Accumulator<T>;
  Vector<T> vector;

  __device__ static Side read(const T* address) { return {load(reinterpret_cast<const Vector<T>*>(address))}; }
  __device__ static Side minus_infinity() { return {cuda::minus_infinity<T>()}; }
  __device__ void unpack(A (&values)[kLaneRows]) const { cuda::unpack(vector, values); }
  __device__ static Side max(const Side& a, const Side& b) { return {max_each(a.vector, b.vector)}; }
  __device__ static void write(T* address, const A (&values)[kLaneRows]) {
    *reinterpret_cast<Vector<T>*>(address) = pack<T>(values);
  }
};

template <typename T>
struct Side<T, 1> {
  using A = Accumulator<T>;
  A value;

  __device__ static Side read(const T* address) { return {load_as_accumulator(*address)}; }
  __device__ static Side minus_infinity() { return {-infinity<A>()}; }
  __device__ void unpack(A (&values)[1]) const { values[0] = value; }
  __device__ static Side max(const Side& a, const Side& b) { return {fmax(a.value, b.value)}; }
  __device__ static void write(T* address, const A (&values)[1]) { *address = round_to<T>(values[0]); }
};

/// The rows and columns of one block of a column kernel.
struct Tile {
  std::int64_t piece;
  std::int64_t outer_row;  ///< the row at the start of the lane axis
  std::int64_t lane_row;   ///< the tile's first row on the lane axis
  std::int64_t lane_axis_size;
  std::int64_t first_column;
  std::int64_t last_column;  ///< exclusive
};

template <int kTileRows, typename View>
__device__ Tile find_tile(const View& view, const TransposedTiles& tiles) {
  Tile tile;
  tile.lane_axis_size = view.rows.sizes[view.rows.rank - 1];
  tile.piece = divide(blockIdx.x, tiles.tiles);
  const std::int64_t index = blockIdx.x - tile.piece * tiles.tiles;
  const std::int64_t outer = divide(index, tiles.tiles_per_lane_axis);
  tile.lane_row = (index - outer * tiles.tiles_per_lane_axis) * kTileRows;
  tile.outer_row = outer * tile.lane_axis_size;
  tile.first_column = tile.piece * tiles.piece_columns;
  tile.last_column = min(tile.first_column + tiles.piece_columns, view.column_count);
  return tile;
}

/// Loads columns first, first + step, ... below `last`, kColumns at a time, and calls `body(batch, column)` with the
/// number of the batch's first column. Places after the last column hold -inf.
template <int kColumns, typename Lanes, typename T, typename Body>
__device__ void for_each_batch_of_columns(const T* x, std::int64_t column_stride, std::int64_t first, std::int64_t last,
                                          int step, Body body) {
  const T* address = x + first * column_stride;
  const std::int64_t address_step = step * column_stride;
  std::int64_t column = first;
  for (; column + (kColumns - 1) * step < last; column += kColumns * step, address += kColumns * address_step) {
    Lanes batch[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) batch[c] = Lanes::read(address + c * address_step);
    body(batch, column);
  }
  if (column < last) {
    Lanes batch[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      batch[c] = column + c * step < last ? Lanes::read(address + c * address_step) : Lanes::minus_infinity();
    }
    body(batch, column);
  }
}

/// Writes function(value, row, column) of columns first, first + step, ... below `last` to another tensor, kColumns at
/// a time.
template <int kColumns, typename Lanes, int kLaneRows, typename T, typename Function>
__device__ void transform_columns(const T* in, std::int64_t in_stride, T* out, std::int64_t out_stride,
                                  std::int64_t first, std::int64_t last, int step, Function function) {
  for (std::int64_t column = first; column < last; column += kColumns * step) {
    Lanes batch[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (column + c * step < last) batch[c] = Lanes::read(in + (column + c * step) * in_stride);
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (column + c * step >= last) break;
      Accumulator<T> values[kLaneRows];
      batch[c].unpack(values);
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) values[r] = function(values[r], r, column + c * step);
      Lanes::write(out + (column + c * step) * out_stride, values);
    }
  }
}

/// Takes a batch of columns into the states of the rows side by side. `anchors` belong to the states, and start at 0
/// like the anchor of a default-constructed state. An anchor follows its maximum only when it has fallen far behind:
/// moving one costs as much as several elements.
template <typename A, int kLaneRows, int kColumns, typename Lanes>
__device__ void accumulate(SoftmaxState<A> (&states)[kLaneRows], A (&anchors)[kLaneRows],
                           const Lanes (&batch)[kColumns]) {
  Lanes largest = batch[0];
#pragma unroll
  for (int c = 1; c < kColumns; ++c) largest = Lanes::max(largest, batch[c]);
  A max[kLaneRows];
  largest.unpack(max);
  bool is_behind = false;
#pragma unroll
  for (int r = 0; r < kLaneRows; ++r) is_behind = is_behind || max[r] > states[r].max + A(kSoftmaxSlack);
  if (is_behind) {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      raise_max(states[r], fmax(states[r].max, max[r]));
      anchors[r] = softmax_anchor(states[r].max);
    }
  }
  // A batch is summed on its own first, or a row of millions of columns would become one running sum.
  A sums[kLaneRows];
  with_exponential_minus(anchors, [&](auto exponential_minus_anchor, auto corrected) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      A values[kLaneRows];
      batch[c].unpack(values);
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        const A term = exponential_minus_anchor(values[r], r);
        sums[r] = c == 0 ? term : sums[r] + term;
      }
    }
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) states[r].sum += corrected(sums[r], r);
  });
}

/// Takes columns first, first + step, ... below `last` of rows side by side into their states.
template <int kColumns, typename T, typename A, int kLaneRows>
__device__ void accumulate_columns(SoftmaxState<A> (&states)[kLaneRows], const T* x, std::int64_t column_stride,
                                   std::int64_t first, std::int64_t last, int step) {
  using Lanes = Side<T, kLaneRows>;
  A anchors[kLaneRows] = {};
  for_each_batch_of_columns<kColumns, Lanes>(
      x, column_stride, first, last, step,
      [&](const Lanes(&batch)[kColumns], std::int64_t) { accumulate(states, anchors, batch); });
}

}  // namespace eaves::cuda
