// Sines and cosines of vectors. For float32 they are our own, good to the last places of each result, however near to
// a zero of it and however large the angle; for float64 they are the C++ library's. Compiled once per level of vector
// instructions, like simd.h.
//
//   angle = n * pi/2 + r      n a whole number, |r| <= 0.86 (n is rounded from a product that errs by 0.04 at most)
//   sin r = r + r^3 * s(r^2)  s of degree 2: relative error of the sine 9e-9
//   cos r = 1 - r^2/2 + r^4 * c(r^2)  c of degree 2: relative error of the cosine 4e-10
//
// Both polynomials are minimax of that relative error over |r| <= 0.86 (Lawson's reweighted least squares on 3000
// Chebyshev nodes in float64), rounded to float32 one coefficient after the other from the lowest, the rest fitted
// again each time.
//
// Up to 2^21 in size r is had by subtracting n times three floats that sum to pi/2: with FMA the first difference is
// exact, and the others are rounded in proportion to what is left. Without FMA the reduction is done in float64.
// Larger angles, infinities and NaN go through the C++ library, one lane at a time.
//
// Largest relative error seen: 1.5e-7 over all sizes up to 2^21, and 1.8e-7 for the floats next to the 1.3 million
// zeros of sine and cosine up to there, all of which were tried; without FMA 1.2e-7 of both.
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cpu/exp.h"
#include "cpu/simd.h"

#if defined(EAVES_CPU_ANGLE_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EAVES_CPU_ANGLE_H_
#undef EAVES_CPU_ANGLE_H_
#else
#define EAVES_CPU_ANGLE_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {

template <typename V>
struct SineAndCosine {
  V sine, cosine;
};

/// The largest angle, in size, that is reduced by vectors.
inline constexpr float kLargestReducedAngle = 0x1p21f;

/// r above, and n in the lowest bits of `quadrant`. Of larger angles, infinities and NaN: anything.
struct ReducedAngle {
  Float rest;
  Word quadrant;
};

HWY_INLINE ReducedAngle reduce_angle(FloatTag d, Float angle) {
#if HWY_NATIVE_FMA
  const Float n_plus_rounding = hn::MulAdd(angle, hn::Set(d, 0x1.45f306p-1f), hn::Set(d, kRounding));
  const Float n = hn::Sub(n_plus_rounding, hn::Set(d, kRounding));
  Float rest = hn::NegMulAdd(n, hn::Set(d, 0x1.921fb6p+0f), angle);
  rest = hn::NegMulAdd(n, hn::Set(d, -0x1.777a5cp-25f), rest);
  rest = hn::NegMulAdd(n, hn::Set(d, -0x1.ee59dap-50f), rest);
  return {rest, hn::BitCast(WordTag(), n_plus_rounding)};
#else
  constexpr std::size_t kLanes = hn::MaxLanes(FloatTag());
  constexpr double kRoundingToWhole = 0x1.8p52;
  HWY_ALIGN float rests[kLanes];
  HWY_ALIGN std::uint32_t quadrants[kLanes];
  hn::Store(angle, d, rests);
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) {
    const double x = std::abs(rests[i]) <= kLargestReducedAngle ? rests[i] : 0.0;
    const double n = (x * 0x1.45f306dc9c883p-1 + kRoundingToWhole) - kRoundingToWhole;
    // The first part of pi/2 has 32 bits, so that its product with n is exact.
    rests[i] = static_cast<float>((x - n * 0x1.921fb544p+0) - n * 0x1.0b4611a626331p-34);
    quadrants[i] = static_cast<std::uint32_t>(static_cast<std::int32_t>(n));
  }
  return {hn::Load(d, rests), hn::Load(WordTag(), quadrants)};
#endif
}

/// One lane at a time, in float64.
template <typename D, typename V = hn::Vec<D>>
HWY_NOINLINE SineAndCosine<V> sine_and_cosine_of_lanes(D d, V angle) {
  using A = hn::TFromD<D>;
  HWY_ALIGN A sines[hn::MaxLanes(D())];
  HWY_ALIGN A cosines[hn::MaxLanes(D())];
  hn::Store(angle, d, sines);
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) {
    const double lane = sines[i];
    sines[i] = static_cast<A>(std::sin(lane));
    cosines[i] = static_cast<A>(std::cos(lane));
  }
  return {hn::Load(d, sines), hn::Load(d, cosines)};
}

HWY_INLINE SineAndCosine<Float> sine_and_cosine(FloatTag d, Float angle) {
  const WordTag dw;
  const ReducedAngle reduced = reduce_angle(d, angle);
  const Float r = reduced.rest;
  const Float square = hn::Mul(r, r);

  Float s = hn::MulAdd(square, hn::Set(d, -0x1.97f084p-13f), hn::Set(d, 0x1.11031p-7f));
  s = hn::MulAdd(square, s, hn::Set(d, -0x1.55553ap-3f));
  const Float sine_of_rest = hn::MulAdd(hn::Mul(square, r), s, r);
  Float c = hn::MulAdd(square, hn::Set(d, 0x1.98b3d8p-16f), hn::Set(d, -0x1.6c07ap-10f));
  c = hn::MulAdd(square, c, hn::Set(d, 0x1.555542p-5f));
  c = hn::MulAdd(square, c, hn::Set(d, -0.5f));
  const Float cosine_of_rest = hn::MulAdd(square, c, hn::Set(d, 1.0f));

  // Each quarter turn exchanges the two, and changes the sign of what becomes the cosine.
  const auto is_odd = hn::RebindMask(d, hn::TestBit(reduced.quadrant, hn::Set(dw, 1u)));
  const auto sign_of = [&](Word quadrant)
                           HWY_ATTR { return hn::BitCast(d, hn::ShiftLeft<30>(hn::And(quadrant, hn::Set(dw, 2u)))); };
  SineAndCosine<Float> result{hn::Xor(hn::IfThenElse(is_odd, cosine_of_rest, sine_of_rest), sign_of(reduced.quadrant)),
                              hn::Xor(hn::IfThenElse(is_odd, sine_of_rest, cosine_of_rest),
                                      sign_of(hn::Add(reduced.quadrant, hn::Set(dw, 1u))))};

  // Written so that a NaN is not reduced. Lane by lane: what a lane becomes must not depend on its neighbours.
  const auto is_reduced = hn::Le(hn::Abs(angle), hn::Set(d, kLargestReducedAngle));
  if (HWY_UNLIKELY(!hn::AllTrue(d, is_reduced))) {
    const SineAndCosine<Float> exact = sine_and_cosine_of_lanes(d, angle);
    result = {hn::IfThenElse(is_reduced, result.sine, exact.sine),
              hn::IfThenElse(is_reduced, result.cosine, exact.cosine)};
  }
  return result;
}

HWY_INLINE SineAndCosine<VectorOf<double>> sine_and_cosine(Tag<double> d, VectorOf<double> angle) {
  return sine_and_cosine_of_lanes(d, angle);
}

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();
#endif  // per target
