// A head and its loss without the logits, over two micro-batches: each call adds the head's gradient to one float32
// buffer, and divides by the rows that count in both. On the CPU. Prints the losses and the gradient; returns non-zero
// where they are not what one pass over all rows gives by the formula.
#include <eaves/linear_cross_entropy.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  constexpr int batches = 2, rows = 2, features = 3, classes = 4;
  const std::vector<float> x = {1, -1, 0.5f, 0, 2, 1, -2, 0, 1, 0.5f, 0.5f, 3};  // [batches * rows, features]
  const std::vector<float> weight = {1, 0, -1, 0.5f, 2, 0, -1, 1, 1, 0, -0.5f, 2};
  const std::vector<std::int64_t> targets = {0, 3, -100, 2};  // -100: this row does not count
  const float counted = 3;

  using eaves::DType;
  using eaves::TensorView;
  std::vector<float> grad_weight(classes * features), grad_x(x.size());
  float loss[batches];
  for (int batch = 0; batch < batches; ++batch) {
    const int first = batch * rows;
    eaves::linear_cross_entropy_forward_backward(
        {.forward = {.inputs = {.x = TensorView::contiguous(&x[first * features], DType::float32, {rows, features}),
                                .weight = TensorView::contiguous(weight.data(), DType::float32, {classes, features}),
                                .targets = TensorView::contiguous(&targets[first], DType::int64, {rows})},
                     .normalizer = TensorView::contiguous(&counted, DType::float32, {}),
                     .outputs = {.loss = TensorView::contiguous(&loss[batch], DType::float32, {})}},
         .gradients = {.grad_x = TensorView::contiguous(&grad_x[first * features], DType::float32, {rows, features}),
                       .grad_weight = TensorView::contiguous(grad_weight.data(), DType::float32, {classes, features}),
                       .accumulates = true}});
    std::printf("loss of micro-batch %d: %.4f\n", batch, loss[batch]);
  }

  // The same by the formula: z = x weight^T, loss = mean(lse - z_t), and dL/dz = (exp(z - lse) - [class is t]) / 3.
  double expected_loss = 0;
  std::vector<double> expected_weight(grad_weight.size()), expected_x(x.size());
  for (int row = 0; row < batches * rows; ++row) {
    if (targets[row] == -100) continue;
    double z[classes] = {}, sum = 0;
    for (int v = 0; v < classes; ++v) {
      for (int d = 0; d < features; ++d) z[v] += x[row * features + d] * weight[v * features + d];
      sum += std::exp(z[v]);
    }
    expected_loss += (std::log(sum) - z[targets[row]]) / counted;
    for (int v = 0; v < classes; ++v) {
      const double dz = (std::exp(z[v]) / sum - (v == targets[row])) / counted;
      for (int d = 0; d < features; ++d) {
        expected_weight[v * features + d] += dz * x[row * features + d];
        expected_x[row * features + d] += dz * weight[v * features + d];
      }
    }
  }

  bool ok = std::abs(loss[0] + loss[1] - expected_loss) <= 1e-6;
  for (std::size_t i = 0; i < x.size(); ++i) ok = ok && std::abs(grad_x[i] - expected_x[i]) <= 1e-6;
  for (int v = 0; v < classes; ++v) {
    std::printf("gradient of the head, class %d:", v);
    for (int i = v * features; i < (v + 1) * features; ++i) {
      std::printf(" %7.4f", grad_weight[i]);
      ok = ok && std::abs(grad_weight[i] - expected_weight[i]) <= 1e-6;
    }
    std::printf("\n");
  }
  return ok ? 0 : 1;
}
