// The divisor of the mean and the outputs of rows on the CPU, computed in float64.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "core/typed_numbers.h"
#include "ops/cross_entropy/cross_entropy_backend.h"
#include "ops/cross_entropy/cross_entropy_math.h"

namespace eaves::cpu {

using namespace cross_entropy_tensors;

using Terms = CrossEntropyTerms<double>;

inline double weight_at(const CrossEntropyInputs& inputs, std::int64_t column) {
  return inputs.weight.data == nullptr ? 1.0 : number_at(inputs.weight, column);
}

/// The weight r of a row. `index` counts the rows in the order of the per-row tensors.
inline double row_weight_at(const CrossEntropyInputs& inputs, std::int64_t index) {
  return inputs.row_weight == nullptr ? 1.0
                                      : number_at({inputs.row_weight, accumulator_dtype(inputs.logits_dtype)}, index);
}

/// Adds in the order of `values`, so that the sum does not depend on the layout of the logits.
inline double sum_in_order(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double value : values) sum += value;
  return sum;
}

/// The divisor of the mean.
inline double divisor_of(const CrossEntropyInputs& inputs, const void* normalizer) {
  if (normalizer != nullptr) return number_at({normalizer, accumulator_dtype(inputs.logits_dtype)}, 0);
  std::vector<double> weights(static_cast<std::size_t>(inputs.view.row_count));
  if (inputs.has_soft_targets()) {
    if (inputs.row_weight == nullptr) return static_cast<double>(inputs.view.row_count);
    for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = row_weight_at(inputs, static_cast<std::int64_t>(i));
    return divisor_of_sum(sum_in_order(weights));
  }
  const std::int64_t ignored = inputs.options.ignore_index;
  inputs.row_targets().for_each([&](std::int64_t index, std::int64_t target) {
    weights[static_cast<std::size_t>(index)] =
        target == ignored ? 0.0 : weigh(weight_at(inputs, target), row_weight_at(inputs, index));
  });
  return divisor_of_sum(sum_in_order(weights));
}

/// Takes the losses of the rows, in any order and from many threads, and writes the outputs that the caller wants.
class Results {
 public:
  Results(const CrossEntropyInputs& inputs, const LossOutputs& outputs)
      : outputs_(outputs),
        dtype_(accumulator_dtype(inputs.logits_dtype)),
        reduction_(inputs.options.reduction),
        classes_(inputs.classes) {
    if (reduction_ == Reduction::none) return;
    losses_.resize(static_cast<std::size_t>(inputs.view.row_count));
    if (outputs.z_loss != nullptr) z_losses_.resize(losses_.size());
  }

  /// `index` counts the rows in the order of the per-row tensors. A row that is not read has default-constructed `row`
  /// and `statistics`.
  void store(std::int64_t index, const RowLoss<double>& row, const ClassStatistics<double>& statistics) {
    write_lse(index, row.lse);
    if (outputs_.entropy != nullptr) write(outputs_.entropy, index, entropy_of(statistics));
    if (outputs_.sum_sq != nullptr) write(outputs_.sum_sq, index, sum_sq_of(statistics));
    if (outputs_.mean_logit != nullptr) write(outputs_.mean_logit, index, mean_logit_of(statistics, classes_));
    write(outputs_.target_mass, index, row.target_mass);
    // A row with only NaN has no largest logit.
    if (outputs_.argmax != nullptr) outputs_.argmax[index] = statistics.best < classes_ ? statistics.best : 0;
    if (reduction_ == Reduction::none) {
      write(outputs_.loss, index, row.loss);
      write(outputs_.z_loss, index, row.z_loss);
    } else {
      losses_[static_cast<std::size_t>(index)] = row.loss;
      if (!z_losses_.empty()) z_losses_[static_cast<std::size_t>(index)] = row.z_loss;
    }
  }

  /// Call after all rows. `divisor` is the divisor of the mean; 0 if the rows' weights add up to 0.
  void finish(double divisor, bool has_normalizer) const {
    if (reduction_ == Reduction::none) return;
    const auto reduce = [&](const std::vector<double>& values) {
      const double sum = sum_in_order(values);
      if (reduction_ == Reduction::sum) return sum;
      return mean_of(sum, divisor, has_normalizer);
    };
    write(outputs_.loss, 0, reduce(losses_));
    write(outputs_.z_loss, 0, reduce(z_losses_));
    write(outputs_.divisor, 0, divisor);
  }

 private:
  void write_lse(std::int64_t index, const SplitLse<double>& lse) const {
    const KeptLse& to = outputs_.lse;
    if (to.data == nullptr) return;
    dtype_ == DType::float64 ? to.store(to.row(index), lse) : to.store(to.row(index), rounded<float>(lse));
  }
  void write(void* to, std::int64_t index, double value) const {
    if (to == nullptr) return;
    if (dtype_ == DType::float64) {
      static_cast<double*>(to)[index] = value;
    } else {
      static_cast<float*>(to)[index] = static_cast<float>(value);
    }
  }

  LossOutputs outputs_;
  DType dtype_;
  Reduction reduction_;
  std::int64_t classes_;
  std::vector<double> losses_;
  std::vector<double> z_losses_;
};

inline double divisor_if_mean(const CrossEntropyInputs& inputs, const void* normalizer) {
  return inputs.options.reduction == Reduction::mean ? divisor_of(inputs, normalizer) : 1.0;
}

/// dL/d(unweighted loss) of the row at the offsets `at`. grad_loss without data is 1.
template <typename Offsets>
double grad_of_row(const CrossEntropyInputs& inputs, const TypedNumbers& grad_loss, const Offsets& at, double divisor) {
  const double gradient = grad_loss.data == nullptr ? 1.0 : number_at(grad_loss, at.of[kGradLoss]);
  return weigh(mean_gradient(gradient, divisor), row_weight_at(inputs, at.of[kPerRow]));
}

inline ClassStatistics<double> merged(const ClassStatistics<double>& a, const ClassStatistics<double>& b) {
  return merge(a, b, [](double x) { return std::exp(x); });
}

}  // namespace eaves::cpu
