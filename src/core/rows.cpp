#include "core/rows.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace eaves {
namespace {

template <int kTensors>
void append_axis(StridedLoop<kTensors>& loop, std::int64_t size, const std::int64_t (&strides)[kTensors]) {
  loop.sizes[loop.rank] = size;
  for (int t = 0; t < kTensors; ++t) loop.strides[t][loop.rank] = strides[t];
  ++loop.rank;
}

/// True if axis `outer` must be nested outside axis `inner`: its stride is larger in the first tensor that tells them
/// apart.
template <int kTensors>
bool strides_larger(const StridedLoop<kTensors>& loop, int outer, int inner) {
  for (int t = 0; t < kTensors; ++t) {
    const std::int64_t a = std::abs(loop.strides[t][outer]);
    const std::int64_t b = std::abs(loop.strides[t][inner]);
    if (a != b) return a > b;
  }
  return false;
}

template <int kTensors>
void swap_axes(StridedLoop<kTensors>& loop, int a, int b) {
  std::swap(loop.sizes[a], loop.sizes[b]);
  for (int t = 0; t < kTensors; ++t) std::swap(loop.strides[t][a], loop.strides[t][b]);
}

/// Sorts the axes by stride, and merges neighbours that are one axis in every tensor. Sorting changes no result: it
/// permutes all tensors alike, and a sum may take its terms in any order.
template <int kTensors>
void simplify(StridedLoop<kTensors>& loop) {
  // Insertion sort: stable, at most 16 axes, usually in order already.
  for (int i = 1; i < loop.rank; ++i) {
    for (int j = i; j > 0 && strides_larger(loop, j, j - 1); --j) swap_axes(loop, j - 1, j);
  }
  int last = 0;
  for (int axis = 1; axis < loop.rank; ++axis) {
    bool mergeable = true;
    for (int t = 0; t < kTensors; ++t) {
      // 128 bits, because an empty tensor may have any strides.
      mergeable = mergeable && loop.strides[t][last] == static_cast<__int128>(loop.strides[t][axis]) * loop.sizes[axis];
    }
    if (mergeable) {
      loop.sizes[last] *= loop.sizes[axis];
    } else {
      ++last;
      loop.sizes[last] = loop.sizes[axis];
    }
    for (int t = 0; t < kTensors; ++t) loop.strides[t][last] = loop.strides[t][axis];
  }
  if (loop.rank > 0) loop.rank = last + 1;
}

template <int kColumnTensors, int kTensors>
RowLayout layout_of(const StridedLoop<kTensors>& rows, const StridedLoop<kColumnTensors>& columns) {
  if (columns.rank == 0) return RowLayout::contiguous;  // one column: its stride is never used
  if (columns.rank > 1) return RowLayout::strided;
  bool are_contiguous = true;
  bool are_transposed = rows.rank > 0;
  for (int t = 0; t < kColumnTensors; ++t) {
    are_contiguous = are_contiguous && columns.strides[t][0] == 1;
    are_transposed = are_transposed && rows.strides[t][rows.rank - 1] == 1;
  }
  return are_contiguous ? RowLayout::contiguous : are_transposed ? RowLayout::transposed : RowLayout::strided;
}

}  // namespace

Dims reduced_shape(const Dims& shape, const AxisSet& axes, bool keepdim) {
  Dims reduced;
  for (int axis = 0; axis < shape.size(); ++axis) {
    if (!axes.contains[axis]) {
      reduced.push_back(shape[axis]);
    } else if (keepdim) {
      reduced.push_back(1);
    }
  }
  return reduced;
}

Dims contiguous_strides(const Dims& shape) {
  return TensorView::contiguous(static_cast<const void*>(nullptr), DType::float32, shape).strides;
}

Dims zero_strides(int rank) {
  Dims strides;
  for (int axis = 0; axis < rank; ++axis) strides.push_back(0);
  return strides;
}

Dims spread_strides(const Dims& reduced_strides, int rank, const AxisSet& axes, bool keepdim) {
  Dims strides;
  int next = 0;
  for (int axis = 0; axis < rank; ++axis) {
    strides.push_back(axes.contains[axis] ? 0 : reduced_strides[next]);
    if (!axes.contains[axis] || keepdim) ++next;
  }
  return strides;
}

template <int kColumnTensors, int kTensors>
RowView<kColumnTensors, kTensors> make_row_view(const Dims& shape, const AxisSet& axes,
                                                const std::array<Dims, kTensors>& strides) {
  RowView<kColumnTensors, kTensors> view;
  const bool is_empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  for (int axis = 0; axis < shape.size(); ++axis) {
    const std::int64_t size = shape[axis];
    (axes.contains[axis] ? view.column_count : view.row_count) *= size;
    if (size == 1) continue;
    std::int64_t row_strides[kTensors] = {};
    std::int64_t column_strides[kColumnTensors] = {};
    for (int t = 0; t < kTensors; ++t) {
      // An empty tensor may have any strides. No element of it is read, and strides of 0 keep offsets from overflowing.
      row_strides[t] = is_empty && t < kColumnTensors ? 0 : strides[t][axis];
      if (t < kColumnTensors) column_strides[t] = row_strides[t];
    }
    if (axes.contains[axis]) {
      append_axis(view.columns, size, column_strides);
    } else {
      append_axis(view.rows, size, row_strides);
    }
  }
  simplify(view.rows);
  simplify(view.columns);
  view.layout = layout_of(view.rows, view.columns);
  return view;
}

template RowView<2, 4> make_row_view<2, 4>(const Dims&, const AxisSet&, const std::array<Dims, 4>&);
template RowView<2, 5> make_row_view<2, 5>(const Dims&, const AxisSet&, const std::array<Dims, 5>&);
template RowView<3, 6> make_row_view<3, 6>(const Dims&, const AxisSet&, const std::array<Dims, 6>&);

}  // namespace eaves
