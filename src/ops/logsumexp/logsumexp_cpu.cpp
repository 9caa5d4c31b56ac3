// logsumexp on the CPU: rows in parallel, vectors along a row, or across rows where they lie side by side.
//
// A sum of exponentials needs something to subtract first, but not the maximum: any element that is not much smaller
// does. So a row goes through once, in blocks: the first block takes its own maximum as the anchor, every later one
// tries the anchor so far, with one exponential per element and no search for a maximum, and is done again properly if
// its sum comes out large, infinite or NaN. The blocks' sums add up in float64.
//
// A long row is cut into pieces by its shape alone, never by the number of threads, and merged in order.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/logsumexp/logsumexp_cpu.cpp"
#include <hwy/foreach_target.h>  // first: compiles this file once per level of vector instructions
//
#include <hwy/cache_control.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <vector>

#include "core/dispatch.h"
#include "core/softmax_state.h"
#include "cpu/cache.h"
#include "cpu/exp.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "ops/logsumexp/logsumexp_backend.h"

#ifndef EAVES_LOGSUMEXP_CPU_ONCE_
#define EAVES_LOGSUMEXP_CPU_ONCE_
namespace eaves::cpu {

/// A SoftmaxState whose `max` is an anchor: an element of the row that none exceeds by much. lse() and merge() do not
/// mind.
using RowState = SoftmaxState<double>;

/// How the columns of each row are cut, from the shape alone. More pieces than one only where there are few rows.
struct ColumnPieces {
  static constexpr std::int64_t kMaxTasks = 256;  // two for each thread of a large machine

  std::int64_t columns;
  std::int64_t size;
  std::int64_t count;

  /// `tasks` are there anyway, each of them `width` rows that are reduced together.
  ColumnPieces(std::int64_t columns, std::int64_t tasks, std::int64_t width)
      : columns(columns), size(columns), count(1) {
    constexpr std::int64_t kSmallestPiece = 32768;  // elements; 5 us of work
    constexpr std::int64_t kMultiple = 64;          // pieces begin on a cache line where the row does
    const std::int64_t wanted = std::min(kMaxTasks / tasks, columns * width / kSmallestPiece);
    if (wanted < 2) return;
    // Rounded up, so that there are never more than wanted.
    size = ((columns + wanted - 1) / wanted + kMultiple - 1) / kMultiple * kMultiple;
    count = (columns + size - 1) / size;
  }
  std::int64_t begin(std::int64_t piece) const { return piece * size; }
  std::int64_t end(std::int64_t piece) const { return std::min(columns, (piece + 1) * size); }
};

}  // namespace eaves::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {
namespace {

template <typename T>
inline constexpr bool kIsFloatingPoint =
    std::is_floating_point_v<T> || std::is_same_v<T, bfloat16> || std::is_same_v<T, float16>;

template <typename T>
T minus_infinity() {
  return round_to<T>(-infinity<Accumulator<T>>());
}

/// Elements per block: 64 terms for each accumulator, so that the float32 sum of a block is good to a few units in the
/// last place, and the horizontal sum at its end costs little; 4096 elements with AVX-512, which fit L1.
inline constexpr std::int64_t kPacksPerBlock = 64;
template <typename T>
std::int64_t block_size() {
  return kPacksPerBlock * static_cast<std::int64_t>(pack_size<T>());
}
/// Memory for a block.
template <typename A>
struct Block {
  HWY_ALIGN A elements[kPacksPerBlock * kMaxPackSize<A>];
};

// ---------------------------------------------------------------------------------------------- along a row: forward

/// exp(v) as a term of a sum whose largest terms are near exp(0): only there it has to be good to the last place.
HWY_INLINE Float exp_term(FloatTag d, Float v) { return exp2(d, hn::Mul(v, hn::Set(d, kLog2E))); }
HWY_INLINE VectorOf<double> exp_term(Tag<double> d, VectorOf<double> v) { return exp(d, v); }

template <typename T>
Accumulator<T> max_of(const T* x, std::int64_t count) {
  const Tag<T> d;
  const auto lowest = hn::Set(d, -infinity<Accumulator<T>>());
  auto m0 = lowest, m1 = lowest, m2 = lowest, m3 = lowest;
  for_each_pack(x, static_cast<std::size_t>(count), minus_infinity<T>(), [&](const Pack<T>& pack) HWY_ATTR {
    m0 = max_ignoring_nan(d, pack.v0, m0);
    m1 = max_ignoring_nan(d, pack.v1, m1);
    m2 = max_ignoring_nan(d, pack.v2, m2);
    m3 = max_ignoring_nan(d, pack.v3, m3);
  });
  return hn::GetLane(hn::MaxOfLanes(d, hn::Max(hn::Max(m0, m1), hn::Max(m2, m3))));
}

/// Sum of body(x).
template <typename T, typename Body>
HWY_INLINE Accumulator<T> sum_of(const T* x, std::int64_t count, Body&& body) {
  const Tag<T> d;
  auto s0 = hn::Zero(d), s1 = hn::Zero(d), s2 = hn::Zero(d), s3 = hn::Zero(d);
  for_each_pack(x, static_cast<std::size_t>(count), minus_infinity<T>(), [&](const Pack<T>& pack) HWY_ATTR {
    s0 = hn::Add(s0, body(pack.v0));
    s1 = hn::Add(s1, body(pack.v1));
    s2 = hn::Add(s2, body(pack.v2));
    s3 = hn::Add(s3, body(pack.v3));
  });
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3))));
}

/// Sum of exp(x - anchor).
template <typename T>
Accumulator<T> sum_of_exp(const T* x, std::int64_t count, Accumulator<T> anchor) {
  const Tag<T> d;
  const auto shift = hn::Set(d, anchor);
  return sum_of(x, count, [&](VectorOf<T> v) HWY_ATTR { return exp_term(d, hn::Sub(v, shift)); });
}

/// Any block: two passes, and every edge value.
template <typename T>
RowState exact_state(const T* x, std::int64_t count) {
  const Accumulator<T> max = max_of(x, count);
  return {max, sum_of_exp(x, count, softmax_anchor(max))};
}

/// x -> exp(x - anchor) for many x, as correction * exp2(exponent(x)). With FMA the exponent is one instruction,
/// x * kLog2E - shift, of which only the small difference is rounded. The shift is anchor * kLog2E rounded to float32;
/// it changes all exponentials by one factor, which is known: the correction.
class Anchored {
 public:
  explicit Anchored(double anchor) : is_usable_(std::abs(anchor) < 1e30) {
    if (!is_usable_) return;  // infinite, NaN, or the shift would be
#if HWY_NATIVE_FMA
    shift_ = static_cast<float>(anchor * kLog2E);
    const double rounding = shift_ - anchor * kLog2E;
    // exp2(rounding), which is almost always 1 + 1e-7; the square of a small number is not missed.
    correction_ = std::abs(rounding) < 1e-6 ? 1.0 + rounding * std::numbers::ln2 : std::exp2(rounding);
#else
    shift_ = static_cast<float>(anchor);
#endif
  }
  bool is_usable() const { return is_usable_; }
  double correction() const { return correction_; }
  HWY_INLINE Float exponent(Float x) const {
    const FloatTag d;
#if HWY_NATIVE_FMA
    return hn::MulSub(x, hn::Set(d, kLog2E), hn::Set(d, shift_));
#else
    return hn::Mul(hn::Sub(x, hn::Set(d, shift_)), hn::Set(d, kLog2E));
#endif
  }

 private:
  bool is_usable_;
  float shift_ = 0.0f;
  double correction_ = 1.0;
};

/// The optimistic pass over the blocks of a row after the first.
template <typename T>
class AnchoredSum {
 public:
  explicit AnchoredSum(double anchor) : anchored_(anchor) {}

  /// False where the block has to be done by exact_state().
  bool add(const T* x, std::int64_t count, double& sum) const {
    if (!anchored_.is_usable()) return false;
    const FloatTag d;
    const Anchored anchored = anchored_;
    const float block = sum_of(x, count, [&](Float v) HWY_ATTR { return exp2(d, anchored.exponent(v)); });
    // Written so that a NaN is refused too. An exponent of 14 still leaves 3e-7 of relative error in its power of two.
    if (!(block <= 4.0f * static_cast<float>(block_size<T>()))) return false;
    sum += block * anchored.correction();
    return true;
  }

 private:
  Anchored anchored_;
};

/// float64 takes the same way without the shortcut of the multiplication.
template <>
class AnchoredSum<double> {
 public:
  explicit AnchoredSum(double anchor) : anchor_(anchor) {}
  bool add(const double* x, std::int64_t count, double& sum) const {
    if (!std::isfinite(anchor_)) return false;
    const double block = sum_of_exp(x, count, anchor_);
    if (!(block <= 0x1p60)) return false;
    sum += block;
    return true;
  }

 private:
  double anchor_;
};

/// The state of columns [begin, end). `fetch(column, count)` gives them as contiguous memory, `count` at most a block.
template <typename T, typename Fetch>
RowState reduce_columns(std::int64_t begin, std::int64_t end, Fetch&& fetch) {
  const std::int64_t block = block_size<T>();
  // A few packs are enough to find an anchor that is not much too small, and short rows need only one pass too.
  const std::int64_t first = std::min<std::int64_t>(4 * static_cast<std::int64_t>(pack_size<T>()), end - begin);
  RowState state = exact_state(fetch(begin, first), first);
  AnchoredSum<T> anchored(state.max);
  for (std::int64_t column = begin + first; column < end; column += block) {
    const std::int64_t count = std::min(block, end - column);
    const T* x = fetch(column, count);
    if (anchored.add(x, count, state.sum)) continue;
    state = merge(state, exact_state(x, count));
    anchored = AnchoredSum<T>(state.max);
  }
  return state;
}

/// Calls body(done, n, offsets, strides) for the stretches of columns [begin, begin + count) that have one stride.
template <typename Body>
void for_each_run(const StridedLoop<2>& columns, std::int64_t begin, std::int64_t count, Body&& body) {
  const std::int64_t stride_of_none[2] = {0, 0};
  const int inner = columns.rank - 1;
  for (std::int64_t done = 0; done < count;) {
    const auto offsets = columns.offsets(begin + done);
    if (inner < 0) {
      body(done, count - done, offsets.of, stride_of_none);
      return;
    }
    const std::int64_t size = columns.sizes[inner];
    const std::int64_t n = std::min(size - (begin + done) % size, count - done);
    const std::int64_t stride[2] = {columns.strides[0][inner], columns.strides[1][inner]};
    body(done, n, offsets.of, stride);
    done += n;
  }
}

/// Columns of any strides and type, gathered block by block into what the kernels above read.
template <typename T>
class Gather {
 public:
  using Element = Accumulator<T>;
  Gather(const StridedLoop<2>& columns, const T* row, int tensor) : columns_(columns), row_(row), tensor_(tensor) {}

  const Element* operator()(std::int64_t begin, std::int64_t count) {
    for_each_run(columns_, begin, count,
                 [&](std::int64_t done, std::int64_t n, const std::int64_t* offset, const std::int64_t* stride) {
                   const T* from = row_ + offset[tensor_];
                   for (std::int64_t i = 0; i < n; ++i)
                     buffer_.elements[done + i] = load_as_accumulator(from[i * stride[tensor_]]);
                 });
    return buffer_.elements;
  }

 private:
  const StridedLoop<2>& columns_;
  const T* row_;
  int tensor_;
  Block<Element> buffer_;
};

template <typename T>
RowState reduce_piece(const LogsumexpForwardProblem& problem, std::int64_t row, std::int64_t begin, std::int64_t end) {
  const T* x = static_cast<const T*>(problem.x) + problem.view.rows.offsets(row).of[0];
  if constexpr (kIsFloatingPoint<T>) {
    if (problem.view.layout == RowLayout::contiguous) {
      return reduce_columns<T>(begin, end, [x](std::int64_t column, std::int64_t) { return x + column; });
    }
  }
  Gather<T> gather(problem.view.columns, x, 0);
  return reduce_columns<Accumulator<T>>(begin, end, gather);
}
/// Writes the result of a row.
void store(const LogsumexpForwardProblem& problem, std::int64_t row, const RowState& state) {
  const auto offsets = problem.view.rows.offsets(row);
  const double lse = state.lse();
  if (problem.x_dtype == DType::float64) {
    if (problem.lse != nullptr) static_cast<double*>(problem.lse)[offsets.of[3]] = lse;
  } else if (problem.lse != nullptr) {
    static_cast<float*>(problem.lse)[offsets.of[3]] = static_cast<float>(lse);
  }
  if (problem.out == nullptr) return;
  dispatch_floating_point(problem.out_dtype,
                          [&]<typename Out>() { static_cast<Out*>(problem.out)[offsets.of[2]] = round_to<Out>(lse); });
}

template <typename T>
void forward_rows(const LogsumexpForwardProblem& problem, const ExecutionContext& context) {
  const std::int64_t rows = problem.view.row_count;
  const ColumnPieces pieces(problem.view.column_count, rows, 1);
  if (pieces.count == 1) {
    parallel_for(context, rows, grain_for(pieces.columns), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        store(problem, row, reduce_piece<T>(problem, row, 0, pieces.columns));
      }
    });
    return;
  }
  std::array<RowState, ColumnPieces::kMaxTasks> states;
  parallel_for(context, rows * pieces.count, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t piece = i % pieces.count;
      states[i] = reduce_piece<T>(problem, i / pieces.count, pieces.begin(piece), pieces.end(piece));
    }
  });
  for (std::int64_t row = 0; row < rows; ++row) {
    RowState state;
    for (std::int64_t piece = 0; piece < pieces.count; ++piece)
      state = merge(state, states[row * pieces.count + piece]);
    store(problem, row, state);
  }
}

// ------------------------------------------------------------------------------------- rows side by side: the tiles

/// Rows that lie side by side, in tiles: so many that a line of memory is used whole and that the tile's part of a few
/// columns still fits L1.
template <typename T>
struct Tiles {
  static constexpr std::int64_t kWidth = 512;
  std::int64_t inner;    ///< rows side by side
  std::int64_t per_run;  ///< tiles that cover them
  std::int64_t count;

  explicit Tiles(const RowView& view)
      : inner(view.rows.sizes[view.rows.rank - 1]),
        per_run((inner + kWidth - 1) / kWidth),
        count(view.row_count / inner * per_run) {}
  std::int64_t first_row(std::int64_t tile) const { return tile / per_run * inner + tile % per_run * kWidth; }
  std::int64_t width(std::int64_t tile) const { return std::min(kWidth, inner - tile % per_run * kWidth); }

  /// Vectors across fewer rows than this would be mostly empty.
  static bool fit(const RowView& view) {
    return view.layout == RowLayout::transposed &&
           2 * view.rows.sizes[view.rows.rank - 1] >= static_cast<std::int64_t>(pack_size<T>());
  }
};

/// The element that lane `i` of a tile, counted over all its packs, has in memory.
template <typename T>
std::int64_t element_of(std::int64_t i) {
  const auto pack = static_cast<std::int64_t>(pack_size<T>());
  const auto lanes = pack / 4;
  return i / pack * pack + static_cast<std::int64_t>(element_of_lane<T>(static_cast<std::size_t>(i % pack / lanes),
                                                                        static_cast<std::size_t>(i % lanes)));
}

template <typename T>
HWY_INLINE Pack<T> load_some(const T* from, std::int64_t count, T fill) {
  if (count >= static_cast<std::int64_t>(pack_size<T>())) return load_pack(from);
  return load_first(from, static_cast<std::size_t>(count), fill);
}

/// One vector of rows over a few columns: the anchor, by how much the sum so far has to be scaled, and the new terms.
template <typename T>
struct LaneUpdate {
  VectorOf<T> anchor, scale;
};

/// The anchor rises only where the maximum of the new elements is well above it: each rise rounds the sum once more.
template <typename T>
HWY_INLINE LaneUpdate<T> raise_anchor(VectorOf<T> anchor, VectorOf<T> max) {
  const Tag<T> d;
  using A = Accumulator<T>;
  const auto must_rise = hn::Gt(max, hn::Add(anchor, hn::Set(d, A(4))));
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

/// The states of `width` rows side by side over `columns` columns, `stride` apart.
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
  for (std::int64_t i = 0; i < (width + pack - 1) / pack * pack; ++i) {
    const std::int64_t row = element_of<T>(i);
    if (row < width) states[row] = {anchors[i], sums[i]};
  }
}

template <typename T>
void forward_tiles(const LogsumexpForwardProblem& problem, const ExecutionContext& context) {
  const RowView& view = problem.view;
  const Tiles<T> tiles(view);
  const std::int64_t stride = view.columns.strides[0][0];
  const ColumnPieces pieces(view.column_count, tiles.count, std::min(tiles.inner, Tiles<T>::kWidth));
  const auto reduce = [&](std::int64_t tile, std::int64_t piece, RowState* states) {
    const T* x = static_cast<const T*>(problem.x) + view.rows.offsets(tiles.first_row(tile)).of[0];
    reduce_tile(x + pieces.begin(piece) * stride, stride, pieces.end(piece) - pieces.begin(piece), tiles.width(tile),
                states);
  };
  const auto store_tile = [&](std::int64_t tile, const RowState* states) {
    for (std::int64_t i = 0; i < tiles.width(tile); ++i) store(problem, tiles.first_row(tile) + i, states[i]);
  };
  if (pieces.count == 1) {
    const std::int64_t grain = grain_for(pieces.columns * std::min(tiles.inner, Tiles<T>::kWidth));
    parallel_for(context, tiles.count, grain, [&](std::int64_t begin, std::int64_t end) {
      RowState states[Tiles<T>::kWidth];
      for (std::int64_t tile = begin; tile < end; ++tile) {
        reduce(tile, 0, states);
        store_tile(tile, states);
      }
    });
    return;
  }
  // Few rows and long columns: at most 256 tasks of 512 states, 2 MiB.
  std::vector<RowState> states(static_cast<std::size_t>(tiles.count * pieces.count * Tiles<T>::kWidth));
  const auto states_of = [&](std::int64_t task) { return states.data() + task * Tiles<T>::kWidth; };
  parallel_for(context, tiles.count * pieces.count, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t task = begin; task < end; ++task) {
      reduce(task / pieces.count, task % pieces.count, states_of(task));
    }
  });
  for (std::int64_t tile = 0; tile < tiles.count; ++tile) {
    RowState* merged = states_of(tile * pieces.count);
    for (std::int64_t piece = 1; piece < pieces.count; ++piece) {
      const RowState* other = states_of(tile * pieces.count + piece);
      for (std::int64_t i = 0; i < tiles.width(tile); ++i) merged[i] = merge(merged[i], other[i]);
    }
    store_tile(tile, merged);
  }
}

// --------------------------------------------------------------------------------------------------------- backward

template <typename A>
struct RowScalars {
  A lse;
  A grad;
};

template <typename T>
RowScalars<Accumulator<T>> load_scalars(const LogsumexpBackwardProblem& problem, std::int64_t row) {
  using A = Accumulator<T>;
  const auto offsets = problem.view.rows.offsets(row);
  RowScalars<A> scalars{static_cast<const A*>(problem.lse)[offsets.of[2]], A(0)};
  if (problem.grad_out_dtype == kDTypeOf<T>) {
    scalars.grad = load_as_accumulator(static_cast<const T*>(problem.grad_out)[offsets.of[3]]);
  } else {
    scalars.grad = static_cast<A>(static_cast<const float*>(problem.grad_out)[offsets.of[3]]);
  }
  // A row of nothing but -inf: its gradient is 0, and x - inf makes it so.
  if (scalars.lse == -infinity<A>()) scalars = {infinity<A>(), A(0)};
  return scalars;
}

/// g * exp(x - lse). The difference comes first: x * log2e - lse * log2e would cancel. What is rounded to 16 bits
/// afterwards may use the shorter exponential.
template <typename T>
HWY_INLINE VectorOf<T> gradient(VectorOf<T> x, VectorOf<T> lse, VectorOf<T> grad) {
  const Tag<T> d;
  const auto difference = hn::Sub(x, lse);
  if constexpr (sizeof(T) == 2) return hn::Mul(grad, exp_term(d, difference));
  return hn::Mul(grad, exp(d, difference));
}

template <bool kNonTemporal, typename T>
void backward_contiguous(const T* x, T* grad_x, std::int64_t count, const RowScalars<Accumulator<T>>& scalars) {
  const Tag<T> d;
  const auto n = static_cast<std::size_t>(count);
  if constexpr (sizeof(T) == 2) {
    const Anchored anchored(scalars.lse);
    if (anchored.is_usable()) {
      const auto scale = hn::Set(d, static_cast<float>(scalars.grad * anchored.correction()));
      transform<kNonTemporal>(x, grad_x, n,
                              [&](Float v) HWY_ATTR { return hn::Mul(scale, exp2(d, anchored.exponent(v))); });
      return;
    }
  }
  const auto lse = hn::Set(d, scalars.lse);
  const auto grad = hn::Set(d, scalars.grad);
  transform<kNonTemporal>(x, grad_x, n, [&](VectorOf<T> v) HWY_ATTR { return gradient<T>(v, lse, grad); });
}

template <typename T>
void backward_strided(const LogsumexpBackwardProblem& problem, const T* x, T* grad_x, std::int64_t begin,
                      std::int64_t end, const RowScalars<Accumulator<T>>& scalars) {
  using A = Accumulator<T>;
  const StridedLoop<2>& columns = problem.view.columns;
  const std::int64_t block = block_size<A>();
  Gather<T> gather(columns, x, 0);
  Block<A> result;
  for (std::int64_t column = begin; column < end; column += block) {
    const std::int64_t count = std::min(block, end - column);
    backward_contiguous<false>(gather(column, count), result.elements, count, scalars);
    for_each_run(columns, column, count,
                 [&](std::int64_t done, std::int64_t n, const std::int64_t* offset, const std::int64_t* stride) {
                   T* to = grad_x + offset[1];
                   for (std::int64_t i = 0; i < n; ++i) to[i * stride[1]] = round_to<T>(result.elements[done + i]);
                 });
  }
}

template <typename T>
void backward_rows(const LogsumexpBackwardProblem& problem, const ExecutionContext& context) {
  const RowView& view = problem.view;
  const ColumnPieces pieces(view.column_count, view.row_count, 1);
  const auto bytes = static_cast<std::size_t>(view.row_count * view.column_count) * sizeof(T);
  constexpr std::int64_t kLongEnough = 1024 / sizeof(T);  // a row's ends are stored the ordinary way
  const bool is_non_temporal = is_beyond_caches(bytes) && view.column_count >= kLongEnough &&
                               reinterpret_cast<std::uintptr_t>(problem.grad_x) % sizeof(T) == 0;
  const std::int64_t grain = grain_for(pieces.size);
  parallel_for(context, view.row_count * pieces.count, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t row = task / pieces.count;
      const std::int64_t first = pieces.begin(task % pieces.count);
      const std::int64_t last = pieces.end(task % pieces.count);
      const auto offsets = view.rows.offsets(row);
      const T* x = static_cast<const T*>(problem.x) + offsets.of[0];
      T* grad_x = static_cast<T*>(problem.grad_x) + offsets.of[1];
      const auto scalars = load_scalars<T>(problem, row);
      if (view.layout != RowLayout::contiguous) {
        backward_strided(problem, x, grad_x, first, last, scalars);
      } else if (is_non_temporal) {
        backward_contiguous<true>(x + first, grad_x + first, last - first, scalars);
      } else {
        backward_contiguous<false>(x + first, grad_x + first, last - first, scalars);
      }
    }
    if (is_non_temporal) hwy::FlushStream();
  });
}

template <typename T>
void backward_tiles(const LogsumexpBackwardProblem& problem, const ExecutionContext& context) {
  using A = Accumulator<T>;
  const RowView& view = problem.view;
  const Tiles<T> tiles(view);
  const ColumnPieces pieces(view.column_count, tiles.count, std::min(tiles.inner, Tiles<T>::kWidth));
  const auto pack = static_cast<std::int64_t>(pack_size<T>());
  const std::int64_t grain = grain_for(pieces.size * std::min(tiles.inner, Tiles<T>::kWidth));
  parallel_for(context, tiles.count * pieces.count, grain, [&](std::int64_t begin, std::int64_t end) {
    const Tag<T> d;
    const auto lanes = hn::Lanes(d);
    HWY_ALIGN A lse[Tiles<T>::kWidth];
    HWY_ALIGN A grad[Tiles<T>::kWidth];
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t tile = task / pieces.count;
      const std::int64_t first_row = tiles.first_row(tile);
      const std::int64_t width = tiles.width(tile);
      for (std::int64_t i = 0; i < (width + pack - 1) / pack * pack; ++i) {
        const std::int64_t row = std::min(element_of<T>(i), width - 1);  // lanes beyond the tile: any row of it
        const auto scalars = load_scalars<T>(problem, first_row + row);
        lse[i] = scalars.lse;
        grad[i] = scalars.grad;
      }
      const auto offsets = view.rows.offsets(first_row);
      for (std::int64_t column = pieces.begin(task % pieces.count); column < pieces.end(task % pieces.count);
           ++column) {
        const T* x = static_cast<const T*>(problem.x) + offsets.of[0] + column * view.columns.strides[0][0];
        T* grad_x = static_cast<T*>(problem.grad_x) + offsets.of[1] + column * view.columns.strides[1][0];
        for (std::int64_t row = 0; row < width; row += pack) {
          const Pack<T> v = load_some(x + row, width - row, T{});
          const auto map = [&](std::size_t vector, VectorOf<T> value) HWY_ATTR {
            const std::size_t at = static_cast<std::size_t>(row) + vector * lanes;
            return gradient<T>(value, hn::Load(d, lse + at), hn::Load(d, grad + at));
          };
          const Pack<T> result{map(0, v.v0), map(1, v.v1), map(2, v.v2), map(3, v.v3)};
          if (width - row >= pack) {
            store_pack(result, grad_x + row);
          } else {
            store_first(result, grad_x + row, static_cast<std::size_t>(width - row));
          }
        }
      }
    }
  });
}

}  // namespace

void forward(const LogsumexpForwardProblem& problem, const ExecutionContext& context) {
  dispatch_any(problem.x_dtype, [&]<typename T>() {
    if constexpr (kIsFloatingPoint<T>) {
      if (Tiles<T>::fit(problem.view)) return forward_tiles<T>(problem, context);
    }
    forward_rows<T>(problem, context);
  });
}

void backward(const LogsumexpBackwardProblem& problem, const ExecutionContext& context) {
  dispatch_floating_point(problem.x_dtype, [&]<typename T>() {
    if (Tiles<T>::fit(problem.view)) return backward_tiles<T>(problem, context);
    backward_rows<T>(problem, context);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eaves::cpu {
namespace {
HWY_EXPORT(forward);
HWY_EXPORT(backward);
}  // namespace

void logsumexp_forward(const LogsumexpForwardProblem& problem, const ExecutionContext& context) {
  HWY_DYNAMIC_DISPATCH(forward)(problem, context);
}

void logsumexp_backward(const LogsumexpBackwardProblem& problem, const ExecutionContext& context) {
  HWY_DYNAMIC_DISPATCH(backward)(problem, context);
}

}  // namespace eaves::cpu
#endif  // HWY_ONCE
