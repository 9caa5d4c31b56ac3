// What `eaves bench lrpe_cosine` measures: the seed tables (activations over a sequence, then grids of one to three
// axes), then what they leave out: the other activations, the gradient of theta, one sequence alone, layouts. Axes,
// buffers and bytes only; the harness does the timing.
#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/dispatch.h"
#include "eaves/lrpe_cosine.h"
#include "runtime/runtime.h"
#include "testing/benchmark.h"
#include "testing/dtype_names.h"

namespace eaves::bench {
namespace {

/// One call of a training step. What is not named is as in the seed tables.
struct Case {
  std::int64_t batch = 12;
  std::int64_t heads = 12;
  std::int64_t features = 128;
  std::int64_t n = 0;  ///< positions, or the edge of a grid
  int grid_axes = 0;   ///< 0: a plain sequence, no grid is passed
  std::int64_t extra_tokens = 0;
  Activation activation = Activation::none;
  int activation_dim = -1;
  bool is_positions_first = false;  ///< in memory [B, N, H, D] instead of [B, H, N, D]
  bool has_grad_theta = false;      ///< in the backward

  Dims grid() const {
    Dims grid;
    for (int axis = 0; axis < grid_axes; ++axis) grid.push_back(n);
    return grid;
  }

  std::int64_t positions() const {
    std::int64_t cells = grid_axes == 0 ? n : 1;
    for (int axis = 0; axis < grid_axes; ++axis) cells *= n;
    return extra_tokens + cells;
  }

  /// E, as many features as the axes can have alike: what the division leaves over has no angle.
  std::int64_t angles_per_head() const { return grid_axes == 0 ? features : features / grid_axes; }

  bool has_lse() const { return activation == Activation::softmax && activation_dim == -2; }
  Dims lse_shape() const { return {batch, heads, 2, features}; }
};

// ------------------------------------------------------------------------------------------------------- the calls

/// `tensor`, allocated in the order that the case says, as a view [B, H, N, features].
TensorView as_heads_first(const Case& item, const TensorView& tensor) {
  if (!item.is_positions_first) return tensor;
  const Dims& shape = tensor.shape;
  const Dims& strides = tensor.strides;
  return TensorView::strided(tensor.data, tensor.dtype, {shape[0], shape[2], shape[1], shape[3]},
                             {strides[0], strides[2], strides[1], strides[3]}, tensor.device);
}

Dims shape_in_memory(const Case& item, std::int64_t features) {
  if (item.is_positions_first) return {item.batch, item.positions(), item.heads, features};
  return {item.batch, item.heads, item.positions(), features};
}

// The usual frequencies: a geometric series from 1 towards 1 / 10000, the same for each head.
LrpeAngles make_angles(Arena& arena, const Case& item, DType dtype) {
  const std::int64_t count = item.angles_per_head();
  std::vector<double> series;
  for (std::int64_t i = 0; i < count; ++i) {
    series.push_back(std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(count)));
  }
  LrpeAngles angles;
  angles.theta = arena.filled(dtype, {item.heads, count}, series);
  angles.grid = item.grid();
  angles.extra_tokens = item.extra_tokens;
  return angles;
}

// A training step's forward: the encoding, and the lse where the backward needs it.
class ForwardCall : public Call {
 public:
  ForwardCall(Arena& arena, const Case& item, DType dtype) {
    args_.x = as_heads_first(item, arena.normal(dtype, shape_in_memory(item, item.features), 1));
    args_.angles = make_angles(arena, item, dtype);
    args_.activation = item.activation;
    args_.activation_dim = item.activation_dim;
    args_.out = as_heads_first(item, arena.output(dtype, shape_in_memory(item, 2 * item.features)));
    if (item.has_lse()) args_.lse = arena.output(accumulator_dtype(dtype), item.lse_shape());
  }
  std::size_t workspace_bytes(const ExecutionContext& context) const override {
    return lrpe_cosine_forward_workspace_bytes(args_, context);
  }
  void run(const ExecutionContext& context) override { lrpe_cosine_forward(args_, context); }

 private:
  LrpeCosineForwardArgs args_;
};

class BackwardCall : public Call {
 public:
  BackwardCall(Arena& arena, const Case& item, DType dtype) {
    args_.grad_out = as_heads_first(item, arena.normal(dtype, shape_in_memory(item, 2 * item.features), 2));
    if (item.activation != Activation::none || item.has_grad_theta) {
      args_.x = as_heads_first(item, arena.normal(dtype, shape_in_memory(item, item.features), 1));
    }
    args_.angles = make_angles(arena, item, dtype);
    args_.activation = item.activation;
    args_.activation_dim = item.activation_dim;
    if (item.has_lse()) args_.lse = lse_of_the_forward(arena, item, dtype);
    args_.grad_x = as_heads_first(item, arena.output(dtype, shape_in_memory(item, item.features)));
    if (item.has_grad_theta) args_.grad_theta = arena.output(dtype, args_.angles.theta.shape);
  }
  std::size_t workspace_bytes(const ExecutionContext& context) const override {
    return lrpe_cosine_backward_workspace_bytes(args_, context);
  }
  void run(const ExecutionContext& context) override { lrpe_cosine_backward(args_, context); }

 private:
  // A made-up lse could overflow every exponential, and infinities may be faster or slower than numbers.
  TensorView lse_of_the_forward(Arena& arena, const Case& item, DType dtype) const {
    Arena not_counted(arena.device());  // what the forward writes and the backward does not take
    LrpeCosineForwardArgs forward;
    forward.x = args_.x;
    forward.angles = args_.angles;
    forward.activation = item.activation;
    forward.activation_dim = item.activation_dim;
    forward.out = as_heads_first(item, not_counted.output(dtype, shape_in_memory(item, 2 * item.features)));
    forward.lse = arena.output(accumulator_dtype(dtype), item.lse_shape());
    lrpe_cosine_forward(forward);
    runtime::synchronize(arena.device());
    return forward.lse;
  }

  LrpeCosineBackwardArgs args_;
};

// -------------------------------------------------------------------------------------------------------- the rows

const char* name_of(Activation activation) {
  static constexpr const char* kNames[] = {"none", "relu", "sigmoid", "silu", "softmax"};
  return kNames[static_cast<int>(activation)];
}

// The options under the names of the Python function's arguments, the values as JSON.
std::vector<std::pair<std::string, std::string>> option_keys(const Case& item) {
  std::vector<std::pair<std::string, std::string>> keys;
  if (item.activation != Activation::none) {
    keys.emplace_back("activation", fmt::format("\"{}\"", name_of(item.activation)));
  }
  if (item.activation == Activation::softmax) keys.emplace_back("activation_dim", std::to_string(item.activation_dim));
  if (item.grid_axes > 0) {
    keys.emplace_back("grid", fmt::format("[{}]", fmt::join(item.grid(), ",")));
  }
  if (item.extra_tokens > 0) keys.emplace_back("extra_tokens", std::to_string(item.extra_tokens));
  if (item.is_positions_first) keys.emplace_back("layout", "\"bnhd\"");
  if (item.has_grad_theta) keys.emplace_back("grad_theta", "true");
  return keys;
}

// Bytes: what any implementation has to move, each input read once, each output written once.
Row make_row(const Case& item, DType dtype, bool is_forward) {
  const auto element_bytes = static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t x_bytes = item.batch * item.heads * item.positions() * item.features * element_bytes;
  const std::int64_t theta_bytes = item.heads * item.angles_per_head() * element_bytes;
  const std::int64_t lse_bytes = item.has_lse() ? 2 * item.batch * item.heads * item.features *
                                                      static_cast<std::int64_t>(size_of(accumulator_dtype(dtype)))
                                                : 0;
  Row row;
  row.axis_value = item.n;
  row.shape = {{"batch", item.batch}, {"head", item.heads}, {"dim", item.features}, {"n", item.n}};
  row.options = option_keys(item);
  if (is_forward) {
    row.read_bytes = x_bytes + theta_bytes;
    row.write_bytes = 2 * x_bytes + lse_bytes;  // out, lse
    row.make_call = [item, dtype](Arena& arena) { return std::make_unique<ForwardCall>(arena, item, dtype); };
  } else {
    const bool needs_x = item.activation != Activation::none || item.has_grad_theta;
    row.read_bytes = (needs_x ? 3 : 2) * x_bytes + theta_bytes + lse_bytes;  // grad_out, x, theta, lse
    row.write_bytes = x_bytes + (item.has_grad_theta ? theta_bytes : 0);     // grad_x, grad_theta
    row.make_call = [item, dtype](Arena& arena) { return std::make_unique<BackwardCall>(arena, item, dtype); };
  }
  return row;
}

// ------------------------------------------------------------------------------------------------------ the tables

std::vector<std::int64_t> doublings(std::int64_t first, std::int64_t last) {
  std::vector<std::int64_t> sizes;
  for (std::int64_t size = first; size <= last; size *= 2) sizes.push_back(size);
  return sizes;
}

/// Of the seed tables, and of the tables beside them.
struct Sizes {
  std::int64_t batch = 12;
  std::vector<std::int64_t> lengths = doublings(256, 32768);
  std::vector<std::int64_t> edges[3] = {lengths, doublings(16, 128), doublings(4, 32)};  ///< of 1, 2 and 3 axes
  std::vector<std::int64_t> lengths_of_others = {8192, 32768};
  std::vector<std::int64_t> lengths_alone = {32768, 131072};
};

// A CPU moves a hundredth of what a GPU does, and each row empties its large cache many times.
Sizes cpu_sizes() {
  return {.batch = 1,
          .lengths = {512, 2048, 8192},
          .edges = {{8192}, {64}, {16}},
          .lengths_of_others = {8192},
          .lengths_alone = {32768}};
}

std::string shape_title(const Case& item) {
  return fmt::format("batch{}-head{}-dim{}", item.batch, item.heads, item.features);
}

Table make_table(const std::string& title, DType dtype, const std::vector<Case>& cases, bool is_forward) {
  Table table{
      .op = "lrpe_cosine", .mode = is_forward ? "fwd" : "bwd", .title_suffix = title, .axis_name = "n", .dtype = dtype};
  for (const Case& item : cases) table.rows.push_back(make_row(item, dtype, is_forward));
  return table;
}

// The speed and memory tables of forward and backward over the same cases.
void add_tables(std::vector<Table>& tables, const std::string& title, DType dtype, const std::vector<Case>& cases) {
  for (const bool is_forward : {true, false}) tables.push_back(make_table(title, dtype, cases, is_forward));
}

std::vector<Case> cases_of_sizes(const Case& like, const std::vector<std::int64_t>& sizes) {
  std::vector<Case> cases;
  for (const std::int64_t n : sizes) {
    cases.push_back(like);
    cases.back().n = n;
  }
  return cases;
}

// The seed tables of one sequence.
void add_activation_tables(std::vector<Table>& tables, const Sizes& sizes, DType dtype) {
  const auto add = [&](const char* title, Activation activation, int activation_dim) {
    const Case like{.batch = sizes.batch, .activation = activation, .activation_dim = activation_dim};
    add_tables(tables, fmt::format("{}-{}-{}", shape_title(like), title, short_name_of(dtype)), dtype,
               cases_of_sizes(like, sizes.lengths));
  };
  add("act_none", Activation::none, -1);
  add("act_silu", Activation::silu, -1);
  add("act_softmax-dim_-1", Activation::softmax, -1);
  add("act_softmax-dim_-2", Activation::softmax, -2);
}

// The seed tables of grids, which have a name of their own for the operator.
void add_grid_tables(std::vector<Table>& tables, const Sizes& sizes, DType dtype) {
  for (const int axes : {1, 2, 3}) {
    for (const std::int64_t extra_tokens : {0, 10}) {
      const Case like{.batch = sizes.batch, .grid_axes = axes, .extra_tokens = extra_tokens};
      const std::string title =
          fmt::format("{}-{}-{}d-l{}", shape_title(like), short_name_of(dtype), axes, extra_tokens);
      for (const bool is_forward : {true, false}) {
        Table table = make_table(title, dtype, cases_of_sizes(like, sizes.edges[axes - 1]), is_forward);
        table.title_op = "md_lrpe_cosine";
        table.axis_tells_all = true;
        tables.push_back(std::move(table));
      }
    }
  }
}

// What the seed tables leave out.
void add_other_tables(std::vector<Table>& tables, const Sizes& sizes, DType dtype) {
  const Case plain{.batch = sizes.batch};
  const auto titled = [&](const char* what) {
    return fmt::format("{}-{}-{}", shape_title(plain), what, short_name_of(dtype));
  };

  std::vector<Case> activations, theta_gradients;
  for (const std::int64_t n : sizes.lengths_of_others) {
    for (const Activation activation : {Activation::relu, Activation::sigmoid}) {
      activations.push_back({.batch = sizes.batch, .n = n, .activation = activation});
    }
    for (const Activation activation : {Activation::none, Activation::silu}) {
      theta_gradients.push_back({.batch = sizes.batch, .n = n, .activation = activation, .has_grad_theta = true});
    }
  }
  add_tables(tables, titled("activations"), dtype, activations);
  tables.push_back(make_table(titled("grad_theta"), dtype, theta_gradients, false));

  // One batch entry: no other shares its angles.
  const Case alone{.batch = 1};
  add_tables(tables, fmt::format("{}-{}", shape_title(alone), short_name_of(dtype)), dtype,
             cases_of_sizes(alone, sizes.lengths_alone));

  const std::int64_t n = sizes.lengths_of_others.front();
  add_tables(tables, "layouts-" + short_name_of(dtype), dtype,
             {{.batch = sizes.batch, .n = n, .is_positions_first = true},
              {.batch = sizes.batch, .features = 96, .n = n},  // no power of two
              {.batch = sizes.batch, .features = 64, .n = n}});
}

std::vector<Table> lrpe_cosine_tables(const Request& request) {
  const bool is_quick = request.sweep == Sweep::quick;
  const Sizes sizes = is_quick && request.device.type == DeviceType::cpu ? cpu_sizes() : Sizes{};
  std::vector<Table> tables;
  add_activation_tables(tables, sizes, request.dtype);
  add_grid_tables(tables, sizes, request.dtype);
  if (is_quick) {
    add_other_tables(tables, sizes, request.dtype);
    if (!request.has_dtype) {
      const Case plain{.batch = sizes.batch};
      add_tables(tables, shape_title(plain) + "-act_none-" + short_name_of(DType::float32), DType::float32,
                 cases_of_sizes(plain, {sizes.lengths_of_others.front()}));
    }
  }
  return tables;
}

}  // namespace

Operator lrpe_cosine_benchmark() { return {"lrpe_cosine", lrpe_cosine_tables}; }

}  // namespace eaves::bench
