// The edge cases in linear_cross_entropy.h: no rows, ignored rows, sizes of one, infinities and NaN, huge logits,
// targets out of range.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "eaves/linear_cross_entropy.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_test_case.h"
#include "runtime/runtime.h"
#include "testing/cases.h"
#include "testing/devices.h"
#include "testing/memory.h"
#include "testing/refusals.h"

namespace eaves::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kIgnored = -100.0;

class LinearCrossEntropyEdges : public OnEachDevice {};
EAVES_EACH_DEVICE(LinearCrossEntropyEdges);

const std::vector<Reduction> kReductions = {Reduction::none, Reduction::sum, Reduction::mean};

double normal(std::int64_t i) { return random_normal(61, static_cast<std::uint64_t>(i)); }

LinearCrossEntropyCase make_case(DType dtype, const Dims& row_shape) {
  return {.dtype = dtype, .row_shape = row_shape, .bias_dtype = dtype};
}

TEST_P(LinearCrossEntropyEdges, SizesThatAreNoMultipleOfAnything) {
  for (const auto& [dtype, rows, features, classes] : combine<DType, std::int64_t, std::int64_t, std::int64_t>(
           floating_point_dtypes(), {1, 2, 7}, {1, 3, 7, 9}, {1, 2, 7, 33})) {
    for (const auto& [targets, limit] :
         combine<DType, std::size_t>({DType::int64, accumulator_dtype(dtype)}, {0, 4000})) {
      LinearCrossEntropyCase test_case = make_case(dtype, {rows});
      test_case.features = features;
      test_case.classes = classes;
      test_case.targets_dtype = targets;
      test_case.workspace_limit = limit;
      test_case.options.label_smoothing = 0.1;
      check_linear_cross_entropy(test_case);
      // Column-major: an axis of size 1 then has a stride that must not be used.
      test_case.head_placement = with_strides({1, classes});
      check_linear_cross_entropy(test_case);
    }
  }
}

TEST_P(LinearCrossEntropyEdges, AVocabularyOfAModelMatchesTheOracle) {
  for (const DType dtype : {DType::bfloat16, DType::float32}) {
    LinearCrossEntropyCase test_case = make_case(dtype, {5});
    test_case.features = 3;
    test_case.classes = 50257;  // GPT-2's vocabulary: odd
    check_linear_cross_entropy(test_case);
    test_case.workspace_limit = std::size_t{3} << 20;  // blocks of classes
    check_linear_cross_entropy(test_case);
  }
}

TEST_P(LinearCrossEntropyEdges, WithoutRowsAReducedLossAndItsGradientsAreZero) {
  for (const auto& [reduction, row_shape, targets, accumulates, has_normalizer] :
       combine<Reduction, Dims, DType, bool, bool>(kReductions, {Dims{0}, Dims{3, 0}, Dims{0, 2}},
                                                   {DType::int64, DType::float32}, {false, true}, {false, true})) {
    LinearCrossEntropyCase test_case = make_case(DType::float32, row_shape);
    test_case.options = {.reduction = reduction, .z_loss_weight = 0.1};
    test_case.targets_dtype = targets;
    test_case.class_weight_dtype = DType::float32;
    test_case.has_normalizer = has_normalizer;
    test_case.accumulates = accumulates;
    check_linear_cross_entropy(test_case);
    test_case.workspace_limit = 1;  // less than the bytes of a call without rows
    check_linear_cross_entropy(test_case);
  }
}

TEST_P(LinearCrossEntropyEdges, TheGradientOfABiasIsASumOfManyRows) {
  constexpr std::int64_t kRows = 65536;
  const Memory hidden(device(), kRows * 4);
  const Memory head(device(), 8);
  const Memory bias(device(), 8);
  const Memory targets(device(), kRows * 8);
  const Memory loss(device(), 4);
  const Memory grad_bias(device(), 8);
  hidden.write(std::vector<float>(kRows, 0.0f));
  head.write(std::vector<float>{0.0f, 0.0f});
  bias.write(std::vector<float>{0.0f, 1.0f});
  targets.write(std::vector<std::int64_t>(kRows, 0));
  linear_cross_entropy_forward_backward({.forward = {.inputs = {.hidden = hidden.view(DType::float32, {kRows, 1}),
                                                                .head = head.view(DType::float32, {2, 1}),
                                                                .bias = bias.view(DType::float32, {2}),
                                                                .targets = targets.view(DType::int64, {kRows})},
                                                     .outputs = {.loss = loss.view(DType::float32, {})}},
                                         .gradients = {.grad_bias = grad_bias.view(DType::float32, {2})}});
  runtime::synchronize(device());
  const double p = 1.0 / (1.0 + std::exp(1.0));  // the probability of class 0
  const std::vector<float> found = grad_bias.read<float>(2);
  EXPECT_NEAR(found[0], p - 1.0, 2e-6 * (1.0 - p));
  EXPECT_NEAR(found[1], 1.0 - p, 2e-6 * (1.0 - p));
}

TEST_P(LinearCrossEntropyEdges, WhereAllRowsAreIgnoredTheMeanIsZeroAndSoAreTheGradients) {
  for (const auto& [reduction, dtype, skips, accumulates, limit] : combine<Reduction, DType, bool, bool, std::size_t>(
           kReductions, floating_point_dtypes(), {false, true}, {false, true}, {0, 4000})) {
    LinearCrossEntropyCase test_case = make_case(dtype, {13});
    test_case.options = {.reduction = reduction, .z_loss_weight = 0.1};
    test_case.class_weight_dtype = dtype;
    test_case.has_normalizer = skips;
    test_case.skips_ignored = skips;
    test_case.accumulates = accumulates;
    test_case.workspace_limit = limit;
    test_case.target = [](std::int64_t) { return kIgnored; };
    check_linear_cross_entropy(test_case);
  }
}

TEST_P(LinearCrossEntropyEdges, RowsWhoseWeightsAddUpToZeroHaveAMeanOfZeroAndNoGradient) {
  LinearCrossEntropyCase test_case = make_case(DType::float32, {5});
  test_case.options.z_loss_weight = 0.1;
  test_case.class_weight_dtype = DType::float32;
  test_case.target = [](std::int64_t) { return 1.0; };
  test_case.class_weight = [](std::int64_t v) { return v == 1 ? 0.0 : 2.0; };
  check_linear_cross_entropy(test_case);
}

TEST_P(LinearCrossEntropyEdges, IgnoredRowsThatAreSkippedChangeNothingWhateverTheyHold) {
  for (const auto& [held, dtype, reduction, limit] : combine<double, DType, Reduction, std::size_t>(
           {kNaN, kInfinity, 1e30}, {DType::bfloat16, DType::float32, DType::float64}, kReductions, {0, 4000})) {
    LinearCrossEntropyCase test_case = make_case(dtype, {13});
    test_case.options = {.reduction = reduction, .z_loss_weight = 0.1};
    test_case.skips_ignored = true;
    test_case.workspace_limit = limit;
    test_case.has_grad_lse = test_case.has_grad_entropy = true;
    test_case.target = [](std::int64_t row) { return row % 3 == 1 ? kIgnored : 1.0; };
    test_case.hidden = [=](std::int64_t i) { return i / 16 % 3 == 1 ? held : normal(i); };
    check_linear_cross_entropy(test_case);
  }
}

TEST_P(LinearCrossEntropyEdges, RowsOfWeightZeroThatAreSkippedChangeNothingWhateverTheyHold) {
  for (const auto& [held, dtype] :
       combine<double, DType>({kNaN, kInfinity, 1e30}, {DType::bfloat16, DType::float32, DType::float64})) {
    for (const auto& [targets, reduction, limit] :
         combine<DType, Reduction, std::size_t>({DType::int32, accumulator_dtype(dtype)}, kReductions, {0, 4000})) {
      LinearCrossEntropyCase test_case = make_case(dtype, {13});
      test_case.options = {.reduction = reduction, .z_loss_weight = 0.1};
      test_case.targets_dtype = targets;
      test_case.skips_ignored = true;
      test_case.workspace_limit = limit;
      test_case.has_grad_lse = test_case.has_grad_entropy = true;
      test_case.has_row_weight = true;
      test_case.row_weight = [](std::int64_t row) { return row % 3 == 1 ? -0.0 : 0.5 + row; };
      test_case.hidden = [=](std::int64_t i) { return i / 16 % 3 == 1 ? held : normal(i); };
      check_linear_cross_entropy(test_case);
    }
  }
}

/// The rows of hidden lie in an order of their own. The rows of weight 0 have to be found all the same, with soft
/// targets too.
TEST_P(LinearCrossEntropyEdges, RowsOfWeightZeroAreFoundWhereverTheyLie) {
  for (const auto& [skips, targets, limit] :
       combine<bool, DType, std::size_t>({false, true}, {DType::int64, DType::float32}, {0, 4000})) {
    LinearCrossEntropyCase test_case = make_case(DType::float32, {5, 7});
    test_case.hidden_placement = with_strides({16, 5 * 16, 1});
    test_case.options.label_smoothing = 0.1;
    test_case.targets_dtype = targets;
    test_case.skips_ignored = skips;
    test_case.workspace_limit = limit;
    test_case.has_row_weight = true;
    test_case.has_grad_lse = test_case.has_grad_entropy = true;
    check_linear_cross_entropy(test_case);
  }
}

TEST_P(LinearCrossEntropyEdges, AnUpstreamGradientThatIsNotFiniteDoesNotReachRowsThatDoNotCount) {
  for (const auto& [upstream, dtype, reduction, skips] : combine<double, DType, Reduction, bool>(
           {kInfinity, kNaN}, floating_point_dtypes(), kReductions, {false, true})) {
    LinearCrossEntropyCase test_case = make_case(dtype, {13});
    test_case.options.reduction = reduction;
    test_case.skips_ignored = skips;
    test_case.has_row_weight = true;
    test_case.target = [](std::int64_t row) { return row % 3 == 1 ? kIgnored : 1.0; };
    test_case.row_weight = [](std::int64_t row) { return row % 4 == 1 ? 0.0 : 1.0; };
    LinearCrossEntropyRun run(test_case);
    run.grad_loss.fill([=](std::int64_t) { return upstream; });
    run.run();
    for (const LinearCrossEntropyGradientTensors* of : {&run.gradients, &run.gradients_at_once}) {
      for (std::int64_t i = 0; i < 13 * 16; ++i) {
        const std::int64_t row = i / 16;
        if (row % 3 == 1 || row % 4 == 1) {
          ASSERT_EQ(of->hidden.get(i), 0.0) << "row " << row;
        } else {
          ASSERT_FALSE(std::isfinite(of->hidden.get(i))) << "row " << row;
        }
      }
      for (std::int64_t i = 0; i < 24 * 16; ++i) ASSERT_FALSE(std::isfinite(of->head.get(i)));
    }
  }
}

TEST_P(LinearCrossEntropyEdges, AFactorThatIsNotFiniteLeavesTheZerosOfAGradient) {
  for (const auto& [factor, dtype] : combine<double, DType>({kInfinity, kNaN}, floating_point_dtypes())) {
    TestTensor gradient(device(), dtype, {3, 37});
    gradient.fill([](std::int64_t i) { return i % 2 == 0 ? 0.0 : 1.0; });
    TestTensor grad_loss(device(), accumulator_dtype(dtype), {});
    grad_loss.fill([=](std::int64_t) { return factor; });
    linear_cross_entropy_rescale({.gradients = {.grad_hidden = gradient.view()}, .grad_loss = grad_loss.view()});
    runtime::synchronize(device());
    gradient.download();
    for (std::int64_t i = 0; i < 3 * 37; ++i) {
      if (i % 2 == 0) {
        ASSERT_EQ(gradient.get(i), 0.0);
      } else {
        ASSERT_FALSE(std::isfinite(gradient.get(i)));
      }
    }
  }
}

TEST_P(LinearCrossEntropyEdges, AnInfiniteClassWeightMakesAMeanAndItsGradientsNaN) {
  LinearCrossEntropyCase test_case = make_case(DType::float32, {5});
  test_case.class_weight_dtype = DType::float32;
  test_case.class_weight = [](std::int64_t v) { return v == 1 ? kInfinity : 2.0; };
  test_case.target = [](std::int64_t row) { return static_cast<double>(row); };
  LinearCrossEntropyRun run(test_case);
  run.run();
  EXPECT_TRUE(std::isnan(run.results.loss.get(0)));
  EXPECT_TRUE(std::isnan(run.results_at_once.loss.get(0)));
  for (std::int64_t i = 0; i < 5 * 16; ++i) {
    ASSERT_TRUE(std::isnan(run.gradients.hidden.get(i)));
    ASSERT_TRUE(std::isnan(run.gradients_at_once.hidden.get(i)));
  }
}

TEST(LinearCrossEntropyNormalizerOnCpu, ANegativeNormalizerIsRefusedBeforeAnythingIsWritten) {
  LinearCrossEntropyCase test_case = make_case(DType::float32, {5});
  test_case.has_normalizer = true;
  LinearCrossEntropyRun run(test_case);
  run.normalizer.fill([](std::int64_t) { return -2.0; });
  expect_message([&] { linear_cross_entropy_forward_backward(run.at_once_args()); },
                 "linear_cross_entropy_forward_backward: normalizer is -2, expected a number that is not negative");
}

TEST_P(LinearCrossEntropyEdges, EveryNumberOfRowsThatCountMatchesTheOracle) {
  constexpr std::int64_t kRows = 1100;
  // Two chunks or more.
  for (const auto& [dtype, reduction, limit, count] : combine<DType, Reduction, std::size_t, std::int64_t>(
           {DType::bfloat16, DType::float16}, {Reduction::mean, Reduction::none}, {0, 300000},
           {0, 1, 128, 129, 640, 641, 1099, 1100})) {
    LinearCrossEntropyCase test_case = make_case(dtype, {kRows});
    test_case.skips_ignored = true;
    test_case.workspace_limit = limit;
    test_case.options = {.reduction = reduction, .z_loss_weight = 0.1};
    test_case.accumulates = test_case.has_grad_lse = test_case.has_grad_entropy = reduction == Reduction::none;
    test_case.target = [=](std::int64_t row) {
      return row * 37 % kRows < count ? static_cast<double>(row % 24) : kIgnored;
    };
    check_linear_cross_entropy(test_case);
  }
}

TEST_P(LinearCrossEntropyEdges, WhatIsNotFiniteInHiddenReachesItsRowAndTheParameters) {
  // The oracle says which results are not finite: the loss and the gradient of the row, and the elements of grad_head
  // and grad_bias that sum over it. The other rows keep their results.
  for (const auto& [held, dtype, limit] :
       combine<double, DType, std::size_t>({kNaN, kInfinity, -kInfinity}, floating_point_dtypes(), {0, 4000})) {
    LinearCrossEntropyCase test_case = make_case(dtype, {13});
    test_case.options.reduction = Reduction::none;
    test_case.workspace_limit = limit;
    test_case.hidden = [=](std::int64_t i) { return i == 5 * 16 + 3 ? held : normal(i); };
    test_case.target = [](std::int64_t row) { return static_cast<double>(row); };
    LinearCrossEntropyRun run(test_case);
    run.run();
    for (const CrossEntropyResults* results : {&run.results, &run.results_at_once}) {
      for (std::int64_t row = 0; row < 13; ++row) {
        EXPECT_EQ(std::isfinite(results->loss.get(row)), row != 5) << "loss of row " << row << ", " << held;
        EXPECT_EQ(std::isfinite(results->lse.get(row)), row != 5) << "lse of row " << row << ", " << held;
      }
    }
    for (const LinearCrossEntropyGradientTensors* of : {&run.gradients, &run.gradients_at_once}) {
      for (std::int64_t i = 0; i < 13 * 16; ++i) {
        EXPECT_EQ(std::isfinite(of->hidden.get(i)), i / 16 != 5) << "grad_hidden, element " << i << ", " << held;
      }
    }
    LinearCrossEntropyComparison comparison(run);
    EXPECT_EQ(comparison.compare_gradients(), "");
  }
}

TEST_P(LinearCrossEntropyEdges, ANaNInTheHeadReachesEveryRow) {
  for (const DType dtype : floating_point_dtypes()) {
    LinearCrossEntropyCase test_case = make_case(dtype, {6});
    test_case.options.reduction = Reduction::none;
    test_case.head = [](std::int64_t i) { return i == 7 * 16 + 3 ? kNaN : normal(i); };
    test_case.target = [](std::int64_t row) { return row == 2 ? kIgnored : static_cast<double>(row); };
    test_case.skips_ignored = true;
    LinearCrossEntropyRun run(test_case);
    run.run();
    for (std::int64_t row = 0; row < 6; ++row) {
      EXPECT_EQ(std::isnan(run.results.loss.get(row)), row != 2);
      EXPECT_EQ(std::isnan(run.results_at_once.loss.get(row)), row != 2);
      EXPECT_EQ(std::isnan(run.gradients.hidden.get(row * 16)), row != 2);
      EXPECT_EQ(std::isnan(run.gradients_at_once.hidden.get(row * 16)), row != 2);
    }
  }
}

TEST_P(LinearCrossEntropyEdges, ABiasOfMinusInfinityMasksAClass) {
  for (const DType dtype : floating_point_dtypes()) {
    LinearCrossEntropyCase test_case = make_case(dtype, {6});
    test_case.options.reduction = Reduction::none;
    test_case.target = [](std::int64_t row) { return static_cast<double>(row); };
    LinearCrossEntropyRun run(test_case);
    run.bias.fill([](std::int64_t v) { return v % 3 == 2 && v > 6 ? -kInfinity : normal(v); });
    run.run();
    LinearCrossEntropyComparison comparison(run);
    EXPECT_EQ(comparison.compare(), "");
    EXPECT_EQ(run.gradients.bias.get(8), 0.0);
    EXPECT_EQ(run.gradients_at_once.bias.get(8), 0.0);
  }
}

TEST_P(LinearCrossEntropyEdges, HugeLogitsMatchTheOracle) {
  for (const auto& [dtype, deviation] : combine<DType, double>(floating_point_dtypes(), {3000.0, 30000.0})) {
    LinearCrossEntropyCase test_case = make_case(dtype, {13});
    test_case.deviation = deviation;
    check_linear_cross_entropy(test_case);
    test_case.workspace_limit = 4000;
    test_case.options.softcap = 30.0;
    check_linear_cross_entropy(test_case);
  }
}

TEST_P(LinearCrossEntropyEdges, OnTheCpuTheLossOfALearnedClassIsKeptHoweverManyRows) {
  if (device().type == DeviceType::cuda) GTEST_SKIP() << "a GPU sums in float32";
  constexpr std::int64_t kFeatures = 8;
  LinearCrossEntropyCase c{.dtype = DType::float32, .row_shape = {300}, .features = kFeatures};
  c.classes = 32768;
  c.options.reduction = Reduction::none;
  c.hidden = [](std::int64_t i) { return i % kFeatures == 0 ? 30.0 : 0.0; };
  c.head = [](std::int64_t i) { return i == 5 * kFeatures ? 1.0 : 0.0; };
  c.target = [](std::int64_t) { return 5.0; };
  LinearCrossEntropyRun run(c);
  run.run();
  const double expected = std::log1p(32767.0 * std::exp(-30.0));  // 3e-9, which a float32 sum loses
  const double bound = 4e-6 * expected;  // exp(-30) is 2^-43.3; float32 rounds that exponent by up to 2^-19
  for (const std::int64_t row : {0, 150, 299}) {
    EXPECT_NEAR(run.results.loss.get(row), expected, bound);
    EXPECT_NEAR(run.results_at_once.loss.get(row), expected, bound);
  }
}

TEST_P(LinearCrossEntropyEdges, OfEqualLogitsTheFirstIsTheLargest) {
  LinearCrossEntropyCase test_case = make_case(DType::float32, {6});
  test_case.classes = 300;
  test_case.bias_dtype = {};
  test_case.hidden = [](std::int64_t) { return 1.0; };
  test_case.head = [](std::int64_t i) { return i / 16 % 100 == 37 ? 2.0 : 1.0; };  // whole numbers, so sums are exact
  LinearCrossEntropyRun run(test_case);
  run.run();
  EXPECT_EQ(run.results.argmax.get(0), 37.0);
  EXPECT_EQ(run.results_at_once.argmax.get(5), 37.0);
}

class LinearCrossEntropyTargets : public LinearCrossEntropyEdges {
 protected:
  /// Two targets out of range: 24 and -1, in rows [1, 2] and [3, 0] of [4, 3].
  LinearCrossEntropyCase bad_case() {
    LinearCrossEntropyCase test_case = make_case(DType::float32, {4, 3});
    test_case.options.reduction = Reduction::none;
    test_case.target = [](std::int64_t row) { return row == 5 ? 24.0 : row == 9 ? -1.0 : 2.0; };
    return test_case;
  }

  static void expect_all_refused(LinearCrossEntropyRun& run) {
    const std::string what = ": targets[1, 2] is 24, expected 0 to 23, or ignore_index -100";
    expect_message([&] { linear_cross_entropy_forward(run.forward_args()); }, "linear_cross_entropy_forward" + what);
    expect_message([&] { linear_cross_entropy_backward(run.backward_args()); }, "linear_cross_entropy_backward" + what);
    expect_message([&] { linear_cross_entropy_forward_backward(run.at_once_args()); },
                   "linear_cross_entropy_forward_backward" + what);
  }
};
EAVES_EACH_DEVICE(LinearCrossEntropyTargets);

TEST_P(LinearCrossEntropyTargets, OutOfRangeAreRefusedBeforeAnythingIsWrittenWhereTheyAreLookedAt) {
  const bool is_gpu = device().type == DeviceType::cuda;
  if (is_gpu) setenv("EAVES_CHECK_TARGETS", "1", 1);
  LinearCrossEntropyRun run(bad_case()), untouched(bad_case());
  expect_all_refused(run);
  if (is_gpu) unsetenv("EAVES_CHECK_TARGETS");
  run.download();
  EXPECT_TRUE(run.results_equal(untouched));
}

TEST_P(LinearCrossEntropyTargets, OutOfRangeMakeTheirRowsNaNOnAGpu) {
  if (device().type == DeviceType::cpu) GTEST_SKIP() << "the CPU refuses this call";
  LinearCrossEntropyRun run(bad_case());
  run.run();
  for (std::int64_t row = 0; row < 12; ++row) {
    const bool is_bad = row == 5 || row == 9;
    EXPECT_EQ(std::isnan(run.results.loss.get(row)), is_bad) << "row " << row;
    EXPECT_EQ(std::isnan(run.results_at_once.loss.get(row)), is_bad) << "row " << row;
    EXPECT_EQ(std::isnan(run.gradients.hidden.get(row * 16)), is_bad) << "row " << row;
    EXPECT_EQ(std::isnan(run.gradients_at_once.hidden.get(row * 16)), is_bad) << "row " << row;
  }
}

}  // namespace
}  // namespace eaves::testing
