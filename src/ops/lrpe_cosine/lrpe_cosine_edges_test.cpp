// lrpe_cosine with infinities and NaN, with elements so large that their exponential overflows, with zeros of either
// sign, and with empty tensors.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "ops/lrpe_cosine/lrpe_cosine_test_case.h"
#include "testing/cases.h"
#include "testing/devices.h"

namespace eaves::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

class LrpeCosineEdges : public OnEachDevice {};
EAVES_EACH_DEVICE(LrpeCosineEdges);

double normal(std::int64_t i) { return random_normal(67, static_cast<std::uint64_t>(i)); }

TEST_P(LrpeCosineEdges, InfinitiesAndNaNFollowTheFormula) {
  // Each feature has one special value at every position, also in extra tokens, where inf * sin(0) is NaN. So theta's
  // gradient of one feature does not mix special values.
  const double specials[] = {kInfinity, -kInfinity, kNaN, 0.0, 1.5, -1.5, -0.0};
  for (const LrpeCosineActivation& activation : every_activation()) {
    if (activation.activation == Activation::softmax) continue;
    for (const auto& [dtype, features] : combine<DType, std::int64_t>(floating_point_dtypes(), {7, 64})) {
      check_lrpe_cosine(with_activation({.dtype = dtype,
                                         .shape = {2, 2, 6, features},
                                         .theta_shape = {2, features},
                                         .extra_tokens = 2,
                                         .value = [=](std::int64_t i) { return specials[i % features % 7]; }},
                                        activation));
    }
  }
}

TEST_P(LrpeCosineEdges, ANaNStaysWhereItIs) {
  // One special element of x, in the middle: with elementwise activations it changes no other element.
  for (const auto& [activation, special] :
       combine<LrpeCosineActivation, double>(every_activation(), {kNaN, kInfinity, -kInfinity})) {
    check_lrpe_cosine(with_activation({.dtype = DType::bfloat16,
                                       .shape = {2, 3, 9, 16},
                                       .theta_shape = {3, 16},
                                       .value = [=](std::int64_t i) { return i == 469 ? special : normal(i); }},
                                      activation));
  }
}

TEST_P(LrpeCosineEdges, ElementsThatAnExponentialCannotHold) {
  // float32 can represent e^88 but not e^89, and e^-103 (a subnormal number) but not e^-104.
  const std::vector<double> sizes = {20.0, 80.0, 87.0, 88.0, 89.0, 103.0, 104.0, 1e4, 3e4};
  for (const auto& [activation, dtype, size, sign] : combine<LrpeCosineActivation, DType, double, double>(
           every_activation(), floating_point_dtypes(), sizes, {1.0, -1.0})) {
    check_lrpe_cosine(with_activation({.dtype = dtype,
                                       .shape = {1, 2, 5, 20},
                                       .theta_shape = {2, 1},
                                       .value = [=](std::int64_t i) { return i % 3 == 0 ? sign * size : normal(i); }},
                                      activation));
  }
}

TEST_P(LrpeCosineEdges, SoftmaxesOfHugeElementsAreThoseOfTheirDifferences) {
  for (const auto& [activation, dtype] :
       combine<LrpeCosineActivation, DType>({every_activation()[4], every_activation()[5]}, floating_point_dtypes())) {
    const double huge = 0.75 * largest_finite(dtype);
    for (const double sign : {1.0, -1.0}) {
      // The mask is the largest number of the dtype; two elements of each row, or of each feature, are not masked.
      check_lrpe_cosine(with_activation({.dtype = dtype,
                                         .shape = {1, 2, 10, 20},
                                         .theta_shape = {2, 20},
                                         .value =
                                             [=](std::int64_t i) {
                                               const bool is_masked = (i % 20 + i / 20) % 5 != 2;
                                               return is_masked ? sign * -huge : (sign < 0.0 ? -huge : normal(i));
                                             }},
                                        activation));
    }
    // Every element raises the maximum so far that the exponential of the difference overflows float32.
    check_lrpe_cosine(
        with_activation({.dtype = dtype,
                         .shape = {1, 1, 150, 24},
                         .theta_shape = {1, 1},
                         .value = [](std::int64_t i) { return 100.0 * static_cast<double>(i % 24 + i / 24) - 9000.0; }},
                        activation));
  }
}

TEST_P(LrpeCosineEdges, SoftmaxesOverInfinitiesFollowPyTorch) {
  struct Special {
    double first, others;  // the value of one element of a row, and of the others; 0: normal()
    const char* reason;
  };
  const Special specials[] = {
      {-kInfinity, -kInfinity, "all -inf: NaN"},
      {-kInfinity, 0.0, "one -inf: its place is 0, and its gradient"},
      {1.5, -kInfinity, "one finite element: 1, and gradient 0"},
      {kInfinity, 0.0, "a +inf: NaN everywhere"},
      {kInfinity, -kInfinity, "a +inf among -inf: NaN everywhere"},
      {kInfinity, kInfinity, "all +inf: NaN"},
      {kNaN, 0.0, "a NaN: NaN everywhere"},
      {kNaN, -kInfinity, "a NaN among -inf: NaN everywhere"},
      {0.0, 0.0, "nothing special beside all these"},
  };
  constexpr std::int64_t kRows = std::size(specials);
  for (const auto& [activation, dtype, columns] : combine<LrpeCosineActivation, DType, std::int64_t>(
           {every_activation()[4], every_activation()[5]}, floating_point_dtypes(), {2, 8, 40, 1000})) {
    const bool is_over_sequence = activation.dim == -2;
    for (const std::int64_t at : {std::int64_t{0}, columns / 2, columns - 1}) {
      const std::int64_t positions = is_over_sequence ? columns : kRows;
      const std::int64_t features = is_over_sequence ? kRows : columns;
      check_lrpe_cosine(with_activation({.dtype = dtype,
                                         .shape = {1, 1, positions, features},
                                         .theta_shape = {1, features},
                                         .value =
                                             [&](std::int64_t i) {
                                               const std::int64_t n = i / features, d = i % features;
                                               const Special& special = specials[is_over_sequence ? d : n];
                                               const bool is_first = (is_over_sequence ? n : d) == at;
                                               const double value = is_first ? special.first : special.others;
                                               return value == 0.0 ? normal(i) : value;
                                             }},
                                        activation));
    }
  }
}

TEST_P(LrpeCosineEdges, ABlockOfMinusInfinityBeforeTheRestChangesNothing) {
  // The first pieces of the sequence have no finite element, for any size of a kernel's pieces.
  for (const DType dtype : {DType::bfloat16, DType::float32}) {
    check_lrpe_cosine({.dtype = dtype,
                       .shape = {1, 1, 5003, 8},
                       .theta_shape = {1, 8},
                       .activation = Activation::softmax,
                       .activation_dim = -2,
                       .value = [](std::int64_t i) { return i < 4900 * 8 ? -kInfinity : normal(i); }});
    check_lrpe_cosine({.dtype = dtype,
                       .shape = {1, 1, 3, 5003},
                       .theta_shape = {1, 5003},
                       .activation = Activation::softmax,
                       .value = [](std::int64_t i) { return i % 5003 < 4900 ? -kInfinity : normal(i); }});
  }
}

TEST_P(LrpeCosineEdges, AMaximumThatRisesLateIsFollowed) {
  // Each quarter raises the maximum, by less and by more than the slack of any kernel.
  for (const auto& [step, dtype] :
       combine<double, DType>({3.0, 6.0, 25.0, 70.0}, {DType::bfloat16, DType::float32, DType::float64})) {
    check_lrpe_cosine({.dtype = dtype,
                       .shape = {1, 1, 1200, 8},
                       .theta_shape = {1, 8},
                       .activation = Activation::softmax,
                       .activation_dim = -2,
                       .value = [=](std::int64_t i) { return step * static_cast<double>(i / 8 / 300); }});
  }
}

TEST_P(LrpeCosineEdges, ReluIsZeroWithDerivativeZeroAtZerosOfEitherSign) {
  for (const auto& [dtype, features] : combine<DType, std::int64_t>(floating_point_dtypes(), {5, 64})) {
    LrpeCosineRun run({.dtype = dtype,
                       .shape = {1, 2, 6, features},
                       .theta_shape = {2, features},
                       .activation = Activation::relu,
                       .value = [](std::int64_t i) { return i % 3 == 0 ? 0.0 : (i % 3 == 1 ? -0.0 : -1e-30); }});
    run_between_canaries(run);
    const std::int64_t count = 12 * features;
    for (std::int64_t i = 0; i < 2 * count; ++i) ASSERT_EQ(run.out.get(i), 0.0) << "element " << i;
    for (std::int64_t i = 0; i < count; ++i) ASSERT_EQ(run.grad_x.get(i), 0.0) << "element " << i;
    for (std::int64_t i = 0; i < 2 * features; ++i) ASSERT_EQ(run.grad_theta.get(i), 0.0) << "element " << i;
  }
}

TEST_P(LrpeCosineEdges, ReluPassesThePositiveAndTheNaN) {
  // 1e-37 is small but positive.
  LrpeCosineRun run({.dtype = DType::float32,
                     .shape = {1, 1, 1, 4},
                     .theta_shape = {1, 4},
                     .activation = Activation::relu,
                     .value =
                         [](std::int64_t i) {
                           const double values[] = {1e-37, kNaN, kInfinity, -kInfinity};
                           return values[i];
                         },
                     .upstream = [](std::int64_t) { return 2.0; }});
  run_between_canaries(run);
  EXPECT_EQ(run.out.get(0), static_cast<double>(1e-37f));
  EXPECT_TRUE(std::isnan(run.out.get(1)));
  EXPECT_EQ(run.out.get(2), kInfinity);
  EXPECT_EQ(run.out.get(3), 0.0);
  for (const std::int64_t i : {0, 1, 2}) EXPECT_EQ(run.grad_x.get(i), 2.0) << "element " << i;
  EXPECT_EQ(run.grad_x.get(3), 0.0);
}

TEST_P(LrpeCosineEdges, AThetaThatIsNoNumberGivesNaNWhereItIsUsedAndNowhereElse) {
  for (const auto& [activation, dtype, special, features] : combine<LrpeCosineActivation, DType, double, std::int64_t>(
           every_activation(), floating_point_dtypes(), {kNaN, kInfinity, -kInfinity}, {20, 64})) {
    // At position 0 the product of an infinity or NaN with 0 is NaN too. Extra tokens do not use theta.
    check_lrpe_cosine(with_activation({.dtype = dtype,
                                       .shape = {2, 3, 5, features},
                                       .theta_shape = {3, 16},
                                       .extra_tokens = 1,
                                       .angle = [=](std::int64_t i) { return i == 21 ? special : normal(i); }},
                                      activation));
  }
}

TEST_P(LrpeCosineEdges, AnUpstreamGradientThatIsNoNumberStaysWhereItIs) {
  for (const auto& [activation, special] :
       combine<LrpeCosineActivation, double>(every_activation(), {kNaN, kInfinity})) {
    check_lrpe_cosine(
        with_activation({.dtype = DType::bfloat16,
                         .shape = {1, 2, 7, 24},
                         .theta_shape = {2, 24},
                         .offset = 1,
                         .value = normal,
                         .upstream = [=](std::int64_t i) { return i % 48 == 7 ? special : normal(i + 1); }},
                        activation));
  }
}

// --------------------------------------------------------------------------------------------------- empty tensors

TEST_P(LrpeCosineEdges, EmptyTensorsAreLegalAndThetasGradientIsZeroThere) {
  struct Case {
    Dims shape;
    Dims theta;
    Dims grid;
    std::int64_t extra_tokens;
    const char* reason;
  };
  const std::vector<Case> cases = {
      {{0, 3, 5, 8}, {3, 8}, {}, 0, "no batch entries"},
      {{0, 3, 5, 8}, {1, 1}, {}, 2, "likewise"},
      {{2, 0, 5, 8}, {0, 8}, {}, 0, "no heads"},
      {{2, 0, 5, 8}, {1, 8}, {}, 0, "no heads but one of theta"},
      {{2, 3, 0, 8}, {3, 8}, {}, 0, "no positions"},
      {{2, 3, 0, 8}, {3, 4}, {0, 7}, 0, "no positions, in a grid"},
      {{2, 3, 5, 0}, {3, 8}, {}, 0, "no features"},
      {{2, 3, 5, 0}, {3, 0}, {}, 0, "no features, and no angles"},
      {{2, 3, 5, 8}, {3, 0}, {}, 0, "no angles: a cosine half of x, a sine half of 0"},
      {{2, 3, 5, 8}, {1, 0}, {}, 1, "likewise"},
      {{2, 3, 5, 8}, {3, 0}, {5, 1}, 0, "likewise, in a grid"},
      {{2, 3, 4, 8}, {3, 8}, {}, 4, "extra tokens alone"},
      {{2, 3, 4, 8}, {3, 4}, {0, 3}, 4, "extra tokens alone, beside a grid without cells"},
      {{2, 3, 4, 8}, {3, 4}, {3, 0}, 4, "likewise, the last axis"},
      {{1, 1, 1, 1}, {1, 1}, {1, 1}, 0, "a grid of one cell"},
  };
  for (const auto& [c, activation, dtype] : combine<Case, LrpeCosineActivation, DType>(
           cases, every_activation(), {DType::bfloat16, DType::float32, DType::float64})) {
    SCOPED_TRACE(c.reason);
    // Compares with the oracle: without positions the lse is -inf, and a sum is 0.
    check_lrpe_cosine(with_activation(
        {.dtype = dtype, .shape = c.shape, .theta_shape = c.theta, .grid = c.grid, .extra_tokens = c.extra_tokens},
        activation));
  }
}

TEST_P(LrpeCosineEdges, ThetasGradientIsZeroByItsStridesWhereNothingIsSummed) {
  for (const Dims& shape : {Dims{2, 3, 0, 8}, Dims{2, 3, 4, 8}}) {
    LrpeCosineRun run({.dtype = DType::bfloat16,
                       .shape = shape,
                       .theta_shape = {3, 8},
                       .extra_tokens = shape[2],
                       .has_grad_x = false,
                       .grad_theta_placement = with_strides({-30, 3}, 1)});
    run_between_canaries(run);
    for (std::int64_t i = 0; i < 24; ++i) ASSERT_EQ(run.grad_theta.get(i), 0.0) << "element " << i;
  }
}

TEST_P(LrpeCosineEdges, PositionsOfNothingAreLegal) {
  // No tokens: an empty list of positions, cu_seqlens of no sequence (one entry), and of one empty sequence.
  TestTensor positions(device(), DType::int64, {0}), offsets(device(), DType::int32, {2});
  TestTensor starts(device(), DType::int64, {1}), two_starts(device(), DType::int32, {2});
  offsets.fill([](std::int64_t) { return 5.0; });
  starts.fill([](std::int64_t) { return 0.0; });
  two_starts.fill([](std::int64_t) { return 0.0; });
  for (const int kind : {0, 1, 2, 3}) {
    LrpeCosineRun run({.dtype = DType::float32, .shape = {2, 3, 0, 8}, .theta_shape = {3, 8}, .has_grad_x = false});
    LrpeCosineForwardArgs forward = run.forward_args();
    LrpeCosineBackwardArgs backward = run.backward_args();
    for (LrpeAngles* angles : {&forward.angles, &backward.angles}) {
      if (kind == 0) angles->positions = positions.view();
      if (kind == 1) angles->offsets = offsets.view();
      if (kind == 2) angles->cu_seqlens = starts.view();
      if (kind == 3) angles->cu_seqlens = two_starts.view();
    }
    lrpe_cosine_forward(forward);
    lrpe_cosine_backward(backward);
    run.download();
    for (std::int64_t i = 0; i < 24; ++i) ASSERT_EQ(run.grad_theta.get(i), 0.0) << "element " << i;
  }
}

TEST_P(LrpeCosineEdges, PositionsOfExtraTokensAreNotRead) {
  // The positions of extra tokens are arbitrary, and their memory need not be mapped.
  LrpeCosineCase test_case{.dtype = DType::bfloat16,
                           .shape = {2, 3, 6, 16},
                           .theta_shape = {3, 16},
                           .extra_tokens = 3,
                           .positions = {7, 8, 9, 1, 2, 3}};
  LrpeCosineRun expected(test_case);
  expected.run();
  test_case.positions = {std::int64_t{1} << 52, -1, 0, 1, 2, 3};
  LrpeCosineRun run(test_case);
  run.run();
  EXPECT_TRUE(run.results_equal(expected));
}

}  // namespace
}  // namespace eaves::testing
