// Numbers whose type is known only when a call runs, one at a time and on the host.
#pragma once

#include <cstdint>

#include "core/dispatch.h"
#include "core/numeric.h"
#include "eaves/tensor.h"

namespace eaves {

/// Numbers of a checked type, nullptr where there are none.
struct TypedNumbers {
  const void* data;
  DType dtype;
};

/// Of any floating-point type.
inline double number_at(const TypedNumbers& numbers, std::int64_t offset) {
  return dispatch_floating_point(numbers.dtype, [&]<typename T>() {
    return static_cast<double>(load_as_accumulator(static_cast<const T*>(numbers.data)[offset]));
  });
}

/// Of int32 or int64.
inline std::int64_t class_at(const TypedNumbers& classes, std::int64_t offset) {
  if (classes.dtype == DType::int32) return static_cast<const std::int32_t*>(classes.data)[offset];
  return static_cast<const std::int64_t*>(classes.data)[offset];
}

}  // namespace eaves
