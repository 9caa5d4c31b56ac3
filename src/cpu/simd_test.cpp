// Tests packs, conversions and exponentials at every level of vector instructions of this machine, because a machine
// with AVX-512 must also test the code of machines without it. The references are core/numeric.h for conversions, and
// the C++ library in float64 for exponentials.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd_test.cpp"
#include <hwy/foreach_target.h>  // first: compiles this file once per level of vector instructions
//
#include <gtest/gtest.h>
#include <hwy/cache_control.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/numeric.h"
#include "cpu/exp.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {
namespace {

template <typename T>
void widen(const T* from, float* to, std::size_t count) {
  const FloatTag d;
  const std::size_t lanes = hn::Lanes(d);
  for_each_pack(from, count, T{}, [&](const Pack<T>& pack) HWY_ATTR {
    HWY_ALIGN float vectors[kMaxPackSize<T>];
    hn::Store(pack.v0, d, vectors);
    hn::Store(pack.v1, d, vectors + lanes);
    hn::Store(pack.v2, d, vectors + 2 * lanes);
    hn::Store(pack.v3, d, vectors + 3 * lanes);
    for (std::size_t i = 0; i < 4 * lanes; ++i) {
      const std::size_t element = element_of_lane<T>(i / lanes, i % lanes);
      if (element < count) to[element] = vectors[i];
    }
    to += 4 * lanes;
    count -= count < 4 * lanes ? count : 4 * lanes;
  });
}

template <typename T>
void narrow(const float* from, T* to, std::size_t count) {
  const FloatTag d;
  const std::size_t lanes = hn::Lanes(d);
  for (std::size_t begin = 0; begin < count; begin += 4 * lanes) {
    const std::size_t n = count - begin < 4 * lanes ? count - begin : 4 * lanes;
    HWY_ALIGN float vectors[kMaxPackSize<T>];
    for (std::size_t i = 0; i < 4 * lanes; ++i) {
      const std::size_t element = element_of_lane<T>(i / lanes, i % lanes);
      vectors[i] = element < n ? from[begin + element] : 0.0f;
    }
    const Pack<T> pack{hn::Load(d, vectors), hn::Load(d, vectors + lanes), hn::Load(d, vectors + 2 * lanes),
                       hn::Load(d, vectors + 3 * lanes)};
    store_first(pack, to + begin, n);
  }
}

template <typename T>
void negate(const T* from, T* to, std::size_t count, bool is_non_temporal) {
  const Tag<T> d;
  const auto body = [&](VectorOf<T> v) HWY_ATTR { return hn::Sub(hn::Zero(d), v); };
  if (is_non_temporal) {
    transform<true>(from, to, count, body);
    hwy::FlushStream();
  } else {
    transform(from, to, count, body);
  }
}

}  // namespace

void widen_bfloat16(const bfloat16* from, float* to, std::size_t count) { widen(from, to, count); }
void widen_float16(const float16* from, float* to, std::size_t count) { widen(from, to, count); }
void narrow_bfloat16(const float* from, bfloat16* to, std::size_t count) { narrow(from, to, count); }
void narrow_float16(const float* from, float16* to, std::size_t count) { narrow(from, to, count); }
void negate_bfloat16(const bfloat16* from, bfloat16* to, std::size_t n, bool nt) { negate(from, to, n, nt); }
void negate_float16(const float16* from, float16* to, std::size_t n, bool nt) { negate(from, to, n, nt); }
void negate_float32(const float* from, float* to, std::size_t n, bool nt) { negate(from, to, n, nt); }
void negate_float64(const double* from, double* to, std::size_t n, bool nt) { negate(from, to, n, nt); }
void exp2_float32(const float* from, float* to, std::size_t count) {
  transform(from, to, count, [](Float v) HWY_ATTR { return exp2(FloatTag(), v); });
}
void exp_float32(const float* from, float* to, std::size_t count) {
  transform(from, to, count, [](Float v) HWY_ATTR { return exp(FloatTag(), v); });
}
void exp_float64(const double* from, double* to, std::size_t count) {
  transform(from, to, count, [](VectorOf<double> v) HWY_ATTR { return exp(Tag<double>(), v); });
}

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eaves::cpu {
namespace {

HWY_EXPORT(widen_bfloat16);
HWY_EXPORT(widen_float16);
HWY_EXPORT(narrow_bfloat16);
HWY_EXPORT(narrow_float16);
HWY_EXPORT(negate_bfloat16);
HWY_EXPORT(negate_float16);
HWY_EXPORT(negate_float32);
HWY_EXPORT(negate_float64);
HWY_EXPORT(exp2_float32);
HWY_EXPORT(exp_float32);
HWY_EXPORT(exp_float64);

/// Each test runs once per level.
class Simd : public ::testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};
INSTANTIATE_TEST_SUITE_P(Levels, Simd, ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& info) { return std::string(hwy::TargetName(info.param)); });

template <typename T>
std::vector<T> all_16_bit_values() {
  std::vector<T> values(65536);
  for (std::size_t i = 0; i < values.size(); ++i) values[i].bits = static_cast<std::uint16_t>(i);
  return values;
}

/// Equal bits, or both NaN.
void expect_same(float actual, float expected, std::size_t index) {
  if (std::isnan(expected)) {
    ASSERT_TRUE(std::isnan(actual)) << "value " << index << " is " << actual << ", expected NaN";
  } else {
    ASSERT_EQ(std::bit_cast<std::uint32_t>(actual), std::bit_cast<std::uint32_t>(expected))
        << "value " << index << " is " << actual << ", expected " << expected;
  }
}

TEST_P(Simd, EveryBfloat16BecomesTheFloat32ThatItIs) {
  const auto values = all_16_bit_values<bfloat16>();
  std::vector<float> actual(values.size());
  HWY_DYNAMIC_DISPATCH(widen_bfloat16)(values.data(), actual.data(), values.size());
  for (std::size_t i = 0; i < values.size(); ++i) expect_same(actual[i], to_float(values[i]), i);
}

TEST_P(Simd, EveryFloat16BecomesTheFloat32ThatItIs) {
  const auto values = all_16_bit_values<float16>();
  std::vector<float> actual(values.size());
  HWY_DYNAMIC_DISPATCH(widen_float16)(values.data(), actual.data(), values.size());
  for (std::size_t i = 0; i < values.size(); ++i) expect_same(actual[i], to_float(values[i]), i);
}

/// Each 16-bit value, the point half way to the next one, and the float32 neighbours of both.
template <typename T>
std::vector<float> values_to_round() {
  std::vector<float> values;
  const float largest = std::numeric_limits<float>::max();
  for (const T value : all_16_bit_values<T>()) {
    const float exact = to_float(value);
    const float next = to_float(T{static_cast<std::uint16_t>(value.bits + 1)});
    const float half_way = exact / 2 + next / 2;
    for (const float x : {exact, half_way}) {
      values.insert(values.end(), {x, std::nextafter(x, largest), std::nextafter(x, -largest)});
    }
  }
  // Numbers around the largest float16 and the largest float32, tiny numbers, and NaNs with low bits.
  values.insert(values.end(), {65519.996f, 65520.0f, 1e6f, -1e6f, largest, -largest, 1e-45f, -1e-45f, 3e-8f});
  for (const std::uint32_t bits : {0x7fffffffu, 0xffffffffu, 0x7f800001u, 0xffff8000u, 0x7fbfffffu}) {
    values.push_back(std::bit_cast<float>(bits));
  }
  return values;
}

TEST_P(Simd, Bfloat16IsRoundedToNearestEven) {
  const auto values = values_to_round<bfloat16>();
  std::vector<bfloat16> actual(values.size());
  HWY_DYNAMIC_DISPATCH(narrow_bfloat16)(values.data(), actual.data(), values.size());
  for (std::size_t i = 0; i < values.size(); ++i) expect_same(to_float(actual[i]), to_float(to_bfloat16(values[i])), i);
}

TEST_P(Simd, Float16IsRoundedToNearestEvenWithSubnormalsAndOverflow) {
  const auto values = values_to_round<float16>();
  std::vector<float16> actual(values.size());
  HWY_DYNAMIC_DISPATCH(narrow_float16)(values.data(), actual.data(), values.size());
  for (std::size_t i = 0; i < values.size(); ++i) expect_same(to_float(actual[i]), to_float(to_float16(values[i])), i);
}

/// Lengths around the size of a pack at several misalignments, with canaries on both sides.
template <typename T, typename Negate>
void check_transform(Negate&& negate) {
  const auto from_int = [](std::size_t i) {
    return round_to<T>(static_cast<Accumulator<T>>(static_cast<int>(i % 200) - 100));
  };
  const T canary = round_to<T>(Accumulator<T>(77));
  constexpr std::size_t kMargin = 80;
  for (const bool is_non_temporal : {false, true}) {
    for (std::size_t count = 0; count < 300; count += count < 140 ? 1 : 13) {
      for (const std::size_t shift : {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{32}}) {
        std::vector<T> from(count + shift);
        for (std::size_t i = 0; i < count; ++i) from[shift + i] = from_int(i);
        std::vector<T> to(count + shift + 2 * kMargin, canary);
        negate(from.data() + shift, to.data() + kMargin + shift, count, is_non_temporal);
        for (std::size_t i = 0; i < to.size(); ++i) {
          const bool is_inside = i >= kMargin + shift && i < kMargin + shift + count;
          const auto expected = load_as_accumulator(is_inside ? from_int(i - kMargin - shift) : canary);
          ASSERT_EQ(load_as_accumulator(to[i]), is_inside ? -expected : expected)
              << "count " << count << ", shift " << shift << ", element " << i << ", non-temporal " << is_non_temporal;
        }
      }
    }
  }
}

TEST_P(Simd, LoopAndRestReachEveryElementAndNoOther) {
  check_transform<bfloat16>(HWY_DYNAMIC_DISPATCH(negate_bfloat16));
  check_transform<float16>(HWY_DYNAMIC_DISPATCH(negate_float16));
  check_transform<float>(HWY_DYNAMIC_DISPATCH(negate_float32));
  check_transform<double>(HWY_DYNAMIC_DISPATCH(negate_float64));
}

/// The largest distance between a float32 result and the exact one, in units of the last place, for exact results of at
/// least kSmallest. For smaller ones a result may be anything between 0 and 2 * kSmallest.
template <typename Reference>
double worst_distance(const std::vector<float>& x, const std::vector<float>& actual, Reference&& reference,
                      float& worst_x) {
  constexpr double kSmallest = 0x1p-125;
  double worst = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double exact = reference(static_cast<double>(x[i]));
    if (exact < kSmallest) {
      EXPECT_TRUE(actual[i] >= 0.0f && actual[i] <= 2 * kSmallest) << "of " << x[i] << " is " << actual[i];
      continue;
    }
    // From half a unit above the largest float32 on, rounding gives infinity.
    if (exact >= 0x1.ffffffp127) {
      EXPECT_EQ(actual[i], infinity<float>()) << "of " << x[i];
      continue;
    }
    const double unit = std::ldexp(1.0, std::ilogb(exact) - 23);
    const double distance = std::abs(static_cast<double>(actual[i]) - exact) / unit;
    if (distance > worst) {
      worst = distance;
      worst_x = x[i];
    }
  }
  return worst;
}

/// Floats of every size and sign in steps of their bits, and a dense range of floats that covers every exponential
/// between 0 and infinity.
std::vector<float> sweep() {
  std::vector<float> x;
  for (std::uint32_t bits = 0; bits < 0x7f800000u; bits += 20011) {
    x.push_back(std::bit_cast<float>(bits));
    x.push_back(-x.back());
  }
  for (int i = -1600000; i <= 1600000; ++i) x.push_back(static_cast<float>(i) * 0x1p-13f * 0.99f);
  return x;
}

TEST_P(Simd, Exp2OfFloat32IsWithinItsBound) {
  const std::vector<float> x = sweep();
  std::vector<float> actual(x.size());
  HWY_DYNAMIC_DISPATCH(exp2_float32)(x.data(), actual.data(), x.size());
  float at = 0.0f;
  const double worst = worst_distance(
      x, actual, [](double v) { return std::exp2(v); }, at);
  EXPECT_LE(worst, 3.0) << "units in the last place, at " << at;
  RecordProperty("worst_ulp", std::to_string(worst));
}

TEST_P(Simd, ExpOfFloat32IsWithinItsBound) {
  const std::vector<float> x = sweep();
  std::vector<float> actual(x.size());
  HWY_DYNAMIC_DISPATCH(exp_float32)(x.data(), actual.data(), x.size());
  float at = 0.0f;
  const double worst = worst_distance(
      x, actual, [](double v) { return std::exp(v); }, at);
  EXPECT_LE(worst, 2.0) << "units in the last place, at " << at;
  RecordProperty("worst_ulp", std::to_string(worst));
}

TEST_P(Simd, ExpOfFloat64IsWithinTwoUnitsOfTheLastPlace) {
  std::vector<double> x;
  for (int i = -70800; i <= 70970; ++i) x.push_back(i * 0.01);
  std::vector<double> actual(x.size());
  HWY_DYNAMIC_DISPATCH(exp_float64)(x.data(), actual.data(), x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const long double exact = std::exp(static_cast<long double>(x[i]));
    ASSERT_LE(std::abs(static_cast<long double>(actual[i]) - exact), exact * 5e-16L) << "exp of " << x[i];
  }
}

TEST_P(Simd, ExponentialsOfTheEdgesAreExact) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> x = {0.0f, -0.0f, -kInfinity, kInfinity, kNaN, -kNaN, -1e30f, 1e30f, -200.0f, 200.0f};
  const std::vector<float> expected = {1.0f, 1.0f, 0.0f, kInfinity, kNaN, kNaN, 0.0f, kInfinity, 0.0f, kInfinity};
  std::vector<float> actual(x.size());
  HWY_DYNAMIC_DISPATCH(exp2_float32)(x.data(), actual.data(), x.size());
  for (std::size_t i = 0; i < x.size(); ++i) expect_same(actual[i], expected[i], i);
  HWY_DYNAMIC_DISPATCH(exp_float32)(x.data(), actual.data(), x.size());
  for (std::size_t i = 0; i < x.size(); ++i) expect_same(actual[i], expected[i], i);

  const std::vector<double> wide = {0.0, -kInfinity, kInfinity, kNaN, -kNaN, -1e300, 1e300, -800.0, 800.0};
  const std::vector<float> wide_expected = {1.0f, 0.0f, kInfinity, kNaN, kNaN, 0.0f, kInfinity, 0.0f, kInfinity};
  std::vector<double> wide_actual(wide.size());
  HWY_DYNAMIC_DISPATCH(exp_float64)(wide.data(), wide_actual.data(), wide.size());
  for (std::size_t i = 0; i < wide.size(); ++i) expect_same(static_cast<float>(wide_actual[i]), wide_expected[i], i);
}

}  // namespace
}  // namespace eaves::cpu
#endif  // HWY_ONCE
