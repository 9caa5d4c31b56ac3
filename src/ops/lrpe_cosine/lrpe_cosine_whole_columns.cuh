// The backward of a softmax over a sequence that is so short that a block has whole columns. The block reads every
// input once, and keeps it in registers between the sums of a * dL/d(a) and the gradient. The angles are computed for
// each batch entry.
#pragma once

#include "ops/lrpe_cosine/lrpe_cosine_plan.h"
#include "ops/lrpe_cosine/lrpe_cosine_token_gradient.cuh"

namespace eaves::cuda {

/// Adds `sums` over the threads with the same features, and returns the totals in all of them. May be called
/// repeatedly: every thread has read `block_sums` before the next call's first barrier, and `warp_sums` before this
/// call's second.
template <int kWidth, typename A>
__device__ void sum_whole_columns(A (&sums)[kWidth]) {
  constexpr int kFeatures = kLrpeWholeColumnLanes * kWidth;
  __shared__ A warp_sums[kLrpeMostWholeColumnThreads / 32][kFeatures];
  __shared__ alignas(16) A block_sums[kFeatures];
  const unsigned lane = threadIdx.x % kLrpeWholeColumnLanes;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
#pragma unroll
    for (int mask = kLrpeWholeColumnLanes; mask < 32; mask *= 2) {
      sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], mask);
    }
    if (threadIdx.x % 32 < kLrpeWholeColumnLanes) warp_sums[threadIdx.x / 32][lane * kWidth + i] = sums[i];
  }
  __syncthreads();
  if (threadIdx.x < kFeatures) {
    A sum = A(0);
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += warp_sums[warp][threadIdx.x];
    block_sums[threadIdx.x] = sum;
  }
  __syncthreads();
  load_accumulators<kWidth>(block_sums + lane * kWidth, sums);
}

/// A block has kLrpeWholeColumnLanes vectors of features of a batch entry's head, for all tokens. `partials` is [H, B,
/// D].
template <typename T, bool kHasThetaGradient>
__global__ void __launch_bounds__(kLrpeMostWholeColumnThreads)
    backpropagate_whole_columns(const __grid_constant__ BackwardArguments<T> p) {
  using A = Accumulator<T>;
  using Gradient = TokenGradient<T, LrpeKind::sequence_softmax, kHasThetaGradient>;
  constexpr int kWidth = Gradient::kWidth;
  constexpr int kTokens = kLrpeWholeColumnTokens;
  let_next_kernel_start();
  const std::uint32_t pieces = (p.tiling.vectors + kLrpeWholeColumnLanes - 1) / kLrpeWholeColumnLanes;
  const std::uint32_t group = blockIdx.x / pieces;
  const std::uint32_t b = group / p.tiling.heads;
  const std::uint32_t h = group - b * p.tiling.heads;
  const std::uint32_t vector =
      (blockIdx.x - group * pieces) * kLrpeWholeColumnLanes + threadIdx.x % kLrpeWholeColumnLanes;
  const bool has_features = vector < p.tiling.vectors;
  const std::int64_t feature = has_features ? std::int64_t{vector} * kWidth : 0;
  const auto column_of = [&](auto* tensor, const LrpeCosineStrides& strides) {
    return tensor + b * strides[0] + h * strides[1] + feature * strides[3];
  };
  const T* const grad_out = column_of(p.grad_out, p.grad_out_strides);
  const T* const x = column_of(p.x, p.x_strides);
  const int step = static_cast<int>(blockDim.x / kLrpeWholeColumnLanes);
  const auto token_of = [&](int t) { return static_cast<int>(threadIdx.x / kLrpeWholeColumnLanes) + t * step; };
  const auto is_there = [&](int n) { return has_features && n < p.positions; };

  Gradient tokens[kTokens];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const int n = token_of(t);
    tokens[t].read(p, is_there(n), grad_out + n * p.grad_out_strides[2], x + n * p.x_strides[2]);
  }
  const FeatureAngles<T, kWidth> theta(p.angles, h, feature);
  const ColumnLse<A, kWidth> lse(p.lse, group, feature, p.features);
  A grad_a[kTokens][kWidth];
  A sums[kWidth] = {};  // of a * dL/d(a)
  A theta_sums[kWidth] = {};
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const int n = token_of(t);
    if (!is_there(n)) break;
    TokenAngles<T, kWidth> token;
    token.compute(p.angles, theta, b, n);
    A a[kWidth];
    A theta_terms[kWidth];
    tokens[t].rotate_back(token, grad_a[t], theta_terms);
    tokens[t].sequence_softmax(lse, a);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sums[i] = fma(a[i], grad_a[t][i], sums[i]);
    if (kHasThetaGradient && p.angles.has_angle(n)) {
      TokenAngles<T, kWidth>::for_each_position(p.angles, theta, b, n, [&](int i, A position) {
        theta_sums[i] = fma(position, a[i] * theta_terms[i], theta_sums[i]);
      });
    }
  }
  if (p.grad_x != nullptr) {
    sum_whole_columns<kWidth>(sums);
    T* const grad_x = column_of(p.grad_x, p.grad_x_strides);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const int n = token_of(t);
      if (!is_there(n)) break;
      A a[kWidth];  // computed again: there are too few registers to keep it
      tokens[t].sequence_softmax(lse, a);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) grad_a[t][i] = a[i] * (grad_a[t][i] - sums[i]);
      Side<T, kWidth>::write(grad_x + n * p.grad_x_strides[2], grad_a[t]);
    }
  }
  if constexpr (kHasThetaGradient) {
    sum_whole_columns<kWidth>(theta_sums);
    if (threadIdx.x >= kLrpeWholeColumnLanes || !has_features) return;
    A* const partial = p.partials + (h * p.batch + b) * p.features + feature;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) partial[i] = theta_sums[i];
  }
}

}  // namespace eaves::cuda
