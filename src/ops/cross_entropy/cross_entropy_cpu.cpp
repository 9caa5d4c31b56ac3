// cross_entropy on the CPU. A plain row (classes as targets, no option that touches every logit) costs what logsumexp
// costs: the loops of cpu/row_softmax.h, and its target besides. Any other row goes through L1 block by block, as
// accumulators in the order of the classes: what an option needs is one more pass over the block
// (cpu/weighted_softmax.h). What is known of a whole row is computed in float64, by cross_entropy_math.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cross_entropy/cross_entropy_cpu.cpp"
#include <hwy/foreach_target.h>  // first: compiles this file once per level of vector instructions

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/dispatch.h"
#include "core/typed_numbers.h"
#include "cpu/row_softmax.h"
#include "cpu/weighted_softmax.h"
#include "eaves/error.h"
#include "ops/cross_entropy/cross_entropy_backend.h"
#include "ops/cross_entropy/cross_entropy_math.h"

#ifndef EAVES_CROSS_ENTROPY_CPU_ONCE
#define EAVES_CROSS_ENTROPY_CPU_ONCE
namespace eaves::cpu {
namespace {

using namespace cross_entropy_tensors;

using Terms = CrossEntropyTerms<double>;

/// The order of a row's statistics in memory.
enum Statistic { kLargest, kSum, kTargetLogit, kTargetWeight, kLinear, kMass, kMoment, kBestValue, kBest };
static_assert(kBest + 1 == kCrossEntropyStatistics);

double weight_at(const CrossEntropyInputs& inputs, std::int64_t column) {
  return inputs.weight == nullptr ? 1.0 : number_at({inputs.weight, inputs.weight_dtype}, column);
}

/// In the order of `values`, whatever the layout of the logits was.
double sum_in_order(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double value : values) sum += value;
  return sum;
}

/// What the mean divides by.
double divisor_of(const CrossEntropyInputs& inputs, const void* normalizer) {
  if (normalizer != nullptr) return number_at({normalizer, accumulator_dtype(inputs.logits_dtype)}, 0);
  if (inputs.has_soft_targets()) return static_cast<double>(inputs.view.row_count);
  const std::int64_t ignored = inputs.options.ignore_index;
  if (inputs.weight == nullptr) {
    std::int64_t count = 0;
    inputs.row_targets().for_each([&](std::int64_t, std::int64_t target) { count += target == ignored ? 0 : 1; });
    return static_cast<double>(count);
  }
  std::vector<double> weights(static_cast<std::size_t>(inputs.view.row_count));
  inputs.row_targets().for_each([&](std::int64_t index, std::int64_t target) {
    weights[static_cast<std::size_t>(index)] = target == ignored ? 0.0 : weight_at(inputs, target);
  });
  return sum_in_order(weights);
}

/// Takes the losses of the rows, in any order and from many threads, and writes everything that was asked for.
class Results {
 public:
  Results(const CrossEntropyInputs& inputs, const CrossEntropyOutputs& outputs)
      : outputs_(outputs),
        dtype_(accumulator_dtype(inputs.logits_dtype)),
        reduction_(inputs.options.reduction),
        classes_(inputs.classes) {
    if (reduction_ == Reduction::none) return;
    losses_.resize(static_cast<std::size_t>(inputs.view.row_count));
    if (outputs.z_loss != nullptr) z_losses_.resize(losses_.size());
  }

  /// `index` counts the rows as the per-row tensors do.
  void store(std::int64_t index, const RowLoss<double>& row, std::int64_t best) {
    write(outputs_.lse, index, row.lse);
    write(outputs_.entropy, index, row.entropy);
    write(outputs_.target_mass, index, row.target_mass);
    // A row of nothing but NaN has no largest logit.
    if (outputs_.argmax != nullptr) outputs_.argmax[index] = best < classes_ ? best : 0;
    if (reduction_ == Reduction::none) {
      write(outputs_.loss, index, row.loss);
      write(outputs_.z_loss, index, row.z_loss);
    } else {
      losses_[static_cast<std::size_t>(index)] = row.loss;
      if (!z_losses_.empty()) z_losses_[static_cast<std::size_t>(index)] = row.z_loss;
    }
  }

  /// After all rows. `divisor` is that of the mean; 0 where the rows have no weight at all.
  void finish(double divisor, bool has_normalizer) const {
    if (reduction_ == Reduction::none) return;
    const auto reduce = [&](const std::vector<double>& values) {
      const double sum = sum_in_order(values);
      if (reduction_ == Reduction::sum) return sum;
      return divisor == 0.0 && (!has_normalizer || sum == 0.0) ? 0.0 : sum / divisor;
    };
    write(outputs_.loss, 0, reduce(losses_));
    write(outputs_.z_loss, 0, reduce(z_losses_));
    write(outputs_.divisor, 0, divisor);
  }

 private:
  void write(void* to, std::int64_t index, double value) const {
    if (to == nullptr) return;
    if (dtype_ == DType::float64) {
      static_cast<double*>(to)[index] = value;
    } else {
      static_cast<float*>(to)[index] = static_cast<float>(value);
    }
  }

  CrossEntropyOutputs outputs_;
  DType dtype_;
  Reduction reduction_;
  std::int64_t classes_;
  std::vector<double> losses_;
  std::vector<double> z_losses_;
};

double divisor_if_mean(const CrossEntropyInputs& inputs, const void* normalizer) {
  return inputs.options.reduction == Reduction::mean ? divisor_of(inputs, normalizer) : 1.0;
}

/// dL/d(loss) of a row; `grad_loss` nullptr stands for 1. Without weight there is no mean, and no gradient.
double grad_of_row(const void* grad_loss, DType dtype, std::int64_t offset, double divisor) {
  if (divisor == 0.0) return 0.0;
  return (grad_loss == nullptr ? 1.0 : number_at({grad_loss, dtype}, offset)) / divisor;
}

/// Statistics of two disjoint sets of classes; `best` is behind all classes where there is none.
ClassStatistics<double> merged(const ClassStatistics<double>& a, const ClassStatistics<double>& b) {
  return merge(a, b, [](double x) { return std::exp(x); });
}

}  // namespace
}  // namespace eaves::cpu
#endif  // EAVES_CROSS_ENTROPY_CPU_ONCE

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {
namespace {

/// ClassStatistics whose best class is, as long as there is none, behind all classes.
struct RowStatistics : ClassStatistics<double> {
  double largest = -infinity<double>();  ///< z' itself: softmax.max may lag behind
};

RowStatistics merge(const RowStatistics& a, const RowStatistics& b) {
  return {merged(a, b), std::max(a.largest, b.largest)};
}

/// Which options touch every logit of a row.
struct Passes {
  bool transforms;  ///< z' is not z
  bool has_linear;  ///< sum of u_v * z'_v
  bool has_moment;
  bool has_best;
  bool has_largest;

  bool any() const { return transforms || has_linear || has_moment || has_best || has_largest; }
};

bool transforms(const Terms& terms) { return terms.scale != 1.0 || terms.softcap != 0.0; }
bool has_linear(const Terms& terms) { return terms.is_soft || terms.smoothing != 0.0; }

/// z' and dz'/dz.
struct Transformed {
  double logit, derivative;
};

double derivative_of(double logit, const Terms& terms) {
  if (terms.softcap == 0.0) return terms.scale;
  const double e = std::exp(-2.0 * std::abs(logit * terms.scale / terms.softcap));
  return terms.scale * 4.0 * e / ((1.0 + e) * (1.0 + e));
}

/// z' of a block, as accumulators; `to` may be `z`.
template <typename A>
void transform_block(const A* z, std::int64_t count, const Terms& terms, A* to, A* derivative) {
  const A scale = static_cast<A>(terms.scale);
  if (terms.softcap != 0.0) return softcap_block(z, count, scale, static_cast<A>(terms.softcap), to, derivative);
  if (z != to) std::copy_n(z, count, to);
  if (terms.scale != 1.0) scale_block(to, count, scale);
}

/// The logits of a call, of element type T, and all that its rows are computed from.
template <typename T>
class Rows {
 public:
  using A = Accumulator<T>;
  static constexpr std::int64_t kBlocks = 2;  // a block's logits, weights and derivatives have to fit L1 together

  explicit Rows(const CrossEntropyInputs& inputs) : inputs_(inputs), terms_(inputs) {}

  const CrossEntropyInputs& inputs() const { return inputs_; }
  const CrossEntropyView& view() const { return inputs_.view; }
  const Terms& terms() const { return terms_; }
  ColumnTensor<const T> logits() const { return {static_cast<const T*>(inputs_.logits), kLogits}; }

  struct Row {
    StridedLoop<CrossEntropyView::kAll>::Offsets at;
    std::int64_t target;  ///< 0 for soft targets
    bool is_ignored;
  };
  Row row(std::int64_t index) const {
    Row result{view().rows.offsets(index), 0, false};
    if (!terms_.is_soft) result.target = class_at({inputs_.targets, inputs_.targets_dtype}, result.at.of[kTargets]);
    result.is_ignored = terms_.is_ignored(result.target);
    return result;
  }

  /// Column of the target, or -1 where these logits do not have it.
  std::int64_t target_column(const Row& row) const {
    const std::int64_t column = row.target - terms_.first_class;
    const bool is_here = !terms_.is_soft && !row.is_ignored && column >= 0 && column < view().column_count;
    return is_here ? column : -1;
  }
  /// As the loops over all classes compute it: of a class that is almost certain, lse - z' is small, and not negative.
  Transformed logit(const Row& row, std::int64_t column) const {
    HWY_ALIGN A z[hn::MaxLanes(Tag<A>())] = {};
    z[0] = load_as_accumulator(logits().data[row.at.of[kLogits] + view().columns.offsets(column).of[kLogits]]);
    const double derivative = derivative_of(z[0], terms_);
    transform_block(z, 1, terms_, z, static_cast<A*>(nullptr));
    return {z[0], derivative};
  }
  TargetClass<double> target_class(const Row& row) const {
    const std::int64_t column = target_column(row);
    if (column < 0) return {};
    return {logit(row, column).logit, weight_at(inputs_, column)};
  }

  static std::int64_t block() { return block_size<A>() / kBlocks; }

  /// Accumulators of z of columns [begin, begin + count): `to`, or where they lie.
  const A* read_logits(const Row& row, std::int64_t begin, std::int64_t count, A* to) const {
    return read<T>(logits().data + row.at.of[kLogits], kLogits, begin, count, to);
  }

  /// u of ClassStatistics; nullptr where it is 1.
  const A* read_factors(const Row& row, std::int64_t begin, std::int64_t count, Block<A>& to, Block<A>& extra) const {
    if (!terms_.is_soft) return read_weights(begin, count, to.elements);
    const A* q = nullptr;
    if (inputs_.targets_dtype == kDTypeOf<T>) {
      q = read<T>(static_cast<const T*>(inputs_.targets) + row.at.of[kSoftTargets], kSoftTargets, begin, count,
                  to.elements);
    } else {
      q = read<float>(static_cast<const float*>(inputs_.targets) + row.at.of[kSoftTargets], kSoftTargets, begin, count,
                      to.elements);
    }
    if (terms_.smoothing == 0.0 && !terms_.has_weight) return q;
    if (q != to.elements) std::copy_n(q, count, to.elements);
    if (terms_.smoothing != 0.0) {
      blend_block(to.elements, count, static_cast<A>(1.0 - terms_.smoothing),
                  static_cast<A>(terms_.smoothing_per_class));
    }
    if (terms_.has_weight) multiply_block(read_weights(begin, count, extra.elements), count, to.elements);
    return to.elements;
  }

 private:
  /// Columns of any element type as accumulators of T.
  template <typename S>
  const A* read(const S* row, int tensor, std::int64_t begin, std::int64_t count, A* to) const {
    if (view().layout != RowLayout::contiguous) {
      gather(row, view().columns, tensor, begin, count, to);
      return to;
    }
    return read_contiguous(row + begin, count, to);
  }
  template <typename S>
  static const A* read_contiguous(const S* from, std::int64_t count, A* to) {
    if constexpr (std::is_same_v<S, A>) {
      // Vectors beyond the end are read, and must exist.
      if (count % static_cast<std::int64_t>(hn::Lanes(Tag<A>())) == 0) return from;
      std::copy_n(from, count, to);
    } else if constexpr (std::is_same_v<Accumulator<S>, A>) {
      widen(from, count, to);
    } else {
      std::transform(from, from + count, to, [](S value) { return static_cast<A>(value); });
    }
    return to;
  }
  const A* read_weights(std::int64_t begin, std::int64_t count, A* to) const {
    if (!terms_.has_weight) return nullptr;
    if (inputs_.weight_dtype == kDTypeOf<T>) {
      return read_contiguous(static_cast<const T*>(inputs_.weight) + begin, count, to);
    }
    return read_contiguous(static_cast<const float*>(inputs_.weight) + begin, count, to);
  }

  const CrossEntropyInputs& inputs_;
  Terms terms_;
};

// ---------------------------------------------------------------------------------------------------------- forward

/// Adds columns [column, column + count), at most a block, to the statistics of a row, as far as `passes` asks for
/// them. `z` are their logits; `buffer`, which may be `z`, is overwritten.
template <typename T>
void add_with_options(const Rows<T>& rows, const Passes& passes, const typename Rows<T>::Row& row, std::int64_t column,
                      std::int64_t count, const Accumulator<T>* z, Accumulator<T>* buffer, RowStatistics& state) {
  using A = Accumulator<T>;
  constexpr A kRise = A(4);  // of the largest element over the anchor, before the anchor follows
  static_assert(kRise <= A(kSoftmaxSlack));
  const Terms& terms = rows.terms();
  A max = max_of(z, count);
  RowStatistics block;
  block.best = terms.class_count;
  if (passes.has_best && (max > state.best_value || state.best == terms.class_count)) {
    const std::int64_t best = find_first(z, count, max);
    if (best < count) {
      block.best = terms.first_class + column + best;
      block.best_value = max;
    }
  }
  if (passes.transforms) {
    transform_block(z, count, terms, buffer, static_cast<A*>(nullptr));
    z = buffer;
    max = max_of(z, count);
  }
  block.largest = max;
  block.softmax.max = max <= static_cast<A>(state.softmax.max) + kRise ? state.softmax.max : max;
  const A anchor = softmax_anchor(static_cast<A>(block.softmax.max));
  if (passes.has_moment) {
    const ExpSums sums = exp_sums(z, count, anchor);
    block.softmax.sum = sums.sum;
    block.moment = sums.moment;
  } else {
    block.softmax.sum = exact_sum_of_exp(z, count, anchor);
  }
  if (passes.has_linear) {
    Block<A> factors, extra;
    // Differences from the anchor keep the digits of logits that are all far from 0.
    const A* u = rows.read_factors(row, column, count, factors, extra);
    if (u == nullptr) {
      block.mass = static_cast<double>(count);
      block.linear = sum_of_differences(z, count, anchor) + block.mass * anchor;
    } else {
      const WeightedSums sums = weighted_sums(z, u, count, anchor);
      block.mass = sums.mass;
      block.linear = sums.linear + sums.mass * anchor;
    }
  }
  state = merge(state, block);
}

/// The statistics of some columns of a row.
template <typename T>
RowStatistics reduce_with_options(const Rows<T>& rows, const Passes& passes, const ColumnPiece& piece) {
  const auto row = rows.row(piece.group);
  Block<Accumulator<T>> buffer;
  RowStatistics state;
  state.best = rows.terms().class_count;
  for (std::int64_t column = piece.begin; column < piece.end; column += rows.block()) {
    const std::int64_t count = std::min(rows.block(), piece.end - column);
    const auto* z = rows.read_logits(row, column, count, buffer.elements);
    add_with_options(rows, passes, row, column, count, z, buffer.elements, state);
  }
  return state;
}

/// The statistics of the rows of a tile: turned a few columns of a pack of rows at a time, so that each line of memory
/// is read once and not once for each of its rows.
template <typename T, typename IsSkipped>
void reduce_tile_with_options(const Rows<T>& rows, const Passes& passes, const Tiles<T>& tiles,
                              const ColumnPiece& piece, IsSkipped&& is_skipped, RowStatistics* states) {
  using A = Accumulator<T>;
  constexpr std::int64_t kColumns = 256;          // of at most 128 rows of float32: 128 KiB, in L2
  constexpr std::int64_t kPitch = kColumns + 16;  // a power of two would put a column's elements into few sets of L1
  constexpr std::int64_t kRows = kMaxPackSize<T>;
  static_assert(kColumns % kRows == 0, "whole packs are written");
  HWY_ALIGN A turned[kRows * kPitch];
  HWY_ALIGN A side[kRows];
  const std::int64_t stride = rows.view().columns.strides[kLogits][0];
  const std::int64_t first = tiles.first_row(piece.group);
  const std::int64_t width = tiles.width(piece.group);
  const auto pack = static_cast<std::int64_t>(pack_size<T>());
  for (std::int64_t begin = 0; begin < width; begin += pack) {
    const std::int64_t row_count = std::min(pack, width - begin);
    const T* from = rows.logits().row(rows.view(), first + begin);
    for (std::int64_t i = 0; i < row_count; ++i) {
      states[begin + i] = {};
      states[begin + i].best = rows.terms().class_count;
    }
    for (std::int64_t column = piece.begin; column < piece.end; column += kColumns) {
      const std::int64_t count = std::min(kColumns, piece.end - column);
      for (std::int64_t i = 0; i < count; ++i) {
        store_in_order(load_some(from + (column + i) * stride, row_count, T{}), side);
        for (std::int64_t j = 0; j < row_count; ++j) turned[j * kPitch + i] = side[j];
      }
      for (std::int64_t i = 0; i < row_count; ++i) {
        if (is_skipped(first + begin + i)) continue;
        A* z = turned + i * kPitch;
        add_with_options(rows, passes, rows.row(first + begin + i), column, count, z, z, states[begin + i]);
      }
    }
  }
}

/// Calls `store(row, statistics)` for every row, from many threads. Those of ignored rows are any numbers where
/// `skips_ignored` is set.
template <typename T, typename Store>
void reduce_rows(const Rows<T>& rows, const Passes& passes, bool skips_ignored, const ExecutionContext& context,
                 Store&& store) {
  const CrossEntropyView& view = rows.view();
  if (view.row_count == 0) return;
  const auto is_skipped = [&](std::int64_t row) { return skips_ignored && rows.row(row).is_ignored; };
  if (passes.any() && Tiles<T>::fit(view)) {
    const Tiles<T> tiles(view);
    return reduce_pieces<RowStatistics, Tiles<T>::kWidth>(
        tiles.pieces(view.column_count), context,
        [&](const ColumnPiece& piece, RowStatistics* states) {
          reduce_tile_with_options(rows, passes, tiles, piece, is_skipped, states);
        },
        [&](std::int64_t tile, const RowStatistics* states) {
          for (std::int64_t i = 0; i < tiles.width(tile); ++i) store(tiles.first_row(tile) + i, states[i]);
        });
  }
  if (passes.any()) {
    return reduce_pieces<RowStatistics, 1>(
        ColumnPieces(view.column_count, view.row_count, 1), context,
        [&](const ColumnPiece& piece, RowStatistics* state) {
          *state = is_skipped(piece.group) ? RowStatistics{} : reduce_with_options(rows, passes, piece);
        },
        [&](std::int64_t row, const RowStatistics* state) { store(row, *state); });
  }
  const auto store_softmax = [&](std::int64_t row, const RowState& state) {
    RowStatistics statistics;
    statistics.softmax = state;
    store(row, statistics);
  };
  if (Tiles<T>::fit(view)) return reduce_softmax<T>(view, rows.logits(), context, store_softmax);
  reduce_pieces<RowState, 1>(
      ColumnPieces(view.column_count, view.row_count, 1), context,
      [&](const ColumnPiece& piece, RowState* state) {
        *state = is_skipped(piece.group) ? RowState{} : reduce_piece(view, rows.logits(), piece);
      },
      [&](std::int64_t row, const RowState* state) { store_softmax(row, *state); });
}

Passes forward_passes(const CrossEntropyForwardProblem& problem, const Terms& terms) {
  return {.transforms = transforms(terms),
          .has_linear = has_linear(terms),
          .has_moment = problem.outputs.entropy != nullptr,
          .has_best = problem.outputs.argmax != nullptr,
          .has_largest = false};
}

/// The results of a row whose statistics are known.
template <typename T>
RowLoss<double> loss_of(const Rows<T>& rows, const typename Rows<T>::Row& row, const RowStatistics& statistics,
                        bool skips_ignored) {
  if (skips_ignored && row.is_ignored) return {};
  return row_loss<double>(statistics, rows.target_class(row), !row.is_ignored, rows.terms());
}

template <typename T>
void forward_of(const CrossEntropyForwardProblem& problem, const ExecutionContext& context) {
  const Rows<T> rows(problem.inputs);
  const bool skips_ignored = !problem.reads_ignored_rows;
  Results results(problem.inputs, problem.outputs);
  reduce_rows(rows, forward_passes(problem, rows.terms()), skips_ignored, context,
              [&](std::int64_t index, const RowStatistics& statistics) {
                const auto row = rows.row(index);
                const bool is_skipped = skips_ignored && row.is_ignored;
                results.store(row.at.of[kPerRow], loss_of(rows, row, statistics, skips_ignored),
                              is_skipped ? 0 : statistics.best);
              });
  results.finish(divisor_if_mean(problem.inputs, problem.normalizer), problem.normalizer != nullptr);
}

// --------------------------------------------------------------------------------------------------------- backward

/// The gradient of a row, and that of its target's entry, which must be read before it is overwritten.
struct RowMap {
  RowGradient<double> gradient;
  bool is_zero;  ///< everywhere
  double target_value;
};

/// w_t. A shard without the target does not know it, but only the whole mass of the row matters there: that is w_t
/// itself, or with smoothing all that is left of the mass.
template <typename T>
double target_weight(const Rows<T>& rows, const typename Rows<T>::Row& row, double target_mass) {
  const std::int64_t column = rows.target_column(row);
  if (column >= 0 || !rows.terms().has_weight) return weight_at(rows.inputs(), column);
  return rows.terms().smoothing == 0.0 ? target_mass : 0.0;
}

/// Everything of `in` but the target, which is the row's. Its entry is computed where it is one of `columns`.
template <typename T>
RowMap map_of(const Rows<T>& rows, const typename Rows<T>::Row& row, RowGradientInputs<double> in,
              const ColumnPiece& columns) {
  const Terms& terms = rows.terms();
  const std::int64_t column = rows.target_column(row);
  in.target = row.target;
  in.target_weight = target_weight(rows, row, in.target_mass);
  RowMap map{row_gradient(in, terms), false, 0.0};
  const RowGradient<double>& g = map.gradient;
  map.is_zero = row.is_ignored && in.grad_lse == 0.0 && in.grad_entropy == 0.0;
  if (map.is_zero || column < columns.begin || column >= columns.end) return map;
  const Transformed z = rows.logit(row, column);
  const double difference = z.logit - g.lse;
  const double p = std::exp(difference);
  double value = 0.0;  // where p has no part in it, whatever p is
  if (g.hard != 0.0 || g.rest != 0.0) value = std::expm1(difference) * g.hard + p * g.rest;
  if (g.slope != 0.0 && p != 0.0) value += p * g.slope * difference;
  if (terms.smoothing != 0.0) value -= g.per_class * (terms.has_weight ? in.target_weight : 1.0);
  map.target_value = value * z.derivative;
  return map;
}

/// The coefficients of a row as its loop takes them: `derivative` is dz'/dz where that is one number. What the lse
/// loses when it is rounded to A is one factor of all exponentials, and goes into theirs.
template <typename A>
SoftmaxGradient<A> coefficients_of(const RowGradient<double>& g, double derivative) {
  const A lse = static_cast<A>(g.lse);
  const double rounding = std::isfinite(g.lse) ? static_cast<double>(lse) - g.lse : 0.0;
  const double factor = rounding == 0.0 ? derivative : derivative * std::exp(rounding);
  return {.lse = lse,
          .mass = static_cast<A>((g.mass + g.slope * rounding) * factor),
          .slope = static_cast<A>(g.slope * factor),
          .constant = static_cast<A>(g.per_class * derivative)};
}

template <typename T>
ScaledSoftmax<Accumulator<T>> softmax_of(const RowMap& map) {
  using A = Accumulator<T>;
  const SoftmaxGradient<A> gradient = coefficients_of<A>(map.gradient, 1.0);
  return {.lse = gradient.lse,
          .scale = gradient.mass,
          .is_zero = map.is_zero,
          .replaced = map.is_zero ? -1 : map.gradient.target,
          .value = static_cast<A>(map.target_value)};
}

/// The gradient of some columns of a row with options. Block by block, each read before it is written: see
/// write_narrower_row().
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

/// Whether a gradient is more than a multiple of the softmax and a target.
bool has_options(const Terms& terms, bool has_grad_entropy) {
  return transforms(terms) || has_linear(terms) || has_grad_entropy;
}

/// Where a gradient goes, and as what: narrower than the logits only over them (CrossEntropyInPlaceProblem).
struct Gradient {
  void* data;
  DType dtype;
};

/// A gradient of 16 bits over its own float32 logits. Columns [c, c + n) of it take the place of columns
/// [c / 2, (c + n) / 2) of theirs, so a row is written whole, from its start, by one thread.
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

/// Over the logits of the piece, which is a whole row where the gradient is narrower. Which dtype is asked here, for
/// each row: all that goes before is compiled once for all three.
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

/// `map(row, piece)` gives the RowMap of a row, for columns that nothing has been written of.
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

template <typename T>
void backward_of(const CrossEntropyBackwardProblem& problem, const ExecutionContext& context) {
  const Rows<T> rows(problem.inputs);
  const DType result_dtype = kDTypeOf<Accumulator<T>>;
  const double divisor = problem.divisor == nullptr ? 1.0 : number_at({problem.divisor, result_dtype}, 0);
  const auto per_row = [&](const void* data, std::int64_t index) {
    return data == nullptr ? 0.0 : static_cast<double>(static_cast<const Accumulator<T>*>(data)[index]);
  };
  write_gradients<T>(
      rows, {problem.grad_logits, problem.grad_dtype}, has_options(rows.terms(), problem.grad_entropy != nullptr),
      context, [&](std::int64_t index, const ColumnPiece& piece) {
        const auto row = rows.row(index);
        const std::int64_t at = row.at.of[kPerRow];
        return map_of(
            rows, row,
            {.grad_loss = grad_of_row(problem.grad_loss, problem.grad_loss_dtype, row.at.of[kGradLoss], divisor),
             .grad_lse = per_row(problem.grad_lse, at),
             .grad_entropy = per_row(problem.grad_entropy, at),
             .lse = per_row(problem.lse, at),
             .entropy = per_row(problem.entropy, at),
             .target_mass = per_row(problem.target_mass, at),
             .target = row.target,
             .target_weight = 0.0},
            piece);
      });
}

// --------------------------------------------------------------------------------------------- forward and backward

template <typename T>
void in_place_of(const CrossEntropyInPlaceProblem& problem, const ExecutionContext& context) {
  const CrossEntropyForwardProblem& forward = problem.forward;
  const Rows<T> rows(forward.inputs);
  const CrossEntropyView& view = rows.view();
  const Gradient grad_logits{const_cast<void*>(forward.inputs.logits), problem.grad_dtype};
  const Passes passes = forward_passes(forward, rows.terms());
  const bool with_options = has_options(rows.terms(), false);
  const double divisor = divisor_if_mean(forward.inputs, forward.normalizer);
  Results results(forward.inputs, forward.outputs);

  const auto finish_forward = [&](std::int64_t index, const RowStatistics& statistics) {
    const auto row = rows.row(index);
    const RowLoss<double> loss = loss_of(rows, row, statistics, true);
    results.store(row.at.of[kPerRow], loss, row.is_ignored ? 0 : statistics.best);
    return loss;
  };
  const auto map = [&](std::int64_t index, const RowLoss<double>& loss, const ColumnPiece& piece) {
    const auto row = rows.row(index);
    return map_of(rows, row,
                  {.grad_loss = grad_of_row(problem.grad_loss, problem.grad_loss_dtype, row.at.of[kGradLoss], divisor),
                   .grad_lse = 0.0,
                   .grad_entropy = 0.0,
                   .lse = loss.lse,
                   .entropy = 0.0,
                   .target_mass = loss.target_mass,
                   .target = row.target,
                   .target_weight = 0.0},
                  piece);
  };

  if (view.row_count == 0) return results.finish(divisor, forward.normalizer != nullptr);
  const bool has_tiles = !with_options && Tiles<T>::fit(view);  // with options there are none to write
  const ColumnPieces pieces(view.column_count, view.row_count, 1);
  if (has_tiles || pieces.count > 1) {
    std::vector<RowLoss<double>> losses(static_cast<std::size_t>(view.row_count));
    reduce_rows(rows, passes, true, context, [&](std::int64_t row, const RowStatistics& statistics) {
      losses[static_cast<std::size_t>(row)] = finish_forward(row, statistics);
    });
    write_gradients<T>(rows, grad_logits, with_options, context, [&](std::int64_t row, const ColumnPiece& piece) {
      return map(row, losses[static_cast<std::size_t>(row)], piece);
    });
  } else {
    // A row is read from memory once: its gradient finds it in the caches.
    for_each_row_piece(view, context, false, [&](const ColumnPiece& piece) {
      RowStatistics statistics;
      if (!rows.row(piece.group).is_ignored) {
        if (passes.any()) {
          statistics = reduce_with_options(rows, passes, piece);
        } else {
          statistics.softmax = reduce_piece(view, rows.logits(), piece);
        }
      }
      const RowMap gradient = map(piece.group, finish_forward(piece.group, statistics), piece);
      write_in_place(rows, grad_logits, with_options, piece, gradient);
    });
  }
  results.finish(divisor, forward.normalizer != nullptr);
}

template <typename T>
void rescale_of(const CrossEntropyRescaleProblem& problem, const ExecutionContext& context) {
  using A = Accumulator<T>;
  const CrossEntropyView& view = problem.view;
  for_each_row_piece(view, context, false, [&](const ColumnPiece& piece) {
    const auto at = view.rows.offsets(piece.group);
    const A factor = static_cast<A>(number_at({problem.grad_loss, problem.grad_loss_dtype}, at.of[kGradLoss]));
    if (factor == A(1)) return;
    T* row = static_cast<T*>(problem.grad_logits) + at.of[kGradLogits];
    if (view.layout == RowLayout::contiguous) {
      const auto factors = hn::Set(Tag<T>(), factor);
      transform(row + piece.begin, row + piece.begin, static_cast<std::size_t>(piece.end - piece.begin),
                [&](VectorOf<T> v) HWY_ATTR { return hn::Mul(v, factors); });
    } else {
      for_each_run(view.columns, kGradLogits, piece.begin, piece.end - piece.begin,
                   [&](std::int64_t, std::int64_t count, std::int64_t offset, std::int64_t stride) {
                     for (std::int64_t i = 0; i < count; ++i) {
                       T& element = row[offset + i * stride];
                       element = round_to<T>(load_as_accumulator(element) * factor);
                     }
                   });
    }
  });
}

// ----------------------------------------------------------------------------------------------------------- shards

template <typename T>
void shard_forward_of(const CrossEntropyShardProblem& problem, const ExecutionContext& context) {
  using A = Accumulator<T>;
  const Rows<T> rows(problem.inputs);
  const Passes passes{.transforms = transforms(rows.terms()),
                      .has_linear = true,
                      .has_moment = true,
                      .has_best = true,
                      .has_largest = true};
  reduce_rows(rows, passes, false, context, [&](std::int64_t index, const RowStatistics& statistics) {
    const auto row = rows.row(index);
    const TargetClass<double> target = rows.target_class(row);
    // The anchor becomes the largest element itself.
    ClassStatistics<double> largest;
    largest.softmax.max = statistics.largest;
    largest.best = rows.terms().class_count;
    const auto exact = merged(statistics, largest);
    A* to = static_cast<A*>(problem.statistics) + row.at.of[kPerRow] * kCrossEntropyStatistics;
    to[kLargest] = static_cast<A>(exact.softmax.max);
    to[kSum] = static_cast<A>(exact.softmax.sum);
    to[kTargetLogit] = static_cast<A>(target.logit);
    to[kTargetWeight] = static_cast<A>(target.weight);
    to[kLinear] = static_cast<A>(exact.linear);
    to[kMass] = static_cast<A>(exact.mass);
    to[kMoment] = static_cast<A>(exact.moment);
    to[kBestValue] = static_cast<A>(exact.best_value);
    to[kBest] = static_cast<A>(exact.best);
  });
}

}  // namespace

void forward(const CrossEntropyForwardProblem& problem, const ExecutionContext& context) {
  dispatch_floating_point(problem.inputs.logits_dtype, [&]<typename T>() { forward_of<T>(problem, context); });
}

void backward(const CrossEntropyBackwardProblem& problem, const ExecutionContext& context) {
  dispatch_floating_point(problem.inputs.logits_dtype, [&]<typename T>() { backward_of<T>(problem, context); });
}

void in_place(const CrossEntropyInPlaceProblem& problem, const ExecutionContext& context) {
  dispatch_floating_point(problem.forward.inputs.logits_dtype, [&]<typename T>() { in_place_of<T>(problem, context); });
}

void rescale(const CrossEntropyRescaleProblem& problem, const ExecutionContext& context) {
  dispatch_floating_point(problem.dtype, [&]<typename T>() { rescale_of<T>(problem, context); });
}

void shard_forward(const CrossEntropyShardProblem& problem, const ExecutionContext& context) {
  dispatch_floating_point(problem.inputs.logits_dtype, [&]<typename T>() { shard_forward_of<T>(problem, context); });
}

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eaves::cpu {
namespace {

HWY_EXPORT(forward);
HWY_EXPORT(backward);
HWY_EXPORT(in_place);
HWY_EXPORT(rescale);
HWY_EXPORT(shard_forward);

template <typename A>
void merge_of(const CrossEntropyMergeProblem& problem, const ExecutionContext& context) {
  const CrossEntropyInputs& inputs = problem.inputs;
  Terms terms(inputs);
  terms.has_weight = problem.has_weight;
  const std::int64_t row_count = inputs.view.row_count;
  Results results(inputs, problem.outputs);
  std::vector<double> weights(static_cast<std::size_t>(row_count));
  parallel_for(context, row_count, grain_for(problem.shards * 64), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const auto at = inputs.view.rows.offsets(row);
      const std::int64_t index = at.of[kPerRow];
      ClassStatistics<double> statistics;
      statistics.best = terms.class_count;
      TargetClass<double> target;
      for (std::int64_t shard = 0; shard < problem.shards; ++shard) {
        const A* from =
            static_cast<const A*>(problem.statistics) + (shard * row_count + index) * kCrossEntropyStatistics;
        const ClassStatistics<double> part{.softmax = {from[kLargest], from[kSum]},
                                           .linear = from[kLinear],
                                           .mass = from[kMass],
                                           .moment = from[kMoment],
                                           .best_value = from[kBestValue],
                                           .best = static_cast<std::int64_t>(from[kBest])};
        statistics = merged(statistics, part);
        target.logit += from[kTargetLogit];
        target.weight += from[kTargetWeight];
      }
      const bool is_ignored = terms.is_ignored(class_at({inputs.targets, inputs.targets_dtype}, at.of[kTargets]));
      weights[static_cast<std::size_t>(index)] = is_ignored ? 0.0 : target.weight;
      if (is_ignored && !problem.reads_ignored_rows) {
        results.store(index, {}, 0);
        continue;
      }
      results.store(index, row_loss(statistics, target, !is_ignored, terms), statistics.best);
    }
  });
  double divisor = 1.0;
  if (inputs.options.reduction == Reduction::mean) {
    divisor = problem.normalizer == nullptr ? sum_in_order(weights) : number_at({problem.normalizer, kDTypeOf<A>}, 0);
  }
  results.finish(divisor, problem.normalizer != nullptr);
}

}  // namespace

void cross_entropy_forward(const CrossEntropyForwardProblem& problem, const ExecutionContext& context) {
  HWY_DYNAMIC_DISPATCH(forward)(problem, context);
}

void cross_entropy_backward(const CrossEntropyBackwardProblem& problem, const ExecutionContext& context) {
  HWY_DYNAMIC_DISPATCH(backward)(problem, context);
}

void cross_entropy_in_place(const CrossEntropyInPlaceProblem& problem, const ExecutionContext& context) {
  HWY_DYNAMIC_DISPATCH(in_place)(problem, context);
}

void cross_entropy_rescale(const CrossEntropyRescaleProblem& problem, const ExecutionContext& context) {
  HWY_DYNAMIC_DISPATCH(rescale)(problem, context);
}

void cross_entropy_shard_forward(const CrossEntropyShardProblem& problem, const ExecutionContext& context) {
  HWY_DYNAMIC_DISPATCH(shard_forward)(problem, context);
}

void cross_entropy_merge(const CrossEntropyMergeProblem& problem, const ExecutionContext& context) {
  if (problem.inputs.logits_dtype == DType::float64) {
    merge_of<double>(problem, context);
  } else {
    merge_of<float>(problem, context);
  }
}

}  // namespace eaves::cpu
#endif  // HWY_ONCE
