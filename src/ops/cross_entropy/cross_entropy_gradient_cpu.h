// The gradient of rows of cross_entropy on the CPU. Compiled once per level of vector instructions.
#include <algorithm>
#include <cmath>

#include "ops/cross_entropy/cross_entropy_rows_cpu.h"

#if defined(EAVES_CROSS_ENTROPY_GRADIENT_CPU_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EAVES_CROSS_ENTROPY_GRADIENT_CPU_H_
#undef EAVES_CROSS_ENTROPY_GRADIENT_CPU_H_
#else
#define EAVES_CROSS_ENTROPY_GRADIENT_CPU_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {
namespace {

/// The gradient coefficients of a row, and the gradient of its target: the target's logit must be read before it is
/// overwritten.
struct RowMap {
  RowGradient<double> gradient;
  bool is_zero;  ///< the gradient of the whole row is 0
  double target_value;
};

/// The map of a row. The caller fills in `in` except for the target and its weight. `target_value` is computed if the
/// target is one of `columns`.
template <typename T>
RowMap map_of(const Rows<T>& rows, const typename Rows<T>::Row& row, RowGradientInputs<double> in,
              const ColumnPiece& columns) {
  const Terms& terms = rows.terms();
  const std::int64_t column = rows.target_column(row);
  in.target = row.target;
  in.target_weight = column >= 0 ? weight_at(rows.inputs(), column) : weight_of_other_shard(in.target_mass, terms);
  RowMap map{row_gradient(in, terms), false, 0.0};
  const RowGradient<double>& g = map.gradient;
  map.is_zero = (row.is_ignored || in.grad_loss == 0.0) && in.grad_lse == 0.0 && in.grad_entropy == 0.0;
  if (map.is_zero || column < columns.begin || column >= columns.end) return map;
  const Transformed z = rows.logit(row, column);
  const double difference = g.log_probability(z.logit);
  const double p = std::exp(difference);
  double value = 0.0;  // stays 0 if all factors of p are 0, even if p is NaN
  if (g.target_factor != 0.0 || g.surplus != 0.0) value = std::expm1(difference) * g.target_factor + p * g.surplus;
  if (g.slope != 0.0 && p != 0.0) value += p * g.slope * difference;
  if (terms.smoothing != 0.0) value -= g.per_class * (terms.has_weight ? in.target_weight : 1.0);
  map.target_value = value * z.derivative;
  return map;
}

/// The coefficients of a row in A, for the loop over its columns. `derivative` is dz'/dz if it is the same for all of
/// them, else 1. With lse = high + low in A, e^(-low) is a factor of all exponentials, and the coefficients include it.
template <typename A>
SoftmaxGradient<A> coefficients_of(const RowGradient<double>& g, double derivative) {
  const SplitLse<A> lse = rounded<A>(g.lse);
  const auto rounding = -static_cast<double>(lse.low);
  const double factor = rounding == 0.0 ? derivative : derivative * std::exp(rounding);
  return {.lse = lse.high,
          .softmax_factor = static_cast<A>((g.softmax_factor + g.slope * rounding) * factor),
          .slope = static_cast<A>(g.slope * factor),
          .constant = static_cast<A>(g.per_class * derivative)};
}

template <typename T>
ScaledSoftmax<Accumulator<T>> softmax_of(const RowMap& map) {
  using A = Accumulator<T>;
  const SoftmaxGradient<A> gradient = coefficients_of<A>(map.gradient, 1.0);
  return {.lse = gradient.lse,
          .scale = gradient.softmax_factor,
          .is_zero = map.is_zero,
          .replaced = map.is_zero ? -1 : map.gradient.target,
          .value = static_cast<A>(map.target_value)};
}

/// Writes the gradient of some columns of a row with options, block by block. Each block is read before it is written,
/// because a narrower gradient lies over its own logits (write_narrower_row()).
template <bool kNonTemporal, typename T, typename R>
void write_with_options(const Rows<T>& rows, R* grad_logits, const ColumnPiece& piece, const RowMap& map) {
  using A = Accumulator<T>;
  const Terms& terms = rows.terms();
  const CrossEntropyView& view = rows.view();
  const auto row = rows.row(piece.group);
  R* to = grad_logits + row.at.of[kGradLogits];
  const bool is_contiguous = view.layout == RowLayout::contiguous;
  const RowGradient<double>& g = map.gradient;
  const bool has_factors = g.per_class != 0.0 && (terms.is_soft || terms.has_weight);
  SoftmaxGradient<A> gradient = coefficients_of<A>(g, terms.softcap == 0.0 ? terms.scale : 1.0);
  const A per_class = gradient.constant;
  if (has_factors) gradient.constant = A(0);
  Block<A> buffer, derivatives, factors, extra;
  if (map.is_zero) std::fill_n(buffer.elements, rows.block(), A(0));
  std::int64_t count = 0;
  for (std::int64_t column = piece.begin; column < piece.end; column += count) {
    count = std::min(rows.block(), piece.end - column);
    A* x = buffer.elements;
    if (!map.is_zero) {
      const A* z = rows.read_logits(row, column, count, x);
      transform_block(z, count, terms, x, derivatives.elements);
      gradient_block(x, count, gradient);
      if (has_factors) {
        subtract_block(rows.read_factors(row, column, count, factors, extra), count, per_class, x);
      }
      if (terms.softcap != 0.0) multiply_block(derivatives.elements, count, x);
      if (g.target >= column && g.target < column + count) x[g.target - column] = static_cast<A>(map.target_value);
    }
    if (is_contiguous) {
      narrow<kNonTemporal>(x, to + column, count);
    } else {
      scatter(x, view.columns, kGradLogits, column, count, to);
    }
  }
}

/// Has the gradient other terms than a multiple of the softmax and the term of the target?
bool has_options(const LossPlan& plan, bool has_grad_entropy) {
  return plan.has_transform || plan.has_logit_sum || has_grad_entropy;
}

/// The destination of a gradient and its dtype. It is narrower than the logits only if it overwrites them
/// (CrossEntropyInPlaceProblem).
struct Gradient {
  void* data;
  DType dtype;
};

/// Writes a gradient of 16 bits over its own float32 logits. Columns [c, c + n) of the gradient overwrite columns [c /
/// 2, (c + n) / 2) of the logits, so one thread writes a whole row from its start.
template <typename T, typename R>
void write_narrower_row(const Rows<T>& rows, R* grad_logits, bool with_options, const ColumnPiece& row,
                        const RowMap& map) {
  if (with_options) return write_with_options<false>(rows, grad_logits, row, map);
  const auto at = rows.view().rows.offsets(row.group);
  const ScaledSoftmax<Accumulator<T>> softmax = softmax_of<T>(map);
  R* to = grad_logits + at.of[kGradLogits];
  write_contiguous_softmax<false>(rows.logits().data + at.of[kLogits], to, row.end, softmax);
  if (softmax.replaced >= 0 && softmax.replaced < row.end) to[softmax.replaced] = round_to<R>(softmax.value);
}

/// Writes the gradient over the logits of the piece, which is a whole row if the gradient is narrower. The dtype is
/// tested here, for each row, so that the code before is compiled once for all three dtypes.
template <typename T>
void write_in_place(const Rows<T>& rows, const Gradient& gradient, bool with_options, const ColumnPiece& piece,
                    const RowMap& map) {
  if constexpr (std::is_same_v<T, float>) {
    if (gradient.dtype == DType::float16) {
      return write_narrower_row(rows, static_cast<float16*>(gradient.data), with_options, piece, map);
    }
    if (gradient.dtype == DType::bfloat16) {
      return write_narrower_row(rows, static_cast<bfloat16*>(gradient.data), with_options, piece, map);
    }
  }
  T* grad_logits = static_cast<T*>(gradient.data);
  if (with_options) return write_with_options<false>(rows, grad_logits, piece, map);
  write_softmax_piece<false, T>(rows.view(), rows.logits(), {grad_logits, kGradLogits}, piece, softmax_of<T>(map));
}

/// Writes the gradients of all rows. `map(row, piece)` returns the RowMap of a row, and is called before the piece is
/// written.
template <typename T, typename Map>
void write_gradients(const Rows<T>& rows, const Gradient& gradient, bool with_options, const ExecutionContext& context,
                     Map&& map) {
  const CrossEntropyView& view = rows.view();
  if (gradient.dtype != kDTypeOf<T>) {
    const ColumnPieces whole_rows = ColumnPieces::of_whole_rows(view.column_count, view.row_count);
    return for_each_piece(whole_rows, context, false, [&](const ColumnPiece& row) {
      write_in_place(rows, gradient, with_options, row, map(row.group, row));
    });
  }
  T* grad_logits = static_cast<T*>(gradient.data);
  if (!with_options) {
    return write_softmax<T>(view, rows.logits(), {grad_logits, kGradLogits}, context,
                            [&](std::int64_t row, const ColumnPiece& piece) { return softmax_of<T>(map(row, piece)); });
  }
  const bool is_non_temporal = rows.logits().data != grad_logits && is_written_past_caches<T>(view);
  for_each_row_piece(view, context, is_non_temporal, [&](const ColumnPiece& piece) {
    const auto write = is_non_temporal ? write_with_options<true, T, T> : write_with_options<false, T, T>;
    write(rows, grad_logits, piece, map(piece.group, piece));
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();
#endif  // per target
