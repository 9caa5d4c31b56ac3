// logsumexp over the last axis of a small matrix, forward and backward, on the CPU. Prints both, and returns non-zero
// if they differ from the formulas.
#include <eaves/logsumexp.h>

#include <cmath>
#include <cstdio>
#include <vector>

int main() {
  constexpr int rows = 2, columns = 3;
  const std::vector<float> x = {0, 1, 2, 1000, 1000, 1000};  // exp(1000) overflows, its logarithm does not
  const std::vector<float> grad_out = {1, 1};                // dL/d(lse)
  std::vector<float> lse(rows), grad_x(rows * columns);

  using eaves::DType;
  using eaves::TensorView;
  const TensorView x_view = TensorView::contiguous(x.data(), DType::float32, {rows, columns});
  const TensorView lse_view = TensorView::contiguous(lse.data(), DType::float32, {rows});

  eaves::logsumexp_forward({.x = x_view, .axes = {-1}, .lse = lse_view});
  eaves::logsumexp_backward({.grad_out = TensorView::contiguous(grad_out.data(), DType::float32, {rows}),
                             .x = x_view,
                             .lse = lse_view,
                             .axes = {-1},
                             .grad_x = TensorView::contiguous(grad_x.data(), DType::float32, {rows, columns})});

  bool ok = true;
  for (int row = 0; row < rows; ++row) {
    const float* z = &x[row * columns];
    const double max = z[columns - 1];  // the rows above are sorted
    double sum = 0;
    for (int i = 0; i < columns; ++i) sum += std::exp(z[i] - max);

    std::printf("lse %.4f, gradient", lse[row]);
    ok = ok && std::abs(lse[row] - (max + std::log(sum))) <= 1e-6 * max;
    for (int i = 0; i < columns; ++i) {
      const float gradient = grad_x[row * columns + i];
      std::printf(" %.4f", gradient);
      // lse was rounded to float32. Its absolute error, 2^-15 at 1001, becomes the gradient's relative error.
      ok = ok && std::abs(gradient - std::exp(z[i] - max) / sum) <= 1e-4;
    }
    std::printf("\n");
  }
  return ok ? 0 : 1;
}
