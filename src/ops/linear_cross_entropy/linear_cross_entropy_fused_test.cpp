// The fused path (fused/fused.h): which calls take it, and rows far from their sampled logits. The loss alone takes an
// online softmax. It guesses the shift if a row is kept, or with few features unless the switch says otherwise.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/exp_product.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_test_case.h"
#include "runtime/backend.h"
#include "testing/devices.h"

namespace eaves::testing {
namespace {

class LinearCrossEntropyFusedOnGpu : public OnGpuWithFusedPath {};

using Mode = LinearCrossEntropyMode;

/// More rows than a tile and nearly the fewest classes, with a remainder in each direction.
LinearCrossEntropyCase fused_case(Reduction reduction = Reduction::none) {
  LinearCrossEntropyCase c{.device = kCuda, .dtype = DType::bfloat16, .row_shape = {131}, .features = 40};
  c.classes = 4099;
  c.options.reduction = reduction;
  c.wants_all_of_row = false;
  c.wanted.bias = false;
  return c;
}

void expect_way(const LinearCrossEntropyCase& c, bool forward, bool backward, bool at_once) {
  LinearCrossEntropyRun run(c);
  EXPECT_EQ(problem_of(run, Mode::forward).is_fused, forward) << description_of(c);
  EXPECT_EQ(problem_of(run, Mode::backward).is_fused, backward) << description_of(c);
  EXPECT_EQ(problem_of(run, Mode::forward_backward).is_fused, at_once) << description_of(c);
}

TEST_F(LinearCrossEntropyFusedOnGpu, CallsThatTakeItAndCallsThatDoNot) {
  expect_way(fused_case(), true, true, true);
  const auto expect_none = [](auto change) {
    LinearCrossEntropyCase c = fused_case();
    change(c);
    expect_way(c, false, false, false);
  };
  expect_none([](LinearCrossEntropyCase& c) { c.row_shape = {127}; });
  expect_none([](LinearCrossEntropyCase& c) { c.classes = 4095; });
  expect_none([](LinearCrossEntropyCase& c) { c.features = 36; });
  expect_none([](LinearCrossEntropyCase& c) { c.dtype = DType::float32; });
  expect_none([](LinearCrossEntropyCase& c) { c.options.softcap = 51.0; });
  expect_none([](LinearCrossEntropyCase& c) { c.options.label_smoothing = 0.1; });
  expect_none([](LinearCrossEntropyCase& c) { c.targets_dtype = DType::float32; });
  LinearCrossEntropyCase with_options = fused_case();
  with_options.options.softcap = 10.0;
  with_options.bias_dtype = DType::float32;
  with_options.wanted.bias = true;
  expect_way(with_options, true, true, true);
  LinearCrossEntropyCase half = fused_case();
  half.dtype = DType::float16;
  expect_way(half, true, false, false);
  LinearCrossEntropyCase argmax = fused_case();
  argmax.wants_all_of_row = true;
  expect_way(argmax, false, true, false);
}

TEST_F(LinearCrossEntropyFusedOnGpu, EachOptionMatchesTheOracle) {
  for (const Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean}) {
    const auto check = [&](auto change) {
      LinearCrossEntropyCase c = fused_case(reduction);
      change(c);
      check_linear_cross_entropy(c);
    };
    check([](LinearCrossEntropyCase&) {});
    // Three tiles of rows, two of them in one cluster; one class more than whole tiles.
    check([](LinearCrossEntropyCase& c) { c.row_shape = {257}, c.classes = 22 * cuda::kExpProductClasses + 1; });
    check([](LinearCrossEntropyCase& c) { c.dtype = DType::float16; });
    check([](LinearCrossEntropyCase& c) { c.options.scale = 0.7, c.options.z_loss_weight = 0.01; });
    check([](LinearCrossEntropyCase& c) { c.options.softcap = 3.0, c.options.scale = 2.0; });
    check([](LinearCrossEntropyCase& c) { c.options.softcap = 0.1, c.has_grad_entropy = c.wants_all_of_row = true; });
    check([](LinearCrossEntropyCase& c) { c.bias_dtype = DType::bfloat16, c.wanted.bias = true; });
    check([](LinearCrossEntropyCase& c) {
      c.bias_dtype = DType::float32, c.wanted.bias = true, c.options.softcap = 5.0, c.has_row_weight = true;
      c.has_grad_lse = c.accumulates = c.skips_ignored = true, c.row_shape = {290};
    });
    check([](LinearCrossEntropyCase& c) {
      c.bias_dtype = DType::float32, c.wanted = {.hidden = false, .head = false, .bias = true}, c.row_shape = {300};
      c.workspace_limit = 2000000;
    });
    check([](LinearCrossEntropyCase& c) { c.class_weight_dtype = DType::float32, c.targets_dtype = DType::int32; });
    check([](LinearCrossEntropyCase& c) { c.has_row_weight = c.has_normalizer = true; });
    check([](LinearCrossEntropyCase& c) { c.has_grad_lse = c.accumulates = true; });
    check([](LinearCrossEntropyCase& c) { c.has_grad_entropy = c.wants_all_of_row = true; });
    check([](LinearCrossEntropyCase& c) { c.skips_ignored = true, c.row_shape = {290}; });
    check([](LinearCrossEntropyCase& c) { c.wanted.hidden = false, c.grad_head_dtype = DType::float32; });
    check([](LinearCrossEntropyCase& c) { c.wanted.head = false; });
    check([](LinearCrossEntropyCase& c) { c.row_shape = {300}, c.workspace_limit = 2000000; });  // chunks and blocks
  }
}

TEST_F(LinearCrossEntropyFusedOnGpu, MoreRowsThanTheCacheHoldsMatchTheOracle) {
  // With more than 4096 rows a product takes several tiles in turn.
  for (const Reduction reduction : {Reduction::none, Reduction::mean}) {
    for (const std::size_t mib : {200, 0}) {  // one chunk, and the default number of chunks
      LinearCrossEntropyCase c = fused_case(reduction);
      c.row_shape = {6100};
      c.workspace_limit = mib << 20;
      check_linear_cross_entropy(c);
    }
  }
}

TEST_F(LinearCrossEntropyFusedOnGpu, EveryNumberOfClassesMatchesTheOracle) {
  // Whole tiles, and remainders of every kind.
  for (const std::int64_t classes : {4096, 4097, 4223, 4224, 50257, 65537, 131071}) {
    LinearCrossEntropyCase c = fused_case(Reduction::mean);
    c.classes = classes;
    c.wants_all_of_row = c.wants_entropy_alone = true;
    c.wanted = {.hidden = false, .head = false, .bias = false};
    check_linear_cross_entropy(c);
  }
}

TEST_F(LinearCrossEntropyFusedOnGpu, LearntRowsMatchTheOracle) {
  // hidden is the target's row of the head times a factor: the target's logit is above all others, and the loss still
  // has to be exact.
  for (const double factor : {0.5, 1.0, 4.0}) {
    for (const DType dtype : {DType::bfloat16, DType::float16}) {
      LinearCrossEntropyCase c = fused_case();
      c.dtype = dtype;
      c.wants_all_of_row = c.wants_entropy_alone = true;
      const auto target = [](std::int64_t row) { return 31 * row % 4099; };
      c.target = [=](std::int64_t row) { return static_cast<double>(target(row)); };
      c.head = [](std::int64_t i) { return 0.5 * noise(52)(i); };
      c.hidden = [=](std::int64_t i) { return factor * noise(52)(target(i / 40) * 40 + i % 40); };
      // float16 gradients use other logits, in memory.
      if (dtype == DType::float16) c.wanted = {.hidden = false, .head = false, .bias = false};
      check_linear_cross_entropy(c);
    }
  }
}

TEST_F(LinearCrossEntropyFusedOnGpu, ARowsLossDoesNotDependOnOtherRows) {
  for (const double deviation : {1.3, 256.0}) {
    const auto run_from = [&](std::int64_t first, std::int64_t rows) {
      LinearCrossEntropyCase c = fused_case();
      c.row_shape = {rows};
      c.classes = 50257;
      c.deviation = deviation;
      c.wants_all_of_row = c.wants_entropy_alone = true;
      c.wanted = {.hidden = false, .head = false, .bias = false};
      c.hidden = [=](std::int64_t i) { return noise(58)(i + first * 40); };
      c.target = [=](std::int64_t row) { return static_cast<double>(31 * (row + first)); };
      auto run = std::make_unique<LinearCrossEntropyRun>(c);
      run->run();
      return run;
    };
    const auto all = run_from(0, 600);
    const auto part = run_from(77, 200);  // the rows get other tiles and other threads
    for (std::int64_t row = 0; row < 200; ++row) {
      EXPECT_EQ(part->results.loss.get(row), all->results.loss.get(row + 77)) << "row " << row;
      EXPECT_EQ(part->results.lse.get(row), all->results.lse.get(row + 77)) << "row " << row;
      EXPECT_EQ(part->results.entropy.get(row), all->results.entropy.get(row + 77)) << "row " << row;
    }
  }
}

TEST_F(LinearCrossEntropyFusedOnGpu, ABiasThatIsNotFiniteGivesWhatItGivesWithLogitsInMemory) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto one = [](double value) { return [=](std::int64_t v) { return v == 7 ? value : noise(57)(v); }; };
  const auto check = [](auto bias, double lse) {
    LinearCrossEntropyCase c = fused_case();
    c.bias_dtype = DType::float32;
    c.bias = bias;
    c.wants_all_of_row = c.wants_entropy_alone = true;
    c.target = [](std::int64_t row) { return row == 5 ? -100.0 : static_cast<double>(row); };
    setenv("EAVES_FUSED_PRODUCT", "1", 1);
    LinearCrossEntropyRun fused(c);
    fused.run();
    setenv("EAVES_FUSED_PRODUCT", "0", 1);
    LinearCrossEntropyRun logits(c);
    logits.run();
    const auto expect_same = [&](double number, double expected, std::int64_t row) {
      EXPECT_TRUE(number == expected || (std::isnan(number) && std::isnan(expected)))
          << "lse " << lse << ", row " << row << ": " << number << ", expected " << expected;
    };
    for (std::int64_t row = 0; row < 131; ++row) {
      expect_same(fused.results.lse.get(row), row == 5 ? 0.0 : lse, row);
      expect_same(fused.results_at_once.lse.get(row), row == 5 ? 0.0 : lse, row);
      expect_same(fused.results.loss.get(row), logits.results.loss.get(row), row);
      expect_same(fused.results.entropy.get(row), logits.results.entropy.get(row), row);
    }
  };
  check([=](std::int64_t) { return -kInfinity; }, -kInfinity);
  check(one(kInfinity), kInfinity);
  check(one(std::nan("")), std::nan(""));
}

TEST_F(LinearCrossEntropyFusedOnGpu, RowsFarFromTheirSampledLogitsMatchTheOracle) {
  // Every 64th of the 4099 classes is sampled, 64 in all. Logits far above the samples leave float32's range: their
  // tiles are computed again, and all of a row without a finite sum.
  const auto check = [](const char* what, auto change) {
    SCOPED_TRACE(what);
    LinearCrossEntropyCase c = fused_case();
    change(c);
    check_linear_cross_entropy(c);
    if (c.dtype != DType::bfloat16) return;  // float16 keeps logits
    c.kept_rows = 1;
    check_linear_cross_entropy(c);
  };
  const auto with_feature_0 = [](double of_hidden, auto of_class) {
    return [=](LinearCrossEntropyCase& c) {
      const std::int64_t features = c.features;
      c.hidden = [=](std::int64_t i) { return i % features == 0 ? of_hidden : noise(51)(i); };
      c.head = [=](std::int64_t i) { return i % features == 0 ? of_class(i / features) : 0.1 * noise(52)(i); };
    };
  };
  // For rows with an lse of 1e4 or more that was computed again, the loss alone: their gradients have a larger error
  // than one product, because lse and softmax come from sums in two orders.
  const auto check_loss = [&](const char* what, auto change) {
    const auto of_loss = [&](LinearCrossEntropyCase& c) {
      change(c);
      c.wanted = {.hidden = false, .head = false, .bias = false};
    };
    check(what, of_loss);
    // Without the switch, a call with so few features guesses the shift. Batch invariance lets so few rows of 16,384
    // classes take the fused path.
    LinearCrossEntropyCase c = fused_case();
    of_loss(c);
    c.classes = 16387;
    unsetenv("EAVES_FUSED_PRODUCT");
    setenv("EAVES_BATCH_INVARIANT", "1", 1);
    LinearCrossEntropyRun run(c);
    const LinearCrossEntropyShape shape = problem_of(run, Mode::forward);
    EXPECT_TRUE(shape.is_fused && !shape.has_online_softmax());
    check_linear_cross_entropy(c);
    unsetenv("EAVES_BATCH_INVARIANT");
    setenv("EAVES_FUSED_PRODUCT", "1", 1);
  };
  check("one logit 100 above", with_feature_0(10.0, [](std::int64_t v) { return v == 7 ? 10.0 : 0.0; }));
  check_loss("one logit 1e4 above", with_feature_0(100.0, [](std::int64_t v) { return v == 7 ? 100.0 : 0.0; }));
  check_loss("three in two tiles",
             with_feature_0(100.0, [](std::int64_t v) { return v == 7 || v == 9 || v == 4098 ? 100.0 : 0.0; }));
  check("all but the samples", with_feature_0(100.0, [](std::int64_t v) { return v % 64 == 0 ? 0.0 : 100.0; }));
  check("offset 1e4", with_feature_0(100.0, [](std::int64_t) { return 100.0; }));
  check("offset -1e4", with_feature_0(-100.0, [](std::int64_t) { return 100.0; }));
  for (const double deviation : {16.0, 64.0, 256.0, 3000.0}) {
    check("deviation", [=](LinearCrossEntropyCase& c) { c.deviation = deviation; });
  }
  check("deviation, of a mean",
        [](LinearCrossEntropyCase& c) { c.deviation = 16.0, c.classes = 8300, c.options.reduction = Reduction::mean; });
  check_loss("deviation of 30000", [](LinearCrossEntropyCase& c) { c.deviation = 30000.0; });
  // The exponents are far from the guess, and lse is next to 0.
  for (const double of_others : {-79.5, -40.0, -20.0}) {
    check("lse next to 0", [=](LinearCrossEntropyCase& c) {
      c.hidden = [](std::int64_t i) { return i % 40 == 0 ? 1.0 : 0.0; };
      c.head = [=](std::int64_t i) {
        return i % 40 != 0 ? 0.0 : i / 40 == 7 ? 0.0976 : i / 40 % 64 == 0 ? -80.0 : of_others;
      };
      c.target = [](std::int64_t row) { return row % 5 == 4 ? -100.0 : 64.0; };
    });
  }
  check_loss("of float16", [&](LinearCrossEntropyCase& c) {
    with_feature_0(100.0, [](std::int64_t v) { return v == 7 ? 100.0 : 0.0; })(c);
    c.dtype = DType::float16;
  });
  for (const double softcap : {0.0, 3.0}) {
    const auto with_bias = [=](auto bias) {
      return [=](LinearCrossEntropyCase& c) {
        c.options.softcap = softcap;
        c.bias_dtype = DType::float32;
        c.bias = bias;
        c.wanted.bias = true;
        c.target = [](std::int64_t row) { return static_cast<double>(row % 5 == 4 ? -100 : 3 * row); };
      };
    };
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    check("classes that a bias of -infinity masks",
          with_bias([](std::int64_t v) { return v % 3 == 0 ? noise(57)(v) : -kInfinity; }));
    check("classes that a finite bias masks",
          with_bias([](std::int64_t v) { return v % 3 == 0 ? noise(57)(v) : -1e4; }));
    check("a bias that the samples do not have", with_bias([](std::int64_t v) { return v % 64 == 0 ? -300.0 : 0.5; }));
  }
  check("soft cap far above the logits", [](LinearCrossEntropyCase& c) { c.options.softcap = 50.0; });
  check("soft cap, logits far above it", [](LinearCrossEntropyCase& c) {
    c.options.softcap = 50.0;
    c.deviation = 256.0;
  });
  check("equal logits", [](LinearCrossEntropyCase& c) { c.head = [](std::int64_t) { return 0.125; }; });
}

TEST_F(LinearCrossEntropyFusedOnGpu, ARowThatIsNotFiniteIsAloneAndNothingIsLostOfTheOthers) {
  for (const double held : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    LinearCrossEntropyCase c = fused_case();
    c.hidden = [=](std::int64_t i) { return i == 5 * 40 + 3 ? held : noise(53)(i); };
    c.target = [](std::int64_t row) { return static_cast<double>(row); };
    LinearCrossEntropyRun run(c);
    run.run();
    for (std::int64_t row = 0; row < 131; ++row) {
      EXPECT_EQ(std::isfinite(run.results.loss.get(row)), row != 5) << "row " << row << ", " << held;
      EXPECT_EQ(std::isfinite(run.results_at_once.loss.get(row)), row != 5) << "row " << row << ", " << held;
      EXPECT_EQ(std::isfinite(run.gradients.hidden.get(row * 40)), row != 5) << "row " << row << ", " << held;
      EXPECT_EQ(std::isfinite(run.gradients_at_once.hidden.get(row * 40)), row != 5) << "row " << row << ", " << held;
    }
  }
}

TEST_F(LinearCrossEntropyFusedOnGpu, AnInfiniteHeadMakesEveryRowsLseInfinite) {
  for (const double sign : {1.0, -1.0}) {
    LinearCrossEntropyCase c = fused_case();
    // All positive: no 0 * infinity, and no infinities of both signs.
    c.hidden = [=](std::int64_t i) { return std::abs(noise(54)(i)) + 0.5; };
    c.head = [=](std::int64_t i) {
      return i / 40 == 7 ? sign * std::numeric_limits<double>::infinity() : 0.1 * noise(55)(i);
    };
    c.target = [](std::int64_t row) { return static_cast<double>(row + 20); };
    LinearCrossEntropyRun run(c);
    run.run();
    for (std::int64_t row = 0; row < 131; ++row) {
      EXPECT_EQ(std::isfinite(run.results.lse.get(row)), sign < 0.0) << "row " << row;
      EXPECT_EQ(std::isinf(run.results.lse.get(row)), sign > 0.0) << "row " << row;
      EXPECT_EQ(std::isfinite(run.results.loss.get(row)), sign < 0.0) << "row " << row;
    }
  }
}

TEST_F(LinearCrossEntropyFusedOnGpu, ATargetOutOfRangeMakesItsRowNaN) {
  LinearCrossEntropyCase c = fused_case();
  c.target = [](std::int64_t row) { return row == 5 ? 4099.0 : row == 9 ? -1.0 : 2.0; };
  LinearCrossEntropyRun run(c);
  run.run();
  for (std::int64_t row = 0; row < 131; ++row) {
    EXPECT_EQ(std::isnan(run.results.loss.get(row)), row == 5 || row == 9) << "row " << row;
    EXPECT_EQ(std::isnan(run.gradients.hidden.get(row * 40)), row == 5 || row == 9) << "row " << row;
    EXPECT_EQ(std::isnan(run.gradients_at_once.hidden.get(row * 40)), row == 5 || row == 9) << "row " << row;
  }
}

TEST_F(LinearCrossEntropyFusedOnGpu, ARowThatIsNotFiniteAndCountsForNothingHasNoGradient) {
  for (const double held : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    for (const auto& [is_ignored, softcap] : {std::pair(true, 0.0), {false, 0.0}, {true, 3.0}, {false, 3.0}}) {
      LinearCrossEntropyCase c = fused_case();
      c.options.softcap = softcap;
      c.hidden = [=](std::int64_t i) { return i == 5 * 40 + 3 ? held : noise(53)(i); };
      c.target = [=](std::int64_t row) { return is_ignored && row == 5 ? -100.0 : static_cast<double>(row); };
      LinearCrossEntropyRun run(c);
      run.grad_loss.fill([](std::int64_t row) { return row == 5 ? 0.0 : 1.0; });
      run.run();
      for (std::int64_t i = 0; i < 40; ++i) {
        EXPECT_EQ(run.gradients.hidden.get(5 * 40 + i), 0.0) << i;
        EXPECT_EQ(run.gradients_at_once.hidden.get(5 * 40 + i), 0.0) << i;
      }
      for (std::int64_t i = 0; i < 4099 * 40; ++i) {
        ASSERT_TRUE(std::isfinite(run.gradients_at_once.head.get(i))) << "element " << i << ", " << held;
      }
    }
  }
}

TEST_F(LinearCrossEntropyFusedOnGpu, RowsOfOneClassMatchTheOracle) {
  // The search for the rows of a class takes several steps, and some calls take several chunks.
  const auto check = [](auto change) {
    LinearCrossEntropyCase c = fused_case(Reduction::mean);
    c.row_shape = {1300};
    c.target = [](std::int64_t row) { return row % 3 == 0 ? 4098.0 : row % 7 == 0 ? -100.0 : 2.0; };
    change(c);
    check_linear_cross_entropy(c);
  };
  check([](LinearCrossEntropyCase&) {});
  check([](LinearCrossEntropyCase& c) { c.workspace_limit = 4000000, c.accumulates = true; });
  check([](LinearCrossEntropyCase& c) { c.workspace_limit = 4000000, c.grad_head_dtype = DType::float32; });
}

TEST_F(LinearCrossEntropyFusedOnGpu, GradientsThatDoNotSuitVectorsMatchTheOracle) {
  for (const std::optional<DType> dtype : {std::optional<DType>{}, std::optional<DType>{DType::float32}}) {
    LinearCrossEntropyCase c = fused_case();
    c.grad_hidden_placement = c.grad_head_placement = with_strides({41, 1});
    c.grad_head_dtype = dtype;
    check_linear_cross_entropy(c);
  }
}

TEST_F(LinearCrossEntropyFusedOnGpu, WithoutTheSwitchItIsTakenWhereItIsFaster) {
  LinearCrossEntropyCase c = fused_case();
  c.features = 8;
  const auto expect = [&](std::int64_t classes, bool alone, bool backward, bool at_once) {
    c.classes = classes;
    expect_way(c, alone, backward, at_once);
  };
  unsetenv("EAVES_FUSED_PRODUCT");
  expect(16383, false, false, false);
  expect(16384, false, true, false);
  expect(32767, false, true, false);
  expect(32768, false, true, true);
  c.row_shape = {512};
  expect(49151, false, true, true);
  expect(49152, true, true, true);
  c.row_shape = {6145};
  expect(4095, false, false, false);
  expect(4096, true, false, false);
  setenv("EAVES_BATCH_INVARIANT", "1", 1);
  expect(16383, false, false, false);
  c.row_shape = {1};
  expect(16384, true, true, false);
  unsetenv("EAVES_BATCH_INVARIANT");
  setenv("EAVES_FUSED_PRODUCT", "0", 1);
  c.row_shape = {512};
  expect(65536, false, false, false);
}

/// The first deviation has rows that the samples describe well; the second has rows that are computed again.
constexpr double kDeviations[] = {1.3, 256.0};

TEST_F(LinearCrossEntropyFusedOnGpu, ACudaGraphReplaysIt) {
  for (const double deviation : kDeviations) {
    LinearCrossEntropyCase c = fused_case(Reduction::mean);
    c.deviation = deviation;
    expect_replayed_by_a_graph<LinearCrossEntropyRun>(c, std::to_string(deviation));
  }
}

TEST_F(LinearCrossEntropyFusedOnGpu, TwoRunsAreBitwiseEqual) {
  for (const double deviation : kDeviations) {
    LinearCrossEntropyCase c = fused_case(Reduction::mean);
    c.row_shape = {700};
    c.deviation = deviation;
    expect_two_runs_equal<LinearCrossEntropyRun>(c, std::to_string(deviation));
  }
}

}  // namespace
}  // namespace eaves::testing
