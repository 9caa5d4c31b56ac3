// The meaning of "relative": a query at position i and a key at position j, both encoded, have an inner product that
// depends on i - j alone. The same query and the same key stand at every position of a short sequence, on the CPU.
// Prints the inner product of each pair, and returns non-zero if it differs from the sum over d of q_d * k_d *
// cos(theta_d * (i - j)).
#include <eaves/lrpe_cosine.h>

#include <cmath>
#include <cstdio>
#include <vector>

constexpr int positions = 6, features = 4;
const std::vector<float> theta = {1, 0.5f, 0.25f, 0.125f};  // radians per position

// Encodes `x` at every position: out is [1, 1, positions, 2 * features].
std::vector<float> encode(const std::vector<float>& x) {
  std::vector<float> sequence, out(positions * 2 * features);
  for (int i = 0; i < positions; ++i) sequence.insert(sequence.end(), x.begin(), x.end());

  using eaves::DType;
  using eaves::TensorView;
  eaves::lrpe_cosine_forward(
      {.x = TensorView::contiguous(sequence.data(), DType::float32, {1, 1, positions, features}),
       .angles = {.theta = TensorView::contiguous(theta.data(), DType::float32, {1, features})},
       .out = TensorView::contiguous(out.data(), DType::float32, {1, 1, positions, 2 * features})});
  return out;
}

int main() {
  const std::vector<float> q = {1, -2, 0.5f, 3}, k = {2, 1, -1, 0.5f};
  const std::vector<float> queries = encode(q), keys = encode(k);

  bool ok = true;
  for (int i = 0; i < positions; ++i) {
    for (int j = 0; j < positions; ++j) {
      double product = 0, expected = 0;
      for (int d = 0; d < 2 * features; ++d) product += queries[i * 2 * features + d] * keys[j * 2 * features + d];
      for (int d = 0; d < features; ++d) expected += q[d] * k[d] * std::cos(theta[d] * (i - j));
      std::printf(" %7.4f", product);
      ok = ok && std::abs(product - expected) <= 1e-5;
    }
    std::printf("\n");
  }
  return ok ? 0 : 1;
}
