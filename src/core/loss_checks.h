// The checks that the losses share: options, per-row tensors, scalars and targets.
#pragma once

#include <cstdint>
#include <vector>

#include "core/check.h"
#include "core/loss_outputs.h"
#include "core/row_targets.h"
#include "core/typed_numbers.h"
#include "eaves/cross_entropy.h"

namespace eaves::check {

void loss_options(const char* op, const CrossEntropyOptions& options);

/// Throws if a required argument is missing; `why` continues the words "expected it".
void is_required(const Argument& argument, const char* why);

/// Checks the arguments of one call. It holds the tensors checked so far, and the shape, dtype and device that the next
/// ones must have. "Per row" means a contiguous tensor of `row_shape`.
struct LossArguments {
  const char* op;
  Dims row_shape;
  DType result_dtype;
  Device device;
  const char* reference;               ///< the argument on `device`: "logits"
  const char* rows_of = reference;     ///< the argument with these rows; its dtype decides `result_dtype`
  std::vector<Argument> inputs = {};   ///< present ones
  std::vector<Argument> outputs = {};  ///< present ones

  void take_input(const Argument& argument);
  void take_output(const Argument& argument);

  void has_result_dtype(const Argument& argument) const;

  /// "one per row of `logits`"
  std::string per_row_shape() const;

  /// Checks an optional per-row tensor. Returns its memory, or nullptr if it is missing.
  void* per_row(const Argument& argument, bool is_output, DType dtype, const char* why);
  void* per_row(const Argument& argument, bool is_output);

  /// Checks an optional lse: one number per row, or two in a last axis of 2.
  KeptLse lse(const Argument& argument, bool is_output);

  /// Checks an optional scalar of the result dtype.
  void* scalar(const Argument& argument, bool is_output);

  /// Checks an optional scalar that only Reduction::mean has.
  void* mean_scalar(const Argument& argument, Reduction reduction, bool is_output);

  /// Checks an optional output with the shape of the loss: per row, or a scalar if it is reduced.
  void* loss(const Argument& argument, Reduction reduction);

  /// Checks dL/d(loss). It may have any strides, and the result dtype or `dtype`, the dtype of `rows_of`.
  void has_loss_gradient(const Argument& argument, DType dtype, Reduction reduction) const;

 private:
  /// Checks an optional contiguous tensor of the result dtype.
  void* numbers(const Argument& argument, bool is_output, const Dims& shape);
  void* taken(const Argument& argument, bool is_output);
};

/// Checks the outputs of a forward; `views` has a member for each. `has_unit_factors`: the sum over the classes has no
/// weights, so there is a `mean_logit`.
template <typename Views>
LossOutputs loss_outputs(LossArguments& checked, const Views& views, Reduction reduction, bool has_unit_factors) {
  const char* op = checked.op;
  is_valid({op, "loss", views.loss});
  LossOutputs outputs{};
  outputs.loss = checked.loss({op, "loss", views.loss}, reduction);
  outputs.z_loss = checked.loss({op, "z_loss", views.z_loss}, reduction);
  outputs.divisor = checked.mean_scalar({op, "divisor", views.divisor}, reduction, true);
  outputs.argmax =
      static_cast<std::int64_t*>(checked.per_row({op, "argmax", views.argmax}, true, DType::int64, "classes"));
  outputs.lse = checked.lse({op, "lse", views.lse}, true);
  outputs.entropy = checked.per_row({op, "entropy", views.entropy}, true);
  outputs.sum_sq = checked.per_row({op, "sum_sq", views.sum_sq}, true);
  outputs.mean_logit = checked.per_row({op, "mean_logit", views.mean_logit}, true);
  outputs.target_mass = checked.per_row({op, "target_mass", views.target_mass}, true);
  if (outputs.mean_logit != nullptr && !has_unit_factors) {
    fail({op, "mean_logit", views.mean_logit},
         "is given, but soft targets, and `class_weight` beside `label_smoothing`, have no mean logit; leave it out");
  }
  return outputs;
}

/// Throws InvalidArgument for the first target out of range, in row-major order of `row_shape`. The targets are in host
/// memory.
void targets_are_in_range(const char* op, const RowTargets& targets, const Dims& row_shape, std::int64_t classes,
                          std::int64_t ignore_index);

/// Throws InvalidArgument for a negative normalizer. Its data is in host memory, or nullptr.
void normalizer_is_not_negative(const char* op, const TypedNumbers& normalizer);

}  // namespace eaves::check
