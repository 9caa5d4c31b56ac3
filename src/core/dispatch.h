// Maps a DType at run time to a C++ type at compile time:
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
}();

/// The dtype of Accumulator<T>: the type of sums over a tensor of `dtype`, and of a stored lse.
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

}  // namespace eaves
