// More than 2^31 logits, which are never all in memory: tests every index that would overflow 32 bits. The test is
// slow, so its name starts with Slow. It is skipped, with the reason, on a CPU and without enough memory.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "eaves/linear_cross_entropy.h"
#include "runtime/runtime.h"
#include "testing/devices.h"
#include "testing/memory.h"

namespace eaves::testing {
namespace {

class SlowLinearCrossEntropyOnGpu : public OnGpu {};

/// hidden and head are 0 everywhere (bytes of zeros), except feature 0 of the last row and of the last class: their
/// logit is 12. The last class is the target of the last row; class 0 is the target of all other rows.
TEST_F(SlowLinearCrossEntropyOnGpu, LogitsBeyondTheRangeOfInt32AreComputedInBlocks) {
  constexpr std::int64_t kRows = 12288, kClasses = 262144, kFeatures = 64;  // 3.2e9 logits
  constexpr std::uint16_t kOne = 0x3f80, kTwelve = 0x4140;                  // in bfloat16
  constexpr double kWithin = 2e-6;                                          // float32's tolerance
  constexpr std::int64_t kBytes = std::int64_t{4} << 30;
  if (runtime::free_memory_bytes(kCuda) < kBytes) GTEST_SKIP() << "needs " << (kBytes >> 20) << " MiB";
  const Memory hidden(kCuda, kRows * kFeatures * 2), head(kCuda, kClasses * kFeatures * 2);
  const Memory grad_hidden(kCuda, kRows * kFeatures * 2), grad_head(kCuda, kClasses * kFeatures * 4);
  const Memory grad_bias(kCuda, kClasses * 4), targets(kCuda, kRows * 8), argmax(kCuda, kRows * 8);
  const Memory loss(kCuda, kRows * 4), lse(kCuda, kRows * 4), grad_loss(kCuda, kRows * 4);
  runtime::fill_bytes(kCuda, hidden.data(), 0, kRows * kFeatures * 2);
  runtime::fill_bytes(kCuda, head.data(), 0, kClasses * kFeatures * 2);
  const auto set = [](const Memory& memory, std::int64_t element, std::uint16_t bits) {
    runtime::copy(static_cast<std::uint16_t*>(memory.data()) + element, kCuda, &bits, kCpu, 2);
  };
  set(hidden, (kRows - 1) * kFeatures, kOne);
  set(head, (kClasses - 1) * kFeatures, kTwelve);
  std::vector<std::int64_t> classes(kRows, 0);
  classes.back() = kClasses - 1;
  targets.write(classes);
  grad_loss.write(std::vector<float>(kRows, 1.0f));

  const LinearCrossEntropyForwardArgs forward{.inputs = {.hidden = hidden.view(DType::bfloat16, {kRows, kFeatures}),
                                                         .head = head.view(DType::bfloat16, {kClasses, kFeatures}),
                                                         .targets = targets.view(DType::int64, {kRows}),
                                                         .options = {.reduction = Reduction::none}},
                                              .outputs = {.loss = loss.view(DType::float32, {kRows}),
                                                          .lse = lse.view(DType::float32, {kRows}),
                                                          .argmax = argmax.view(DType::int64, {kRows})}};
  const LinearCrossEntropyGradients gradients{.grad_hidden = grad_hidden.view(DType::bfloat16, {kRows, kFeatures}),
                                              .grad_head = grad_head.view(DType::float32, {kClasses, kFeatures}),
                                              .grad_bias = grad_bias.view(DType::float32, {kClasses})};
  const double plain_lse = std::log(static_cast<double>(kClasses));
  const double last_lse = std::log(static_cast<double>(kClasses - 1) + std::exp(12.0));
  const auto expect_results = [&] {
    runtime::synchronize(kCuda);
    const std::vector<float> losses = loss.read<float>(kRows), of_bias = grad_bias.read<float>(kClasses);
    EXPECT_NEAR(losses[0], plain_lse, kWithin * plain_lse);
    EXPECT_NEAR(losses[kRows - 2], plain_lse, kWithin * plain_lse);
    EXPECT_NEAR(losses[kRows - 1], last_lse - 12.0, kWithin * last_lse);
    EXPECT_NEAR(lse.read<float>(kRows)[kRows - 1], last_lse, kWithin * last_lse);
    EXPECT_EQ(argmax.read<std::int64_t>(kRows)[kRows - 1], kClasses - 1);
    // Each probability is rounded to bfloat16, by up to 2^-9 of itself, in the same direction in all rows.
    const double probability = 1.0 / static_cast<double>(kClasses), of_last = std::exp(12.0 - last_lse);
    const double rows = static_cast<double>(kRows - 1);
    EXPECT_NEAR(of_bias[0], rows * (probability - 1.0), rows / 512.0);
    EXPECT_NEAR(of_bias[kClasses - 2], rows * probability, rows * probability / 256.0);
    EXPECT_NEAR(of_bias[kClasses - 1], rows * probability + of_last - 1.0, 2e-3);
    const std::vector<float> of_head = grad_head.read<float>(kClasses * kFeatures);
    EXPECT_NEAR(of_head[static_cast<std::size_t>((kClasses - 1) * kFeatures)], of_last - 1.0, 2e-3);
    EXPECT_EQ(of_head[static_cast<std::size_t>((kClasses - 1) * kFeatures + 1)], 0.0f);
  };
  linear_cross_entropy_forward_backward(
      {.forward = forward, .grad_loss = grad_loss.view(DType::float32, {kRows}), .gradients = gradients});
  expect_results();
  linear_cross_entropy_forward(forward);
  linear_cross_entropy_backward({.grad_loss = grad_loss.view(DType::float32, {kRows}),
                                 .inputs = forward.inputs,
                                 .lse = forward.outputs.lse,
                                 .gradients = gradients});
  expect_results();
}

}  // namespace
}  // namespace eaves::testing
