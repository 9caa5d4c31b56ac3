// What `eaves bench cross_entropy` measures: the published tables (vocabulary by vocabulary), then what they leave out:
// every option at once, the options one by one, and the layouts. Axes, buffers and bytes only; the harness does the
// timing.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/dispatch.h"
#include "core/rows.h"
#include "eaves/cross_entropy.h"
#include "runtime/runtime.h"
#include "testing/benchmark.h"

namespace eaves::bench {
namespace {

enum class Mode { forward, backward, in_place };

/// One call of a training step. What is not named is as in the published tables: a mean over targets that all count.
struct Case {
  Dims shape = {};
  int class_axis = -1;
  Sizes shape_keys = {};
  CrossEntropyOptions options = {};
  bool has_weight = false;
  bool has_soft_targets = false;
  bool half_is_ignored = false;
  /// Outputs. The entropy has a gradient too: a policy's entropy is a part of its loss.
  bool has_argmax = false;
  bool has_entropy = false;

  int axis() const { return class_axis < 0 ? shape.size() + class_axis : class_axis; }
  std::int64_t classes() const { return shape[axis()]; }

  Dims row_shape() const {
    AxisSet axes;
    axes.contains[axis()] = true;
    return reduced_shape(shape, axes, false);
  }

  std::int64_t rows() const {
    std::int64_t count = 1;
    for (const std::int64_t size : row_shape()) count *= size;
    return count;
  }

  Dims loss_shape() const { return options.reduction == Reduction::none ? row_shape() : Dims{}; }

  bool needs_target_mass() const { return has_soft_targets || (has_weight && options.label_smoothing > 0.0); }
};

// ----------------------------------------------------------------------------------------------------- the inputs

// Distributions along the last axis. A few that differ are enough: a kernel does not know that they come again.
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

// Between 0.5 and 1.5: as class weights are, and far from 0, which a mean would divide by.
TensorView class_weights(Arena& arena, const Case& item, DType dtype) {
  std::mt19937_64 random(4);
  std::uniform_real_distribution<double> uniform(0.5, 1.5);
  std::vector<double> weights(static_cast<std::size_t>(item.classes()));
  for (double& weight : weights) weight = uniform(random);
  return arena.filled(dtype, {item.classes()}, weights);
}

// ------------------------------------------------------------------------------------------------------ the calls

// The inputs of a training step's forward, and the loss.
CrossEntropyForwardArgs forward_args(Arena& arena, const Case& item, DType dtype) {
  CrossEntropyForwardArgs args;
  args.logits = arena.normal(dtype, item.shape, 1);
  args.targets = item.has_soft_targets ? soft_targets(arena, item, dtype)
                                       : class_targets(arena, item.row_shape(), item.classes(), item.half_is_ignored);
  if (item.has_weight) args.class_weight = class_weights(arena, item, dtype);
  args.class_axis = item.class_axis;
  args.options = item.options;
  args.skips_ignored = true;
  return args;
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
  Arena not_counted(arena.device());  // what the forward writes and the backward does not take
  CrossEntropyForwardArgs forward = forward_args(arena, item, dtype);
  forward.skips_ignored = false;
  forward.loss = not_counted.output(result_dtype, item.loss_shape());
  if (item.has_entropy) forward.entropy = arena.output(result_dtype, item.row_shape());
  add_what_the_backward_needs(forward, arena, item);
  cross_entropy_forward(forward);

  CrossEntropyBackwardArgs args;
  args.grad_loss = arena.normal(result_dtype, item.loss_shape(), 2);
  if (item.has_entropy) args.grad_entropy = arena.normal(result_dtype, item.row_shape(), 5);
  args.logits = forward.logits;
  args.targets = forward.targets;
  args.class_weight = forward.class_weight;
  args.class_axis = forward.class_axis;
  args.options = forward.options;
  args.lse = forward.lse;
  args.entropy = forward.entropy;
  args.target_mass = forward.target_mass;
  args.divisor = forward.divisor;
  args.grad_logits = arena.output(dtype, item.shape);
  runtime::synchronize(arena.device());
  return make_call(args, cross_entropy_backward, cross_entropy_backward_workspace_bytes);
}

// Both at once. Afterwards the logits are a gradient, nearly all of it the same small number: the next call gets logits
// again.
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

// The options under the names of the Python function's and the program's arguments, the values as JSON.
std::vector<std::pair<std::string, std::string>> option_keys(const Case& item, Mode mode) {
  static constexpr const char* kReductions[] = {"\"none\"", "\"sum\"", "\"mean\""};
  std::vector<std::pair<std::string, std::string>> keys;
  const auto add_number = [&](const char* key, double value) {
    std::string text = std::to_string(value);
    text.erase(text.find_last_not_of('0') + 1);  // "0.100000"
    if (text.back() == '.') text.pop_back();
    if (value > 0.0) keys.emplace_back(key, text);
  };
  const auto add_flag = [&](const char* key, bool is_set) {
    if (is_set) keys.emplace_back(key, "true");
  };
  keys.emplace_back("reduction", kReductions[static_cast<int>(item.options.reduction)]);
  add_number("label_smoothing", item.options.label_smoothing);
  add_number("softcap", item.options.softcap);
  add_number("z_loss", item.options.z_loss_weight);
  add_flag("weight", item.has_weight);
  add_flag("soft_targets", item.has_soft_targets);
  add_flag("argmax", item.has_argmax);
  add_flag("entropy", item.has_entropy);
  if (item.class_axis != -1) keys.emplace_back("class_axis", std::to_string(item.class_axis));
  if (item.half_is_ignored) keys.emplace_back("ignored_rows", "0.5");
  add_flag("in_place", mode == Mode::in_place);
  return keys;
}

struct Bytes {
  std::int64_t read = 0;
  std::int64_t written = 0;
};

// What any implementation has to move in this mode: each input read once, each output written once. Of a row that is
// ignored no logits have to be read, since its loss and its gradient are 0 whatever they are, but that gradient has to
// be written.
Bytes moved_bytes(const Case& item, DType dtype, Mode mode) {
  const std::int64_t rows = item.rows();
  const std::int64_t element_bytes = bytes_of(dtype);
  const std::int64_t result_bytes = bytes_of(accumulator_dtype(dtype));
  const std::int64_t logits_bytes = rows * item.classes() * element_bytes;
  const std::int64_t loss_bytes = (item.options.reduction == Reduction::none ? rows : 1) * result_bytes;
  const std::int64_t row_bytes = rows * result_bytes;
  const std::int64_t divisor_bytes = item.options.reduction == Reduction::mean ? result_bytes : 0;

  Bytes bytes;
  bytes.read = item.half_is_ignored ? logits_bytes / 2 : logits_bytes;
  bytes.read += item.has_soft_targets ? logits_bytes : rows * bytes_of(DType::int64);
  if (item.has_weight) bytes.read += item.classes() * element_bytes;
  // lse, target_mass, divisor: from the forward to the backward; both at once need not pass them on.
  const std::int64_t passed_on = row_bytes + (item.needs_target_mass() ? row_bytes : 0) + divisor_bytes;
  if (mode == Mode::backward) {
    bytes.read += loss_bytes + passed_on;               // grad_loss
    if (item.has_entropy) bytes.read += 2 * row_bytes;  // entropy, grad_entropy
  } else {
    bytes.written += loss_bytes;
    if (item.options.z_loss_weight > 0.0) bytes.written += loss_bytes;
    if (item.has_argmax) bytes.written += rows * bytes_of(DType::int64);
    if (item.has_entropy) bytes.written += row_bytes;
    if (mode == Mode::forward) bytes.written += passed_on;
  }
  if (mode != Mode::forward) bytes.written += logits_bytes;  // grad_logits
  return bytes;
}

Row make_row(const Case& item, DType dtype, Mode mode) {
  static constexpr const char* kModes[] = {"fwd", "bwd", "fwd+bwd"};
  const Bytes bytes = moved_bytes(item, dtype, mode);
  Row row{.mode = kModes[static_cast<int>(mode)], .shape = item.shape_keys, .options = option_keys(item, mode)};
  row.read_bytes = bytes.read;
  row.write_bytes = bytes.written;
  row.make_call = [=](Arena& arena) {
    if (mode == Mode::forward) return forward_call(arena, item, dtype);
    return mode == Mode::backward ? backward_call(arena, item, dtype) : in_place_call(arena, item, dtype);
  };
  return row;
}

// ------------------------------------------------------------------------------------------------------ the tables

const std::vector<Mode> kSeedModes = {Mode::forward, Mode::backward};  // published are these two alone
const std::vector<Mode> kEveryMode = {Mode::forward, Mode::backward, Mode::in_place};

// The tables of each mode over the same cases.
void add_tables(std::vector<Table>& tables, const std::vector<Mode>& modes, DType dtype,
                const std::vector<Case>& cases) {
  for (const Mode mode : modes) {
    Table table{.op = "cross_entropy", .dtype = dtype};
    for (const Case& item : cases) {
      if (item.has_argmax && mode == Mode::backward) continue;  // it has no gradient
      table.rows.push_back(make_row(item, dtype, mode));
    }
    tables.push_back(std::move(table));
  }
}

Case plain(std::int64_t batch, std::int64_t v) {
  return {.shape = {batch, v}, .shape_keys = {{"batch", batch}, {"v", v}}};
}

Case every_option(std::int64_t batch, std::int64_t v) {
  Case item = plain(batch, v);
  item.options = {.label_smoothing = 0.1, .softcap = 30.0, .z_loss_weight = 1e-4};
  item.has_weight = true;
  item.has_entropy = true;
  return item;
}

// What each of them costs beside the plain loss, which comes first.
std::vector<Case> options_one_by_one(std::int64_t batch) {
  const Case plain_loss = plain(batch, 32768);
  Case smoothing = plain_loss, softcap = plain_loss, weight = plain_loss, entropy = plain_loss, argmax = plain_loss;
  Case soft_targets = plain_loss;
  smoothing.options.label_smoothing = 0.1;
  softcap.options.softcap = 30.0;
  weight.options.label_smoothing = 0.1;  // alone, only the target's weight counts
  weight.has_weight = true;
  entropy.has_entropy = true;
  argmax.has_argmax = true;
  soft_targets.has_soft_targets = true;
  return {plain_loss, smoothing, softcap, weight, entropy, argmax, soft_targets};
}

// Ways through memory that the published tables, with their aligned rows that all count in a mean, do not show.
std::vector<Case> layouts(bool is_cpu, std::int64_t batch) {
  // A vocabulary that is no power of two, and the same without its last class: then rows start anywhere, on 2 bytes.
  const Case aligned = plain(batch, 129920);
  const Case unaligned = plain(batch, 129919);
  Case half_is_ignored = plain(batch, 32768);
  half_is_ignored.half_is_ignored = true;
  // The mean's divisor is known only when all targets are, before which no gradient can be written; these have none.
  Case sum = plain(batch, 32768), per_row = plain(batch, 32768);
  sum.options.reduction = Reduction::sum;
  per_row.options.reduction = Reduction::none;
  // Neighbours in memory belong to different rows, as in images.
  const std::int64_t d1 = batch / 4;
  Case class_first = {.shape = {4, 32768, d1}, .class_axis = 1, .shape_keys = {{"batch", 4}, {"v", 32768}, {"d1", d1}}};
  // Rows shorter than what one block reads at a time.
  const Case short_rows = plain(is_cpu ? std::int64_t{1} << 16 : std::int64_t{1} << 20, 64);
  return {aligned, unaligned, half_is_ignored, sum, per_row, class_first, short_rows};
}

std::vector<Table> tables_of(const Request& request) {
  const bool is_quick = request.sweep == Sweep::quick;
  const bool is_cpu = request.device.type == DeviceType::cpu;
  const std::int64_t batch = is_quick && is_cpu ? 256 : 4096;
  const DType dtype = request.dtype;

  std::vector<Table> tables;
  std::vector<Case> vocabularies;
  for (const std::int64_t v : doublings(1024, 131072)) vocabularies.push_back(plain(batch, v));
  add_tables(tables, is_quick ? kEveryMode : kSeedModes, dtype, vocabularies);
  if (!is_quick) return tables;
  add_tables(tables, kEveryMode, dtype, {every_option(batch, 32768), every_option(batch, 131072)});
  add_tables(tables, kEveryMode, dtype, options_one_by_one(batch));
  add_tables(tables, kEveryMode, dtype, layouts(is_cpu, batch));
  if (!request.has_dtype) add_tables(tables, kEveryMode, DType::float32, {plain(batch, 32768)});
  return tables;
}

std::vector<Row> rows_of_shape(const Shape& shape, DType dtype) {
  std::vector<Row> rows;
  for (const Mode mode : kEveryMode) {
    rows.push_back(make_row(plain(shape.sizes.at("rows"), shape.sizes.at("v")), dtype, mode));
  }
  return rows;
}

}  // namespace

Operator cross_entropy_benchmark() { return {"cross_entropy", tables_of, {"rows", "v"}, rows_of_shape}; }

}  // namespace eaves::bench
