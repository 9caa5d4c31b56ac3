// The loops over rows, tiles of rows and pieces of their columns that operators share, for any layout. They reduce each
// row to the statistics of its softmax, or map it to a multiple of that softmax, as a gradient needs it. Operators
// supply the code that reads and writes other data of a row. Compiled once per level of vector instructions, like
// simd.h.
#include <hwy/cache_control.h>

#include <algorithm>
#include <cstdint>

#include "core/rows.h"
#include "cpu/cache.h"
#include "cpu/columns.h"
#include "cpu/gather.h"
#include "cpu/parallel.h"
#include "cpu/row_pieces.h"
#include "cpu/simd.h"
#include "cpu/softmax.h"

#if defined(EAVES_CPU_ROW_SOFTMAX_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EAVES_CPU_ROW_SOFTMAX_H_
#undef EAVES_CPU_ROW_SOFTMAX_H_
#else
#define EAVES_CPU_ROW_SOFTMAX_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {

/// A tensor with columns: its memory, and its number in the view.
template <typename T>
struct ColumnTensor {
  T* data;
  int number;

  template <typename View>
  T* row(const View& view, std::int64_t row) const {
    return data + view.rows.offsets(row).of[number];
  }
};

// ------------------------------------------------------------------------------------------------------ reductions

template <typename T, typename View>
RowState reduce_piece(const View& view, ColumnTensor<const T> x, const ColumnPiece& piece) {
  const T* row = x.row(view, piece.group);
  if (view.layout == RowLayout::contiguous) {
    return reduce_columns<T>(piece.begin, piece.end, [row](std::int64_t column, std::int64_t) { return row + column; });
  }
  Gather gather(view.columns, row, x.number);
  return reduce_columns<Accumulator<T>>(piece.begin, piece.end, gather);
}

/// Reduces the rows of a tile over one piece of their columns.
template <typename T, typename View>
void reduce_tile_piece(const View& view, ColumnTensor<const T> x, const Tiles<T>& tiles, const ColumnPiece& piece,
                       RowState* states) {
  const std::int64_t stride = view.columns.strides[x.number][0];
  const T* first = x.row(view, tiles.first_row(piece.group)) + piece.begin * stride;
  reduce_tile(first, stride, piece.end - piece.begin, tiles.width(piece.group), states);
}

/// Reduces all rows. Calls `store(first_row, count, states)` from many threads for consecutive rows, at most as many as
/// a tile has.
template <typename T, typename View, typename Store>
void reduce_softmax(const View& view, ColumnTensor<const T> x, const ExecutionContext& context, Store&& store) {
  if (Tiles<T>::fit(view)) {
    const Tiles<T> tiles(view);
    return reduce_pieces<RowState, Tiles<T>::kWidth>(
        tiles.pieces(view.column_count), context,
        [&](const ColumnPiece& piece, RowState* states) { reduce_tile_piece(view, x, tiles, piece, states); },
        [&](std::int64_t tile, const RowState* states) { store(tiles.first_row(tile), tiles.width(tile), states); });
  }
  const ColumnPieces pieces(view.column_count, view.row_count, 1);
  const auto reduce = [&](const ColumnPiece& piece, RowState* state) { *state = reduce_piece(view, x, piece); };
  if (pieces.count > 1) {
    return reduce_pieces<RowState, 1>(pieces, context, reduce,
                                      [&](std::int64_t row, const RowState* state) { store(row, 1, state); });
  }
  parallel_for(context, view.row_count, pieces.grain(), [&](std::int64_t begin, std::int64_t end) {
    constexpr std::int64_t kAtOnce = 8;
    RowState states[kAtOnce];
    for (std::int64_t row = begin; row < end; row += kAtOnce) {
      const std::int64_t count = std::min(kAtOnce, end - row);
      for (std::int64_t i = 0; i < count; ++i) reduce(pieces[row + i], states + i);
      store(row, count, states);
    }
  });
}

/// Makes a `store` for reduce_softmax() from `store(row, state)`.
template <typename Store>
auto row_by_row(Store store) {
  return [store](std::int64_t first_row, std::int64_t count, const RowState* states) {
    for (std::int64_t i = 0; i < count; ++i) store(first_row + i, states[i]);
  };
}

// ------------------------------------------------------------------------------------------------------------- maps

/// The map of a row x to scale * exp(x - lse).
template <typename A>
struct ScaledSoftmax {
  A lse;
  A scale;
  bool is_zero = false;        ///< the row becomes 0, and x is not read
  std::int64_t replaced = -1;  ///< this column becomes `value`; ignored outside of the written columns
  A value = A(0);
};

/// True if stores should bypass the caches: the tensor is too large for them, and the ends of a row, which take
/// ordinary stores, are a small part of it.
template <typename T, typename View>
bool is_written_past_caches(const View& view) {
  constexpr std::int64_t kLongEnough = 1024 / sizeof(T);
  const auto bytes = static_cast<std::size_t>(view.row_count * view.column_count) * sizeof(T);
  return view.layout == RowLayout::contiguous && is_beyond_caches(bytes) && view.column_count >= kLongEnough;
}

/// Maps `count` contiguous elements; the caller writes the replaced one. `to` may begin at `x`, also for an R that is
/// narrower than T.
template <bool kNonTemporal, typename T, typename R>
void write_contiguous_softmax(const T* x, R* to, std::int64_t count, const ScaledSoftmax<Accumulator<R>>& softmax) {
  if (softmax.is_zero) {
    fill<kNonTemporal>(to, count, Accumulator<R>(0));
  } else {
    write_scaled_softmax<kNonTemporal>(x, to, count, softmax.lse, softmax.scale);
  }
}

template <bool kNonTemporal, typename T, typename View>
void write_softmax_piece(const View& view, ColumnTensor<const T> x, ColumnTensor<T> to, const ColumnPiece& piece,
                         const ScaledSoftmax<Accumulator<T>>& softmax) {
  using A = Accumulator<T>;
  const T* from_row = x.row(view, piece.group);
  T* to_row = to.row(view, piece.group);
  if (view.layout == RowLayout::contiguous) {
    write_contiguous_softmax<kNonTemporal>(from_row + piece.begin, to_row + piece.begin, piece.end - piece.begin,
                                           softmax);
  } else {
    const std::int64_t block = block_size<A>();
    Gather gather(view.columns, from_row, x.number);
    Block<A> result{};
    for (std::int64_t column = piece.begin; column < piece.end; column += block) {
      const std::int64_t count = std::min(block, piece.end - column);
      if (!softmax.is_zero) {
        write_scaled_softmax<false>(gather(column, count), result.elements, count, softmax.lse, softmax.scale);
      }
      scatter(result.elements, view.columns, to.number, column, count, to_row);
    }
  }
  if (softmax.replaced >= piece.begin && softmax.replaced < piece.end) {
    to_row[view.columns.offsets(softmax.replaced).of[to.number]] = round_to<T>(softmax.value);
  }
}

/// Maps a piece of the columns of a tile. Calls `softmax_of(row, piece)` for each row before it writes anything.
template <typename T, typename View, typename SoftmaxOf>
void write_softmax_tile(const View& view, ColumnTensor<const T> x, ColumnTensor<T> to, const Tiles<T>& tiles,
                        const ColumnPiece& piece, SoftmaxOf&& softmax_of) {
  using A = Accumulator<T>;
  using Softmax = ScaledSoftmax<A>;
  const auto pack = static_cast<std::int64_t>(pack_size<T>());
  const Tag<T> d;
  const auto lanes = hn::Lanes(d);
  HWY_ALIGN A lse[Tiles<T>::kMostWidth];
  HWY_ALIGN A scale[Tiles<T>::kMostWidth];
  HWY_ALIGN A kept[Tiles<T>::kMostWidth];  // 0 for a row with is_zero
  A value[Tiles<T>::kMostWidth];
  std::int64_t replaced[Tiles<T>::kMostWidth];

  const std::int64_t first_row = tiles.first_row(piece.group);
  const std::int64_t width = tiles.width(piece.group);
  bool has_zeros = false;
  for (std::int64_t i = 0; i < ceil_divide(width, pack) * pack; ++i) {
    const std::int64_t row = std::min(element_of<T>(i), width - 1);  // lanes beyond the tile repeat its last row
    const Softmax softmax = softmax_of(first_row + row, piece);
    lse[i] = softmax.lse;
    scale[i] = softmax.scale;
    kept[i] = softmax.is_zero ? A(0) : A(1);
    has_zeros = has_zeros || softmax.is_zero;
    replaced[row] = softmax.replaced;
    value[row] = softmax.value;
  }

  const T* from_row = x.row(view, first_row);
  T* to_row = to.row(view, first_row);
  const std::int64_t from_stride = view.columns.strides[x.number][0];
  const std::int64_t to_stride = view.columns.strides[to.number][0];
  for (std::int64_t column = piece.begin; column < piece.end; ++column) {
    const T* from = from_row + column * from_stride;
    T* out = to_row + column * to_stride;
    for (std::int64_t row = 0; row < width; row += pack) {
      const Pack<T> v = load_some(from + row, width - row, T{});
      const auto map = [&](std::size_t vector, VectorOf<T> element) HWY_ATTR {
        const std::size_t at = static_cast<std::size_t>(row) + vector * lanes;
        const auto result = scaled_softmax<T>(element, hn::Load(d, lse + at), hn::Load(d, scale + at));
        if (!has_zeros) return result;
        return hn::IfThenElseZero(hn::Gt(hn::Load(d, kept + at), hn::Zero(d)), result);
      };
      store_some(Pack<T>{map(0, v.v0), map(1, v.v1), map(2, v.v2), map(3, v.v3)}, out + row, width - row);
    }
  }
  for (std::int64_t row = 0; row < width; ++row) {
    if (replaced[row] < piece.begin || replaced[row] >= piece.end) continue;
    to_row[replaced[row] * to_stride + row] = round_to<T>(value[row]);
  }
}

/// Calls `body(piece)` for all pieces, from many threads; waits for non-temporal stores.
template <typename Body>
void for_each_piece(const ColumnPieces& pieces, const ExecutionContext& context, bool is_non_temporal, Body&& body) {
  parallel_for(context, pieces.tasks(), pieces.grain(), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t task = begin; task < end; ++task) body(pieces[task]);
    if (is_non_temporal) hwy::FlushStream();
  });
}

/// The same for the pieces of all rows of a view.
template <typename View, typename Body>
void for_each_row_piece(const View& view, const ExecutionContext& context, bool is_non_temporal, Body&& body) {
  for_each_piece(ColumnPieces(view.column_count, view.row_count, 1), context, is_non_temporal, body);
}

/// Maps `x` to `to`, which may be the same memory. `softmax_of(row, piece)` returns the ScaledSoftmax of a row for one
/// piece; a replaced column outside of the piece is ignored. It may read the piece's elements of `x`, which are not
/// overwritten yet; elements of other pieces may be.
template <typename T, typename View, typename SoftmaxOf>
void write_softmax(const View& view, ColumnTensor<const T> x, ColumnTensor<T> to, const ExecutionContext& context,
                   SoftmaxOf&& softmax_of) {
  if (Tiles<T>::fit(view)) {
    const auto tiles = Tiles<T>::of_map(view);
    const ColumnPieces pieces = tiles.pieces(view.column_count);
    parallel_for(context, pieces.tasks(), pieces.grain(), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t task = begin; task < end;) {
        // Joins consecutive pieces of a tile, because write_softmax_tile() prepares every row of the tile once a call.
        ColumnPiece piece = pieces[task];
        task = std::min(end, (piece.group + 1) * pieces.count);
        piece.end = pieces[task - 1].end;
        write_softmax_tile(view, x, to, tiles, piece, softmax_of);
      }
    });
    return;
  }
  // In place, the lines to write are in the caches already.
  const bool is_non_temporal = x.data != to.data && is_written_past_caches<T>(view);
  for_each_row_piece(view, context, is_non_temporal, [&](const ColumnPiece& piece) {
    const auto write = is_non_temporal ? write_softmax_piece<true, T, View> : write_softmax_piece<false, T, View>;
    write(view, x, to, piece, softmax_of(piece.group, piece));
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();
#endif  // per target
