// SoftmaxState on a CPU: the statistics of a row of contiguous elements, and the softmax that a gradient needs.
//
// A sum of exponentials needs an anchor to subtract first. The maximum is one, but any element that is not much smaller
// is good enough. So one pass over a row suffices, in blocks. The first four packs give the anchor. Each later block
// tries the current anchor, with one exponential per element and no search for a maximum. If its sum is large, infinite
// or NaN, exact_state() computes the block again. The sums of the blocks are added in float64.
//
// Compiled once per level of vector instructions, like simd.h.
#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>

#include "core/softmax_state.h"
#include "cpu/exp.h"
#include "cpu/simd.h"

#if defined(EAVES_CPU_SOFTMAX_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EAVES_CPU_SOFTMAX_H_
#undef EAVES_CPU_SOFTMAX_H_
#else
#define EAVES_CPU_SOFTMAX_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {

/// A SoftmaxState with an anchor as its `max`: an element of the row that no other exceeds by more than kSoftmaxSlack.
/// lse() and merge() are right for any anchor.
using RowState = SoftmaxState<double>;

template <typename T>
T minus_infinity() {
  return round_to<T>(-infinity<Accumulator<T>>());
}

// ------------------------------------------------------------------------------------------------------ reductions

/// exp(v) as a term of a sum. The largest terms are near exp(0), and only they must be right to the last place.
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

/// A sum of terms that are not negative; it keeps the rounding error of each addition. If a lane adds many small terms
/// to the largest one, as in a row with an almost certain class, a plain sum errs by a unit in the last place for each
/// of them.
template <typename T>
struct CompensatedSum {
  VectorOf<T> sum, rest;

  HWY_INLINE void add(VectorOf<T> term) {
    const auto next = hn::Add(sum, term);
    rest = hn::Add(rest, hn::Sub(hn::Min(sum, term), hn::Sub(next, hn::Max(sum, term))));
    sum = next;
  }
};

/// Converts the lanes to float64, and adds the upper half of them to the lower.
HWY_INLINE VectorOf<double> widened(Float v) {
  const Tag<double> d;
#if HWY_TARGET == HWY_SCALAR
  return hn::PromoteTo(d, v);
#else
  const hn::Half<FloatTag> half;
  return hn::Add(hn::PromoteTo(d, hn::LowerHalf(half, v)), hn::PromoteTo(d, hn::UpperHalf(half, v)));
#endif
}
HWY_INLINE VectorOf<double> widened(VectorOf<double> v) { return v; }

/// The sum of all lanes of `a` and `b`.
template <typename T>
double total_of(const CompensatedSum<T>& a, const CompensatedSum<T>& b) {
  const Tag<double> d;
  const auto sum = hn::Add(widened(a.sum), widened(b.sum));
  const auto rest = widened(hn::Add(a.rest, b.rest));
  const double total = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum, rest)));
  if (std::isfinite(total)) return total;
  return hn::GetLane(hn::SumOfLanes(d, sum));  // the rest of an infinite sum is a NaN
}

/// Sum of exp(x - anchor), right to the last place of the largest term.
template <typename T>
double exact_sum_of_exp(const T* x, std::int64_t count, Accumulator<T> anchor) {
  const Tag<T> d;
  const auto shift = hn::Set(d, anchor);
  const auto zero = hn::Zero(d);
  CompensatedSum<T> s0{zero, zero}, s1{zero, zero};
  for_each_pack(x, static_cast<std::size_t>(count), minus_infinity<T>(), [&](const Pack<T>& pack) HWY_ATTR {
    s0.add(exp_term(d, hn::Sub(pack.v0, shift)));
    s1.add(exp_term(d, hn::Sub(pack.v1, shift)));
    s0.add(exp_term(d, hn::Sub(pack.v2, shift)));
    s1.add(exp_term(d, hn::Sub(pack.v3, shift)));
  });
  return total_of(s0, s1);
}

/// Sum of exp(x - anchor).
template <typename T>
Accumulator<T> sum_of_exp(const T* x, std::int64_t count, Accumulator<T> anchor) {
  const Tag<T> d;
  const auto shift = hn::Set(d, anchor);
  return sum_of(x, count, [&](VectorOf<T> v) HWY_ATTR { return exp_term(d, hn::Sub(v, shift)); });
}

/// The state of any block, with any edge values, in two passes.
template <typename T>
RowState exact_state(const T* x, std::int64_t count) {
  const Accumulator<T> max = max_of(x, count);
  return {max, exact_sum_of_exp(x, count, softmax_anchor(max))};
}

/// Computes exp(x - anchor) for many x, as correction * exp2(exponent(x)). With FMA the exponent is one instruction,
/// x * kLog2E - shift, which rounds only the small difference. The shift is anchor * kLog2E rounded to float32. This
/// rounding changes all exponentials by one known factor, which `correction` undoes. If the factor is large,
/// is_usable() is false, and the caller subtracts the anchor first.
class Anchored {
 public:
  explicit Anchored(double anchor) {
#if HWY_NATIVE_FMA
    shift_ = static_cast<float>(anchor * kLog2E);
    const double rounding = shift_ - anchor * kLog2E;
    // False for infinities and NaN, and for anchors from about 2^24 on: with a large correction, sums of
    // exp2(exponent(x)) overflow or vanish.
    is_usable_ = std::abs(rounding) <= 1.0;
    // exp2(rounding), almost always 1 + 1e-7. For a small rounding its square is negligible.
    if (is_usable_) correction_ = std::abs(rounding) < 1e-6 ? 1.0 + rounding * std::numbers::ln2 : std::exp2(rounding);
#else
    is_usable_ = std::isfinite(anchor);
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
  bool is_usable_ = false;
  float shift_ = 0.0f;
  double correction_ = 1.0;
};

/// Sums the blocks of a row after the first with the current anchor, in the hope that it is large enough.
template <typename T>
class AnchoredSum {
 public:
  explicit AnchoredSum(double anchor) : anchored_(anchor) {}

  /// Returns false if exact_state() must compute the block.
  bool add(const T* x, std::int64_t count, double& sum) const {
    if (!anchored_.is_usable()) return false;
    const FloatTag d;
    const Anchored anchored = anchored_;
    const float block = sum_of(x, count, [&](Float v) HWY_ATTR { return exp2(d, anchored.exponent(v)); });
    // The negated comparison refuses a NaN too.
    if (!(block <= kLargestMean * static_cast<float>(block_size<T>()))) return false;
    sum += block * anchored.correction();
    return true;
  }

 private:
  // Less than kSoftmaxSlack allows, because the exponent is rounded to float32, and the relative error of its power of
  // two grows with its size. The largest sum with AVX-512 allows an exponent of 14, with a relative error of 3e-7.
  static constexpr float kLargestMean = 4.0f;
  static_assert(std::bit_width(std::size_t{4} * kPacksPerBlock * kMaxPackSize<T>) * std::numbers::ln2 < kSoftmaxSlack,
                "an element may exceed the anchor by the logarithm of the largest sum");

  Anchored anchored_;
};

/// The same for float64, without Anchored.
template <>
class AnchoredSum<double> {
 public:
  explicit AnchoredSum(double anchor) : anchor_(anchor) {}
  bool add(const double* x, std::int64_t count, double& sum) const {
    if (!std::isfinite(anchor_)) return false;
    const double block = sum_of_exp(x, count, anchor_);
    // A single term may be that large.
    if (!(block <= std::exp(double{kSoftmaxSlack}))) return false;
    sum += block;
    return true;
  }

 private:
  double anchor_;
};

/// The state of columns [begin, end). `fetch(column, count)` returns `count` columns, at most a block, as contiguous
/// memory.
template <typename T, typename Fetch>
RowState reduce_columns(std::int64_t begin, std::int64_t end, Fetch&& fetch) {
  const std::int64_t block = block_size<T>();
  // A few packs usually give an anchor that is large enough, and then a short row needs only one pass too.
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

// -------------------------------------------------------------------------------------------------------- gradients

/// scale * exp(x - lse), lane by lane. The difference comes first, because x * log2e - lse * log2e would cancel. A
/// result of 16 bits may use the shorter exponential.
template <typename T>
HWY_INLINE VectorOf<T> scaled_softmax(VectorOf<T> x, VectorOf<T> lse, VectorOf<T> scale) {
  const Tag<T> d;
  const auto difference = hn::Sub(x, lse);
  if constexpr (sizeof(T) == 2) return hn::Mul(scale, exp_term(d, difference));
  return hn::Mul(scale, exp(d, difference));
}

/// to[i] = scale * exp(x[i] - lse). `to` may begin at `x`, also for an R that is narrower than T.
template <bool kNonTemporal, typename T, typename R>
void write_scaled_softmax(const T* x, R* to, std::int64_t count, Accumulator<R> lse, Accumulator<R> scale) {
  const Tag<R> d;
  const auto n = static_cast<std::size_t>(count);
  if constexpr (sizeof(R) == 2) {
    const Anchored anchored(lse);
    if (anchored.is_usable()) {
      const auto corrected = hn::Set(d, static_cast<float>(scale * anchored.correction()));
      transform<kNonTemporal>(x, to, n,
                              [&](Float v) HWY_ATTR { return hn::Mul(corrected, exp2(d, anchored.exponent(v))); });
      return;
    }
  }
  const auto lses = hn::Set(d, lse);
  const auto scales = hn::Set(d, scale);
  transform<kNonTemporal>(x, to, n, [&](VectorOf<R> v) HWY_ATTR { return scaled_softmax<R>(v, lses, scales); });
}

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();
#endif  // per target
