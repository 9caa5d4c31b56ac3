// The statistics of a softmax over a set of elements, and the merge of two sets: the online-softmax monoid. Every
// operator that normalises a row (logsumexp, cross entropy) is a reduction over this type, in a CPU vector lane, a GPU
// thread, a warp, a block, a cluster or a grid.
//
//   max   the largest element that is not NaN, or a number at most kSoftmaxSlack below it; -inf for the empty set
//   sum   sum of exp(x - anchor(max)), where anchor(m) = m if m is finite, else 0
//
// The anchor makes the edge cases right without a branch: a set of -inf sums to 0 (lse = -inf), a set with a +inf sums
// to +inf (lse = +inf), and a NaN, which the maximum ignores, always reaches the sum (lse = NaN).
#pragma once

#include <cmath>

#include "core/numeric.h"

namespace eaves {

/// How far a state's `max` may lag behind its largest element. e^20 times 2^31 elements is far below float32's largest
/// number, and moving the maximum for a smaller lag is wasted work.
inline constexpr float kSoftmaxSlack = 20.0f;

/// The number to subtract before the exponential: `max`, or 0 for an infinite `max`, to avoid infinity - infinity.
template <typename A>
EAVES_HOST_DEVICE constexpr A softmax_anchor(A max) {
  return max - max == A(0) ? max : A(0);  // infinity - infinity is NaN, and NaN == 0 is false
}

template <typename A>
struct SoftmaxState {
  A max = -infinity<A>();
  A sum = A(0);

  /// log of the sum of exponentials of the whole set.
  EAVES_HOST_DEVICE A lse() const { return softmax_anchor(max) + std::log(sum); }
};

/// An lse as two numbers: the rounded `high`, and `low`, its rounding error (0 for a `high` that is not finite). Next
/// to a large anchor, one number keeps too few digits of log(sum), and none for a sum close to 1.
template <typename A>
struct SplitLse {
  A high = A(0);
  A low = A(0);
};

/// anchor + log_sum, exactly (TwoSum).
template <typename A>
EAVES_HOST_DEVICE SplitLse<A> split_lse(A anchor, A log_sum) {
  const A high = anchor + log_sum;
  if (!(high - high == A(0))) return {high, A(0)};
  const A added = high - anchor;
  return {high, (anchor - (high - added)) + (log_sum - added)};
}

/// Converts both numbers to A; `low` takes the rounding error of `high`.
template <typename A, typename B>
EAVES_HOST_DEVICE SplitLse<A> rounded(const SplitLse<B>& lse) {
  const A high = static_cast<A>(lse.high);
  const bool is_finite = high - high == A(0);
  return {high, is_finite ? static_cast<A>((lse.high - static_cast<B>(high)) + lse.low) : A(0)};
}

/// The lse of rows in memory: one number per row, or `high` and `low` next to each other.
struct KeptLse {
  void* data = nullptr;  ///< nullptr: no lse
  bool is_split = false;

  /// Reads one row's lse, which begins at element `first`.
  template <typename A>
  EAVES_HOST_DEVICE SplitLse<A> load(std::int64_t first) const {
    const A* from = static_cast<const A*>(data) + first;
    return {from[0], is_split ? from[1] : A(0)};
  }
  template <typename A>
  EAVES_HOST_DEVICE void store(std::int64_t first, const SplitLse<A>& lse) const {
    A* to = static_cast<A*>(data) + first;
    to[0] = lse.high;
    if (is_split) to[1] = lse.low;
  }
  /// The first element of row `index` in a contiguous lse.
  EAVES_HOST_DEVICE std::int64_t row(std::int64_t index) const { return is_split ? 2 * index : index; }
};

/// The state of the union of two disjoint sets. Commutative; the default-constructed state is neutral. `exp` is the
/// exponential to use: the library's, or an approximate one of a GPU.
template <typename A, typename Exp>
EAVES_HOST_DEVICE SoftmaxState<A> merge(const SoftmaxState<A>& a, const SoftmaxState<A>& b, Exp exp) {
  const A max = a.max > b.max ? a.max : b.max;
  // Equal maxima need no scaling, and the difference of two infinite ones would be NaN.
  const A scale_a = a.max == max ? A(1) : exp(a.max - max);
  const A scale_b = b.max == max ? A(1) : exp(b.max - max);
  return {max, a.sum * scale_a + b.sum * scale_b};
}

template <typename A>
SoftmaxState<A> merge(const SoftmaxState<A>& a, const SoftmaxState<A>& b) {
  return merge(a, b, [](A x) { return std::exp(x); });
}

}  // namespace eaves
