// What the kernels of cross_entropy share on the device: where a row's target and the weights are, the transforms of a
// logit, and what many logits add to the statistics of a row.
#pragma once

#include <numbers>

#include "core/dispatch.h"
#include "cuda/math.cuh"
#include "cuda/row_reduce.cuh"
#include "cuda/softmax.cuh"
#include "cuda/vector.cuh"
#include "ops/cross_entropy/cross_entropy_math.h"

namespace eaves::cuda {

// ---- loads ---------------------------------------------------------------------------------------------------------

/// Where column `column` lies in tensor `tensor` of a view, counted from the row.
template <int kColumns, int kAll>
__device__ std::int64_t column_offset(const ShortRowView<kColumns, kAll>& view, int tensor, std::int64_t column) {
  return column * view.column_strides[tensor];
}
template <int kColumns, int kAll>
__device__ std::int64_t column_offset(const RowView<kColumns, kAll>& view, int tensor, std::int64_t column) {
  return view.columns.offsets(column).of[tensor];
}

/// An array of T, or of float32: `is_float` says which.
template <typename T>
struct OwnOrFloat {
  const void* data = nullptr;
  bool is_float = false;

  __device__ Accumulator<T> operator[](std::int64_t i) const {
    return is_float ? Accumulator<T>(static_cast<const float*>(data)[i])
                    : load_as_accumulator(static_cast<const T*>(data)[i]);
  }

  /// Elements i to i + kSize, by vectors where they start on one.
  __device__ void load_run(std::int64_t i, Accumulator<T> (&values)[Vector<T>::kSize]) const {
    constexpr int kSize = Vector<T>::kSize;
    if (!is_float) {
      const T* from = static_cast<const T*>(data) + i;
      if (reinterpret_cast<std::uintptr_t>(from) % 16 == 0) {
        const uint4 words = __ldg(reinterpret_cast<const uint4*>(from));
        unpack(Vector<T>{words}, values);
        return;
      }
    } else if constexpr (kSize >= 4) {
      const float* from = static_cast<const float*>(data) + i;
      if (reinterpret_cast<std::uintptr_t>(from) % 16 == 0) {
#pragma unroll
        for (int v = 0; v < kSize; v += 4) {
          const float4 four = __ldg(reinterpret_cast<const float4*>(from + v));
          values[v] = four.x;
          values[v + 1] = four.y;
          values[v + 2] = four.z;
          values[v + 3] = four.w;
        }
        return;
      }
    }
#pragma unroll
    for (int v = 0; v < kSize; ++v) values[v] = (*this)[i + v];
  }
};

// ---- transforms ----------------------------------------------------------------------------------------------------

/// tanh, and its derivative 1 - tanh^2 without cancellation.
template <typename A>
struct Tanh {
  A value;
  A derivative;
};

__device__ inline Tanh<double> tanh_of(double x) {
  const double inverse_cosh = 1.0 / ::cosh(x);
  return {::tanh(x), inverse_cosh * inverse_cosh};
}

/// Up to kSmallTanh by a polynomial, which needs no special function, beyond as 1 - 2 / (e^2|x| + 1). Relative error
/// 3e-7.
inline constexpr float kSmallTanh = 0.625f;
/// tanh(x) / x as a polynomial of x^2: a relative error of 4e-9 for |x| <= kSmallTanh, fitted by weighted least
/// squares; 1e-7 with the roundings.
inline constexpr int kTanhDegree = 5;
EAVES_HOST_DEVICE constexpr float tanh_coefficient(int i) {
  constexpr float kCoefficients[kTanhDegree + 1] = {0x1p+0f,         -0x1.555524p-2f, 0x1.11058p-3f,
                                                    -0x1.b8153ep-5f, 0x1.515cdep-6f,  -0x1.72eedcp-8f};
  return kCoefficients[i];
}

__device__ inline float small_tanh(float x) {
  const float u = x * x;
  float p = tanh_coefficient(kTanhDegree);
#pragma unroll
  for (int i = kTanhDegree - 1; i >= 0; --i) p = fmaf(p, u, tanh_coefficient(i));
  return x * p;
}

__device__ inline float large_tanh_complement(float x) {
  return __fdividef(2.0f, exponential(2.0f * fminf(fabsf(x), 40.0f)) + 1.0f);
}

__device__ inline Tanh<float> tanh_of(float x) {
  if (fabsf(x) <= kSmallTanh) {
    const float t = small_tanh(x);
    return {t, fmaf(-t, t, 1.0f)};
  }
  const float q = large_tanh_complement(x);  // a NaN stays one: fminf() has dropped it, the next line puts it back
  return {x != x ? x : copysignf(1.0f - q, x), q * (2.0f - q)};
}

/// The options as kernels compute with them. The factors of the softcap's polynomial are put into its coefficients, and
/// those are read from the kernel's arguments.
template <typename A>
struct LossTerms : CrossEntropyTerms<A> {
  A factor = A(0);                       ///< scale / softcap
  A small_logit = A(0);                  ///< up to which the polynomial serves
  A coefficients[kTanhDegree + 1] = {};  ///< of z' / log(2)

  explicit LossTerms(const CrossEntropyInputs& inputs) : CrossEntropyTerms<A>(inputs) {
    if (this->softcap == A(0)) return;
    const double exact_factor = inputs.options.scale / inputs.options.softcap;
    factor = static_cast<A>(exact_factor);
    double power = inputs.options.scale * std::numbers::log2e;
    for (int i = 0; i <= kTanhDegree; ++i, power *= exact_factor * exact_factor) {
      coefficients[i] = static_cast<A>(tanh_coefficient(i) * power);
    }
    // Extreme scales, whose powers are no numbers, take the other way.
    const bool is_usable = exact_factor > 1e-4 && exact_factor < 1e4 && power > 1e-30 && power < 1e30;
    small_logit = is_usable ? static_cast<A>(kSmallTanh / exact_factor) : A(-1);
  }
};

/// z' / log(2) of a logit of at most `small_logit`.
__device__ inline float capped_in_log2(float z, const LossTerms<float>& terms, float minus = 0.0f) {
  const float square = z * z;
  float p = terms.coefficients[kTanhDegree];
#pragma unroll
  for (int c = kTanhDegree - 1; c >= 0; --c) p = fmaf(p, square, terms.coefficients[c]);
  return fmaf(z, p, -minus);
}

/// z' of a logit by the common path of every kernel: what a target is, and the strided layouts.
template <typename A>
__device__ A transformed(A z, const CrossEntropyTerms<A>& terms) {
  return transformed_logit(z, terms, [](A x) { return tanh_of(x).value; });
}

/// z' of kSize logits.
template <typename A, int kSize>
__device__ void transform_logits(const A (&z)[kSize], A (&transformed)[kSize], const LossTerms<A>& terms) {
  if (terms.softcap == A(0)) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) transformed[i] = z[i] * terms.scale;
    return;
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) transformed[i] = terms.softcap * tanh_of(z[i] * terms.factor).value;
}

// ---- problems ------------------------------------------------------------------------------------------------------

/// What every kernel knows of its problem.
template <typename T, typename View>
struct LossInputs {
  using A = Accumulator<T>;

  View view;
  LossTerms<A> terms;
  const T* logits;
  const void* targets;  ///< classes
  bool are_targets_64_bit;
  OwnOrFloat<T> soft_targets;
  OwnOrFloat<T> weight;

  LossInputs(const View& rows, const CrossEntropyInputs& inputs)
      : view(rows),
        terms(inputs),
        logits(static_cast<const T*>(inputs.logits)),
        targets(inputs.targets),
        are_targets_64_bit(inputs.targets_dtype == DType::int64),
        soft_targets{inputs.targets, inputs.targets_dtype != kDTypeOf<T>},
        weight{inputs.weight, inputs.weight_dtype != kDTypeOf<T>} {}

  /// The class that a row names; 0 with soft targets.
  __device__ std::int64_t target_at(std::int64_t offset) const {
    if (terms.is_soft) return 0;
    return are_targets_64_bit ? static_cast<const std::int64_t*>(targets)[offset]
                              : static_cast<const std::int32_t*>(targets)[offset];
  }

  /// The weight of a class in range; 1 where the class belongs to another shard.
  __device__ A weight_of(std::int64_t target) const {
    const std::int64_t column = target - terms.first_class;
    return terms.has_weight && column >= 0 && column < view.column_count ? weight[column] : A(1);
  }
};

// ---- statistics ----------------------------------------------------------------------------------------------------

struct MergeStatistics {
  template <typename A>
  __device__ ClassStatistics<A> operator()(const ClassStatistics<A>& a, const ClassStatistics<A>& b) const {
    return merge(a, b, [](A x) { return exponential(x); });
  }
};

/// What of the statistics is wanted beside the softmax.
struct WantedStatistics {
  bool linear = false;  ///< and mass
  bool moment = false;
  bool best = false;
};

/// Moves the anchor to a larger maximum.
template <typename A>
__device__ void raise_max(ClassStatistics<A>& s, A max) {
  if (s.softmax.sum != A(0)) {  // the anchor of nothing may be any number
    const A shift = softmax_anchor(s.softmax.max) - softmax_anchor(max);
    const A scale = exponential(s.softmax.max - max);
    s.moment = scale == A(0) ? A(0) : fma(s.softmax.sum, shift, s.moment) * scale;  // the shift may be infinite
    s.softmax.sum *= scale;
  }
  s.softmax.max = max;
}

/// Takes kSize logits into the statistics: columns first, first + step, ... `u` are those of ClassStatistics.
template <typename A, int kSize>
__device__ void take(ClassStatistics<A>& s, const A (&z)[kSize], const A (&u)[kSize], std::int64_t first,
                     std::int64_t step, const LossTerms<A>& terms, const WantedStatistics& wanted) {
  if (wanted.best) {
    A best = z[0];
#pragma unroll
    for (int i = 1; i < kSize; ++i) best = fmax(best, z[i]);
    if (best > s.best_value || (best == s.best_value && first < s.best)) {
      int index = 0;
#pragma unroll
      for (int i = kSize - 1; i >= 0; --i) index = z[i] == best ? i : index;
      const std::int64_t column = first + index * step;
      if (best > s.best_value || column < s.best) s.best = column;
      s.best_value = best;
    }
  }
  A values[kSize];
  transform_logits(z, values, terms);

  A max = values[0];
#pragma unroll
  for (int i = 1; i < kSize; ++i) max = fmax(max, values[i]);
  if (max > s.softmax.max) raise_max(s, max);
  const A anchor = softmax_anchor(s.softmax.max);
  A sums[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) sums[i] = exponential(values[i] - anchor);
  if (wanted.moment) {
    A moment = A(0);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      // 0 * -infinity must be 0; what fmax() does to a NaN, the exponential undoes.
      moment = fma(sums[i], fmax(values[i] - anchor, A(-1e30)), moment);
    }
    s.moment += moment;
  }
#pragma unroll
  for (int width = kSize / 2; width > 0; width /= 2) {
#pragma unroll
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  }
  s.softmax.sum += sums[0];
  if (!wanted.linear) return;
  A linear = A(0);
  A mass = A(0);
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    linear += u[i] == A(0) ? A(0) : u[i] * values[i];  // 0 * -infinity
    mass += u[i];
  }
  s.linear += linear;
  s.mass += mass;
}

/// u of ClassStatistics, for elements [column, column + kSize) of a row. `soft_row` is where the row's soft targets
/// begin.
template <typename T, typename View>
__device__ void load_measure(const LossInputs<T, View>& in, std::int64_t soft_row, std::int64_t column,
                             Accumulator<T> (&u)[Vector<T>::kSize]) {
  using A = Accumulator<T>;
  constexpr int kSize = Vector<T>::kSize;
  if (in.terms.has_weight) {
    in.weight.load_run(column, u);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) u[i] = A(1);
  }
  if (!in.terms.is_soft) return;
  A q[kSize];
  in.soft_targets.load_run(soft_row + column, q);
  const A rest = A(1) - in.terms.smoothing;
#pragma unroll
  for (int i = 0; i < kSize; ++i) u[i] *= fma(rest, q[i], in.terms.smoothing_per_class);
}

/// The same of one element. `soft_offset` is where its soft target lies.
template <typename T, typename View>
__device__ Accumulator<T> measure_of(const LossInputs<T, View>& in, std::int64_t soft_offset, std::int64_t column) {
  using A = Accumulator<T>;
  A u = in.terms.has_weight ? in.weight[column] : A(1);
  if (in.terms.is_soft) {
    u *= fma(A(1) - in.terms.smoothing, in.soft_targets[soft_offset], in.terms.smoothing_per_class);
  }
  return u;
}

/// Takes any vector, element by element if need be: what the straight code below leaves out. Not inlined, so that the
/// loops stay short.
template <typename T, typename View>
__device__ __noinline__ ClassStatistics<Accumulator<T>> take_any(ClassStatistics<Accumulator<T>> s, Vector<T> v,
                                                                 std::int64_t soft_row, std::int64_t column,
                                                                 int elements, const LossInputs<T, View>& in,
                                                                 const WantedStatistics& wanted) {
  using A = Accumulator<T>;
  A z[Vector<T>::kSize];
  unpack(v, z);
#pragma unroll
  for (int i = 0; i < Vector<T>::kSize; ++i) {
    if (i >= elements) break;
    const A one[1] = {z[i]};
    const A u[1] = {wanted.linear ? measure_of(in, soft_row + column + i, column + i) : A(0)};
    take(s, one, u, column + i, 1, in.terms, wanted);
  }
  return s;
}

/// The first element of a vector that equals `value`, or one behind the last. By value and not inlined: a batch
/// whose address is taken would live in memory.
template <typename T>
__device__ __noinline__ int find_first(Vector<T> v, Accumulator<T> value) {
  Accumulator<T> z[Vector<T>::kSize];
  unpack(v, z);
  int found = Vector<T>::kSize;
#pragma unroll
  for (int i = Vector<T>::kSize - 1; i >= 0; --i) {
    if (z[i] == value) found = i;
  }
  return found;
}

/// What u of ClassStatistics is: the same for all elements of a kernel, so that loops are compiled for each.
enum class Measure { none, unit, loaded };

/// Takes a whole batch into float32 statistics, without a branch between its elements. Returns false, and has taken
/// nothing, where it cannot: a softcap beyond its polynomial's range, or 0 * infinity in a sum.
///
/// Exponents and z' are in units of log 2 here, as the exponential wants them.
template <bool kIsCapped, Measure kMeasure, typename T, typename View, int kVectors>
__device__ bool take_whole(ClassStatistics<float>& s, const Vector<T> (&batch)[kVectors], std::int64_t first, int step,
                           std::int64_t soft_row, const LossInputs<T, View>& in, const WantedStatistics& wanted) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr float kLog2 = 0.693147180559945309f;
  const float scale = in.terms.scale * kLog2E;
  float scaled_anchor;
  const float largest = max_of(batch);
  if constexpr (kIsCapped) {
    if (!(max_of_sizes(batch) <= in.terms.small_logit)) return false;
    const float max = capped_in_log2(largest, in.terms) * kLog2;
    if (max > s.softmax.max) raise_max(s, max);
  } else {
    const float max = largest * in.terms.scale;
    if (max > s.softmax.max) raise_max(s, max);
  }
  const float anchor = softmax_anchor(s.softmax.max);
  if (!(fabsf(anchor) < 0x1p20f)) return false;
  scaled_anchor = anchor * kLog2E;
  // Four sums of each kind, which do not wait for each other.
  float sums[4] = {};
  float moments[4] = {};
  float linears[4] = {};
  float masses[4] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float z[kSize];
    float u[kSize];
    unpack(batch[v], z);
    if constexpr (kMeasure == Measure::loaded) load_measure(in, soft_row, first + v * step, u);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const float exponent =
          kIsCapped ? capped_in_log2(z[i], in.terms, scaled_anchor) : fmaf(z[i], scale, -scaled_anchor);
      const float term = exp2_approximate(exponent);
      sums[i % 4] += term;
      moments[i % 4] = fmaf(term, exponent, moments[i % 4]);
      const float value = kIsCapped ? exponent : z[i];
      if constexpr (kMeasure == Measure::unit) linears[i % 4] += value;
      if constexpr (kMeasure == Measure::loaded) {
        linears[i % 4] = fmaf(u[i], value, linears[i % 4]);
        masses[i % 4] += u[i];
      }
    }
  }
  const auto total = [](const float(&parts)[4]) { return (parts[0] + parts[1]) + (parts[2] + parts[3]); };
  const float sum = total(sums);
  const float mass = total(masses);
  float moment = total(moments);
  float linear = total(linears);
  if (kMeasure == Measure::none) linear = 0.0f;
  if (!wanted.moment) moment = 0.0f;
  if (isnan(moment) || isnan(linear)) return false;
  s.softmax.sum += sum;
  s.moment = fmaf(moment, kLog2, s.moment);
  if constexpr (kIsCapped && kMeasure != Measure::none) {
    // Of z' without the anchor.
    linear = fmaf(scaled_anchor, kMeasure == Measure::unit ? float(kVectors * kSize) : mass, linear) * kLog2;
    s.linear += linear;
  } else {
    s.linear = fmaf(linear, in.terms.scale, s.linear);
  }
  s.mass += mass;
  if (wanted.best) {
    const float best = largest;
    if (best > s.best_value || (best == s.best_value && first < s.best)) {
      std::int64_t column = kNoClass;
#pragma unroll
      for (int v = kVectors - 1; v >= 0; --v) {
        const int found = find_first(batch[v], best);
        if (found < kSize) column = first + v * step + found;
      }
      if (best > s.best_value || column < s.best) s.best = column;
      s.best_value = best;
    }
  }
  return true;
}

}  // namespace eaves::cuda
