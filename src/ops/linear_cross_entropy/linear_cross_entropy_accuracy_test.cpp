// The accuracy contract, measured: for every dtype and size of logits the worst error against the float64 oracle, as a
// share of what is allowed. Of 16 bits, a gradient's share is its error, of all elements together, over 1.15 times that
// of one product in float32 of exact factors that were rounded once; of float32 and float64 that of its worst element.
// The test prints the table that docs/numerics.md shows, and fails where a share exceeds 1.
#include <algorithm>
#include <cstdio>

#include "ops/linear_cross_entropy/linear_cross_entropy_test_case.h"
#include "testing/cases.h"
#include "testing/devices.h"

namespace eaves::testing {
namespace {

class LinearCrossEntropyAccuracy : public OnEachDevice {
 protected:
  const char* device_name() const { return GetParam() == DeviceType::cpu ? "CPU" : "GPU"; }
};
EAVES_EACH_DEVICE(LinearCrossEntropyAccuracy);

/// Of logits: a model that has just been initialised, one that is trained, and the normal numbers of hidden and head
/// over 4096 features.
const std::vector<double> kDeviations = {1.3, 4.0, 64.0};

LinearCrossEntropyCase make_case(DType dtype, double deviation) {
  return {
      .dtype = dtype, .row_shape = {80}, .features = 64, .classes = 500, .deviation = deviation, .bias_dtype = dtype};
}

void print_row(const char* dtype, double deviation, const char* how, const LinearCrossEntropyShares& shares) {
  std::printf("| %s | %g | %s | %.2f | %.2f | %.2f | %.2f | %.2f |\n", dtype, deviation, how, shares.loss, shares.lse,
              shares.grad_hidden, shares.grad_head, shares.grad_bias);
}

TEST_P(LinearCrossEntropyAccuracy, EveryResultIsWithinTheContract) {
  std::printf("| %s | deviation of logits | computed | loss | lse | grad_hidden | grad_head | grad_bias |\n",
              device_name());
  std::printf("|---|---|---|---|---|---|---|---|\n");
  struct Way {
    const char* name;
    std::size_t limit;  ///< 0: one chunk
  };
  // The bytes are those of about 30 rows, and in the backward of half as many classes.
  for (const auto& [dtype, deviation] : combine<DType, double>(floating_point_dtypes(), kDeviations)) {
    for (const Way& way : {Way{"at once", 0}, Way{"in chunks", size_of(accumulator_dtype(dtype)) * 16000}}) {
      LinearCrossEntropyShares worst;
      for (const Reduction reduction : {Reduction::none, Reduction::mean}) {
        LinearCrossEntropyCase test_case = make_case(dtype, deviation);
        test_case.options.reduction = reduction;
        test_case.workspace_limit = way.limit;
        worst.raise(check_linear_cross_entropy(test_case));  // fails above 1
        test_case.skips_ignored = true;
        test_case.grad_head_dtype = test_case.grad_bias_dtype = accumulator_dtype(dtype);
        worst.raise(check_linear_cross_entropy(test_case));
      }
      print_row(name_of(dtype), deviation, way.name, worst);
      EXPECT_LE(worst.worst(), 1.0) << name_of(dtype) << ", deviation " << deviation << ", " << way.name;
    }
  }
}

TEST_P(LinearCrossEntropyAccuracy, EveryOptionIsWithinTheContract) {
  for (const auto& [dtype, deviation] : combine<DType, double>(floating_point_dtypes(), kDeviations)) {
    LinearCrossEntropyCase test_case = make_case(dtype, deviation);
    test_case.options.label_smoothing = 0.1;
    test_case.options.softcap = 30.0;
    test_case.options.z_loss_weight = 1e-4;
    test_case.class_weight_dtype = DType::float32;
    test_case.has_grad_lse = test_case.has_grad_entropy = true;
    EXPECT_LE(check_linear_cross_entropy(test_case).worst(), 1.0) << name_of(dtype) << ", deviation " << deviation;
  }
}

/// ||a - b|| / ||b||
double distance(const reference::Matrix& a, const reference::Matrix& b) {
  double error = 0.0, size = 0.0;
  for (std::size_t i = 0; i < b.values.size(); ++i) {
    error += std::pow(a.values[i] - b.values[i], 2);
    size += std::pow(b.values[i], 2);
  }
  return std::sqrt(error / size);
}

TEST_P(LinearCrossEntropyAccuracy, LogitsThatWereRoundedToSixteenBitsWouldMissTheContract) {
  // grad_bias of a single row is the gradient of its logits, rounded once: in classes that are not the target their
  // probabilities.
  std::printf("| %s: deviation of logits | probabilities | exact, rounded once | from bfloat16 logits |\n",
              device_name());
  std::printf("|---|---|---|---|\n");
  constexpr std::int64_t kRows = 10;
  for (const double deviation : kDeviations) {
    LinearCrossEntropyCase test_case = make_case(DType::bfloat16, deviation);
    test_case.row_shape = {1};
    test_case.options.reduction = Reduction::sum;
    test_case.grad_bias_dtype = DType::float32;
    test_case.bias_dtype = {};
    test_case.wanted = {.hidden = false, .head = false, .bias = true};
    reference::Matrix actual(0, test_case.classes), exact = actual, once = actual, from_rounded = actual;
    for (std::int64_t i = 0; i < kRows; ++i) {
      test_case.hidden = [=](std::int64_t d) { return random_normal(41, static_cast<std::uint64_t>(i * 64 + d)); };
      test_case.target = [=](std::int64_t) { return static_cast<double>(17 * i); };
      LinearCrossEntropyRun run(test_case);
      run.grad_loss.fill([](std::int64_t) { return 1.0; });
      run.run();
      reference::LinearCrossEntropy forward(run.forward_args(&TestTensor::host).inputs);
      const auto append = [](reference::Matrix& to, const std::vector<double>& values) {
        ++to.rows;
        to.values.insert(to.values.end(), values.begin(), values.end());
      };
      const auto probabilities = [&] {
        std::vector<double> values = logits_gradient(forward, {.loss = {1.0}}).values.values;
        values[static_cast<std::size_t>(17 * i)] = 0.0;
        return values;
      };
      append(exact, probabilities());
      std::vector<double> written, rounded_once, of_rounded = forward.logits.values;
      for (std::int64_t v = 0; v < test_case.classes; ++v) {
        written.push_back(v == 17 * i ? 0.0 : run.gradients_at_once.bias.get(v));
        rounded_once.push_back(rounded(DType::bfloat16, exact.at(i, v)));
      }
      append(actual, written);
      append(once, rounded_once);
      for (double& logit : of_rounded) logit = rounded(DType::bfloat16, logit);
      const Dims shape = {1, test_case.classes};
      const TensorView targets = run.targets.host();
      forward.rows[0] = reference::cross_entropy_row(
          {.logits = TensorView::contiguous(of_rounded.data(), DType::float64, shape), .targets = targets}, 0);
      append(from_rounded, probabilities());
    }
    const double ours = distance(actual, exact), best = distance(once, exact), worse = distance(from_rounded, exact);
    std::printf("| %g | %.2e | %.2e | %.2e |\n", deviation, ours, best, worse);
    EXPECT_LE(ours, 1.15 * best);
    EXPECT_GT(worse, 2.0 * 1.15 * best);
  }
}

}  // namespace
}  // namespace eaves::testing
