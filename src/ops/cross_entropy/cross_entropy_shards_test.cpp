// A vocabulary in shards: the statistics of each shard, their merging, and the backward of each shard with the global
// lse, against the oracle of the whole vocabulary.
#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

#include "eaves/cross_entropy.h"
#include "ops/cross_entropy/cross_entropy_test_case.h"
#include "testing/cases.h"
#include "testing/devices.h"
#include "testing/refusals.h"

namespace eaves::testing {
namespace {

class CrossEntropyShards : public OnEachDevice {};
EAVES_EACH_DEVICE(CrossEntropyShards);

double normal(std::int64_t i) { return 3.0 * random_normal(37, static_cast<std::uint64_t>(i)); }

void check_shards(CrossEntropyCase test_case, const std::vector<std::int64_t>& sizes) {
  test_case.runs_in_place = false;
  SCOPED_TRACE(description_of(test_case) + ", " + std::to_string(sizes.size()) + " shards");
  EXPECT_EQ(compare_cross_entropy_in_shards(test_case, sizes).failure, "");
}

/// Uneven ways to cut `classes`.
std::vector<std::vector<std::int64_t>> cuts_of(std::int64_t classes) {
  return {{classes},
          {classes / 3, classes - classes / 3},
          {1, classes / 2, classes - classes / 2 - 1},
          {5, 1, classes / 4, 0, 2, classes / 2, 3, classes - classes / 4 - classes / 2 - 11}};
}

TEST_P(CrossEntropyShards, TheirMergeIsTheWhole) {
  for (const auto& [dtype, classes] : combine<DType, std::int64_t>(floating_point_dtypes(), {48, 1000, 9001})) {
    for (const auto& [sizes, targets] :
         combine<std::vector<std::int64_t>, DType>(cuts_of(classes), {DType::int32, DType::int64})) {
      CrossEntropyCase test_case{.dtype = dtype, .shape = {11, classes}, .targets_dtype = targets, .value = normal};
      check_shards(test_case, sizes);
      test_case.skips_ignored = true;
      check_shards(test_case, sizes);
    }
  }
}

TEST_P(CrossEntropyShards, TheirMergeIsTheWholeWithEveryOption) {
  for (const auto& [dtype, classes] :
       combine<DType, std::int64_t>({DType::bfloat16, DType::float32, DType::float64}, {48, 3000})) {
    for (const auto& [sizes, reduction, has_weight, smoothing] :
         combine<std::vector<std::int64_t>, Reduction, bool, double>(
             cuts_of(classes), {Reduction::none, Reduction::sum, Reduction::mean}, {false, true}, {0.0, 0.1, 1.0})) {
      CrossEntropyCase test_case{.dtype = dtype,
                                 .shape = {6, classes},
                                 .options = {.reduction = reduction,
                                             .label_smoothing = smoothing,
                                             .scale = 0.5,
                                             .softcap = 15.0,
                                             .z_loss_weight = 0.01},
                                 .has_row_weight = reduction != Reduction::sum,
                                 .has_normalizer = has_weight,
                                 .has_grad_lse = true,
                                 .has_grad_entropy = true,
                                 .wants_mean_logit = true,
                                 .value = normal};
      if (has_weight) test_case.weight_dtype = dtype;
      check_shards(test_case, sizes);
    }
  }
}

TEST_P(CrossEntropyShards, TakeSoftTargets) {
  for (const auto& [dtype, axis, sizes, reduction, smoothing] :
       combine<DType, int, std::vector<std::int64_t>, Reduction, double>(
           floating_point_dtypes(), {-1, 0}, cuts_of(48), {Reduction::none, Reduction::sum, Reduction::mean},
           {0.0, 0.1})) {
    CrossEntropyCase test_case{.dtype = dtype,
                               .shape = {48, 48},
                               .class_axis = axis,
                               .options = {.reduction = reduction, .label_smoothing = smoothing},
                               .targets_dtype = accumulator_dtype(dtype),
                               .value = normal};
    check_shards(test_case, sizes);
    test_case.options.softcap = 15.0;
    test_case.options.z_loss_weight = 0.01;
    test_case.targets_dtype = dtype;
    test_case.weight_dtype = dtype;
    test_case.has_row_weight = reduction != Reduction::sum;
    test_case.has_grad_lse = test_case.has_grad_entropy = true;
    check_shards(test_case, sizes);
  }
}

TEST_P(CrossEntropyShards, TheMergeTakesEitherTargetsOrThatTheyWereSoft) {
  TestTensor statistics(device(), DType::float32, {2, 3, kCrossEntropyStatistics});
  TestTensor targets(device(), DType::int64, {3});
  TestTensor loss(device(), DType::float32, {});
  EXPECT_EQ(refusal_of([&] {
              cross_entropy_merge({.statistics = statistics.view(),
                                   .targets = targets.view(),
                                   .classes = 8,
                                   .has_soft_targets = true,
                                   .loss = loss.view()});
            }),
            "cross_entropy_merge: targets is given beside has_soft_targets, expected one of them");
}

TEST_P(CrossEntropyShards, EveryClassAxisCanBeCut) {
  for (const int axis : {0, 1, 2, -1}) {
    CrossEntropyCase test_case{.dtype = DType::bfloat16,
                               .shape = {48, 50, 52},
                               .class_axis = axis,
                               .options = {.label_smoothing = 0.1},
                               .weight_dtype = DType::float32,
                               .value = normal};
    const std::int64_t classes = test_case.shape[axis < 0 ? axis + 3 : axis];
    for (const std::vector<std::int64_t>& sizes : cuts_of(classes)) check_shards(test_case, sizes);
  }
}

TEST_P(CrossEntropyShards, FewLongRowsAreCutTwice) {
  for (const std::vector<std::int64_t>& sizes : cuts_of(400003)) {
    check_shards({.dtype = DType::bfloat16, .shape = {2, 400003}, .options = {.label_smoothing = 0.1}, .value = normal},
                 sizes);
  }
}

TEST_P(CrossEntropyShards, AShardMayHoldNothingButMinusInfinityAndALargestLogitMayBeTwice) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const std::vector<std::int64_t>& sizes : cuts_of(1000)) {
    CrossEntropyCase test_case{.dtype = DType::float32,
                               .shape = {4, 1000},
                               .value =
                                   [=](std::int64_t i) {
                                     if (i % 1000 < 400) return -kInfinity;
                                     return static_cast<double>(i % 3);  // the largest one in every shard
                                   },
                               .target = [](std::int64_t row) { return 500.0 + static_cast<double>(row); }};
    check_shards(test_case, sizes);
    // Logits far apart: the sums of all shards but one vanish.
    test_case.value = [](std::int64_t i) { return static_cast<double>(i % 1000) * 3.0; };
    check_shards(test_case, sizes);
  }
}

TEST_P(CrossEntropyShards, TheStatisticsAreWhatTheHeaderNames) {
  constexpr std::int64_t kRows = 3;
  constexpr std::int64_t kClasses = 600;
  constexpr std::int64_t kFirst = 200;
  constexpr std::int64_t kSize = 250;
  for (const DType dtype : {DType::float32, DType::float64}) {
    CrossEntropyRun run({.dtype = dtype,
                         .shape = {kRows, kClasses},
                         .options = {.label_smoothing = 0.1, .scale = 0.5},
                         .weight_dtype = dtype,
                         .value = normal,
                         .target = [](std::int64_t row) { return row == 0   ? 199.0
                                                                 : row == 1 ? 200.0
                                                                            : 449.0; }});
    const CrossEntropyForwardArgs whole = run.forward_args();
    TestTensor statistics(device(), dtype, {kRows, kCrossEntropyStatistics});
    cross_entropy_shard_forward({.logits = part_of(whole.logits, 1, kFirst, kSize),
                                 .targets = whole.targets,
                                 .class_weight = part_of(whole.class_weight, 0, kFirst, kSize),
                                 .class_axis = 1,
                                 .options = whole.options,
                                 .first_class = kFirst,
                                 .classes = kClasses,
                                 .statistics = statistics.view()});
    statistics.download();
    for (std::int64_t row = 0; row < kRows; ++row) {
      SCOPED_TRACE("row " + std::to_string(row));
      double max = -std::numeric_limits<double>::infinity();
      double best = kFirst;
      for (std::int64_t v = kFirst; v < kFirst + kSize; ++v) {
        const double z = 0.5 * run.logits.get(row * kClasses + v);
        if (z > max) best = static_cast<double>(v);
        max = std::fmax(max, z);
      }
      double sum = 0.0, linear = 0.0, absolute = 0.0, mass = 0.0, moment = 0.0, square = 0.0;
      for (std::int64_t v = kFirst; v < kFirst + kSize; ++v) {
        const double z = 0.5 * run.logits.get(row * kClasses + v);
        const double w = run.weight.get(v);
        sum += std::exp(z - max);
        linear += w * z;
        absolute += w * std::abs(z);
        mass += w;
        moment += std::exp(z - max) * (z - max);
        square += std::exp(2.0 * (z - max));
      }
      const double target = run.targets.get(row);
      const bool is_here = target >= kFirst && target < kFirst + kSize;
      const double target_logit =
          is_here ? 0.5 * run.logits.get(row * kClasses + static_cast<std::int64_t>(target)) : 0.0;
      const double target_weight = is_here ? run.weight.get(static_cast<std::int64_t>(target)) : 0.0;
      const std::pair<double, double> expected[] = {{max, std::abs(max)},
                                                    {sum, sum * std::max(1.0, std::abs(max))},
                                                    {target_logit, std::abs(target_logit)},
                                                    {target_weight, target_weight},
                                                    {linear, absolute},
                                                    {mass, mass},
                                                    {moment, std::abs(moment) * std::max(1.0, std::abs(max))},
                                                    {2.0 * max, std::abs(max)},
                                                    {best, 0.0},
                                                    {square, square * std::max(1.0, std::abs(max))}};
      for (int i = 0; i < kCrossEntropyStatistics; ++i) {
        const auto [exact, scale] = expected[i];
        EXPECT_EQ(difference(dtype, statistics.get(row * kCrossEntropyStatistics + i), exact, scale), "")
            << "statistic " << i;
      }
    }
  }
}

TEST_P(CrossEntropyShards, OnTheCpuStatisticsOfFloat64KeepTheLossOfALearnedClass) {
  constexpr std::int64_t kClasses = 1000;
  CrossEntropyCase test_case{.dtype = DType::float32, .shape = {3, kClasses}};
  test_case.options.reduction = Reduction::none;
  test_case.value = [](std::int64_t i) { return i % kClasses == 7 ? 25.0 : 0.0; };
  test_case.target = [](std::int64_t) { return 7.0; };
  CrossEntropyRun run(test_case);
  const CrossEntropyForwardArgs whole = run.forward_args();
  TestTensor statistics(device(), DType::float64, {1, 3, kCrossEntropyStatistics});
  const auto forward = [&] {
    TensorView of_rows = statistics.view();
    of_rows.shape = {3, kCrossEntropyStatistics};
    of_rows.strides = {kCrossEntropyStatistics, 1};
    cross_entropy_shard_forward({.logits = whole.logits,
                                 .targets = whole.targets,
                                 .options = whole.options,
                                 .classes = kClasses,
                                 .statistics = of_rows});
  };
  if (device().type == DeviceType::cuda) {
    EXPECT_EQ(refusal_of(forward),
              "cross_entropy_shard_forward: statistics has dtype float64, expected float32 (float32, or float64 where "
              "logits is float64)");
    return;
  }
  forward();
  cross_entropy_merge({.statistics = statistics.view(),
                       .targets = whole.targets,
                       .options = whole.options,
                       .classes = kClasses,
                       .loss = whole.loss});
  run.download();
  const double expected = std::log1p(999.0 * std::exp(-25.0));  // 1.4e-8
  EXPECT_NEAR(run.results.loss.get(0), expected, 4e-6 * expected);
}

}  // namespace
}  // namespace eaves::testing
