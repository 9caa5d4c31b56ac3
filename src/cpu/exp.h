// Exponentials of vectors. float32 has its own: Highway's takes 30 instructions, 13 are enough, and they limit an
// operator that reads 16-bit elements. float64 uses Highway's, with infinities and NaN corrected. Compiled once per
// level of vector instructions, like simd.h.
//
//   exp2, float32   2^x = 2^n * p(x - n), n a whole number next to x, p of degree 5: 3 units in the last place
//   exp,  float32   e^x = 2^n * q(x - n log 2), n = round(x log2 e), q of degree 6: 2 units in the last place
//
// Both give 0 for -infinity, infinity for +infinity and for results beyond float32, and NaN for NaN. Results below
// 2^-125 may be 0.
#include <hwy/contrib/math/math-inl.h>

#include "cpu/simd.h"

#if defined(EAVES_CPU_EXP_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EAVES_CPU_EXP_H_
#undef EAVES_CPU_EXP_H_
#else
#define EAVES_CPU_EXP_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {

#undef EAVES_HAS_SCALEF
// AVX-512 rounds, and scales by powers of two, in one instruction each; they also handle overflow, underflow,
// infinities and NaN. Other levels build the exponent from integers. A better level has a lower number in Highway, and
// newer versions have more levels above AVX3 than a list here could name.
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
#define EAVES_HAS_SCALEF 1
#else
#define EAVES_HAS_SCALEF 0
#endif

// Adding this to a float x with |x| <= 2^21 rounds x to a whole number, and the lowest bits of the sum hold it.
inline constexpr float kRounding = 0x1.8p23f;

/// p * 2^n for n in [-127, 129], given as kRounding + n; 0 for n of -126 and less.
HWY_INLINE Float scale_by_power_of_two(Float p, Float n_plus_rounding) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  // Scales by 2^(n-1) and doubles the result: 2^128 is no float, but results below it are.
  const auto n = hn::Sub(hn::BitCast(di, n_plus_rounding), hn::Set(di, 0x4b400000));
  const auto exponent = hn::Max(hn::Add(n, hn::Set(di, 126)), hn::Zero(di));
  const Float scaled = hn::Mul(p, hn::BitCast(d, hn::ShiftLeft<23>(exponent)));
  return hn::Add(scaled, scaled);
}

/// 2^x.
HWY_INLINE Float exp2(FloatTag d, Float x) {
#if EAVES_HAS_SCALEF
  // f = x - floor(x), or 0 for the infinities. scalef adds floor(x) to the exponent.
  const Float f{_mm512_reduce_ps(x.raw, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
  Float p = hn::MulAdd(f, hn::Set(d, 0x1.e974fap-10f), hn::Set(d, 0x1.277856p-7f));
  p = hn::MulAdd(f, p, hn::Set(d, 0x1.c91ce6p-5f));
  p = hn::MulAdd(f, p, hn::Set(d, 0x1.ebdb56p-3f));
  p = hn::MulAdd(f, p, hn::Set(d, 0x1.62e4bap-1f));
  p = hn::MulAdd(f, p, hn::Set(d, 1.0f));
  return Float{_mm512_scalef_ps(p.raw, x.raw)};
#else
  x = clamp_keeping_nan(d, x, hn::Set(d, -127.0f), hn::Set(d, 129.0f));
  const Float n_plus_rounding = hn::Add(x, hn::Set(d, kRounding));
  const Float f = hn::Sub(x, hn::Sub(n_plus_rounding, hn::Set(d, kRounding)));
  Float p = hn::MulAdd(f, hn::Set(d, 0x1.5bba14p-10f), hn::Set(d, 0x1.3cea88p-7f));
  p = hn::MulAdd(f, p, hn::Set(d, 0x1.c6b752p-5f));
  p = hn::MulAdd(f, p, hn::Set(d, 0x1.ebf9bcp-3f));
  p = hn::MulAdd(f, p, hn::Set(d, 0x1.62e42ap-1f));
  p = hn::MulAdd(f, p, hn::Set(d, 1.0f));
  return scale_by_power_of_two(p, n_plus_rounding);
#endif
}

/// e^x.
HWY_INLINE Float exp(FloatTag d, Float x) {
  // Beyond these bounds the result is 0 or infinity; within them n is small.
  x = clamp_keeping_nan(d, x, hn::Set(d, -88.0f), hn::Set(d, 89.0f));
  const Float n_plus_rounding = hn::MulAdd(x, hn::Set(d, kLog2E), hn::Set(d, kRounding));
  const Float n = hn::Sub(n_plus_rounding, hn::Set(d, kRounding));
  // log 2 in two parts. The first has 15 bits, so its product with n is exact, with and without FMA.
  const Float r = hn::NegMulAdd(n, hn::Set(d, 0x1.7f7d1cp-20f), hn::NegMulAdd(n, hn::Set(d, 0x1.62e4p-1f), x));
  Float q = hn::MulAdd(r, hn::Set(d, 0x1.6a23dp-10f), hn::Set(d, 0x1.123a2p-7f));
  q = hn::MulAdd(r, q, hn::Set(d, 0x1.5558f2p-5f));
  q = hn::MulAdd(r, q, hn::Set(d, 0x1.555492p-3f));
  q = hn::MulAdd(r, q, hn::Set(d, 0x1.fffffcp-2f));
  q = hn::MulAdd(r, q, hn::Set(d, 1.0f));
  q = hn::MulAdd(r, q, hn::Set(d, 1.0f));
  return scale_by_power_of_two(q, n_plus_rounding);
}

HWY_INLINE VectorOf<double> exp(Tag<double> d, VectorOf<double> x) {
  // Highway's exp() ends at 706, float64 at 709.8: above 700 the result is exp(700) * exp(x - 700).
  const auto limit = hn::Set(d, 700.0);
  const auto lower = hn::Exp(d, hn::Min(x, limit));
  const auto excess = hn::Min(hn::Sub(x, limit), hn::Set(d, 10.0));
  const auto upper = hn::Mul(hn::Set(d, 1.01423205473500450e304), hn::Exp(d, excess));
  return hn::IfThenElse(hn::IsNaN(x), x, hn::IfThenElse(hn::Gt(x, limit), upper, lower));
}

/// tanh(x) and its derivative, 1 - tanh(x)^2. Both are right to a few units in their last place, however small.
template <typename V>
struct TanhAndDerivative {
  V tanh, derivative;
};

HWY_INLINE TanhAndDerivative<Float> tanh_and_derivative(FloatTag d, Float x) {
  const auto one = hn::Set(d, 1.0f);
  const auto size = hn::Abs(x);
  const auto e = exp(d, hn::Mul(size, hn::Set(d, -2.0f)));
  const auto reciprocal = hn::Div(one, hn::Add(one, e));
  const auto large = hn::Mul(hn::Sub(one, e), reciprocal);
  // 1 - e cancels for a small |x|, which takes x + x^3 * p(x^2), p of degree 4.
  const auto square = hn::Mul(x, x);
  Float p = hn::MulAdd(square, hn::Set(d, -0x1.901808p-8f), hn::Set(d, 0x1.581fa8p-6f));
  p = hn::MulAdd(square, p, hn::Set(d, -0x1.b928ep-5f));
  p = hn::MulAdd(square, p, hn::Set(d, 0x1.110e2ep-3f));
  p = hn::MulAdd(square, p, hn::Set(d, -0x1.555552p-2f));
  const auto small = hn::MulAdd(hn::Mul(size, square), p, size);
  const auto tanh = hn::IfThenElse(hn::Lt(size, hn::Set(d, 0.625f)), small, large);
  const auto four_e = hn::Mul(hn::Set(d, 4.0f), e);
  return {hn::CopySign(tanh, x), hn::Mul(hn::Mul(four_e, reciprocal), reciprocal)};
}

HWY_INLINE TanhAndDerivative<VectorOf<double>> tanh_and_derivative(Tag<double> d, VectorOf<double> x) {
  const auto one = hn::Set(d, 1.0);
  const auto two = hn::Set(d, 2.0);
  // From 20 on tanh is 1 and the derivative below 2e-17, so |x| may be limited. A NaN passes: its comparison is false.
  const auto size = hn::Abs(x);
  const auto limited = hn::IfThenElse(hn::Gt(size, hn::Set(d, 300.0)), hn::Set(d, 300.0), size);
  const auto e_minus_one = hn::Expm1(d, hn::Mul(limited, hn::Set(d, -2.0)));
  const auto e_plus_one = hn::Add(two, e_minus_one);
  const auto tanh = hn::Div(hn::Neg(e_minus_one), e_plus_one);
  const auto reciprocal = hn::Div(one, e_plus_one);
  const auto four_e = hn::Mul(hn::Set(d, 4.0), hn::Add(one, e_minus_one));
  const auto derivative = hn::Mul(hn::Mul(four_e, reciprocal), reciprocal);
  const auto is_nan = hn::IsNaN(x);
  return {hn::IfThenElse(is_nan, x, hn::CopySign(tanh, x)), hn::IfThenElse(is_nan, x, derivative)};
}

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();
#endif  // per target
