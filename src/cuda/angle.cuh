// Sine and cosine of angles of any size, exact to float32 rounding: core/polynomials.h on a GPU.
#pragma once

#include <cstdint>

#include "core/numeric.h"
#include "core/polynomials.h"

namespace eaves::cuda {

template <typename A>
struct SineCosine {
  A sine;
  A cosine;
};

namespace detail {

// A call, not inlined: the case is rare and its code long.
__device__ __noinline__ inline SineCosine<float> sine_cosine_of_large(float angle) {
  SineCosine<float> result;
  sincosf(angle, &result.sine, &result.cosine);
  return result;
}

/// Returns -value if the highest bit of `bits` is set, else value. value ^ (bits & 0x80000000) is one instruction here;
/// the compiler makes two.
__device__ inline float flip_sign(float value, std::uint32_t bits) {
  std::uint32_t result;
  asm("lop3.b32 %0, %1, %2, 0x80000000, 0x78;" : "=r"(result) : "r"(__float_as_uint(value)), "r"(bits));
  return __uint_as_float(result);
}

__device__ inline SineCosine<float> sine_cosine_of_reduced(float angle) {
  // Adding 1.5 * 2^23 rounds to an integer and leaves the integer in the last bits.
  const float shifted = fmaf(angle, kTwoOverPi, 0x1.8p23f);
  const auto quadrant = __float_as_uint(shifted);
  const float count = shifted - 0x1.8p23f;
  float r = fmaf(count, -kHalfPiHigh, angle);  // exact: a multiple of 2^-24 below 1
  r = fmaf(count, -kHalfPiMiddle, r);
  r = fmaf(count, -kHalfPiLow, r);
  const float r2 = r * r;
  const float s = fmaf(fmaf(fmaf(kSine7, r2, kSine5), r2, kSine3), r * r2, r);
  const float c = fmaf(fmaf(fmaf(fmaf(kCosine8, r2, kCosine6), r2, kCosine4), r2, -0.5f), r2, 1.0f);
  // A quarter turn swaps sine and cosine. A half turn, the second bit of the quadrant, changes both signs.
  const bool is_odd = (quadrant & 1) != 0;
  const std::uint32_t half_turn = quadrant << 30;
  return {flip_sign(is_odd ? c : s, half_turn), flip_sign(is_odd ? -s : c, half_turn)};
}

}  // namespace detail

/// Sines and cosines of several angles. The CUDA library computes the angles that are not finite or lie beyond
/// kLargestReducedAngle. `largest` is at least |angle| of every angle that is not NaN. An angle's result does not
/// depend on the other angles.
template <int kCount>
__device__ void sine_cosine(const float (&angles)[kCount], float largest, float (&sines)[kCount],
                            float (&cosines)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const auto [sine, cosine] = detail::sine_cosine_of_reduced(angles[i]);
    sines[i] = sine;
    cosines[i] = cosine;
  }
  if (largest <= kLargestReducedAngle) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (fabsf(angles[i]) <= kLargestReducedAngle) continue;
    const auto [sine, cosine] = detail::sine_cosine_of_large(angles[i]);
    sines[i] = sine;
    cosines[i] = cosine;
  }
}

template <int kCount>
__device__ void sine_cosine(const double (&angles)[kCount], double, double (&sines)[kCount],
                            double (&cosines)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sincos(angles[i], &sines[i], &cosines[i]);
}

}  // namespace eaves::cuda
