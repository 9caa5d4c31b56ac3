// The arguments of the backward's kernels of lrpe_cosine, and the gradient of a token in a thread.
#pragma once

#include "ops/lrpe_cosine/lrpe_cosine_columns.cuh"
#include "ops/lrpe_cosine/lrpe_cosine_device.cuh"

namespace eaves::cuda {

template <typename T>
struct BackwardArguments {
  LrpeTiling tiling;
  std::int64_t batch;
  std::int64_t heads;
  std::int64_t positions;
  std::int64_t features;
  Activation activation;
  const T* grad_out;
  const T* x;
  T* grad_x;                          ///< or nullptr
  const Accumulator<T>* lse;          ///< [B, H, 2, D], with a softmax over the sequence
  const Accumulator<T>* column_dots;  ///< [B, H, D], sum of a * g, with a softmax over the sequence
  Accumulator<T>* partials;           ///< [H, partials, D] of theta; [partials, B * H * D] of column_dots
  LrpeCosineStrides grad_out_strides;
  LrpeCosineStrides x_strides;
  LrpeCosineStrides grad_x_strides;
  LrpeCosineAngles angles;
};

/// A thread's features of one token in the backward: the vectors that it loads, and the gradients from them.
template <typename T, LrpeKind kKind, bool kHasThetaGradient>
struct TokenGradient {
  using A = Accumulator<T>;
  static constexpr int kWidth = kLrpeVectorWidth<T>;
  using Lanes = Side<T, kWidth>;
  static constexpr bool kReadsX = kKind != LrpeKind::none || kHasThetaGradient;
  Lanes grad_cosine;
  Lanes grad_sine;
  Lanes x;

  /// Loads a token. A missing token gets numbers that are neutral in every reduction over the lanes of the warp.
  __device__ void read(const BackwardArguments<T>& p, bool is_there, const T* from, const T* x_from) {
    if (!is_there) {
      grad_cosine = Lanes{};
      grad_sine = Lanes{};
      x = Lanes::minus_infinity();
      return;
    }
    grad_cosine = Lanes::read(from);
    grad_sine = Lanes::read(from + p.features * p.grad_out_strides[3]);
    if constexpr (kReadsX) x = Lanes::read(x_from);
  }

  /// grad_a = dL/d(a) with a = activation(x), and the terms of theta's gradient without their factors a and position.
  __device__ void rotate_back(const TokenAngles<T, kWidth>& token, A (&grad_a)[kWidth],
                              A (&theta_terms)[kWidth]) const {
    A cosine_part[kWidth];
    A sine_part[kWidth];
    grad_cosine.unpack(cosine_part);
    grad_sine.unpack(sine_part);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      grad_a[i] = fma(cosine_part[i], token.cosine[i], sine_part[i] * token.sine[i]);
      theta_terms[i] = fma(sine_part[i], token.cosine[i], -cosine_part[i] * token.sine[i]);
    }
  }

  /// a of a softmax over the sequence.
  __device__ void sequence_softmax(const ColumnLse<A, kWidth>& lse, A (&a)[kWidth]) const {
    x.unpack(a);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) a[i] = precise_exponential<T>(lse.log_softmax(a[i], i));
  }

  /// Computes grad_x = dL/d(x), and the terms of theta's gradient without their factor position. With a softmax over
  /// the features all lanes of the warp call it.
  __device__ void compute(const BackwardArguments<T>& p, bool is_there, const TokenAngles<T, kWidth>& token,
                          std::int64_t group, std::int64_t feature, A (&grad_x)[kWidth],
                          A (&theta_terms)[kWidth]) const {
    A a[kWidth];
    rotate_back(token, grad_x, theta_terms);
    if constexpr (kReadsX) x.unpack(a);
    if constexpr (kKind == LrpeKind::elementwise) {
      A derivative[kWidth];
      activate<T>(p.activation, a, derivative);
      // Not a product with the derivative 0: relu stops a NaN of the gradient too.
      const bool is_relu = p.activation == Activation::relu;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        grad_x[i] = is_relu && derivative[i] == A(0) ? A(0) : grad_x[i] * derivative[i];
      }
    }
    if constexpr (kKind == LrpeKind::feature_softmax) {
      feature_softmax<T>(a, p.tiling.lanes());
      A dot = A(0);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) dot = fma(a[i], grad_x[i], dot);
      // A lane without a token has no angles, so its dot is arbitrary.
      dot = over_lanes(is_there ? dot : A(0), p.tiling.lanes(), Plus{});
#pragma unroll
      for (int i = 0; i < kWidth; ++i) grad_x[i] = a[i] * (grad_x[i] - dot);
    }
    if constexpr (kKind == LrpeKind::sequence_softmax) {
      if (is_there) {
        const ColumnLse<A, kWidth> lse(p.lse, group, feature, p.features);
        A sums[kWidth] = {};
        if (p.grad_x != nullptr) load_accumulators<kWidth>(p.column_dots + group * p.features + feature, sums);
        sequence_softmax(lse, a);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) grad_x[i] = a[i] * (grad_x[i] - sums[i]);
      }
    }
    if constexpr (kHasThetaGradient) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) theta_terms[i] *= a[i];
    }
  }
};

}  // namespace eaves::cuda
