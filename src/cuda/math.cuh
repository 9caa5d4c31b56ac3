// The exponential that kernels use: one special-function instruction and one multiplication for float32, the library's
// for float64.
#pragma once

#include "core/numeric.h"

namespace eaves::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;

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

/// e^(x - anchor) with one multiply-add and one special-function instruction. All terms of a sum share the rounding
/// of the anchor's product, |anchor| * 2^-24 relative: harmless for log(sum) + anchor, not for a gradient, which
/// takes exp(x - lse).
struct ExpMinusAnchor {
  float negative_scaled_anchor;
  __device__ explicit ExpMinusAnchor(float anchor) : negative_scaled_anchor(-anchor * kLog2E) {}
  __device__ float operator()(float x) const { return exp2_approximate(fmaf(x, kLog2E, negative_scaled_anchor)); }
};

struct ExpMinusAnchorDouble {
  double anchor;
  __device__ explicit ExpMinusAnchorDouble(double a) : anchor(a) {}
  __device__ double operator()(double x) const { return ::exp(x - anchor); }
};

template <typename A>
using ExpMinus = std::conditional_t<std::is_same_v<A, double>, ExpMinusAnchorDouble, ExpMinusAnchor>;

}  // namespace eaves::cuda
