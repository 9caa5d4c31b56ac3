// Tests that ShortRowView finds the same rows as RowView.
#include "core/rows.h"

#include <gtest/gtest.h>

namespace eaves::testing {
namespace {

/// Strides of a slice of a tensor that is longer than `shape` by 1 along each axis, so that no axes merge.
Dims strides_of_part(const Dims& shape) {
  Dims strides = shape;
  std::int64_t stride = 1;
  for (int axis = shape.size() - 1; axis >= 0; --axis) {
    strides[axis] = stride;
    stride *= shape[axis] + 1;
  }
  return strides;
}

TEST(ShortRowView, FindsRowsWhereTheWholeViewDoes) {
  for (const Dims& shape : {Dims{7}, Dims{5, 7}, Dims{3, 5, 7}, Dims{3, 2, 5, 7}, Dims{3, 2, 4, 5, 7}}) {
    AxisSet axes;
    axes.contains[shape.size() - 1] = true;
    const Dims strides = contiguous_strides(shape);
    Dims per_row = strides;
    per_row[shape.size() - 1] = 0;
    const auto view = make_row_view<2, 4>(shape, axes, {strides_of_part(shape), strides, per_row, per_row});
    ASSERT_TRUE((ShortRowView<2, 4>::fits(view)));
    const ShortRowView<2, 4> short_view(view);
    EXPECT_EQ(short_view.row_count, view.row_count);
    for (std::int64_t row = 0; row < view.row_count; ++row) {
      const auto expected = view.rows.offsets(row);
      const auto found = short_view.rows.offsets(row);
      for (int tensor = 0; tensor < 4; ++tensor) {
        EXPECT_EQ(found.of[tensor], expected.of[tensor]) << "row " << row << " of rank " << view.rows.rank;
      }
    }
  }
}

TEST(ShortRowView, FindsTheLastOfAlmost2To31Rows) {
  const std::int64_t sizes[] = {3, 715827882};  // 2^31 - 2 rows
  AxisSet axes;
  axes.contains[2] = true;
  const Dims shape{sizes[0], sizes[1], 7};
  const Dims strides = strides_of_part(shape);
  const ShortRowView<2, 4> view(make_row_view<2, 4>(shape, axes, {strides, strides, strides, strides}));
  for (const std::int64_t row : {std::int64_t{0}, sizes[1] - 1, sizes[1], 2 * sizes[1] + 5, 3 * sizes[1] - 1}) {
    const std::int64_t expected = row / sizes[1] * strides[0] + row % sizes[1] * strides[1];
    EXPECT_EQ(view.rows.offsets(row).of[0], expected) << "row " << row;
  }
}

TEST(ShortRowView, HasFewAxesAndFewerThan2To31Rows) {
  const auto fits = [](const Dims& shape) {
    AxisSet axes;
    axes.contains[shape.size() - 1] = true;
    const Dims strides = strides_of_part(shape);
    return ShortRowView<2, 4>::fits(make_row_view<2, 4>(shape, axes, {strides, strides, strides, strides}));
  };
  EXPECT_TRUE(fits({(std::int64_t{1} << 31) - 1, 7}));
  EXPECT_FALSE(fits({std::int64_t{1} << 31, 7}));
  EXPECT_FALSE(fits({2, 3, 2, 3, 2, 7}));
}

}  // namespace
}  // namespace eaves::testing
