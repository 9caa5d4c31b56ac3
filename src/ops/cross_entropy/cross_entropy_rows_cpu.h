// The rows of a call of cross_entropy on the CPU, and their statistics. Compiled once per level of vector
// instructions.
#include <algorithm>
#include <cmath>

#include "cpu/row_softmax.h"
#include "cpu/weighted_softmax.h"
#include "ops/cross_entropy/cross_entropy_results.h"

#if defined(EAVES_CROSS_ENTROPY_ROWS_CPU_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EAVES_CROSS_ENTROPY_ROWS_CPU_H_
#undef EAVES_CROSS_ENTROPY_ROWS_CPU_H_
#else
#define EAVES_CROSS_ENTROPY_ROWS_CPU_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {
namespace {

struct RowStatistics : ClassStatistics<double> {
  double largest = -infinity<double>();  ///< the largest z'; softmax.max may lag behind it
};

RowStatistics merge(const RowStatistics& a, const RowStatistics& b) {
  return {merged(a, b), std::max(a.largest, b.largest)};
}

/// z' and dz'/dz.
struct Transformed {
  double logit, derivative;
};

double derivative_of(double logit, const Terms& terms) {
  if (terms.softcap == 0.0) return terms.scale;
  const double e = std::exp(-2.0 * std::abs(logit * terms.scale / terms.softcap));
  return terms.scale * 4.0 * e / ((1.0 + e) * (1.0 + e));
}

/// Computes z' of a block of accumulators; `to` may be `z`.
template <typename A>
void transform_block(const A* z, std::int64_t count, const Terms& terms, A* to, A* derivative) {
  const A scale = static_cast<A>(terms.scale);
  if (terms.softcap != 0.0) return softcap_block(z, count, scale, static_cast<A>(terms.softcap), to, derivative);
  if (z != to) std::copy_n(z, count, to);
  if (terms.scale != 1.0) scale_block(to, count, scale);
}

/// The logits of a call, of element type T, and the other inputs of its rows.
template <typename T>
class Rows {
 public:
  using A = Accumulator<T>;
  static constexpr std::int64_t kBlocks = 2;  // half of block_size(): logits, weights and derivatives share L1

  explicit Rows(const CrossEntropyInputs& inputs) : inputs_(inputs), terms_(inputs) {}

  const CrossEntropyInputs& inputs() const { return inputs_; }
  const CrossEntropyView& view() const { return inputs_.view; }
  const Terms& terms() const { return terms_; }
  ColumnTensor<const T> logits() const { return {static_cast<const T*>(inputs_.logits), kLogits}; }

  struct Row {
    StridedLoop<CrossEntropyView::kAll>::Offsets at;
    std::int64_t target;  ///< 0 for soft targets
    bool is_ignored;
  };
  Row row(std::int64_t index) const {
    Row result{view().rows.offsets(index), 0, false};
    if (!terms_.is_soft) result.target = integer_at(inputs_.targets, result.at.of[kTargets]);
    result.is_ignored = terms_.is_ignored(result.target);
    return result;
  }

  /// The column of the target, or -1 if these logits do not have it.
  std::int64_t target_column(const Row& row) const {
    const std::int64_t column = row.target - terms_.first_class;
    const bool is_here = !terms_.is_soft && !row.is_ignored && column >= 0 && column < view().column_count;
    return is_here ? column : -1;
  }
  /// z' and dz'/dz of one logit, by the code of the loops over all classes: lse - z' of an almost certain class is then
  /// small, and not negative.
  Transformed logit(const Row& row, std::int64_t column) const {
    HWY_ALIGN A z[hn::MaxLanes(Tag<A>())] = {};
    z[0] = load_as_accumulator(logits().data[row.at.of[kLogits] + view().columns.offsets(column).of[kLogits]]);
    const double derivative = derivative_of(z[0], terms_);
    transform_block(z, 1, terms_, z, static_cast<A*>(nullptr));
    return {z[0], derivative};
  }
  TargetClass<double> target_class(const Row& row) const {
    const std::int64_t column = target_column(row);
    if (column < 0) return {};
    return {logit(row, column).logit, weight_at(inputs_, column)};
  }

  static std::int64_t block() { return block_size<A>() / kBlocks; }

  /// The logits of columns [begin, begin + count) as accumulators: in `to`, or the tensor itself if it needs no
  /// conversion.
  const A* read_logits(const Row& row, std::int64_t begin, std::int64_t count, A* to) const {
    return read<T>(logits().data + row.at.of[kLogits], kLogits, begin, count, to);
  }

  /// u of ClassStatistics for columns [begin, begin + count), if it is not 1.
  const A* read_factors(const Row& row, std::int64_t begin, std::int64_t count, Block<A>& to, Block<A>& extra) const {
    if (!terms_.is_soft) return read_weights(begin, count, to.elements);
    const std::int64_t first = row.at.of[kSoftTargets];
    const A* q =
        inputs_.targets.dtype == kDTypeOf<T>
            ? read<T>(static_cast<const T*>(inputs_.targets.data) + first, kSoftTargets, begin, count, to.elements)
            : read<float>(static_cast<const float*>(inputs_.targets.data) + first, kSoftTargets, begin, count,
                          to.elements);
    if (terms_.smoothing == 0.0 && !terms_.has_weight) return q;
    if (q != to.elements) std::copy_n(q, count, to.elements);
    if (terms_.smoothing != 0.0) {
      blend_block(to.elements, count, static_cast<A>(1.0 - terms_.smoothing),
                  static_cast<A>(terms_.smoothing_per_class));
    }
    if (terms_.has_weight) multiply_block(read_weights(begin, count, extra.elements), count, to.elements);
    return to.elements;
  }

 private:
  /// Reads columns of any element type as accumulators of T.
  template <typename S>
  const A* read(const S* row, int tensor, std::int64_t begin, std::int64_t count, A* to) const {
    if (view().layout != RowLayout::contiguous) {
      gather(row, view().columns, tensor, begin, count, to);
      return to;
    }
    return read_contiguous(row + begin, count, to);
  }
  template <typename S>
  static const A* read_contiguous(const S* from, std::int64_t count, A* to) {
    if constexpr (std::is_same_v<S, A>) {
      // The caller reads whole vectors, so an incomplete last vector is copied to a buffer that has all of it.
      if (count % static_cast<std::int64_t>(hn::Lanes(Tag<A>())) == 0) return from;
      std::copy_n(from, count, to);
    } else if constexpr (std::is_same_v<Accumulator<S>, A>) {
      widen(from, count, to);
    } else {
      std::transform(from, from + count, to, [](S value) { return static_cast<A>(value); });
    }
    return to;
  }
  const A* read_weights(std::int64_t begin, std::int64_t count, A* to) const {
    if (inputs_.weight.dtype == kDTypeOf<T>) {
      return read_contiguous(static_cast<const T*>(inputs_.weight.data) + begin, count, to);
    }
    return read_contiguous(static_cast<const float*>(inputs_.weight.data) + begin, count, to);
  }

  const CrossEntropyInputs& inputs_;
  Terms terms_;
};

/// Adds columns [column, column + count), at most a block, to the statistics of a row that the plan needs. `z` holds
/// their logits; `buffer`, which may be `z`, is overwritten.
template <typename T>
void add_with_options(const Rows<T>& rows, const typename Rows<T>::Row& row, std::int64_t column, std::int64_t count,
                      const Accumulator<T>* z, Accumulator<T>* buffer, RowStatistics& state) {
  using A = Accumulator<T>;
  constexpr A kRise = A(4);  // the anchor follows the largest element after this rise
  static_assert(kRise <= A(kSoftmaxSlack));
  const Terms& terms = rows.terms();
  const LossPlan& plan = rows.inputs().plan;
  A max = max_of(z, count);
  RowStatistics block;
  if (plan.has_best && (max > state.best_value || state.best == kNoClass)) {
    const std::int64_t best = find_first(z, count, max);
    if (best < count) {
      block.best = terms.first_class + column + best;
      block.best_value = max;
    }
  }
  if (plan.has_transform) {
    transform_block(z, count, terms, buffer, static_cast<A*>(nullptr));
    z = buffer;
    max = max_of(z, count);
  }
  block.largest = max;
  block.softmax.max = max <= static_cast<A>(state.softmax.max) + kRise ? state.softmax.max : max;
  const A anchor = softmax_anchor(static_cast<A>(block.softmax.max));
  if (plan.has_moment || plan.has_square) {
    const ExpSums sums = exp_sums(z, count, anchor);
    block.softmax.sum = sums.sum;
    block.moment = sums.moment;
    block.square = sums.square;
  } else {
    block.softmax.sum = exact_sum_of_exp(z, count, anchor);
  }
  if (plan.has_logit_sum) {
    Block<A> factors, extra;
    // Sums of differences from the anchor keep the digits of logits that are all far from 0.
    const A* u = plan.has_factors ? rows.read_factors(row, column, count, factors, extra) : nullptr;
    if (u == nullptr) {
      block.factor_sum = static_cast<double>(count);
      block.logit_sum = sum_of_differences(z, count, anchor) + block.factor_sum * anchor;
    } else {
      const WeightedSums sums = weighted_sums(z, u, count, anchor);
      block.factor_sum = sums.weight_sum;
      block.logit_sum = sums.weighted_sum + sums.weight_sum * anchor;
    }
  }
  state = merge(state, block);
}

/// The statistics of some columns of a row.
template <typename T>
RowStatistics reduce_with_options(const Rows<T>& rows, const ColumnPiece& piece) {
  const auto row = rows.row(piece.group);
  Block<Accumulator<T>> buffer;
  RowStatistics state;
  for (std::int64_t column = piece.begin; column < piece.end; column += rows.block()) {
    const std::int64_t count = std::min(rows.block(), piece.end - column);
    const auto* z = rows.read_logits(row, column, count, buffer.elements);
    add_with_options(rows, row, column, count, z, buffer.elements, state);
  }
  return state;
}

/// The statistics of the rows of a tile. A few columns of a pack of rows are transposed at a time, so that each cache
/// line is read once and not once for each of its rows.
template <typename T, typename IsSkipped>
void reduce_tile_with_options(const Rows<T>& rows, const Tiles<T>& tiles, const ColumnPiece& piece,
                              IsSkipped&& is_skipped, RowStatistics* states) {
  using A = Accumulator<T>;
  constexpr std::int64_t kColumns = 256;          // of at most 128 rows of float32: 128 KiB, in L2
  constexpr std::int64_t kPitch = kColumns + 16;  // a power of two would put a column's elements into few sets of L1
  constexpr std::int64_t kRows = kMaxPackSize<T>;
  static_assert(kColumns % kRows == 0, "whole packs are written");
  HWY_ALIGN A turned[kRows * kPitch];
  HWY_ALIGN A side[kRows];
  const std::int64_t stride = rows.view().columns.strides[kLogits][0];
  const std::int64_t first = tiles.first_row(piece.group);
  const std::int64_t width = tiles.width(piece.group);
  const auto pack = static_cast<std::int64_t>(pack_size<T>());
  for (std::int64_t begin = 0; begin < width; begin += pack) {
    const std::int64_t row_count = std::min(pack, width - begin);
    const T* from = rows.logits().row(rows.view(), first + begin);
    std::fill_n(states + begin, row_count, RowStatistics{});
    for (std::int64_t column = piece.begin; column < piece.end; column += kColumns) {
      const std::int64_t count = std::min(kColumns, piece.end - column);
      for (std::int64_t i = 0; i < count; ++i) {
        store_in_order(load_some(from + (column + i) * stride, row_count, T{}), side);
        for (std::int64_t j = 0; j < row_count; ++j) turned[j * kPitch + i] = side[j];
      }
      for (std::int64_t i = 0; i < row_count; ++i) {
        if (is_skipped(first + begin + i)) continue;
        A* z = turned + i * kPitch;
        add_with_options(rows, rows.row(first + begin + i), column, count, z, z, states[begin + i]);
      }
    }
  }
}

/// Calls `store(row, statistics)` for every row, from many threads. If `skips_ignored` is set, the statistics of
/// ignored rows are arbitrary.
template <typename T, typename Store>
void reduce_rows(const Rows<T>& rows, bool skips_ignored, const ExecutionContext& context, Store&& store) {
  const CrossEntropyView& view = rows.view();
  if (view.row_count == 0) return;
  const auto is_skipped = [&](std::int64_t row) { return skips_ignored && rows.row(row).is_ignored; };
  if (!rows.inputs().plan.needs_only_softmax() && Tiles<T>::fit(view)) {
    const Tiles<T> tiles(view);
    return reduce_pieces<RowStatistics, Tiles<T>::kWidth>(
        tiles.pieces(view.column_count), context,
        [&](const ColumnPiece& piece, RowStatistics* states) {
          reduce_tile_with_options(rows, tiles, piece, is_skipped, states);
        },
        [&](std::int64_t tile, const RowStatistics* states) {
          for (std::int64_t i = 0; i < tiles.width(tile); ++i) store(tiles.first_row(tile) + i, states[i]);
        });
  }
  if (!rows.inputs().plan.needs_only_softmax()) {
    return reduce_pieces<RowStatistics, 1>(
        ColumnPieces(view.column_count, view.row_count, 1), context,
        [&](const ColumnPiece& piece, RowStatistics* state) {
          *state = is_skipped(piece.group) ? RowStatistics{} : reduce_with_options(rows, piece);
        },
        [&](std::int64_t row, const RowStatistics* state) { store(row, *state); });
  }
  const auto store_softmax = [&](std::int64_t row, const RowState& state) {
    RowStatistics statistics;
    statistics.softmax = state;
    store(row, statistics);
  };
  if (Tiles<T>::fit(view)) return reduce_softmax<T>(view, rows.logits(), context, row_by_row(store_softmax));
  reduce_pieces<RowState, 1>(
      ColumnPieces(view.column_count, view.row_count, 1), context,
      [&](const ColumnPiece& piece, RowState* state) {
        *state = is_skipped(piece.group) ? RowState{} : reduce_piece(view, rows.logits(), piece);
      },
      [&](std::int64_t row, const RowState* state) { store_softmax(row, *state); });
}

/// The results of a row from its statistics.
template <typename T>
RowLoss<double> loss_of(const Rows<T>& rows, const typename Rows<T>::Row& row, const RowStatistics& statistics,
                        bool skips_ignored) {
  if (skips_ignored && row.is_ignored) return {};
  const RowLoss<double> loss = row_loss<double>(statistics, rows.target_class(row), !row.is_ignored, rows.terms());
  return row.is_ignored ? loss : weighted(loss, row_weight_at(rows.inputs(), row.at.of[kPerRow]));
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();
#endif  // per target
