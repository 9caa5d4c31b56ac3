// SoftmaxState on a CPU: the statistics of a row of contiguous elements, and the softmax that a gradient needs.
//
// A sum of exponentials needs something to subtract first, but not the maximum: any element that is not much smaller
// does. So a row goes through once, in blocks: its first four packs give the anchor, every later block tries the anchor
// so far, with one exponential per element and no search for a maximum, and is done again properly if its sum comes out
// large, infinite or NaN. The blocks' sums add up in float64.
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

/// A SoftmaxState whose `max` is an anchor: an element of the row that none exceeds by more than kSoftmaxSlack. lse()
/// and merge() do not mind.
using RowState = SoftmaxState<double>;

template <typename T>
T minus_infinity() {
  return round_to<T>(-infinity<Accumulator<T>>());
}

// ------------------------------------------------------------------------------------------------------ reductions

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

/// A sum of terms that are not negative, which keeps what each addition rounds off. Where the largest term meets many
/// small ones, as in the row of a class that is almost certain, the plain sum of one lane errs by a unit in the last
/// place for each of them.
template <typename T>
struct CompensatedSum {
  VectorOf<T> sum, rest;

  HWY_INLINE void add(VectorOf<T> term) {
    const auto next = hn::Add(sum, term);
    rest = hn::Add(rest, hn::Sub(hn::Min(sum, term), hn::Sub(next, hn::Max(sum, term))));
    sum = next;
  }
};

/// The lanes in float64, those of one half added to those of the other.
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

/// The sum of all lanes of both.
template <typename T>
double total_of(const CompensatedSum<T>& a, const CompensatedSum<T>& b) {
  const Tag<double> d;
  const auto sum = hn::Add(widened(a.sum), widened(b.sum));
  const auto rest = widened(hn::Add(a.rest, b.rest));
  const double total = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum, rest)));
  if (std::isfinite(total)) return total;
  return hn::GetLane(hn::SumOfLanes(d, sum));  // the rest of an infinite sum is a NaN
}

/// Sum of exp(x - anchor), to the last place of the largest term.
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

/// Any block: two passes, and every edge value.
template <typename T>
RowState exact_state(const T* x, std::int64_t count) {
  const Accumulator<T> max = max_of(x, count);
  return {max, exact_sum_of_exp(x, count, softmax_anchor(max))};
}

/// x -> exp(x - anchor) for many x, as correction * exp2(exponent(x)). With FMA the exponent is one instruction,
/// x * kLog2E - shift, of which only the small difference is rounded. The shift is anchor * kLog2E rounded to float32;
/// it changes all exponentials by one factor, which is known: the correction. Where that is large (see is_usable()) the
/// caller subtracts first.
class Anchored {
 public:
  explicit Anchored(double anchor) {
#if HWY_NATIVE_FMA
    shift_ = static_cast<float>(anchor * kLog2E);
    const double rounding = shift_ - anchor * kLog2E;
    // False for infinities and NaN, and for anchors from about 2^24 on: exp2(exponent(x)) is off by the correction, and
    // where that is large, sums of it overflow or vanish.
    is_usable_ = std::abs(rounding) <= 1.0;
    // exp2(rounding), which is almost always 1 + 1e-7; the square of a small number is not missed.
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
    // Written so that a NaN is refused too.
    if (!(block <= kLargestMean * static_cast<float>(block_size<T>()))) return false;
    sum += block * anchored.correction();
    return true;
  }

 private:
  // Less than kSoftmaxSlack allows, because the exponent is rounded in float32, which costs a power of two in
  // proportion to the exponent's size: one of 14, from the largest sum with AVX-512, still leaves 3e-7 of relative
  // error.
  static constexpr float kLargestMean = 4.0f;
  static_assert(std::bit_width(std::size_t{4} * kPacksPerBlock * kMaxPackSize<T>) * std::numbers::ln2 < kSoftmaxSlack,
                "an element may exceed the anchor by the logarithm of the largest sum");

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
    // One term alone may be as large as that.
    if (!(block <= std::exp(double{kSoftmaxSlack}))) return false;
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

// -------------------------------------------------------------------------------------------------------- gradients

/// scale * exp(x - lse), lane by lane. The difference comes first: x * log2e - lse * log2e would cancel. What is
/// rounded to 16 bits afterwards may use the shorter exponential.
template <typename T>
HWY_INLINE VectorOf<T> scaled_softmax(VectorOf<T> x, VectorOf<T> lse, VectorOf<T> scale) {
  const Tag<T> d;
  const auto difference = hn::Sub(x, lse);
  if constexpr (sizeof(T) == 2) return hn::Mul(scale, exp_term(d, difference));
  return hn::Mul(scale, exp(d, difference));
}

/// to[i] = scale * exp(x[i] - lse). `to` may begin where `x` does, also where R is narrower than T.
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
