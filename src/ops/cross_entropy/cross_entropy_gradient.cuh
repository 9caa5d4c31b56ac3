// The gradient of a row on the device: its coefficients from what the forward has kept, and the two functions that map
// logits to gradients.
//
//   PlainGradient   z' = z and u = 1: one multiply-add and one exponential for each element
//   FullGradient    every option
#pragma once

#include "ops/cross_entropy/cross_entropy_device.cuh"

namespace eaves::cuda {

using namespace cross_entropy_tensors;

/// dL/d(loss of a row) from dL/d(mean). Where nothing counts, the mean is 0 and so is its gradient.
template <typename A>
__device__ A mean_gradient(A gradient, const A* divisor) {
  if (divisor == nullptr) return gradient;
  return *divisor == A(0) ? A(0) : gradient / *divisor;
}

/// The coefficients of a row; fills in what its target says.
template <typename T, typename View>
__device__ RowGradient<Accumulator<T>> gradient_of_row(const LossInputs<T, View>& in,
                                                       RowGradientInputs<Accumulator<T>> row) {
  using A = Accumulator<T>;
  row.target_weight = A(1);
  if (!in.terms.is_soft && !in.terms.is_ignored(row.target)) {
    const std::int64_t column = row.target - in.terms.first_class;
    if (!in.terms.is_in_range(row.target)) {
      row.grad_loss = nan_of<A>();
    } else if (column >= 0 && column < in.view.column_count) {
      row.target_weight = in.weight_of(row.target);
    } else if (in.terms.has_weight) {
      // The weight is another shard's; what p is multiplied by is known from the merge, all of it.
      row.target_weight = in.terms.smoothing == A(0) ? row.target_mass : A(0);
    }
  }
  return row_gradient(row, in.terms);
}

template <typename T, typename View>
struct GradientInputs {
  using A = Accumulator<T>;

  LossInputs<T, View> in;
  OwnOrFloat<T> grad_loss;  ///< its data nullptr: 1
  const A* grad_lse;
  const A* grad_entropy;
  const A* lse;
  const A* entropy;
  const A* target_mass;
  const A* divisor;

  GradientInputs(const View& view, const CrossEntropyBackwardProblem& problem)
      : in(view, problem.inputs),
        grad_loss{problem.grad_loss, problem.grad_loss_dtype != kDTypeOf<T>},
        grad_lse(static_cast<const A*>(problem.grad_lse)),
        grad_entropy(static_cast<const A*>(problem.grad_entropy)),
        lse(static_cast<const A*>(problem.lse)),
        entropy(static_cast<const A*>(problem.entropy)),
        target_mass(static_cast<const A*>(problem.target_mass)),
        divisor(static_cast<const A*>(problem.divisor)) {}

  /// Of the row whose tensors lie at `at`.
  template <typename Offsets>
  __device__ RowGradient<A> row(const Offsets& at) const {
    const std::int64_t i = at.of[kPerRow];
    RowGradientInputs<A> row{};
    row.target = in.target_at(at.of[kTargets]);
    row.lse = lse[i];
    row.grad_loss = mean_gradient(grad_loss.data == nullptr ? A(1) : grad_loss[at.of[kGradLoss]], divisor);
    if (grad_lse != nullptr) row.grad_lse = grad_lse[i];
    if (grad_entropy != nullptr) {
      row.grad_entropy = grad_entropy[i];
      row.entropy = entropy[i];
    }
    if (target_mass != nullptr) row.target_mass = target_mass[i];
    return gradient_of_row(in, row);
  }
};

template <typename T, typename View>
struct PlainGradient {
  using A = Accumulator<T>;
  static constexpr int kSize = Vector<T>::kSize;
  static constexpr bool kIsHeavy = false;

  RowGradient<A> row;

  __device__ PlainGradient(const LossInputs<T, View>&, const RowGradient<A>& gradient, std::int64_t) : row(gradient) {}

  /// Of a class that is not the target. The difference is taken before the product with log2(e): near lse, where the
  /// result is largest, it is exact. In a row that counts for nothing p is not used, and may be NaN.
  __device__ A other(A z) const {
    return row.mass == A(0) ? -row.per_class : fma(exponential(z - row.lse), row.mass, -row.per_class);
  }
  __device__ A target(A z) const {
    const A d = z - row.lse;
    return fma(std::expm1(d), row.hard, fma(exponential(d), row.rest, -row.per_class));
  }

  __device__ A operator()(A z, std::int64_t column) const { return column == row.target ? target(z) : other(z); }
  __device__ Vector<T> operator()(const Vector<T>& v, std::int64_t column) const {
    A values[kSize];
    unpack(v, values);
    const std::int64_t at = row.target - column;
    const bool has_target = at >= 0 && at < kSize;
    A z_target = A(0);
    if (has_target) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) z_target = i == at ? values[i] : z_target;
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = other(values[i]);
    if (has_target) {
      const A gradient = target(z_target);
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = i == at ? gradient : values[i];
    }
    return pack<T>(values);
  }
};

template <typename T, typename View>
struct FullGradient {
  using A = Accumulator<T>;
  static constexpr int kSize = Vector<T>::kSize;
  static constexpr bool kIsHeavy = true;

  const LossInputs<T, View>& in;
  RowGradient<A> row;
  std::int64_t soft_row;

  __device__ FullGradient(const LossInputs<T, View>& inputs, const RowGradient<A>& gradient, std::int64_t soft_offset)
      : in(inputs), row(gradient), soft_row(soft_offset) {}

  __device__ bool has_measure() const { return row.per_class != A(0) && (in.terms.is_soft || in.terms.has_weight); }

  /// `u` as in ClassStatistics.
  __device__ A gradient(A z, A u, bool is_target) const {
    A transformed = z * in.terms.scale;
    A slope = in.terms.scale;  // dz'/dz
    if (in.terms.softcap != A(0)) {
      const Tanh<A> t = tanh_of(z * in.terms.factor);
      transformed = in.terms.softcap * t.value;
      slope = in.terms.scale * t.derivative;
    }
    const A d = transformed - row.lse;
    const A p = exponential(d);
    A result = -row.per_class * u;
    if (row.per_class == A(0)) result = A(0);
    if (is_target) {
      result += fma(std::expm1(d), row.hard, p * row.rest);
    } else if (row.mass != A(0)) {
      result = fma(p, row.mass, result);
    }
    // 0 * -infinity must be 0; what fmax() does to a NaN, the exponential undoes.
    if (row.slope != A(0)) result = fma(p, row.slope * fmax(d, A(-1e30)), result);
    return result * slope;
  }

  __device__ A operator()(A z, std::int64_t column) const {
    const A u = has_measure() ? measure_of(in, soft_row + column_offset(in.view, kSoftTargets, column), column) : A(1);
    return gradient(z, u, column == row.target);
  }
  __device__ Vector<T> operator()(const Vector<T>& v, std::int64_t column) const {
    const std::int64_t at = row.target - column;
    if constexpr (std::is_same_v<A, float>) {
      const Vector<T> batch[1] = {v};
      const bool is_capped = in.terms.softcap != 0.0f;
      const bool is_whole = (at < 0 || at >= kSize) && (!is_capped || max_of_sizes(batch) <= in.terms.small_logit);
      if (is_whole && row.mass != 0.0f) {
        if (is_capped) return has_measure() ? map_whole<true, true>(v, column) : map_whole<true, false>(v, column);
        return has_measure() ? map_whole<false, true>(v, column) : map_whole<false, false>(v, column);
      }
    }
    return map_any(*this, v, column);
  }

 private:
  /// A vector without the target and with every logit in the range of the softcap's polynomial: no branch between its
  /// elements.
  template <bool kIsCapped, bool kIsLoaded>
  __device__ Vector<T> map_whole(const Vector<T>& v, std::int64_t column) const {
    constexpr float kLog2 = 0.693147180559945309f;
    float values[kSize];
    float u[kSize];
    if constexpr (kIsLoaded) load_measure(in, soft_row, column, u);
    unpack(v, values);
    const float to_tanh = kIsCapped ? kLog2 / in.terms.softcap : 0.0f;
    const bool has_slope = row.slope != 0.0f;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const float z = values[i];
      float d;
      float dz = in.terms.scale;
      if constexpr (kIsCapped) {
        const float transformed = capped_in_log2(z, in.terms);
        d = fmaf(transformed, kLog2, -row.lse);
        const float t = transformed * to_tanh;
        dz = fmaf(-dz * t, t, dz);
      } else {
        d = fmaf(z, dz, -row.lse);
      }
      const float p = exponential(d);
      const float mass = has_slope ? fmaf(row.slope, fmaxf(d, -1e30f), row.mass) : row.mass;
      values[i] = fmaf(p, mass, kIsLoaded ? -row.per_class * u[i] : -row.per_class) * dz;
    }
    return pack<T>(values);
  }

  /// Any vector. Not inlined, so that the loops stay short.
  static __device__ __noinline__ Vector<T> map_any(FullGradient self, Vector<T> v, std::int64_t column) {
    A values[kSize];
    unpack(v, values);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = self(values[i], column + i);
    return pack<T>(values);
  }
};

}  // namespace eaves::cuda
