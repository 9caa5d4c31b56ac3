// From a DType at run time to a C++ type at compile time, in one place:
//
//   dispatch_floating_point(x.dtype, [&]<typename T>() { launch<T>(...); });
#pragma once

#include <string>
#include <utility>

#include "core/numeric.h"
#include "eaves/error.h"
#include "eaves/tensor.h"

namespace eaves {

template <typename T>
inline constexpr DType kDTypeOf = [] {
  if constexpr (std::is_same_v<T, float>) return DType::float32;
  if constexpr (std::is_same_v<T, double>) return DType::float64;
  if constexpr (std::is_same_v<T, float16>) return DType::float16;
  if constexpr (std::is_same_v<T, bfloat16>) return DType::bfloat16;
  if constexpr (std::is_same_v<T, std::int8_t>) return DType::int8;
  if constexpr (std::is_same_v<T, std::int16_t>) return DType::int16;
  if constexpr (std::is_same_v<T, std::int32_t>) return DType::int32;
  if constexpr (std::is_same_v<T, std::int64_t>) return DType::int64;
  if constexpr (std::is_same_v<T, std::uint8_t>) return DType::uint8;
  if constexpr (std::is_same_v<T, boolean>) return DType::boolean;
}();

/// Accumulator<T> as a dtype: what sums of a dtype are kept in, and what an lse is stored as.
inline DType accumulator_dtype(DType dtype) { return dtype == DType::float64 ? DType::float64 : DType::float32; }

/// Calls `function.operator()<T>()` with the type of a floating-point dtype.
template <typename Function>
decltype(auto) dispatch_floating_point(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::float32:
      return function.template operator()<float>();
    case DType::float64:
      return function.template operator()<double>();
    case DType::float16:
      return function.template operator()<float16>();
    case DType::bfloat16:
      return function.template operator()<bfloat16>();
    default:
      throw InvalidArgument(std::string("dtype is ") + name_of(dtype) + ", expected a floating-point type");
  }
}

/// The same for every dtype.
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
