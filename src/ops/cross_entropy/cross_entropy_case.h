// One call of cross_entropy in a test or a self-test: its inputs, its buffers between canaries, and the comparison of
// the forward, the backward and forward_backward with the oracle.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/rows.h"
#include "eaves/cross_entropy.h"
#include "testing/cross_entropy_reference.h"
#include "testing/cross_entropy_results.h"
#include "testing/runs.h"
#include "testing/tensor.h"
#include "testing/tolerance.h"

namespace eaves::testing {

struct CrossEntropyCase {
  Device device = device_of_test();
  DType dtype = DType::float32;
  std::optional<DType> narrow_dtype = {};  ///< of the gradients, which overwrite copies of the float32 `logits`
  Dims shape = {};
  int class_axis = -1;
  CrossEntropyOptions options = {};
  DType targets_dtype = DType::int64;         ///< a floating-point type: soft targets
  std::optional<DType> weight_dtype = {};     ///< no weights unless given
  std::optional<DType> grad_loss_dtype = {};  ///< the dtype of the loss unless given
  bool has_row_weight = false;
  bool has_normalizer = false;  ///< used with the mean
  bool skips_ignored = false;
  bool has_grad_lse = false;
  bool has_grad_entropy = false;
  bool wants_all_of_row = true;        ///< argmax, entropy and sum_sq among the outputs
  bool wants_sum_sq_in_place = false;  ///< sum_sq in place as well; a GPU then takes two passes
  bool wants_mean_logit = false;
  bool has_split_lse = false;  ///< lse is written as two numbers
  bool runs_in_place = true;   ///< forward_backward too; not possible if logits share memory
  Placement logits_placement = {};
  Placement targets_placement = {};
  Placement grad_loss_placement = {};
  Placement grad_logits_placement = {};
  std::function<double(std::int64_t)> value;        ///< of element i of logits, in row-major order
  std::function<double(std::int64_t)> target = {};  ///< of element i of targets; absent: any class, every fifth ignored
  std::function<double(std::int64_t)> weight = {};  ///< of class v; absent: 0.25 to 1.75, and 0 for every seventh
};

/// The view of a gradient of `dtype` over float32 logits: each gradient row takes the first half of the row.
inline TensorView narrow_view_of(TensorView logits, DType dtype) {
  logits.dtype = dtype;
  for (int axis = 0; axis + 1 < logits.strides.size(); ++axis) logits.strides[axis] *= 2;
  return logits;
}

/// The buffers of one call: forward, backward, and forward_backward with separate results.
class CrossEntropyRun : public CallsOf<CrossEntropyRun> {
 public:
  explicit CrossEntropyRun(const CrossEntropyCase& test_case)
      : case_(test_case),
        class_axis_(case_.class_axis < 0 ? case_.class_axis + case_.shape.size() : case_.class_axis),
        results(case_.device, result_dtype(), row_shape(), reduction(), case_.has_split_lse),
        results_in_place(case_.device, result_dtype(), row_shape(), reduction(), case_.has_split_lse),
        logits(case_.device, case_.dtype, case_.shape, case_.logits_placement),
        targets(case_.device, case_.targets_dtype, is_soft() ? case_.shape : row_shape(), case_.targets_placement),
        weight(case_.device, case_.weight_dtype.value_or(DType::float32), {classes()}),
        row_weight(case_.device, result_dtype(), row_shape()),
        normalizer(case_.device, result_dtype(), {}),
        grad_loss(case_.device, case_.grad_loss_dtype.value_or(result_dtype()),
                  reduction() == Reduction::none ? row_shape() : Dims{}, case_.grad_loss_placement),
        grad_lse(case_.device, result_dtype(), row_shape()),
        grad_entropy(case_.device, result_dtype(), row_shape()),
        grad_logits(case_.device, case_.dtype, case_.shape,
                    case_.narrow_dtype ? case_.logits_placement : case_.grad_logits_placement),
        in_place(case_.device, case_.dtype, case_.runs_in_place ? case_.shape : Dims{0},
                 case_.runs_in_place ? case_.logits_placement : Placement{}) {
    logits.fill(case_.value);
    restore();
    targets.fill([this](std::int64_t i) { return target(i); });
    weight.fill([this](std::int64_t v) { return case_.weight ? case_.weight(v) : random_class_weight(41, v); });
    row_weight.fill([](std::int64_t i) { return random_class_weight(46, i); });
    normalizer.fill([](std::int64_t) { return 37.5; });
    const bool has_row_losses = reduction() == Reduction::none;
    grad_loss.fill([&](std::int64_t i) { return has_row_losses ? noise(42)(i) : 1.75; });
    results.has_all_of_row = results_in_place.has_all_of_row = case_.wants_all_of_row;
    results_in_place.has_sum_sq = case_.wants_sum_sq_in_place || case_.device.type == DeviceType::cpu;
    results.has_mean_logit = results_in_place.has_mean_logit = case_.wants_mean_logit && has_mean_logit();
    grad_lse.fill(noise(43));
    grad_entropy.fill(noise(44));
  }

  CrossEntropyForwardArgs forward_args(Where where = &TestTensor::view) { return args(logits, results, where); }

  CrossEntropyBackwardArgs backward_args() {
    return {.grad_loss = grad_loss.view(),
            .grad_lse = case_.has_grad_lse ? grad_lse.view() : TensorView{},
            .grad_entropy = case_.has_grad_entropy ? grad_entropy.view() : TensorView{},
            .logits = case_.narrow_dtype ? grad_logits.view() : logits.view(),
            .targets = targets.view(),
            .class_weight = case_.weight_dtype ? weight.view() : TensorView{},
            .row_weight = case_.has_row_weight ? row_weight.view() : TensorView{},
            .class_axis = case_.class_axis,
            .options = case_.options,
            .lse = results.lse.view(),
            .entropy = case_.wants_all_of_row ? results.entropy.view() : TensorView{},
            .target_mass = results.target_mass.view(),
            .divisor = reduction() == Reduction::mean ? results.divisor.view() : TensorView{},
            .grad_logits = gradient_of(grad_logits.view())};
  }

  CrossEntropyForwardBackwardArgs in_place_args() {
    return {.forward = args(in_place, results_in_place, &TestTensor::view),
            .grad_loss = grad_loss.view(),
            .grad_logits = case_.narrow_dtype ? gradient_of(in_place.view()) : TensorView{}};
  }

  /// The view of the gradient in `grad_logits` or `in_place`.
  TensorView gradient_of(const TensorView& view) const {
    return case_.narrow_dtype ? narrow_view_of(view, *case_.narrow_dtype) : view;
  }

  void launch(const ExecutionContext& context = {}) {
    cross_entropy_forward(forward_args(), context);
    cross_entropy_backward(backward_args(), context);
    if (case_.runs_in_place) cross_entropy_forward_backward(in_place_args(), context);
  }
  /// Restores the logits that the calls in place have overwritten.
  void restore() {
    if (case_.runs_in_place) in_place.copy_from(logits);
    if (case_.narrow_dtype) grad_logits.copy_from(logits);
  }

  /// Are all results equal bit by bit?
  bool results_equal(const CrossEntropyRun& other) const {
    return results.equal(other.results) && results_in_place.equal(other.results_in_place) &&
           gradients_equal(grad_logits, other.grad_logits) && gradients_equal(in_place, other.in_place);
  }

  std::vector<TestTensor*> inputs() {
    return {&logits, &targets, &weight, &row_weight, &normalizer, &grad_loss, &grad_lse, &grad_entropy};
  }
  std::vector<std::pair<const char*, TestTensor*>> outputs() {
    std::vector<std::pair<const char*, TestTensor*>> all = {{"grad_logits", &grad_logits},
                                                            {"the logits, in place", &in_place}};
    for (CrossEntropyResults* of : {&results, &results_in_place}) {
      const auto more = of->all();
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  }

  const CrossEntropyCase& test_case() const { return case_; }
  Reduction reduction() const { return case_.options.reduction; }
  std::int64_t classes() const { return case_.shape[class_axis_]; }
  int class_axis() const { return class_axis_; }
  bool is_soft() const { return is_floating_point(case_.targets_dtype); }
  Dims row_shape() const {
    AxisSet axes;
    axes.contains[class_axis_] = true;
    return reduced_shape(case_.shape, axes, false);
  }

 private:
  /// Are the gradients equal bit by bit? The bytes behind a narrow row are undefined and not compared.
  bool gradients_equal(const TestTensor& one, const TestTensor& other) const {
    if (!case_.narrow_dtype || one.view().shape != case_.shape) return one.bytes() == other.bytes();
    const auto row = [&](const TestTensor& tensor, std::int64_t i) {
      return reference::elements_along(gradient_of(tensor.host()), class_axis_, i);
    };
    for (std::int64_t i = 0; i < results.entropy.host().element_count(); ++i) {
      const std::vector<double> a = row(one, i), b = row(other, i);
      if (std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) != 0) return false;
    }
    return true;
  }

  bool has_mean_logit() const { return !is_soft() && !(case_.weight_dtype && case_.options.label_smoothing != 0.0); }
  DType result_dtype() const { return accumulator_dtype(case_.dtype); }
  double target(std::int64_t i) const {
    return case_.target ? case_.target(i) : random_target(45, i, is_soft(), classes(), case_.options.ignore_index);
  }

  CrossEntropyForwardArgs args(TestTensor& of_logits, CrossEntropyResults& of, Where where) {
    const bool is_mean = reduction() == Reduction::mean;
    CrossEntropyForwardArgs result{.logits = (of_logits.*where)(),
                                   .targets = (targets.*where)(),
                                   .class_weight = case_.weight_dtype ? (weight.*where)() : TensorView{},
                                   .row_weight = case_.has_row_weight ? (row_weight.*where)() : TensorView{},
                                   .normalizer = is_mean && case_.has_normalizer ? (normalizer.*where)() : TensorView{},
                                   .class_axis = case_.class_axis,
                                   .options = case_.options,
                                   .skips_ignored = case_.skips_ignored};
    of.put_into(result, reduction(), where);
    return result;
  }

  CrossEntropyCase case_;
  int class_axis_;

 public:
  CrossEntropyResults results, results_in_place;
  TestTensor logits, targets, weight, row_weight, normalizer, grad_loss, grad_lse, grad_entropy, grad_logits, in_place;
};

/// The part [first, first + size) of an axis.
inline TensorView part_of(TensorView view, int axis, std::int64_t first, std::int64_t size) {
  const std::int64_t bytes = first * view.strides[axis] * static_cast<std::int64_t>(size_of(view.dtype));
  view.data = static_cast<char*>(view.data) + bytes;
  view.shape[axis] = size;
  return view;
}

/// A run whose forward is that of each shard of the classes and their merge, and whose backward is that of each shard.
class CrossEntropyShardsRun : public CrossEntropyRun {
 public:
  /// The sizes add up to the classes of the case, which does not run in place.
  CrossEntropyShardsRun(const CrossEntropyCase& of_whole, const std::vector<std::int64_t>& sizes)
      : CrossEntropyRun(of_whole),
        sizes_(sizes),
        statistics(of_whole.device, accumulator_dtype(of_whole.dtype), statistics_shape()) {}

  std::vector<std::pair<const char*, TestTensor*>> outputs() {
    auto all = CrossEntropyRun::outputs();
    all.emplace_back("statistics", &statistics);
    return all;
  }

  void run(const ExecutionContext& context = {}) {
    const CrossEntropyForwardArgs whole = forward_args();
    const auto shards = static_cast<std::int64_t>(sizes_.size());
    const auto of_shard = [&](std::int64_t shard) {
      const TensorView all = statistics.view();
      Dims of_one;
      for (int axis = 1; axis < all.shape.size(); ++axis) of_one.push_back(all.shape[axis]);
      const std::int64_t bytes = shard * all.strides[0] * static_cast<std::int64_t>(size_of(all.dtype));
      return TensorView::contiguous(static_cast<char*>(all.data) + bytes, all.dtype, of_one, all.device);
    };
    const auto weight_of = [&](std::int64_t first, std::int64_t size) {
      return whole.class_weight.is_present ? part_of(whole.class_weight, 0, first, size) : TensorView{};
    };
    const auto targets_of = [&](std::int64_t first, std::int64_t size) {
      return is_soft() ? part_of(whole.targets, class_axis(), first, size) : whole.targets;
    };
    std::int64_t first = 0;
    for (std::int64_t shard = 0; shard < shards; ++shard) {
      const std::int64_t size = sizes_[static_cast<std::size_t>(shard)];
      cross_entropy_shard_forward({.logits = part_of(whole.logits, class_axis(), first, size),
                                   .targets = targets_of(first, size),
                                   .class_weight = weight_of(first, size),
                                   .class_axis = test_case().class_axis,
                                   .options = test_case().options,
                                   .first_class = first,
                                   .classes = classes(),
                                   .is_for_mean_logit = whole.mean_logit.is_present,
                                   .statistics = of_shard(shard)},
                                  context);
      first += size;
    }
    cross_entropy_merge({.statistics = statistics.view(),
                         .targets = is_soft() ? TensorView{} : whole.targets,
                         .row_weight = whole.row_weight,
                         .normalizer = whole.normalizer,
                         .options = test_case().options,
                         .classes = classes(),
                         .has_class_weight = whole.class_weight.is_present,
                         .has_soft_targets = is_soft(),
                         .skips_ignored = test_case().skips_ignored,
                         .loss = whole.loss,
                         .lse = whole.lse,
                         .argmax = whole.argmax,
                         .entropy = whole.entropy,
                         .sum_sq = whole.sum_sq,
                         .mean_logit = whole.mean_logit,
                         .z_loss = whole.z_loss,
                         .target_mass = whole.target_mass,
                         .divisor = whole.divisor},
                        context);
    first = 0;
    for (const std::int64_t size : sizes_) {
      CrossEntropyBackwardArgs args = backward_args();
      args.logits = part_of(args.logits, class_axis(), first, size);
      args.grad_logits = part_of(args.grad_logits, class_axis(), first, size);
      args.targets = targets_of(first, size);
      args.class_weight = weight_of(first, size);
      args.first_class = first;
      args.classes = classes();
      cross_entropy_backward(args, context);
      first += size;
    }
    download();
    statistics.download();
  }

 private:
  Dims statistics_shape() const {
    Dims shape = {static_cast<std::int64_t>(sizes_.size())};
    for (const std::int64_t size : row_shape()) shape.push_back(size);
    shape.push_back(kCrossEntropyStatistics);
    return shape;
  }

  std::vector<std::int64_t> sizes_;

 public:
  TestTensor statistics;
};

/// The worst errors of one call, as shares of the errors that testing/tolerance.h allows.
struct CrossEntropyShares : CrossEntropyResultShares {
  double gradient = 0.0;
  double in_place = 0.0;

  void raise(const CrossEntropyShares& other) {
    raise_results(other);
    gradient = std::max(gradient, other.gradient);
    in_place = std::max(in_place, other.in_place);
  }
  double worst() const { return std::max({loss, lse, entropy, gradient, in_place}); }
};

/// Compares the downloaded results of a run with the oracle.
class CrossEntropyComparison {
 public:
  explicit CrossEntropyComparison(CrossEntropyRun& run)
      : run_(run),
        args_(run.forward_args(&TestTensor::host)),
        gradient_dtype_(run.test_case().narrow_dtype.value_or(run.test_case().dtype)),
        compare_results_(accumulator_dtype(run.test_case().dtype), args_.options, shares) {}

  /// Empty, or a sentence on the first result outside of the contract; then it compares no more.
  [[nodiscard]] std::string compare() {
    if (compare_rows() && compare_sums(run_.results, "") && run_.test_case().runs_in_place) {
      compare_sums(run_.results_in_place, ", in place");
    }
    return shares.failure;
  }

  CrossEntropyShares shares;

 private:
  bool compare_rows() {
    const std::int64_t rows = reference::row_count_of(args_);
    for (std::int64_t i = 0; i < rows; ++i) {
      const reference::CrossEntropyRow row = reference::cross_entropy_row(args_, i);
      sums_.add(row, args_.options);
      const std::string of_row = " of row " + std::to_string(i);
      if (!compare_row(run_.results, row, i, args_.skips_ignored, of_row)) return false;
      if (!compare_backward(row, i, of_row)) return false;
      if (!run_.test_case().runs_in_place) continue;
      if (!compare_row(run_.results_in_place, row, i, true, of_row + ", in place")) return false;
      if (!compare_in_place(row, i, of_row)) return false;
    }
    return true;
  }

  bool compare_row(const CrossEntropyResults& results, const reference::CrossEntropyRow& row, std::int64_t i,
                   bool skips_ignored, const std::string& of_row) {
    const bool is_skipped = skips_ignored && !row.is_counted;
    const double argmax = is_skipped ? 0.0 : static_cast<double>(row.argmax);
    if (results.has_all_of_row && results.argmax.get(i) != argmax) {
      shares.failure =
          "argmax" + of_row + ": expected " + short_text(argmax) + ", actual " + short_text(results.argmax.get(i));
      return false;
    }
    return compare_results_.compare_row(results, row, i, is_skipped, of_row);
  }

  bool compare_sums(const CrossEntropyResults& results, const std::string& how) {
    const double divisor = args_.normalizer.is_present ? run_.normalizer.get(0) : static_cast<double>(sums_.weight);
    return compare_results_.compare_sums(results, sums_, divisor, how);
  }

  /// The oracle of the backward takes the backward's own inputs: the forward's entropy and divisor, and its rounded
  /// lse.
  bool compare_backward(const reference::CrossEntropyRow& row, std::int64_t i, const std::string& of_row) {
    const CrossEntropyCase& test_case = run_.test_case();
    const CrossEntropyResults& results = run_.results;
    const std::string text =
        compare_gradient(run_.grad_logits, row, i,
                         {.loss = grad_loss(results, i),
                          .lse_gradient = test_case.has_grad_lse ? run_.grad_lse.get(i) : 0.0,
                          .entropy_gradient = test_case.has_grad_entropy ? run_.grad_entropy.get(i) : 0.0,
                          .anchor = test_case.has_split_lse ? row.anchor : 0.0,
                          .lse_minus_anchor = test_case.has_split_lse ? row.lse_minus_anchor : results.lse_of(i),
                          .entropy = results.entropy.get(i)},
                         shares.gradient);
    if (!text.empty()) shares.failure = "gradient" + of_row + ", " + text;
    return text.empty();
  }

  /// In place the gradient may come from the lse as written, or from the lse before its rounding; in float32 also from
  /// a sum that was rounded in between.
  bool compare_in_place(const reference::CrossEntropyRow& row, std::int64_t i, const std::string& of_row) {
    const CrossEntropyResults& results = run_.results_in_place;
    const reference::CrossEntropyUpstream written{.loss = grad_loss(results, i), .lse_minus_anchor = results.lse_of(i)};
    const reference::CrossEntropyUpstream exact{
        .loss = written.loss, .anchor = row.anchor, .lse_minus_anchor = row.lse_minus_anchor};
    reference::CrossEntropyUpstream rounded = exact;
    rounded.lse_rounding = std::isfinite(row.lse) ? std::abs(row.lse) : 0.0;
    std::string text;
    for (const auto& upstream : {exact, written, rounded}) {
      text = compare_gradient(run_.in_place, row, i, upstream, shares.in_place);
      if (text.empty()) return true;
    }
    shares.failure = "gradient" + of_row + ", in place, " + text;
    return false;
  }

  /// dL/d(loss) of row i.
  double grad_loss(const CrossEntropyResults& results, std::int64_t i) const {
    const Reduction reduction = args_.options.reduction;
    if (reduction == Reduction::none) return run_.grad_loss.get(i);
    const double divisor = reduction == Reduction::mean ? results.divisor.get(0) : 1.0;
    return divisor == 0.0 ? 0.0 : run_.grad_loss.get(0) / divisor;
  }

  double allowed_gradient_error(double exact, double scale) const {
    const bool is_narrow = run_.test_case().narrow_dtype.has_value();
    return (is_narrow ? allowed_narrow_error : allowed_error)(gradient_dtype_, exact, scale);
  }

  /// Empty, or a sentence on the first element outside of the contract; then `share` is unchanged.
  std::string compare_gradient(const TestTensor& gradient, const reference::CrossEntropyRow& row, std::int64_t i,
                               const reference::CrossEntropyUpstream& upstream, double& share) const {
    const reference::CrossEntropyGradient exact = reference::cross_entropy_gradient(row, args_.options, upstream);
    const TensorView view = run_.gradient_of(gradient.host());
    const std::vector<double> actual = reference::elements_along(view, run_.class_axis(), i);
    double worst = share;
    for (std::size_t v = 0; v < actual.size(); ++v) {
      // The text of a failure is built only for a failure: there are millions of elements.
      const double error = std::abs(actual[v] - exact.values[v]);
      if (error == 0.0) continue;
      const double allowed = allowed_gradient_error(exact.values[v], exact.scale);
      if (error <= allowed) {
        worst = std::max(worst, error / allowed);
        continue;
      }
      const std::string text = difference_beyond(allowed, gradient_dtype_, actual[v], exact.values[v]);
      if (!text.empty()) return "class " + std::to_string(v) + ": " + text + ", scale " + std::to_string(exact.scale);
    }
    share = worst;
    return "";
  }

  CrossEntropyRun& run_;
  CrossEntropyForwardArgs args_;
  DType gradient_dtype_;
  CrossEntropyResultComparison compare_results_;
  reference::CrossEntropySums sums_;
};

inline std::string description_of(const CrossEntropyCase& c) {
  std::string text = std::string(name_of(c.dtype)) + " " + check::to_string(c.shape) + ", class axis " +
                     std::to_string(c.class_axis) + ", targets " + name_of(c.targets_dtype) + description_of(c.options);
  if (c.narrow_dtype) text += std::string(", gradient ") + name_of(*c.narrow_dtype);
  if (c.weight_dtype) text += std::string(", weight ") + name_of(*c.weight_dtype);
  if (c.has_row_weight) text += ", row_weight";
  if (c.wants_mean_logit) text += ", mean_logit";
  if (c.has_split_lse) text += ", lse as two numbers";
  if (c.has_normalizer) text += ", normalizer";
  if (c.skips_ignored) text += ", ignored rows skipped";
  if (c.has_grad_lse) text += ", grad_lse";
  if (c.has_grad_entropy) text += ", grad_entropy";
  if (!c.wants_all_of_row) text += ", without argmax, entropy and sum_sq";
  return text;
}

/// Runs all calls, and compares every element with the oracle and every byte around the elements with its canary. On a
/// GPU it does so again without the outputs that have kernels of their own.
inline CrossEntropyShares compare_cross_entropy(const CrossEntropyCase& test_case) {
  return compare_with_and_without_all_of_row(test_case, [](const CrossEntropyCase& one) {
    CrossEntropyRun run(one);
    return shares_of_run<CrossEntropyComparison>(run, description_of(one));
  });
}

/// The same for shards of these sizes.
inline CrossEntropyShares compare_cross_entropy_in_shards(CrossEntropyCase test_case,
                                                          const std::vector<std::int64_t>& sizes) {
  test_case.runs_in_place = false;
  CrossEntropyShardsRun run(test_case, sizes);
  return shares_of_run<CrossEntropyComparison>(run, description_of(test_case) + ", in shards");
}

/// A gradient that cross_entropy_rescale() multiplies by 1, 0 and -1.7 in turn, row by row, or as a whole by -1.7.
struct RescaleCase {
  Device device;
  DType dtype;
  Dims shape;
  int class_axis = 1;
  Placement placement = {};
  bool is_per_row = true;
  DType factor_dtype = DType::float32;
};

struct RescaleShares {
  std::string failure = {};  ///< on the first element outside of the contract; empty: all are within it
  double gradient = 0.0;     ///< the worst error, as a share of the error that testing/tolerance.h allows
  double worst() const { return gradient; }
};

/// Compares every element with the exact product, and every byte around the elements with its canary.
inline RescaleShares compare_rescale(const RescaleCase& c) {
  TestTensor gradient(c.device, c.dtype, c.shape, c.placement);
  gradient.fill([](std::int64_t i) { return 3.0 * random_normal(91, static_cast<std::uint64_t>(i)); });
  AxisSet axes;
  axes.contains[c.class_axis] = true;
  TestTensor factors(c.device, c.factor_dtype, c.is_per_row ? reduced_shape(c.shape, axes, false) : Dims{});
  factors.fill([&](std::int64_t row) { return !c.is_per_row || row % 3 == 0 ? -1.7 : row % 3 == 1 ? 1.0 : 0.0; });
  const std::int64_t rows = reference::row_count_of({.logits = gradient.host(), .class_axis = c.class_axis});
  const auto elements_of = [&](std::int64_t row) {
    return reference::elements_along(gradient.host(), c.class_axis, row);
  };
  std::vector<std::vector<double>> before;
  for (std::int64_t row = 0; row < rows; ++row) before.push_back(elements_of(row));
  const CrossEntropyRescaleArgs args{
      .grad_logits = gradient.view(), .grad_loss = factors.view(), .class_axis = c.class_axis};
  cross_entropy_rescale(args);
  runtime::synchronize(c.device);
  gradient.download();
  RescaleShares shares{.failure = gradient.canary_damage()};
  if (cross_entropy_rescale_workspace_bytes(args) != 0) shares.failure = "the workspace is not empty";
  for (std::int64_t row = 0; row < rows; ++row) {
    const double factor = factors.get(c.is_per_row ? row : 0);
    const std::vector<double> after = elements_of(row);
    for (std::size_t v = 0; v < after.size(); ++v) {
      const double exact = before[static_cast<std::size_t>(row)][v] * factor;
      const double allowed = factor == 1.0 ? 0.0 : allowed_error(c.dtype, exact, std::abs(exact));
      const double error = std::abs(after[v] - exact);
      if (error > 0.0) shares.gradient = std::max(shares.gradient, error / allowed);
      if (!(error <= allowed) && shares.failure.empty()) {
        shares.failure = std::string(name_of(c.dtype)) + " " + check::to_string(c.shape) + ", row " +
                         std::to_string(row) + ", class " + std::to_string(v) + ": " +
                         difference_beyond(allowed, c.dtype, after[v], exact);
      }
    }
  }
  return shares;
}

}  // namespace eaves::testing
