// What becomes of a logit z on a GPU, for all kernels: z' = scale * z, or with a soft cap softcap * tanh(to_tanh * z)
// with to_tanh = scale / softcap. Two tanh:
//
//   capped()               a relative error of 3e-7: of logits in memory, with any soft cap (LossTerms)
//   tanh_and_derivative()  an error of 2.4e-7 of 1, in fewer instructions: of logits on the head's fused path, with a
//                          soft cap of at most 50 (FastTransform; in the product cuda/sm90/exp_product.cuh)
#pragma once

#include <algorithm>
#include <numbers>

#include "cuda/math.cuh"
#include "ops/cross_entropy/cross_entropy_math.h"

namespace eaves::cuda {

// ---- exponents -----------------------------------------------------------------------------------------------------

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

inline constexpr double kLog2EExact = std::numbers::log2e;

// ---- logits in memory ----------------------------------------------------------------------------------------------

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
  A per_softcap = A(0);                  ///< 1 / softcap_in_units
  A per_softcap_squared = A(0);          ///< its square
  A to_tanh = A(0);                      ///< scale / softcap
  A doubled_in_units = A(0);             ///< 2 * to_tanh / kUnit
  A small_logit = A(-1);                 ///< up to which the polynomial below serves; below 0: never
  A coefficients[kTanhDegree + 1] = {};  ///< of z' / kUnit / z, for z^2

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
    constexpr double kMost = 3e38;  // 0 * infinity would be NaN
    to_tanh = static_cast<A>(std::min(exact_to_tanh, kMost));
    doubled_in_units = static_cast<A>(std::min(2.0 * exact_to_tanh / kUnit<A>, kMost));
    // The powers of an extreme factor are no numbers of float32.
    if (exact_to_tanh < 1e-3 || exact_to_tanh > 1e3 || exact_softcap < 1e-6 || exact_softcap > 1e6) return;
    double power = exact_softcap * exact_to_tanh;
    for (int i = 0; i <= kTanhDegree; ++i, power *= exact_to_tanh * exact_to_tanh) {
      coefficients[i] = static_cast<A>(tanh_coefficient(i) * power);
    }
    small_logit = static_cast<A>(kSmallTanh / exact_to_tanh);
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

/// Of a capped logit; and d tanh(x) / dx = 1 - tanh(x)^2 with x = to_tanh * z, without cancellation. Without a branch
/// where the factor is usual: small_logit is not below 0.
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

// ---- the fused path of linear_cross_entropy ------------------------------------------------------------------------

/// By tanh_and_derivative(): z' = outer * inner with inner = z, or tanh(z * to_tanh).
struct FastTransform {
  float to_tanh = 0.0f;  ///< scale / softcap; 0: no soft cap
  float outer;           ///< the scale, or the soft cap
  float factor;          ///< of t: outer * log2(e)
  double stretch;        ///< factor / (outer * log2(e)): what its rounding does to exponents
  float scale;           ///< dz'/dz, but for the derivative of tanh

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
  /// z * factor - shift, with one rounding where there is no soft cap, as in the product.
  __device__ float exponent_above(float z, float shift) const { return fmaf(inner(z), factor, -shift); }

  /// (z' - lse) * log2(e) - t.
  __device__ float rest_of(float shift, const SplitLse<float>& lse) const {
    return static_cast<float>((double(shift) / stretch - double(lse.high) * kLog2EExact) -
                              double(lse.low) * kLog2EExact);
  }

 private:
  __device__ float inner(float z) const { return to_tanh == 0.0f ? z : tanh_and_derivative(z * to_tanh).tanh; }
};

}  // namespace eaves::cuda
