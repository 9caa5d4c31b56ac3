// A softmax over more features than a warp holds, or over features that are not whole vectors of more than a warp: a
// warp walks along each token's features several times, and finds them in the cache from the second time on. Plain, for
// any size and any strides.
#pragma once

#include "ops/lrpe_cosine/lrpe_cosine_columns.cuh"

namespace eaves::cuda {

inline constexpr int kLongRowsThreads = 128;

/// The maximum of a token's features and the factor that makes the exponentials sum to 1, in all lanes.
template <typename A>
struct RowSoftmax {
  A max;
  A scale;
};

template <typename T>
__device__ RowSoftmax<Accumulator<T>> softmax_of_row(const T* x, std::int64_t features, std::int64_t stride) {
  using A = Accumulator<T>;
  const int lane = threadIdx.x % 32;
  A max = -infinity<A>();
  for (std::int64_t d = lane; d < features; d += 32) max = fmax(max, load_as_accumulator(x[d * stride]));
  max = over_lanes(max, 32, [](A a, A b) { return fmax(a, b); });
  A sum = A(0);
  for (std::int64_t d = lane; d < features; d += 32) {
    sum += precise_exponential<T>(load_as_accumulator(x[d * stride]) - max);
  }
  return {max, A(1) / over_lanes(sum, 32, AddSums{})};
}

/// Cosine and sine of one feature of a token, and the position that theta is multiplied with.
template <typename A>
struct FeatureAngle {
  A cosine;
  A sine;
  A position;
};

template <typename T>
__device__ FeatureAngle<Accumulator<T>> angle_of(const LrpeCosineAngles& angles, std::int64_t batch, std::int64_t head,
                                                 std::int64_t n, std::int64_t feature) {
  const FeatureAngles<T, 1> theta(angles, head, feature);
  TokenAngles<T, 1> token;
  token.compute(angles, theta, batch, n);
  FeatureAngle<Accumulator<T>> result{token.cosine[0], token.sine[0], 0};
  TokenAngles<T, 1>::for_each_position(angles, theta, batch, n,
                                       [&](int, Accumulator<T> position) { result.position = position; });
  return result;
}

template <typename T>
__global__ void __launch_bounds__(kLongRowsThreads)
    encode_row_per_warp(const __grid_constant__ LrpeCosineForwardProblem problem) {
  const LrpeCosineShape& shape = problem.shape;
  const std::int64_t rows = shape.batch * shape.heads * shape.positions;
  const std::int64_t warps = std::int64_t{gridDim.x} * (kLongRowsThreads / 32);
  for (std::int64_t row = (std::int64_t{blockIdx.x} * kLongRowsThreads + threadIdx.x) / 32; row < rows; row += warps) {
    const std::int64_t group = divide(row, shape.positions);
    const std::int64_t n = row - group * shape.positions;
    const std::int64_t b = divide(group, shape.heads);
    const std::int64_t h = group - b * shape.heads;
    const auto& xs = problem.x_strides;
    const auto& os = problem.out_strides;
    const T* x = static_cast<const T*>(problem.x) + b * xs[0] + h * xs[1] + n * xs[2];
    T* out = static_cast<T*>(problem.out) + b * os[0] + h * os[1] + n * os[2];
    const auto [max, scale] = softmax_of_row(x, shape.features, xs[3]);
    for (std::int64_t d = threadIdx.x % 32; d < shape.features; d += 32) {
      const auto a = precise_exponential<T>(load_as_accumulator(x[d * xs[3]]) - max) * scale;
      const auto angle = angle_of<T>(problem.angles, b, h, n, d);
      out[d * os[3]] = round_to<T>(a * angle.cosine);
      out[(shape.features + d) * os[3]] = round_to<T>(a * angle.sine);
    }
  }
}

/// A warp has rows first, first + pieces, ... of a head, all batch entries behind each other. `theta_pieces`
/// [H, pieces, D] or nullptr: its own row of it is where a warp adds up, in float64 because it may have many rows.
template <typename T>
__global__ void __launch_bounds__(kLongRowsThreads)
    backpropagate_row_per_warp(const __grid_constant__ LrpeCosineBackwardProblem problem, std::int64_t pieces,
                               double* theta_pieces) {
  using A = Accumulator<T>;
  const LrpeCosineShape& shape = problem.shape;
  const std::int64_t warp = (std::int64_t{blockIdx.x} * kLongRowsThreads + threadIdx.x) / 32;
  const std::int64_t h = divide(warp, pieces);
  const std::int64_t piece = warp - h * pieces;
  if (h >= shape.heads) return;
  const int lane = threadIdx.x % 32;
  double* const sums = theta_pieces == nullptr ? nullptr : theta_pieces + warp * shape.features;
  if (sums != nullptr) {
    for (std::int64_t d = lane; d < shape.features; d += 32) sums[d] = 0.0;
  }
  const auto& xs = problem.x_strides;
  const auto& gs = problem.grad_out_strides;
  const auto& ds = problem.grad_x_strides;
  for (std::int64_t row = piece; row < shape.batch * shape.positions; row += pieces) {
    const std::int64_t b = divide(row, shape.positions);
    const std::int64_t n = row - b * shape.positions;
    const T* x = static_cast<const T*>(problem.x) + b * xs[0] + h * xs[1] + n * xs[2];
    const T* grad_out = static_cast<const T*>(problem.grad_out) + b * gs[0] + h * gs[1] + n * gs[2];
    const auto [max, scale] = softmax_of_row(x, shape.features, xs[3]);
    const auto activation = [&](std::int64_t d) {
      return precise_exponential<T>(load_as_accumulator(x[d * xs[3]]) - max) * scale;
    };
    const auto grad_cosine = [&](std::int64_t d) { return load_as_accumulator(grad_out[d * gs[3]]); };
    const auto grad_sine = [&](std::int64_t d) { return load_as_accumulator(grad_out[(shape.features + d) * gs[3]]); };
    A dot = A(0);
    for (std::int64_t d = lane; d < shape.features; d += 32) {
      const auto angle = angle_of<T>(problem.angles, b, h, n, d);
      const A a = activation(d);
      dot += a * (grad_cosine(d) * angle.cosine + grad_sine(d) * angle.sine);
      if (sums != nullptr && n >= problem.angles.extra_tokens)
        sums[d] += angle.position * (a * (grad_sine(d) * angle.cosine - grad_cosine(d) * angle.sine));
    }
    if (problem.grad_x == nullptr) continue;
    dot = over_lanes(dot, 32, AddSums{});
    T* grad_x = static_cast<T*>(problem.grad_x) + b * ds[0] + h * ds[1] + n * ds[2];
    for (std::int64_t d = lane; d < shape.features; d += 32) {
      const auto angle = angle_of<T>(problem.angles, b, h, n, d);
      const A g = grad_cosine(d) * angle.cosine + grad_sine(d) * angle.sine;
      grad_x[d * ds[3]] = round_to<T>(activation(d) * (g - dot));
    }
  }
}

template <typename T>
void encode_long_rows(const char* op, const LrpeCosineForwardProblem& problem, void* stream) {
  const LrpeCosineShape& shape = problem.shape;
  const std::int64_t blocks = ceil_divide(shape.batch * shape.heads * shape.positions, kLongRowsThreads / 32);
  launch(op, encode_row_per_warp<T>,
         {.blocks = std::min<std::int64_t>(blocks, 1 << 20), .threads = kLongRowsThreads, .stream = stream}, problem);
}

}  // namespace eaves::cuda
