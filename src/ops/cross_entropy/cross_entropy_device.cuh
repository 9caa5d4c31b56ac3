// What the kernels of cross_entropy share on the device: where a row's target and the weights are, and the transforms
// of a logit.
#pragma once

#include <algorithm>

#include "core/dispatch.h"
#include "core/rows.h"
#include "core/typed_numbers.h"
#include "cuda/math.cuh"
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

/// Elements i to i + Vector<T>::kSize of numbers of T or float32. kIsAligned: they start on 16 bytes.
template <typename T, bool kIsAligned = false>
__device__ void load_run(const TypedNumbers& numbers, std::int64_t i, Accumulator<T> (&values)[Vector<T>::kSize]) {
  constexpr int kSize = Vector<T>::kSize;
  const bool is_own = numbers.dtype == kDTypeOf<T>;
  const char* from = static_cast<const char*>(numbers.data) + i * (is_own ? sizeof(T) : sizeof(float));
  if (!kIsAligned && reinterpret_cast<std::uintptr_t>(from) % 16 != 0) {
#pragma unroll
    for (int v = 0; v < kSize; ++v) values[v] = own_or_float_at<T>(numbers, i + v);
    return;
  }
  if constexpr (sizeof(T) == 2) {
    if (!is_own) {
#pragma unroll
      for (int v = 0; v < kSize; v += 4) {
        const float4 four = __ldg(reinterpret_cast<const float4*>(from) + v / 4);
        values[v] = four.x;
        values[v + 1] = four.y;
        values[v + 2] = four.z;
        values[v + 3] = four.w;
      }
      return;
    }
  }
  unpack(Vector<T>{__ldg(reinterpret_cast<const uint4*>(from))}, values);
}

// ---- transforms ----------------------------------------------------------------------------------------------------

/// What exponents are counted in: log(2) for float32, as its exponential takes them.
template <typename A>
inline constexpr A kUnit = A(1);
template <>
inline constexpr float kUnit<float> = 0.693147180559945309f;

/// e^(kUnit * x)
__device__ inline float power(float x) { return exp2_approximate(x); }
__device__ inline double power(double x) { return ::exp(x); }

/// How far the anchor of a row's exponents may lag behind its logits. Less would be more work, and more would cost
/// accuracy: exponents below 4 are known to 2^-23.
inline constexpr double kAnchorSlack = 3.0;

/// a * b, rounded by itself, whatever happens to it afterwards.
__device__ inline float product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double product(double a, double b) { return __dmul_rn(a, b); }

/// Up to kSmallTanh a polynomial, which needs no special function; beyond, 1 - 2 / (e^2|x| + 1). Relative error 3e-7.
inline constexpr float kSmallTanh = 0.625f;
/// tanh(x) / x as a polynomial of x^2: a relative error of 4e-9 for |x| <= kSmallTanh, fitted by weighted least
/// squares; 1e-7 with the roundings.
inline constexpr int kTanhDegree = 5;
EAVES_HOST_DEVICE constexpr float tanh_coefficient(int i) {
  constexpr float kCoefficients[kTanhDegree + 1] = {0x1p+0f,         -0x1.555524p-2f, 0x1.11058p-3f,
                                                    -0x1.b8153ep-5f, 0x1.515cdep-6f,  -0x1.72eedcp-8f};
  return kCoefficients[i];
}

/// The options as kernels compute with them. The factors of the softcap's polynomial are put into its coefficients, and
/// those are read from the kernel's arguments.
template <typename A>
struct LossTerms : CrossEntropyTerms<A> {
  A scale_in_units;                      ///< scale / kUnit
  A slack_of_logits;                     ///< between two logits z' / kUnit differs by at most kAnchorSlack
  A softcap_in_units = A(0);             ///< softcap / kUnit; this and the following only with a softcap
  A to_tanh = A(0);                      ///< 1 / softcap_in_units
  A to_tanh_squared = A(0);              ///< its square
  A factor = A(0);                       ///< scale / softcap
  A doubled_in_units = A(0);             ///< 2 * factor / kUnit
  A small_logit = A(-1);                 ///< up to which the polynomial below serves; below 0: never
  A coefficients[kTanhDegree + 1] = {};  ///< of z' / kUnit / z, for z^2

  explicit LossTerms(const CrossEntropyInputs& inputs)
      : CrossEntropyTerms<A>(inputs),
        scale_in_units(static_cast<A>(inputs.options.scale / kUnit<A>)),
        slack_of_logits(static_cast<A>(kAnchorSlack * kUnit<A> / inputs.options.scale)) {
    if (inputs.options.softcap == 0.0) return;
    const double exact_softcap = inputs.options.softcap / kUnit<A>;
    const double exact_factor = inputs.options.scale / inputs.options.softcap;
    softcap_in_units = static_cast<A>(exact_softcap);
    to_tanh = static_cast<A>(1.0 / exact_softcap);
    to_tanh_squared = static_cast<A>(1.0 / (exact_softcap * exact_softcap));
    constexpr double kMost = 3e38;  // 0 * infinity would be NaN
    factor = static_cast<A>(std::min(exact_factor, kMost));
    doubled_in_units = static_cast<A>(std::min(2.0 * exact_factor / kUnit<A>, kMost));
    // The powers of an extreme factor are no numbers of float32.
    if (exact_factor < 1e-3 || exact_factor > 1e3 || exact_softcap < 1e-6 || exact_softcap > 1e6) return;
    double power = exact_softcap * exact_factor;
    for (int i = 0; i <= kTanhDegree; ++i, power *= exact_factor * exact_factor) {
      coefficients[i] = static_cast<A>(tanh_coefficient(i) * power);
    }
    small_logit = static_cast<A>(kSmallTanh / exact_factor);
  }
};

/// z' / kUnit / z of a logit of at most `small_logit`.
__device__ inline float small_slope(float z, const LossTerms<float>& terms) {
  const float square = z * z;
  float p = terms.coefficients[kTanhDegree];
#pragma unroll
  for (int i = kTanhDegree - 1; i >= 0; --i) p = fmaf(p, square, terms.coefficients[i]);
  return p;
}

/// z' / kUnit of a logit, as a product that is taken together with a difference: one rounding instead of two.
template <typename A>
struct Transformed {
  A value;
  A factor;

  __device__ A rounded() const { return product(value, factor); }
};

/// Of a capped logit; and d tanh(x) / dx = 1 - tanh(x)^2 with x = factor * z, without cancellation. Without a branch
/// where the factor is usual: small_logit is not below 0.
template <bool kHasUsualFactor>
__device__ Transformed<float> capped(float z, const LossTerms<float>& terms, float* derivative = nullptr) {
  const float complement = __fdividef(2.0f, power(fabsf(z * terms.doubled_in_units)) + 1.0f);  // 1 - |tanh|
  Transformed<float> large{copysignf(1.0f - complement, z), terms.softcap_in_units};
  bool is_small = fabsf(z) <= terms.small_logit;
  const Transformed<float> small{z, small_slope(z, terms)};
  if constexpr (!kHasUsualFactor) {
    const float x = z * terms.factor;
    if (terms.small_logit < 0.0f && fabsf(x) <= kSmallTanh) {
      const float square = x * x;
      float p = tanh_coefficient(kTanhDegree);
#pragma unroll
      for (int i = kTanhDegree - 1; i >= 0; --i) p = fmaf(p, square, tanh_coefficient(i));
      if (derivative != nullptr) *derivative = fmaf(-x * p, x * p, 1.0f);
      return {z, terms.scale_in_units * p};
    }
  }
  if (derivative != nullptr) {
    const float t = small.rounded() * terms.to_tanh;
    *derivative = is_small ? fmaf(-t, t, 1.0f) : complement * (2.0f - complement);
  }
  return {is_small ? small.value : large.value, is_small ? small.factor : large.factor};
}
template <bool kHasUsualFactor>
__device__ Transformed<double> capped(double z, const LossTerms<double>& terms, double* derivative = nullptr) {
  const double inverse_cosh = 1.0 / ::cosh(z * terms.factor);
  if (derivative != nullptr) *derivative = inverse_cosh * inverse_cosh;
  return {::tanh(z * terms.factor), terms.softcap_in_units};
}

/// Of any logit.
template <typename A>
__device__ Transformed<A> transformed_in_units(A z, const LossTerms<A>& terms) {
  if (terms.softcap == A(0)) return {z, terms.scale_in_units};
  return capped<false>(z, terms);
}

/// z' of any logit, rounded. The loss takes the difference of the largest z' and the target's: the same logit has to
/// give the same number.
template <typename A>
__device__ A transformed(A z, const LossTerms<A>& terms) {
  if (terms.softcap == A(0)) return product(z, terms.scale);
  return product(capped<false>(z, terms).rounded(), kUnit<A>);
}

// ---- problems ------------------------------------------------------------------------------------------------------

/// What every kernel knows of its problem.
template <typename T, typename View>
struct LossInputs {
  using A = Accumulator<T>;

  View view;
  LossTerms<A> terms;
  const T* logits;
  TypedNumbers targets;
  TypedNumbers weight;
  const A* row_weight;  ///< per row; nullptr: 1
  bool has_factors;     ///< u of ClassStatistics is not 1

  LossInputs(const View& rows, const CrossEntropyInputs& inputs)
      : view(rows),
        terms(inputs),
        logits(static_cast<const T*>(inputs.logits)),
        targets(inputs.targets),
        weight(inputs.weight),
        row_weight(static_cast<const A*>(inputs.row_weight)),
        has_factors(inputs.plan.has_factors) {}

  /// The class that a row names; 0 with soft targets.
  __device__ std::int64_t target_at(std::int64_t offset) const {
    return terms.is_soft ? 0 : integer_at(targets, offset);
  }

  /// Of a class in range; -1 where it belongs to another shard.
  __device__ std::int64_t column_of_class(std::int64_t target) const {
    const std::int64_t column = target - terms.first_class;
    return column >= 0 && column < view.column_count ? column : -1;
  }
  __device__ A row_weight_at(std::int64_t per_row) const { return row_weight == nullptr ? A(1) : row_weight[per_row]; }
  __device__ A weight_in(std::int64_t column) const {
    return terms.has_weight ? own_or_float_at<T>(weight, column) : A(1);
  }
};

/// u of ClassStatistics, where it is not 1, for elements [column, column + kSize) of a row. `soft_row` is where the
/// row's soft targets begin.
template <typename T, typename View>
__device__ void load_factors(const LossInputs<T, View>& in, std::int64_t soft_row, std::int64_t column,
                             Accumulator<T> (&u)[Vector<T>::kSize]) {
  using A = Accumulator<T>;
  constexpr int kSize = Vector<T>::kSize;
  if (in.terms.has_weight) {
    load_run<T>(in.weight, column, u);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) u[i] = A(1);
  }
  if (!in.terms.is_soft) return;
  A q[kSize];
  load_run<T>(in.targets, soft_row + column, q);
  const A rest = A(1) - in.terms.smoothing;
#pragma unroll
  for (int i = 0; i < kSize; ++i) u[i] *= fma(rest, q[i], in.terms.smoothing_per_class);
}

/// The same of one element. `soft_offset` is where its soft target lies.
template <typename T, typename View>
__device__ Accumulator<T> factor_of(const LossInputs<T, View>& in, std::int64_t soft_offset, std::int64_t column) {
  using A = Accumulator<T>;
  A u = in.weight_in(column);
  if (in.terms.is_soft) {
    u *= fma(A(1) - in.terms.smoothing, own_or_float_at<T>(in.targets, soft_offset), in.terms.smoothing_per_class);
  }
  return u;
}

}  // namespace eaves::cuda
