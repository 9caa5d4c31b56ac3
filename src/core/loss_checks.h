// The checks that operators with a loss share: their options, tensors that come one per row or as one number, targets.
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

/// An argument that cannot be left out here; `why` follows "expected it".
void is_required(const Argument& argument, const char* why);

/// What a call has beside its problem: the tensors that have been checked, and what others are checked against.
/// "Per row" means `row_shape`, contiguous.
struct LossArguments {
  const char* op;
  Dims row_shape;
  DType result_dtype;
  Device device;
  const char* reference;               ///< the argument whose device it is: "logits"
  const char* rows_of = reference;     ///< the argument whose rows and dtype these are
  std::vector<Argument> inputs = {};   ///< present ones
  std::vector<Argument> outputs = {};  ///< present ones

  void take_input(const Argument& argument);
  void take_output(const Argument& argument);

  void has_result_dtype(const Argument& argument) const;

  /// "one per row of `logits`"
  std::string per_row_shape() const;

  /// An optional per-row tensor; its memory, or nullptr where there is none.
  void* per_row(const Argument& argument, bool is_output, DType dtype, const char* why);
  void* per_row(const Argument& argument, bool is_output);

  /// lse, optional: per row, or with one more axis of 2.
  KeptLse lse(const Argument& argument, bool is_output);

  /// An optional single number of the result dtype.
  void* scalar(const Argument& argument, bool is_output);

  /// The same of an argument that only the mean has.
  void* mean_scalar(const Argument& argument, Reduction reduction, bool is_output);

  /// What has the shape of the loss.
  void* loss(const Argument& argument, Reduction reduction);

  /// dL/d(loss): any strides, dtype of the result or `dtype`, that of the reference.
  void has_loss_gradient(const Argument& argument, DType dtype, Reduction reduction) const;

 private:
  /// An optional contiguous tensor of the result dtype.
  void* numbers(const Argument& argument, bool is_output, const Dims& shape);
  void* taken(const Argument& argument, bool is_output);
};

/// `views` has a member for each. `has_unit_factors`: the sum over the classes has no weights.
template <typename Views>
LossOutputs loss_outputs(LossArguments& checked, const Views& views, Reduction reduction, bool has_unit_factors) {
  const char* op = checked.op;
  is_valid({op, "loss", views.loss});
  LossOutputs outputs{};
  outputs.loss = checked.loss({op, "loss", views.loss}, reduction);
  outputs.z_loss = checked.loss({op, "z_loss", views.z_loss}, reduction);
  outputs.divisor = checked.mean_scalar({op, "divisor", views.divisor}, reduction, true);
  outputs.argmax = static_cast<std::int64_t*>(
      checked.per_row({op, "argmax", views.argmax}, true, DType::int64, "a class of each row"));
  outputs.lse = checked.lse({op, "lse", views.lse}, true);
  outputs.entropy = checked.per_row({op, "entropy", views.entropy}, true);
  outputs.sum_sq = checked.per_row({op, "sum_sq", views.sum_sq}, true);
  outputs.mean_logit = checked.per_row({op, "mean_logit", views.mean_logit}, true);
  outputs.target_mass = checked.per_row({op, "target_mass", views.target_mass}, true);
  if (outputs.mean_logit != nullptr && !has_unit_factors) {
    fail({op, "mean_logit", views.mean_logit},
         "is given with soft targets, or with weights and `label_smoothing`: there is none with those");
  }
  return outputs;
}

/// Throws InvalidArgument for the first target, in the order of `row_shape`, that is out of range. The targets are in
/// memory of the host.
void targets_are_in_range(const char* op, const RowTargets& targets, const Dims& row_shape, std::int64_t classes,
                          std::int64_t ignore_index);

/// Throws InvalidArgument if it is below 0. It is in memory of the host, or nullptr.
void normalizer_is_not_negative(const char* op, const TypedNumbers& normalizer);

}  // namespace eaves::check
