// The tables of `eaves bench cross_entropy`: the published ones (vocabulary by vocabulary), then every option at once,
// the options one by one, and the layouts. This file has axes, buffers and bytes only; the harness does the timing.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/dispatch.h"
#include "eaves/cross_entropy.h"
#include "runtime/runtime.h"
#include "testing/benchmark.h"

namespace eaves::bench {
namespace {

const std::string kForward = "fwd", kBackward = "bwd", kInPlace = "fwd+bwd";

/// One call of a training step. The defaults are the call of the published tables: a mean over targets that all count.
struct Case {
  Dims shape = {};
  int class_axis = -1;
  Sizes shape_keys = {};
  CrossEntropyOptions options = {};
  bool has_weight = false;
  bool has_soft_targets = false;
  bool half_is_ignored = false;
  /// Outputs. The entropy also has a gradient, because the entropy of a policy is a part of its loss.
  bool has_argmax = false;
  bool has_entropy = false;

  int axis() const { return class_axis < 0 ? shape.size() + class_axis : class_axis; }
  std::int64_t classes() const { return shape[axis()]; }
  Dims row_shape() const { return without_axis(shape, axis()); }
  std::int64_t rows() const { return elements_of(row_shape()); }
  Dims loss_shape() const { return options.reduction == Reduction::none ? row_shape() : Dims{}; }
  bool needs_target_mass() const { return has_soft_targets || (has_weight && options.label_smoothing > 0.0); }
};

// ----------------------------------------------------------------------------------------------------- the inputs

// Distributions along the last axis. A few different ones are enough: repeating them does not change a kernel's time.
TensorView soft_targets(Arena& arena, const Case& item, DType dtype) {
  constexpr std::int64_t kDifferent = 4;
  std::mt19937_64 random(3);
  std::normal_distribution<double> normal;
  std::vector<double> targets;
  for (std::int64_t row = 0; row < std::min(kDifferent, item.rows()); ++row) {
    std::vector<double> weights(static_cast<std::size_t>(item.classes()));
    double sum = 0.0;
    for (double& weight : weights) sum += weight = std::exp(normal(random));
    for (const double weight : weights) targets.push_back(weight / sum);
  }
  return arena.filled(dtype, item.shape, targets);
}

// Between 0.5 and 1.5: usual class weights, and far from 0, because the mean divides by their sum.
TensorView class_weights(Arena& arena, const Case& item, DType dtype) {
  std::mt19937_64 random(4);
  std::uniform_real_distribution<double> uniform(0.5, 1.5);
  std::vector<double> weights(static_cast<std::size_t>(item.classes()));
  for (double& weight : weights) weight = uniform(random);
  return arena.filled(dtype, {item.classes()}, weights);
}

// ------------------------------------------------------------------------------------------------------ the calls

// The inputs of a training step's forward.
CrossEntropyForwardArgs forward_args(Arena& arena, const Case& item, DType dtype) {
  return {.logits = arena.normal(dtype, item.shape, 1),
          .targets = item.has_soft_targets
                         ? soft_targets(arena, item, dtype)
                         : class_targets(arena, item.row_shape(), item.classes(), item.half_is_ignored),
          .class_weight = item.has_weight ? class_weights(arena, item, dtype) : TensorView{},
          .class_axis = item.class_axis,
          .options = item.options,
          .skips_ignored = true};
}

void add_outputs(CrossEntropyForwardArgs& args, Arena& arena, const Case& item) {
  const DType dtype = accumulator_dtype(args.logits.dtype);
  args.loss = arena.output(dtype, item.loss_shape());
  if (item.options.z_loss_weight > 0.0) args.z_loss = arena.output(dtype, item.loss_shape());
  if (item.has_argmax) args.argmax = arena.output(DType::int64, item.row_shape());
  if (item.has_entropy) args.entropy = arena.output(dtype, item.row_shape());
}

void add_what_the_backward_needs(CrossEntropyForwardArgs& args, Arena& arena, const Case& item) {
  const DType dtype = accumulator_dtype(args.logits.dtype);
  args.lse = arena.output(dtype, item.row_shape());
  if (item.needs_target_mass()) args.target_mass = arena.output(dtype, item.row_shape());
  if (item.options.reduction == Reduction::mean) args.divisor = arena.output(dtype, {});
}

Call forward_call(Arena& arena, const Case& item, DType dtype) {
  CrossEntropyForwardArgs args = forward_args(arena, item, dtype);
  add_outputs(args, arena, item);
  add_what_the_backward_needs(args, arena, item);
  return make_call(args, cross_entropy_forward, cross_entropy_forward_workspace_bytes);
}

Call backward_call(Arena& arena, const Case& item, DType dtype) {
  const DType result_dtype = accumulator_dtype(dtype);
  Arena not_counted(arena.device());  // the forward's outputs that the backward does not read
  CrossEntropyForwardArgs forward = forward_args(arena, item, dtype);
  forward.skips_ignored = false;
  forward.loss = not_counted.output(result_dtype, item.loss_shape());
  if (item.has_entropy) forward.entropy = arena.output(result_dtype, item.row_shape());
  add_what_the_backward_needs(forward, arena, item);
  cross_entropy_forward(forward);

  const CrossEntropyBackwardArgs args{
      .grad_loss = arena.normal(result_dtype, item.loss_shape(), 2),
      .grad_entropy = item.has_entropy ? arena.normal(result_dtype, item.row_shape(), 5) : TensorView{},
      .logits = forward.logits,
      .targets = forward.targets,
      .class_weight = forward.class_weight,
      .class_axis = forward.class_axis,
      .options = forward.options,
      .lse = forward.lse,
      .entropy = forward.entropy,
      .target_mass = forward.target_mass,
      .divisor = forward.divisor,
      .grad_logits = arena.output(dtype, item.shape)};
  runtime::synchronize(arena.device());
  return make_call(args, cross_entropy_backward, cross_entropy_backward_workspace_bytes);
}

// Forward and backward in place. The call leaves a gradient in place of the logits, nearly all of it the same small
// number, so the logits are restored for the next call.
Call in_place_call(Arena& arena, const Case& item, DType dtype) {
  CrossEntropyForwardBackwardArgs args{.forward = forward_args(arena, item, dtype)};
  add_outputs(args.forward, arena, item);
  const TensorView logits = args.forward.logits;
  const auto bytes = static_cast<std::size_t>(logits.element_count()) * size_of(dtype);
  const auto not_counted = std::make_shared<Arena>(arena.device());
  void* const copy_of_logits = not_counted->allocate(bytes);
  runtime::copy(copy_of_logits, logits.device, logits.data, logits.device, bytes);
  Call call = make_call(args, cross_entropy_forward_backward, cross_entropy_forward_backward_workspace_bytes);
  call.restore = [=] {
    runtime::synchronize(not_counted->device());  // the call may still be running on its stream
    runtime::copy(logits.data, logits.device, copy_of_logits, logits.device, bytes);
    runtime::synchronize(not_counted->device());  // a copy within the device may return before it is done
  };
  return call;
}

// -------------------------------------------------------------------------------------------------------- the rows

// The options by their names in the Python function and in the program, with values as JSON.
Options option_keys(const Case& item, const std::string& mode) {
  static constexpr const char* kReductions[] = {"\"none\"", "\"sum\"", "\"mean\""};
  Options keys = {{"reduction", kReductions[static_cast<int>(item.options.reduction)]}};
  const auto add_number = [&](const char* key, double value) {
    keys.add(value > 0.0, key, fmt::format("{:g}", value));
  };
  add_number("label_smoothing", item.options.label_smoothing);
  add_number("softcap", item.options.softcap);
  add_number("z_loss", item.options.z_loss_weight);
  keys.add(item.has_weight, "weight");
  keys.add(item.has_soft_targets, "soft_targets");
  keys.add(item.has_argmax, "argmax");
  keys.add(item.has_entropy, "entropy");
  keys.add(item.class_axis != -1, "class_axis", std::to_string(item.class_axis));
  keys.add(item.half_is_ignored, "ignored_rows", "0.5");
  keys.add(mode == kInPlace, "in_place");
  return keys;
}

// The bytes that any implementation has to move in this mode: each input is read once, each output is written once. The
// logits of an ignored row need not be read, because its loss and its gradient are 0, but this gradient has to be
// written.
void add_bytes(Row& row, const Case& item, DType dtype) {
  const auto where = [](bool is_moved, std::int64_t bytes) { return is_moved ? bytes : 0; };
  const bool is_backward = row.mode == kBackward;
  const std::int64_t element_bytes = bytes_of(dtype), result_bytes = bytes_of(accumulator_dtype(dtype));
  const std::int64_t logits_bytes = elements_of(item.shape) * element_bytes;
  const std::int64_t loss_bytes = elements_of(item.loss_shape()) * result_bytes;
  const std::int64_t row_bytes = item.rows() * result_bytes, index_bytes = item.rows() * bytes_of(DType::int64);
  // The forward passes lse, target_mass and divisor on to the backward; a call in place does not.
  const std::int64_t passed_on = row_bytes + where(item.needs_target_mass(), row_bytes) +
                                 where(item.options.reduction == Reduction::mean, result_bytes);
  row.read_bytes = (item.half_is_ignored ? logits_bytes / 2 : logits_bytes) +
                   (item.has_soft_targets ? logits_bytes : index_bytes) +
                   where(item.has_weight, item.classes() * element_bytes) +
                   where(is_backward, loss_bytes + passed_on + where(item.has_entropy, 2 * row_bytes));
  row.write_bytes = where(row.mode != kForward, logits_bytes) +
                    where(!is_backward, loss_bytes + where(item.options.z_loss_weight > 0.0, loss_bytes) +
                                            where(item.has_argmax, index_bytes) + where(item.has_entropy, row_bytes)) +
                    where(row.mode == kForward, passed_on);
}

Row make_row(const Case& item, DType dtype, const std::string& mode) {
  Row row{.mode = mode, .shape = item.shape_keys, .options = option_keys(item, mode)};
  add_bytes(row, item, dtype);
  row.make_call = [=](Arena& arena) {
    const auto call = mode == kForward ? forward_call : mode == kBackward ? backward_call : in_place_call;
    return call(arena, item, dtype);
  };
  return row;
}

// ------------------------------------------------------------------------------------------------------ the tables

const std::vector<std::string> kPublishedModes = {kForward, kBackward};
const std::vector<std::string> kEveryMode = {kForward, kBackward, kInPlace};

// A table for each mode, over the same cases.
void add_tables(std::vector<Table>& tables, const std::vector<std::string>& modes, DType dtype,
                std::vector<Case> cases) {
  for (const std::string& mode : modes) {
    std::vector<Case> of_mode = cases;
    if (mode == kBackward) std::erase_if(of_mode, [](const Case& item) { return item.has_argmax; });  // no gradient
    tables.push_back(make_table("cross_entropy", dtype, of_mode, make_row, dtype, mode));
  }
}

Case plain(std::int64_t batch, std::int64_t v) {
  return {.shape = {batch, v}, .shape_keys = {{"batch", batch}, {"v", v}}};
}

Case every_option(std::int64_t batch, std::int64_t v) {
  Case item = plain(batch, v);
  item.options = {.label_smoothing = 0.1, .softcap = 30.0, .z_loss_weight = 1e-4};
  item.has_weight = item.has_entropy = true;
  return item;
}

// The plain loss first, then each option alone: its cost is the difference.
std::vector<Case> options_one_by_one(std::int64_t batch) {
  const Case loss = plain(batch, 32768);
  return {loss,
          with(loss, [](Case& c) { c.options.label_smoothing = 0.1; }),
          with(loss, [](Case& c) { c.options.softcap = 30.0; }),
          with(loss, [](Case& c) { c.has_weight = true, c.options.label_smoothing = 0.1; }),  // else one weight a row
          with(loss, [](Case& c) { c.has_entropy = true; }),
          with(loss, [](Case& c) { c.has_argmax = true; }),
          with(loss, [](Case& c) { c.has_soft_targets = true; })};
}

// Layouts and reductions that the published tables lack: their rows are aligned and all count in a mean.
std::vector<Case> layouts(bool is_cpu, std::int64_t batch) {
  const Case loss = plain(batch, 32768);
  const std::int64_t d1 = batch / 4;
  return {plain(batch, 129920),  // a vocabulary that is no power of two
          plain(batch, 129919),  // without its last class: rows start on 2 bytes only
          with(loss, [](Case& c) { c.half_is_ignored = true; }),
          // The mean's divisor needs all targets, and no gradient can be written before it is known; these reductions
          // have none.
          with(loss, [](Case& c) { c.options.reduction = Reduction::sum; }),
          with(loss, [](Case& c) { c.options.reduction = Reduction::none; }),
          // Neighbours in memory belong to different rows, as the pixels of images do.
          {.shape = {4, 32768, d1}, .class_axis = 1, .shape_keys = {{"batch", 4}, {"v", 32768}, {"d1", d1}}},
          // Rows shorter than one batch of a block's loads.
          plain(std::int64_t{1} << (is_cpu ? 16 : 20), 64)};
}

std::vector<Table> tables_of(const Request& request) {
  const bool is_quick = request.sweep == Sweep::quick;
  const bool is_cpu = request.device.type == DeviceType::cpu;
  const std::int64_t batch = is_quick && is_cpu ? 256 : 4096;
  const DType dtype = request.dtype;

  std::vector<Table> tables;
  std::vector<Case> vocabularies;
  for (const std::int64_t v : doublings(1024, 131072)) vocabularies.push_back(plain(batch, v));
  add_tables(tables, is_quick ? kEveryMode : kPublishedModes, dtype, vocabularies);
  if (!is_quick) return tables;
  add_tables(tables, kEveryMode, dtype, {every_option(batch, 32768), every_option(batch, 131072)});
  add_tables(tables, kEveryMode, dtype, options_one_by_one(batch));
  add_tables(tables, kEveryMode, dtype, layouts(is_cpu, batch));
  if (!request.has_dtype) add_tables(tables, kEveryMode, DType::float32, {plain(batch, 32768)});
  return tables;
}

std::vector<Row> rows_of_shape(const Shape& shape, DType dtype) {
  std::vector<Row> rows;
  for (const std::string& mode : kEveryMode) {
    rows.push_back(make_row(plain(shape.sizes.at("rows"), shape.sizes.at("v")), dtype, mode));
  }
  return rows;
}

}  // namespace

Operator cross_entropy_benchmark() { return {"cross_entropy", tables_of, {"rows", "v"}, rows_of_shape}; }

}  // namespace eaves::bench
