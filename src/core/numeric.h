// The number types that C++20 lacks: bfloat16 and float16 as storage, the accumulator type of each element type, and
// conversions that round once, to nearest, ties to even. Compiles for host and device.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#if defined(__CUDACC__)
#define EAVES_HOST_DEVICE __host__ __device__
#else
#define EAVES_HOST_DEVICE
#endif

namespace eaves {

/// The upper half of a float32.
struct bfloat16 {
  std::uint16_t bits;
};

/// IEEE 754 binary16.
struct float16 {
  std::uint16_t bits;
};

EAVES_HOST_DEVICE constexpr float to_float(bfloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

EAVES_HOST_DEVICE constexpr float to_float(float16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity, NaN: the exponent becomes all ones again
    return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  // Shift exponent and mantissa to their places in float32, then multiply by 2^112, the difference of the biases. This
  // converts subnormals too.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scaled) | sign);
}

EAVES_HOST_DEVICE constexpr bfloat16 to_bfloat16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {  // a NaN, which the rounding below could turn into an infinity
    return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  }
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

EAVES_HOST_DEVICE constexpr float16 to_float16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};  // 65520 and more
  if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the last ten bits of the sum.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u))};
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u;
  return {static_cast<std::uint16_t>(sign | (rounded >> 13))};
}

/// The type of sums, maxima and exponentials of T: float32, or float64 for float64.
template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

/// Converts an element to its accumulator type.
template <typename T>
EAVES_HOST_DEVICE constexpr Accumulator<T> load_as_accumulator(T value) {
  if constexpr (std::is_same_v<T, bfloat16> || std::is_same_v<T, float16>) {
    return to_float(value);
  } else {
    return static_cast<Accumulator<T>>(value);
  }
}

/// Rounds a result to its storage type: the only rounding of a result.
template <typename T, typename A>
EAVES_HOST_DEVICE constexpr T round_to(A value) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    return to_bfloat16(static_cast<float>(value));
  } else if constexpr (std::is_same_v<T, float16>) {
    return to_float16(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

/// log2(e): e^x = 2^(x * kLog2E).
inline constexpr float kLog2E = 1.44269504088896341f;

/// a / b, rounded up, for numbers that are not negative.
EAVES_HOST_DEVICE constexpr std::int64_t ceil_divide(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

template <typename T>
EAVES_HOST_DEVICE constexpr T nan_of() {
  return std::numeric_limits<T>::quiet_NaN();
}

template <typename T>
EAVES_HOST_DEVICE constexpr T infinity() {
  return std::numeric_limits<T>::infinity();
}

}  // namespace eaves
