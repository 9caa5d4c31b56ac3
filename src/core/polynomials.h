// Sine and cosine of float32 on both backends.
//
//   angle = n * pi/2 + r      n a whole number, |r| <= 0.86 (n is rounded from a product that errs by 0.05 at most)
//   sin r = r + r^3 * s(r^2)            s of degree 2: relative error of the sine 9e-9
//   cos r = 1 - r^2/2 + r^4 * c(r^2)    c of degree 2: relative error of the cosine 4e-10
//
// Both polynomials minimise the largest relative error over |r| <= 0.86 (Lawson's reweighted least squares on 3000
// Chebyshev nodes in float64). The coefficients were rounded to float32 one after the other from the lowest, and the
// rest fitted again each time. The error is relative near the zeros too, because a small sine times a large number must
// still be right to 16 bits.
#pragma once

namespace eaves {

/// Up to this |angle| the reduction subtracts n times three floats that sum to pi/2 (W. Cody, W. Waite, "Software
/// Manual for the Elementary Functions", 1980). With FMA the first difference is exact, and the rounding errors of the
/// other two are in proportion to the remainder.
inline constexpr float kLargestReducedAngle = 0x1p21f;

inline constexpr float kTwoOverPi = 0x1.45f306p-1f;
inline constexpr float kHalfPiHigh = 0x1.921fb6p+0f;
inline constexpr float kHalfPiMiddle = -0x1.777a5cp-25f;
inline constexpr float kHalfPiLow = -0x1.ee59dap-50f;

// Coefficients of the powers of r.
inline constexpr float kSine3 = -0x1.55553ap-3f;
inline constexpr float kSine5 = 0x1.11031p-7f;
inline constexpr float kSine7 = -0x1.97f084p-13f;
inline constexpr float kCosine4 = 0x1.555542p-5f;
inline constexpr float kCosine6 = -0x1.6c07ap-10f;
inline constexpr float kCosine8 = 0x1.98b3d8p-16f;

}  // namespace eaves
