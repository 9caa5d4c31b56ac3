// A head and its loss without the logits, over two micro-batches. Each call adds the head's gradient to one float32
// buffer, and divides by the number of rows that count in both micro-batches. On the CPU. Prints the losses and the
// gradient; returns non-zero if they differ from one pass over all rows by the formula.
#include <eaves/linear_cross_entropy.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  constexpr int batches = 2, rows = 2, features = 3, classes = 4;
  const std::vector<float> hidden = {1, -1, 0.5f, 0, 2, 1, -2, 0, 1, 0.5f, 0.5f, 3};  // [batches * rows, features]
  const std::vector<float> head = {1, 0, -1, 0.5f, 2, 0, -1, 1, 1, 0, -0.5f, 2};
  const std::vector<std::int64_t> targets = {0, 3, -100, 2};  // -100: this row does not count
  const float counted = 3;

  using eaves::DType;
  using eaves::TensorView;
  std::vector<float> grad_head(classes * features), grad_hidden(hidden.size());
  float loss[batches];
  for (int batch = 0; batch < batches; ++batch) {
    const int first = batch * rows;
    eaves::linear_cross_entropy_forward_backward(
        {.forward = {.inputs = {.hidden =
                                    TensorView::contiguous(&hidden[first * features], DType::float32, {rows, features}),
                                .head = TensorView::contiguous(head.data(), DType::float32, {classes, features}),
                                .targets = TensorView::contiguous(&targets[first], DType::int64, {rows})},
                     .normalizer = TensorView::contiguous(&counted, DType::float32, {}),
                     .outputs = {.loss = TensorView::contiguous(&loss[batch], DType::float32, {})}},
         .gradients = {
             .grad_hidden = TensorView::contiguous(&grad_hidden[first * features], DType::float32, {rows, features}),
             .grad_head = TensorView::contiguous(grad_head.data(), DType::float32, {classes, features}),
             .accumulates = true}});
    std::printf("loss of micro-batch %d: %.4f\n", batch, loss[batch]);
  }

  // The formula: z = hidden head^T, loss = mean(lse - z_t), and dL/dz = (exp(z - lse) - [class is t]) / 3.
  double expected_loss = 0;
  std::vector<double> expected_head(grad_head.size()), expected_hidden(hidden.size());
  for (int row = 0; row < batches * rows; ++row) {
    if (targets[row] == -100) continue;
    double z[classes] = {}, sum = 0;
    for (int v = 0; v < classes; ++v) {
      for (int d = 0; d < features; ++d) z[v] += hidden[row * features + d] * head[v * features + d];
      sum += std::exp(z[v]);
    }
    expected_loss += (std::log(sum) - z[targets[row]]) / counted;
    for (int v = 0; v < classes; ++v) {
      const double dz = (std::exp(z[v]) / sum - (v == targets[row])) / counted;
      for (int d = 0; d < features; ++d) {
        expected_head[v * features + d] += dz * hidden[row * features + d];
        expected_hidden[row * features + d] += dz * head[v * features + d];
      }
    }
  }

  bool ok = std::abs(loss[0] + loss[1] - expected_loss) <= 1e-6;
  for (std::size_t i = 0; i < hidden.size(); ++i) ok = ok && std::abs(grad_hidden[i] - expected_hidden[i]) <= 1e-6;
  for (int v = 0; v < classes; ++v) {
    std::printf("gradient of the head, class %d:", v);
    for (int i = v * features; i < (v + 1) * features; ++i) {
      std::printf(" %7.4f", grad_head[i]);
      ok = ok && std::abs(grad_head[i] - expected_head[i]) <= 1e-6;
    }
    std::printf("\n");
  }
  return ok ? 0 : 1;
}
