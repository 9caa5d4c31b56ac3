// One call of linear_cross_entropy in a test or a self-test: its inputs, its buffers between canaries, and the
// comparison of its results with the oracle, for both algorithms that compute gradients.
//
// A gradient is a product, and has two bounds. Each element is within the sum of the worst roundings on its way. With
// 16-bit inputs, the error of all elements together is within that of one product in float32, of a factor that is exact
// except for its one rounding: `RoundedProduct`.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/mean_loss.h"
#include "core/rows.h"
#include "eaves/linear_cross_entropy.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_plan.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_reference.h"
#include "testing/cross_entropy_results.h"
#include "testing/runs.h"
#include "testing/tensor.h"
#include "testing/tolerance.h"

namespace eaves::testing {

/// The gradients that a case asks for.
struct WantedGradients {
  bool hidden = true;
  bool head = true;
  bool bias = true;
};

struct LinearCrossEntropyCase {
  Device device = device_of_test();
  DType dtype = DType::float32;
  Dims row_shape = {};
  std::int64_t features = 16;
  std::int64_t classes = 24;
  CrossEntropyOptions options = {};
  double deviation = 3.0;                        ///< of the logits
  DType targets_dtype = DType::int64;            ///< a floating-point type for soft targets
  std::optional<DType> bias_dtype = {};          ///< absent: no bias
  std::optional<DType> class_weight_dtype = {};  ///< absent: no weights
  std::optional<DType> grad_loss_dtype = {};     ///< absent: the dtype of the loss
  bool has_row_weight = false;
  bool has_normalizer = false;  ///< with the mean
  bool has_split_lse = false;   ///< lse has two numbers per row
  bool has_grad_lse = false;    ///< in the backward, like the next
  bool has_grad_entropy = false;
  bool wants_all_of_row = true;      ///< argmax, entropy and sum_sq among the outputs
  bool wants_entropy_alone = false;  ///< of these outputs, the entropy alone
  bool wants_mean_logit = false;
  bool skips_ignored = false;
  bool accumulates = false;
  std::optional<std::int64_t> kept_rows = {};  ///< absent: no `kept`
  WantedGradients wanted = {};
  std::optional<DType> grad_head_dtype = {};  ///< absent: the dtype of head
  std::optional<DType> grad_bias_dtype = {};  ///< absent: the dtype of hidden
  std::size_t workspace_limit = 0;            ///< plus the bytes that a call on a GPU takes for any chunks
  Placement hidden_placement = {};
  Placement head_placement = {};
  Placement targets_placement = {};
  Placement grad_loss_placement = {};
  Placement grad_hidden_placement = {};
  Placement grad_head_placement = {};
  std::function<double(std::int64_t)> hidden = {};        ///< of element i, in row-major order; absent: normal
  std::function<double(std::int64_t)> head = {};          ///< likewise
  std::function<double(std::int64_t)> bias = {};          ///< likewise
  std::function<double(std::int64_t)> target = {};        ///< absent: any class, every fifth row ignored
  std::function<double(std::int64_t)> class_weight = {};  ///< absent: 0.25 to 1.75, and 0 for every seventh
  std::function<double(std::int64_t)> row_weight = {};    ///< likewise
};

/// The limit that the operator gets for a case.
inline std::size_t limit_of(const LinearCrossEntropyCase& c) {
  constexpr std::size_t kOfCalls = kGemmWorkspaceBytes + (std::size_t{2} << 20);
  if (c.workspace_limit == 0 || c.device.type == DeviceType::cpu) return c.workspace_limit;
  return c.workspace_limit + kOfCalls;
}

/// The gradients of one call.
struct LinearCrossEntropyGradientTensors {
  LinearCrossEntropyGradientTensors(const LinearCrossEntropyCase& c, const Dims& hidden_shape)
      : hidden(c.device, c.dtype, hidden_shape, c.grad_hidden_placement),
        head(c.device, c.grad_head_dtype.value_or(c.dtype), {c.classes, c.features}, c.grad_head_placement),
        bias(c.device, c.grad_bias_dtype.value_or(c.dtype), {c.classes}) {}

  std::vector<std::pair<const char*, TestTensor*>> all() {
    return {{"grad_hidden", &hidden}, {"grad_head", &head}, {"grad_bias", &bias}};
  }

  TestTensor hidden, head, bias;
};

/// The buffers of one call of each kind: forward, backward, and loss and gradients at once with results of its own.
class LinearCrossEntropyRun : public CallsOf<LinearCrossEntropyRun> {
 public:
  explicit LinearCrossEntropyRun(const LinearCrossEntropyCase& test_case)
      : case_(test_case),
        results(case_.device, result_dtype(), case_.row_shape, reduction(), case_.has_split_lse),
        results_at_once(case_.device, result_dtype(), case_.row_shape, reduction(), case_.has_split_lse),
        hidden(case_.device, case_.dtype, with_axis(case_.features), case_.hidden_placement),
        head(case_.device, case_.dtype, {case_.classes, case_.features}, case_.head_placement),
        bias(case_.device, case_.bias_dtype.value_or(DType::float32), {case_.classes}),
        targets(case_.device, case_.targets_dtype, is_soft() ? with_axis(case_.classes) : case_.row_shape,
                case_.targets_placement),
        class_weight(case_.device, case_.class_weight_dtype.value_or(DType::float32), {case_.classes}),
        row_weight(case_.device, result_dtype(), case_.row_shape),
        normalizer(case_.device, result_dtype(), {}),
        grad_loss(case_.device, case_.grad_loss_dtype.value_or(result_dtype()),
                  reduction() == Reduction::none ? case_.row_shape : Dims{}, case_.grad_loss_placement),
        grad_lse(case_.device, result_dtype(), case_.row_shape),
        grad_entropy(case_.device, result_dtype(), case_.row_shape),
        gradients(case_, with_axis(case_.features)),
        gradients_at_once(case_, with_axis(case_.features)) {
    const double spread = case_.deviation / std::sqrt(static_cast<double>(case_.features));
    hidden.fill(case_.hidden ? case_.hidden : noise(41));
    head.fill(case_.head ? case_.head : [=](std::int64_t i) { return spread * noise(42)(i); });
    bias.fill(case_.bias ? case_.bias : noise(43));
    targets.fill([this](std::int64_t i) { return target(i); });
    class_weight.fill(
        [this](std::int64_t v) { return case_.class_weight ? case_.class_weight(v) : random_class_weight(44, v); });
    row_weight.fill(
        [this](std::int64_t i) { return case_.row_weight ? case_.row_weight(i) : random_class_weight(49, i); });
    normalizer.fill([](std::int64_t) { return 37.5; });
    const bool has_row_losses = reduction() == Reduction::none;
    grad_loss.fill([&](std::int64_t i) { return has_row_losses ? noise(45)(i) : 1.75; });
    for (CrossEntropyResults* of : {&results, &results_at_once}) {
      of->has_all_of_row = case_.wants_all_of_row;
      of->has_argmax = of->has_sum_sq = !case_.wants_entropy_alone;
    }
    results.has_mean_logit = results_at_once.has_mean_logit = case_.wants_mean_logit && has_mean_logit();
    grad_lse.fill(noise(46));
    grad_entropy.fill(noise(47));
    restore();
    if (!case_.kept_rows) return;
    constexpr std::size_t kEnough = std::size_t{1} << 40;
    const LinearCrossEntropyKept whole = linear_cross_entropy_kept(forward_args(), kEnough);
    kept = std::make_unique<TestTensor>(case_.device, whole.dtype, Dims{*case_.kept_rows, whole.columns});
  }

  LinearCrossEntropyForwardArgs forward_args(Where where = &TestTensor::view) {
    LinearCrossEntropyForwardArgs result = args(results, where);
    result.kept = kept_view();
    return result;
  }

  LinearCrossEntropyForwardBackwardArgs at_once_args() {
    return {.forward = args(results_at_once, &TestTensor::view),
            .grad_loss = grad_loss.view(),
            .gradients = gradients_of(gradients_at_once)};
  }

  LinearCrossEntropyBackwardArgs backward_args() {
    return {.grad_loss = grad_loss.view(),
            .grad_lse = case_.has_grad_lse ? grad_lse.view() : TensorView{},
            .grad_entropy = case_.has_grad_entropy ? grad_entropy.view() : TensorView{},
            .inputs = inputs_of_call(&TestTensor::view),
            .lse = results.lse.view(),
            .entropy = case_.wants_all_of_row ? results.entropy.view() : TensorView{},
            .target_mass = results.target_mass.view(),
            .divisor = reduction() == Reduction::mean ? results.divisor.view() : TensorView{},
            .kept = kept_view(),
            .gradients = gradients_of(gradients)};
  }

  void launch(const ExecutionContext& context = {}) {
    linear_cross_entropy_forward(forward_args(), context);
    linear_cross_entropy_backward(backward_args(), context);
    linear_cross_entropy_forward_backward(at_once_args(), context);
  }
  /// Restores the tensors that a call accumulates into.
  void restore() {
    if (!case_.accumulates) return;
    for (LinearCrossEntropyGradientTensors* of : {&gradients, &gradients_at_once}) {
      of->head.fill([](std::int64_t i) { return held(i); });
      of->bias.fill([](std::int64_t i) { return held(i); });
    }
  }
  /// The contents of grad_head and grad_bias before a call accumulates into them, exact in every dtype.
  static double held(std::int64_t i) { return 0.125 * static_cast<double>(i % 9 - 4); }

  /// Compares bit by bit.
  bool results_equal(LinearCrossEntropyRun& other) {
    const auto mine = outputs(), others = other.outputs();
    for (std::size_t i = 0; i < mine.size(); ++i) {
      if (mine[i].second->bytes() != others[i].second->bytes()) return false;
    }
    return true;
  }

  std::vector<TestTensor*> inputs() {
    return {&hidden,     &head,       &bias,      &targets,  &class_weight,
            &row_weight, &normalizer, &grad_loss, &grad_lse, &grad_entropy};
  }
  std::vector<std::pair<const char*, TestTensor*>> outputs() {
    std::vector<std::pair<const char*, TestTensor*>> all;
    const auto append = [&](const auto& more) { all.insert(all.end(), more.begin(), more.end()); };
    append(results.all());
    append(results_at_once.all());
    append(gradients.all());
    append(gradients_at_once.all());
    if (kept != nullptr) all.emplace_back("kept", kept.get());
    return all;
  }

  const LinearCrossEntropyCase& test_case() const { return case_; }
  Reduction reduction() const { return case_.options.reduction; }
  DType result_dtype() const { return accumulator_dtype(case_.dtype); }
  bool is_soft() const { return is_floating_point(case_.targets_dtype); }

 private:
  bool has_mean_logit() const {
    return !is_soft() && !(case_.class_weight_dtype && case_.options.label_smoothing != 0.0);
  }

  Dims with_axis(std::int64_t size) const {
    Dims shape = case_.row_shape;
    shape.push_back(size);
    return shape;
  }

  double target(std::int64_t i) const {
    return case_.target ? case_.target(i) : random_target(48, i, is_soft(), case_.classes, case_.options.ignore_index);
  }

  TensorView kept_view() const { return kept == nullptr ? TensorView{} : kept->view(); }

  LinearCrossEntropyInputs inputs_of_call(Where where) const {
    return {.hidden = (hidden.*where)(),
            .head = (head.*where)(),
            .bias = case_.bias_dtype ? (bias.*where)() : TensorView{},
            .targets = (targets.*where)(),
            .class_weight = case_.class_weight_dtype ? (class_weight.*where)() : TensorView{},
            .row_weight = case_.has_row_weight ? (row_weight.*where)() : TensorView{},
            .options = case_.options,
            .skips_ignored = case_.skips_ignored,
            .workspace_limit = limit_of(case_)};
  }

  LinearCrossEntropyForwardArgs args(CrossEntropyResults& of, Where where) const {
    const bool is_mean = reduction() == Reduction::mean;
    LinearCrossEntropyForwardArgs result{
        .inputs = inputs_of_call(where),
        .normalizer = is_mean && case_.has_normalizer ? (normalizer.*where)() : TensorView{}};
    of.put_into(result.outputs, reduction(), where);
    return result;
  }

  LinearCrossEntropyGradients gradients_of(LinearCrossEntropyGradientTensors& of) const {
    return {.grad_hidden = case_.wanted.hidden ? of.hidden.view() : TensorView{},
            .grad_head = case_.wanted.head ? of.head.view() : TensorView{},
            .grad_bias = case_.wanted.bias ? of.bias.view() : TensorView{},
            .accumulates = case_.accumulates};
  }

  LinearCrossEntropyCase case_;

 public:
  CrossEntropyResults results, results_at_once;
  TestTensor hidden, head, bias, targets, class_weight, row_weight, normalizer, grad_loss, grad_lse, grad_entropy;
  LinearCrossEntropyGradientTensors gradients, gradients_at_once;
  std::unique_ptr<TestTensor> kept;
};

// ---- the plan of a run ---------------------------------------------------------------------------------------------

inline LinearCrossEntropyProblem problem_of(LinearCrossEntropyRun& run, LinearCrossEntropyMode mode) {
  switch (mode) {
    case LinearCrossEntropyMode::forward:
      return make_problem(run.forward_args());
    case LinearCrossEntropyMode::backward:
      return make_problem(run.backward_args());
    case LinearCrossEntropyMode::forward_backward:
      break;
  }
  return make_problem(run.at_once_args());
}

/// The block of a call. For a case without a limit any large limit will do: the sizes of these tests are one block.
inline LinearCrossEntropyBlock block_of(LinearCrossEntropyRun& run, LinearCrossEntropyMode mode) {
  const LinearCrossEntropyProblem problem = problem_of(run, mode);
  if (problem.rows() == 0) return {1, problem.classes};
  return plan_block(problem, problem.workspace_limit != 0 ? problem.workspace_limit : std::size_t{1} << 30);
}

// ---- the comparison ------------------------------------------------------------------------------------------------

/// The nearest number of a dtype.
inline double rounded(DType dtype, double value) {
  return dispatch_floating_point(dtype, [&]<typename T>() { return reference::exact(round_to<T>(value)); });
}

/// The product in float32 of exact factors that were rounded once: the contract of the gradients. A sum over several
/// chunks of rows is rounded after each chunk.
struct RoundedProduct {
  DType dtype;        ///< of the factors
  double alpha;       ///< the sum is multiplied by it
  std::int64_t rows;  ///< of the second factor, in a chunk
  bool rounds_before_adding;

  /// c = a b, or c += a b, with elements of `c_dtype`.
  reference::Matrix multiply(const reference::Matrix& a, const reference::Matrix& b, DType c_dtype,
                             const std::optional<reference::Matrix>& held) const {
    reference::Matrix c = held.value_or(reference::Matrix(a.rows, b.columns));
    reference::Matrix factor = a;
    for (double& value : factor.values) value = rounded(dtype, value);
    std::vector<float> sums(static_cast<std::size_t>(b.columns));
    for (std::int64_t i = 0; i < c.rows; ++i) {
      for (std::int64_t first = 0; first < a.columns; first += rows) {
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (std::int64_t p = first; p < std::min(a.columns, first + rows); ++p) {
          const auto of_row = static_cast<float>(factor.at(i, p));
          for (std::int64_t j = 0; j < c.columns; ++j) {
            sums[static_cast<std::size_t>(j)] += of_row * static_cast<float>(b.at(p, j));
          }
        }
        const bool adds = first != 0 || held;
        for (std::int64_t j = 0; j < c.columns; ++j) {
          double sum = alpha * static_cast<double>(sums[static_cast<std::size_t>(j)]);
          if (adds && rounds_before_adding) sum = rounded(c_dtype, sum);
          c.at(i, j) = rounded(c_dtype, c.at(i, j) + sum);
        }
      }
    }
    return c;
  }
};

/// The worst errors of one call, as shares of the allowed errors.
struct LinearCrossEntropyShares : CrossEntropyResultShares {
  double grad_hidden = 0.0;
  double grad_head = 0.0;
  double grad_bias = 0.0;

  void raise(const LinearCrossEntropyShares& other) {
    raise_results(other);
    grad_hidden = std::max(grad_hidden, other.grad_hidden);
    grad_head = std::max(grad_head, other.grad_head);
    grad_bias = std::max(grad_bias, other.grad_bias);
  }
  double worst() const { return std::max({loss, lse, entropy, grad_hidden, grad_head, grad_bias}); }
};

/// Compares the downloaded results of a run with the oracle.
class LinearCrossEntropyComparison {
 public:
  explicit LinearCrossEntropyComparison(LinearCrossEntropyRun& run)
      : run_(run),
        case_(run.test_case()),
        result_dtype_(run.result_dtype()),
        compare_results_(result_dtype_, case_.options, shares, false),
        exact_(run.forward_args(&TestTensor::host).inputs, run.forward_args(&TestTensor::host).normalizer) {}

  /// Empty, or a sentence on the first result outside of the contract; then it compares no more.
  [[nodiscard]] std::string compare() {
    const bool is_within = compare_forward(run_.results, "") && compare_forward(run_.results_at_once, ", at once");
    return is_within ? compare_gradients() : shares.failure;
  }
  [[nodiscard]] std::string compare_gradients() {
    const Mode backward = Mode::backward, at_once = Mode::forward_backward;
    if (compare_gradients(run_.gradients, backward, ", backward")) {
      compare_gradients(run_.gradients_at_once, at_once, ", at once");
    }
    return shares.failure;
  }

  LinearCrossEntropyShares shares;

 private:
  using Mode = LinearCrossEntropyMode;
  using Matrix = reference::Matrix;

  bool compare_forward(const CrossEntropyResults& results, const std::string& how) {
    for (std::size_t i = 0; i < exact_.rows.size(); ++i) {
      if (!compare_row(results, exact_.rows[i], static_cast<std::int64_t>(i), how)) return false;
    }
    return compare_results_.compare_sums(results, exact_.sums, exact_.divisor, how);
  }

  bool compare_row(const CrossEntropyResults& results, const reference::CrossEntropyRow& row, std::int64_t i,
                   const std::string& how) {
    const std::string of_row = " of row " + std::to_string(i) + how;
    // A row that does not count has zeros, for any contents.
    return (!results.has_all_of_row || !results.has_argmax || is_argmax(row, i, results.argmax.get(i), of_row)) &&
           compare_results_.compare_row(results, row, i, !row.is_counted, of_row);
  }

  /// True for the class of the largest logit, and for a class with a logit that float32 cannot tell from the largest.
  bool is_argmax(const reference::CrossEntropyRow& row, std::int64_t i, double actual, const std::string& of_row) {
    const std::int64_t expected = row.is_counted ? row.argmax : 0;
    const auto found = static_cast<std::int64_t>(actual);
    if (found == expected) return true;
    if (row.is_counted && found >= 0 && found < case_.classes) {
      const double largest = exact_.logits.at(i, expected), at_found = exact_.logits.at(i, found);
      if (difference(result_dtype_, at_found, largest, logsumexp_scale(largest, largest)).empty()) return true;
    }
    shares.failure = "argmax" + of_row + ": expected " + std::to_string(expected) + ", actual " + short_text(actual);
    return false;
  }

  // ---- gradients ---------------------------------------------------------------------------------------------------

  /// dL/d(loss), dL/d(lse) and dL/d(entropy) of each row are `in_factor` times `alpha`. `in_factor` multiplies the
  /// gradient of the logits before its rounding, `alpha` multiplies the products.
  struct Scaling {
    reference::LinearCrossEntropyUpstream in_factor;
    double alpha = 1.0;
  };

  Scaling scaling_of(Mode mode) {
    const auto rows = static_cast<std::int64_t>(exact_.rows.size());
    Scaling scaling;
    const LinearCrossEntropyProblem problem = problem_of(run_, mode);
    UpstreamRange<double> upstream;
    for (std::int64_t i = 0; !problem.is_reduced() && i < rows; ++i) {
      if (exact_.rows[static_cast<std::size_t>(i)].is_counted) upstream.add(run_.grad_loss.get(i));
    }
    double scale = upstream.scale();
    if (problem.is_reduced()) scale = run_.grad_loss.get(0);
    if (case_.options.reduction == Reduction::mean) scale = mean_gradient(scale, exact_.divisor);
    std::array<double, kNumbers> numbers{};
    put_scale(scale, problem.scale_in_products(), numbers.data());
    if (scale != 0.0 && std::isfinite(scale)) {
      const double product = numbers[kAlpha] * numbers[kRest];
      const double allowed = 4.0 * unit_in_last_place(DType::float64, scale);
      const std::string text = difference_beyond(allowed, DType::float64, product, scale);
      if (!text.empty()) shares.failure = "alpha times the rest of the scale: " + text;
    }
    scaling.alpha = numbers[kAlpha];
    const auto in_factor = [&](const TestTensor& tensor) {
      std::vector<double> values;
      for (std::int64_t i = 0; i < rows; ++i) values.push_back(tensor.get(i) / scaling.alpha);
      return values;
    };
    const bool is_backward = mode == Mode::backward;
    scaling.in_factor.has_split_lse = is_backward && case_.has_split_lse;
    if (is_backward && case_.has_grad_lse) scaling.in_factor.lse = in_factor(run_.grad_lse);
    if (is_backward && case_.has_grad_entropy) scaling.in_factor.entropy = in_factor(run_.grad_entropy);
    scaling.in_factor.loss =
        problem.is_reduced() ? std::vector<double>(exact_.rows.size(), numbers[kRest]) : in_factor(run_.grad_loss);
    return scaling;
  }

  bool compare_gradients(LinearCrossEntropyGradientTensors& actual, Mode mode, const std::string& how) {
    const Scaling scaling = scaling_of(mode);
    const reference::LogitsGradient all = reference::logits_gradient(exact_, scaling.in_factor);
    const Matrix factor = counted_rows(exact_, all.values);
    const Matrix scales = counted_rows(exact_, all.scales);
    const auto computed = [&](const Matrix& rows) { return computed_rows(rows, problem_of(run_, mode)); };
    const LinearCrossEntropyBlock block = block_of(run_, mode);
    const LinearCrossEntropyShape shape = problem_of(run_, mode);
    const bool has_exps = shape.has_exps() || (shape.is_backward() && shape.keeps_exps);
    has_gradient_of_exps_ = shape.is_backward() && shape.keeps_exps && case_.has_grad_entropy;
    const WantedGradients& wanted = case_.wanted;
    const auto is_within = [&](const TestTensor& tensor, const char* name, const Product& product, double& share) {
      return compare_product(tensor, name + how, product, scaling.alpha, share);
    };
    // A row of grad_hidden is one sum for any number of blocks of classes; a class of grad_bias is one sum for any
    // number of chunks.
    const Product of_hidden{factor, scales, exact_.head, std::max<std::int64_t>(1, case_.classes),
                            false,  false,  has_exps};
    Product of_head{transposed(computed(all.values)),
                    transposed(computed(all.scales)),
                    computed(exact_.hidden),
                    shape.is_backward() && shape.kept_rows != 0 ? std::min(block.rows, shape.kept_rows) : block.rows,
                    case_.accumulates,
                    true,
                    has_exps};
    Matrix ones(of_head.factor.columns, 1);
    std::fill(ones.values.begin(), ones.values.end(), 1.0);
    const Product of_bias{of_head.factor,    of_head.scales, ones,    std::max<std::int64_t>(1, ones.rows),
                          case_.accumulates, false,          has_exps};
    if (of_head.has_exps) {
      of_head.rounded_other = computed(hidden_with_factors(scaling));
      const bool is_added_at_end = !shape.is_backward() && !shape.may_gather();
      of_head.target_roundings = is_added_at_end ? 1 : ceil_divide(of_head.factor.columns, of_head.chunk);
    }
    return (!wanted.hidden || (is_within(actual.hidden, "grad_hidden", of_hidden, shares.grad_hidden) &&
                               uncounted_are_zero(actual.hidden, how))) &&
           (!wanted.head || is_within(actual.head, "grad_head", of_head, shares.grad_head)) &&
           (!wanted.bias || is_within(actual.bias, "grad_bias", of_bias, shares.grad_bias));
  }

  /// The rows of the chunks, in the order of the loop: all rows, or the rows that count.
  Matrix computed_rows(const Matrix& all, const LinearCrossEntropyProblem& problem) const {
    const bool leaves_out = case_.device.type == DeviceType::cpu || case_.skips_ignored;
    Matrix computed(0, all.columns);
    for (std::int64_t i = 0; i < all.rows; ++i) {
      const std::int64_t of_view = problem.view.rows.offsets(i).of[linear_cross_entropy_tensors::kPerRow];
      const std::int64_t row =
          problem.has_soft_targets() && !LinearCrossEntropyShape(problem).gathers_soft_targets() ? i : of_view;
      if (leaves_out && !exact_.rows[static_cast<std::size_t>(row)].is_counted) continue;
      ++computed.rows;
      for (std::int64_t j = 0; j < all.columns; ++j) computed.values.push_back(all.at(row, j));
    }
    return computed;
  }

  /// True if the rows that do not count have a gradient of 0.
  bool uncounted_are_zero(const TestTensor& grad_hidden, const std::string& how) {
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(exact_.rows.size()); ++i) {
      for (std::int64_t d = 0; d < case_.features; ++d) {
        if (exact_.rows[static_cast<std::size_t>(i)].is_counted || grad_hidden.get(i * case_.features + d) == 0.0)
          continue;
        shares.failure = "grad_hidden" + how + " of row " + std::to_string(i) +
                         ", which does not count: " + short_text(grad_hidden.get(i * case_.features + d));
        return false;
      }
    }
    return true;
  }

  /// factor * other, with sums cut into chunks.
  struct Product {
    Matrix factor;
    Matrix scales;  ///< of the elements of the factor
    Matrix other;
    std::int64_t chunk;
    bool accumulates;
    bool is_added_by_gemm = false;             ///< a product adds each chunk to the sum
    bool has_exps = false;                     ///< fused/fused.h
    std::int64_t target_roundings = 0;         ///< with exps: how often the targets' parts are added
    std::optional<Matrix> rounded_other = {};  ///< `other` after its rounding, if it has one
  };

  /// hidden as the product for grad_head reads it beside exps: times the factor of its row, rounded, and divided by the
  /// factor again. The factor's power of two changes no rounding and is left out.
  Matrix hidden_with_factors(const Scaling& scaling) const {
    Matrix hidden = exact_.hidden;
    for (std::int64_t i = 0; i < hidden.rows; ++i) {
      const reference::CrossEntropyRow& row = exact_.rows[static_cast<std::size_t>(i)];
      const double bits = row.lse / std::log(2.0);
      const double grad_loss = scaling.alpha * scaling.in_factor.loss[static_cast<std::size_t>(i)];
      const double factor = grad_loss * row.weight * std::exp2(std::floor(bits) - bits);
      if (!std::isfinite(factor) || factor == 0.0) continue;
      for (std::int64_t d = 0; d < hidden.columns; ++d)
        hidden.at(i, d) = rounded(case_.dtype, hidden.at(i, d) * factor) / factor;
    }
    return hidden;
  }

  /// The elements of `tensor` that a product computes: for grad_hidden the rows that count.
  Matrix elements_of(const TestTensor& tensor, const Matrix& like) const {
    Matrix all(tensor.host().element_count() / std::max<std::int64_t>(like.columns, 1), like.columns);
    for (std::size_t i = 0; i < all.values.size(); ++i) all.values[i] = tensor.get(static_cast<std::int64_t>(i));
    return all.rows == like.rows ? all : counted_rows(exact_, all);
  }

  bool compare_product(const TestTensor& tensor, const std::string& name, const Product& product, double alpha,
                       double& share) {
    const DType dtype = tensor.host().dtype;
    Matrix exact = reference::multiply(product.factor, product.other);
    const Matrix actual = elements_of(tensor, exact);
    const Matrix allowed = allowed_of(product, dtype, alpha);
    for (std::size_t i = 0; i < exact.values.size(); ++i) {
      const double held = product.accumulates ? LinearCrossEntropyRun::held(static_cast<std::int64_t>(i)) : 0.0;
      exact.values[i] = held + alpha * exact.values[i];
      const double error = std::abs(actual.values[i] - exact.values[i]);
      if (error == 0.0) continue;
      const double before = allowed.values[i] + allowed_error(result_dtype_, 0.0, std::abs(held));
      const double bound = before + rounding_of(dtype, std::abs(exact.values[i]) + before);
      if (size_of(case_.dtype) > 2 && error <= bound) share = std::max(share, error / bound);
      const std::string text = difference_beyond(bound, dtype, actual.values[i], exact.values[i]);
      if (text.empty()) continue;
      shares.failure = name + ", element " + std::to_string(i) + ": " + text + ", allowed " + short_text(bound);
      return false;
    }
    return size_of(case_.dtype) > 2 || is_within_rounded_product(product, dtype, alpha, exact, actual, name, share);
  }

  /// The error of a factor that is an exp: the exp is rounded instead of the factor; for grad_head, hidden times its
  /// row's factor is rounded too; an exp of 2^-36 of the row's largest may be 0.
  static double of_exps(const Product& product, double factor, double largest) {
    constexpr double kUnitRoundoff = 0x1p-8;  // of bfloat16
    constexpr double kLost = 0x1p-36;
    return (product.is_added_by_gemm ? 2.0 : 1.0) * kUnitRoundoff * std::abs(factor) + kLost * largest;
  }

  static double rounding_of(DType dtype, double value) {
    return size_of(dtype) == 2 && std::isfinite(value) ? 0.5 * unit_in_last_place(dtype, value) : 0.0;
  }

  /// The sum of the worst roundings in each element, without the rounding of the result: the rounding of the factor to
  /// 16 bits, the allowed error of each term in float32, and the rounding of the sum after each chunk.
  Matrix allowed_of(const Product& product, DType dtype, double alpha) const {
    // A probability that would be subnormal may be 0. This bounds its multiplier, which may be the logarithm of a
    // probability.
    constexpr double kBesideProbability = 256.0;
    Matrix of_factor = product.factor;
    double largest = 0.0;
    for (const double value : product.factor.values) largest = std::max(largest, std::abs(value));
    for (std::size_t i = 0; i < of_factor.values.size(); ++i) {
      const double scale = activation_scale(result_dtype_, product.scales.values[i], kBesideProbability);
      const double before = allowed_error(result_dtype_, 0.0, scale);
      of_factor.values[i] =
          before + (product.has_exps ? of_exps(product, product.factor.values[i], largest)
                                     : rounding_of(case_.dtype, std::abs(product.factor.values[i]) + before));
      // In a gradient made of an exp, the terms have the rounding of the exp, and so has the logarithm in one of them.
      if (has_gradient_of_exps_) of_factor.values[i] += 0x1p-7 * product.scales.values[i];
    }
    const Matrix sizes = sizes_of(product.other);
    Matrix allowed = multiply(of_factor, sizes);
    const std::int64_t chunks = ceil_divide(product.factor.columns, product.chunk);
    const Matrix sums =
        chunks > 1 || product.accumulates || product.has_exps ? multiply(sizes_of(product.factor), sizes) : allowed;
    for (std::size_t i = 0; i < allowed.values.size(); ++i) {
      const double held = product.accumulates ? 0.5 : 0.0;
      std::int64_t roundings = chunks - 1;
      if (product.is_added_by_gemm && rounds_before_adding(case_.device, dtype))
        roundings += chunks - (product.accumulates ? 0 : 1);
      if (product.has_exps && product.is_added_by_gemm) roundings += product.target_roundings;
      allowed.values[i] = std::abs(alpha) * allowed.values[i] +
                          static_cast<double>(roundings) * rounding_of(dtype, held + std::abs(alpha) * sums.values[i]);
    }
    return allowed;
  }

  /// For 16 bits, the errors of all elements together, if there are too many numbers for luck to decide.
  bool is_within_rounded_product(const Product& product, DType dtype, double alpha, const Matrix& exact,
                                 const Matrix& actual, const std::string& name, double& share) {
    // The logits of a GPU have other roundings than those of that product, so luck decides more.
    constexpr std::size_t kFewFactors = 256, kFewElementsOfGpu = 4096;
    // The contract. A gradient made of kept exps, which are rounded themselves, has twice the error if the entropy's
    // part outweighs the loss' part.
    const double kMost = has_gradient_of_exps_ ? 2.3 : 1.15;
    if (product.factor.values.size() < kFewFactors) return true;
    if (case_.device.type == DeviceType::cuda && exact.values.size() < kFewElementsOfGpu) return true;
    const RoundedProduct bound{case_.dtype, alpha, product.chunk,
                               product.is_added_by_gemm && rounds_before_adding(case_.device, dtype)};
    std::optional<Matrix> held;
    if (product.accumulates) {
      held = exact;
      for (std::size_t i = 0; i < exact.values.size(); ++i) {
        held->values[i] = LinearCrossEntropyRun::held(static_cast<std::int64_t>(i));
      }
    }
    const auto squared_error = [&](const Matrix& result) {
      double error = 0.0;
      for (std::size_t i = 0; i < exact.values.size(); ++i) error += std::pow(result.values[i] - exact.values[i], 2);
      return error;
    };
    double allowed = squared_error(bound.multiply(product.factor, product.other, dtype, held));
    if (product.rounded_other) {  // the errors of the factor and of hidden may cancel: then either alone is larger
      allowed = std::max(allowed, squared_error(bound.multiply(product.factor, *product.rounded_other, dtype, held)));
    }
    const double error = squared_error(actual);
    if (!std::isfinite(allowed)) return true;
    const double ratio = error == 0.0 ? 0.0 : std::sqrt(error / allowed);
    share = std::max(share, ratio / kMost);
    if (ratio <= kMost) return true;
    shares.failure = name + ": error " + short_text(std::sqrt(error)) + ", of one product " +
                     short_text(std::sqrt(allowed)) + ", at most " + short_text(kMost) + " times that is allowed";
    return false;
  }

  LinearCrossEntropyRun& run_;
  const LinearCrossEntropyCase& case_;
  DType result_dtype_;
  CrossEntropyResultComparison compare_results_;
  reference::LinearCrossEntropy exact_;
  bool has_gradient_of_exps_ = false;  ///< the gradient of the logits is rounded twice
};

inline std::string description_of(const LinearCrossEntropyCase& c) {
  std::string text = std::string(name_of(c.dtype)) + " x " + check::to_string(c.row_shape) + " of " +
                     std::to_string(c.features) + ", classes " + std::to_string(c.classes) + ", targets " +
                     name_of(c.targets_dtype) + description_of(c.options) + ", deviation " +
                     std::to_string(c.deviation);
  const auto add_dtype = [&](const char* name, const std::optional<DType>& dtype) {
    if (dtype) text += std::string(", ") + name + " " + name_of(*dtype);
  };
  add_dtype("bias", c.bias_dtype);
  add_dtype("class_weight", c.class_weight_dtype);
  add_dtype("grad_head", c.grad_head_dtype);
  add_dtype("grad_bias", c.grad_bias_dtype);
  if (c.workspace_limit != 0) text += ", workspace_limit " + std::to_string(c.workspace_limit);
  if (c.has_row_weight) text += ", row_weight";
  if (c.wants_mean_logit) text += ", mean_logit";
  if (c.has_normalizer) text += ", normalizer";
  if (c.has_split_lse) text += ", lse as two numbers";
  if (c.has_grad_lse) text += ", grad_lse";
  if (c.has_grad_entropy) text += ", grad_entropy";
  if (!c.wants_all_of_row) text += ", without argmax and entropy";
  if (c.wants_entropy_alone) text += ", without argmax";
  if (c.skips_ignored) text += ", ignored rows skipped";
  if (c.accumulates) text += ", accumulates";
  if (c.kept_rows) text += ", kept rows " + std::to_string(*c.kept_rows);
  return text;
}

/// Runs a case with every call, and compares every element with the oracle and every byte around it with its canary; on
/// a GPU also without the outputs that have kernels of their own.
inline LinearCrossEntropyShares compare_linear_cross_entropy(const LinearCrossEntropyCase& test_case) {
  return compare_with_and_without_all_of_row(test_case, [](const LinearCrossEntropyCase& one) {
    LinearCrossEntropyRun run(one);
    return shares_of_run<LinearCrossEntropyComparison>(run, description_of(one));
  });
}

}  // namespace eaves::testing
