// Sines and cosines of vectors. float32 uses core/polynomials.h: each result is right to its last places, even near a
// zero of the function and for any angle. float64 uses the C++ library. Compiled once per level of vector instructions,
// like simd.h.
//
// Without FMA the reduction is in float64. Angles beyond kLargestReducedAngle, infinities and NaN go through the C++
// library, one lane at a time.
//
// Largest relative error measured: 1.5e-7 over all sizes up to 2^21, and 1.8e-7 over the floats next to all 1.3 million
// zeros of sine and cosine up to there; without FMA 1.2e-7 over both.
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "core/polynomials.h"
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

/// r and n of core/polynomials.h: `rest` is r, and the lowest bits of `quadrant` are n. Both are arbitrary for angles
/// beyond kLargestReducedAngle, infinities and NaN.
struct ReducedAngle {
  Float rest;
  Word quadrant;
};

HWY_INLINE ReducedAngle reduce_angle(FloatTag d, Float angle) {
#if HWY_NATIVE_FMA
  const Float n_plus_rounding = hn::MulAdd(angle, hn::Set(d, kTwoOverPi), hn::Set(d, kRounding));
  const Float n = hn::Sub(n_plus_rounding, hn::Set(d, kRounding));
  Float rest = hn::NegMulAdd(n, hn::Set(d, kHalfPiHigh), angle);
  rest = hn::NegMulAdd(n, hn::Set(d, kHalfPiMiddle), rest);
  rest = hn::NegMulAdd(n, hn::Set(d, kHalfPiLow), rest);
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

/// Calls the C++ library in float64, one lane at a time.
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

  Float s = hn::MulAdd(square, hn::Set(d, kSine7), hn::Set(d, kSine5));
  s = hn::MulAdd(square, s, hn::Set(d, kSine3));
  const Float sine_of_rest = hn::MulAdd(hn::Mul(square, r), s, r);
  Float c = hn::MulAdd(square, hn::Set(d, kCosine8), hn::Set(d, kCosine6));
  c = hn::MulAdd(square, c, hn::Set(d, kCosine4));
  c = hn::MulAdd(square, c, hn::Set(d, -0.5f));
  const Float cosine_of_rest = hn::MulAdd(square, c, hn::Set(d, 1.0f));

  // Each quarter turn exchanges sine and cosine, and changes the sign of the new cosine.
  const auto is_odd = hn::RebindMask(d, hn::TestBit(reduced.quadrant, hn::Set(dw, 1u)));
  const auto sign_of = [&](Word quadrant)
                           HWY_ATTR { return hn::BitCast(d, hn::ShiftLeft<30>(hn::And(quadrant, hn::Set(dw, 2u)))); };
  SineAndCosine<Float> result{hn::Xor(hn::IfThenElse(is_odd, cosine_of_rest, sine_of_rest), sign_of(reduced.quadrant)),
                              hn::Xor(hn::IfThenElse(is_odd, sine_of_rest, cosine_of_rest),
                                      sign_of(hn::Add(reduced.quadrant, hn::Set(dw, 1u))))};

  // Le() is false for a NaN, so a NaN takes the library's result. Each lane chooses by itself, because its result must
  // not depend on its neighbours.
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
