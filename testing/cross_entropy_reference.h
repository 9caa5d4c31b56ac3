// The oracle: the header's formulas of cross_entropy and its gradient in float64 loops over the classes of a row; sums
// are long double, because results may be float64. Every target is a distribution here, of one class or many. The
// oracle reads the same arguments as the operator, in CPU memory, and shares no code with the backends. It need not be
// fast.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "eaves/cross_entropy.h"
#include "testing/reference.h"
#include "testing/tolerance.h"

namespace eaves::reference {

/// One row: its classes, and its results of the forward. testing/tolerance.h defines the scales.
struct CrossEntropyRow {
  std::vector<double> logits;        ///< z'
  std::vector<double> slope;         ///< dz'/dz
  std::vector<double> distribution;  ///< u_v = w_v * q'_v without the hard target's part
  double hard = 0.0;                 ///< the hard target's part: (1 - e) * w_t
  std::int64_t target = -1;          ///< -1: soft targets, or the row is ignored
  double weight = 1.0;               ///< r
  double target_weight = 0.0;        ///< the row's part of the mean's divisor: r w_t
  bool is_counted = true;            ///< not ignored

  double max = -std::numeric_limits<double>::infinity();
  double lse = 0.0;
  double anchor = 0.0;            ///< the largest z', or 0 if it is not finite
  double lse_minus_anchor = 0.0;  ///< has digits that lse lacks beside a huge anchor
  double entropy = 0.0;
  double sum_sq = 0.0;
  double mean_logit = 0.0;
  double mean_size = 0.0;  ///< mean of |z'|
  std::int64_t argmax = 0;
  double target_mass = 0.0;
  // Multiplied by r.
  double loss = 0.0;
  double loss_scale = 0.0;
  double z_loss = 0.0;
};

inline int class_axis_of(const CrossEntropyForwardArgs& args) {
  return args.class_axis < 0 ? args.class_axis + args.logits.shape.size() : args.class_axis;
}

inline std::int64_t row_count_of(const CrossEntropyForwardArgs& args) {
  std::int64_t rows = 1;
  for (int axis = 0; axis < args.logits.shape.size(); ++axis) {
    if (axis != class_axis_of(args)) rows *= args.logits.shape[axis];
  }
  return rows;
}

/// Row number `row`, in row-major order of the axes other than that of the classes.
inline CrossEntropyRow cross_entropy_row(const CrossEntropyForwardArgs& args, std::int64_t row) {
  const CrossEntropyOptions& options = args.options;
  const int axis = class_axis_of(args);
  const std::vector<double> z = elements_along(args.logits, axis, row);
  const std::size_t classes = z.size();
  const double per_class = 1.0 / static_cast<double>(classes);
  const double e = options.label_smoothing;
  CrossEntropyRow result;

  for (const double logit : z) {
    const double scaled = options.scale * logit;
    const double tanh = options.softcap == 0.0 ? 0.0 : std::tanh(scaled / options.softcap);
    result.logits.push_back(options.softcap == 0.0 ? scaled : options.softcap * tanh);
    const double cosh = options.softcap == 0.0 ? 1.0 : std::cosh(scaled / options.softcap);
    result.slope.push_back(options.scale / (cosh * cosh));  // 1 - tanh^2 would cancel
  }
  std::size_t best = classes;  // none yet
  for (std::size_t v = 0; v < classes; ++v) {
    result.max = std::fmax(result.max, result.logits[v]);
    if (!std::isnan(z[v]) && (best == classes || z[v] > z[best])) best = v;
  }
  result.argmax = best == classes ? 0 : static_cast<std::int64_t>(best);

  // An infinite maximum is not subtracted: exp of the logit itself is 0, infinity or NaN, as in the formula.
  result.anchor = std::isfinite(result.max) ? result.max : 0.0;
  long double sum = 0.0;
  for (const double logit : result.logits) sum += std::exp(logit - result.anchor);
  result.lse_minus_anchor = std::log(static_cast<double>(sum));
  result.lse = result.anchor + result.lse_minus_anchor;
  long double entropy = 0.0, squares = 0.0, logits = 0.0, sizes = 0.0;
  for (const double logit : result.logits) {
    const double log_p = logit - result.anchor - result.lse_minus_anchor;
    logits += logit;
    sizes += std::abs(logit);
    if (logit == -std::numeric_limits<double>::infinity()) continue;  // p is 0
    entropy -= std::exp(log_p) * log_p;
    squares += std::exp(2.0 * log_p);
  }
  result.entropy = static_cast<double>(entropy);
  result.sum_sq = static_cast<double>(squares);
  result.mean_logit = static_cast<double>(logits) * per_class;
  result.mean_size = static_cast<double>(sizes) * per_class;

  std::vector<double> weight(classes, 1.0);
  if (args.class_weight.is_present) weight = elements_along(args.class_weight, 0, 0);
  result.distribution.assign(classes, 0.0);
  if (is_floating_point(args.targets.dtype)) {
    const std::vector<double> q = elements_along(args.targets, axis, row);
    for (std::size_t v = 0; v < classes; ++v) {
      result.distribution[v] = weight[v] * ((1.0 - e) * q[v] + e * per_class);
    }
    result.target_weight = 1.0;
  } else {
    const auto target = static_cast<std::int64_t>(element(args.targets, row));
    result.is_counted = target != options.ignore_index;
    if (result.is_counted) {
      result.target = target;
      result.target_weight = weight[static_cast<std::size_t>(target)];
      result.hard = (1.0 - e) * result.target_weight;
      for (std::size_t v = 0; v < classes; ++v) result.distribution[v] = e * per_class * weight[v];
    }
  }
  if (!result.is_counted) return result;
  if (args.row_weight.is_present) result.weight = element(args.row_weight, row);
  result.target_weight *= result.weight;

  const double lse_scale = testing::logsumexp_scale(result.lse, result.max);
  long double target_mass = 0.0;
  long double loss = 0.0;
  for (std::size_t v = 0; v < classes; ++v) {
    const double hard = static_cast<std::int64_t>(v) == result.target ? result.hard : 0.0;
    const double mass = hard + result.distribution[v];
    if (mass == 0.0) continue;  // 0 * log(0) is 0
    target_mass += mass;
    loss += mass * (result.anchor - result.logits[v] + result.lse_minus_anchor);
    result.loss_scale += testing::class_loss_scale(mass, result.logits[v], lse_scale);
  }
  result.target_mass = static_cast<double>(target_mass);
  result.loss = static_cast<double>(loss);
  if (options.z_loss_weight != 0.0) {
    result.z_loss = options.z_loss_weight * result.lse * result.lse;
    result.loss += result.z_loss;
    result.loss_scale += testing::z_loss_scale(options.z_loss_weight, lse_scale);
  }
  if (result.weight == 0.0) {  // 0 even if they are infinite or NaN
    result.loss = result.loss_scale = result.z_loss = 0.0;
    return result;
  }
  result.loss *= result.weight;
  result.loss_scale *= std::abs(result.weight);
  result.z_loss *= result.weight;
  return result;
}

/// The sums over the rows; `weight` is the mean's divisor.
struct CrossEntropySums {
  long double loss = 0.0;
  double loss_scale = 0.0;
  long double z_loss = 0.0;
  double z_loss_scale = 0.0;
  long double weight = 0.0;

  void add(const CrossEntropyRow& row, const CrossEntropyOptions& options) {
    weight += row.target_weight;
    loss += row.loss;
    loss_scale += row.loss_scale;
    z_loss += row.z_loss;
    if (row.is_counted) {
      z_loss_scale += std::abs(row.weight) *
                      testing::z_loss_scale(options.z_loss_weight, testing::logsumexp_scale(row.lse, row.max));
    }
  }
};

/// The gradients of a row's outputs, and the outputs of the forward that the backward reads: the oracle takes the same
/// numbers.
struct CrossEntropyUpstream {
  double loss = 0.0;  ///< after the mean's division
  double lse_gradient = 0.0;
  double entropy_gradient = 0.0;
  double anchor = 0.0;  ///< lse = anchor + lse_minus_anchor
  double lse_minus_anchor = 0.0;
  double entropy = 0.0;
  double lse_rounding = 0.0;  ///< |lse| if the call computes or rounds lse itself, for GradientTerms::rounded
};

struct CrossEntropyGradient {
  std::vector<double> values;
  std::vector<double> scales;  ///< of each class
  double scale = 0.0;          ///< of the row: the largest one
};

inline CrossEntropyGradient cross_entropy_gradient(const CrossEntropyRow& row, const CrossEntropyOptions& options,
                                                   const CrossEntropyUpstream& upstream) {
  CrossEntropyGradient result;
  const double of_lse = upstream.lse_gradient;
  const double of_entropy = upstream.entropy_gradient;
  if ((!row.is_counted || row.weight == 0.0) && of_lse == 0.0 && of_entropy == 0.0) {
    result.values.assign(row.logits.size(), 0.0);  // 0 for any logits
    result.scales = result.values;
    return result;
  }
  const double lse = upstream.anchor + upstream.lse_minus_anchor;
  const double g = row.is_counted ? upstream.loss * row.weight : 0.0;
  const double of_z_loss = g != 0.0 && options.z_loss_weight != 0.0 ? g * 2.0 * options.z_loss_weight * lse : 0.0;
  const bool is_transformed = options.scale != 1.0 || options.softcap != 0.0;
  for (std::size_t v = 0; v < row.logits.size(); ++v) {
    const bool is_target = static_cast<std::int64_t>(v) == row.target;
    const double hard = is_target ? g * row.hard : 0.0;
    const double of_mass = g * (row.target_mass - (is_target ? row.hard : 0.0));
    const double distribution = g * row.distribution[v];
    const double log_p = row.logits[v] - upstream.anchor - upstream.lse_minus_anchor;
    const double p = std::exp(log_p);
    // d(entropy)/dz' = -p * (log p + entropy), and 0 if p is 0
    const bool has_entropy = of_entropy != 0.0 && p != 0.0;
    const double in_entropy = has_entropy ? -of_entropy * (log_p + upstream.entropy) : 0.0;
    double value = p * (of_mass + of_z_loss + of_lse + in_entropy) - distribution;
    if (hard != 0.0) value += hard * std::expm1(log_p);  // (p - 1) * hard
    result.values.push_back(value * row.slope[v]);

    const double scale = testing::gradient_scale(
        {.probability = p,
         .of_probability = std::abs(of_mass) + std::abs(of_z_loss) + std::abs(of_lse) +
                           (has_entropy ? std::abs(of_entropy) * (std::abs(log_p) + std::abs(upstream.entropy)) : 0.0),
         .of_target = std::abs(hard),
         .p_minus_one = std::expm1(log_p),
         .of_distribution = std::abs(distribution),
         .rounded = (is_transformed ? std::abs(row.logits[v]) : 0.0) + upstream.lse_rounding,
         .slope = options.scale});
    result.scales.push_back(scale);
    result.scale = std::fmax(result.scale, scale);  // a NaN does not raise it
  }
  return result;
}

}  // namespace eaves::reference
