// The gradients of linear_cross_entropy against its forward, by central differences in float64: the one test that does
// not use the gradients' formulas.
#include <gtest/gtest.h>

#include <vector>

#include "ops/linear_cross_entropy/linear_cross_entropy_test_case.h"
#include "testing/cases.h"
#include "testing/devices.h"

namespace eaves::testing {
namespace {

class LinearCrossEntropyGradient : public OnEachDevice {};
EAVES_EACH_DEVICE(LinearCrossEntropyGradient);

/// The sum of every output times its upstream gradient: the losses; in the backward also lse and entropy.
double loss_of(LinearCrossEntropyRun& run, bool is_backward) {
  linear_cross_entropy_forward(run.forward_args());
  runtime::synchronize(run.test_case().device);
  for (const auto& named : run.results.all()) named.second->download();
  double sum = 0.0;
  const std::int64_t losses = run.results.loss.host().element_count();
  for (std::int64_t i = 0; i < losses; ++i) sum += run.results.loss.get(i) * run.grad_loss.get(i);
  const std::int64_t rows = run.results.lse.host().element_count();
  for (std::int64_t i = 0; is_backward && i < rows; ++i) {
    if (run.test_case().has_grad_lse) sum += run.results.lse.get(i) * run.grad_lse.get(i);
    if (run.test_case().has_grad_entropy) sum += run.results.entropy.get(i) * run.grad_entropy.get(i);
  }
  return sum;
}

double slope_of(LinearCrossEntropyRun& run, TestTensor& tensor, std::int64_t i, bool is_backward) {
  return difference_quotient(tensor, i, 1e-5, [&] { return loss_of(run, is_backward); });
}

void check_gradients(const LinearCrossEntropyCase& test_case) {
  // The error of the differences themselves: the rounding of a loss of about 100 over the step, and the step squared
  // times a third derivative.
  constexpr double kWithin = 1e-7;
  SCOPED_TRACE(description_of(test_case));
  LinearCrossEntropyRun run(test_case);
  run.run();
  const auto expect_derivatives = [&](TestTensor& of, const TestTensor& backward, const TestTensor& at_once,
                                      const char* name) {
    for (std::int64_t i = 0; i < of.host().element_count(); ++i) {
      ASSERT_NEAR(backward.get(i), slope_of(run, of, i, true), kWithin) << "element " << i << " of " << name;
      ASSERT_NEAR(at_once.get(i), slope_of(run, of, i, false), kWithin) << "element " << i << " of " << name;
    }
  };
  expect_derivatives(run.hidden, run.gradients.hidden, run.gradients_at_once.hidden, "hidden");
  expect_derivatives(run.head, run.gradients.head, run.gradients_at_once.head, "head");
  expect_derivatives(run.bias, run.gradients.bias, run.gradients_at_once.bias, "bias");
}

TEST_P(LinearCrossEntropyGradient, BothWaysAreTheDerivativeOfTheForward) {
  for (const auto& [reduction, limit] :
       combine<Reduction, std::size_t>({Reduction::none, Reduction::sum, Reduction::mean}, {0, 2000})) {
    const LinearCrossEntropyCase plain{.dtype = DType::float64,
                                       .row_shape = {6},
                                       .features = 5,
                                       .classes = 7,
                                       .options = {.reduction = reduction},
                                       .deviation = 1.5,
                                       .bias_dtype = DType::float64,
                                       .workspace_limit = limit};
    LinearCrossEntropyCase transformed = plain;
    transformed.options.scale = 0.7;
    transformed.options.softcap = 5.0;
    transformed.options.label_smoothing = 0.2;
    transformed.class_weight_dtype = DType::float64;
    LinearCrossEntropyCase everything = transformed;
    everything.options.z_loss_weight = 0.01;
    everything.has_normalizer = true;
    everything.has_grad_lse = everything.has_grad_entropy = true;
    LinearCrossEntropyCase soft = everything;
    soft.targets_dtype = DType::float64;
    for (const LinearCrossEntropyCase& test_case : {plain, transformed, everything, soft}) check_gradients(test_case);
  }
}

}  // namespace
}  // namespace eaves::testing
