// The statistics of a softmax over any set of elements, in a form that two sets can be merged by: the online-softmax
// monoid. Everything that normalises a row (logsumexp, cross entropy) is a reduction over this type, on a CPU vector
// lane, a GPU thread, a warp, a block, a cluster or a grid.
//
//   max   the largest element that is not NaN, or a number at most kSoftmaxSlack below it; -inf for the empty set
//   sum   sum of exp(x - anchor(max)), where anchor(m) = m if m is finite, else 0
//
// The anchor makes the edges come out without a branch: a set of -inf sums to 0 (lse = -inf), a set with a +inf sums
// to +inf (lse = +inf), and a NaN, which no maximum keeps, always reaches the sum (lse = NaN).
#pragma once

#include <cmath>

#include "core/numeric.h"

namespace eaves {

/// How far a state's maximum may lag behind: e^20 times 2^31 elements is far from float32's largest number, and moving
/// the maximum for less is wasted work.
inline constexpr float kSoftmaxSlack = 20.0f;

/// What is subtracted before the exponential: `max`, where that does not make infinity minus infinity.
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

/// The state of the union of two disjoint sets. Commutative; the default-constructed state is neutral. `exp` is the
/// exponential to use: the library's, or an approximate one of a GPU.
template <typename A, typename Exp>
EAVES_HOST_DEVICE SoftmaxState<A> merge(const SoftmaxState<A>& a, const SoftmaxState<A>& b, Exp exp) {
  const A max = a.max > b.max ? a.max : b.max;
  // Equal maxima need no scaling, and for two infinite ones max - max would be NaN.
  const A scale_a = a.max == max ? A(1) : exp(a.max - max);
  const A scale_b = b.max == max ? A(1) : exp(b.max - max);
  return {max, a.sum * scale_a + b.sum * scale_b};
}

template <typename A>
SoftmaxState<A> merge(const SoftmaxState<A>& a, const SoftmaxState<A>& b) {
  return merge(a, b, [](A x) { return std::exp(x); });
}

}  // namespace eaves
