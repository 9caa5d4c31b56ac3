// Reductions of rows that lie side by side (RowLayout::transposed). A vector spans neighbouring rows and walks along
// their columns, which uses whole cache lines without a transposed copy. Each lane has its own anchor, which rises at
// most once every few columns. Compiled once per level of vector instructions, like simd.h.
#include <algorithm>
#include <cstdint>

#include "core/numeric.h"
#include "core/rows.h"
#include "cpu/row_pieces.h"
#include "cpu/simd.h"
#include "cpu/softmax.h"

#if defined(EAVES_CPU_COLUMNS_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EAVES_CPU_COLUMNS_H_
#undef EAVES_CPU_COLUMNS_H_
#else
#define EAVES_CPU_COLUMNS_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {

/// Tiles of rows that lie side by side. A tile has enough rows to use whole cache lines. A reduction reads a few
/// columns twice, so its tiles have no more rows than fit L1.
template <typename T>
struct Tiles {
  static constexpr std::int64_t kWidth = 512;
  static constexpr std::int64_t kMostWidth = 8192 / sizeof(Accumulator<T>);
  std::int64_t inner;    ///< rows side by side
  std::int64_t most;     ///< rows of a tile; the last tile of a run may have fewer
  std::int64_t per_run;  ///< tiles that cover the `inner` rows
  std::int64_t count;

  template <typename View>
  explicit Tiles(const View& view, std::int64_t width = kWidth)
      : inner(view.rows.sizes[view.rows.rank - 1]),
        most(std::min(inner, width)),
        per_run(ceil_divide(inner, most)),
        count(view.row_count / inner * per_run) {}

  /// The tiles of a map, which reads each column once. Wide tiles have long runs of memory; they are used if they are
  /// enough for many threads. (Gradient of logsumexp, [8192, 1024] bfloat16 over axis 0, 2 threads of an AMD EPYC:
  /// tiles of 512 rows 2.8 ms, of all 1024 rows 1.3 ms.)
  template <typename View>
  static Tiles of_map(const View& view) {
    constexpr std::int64_t kEnoughTasks = 64;
    const Tiles wide(view, kMostWidth);
    return wide.pieces(view.column_count).tasks() >= kEnoughTasks ? wide : Tiles(view);
  }

  ColumnPieces pieces(std::int64_t columns) const { return {columns, count, most}; }
  std::int64_t first_row(std::int64_t tile) const { return tile / per_run * inner + tile % per_run * most; }
  std::int64_t width(std::int64_t tile) const { return std::min(most, inner - tile % per_run * most); }

  /// False for too few rows: vectors across them would be mostly empty.
  template <int kColumnTensors, int kTensors>
  static bool fit(const RowView<kColumnTensors, kTensors>& view) {
    return view.layout == RowLayout::transposed &&
           2 * view.rows.sizes[view.rows.rank - 1] >= static_cast<std::int64_t>(pack_size<T>());
  }
};

/// The index in memory of lane `i` of a tile; lanes count over all of its packs.
template <typename T>
std::int64_t element_of(std::int64_t i) {
  const auto pack = static_cast<std::int64_t>(pack_size<T>());
  const auto lanes = pack / 4;
  return i / pack * pack + static_cast<std::int64_t>(element_of_lane<T>(static_cast<std::size_t>(i % pack / lanes),
                                                                        static_cast<std::size_t>(i % lanes)));
}

/// A vector of rows after a few more columns: the new anchor, and the factor that scales the sum so far.
template <typename T>
struct LaneUpdate {
  VectorOf<T> anchor, scale;
};

/// The anchor rises only if the maximum of the new elements exceeds it by more than this, because each rise rounds the
/// sum once more. kSoftmaxSlack would be allowed, but exp_term() rounds its exponent, and a larger exponent makes a
/// less exact term.
inline constexpr float kTileSlack = 4.0f;
static_assert(kTileSlack <= kSoftmaxSlack);

template <typename T>
HWY_INLINE LaneUpdate<T> raise_anchor(VectorOf<T> anchor, VectorOf<T> max) {
  const Tag<T> d;
  using A = Accumulator<T>;
  const auto must_rise = hn::Gt(max, hn::Add(anchor, hn::Set(d, A(kTileSlack))));
  const auto raised = hn::IfThenElse(must_rise, max, anchor);
  const auto scale = hn::IfThenElse(must_rise, exp_term(d, hn::Sub(anchor, raised)), hn::Set(d, A(1)));
  return {raised, scale};
}

/// softmax_anchor() of every lane.
template <typename T>
HWY_INLINE VectorOf<T> finite_or_zero(VectorOf<T> anchor) {
  const Tag<T> d;
  const auto difference = hn::Sub(anchor, anchor);
  return hn::IfThenElseZero(hn::Eq(difference, hn::Zero(d)), anchor);
}

/// Reduces `width` rows side by side over `columns` columns, which are `stride` apart, to their states.
template <typename T>
void reduce_tile(const T* x, std::int64_t stride, std::int64_t columns, std::int64_t width, RowState* states) {
  using A = Accumulator<T>;
  constexpr std::int64_t kColumns = 32;  // 512 x 32 bfloat16 are 32 KiB
  const Tag<T> d;
  const auto lanes = hn::Lanes(d);
  const auto pack = static_cast<std::int64_t>(pack_size<T>());
  HWY_ALIGN A anchors[Tiles<T>::kWidth];
  HWY_ALIGN A scales[kMaxPackSize<T>];
  HWY_ALIGN A terms[kMaxPackSize<T>];
  double sums[Tiles<T>::kWidth];
  std::fill_n(anchors, Tiles<T>::kWidth, -infinity<A>());
  std::fill_n(sums, Tiles<T>::kWidth, 0.0);

  for (std::int64_t begin = 0; begin < columns; begin += kColumns) {
    const std::int64_t end = std::min(columns, begin + kColumns);
    for (std::int64_t row = 0; row < width; row += pack) {
      const T* from = x + row;
      A* anchor = anchors + row;
      const auto lowest = hn::Set(d, -infinity<A>());
      Pack<T> max{lowest, lowest, lowest, lowest};
      for (std::int64_t column = begin; column < end; ++column) {
        const Pack<T> v = load_some(from + column * stride, width - row, minus_infinity<T>());
        max = {max_ignoring_nan(d, v.v0, max.v0), max_ignoring_nan(d, v.v1, max.v1), max_ignoring_nan(d, v.v2, max.v2),
               max_ignoring_nan(d, v.v3, max.v3)};
      }
      const auto update = [&](std::size_t vector, VectorOf<T> lane_max) HWY_ATTR {
        const LaneUpdate<T> raised = raise_anchor<T>(hn::Load(d, anchor + vector * lanes), lane_max);
        hn::Store(raised.anchor, d, anchor + vector * lanes);
        hn::Store(raised.scale, d, scales + vector * lanes);
        return finite_or_zero<T>(raised.anchor);
      };
      const Pack<T> shift{update(0, max.v0), update(1, max.v1), update(2, max.v2), update(3, max.v3)};
      Pack<T> sum{hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
      for (std::int64_t column = begin; column < end; ++column) {
        const Pack<T> v = load_some(from + column * stride, width - row, minus_infinity<T>());
        sum = {hn::Add(sum.v0, exp_term(d, hn::Sub(v.v0, shift.v0))),
               hn::Add(sum.v1, exp_term(d, hn::Sub(v.v1, shift.v1))),
               hn::Add(sum.v2, exp_term(d, hn::Sub(v.v2, shift.v2))),
               hn::Add(sum.v3, exp_term(d, hn::Sub(v.v3, shift.v3)))};
      }
      hn::Store(sum.v0, d, terms);
      hn::Store(sum.v1, d, terms + lanes);
      hn::Store(sum.v2, d, terms + 2 * lanes);
      hn::Store(sum.v3, d, terms + 3 * lanes);
      for (std::int64_t i = 0; i < pack; ++i) sums[row + i] = sums[row + i] * scales[i] + terms[i];
    }
  }
  for (std::int64_t i = 0; i < ceil_divide(width, pack) * pack; ++i) {
    const std::int64_t row = element_of<T>(i);
    if (row < width) states[row] = {anchors[i], sums[i]};
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();
#endif  // per target
