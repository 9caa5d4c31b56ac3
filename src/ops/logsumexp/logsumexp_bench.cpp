// What `eaves bench logsumexp` measures: the seed tables (rows along the last axis, length by length), and the layouts
// that they leave out. Axes, buffers and bytes only; the harness does the timing.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/dispatch.h"
#include "core/rows.h"
#include "eaves/logsumexp.h"
#include "runtime/runtime.h"
#include "testing/benchmark.h"
#include "testing/dtype_names.h"

namespace eaves::bench {
namespace {

struct Case {
  Dims shape;
  int axis = -1;
  std::vector<std::pair<std::string, std::int64_t>> shape_keys;
  std::vector<std::pair<std::string, std::string>> options;
};

std::int64_t reduced_length(const Case& item) {
  return item.shape[item.axis < 0 ? item.shape.size() + item.axis : item.axis];
}

Dims row_shape(const Case& item) {
  AxisSet axes;
  axes.contains[item.axis < 0 ? item.shape.size() + item.axis : item.axis] = true;
  return reduced_shape(item.shape, axes, false);
}

// A training step's forward: the result, and the lse that its backward needs.
class ForwardCall : public Call {
 public:
  ForwardCall(Arena& arena, const Case& item, DType dtype) {
    args_.x = arena.normal(dtype, item.shape, 1);
    args_.axes = {item.axis};
    args_.out = arena.output(dtype, row_shape(item));
    args_.lse = arena.output(accumulator_dtype(dtype), row_shape(item));
  }
  std::size_t workspace_bytes(const ExecutionContext& context) const override {
    return logsumexp_forward_workspace_bytes(args_, context);
  }
  void run(const ExecutionContext& context) override { logsumexp_forward(args_, context); }

 private:
  LogsumexpForwardArgs args_;
};

class BackwardCall : public Call {
 public:
  BackwardCall(Arena& arena, const Case& item, DType dtype) {
    args_.x = arena.normal(dtype, item.shape, 1);
    args_.axes = {item.axis};
    args_.grad_out = arena.normal(dtype, row_shape(item), 2);
    args_.lse = arena.output(accumulator_dtype(dtype), row_shape(item));
    args_.grad_x = arena.output(dtype, item.shape);
    // A made-up lse could overflow every exponential, and infinities may be faster or slower than numbers.
    LogsumexpForwardArgs forward;
    forward.x = args_.x;
    forward.axes = args_.axes;
    forward.lse = args_.lse;
    logsumexp_forward(forward);
    runtime::synchronize(arena.device());
  }
  std::size_t workspace_bytes(const ExecutionContext& context) const override {
    return logsumexp_backward_workspace_bytes(args_, context);
  }
  void run(const ExecutionContext& context) override { logsumexp_backward(args_, context); }

 private:
  LogsumexpBackwardArgs args_;
};

Row make_row(const Case& item, DType dtype, bool is_forward) {
  std::int64_t elements = 1;
  for (const std::int64_t size : item.shape) elements *= size;
  const std::int64_t rows = elements / reduced_length(item);
  const auto element_bytes = static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t lse_bytes = rows * (dtype == DType::float64 ? 8 : 4);

  Row row;
  row.axis_value = reduced_length(item);
  row.shape = item.shape_keys;
  row.options = item.options;
  if (is_forward) {
    row.read_bytes = elements * element_bytes;           // x
    row.write_bytes = rows * element_bytes + lse_bytes;  // out, lse
    row.make_call = [item, dtype](Arena& arena) { return std::make_unique<ForwardCall>(arena, item, dtype); };
  } else {
    row.read_bytes = (elements + rows) * element_bytes + lse_bytes;  // x, grad_out, lse
    row.write_bytes = elements * element_bytes;                      // grad_x
    row.make_call = [item, dtype](Arena& arena) { return std::make_unique<BackwardCall>(arena, item, dtype); };
  }
  return row;
}

// The speed and memory tables of forward and backward over the same cases.
void add_tables(std::vector<Table>& tables, const std::string& title, DType dtype, const std::vector<Case>& cases) {
  for (const bool is_forward : {true, false}) {
    Table table;
    table.op = "logsumexp";
    table.mode = is_forward ? "fwd" : "bwd";
    table.title_suffix = title + "-" + short_name_of(dtype);
    table.axis_name = "n";
    table.dtype = dtype;
    for (const Case& item : cases) table.rows.push_back(make_row(item, dtype, is_forward));
    tables.push_back(std::move(table));
  }
}

Case last_axis(std::int64_t batch, std::int64_t dim, std::int64_t n) {
  return {{batch, dim, n}, -1, {{"batch", batch}, {"dim", dim}, {"n", n}}, {}};
}

// Each is a way to read memory that the seed tables, with their long aligned rows, do not show.
std::vector<Case> layouts(bool is_cpu, std::int64_t batch, std::int64_t dim) {
  // A CPU moves a hundredth of what a GPU does: the same layouts at about a sixteenth of the size.
  const std::int64_t first_n = is_cpu ? 8192 : 131072;
  const std::int64_t middle_n = is_cpu ? 512 : 8192;
  const std::int64_t long_n = is_cpu ? std::int64_t{1} << 20 : std::int64_t{1} << 24;
  const std::int64_t short_rows = is_cpu ? std::int64_t{1} << 16 : std::int64_t{1} << 20;
  Case unaligned = last_axis(batch, dim, 131071);  // odd: no row but the first starts on 4 bytes or more
  unaligned.options = {{"axes", "[-1]"}};
  return {
      // Neighbours in memory belong to different rows.
      {{first_n, 1024}, 0, {{"n", first_n}, {"dim", 1024}}, {{"axes", "[0]"}}},
      {{16, middle_n, 1024}, 1, {{"batch", 16}, {"n", middle_n}, {"dim", 1024}}, {{"axes", "[1]"}}},
      unaligned,
      // Fewer rows than processors: a row has to be split.
      {{8, long_n}, -1, {{"batch", 8}, {"n", long_n}}, {{"axes", "[-1]"}}},
      // Rows shorter than what one block reads at a time.
      {{short_rows, 64}, -1, {{"batch", short_rows}, {"n", 64}}, {{"axes", "[-1]"}}},
  };
}

std::string seed_title(std::int64_t batch, std::int64_t dim) {
  return "batch" + std::to_string(batch) + "-dim" + std::to_string(dim);
}

std::vector<Table> logsumexp_tables(const Request& request) {
  const bool is_quick = request.sweep == Sweep::quick;
  const bool is_cpu = request.device.type == DeviceType::cpu;
  const std::int64_t batch = is_quick && is_cpu ? 1 : 4;
  const std::int64_t dim = is_quick && is_cpu ? 256 : 1024;

  std::vector<Table> tables;
  std::vector<Case> lengths;
  for (std::int64_t n = 1024; n <= 131072; n *= 2) lengths.push_back(last_axis(batch, dim, n));
  add_tables(tables, seed_title(batch, dim), request.dtype, lengths);
  if (is_quick) {
    add_tables(tables, "layouts", request.dtype, layouts(is_cpu, batch, dim));
    if (!request.has_dtype) {
      add_tables(tables, seed_title(batch, dim), DType::float32, {last_axis(batch, dim, 32768)});
    }
  }
  return tables;
}

}  // namespace

Operator logsumexp_benchmark() { return {"logsumexp", logsumexp_tables}; }

}  // namespace eaves::bench
