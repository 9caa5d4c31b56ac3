// What `eaves bench cross_entropy` measures: the seed tables (vocabulary by vocabulary), then what they leave out:
// every option at once, the options one by one, and the layouts. Axes, buffers and bytes only; the harness does the
// timing.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
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
#include "testing/dtype_names.h"

namespace eaves::bench {
namespace {

enum class Mode { forward, backward, in_place };

/// One call of a training step. What is not named is as in the seed tables: a mean over targets that all count.
struct Case {
  Dims shape = {};
  int class_axis = -1;
  std::vector<std::pair<std::string, std::int64_t>> shape_keys = {};
  CrossEntropyOptions options = {};
  bool has_weight = false;
  bool has_soft_targets = false;
  bool half_is_ignored = false;
  /// Outputs. The entropy has a gradient too: a policy's entropy is a part of its loss.
  bool has_argmax = false;
  bool has_entropy = false;

  std::int64_t classes() const { return shape[class_axis < 0 ? shape.size() + class_axis : class_axis]; }

  Dims row_shape() const {
    AxisSet axes;
    axes.contains[class_axis < 0 ? shape.size() + class_axis : class_axis] = true;
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

// Ignored rows come in runs, as prompts do in front of their answers.
constexpr std::int64_t kRunOfIgnoredRows = 32;

TensorView class_targets(Arena& arena, const Case& item) {
  std::mt19937_64 random(3);
  std::vector<double> targets;
  for (std::int64_t row = 0; row < item.rows(); ++row) {
    const auto target = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(item.classes()));
    const bool is_ignored = item.half_is_ignored && row / kRunOfIgnoredRows % 2 == 0;
    targets.push_back(static_cast<double>(is_ignored ? item.options.ignore_index : target));
  }
  return arena.filled(DType::int64, item.row_shape(), targets);
}

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

// A training step's forward: the loss, and what the backward needs.
CrossEntropyForwardArgs forward_args(Arena& arena, const Case& item, DType dtype) {
  const DType result_dtype = accumulator_dtype(dtype);
  const Dims row_shape = item.row_shape();
  CrossEntropyForwardArgs args;
  args.logits = arena.normal(dtype, item.shape, 1);
  args.targets = item.has_soft_targets ? soft_targets(arena, item, dtype) : class_targets(arena, item);
  if (item.has_weight) args.weight = class_weights(arena, item, dtype);
  args.class_axis = item.class_axis;
  args.options = item.options;
  args.reads_ignored_rows = false;
  args.loss = arena.output(result_dtype, item.loss_shape());
  if (item.options.z_loss_weight > 0.0) args.z_loss = arena.output(result_dtype, item.loss_shape());
  if (item.has_argmax) args.argmax = arena.output(DType::int64, row_shape);
  if (item.has_entropy) args.entropy = arena.output(result_dtype, row_shape);
  return args;
}

void add_what_the_backward_needs(CrossEntropyForwardArgs& args, Arena& arena, const Case& item, DType dtype) {
  const DType result_dtype = accumulator_dtype(dtype);
  args.lse = arena.output(result_dtype, item.row_shape());
  if (item.needs_target_mass()) args.target_mass = arena.output(result_dtype, item.row_shape());
  if (item.options.reduction == Reduction::mean) args.divisor = arena.output(result_dtype, {});
}

class ForwardCall : public Call {
 public:
  ForwardCall(Arena& arena, const Case& item, DType dtype) : args_(forward_args(arena, item, dtype)) {
    add_what_the_backward_needs(args_, arena, item, dtype);
  }
  std::size_t workspace_bytes(const ExecutionContext& context) const override {
    return cross_entropy_forward_workspace_bytes(args_, context);
  }
  void run(const ExecutionContext& context) override { cross_entropy_forward(args_, context); }

 private:
  CrossEntropyForwardArgs args_;
};

class BackwardCall : public Call {
 public:
  BackwardCall(Arena& arena, const Case& item, DType dtype) {
    const DType result_dtype = accumulator_dtype(dtype);
    Arena not_counted(arena.device());  // what the forward writes and the backward does not take
    CrossEntropyForwardArgs forward;
    forward.logits = arena.normal(dtype, item.shape, 1);
    forward.targets = item.has_soft_targets ? soft_targets(arena, item, dtype) : class_targets(arena, item);
    if (item.has_weight) forward.weight = class_weights(arena, item, dtype);
    forward.class_axis = item.class_axis;
    forward.options = item.options;
    forward.loss = not_counted.output(result_dtype, item.loss_shape());
    if (item.has_entropy) forward.entropy = arena.output(result_dtype, item.row_shape());
    add_what_the_backward_needs(forward, arena, item, dtype);
    cross_entropy_forward(forward);

    args_.grad_loss = arena.normal(result_dtype, item.loss_shape(), 2);
    if (item.has_entropy) args_.grad_entropy = arena.normal(result_dtype, item.row_shape(), 5);
    args_.logits = forward.logits;
    args_.targets = forward.targets;
    args_.weight = forward.weight;
    args_.class_axis = forward.class_axis;
    args_.options = forward.options;
    args_.lse = forward.lse;
    args_.entropy = forward.entropy;
    args_.target_mass = forward.target_mass;
    args_.divisor = forward.divisor;
    args_.grad_logits = arena.output(dtype, item.shape);
    runtime::synchronize(arena.device());
  }
  std::size_t workspace_bytes(const ExecutionContext& context) const override {
    return cross_entropy_backward_workspace_bytes(args_, context);
  }
  void run(const ExecutionContext& context) override { cross_entropy_backward(args_, context); }

 private:
  CrossEntropyBackwardArgs args_;
};

// Both at once. Afterwards the logits are a gradient, nearly all of it the same small number: the next call gets logits
// again.
class InPlaceCall : public Call {
 public:
  InPlaceCall(Arena& arena, const Case& item, DType dtype)
      : device_(arena.device()), not_counted_(device_), args_{.forward = forward_args(arena, item, dtype)} {
    const TensorView& logits = args_.forward.logits;
    logits_bytes_ = static_cast<std::size_t>(logits.element_count()) * size_of(dtype);
    copy_of_logits_ = not_counted_.allocate(logits_bytes_);
    runtime::copy(copy_of_logits_, device_, logits.data, device_, logits_bytes_);
  }
  std::size_t workspace_bytes(const ExecutionContext& context) const override {
    return cross_entropy_forward_backward_workspace_bytes(args_, context);
  }
  void run(const ExecutionContext& context) override { cross_entropy_forward_backward(args_, context); }
  void restore() override {
    runtime::synchronize(device_);  // the call may still be running on its stream
    runtime::copy(args_.forward.logits.data, device_, copy_of_logits_, device_, logits_bytes_);
    runtime::synchronize(device_);  // a copy within the device may return before it is done
  }

 private:
  Device device_;
  Arena not_counted_;
  CrossEntropyForwardBackwardArgs args_;
  void* copy_of_logits_ = nullptr;
  std::size_t logits_bytes_ = 0;
};

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
Bytes bytes_of(const Case& item, DType dtype, Mode mode) {
  const std::int64_t rows = item.rows();
  const auto element_bytes = static_cast<std::int64_t>(size_of(dtype));
  const auto result_bytes = static_cast<std::int64_t>(size_of(accumulator_dtype(dtype)));
  const std::int64_t logits_bytes = rows * item.classes() * element_bytes;
  const std::int64_t loss_bytes = (item.options.reduction == Reduction::none ? rows : 1) * result_bytes;
  const std::int64_t row_bytes = rows * result_bytes;
  const std::int64_t divisor_bytes = item.options.reduction == Reduction::mean ? result_bytes : 0;

  Bytes bytes;
  bytes.read = item.half_is_ignored ? logits_bytes / 2 : logits_bytes;
  bytes.read += item.has_soft_targets ? logits_bytes : rows * static_cast<std::int64_t>(size_of(DType::int64));
  if (item.has_weight) bytes.read += item.classes() * element_bytes;
  // lse, target_mass, divisor: from the forward to the backward; both at once need not pass them on.
  const std::int64_t passed_on = row_bytes + (item.needs_target_mass() ? row_bytes : 0) + divisor_bytes;
  if (mode == Mode::backward) {
    bytes.read += loss_bytes + passed_on;               // grad_loss
    if (item.has_entropy) bytes.read += 2 * row_bytes;  // entropy, grad_entropy
  } else {
    bytes.written += loss_bytes;
    if (item.options.z_loss_weight > 0.0) bytes.written += loss_bytes;
    if (item.has_argmax) bytes.written += rows * static_cast<std::int64_t>(size_of(DType::int64));
    if (item.has_entropy) bytes.written += row_bytes;
    if (mode == Mode::forward) bytes.written += passed_on;
  }
  if (mode != Mode::forward) bytes.written += logits_bytes;  // grad_logits
  return bytes;
}

Row make_row(const Case& item, DType dtype, Mode mode) {
  const Bytes bytes = bytes_of(item, dtype, mode);
  Row row;
  row.axis_value = item.classes();
  row.shape = item.shape_keys;
  row.options = option_keys(item, mode);
  row.read_bytes = bytes.read;
  row.write_bytes = bytes.written;
  row.make_call = [item, dtype, mode](Arena& arena) -> std::unique_ptr<Call> {
    if (mode == Mode::forward) return std::make_unique<ForwardCall>(arena, item, dtype);
    if (mode == Mode::backward) return std::make_unique<BackwardCall>(arena, item, dtype);
    return std::make_unique<InPlaceCall>(arena, item, dtype);
  };
  return row;
}

// ------------------------------------------------------------------------------------------------------ the tables

// Published are these two alone.
constexpr std::initializer_list<Mode> kSeedModes = {Mode::forward, Mode::backward};
constexpr std::initializer_list<Mode> kEveryMode = {Mode::forward, Mode::backward, Mode::in_place};

// The speed and memory tables of each mode over the same cases.
void add_tables(std::vector<Table>& tables, std::initializer_list<Mode> modes, const std::string& title, DType dtype,
                const std::vector<Case>& cases) {
  for (const Mode mode : modes) {
    Table table;
    table.op = "cross_entropy";
    table.mode = mode == Mode::forward ? "fwd" : mode == Mode::backward ? "bwd" : "fwd+bwd";
    table.title_suffix = title + (mode == Mode::in_place ? "-in-place" : "");
    table.axis_name = "v";
    table.dtype = dtype;
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

// Ways through memory that the seed tables, with their aligned rows that all count in a mean, do not show.
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

std::vector<Table> cross_entropy_tables(const Request& request) {
  const bool is_quick = request.sweep == Sweep::quick;
  const bool is_cpu = request.device.type == DeviceType::cpu;
  const std::int64_t batch = is_quick && is_cpu ? 256 : 4096;
  const auto title = [&](DType dtype, const std::string& rest) {
    return "batch" + std::to_string(batch) + "-" + short_name_of(dtype) + "-" + rest;
  };

  std::vector<Table> tables;
  std::vector<Case> vocabularies;
  for (std::int64_t v = 1024; v <= 131072; v *= 2) vocabularies.push_back(plain(batch, v));
  add_tables(tables, is_quick ? kEveryMode : kSeedModes, title(request.dtype, "ls0.0-mean"), request.dtype,
             vocabularies);
  if (is_quick) {
    add_tables(tables, kEveryMode, title(request.dtype, "every-option"), request.dtype,
               {every_option(batch, 32768), every_option(batch, 131072)});
    add_tables(tables, kEveryMode, title(request.dtype, "options"), request.dtype, options_one_by_one(batch));
    add_tables(tables, kEveryMode, "layouts-" + short_name_of(request.dtype), request.dtype, layouts(is_cpu, batch));
    if (!request.has_dtype) {
      add_tables(tables, kEveryMode, title(DType::float32, "ls0.0-mean"), DType::float32, {plain(batch, 32768)});
    }
  }
  return tables;
}

}  // namespace

Operator cross_entropy_benchmark() { return {"cross_entropy", cross_entropy_tables}; }

}  // namespace eaves::bench
