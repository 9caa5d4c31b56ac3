// linear_cross_entropy against its oracle, on every device, for both algorithms: options, subsets of gradients, sizes
// of chunks, layouts. Other files of tests:
//
//   linear_cross_entropy_edges_test.cpp      infinities, ignored rows, odd sizes
//   linear_cross_entropy_accuracy_test.cpp   the accuracy contract
//   linear_cross_entropy_calls_test.cpp      calls rather than values
//   linear_cross_entropy_errors_test.cpp     refused arguments
//   linear_cross_entropy_plan_test.cpp       the cut of the work
#include "eaves/linear_cross_entropy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/linear_cross_entropy/linear_cross_entropy_test_case.h"
#include "testing/cases.h"
#include "testing/devices.h"

namespace eaves::testing {
namespace {

class LinearCrossEntropy : public OnEachDevice {};
EAVES_EACH_DEVICE(LinearCrossEntropy);

const std::vector<Reduction> kReductions = {Reduction::none, Reduction::sum, Reduction::mean};

/// 23 rows are no multiple of any tile.
LinearCrossEntropyCase make_case(DType dtype, Reduction reduction = Reduction::mean) {
  return {.dtype = dtype, .row_shape = {23}, .options = {.reduction = reduction}, .bias_dtype = dtype};
}

/// Every option that changes the loss and the gradient of a row.
LinearCrossEntropyCase with_every_option(LinearCrossEntropyCase c) {
  c.options.label_smoothing = 0.1;
  c.options.scale = 0.5;
  c.options.softcap = 20.0;
  c.options.z_loss_weight = 1e-3;
  c.options.ignore_index = 1;  // one of the classes
  c.class_weight_dtype = c.dtype;
  c.targets_dtype = DType::int32;
  c.has_row_weight = true;
  c.has_normalizer = true;
  c.has_grad_lse = c.has_grad_entropy = true;
  return c;
}

LinearCrossEntropyCase with_soft_targets(LinearCrossEntropyCase c) {
  c.targets_dtype = DType::float32;
  c.bias_dtype = {};
  return c;
}

/// The three kinds of cases that most tests here check for a layout or a size: with row weights, with every option,
/// with soft targets.
std::vector<LinearCrossEntropyCase> of_every_kind(const LinearCrossEntropyCase& plain) {
  LinearCrossEntropyCase weighted = plain;
  weighted.has_row_weight = weighted.wants_mean_logit = true;
  return {weighted, with_every_option(plain), with_soft_targets(plain)};
}

/// The plain case, the case with each option alone, and the case with all options.
std::vector<LinearCrossEntropyCase> with_each_option(const LinearCrossEntropyCase& plain) {
  std::vector<LinearCrossEntropyCase> cases = {plain};
  LinearCrossEntropyCase all = plain;
  const auto add = [&](auto change) {
    cases.push_back(plain);
    change(cases.back());
    change(all);
  };
  add([](LinearCrossEntropyCase& c) { c.bias_dtype = {}; });
  add([](LinearCrossEntropyCase& c) { c.bias_dtype = DType::float32; });
  add([](LinearCrossEntropyCase& c) { c.class_weight_dtype = c.dtype; });
  add([](LinearCrossEntropyCase& c) { c.class_weight_dtype = DType::float32; });
  add([](LinearCrossEntropyCase& c) { c.options.label_smoothing = 0.2; });
  add([](LinearCrossEntropyCase& c) { c.options.softcap = 10.0; });
  add([](LinearCrossEntropyCase& c) { c.options.scale = 0.7; });
  add([](LinearCrossEntropyCase& c) { c.options.z_loss_weight = 0.01; });
  add([](LinearCrossEntropyCase& c) { c.has_grad_lse = true; });
  add([](LinearCrossEntropyCase& c) { c.has_grad_entropy = true; });
  add([](LinearCrossEntropyCase& c) { c.has_split_lse = true; });
  add([](LinearCrossEntropyCase& c) { c.has_row_weight = true; });
  add([](LinearCrossEntropyCase& c) {
    c.wants_mean_logit = true;
    c.class_weight_dtype = DType::float32;
  });
  add([](LinearCrossEntropyCase& c) { c.has_normalizer = true; });
  add([](LinearCrossEntropyCase& c) { c.options.ignore_index = 1; });
  add([](LinearCrossEntropyCase& c) { c.skips_ignored = true; });
  add([](LinearCrossEntropyCase& c) { c.grad_head_dtype = accumulator_dtype(c.dtype); });
  add([](LinearCrossEntropyCase& c) { c.grad_bias_dtype = accumulator_dtype(c.dtype); });
  cases.push_back(all);
  return cases;
}

/// Limits that leave little room for logits. 0 is one chunk. On a CPU the others give chunks of 1, 5, 8 rows and so on,
/// and in the backward blocks of a few classes; on a GPU all but the last give the least block.
const std::vector<std::size_t> kLimits = {0, 1, 6000, 9000, 14000};

TEST_P(LinearCrossEntropy, EachOptionMatchesTheOracle) {
  for (const auto& [dtype, reduction] : combine<DType, Reduction>(floating_point_dtypes(), kReductions)) {
    for (const DType targets : {DType::int64, DType::int32, DType::float32, dtype}) {
      if (targets == DType::bfloat16 || targets == DType::float16) continue;  // soft targets are never 16 bits
      LinearCrossEntropyCase plain = make_case(dtype, reduction);
      plain.targets_dtype = targets;
      for (const LinearCrossEntropyCase& test_case : with_each_option(plain)) check_linear_cross_entropy(test_case);
    }
  }
}

TEST_P(LinearCrossEntropy, ChunksOfEverySizeMatchTheOracle) {
  for (const auto& [dtype, limit, reduction] :
       combine<DType, std::size_t, Reduction>(floating_point_dtypes(), kLimits, {Reduction::none, Reduction::mean})) {
    LinearCrossEntropyCase plain = make_case(dtype, reduction);
    plain.workspace_limit = limit;
    plain.classes = 131;  // several strides of a row of logits, and a remainder
    if (device().type == DeviceType::cuda) {
      plain.classes = 300;  // more than the least block has
    } else if (limit == 1) {
      plain.classes = 29, plain.row_shape = {11};  // in the backward each logit is a block of its own
    }
    for (LinearCrossEntropyCase& test_case : of_every_kind(plain)) {
      check_linear_cross_entropy(test_case);
      test_case.skips_ignored = true;
      test_case.grad_head_dtype = DType::float32;
      if (dtype != DType::float64) check_linear_cross_entropy(test_case);
    }
  }
}

TEST_P(LinearCrossEntropy, MoreRowsAndClassesThanATileMatchTheOracle) {
  for (const auto& [dtype, limit] :
       combine<DType, std::size_t>({DType::bfloat16, DType::float32}, {0, 300000, 700000})) {
    // By limit: all at once; chunks of whole tiles of 128 rows; in the backward blocks of whole tiles of 256 classes.
    LinearCrossEntropyCase plain = make_case(dtype);
    plain.row_shape = {290};
    plain.classes = 601;
    plain.features = 9;
    plain.workspace_limit = limit;
    for (const LinearCrossEntropyCase& test_case : of_every_kind(plain)) check_linear_cross_entropy(test_case);
  }
}

TEST_P(LinearCrossEntropy, EverySubsetOfGradientsMatchesTheOracle) {
  for (const DType dtype : {DType::bfloat16, DType::float32}) {
    for (int subset = 0; subset < 8; ++subset) {
      for (const std::size_t limit : {0, 9000}) {
        LinearCrossEntropyCase plain = make_case(dtype);
        plain.wanted = {.hidden = (subset & 1) != 0, .head = (subset & 2) != 0, .bias = (subset & 4) != 0};
        plain.workspace_limit = limit;
        for (LinearCrossEntropyCase& test_case : of_every_kind(plain)) check_linear_cross_entropy(test_case);
      }
    }
  }
}

TEST_P(LinearCrossEntropy, GradientsThatNobodyAsksForAreNotWritten) {
  LinearCrossEntropyCase test_case = make_case(DType::float32);
  test_case.wanted = {.hidden = false, .head = false, .bias = false};
  LinearCrossEntropyRun run(test_case), untouched(test_case);
  run.run();
  for (std::size_t i = 0; i < run.gradients.all().size(); ++i) {
    EXPECT_EQ(run.gradients.all()[i].second->bytes(), untouched.gradients.all()[i].second->bytes());
    EXPECT_EQ(run.gradients_at_once.all()[i].second->bytes(), untouched.gradients_at_once.all()[i].second->bytes());
  }
}

TEST_P(LinearCrossEntropy, LayoutsOfHiddenMatchTheOracle) {
  struct Case {
    Dims row_shape;
    Placement placement;
    const char* reason;
    bool may_be_written = true;  ///< every element has an address of its own, so the gradient may have this layout
  };
  // hidden has 16 features.
  const std::vector<Case> cases = {
      {{}, {}, "one row"},
      {{23}, {}, "rows behind each other"},
      {{23}, with_strides({20, 1}), "rows of a wider tensor"},
      {{23}, with_strides({17, 1}), "rows that start anywhere"},
      {{23}, contiguous_at(1), "one element off"},
      {{2, 3, 4}, {}, "several axes of rows that are one"},
      {{4, 6}, with_strides({200, 16, 1}), "gathered: two axes of rows"},
      {{4, 6}, with_strides({16, 64, 1}), "gathered: the axes of rows swapped"},
      {{23}, with_strides({32, 2}), "gathered: every second feature"},
      {{23}, with_strides({1, 23}), "gathered: features are rows"},
      {{23}, with_strides({-16, 1}), "gathered: rows in reverse order"},
      {{23}, with_strides({16, -1}), "gathered: features in reverse order"},
      {{23}, with_strides({0, 1}), "gathered: one row, expanded", false},
      {{23}, with_strides({8, 1}), "gathered: rows that overlap", false},
      {{2, 3, 2, 2}, with_strides({500, 150, 60, 20, 1}), "gathered: four axes of rows"},
  };
  for (const auto& [c, dtype, reduction, limit] : combine<Case, DType, Reduction, std::size_t>(
           cases, floating_point_dtypes(), {Reduction::none, Reduction::mean}, {0, 9000})) {
    SCOPED_TRACE(c.reason);
    LinearCrossEntropyCase plain = make_case(dtype, reduction);
    plain.row_shape = c.row_shape;
    plain.workspace_limit = limit;
    plain.hidden_placement = c.placement;
    for (LinearCrossEntropyCase& test_case : of_every_kind(plain)) {
      check_linear_cross_entropy(test_case);
      if (!c.may_be_written) continue;
      test_case.grad_hidden_placement = c.placement;
      check_linear_cross_entropy(test_case);
      test_case.hidden_placement = {};
      check_linear_cross_entropy(test_case);
    }
  }
}

TEST_P(LinearCrossEntropy, LayoutsOfTheHeadMatchTheOracle) {
  // [24 classes, 16 features]
  struct Case {
    Placement head;
    Placement gradient;
    const char* reason;
  };
  const std::vector<Case> cases = {
      {with_strides({20, 1}), with_strides({20, 1}), "row-major with a gap"},
      {with_strides({17, 1}), with_strides({19, 1}), "classes that start anywhere"},
      {contiguous_at(1), contiguous_at(1), "one element off"},
      {with_strides({1, 24}), {}, "column-major"},
      {with_strides({1, 31}), with_strides({24, 1}), "column-major with a gap"},
      {with_strides({1, 25}, 3), contiguous_at(3), "column-major, features that start anywhere"},
  };
  for (const auto& [c, dtype, limit] : combine<Case, DType, std::size_t>(cases, floating_point_dtypes(), {0, 6000})) {
    SCOPED_TRACE(c.reason);
    LinearCrossEntropyCase plain = make_case(dtype);
    plain.workspace_limit = limit;
    plain.head_placement = c.head;
    plain.grad_head_placement = c.gradient;
    for (const LinearCrossEntropyCase& test_case : of_every_kind(plain)) check_linear_cross_entropy(test_case);
  }
}

TEST_P(LinearCrossEntropy, TargetsAreReadByTheirStrides) {
  for (const auto& [strides, targets] : combine<Dims, DType>(
           {Dims{0, 0}, Dims{0, 1}, Dims{1, 5}, Dims{-7, 1}, Dims{30, 2}, Dims{14, 2}}, {DType::int32, DType::int64})) {
    LinearCrossEntropyCase test_case = make_case(DType::float32, Reduction::none);
    test_case.row_shape = {5, 7};
    test_case.targets_dtype = targets;
    test_case.targets_placement = with_strides(strides, 1);
    check_linear_cross_entropy(test_case);
    // No row is ignored, so rows are not gathered for that reason.
    test_case.target = [](std::int64_t i) { return static_cast<double>(i % 24); };
    check_linear_cross_entropy(test_case);
    test_case.workspace_limit = 9000;
    check_linear_cross_entropy(test_case);
  }
}

TEST_P(LinearCrossEntropy, SoftTargetsAreReadByTheDistanceOfTheirRows) {
  for (const Placement& targets :
       {with_strides({144, 24, 1}), with_strides({180, 30, 1}, 1), with_strides({0, 0, 1}), contiguous_at(1)}) {
    // The rows of hidden have another order in memory than their numbers.
    for (const auto& [hidden, limit] : combine<Placement, std::size_t>(
             {Placement{}, with_strides({16, 64, 1}), with_strides({200, 16, 1})}, {0, 9000})) {
      LinearCrossEntropyCase test_case = with_soft_targets(make_case(DType::float32, Reduction::none));
      test_case.row_shape = {4, 6};
      test_case.targets_placement = targets;
      test_case.hidden_placement = hidden;
      test_case.workspace_limit = limit;
      check_linear_cross_entropy(test_case);
      test_case.class_weight_dtype = DType::float32;
      test_case.options.label_smoothing = 0.1;
      check_linear_cross_entropy(test_case);
    }
  }
}

TEST_P(LinearCrossEntropy, AnUpstreamGradientMayBeExpandedStridedOrHave16Bits) {
  for (const auto& [strides, dtype] :
       combine<Dims, DType>({Dims{0, 0}, Dims{0, 1}, Dims{1, 5}, Dims{-7, 1}, Dims{14, 2}}, floating_point_dtypes())) {
    for (const auto& [grad_loss, limit] : combine<DType, std::size_t>({dtype, accumulator_dtype(dtype)}, {0, 9000})) {
      LinearCrossEntropyCase test_case = make_case(dtype, Reduction::none);
      test_case.row_shape = {5, 7};
      test_case.grad_loss_dtype = grad_loss;
      test_case.grad_loss_placement = with_strides(strides, 1);
      test_case.workspace_limit = limit;
      check_linear_cross_entropy(test_case);
      check_linear_cross_entropy(with_every_option(test_case));
    }
  }
  for (const Reduction reduction : {Reduction::sum, Reduction::mean}) {
    LinearCrossEntropyCase test_case = make_case(DType::bfloat16, reduction);
    test_case.grad_loss_dtype = DType::bfloat16;
    check_linear_cross_entropy(test_case);
  }
}

TEST_P(LinearCrossEntropy, GradientsOfParametersAreAddedToWhatTheyHold) {
  for (const DType dtype : floating_point_dtypes()) {
    for (const auto& [gradient, limit, skips] :
         combine<DType, std::size_t, bool>({dtype, accumulator_dtype(dtype)}, {0, 1, 9000}, {false, true})) {
      LinearCrossEntropyCase plain = make_case(dtype, Reduction::sum);
      plain.accumulates = true;
      plain.grad_head_dtype = plain.grad_bias_dtype = gradient;
      plain.workspace_limit = limit;
      plain.skips_ignored = skips;
      for (const LinearCrossEntropyCase& test_case : of_every_kind(plain)) check_linear_cross_entropy(test_case);
    }
  }
}

TEST_P(LinearCrossEntropy, WithoutAnUpstreamGradientItIsOne) {
  for (const auto& [reduction, dtype] : combine<Reduction, DType>(kReductions, floating_point_dtypes())) {
    LinearCrossEntropyRun absent(make_case(dtype, reduction)), ones(absent.test_case());
    ones.grad_loss.fill([](std::int64_t) { return 1.0; });
    LinearCrossEntropyForwardBackwardArgs args = absent.at_once_args();
    args.grad_loss = {};
    linear_cross_entropy_forward_backward(args);
    linear_cross_entropy_forward_backward(ones.at_once_args());
    absent.download();
    ones.download();
    EXPECT_TRUE(absent.results_equal(ones));
  }
}

TEST_P(LinearCrossEntropy, OutputsThatNobodyAsksForChangeNoOther) {
  // Bit by bit on the CPU. A GPU has faster kernels for calls without these outputs; they round in other places.
  const auto expect_same = [&](const TestTensor& few, const TestTensor& all) {
    if (device().type == DeviceType::cpu) {
      EXPECT_EQ(few.bytes(), all.bytes());
      return;
    }
    for (std::int64_t i = 0; i < all.host().element_count(); ++i) {
      EXPECT_NEAR(few.get(i), all.get(i), 2e-6 * std::max(1.0, std::abs(all.get(i))));
    }
  };
  for (const auto& [reduction, has_ignored] : combine<Reduction, bool>(kReductions, {false, true})) {
    LinearCrossEntropyCase test_case = make_case(DType::float32, reduction);
    test_case.options.z_loss_weight = 0.01;
    if (!has_ignored) test_case.target = [](std::int64_t i) { return static_cast<double>(i % 24); };
    LinearCrossEntropyRun all(test_case), few(test_case);
    all.run();
    LinearCrossEntropyForwardBackwardArgs args = few.at_once_args();
    args.forward.outputs = {.loss = args.forward.outputs.loss};
    linear_cross_entropy_forward_backward(args);
    LinearCrossEntropyForwardArgs forward = few.forward_args();
    forward.outputs = {.loss = forward.outputs.loss};
    linear_cross_entropy_forward(forward);
    few.download();
    expect_same(few.results.loss, all.results.loss);
    expect_same(few.results_at_once.loss, all.results_at_once.loss);
    for (std::size_t i = 0; i < all.gradients.all().size(); ++i) {
      expect_same(*few.gradients_at_once.all()[i].second, *all.gradients_at_once.all()[i].second);
    }
  }
}

TEST_P(LinearCrossEntropy, GradientsAreRescaledWhereTheUpstreamGradientIsKnownLater) {
  for (const auto& [dtype, grad_hidden] : combine<DType, Placement>(
           floating_point_dtypes(), {Placement{}, with_strides({1, 23}), with_strides({20, 1})})) {
    LinearCrossEntropyCase test_case = make_case(dtype);
    test_case.grad_hidden_placement = grad_hidden;
    test_case.grad_head_placement = with_strides({19, 1});
    test_case.grad_bias_dtype = accumulator_dtype(dtype);
    for (const double factor : {1.0, -1.7, 0.0}) {
      LinearCrossEntropyRun run(test_case), scaled(test_case);
      linear_cross_entropy_forward_backward(run.at_once_args());
      linear_cross_entropy_forward_backward(scaled.at_once_args());
      TestTensor grad_loss(device(), accumulator_dtype(dtype), {});
      grad_loss.fill([&](std::int64_t) { return factor; });
      linear_cross_entropy_rescale({.gradients = scaled.at_once_args().gradients, .grad_loss = grad_loss.view()});
      run.download();
      scaled.download();
      const auto unscaled = run.gradients_at_once.all();
      for (std::size_t i = 0; i < unscaled.size(); ++i) {
        const auto& [name, before] = unscaled[i];
        const TestTensor& after = *scaled.gradients_at_once.all()[i].second;
        EXPECT_EQ(after.canary_damage(), "");
        for (std::int64_t e = 0; e < before->host().element_count(); ++e) {
          const double exact = before->get(e) * grad_loss.get(0);
          const double allowed = factor == 1.0 ? 0.0 : allowed_error(before->host().dtype, exact, std::abs(exact));
          ASSERT_LE(std::abs(after.get(e) - exact), allowed) << name << ", element " << e;
        }
      }
    }
  }
}

TEST_P(LinearCrossEntropy, ABackwardTwiceFromOneForwardGivesTheSameBits) {
  for (const std::size_t limit : {0, 9000}) {
    LinearCrossEntropyCase test_case = with_every_option(make_case(DType::bfloat16));
    test_case.workspace_limit = limit;
    LinearCrossEntropyRun run(test_case);
    linear_cross_entropy_forward(run.forward_args());
    linear_cross_entropy_backward(run.backward_args());
    run.download();
    std::vector<std::vector<unsigned char>> first;
    for (const auto& named : run.gradients.all()) first.push_back(named.second->bytes());
    linear_cross_entropy_backward(run.backward_args());
    run.download();
    for (std::size_t i = 0; i < first.size(); ++i) EXPECT_EQ(run.gradients.all()[i].second->bytes(), first[i]);
  }
}

}  // namespace
}  // namespace eaves::testing
