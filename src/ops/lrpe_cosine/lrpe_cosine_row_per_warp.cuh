// lrpe_cosine for calls that the kernels of vectors do not fit: a warp walks along each token's features, one element
// for each lane, for any number, type and strides. A softmax over the features walks several times, and finds the
// features in the cache from the second time on.
#pragma once

#include "ops/lrpe_cosine/lrpe_cosine_columns.cuh"

namespace eaves::cuda {

inline constexpr int kRowPerWarpThreads = 128;

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
  return {max, A(1) / over_lanes(sum, 32, Plus{})};
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

/// `lse` [B, H, 2, D] is read for a softmax over the sequence only.
template <typename T>
__global__ void __launch_bounds__(kRowPerWarpThreads)
    encode_row_per_warp(const __grid_constant__ LrpeCosineForwardProblem problem, const Accumulator<T>* lse) {
  using A = Accumulator<T>;
  const LrpeCosineShape& shape = problem.shape;
  const auto& xs = problem.x_strides;
  const auto& os = problem.out_strides;
  const std::int64_t rows = shape.batch * shape.heads * shape.positions;
  const std::int64_t warps = std::int64_t{gridDim.x} * (kRowPerWarpThreads / 32);
  for (std::int64_t row = (std::int64_t{blockIdx.x} * kRowPerWarpThreads + threadIdx.x) / 32; row < rows;
       row += warps) {
    const std::int64_t group = divide(row, shape.positions);
    const std::int64_t n = row - group * shape.positions;
    const std::int64_t b = divide(group, shape.heads);
    const std::int64_t h = group - b * shape.heads;
    const T* x = static_cast<const T*>(problem.x) + b * xs[0] + h * xs[1] + n * xs[2];
    T* out = static_cast<T*>(problem.out) + b * os[0] + h * os[1] + n * os[2];
    RowSoftmax<A> softmax{};
    if (problem.kind == LrpeKind::feature_softmax) softmax = softmax_of_row(x, shape.features, xs[3]);
    for (std::int64_t d = threadIdx.x % 32; d < shape.features; d += 32) {
      A a[1] = {load_as_accumulator(x[d * xs[3]])};
      if (problem.kind == LrpeKind::elementwise) {
        activate<T>(problem.activation, a);
      } else if (problem.kind == LrpeKind::feature_softmax) {
        a[0] = precise_exponential<T>(a[0] - softmax.max) * softmax.scale;
      } else if (problem.kind == LrpeKind::sequence_softmax) {
        a[0] = precise_exponential<T>(ColumnLse<A, 1>(lse, group, d, shape.features).log_softmax(a[0], 0));
      }
      const auto angle = angle_of<T>(problem.angles, b, h, n, d);
      out[d * os[3]] = round_to<T>(a[0] * angle.cosine);
      out[(shape.features + d) * os[3]] = round_to<T>(a[0] * angle.sine);
    }
  }
}

template <typename T>
void encode_rows(const char* op, const LrpeCosineForwardProblem& problem, const void* lse, void* stream) {
  const LrpeCosineShape& shape = problem.shape;
  const std::int64_t blocks = ceil_divide(shape.batch * shape.heads * shape.positions, kRowPerWarpThreads / 32);
  launch(op, encode_row_per_warp<T>,
         {.blocks = std::min<std::int64_t>(blocks, 1 << 20), .threads = kRowPerWarpThreads, .stream = stream}, problem,
         static_cast<const Accumulator<T>*>(lse));
}

/// A warp has rows first, first + warps, ... of a head, all batch entries behind each other. `column_dots` [B, H, D]
/// are the sums of a * g of a softmax over the sequence. `theta_partials` is [H, warps, D] or nullptr: each warp adds
/// to its own row of it, in float64 because a warp may have many tokens.
template <typename T>
__global__ void __launch_bounds__(kRowPerWarpThreads)
    backpropagate_row_per_warp(const __grid_constant__ LrpeCosineBackwardProblem problem, std::int64_t warps,
                               const Accumulator<T>* column_dots, double* theta_partials) {
  using A = Accumulator<T>;
  const LrpeCosineShape& shape = problem.shape;
  const auto& xs = problem.x_strides;
  const auto& gs = problem.grad_out_strides;
  const auto& ds = problem.grad_x_strides;
  const std::int64_t warp = (std::int64_t{blockIdx.x} * kRowPerWarpThreads + threadIdx.x) / 32;
  const std::int64_t h = divide(warp, warps);
  const std::int64_t first = warp - h * warps;
  if (h >= shape.heads) return;
  const int lane = threadIdx.x % 32;
  double* const sums = theta_partials == nullptr ? nullptr : theta_partials + warp * shape.features;
  if (sums != nullptr) {
    for (std::int64_t d = lane; d < shape.features; d += 32) sums[d] = 0.0;
  }
  for (std::int64_t row = first; row < shape.batch * shape.positions; row += warps) {
    const std::int64_t b = divide(row, shape.positions);
    const std::int64_t n = row - b * shape.positions;
    const std::int64_t group = b * shape.heads + h;
    const T* x = static_cast<const T*>(problem.x) + b * xs[0] + h * xs[1] + n * xs[2];
    const T* grad_out = static_cast<const T*>(problem.grad_out) + b * gs[0] + h * gs[1] + n * gs[2];
    T* grad_x = static_cast<T*>(problem.grad_x) + b * ds[0] + h * ds[1] + n * ds[2];
    const auto cosine_gradient = [&](std::int64_t d) { return load_as_accumulator(grad_out[d * gs[3]]); };
    const auto sine_gradient = [&](std::int64_t d) {
      return load_as_accumulator(grad_out[(shape.features + d) * gs[3]]);
    };
    const auto gradient = [&](std::int64_t d, const FeatureAngle<A>& angle) {
      return fma(cosine_gradient(d), angle.cosine, sine_gradient(d) * angle.sine);
    };
    RowSoftmax<A> softmax{};
    A dot = A(0);
    const auto softmax_at = [&](std::int64_t d) {
      return precise_exponential<T>(load_as_accumulator(x[d * xs[3]]) - softmax.max) * softmax.scale;
    };
    if (problem.kind == LrpeKind::feature_softmax) {
      softmax = softmax_of_row(x, shape.features, xs[3]);
      for (std::int64_t d = lane; d < shape.features; d += 32) {
        dot = fma(softmax_at(d), gradient(d, angle_of<T>(problem.angles, b, h, n, d)), dot);
      }
      dot = over_lanes(dot, 32, Plus{});
    }
    for (std::int64_t d = lane; d < shape.features; d += 32) {
      const auto angle = angle_of<T>(problem.angles, b, h, n, d);
      A a[1] = {};
      A g[1] = {gradient(d, angle)};
      if (problem.kind == LrpeKind::none) {
        if (sums != nullptr) a[0] = load_as_accumulator(x[d * xs[3]]);  // x may be nullptr without theta's gradient
      } else if (problem.kind == LrpeKind::elementwise) {
        A derivative[1];
        a[0] = load_as_accumulator(x[d * xs[3]]);
        activate<T>(problem.activation, a, derivative);
        // Not a product with the derivative 0: relu stops a NaN of g too.
        const bool is_held_back = problem.activation == Activation::relu && derivative[0] == A(0);
        g[0] = is_held_back ? A(0) : g[0] * derivative[0];
      } else if (problem.kind == LrpeKind::feature_softmax) {
        a[0] = softmax_at(d);
        g[0] = a[0] * (g[0] - dot);
      } else {
        const ColumnLse<A, 1> lse(static_cast<const A*>(problem.lse), group, d, shape.features);
        a[0] = precise_exponential<T>(lse.log_softmax(load_as_accumulator(x[d * xs[3]]), 0));
        g[0] = a[0] * (g[0] - (problem.grad_x == nullptr ? A(0) : column_dots[group * shape.features + d]));
      }
      if (problem.grad_x != nullptr) grad_x[d * ds[3]] = round_to<T>(g[0]);
      if (sums != nullptr && problem.angles.has_angle(n)) {
        sums[d] += angle.position * (a[0] * fma(sine_gradient(d), angle.cosine, -cosine_gradient(d) * angle.sine));
      }
    }
  }
}

}  // namespace eaves::cuda
