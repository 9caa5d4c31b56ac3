// The transform of a logit z on a GPU, for all kernels: z' = scale * z, or with a softcap z' = softcap * tanh(to_tanh *
// z) with to_tanh = scale / softcap. There are two tanh:
//
//   capped()               relative error 3e-7; for logits in memory, with any softcap (LossTerms)
//   tanh_and_derivative()  absolute error 2.4e-7, fewer instructions; for logits on the fused path of
//                          linear_cross_entropy, with a softcap of at most 50 (FastTransform, and
//                          cuda/cutlass/exp_product.cuh in the matrix product)
#pragma once

#include <algorithm>
#include <numbers>

#include "cuda/math.cuh"
#include "ops/cross_entropy/cross_entropy_math.h"

namespace eaves::cuda {

// ---- exponents -----------------------------------------------------------------------------------------------------

/// The unit of exponents: log(2) for float32, because its exponential computes 2^x.
template <typename A>
inline constexpr A kUnit = A(1);
template <>
inline constexpr float kUnit<float> = 0.693147180559945309f;

/// e^(kUnit * x)
__device__ inline float power(float x) { return exp2_approximate(x); }
__device__ inline double power(double x) { return ::exp(x); }

/// How far z' / kUnit may exceed the anchor of a row. A smaller slack raises the anchor more often; a larger one costs
/// accuracy: exponents below 4 are accurate to 2^-23.
inline constexpr double kAnchorSlack = 3.0;

/// a * b with its own rounding: the compiler cannot contract it with an addition.
__device__ inline float product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double product(double a, double b) { return __dmul_rn(a, b); }

inline constexpr double kLog2EExact = std::numbers::log2e;

// ---- logits in memory ----------------------------------------------------------------------------------------------

/// tanh(x) is a polynomial, without special functions, for |x| <= kSmallTanh, and 1 - 2 / (e^2|x| + 1) beyond. Relative
/// error 3e-7.
inline constexpr float kSmallTanh = 0.625f;
/// tanh(x) / x for |x| <= kSmallTanh as a polynomial in x^2, fitted by weighted least squares. Relative error 4e-9;
/// 1e-7 with rounding.
inline constexpr int kTanhDegree = 5;
EAVES_HOST_DEVICE constexpr float tanh_coefficient(int i) {
  constexpr float kCoefficients[kTanhDegree + 1] = {0x1p+0f,         -0x1.555524p-2f, 0x1.11058p-3f,
                                                    -0x1.b8153ep-5f, 0x1.515cdep-6f,  -0x1.72eedcp-8f};
  return kCoefficients[i];
}

/// The options of a call with the constants of the transform. The coefficients of the softcap's polynomial include the
/// softcap and the powers of to_tanh; kernels read them from their arguments.
template <typename A>
struct LossTerms : CrossEntropyTerms<A> {
  A scale_in_units;              ///< scale / kUnit
  A slack_of_logits;             ///< logits that differ by this have z' / kUnit that differ by at most kAnchorSlack
  A softcap_in_units = A(0);     ///< softcap / kUnit; set only with a softcap, like all members below
  A per_softcap = A(0);          ///< 1 / softcap_in_units
  A per_softcap_squared = A(0);  ///< per_softcap^2
  A to_tanh = A(0);              ///< scale / softcap
  A doubled_in_units = A(0);     ///< 2 * to_tanh / kUnit
  A small_logit = A(-1);         ///< the largest |z| for the polynomial below; negative: none
  A coefficients[kTanhDegree + 1] = {};  ///< of z' / kUnit / z as a polynomial in z^2

  explicit LossTerms(const CrossEntropyInputs& inputs)
      : CrossEntropyTerms<A>(inputs),
        scale_in_units(static_cast<A>(inputs.options.scale / kUnit<A>)),
        slack_of_logits(static_cast<A>(kAnchorSlack * kUnit<A> / inputs.options.scale)) {
    if (inputs.options.softcap == 0.0) return;
    const double exact_softcap = inputs.options.softcap / kUnit<A>;
    const double exact_to_tanh = inputs.options.scale / inputs.options.softcap;
    softcap_in_units = static_cast<A>(exact_softcap);
    per_softcap = static_cast<A>(1.0 / exact_softcap);
    per_softcap_squared = static_cast<A>(1.0 / (exact_softcap * exact_softcap));
    constexpr double kMost = 3e38;  // not infinity: 0 * infinity would be NaN
    to_tanh = static_cast<A>(std::min(exact_to_tanh, kMost));
    doubled_in_units = static_cast<A>(std::min(2.0 * exact_to_tanh / kUnit<A>, kMost));
    // The powers of an extreme factor are out of float32's range.
    if (exact_to_tanh < 1e-3 || exact_to_tanh > 1e3 || exact_softcap < 1e-6 || exact_softcap > 1e6) return;
    double power = exact_softcap * exact_to_tanh;
    for (int i = 0; i <= kTanhDegree; ++i, power *= exact_to_tanh * exact_to_tanh) {
      coefficients[i] = static_cast<A>(tanh_coefficient(i) * power);
    }
    small_logit = static_cast<A>(kSmallTanh / exact_to_tanh);
  }
};

/// z' / kUnit / z for |z| <= small_logit.
__device__ inline float small_slope(float z, const LossTerms<float>& terms) {
  const float square = z * z;
  float p = terms.coefficients[kTanhDegree];
#pragma unroll
  for (int i = kTanhDegree - 1; i >= 0; --i) p = fmaf(p, square, terms.coefficients[i]);
  return p;
}

/// z' / kUnit = value * factor, not yet multiplied: fma(value, factor, -anchor) has one rounding instead of two.
template <typename A>
struct Transformed {
  A value;
  A factor;

  __device__ A rounded() const { return product(value, factor); }
};

/// z' / kUnit with a softcap. `derivative` gets d tanh(x) / dx = 1 - tanh(x)^2 with x = to_tanh * z, without
/// cancellation. kHasUsualFactor: small_logit is not negative, so that no branch is needed.
template <bool kHasUsualFactor>
__device__ Transformed<float> capped(float z, const LossTerms<float>& terms, float* derivative = nullptr) {
  const float complement = __fdividef(2.0f, power(fabsf(z * terms.doubled_in_units)) + 1.0f);  // 1 - |tanh|
  Transformed<float> large{copysignf(1.0f - complement, z), terms.softcap_in_units};
  bool is_small = fabsf(z) <= terms.small_logit;
  const Transformed<float> small{z, small_slope(z, terms)};
  if constexpr (!kHasUsualFactor) {
    const float x = z * terms.to_tanh;
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
    const float t = small.rounded() * terms.per_softcap;
    *derivative = is_small ? fmaf(-t, t, 1.0f) : complement * (2.0f - complement);
  }
  return {is_small ? small.value : large.value, is_small ? small.factor : large.factor};
}
template <bool kHasUsualFactor>
__device__ Transformed<double> capped(double z, const LossTerms<double>& terms, double* derivative = nullptr) {
  const double inverse_cosh = 1.0 / ::cosh(z * terms.to_tanh);
  if (derivative != nullptr) *derivative = inverse_cosh * inverse_cosh;
  return {::tanh(z * terms.to_tanh), terms.softcap_in_units};
}

/// z' / kUnit with or without a softcap.
template <typename A>
__device__ Transformed<A> transformed_in_units(A z, const LossTerms<A>& terms) {
  if (terms.softcap == A(0)) return {z, terms.scale_in_units};
  return capped<false>(z, terms);
}

/// z' of any logit, rounded. The loss subtracts the target's z' from the largest z', so equal logits have to give equal
/// numbers.
template <typename A>
__device__ A transformed(A z, const LossTerms<A>& terms) {
  if (terms.softcap == A(0)) return product(z, terms.scale);
  return product(capped<false>(z, terms).rounded(), kUnit<A>);
}

// ---- the fused path of linear_cross_entropy ------------------------------------------------------------------------

/// z' = outer * inner with inner = z, or tanh(z * to_tanh) by tanh_and_derivative().
struct FastTransform {
  float to_tanh = 0.0f;  ///< scale / softcap; 0: no softcap
  float outer;           ///< scale, or softcap
  float factor;          ///< outer * log2(e), the factor of exponents t
  double stretch;        ///< factor / (outer * log2(e)): the relative error of `factor`, which exponents inherit
  float scale;           ///< dz'/dz without the derivative of tanh

  explicit FastTransform(const CrossEntropyOptions& options) : scale(static_cast<float>(options.scale)) {
    const bool is_capped = options.softcap != 0.0;
    const double exact = is_capped ? options.softcap : options.scale;
    if (is_capped) to_tanh = static_cast<float>(options.scale / options.softcap);
    outer = static_cast<float>(exact);
    factor = static_cast<float>(exact * kLog2EExact);
    stretch = static_cast<double>(factor) / (exact * kLog2EExact);
  }

  /// z', and z' * log2(e).
  __device__ float value(float z) const { return inner(z) * outer; }
  __device__ float exponent(float z) const { return inner(z) * factor; }
  /// dz'/dz / scale.
  __device__ float derivative(float z) const {
    return to_tanh == 0.0f ? 1.0f : tanh_and_derivative(z * to_tanh).derivative;
  }
  /// t = inner * factor - shift; with one rounding if there is no softcap, as in cuda/cutlass/exp_product.cuh.
  __device__ float exponent_above(float z, float shift) const { return fmaf(inner(z), factor, -shift); }

  /// (z' - lse) * log2(e) - t, the same for all classes of a row.
  __device__ float rest_of(float shift, const SplitLse<float>& lse) const {
    return static_cast<float>((double(shift) / stretch - double(lse.high) * kLog2EExact) -
                              double(lse.low) * kLog2EExact);
  }

 private:
  __device__ float inner(float z) const { return to_tanh == 0.0f ? z : tanh_and_derivative(z * to_tanh).tanh; }
};

}  // namespace eaves::cuda
