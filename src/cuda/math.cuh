// The exponential that kernels use: one special-function instruction and one multiplication for float32, the library's
// for float64. And tanh.
#pragma once

#include <type_traits>

#include "core/numeric.h"

namespace eaves::cuda {

/// Below it, what the rounding of an anchor adds to an exponent is far from an overflow.
inline constexpr float kCommonAnchor = 0x1p20f;

/// 2^x, relative error 2^-22; 0 for x below -126 (subnormal results are flushed), for -inf too.
__device__ inline float exp2_approximate(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// e^x. The product x * log2(e) is rounded, so that the relative error is 2^-22 + |x| * 2^-24: small wherever the
/// result counts beside e^0 = 1.
__device__ inline float exponential(float x) { return exp2_approximate(x * kLog2E); }
__device__ inline double exponential(double x) { return ::exp(x); }

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
__device__ inline float small_tanh(float x) {
  const float square = x * x;
  float slope = tanh_coefficient(kTanhDegree);
#pragma unroll
  for (int i = kTanhDegree - 1; i >= 0; --i) slope = fmaf(slope, square, tanh_coefficient(i));
  return x * slope;
}
/// 1 - tanh(x)^2, where it does not cancel.
__device__ inline float small_tanh_derivative(float x) {
  const float tanh = small_tanh(x);
  return fmaf(-tanh, tanh, 1.0f);
}
struct TanhAndDerivative {
  float tanh;
  float derivative;
};
__device__ inline TanhAndDerivative tanh_and_derivative(float x) {
  if (fabsf(x) <= kSmallTanh) return {small_tanh(x), small_tanh_derivative(x)};
  const float complement = __fdividef(2.0f, exp2_approximate(fabsf(x) * (2.0f * kLog2E)) + 1.0f);  // 1 - |tanh|
  return {copysignf(1.0f - complement, x), complement * (2.0f - complement)};
}

/// Calls `body` with two functions: one of (x, i) that computes e^(x - anchors[i]), and one of (sum, i) that a sum of
/// those goes through. For float32 and anchors of common size the first is one multiply-add and one special-function
/// instruction, 1 % of a read-only stream's time less than exponential(x - anchor). What the rounding of
/// anchor * log2(e) adds to every exponent, up to |anchor| * 2^-24, the second takes out again.
template <int kAnchors, typename A, typename Body>
__device__ void with_exponential_minus(const A (&anchors)[kAnchors], Body body) {
  if constexpr (std::is_same_v<A, float>) {
    bool are_common = true;
    float negative_scaled[kAnchors];
#pragma unroll
    for (int i = 0; i < kAnchors; ++i) {
      are_common = are_common && fabsf(anchors[i]) < kCommonAnchor;
      negative_scaled[i] = -anchors[i] * kLog2E;
    }
    if (are_common) {
      body([&](float x, int i) { return exp2_approximate(fmaf(x, kLog2E, negative_scaled[i])); },
           [&](float sum, int i) { return sum * exp2_approximate(-fmaf(anchors[i], kLog2E, negative_scaled[i])); });
      return;
    }
  }
  body([&](A x, int i) { return exponential(x - anchors[i]); }, [](A sum, int) { return sum; });
}

}  // namespace eaves::cuda
