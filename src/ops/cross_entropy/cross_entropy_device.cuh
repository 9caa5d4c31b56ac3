// Device code that the kernels of cross_entropy share: the loads of a row's target, of weights and of soft targets.
#pragma once

#include "core/dispatch.h"
#include "core/rows.h"
#include "core/typed_numbers.h"
#include "cuda/vector.cuh"
#include "ops/cross_entropy/cross_entropy_math.h"
#include "ops/cross_entropy/cross_entropy_transform.cuh"

namespace eaves::cuda {

// ---- loads ---------------------------------------------------------------------------------------------------------

/// The offset of a column from the start of its row, in elements of the view's tensor number `tensor`.
template <int kColumns, int kAll>
__device__ std::int64_t column_offset(const ShortRowView<kColumns, kAll>& view, int tensor, std::int64_t column) {
  return column * view.column_strides[tensor];
}
template <int kColumns, int kAll>
__device__ std::int64_t column_offset(const RowView<kColumns, kAll>& view, int tensor, std::int64_t column) {
  return view.columns.offsets(column).of[tensor];
}

/// Loads elements [i, i + Vector<T>::kSize) of a tensor of T or float32. kIsAligned: element i starts on 16 bytes.
template <typename T, bool kIsAligned = false>
__device__ void load_run(const TypedNumbers& numbers, std::int64_t i, Accumulator<T> (&values)[Vector<T>::kSize]) {
  constexpr int kSize = Vector<T>::kSize;
  const bool is_own = numbers.dtype == kDTypeOf<T>;
  const char* from = static_cast<const char*>(numbers.data) + i * (is_own ? sizeof(T) : sizeof(float));
  if (!kIsAligned && reinterpret_cast<std::uintptr_t>(from) % 16 != 0) {
#pragma unroll
    for (int v = 0; v < kSize; ++v) values[v] = own_or_float_at<T>(numbers, i + v);
    return;
  }
  if constexpr (sizeof(T) == 2) {
    if (!is_own) {
#pragma unroll
      for (int v = 0; v < kSize; v += 4) {
        const float4 four = __ldg(reinterpret_cast<const float4*>(from) + v / 4);
        values[v] = four.x;
        values[v + 1] = four.y;
        values[v + 2] = four.z;
        values[v + 3] = four.w;
      }
      return;
    }
  }
  unpack(Vector<T>{__ldg(reinterpret_cast<const uint4*>(from))}, values);
}

// ---- problems ------------------------------------------------------------------------------------------------------

/// The inputs of a problem that every kernel takes.
template <typename T, typename View>
struct LossInputs {
  using A = Accumulator<T>;

  View view;
  LossTerms<A> terms;
  const T* logits;
  TypedNumbers targets;
  TypedNumbers weight;
  const A* row_weight;  ///< per row; nullptr: 1
  bool has_factors;     ///< u of ClassStatistics is not 1

  LossInputs(const View& rows, const CrossEntropyInputs& inputs)
      : view(rows),
        terms(inputs),
        logits(static_cast<const T*>(inputs.logits)),
        targets(inputs.targets),
        weight(inputs.weight),
        row_weight(static_cast<const A*>(inputs.row_weight)),
        has_factors(inputs.plan.has_factors) {}

  /// The hard target of a row; 0 with soft targets.
  __device__ std::int64_t target_at(std::int64_t offset) const {
    return terms.is_soft ? 0 : integer_at(targets, offset);
  }

  /// The column of a class in range; -1 if another shard has the class.
  __device__ std::int64_t column_of_class(std::int64_t target) const {
    const std::int64_t column = target - terms.first_class;
    return column >= 0 && column < view.column_count ? column : -1;
  }
  __device__ A row_weight_at(std::int64_t per_row) const { return row_weight == nullptr ? A(1) : row_weight[per_row]; }
  __device__ A weight_in(std::int64_t column) const {
    return terms.has_weight ? own_or_float_at<T>(weight, column) : A(1);
  }
};

/// Loads u of ClassStatistics for columns [column, column + kSize) of a row; has_factors is true. `soft_row` is the
/// offset of the row's soft targets.
template <typename T, typename View>
__device__ void load_factors(const LossInputs<T, View>& in, std::int64_t soft_row, std::int64_t column,
                             Accumulator<T> (&u)[Vector<T>::kSize]) {
  using A = Accumulator<T>;
  constexpr int kSize = Vector<T>::kSize;
  if (in.terms.has_weight) {
    load_run<T>(in.weight, column, u);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) u[i] = A(1);
  }
  if (!in.terms.is_soft) return;
  A q[kSize];
  load_run<T>(in.targets, soft_row + column, q);
  const A rest = A(1) - in.terms.smoothing;
#pragma unroll
  for (int i = 0; i < kSize; ++i) u[i] *= fma(rest, q[i], in.terms.smoothing_per_class);
}

/// u of one element. `soft_offset` is the offset of its soft target.
template <typename T, typename View>
__device__ Accumulator<T> factor_of(const LossInputs<T, View>& in, std::int64_t soft_offset, std::int64_t column) {
  using A = Accumulator<T>;
  A u = in.weight_in(column);
  if (in.terms.is_soft) {
    u *= fma(A(1) - in.terms.smoothing, own_or_float_at<T>(in.targets, soft_offset), in.terms.smoothing_per_class);
  }
  return u;
}

}  // namespace eaves::cuda
