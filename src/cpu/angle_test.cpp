// Tests sines and cosines at every level of vector instructions of this machine against the C++ library in float64.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/angle_test.cpp"
#include <hwy/foreach_target.h>  // first: compiles this file once per level of vector instructions
//
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <string>
#include <vector>

#include "cpu/angle.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {

void sine_float32(const float* from, float* to, std::size_t count) {
  transform(from, to, count, [](Float v) HWY_ATTR { return sine_and_cosine(FloatTag(), v).sine; });
}
void cosine_float32(const float* from, float* to, std::size_t count) {
  transform(from, to, count, [](Float v) HWY_ATTR { return sine_and_cosine(FloatTag(), v).cosine; });
}
void sine_float64(const double* from, double* to, std::size_t count) {
  transform(from, to, count, [](VectorOf<double> v) HWY_ATTR { return sine_and_cosine(Tag<double>(), v).sine; });
}
void cosine_float64(const double* from, double* to, std::size_t count) {
  transform(from, to, count, [](VectorOf<double> v) HWY_ATTR { return sine_and_cosine(Tag<double>(), v).cosine; });
}

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eaves::cpu {
namespace {

HWY_EXPORT(sine_float32);
HWY_EXPORT(cosine_float32);
HWY_EXPORT(sine_float64);
HWY_EXPORT(cosine_float64);

/// Each test runs once per level.
class Angle : public ::testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};
INSTANTIATE_TEST_SUITE_P(Levels, Angle, ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& info) { return std::string(hwy::TargetName(info.param)); });

struct Worst {
  double error = 0.0;  ///< relative
  float at = 0.0f;
};

template <typename Exact>
Worst worst_error(const std::vector<float>& angles, const std::vector<float>& actual, Exact&& exact) {
  Worst worst;
  for (std::size_t i = 0; i < angles.size(); ++i) {
    const double expected = exact(static_cast<double>(angles[i]));
    const double distance = std::abs(static_cast<double>(actual[i]) - expected);
    const double error = expected == 0.0 ? distance : distance / std::abs(expected);
    if (!(error <= worst.error)) worst = {error, angles[i]};
  }
  return worst;
}

/// Bounds the relative error of both functions.
void expect_error(const std::vector<float>& angles, double bound) {
  std::vector<float> actual(angles.size());
  HWY_DYNAMIC_DISPATCH(sine_float32)(angles.data(), actual.data(), angles.size());
  const Worst sine = worst_error(angles, actual, [](double x) { return std::sin(x); });
  EXPECT_LE(sine.error, bound) << "of the sine of " << sine.at;
  HWY_DYNAMIC_DISPATCH(cosine_float32)(angles.data(), actual.data(), angles.size());
  const Worst cosine = worst_error(angles, actual, [](double x) { return std::cos(x); });
  EXPECT_LE(cosine.error, bound) << "of the cosine of " << cosine.at;
  ::testing::Test::RecordProperty("worst_sine", std::to_string(sine.error * 0x1p24) + " * 2^-24");
  ::testing::Test::RecordProperty("worst_cosine", std::to_string(cosine.error * 0x1p24) + " * 2^-24");
}

TEST_P(Angle, SineAndCosineAreGoodToTheLastPlaces) {
  std::vector<float> angles;
  for (std::uint32_t bits = 0; bits < 0x4a000000u; bits += 1009) {  // to 2^21
    angles.push_back(std::bit_cast<float>(bits));
    angles.push_back(-angles.back());
  }
  expect_error(angles, 1.6e-7);
}

/// A reduction loses digits near the zeros of sine and cosine: this tests the floats on both sides of every zero.
TEST_P(Angle, NoZeroIsTooNear) {
  std::vector<float> angles;
  for (int n = 1; n * (std::numbers::pi / 2) < 0x1p21; ++n) {
    const auto nearest = static_cast<float>(n * (std::numbers::pi / 2));
    for (const float angle : {std::nextafter(nearest, 0.0f), nearest, std::nextafter(nearest, 1e9f)}) {
      angles.push_back(n % 2 == 0 ? angle : -angle);
    }
  }
  expect_error(angles, 1.8e-7);
}

TEST_P(Angle, LargeAnglesAreExact) {
  std::vector<float> angles;
  for (std::uint32_t bits = 0x49ffff00u; bits < 0x7f800000u; bits += 60013) {
    angles.push_back(std::bit_cast<float>(bits));
    angles.push_back(-angles.back());
  }
  angles.push_back(std::numeric_limits<float>::max());
  expect_error(angles, 1.4e-7);
}

TEST_P(Angle, TheEdgesAreExact) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> angles = {0.0f, -0.0f, kInfinity, -kInfinity, kNaN, 1e-45f, -1e-38f};
  std::vector<float> actual(angles.size());
  HWY_DYNAMIC_DISPATCH(sine_float32)(angles.data(), actual.data(), angles.size());
  for (const std::size_t i : {0u, 1u, 5u, 6u}) EXPECT_EQ(actual[i], angles[i]);
  for (const std::size_t i : {2u, 3u, 4u}) EXPECT_TRUE(std::isnan(actual[i])) << actual[i];
  HWY_DYNAMIC_DISPATCH(cosine_float32)(angles.data(), actual.data(), angles.size());
  for (const std::size_t i : {0u, 1u, 5u, 6u}) EXPECT_EQ(actual[i], 1.0f);
  for (const std::size_t i : {2u, 3u, 4u}) EXPECT_TRUE(std::isnan(actual[i])) << actual[i];
}

/// The result of a row must not depend on the rows that are computed with it.
TEST_P(Angle, ALaneDoesNotDependOnItsNeighbours) {
  std::vector<float> angles;
  for (int i = 0; i < 300; ++i) angles.push_back(static_cast<float>(i * i) * 0.37f);
  std::vector<float> alone(angles.size());
  for (std::size_t i = 0; i < angles.size(); ++i) HWY_DYNAMIC_DISPATCH(sine_float32)(&angles[i], &alone[i], 1);
  std::vector<float> with_large = angles;
  for (std::size_t i = 0; i < with_large.size(); i += 3) with_large[i] = i % 2 == 0 ? 1e30f : nan_of<float>();
  std::vector<float> actual(angles.size());
  HWY_DYNAMIC_DISPATCH(sine_float32)(with_large.data(), actual.data(), angles.size());
  for (std::size_t i = 0; i < angles.size(); ++i) {
    if (i % 3 == 0) continue;
    EXPECT_EQ(actual[i], alone[i]) << "sine of " << angles[i];
  }
}

TEST_P(Angle, Float64IsTheLibrarys) {
  std::vector<double> angles;
  for (int i = -500; i < 500; ++i) angles.push_back(i * 1.37e3);
  std::vector<double> actual(angles.size());
  HWY_DYNAMIC_DISPATCH(sine_float64)(angles.data(), actual.data(), angles.size());
  for (std::size_t i = 0; i < angles.size(); ++i) EXPECT_EQ(actual[i], std::sin(angles[i]));
  HWY_DYNAMIC_DISPATCH(cosine_float64)(angles.data(), actual.data(), angles.size());
  for (std::size_t i = 0; i < angles.size(); ++i) EXPECT_EQ(actual[i], std::cos(angles[i]));
}

}  // namespace
}  // namespace eaves::cpu
#endif  // HWY_ONCE
