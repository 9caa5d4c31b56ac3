// The backward of lrpe_cosine against its forward: central differences in float64, the only test that does not use the
// formulas of the gradients.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "ops/lrpe_cosine/lrpe_cosine_test_case.h"
#include "testing/cases.h"
#include "testing/devices.h"

namespace eaves::testing {
namespace {

class LrpeCosineGradient : public OnEachDevice {};
EAVES_EACH_DEVICE(LrpeCosineGradient);

/// The sum of out * grad_out.
double loss_of(LrpeCosineRun& run) {
  lrpe_cosine_forward(run.forward_args());
  runtime::synchronize(run.test_case().device);
  run.out.download();
  double loss = 0.0;
  const std::int64_t count = run.out.host().element_count();
  for (std::int64_t i = 0; i < count; ++i) loss += run.out.get(i) * run.grad_out.get(i);
  return loss;
}

double slope_of(LrpeCosineRun& run, TestTensor& tensor, std::int64_t i) {
  return difference_quotient(tensor, i, 1e-5, [&] { return loss_of(run); });
}

void check_gradients(const LrpeCosineCase& test_case) {
  // The error of the differences: a step squared times a third derivative (theta's has a factor of position^3), and the
  // rounding of a loss of about 30 divided by the step.
  constexpr double kWithin = 1e-6;
  SCOPED_TRACE(description_of(test_case));
  LrpeCosineRun run(test_case);
  run.run();
  ASSERT_TRUE(run.has_written());
  const std::int64_t count = run.x.host().element_count();
  for (std::int64_t i = 0; i < count; ++i) {
    if (test_case.activation == Activation::relu && std::abs(run.x.get(i)) < 1e-4) continue;  // no derivative at 0
    ASSERT_NEAR(run.grad_x.get(i), slope_of(run, run.x, i), kWithin) << "element " << i << " of x";
  }
  const std::int64_t angles = run.theta.host().element_count();
  for (std::int64_t i = 0; i < angles; ++i) {
    ASSERT_NEAR(run.grad_theta.get(i), slope_of(run, run.theta, i), kWithin) << "element " << i << " of theta";
  }
}

TEST_P(LrpeCosineGradient, BackwardIsTheDerivativeOfForward) {
  struct Case {
    Dims shape, theta, grid;
    std::int64_t extra_tokens;
    const char* reason;
  };
  const std::vector<Case> cases = {
      {{1, 2, 6, 8}, {2, 8}, {}, 0, "an angle for each feature"},
      {{2, 2, 5, 7}, {1, 1}, {}, 1, "one angle, an extra token"},
      {{1, 2, 7, 9}, {2, 3}, {2, 3}, 1, "two axes, and features without one"},
      {{1, 1, 8, 7}, {1, 3}, {2, 2, 2}, 0, "three axes, cut at D"},
      {{2, 1, 4, 5}, {1, 9}, {}, 0, "more angles than features"},
  };
  for (const auto& [c, activation] : combine<Case, LrpeCosineActivation>(cases, every_activation())) {
    SCOPED_TRACE(c.reason);
    check_gradients(with_activation({.dtype = DType::float64,
                                     .shape = c.shape,
                                     .theta_shape = c.theta,
                                     .grid = c.grid,
                                     .extra_tokens = c.extra_tokens},
                                    activation));
  }
}

TEST_P(LrpeCosineGradient, BackwardIsTheDerivativeOfForwardAtAnyPositions) {
  const LrpeCosineCase plain{
      .dtype = DType::float64, .shape = {2, 1, 4, 3}, .theta_shape = {1, 3}, .activation = Activation::silu};
  LrpeCosineCase offsets = plain;
  offsets.offsets = {3, -4};
  LrpeCosineCase positions = plain;
  positions.positions = {5, -2, 0, 3, 1, 1, 7, -7};
  LrpeCosineCase packed = plain;
  packed.cu_seqlens = {0, 1, 4};
  for (const LrpeCosineCase& test_case : {offsets, positions, packed}) check_gradients(test_case);
}

}  // namespace
}  // namespace eaves::testing
