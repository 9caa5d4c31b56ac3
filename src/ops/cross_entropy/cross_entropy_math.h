// The formulas of cross_entropy.h for one row, in numbers: from the statistics of its logits to the loss, and to the
// few coefficients that its gradient consists of. Shared by both backends; the loops over classes are theirs.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "core/mean_loss.h"
#include "core/numeric.h"
#include "core/softmax_state.h"
#include "ops/cross_entropy/cross_entropy_backend.h"

namespace eaves {

/// The options as a kernel computes with them.
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

/// Behind all classes: the best class of none.
inline constexpr std::int64_t kNoClass = std::numeric_limits<std::int64_t>::max();

/// What the loss needs to know of some classes of a row.
template <typename A>
struct ClassStatistics {
  SoftmaxState<A> softmax;        ///< of z'
  A logit_sum = A(0);             ///< sum of u_v * z'_v, where u is 1, the weights, or with soft targets w_v * q'_v
  A factor_sum = A(0);            ///< sum of u_v; not computed where u is 1
  A square = A(0);                ///< sum of exp(2 * d) with d as below
  A moment = A(0);                ///< sum of exp(d) * d with d = z' - anchor(softmax.max); 0 where exp(d) is
  A best_value = -infinity<A>();  ///< the largest z that is not NaN
  std::int64_t best = kNoClass;   ///< its class, the first of equal ones
};

/// The statistics of the union of two disjoint sets of classes. Commutative; the default-constructed one is neutral.
template <typename A, typename Exp>
EAVES_HOST_DEVICE ClassStatistics<A> merge(const ClassStatistics<A>& a, const ClassStatistics<A>& b, Exp exp) {
  ClassStatistics<A> result;
  result.softmax = merge(a.softmax, b.softmax, exp);
  result.logit_sum = a.logit_sum + b.logit_sum;
  result.factor_sum = a.factor_sum + b.factor_sum;
  const auto add_moved = [&](const ClassStatistics<A>& part) {
    if (part.softmax.sum == A(0)) return;  // its anchor may be any number
    const A shift = softmax_anchor(part.softmax.max) - softmax_anchor(result.softmax.max);
    const A scale = shift == A(0) ? A(1) : exp(shift);
    if (scale == A(0)) return;  // shift may be -infinity
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

/// Of the class that a hard target names: z'_t and w_t. Both 0 for soft targets and rows that are ignored.
template <typename A>
struct TargetClass {
  A logit = A(0);
  A weight = A(0);
};

/// The statistics of a row of a shard in memory: `first_class` is added to the best class.
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

/// The loss of a row with a weight; with 0 it is 0, whatever it was.
template <typename A>
EAVES_HOST_DEVICE RowLoss<A> weighted(RowLoss<A> row, A row_weight) {
  row.loss = weigh(row.loss, row_weight);
  row.z_loss = weigh(row.z_loss, row_weight);
  return row;
}

/// `is_counted` is false where the row is ignored: then loss, z_loss and target_mass are 0.
template <typename A>
EAVES_HOST_DEVICE RowLoss<A> row_loss(const ClassStatistics<A>& statistics, const TargetClass<A>& target,
                                      bool is_counted, const CrossEntropyTerms<A>& terms) {
  RowLoss<A> result{};
  const A anchor = softmax_anchor(statistics.softmax.max);
  const A log_sum = std::log(statistics.softmax.sum);
  result.lse = split_lse(anchor, log_sum);
  if (!is_counted) return result;
  // Through the anchor instead of lse: next to a loss of 0, z'_t is the anchor, and nothing cancels.
  const A target_factor = terms.is_soft ? A(0) : (A(1) - terms.smoothing) * target.weight;
  if (target_factor != A(0)) {
    const A loss = (anchor - target.logit) + log_sum;
    result.loss = target_factor * (loss < A(0) ? A(0) : loss);  // the roundings of a loss next to 0; a NaN stays one
  }
  const A factor = terms.is_soft ? A(1) : terms.smoothing_per_class;
  A smooth_mass = A(0);
  if (factor != A(0)) {
    smooth_mass = terms.is_soft || terms.has_weight ? factor * statistics.factor_sum : terms.smoothing;
    // Without mass there is no term, whatever log_sum is.
    const bool has_terms = smooth_mass != A(0) || statistics.logit_sum != A(0);
    if (has_terms) result.loss += smooth_mass * log_sum + (smooth_mass * anchor - factor * statistics.logit_sum);
  }
  result.target_mass = target_factor + smooth_mass;
  if (terms.z_loss_weight != A(0)) result.z_loss = terms.z_loss_weight * result.lse.high * result.lse.high;
  result.loss += result.z_loss;
  return result;
}

// Outputs that few calls want, each by itself: their divisions take a GPU longer than the rest of a short row's end.
// A row without classes has no distribution: they are 0.

template <typename A>
EAVES_HOST_DEVICE A entropy_of(const ClassStatistics<A>& statistics) {
  const A sum = statistics.softmax.sum;
  // sum p (log p) = sum p (d - log sum)
  const A entropy = sum == A(0) ? A(0) : std::log(sum) - statistics.moment / sum;
  return entropy < A(0) ? A(0) : entropy;  // the roundings of one next to 0
}

template <typename A>
EAVES_HOST_DEVICE A sum_sq_of(const ClassStatistics<A>& statistics) {
  const A sum = statistics.softmax.sum;
  return sum == A(0) ? A(0) : statistics.square / sum / sum;
}

/// Only where `logit_sum` is the plain sum: no soft targets, no weights with smoothing.
template <typename A>
EAVES_HOST_DEVICE A mean_logit_of(const ClassStatistics<A>& statistics, std::int64_t classes) {
  return classes == 0 ? A(0) : statistics.logit_sum / static_cast<A>(classes);
}

/// A number that only roundings make positive; a NaN stays one.
template <typename A>
EAVES_HOST_DEVICE A not_above_0(A value) {
  return value > A(0) ? A(0) : value;
}

/// The gradient of a row in the classes v, without dz'_v/dz_v:
///
///   p_v * (softmax_factor + slope * (z'_v - lse)) - per_class * u_v        with p_v = exp(z'_v - lse)
///
/// The target's is target_factor less. softmax_factor * p - target_factor would cancel as p goes to 1, so those two are
/// expm1(z'_v - lse) * target_factor + p_v * surplus.
///
/// u is that of ClassStatistics. No p is above 1: a z'_t beyond lse is a rounding.
template <typename A>
struct RowGradient {
  SplitLse<A> lse;
  A softmax_factor;     ///< of each probability: target_factor + surplus
  A surplus;            ///< softmax_factor - target_factor, computed without the difference
  A target_factor;      ///< (1 - e) w_t g; 0 with soft targets
  A slope;              ///< of the entropy's gradient, 0 without
  A per_class;          ///< 1 * g for soft targets, g * e / V for smoothing
  std::int64_t target;  ///< column of the target, -1 where there is none among the columns

  /// z'_t - lse of the target.
  EAVES_HOST_DEVICE A log_probability(A z) const { return not_above_0((z - lse.high) - lse.low); }
};

/// What the gradient of a row is made of.
template <typename A>
struct RowGradientInputs {
  A grad_loss;     ///< dL/d(loss of the row): after the mean's division, and with the row's weight
  A grad_lse;      ///< 0 where not given
  A grad_entropy;  ///< likewise
  SplitLse<A> lse;
  A entropy;
  A target_mass;        ///< of soft targets, where weights and smoothing meet, and of shards with weights
  std::int64_t target;  ///< the class; any number for soft targets
  A target_weight;      ///< w_t
};

/// w_t, as row_gradient() takes it, where the target is another shard's: what p is multiplied by is known from the
/// merge, all of it.
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
  if (!terms.is_ignored(in.target) && in.grad_loss != A(0)) {  // or 0 * infinity would be a NaN
    const A g = in.grad_loss;
    // 0 * infinity: without a z-loss, an infinite lse leaves the other classes their gradient.
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
