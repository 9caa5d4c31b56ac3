// What `eaves bench linear_cross_entropy` measures: the seed tables (vocabulary by vocabulary), for both ways to the
// gradients and over logits of two kinds, then what they leave out: the loss alone, some of the gradients, rows that
// are ignored. Sizes, buffers and products only; the harness does the timing.
//
// `limit` is the matrix products that no implementation can do without, each whole and nothing between them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/dispatch.h"
#include "core/gemm.h"
#include "core/numeric.h"
#include "eaves/cross_entropy.h"
#include "eaves/linear_cross_entropy.h"
#include "runtime/runtime.h"
#include "testing/benchmark.h"
#include "testing/dtype_names.h"

namespace eaves::bench {
namespace {

using Algorithm = LinearCrossEntropyAlgorithm;

/// One call of a training step. What is not named is as in the seed tables.
struct Case {
  std::int64_t batch = 12288;
  std::int64_t dim = 4096;
  std::int64_t v = 32768;
  DType dtype = DType::bfloat16;
  Algorithm algorithm = Algorithm::speed;
  /// Logits of deviation 1.3, as a model has them, and so a gradient without zeros. Otherwise x and weight have
  /// deviation 1: the logits of a row then differ by hundreds, and nearly all of its gradient is 0.
  bool is_dense = false;
  bool has_grad_x = true;
  bool has_grad_weight = true;
  bool half_is_ignored = false;
  bool skips_ignored_rows = false;
  /// What it would cost and save to round the logits to the dtype of x. Not the operator: the same chunks from its
  /// parts.
  bool has_rounded_logits = false;

  bool is_loss_alone() const { return !has_grad_x && !has_grad_weight; }
  std::int64_t rows_that_count() const { return half_is_ignored ? batch / 2 : batch; }
  std::int64_t products() const { return 1 + (has_grad_x ? 1 : 0) + (has_grad_weight ? 1 : 0); }
};

// ----------------------------------------------------------------------------------------------------- the inputs

TensorView x_of(Arena& arena, const Case& item) {
  const double deviation = item.is_dense ? 1.3 / std::sqrt(static_cast<double>(item.dim)) : 1.0;
  return arena.normal(item.dtype, {item.batch, item.dim}, 1, deviation);
}

TensorView weight_of(Arena& arena, const Case& item) { return arena.normal(item.dtype, {item.v, item.dim}, 2); }

// Ignored rows come in runs, as prompts do in front of their answers.
constexpr std::int64_t kRunOfIgnoredRows = 32;

TensorView targets_of(Arena& arena, const Case& item) {
  std::mt19937_64 random(3);
  std::vector<double> targets;
  for (std::int64_t row = 0; row < item.batch; ++row) {
    const auto target = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(item.v));
    const bool is_ignored = item.half_is_ignored && row / kRunOfIgnoredRows % 2 == 0;
    targets.push_back(static_cast<double>(is_ignored ? CrossEntropyOptions{}.ignore_index : target));
  }
  return arena.filled(DType::int64, {item.batch}, targets);
}

LinearCrossEntropyInputs inputs_of(Arena& arena, const Case& item) {
  LinearCrossEntropyInputs inputs;
  inputs.x = x_of(arena, item);
  inputs.weight = weight_of(arena, item);
  inputs.targets = targets_of(arena, item);
  inputs.skips_ignored_rows = item.skips_ignored_rows;
  return inputs;
}

LinearCrossEntropyForwardArgs forward_args(Arena& arena, const Case& item) {
  LinearCrossEntropyForwardArgs args;
  args.inputs = inputs_of(arena, item);
  args.outputs.loss = arena.output(accumulator_dtype(item.dtype), {});
  return args;
}

LinearCrossEntropyGradients gradients_of(Arena& arena, const Case& item) {
  LinearCrossEntropyGradients gradients;
  if (item.has_grad_x) gradients.grad_x = arena.output(item.dtype, {item.batch, item.dim});
  if (item.has_grad_weight) gradients.grad_weight = arena.output(item.dtype, {item.v, item.dim});
  return gradients;
}

// --------------------------------------------------------------------------------------------------- the products

struct Sizes {
  std::int64_t m, n, k;
};

/// Of factors of the case's dtype; `c` has no gaps.
Gemm product(const Case& item, const Sizes& sizes, const GemmMatrix& a, const GemmMatrix& b, void* c,
             bool accumulates = false) {
  return {.m = sizes.m,
          .n = sizes.n,
          .k = sizes.k,
          .dtype = item.dtype,
          .a = a,
          .b = b,
          .c_dtype = item.dtype,
          .c = c,
          .c_stride = sizes.n,
          .accumulates = accumulates};
}

// ------------------------------------------------------------------------------------------------------ the calls

class LossCall : public Call {
 public:
  LossCall(Arena& arena, const Case& item) : args_(forward_args(arena, item)) {}
  std::size_t workspace_bytes(const ExecutionContext& context) const override {
    return linear_cross_entropy_forward_workspace_bytes(args_, context);
  }
  void run(const ExecutionContext& context) override { linear_cross_entropy_forward(args_, context); }

 private:
  LinearCrossEntropyForwardArgs args_;
};

class SpeedCall : public Call {
 public:
  SpeedCall(Arena& arena, const Case& item)
      : args_{.forward = forward_args(arena, item), .gradients = gradients_of(arena, item)} {}
  std::size_t workspace_bytes(const ExecutionContext& context) const override {
    return linear_cross_entropy_forward_backward_workspace_bytes(args_, context);
  }
  void run(const ExecutionContext& context) override { linear_cross_entropy_forward_backward(args_, context); }

 private:
  LinearCrossEntropyForwardBackwardArgs args_;
};

/// The speedy way with the logits in the dtype of x, and so half the workspace, in chunks of as many rows: a product,
/// the loss with the gradient over its logits, two products.
class RoundedLogitsCall : public Call {
 public:
  RoundedLogitsCall(Arena& arena, const Case& item)
      : item_(item),
        inputs_(inputs_of(arena, item)),
        gradients_(gradients_of(arena, item)),
        losses_(arena.output(accumulator_dtype(item.dtype), {item.batch})) {
    const DType wide = losses_.dtype;
    LinearCrossEntropyForwardBackwardArgs exact{.forward = {.inputs = inputs_}, .gradients = gradients_};
    exact.forward.outputs.loss = TensorView::contiguous(losses_.data, wide, {}, arena.device());
    const auto bytes = static_cast<std::int64_t>(linear_cross_entropy_forward_backward_workspace_bytes(exact));
    const auto most_rows = std::max<std::int64_t>(bytes / (item.v * static_cast<std::int64_t>(size_of(wide))), 1);
    const std::int64_t chunks = ceil_divide(item.batch, most_rows);
    rows_ = ceil_divide(item.batch, chunks);
    const double mean = 1.0 / static_cast<double>(item.batch);
    factor_ = arena.filled(wide, {}, {&mean, 1});
  }
  /// What a product takes is more than the loss of a chunk needs.
  std::size_t workspace_bytes(const ExecutionContext&) const override {
    return logits_bytes() + (inputs_.x.device.type == DeviceType::cpu ? 0 : kGemmWorkspaceBytes);
  }
  void run(const ExecutionContext& context) override {
    void* const logits = context.workspace.data;
    ExecutionContext rest = context;
    rest.workspace = {static_cast<char*>(logits) + logits_bytes(), context.workspace.bytes - logits_bytes()};
    const GemmMatrix weight{inputs_.weight.data, item_.dim};
    const auto multiply = [&](const Gemm& gemm) { runtime::matrix_product(inputs_.x.device, gemm, rest); };
    for (std::int64_t first = 0; first < item_.batch; first += rows_) {
      const std::int64_t rows = rows_from(first);
      const GemmMatrix x{row(inputs_.x, first), item_.dim};
      multiply(product(item_, {rows, item_.v, item_.dim}, x, {weight.data, weight.stride, true}, logits));
      cross_entropy_forward_backward(loss_of(logits, first), rest);
      multiply(product(item_, {rows, item_.dim, item_.v}, {logits, item_.v}, weight, row(gradients_.grad_x, first)));
      multiply(product(item_, {item_.v, item_.dim, rows}, {logits, item_.v, true}, x, gradients_.grad_weight.data,
                       first != 0));
    }
  }

 private:
  /// A multiple of 256, which workspaces are aligned to.
  std::size_t logits_bytes() const {
    return static_cast<std::size_t>(
               ceil_divide(rows_ * item_.v * static_cast<std::int64_t>(size_of(item_.dtype)), 256)) *
           256;
  }
  std::int64_t rows_from(std::int64_t first) const { return std::min(rows_, item_.batch - first); }
  static void* row(const TensorView& tensor, std::int64_t i) {
    const auto row_elements = tensor.shape.size() == 1 ? 1 : tensor.shape[1];
    return static_cast<char*>(tensor.data) + i * row_elements * static_cast<std::int64_t>(size_of(tensor.dtype));
  }
  CrossEntropyForwardBackwardArgs loss_of(void* logits, std::int64_t first) const {
    const std::int64_t rows = rows_from(first);
    const Device device = inputs_.x.device;
    CrossEntropyForwardBackwardArgs args;
    args.forward.logits = TensorView::contiguous(logits, item_.dtype, {rows, item_.v}, device);
    args.forward.targets = TensorView::contiguous(row(inputs_.targets, first), DType::int64, {rows}, device);
    args.forward.options.reduction = Reduction::none;
    args.forward.loss = TensorView::contiguous(row(losses_, first), losses_.dtype, {rows}, device);
    args.grad_loss = TensorView::strided(factor_.data, factor_.dtype, {rows}, {0}, device);
    return args;
  }

  Case item_;
  LinearCrossEntropyInputs inputs_;
  LinearCrossEntropyGradients gradients_;
  TensorView losses_, factor_;
  std::int64_t rows_ = 0;
};

// How much a call computes at once follows from the size of its workspace: each of the two gets its own, at the start
// of the same memory.
class MemoryCall : public Call {
 public:
  MemoryCall(Arena& arena, const Case& item) : forward_(forward_args(arena, item)) {
    const DType result_dtype = accumulator_dtype(item.dtype);
    forward_.outputs.lse = arena.output(result_dtype, {item.batch});
    forward_.outputs.divisor = arena.output(result_dtype, {});
    const double one = 1.0;
    backward_.grad_loss = arena.filled(result_dtype, {}, {&one, 1});
    backward_.inputs = forward_.inputs;
    backward_.lse = forward_.outputs.lse;
    backward_.divisor = forward_.outputs.divisor;
    backward_.gradients = gradients_of(arena, item);
    forward_bytes_ = linear_cross_entropy_forward_workspace_bytes(forward_);
    backward_bytes_ = linear_cross_entropy_backward_workspace_bytes(backward_);
  }
  std::size_t workspace_bytes(const ExecutionContext&) const override {
    return std::max(forward_bytes_, backward_bytes_);
  }
  void run(const ExecutionContext& context) override {
    ExecutionContext own = context;
    own.workspace.bytes = forward_bytes_;
    linear_cross_entropy_forward(forward_, own);
    own.workspace.bytes = backward_bytes_;
    linear_cross_entropy_backward(backward_, own);
  }

 private:
  LinearCrossEntropyForwardArgs forward_;
  LinearCrossEntropyBackwardArgs backward_;
  std::size_t forward_bytes_ = 0;
  std::size_t backward_bytes_ = 0;
};

// ------------------------------------------------------------------------------------------------------- the limit

/// The same rows without those that are ignored.
Case rows_that_count(Case item) {
  item.batch = item.rows_that_count();
  item.half_is_ignored = false;
  return item;
}

// The logits of all rows, then both products with their gradient, of the dtype of x. That is the real gradient, in
// memory of its own so that it stays: what a GPU draws, and so its clock, depends on how much of a factor is 0.
class MatrixProducts : public Call {
 public:
  MatrixProducts(Arena& arena, const Case& item) : device_(arena.device()) {
    const GemmMatrix x{x_of(arena, item).data, item.dim};
    const GemmMatrix weight{weight_of(arena, item).data, item.dim};
    const GemmMatrix weight_transposed{weight.data, weight.stride, true};
    const Dims logits_shape{item.batch, item.v};
    products_.push_back(product(item, {item.batch, item.v, item.dim}, x, weight_transposed,
                                arena.output(item.dtype, logits_shape).data));
    if (item.is_loss_alone()) return;

    const TensorView gradient = arena.output(item.dtype, logits_shape);
    compute_gradient(gradient, item);
    const GemmMatrix factor{gradient.data, item.v};
    const GemmMatrix factor_transposed{gradient.data, item.v, true};
    if (item.has_grad_x) {
      products_.push_back(product(item, {item.batch, item.dim, item.v}, factor, weight,
                                  arena.output(item.dtype, {item.batch, item.dim}).data));
    }
    if (item.has_grad_weight) {
      products_.push_back(product(item, {item.v, item.dim, item.batch}, factor_transposed, x,
                                  arena.output(item.dtype, {item.v, item.dim}).data));
    }
  }
  std::size_t workspace_bytes(const ExecutionContext&) const override { return 0; }
  void run(const ExecutionContext& context) override {
    for (const Gemm& product : products_) runtime::matrix_product(device_, product, context);
  }

 private:
  /// Probabilities minus the targets.
  void compute_gradient(const TensorView& gradient, const Case& item) const {
    Gemm logits = products_.front();
    logits.c = gradient.data;
    runtime::matrix_product(device_, logits, {});
    Arena not_counted(device_);
    CrossEntropyForwardBackwardArgs args;
    args.forward.logits = gradient;
    args.forward.targets = targets_of(not_counted, item);
    args.forward.options.reduction = Reduction::sum;
    args.forward.loss = not_counted.output(accumulator_dtype(item.dtype), {});
    cross_entropy_forward_backward(args);
    runtime::synchronize(device_);
  }

  Device device_;
  std::vector<Gemm> products_;
};

// -------------------------------------------------------------------------------------------------------- the rows

// The options under the names of the Python function's and the program's arguments, the values as JSON; `data` where
// there are two data sets.
std::vector<std::pair<std::string, std::string>> option_keys(const Case& item) {
  std::vector<std::pair<std::string, std::string>> keys = {{"reduction", "\"mean\""}};
  if (!item.is_loss_alone()) {
    keys.emplace_back("algorithm", item.algorithm == Algorithm::speed ? "\"speed\"" : "\"memory\"");
    if (!item.has_grad_x) keys.emplace_back("grad_x", "false");
    if (!item.has_grad_weight) keys.emplace_back("grad_weight", "false");
  }
  if (item.has_rounded_logits) keys.emplace_back("logits", '"' + short_name_of(item.dtype) + '"');
  keys.emplace_back("data", item.is_dense ? "\"dense\"" : "\"seed\"");
  if (item.half_is_ignored) {
    keys.emplace_back("ignored_rows", "0.5");
    keys.emplace_back("skip_ignored", item.skips_ignored_rows ? "true" : "false");
  }
  return keys;
}

std::unique_ptr<Call> make_call(Arena& arena, const Case& item) {
  if (item.is_loss_alone()) return std::make_unique<LossCall>(arena, item);
  if (item.has_rounded_logits) return std::make_unique<RoundedLogitsCall>(arena, item);
  if (item.algorithm == Algorithm::speed) return std::make_unique<SpeedCall>(arena, item);
  return std::make_unique<MemoryCall>(arena, item);
}

Row make_row(const Case& item) {
  const auto element_bytes = static_cast<std::int64_t>(size_of(item.dtype));
  const std::int64_t rows = item.rows_that_count();
  const std::int64_t x_bytes = rows * item.dim * element_bytes;
  const std::int64_t weight_bytes = item.v * item.dim * element_bytes;
  const std::int64_t logits_bytes = rows * item.v * element_bytes;
  const std::int64_t gradient_bytes =
      (item.has_grad_x ? item.batch * item.dim * element_bytes : 0) + (item.has_grad_weight ? weight_bytes : 0);
  Row row;
  row.axis_value = item.v;
  row.shape = {{"batch", item.batch}, {"dim", item.dim}, {"v", item.v}};
  row.options = option_keys(item);
  row.read_bytes = x_bytes + weight_bytes + item.batch * static_cast<std::int64_t>(size_of(DType::int64));
  row.write_bytes = gradient_bytes + static_cast<std::int64_t>(size_of(accumulator_dtype(item.dtype)));
  row.operations = item.products() * 2 * rows * item.dim * item.v;
  row.make_call = [item](Arena& arena) { return make_call(arena, item); };
  row.make_limit = [item](Arena& arena) { return std::make_unique<MatrixProducts>(arena, rows_that_count(item)); };
  row.limit_bytes = x_bytes + weight_bytes + gradient_bytes + (item.is_loss_alone() ? 1 : 2) * logits_bytes;
  return row;
}

// ------------------------------------------------------------------------------------------------------ the tables

/// What a device shows: a case like all others, vocabularies, and the one where only options differ.
struct Shown {
  Case like = {};
  std::vector<std::int64_t> vocabularies = {};
  std::vector<std::int64_t> dense_vocabularies = {};
  std::int64_t vocabulary_of_options = 32768;
};

Shown shown_on(const Request& request) {
  Shown shown{.like = {.dtype = request.dtype}};
  if (request.sweep == Sweep::seed) {
    for (std::int64_t v = 1024; v <= 131072; v *= 2) shown.vocabularies.push_back(v);
  } else if (request.device.type == DeviceType::cuda) {
    shown.vocabularies = {4096, 32768, 131072};
  } else {
    // A core does in seconds what a GPU does in milliseconds.
    shown.like.batch = 512;
    shown.like.dim = 1024;
    shown.vocabularies = {1024, 8192, 32768};
    shown.dense_vocabularies = {8192};  // its clock does not depend on the numbers
    shown.vocabulary_of_options = 8192;
  }
  if (shown.dense_vocabularies.empty()) shown.dense_vocabularies = shown.vocabularies;
  return shown;
}

void add_table(std::vector<Table>& tables, const std::string& title, const std::vector<Case>& cases) {
  const Case& first = cases.front();
  Table table{.op = "linear_cross_entropy",
              .mode = first.is_loss_alone() ? "fwd" : "fwd+bwd",
              .title_op = "lce",
              .axis_name = "v",
              .dtype = first.dtype};
  table.title_suffix = "batch" + std::to_string(first.batch) + "-dim" + std::to_string(first.dim) + "-" +
                       short_name_of(first.dtype) + title;
  for (const Case& item : cases) table.rows.push_back(make_row(item));
  tables.push_back(std::move(table));
}

std::vector<Case> of_each_vocabulary(const Shown& shown, const Case& like) {
  std::vector<Case> cases;
  for (const std::int64_t v : like.is_dense ? shown.dense_vocabularies : shown.vocabularies) {
    cases.push_back(like);
    cases.back().v = v;
  }
  return cases;
}

// The seed's data and the speedy way come first: they have the published title.
void add_seed_tables(std::vector<Table>& tables, const Shown& shown) {
  for (const bool is_dense : {false, true}) {
    for (const Algorithm algorithm : {Algorithm::speed, Algorithm::memory}) {
      Case like = shown.like;
      like.is_dense = is_dense;
      like.algorithm = algorithm;
      const std::string title = algorithm == Algorithm::memory ? "-algorithm_memory" : "";
      add_table(tables, title + (is_dense ? "-data_dense" : ""), of_each_vocabulary(shown, like));
    }
  }
}

// Logits that are not exact, beside the same rows of the tables above.
std::vector<Case> with_rounded_logits(const Shown& shown) {
  std::vector<Case> cases;
  for (const bool is_dense : {false, true}) {
    Case like = shown.like;
    like.is_dense = is_dense;
    like.has_rounded_logits = true;
    for (const Case& item : of_each_vocabulary(shown, like)) cases.push_back(item);
  }
  return cases;
}

// What each saves, or does not.
std::vector<Case> options_one_by_one(const Shown& shown, bool is_cpu) {
  Case like = shown.like;
  like.v = shown.vocabulary_of_options;
  Case frozen_head = like, frozen_body = like, half_is_ignored = like;
  frozen_head.has_grad_weight = false;
  frozen_body.has_grad_x = false;
  half_is_ignored.half_is_ignored = true;
  Case half_is_skipped = half_is_ignored;
  half_is_skipped.skips_ignored_rows = true;
  std::vector<Case> cases = {frozen_head, frozen_body, half_is_skipped};
  if (!is_cpu) cases.push_back(half_is_ignored);  // a CPU always skips
  return cases;
}

std::vector<Table> linear_cross_entropy_tables(const Request& request) {
  const Shown shown = shown_on(request);
  std::vector<Table> tables;
  add_seed_tables(tables, shown);
  if (request.sweep == Sweep::seed) return tables;
  Case loss_alone = shown.like;
  loss_alone.has_grad_x = loss_alone.has_grad_weight = false;
  add_table(tables, "", of_each_vocabulary(shown, loss_alone));
  if (size_of(shown.like.dtype) == 2) {
    add_table(tables, "-logits_" + short_name_of(shown.like.dtype), with_rounded_logits(shown));
  }
  add_table(tables, "-options", options_one_by_one(shown, request.device.type == DeviceType::cpu));
  if (!request.has_dtype) {
    Case speed = shown.like;
    speed.dtype = DType::float32;
    speed.v = shown.vocabulary_of_options;
    Case memory = speed;
    memory.algorithm = Algorithm::memory;
    add_table(tables, "", {speed, memory});
  }
  return tables;
}

}  // namespace

Operator linear_cross_entropy_benchmark() { return {"linear_cross_entropy", linear_cross_entropy_tables}; }

}  // namespace eaves::bench
