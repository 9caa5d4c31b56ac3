// The tables of `eaves bench lrpe_cosine`: the published ones (activations over a sequence, then grids of one to three
// axes), then the other activations, the gradient of theta, one sequence alone, and layouts. This file has axes,
// buffers and bytes only; the harness does the timing.
#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/dispatch.h"
#include "eaves/lrpe_cosine.h"
#include "runtime/runtime.h"
#include "testing/benchmark.h"

namespace eaves::bench {
namespace {

/// One call of a training step. The defaults are the calls of the published tables.
struct Case {
  std::int64_t batch = 12;
  std::int64_t heads = 12;
  std::int64_t features = 128;
  std::int64_t n = 0;  ///< positions, or the edge of a grid
  Dims grid = {};      ///< empty: a plain sequence
  std::int64_t extra_tokens = 0;
  Activation activation = Activation::none;
  int activation_dim = -1;
  bool is_positions_first = false;  ///< in memory [B, N, H, D] instead of [B, H, N, D]
  bool has_grad_theta = false;      ///< in the backward

  std::int64_t positions() const { return extra_tokens + (grid.size() == 0 ? n : elements_of(grid)); }

  /// E, the features of each axis. The features that the division leaves over have no angle.
  std::int64_t angles_per_head() const { return grid.size() == 0 ? features : features / grid.size(); }

  bool needs_x() const { return activation != Activation::none || has_grad_theta; }  ///< the backward
  bool has_lse() const { return activation == Activation::softmax && activation_dim == -2; }
  Dims lse_shape() const { return {batch, heads, 2, features}; }
};

// ------------------------------------------------------------------------------------------------------- the calls

/// `tensor`, allocated in the memory order of the case, as a view [B, H, N, features].
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
  angles.grid = item.grid;
  angles.extra_tokens = item.extra_tokens;
  return angles;
}

// The forward of a training step: the encoding, and the lse if the backward needs it.
LrpeCosineForwardArgs forward_args(Arena& arena, const Case& item, DType dtype) {
  LrpeCosineForwardArgs args;
  args.x = as_heads_first(item, arena.normal(dtype, shape_in_memory(item, item.features), 1));
  args.angles = make_angles(arena, item, dtype);
  args.activation = item.activation;
  args.activation_dim = item.activation_dim;
  if (item.has_lse()) args.lse = arena.output(accumulator_dtype(dtype), item.lse_shape());
  return args;
}

Call forward_call(Arena& arena, const Case& item, DType dtype) {
  LrpeCosineForwardArgs args = forward_args(arena, item, dtype);
  args.out = as_heads_first(item, arena.output(dtype, shape_in_memory(item, 2 * item.features)));
  return make_call(args, lrpe_cosine_forward, lrpe_cosine_forward_workspace_bytes);
}

Call backward_call(Arena& arena, const Case& item, DType dtype) {
  LrpeCosineBackwardArgs args;
  args.grad_out = as_heads_first(item, arena.normal(dtype, shape_in_memory(item, 2 * item.features), 2));
  args.activation = item.activation;
  args.activation_dim = item.activation_dim;
  if (item.needs_x()) {
    LrpeCosineForwardArgs forward = forward_args(arena, item, dtype);
    if (item.has_lse()) {
      // A made-up lse could overflow every exponential, and infinities may be faster or slower than numbers.
      Arena not_counted(arena.device());  // the forward's output that the backward does not read
      forward.out = as_heads_first(item, not_counted.output(dtype, shape_in_memory(item, 2 * item.features)));
      lrpe_cosine_forward(forward);
      runtime::synchronize(arena.device());
    }
    args.x = forward.x;
    args.angles = forward.angles;
    args.lse = forward.lse;
  } else {
    args.angles = make_angles(arena, item, dtype);
  }
  args.grad_x = as_heads_first(item, arena.output(dtype, shape_in_memory(item, item.features)));
  if (item.has_grad_theta) args.grad_theta = arena.output(dtype, args.angles.theta.shape);
  return make_call(args, lrpe_cosine_backward, lrpe_cosine_backward_workspace_bytes);
}

// -------------------------------------------------------------------------------------------------------- the rows

// The options by the names of the Python function's arguments, with values as JSON.
Options option_keys(const Case& item) {
  static constexpr const char* kActivations[] = {"none", "relu", "sigmoid", "silu", "softmax"};
  Options keys;
  keys.add(item.activation != Activation::none, "activation",
           fmt::format("\"{}\"", kActivations[static_cast<int>(item.activation)]));
  keys.add(item.activation == Activation::softmax, "activation_dim", std::to_string(item.activation_dim));
  keys.add(item.grid.size() > 0, "grid", fmt::format("[{}]", fmt::join(item.grid, ",")));
  keys.add(item.extra_tokens > 0, "extra_tokens", std::to_string(item.extra_tokens));
  keys.add(item.is_positions_first, "layout", "\"bnhd\"");
  keys.add(item.has_grad_theta, "grad_theta");
  return keys;
}

// Its bytes are the ones that any implementation has to move: each input is read once, each output is written once.
Row make_row(const Case& item, DType dtype, bool is_forward) {
  const std::int64_t x_bytes = item.batch * item.heads * item.positions() * item.features * bytes_of(dtype);
  const std::int64_t theta_bytes = item.heads * item.angles_per_head() * bytes_of(dtype);
  const std::int64_t lse_bytes =
      item.has_lse() ? 2 * item.batch * item.heads * item.features * bytes_of(accumulator_dtype(dtype)) : 0;
  Row row{.mode = is_forward ? "fwd" : "bwd",
          .shape = {{"batch", item.batch}, {"head", item.heads}, {"dim", item.features}, {"n", item.n}},
          .options = option_keys(item)};
  if (is_forward) {
    row.read_bytes = x_bytes + theta_bytes;
    row.write_bytes = 2 * x_bytes + lse_bytes;  // out, lse
  } else {
    row.read_bytes = (item.needs_x() ? 3 : 2) * x_bytes + theta_bytes + lse_bytes;  // grad_out, x, theta, lse
    row.write_bytes = x_bytes + (item.has_grad_theta ? theta_bytes : 0);            // grad_x, grad_theta
  }
  row.make_call = [=](Arena& arena) {
    return is_forward ? forward_call(arena, item, dtype) : backward_call(arena, item, dtype);
  };
  return row;
}

// ------------------------------------------------------------------------------------------------------ the tables

/// The sizes of the published tables, and of the other tables.
struct Shown {
  std::int64_t batch = 12;
  std::vector<std::int64_t> lengths = doublings(256, 32768);
  std::vector<std::int64_t> edges[3] = {lengths, doublings(16, 128), doublings(4, 32)};  ///< of grids of 1 to 3 axes
  std::vector<std::int64_t> lengths_of_others = {8192, 32768};
  std::vector<std::int64_t> lengths_alone = {32768, 131072};
};

// Smaller sizes for a CPU: it moves a hundredth of the bytes of a GPU, and the harness empties its large cache many
// times for each row.
Shown cpu_sizes() {
  return {.batch = 1,
          .lengths = {512, 2048, 8192},
          .edges = {{8192}, {64}, {16}},
          .lengths_of_others = {8192},
          .lengths_alone = {32768}};
}

// One table of the forward and one of the backward, over the same cases.
void add_tables(std::vector<Table>& tables, DType dtype, const std::vector<Case>& cases) {
  for (const bool is_forward : {true, false}) {
    tables.push_back(make_table("lrpe_cosine", dtype, cases, make_row, dtype, is_forward));
  }
}

std::vector<Case> cases_of_sizes(const Case& like, const std::vector<std::int64_t>& sizes) {
  std::vector<Case> cases;
  for (const std::int64_t n : sizes) cases.push_back(with(like, [=](Case& item) { item.n = n; }));
  return cases;
}

// The published tables: a sequence with activations, then grids.
void add_published_tables(std::vector<Table>& tables, const Shown& sizes, DType dtype) {
  for (const auto& [activation, activation_dim] :
       {std::pair(Activation::none, -1), std::pair(Activation::silu, -1), std::pair(Activation::softmax, -1),
        std::pair(Activation::softmax, -2)}) {
    const Case like{.batch = sizes.batch, .activation = activation, .activation_dim = activation_dim};
    add_tables(tables, dtype, cases_of_sizes(like, sizes.lengths));
  }
  for (const int axes : {1, 2, 3}) {
    for (const std::int64_t extra_tokens : {0, 10}) {
      std::vector<Case> cases =
          cases_of_sizes({.batch = sizes.batch, .extra_tokens = extra_tokens}, sizes.edges[axes - 1]);
      for (Case& item : cases) {
        for (int axis = 0; axis < axes; ++axis) item.grid.push_back(item.n);
      }
      add_tables(tables, dtype, cases);
    }
  }
}

// The cases that the published tables lack.
void add_other_tables(std::vector<Table>& tables, const Shown& sizes, DType dtype) {
  std::vector<Case> activations, theta_gradients;
  for (const std::int64_t n : sizes.lengths_of_others) {
    for (const Activation activation : {Activation::relu, Activation::sigmoid}) {
      activations.push_back({.batch = sizes.batch, .n = n, .activation = activation});
    }
    for (const Activation activation : {Activation::none, Activation::silu}) {
      theta_gradients.push_back({.batch = sizes.batch, .n = n, .activation = activation, .has_grad_theta = true});
    }
  }
  add_tables(tables, dtype, activations);
  tables.push_back(make_table("lrpe_cosine", dtype, theta_gradients, make_row, dtype, false));

  // One batch entry: no other shares its angles.
  add_tables(tables, dtype, cases_of_sizes({.batch = 1}, sizes.lengths_alone));

  const std::int64_t n = sizes.lengths_of_others.front();
  add_tables(tables, dtype,
             {{.batch = sizes.batch, .n = n, .is_positions_first = true},
              {.batch = sizes.batch, .features = 96, .n = n},  // no power of two
              {.batch = sizes.batch, .features = 64, .n = n}});
}

std::vector<Table> tables_of(const Request& request) {
  const bool is_quick = request.sweep == Sweep::quick;
  const Shown sizes = is_quick && request.device.type == DeviceType::cpu ? cpu_sizes() : Shown{};
  std::vector<Table> tables;
  add_published_tables(tables, sizes, request.dtype);
  if (is_quick) add_other_tables(tables, sizes, request.dtype);
  if (is_quick && !request.has_dtype) {
    add_tables(tables, DType::float32, {{.batch = sizes.batch, .n = sizes.lengths_of_others.front()}});
  }
  return tables;
}

std::vector<Row> rows_of_shape(const Shape& shape, DType dtype) {
  Case item{.batch = shape.sizes.at("batch"), .heads = shape.sizes.at("heads"), .features = shape.sizes.at("dim")};
  item.grid = shape.grid;
  item.n = item.grid.size() == 0 ? shape.sizes.at("length") : item.positions();
  return {make_row(item, dtype, true), make_row(item, dtype, false)};
}

}  // namespace

Operator lrpe_cosine_benchmark() {
  return {"lrpe_cosine", tables_of, {"batch", "length", "heads", "dim"}, rows_of_shape};
}

}  // namespace eaves::bench
