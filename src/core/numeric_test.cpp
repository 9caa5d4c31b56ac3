// Tests the conversions of core/numeric.h over every 16-bit value in both directions, and against the compiler's own
// types if it has them.
#include "core/numeric.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace eaves {
namespace {

constexpr float kLargest = std::numeric_limits<float>::max();

template <typename Function>
void for_each_16_bit_value(Function&& function) {
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) function(static_cast<std::uint16_t>(bits));
}

TEST(Numeric, EveryBfloat16SurvivesTheWayToFloat32AndBack) {
  for_each_16_bit_value([](std::uint16_t bits) {
    const float value = to_float(bfloat16{bits});
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(to_float(to_bfloat16(value)))) << bits;
    } else {
      EXPECT_EQ(to_bfloat16(value).bits, bits);
    }
  });
}

TEST(Numeric, EveryFloat16SurvivesTheWayToFloat32AndBack) {
  for_each_16_bit_value([](std::uint16_t bits) {
    const float value = to_float(float16{bits});
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(to_float(to_float16(value)))) << bits;
    } else {
      EXPECT_EQ(to_float16(value).bits, bits);
    }
  });
}

/// Half way between two neighbours, the even one wins; on either side of that point, the nearer one.
template <typename T, typename Round>
void check_half_ways(std::uint16_t infinity_bits, Round&& round) {
  for (std::uint32_t bits = 0; bits + 1 < infinity_bits; ++bits) {
    const auto lower = static_cast<std::uint16_t>(bits);
    const auto upper = static_cast<std::uint16_t>(bits + 1);
    const float half_way = to_float(T{lower}) / 2 + to_float(T{upper}) / 2;
    const std::uint16_t sign = 0x8000;
    // A guard for half-way points that float32 cannot represent. It skips no pair of bfloat16 or float16.
    if (half_way == to_float(T{lower}) || half_way == to_float(T{upper})) continue;
    const std::uint16_t even = bits % 2 == 0 ? lower : upper;
    ASSERT_EQ(round(half_way).bits, even) << half_way;
    ASSERT_EQ(round(-half_way).bits, even | sign) << -half_way;
    ASSERT_EQ(round(std::nextafter(half_way, 0.0f)).bits, lower) << half_way;
    ASSERT_EQ(round(std::nextafter(half_way, kLargest)).bits, upper) << half_way;
  }
}

TEST(Numeric, Bfloat16IsRoundedToNearestEven) {
  check_half_ways<bfloat16>(0x7f80, [](float value) { return to_bfloat16(value); });
}

TEST(Numeric, Float16IsRoundedToNearestEven) {
  check_half_ways<float16>(0x7c00, [](float value) { return to_float16(value); });
}

TEST(Numeric, WhatIsTooLargeBecomesInfinity) {
  EXPECT_EQ(to_float16(65519.996f).bits, 0x7bff);
  EXPECT_EQ(to_float16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to_float16(-1e30f).bits, 0xfc00);
  EXPECT_EQ(to_bfloat16(kLargest).bits, 0x7f80);
  EXPECT_EQ(to_bfloat16(std::numeric_limits<float>::infinity()).bits, 0x7f80);
}

TEST(Numeric, ANaNStaysOneWhateverItsBits) {
  for (const std::uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xffffffffu, 0xff800001u, 0x7fc00000u}) {
    const float value = std::bit_cast<float>(bits);
    EXPECT_TRUE(std::isnan(to_float(to_bfloat16(value)))) << bits;
    EXPECT_TRUE(std::isnan(to_float(to_float16(value)))) << bits;
  }
}

#if defined(__FLT16_MANT_DIG__)
#if defined(__aarch64__)
using CompilersFloat16 = __fp16;  // before GCC 13 C++ has no _Float16 there
#else
using CompilersFloat16 = _Float16;
#endif

TEST(Numeric, Float16IsWhatTheCompilerMakesOfIt) {
  for_each_16_bit_value([](std::uint16_t bits) {
    const auto value = static_cast<float>(std::bit_cast<CompilersFloat16>(bits));
    if (std::isnan(value)) return;
    EXPECT_EQ(to_float(float16{bits}), value) << bits;
  });
  // Every exponent, with mantissas that fall on, beside and between what float16 can hold.
  for (std::uint64_t bits = 0; bits <= 0xffffffffu; bits += 4093) {
    const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    if (std::isnan(value)) continue;
    ASSERT_EQ(to_float16(value).bits, std::bit_cast<std::uint16_t>(static_cast<CompilersFloat16>(value))) << value;
  }
}
#endif

TEST(Numeric, AccumulatorsAreFloat32ExceptForFloat64) {
  EXPECT_EQ(load_as_accumulator(std::int64_t{1} << 40), 0x1p40f);
  EXPECT_EQ(load_as_accumulator(0.1), 0.1);
  EXPECT_EQ(round_to<double>(0.1), 0.1);
  EXPECT_EQ(round_to<float16>(1.0).bits, 0x3c00);
  EXPECT_EQ(round_to<bfloat16>(1.0).bits, 0x3f80);
}

}  // namespace
}  // namespace eaves
