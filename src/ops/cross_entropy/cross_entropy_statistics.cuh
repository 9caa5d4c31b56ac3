// The statistics that a thread accumulates while it walks along a row, and the functions that add single logits and
// batches of vectors to them.
#pragma once

#include "cuda/vector.cuh"
#include "ops/cross_entropy/cross_entropy_device.cuh"

namespace eaves::cuda {

struct MergeStatistics {
  template <typename A>
  __device__ ClassStatistics<A> operator()(const ClassStatistics<A>& a, const ClassStatistics<A>& b) const {
    return merge(a, b, [](A x) { return exponential(x); });
  }
};

/// reduce_lanes() for ClassStatistics in fewer steps: it reduces the maxima, rescales once, and then adds the sums.
template <int kLanes, typename A>
__device__ ClassStatistics<A> reduce_lanes(const ClassStatistics<A>& state, MergeStatistics merge) {
  const auto over_lanes = [](auto value, auto combine) {
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
      value = combine(value, __shfl_xor_sync(0xffffffffu, value, mask));
    }
    return value;
  };
  const auto larger = [](A a, A b) { return fmax(a, b); };
  const auto add = [](A a, A b) { return a + b; };
  ClassStatistics<A> result;
  result.softmax.max = over_lanes(state.softmax.max, larger);
  // Merging with an empty set that has the common maximum rescales the sums to it.
  const ClassStatistics<A> moved = merge(state, {.softmax = {result.softmax.max, A(0)}});
  result.softmax.sum = over_lanes(moved.softmax.sum, add);
  result.moment = over_lanes(moved.moment, add);
  result.square = over_lanes(moved.square, add);
  result.logit_sum = over_lanes(state.logit_sum, add);
  result.factor_sum = over_lanes(state.factor_sum, add);
  result.best_value = over_lanes(state.best_value, larger);
  const std::int64_t candidate = state.best_value == result.best_value ? state.best : kNoClass;
  result.best = over_lanes(candidate, [](std::int64_t a, std::int64_t b) { return min(a, b); });
  return result;
}

/// ClassStatistics before finished(): exponents are in units of kUnit. Without kHasSquare, `square` stays 0.
template <typename A, bool kHasSquare>
struct RunningStatistics {
  A anchor_logit = -infinity<A>();  ///< one of the logits; no other z' / kUnit is more than kAnchorSlack above its own
  A anchor = -infinity<A>();        ///< its z' / kUnit
  A sum = A(0);                     ///< sum of e^(kUnit * d) with d = z' / kUnit - anchor
  A lost = A(0);                    ///< the rounding errors of `sum` in add_logit(), until settle()
  A moment = A(0);                  ///< sum of e^(kUnit * d) * d
  A square = A(0);                  ///< sum of e^(2 * kUnit * d)
  A logit_sum = A(0);               ///< sum of u * z' / kUnit with a softcap, of u * z without
  A factor_sum = A(0);              ///< sum of u
  A best_value = -infinity<A>();    ///< the largest z that is not NaN
  std::int64_t best = kNoClass;     ///< its class, if argmax is wanted

  /// Adds the rounding errors back to `sum`: beside a term of 1, up to half a unit in the last place for each element
  /// that add_logit() takes. Every loop over elements ends with this call, so that loops over vectors need no register
  /// for `lost`.
  __device__ void settle() {
    if (lost - lost == A(0)) sum += lost;  // beside an infinite sum `lost` is NaN
    lost = A(0);
  }

  /// z' / kUnit - anchor of a logit.
  __device__ A exponent(A z, const LossTerms<A>& terms) const {
    const Transformed<A> transformed = transformed_in_units(z, terms);
    if (fabs(anchor) < A(kCommonAnchor)) return fma(transformed.value, transformed.factor, -anchor);
    // Products are as large as a large anchor, and so are their rounding errors: the logits are subtracted first, if
    // that is not inf - inf.
    if (terms.softcap == A(0) && fabs(anchor_logit) < infinity<A>()) {
      return product(z - anchor_logit, terms.scale_in_units);
    }
    return transformed.rounded() - softmax_anchor(anchor);
  }
};

/// Makes a logit the anchor. Callers do so only if it is needed: when one lane raises its anchor, its whole warp waits.
template <typename A, bool kHasSquare>
__device__ void raise_anchor(RunningStatistics<A, kHasSquare>& s, A z, const LossTerms<A>& terms) {
  const Transformed<A> transformed = transformed_in_units(z, terms);
  const A anchor = transformed.rounded();
  if (!(anchor > s.anchor) && !(z > s.anchor_logit)) return;  // z is a NaN or -infinity
  if (s.sum != A(0)) {                                        // an empty sum needs no rescaling
    // With a common anchor (below kCommonAnchor) terms are relative to the rounded anchor; with a large anchor and no
    // softcap, to the exact product anchor_logit * scale_in_units. exponent() still refers to the old anchor, so a
    // change from large to common adds the rounding error of the new one.
    const bool was_common = fabs(s.anchor) < A(kCommonAnchor);
    const bool is_common = fabs(anchor) < A(kCommonAnchor);
    A shift = was_common && is_common ? s.anchor - anchor : -s.exponent(z, terms);
    if (!was_common && is_common && terms.softcap == A(0)) shift += fma(transformed.value, transformed.factor, -anchor);
    const A scale = power(shift);
    s.settle();
    // The shift may be infinite, and infinity * 0 is NaN.
    s.moment = scale == A(0) ? A(0) : fma(s.sum, shift, s.moment) * scale;
    s.sum *= scale;
    if constexpr (kHasSquare) s.square *= scale * scale;
  }
  s.anchor = anchor;
  s.anchor_logit = z;
}

/// Adds one logit; ClassStatistics defines `u`. The caller calls settle() or finished() afterwards.
template <typename A, bool kHasSquare>
__device__ void add_logit(RunningStatistics<A, kHasSquare>& s, A z, A u, std::int64_t column,
                          const LossTerms<A>& terms) {
  if (z > s.best_value || (z == s.best_value && column < s.best)) {
    s.best_value = z;
    s.best = column;
  }
  if (z > s.anchor_logit + terms.slack_of_logits || s.anchor == -infinity<A>()) raise_anchor(s, z, terms);
  const A exponent = s.exponent(z, terms);
  const A term = power(exponent);
  const A larger = fmax(s.sum, term);
  const A sum = s.sum + term;
  s.lost += fmin(s.sum, term) - (sum - larger);
  s.sum = sum;
  // fmax(), because 0 * -infinity must be 0. It replaces a NaN exponent, but then `term` is NaN, and so is the moment.
  s.moment = fma(term, fmax(exponent, A(-1e30)), s.moment);
  if constexpr (kHasSquare) s.square = fma(term, term, s.square);
  const A value = terms.softcap == A(0) ? z : transformed_in_units(z, terms).rounded();
  s.logit_sum += u == A(0) ? A(0) : u * value;  // 0 * -infinity would be NaN
  s.factor_sum += u;
}

/// The sum of the factors u of a vector.
template <int kSize>
__device__ float total_of(const float (&u)[kSize]) {
  float total = u[0];
#pragma unroll
  for (int i = 1; i < kSize; ++i) total += u[i];
  return total;
}

/// The column of the first element of a batch that equals `value`, which is one of the elements. H100, [4096, 32768]
/// bf16 with argmax: 101 us, with a select for each element 103 us.
template <typename T, int kVectors>
__device__ std::int64_t first_column_equal_to(const Vector<T> (&batch)[kVectors], Accumulator<T> value,
                                              std::int64_t first, int step) {
  constexpr int kSize = Vector<T>::kSize;
  static_assert(kVectors * kSize <= 32);
  std::uint32_t equal = 0;  // a bit for each element
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const std::uint32_t words[4] = {batch[v].words.x, batch[v].words.y, batch[v].words.z, batch[v].words.w};
    std::uint32_t halves = 0;  // bit i of an even element i, bit 16 + i of an odd one
    if constexpr (sizeof(T) == 2) {
      const std::uint32_t both = pack<T>({value, value}).words.x;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        halves |= __heq2_mask(detail::pair_of<T>(words[w]), detail::pair_of<T>(both)) & (0x20001u << 2 * w);
      }
      equal |= ((halves | halves >> 16) & 0xffu) << kSize * v;
    } else {
#pragma unroll
      for (int w = 0; w < 4; ++w) equal |= __uint_as_float(words[w]) == value ? 1u << (kSize * v + w) : 0u;
    }
  }
  const int found = __ffs(static_cast<int>(equal)) - 1;
  return first + found / kSize * step + found % kSize;
}

/// u of ClassStatistics: not needed by any statistic, 1, or loaded. H200, [4096, 32768] bf16 with argmax: 0.092 ms;
/// 0.097 ms if `none` is treated as `one`.
enum class Factors { none, one, loaded };

/// try_add_batch() after the anchor has been raised. kIsSmall: all logits are in the range of the softcap's polynomial.
template <bool kIsCapped, bool kIsSmall, Factors kFactors, bool kHasSquare, typename T, int kVectors,
          typename LoadFactors>
__device__ bool add_at_anchor(RunningStatistics<float, kHasSquare>& s, const Vector<T> (&batch)[kVectors],
                              const LossTerms<float>& terms, bool has_moment, LoadFactors load_factors) {
  constexpr int kSize = Vector<T>::kSize;
  // Two sums of each kind, so that consecutive additions do not wait for each other.
  float sums[2] = {};
  float moments[2] = {};
  float logit_sums[2] = {};
  float squares[2] = {};
  float factor_sum = kFactors == Factors::one ? kVectors * kSize : 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float z[kSize];
    float u[kSize];
    unpack(batch[v], z);
    if constexpr (kFactors == Factors::loaded) factor_sum += load_factors(v, u);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      float exponent;
      if constexpr (!kIsCapped) {
        exponent = fmaf(z[i], terms.scale_in_units, -s.anchor);
      } else if constexpr (kIsSmall) {
        exponent = fmaf(z[i], small_slope(z[i], terms), -s.anchor);
      } else {
        const Transformed<float> transformed = capped<true>(z[i], terms);
        exponent = fmaf(transformed.value, transformed.factor, -s.anchor);
      }
      const float term = power(exponent);
      sums[i % 2] += term;
      moments[i % 2] = fmaf(term, exponent, moments[i % 2]);
      if constexpr (kHasSquare) squares[i % 2] = fmaf(term, term, squares[i % 2]);
      const float value = kIsCapped ? exponent : z[i];
      if constexpr (kFactors == Factors::loaded) logit_sums[i % 2] = fmaf(u[i], value, logit_sums[i % 2]);
      if constexpr (kFactors == Factors::one) logit_sums[i % 2] += value;
    }
  }
  const float moment = has_moment ? moments[0] + moments[1] : 0.0f;
  float logit_sum = logit_sums[0] + logit_sums[1];
  if (isnan(moment) || isnan(logit_sum)) return false;
  if constexpr (kIsCapped) logit_sum = fmaf(s.anchor, factor_sum, logit_sum);
  s.sum += sums[0] + sums[1];
  s.moment += moment;
  if constexpr (kHasSquare) s.square += squares[0] + squares[1];
  s.logit_sum += logit_sum;
  s.factor_sum += factor_sum;
  return true;
}

/// Adds whole vectors without a branch between their elements. Vector v starts at column first + v * step. With
/// Factors::loaded, `load_factors(v, u)` loads u of vector v and returns its sum. Returns false if the batch needs the
/// slower add_logit(): the anchor is infinite or large, the softcap is extreme, or a sum has 0 * infinity. Then only
/// the maximum has been taken, and taking it a second time is harmless.
template <bool kIsCapped, Factors kFactors, bool kHasSquare, typename T, int kVectors, typename LoadFactors>
__device__ bool try_add_batch(RunningStatistics<float, kHasSquare>& s, const Vector<T> (&batch)[kVectors],
                              std::int64_t first, int step, const LossTerms<float>& terms, const LossPlan& plan,
                              LoadFactors load_factors) {
  const float largest = max_of(batch);
  if (plan.has_best && largest > s.best_value) s.best = first_column_equal_to(batch, largest, first, step);
  s.best_value = fmaxf(s.best_value, largest);
  if (largest > s.anchor_logit + terms.slack_of_logits) raise_anchor(s, largest, terms);
  if (!(fabsf(s.anchor) < kCommonAnchor)) return false;
  const auto add = [&]<bool kIsSmall>() {
    return add_at_anchor<kIsCapped, kIsSmall, kFactors>(s, batch, terms, plan.has_moment, load_factors);
  };
  if constexpr (kIsCapped) {
    if (max_of_sizes(batch) <= terms.small_logit) return add.template operator()<true>();
    if (terms.small_logit < 0.0f) return false;
  }
  return add.template operator()<false>();
}

/// The statistics in the form that merge() takes, relative to the largest z'.
template <typename A, bool kHasSquare>
__device__ ClassStatistics<A> finished(RunningStatistics<A, kHasSquare> s, const LossTerms<A>& terms) {
  s.settle();
  ClassStatistics<A> result;
  result.logit_sum = s.logit_sum * (terms.softcap == A(0) ? terms.scale : kUnit<A>);
  result.factor_sum = s.factor_sum;
  result.best_value = s.best_value;
  result.best = s.best;
  result.softmax = {s.anchor, s.sum};
  result.moment = s.moment * kUnit<A>;
  result.square = s.square;
  // Sums relative to an infinite anchor, or to none, cannot be moved. Without a softcap the test is on the logit,
  // because the product of a finite logit may be infinite.
  const A finite = terms.softcap == A(0) ? s.anchor_logit : s.anchor;
  if (!(fabs(finite) < infinity<A>())) {
    result.softmax.max = finite;
    return result;
  }
  // The shift from the anchor to the largest z', with one rounding. The difference of two rounded numbers would make
  // the sum of a single large term differ from 1.
  const A shift = s.exponent(s.best_value, terms);
  // 1 / power(shift), not power(-shift): the largest term is power(shift), so the error of the approximate exponential
  // cancels.
  const A scale = A(1) / power(shift);
  result.softmax = {transformed(s.best_value, terms), s.sum * scale};
  // product() rounds like the moment of a single term, so that the moment of a single term becomes 0.
  result.moment = (s.moment - product(s.sum, shift)) * scale * kUnit<A>;
  if constexpr (kHasSquare) result.square = s.square * scale * scale;
  if (result.softmax.max == infinity<A>()) result.softmax.sum = result.square = infinity<A>();  // z' has overflowed
  return result;
}

}  // namespace eaves::cuda
