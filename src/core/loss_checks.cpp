#include "core/loss_checks.h"

#include <limits>
#include <string>

#include "core/loss_options.h"
#include "eaves/error.h"

namespace eaves::check {

void loss_options(const char* op, const CrossEntropyOptions& options) {
  for (const LossOption& option : kLossOptions) {
    const double value = options.*option.value;
    if (option.zero_is_none && value == 0.0) continue;
    if (value >= option.smallest && value <= option.largest) continue;  // before a message is built
    const char* or_none = option.zero_is_none && option.smallest > 0.0 ? ", or 0 for none" : "";
    number(op, option.name, value, option.smallest, option.largest, std::string(option.expected) + or_none);
  }
  if (options.reduction > Reduction::mean) {
    fail(op, "reduction",
         "is " + std::to_string(static_cast<int>(options.reduction)) + ", expected one of enum Reduction");
  }
}

void is_required(const Argument& argument, const char* why) {
  if (!argument.view.is_present && argument.view.data == nullptr) {
    fail(argument, std::string("is missing, expected ") + why);
  }
}

void LossArguments::take_input(const Argument& argument) {
  for (const Argument& output : outputs) do_not_overlap(output, argument);  // a call in place has `logits` as an output
  inputs.push_back(argument);
}

void LossArguments::take_output(const Argument& argument) {
  is_writable(argument);
  for (const Argument& input : inputs) do_not_overlap(argument, input);
  for (const Argument& output : outputs) do_not_overlap(argument, output);
  outputs.push_back(argument);
}

void LossArguments::has_result_dtype(const Argument& argument) const {
  is_on(argument, device, reference);
  if (argument.view.dtype == result_dtype) return;  // before a message is built
  has_dtype(argument, {result_dtype}, std::string("float32, or float64 where `") + rows_of + "` is float64");
}

std::string LossArguments::per_row_shape() const { return std::string("one per row of `") + rows_of + "`"; }

void* LossArguments::per_row(const Argument& argument, bool is_output, DType dtype, const char* why) {
  if (!is_given(argument)) return nullptr;
  is_on(argument, device, reference);
  if (argument.view.shape != row_shape) has_shape(argument, row_shape, per_row_shape());
  has_dtype(argument, {dtype}, why);
  return taken(argument, is_output);
}

void* LossArguments::per_row(const Argument& argument, bool is_output) {
  return numbers(argument, is_output, row_shape);
}

KeptLse LossArguments::lse(const Argument& argument, bool is_output) {
  const bool is_split = has_two_numbers(argument.view, row_shape);
  Dims shape = row_shape;
  if (is_split) shape.push_back(2);
  return {numbers(argument, is_output, shape), is_split};
}

void* LossArguments::numbers(const Argument& argument, bool is_output, const Dims& shape) {
  if (!is_given(argument)) return nullptr;
  is_on(argument, device, reference);
  if (argument.view.shape != shape) has_shape(argument, shape, per_row_shape());
  has_result_dtype(argument);
  return taken(argument, is_output);
}

void* LossArguments::taken(const Argument& argument, bool is_output) {
  is_contiguous(argument);
  is_output ? take_output(argument) : take_input(argument);
  return argument.view.data;
}

void* LossArguments::scalar(const Argument& argument, bool is_output) {
  if (!is_given(argument)) return nullptr;
  has_one_element(argument);
  has_result_dtype(argument);
  is_output ? take_output(argument) : take_input(argument);
  return argument.view.data;
}

void* LossArguments::mean_scalar(const Argument& argument, Reduction reduction, bool is_output) {
  if (argument.view.is_present && reduction != Reduction::mean) {
    fail(argument, "is given, but only the mean divides by a number; expected `reduction` mean");
  }
  return scalar(argument, is_output);
}

void* LossArguments::loss(const Argument& argument, Reduction reduction) {
  return reduction == Reduction::none ? per_row(argument, true) : scalar(argument, true);
}

void LossArguments::has_loss_gradient(const Argument& argument, DType dtype, Reduction reduction) const {
  is_valid(argument);
  is_on(argument, device, reference);
  if (argument.view.dtype != result_dtype) {
    has_dtype(argument, {result_dtype, dtype}, std::string("as the loss, or `") + rows_of + "`");
  }
  if (reduction == Reduction::none) {
    if (argument.view.shape != row_shape) has_shape(argument, row_shape, per_row_shape());
  } else {
    has_one_element(argument);
  }
}

namespace {

/// `index` is the row's number in row-major order of `row_shape`.
[[noreturn]] void fail_for_target(const char* op, const Dims& row_shape, std::int64_t index, std::int64_t target,
                                  std::int64_t classes, std::int64_t ignore_index) {
  Dims row;
  for (int axis = 0; axis < row_shape.size(); ++axis) row.push_back(0);
  for (int axis = row_shape.size() - 1; axis >= 0; --axis) {
    row[axis] = index % row_shape[axis];
    index /= row_shape[axis];
  }
  // A zero-dimensional `targets` has no index.
  throw InvalidArgument(op, "`targets`" + (row.empty() ? "" : to_string(row)) + " is " + std::to_string(target) +
                                ", expected 0 to " + std::to_string(classes - 1) + ", or `ignore_index` " +
                                std::to_string(ignore_index));
}

}  // namespace

void targets_are_in_range(const char* op, const RowTargets& targets, const Dims& row_shape, std::int64_t classes,
                          std::int64_t ignore_index) {
  constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
  std::int64_t first = kNone;
  std::int64_t value = 0;
  targets.for_each([&](std::int64_t index, std::int64_t target) {
    const bool is_legal = (target >= 0 && target < classes) || target == ignore_index;
    if (is_legal || index > first) return;
    first = index;
    value = target;
  });
  if (first != kNone) fail_for_target(op, row_shape, first, value, classes, ignore_index);
}

void normalizer_is_not_negative(const char* op, const TypedNumbers& normalizer) {
  const double value = normalizer.data == nullptr ? 0.0 : number_at(normalizer, 0);
  if (value < 0.0) number(op, "normalizer", value, 0.0, infinity<double>(), "a number that is not negative");
}

}  // namespace eaves::check
