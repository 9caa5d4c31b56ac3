// The edges that cross_entropy.h lists: infinities and NaN, ignored rows, empty tensors, ties, classes and rows without
// weight, targets out of range.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

#include "eaves/cross_entropy.h"
#include "ops/cross_entropy/cross_entropy_test_case.h"
#include "testing/cases.h"
#include "testing/devices.h"
#include "testing/refusals.h"
#include "testing/row_cases.h"

namespace eaves::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kIgnored = -100.0;

class CrossEntropyEdges : public OnEachDevice {};
EAVES_EACH_DEVICE(CrossEntropyEdges);

double normal(std::int64_t i) { return 3.0 * random_normal(27, static_cast<std::uint64_t>(i)); }

/// Row lengths that reach every kernel of a backend.
const std::vector<std::int64_t> kLengths = {2, 8, 40, 1000, 9000};

TEST_P(CrossEntropyEdges, InfinitiesAndNaNsFollowTheHeader) {
  // One row of each kind, with its special logits at the start, around a vector boundary and at the end. The target is
  // each special class, or the next class.
  const auto rows = static_cast<std::int64_t>(special_rows().size());
  for (const auto& [dtype, columns] : combine<DType, std::int64_t>(floating_point_dtypes(), kLengths)) {
    for (const auto& [at, axis] : combine<std::int64_t, int>({std::int64_t{0}, columns / 2 - 1, columns - 2}, {0, 1})) {
      for (const std::int64_t target : {at, at + 1, std::int64_t{0}}) {
        check_cross_entropy({.dtype = dtype,
                             .shape = axis == 1 ? Dims{rows, columns} : Dims{columns, rows},
                             .class_axis = axis,
                             .options = {.reduction = Reduction::none},
                             .value =
                                 [&](std::int64_t i) {
                                   const SpecialRow& special =
                                       special_rows()[static_cast<std::size_t>(axis == 1 ? i / columns : i % rows)];
                                   const std::int64_t column = axis == 1 ? i % columns : i / rows;
                                   if (column == at) return special.first;
                                   return column == at + 1 ? special.second : special.others;
                                 },
                             .target = [=](std::int64_t) { return static_cast<double>(target); }});
      }
    }
  }
}

TEST_P(CrossEntropyEdges, MinusInfinityInAClassWithoutWeightCostsNothing) {
  // A masked class has no mass in the target either, and 0 * log(0) is 0 in the loss and in the entropy.
  for (const auto& [dtype, columns] : combine<DType, std::int64_t>(floating_point_dtypes(), kLengths)) {
    const auto is_masked = [=](std::int64_t i) { return i % columns % 2 == 1; };
    const auto masked = [=](std::int64_t i) { return is_masked(i) ? -kInfinity : normal(i); };
    CrossEntropyCase smoothed{.dtype = dtype,
                              .shape = {4, columns},
                              .options = {.reduction = Reduction::none, .label_smoothing = 0.2},
                              .weight_dtype = dtype,
                              .has_grad_entropy = true,
                              .value = masked,
                              .target = [](std::int64_t) { return 0.0; },
                              .weight = [](std::int64_t v) { return v % 2 == 1 ? 0.0 : 1.5; }};
    check_cross_entropy(smoothed);
    smoothed.options.label_smoothing = 0.0;
    smoothed.target = [](std::int64_t row) { return row % 2 == 0 ? 1.0 : 0.0; };  // a masked class of weight 0
    check_cross_entropy(smoothed);
    check_cross_entropy({.dtype = dtype,
                         .shape = {4, columns},
                         .options = {.reduction = Reduction::none},
                         .targets_dtype = DType::float32,
                         .has_grad_entropy = true,
                         .value = masked,
                         .target = [=](std::int64_t i) { return is_masked(i) ? 0.0 : 0.01; }});
  }
}

TEST_P(CrossEntropyEdges, MinusInfinityInAClassWithMassIsAnInfiniteLossWithAFiniteGradient) {
  for (const auto& [columns, smoothing] : combine<std::int64_t, double>(kLengths, {0.2, 1.0})) {
    CrossEntropyCase test_case{
        .dtype = DType::float32,
        .shape = {4, columns},
        .options = {.reduction = Reduction::none, .label_smoothing = smoothing},
        .value = [=](std::int64_t i) { return i % columns == columns - 1 ? -kInfinity : normal(i); },
        .target = [](std::int64_t) { return 0.0; }};
    check_cross_entropy(test_case);
    CrossEntropyRun run(test_case);
    run.run();
    EXPECT_EQ(run.results.loss.get(2), kInfinity);
    EXPECT_TRUE(std::isfinite(run.grad_logits.get(0)));
  }
}

TEST_P(CrossEntropyEdges, ASoftcapMakesInfinitiesFinite) {
  for (const auto& [dtype, columns] : combine<DType, std::int64_t>(floating_point_dtypes(), kLengths)) {
    check_cross_entropy({.dtype = dtype,
                         .shape = {4, columns},
                         .options = {.reduction = Reduction::none, .label_smoothing = 0.1, .softcap = 8.0},
                         .value =
                             [=](std::int64_t i) {
                               if (i % columns == columns - 1) return -kInfinity;
                               return i % columns == columns / 2 ? kInfinity : normal(i);
                             },
                         .target = [](std::int64_t row) { return static_cast<double>(row % 2); }});
  }
}

TEST_P(CrossEntropyEdges, IgnoredRowsHaveNoLossAndNoGradientWhateverTheyHold) {
  for (const auto& [held, dtype, columns, axis, skips] : combine<double, DType, std::int64_t, int, bool>(
           {kNaN, kInfinity, -kInfinity, 1e30}, {DType::bfloat16, DType::float32, DType::float64}, kLengths, {1, 0},
           {false, true})) {
    CrossEntropyRun run(
        {.dtype = dtype,
         .shape = axis == 1 ? Dims{4, columns} : Dims{columns, 4},
         .class_axis = axis,
         .options = {.reduction = Reduction::mean, .label_smoothing = 0.1, .z_loss_weight = 0.1},
         .weight_dtype = dtype,
         .skips_ignored = skips,
         .value = [=](std::int64_t i) { return (axis == 1 ? i / columns : i % 4) % 2 == 0 ? held : normal(i); },
         .target = [](std::int64_t row) { return row % 2 == 0 ? kIgnored : 1.0; }});
    run.run();
    CrossEntropyComparison comparison(run);
    EXPECT_EQ(comparison.compare(), "");
    EXPECT_TRUE(std::isfinite(run.results.loss.get(0)));
    EXPECT_TRUE(std::isfinite(run.results_in_place.loss.get(0)));
    for (std::int64_t v = 0; v < columns; ++v) {
      const std::int64_t element = axis == 1 ? v : 4 * v;
      ASSERT_EQ(run.grad_logits.get(element), 0.0) << "class " << v;
      ASSERT_EQ(run.in_place.get(element), 0.0) << "class " << v << ", in place";
    }
    if (skips) {
      EXPECT_EQ(run.results.lse.get(0), 0.0);
    }
    EXPECT_EQ(run.results_in_place.lse.get(2), 0.0);
  }
}

TEST_P(CrossEntropyEdges, TheWeightOfTheIgnoredClassIsNeverRead) {
  // ignore_index is so far from the classes that a read at this index would crash the process.
  for (const auto& [ignored, targets, columns, smoothing] : combine<std::int64_t, DType, std::int64_t, double>(
           {std::int64_t{2000000011}, std::int64_t{-2000000011}}, {DType::int32, DType::int64}, kLengths, {0.0, 0.1})) {
    check_cross_entropy({.dtype = DType::float32,
                         .shape = {6, columns},
                         .options = {.ignore_index = ignored, .label_smoothing = smoothing},
                         .targets_dtype = targets,
                         .weight_dtype = DType::float32,
                         .value = normal});
  }
}

TEST_P(CrossEntropyEdges, WhereAllRowsAreIgnoredTheMeanIsZeroAndSoAreTheGradients) {
  for (const auto& [has_normalizer, reduction, columns] : combine<bool, Reduction, std::int64_t>(
           {false, true}, {Reduction::none, Reduction::sum, Reduction::mean}, kLengths)) {
    CrossEntropyRun run({.dtype = DType::bfloat16,
                         .shape = {5, columns},
                         .options = {.reduction = reduction, .z_loss_weight = 0.1},
                         .weight_dtype = DType::bfloat16,
                         .has_normalizer = has_normalizer,
                         .value = normal,
                         .target = [](std::int64_t) { return kIgnored; }});
    run.run();
    CrossEntropyComparison comparison(run);
    EXPECT_EQ(comparison.compare(), "");
    EXPECT_EQ(run.results.loss.get(0), 0.0);
    EXPECT_EQ(run.results.z_loss.get(0), 0.0);
    for (std::int64_t i = 0; i < 5 * columns; ++i) {
      ASSERT_EQ(run.grad_logits.get(i), 0.0);
      ASSERT_EQ(run.in_place.get(i), 0.0);
    }
  }
}

TEST_P(CrossEntropyEdges, RowsWhoseWeightsAddUpToZeroHaveAMeanOfZeroAndNoGradient) {
  for (const auto& [columns, smoothing] : combine<std::int64_t, double>(kLengths, {0.0, 0.1})) {
    CrossEntropyRun run({.dtype = DType::float32,
                         .shape = {5, columns},
                         .options = {.label_smoothing = smoothing, .z_loss_weight = 0.1},
                         .weight_dtype = DType::float32,
                         .value = normal,
                         .target = [](std::int64_t) { return 1.0; },
                         .weight = [](std::int64_t v) { return v == 1 ? 0.0 : 2.0; }});
    run.run();
    CrossEntropyComparison comparison(run);
    EXPECT_EQ(comparison.compare(), "");
    EXPECT_EQ(run.results.loss.get(0), 0.0);
    for (std::int64_t i = 0; i < 5 * columns; ++i) ASSERT_EQ(run.grad_logits.get(i), 0.0);
  }
}

TEST_P(CrossEntropyEdges, ARowOfWeightZeroHasNoLossAndNoGradientWhateverItHolds) {
  for (const auto& [columns, held, targets, z_loss_weight] : combine<std::int64_t, double, DType, double>(
           kLengths, {kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN()}, {DType::int64, DType::float32},
           {0.0, 0.1})) {
    const bool is_soft = is_floating_point(targets);
    CrossEntropyRun run({.dtype = DType::float32,
                         .shape = {5, columns},
                         .options = {.reduction = Reduction::sum, .z_loss_weight = z_loss_weight},
                         .targets_dtype = targets,
                         .has_row_weight = true,
                         .value = [=](std::int64_t i) { return i / columns == 4 ? held : normal(i); },
                         .target = [=](std::int64_t) { return is_soft ? 1.0 / columns : 1.0; }});
    ASSERT_EQ(run.row_weight.get(4), 0.0);
    run.run();
    EXPECT_TRUE(std::isfinite(run.results.loss.get(0)));
    EXPECT_TRUE(std::isfinite(run.results_in_place.loss.get(0)));
    for (std::int64_t i = 4 * columns; i < 5 * columns; ++i) {
      ASSERT_EQ(run.grad_logits.get(i), 0.0);
      ASSERT_EQ(run.in_place.get(i), 0.0);
    }
  }
}

TEST_P(CrossEntropyEdges, AnUpstreamGradientThatIsNotFiniteDoesNotReachRowsThatDoNotCount) {
  for (const auto& [columns, upstream, reduction, smoothing] : combine<std::int64_t, double, Reduction, double>(
           kLengths, {kInfinity, std::numeric_limits<double>::quiet_NaN()},
           {Reduction::none, Reduction::sum, Reduction::mean}, {0.0, 0.1})) {
    CrossEntropyRun run({.dtype = DType::float32,
                         .shape = {5, columns},
                         .options = {.reduction = reduction, .label_smoothing = smoothing},
                         .has_row_weight = true,
                         .value = normal,
                         .target = [](std::int64_t row) { return row == 2 ? kIgnored : 1.0; }});
    ASSERT_EQ(run.row_weight.get(4), 0.0);
    run.grad_loss.fill([=](std::int64_t) { return upstream; });
    run.run();
    for (const TestTensor* gradient : {&run.grad_logits, &run.in_place}) {
      for (std::int64_t i = 0; i < 5 * columns; ++i) {
        if (i / columns == 2 || i / columns == 4) {
          ASSERT_EQ(gradient->get(i), 0.0) << i;
        } else {
          ASSERT_FALSE(std::isfinite(gradient->get(i))) << i;
        }
      }
    }
  }
}

TEST_P(CrossEntropyEdges, AnInfiniteClassWeightMakesAMeanAndItsGradientNaN) {
  for (const std::int64_t columns : kLengths) {
    CrossEntropyRun run({.dtype = DType::float32,
                         .shape = {5, columns},
                         .weight_dtype = DType::float32,
                         .value = normal,
                         .target = [](std::int64_t row) { return row == 3   ? kIgnored
                                                                 : row == 0 ? 1.0
                                                                            : 0.0; },
                         .weight = [](std::int64_t v) { return v == 1 ? kInfinity : 2.0; }});
    run.run();
    EXPECT_TRUE(std::isnan(run.results.loss.get(0)));
    EXPECT_TRUE(std::isnan(run.results_in_place.loss.get(0)));
    for (const TestTensor* gradient : {&run.grad_logits, &run.in_place}) {
      for (std::int64_t i = 0; i < 5 * columns; ++i) {
        ASSERT_EQ(std::isnan(gradient->get(i)), i / columns != 3) << i;
      }
    }
  }
}

TEST(CrossEntropyNormalizerOnCpu, ANegativeNormalizerIsRefusedBeforeAnythingIsWritten) {
  CrossEntropyRun run(
      {.device = kCpu, .dtype = DType::float32, .shape = {3, 40}, .has_normalizer = true, .value = normal});
  run.normalizer.fill([](std::int64_t) { return -2.0; });
  expect_message([&] { run.run(); }, "cross_entropy_forward: normalizer is -2, expected a number that is not negative");
}

TEST_P(CrossEntropyEdges, ANormalizerOfZeroIsDividedByUnlessNothingCounts) {
  for (const bool counts : {false, true}) {
    CrossEntropyRun run({.dtype = DType::float32,
                         .shape = {3, 40},
                         .has_normalizer = true,
                         .value = normal,
                         .target = [=](std::int64_t row) { return counts && row == 1 ? 2.0 : kIgnored; }});
    run.normalizer.fill([](std::int64_t) { return 0.0; });
    run.run();
    EXPECT_EQ(run.results.loss.get(0), counts ? kInfinity : 0.0);
    for (std::int64_t i = 0; i < 120; ++i) ASSERT_EQ(run.grad_logits.get(i), 0.0);
  }
}

TEST_P(CrossEntropyEdges, WithoutRowsAReducedLossIsZero) {
  for (const auto& [targets, reduction, has_normalizer] : combine<DType, Reduction, bool>(
           {DType::int64, DType::float32}, {Reduction::none, Reduction::sum, Reduction::mean}, {false, true})) {
    for (const auto& [shape, axis] :
         std::vector<std::pair<Dims, int>>{{{0, 7}, 1}, {{7, 0}, 0}, {{3, 0, 4}, 2}, {{0, 0}, 0}}) {
      check_cross_entropy({.dtype = DType::float32,
                           .shape = shape,
                           .class_axis = axis,
                           .options = {.reduction = reduction, .label_smoothing = 0.1, .z_loss_weight = 0.1},
                           .targets_dtype = targets,
                           .weight_dtype = DType::float32,
                           .has_normalizer = has_normalizer,
                           .value = normal});
    }
  }
}

TEST_P(CrossEntropyEdges, OverNoClassesTheSumOfSoftTargetsIsZero) {
  for (const auto& [shape, axis] : std::vector<std::pair<Dims, int>>{{{3, 0}, 1}, {{0, 3}, 0}, {{2, 0, 4}, 1}}) {
    for (const Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean}) {
      CrossEntropyCase test_case{.dtype = DType::float32,
                                 .shape = shape,
                                 .class_axis = axis,
                                 .options = {.reduction = reduction, .label_smoothing = 0.1},
                                 .targets_dtype = DType::float32,
                                 .value = normal};
      check_cross_entropy(test_case);
    }
  }
}

TEST_P(CrossEntropyEdges, AOneDimensionalTensorIsOneRow) {
  for (const auto& [targets, reduction] :
       combine<DType, Reduction>({DType::int64, DType::float32}, {Reduction::none, Reduction::mean})) {
    check_cross_entropy({.dtype = DType::bfloat16,
                         .shape = {300},
                         .class_axis = 0,
                         .options = {.reduction = reduction},
                         .targets_dtype = targets,
                         .value = normal});
  }
}

TEST_P(CrossEntropyEdges, AsPGoesToOneTheGradientOfTheTargetStaysPrecise) {
  // 1 - p from 1e-2 to 1e-8. Not in place, because lse is no input there, and its error is most of 1 - p.
  for (const auto& [dtype, margin, columns] :
       combine<DType, double, std::int64_t>({DType::float32, DType::float64}, {5.0, 10.0, 15.0, 20.0}, kLengths)) {
    for (const double offset : {0.0, -margin}) {
      CrossEntropyRun run({.dtype = dtype,
                           .shape = {2, columns},
                           .options = {.reduction = Reduction::sum},
                           .runs_in_place = false,
                           .value = [=](std::int64_t i) { return i % columns == 1 ? margin + offset : offset; },
                           .target = [](std::int64_t) { return 1.0; }});
      run.run();
      CrossEntropyComparison comparison(run);
      EXPECT_EQ(comparison.compare(), "");
      // The error relative to 1 - p itself, not to a larger scale.
      const double exact = 1.75 * std::expm1(run.logits.get(1) - run.results.lse.get(0));
      EXPECT_NEAR(run.grad_logits.get(1), exact, 2e-6 * std::abs(exact)) << "margin " << margin;
    }
  }
}

TEST_P(CrossEntropyEdges, TwoNumbersOfAnLseKeepTheGradientOfLogitsFarFromZero) {
  // With the last offset, exponents of 2 are around -2^20, from which on a GPU with options takes a slower code path.
  for (const auto& [offset, columns, dtype] :
       combine<double, std::int64_t, DType>({300.0, -1e4, 1e4, 1e5, -0x1p20 * std::numbers::ln2}, {3, 50, 1000, 40003},
                                            {DType::float32, DType::bfloat16, DType::float64})) {
    CrossEntropyCase plain{.dtype = dtype, .shape = {5, columns}, .has_split_lse = true};
    plain.value = [=](std::int64_t i) { return offset + normal(i); };
    check_cross_entropy(plain);
    if (dtype != DType::float32) continue;
    CrossEntropyCase with_options = plain;
    with_options.options = {.label_smoothing = 0.1, .z_loss_weight = 1e-4};
    with_options.has_grad_lse = with_options.has_grad_entropy = true;
    check_cross_entropy(with_options);
    with_options.weight_dtype = DType::float32;
    check_cross_entropy(with_options);
  }
}

/// The gradient of the target's logit beside 49 zeros, for an upstream gradient of 1: in the backward and in place.
std::array<double, 2> gradients_of_learnt(Device device, DType dtype, double logit, bool has_options) {
  CrossEntropyCase learnt{.device = device, .dtype = dtype, .shape = {1, 50}, .has_split_lse = true};
  if (has_options) learnt.options.softcap = 1e4;
  learnt.options.reduction = Reduction::sum;
  learnt.value = [=](std::int64_t i) { return i == 1 ? logit : 0.0; };
  learnt.target = [](std::int64_t) { return 1.0; };
  CrossEntropyRun run(learnt);
  run.run();
  const double upstream = run.grad_loss.get(0);
  return {run.grad_logits.get(1) / upstream, run.in_place.get(1) / upstream};
}

TEST_P(CrossEntropyEdges, AClassThatIsAlmostCertainHasItsGradient) {
  // 1 - p is 7e-7 at 18, where float32 has steps of 2e-6; at 60 it is 4e-25, and must not change its sign.
  for (const auto& [dtype, has_options, logit] :
       combine<DType, bool, double>({DType::float16, DType::bfloat16, DType::float32, DType::float64}, {false, true},
                                    {8.0, 12.0, 15.0, 18.0, 30.0, 60.0})) {
    const bool has_wide_sum = device().type == DeviceType::cpu || dtype == DType::float64;
    const double of_dtype = dtype == DType::bfloat16 ? 0x1p-8 : dtype == DType::float16 ? 0x1p-11 : 0.0;
    // Half of the smallest number: a smaller gradient rounds to 0.
    const double smallest = dtype == DType::float16 ? 0x1p-25 : 0.0;
    // The sum of the row, close to 1, is a float64 on the CPU. On a GPU it has an error of some units in the last place
    // of a float32.
    const double of_sum = has_wide_sum ? 0x1p-52 : has_options ? 0x1p-21 : 0x1p-22;
    const double capped = has_options ? 1e4 * std::tanh(logit / 1e4) : logit;
    const double exact = -1.0 / (1.0 + std::exp(capped) / 49.0);
    const double of_cap = has_options ? capped * 0x1p-23 : 0.0;  // the rounding of the capped logit
    const double allowed = std::abs(exact) * (2e-6 + of_dtype + of_cap) + of_sum + smallest;
    for (const double gradient : gradients_of_learnt(device(), dtype, logit, has_options)) {
      EXPECT_NEAR(gradient, exact, allowed) << name_of(dtype) << ", logit " << logit << ", options " << has_options;
      EXPECT_LE(gradient, 0.0) << name_of(dtype) << ", logit " << logit << ", options " << has_options;
    }
  }
}

TEST_P(CrossEntropyEdges, LogitsAtTheEndOfTheirRangeHaveTheirGradient) {
  // Two equal logits: beside the largest number of a type, one number for lse loses log(2).
  for (const auto& [dtype, largest] : {std::pair(DType::float16, 65504.0), std::pair(DType::float32, 0x1.fffffep127),
                                       std::pair(DType::float64, std::numeric_limits<double>::max())}) {
    CrossEntropyCase test_case{.dtype = dtype, .shape = {1, 2}, .has_split_lse = true};
    test_case.options.reduction = Reduction::sum;
    test_case.value = [largest = largest](std::int64_t) { return largest; };
    test_case.target = [](std::int64_t) { return 1.0; };
    CrossEntropyRun run(test_case);
    run.run();
    const double upstream = run.grad_loss.get(0);
    for (const TestTensor* gradient : {&run.grad_logits, &run.in_place}) {
      EXPECT_NEAR(gradient->get(0) / upstream, 0.5, 1e-3) << name_of(dtype);
      EXPECT_NEAR(gradient->get(1) / upstream, -0.5, 1e-3) << name_of(dtype);
    }
  }
}

TEST_P(CrossEntropyEdges, ALossNextToZeroIsNotRoundedToZero) {
  // lse - z_t would lose the loss: float32 has 16 to 1e-6. Relative to the largest logit nothing is lost, at any
  // column. On a GPU the sum of the row, close to 1, is a float32.
  const bool is_cpu = device().type == DeviceType::cpu;
  for (const std::int64_t columns : kLengths) {
    // an option selects another kernel
    for (const auto& [at, smoothing] :
         combine<std::int64_t, double>({std::int64_t{1}, columns / 2, columns - 1}, {0.0, 1e-6})) {
      CrossEntropyRun run({.dtype = DType::float32,
                           .shape = {1, columns},
                           .options = {.reduction = Reduction::none, .label_smoothing = smoothing},
                           .value = [=](std::int64_t i) { return i == at ? 16.0 : 0.0; },
                           .target = [=](std::int64_t) { return static_cast<double>(at); }});
      run.run();
      const auto others = static_cast<double>(columns - 1);
      const double of_target = std::log1p(others * std::exp(-16.0));
      const double exact = of_target + smoothing * 16.0 * others / static_cast<double>(columns);
      const double error = is_cpu ? 1e-6 * exact : allowed_error(DType::float32, exact, logsumexp_scale(0.0, 0.0));
      EXPECT_NEAR(run.results.loss.get(0), exact, error) << "class " << at << " of " << columns;
    }
  }
}

TEST_P(CrossEntropyEdges, TheArgmaxIsTheFirstOfEqualLogits) {
  const auto check = [&](const Dims& shape, int axis, const Placement& placement, auto value) {
    for (const DType dtype : {DType::bfloat16, DType::float32, DType::float64}) {
      check_cross_entropy(
          {.dtype = dtype, .shape = shape, .class_axis = axis, .logits_placement = placement, .value = value});
    }
  };
  for (const std::int64_t columns : {2, 8, 40, 1000, 9000, 70001}) {
    const auto few = [=](std::int64_t i) { return static_cast<double>(i * 7919 % 5); };  // many ties
    const auto equal = [](std::int64_t) { return -1.5; };
    const auto last_two = [=](std::int64_t i) { return i % columns >= columns - 2 ? 1.0 : -3.0; };
    check({3, columns}, 1, {}, few);
    check({3, columns}, 1, {}, equal);
    check({3, columns}, 1, {}, last_two);
    const std::int64_t rows = columns > 9000 ? 3 : 24;
    check({columns, rows}, 0, {}, few);
    check({columns, rows}, 0, {}, equal);
    check({3, columns}, 1, with_strides({2 * columns, 2}), few);
    check({3, columns}, 1, with_strides({-columns, -1}), few);
  }
}

TEST_P(CrossEntropyEdges, TheArgmaxIsThatOfTheLogitsEvenWhereASoftcapMakesThemEqual) {
  check_cross_entropy(
      {.dtype = DType::float32, .shape = {2, 900}, .options = {.softcap = 1.0}, .value = [](std::int64_t i) {
         return 1000.0 + static_cast<double>(i * 37 % 900);
       }});
}

TEST_P(CrossEntropyEdges, TheEntropyIsThatOfAUniformRowAndOfACertainOne) {
  for (const auto& [columns, size] : combine<std::int64_t, double>(kLengths, {0.0, -40.0, 1000.0})) {
    CrossEntropyRun uniform(
        {.dtype = DType::float32, .shape = {1, columns}, .value = [=](std::int64_t) { return size; }});
    uniform.run();
    const double exact = std::log(static_cast<double>(columns));
    EXPECT_NEAR(uniform.results.entropy.get(0), exact, 2e-6 * entropy_scale(exact, size + exact, size));
    CrossEntropyRun certain({.dtype = DType::float32,
                             .shape = {1, columns},
                             .value = [=](std::int64_t i) { return i == 1 ? size : -kInfinity; },
                             .target = [](std::int64_t) { return 1.0; }});
    certain.run();
    EXPECT_EQ(certain.results.entropy.get(0), 0.0);
    EXPECT_EQ(certain.results.loss.get(0), 0.0);
    EXPECT_EQ(certain.results.argmax.get(0), 1.0);
  }
}

const std::int64_t kOutOfRange[] = {-1, 40, 41, -99, -101, std::numeric_limits<std::int32_t>::min()};

/// Four rows; the target of the third one is not a class.
CrossEntropyCase with_bad_target(Device device, std::int64_t bad, std::int64_t columns = 40) {
  return {.device = device,
          .dtype = DType::float32,
          .shape = {4, columns},
          .options = {.reduction = Reduction::none, .label_smoothing = 0.1, .z_loss_weight = 0.1},
          .weight_dtype = DType::float32,
          .value = normal,
          .target = [=](std::int64_t row) { return row == 2 ? static_cast<double>(bad) : static_cast<double>(row); }};
}

void expect_named(const std::string& message, const char* op, std::int64_t bad) {
  EXPECT_EQ(message,
            std::string(op) + ": targets[2] is " + std::to_string(bad) + ", expected 0 to 39, or ignore_index -100");
}

/// Every call names the row and the value of a bad target, and writes nothing.
void expect_bad_targets_are_refused(Device device, std::int64_t bad, DType targets) {
  SCOPED_TRACE("target " + std::to_string(bad));
  CrossEntropyCase test_case = with_bad_target(device, bad);
  test_case.targets_dtype = targets;
  CrossEntropyRun run(test_case);
  const CrossEntropyRun untouched(test_case);
  expect_named(refusal_of([&] { cross_entropy_forward(run.forward_args()); }), "cross_entropy_forward", bad);
  expect_named(refusal_of([&] { cross_entropy_backward(run.backward_args()); }), "cross_entropy_backward", bad);
  expect_named(refusal_of([&] { cross_entropy_forward_backward(run.in_place_args()); }),
               "cross_entropy_forward_backward", bad);
  TestTensor statistics(device, DType::float32, {1, 4, kCrossEntropyStatistics});
  const std::vector<unsigned char> statistics_before = statistics.bytes();
  TensorView of_shard = statistics.view();
  of_shard.shape = {4, kCrossEntropyStatistics};
  of_shard.strides = {kCrossEntropyStatistics, 1};
  expect_named(refusal_of([&] {
                 cross_entropy_shard_forward({.logits = run.logits.view(),
                                              .targets = run.targets.view(),
                                              .class_axis = 1,
                                              .options = test_case.options,
                                              .classes = 40,
                                              .statistics = of_shard});
               }),
               "cross_entropy_shard_forward", bad);
  statistics.download();
  EXPECT_EQ(statistics.bytes(), statistics_before);
  expect_named(refusal_of([&] {
                 cross_entropy_merge({.statistics = statistics.view(),
                                      .targets = run.targets.view(),
                                      .options = test_case.options,
                                      .classes = 40,
                                      .loss = run.results.loss.view()});
               }),
               "cross_entropy_merge", bad);
  run.download();
  EXPECT_TRUE(run.results_equal(untouched)) << "something was written";
}

TEST(CrossEntropyTargetsOnCpu, OutOfRangeAreRefusedBeforeAnythingIsWritten) {
  for (const std::int64_t bad : kOutOfRange) {
    expect_bad_targets_are_refused(kCpu, bad, DType::int64);
    expect_bad_targets_are_refused(kCpu, bad, DType::int32);
  }
  // The lower 32 bits of this target are class 1.
  expect_bad_targets_are_refused(kCpu, (std::int64_t{1} << 32) + 1, DType::int64);
}

/// Targets with several axes or none, in any order in memory.
void expect_bad_targets_are_counted_by_their_axes(Device device) {
  const auto refusal = [&](const Dims& shape, int class_axis, const Placement& targets, const Placement& logits,
                           std::int64_t bad_row) {
    CrossEntropyRun run({.device = device,
                         .dtype = DType::float32,
                         .shape = shape,
                         .class_axis = class_axis,
                         .logits_placement = logits,
                         .targets_placement = targets,
                         .value = normal,
                         .target = [=](std::int64_t row) { return row == bad_row ? 9.0 : 0.0; }});
    return refusal_of([&] { cross_entropy_forward(run.forward_args()); });
  };
  const std::string is_bad = " is 9, expected 0 to 4, or ignore_index -100";
  const std::string message = "cross_entropy_forward: targets[1, 2]" + is_bad;
  EXPECT_EQ(refusal({3, 4, 5}, 2, {}, {}, 6), message);
  EXPECT_EQ(refusal({3, 5, 4}, 1, {}, {}, 6), message);
  EXPECT_EQ(refusal({5, 3, 4}, 0, {}, {}, 6), message);
  EXPECT_EQ(refusal({3, 4, 5}, 2, with_strides({1, 3}), {}, 6), message);
  EXPECT_EQ(refusal({3, 4, 5}, 2, with_strides({-8, 2}), {}, 6), message);
  EXPECT_EQ(refusal({3, 4, 5}, 2, {}, with_strides({1, 3, 12}), 6), message);
  EXPECT_EQ(refusal({5}, 0, {}, {}, 0), "cross_entropy_forward: targets" + is_bad);
}

TEST(CrossEntropyTargetsOnCpu, OutOfRangeAreCountedByTheirAxes) { expect_bad_targets_are_counted_by_their_axes(kCpu); }

TEST(CrossEntropyTargetsOnCpu, AnIgnoreIndexOutOfRangeIsNotOutOfRange) {
  CrossEntropyCase test_case = with_bad_target(kCpu, 77);
  test_case.options.ignore_index = 77;
  check_cross_entropy(test_case);
}

class CrossEntropyTargetsOnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (runtime::gpu_count() == 0) GTEST_SKIP() << "no GPU: " << system_info().cuda_missing;
    unsetenv("EAVES_CHECK_TARGETS");
  }
  void TearDown() override { unsetenv("EAVES_CHECK_TARGETS"); }
};

TEST_F(CrossEntropyTargetsOnGpu, OutOfRangeMakeTheirRowNaNAndNoOther) {
  for (const std::int64_t columns : {std::int64_t{40}, std::int64_t{1000}, std::int64_t{9000}, std::int64_t{100003}}) {
    for (const std::int64_t bad : {std::int64_t{-1}, columns, columns + 1, std::int64_t{-2000000011},
                                   std::int64_t{2000000011}, (std::int64_t{1} << 32) + 1}) {
      for (const bool is_transposed : {false, true}) {
        SCOPED_TRACE("target " + std::to_string(bad) + " of " + std::to_string(columns));
        CrossEntropyCase test_case = with_bad_target(kCuda, bad, columns);
        CrossEntropyCase good_case = with_bad_target(kCuda, 0, columns);
        if (is_transposed) {
          for (CrossEntropyCase* c : {&test_case, &good_case}) {
            c->shape = {columns, 4};
            c->class_axis = 0;
          }
        }
        CrossEntropyRun run(test_case), good(good_case);
        run.run();
        good.run();
        for (std::int64_t row = 0; row < 4; ++row) {
          for (const auto& [results, expected, gradient, good_gradient] :
               {std::tuple(&run.results, &good.results, &run.grad_logits, &good.grad_logits),
                std::tuple(&run.results_in_place, &good.results_in_place, &run.in_place, &good.in_place)}) {
            if (row == 2) {
              EXPECT_TRUE(std::isnan(results->loss.get(row)));
            } else {
              EXPECT_EQ(results->loss.get(row), expected->loss.get(row));
            }
            for (std::int64_t v = 0; v < columns; ++v) {
              const std::int64_t element = is_transposed ? 4 * v + row : row * columns + v;
              if (row == 2) {
                ASSERT_TRUE(std::isnan(gradient->get(element))) << "class " << v;
              } else {
                ASSERT_EQ(gradient->get(element), good_gradient->get(element)) << "row " << row << ", class " << v;
              }
            }
          }
        }
        for (auto& [name, tensor] : run.outputs()) EXPECT_EQ(tensor->canary_damage(), "") << "around " << name;
      }
    }
  }
}

TEST_F(CrossEntropyTargetsOnGpu, OutOfRangeMakeAReducedLossNaN) {
  for (const Reduction reduction : {Reduction::sum, Reduction::mean}) {
    CrossEntropyCase test_case = with_bad_target(kCuda, 40);
    test_case.options.reduction = reduction;
    CrossEntropyRun run(test_case);
    run.run();
    EXPECT_TRUE(std::isnan(run.results.loss.get(0)));
    EXPECT_TRUE(std::isnan(run.results_in_place.loss.get(0)));
    for (std::int64_t v = 0; v < 40; ++v) ASSERT_TRUE(std::isnan(run.grad_logits.get(2 * 40 + v)));
  }
}

TEST_F(CrossEntropyTargetsOnGpu, WithTheCheckOutOfRangeAreRefusedAsOnTheCpu) {
  setenv("EAVES_CHECK_TARGETS", "1", 1);
  for (const std::int64_t bad : kOutOfRange) {
    expect_bad_targets_are_refused(kCuda, bad, DType::int64);
    expect_bad_targets_are_refused(kCuda, bad, DType::int32);
    CrossEntropyRun cpu(with_bad_target(kCpu, bad)), gpu(with_bad_target(kCuda, bad));
    const std::string on_cpu = refusal_of([&] { cross_entropy_forward(cpu.forward_args()); });
    EXPECT_EQ(refusal_of([&] { cross_entropy_forward(gpu.forward_args()); }), on_cpu);
  }
  check_cross_entropy(with_bad_target(kCuda, -100));  // ignored: nothing to refuse
}

TEST_F(CrossEntropyTargetsOnGpu, WithTheCheckOutOfRangeAreCountedByTheirAxes) {
  setenv("EAVES_CHECK_TARGETS", "1", 1);
  expect_bad_targets_are_counted_by_their_axes(kCuda);
}

TEST_F(CrossEntropyTargetsOnGpu, TheCheckIsOffWhereTheVariableIsEmptyOrZero) {
  for (const char* value : {"", "0"}) {
    setenv("EAVES_CHECK_TARGETS", value, 1);
    CrossEntropyRun run(with_bad_target(kCuda, 40));
    EXPECT_EQ(refusal_of([&] { cross_entropy_forward(run.forward_args()); }), "");
  }
}

}  // namespace
}  // namespace eaves::testing
