// The code that tests of cross_entropy and of linear_cross_entropy share: the default inputs of a case, the outputs of
// a forward, and their comparison with the oracle's rows and sums.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "eaves/cross_entropy.h"
#include "testing/cross_entropy_reference.h"
#include "testing/tensor.h"
#include "testing/tolerance.h"

namespace eaves::testing {

// ---- inputs --------------------------------------------------------------------------------------------------------

inline std::function<double(std::int64_t)> noise(std::uint64_t seed) {
  return [seed](std::int64_t i) { return random_normal(seed, static_cast<std::uint64_t>(i)); };
}

/// 0.25 to 1.75, and 0 for every seventh class.
inline double random_class_weight(std::uint64_t seed, std::int64_t v) {
  return v % 7 == 4 ? 0.0 : 0.25 + 1.5 * random_uniform(seed, static_cast<std::uint64_t>(v));
}

/// Element i of soft targets, or of hard targets: any class, every fifth row ignored.
inline double random_target(std::uint64_t seed, std::int64_t i, bool is_soft, std::int64_t classes,
                            std::int64_t ignore_index) {
  const auto number = static_cast<std::uint64_t>(i);
  if (is_soft) return 2.0 * random_uniform(seed, number) / static_cast<double>(classes);
  if (i % 5 == 3) return static_cast<double>(ignore_index);
  return std::floor(random_uniform(seed + 1, number) * static_cast<double>(classes));
}

/// ", reduction mean", and every option that is not its default.
inline std::string description_of(const CrossEntropyOptions& options) {
  constexpr const char* kReductions[] = {"none", "sum", "mean"};
  std::string text = std::string(", reduction ") + kReductions[static_cast<int>(options.reduction)];
  if (options.ignore_index != CrossEntropyOptions{}.ignore_index) {
    text += ", ignore_index " + std::to_string(options.ignore_index);
  }
  const auto add = [&](const char* name, double value, double absent) {
    if (value != absent) text += std::string(", ") + name + " " + std::to_string(value);
  };
  add("label_smoothing", options.label_smoothing, 0.0);
  add("scale", options.scale, 1.0);
  add("softcap", options.softcap, 0.0);
  add("z_loss_weight", options.z_loss_weight, 0.0);
  return text;
}

// ---- outputs -------------------------------------------------------------------------------------------------------

/// The view of a tensor for an operator or for the oracle: &TestTensor::view or &TestTensor::host.
using Where = TensorView (TestTensor::*)() const;

/// The outputs of one forward.
struct CrossEntropyResults {
  CrossEntropyResults(Device device, DType dtype, const Dims& row_shape, Reduction reduction,
                      bool has_split_lse = false)
      : has_split_lse(has_split_lse),
        loss(device, dtype, reduction == Reduction::none ? row_shape : Dims{}),
        lse(device, dtype, has_split_lse ? with_axis_of_2(row_shape) : row_shape),
        argmax(device, DType::int64, row_shape),
        entropy(device, dtype, row_shape),
        sum_sq(device, dtype, row_shape),
        mean_logit(device, dtype, row_shape),
        z_loss(device, dtype, reduction == Reduction::none ? row_shape : Dims{}),
        target_mass(device, dtype, row_shape),
        divisor(device, dtype, {}) {}

  std::vector<std::pair<const char*, TestTensor*>> all() {
    return {{"loss", &loss},      {"lse", &lse},       {"argmax", &argmax},         {"entropy", &entropy},
            {"sum_sq", &sum_sq},  {"z_loss", &z_loss}, {"mean_logit", &mean_logit}, {"target_mass", &target_mass},
            {"divisor", &divisor}};
  }

  /// Puts the outputs into the arguments of a forward, which have a member for each.
  template <typename Views>
  void put_into(Views& views, Reduction reduction, Where where) const {
    views.loss = (loss.*where)();
    views.lse = (lse.*where)();
    if (has_all_of_row) {
      if (has_argmax) views.argmax = (argmax.*where)();
      views.entropy = (entropy.*where)();
      if (has_sum_sq) views.sum_sq = (sum_sq.*where)();
    }
    if (has_mean_logit) views.mean_logit = (mean_logit.*where)();
    views.z_loss = (z_loss.*where)();
    views.target_mass = (target_mass.*where)();
    if (reduction == Reduction::mean) views.divisor = (divisor.*where)();
  }

  /// Are all outputs equal bit by bit?
  bool equal(const CrossEntropyResults& other) const {
    return loss.bytes() == other.loss.bytes() && lse.bytes() == other.lse.bytes() &&
           argmax.bytes() == other.argmax.bytes() && entropy.bytes() == other.entropy.bytes() &&
           sum_sq.bytes() == other.sum_sq.bytes() && mean_logit.bytes() == other.mean_logit.bytes() &&
           z_loss.bytes() == other.z_loss.bytes() && target_mass.bytes() == other.target_mass.bytes() &&
           divisor.bytes() == other.divisor.bytes();
  }

  /// The outputs that need more of a row than its lse: argmax, entropy and sum_sq. For calls without them a GPU has
  /// separate kernels.
  bool has_all_of_row = true;
  bool has_argmax = true;  ///< false: all of them except argmax
  bool has_sum_sq = true;  ///< false: all of them except sum_sq
  bool has_mean_logit = false;
  bool has_split_lse;  ///< lse as two numbers

  /// lse - anchor of row i. With two numbers it has more digits than one number for lse.
  double lse_of(std::int64_t i, double anchor = 0.0) const {
    return has_split_lse ? (lse.get(2 * i) - anchor) + lse.get(2 * i + 1) : lse.get(i) - anchor;
  }

  TestTensor loss, lse, argmax, entropy, sum_sq, mean_logit, z_loss, target_mass, divisor;
};

/// The worst errors of a forward, as shares of the errors that testing/tolerance.h allows.
struct CrossEntropyResultShares {
  std::string failure = {};  ///< on the first result outside of the contract; empty: all are within it
  double loss = 0.0;
  double lse = 0.0;
  double entropy = 0.0;

  void raise_results(const CrossEntropyResultShares& other) {
    if (failure.empty()) failure = other.failure;
    loss = std::max(loss, other.loss);
    lse = std::max(lse, other.lse);
    entropy = std::max(entropy, other.entropy);
  }
};

/// The worst shares of `compare(test_case)`; on a GPU also without the outputs that need separate kernels.
template <typename Case, typename Compare>
auto compare_with_and_without_all_of_row(const Case& test_case, Compare compare) {
  auto shares = compare(test_case);
  if (test_case.device.type == DeviceType::cuda && test_case.wants_all_of_row && !test_case.has_grad_entropy) {
    Case few = test_case;
    few.wants_all_of_row = false;
    shares.raise(compare(few));
  }
  return shares;
}

/// Compares all results except argmax with the oracle. Each function returns true within the contract; otherwise the
/// shares have a failure.
class CrossEntropyResultComparison {
 public:
  /// `has_exact_logits`: the logits are inputs, and not a product computed in `dtype`.
  CrossEntropyResultComparison(DType dtype, const CrossEntropyOptions& options, CrossEntropyResultShares& shares,
                               bool has_exact_logits = true)
      : dtype_(dtype), options_(options), shares_(shares), has_exact_logits_(has_exact_logits) {}

  /// In an ignored row loss, z_loss and target_mass are 0; the other outputs are 0 too if the row is skipped.
  bool compare_row(const CrossEntropyResults& results, const reference::CrossEntropyRow& row, std::int64_t i,
                   bool is_skipped, const std::string& of_row) {
    const double lse_scale = logsumexp_scale(row.lse, row.max);
    // Two numbers are as exact as the logarithm of the row's sum, however large its logits are.
    const bool is_exact = has_exact_logits_ && results.has_split_lse && !is_skipped;
    const double lse = results.lse_of(i, is_exact ? row.anchor : 0.0);
    const Expected expected_lse = is_exact ? Expected{row.lse_minus_anchor, logsumexp_scale(row.lse_minus_anchor, 0.0)}
                                           : Expected{is_skipped ? 0.0 : row.lse, is_skipped ? 0.0 : lse_scale};
    const auto unless = [](bool is_zero, double value, double scale) {
      return is_zero ? Expected{0.0, 0.0} : Expected{value, scale};
    };
    double unused = 0.0;
    const bool is_within =
        expect(lse, expected_lse, "lse" + of_row, shares_.lse) &&
        (!results.has_all_of_row ||
         expect(results.entropy.get(i), unless(is_skipped, row.entropy, entropy_scale(row.entropy, row.lse, row.max)),
                "entropy" + of_row, shares_.entropy)) &&
        (!results.has_all_of_row || !results.has_sum_sq ||
         expect(results.sum_sq.get(i), unless(is_skipped, row.sum_sq, sum_sq_scale(row.sum_sq, row.max)),
                "sum_sq" + of_row, unused)) &&
        (!results.has_mean_logit || expect(results.mean_logit.get(i), unless(is_skipped, row.mean_logit, row.mean_size),
                                           "mean_logit" + of_row, unused)) &&
        expect(results.target_mass.get(i), {row.target_mass, row.target_mass}, "target_mass" + of_row, unused);
    if (!is_within || options_.reduction != Reduction::none) return is_within;
    return expect(results.loss.get(i), {row.loss, row.loss_scale}, "loss" + of_row, shares_.loss) &&
           expect(results.z_loss.get(i),
                  unless(!row.is_counted, row.z_loss,
                         std::abs(row.weight) * z_loss_scale(options_.z_loss_weight, lse_scale)),
                  "z_loss" + of_row, unused);
  }

  bool compare_sums(const CrossEntropyResults& results, const reference::CrossEntropySums& sums, double divisor,
                    const std::string& how) {
    if (options_.reduction == Reduction::none) return true;
    double unused = 0.0;
    if (options_.reduction == Reduction::sum) divisor = 1.0;
    if (options_.reduction == Reduction::mean &&
        !expect(results.divisor.get(0), {divisor, divisor}, "divisor" + how, unused)) {
      return false;
    }
    // If no row counts, the mean is 0 for any sum.
    const auto reduced = [&](long double sum) { return divisor == 0.0 ? 0.0 : static_cast<double>(sum / divisor); };
    return expect(results.loss.get(0), {reduced(sums.loss), reduced(sums.loss_scale)}, "loss" + how, shares_.loss) &&
           expect(results.z_loss.get(0), {reduced(sums.z_loss), reduced(sums.z_loss_scale)}, "z_loss" + how, unused);
  }

 private:
  struct Expected {
    double value;
    double scale;
  };

  /// Within the contract, raises `share` to the error divided by the bound.
  bool expect(double actual, const Expected& expected, const std::string& what, double& share) {
    const std::string text = difference(dtype_, actual, expected.value, expected.scale);
    if (!text.empty()) {
      shares_.failure = what + ": " + text + ", scale " + short_text(expected.scale);
      return false;
    }
    const double error = std::abs(actual - expected.value);
    if (error > 0.0) share = std::max(share, error / allowed_error(dtype_, expected.value, expected.scale));
    return true;
  }

  DType dtype_;
  CrossEntropyOptions options_;
  CrossEntropyResultShares& shares_;
  bool has_exact_logits_;
};

}  // namespace eaves::testing
