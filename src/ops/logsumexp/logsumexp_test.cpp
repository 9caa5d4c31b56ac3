// logsumexp against its oracle, on every device: values, layouts, edges, and untouched memory around the results. Other
// tests:
//
//   logsumexp_calls_test.cpp    workspaces, threads, streams, graphs
//   logsumexp_errors_test.cpp   refused arguments
//   logsumexp_large_test.cpp    tensors beyond 2^31 elements
#include "eaves/logsumexp.h"

#include <gtest/gtest.h>

#include "ops/logsumexp/logsumexp_test_case.h"
#include "testing/cases.h"
#include "testing/devices.h"
#include "testing/row_cases.h"

namespace eaves::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

class Logsumexp : public OnEachDevice {};
EAVES_EACH_DEVICE(Logsumexp);

double normal(std::int64_t i) { return random_normal(7, static_cast<std::uint64_t>(i)); }

/// Heavy tails: a few elements carry the whole sum.
double heavy_tailed(std::int64_t i) {
  const double z = random_normal(11, static_cast<std::uint64_t>(i));
  return 3.0 * z * z * z;
}

TEST_P(Logsumexp, RowsOfEveryLengthMatchTheOracle) {
  // With a misalignment of 1 no row, or every other row, starts on 16 bytes.
  for (const auto& [dtype, length, misalignment] :
       combine<DType, RowLength, std::int64_t>(floating_point_dtypes(), row_lengths(), {0, 1})) {
    SCOPED_TRACE(length.reason);
    check_logsumexp({.dtype = dtype,
                     .shape = {5, length.columns},
                     .axes = {-1},
                     .x_placement = contiguous_at(misalignment),
                     .grad_x_placement = contiguous_at(misalignment),
                     .value = normal});
  }
}

TEST_P(Logsumexp, FewLongRowsMatchTheOracle) {
  for (const auto& [dtype, rows] : combine<DType, RowCount>({DType::bfloat16, DType::float32}, few_long_rows())) {
    if (device().type == DeviceType::cpu && rows.rows > 3) continue;  // only a GPU has clusters
    SCOPED_TRACE(rows.reason);
    check_logsumexp({.dtype = dtype, .shape = {rows.rows, rows.columns}, .axes = {1}, .value = normal});
  }
}

TEST_P(Logsumexp, ManyShortRowsMatchTheOracle) {
  for (const std::int64_t columns : {1, 3, 5, 24, 64}) {
    check_logsumexp({.dtype = DType::bfloat16, .shape = {20011, columns}, .axes = {1}, .value = normal});
  }
}

TEST_P(Logsumexp, HeavyTailedRowsMatchTheOracle) {
  for (const DType dtype : floating_point_dtypes()) {
    check_logsumexp({.dtype = dtype, .shape = {7, 30001}, .axes = {1}, .value = heavy_tailed});
  }
}

TEST_P(Logsumexp, EverySetOfAxesMatchesTheOracle) {
  const Dims shape = {3, 4, 5, 6};
  for (int set = 1; set < 16; ++set) {
    Dims axes;
    for (int axis = 0; axis < 4; ++axis) {
      // Negative numbers count axes from the last one.
      if (set >> axis & 1) axes.push_back(axis % 2 == 0 ? axis : axis - 4);
    }
    for (const auto& [keepdim, dtype] : combine<bool, DType>({false, true}, floating_point_dtypes())) {
      check_logsumexp({.dtype = dtype, .shape = shape, .axes = axes, .keepdim = keepdim, .value = normal});
      // The same tensor with its axes in reverse order in memory.
      check_logsumexp({.dtype = dtype,
                       .shape = shape,
                       .axes = axes,
                       .keepdim = keepdim,
                       .x_placement = with_strides({1, 3, 12, 60}),
                       .value = normal});
      // The input and its gradient have different layouts.
      check_logsumexp({.dtype = dtype,
                       .shape = shape,
                       .axes = axes,
                       .keepdim = keepdim,
                       .grad_x_placement = with_strides({1, 3, 12, 60}),
                       .value = normal});
    }
  }
}

TEST_P(Logsumexp, NoAxesMeansAllOfThem) {
  check_logsumexp({.dtype = DType::float32, .shape = {9, 11, 13}, .axes = {}, .value = normal});
}

TEST_P(Logsumexp, AZeroDimensionalTensorIsItsOwnLogsumexp) {
  for (const auto& [axes, keepdim] : combine<Dims, bool>({Dims{}, Dims{0}, Dims{-1}}, {false, true})) {
    check_logsumexp({.dtype = DType::float32, .shape = {}, .axes = axes, .keepdim = keepdim, .value = normal});
  }
}

TEST_P(Logsumexp, AnAxisThatIsNotTheLastIsReducedInPlaceOfItsStrides) {
  for (const auto& [c, dtype, misalignment] :
       combine<RowsAcross, DType, std::int64_t>(rows_across(), floating_point_dtypes(), {0, 1})) {
    SCOPED_TRACE(c.reason);
    if (misalignment != 0 && c.shape[0] > 2000) continue;  // small shapes are enough for misalignment
    check_logsumexp({.dtype = dtype,
                     .shape = c.shape,
                     .axes = {c.axis},
                     .x_placement = contiguous_at(misalignment),
                     .value = normal});
  }
}

TEST_P(Logsumexp, StridesOfEveryKindMatchTheOracle) {
  for (const auto& [c, dtype] : combine<StridedRows, DType>(strided_rows(), floating_point_dtypes())) {
    SCOPED_TRACE(c.reason);
    check_logsumexp(
        {.dtype = dtype, .shape = c.shape, .axes = {c.axis}, .x_placement = with_strides(c.strides), .value = normal});
  }
}

TEST_P(Logsumexp, MoreRowAxesThanAKernelTakesInItsShortForm) {
  // Gaps between all axes, so that none can be merged.
  const Dims shape = {2, 3, 2, 3, 2, 50};
  const Dims strides = {2084, 691, 344, 113, 53, 1};
  for (const auto& [dtype, axis] : combine<DType, std::int64_t>(floating_point_dtypes(), {5, 0})) {
    check_logsumexp({.dtype = dtype,
                     .shape = shape,
                     .axes = {axis},
                     .x_placement = with_strides(strides),
                     .grad_x_placement = with_strides(strides),
                     .value = normal});
  }
}

TEST_P(Logsumexp, OutputsAreWrittenByTheirStrides) {
  check_logsumexp({.dtype = DType::bfloat16,
                   .shape = {5, 7, 300},
                   .axes = {2},
                   .out_placement = with_strides({2, 11}),
                   .lse_placement = with_strides({-14, 2}),
                   .value = normal});
  check_logsumexp({.dtype = DType::bfloat16,
                   .shape = {300, 5, 8},
                   .axes = {0},
                   .out_placement = with_strides({1, 6}),
                   .lse_placement = with_strides({30, 3}),
                   .value = normal});
}

TEST_P(Logsumexp, AnUpstreamGradientMayBeExpandedOrStrided) {
  for (const Dims& strides : {Dims{0, 0}, Dims{0, 1}, Dims{1, 5}, Dims{-7, 1}}) {
    check_logsumexp({.dtype = DType::bfloat16,
                     .shape = {5, 7, 300},
                     .axes = {2},
                     .grad_out_placement = with_strides(strides),
                     .value = normal});
  }
}

TEST_P(Logsumexp, Float32OutputsAndUpstreamGradientsOfA16BitTensorAreNotRoundedTo16Bits) {
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    check_logsumexp({.dtype = dtype,
                     .shape = {9, 3000},
                     .axes = {1},
                     .out_dtype = DType::float32,
                     .grad_out_dtype = DType::float32,
                     .value = normal});
  }
}

TEST_P(Logsumexp, InfinitiesAndNaNsFollowTheHeader) {
  // One row of each kind, with its special elements at the start, around a vector boundary and at the end.
  for (const auto& [dtype, columns] : combine<DType, std::int64_t>(floating_point_dtypes(), {2, 8, 40, 1000, 9000})) {
    for (const auto& [at, axis] :
         combine<std::int64_t, std::int64_t>({std::int64_t{0}, columns / 2, columns - 2}, {0, 1})) {
      const Dims shape = axis == 1 ? Dims{12, columns} : Dims{columns, 12};
      check_logsumexp({.dtype = dtype, .shape = shape, .axes = {axis}, .value = [&](std::int64_t i) {
                         const std::int64_t row = axis == 1 ? i / columns : i % 12;
                         const std::int64_t column = axis == 1 ? i % columns : i / 12;
                         const SpecialRow& special = special_rows()[static_cast<std::size_t>(row)];
                         if (column == at) return special.first;
                         return column == at + 1 ? special.second : special.others;
                       }});
    }
  }
}

TEST_P(Logsumexp, LongRowsThatStartWithMinusInfinityKeepTheirTail) {
  // The first pieces, batches or blocks of a row contain no finite element.
  for (const DType dtype : {DType::bfloat16, DType::float32}) {
    check_logsumexp({.dtype = dtype, .shape = {2, 200003}, .axes = {1}, .value = [](std::int64_t i) {
                       return i % 200003 < 190000 ? -kInfinity : normal(i);
                     }});
  }
}

TEST_P(Logsumexp, TheGradientIsExactlyZeroWhereEveryElementIsMinusInfinity) {
  TestTensor x(device(), DType::float32, {2, 100});
  TestTensor lse(device(), DType::float32, {2});
  TestTensor grad_out(device(), DType::float32, {2});
  TestTensor grad_x(device(), DType::float32, {2, 100});
  x.fill([](std::int64_t) { return -kInfinity; });
  lse.fill([](std::int64_t) { return -kInfinity; });
  grad_out.fill([](std::int64_t i) { return i == 0 ? 3.0 : kNaN; });  // the gradient is 0 even if g is NaN
  logsumexp_backward(
      {.grad_out = grad_out.view(), .x = x.view(), .lse = lse.view(), .axes = {1}, .grad_x = grad_x.view()});
  grad_x.download();
  for (std::int64_t i = 0; i < 200; ++i) EXPECT_EQ(grad_x.get(i), 0.0) << "element " << i;
}

TEST_P(Logsumexp, HugeElementsDoNotOverflow) {
  for (const DType dtype : floating_point_dtypes()) {
    const double huge = 0.75 * largest_finite(dtype);
    for (const double sign : {1.0, -1.0}) {
      check_logsumexp({.dtype = dtype, .shape = {3, 5000}, .axes = {1}, .value = [=](std::int64_t i) {
                         return i % 5000 == 4321 ? sign * huge : -huge;
                       }});
    }
    // Every element raises the maximum so far that the exponential of the difference overflows float32.
    check_logsumexp({.dtype = dtype, .shape = {2, 600}, .axes = {1}, .value = [](std::int64_t i) {
                       return 100.0 * static_cast<double>(i % 600) - 30000.0;
                     }});
  }
}

TEST_P(Logsumexp, ManyEqualElementsKeepTheirPrecision) {
  // The worst case of a running sum: every rounding error points the same way.
  constexpr std::int64_t kColumns = 1 << 18;
  for (const double others : {0.0, -5.0, -77.7}) {
    check_logsumexp({.dtype = DType::float32, .shape = {2, kColumns}, .axes = {1}, .value = [=](std::int64_t i) {
                       return i % kColumns == 0 ? 0.0 : others;
                     }});
    check_logsumexp({.dtype = DType::float32, .shape = {kColumns / 2, 4}, .axes = {0}, .value = [=](std::int64_t i) {
                       return i < 4 ? 0.0 : others;
                     }});
  }
}

TEST_P(Logsumexp, ManyEqualElementsKeepTheirPrecisionInStridedRowsThatAreNotCut) {
  // One row of every second element, expanded to so many rows that no GPU cuts them.
  constexpr std::int64_t kColumns = 1 << 18;
  constexpr std::int64_t kRows = 400;
  TestTensor x(device(), DType::float32, {kColumns}, with_strides({2}));
  x.fill([](std::int64_t column) { return column == 0 ? 0.0 : -5.0; });
  TensorView rows = x.view();
  rows.shape = {kRows, kColumns};
  rows.strides = {0, 2};
  TestTensor lse(device(), DType::float32, {kRows});
  logsumexp_forward({.x = rows, .axes = {1}, .lse = lse.view()});
  lse.download();
  const double exact = std::log(1.0 + static_cast<double>(kColumns - 1) * std::exp(-5.0));
  for (std::int64_t row = 0; row < kRows; ++row) {
    ASSERT_EQ(difference(DType::float32, lse.get(row), exact, logsumexp_scale(exact, 0.0)), "") << "row " << row;
  }
}

TEST_P(Logsumexp, ALogsumexpNearZeroIsExactToTheRoundingOfItsSum) {
  // lse = 0.0005 + log(1 + e^-8.0005): the logarithm of a sum close to 1.
  check_logsumexp({.dtype = DType::float32, .shape = {1, 2}, .axes = {1}, .value = [](std::int64_t i) {
                     return i == 0 ? 0.0005 : -8.0;
                   }});
}

TEST_P(Logsumexp, MaximaThatRiseLateAreFollowedInEveryLayout) {
  // Each quarter of a row raises the maximum, by less and by more than the slack of any kernel.
  for (const auto& [step, dtype, columns] : combine<double, DType, std::int64_t>(
           {3.0, 6.0, 25.0, 70.0}, {DType::bfloat16, DType::float32, DType::float64}, {128, 6000})) {
    const auto rising = [=](std::int64_t column) { return step * static_cast<double>(4 * column / columns); };
    const auto along_rows = [=](std::int64_t i) { return rising(i % columns); };
    check_logsumexp({.dtype = dtype, .shape = {3, columns}, .axes = {1}, .value = along_rows});
    check_logsumexp({.dtype = dtype,
                     .shape = {3, columns},
                     .axes = {1},
                     .x_placement = with_strides({2 * columns, 2}),
                     .value = along_rows});
    check_logsumexp(
        {.dtype = dtype, .shape = {columns, 16}, .axes = {0}, .value = [=](std::int64_t i) { return rising(i / 16); }});
  }
}

TEST_P(Logsumexp, MaskedElementsOfAnySizeChangeNothing) {
  // Codebases mask with different numbers; a row may start with many masked elements.
  for (const auto& [mask, dtype, axis] :
       combine<double, DType, std::int64_t>({-1e4, -1e6, -1e7, -3e8, -1e9, -1e11, -1e12, -1e15, -1e25, -1e30, -3e38},
                                            {DType::bfloat16, DType::float32, DType::float64}, {1, 0})) {
    check_logsumexp({.dtype = dtype,
                     .shape = axis == 1 ? Dims{2, 8192} : Dims{8192, 2},
                     .axes = {axis},
                     .value = [=](std::int64_t i) { return (axis == 1 ? i % 8192 : i / 2) < 6000 ? mask : 0.5; }});
  }
}

TEST_P(Logsumexp, LargeElementsOfEitherSignMatchTheOracle) {
  for (double size = 1e3; size < 1e31; size *= 37.0) {
    for (const auto& [sign, dtype] :
         combine<double, DType>({1.0, -1.0}, {DType::bfloat16, DType::float32, DType::float64})) {
      check_logsumexp({.dtype = dtype, .shape = {2, 1000}, .axes = {1}, .value = [=](std::int64_t i) {
                         return i % 7 == 3 ? sign * size : sign * 0.5 * size;
                       }});
    }
  }
}

TEST_P(Logsumexp, TwoNumbersOfAnLseKeepTheGradientOfElementsFarFromZero) {
  for (const auto& [offset, columns, dtype] : combine<double, std::int64_t, DType>(
           {300.0, -1e4, 1e4, 1e5}, {3, 50, 1000, 40003}, {DType::float32, DType::bfloat16, DType::float64})) {
    check_logsumexp(
        {.dtype = dtype, .shape = {5, columns}, .axes = {1}, .has_split_lse = true, .value = [=](std::int64_t i) {
           return offset + normal(i);
         }});
  }
  for (const bool keepdim : {false, true}) {
    check_logsumexp({.dtype = DType::float32,
                     .shape = {2, 3, 4},
                     .axes = {1},
                     .keepdim = keepdim,
                     .has_split_lse = true,
                     .value = [](std::int64_t i) { return 1e4 + normal(i); }});
  }
  // At the largest number of each type, one number for lse loses log(2).
  for (const auto& [dtype, largest] : {std::pair(DType::float16, 65504.0), std::pair(DType::float32, 0x1.fffffep127),
                                       std::pair(DType::float64, std::numeric_limits<double>::max())}) {
    LogsumexpRun run({.dtype = dtype, .shape = {1, 2}, .axes = {1}, .has_split_lse = true, .value = [=](std::int64_t) {
                        return largest;
                      }});
    run.run();
    for (const int i : {0, 1}) EXPECT_NEAR(run.grad_x.get(i), 0.5 * run.grad_out.get(0), 1e-3) << name_of(dtype);
  }
  for (const double element : {-std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity()}) {
    check_logsumexp(
        {.dtype = DType::bfloat16, .shape = {2, 9}, .axes = {1}, .has_split_lse = true, .value = [=](std::int64_t i) {
           return i < 9 ? element : 0.5;
         }});
  }
}

TEST_P(Logsumexp, AnEmptyReductionIsMinusInfinity) {
  for (const Dims& shape : {Dims{3, 0}, Dims{0, 3}, Dims{0, 0}, Dims{2, 0, 4}}) {
    for (int axis = 0; axis < shape.size(); ++axis) {
      check_logsumexp({.dtype = DType::bfloat16, .shape = shape, .axes = {axis}, .value = normal});
    }
    check_logsumexp({.dtype = DType::float32, .shape = shape, .axes = {}, .value = normal});
  }
}

TEST_P(Logsumexp, EachOutputCanBeAskedForAlone) {
  TestTensor x(device(), DType::bfloat16, {4, 500});
  x.fill(normal);
  TestTensor both_out(device(), DType::bfloat16, {4}), both_lse(device(), DType::float32, {4});
  TestTensor only_out(device(), DType::bfloat16, {4}), only_lse(device(), DType::float32, {4});
  logsumexp_forward({.x = x.view(), .axes = {1}, .out = both_out.view(), .lse = both_lse.view()});
  logsumexp_forward({.x = x.view(), .axes = {1}, .out = only_out.view()});
  logsumexp_forward({.x = x.view(), .axes = {1}, .lse = only_lse.view()});
  for (TestTensor* tensor : {&both_out, &both_lse, &only_out, &only_lse}) tensor->download();
  EXPECT_EQ(both_out.bytes(), only_out.bytes());
  EXPECT_EQ(both_lse.bytes(), only_lse.bytes());
  EXPECT_NE(only_lse.get(0), 0.0);
}

TEST_P(Logsumexp, BackwardIsTheDerivativeOfForward) {
  // Central differences in float64: the only test that does not use the formula of the gradient.
  constexpr std::int64_t kRows = 3;
  constexpr std::int64_t kColumns = 17;
  constexpr double kStep = 1e-6;
  TestTensor x(device(), DType::float64, {kRows, kColumns});
  TestTensor lse(device(), DType::float64, {kRows}), grad_out(device(), DType::float64, {kRows});
  TestTensor grad_x(device(), DType::float64, {kRows, kColumns});
  x.fill(normal);
  grad_out.fill([](std::int64_t i) { return 0.5 + static_cast<double>(i); });
  const auto forward = [&] {
    x.upload();
    logsumexp_forward({.x = x.view(), .axes = {1}, .lse = lse.view()});
    lse.download();
  };
  forward();
  logsumexp_backward(
      {.grad_out = grad_out.view(), .x = x.view(), .lse = lse.view(), .axes = {1}, .grad_x = grad_x.view()});
  grad_x.download();
  for (std::int64_t i = 0; i < kRows * kColumns; ++i) {
    const double original = x.get(i);
    const std::int64_t row = i / kColumns;
    x.set(i, original + kStep);
    forward();
    const double above = lse.get(row);
    x.set(i, original - kStep);
    forward();
    const double below = lse.get(row);
    x.set(i, original);
    EXPECT_NEAR(grad_x.get(i), grad_out.get(row) * (above - below) / (2.0 * kStep), 1e-8) << "element " << i;
  }
}

}  // namespace
}  // namespace eaves::testing
