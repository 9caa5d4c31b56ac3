// A tensor seen as rows: the reduced axes are the columns of a row, and the other axes enumerate the rows. Axes of size
// 1 disappear, and neighbouring axes without a gap between them in memory become one, so kernels see the fewest axes
// that describe the same addresses. Every row operator starts from a RowView.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/divider.h"
#include "core/numeric.h"
#include "eaves/tensor.h"

namespace eaves {

/// a / b for numbers that are not negative. A 64-bit division costs a GPU as much as about ten 32-bit divisions, and
/// the sizes of almost every tensor fit into 32 bits.
EAVES_HOST_DEVICE inline std::int64_t divide(std::int64_t a, std::int64_t b) {
  if (static_cast<std::uint64_t>(a | b) >> 32 == 0)
    return static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b);
  return a / b;
}

/// Nested loops over `rank` axes, outermost first, with the strides of several tensors that are walked together.
/// Passed to kernels by value.
template <int kTensors>
struct StridedLoop {
  int rank = 0;
  std::int64_t sizes[kMaxRank] = {};
  std::int64_t strides[kTensors][kMaxRank] = {};

  struct Offsets {
    std::int64_t of[kTensors];
  };

  /// The offset of iteration `index` of the flattened loops in each tensor, in elements.
  EAVES_HOST_DEVICE Offsets offsets(std::int64_t index) const {
    Offsets result{};
#ifdef __CUDA_ARCH__
#pragma unroll 1  // a division takes many instructions
#endif
    for (int axis = rank - 1; axis > 0; --axis) {
      const std::int64_t next = divide(index, sizes[axis]);
      const std::int64_t coordinate = index - next * sizes[axis];
      for (int t = 0; t < kTensors; ++t) result.of[t] += coordinate * strides[t][axis];
      index = next;
    }
    if (rank > 0) {
      for (int t = 0; t < kTensors; ++t) result.of[t] += index * strides[t][0];
    }
    return result;
  }
};

/// A StridedLoop that takes few instructions, for fewer than 2^31 iterations.
template <int kTensors>
struct ShortLoop {
  static constexpr int kMostAxes = 4;  ///< after merging; tensors with more axes are rare and take StridedLoop

  int rank = 0;
  std::uint32_t sizes[kMostAxes] = {};
  Divider by_size[kMostAxes];
  std::int64_t strides[kTensors][kMostAxes] = {};

  using Offsets = typename StridedLoop<kTensors>::Offsets;
  EAVES_HOST_DEVICE Offsets offsets(std::int64_t index) const {
    Offsets result{};
    auto left = static_cast<std::uint32_t>(index);
    // Most tensors have one axis of rows, so this loop rarely runs. Unrolled, it would be most of a small kernel's
    // instructions.
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
    for (int axis = rank - 1; axis > 0; --axis) {
      const std::uint32_t next = by_size[axis].divide(left);
      const std::uint32_t coordinate = left - next * sizes[axis];
      for (int t = 0; t < kTensors; ++t) result.of[t] += coordinate * strides[t][axis];
      left = next;
    }
    if (rank > 0) {  // without the branch nvcc 13.0 computes this too early, and kernels in place spill registers
      for (int t = 0; t < kTensors; ++t) result.of[t] += left * strides[t][0];
    }
    return result;
  }
};

enum class RowLayout {
  contiguous,  ///< the columns of a row are one axis of unit stride in every tensor that has columns
  transposed,  ///< one axis of columns, and the innermost axis of rows has unit stride instead: rows lie side by side
  strided,     ///< anything else
};

/// The memory layout of the kTensors tensors that an operator walks together. The first kColumnTensors have rows and
/// columns: the input and its gradient (an operator without one passes the input again). The others have one element
/// per row.
template <int kColumnTensors, int kTensors>
struct RowView {
  static constexpr int kColumns = kColumnTensors;
  static constexpr int kAll = kTensors;

  StridedLoop<kTensors> rows;
  StridedLoop<kColumnTensors> columns;
  std::int64_t row_count = 1;
  std::int64_t column_count = 1;
  RowLayout layout = RowLayout::strided;
};

/// A RowView of the contiguous or transposed layout in little space. A kernel waits for its arguments when it starts,
/// so they should fill few cache lines.
template <int kColumnTensors, int kTensors>
struct ShortRowView {
  using Long = RowView<kColumnTensors, kTensors>;

  ShortLoop<kTensors> rows;
  std::int64_t row_count = 1;
  std::int64_t column_count = 1;
  std::int64_t column_strides[kColumnTensors] = {};

  static bool fits(const Long& view) {
    return view.layout != RowLayout::strided && view.rows.rank <= ShortLoop<kTensors>::kMostAxes &&
           view.row_count <= INT32_MAX;
  }

  /// Requires fits(view).
  explicit ShortRowView(const Long& view) : row_count(view.row_count), column_count(view.column_count) {
    rows.rank = view.rows.rank;
    for (int axis = 0; axis < view.rows.rank; ++axis) {
      rows.sizes[axis] = static_cast<std::uint32_t>(view.rows.sizes[axis]);
      rows.by_size[axis] = Divider(std::max(rows.sizes[axis], 1u));
      for (int t = 0; t < kTensors; ++t) rows.strides[t][axis] = view.rows.strides[t][axis];
    }
    for (int t = 0; t < kColumnTensors; ++t) {
      column_strides[t] = view.columns.rank == 0 ? 1 : view.columns.strides[t][0];
    }
  }
};

/// The axes that a reduction removes.
struct AxisSet {
  bool contains[kMaxRank] = {};
};

/// `shape` after the reduction: without the axes of the set, or with size 1 in their place.
[[gnu::visibility("default")]]  // for the Python package
Dims reduced_shape(const Dims& shape, const AxisSet& axes, bool keepdim);

/// The strides of a row-major tensor without gaps.
Dims contiguous_strides(const Dims& shape);

/// The strides of a tensor that repeats one element: 0 for every axis.
Dims zero_strides(int rank);

/// The strides of a reduced tensor over the `rank` axes of the tensor before the reduction. A removed axis has stride
/// 0.
Dims spread_strides(const Dims& reduced_strides, int rank, const AxisSet& axes, bool keepdim);

/// `axes` are the columns. strides[t] has the strides of tensor t over all axes; the entries for `axes` of a per-row
/// tensor are ignored. rows.cpp instantiates it for the operators' views.
template <int kColumnTensors, int kTensors>
RowView<kColumnTensors, kTensors> make_row_view(const Dims& shape, const AxisSet& axes,
                                                const std::array<Dims, kTensors>& strides);

}  // namespace eaves
