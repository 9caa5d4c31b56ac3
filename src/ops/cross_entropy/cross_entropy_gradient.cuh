// The gradient of a row on the device: its coefficients from the outputs of the forward, and the two functions that map
// logits to gradients.
//
//   PlainGradient   z' = z and u = 1: one multiply-add and one exponential for each element
//   FullGradient    all options
#pragma once

#include "cuda/row_policy.h"
#include "ops/cross_entropy/cross_entropy_backend.h"
#include "ops/cross_entropy/cross_entropy_device.cuh"

namespace eaves::cuda {

using namespace cross_entropy_tensors;

/// dL/d(loss of a row). `divisor` is nullptr unless the reduction is the mean; grad_loss without data is 1.
template <typename T>
__device__ Accumulator<T> gradient_of_loss(const TypedNumbers& grad_loss, std::int64_t i,
                                           const Accumulator<T>* divisor) {
  const Accumulator<T> gradient = grad_loss.data == nullptr ? Accumulator<T>(1) : own_or_float_at<T>(grad_loss, i);
  return divisor == nullptr ? gradient : mean_gradient(gradient, *divisor);
}

/// The gradient coefficients of row `per_row`. Sets `target_weight` first, and makes `grad_loss` NaN if the target is
/// out of range.
template <typename T, typename View>
__device__ RowGradient<Accumulator<T>> gradient_of_row(const LossInputs<T, View>& in,
                                                       RowGradientInputs<Accumulator<T>> row, std::int64_t per_row) {
  using A = Accumulator<T>;
  row.target_weight = A(1);
  if (!in.terms.is_soft && !in.terms.is_ignored(row.target)) {
    const std::int64_t column = in.column_of_class(row.target);
    if (!in.terms.is_in_range(row.target)) {
      if (in.row_weight_at(per_row) != A(0)) row.grad_loss = nan_of<A>();
    } else {
      row.target_weight = column >= 0 ? in.weight_in(column) : weight_of_other_shard(row.target_mass, in.terms);
    }
  }
  return row_gradient(row, in.terms);
}

template <typename T, typename View>
struct GradientInputs {
  using A = Accumulator<T>;

  LossInputs<T, View> in;
  TypedNumbers grad_loss;
  const A* grad_lse;
  const A* grad_entropy;
  KeptLse lse;
  const A* entropy;
  const A* target_mass;
  const A* divisor;

  GradientInputs(const View& view, const CrossEntropyBackwardProblem& problem)
      : in(view, problem.inputs),
        grad_loss(problem.grad_loss),
        grad_lse(static_cast<const A*>(problem.grad_lse)),
        grad_entropy(static_cast<const A*>(problem.grad_entropy)),
        lse(problem.lse),
        entropy(static_cast<const A*>(problem.entropy)),
        target_mass(static_cast<const A*>(problem.target_mass)),
        divisor(static_cast<const A*>(problem.divisor)) {}

  /// The gradient coefficients of the row at the offsets `at`.
  template <typename Offsets>
  __device__ RowGradient<A> row(const Offsets& at) const {
    const std::int64_t i = at.of[kPerRow];
    RowGradientInputs<A> row{};
    row.target = in.target_at(at.of[kTargets]);
    row.lse = lse.load<A>(lse.row(i));
    row.grad_loss = weigh(gradient_of_loss<T>(grad_loss, at.of[kGradLoss], divisor), in.row_weight_at(i));
    if (grad_lse != nullptr) row.grad_lse = grad_lse[i];
    if (grad_entropy != nullptr) {
      row.grad_entropy = grad_entropy[i];
      row.entropy = entropy[i];
    }
    if (target_mass != nullptr) row.target_mass = target_mass[i];
    return gradient_of_row(in, row, i);
  }
};

template <typename T, typename View>
struct PlainGradient {
  using A = Accumulator<T>;
  static constexpr int kSize = Vector<T>::kSize;

  RowGradient<A> row;  ///< softmax_factor includes e^(-lse.low): it multiplies e^(z - lse.high)

  __device__ PlainGradient(const LossInputs<T, View>&, const RowGradient<A>& gradient, std::int64_t) : row(gradient) {
    row.softmax_factor *= exponential(-row.lse.low);
  }

  __device__ std::int64_t target_column() const { return row.target; }
  /// The gradient of a class that is not the target. exponential() takes the difference before its product with
  /// log2(e), because the difference is exact for z near lse, for which the gradient is largest. If softmax_factor is
  /// 0, p is not used, because it may be NaN.
  __device__ A other(A z) const {
    return row.softmax_factor == A(0) ? -row.per_class
                                      : fma(exponential(z - row.lse.high), row.softmax_factor, -row.per_class);
  }
  __device__ A target(A z) const {
    if (row.target_factor == A(0) && row.surplus == A(0)) return -row.per_class;
    const A d = row.log_probability(z);
    return fma(std::expm1(d), row.target_factor, fma(exponential(d), row.surplus, -row.per_class));
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

  const LossInputs<T, View>& in;
  RowGradient<A> row;
  std::int64_t soft_row;
  // For whole vectors, with x = z' / kUnit - anchor and lse / kUnit = anchor + r:
  //
  //   p = e^(kUnit * x) * e^(-kUnit * r),   z' - lse = kUnit * (x - r)
  //
  // The coefficients include e^(-kUnit * r) * scale. softmax_factor also includes -kUnit * r * slope.
  A anchor;          ///< lse.high / kUnit, rounded
  A softmax_factor;  ///< of e^(kUnit * x)
  A slope;           ///< of e^(kUnit * x) * x
  A per_class;       ///< row.per_class * scale
  bool has_vectors;  ///< map_whole() can take the row: lse is not large, the softcap not extreme, softmax_factor not 0

  __device__ FullGradient(const LossInputs<T, View>& inputs, const RowGradient<A>& gradient, std::int64_t soft_offset)
      : in(inputs), row(gradient), soft_row(soft_offset), anchor(product(row.lse.high, A(1) / kUnit<A>)) {
    const A rounding = fma(row.lse.high, A(1) / kUnit<A>, -anchor) + row.lse.low * (A(1) / kUnit<A>);
    const A correction = power(-rounding) * in.terms.scale;
    softmax_factor = (row.softmax_factor - row.slope * (kUnit<A> * rounding)) * correction;
    slope = row.slope * correction * kUnit<A>;
    per_class = row.per_class * in.terms.scale;
    has_vectors = row.softmax_factor != A(0) && fabs(row.lse.high) < A(kCommonAnchor) &&
                  (in.terms.softcap == A(0) || in.terms.small_logit >= A(0));
  }

  /// Is the gradient 0 for all logits, NaN among them?
  __device__ bool is_nothing() const {
    return row.softmax_factor == A(0) && row.target_factor == A(0) && row.slope == A(0) && row.per_class == A(0);
  }

  __device__ A operator()(A z, std::int64_t column) const {
    if (is_nothing()) return A(0);
    A u = A(1);  // see ClassStatistics
    if (row.per_class != A(0) && in.has_factors) {
      u = factor_of(in, soft_row + column_offset(in.view, kSoftTargets, column), column);
    }
    A transformed = product(z, in.terms.scale);  // rounded, as in the forward
    A derivative = A(1);                         // of tanh
    if (in.terms.softcap != A(0)) {
      transformed = product(capped<false>(z, in.terms, &derivative).rounded(), kUnit<A>);
    }
    const A d = column == row.target ? row.log_probability(transformed) : (transformed - row.lse.high) - row.lse.low;
    const A p = exponential(d);
    A result = row.per_class == A(0) ? A(0) : -row.per_class * u;
    if (column == row.target) {
      result += fma(std::expm1(d), row.target_factor, p * row.surplus);
    } else if (row.softmax_factor != A(0)) {
      result = fma(p, row.softmax_factor, result);
    }
    // fmax(), because 0 * -infinity must be 0. It replaces a NaN of d, but then p is NaN, and so is the result.
    if (row.slope != A(0)) result = fma(p, row.slope * fmax(d, A(-1e30)), result);
    return result * (in.terms.scale * derivative);
  }

  __device__ Vector<T> operator()(const Vector<T>& v, std::int64_t column) const {
    if (in.terms.softcap == A(0)) {
      return in.has_factors ? map<false, true>(v, column) : map<false, false>(v, column);
    }
    return in.has_factors ? map<true, true>(v, column) : map<true, false>(v, column);
  }

  template <bool kIsCapped, bool kHasFactors>
  __device__ Vector<T> map(const Vector<T>& v, std::int64_t column) const {
    if constexpr (std::is_same_v<A, float>) {
      if (has_vectors) {
        const auto without_target = [&] {
          if constexpr (!kIsCapped) return map_whole<false, false, kHasFactors>(v, column);
          const Vector<T> batch[1] = {v};
          return max_of_sizes(batch) <= in.terms.small_logit ? map_whole<true, true, kHasFactors>(v, column)
                                                             : map_whole<true, false, kHasFactors>(v, column);
        };
        const Vector<T> gradient = without_target();
        const std::int64_t at = row.target - column;
        return at >= 0 && at < kSize ? with_target(*this, v, gradient, static_cast<int>(at)) : gradient;
      }
    }
    return is_nothing() ? Vector<T>{} : map_any(*this, v, column);
  }

 private:
  /// Maps every element as if it were not the target, without a branch between elements. kIsSmall: all logits are in
  /// the range of the softcap's polynomial.
  template <bool kIsCapped, bool kIsSmall, bool kHasFactors>
  __device__ Vector<T> map_whole(const Vector<T>& v, std::int64_t column) const {
    float values[kSize];
    float u[kSize];
    if constexpr (kHasFactors) load_factors(in, soft_row, column, u);
    unpack(v, values);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const float z = values[i];
      float exponent;
      float derivative = 1.0f;  // of tanh
      if constexpr (!kIsCapped) {
        exponent = fmaf(z, in.terms.scale_in_units, -anchor);
      } else if constexpr (kIsSmall) {
        const float in_units = z * small_slope(z, in.terms);
        exponent = in_units - anchor;
        derivative = fmaf(in_units * in_units, -in.terms.per_softcap_squared, 1.0f);
      } else {
        const Transformed<float> transformed = capped<true>(z, in.terms, &derivative);
        exponent = fmaf(transformed.value, transformed.factor, -anchor);
      }
      const float p = power(exponent);
      // fmaxf(), because 0 * -infinity must be 0. A capped logit is finite.
      const float with_slope = fmaf(slope, kIsCapped ? exponent : fmaxf(exponent, -1e30f), softmax_factor);
      const float result = fmaf(p, with_slope, kHasFactors ? -per_class * u[i] : -per_class);
      values[i] = kIsCapped ? result * derivative : result;
    }
    return pack<T>(values);
  }

  /// `gradient` with its element `at` replaced by the gradient of the target. Not inlined, so that the loops stay
  /// short.
  static __device__ __noinline__ Vector<T> with_target(FullGradient self, Vector<T> v, Vector<T> gradient, int at) {
    A z[kSize];
    A values[kSize];
    unpack(v, z);
    unpack(gradient, values);
    A z_target = z[0];
#pragma unroll
    for (int i = 1; i < kSize; ++i) z_target = i == at ? z[i] : z_target;
    const A of_target = self(z_target, self.row.target);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = i == at ? of_target : values[i];
    return pack<T>(values);
  }

  /// Maps any vector, element by element. Not inlined either.
  static __device__ __noinline__ Vector<T> map_any(FullGradient self, Vector<T> v, std::int64_t column) {
    A values[kSize];
    unpack(v, values);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = self(values[i], column + i);
    return pack<T>(values);
  }
};

/// FullGradient with the options that all rows share as template parameters.
template <typename T, typename View, bool kIsCapped, bool kHasFactors>
struct GradientVariant {
  FullGradient<T, View> gradient;

  __device__ Accumulator<T> operator()(Accumulator<T> z, std::int64_t column) const { return gradient(z, column); }
  __device__ Vector<T> operator()(const Vector<T>& v, std::int64_t column) const {
    return gradient.template map<kIsCapped, kHasFactors>(v, column);
  }
};

/// The gradient as an operation of cuda/row_map.cuh.
template <typename T, typename View, typename Function>
struct CrossEntropyGradient {
  using Element = T;

  const T* in;
  T* out;
  GradientInputs<T, View> inputs;

  EAVES_HOST_DEVICE const View& view() const { return inputs.in.view; }

  template <typename Offsets>
  __device__ auto row(const Offsets& at) const {
    return Function(inputs.in, inputs.row(at), at.of[kSoftTargets]);
  }

  EAVES_HOST_DEVICE bool has_factors() const { return inputs.in.has_factors; }

  template <bool kHasFactors, typename Body>
  __device__ void for_variant(Body body) const {
    const auto call = [&]<bool kIsCapped>() {
      body([&](const auto& at) { return GradientVariant<T, View, kIsCapped, kHasFactors>{row(at)}; });
    };
    inputs.in.terms.softcap == Accumulator<T>(0) ? call.template operator()<false>() : call.template operator()<true>();
  }
};

template <typename T, typename View>
inline constexpr bool kIsHeavy<CrossEntropyGradient<T, View, FullGradient<T, View>>> = true;

/// Stores vector `i` of a row's gradient. kIsNarrow: the gradient has 16 bits over float32 logits and takes the first
/// half of its row, which starts on 16 bytes and has no head.
template <bool kIsNarrow, typename T>
__device__ void store_gradient(const Span<T>& span, DType dtype, std::int64_t i, const Vector<T>& gradient) {
  if constexpr (kIsNarrow) {
    const std::int64_t first = i * Vector<T>::kSize;
    if (dtype == DType::bfloat16) return store_narrow(reinterpret_cast<bfloat16*>(span.begin) + first, gradient);
    store_narrow(reinterpret_cast<float16*>(span.begin) + first, gradient);
  } else {
    *span.vector_address(i) = gradient;
  }
}
template <bool kIsNarrow, typename T>
__device__ void store_gradient_edge(const Span<T>& span, DType dtype, int edge, Accumulator<T> gradient) {
  const std::int64_t i = span.edge_index(edge);
  if constexpr (kIsNarrow) {
    if (dtype == DType::bfloat16) return void(reinterpret_cast<bfloat16*>(span.begin)[i] = to_bfloat16(gradient));
    reinterpret_cast<float16*>(span.begin)[i] = to_float16(gradient);
  } else {
    span.begin[i] = round_to<T>(gradient);
  }
}

/// Is PlainGradient enough for a call?
inline bool has_plain_gradient(const LossPlan& plan) {
  return !plan.has_transform && !plan.has_factors && !plan.has_moment;
}

}  // namespace eaves::cuda
