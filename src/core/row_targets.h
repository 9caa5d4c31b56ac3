// Hard targets (one class per row), read on the host. A view may walk the rows in another order than the per-row
// tensors, so each target comes with its row's number.
#pragma once

#include <cstdint>

#include "core/rows.h"
#include "core/typed_numbers.h"

namespace eaves {

struct RowTargets {
  TypedNumbers classes;  ///< int32 or int64
  StridedLoop<2> rows;   ///< offsets of a row's target, and of the row in a per-row tensor: its number
  std::int64_t row_count;

  /// `targets` and `per_row` number two tensors of `view`: the targets, and any per-row tensor.
  template <typename View>
  RowTargets(const View& view, int targets, int per_row, const TypedNumbers& classes)
      : classes(classes), row_count(view.row_count) {
    rows.rank = view.rows.rank;
    for (int axis = 0; axis < rows.rank; ++axis) {
      rows.sizes[axis] = view.rows.sizes[axis];
      rows.strides[0][axis] = view.rows.strides[targets][axis];
      rows.strides[1][axis] = view.rows.strides[per_row][axis];
    }
  }

  /// Calls `body(index, target)` for every row; `index` is the row's number in the per-row tensors.
  template <typename Body>
  void for_each(Body&& body) const {
    const int inner = rows.rank - 1;
    const std::int64_t size = inner < 0 ? 1 : rows.sizes[inner];
    const std::int64_t target_stride = inner < 0 ? 0 : rows.strides[0][inner];
    const std::int64_t index_stride = inner < 0 ? 0 : rows.strides[1][inner];
    for (std::int64_t row = 0; row < row_count; row += size) {
      const auto offsets = rows.offsets(row);
      for (std::int64_t i = 0; i < size; ++i) {
        body(offsets.of[1] + i * index_stride, integer_at(classes, offsets.of[0] + i * target_stride));
      }
    }
  }
};

}  // namespace eaves
