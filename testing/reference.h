// What oracles of all operators need: a tensor in CPU memory, element by element, in float64.
#pragma once

#include "core/dispatch.h"
#include "eaves/tensor.h"

namespace eaves::reference {

/// The element at `index` (one number per axis) of a tensor in CPU memory, exact in float64.
inline double element(const TensorView& view, const Dims& index) {
  std::int64_t offset = 0;
  for (int axis = 0; axis < index.size(); ++axis) offset += index[axis] * view.strides[axis];
  return dispatch_any(view.dtype, [&]<typename T>() {
    return static_cast<double>(load_as_accumulator(static_cast<const T*>(view.data)[offset]));
  });
}

/// Moves to the next index in row-major order; false after the last one.
inline bool next_index(Dims& index, const Dims& shape) {
  for (int axis = shape.size() - 1; axis >= 0; --axis) {
    if (++index[axis] < shape[axis]) return true;
    index[axis] = 0;
  }
  return false;
}

}  // namespace eaves::reference
