// Sine and cosine of angles of any size, exact to float32 rounding, relative near their zeros too: what turns a product
// with a large number into a result of 16 bits must not lose the small ones.
//
// The angle is reduced by multiples of pi / 2, whose three parts leave the difference exact (W. Cody, W. Waite,
// "Software Manual for the Elementary Functions", 1980), and the rest goes through two polynomials of our own: the
// smallest relative error over |r| <= 0.83, by reweighted least squares: 6e-9 for the sine, 2e-10 for the cosine.
#pragma once

#include <cstdint>

#include "core/numeric.h"

namespace eaves::cuda {

/// Up to here the quotient by pi / 2, which is rounded in float32, is off by less than 1/20 from what it should be.
/// Beyond it, and for what is not finite, the library's functions reduce the angle.
inline constexpr float kLargestCommonAngle = 0x1p21f;

template <typename A>
struct SineCosine {
  A sine;
  A cosine;
};

namespace detail {

// A call, not inlined: it is rare and long.
__device__ __noinline__ inline SineCosine<float> sine_cosine_of_large(float angle) {
  SineCosine<float> result;
  sincosf(angle, &result.sine, &result.cosine);
  return result;
}

/// -value where the highest bit of `bits` is set: value ^ (bits & 0x80000000) in one instruction, where the compiler
/// makes two of it.
__device__ inline float flip_sign(float value, std::uint32_t bits) {
  std::uint32_t result;
  asm("lop3.b32 %0, %1, %2, 0x80000000, 0x78;" : "=r"(result) : "r"(__float_as_uint(value)), "r"(bits));
  return __uint_as_float(result);
}

__device__ inline SineCosine<float> sine_cosine_of_common(float angle) {
  // Adding 1.5 * 2^23 rounds to an integer, and leaves it in the last bits.
  const float shifted = fmaf(angle, 0x1.45f306p-1f, 0x1.8p23f);
  const auto quadrant = __float_as_uint(shifted);
  const float count = shifted - 0x1.8p23f;
  float r = fmaf(count, -0x1.921fb6p+0f, angle);  // exact: a multiple of 2^-24 below 1
  r = fmaf(count, 0x1.777a5cp-25f, r);
  r = fmaf(count, 0x1.ee59dap-50f, r);
  const float r2 = r * r;
  const float s = fmaf(fmaf(fmaf(-0x1.986bf8p-13f, r2, 0x1.1104a4p-7f), r2, -0x1.55553ep-3f), r * r2, r);
  const float c =
      fmaf(fmaf(fmaf(fmaf(0x1.9925f0p-16f, r2, -0x1.6c0962p-10f), r2, 0x1.555546p-5f), r2, -0.5f), r2, 1.0f);
  // A quarter turn swaps the two, and half a turn, the second bit of the quadrant, changes both signs.
  const bool is_odd = (quadrant & 1) != 0;
  const std::uint32_t half_turn = quadrant << 30;
  return {flip_sign(is_odd ? c : s, half_turn), flip_sign(is_odd ? -s : c, half_turn)};
}

}  // namespace detail

/// Of several angles, none of which is larger in size than `largest`, but for NaN. What one comes to does not depend on
/// the others.
template <int kCount>
__device__ void sine_cosine(const float (&angles)[kCount], float largest, float (&sines)[kCount],
                            float (&cosines)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const auto [sine, cosine] = detail::sine_cosine_of_common(angles[i]);
    sines[i] = sine;
    cosines[i] = cosine;
  }
  if (largest <= kLargestCommonAngle) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (fabsf(angles[i]) <= kLargestCommonAngle) continue;
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
