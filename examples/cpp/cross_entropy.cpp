// The cross entropy of a small batch and the gradient of its logits, in one call that overwrites the logits: what a
// training step needs, in the least memory. On the CPU. Prints both, then takes a step against the gradient; returns
// non-zero when the numbers are not what the formulas say, or the step does not lower the loss.
#include <eaves/cross_entropy.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  constexpr int rows = 3, classes = 4;
  const std::vector<float> logits = {2, 1, 0, -1, 0, 0, 0, 0, 1, 3, 2, 1};
  const std::vector<std::int64_t> targets = {0, -100, 2};  // -100: the second row does not count

  using eaves::DType;
  using eaves::TensorView;
  const TensorView target_view = TensorView::contiguous(targets.data(), DType::int64, {rows});

  // One call: afterwards `gradient`, which holds the logits before, is dL/d(logits) of the mean L.
  std::vector<float> gradient = logits;
  float loss = 0;
  eaves::cross_entropy_forward_backward(
      {.forward = {.logits = TensorView::contiguous(gradient.data(), DType::float32, {rows, classes}),
                   .targets = target_view,
                   .loss = TensorView::contiguous(&loss, DType::float32, {})}});

  // The same by the formula: loss = mean(lse - z_t), gradient = (exp(z - lse) - [class is t]) / 2, over 2 rows.
  bool ok = true;
  double expected_loss = 0;
  for (int row = 0; row < rows; ++row) {
    const float* z = &logits[row * classes];
    double sum = 0;
    for (int i = 0; i < classes; ++i) sum += std::exp(z[i]);
    const bool counts = targets[row] != -100;
    if (counts) expected_loss += (std::log(sum) - z[targets[row]]) / 2;

    std::printf("gradient");
    for (int i = 0; i < classes; ++i) {
      const float value = gradient[row * classes + i];
      std::printf(" %7.4f", value);
      const double expected = counts ? (std::exp(z[i]) / sum - (i == targets[row])) / 2 : 0;
      ok = ok && std::abs(value - expected) <= 1e-6;
    }
    std::printf("\n");
  }

  std::vector<float> stepped = logits;
  for (int i = 0; i < rows * classes; ++i) stepped[i] -= 0.5f * gradient[i];
  float next_loss = 0;
  eaves::cross_entropy_forward({.logits = TensorView::contiguous(stepped.data(), DType::float32, {rows, classes}),
                                .targets = target_view,
                                .loss = TensorView::contiguous(&next_loss, DType::float32, {})});
  std::printf("loss %.4f, after a step %.4f\n", loss, next_loss);
  ok = ok && std::abs(loss - expected_loss) <= 1e-6 && next_loss < loss;
  return ok ? 0 : 1;
}
