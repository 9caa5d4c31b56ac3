// The tables of `eaves bench logsumexp`: the published ones (rows along the last axis, length by length), and other
// layouts. This file has axes, buffers and bytes only; the harness does the timing.
#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/dispatch.h"
#include "eaves/logsumexp.h"
#include "runtime/runtime.h"
#include "testing/benchmark.h"

namespace eaves::bench {
namespace {

struct Case {
  Dims shape;
  int axis = 0;
  Sizes shape_keys;
  bool names_axis = false;  ///< among the options

  Dims row_shape() const { return without_axis(shape, axis); }
};

// The forward of a training step: the result, and the lse that its backward needs.
Call forward_call(Arena& arena, const Case& item, DType dtype) {
  LogsumexpForwardArgs args{.x = arena.normal(dtype, item.shape, 1), .axes = {item.axis}};
  args.out = arena.output(dtype, item.row_shape());
  args.lse = arena.output(accumulator_dtype(dtype), item.row_shape());
  return make_call(args, logsumexp_forward, logsumexp_forward_workspace_bytes);
}

Call backward_call(Arena& arena, const Case& item, DType dtype) {
  LogsumexpBackwardArgs args{.x = arena.normal(dtype, item.shape, 1), .axes = {item.axis}};
  args.grad_out = arena.normal(dtype, item.row_shape(), 2);
  args.lse = arena.output(accumulator_dtype(dtype), item.row_shape());
  args.grad_x = arena.output(dtype, item.shape);
  // A made-up lse could overflow every exponential, and infinities may be faster or slower than numbers.
  logsumexp_forward({.x = args.x, .axes = args.axes, .lse = args.lse});
  runtime::synchronize(arena.device());
  return make_call(args, logsumexp_backward, logsumexp_backward_workspace_bytes);
}

Row make_row(const Case& item, DType dtype, bool is_forward) {
  const std::int64_t x_bytes = elements_of(item.shape) * bytes_of(dtype);
  const std::int64_t out_bytes = elements_of(item.row_shape()) * bytes_of(dtype);
  const std::int64_t lse_bytes = elements_of(item.row_shape()) * bytes_of(accumulator_dtype(dtype));

  Row row{.mode = is_forward ? "fwd" : "bwd", .shape = item.shape_keys};
  row.options.add(item.names_axis, "axes", fmt::format("[{}]", item.axis + 1 == item.shape.size() ? -1 : item.axis));
  row.read_bytes = is_forward ? x_bytes : x_bytes + out_bytes + lse_bytes;  // x, grad_out, lse
  row.write_bytes = is_forward ? out_bytes + lse_bytes : x_bytes;           // out, lse; grad_x
  row.make_call = [=](Arena& arena) {
    return is_forward ? forward_call(arena, item, dtype) : backward_call(arena, item, dtype);
  };
  return row;
}

// One table of the forward and one of the backward, over the same cases.
void add_tables(std::vector<Table>& tables, DType dtype, const std::vector<Case>& cases) {
  for (const bool is_forward : {true, false}) {
    tables.push_back(make_table("logsumexp", dtype, cases, make_row, dtype, is_forward));
  }
}

Case last_axis(std::int64_t batch, std::int64_t dim, std::int64_t n) {
  return {{batch, dim, n}, 2, {{"batch", batch}, {"dim", dim}, {"n", n}}};
}

// Layouts that the published tables, with their long aligned rows, do not cover.
std::vector<Case> layouts(bool is_cpu, std::int64_t batch, std::int64_t dim) {
  // A CPU moves a hundredth of the bytes of a GPU: the same layouts at about a sixteenth of the size.
  const std::int64_t first_n = is_cpu ? 8192 : 131072;
  const std::int64_t middle_n = is_cpu ? 512 : 8192;
  const std::int64_t long_n = is_cpu ? std::int64_t{1} << 20 : std::int64_t{1} << 24;
  const std::int64_t short_rows = is_cpu ? std::int64_t{1} << 16 : std::int64_t{1} << 20;
  Case unaligned = last_axis(batch, dim, 131071);  // odd: no row but the first starts on 4 bytes or more
  unaligned.names_axis = true;
  return {
      // Neighbours in memory belong to different rows.
      {{first_n, 1024}, 0, {{"n", first_n}, {"dim", 1024}}, true},
      {{16, middle_n, 1024}, 1, {{"batch", 16}, {"n", middle_n}, {"dim", 1024}}, true},
      unaligned,
      // Fewer rows than processors: a row has to be split.
      {{8, long_n}, 1, {{"batch", 8}, {"n", long_n}}, true},
      // Rows shorter than one batch of a block's loads.
      {{short_rows, 64}, 1, {{"batch", short_rows}, {"n", 64}}, true},
  };
}

std::vector<Table> tables_of(const Request& request) {
  const bool is_quick = request.sweep == Sweep::quick;
  const bool is_cpu = request.device.type == DeviceType::cpu;
  const std::int64_t batch = is_quick && is_cpu ? 1 : 4;
  const std::int64_t dim = is_quick && is_cpu ? 256 : 1024;

  std::vector<Table> tables;
  std::vector<Case> lengths;
  for (const std::int64_t n : doublings(1024, 131072)) lengths.push_back(last_axis(batch, dim, n));
  add_tables(tables, request.dtype, lengths);
  if (is_quick) add_tables(tables, request.dtype, layouts(is_cpu, batch, dim));
  if (is_quick && !request.has_dtype) add_tables(tables, DType::float32, {last_axis(batch, dim, 32768)});
  return tables;
}

std::vector<Row> rows_of_shape(const Shape& shape, DType dtype) {
  const std::int64_t rows = shape.sizes.at("rows"), n = shape.sizes.at("n");
  const Case item{{rows, n}, 1, {{"batch", rows}, {"n", n}}};
  return {make_row(item, dtype, true), make_row(item, dtype, false)};
}

}  // namespace

Operator logsumexp_benchmark() { return {"logsumexp", tables_of, {"rows", "n"}, rows_of_shape}; }

}  // namespace eaves::bench
