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
  std::int64_t columns;
  std::int64_t size;
  std::int64_t count;

  ColumnPieces(std::int64_t columns, std::int64_t independent_rows) : columns(columns), size(columns), count(1) {
    constexpr std::int64_t kEnoughPieces = 256;     // of all rows together: two for each thread of a large machine
    constexpr std::int64_t kSmallestPiece = 32768;  // elements; 5 us of work
    constexpr std::int64_t kMultiple = 64;          // pieces begin on a cache line where the row does
    const std::int64_t wanted =
        std::min(kEnoughPieces / std::max<std::int64_t>(independent_rows, 1), columns / kSmallestPiece);
    if (wanted < 2) return;
    size = (columns / wanted + kMultiple - 1) / kMultiple * kMultiple;
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
T minus_infinity() {
  return round_to<T>(-infinity<Accumulator<T>>());
}

/// Elements per block: each accumulator of a block takes 32 terms, so that the float32 sum of a block is good to a few
/// units in the last place; 2048 elements with AVX-512.
template <typename T>
std::int64_t block_size() {
  return 32 * static_cast<std::int64_t>(pack_size<T>());
}

// ---------------------------------------------------------------------------------------------- along a row: forward

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
  return sum_of(x, count, [&](VectorOf<T> v) HWY_ATTR { return exp(d, hn::Sub(v, shift)); });
}

/// Any block: two passes, and every edge value.
template <typename T>
RowState exact_state(const T* x, std::int64_t count) {
  const Accumulator<T> max = max_of(x, count);
  return {max, sum_of_exp(x, count, softmax_anchor(max))};
}

/// The optimistic pass over the blocks of a row after the first.
template <typename T>
class AnchoredSum {
 public:
  explicit AnchoredSum(double anchor)
      : is_usable_(std::abs(anchor) < 1e30), shift_(static_cast<float>(anchor) * kLog2E) {
    // The shift is rounded once more than the anchor: by as much is what is summed off, the same for all elements.
    if (is_usable_) correction_ = std::exp(static_cast<double>(shift_) / 1.44269504088896341 - anchor);
  }

  /// False where the block has to be done by exact_state().
  bool add(const T* x, std::int64_t count, double& sum) const {
    if (!is_usable_) return false;
    const FloatTag d;
    const auto log2e = hn::Set(d, kLog2E);
    const auto shift = hn::Set(d, shift_);
    const float block = sum_of(x, count, [&](Float v) HWY_ATTR { return exp2(d, hn::MulSub(v, log2e, shift)); });
    // Written so that a NaN is refused too. An exponent of 13 still leaves 2e-7 of relative error in its power of two.
    if (!(block <= 4.0f * static_cast<float>(block_size<T>()))) return false;
    sum += block * correction_;
    return true;
  }

 private:
  bool is_usable_;
  float shift_;
  double correction_ = 1.0;
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
  const std::int64_t first = std::min(block, end - begin);
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
                     buffer_[done + i] = load_as_accumulator(from[i * stride[tensor_]]);
                 });
    return buffer_;
  }

  /// Calls body(done, n, offsets, strides) for the stretches of columns [begin, begin + count) that have one stride.
  template <typename Body>
  static void for_each_run(const StridedLoop<2>& columns, std::int64_t begin, std::int64_t count, Body&& body) {
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

 private:
  const StridedLoop<2>& columns_;
  const T* row_;
  int tensor_;
  HWY_ALIGN Element buffer_[32 * kMaxPackSize<Element>];
};

template <typename T>
RowState reduce_piece(const LogsumexpForwardProblem& problem, std::int64_t row, std::int64_t begin, std::int64_t end) {
  const T* x = static_cast<const T*>(problem.x) + problem.view.rows.offsets(row).of[0];
  constexpr bool kIsFloatingPoint = is_floating_point_type<T>();
  if constexpr (kIsFloatingPoint) {
    if (problem.view.layout == RowLayout::contiguous) {
      return reduce_columns<T>(begin, end, [x](std::int64_t column, std::int64_t) { return x + column; });
    }
  }
  Gather<T> gather(problem.view.columns, x, 0);
  return reduce_columns<Accumulator<T>>(begin, end, gather);
}
