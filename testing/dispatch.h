// core/dispatch.h for every dtype: operators compute with floating-point types only, but tests also make integers.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/dispatch.h"

namespace eaves {

/// PyTorch's and safetensors' bool: one byte, 0 or 1; any other byte counts as true.
struct boolean {
  std::uint8_t byte;
};

/// Is T a floating-point element type? Only these have gradients.
template <typename T>
inline constexpr bool kIsFloatingPoint =
    std::is_floating_point_v<T> || std::is_same_v<T, bfloat16> || std::is_same_v<T, float16>;

/// dispatch_floating_point() for every dtype.
template <typename Function>
decltype(auto) dispatch_any(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::int8:
      return function.template operator()<std::int8_t>();
    case DType::int16:
      return function.template operator()<std::int16_t>();
    case DType::int32:
      return function.template operator()<std::int32_t>();
    case DType::int64:
      return function.template operator()<std::int64_t>();
    case DType::uint8:
      return function.template operator()<std::uint8_t>();
    case DType::boolean:
      return function.template operator()<boolean>();
    default:
      return dispatch_floating_point(dtype, std::forward<Function>(function));
  }
}

}  // namespace eaves
