// One call of divergence in a self-test: its inputs, the formulas in float64, and the comparison. A GPU alone has these
// kernels. python/tests/divergence_test.py tests them with more options, within the same bounds.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "ops/divergence/divergence.h"
#include "runtime/runtime.h"
#include "testing/runs.h"
#include "testing/tensor.h"
#include "testing/tolerance.h"

namespace eaves::testing {

struct DivergenceCase {
  Device device = device_of_test();
  Divergence divergence = Divergence::forward;
  std::int64_t rows = 5;
  std::int64_t classes = 37;
  DType teacher_dtype = DType::float32;
  DType grad_dtype = DType::float32;
  double scale = 1.0;
  double softcap = 0.0;
  double temperature = 1.0;
  double beta = 0.3;
  bool has_bias = false;
  // Upstream gradients, the same for each row. Kernels are separate for some that are 0.
  double grad_divergence = 0.7;
  double grad_lse = 0.0;
  double grad_entropy = 0.0;
  double grad_hard_loss = 0.0;
};

/// One row by the formulas of divergence.h, and the gradient of the sum of its outputs times their upstream gradients.
struct DivergenceOracle {
  double divergence = 0.0, lse = 0.0, entropy = 0.0, hard_loss = 0.0;
  std::vector<double> gradient;
  std::vector<double> terms;  ///< sizes of the gradient's terms, as if they did not cancel
  double rounding = 0.0;      ///< relative, of an exponential: the contract, of the largest logits and at least of 1

  /// Values and biases of the row.
  DivergenceOracle(const DivergenceCase& c, const std::vector<double>& student, const std::vector<double>& teacher,
                   std::int64_t target) {
    const auto logits = [&](std::vector<double> z) {
      for (double& u : z) u = c.softcap == 0.0 ? c.scale * u : c.softcap * std::tanh(c.scale * u / c.softcap);
      return z;
    };
    const auto log_softmax = [](std::vector<double> z, double temperature, double& lse) {
      const double largest = *std::max_element(z.begin(), z.end()) / temperature;
      double sum = 0.0;
      for (double& each : z) sum += std::exp((each /= temperature) - largest);
      lse = largest + std::log(sum);
      for (double& each : z) each -= lse;
      return z;
    };
    const std::vector<double> z = logits(student);
    double unused = 0.0;
    const std::vector<double> log_s = log_softmax(z, c.temperature, lse), hard = log_softmax(z, 1.0, unused);
    const std::vector<double> log_t = log_softmax(logits(teacher), c.temperature, unused);
    hard_loss = -hard[static_cast<std::size_t>(target)];
    double largest = 0.0;
    for (const std::vector<double>* side : {&student, &teacher}) {
      for (const double value : *side) largest = std::max(largest, std::abs(value));
    }
    rounding = allowed_error(DType::float32, 0.0, 1.0 + c.scale * largest / std::min(c.temperature, 1.0));

    std::vector<double> weighted(z.size()), size(z.size());  // s * f', and its size
    double centre = 0.0, sizes = 0.0, entropy_sizes = 0.0;
    for (std::size_t v = 0; v < z.size(); ++v) {
      const double s = std::exp(log_s[v]), t = std::exp(log_t[v]), log_m = std::log(c.beta * t + (1.0 - c.beta) * s);
      double term = 0.0;
      switch (c.divergence) {
        case Divergence::forward:
          term = t * (log_t[v] - log_s[v]), weighted[v] = -t;
          break;
        case Divergence::reverse:
          term = s * (log_s[v] - log_t[v]), weighted[v] = s * (log_s[v] - log_t[v]);
          break;
        case Divergence::jsd:
          term = c.beta * t * (log_t[v] - log_m) + (1.0 - c.beta) * s * (log_s[v] - log_m);
          weighted[v] = (1.0 - c.beta) * s * (log_s[v] - log_m);
          break;
        case Divergence::total_variation:
          term = std::abs(s - t) / 2.0, weighted[v] = s == t ? 0.0 : std::copysign(s / 2.0, s - t);
          break;
      }
      divergence += term;
      entropy -= s * log_s[v];
      centre += weighted[v];
      // Rounding may change the sign of a small difference.
      const bool may_flip = c.divergence == Divergence::total_variation && std::abs(log_s[v] - log_t[v]) <= rounding;
      size[v] = std::abs(weighted[v]) + (may_flip ? s / rounding : 0.0);
      sizes += size[v];
      entropy_sizes += std::abs(s * log_s[v]);
    }
    for (std::size_t v = 0; v < z.size(); ++v) {
      const double s = std::exp(log_s[v]), of_hard = std::exp(hard[v]),
                   capped = c.softcap == 0.0 ? 0.0 : z[v] / c.softcap;
      const double slope = c.scale * (1.0 - capped * capped), of_z = slope / c.temperature;
      const double minus_one = static_cast<std::int64_t>(v) == target ? 1.0 : 0.0;
      gradient.push_back(of_z * (c.grad_divergence * (weighted[v] - s * centre) + c.grad_lse * s -
                                 c.grad_entropy * s * (log_s[v] + entropy)) +
                         slope * c.grad_hard_loss * (of_hard - minus_one));
      terms.push_back(of_z * (std::abs(c.grad_divergence) * (s + size[v] + s * sizes) + std::abs(c.grad_lse) * s +
                              std::abs(c.grad_entropy) * (s + std::abs(s * log_s[v]) + s * entropy_sizes)) +
                      slope * std::abs(c.grad_hard_loss) * of_hard);
    }
  }
};

/// The buffers of one call, forward and backward.
class DivergenceRun {
 public:
  explicit DivergenceRun(const DivergenceCase& test_case)
      : case_(test_case),
        student(case_.device, DType::float32, {case_.rows, case_.classes}),
        teacher(case_.device, case_.teacher_dtype, {case_.rows, case_.classes}),
        bias(case_.device, DType::float32, {case_.classes}),
        teacher_bias(case_.device, DType::float32, {case_.classes}),
        targets(case_.device, DType::int64, {case_.rows}),
        statistics(case_.device, DType::float32, {case_.rows, kDivergenceStatistics}),
        grad_values(case_.device, case_.grad_dtype, {case_.rows, case_.classes}) {
    const auto normal = [](std::uint64_t seed, double deviation) {
      return [=](std::int64_t i) { return deviation * random_normal(seed, static_cast<std::uint64_t>(i)); };
    };
    student.fill(normal(81, 3.0));
    teacher.fill(normal(82, 3.0));
    bias.fill(normal(83, 1.0));
    teacher_bias.fill(normal(84, 1.0));
    targets.fill([this](std::int64_t i) { return static_cast<double>(31 * i % case_.classes); });
  }

  void run(const ExecutionContext& context = {}) {
    divergence_forward({.inputs = inputs_of_call(), .statistics = statistics.view()}, context);
    const auto number = [this](DivergenceStatistic which) {
      TensorView view = columns(which, 1);
      view.shape = {case_.rows};
      view.strides = {kDivergenceStatistics};
      return RowNumber{view};
    };
    divergence_backward({.inputs = inputs_of_call(),
                         .lse = columns(DivergenceStatistic::lse, 2),
                         .teacher_lse = columns(DivergenceStatistic::teacher_lse, 2),
                         .hard_lse = columns(DivergenceStatistic::hard_lse, 2),
                         .centre = number(DivergenceStatistic::centre),
                         .entropy = number(DivergenceStatistic::entropy),
                         .hard_loss = number(DivergenceStatistic::hard_loss),
                         .grad_divergence = {{}, case_.grad_divergence},
                         .grad_lse = {{}, case_.grad_lse},
                         .grad_entropy = {{}, case_.grad_entropy},
                         .grad_hard_loss = {{}, case_.grad_hard_loss},
                         .grad_values = grad_values.view()},
                        context);
    runtime::synchronize(case_.device);
    for (TestTensor* input : inputs()) input->download();
    for (auto& [name, tensor] : outputs()) tensor->download();
  }

  std::vector<TestTensor*> inputs() { return {&student, &teacher, &bias, &teacher_bias, &targets}; }
  std::vector<std::pair<const char*, TestTensor*>> outputs() {
    return {{"statistics", &statistics}, {"grad_values", &grad_values}};
  }

  DivergenceOracle oracle(std::int64_t row) const {
    std::vector<double> of_student, of_teacher;
    for (std::int64_t v = 0; v < case_.classes; ++v) {
      of_student.push_back(student.get(row * case_.classes + v) + (case_.has_bias ? bias.get(v) : 0.0));
      of_teacher.push_back(teacher.get(row * case_.classes + v) + (case_.has_bias ? teacher_bias.get(v) : 0.0));
    }
    return {case_, of_student, of_teacher, static_cast<std::int64_t>(targets.get(row))};
  }

  const DivergenceCase& test_case() const { return case_; }

 private:
  DivergenceInputs inputs_of_call() const {
    const auto side = [this](const TestTensor& values, const TestTensor& added) {
      return Distribution{.values = values.view(),
                          .bias = case_.has_bias ? added.view() : TensorView{},
                          .scale = case_.scale,
                          .softcap = case_.softcap};
    };
    return {.student = side(student, bias),
            .teacher = side(teacher, teacher_bias),
            .temperature = {{}, case_.temperature},
            .divergence = case_.divergence,
            .beta = case_.beta,
            .targets = targets.view()};
  }

  TensorView columns(DivergenceStatistic first, std::int64_t count) const {
    TensorView view = statistics.view();
    view.data = static_cast<float*>(view.data) + static_cast<int>(first);
    view.shape = {case_.rows, count};
    return view;
  }

  DivergenceCase case_;

 public:
  TestTensor student, teacher, bias, teacher_bias, targets, statistics, grad_values;
};

/// The worst errors of one call, as shares of the errors that are allowed.
struct DivergenceShares {
  std::string failure = {};  ///< on the first result outside of the contract; empty: all are within it
  double statistics = 0.0;
  double gradient = 0.0;
  double worst() const { return std::max(statistics, gradient); }
};

/// Compares the downloaded results of a run with the oracle.
class DivergenceComparison {
 public:
  explicit DivergenceComparison(const DivergenceRun& run) : run_(run) {}

  /// Empty, or a sentence on the first result outside of the contract; then it compares no more.
  [[nodiscard]] std::string compare() {
    const DivergenceCase& c = run_.test_case();
    for (std::int64_t row = 0; row < c.rows; ++row) {
      const DivergenceOracle exact = run_.oracle(row);
      const auto found = [&](DivergenceStatistic which, int i = 0) {
        return run_.statistics.get(row * kDivergenceStatistics + static_cast<int>(which) + i);
      };
      const auto is_statistic = [&](const char* name, double actual, double expected) {
        return expect(DType::float32, actual, expected, exact.rounding * std::max(1.0, std::abs(expected)),
                      shares.statistics, name + std::string(" of row ") + std::to_string(row));
      };
      if (!is_statistic("divergence", found(DivergenceStatistic::divergence), exact.divergence) ||
          !is_statistic("lse", found(DivergenceStatistic::lse) + found(DivergenceStatistic::lse, 1), exact.lse) ||
          !is_statistic("entropy", found(DivergenceStatistic::entropy), exact.entropy) ||
          !is_statistic("hard loss", found(DivergenceStatistic::hard_loss), exact.hard_loss)) {
        break;
      }
      for (std::int64_t v = 0; v < c.classes; ++v) {
        const auto at = static_cast<std::size_t>(v);
        const double expected = exact.gradient[at], half = size_of(c.grad_dtype) == 2 ? 0.5 : 0.0;
        // A few roundings of the number itself, such as p - 1 of the target. A GPU flushes a probability below 1.2e-38.
        const double allowed = exact.rounding * exact.terms[at] + 4.0 * unit_in_last_place(DType::float32, expected) +
                               1e-33 + half * unit_in_last_place(c.grad_dtype, expected);
        if (!expect(c.grad_dtype, run_.grad_values.get(row * c.classes + v), expected, allowed, shares.gradient,
                    "gradient of row " + std::to_string(row) + ", class " + std::to_string(v))) {
          return shares.failure;
        }
      }
    }
    return shares.failure;
  }

  DivergenceShares shares;

 private:
  bool expect(DType dtype, double actual, double expected, double allowed, double& share, const std::string& what) {
    const std::string text = difference_beyond(allowed, dtype, actual, expected);
    if (!text.empty()) shares.failure = what + ": " + text + ", allowed " + short_text(allowed);
    const double error = std::abs(actual - expected);
    if (error > 0.0) share = std::max(share, error / allowed);
    return text.empty();
  }

  const DivergenceRun& run_;
};

inline DivergenceShares compare_divergence(const DivergenceCase& test_case) {
  DivergenceRun run(test_case);
  return shares_of_run<DivergenceComparison>(
      run, "divergence " + std::to_string(static_cast<int>(test_case.divergence)) + ", " +
               std::to_string(test_case.classes) + " classes, teacher " + name_of(test_case.teacher_dtype));
}

}  // namespace eaves::testing
