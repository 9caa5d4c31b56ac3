// cross_entropy over the grid of its options: each combination forward, backward and in place, and the gradient with
// every option against finite differences.
#include <gtest/gtest.h>

#include <optional>
#include <utility>
#include <vector>

#include "eaves/cross_entropy.h"
#include "ops/cross_entropy/cross_entropy_test_case.h"
#include "testing/cases.h"
#include "testing/devices.h"

namespace eaves::testing {
namespace {

class CrossEntropyOptionsTest : public OnEachDevice {};
EAVES_EACH_DEVICE(CrossEntropyOptionsTest);

double normal(std::int64_t i) { return 3.0 * random_normal(17, static_cast<std::uint64_t>(i)); }

const std::vector<Reduction> kReductions = {Reduction::none, Reduction::sum, Reduction::mean};
const std::vector<double> kSmoothings = {0.0, 0.1, 1.0};

struct Transform {
  double scale;
  double softcap;
};
const std::vector<Transform> kTransforms = {{1.0, 0.0}, {0.37, 0.0}, {1.0, 5.0}, {2.0, 30.0}};

/// The case without options, with each option alone, and with all of them.
std::vector<CrossEntropyCase> with_each_option(const CrossEntropyCase& plain) {
  std::vector<CrossEntropyCase> cases = {plain};
  CrossEntropyCase all = plain;
  const auto add = [&](auto change) {
    cases.push_back(plain);
    change(cases.back());
    change(all);
  };
  add([](CrossEntropyCase& c) { c.weight_dtype = c.dtype; });
  add([](CrossEntropyCase& c) { c.weight_dtype = DType::float32; });
  add([](CrossEntropyCase& c) { c.options.label_smoothing = 0.2; });
  add([](CrossEntropyCase& c) { c.options.softcap = 10.0; });
  add([](CrossEntropyCase& c) { c.options.scale = 0.7; });
  add([](CrossEntropyCase& c) { c.options.z_loss_weight = 0.01; });
  add([](CrossEntropyCase& c) { c.has_grad_lse = true; });
  add([](CrossEntropyCase& c) { c.has_grad_entropy = true; });
  add([](CrossEntropyCase& c) { c.has_row_weight = true; });
  add([](CrossEntropyCase& c) {
    c.wants_mean_logit = true;
    c.weight_dtype = DType::float32;
  });
  add([](CrossEntropyCase& c) { c.has_normalizer = true; });
  add([](CrossEntropyCase& c) { c.options.ignore_index = 1; });
  cases.push_back(all);
  return cases;
}

TEST_P(CrossEntropyOptionsTest, EachOptionMatchesTheOracleInEveryLayout) {
  struct Layout {
    Dims shape;
    int axis;
    Placement placement;
    const char* reason;
  };
  const std::vector<Layout> layouts = {
      {{7, 75}, 1, {}, "lanes share a row"},
      {{6, 5003}, 1, {}, "a block a row"},
      {{3, 40001}, 1, {}, "a row in pieces, or in a cluster"},
      {{301, 48}, 0, {}, "rows side by side"},
      {{700, 3}, 0, {}, "rows side by side, no vector fits"},
      {{5, 600}, 1, with_strides({1800, 3}), "every third class"},
  };
  for (const auto& [layout, dtype, targets] :
       combine<Layout, DType, DType>(layouts, {DType::bfloat16, DType::float32}, {DType::int64, DType::float32})) {
    SCOPED_TRACE(layout.reason);
    for (const CrossEntropyCase& test_case : with_each_option({.dtype = dtype,
                                             .shape = layout.shape,
                                             .class_axis = layout.axis,
                                             .targets_dtype = targets,
                                             .logits_placement = layout.placement,
                                             .value = normal})) {
      check_cross_entropy(test_case);
    }
  }
}

TEST_P(CrossEntropyOptionsTest, ManyCombinationsMatchTheOracle) {
  for (const auto& [dtype, targets, reduction, smoothing] : combine<DType, DType, Reduction, double>(
           floating_point_dtypes(), {DType::int64, DType::float32}, kReductions, kSmoothings)) {
    const bool is_soft = is_floating_point(targets);
    for (const std::optional<DType> weight :
         {std::optional<DType>(), std::optional(dtype), std::optional(DType::float32)}) {
      if (weight == DType::float32 && dtype == DType::float32) continue;  // the same as the case before
      for (const auto& [transform, z_loss_weight, ignore_index] :
           combine<Transform, double, std::int64_t>(kTransforms, {0.0, 0.02}, {std::int64_t{-100}, std::int64_t{2}})) {
        if (is_soft && ignore_index != -100) continue;  // nothing is ignored
        check_cross_entropy({.dtype = dtype,
                             .shape = {7, 45},
                             .options = {.ignore_index = ignore_index,
                                         .reduction = reduction,
                                         .label_smoothing = smoothing,
                                         .scale = transform.scale,
                                         .softcap = transform.softcap,
                                         .z_loss_weight = z_loss_weight},
                             .targets_dtype = targets,
                             .weight_dtype = weight,
                             .has_row_weight = reduction != Reduction::none && z_loss_weight != 0.0,
                             .wants_mean_logit = ignore_index == 2,
                             .value = normal});
        if (HasFailure()) return;  // one failure is enough to read
      }
    }
  }
}

TEST_P(CrossEntropyOptionsTest, ANormalizerReplacesTheWeightsOfTheRows) {
  for (const DType dtype : floating_point_dtypes()) {
    for (const auto& [targets, weight] :
         combine<DType, std::optional<DType>>({DType::int32, dtype}, {std::optional<DType>(), std::optional(dtype)})) {
      check_cross_entropy({.dtype = dtype,
                           .shape = {40, 45},
                           .targets_dtype = targets,
                           .weight_dtype = weight,
                           .has_normalizer = true,
                           .value = normal});
    }
  }
}

TEST_P(CrossEntropyOptionsTest, RowsHaveWeights) {
  for (const DType dtype : floating_point_dtypes()) {
    for (const auto& [targets, weight, reduction, shape] : combine<DType, std::optional<DType>, Reduction, Dims>(
             {DType::int32, dtype}, {std::optional<DType>(), std::optional(dtype)}, kReductions,
             {Dims{40, 45}, Dims{5, 9001}})) {
      check_cross_entropy({.dtype = dtype,
                           .shape = shape,
                           .options = {.reduction = reduction, .z_loss_weight = 0.01},
                           .targets_dtype = targets,
                           .weight_dtype = weight,
                           .has_row_weight = true,
                           .value = normal});
    }
  }
}

TEST_P(CrossEntropyOptionsTest, GradientsOfLseAndEntropyReachIgnoredRows) {
  for (const DType dtype : floating_point_dtypes()) {
    for (const auto& [lse, entropy] : {std::pair(true, false), std::pair(false, true), std::pair(true, true)}) {
      for (const Dims& shape : {Dims{5, 30}, Dims{5, 3000}}) {
        check_cross_entropy({.dtype = dtype,
                             .shape = shape,
                             .options = {.reduction = Reduction::sum},
                             .has_grad_lse = lse,
                             .has_grad_entropy = entropy,
                             .value = normal,
                             .target = [](std::int64_t row) { return row < 3 ? -100.0 : 7.0; }});
      }
    }
  }
}

TEST_P(CrossEntropyOptionsTest, RowsThatAreIgnoredNeedNotBeRead) {
  for (const auto& [shape, axis, reduction] :
       combine<Dims, int, Reduction>({Dims{50, 30}, Dims{20, 3000}, Dims{5, 40003}}, {1, 0}, kReductions)) {
    check_cross_entropy({.dtype = DType::bfloat16,
                         .shape = axis == 1 ? shape : Dims{shape[1], shape[0]},
                         .class_axis = axis,
                         .options = {.reduction = reduction, .z_loss_weight = 0.01},
                         .skips_ignored = true,
                         .value = normal,
                         .target = [](std::int64_t row) { return row % 2 == 0 ? -100.0 : 3.0; }});
  }
}

TEST_P(CrossEntropyOptionsTest, ASaturatedSoftcapHasASmallGradient) {
  // `size` is the size of the logits in softcaps
  for (const auto& [dtype, size] : combine<DType, double>(floating_point_dtypes(), {1.0, 4.0, 9.0, 50.0, 1e4})) {
    check_cross_entropy({.dtype = dtype,
                         .shape = {10, 200},
                         .options = {.reduction = Reduction::none, .softcap = 3.0},
                         .value = [=](std::int64_t i) { return 3.0 * size * normal(i); }});
  }
}

TEST_P(CrossEntropyOptionsTest, TheBackwardIsTheDerivativeOfTheForward) {
  // Central differences in float64: the only test that does not use the formula of the gradient.
  constexpr std::int64_t kRows = 5;
  constexpr std::int64_t kClasses = 9;
  constexpr double kStep = 1e-6;
  for (const auto& [targets, reduction] : combine<DType, Reduction>({DType::int64, DType::float64}, kReductions)) {
    for (const CrossEntropyCase& option : with_each_option({.dtype = DType::float64,
                                          .shape = {kRows, kClasses},
                                          .options = {.reduction = reduction},
                                          .targets_dtype = targets,
                                          .value = normal})) {
      CrossEntropyCase test_case = option;
      // The grid tests float64 with a weight of float32; only this test has a smoothing of 1.
      if (test_case.options.label_smoothing > 0.0 && targets == DType::int64) test_case.options.label_smoothing = 1.0;
      SCOPED_TRACE(description_of(test_case));
      CrossEntropyRun run(test_case);
      cross_entropy_forward(run.forward_args());
      cross_entropy_backward(run.backward_args());
      run.grad_logits.download();
      // L = sum of the outputs times their upstream gradients.
      const auto objective = [&] {
        cross_entropy_forward(run.forward_args());
        for (const auto& named : run.results.all()) named.second->download();
        double sum = 0.0;
        const std::int64_t losses = reduction == Reduction::none ? kRows : 1;
        for (std::int64_t i = 0; i < losses; ++i) sum += run.grad_loss.get(i) * run.results.loss.get(i);
        for (std::int64_t i = 0; i < kRows; ++i) {
          if (test_case.has_grad_lse) sum += run.grad_lse.get(i) * run.results.lse.get(i);
          if (test_case.has_grad_entropy) sum += run.grad_entropy.get(i) * run.results.entropy.get(i);
        }
        return sum;
      };
      for (std::int64_t i = 0; i < kRows * kClasses; ++i) {
        const double slope = difference_quotient(run.logits, i, kStep, objective);
        ASSERT_NEAR(run.grad_logits.get(i), slope, 1e-7) << "element " << i;
      }
    }
  }
}

}  // namespace
}  // namespace eaves::testing
