// The per-row parts that the kernels of the fused path (fused.h) share: the target of a row, its dot products with
// classes of the head, and the inputs of its gradient.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "core/dispatch.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"
#include "ops/cross_entropy/cross_entropy_math.h"
#include "ops/cross_entropy/cross_entropy_transform.cuh"
#include "ops/linear_cross_entropy/fused/fused.h"

namespace eaves::cuda {

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / 32;

struct Targets {
  TypedNumbers targets;
  std::int64_t stride;
  std::int64_t first_class;
  std::int64_t classes;
  std::int64_t ignore_index;

  explicit Targets(const FusedRows& rows)
      : targets(rows.targets),
        stride(rows.target_stride),
        first_class(rows.first_class),
        classes(rows.classes),
        ignore_index(rows.options.ignore_index) {}

  __device__ std::int64_t of(std::int64_t row) const { return integer_at(targets, row * stride); }
  __device__ bool is_ignored(std::int64_t row) const { return of(row) == ignore_index; }
  /// -1 if the row is ignored, or if its class is in another block or out of range.
  __device__ int column(std::int64_t row) const {
    const std::int64_t column = of(row) - first_class;
    return !is_ignored(row) && column >= 0 && column < classes ? static_cast<int>(column) : -1;
  }
};

/// The dot products of a row of hidden with `kCount` rows of the head, by a warp; every lane gets all of them. The bits
/// of each product do not depend on the other products.
template <int kCount, typename T>
__device__ void multiply(const T* hidden, const T* const (&head)[kCount], std::int64_t features,
                         float (&products)[kCount]) {
  constexpr int kSize = Vector<T>::kSize;
#pragma unroll
  for (float& product : products) product = 0.0f;
#pragma unroll 2
  for (std::int64_t i = threadIdx.x % 32 * kSize; i < features; i += 32 * kSize) {
    float a[kSize];
    unpack(*reinterpret_cast<const Vector<T>*>(hidden + i), a);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      float b[kSize];
      unpack(*reinterpret_cast<const Vector<T>*>(head[n] + i), b);
#pragma unroll
      for (int k = 0; k < kSize; ++k) products[n] = fmaf(a[k], b[k], products[n]);
    }
  }
#pragma unroll
  for (float& product : products) product = reduce_lanes<32>(product, Plus{});
}

/// The inputs of every row's gradient.
struct GradientOfRows {
  Targets targets;
  FastTransform transform;
  CrossEntropyTerms<float> terms;
  const float* class_weight;
  FusedGradient in;
  FusedMemory memory;
  bool is_shard;
  bool is_kept;

  __device__ RowGradient<float> row(std::int64_t i, const SplitLse<float>& lse) const {
    RowGradientInputs<float> inputs{};
    inputs.target = targets.of(i);
    inputs.lse = lse;
    const float alpha = in.alpha == nullptr ? 1.0f : *in.alpha;
    const float grad_loss = in.grad_loss == nullptr ? 1.0f : in.grad_loss[i * in.grad_loss_stride];
    inputs.grad_loss = weigh(alpha * grad_loss, in.row_weight == nullptr ? 1.0f : in.row_weight[i]);
    if (in.grad_lse != nullptr) inputs.grad_lse = alpha * in.grad_lse[i];
    if (in.grad_entropy != nullptr) {
      inputs.grad_entropy = alpha * in.grad_entropy[i];
      inputs.entropy = in.entropy[i];
    }
    inputs.target_weight = 1.0f;
    if (!terms.is_ignored(inputs.target)) {
      if (!terms.is_in_range(inputs.target)) {
        inputs.grad_loss = nan_of<float>();
      } else if (in.target_weight != nullptr) {
        inputs.target_weight = in.target_weight[i];
      } else if (class_weight != nullptr) {
        inputs.target_weight = class_weight[inputs.target];
      }
    }
    return row_gradient(inputs, terms);
  }

  /// With the lse that the forward kept.
  __device__ RowGradient<float> row(std::int64_t i) const { return row(i, in.lse.load<float>(in.lse.row(i))); }

  /// dL/dz for the target's logit z. `d` is z' - lse, at most 0; expm1(d) replaces softmax - 1, which would cancel.
  __device__ float of_target(float z, float d, const RowGradient<float>& row) const {
    if (row.softmax_factor == 0.0f && row.target_factor == 0.0f && row.slope == 0.0f) return 0.0f;
    const float p = exponential(d);
    float gradient = row.target < 0 ? p * row.softmax_factor : fmaf(std::expm1(d), row.target_factor, p * row.surplus);
    // p * d has to be 0 for d = -infinity. fmaxf() drops a NaN of d, but p is NaN then.
    if (row.slope != 0.0f) gradient = fmaf(p, row.slope * fmaxf(d, -1e30f), gradient);
    return gradient * (transform.scale * transform.derivative(z));
  }
};

/// Finds the first row of each class, then marks the classes with more rows. `column` is the row's class; negative:
/// none. mark_more_rows() has to follow put_first_of_class() of all rows.
__device__ inline void put_first_of_class(const FusedMemory& memory, std::int64_t row, int column) {
  if (memory.first_of_class == nullptr) return;
  const std::int64_t of_all = memory.first_row + row;
  memory.has_more_rows[of_all] = 0;
  if (column >= 0) atomicMax(memory.first_of_class + column, INT32_MAX - static_cast<std::int32_t>(of_all));
}
__device__ inline std::int32_t first_row_of(const FusedMemory& memory, int column) {
  return INT32_MAX - memory.first_of_class[column];
}
__device__ inline void mark_more_rows(const FusedMemory& memory, std::int64_t row, int column) {
  if (memory.first_of_class == nullptr || column < 0) return;
  const std::int32_t first = first_row_of(memory, column);
  if (first != memory.first_row + row) memory.has_more_rows[first] = 1;
}

// ---- host ----------------------------------------------------------------------------------------------------------

inline void clear_first_of_class(const FusedRows& rows) {
  std::int32_t* first_of_class = rows.memory.first_of_class;
  if (first_of_class == nullptr || rows.memory.first_row != 0) return;
  const std::size_t bytes = static_cast<std::size_t>(rows.classes) * sizeof(std::int32_t);
  check_status(cudaMemsetAsync(first_of_class, 0, bytes, static_cast<cudaStream_t>(rows.context.stream)), rows.op);
}

inline CrossEntropyTerms<float> terms_of(const FusedRows& rows) {
  CrossEntropyInputs inputs{};
  inputs.targets = rows.targets;
  inputs.classes = rows.all_classes;
  inputs.options = rows.options;
  inputs.weight.data = rows.class_weight;
  return CrossEntropyTerms<float>(inputs);
}

inline GradientOfRows gradient_of(const FusedRows& rows, const FusedGradient& gradient) {
  return {Targets(rows),  FastTransform(rows.options),
          terms_of(rows), rows.class_weight,
          gradient,       rows.memory,
          rows.is_shard,  rows.is_kept};
}

inline ExpProduct product_of(const FusedRows& rows) {
  const FastTransform transform(rows.options);
  return {.device = rows.device,
          .rows = rows.rows,
          .classes = rows.classes,
          .features = rows.features,
          .dtype = rows.dtype,
          .x = rows.hidden,
          .weight = rows.head,
          .bias = rows.bias,
          .to_tanh = transform.to_tanh,
          .factor = transform.factor,
          .shift = rows.memory.shift,
          .target = rows.memory.target,
          .target_logit = rows.memory.target_logit};
}

template <typename Body>
void dispatch_half(DType dtype, Body body) {
  dtype == DType::bfloat16 ? body.template operator()<bfloat16>() : body.template operator()<float16>();
}

}  // namespace eaves::cuda
