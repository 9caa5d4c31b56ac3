// The formulas of cross_entropy.h for one row: the loss from the statistics of its logits, and the coefficients of its
// gradient. Both backends share them; each has its own loops over the classes.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "core/mean_loss.h"
#include "core/numeric.h"
#include "core/softmax_state.h"
#include "ops/cross_entropy/cross_entropy_backend.h"

namespace eaves {

/// The options of a call, in the type A of a kernel's arithmetic.
template <typename A>
struct CrossEntropyTerms {
  A scale;
  A softcap;              ///< 0: absent
  A smoothing;            ///< e
  A smoothing_per_class;  ///< e / V
  A z_loss_weight;
  std::int64_t ignore_index;
  std::int64_t class_count;
  std::int64_t first_class;
  bool is_soft;     ///< targets are distributions
  bool has_weight;  ///< classes have weights

  explicit CrossEntropyTerms(const CrossEntropyInputs& inputs)
      : scale(static_cast<A>(inputs.options.scale)),
        softcap(static_cast<A>(inputs.options.softcap)),
        smoothing(static_cast<A>(inputs.options.label_smoothing)),
        smoothing_per_class(static_cast<A>(inputs.options.label_smoothing /
                                           static_cast<double>(std::max<std::int64_t>(1, inputs.classes)))),
        z_loss_weight(static_cast<A>(inputs.options.z_loss_weight)),
        ignore_index(inputs.options.ignore_index),
        class_count(inputs.classes),
        first_class(inputs.first_class),
        is_soft(inputs.has_soft_targets()),
        has_weight(inputs.weight.data != nullptr) {}

  EAVES_HOST_DEVICE bool is_ignored(std::int64_t target) const { return !is_soft && target == ignore_index; }
  EAVES_HOST_DEVICE bool is_in_range(std::int64_t target) const { return target >= 0 && target < class_count; }
};

/// Greater than every class: the best class of an empty set.
inline constexpr std::int64_t kNoClass = std::numeric_limits<std::int64_t>::max();

/// The statistics of a set of classes of a row; the loss is a function of the statistics of all classes.
template <typename A>
struct ClassStatistics {
  SoftmaxState<A> softmax;  ///< of z'
  A logit_sum = A(0);   ///< sum_v u_v z'_v; u_v is 1, w_v with smoothing over weights, or w_v q'_v with soft targets
  A factor_sum = A(0);  ///< sum_v u_v; not computed if u is 1
  A square = A(0);      ///< sum_v exp(2 d_v) with d as below
  A moment = A(0);      ///< sum_v exp(d_v) d_v with d_v = z'_v - anchor(softmax.max); a term is 0 if exp(d_v) is
  A best_value = -infinity<A>();  ///< the largest z that is not NaN
  std::int64_t best = kNoClass;   ///< its class, the first of equal ones
};

/// The statistics of the union of two disjoint sets of classes. Commutative; default-constructed statistics are
/// neutral.
template <typename A, typename Exp>
EAVES_HOST_DEVICE ClassStatistics<A> merge(const ClassStatistics<A>& a, const ClassStatistics<A>& b, Exp exp) {
  ClassStatistics<A> result;
  result.softmax = merge(a.softmax, b.softmax, exp);
  result.logit_sum = a.logit_sum + b.logit_sum;
  result.factor_sum = a.factor_sum + b.factor_sum;
  const auto add_moved = [&](const ClassStatistics<A>& part) {
    if (part.softmax.sum == A(0)) return;  // nothing to move, and its anchor is arbitrary
    const A shift = softmax_anchor(part.softmax.max) - softmax_anchor(result.softmax.max);
    const A scale = shift == A(0) ? A(1) : exp(shift);
    if (scale == A(0)) return;  // the shift may be -infinity, and 0 * -infinity is NaN
    result.moment += (part.moment + part.softmax.sum * shift) * scale;
    result.square += part.square * scale * scale;
  };
  add_moved(a);
  add_moved(b);
  const bool is_b = b.best_value > a.best_value || (b.best_value == a.best_value && b.best < a.best);
  result.best_value = is_b ? b.best_value : a.best_value;
  result.best = is_b ? b.best : a.best;
  return result;
}

/// z'_t and w_t of a hard target t. Both are 0 with soft targets and in ignored rows.
template <typename A>
struct TargetClass {
  A logit = A(0);
  A weight = A(0);
};

/// Stores the statistics of a row of a shard. `statistics.best` is a class of the whole vocabulary, not a column.
template <typename A>
EAVES_HOST_DEVICE void store_statistics(const ClassStatistics<A>& statistics, const TargetClass<A>& target,
                                        const CrossEntropyTerms<A>& terms, auto* to) {
  using S = CrossEntropyStatistic;
  const auto store = [&](S i, A value) { to[int(i)] = static_cast<std::remove_reference_t<decltype(*to)>>(value); };
  store(S::largest, statistics.softmax.max);
  store(S::sum, statistics.softmax.sum);
  store(S::target_logit, target.logit);
  store(S::target_weight, target.weight);
  store(S::logit_sum, statistics.logit_sum);
  store(S::factor_sum, statistics.factor_sum);
  store(S::moment, statistics.moment);
  store(S::best_value, statistics.best_value);
  store(S::best, static_cast<A>(statistics.best == kNoClass ? terms.class_count : statistics.best));
  store(S::square, statistics.square);
}

template <typename A>
EAVES_HOST_DEVICE ClassStatistics<A> stored_statistics(const auto* from) {
  const auto at = [&](CrossEntropyStatistic i) { return static_cast<A>(from[int(i)]); };
  using S = CrossEntropyStatistic;
  return {.softmax = {at(S::largest), at(S::sum)},
          .logit_sum = at(S::logit_sum),
          .factor_sum = at(S::factor_sum),
          .square = at(S::square),
          .moment = at(S::moment),
          .best_value = at(S::best_value),
          .best = static_cast<std::int64_t>(at(S::best))};
}

template <typename A>
struct RowLoss {
  A loss;
  A z_loss;
  SplitLse<A> lse;
  A target_mass;  ///< m of cross_entropy.h
};

/// The loss of a row times the row's weight. A weight of 0 makes it 0, even if it is infinite or NaN.
template <typename A>
EAVES_HOST_DEVICE RowLoss<A> weighted(RowLoss<A> row, A row_weight) {
  row.loss = weigh(row.loss, row_weight);
  row.z_loss = weigh(row.z_loss, row_weight);
  return row;
}

/// `is_counted` is false for an ignored row: its loss, z_loss and target_mass are 0.
template <typename A>
EAVES_HOST_DEVICE RowLoss<A> row_loss(const ClassStatistics<A>& statistics, const TargetClass<A>& target,
                                      bool is_counted, const CrossEntropyTerms<A>& terms) {
  RowLoss<A> result{};
  const A anchor = softmax_anchor(statistics.softmax.max);
  const A log_sum = std::log(statistics.softmax.sum);
  result.lse = split_lse(anchor, log_sum);
  if (!is_counted) return result;
  // lse - z'_t as (anchor - z'_t) + log_sum: beside a loss of 0 the anchor is z'_t, and nothing cancels.
  const A target_factor = terms.is_soft ? A(0) : (A(1) - terms.smoothing) * target.weight;
  if (target_factor != A(0)) {
    const A loss = (anchor - target.logit) + log_sum;
    result.loss = target_factor * (loss < A(0) ? A(0) : loss);  // rounding can make a loss near 0 negative; keeps a NaN
  }
  const A factor = terms.is_soft ? A(1) : terms.smoothing_per_class;
  A smooth_mass = A(0);
  if (factor != A(0)) {
    smooth_mass = terms.is_soft || terms.has_weight ? factor * statistics.factor_sum : terms.smoothing;
    // Without mass there is no term, even if log_sum is infinite or NaN.
    const bool has_terms = smooth_mass != A(0) || statistics.logit_sum != A(0);
    if (has_terms) result.loss += smooth_mass * log_sum + (smooth_mass * anchor - factor * statistics.logit_sum);
  }
  result.target_mass = target_factor + smooth_mass;
  if (terms.z_loss_weight != A(0)) result.z_loss = terms.z_loss_weight * result.lse.high * result.lse.high;
  result.loss += result.z_loss;
  return result;
}

// The outputs that few calls want have a function each: on a GPU their divisions take longer than the rest of a short
// row's end. All of them are 0 in a row without classes.

template <typename A>
EAVES_HOST_DEVICE A entropy_of(const ClassStatistics<A>& statistics) {
  const A sum = statistics.softmax.sum;
  // sum_v p_v log p_v = sum_v p_v (d_v - log sum)
  const A entropy = sum == A(0) ? A(0) : std::log(sum) - statistics.moment / sum;
  return entropy < A(0) ? A(0) : entropy;  // rounding can make an entropy near 0 negative
}

template <typename A>
EAVES_HOST_DEVICE A sum_sq_of(const ClassStatistics<A>& statistics) {
  const A sum = statistics.softmax.sum;
  return sum == A(0) ? A(0) : statistics.square / sum / sum;
}

/// Requires u = 1 in `logit_sum`: no soft targets, and no smoothing over weighted classes.
template <typename A>
EAVES_HOST_DEVICE A mean_logit_of(const ClassStatistics<A>& statistics, std::int64_t classes) {
  return classes == 0 ? A(0) : statistics.logit_sum / static_cast<A>(classes);
}

/// Replaces a positive number, which only rounding can cause, by 0; keeps a NaN.
template <typename A>
EAVES_HOST_DEVICE A not_above_0(A value) {
  return value > A(0) ? A(0) : value;
}

/// The coefficients of a row's gradient. For a class v that is not the target, dL/dz'_v (without the factor dz'_v/dz_v)
/// is
///
///   p_v * (softmax_factor + slope * (z'_v - lse)) - per_class * u_v        with p_v = exp(z'_v - lse)
///
/// For the target t, target_factor is subtracted. softmax_factor * p_t - target_factor would cancel as p_t goes to 1,
/// so it is computed as expm1(z'_t - lse) * target_factor + p_t * surplus.
///
/// ClassStatistics defines u. p_t is kept from exceeding 1, because only rounding puts z'_t above lse.
template <typename A>
struct RowGradient {
  SplitLse<A> lse;
  A softmax_factor;     ///< the factor of p_v: target_factor + surplus
  A surplus;            ///< softmax_factor - target_factor, computed without the difference
  A target_factor;      ///< (1 - e) w_t g with g = dL/d(loss of the row); 0 with soft targets
  A slope;              ///< -dL/d(entropy); 0 without one
  A per_class;          ///< g with soft targets, g * e / V with smoothing
  std::int64_t target;  ///< column of the target; outside of the columns if another shard has it, -1 without a target

  /// z'_t - lse of the target, at most 0.
  EAVES_HOST_DEVICE A log_probability(A z) const { return not_above_0((z - lse.high) - lse.low); }
};

/// The inputs of row_gradient().
template <typename A>
struct RowGradientInputs {
  A grad_loss;     ///< g = dL/d(loss of the row), after the mean's division and times the row's weight
  A grad_lse;      ///< 0 if not given
  A grad_entropy;  ///< 0 if not given
  SplitLse<A> lse;
  A entropy;
  A target_mass;        ///< m; read with soft targets, with smoothing over weights, and in shards with weights
  std::int64_t target;  ///< a class, not a column; arbitrary with soft targets
  A target_weight;      ///< w_t
};

/// The w_t for row_gradient() if another shard has the target. The loss's part of softmax_factor has to be g * m, with
/// m from the merge. Without smoothing w_t = m; with smoothing w_t = 0, because row_gradient() adds the rest, m - (1 -
/// e) * w_t.
template <typename A>
EAVES_HOST_DEVICE A weight_of_other_shard(A target_mass, const CrossEntropyTerms<A>& terms) {
  return !terms.has_weight ? A(1) : terms.smoothing == A(0) ? target_mass : A(0);
}

template <typename A>
EAVES_HOST_DEVICE RowGradient<A> row_gradient(const RowGradientInputs<A>& in, const CrossEntropyTerms<A>& terms) {
  RowGradient<A> result{};
  result.lse = in.lse;
  result.target = -1;
  result.slope = -in.grad_entropy;
  // d(entropy)/dz'_v = -p_v * (z'_v - lse + entropy)
  result.surplus = in.grad_lse;
  if (in.grad_entropy != A(0)) result.surplus -= in.grad_entropy * in.entropy;
  if (!terms.is_ignored(in.target) && in.grad_loss != A(0)) {  // 0 * infinity would be NaN
    const A g = in.grad_loss;
    // Not 0 * lse: without a z-loss, an infinite lse would make the gradient of every class NaN.
    const A of_z_loss = terms.z_loss_weight == A(0) ? A(0) : A(2) * terms.z_loss_weight * in.lse.high;
    if (terms.is_soft) {
      result.surplus += g * (in.target_mass + of_z_loss);
      result.per_class = g;
    } else {
      const A one_minus_smoothing = A(1) - terms.smoothing;
      const A smooth_mass = terms.smoothing == A(0) ? A(0)
                            : terms.has_weight      ? in.target_mass - one_minus_smoothing * in.target_weight
                                                    : terms.smoothing;
      result.target_factor = g * one_minus_smoothing * in.target_weight;
      result.surplus += g * (smooth_mass + of_z_loss);
      result.per_class = g * terms.smoothing_per_class;
      result.target = in.target - terms.first_class;
    }
  }
  result.softmax_factor = result.target_factor + result.surplus;
  return result;
}

}  // namespace eaves
