// Reads of single numbers from arrays with a dtype known only at run time, on the host and in kernels.
#pragma once

#include <cstdint>

#include "core/dispatch.h"
#include "core/numeric.h"
#include "eaves/tensor.h"

namespace eaves {

/// An array of a checked dtype; `data` is nullptr if there is none.
struct TypedNumbers {
  const void* data = nullptr;
  DType dtype = DType::float32;
};

/// Reads number i of any floating-point dtype.
template <typename A = double>
EAVES_HOST_DEVICE A number_at(const TypedNumbers& numbers, std::int64_t i) {
  switch (numbers.dtype) {
    case DType::float64:
      return static_cast<A>(static_cast<const double*>(numbers.data)[i]);
    case DType::float16:
      return static_cast<A>(load_as_accumulator(static_cast<const float16*>(numbers.data)[i]));
    case DType::bfloat16:
      return static_cast<A>(load_as_accumulator(static_cast<const bfloat16*>(numbers.data)[i]));
    default:
      return static_cast<A>(static_cast<const float*>(numbers.data)[i]);
  }
}

/// Reads number i of dtype T or float32, for kernels over T.
template <typename T>
EAVES_HOST_DEVICE Accumulator<T> own_or_float_at(const TypedNumbers& numbers, std::int64_t i) {
  return numbers.dtype == kDTypeOf<T> ? load_as_accumulator(static_cast<const T*>(numbers.data)[i])
                                      : static_cast<Accumulator<T>>(static_cast<const float*>(numbers.data)[i]);
}

/// Reads integer i of dtype int32 or int64.
EAVES_HOST_DEVICE inline std::int64_t integer_at(const TypedNumbers& integers, std::int64_t i) {
  if (integers.dtype == DType::int32) return static_cast<const std::int32_t*>(integers.data)[i];
  return static_cast<const std::int64_t*>(integers.data)[i];
}

}  // namespace eaves
