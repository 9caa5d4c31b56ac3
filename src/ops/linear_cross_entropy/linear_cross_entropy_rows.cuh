// The rows of linear_cross_entropy on a GPU, and the kernels that copy and sum their features, their per-row numbers,
// and the gradient of the bias.
#pragma once

#include <cuda_runtime.h>

#include "core/dispatch.h"
#include "core/rows.h"
#include "core/typed_numbers.h"
#include "cuda/launch.cuh"
#include "cuda/loads.cuh"
#include "ops/linear_cross_entropy/linear_cross_entropy_shape.h"

namespace eaves::cuda {

using namespace linear_cross_entropy_tensors;

inline constexpr int kRowThreads = 256;

/// The facts about rows that every kernel needs.
struct Rows {
  LinearCrossEntropyView view;
  TypedNumbers targets;  ///< nullptr: soft targets
  std::int64_t ignore_index;
  TypedNumbers row_weight;  ///< nullptr: 1
  bool leaves_out_zeros;    ///< leaves out rows with upstream gradients (the next members) that are all 0
  TypedNumbers grad_loss;
  TypedNumbers grad_lse;
  TypedNumbers grad_entropy;

  explicit Rows(const LinearCrossEntropyProblem& problem)
      : view(problem.view),
        targets(problem.has_soft_targets() ? TypedNumbers{} : problem.targets),
        ignore_index(problem.options.ignore_index),
        row_weight{problem.row_weight, problem.accumulator()},
        leaves_out_zeros(leaves_out_rows_without_upstream(problem)),
        grad_loss(problem.grad_loss),
        grad_lse{problem.grad_lse, problem.accumulator()},
        grad_entropy{problem.grad_entropy, problem.accumulator()} {}

  template <typename Offsets>
  __device__ bool has_upstream(const Offsets& at) const {
    const auto is_zero = [&](const TypedNumbers& of, int tensor) {
      return of.data == nullptr || number_at<double>(of, at.of[tensor]) == 0.0;
    };
    return !is_zero(grad_loss, kGradLoss) || !is_zero(grad_lse, kPerRow) || !is_zero(grad_entropy, kPerRow);
  }

  /// False for an ignored row, for a row of weight 0, and in a backward for a row without an upstream gradient. `at`
  /// has the row's offsets.
  template <typename Offsets>
  __device__ bool counts(const Offsets& at) const {
    if (leaves_out_zeros && !has_upstream(at)) return false;
    if (row_weight.data != nullptr && number_at<double>(row_weight, at.of[kPerRow]) == 0.0) return false;
    return targets.data == nullptr || integer_at(targets, at.of[kTargets]) != ignore_index;
  }
};

// ---- features ------------------------------------------------------------------------------------------------------

/// Rows of features: one side of a copy is a matrix without gaps, the other is a tensor of the problem.
struct FeatureRows {
  LinearCrossEntropyView view;
  const std::int64_t* row_indices;  ///< nullptr: the rows of the view
  std::int64_t first;
  std::int64_t count;

  __device__ std::int64_t row(std::int64_t i) const {
    return row_indices == nullptr ? first + i : row_indices[first + i];
  }
  __device__ std::int64_t feature(int tensor, std::int64_t i) const {
    return view.columns.rank == 1 ? i * view.columns.strides[tensor][0] : view.columns.offsets(i).of[tensor];
  }
};

/// One block per row.
template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    gather_features(const __grid_constant__ FeatureRows rows, const T* hidden, T* to) {
  const std::int64_t features = rows.view.column_count;
  for (std::int64_t i = blockIdx.x; i < rows.count; i += gridDim.x) {
    const std::int64_t row = rows.row(i);
    T* into = to + i * features;
    const T* from = hidden + rows.view.rows.offsets(row).of[kHidden];
    const bool has_unit_stride = rows.view.columns.rank == 1 && rows.view.columns.strides[kHidden][0] == 1;
    const std::uint64_t addresses = reinterpret_cast<std::uint64_t>(from) | reinterpret_cast<std::uint64_t>(into) |
                                    static_cast<std::uint64_t>(features) * sizeof(T);
    if (has_unit_stride && addresses % 16 == 0) {
      const std::int64_t vectors = features * static_cast<std::int64_t>(sizeof(T)) / 16;
      for (std::int64_t f = threadIdx.x; f < vectors; f += kRowThreads) {
        reinterpret_cast<uint4*>(into)[f] = reinterpret_cast<const uint4*>(from)[f];
      }
    } else {
      for (std::int64_t f = threadIdx.x; f < features; f += kRowThreads) into[f] = from[rows.feature(kHidden, f)];
    }
  }
}

/// One block per row.
template <typename N>
__global__ void __launch_bounds__(kRowThreads)
    gather_targets(const __grid_constant__ FeatureRows rows, const N* targets, std::int64_t target_stride,
                   std::int64_t classes, N* to, std::int64_t stride) {
  for (std::int64_t i = blockIdx.x; i < rows.count; i += gridDim.x) {
    const N* from = targets + rows.view.rows.offsets(rows.row(i)).of[kPerRow] * target_stride;
    for (std::int64_t v = threadIdx.x; v < classes; v += kRowThreads) to[i * stride + v] = from[v];
  }
}

/// One block per row. S is T or its accumulator. A `scale` of nullptr is 1.
template <typename S, typename T>
__global__ void __launch_bounds__(kRowThreads) scatter_features(const __grid_constant__ FeatureRows rows, const S* from,
                                                                const Accumulator<T>* scale, T* grad_hidden) {
  const std::int64_t features = rows.view.column_count;
  const Accumulator<T> factor = scale == nullptr ? Accumulator<T>(1) : *scale;
  for (std::int64_t i = blockIdx.x; i < rows.count; i += gridDim.x) {
    const std::int64_t row = rows.row(i);
    T* into = grad_hidden + rows.view.rows.offsets(row).of[kGradHidden];
    for (std::int64_t f = threadIdx.x; f < features; f += kRowThreads) {
      into[rows.feature(kGradHidden, f)] = round_to<T>(factor * load_as_accumulator(from[i * features + f]));
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    clear_uncounted(const __grid_constant__ Rows rows, FeatureRows features, T* grad_hidden) {
  for (std::int64_t row = blockIdx.x; row < rows.view.row_count; row += gridDim.x) {
    const auto at = rows.view.rows.offsets(row);
    if (rows.counts(at)) continue;
    for (std::int64_t f = threadIdx.x; f < rows.view.column_count; f += kRowThreads) {
      grad_hidden[at.of[kGradHidden] + features.feature(kGradHidden, f)] = T{};
    }
  }
}

// ---- numbers -------------------------------------------------------------------------------------------------------

/// `divisor` divides numbers of type A; nullptr: 1.
template <typename N, typename A>
__global__ void __launch_bounds__(kRowThreads)
    gather_numbers_of(const __grid_constant__ Rows rows, const std::int64_t* row_indices, const N* from, N* to,
                      std::int64_t count, const A* divisor) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kRowThreads + threadIdx.x; i < count; i += gridDim.x * kRowThreads) {
    const std::int64_t row = row_indices == nullptr ? i : row_indices[i];
    const auto at = rows.view.rows.offsets(row);
    N number = rows.counts(at) ? from[at.of[kPerRow]] : N{};
    if constexpr (std::is_same_v<N, A>) {
      if (divisor != nullptr) number /= *divisor;
    }
    to[i] = number;
  }
}

template <typename N>
__global__ void __launch_bounds__(kRowThreads)
    scatter_numbers_of(const __grid_constant__ Rows rows, const std::int64_t* row_indices, const N* from, N* to,
                       std::int64_t count) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kRowThreads + threadIdx.x; i < count; i += gridDim.x * kRowThreads) {
    const auto at = rows.view.rows.offsets(row_indices == nullptr ? i : row_indices[i]);
    to[at.of[kPerRow]] = rows.counts(at) ? from[i] : N{};
  }
}

template <typename A>
__global__ void __launch_bounds__(kRowThreads) widen_numbers(TypedNumbers from, A* to, std::int64_t count) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kRowThreads + threadIdx.x; i < count; i += gridDim.x * kRowThreads) {
    to[i] = number_at<A>(from, i);
  }
}

inline constexpr int kSumLanes = 32;  // columns of a block
inline constexpr int kSumRows = 16;   // rows that a block reads side by side

template <typename T, typename A = Accumulator<T>>
__global__ void __launch_bounds__(kSumLanes* kSumRows)
    sum_bias_gradient(const T* from, std::int64_t rows, std::int64_t columns, std::int64_t stride,
                      const float* row_factor, const A* scale, bool is_first, double* to) {
  __shared__ double sums[kSumRows][kSumLanes];
  const std::int64_t column = std::int64_t{blockIdx.x} * kSumLanes + threadIdx.x;
  double sum = 0.0;
  if (column < columns) {
#pragma unroll 8
    for (std::int64_t row = threadIdx.y; row < rows; row += kSumRows) {
      A value = load_as_accumulator(from[row * stride + column]);
      if (row_factor != nullptr) value = row_factor[row] == 0.0f ? A(0) : value * A(row_factor[row]);
      sum += double(value);
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  double all = 0.0;
#pragma unroll
  for (int i = 0; i < kSumRows; ++i) all += sums[i][threadIdx.x];
  if (scale != nullptr) all *= double(*scale);
  to[column] = is_first ? all : to[column] + all;
}

template <typename N>
__global__ void __launch_bounds__(kRowThreads)
    write_numbers(const double* from, N* to, std::int64_t count, bool accumulates) {
  using A = Accumulator<N>;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kRowThreads + threadIdx.x; i < count; i += gridDim.x * kRowThreads) {
    to[i] = round_to<N>(A((accumulates ? double(load_as_accumulator(to[i])) : 0.0) + from[i]));
  }
}

}  // namespace eaves::cuda
