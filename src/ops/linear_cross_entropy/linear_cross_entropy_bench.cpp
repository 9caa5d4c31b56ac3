// The measurements of `eaves bench linear_cross_entropy`: the published tables (vocabulary by vocabulary), for each
// algorithm and for two kinds of logits; then cases beyond these tables: the loss alone, a part of the gradients,
// ignored rows. This file has sizes, buffers and products only; the harness does the timing.
//
// `limit` runs the matrix products that every implementation needs, each whole, with nothing between them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/dispatch.h"
#include "core/gemm.h"
#include "core/numeric.h"
#include "eaves/cross_entropy.h"
#include "eaves/linear_cross_entropy.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_plan.h"
#include "runtime/runtime.h"
#include "testing/benchmark.h"
#include "testing/dtype_names.h"

namespace eaves::bench {
namespace {

/// In the spelling of the Python function.
const std::string kSpeed = "\"speed\"", kMemory = "\"memory\"", kRecompute = "\"recompute\"";

/// One call of a training step. Everything else is as in the published tables.
struct Case {
  std::int64_t batch = 12288;
  std::int64_t dim = 4096;
  std::int64_t v = 32768;
  DType dtype = DType::bfloat16;
  std::string algorithm = kSpeed;
  /// Logits of deviation 1.3, as in a model, and so a gradient without zeros. Otherwise hidden and head have deviation
  /// 1: the logits of a row then differ by hundreds, and nearly all of its gradient is 0.
  bool is_dense = false;
  bool has_grad_hidden = true;
  bool has_grad_head = true;
  bool half_is_ignored = false;
  bool skips_ignored = false;
  /// Measures the cost and the gain of logits rounded to the dtype of hidden. The operator does not do this; the case
  /// builds the same chunks from its parts.
  bool has_rounded_logits = false;

  bool is_loss_alone() const { return !has_grad_hidden && !has_grad_head; }
  std::int64_t rows_that_count() const { return half_is_ignored ? batch / 2 : batch; }
  std::int64_t products() const { return 1 + (has_grad_hidden ? 1 : 0) + (has_grad_head ? 1 : 0); }
};

// ----------------------------------------------------------------------------------------------------- the inputs

TensorView hidden_of(Arena& arena, const Case& item) {
  const double deviation = item.is_dense ? 1.3 / std::sqrt(static_cast<double>(item.dim)) : 1.0;
  return arena.normal(item.dtype, {item.batch, item.dim}, 1, deviation);
}

TensorView head_of(Arena& arena, const Case& item) { return arena.normal(item.dtype, {item.v, item.dim}, 2); }

LinearCrossEntropyInputs inputs_of(Arena& arena, const Case& item) {
  return {.hidden = hidden_of(arena, item),
          .head = head_of(arena, item),
          .targets = class_targets(arena, {item.batch}, item.v, item.half_is_ignored),
          .skips_ignored = item.skips_ignored};
}

LinearCrossEntropyForwardArgs forward_args(Arena& arena, const Case& item) {
  return {.inputs = inputs_of(arena, item), .outputs = {.loss = arena.output(accumulator_dtype(item.dtype), {})}};
}

LinearCrossEntropyGradients gradients_of(Arena& arena, const Case& item) {
  return {.grad_hidden = item.has_grad_hidden ? arena.output(item.dtype, {item.batch, item.dim}) : TensorView{},
          .grad_head = item.has_grad_head ? arena.output(item.dtype, {item.v, item.dim}) : TensorView{}};
}

// --------------------------------------------------------------------------------------------------- the products

struct ProductSizes {
  std::int64_t m, n, k;
};

/// Both factors have the case's dtype; `c` has no gaps.
Gemm product(const Case& item, const ProductSizes& sizes, const GemmMatrix& a, const GemmMatrix& b, void* c,
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

Call loss_call(Arena& arena, const Case& item) {
  return make_call(forward_args(arena, item), linear_cross_entropy_forward,
                   linear_cross_entropy_forward_workspace_bytes);
}

Call speed_call(Arena& arena, const Case& item) {
  LinearCrossEntropyForwardBackwardArgs args{.forward = forward_args(arena, item),
                                             .gradients = gradients_of(arena, item)};
  if (item.algorithm == kMemory && arena.device().type == DeviceType::cuda) {
    args.forward.inputs.workspace_limit = linear_cross_entropy_small_workspace(item.v);
  }
  return make_call(args, linear_cross_entropy_forward_backward, linear_cross_entropy_forward_backward_workspace_bytes);
}

/// The address of row `i` of a contiguous tensor of one or two axes.
void* row_of(const TensorView& tensor, std::int64_t i) {
  const std::int64_t row_elements = tensor.shape.size() == 1 ? 1 : tensor.shape[1];
  return static_cast<char*>(tensor.data) + i * row_elements * bytes_of(tensor.dtype);
}

/// The "speed" algorithm with logits in the dtype of hidden, in chunks of as many rows: a product, the loss with the
/// gradient over its logits, two products.
Call rounded_logits_call(Arena& arena, const Case& item) {
  const LinearCrossEntropyInputs inputs = inputs_of(arena, item);
  const LinearCrossEntropyGradients gradients = gradients_of(arena, item);
  const Device device = arena.device();
  const DType wide = accumulator_dtype(item.dtype);
  const TensorView losses = arena.output(wide, {item.batch});
  const double mean = 1.0 / static_cast<double>(item.batch);
  const TensorView factor = arena.filled(wide, {}, {&mean, 1});

  LinearCrossEntropyForwardBackwardArgs exact{.forward = {.inputs = inputs}, .gradients = gradients};
  exact.forward.outputs.loss = TensorView::contiguous(losses.data, wide, {}, device);
  const LinearCrossEntropyProblem problem = make_problem(exact);
  const std::int64_t chunk = plan_block(problem, limit_without_workspace(problem)).rows;
  // Workspaces are aligned to 256 bytes.
  const auto logits_bytes = static_cast<std::size_t>(ceil_divide(chunk * item.v * bytes_of(item.dtype), 256)) * 256;

  const auto run = [=](const ExecutionContext& context) {
    void* const logits = context.workspace.data;
    ExecutionContext rest = context;
    rest.workspace = {static_cast<char*>(logits) + logits_bytes, context.workspace.bytes - logits_bytes};
    const GemmMatrix head{inputs.head.data, item.dim};
    const auto multiply = [&](const Gemm& gemm) { runtime::matrix_product(device, gemm, rest); };
    for (std::int64_t first = 0; first < item.batch; first += chunk) {
      const std::int64_t rows = std::min(chunk, item.batch - first);
      const GemmMatrix hidden{row_of(inputs.hidden, first), item.dim};
      multiply(product(item, {rows, item.v, item.dim}, hidden, {head.data, head.stride, true}, logits));
      CrossEntropyForwardBackwardArgs loss;
      loss.forward.logits = TensorView::contiguous(logits, item.dtype, {rows, item.v}, device);
      loss.forward.targets = TensorView::contiguous(row_of(inputs.targets, first), DType::int64, {rows}, device);
      loss.forward.options.reduction = Reduction::none;
      loss.forward.loss = TensorView::contiguous(row_of(losses, first), wide, {rows}, device);
      loss.grad_loss = TensorView::strided(factor.data, wide, {rows}, {0}, device);
      cross_entropy_forward_backward(loss, rest);
      multiply(product(item, {rows, item.dim, item.v}, {logits, item.v}, head, row_of(gradients.grad_hidden, first)));
      multiply(product(item, {item.v, item.dim, rows}, {logits, item.v, true}, hidden, gradients.grad_head.data,
                       first != 0));
    }
  };
  // A product needs more workspace than the loss of a chunk.
  const std::size_t workspace_bytes = logits_bytes + (device.type == DeviceType::cpu ? 0 : kGemmWorkspaceBytes);
  return {.run = run, .workspace_bytes = [=](const ExecutionContext&) { return workspace_bytes; }};
}

// The size of its workspace decides the block of a call. Each of the two calls gets its own size, at the start of the
// same memory.
Call recompute_call(Arena& arena, const Case& item) {
  const DType result_dtype = accumulator_dtype(item.dtype);
  LinearCrossEntropyForwardArgs forward = forward_args(arena, item);
  forward.outputs.lse = arena.output(result_dtype, {item.batch});
  forward.outputs.divisor = arena.output(result_dtype, {});
  const double one = 1.0;
  const LinearCrossEntropyBackwardArgs backward{.grad_loss = arena.filled(result_dtype, {}, {&one, 1}),
                                                .inputs = forward.inputs,
                                                .lse = forward.outputs.lse,
                                                .divisor = forward.outputs.divisor,
                                                .gradients = gradients_of(arena, item)};
  const std::size_t forward_bytes = linear_cross_entropy_forward_workspace_bytes(forward);
  const std::size_t backward_bytes = linear_cross_entropy_backward_workspace_bytes(backward);
  const auto run = [=](const ExecutionContext& context) {
    ExecutionContext own = context;
    own.workspace.bytes = forward_bytes;
    linear_cross_entropy_forward(forward, own);
    own.workspace.bytes = backward_bytes;
    linear_cross_entropy_backward(backward, own);
  };
  return {.run = run,
          .workspace_bytes = [=](const ExecutionContext&) { return std::max(forward_bytes, backward_bytes); }};
}

// ------------------------------------------------------------------------------------------------------- the limit

/// The same rows without the ignored ones.
Case rows_that_count(Case item) {
  item.batch = item.rows_that_count();
  item.half_is_ignored = false;
  return item;
}

// The logits of all rows, then both products with their gradient, in the dtype of hidden. It is the real gradient, in
// memory of its own so that it stays: the power of a GPU, and so its clock, depends on the share of zeros in a factor.
Call matrix_products(Arena& arena, const Case& item) {
  const Device device = arena.device();
  const GemmMatrix hidden{hidden_of(arena, item).data, item.dim};
  const GemmMatrix head{head_of(arena, item).data, item.dim};
  const auto output = [&](const Dims& shape) { return arena.output(item.dtype, shape); };
  const ProductSizes logits_sizes{item.batch, item.v, item.dim};
  const GemmMatrix head_transposed{head.data, head.stride, true};
  std::vector<Gemm> products = {
      product(item, logits_sizes, hidden, head_transposed, output({item.batch, item.v}).data)};
  if (!item.is_loss_alone()) {
    // Probabilities minus the targets.
    const TensorView gradient = output({item.batch, item.v});
    runtime::matrix_product(device, product(item, logits_sizes, hidden, head_transposed, gradient.data), {});
    Arena not_counted(device);
    CrossEntropyForwardBackwardArgs args;
    args.forward.logits = gradient;
    args.forward.targets = class_targets(not_counted, {item.batch}, item.v, item.half_is_ignored);
    args.forward.options.reduction = Reduction::sum;
    args.forward.loss = not_counted.output(accumulator_dtype(item.dtype), {});
    cross_entropy_forward_backward(args);
    runtime::synchronize(device);

    if (item.has_grad_hidden) {
      products.push_back(product(item, {item.batch, item.dim, item.v}, {gradient.data, item.v}, head,
                                 output({item.batch, item.dim}).data));
    }
    if (item.has_grad_head) {
      products.push_back(product(item, {item.v, item.dim, item.batch}, {gradient.data, item.v, true}, hidden,
                                 output({item.v, item.dim}).data));
    }
  }
  return {.run = [=](const ExecutionContext& context) {
    for (const Gemm& gemm : products) runtime::matrix_product(device, gemm, context);
  }};
}

// -------------------------------------------------------------------------------------------------------- the rows

// The options, in the argument names of the Python function and the program, with values as JSON; `data` if there are
// two data sets.
Options option_keys(const Case& item) {
  Options keys = {{"reduction", "\"mean\""}};
  const bool has_gradients = !item.is_loss_alone();
  keys.add(has_gradients, "algorithm", item.algorithm);
  keys.add(has_gradients && !item.has_grad_hidden, "grad_hidden", "false");
  keys.add(has_gradients && !item.has_grad_head, "grad_head", "false");
  keys.add(item.has_rounded_logits, "logits", '"' + short_name_of(item.dtype) + '"');
  keys.add(true, "data", item.is_dense ? "\"dense\"" : "\"spread\"");
  keys.add(item.half_is_ignored, "ignored_rows", "0.5");
  keys.add(item.half_is_ignored, "skip_ignored", item.skips_ignored ? "true" : "false");
  return keys;
}

Call call_of(Arena& arena, const Case& item) {
  if (item.is_loss_alone()) return loss_call(arena, item);
  if (item.has_rounded_logits) return rounded_logits_call(arena, item);
  return item.algorithm == kRecompute ? recompute_call(arena, item) : speed_call(arena, item);
}

Row make_row(const Case& item) {
  const std::int64_t rows = item.rows_that_count();
  const std::int64_t hidden_bytes = rows * item.dim * bytes_of(item.dtype);
  const std::int64_t head_bytes = item.v * item.dim * bytes_of(item.dtype);
  const std::int64_t logits_bytes = rows * item.v * bytes_of(item.dtype);
  const std::int64_t gradient_bytes =
      (item.has_grad_hidden ? item.batch * item.dim * bytes_of(item.dtype) : 0) + (item.has_grad_head ? head_bytes : 0);
  Row row{.mode = item.is_loss_alone() ? "fwd" : "fwd+bwd",
          .shape = {{"batch", item.batch}, {"dim", item.dim}, {"v", item.v}},
          .options = option_keys(item)};
  row.read_bytes = hidden_bytes + head_bytes + item.batch * bytes_of(DType::int64);
  row.write_bytes = gradient_bytes + bytes_of(accumulator_dtype(item.dtype));
  row.operations = item.products() * 2 * rows * item.dim * item.v;
  row.make_call = [item](Arena& arena) { return call_of(arena, item); };
  row.make_limit = [item](Arena& arena) { return matrix_products(arena, rows_that_count(item)); };
  row.limit_bytes = hidden_bytes + head_bytes + gradient_bytes + (item.is_loss_alone() ? 1 : 2) * logits_bytes;
  return row;
}

// ------------------------------------------------------------------------------------------------------ the tables

/// The cases of a device: the case that all others start from, the vocabularies, and the vocabulary of the cases that
/// vary options.
struct Shown {
  Case like = {};
  std::vector<std::int64_t> vocabularies = {};
  std::vector<std::int64_t> dense_vocabularies = {};
  std::int64_t vocabulary_of_options = 32768;
};

Shown shown_on(const Request& request) {
  Shown shown{.like = {.dtype = request.dtype}};
  if (request.sweep == Sweep::published) {
    shown.vocabularies = doublings(1024, 131072);
  } else if (request.device.type == DeviceType::cuda) {
    shown.vocabularies = {4096, 32768, 131072};
  } else {
    // A CPU core takes seconds for the milliseconds of a GPU.
    shown.like.batch = 512;
    shown.like.dim = 1024;
    shown.vocabularies = {1024, 8192, 32768};
    shown.dense_vocabularies = {8192};  // the numbers do not change its clock
    shown.vocabulary_of_options = 8192;
  }
  if (shown.dense_vocabularies.empty()) shown.dense_vocabularies = shown.vocabularies;
  return shown;
}

void add_table(std::vector<Table>& tables, const std::vector<Case>& cases) {
  tables.push_back(make_table("linear_cross_entropy", cases.front().dtype, cases, make_row));
}

std::vector<Case> of_each_vocabulary(const Shown& shown, const Case& like) {
  std::vector<Case> cases;
  for (const std::int64_t v : like.is_dense ? shown.dense_vocabularies : shown.vocabularies) {
    cases.push_back(with(like, [=](Case& c) { c.v = v; }));
  }
  return cases;
}

void add_published_tables(std::vector<Table>& tables, const Shown& shown) {
  for (const bool is_dense : {false, true}) {
    for (const std::string& algorithm : {kSpeed, kMemory, kRecompute}) {
      const Case like = with(shown.like, [&](Case& c) { c.is_dense = is_dense, c.algorithm = algorithm; });
      add_table(tables, of_each_vocabulary(shown, like));
    }
  }
}

// Rounded logits, next to the same rows of the tables above.
std::vector<Case> with_rounded_logits(const Shown& shown) {
  std::vector<Case> cases;
  for (const bool is_dense : {false, true}) {
    const Case like = with(shown.like, [=](Case& c) { c.is_dense = is_dense, c.has_rounded_logits = true; });
    for (const Case& item : of_each_vocabulary(shown, like)) cases.push_back(item);
  }
  return cases;
}

// The time that each option saves, or does not save.
std::vector<Case> options_one_by_one(const Shown& shown, bool is_cpu) {
  const Case like = with(shown.like, [&](Case& c) { c.v = shown.vocabulary_of_options; });
  const Case half_is_ignored = with(like, [](Case& c) { c.half_is_ignored = true; });
  std::vector<Case> cases = {with(like, [](Case& c) { c.has_grad_head = false; }),
                             with(like, [](Case& c) { c.has_grad_hidden = false; }),
                             with(half_is_ignored, [](Case& c) { c.skips_ignored = true; })};
  if (!is_cpu) cases.push_back(half_is_ignored);  // a CPU always skips ignored rows
  return cases;
}

// The loss without gradients.
void be_loss_alone(Case& item) { item.has_grad_hidden = item.has_grad_head = false; }

std::vector<Table> tables_of(const Request& request) {
  const Shown shown = shown_on(request);
  std::vector<Table> tables;
  add_published_tables(tables, shown);
  if (request.sweep == Sweep::published) return tables;
  add_table(tables, of_each_vocabulary(shown, with(shown.like, be_loss_alone)));
  if (size_of(shown.like.dtype) == 2) add_table(tables, with_rounded_logits(shown));
  add_table(tables, options_one_by_one(shown, request.device.type == DeviceType::cpu));
  if (!request.has_dtype) {
    const Case speed = with(shown.like, [&](Case& c) { c.dtype = DType::float32, c.v = shown.vocabulary_of_options; });
    add_table(tables, {speed, with(speed, [](Case& c) { c.algorithm = kRecompute; })});
  }
  return tables;
}

// With logits as in a model.
std::vector<Row> rows_of_shape(const Shape& shape, DType dtype) {
  const Case speed{.batch = shape.sizes.at("rows"),
                   .dim = shape.sizes.at("dim"),
                   .v = shape.sizes.at("v"),
                   .dtype = dtype,
                   .is_dense = true};
  return {make_row(speed), make_row(with(speed, [](Case& c) { c.algorithm = kMemory; })),
          make_row(with(speed, [](Case& c) { c.algorithm = kRecompute; })), make_row(with(speed, be_loss_alone))};
}

}  // namespace

Operator linear_cross_entropy_benchmark() {
  return {"linear_cross_entropy", tables_of, {"rows", "dim", "v"}, rows_of_shape};
}

}  // namespace eaves::bench
