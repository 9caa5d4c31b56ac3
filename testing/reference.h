// The code that the oracles of all operators share: a tensor in CPU memory, element by element, in float64.
#pragma once

#include <type_traits>
#include <vector>

#include "eaves/tensor.h"
#include "testing/dispatch.h"

namespace eaves::reference {

/// The number as a float64; an int64 is exact up to 2^53.
template <typename T>
double exact(T value) {
  if constexpr (std::is_same_v<T, boolean>) {
    return value.byte != 0 ? 1.0 : 0.0;
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<double>(value);
  } else {
    return static_cast<double>(load_as_accumulator(value));
  }
}

/// The element at `index` (one number per axis) of a tensor in CPU memory, exact in float64.
inline double element(const TensorView& view, const Dims& index) {
  std::int64_t offset = 0;
  for (int axis = 0; axis < index.size(); ++axis) offset += index[axis] * view.strides[axis];
  return dispatch_any(view.dtype, [&]<typename T>() { return exact(static_cast<const T*>(view.data)[offset]); });
}

/// Moves to the next index in row-major order; false after the last one.
inline bool next_index(Dims& index, const Dims& shape) {
  for (int axis = shape.size() - 1; axis >= 0; --axis) {
    if (++index[axis] < shape[axis]) return true;
    index[axis] = 0;
  }
  return false;
}

/// The elements along `axis` of a tensor in CPU memory; `row` is the index over the other axes in row-major order.
inline std::vector<double> elements_along(const TensorView& view, int axis, std::int64_t row) {
  std::int64_t first = 0;
  for (int other = view.shape.size() - 1; other >= 0; --other) {
    if (other == axis) continue;
    first += row % view.shape[other] * view.strides[other];
    row /= view.shape[other];
  }
  std::vector<double> values(static_cast<std::size_t>(view.shape[axis]));
  dispatch_any(view.dtype, [&]<typename T>() {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::int64_t offset = first + static_cast<std::int64_t>(i) * view.strides[axis];
      values[i] = exact(static_cast<const T*>(view.data)[offset]);
    }
  });
  return values;
}

/// The element with the index `row` in row-major order.
inline double element(const TensorView& view, std::int64_t row) {
  Dims index = view.shape;
  for (int axis = view.shape.size() - 1; axis >= 0; --axis) {
    index[axis] = row % view.shape[axis];
    row /= view.shape[axis];
  }
  return element(view, index);
}

}  // namespace eaves::reference
