// row_sum against its oracle, the formula in float64, on every device.
#include "eaves/row_sum.h"

#include <gtest/gtest.h>

#include <cmath>

#include "eaves/error.h"
#include "runtime/runtime.h"
#include "testing/cases.h"
#include "testing/devices.h"
#include "testing/tensor.h"
#include "testing/tolerance.h"

namespace eaves::testing {
namespace {

class RowSum : public OnEachDevice {};
EAVES_EACH_DEVICE(RowSum);

void check_row_sum(Device device, DType dtype, std::int64_t columns, const Placement& placement) {
  constexpr std::int64_t kRows = 5;
  TestTensor x(device, dtype, {kRows, columns}, placement);
  TestTensor out(device, dtype, {kRows});
  x.fill([](std::int64_t i) { return random_normal(1, static_cast<std::uint64_t>(i)); });
  row_sum_forward({.x = x.view(), .out = out.view()});
  runtime::synchronize(device);
  out.download();
  EXPECT_EQ(out.canary_damage(), "");
  for (std::int64_t row = 0; row < kRows; ++row) {
    double sum = 0, size = 0;  // size: the sum of the terms' sizes, the scale of errors
    for (std::int64_t column = 0; column < columns; ++column) {
      sum += x.get(row * columns + column);
      size += std::abs(x.get(row * columns + column));
    }
    EXPECT_EQ(difference(dtype, out.get(row), sum, size), "")
        << name_of(dtype) << ", " << columns << " columns, row " << row;
  }
}

TEST_P(RowSum, RowsOfEveryLengthMatchTheOracle) {
  for (const DType dtype : floating_point_dtypes()) {
    for (const RowLength& length : row_lengths()) {
      SCOPED_TRACE(length.reason);
      check_row_sum(device(), dtype, length.columns, contiguous_at(1));
      check_row_sum(device(), dtype, length.columns, with_strides({1, 5}));
    }
  }
}

TEST(RowSumErrors, AnOutputOfTheWrongShapeIsNamed) {
  float memory[12] = {};
  try {
    row_sum_forward({.x = TensorView::contiguous(memory, DType::float32, {2, 4}),
                     .out = TensorView::contiguous(memory + 8, DType::float32, {3})});
    FAIL() << "was not refused";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "row_sum_forward: out has shape [3], expected [2] (x without its last axis)");
  }
}

}  // namespace
}  // namespace eaves::testing
