// The declarations of an operator for the benchmark harness: tables, rows, the bytes that a row has to move (or another
// limit), and functions that make the buffers and the call. Neither this file nor an operator has timing code, and the
// harness names no operator.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "eaves/context.h"
#include "eaves/tensor.h"

namespace eaves::bench {

/// Device memory of a row; the harness reports its sum as the row's peak. A Call allocates from here only.
class Arena {
 public:
  explicit Arena(Device device) : device_(device) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  Device device() const { return device_; }
  std::int64_t bytes() const { return bytes_; }

  /// Uninitialised memory.
  void* allocate(std::size_t bytes);

  /// A contiguous tensor of normal random numbers with mean 0, never zeros; `seed` fixes them.
  TensorView normal(DType dtype, const Dims& shape, std::uint64_t seed, double deviation = 1.0);

  /// A contiguous tensor of any dtype, filled with repetitions of these numbers: targets, weights and other tensors
  /// that must not be normal numbers. Throws InvalidArgument if `numbers` is empty and the tensor is not.
  TensorView filled(DType dtype, const Dims& shape, std::span<const double> numbers);

  /// A contiguous tensor that the call writes.
  TensorView output(DType dtype, const Dims& shape);

 private:
  Device device_;
  std::int64_t bytes_ = 0;
  std::vector<void*> blocks_;
};

/// One call with its buffers, ready to run again and again.
struct Call {
  std::function<void(const ExecutionContext& context)> run;

  /// Optional: the bytes of workspace that run() needs in its context.
  std::function<std::size_t(const ExecutionContext& context)> workspace_bytes = {};

  /// Optional: restores the inputs that run() has overwritten. Called before every run() except the first, and not
  /// timed. May wait for the device.
  std::function<void()> restore = {};
};

/// A Call of an operator's function and the query of its workspace: make_call(args, logsumexp_forward,
/// ..._workspace_bytes).
template <typename Args>
Call make_call(const Args& args, void (*run)(const Args&, const ExecutionContext&),
               std::size_t (*workspace_bytes)(const Args&, const ExecutionContext&)) {
  return {.run = [=](const ExecutionContext& context) { run(args, context); },
          .workspace_bytes = [=](const ExecutionContext& context) { return workspace_bytes(args, context); }};
}

/// Sizes by the names of their axes, in order: {"batch", 4}, {"dim", 1024}, {"n", 32768}.
using Sizes = std::vector<std::pair<std::string, std::int64_t>>;

/// The options that differ from the defaults, by the Python function's names; values as JSON text: {"axis", "0"},
/// {"layout", "\"first\""}.
struct Options : std::vector<std::pair<std::string, std::string>> {
  using vector::vector;
  void add(bool differs, const std::string& name, const std::string& value = "true") {
    if (differs) emplace_back(name, value);
  }
};

/// One row of a table.
struct Row {
  std::string mode;  ///< "fwd", "bwd", "fwd+bwd"
  Sizes shape;       ///< "shape" in the result file
  Options options;   ///< "options" in the result file
  /// The bytes that any implementation has to read and write. The `limit` column streams them, unless the row has
  /// make_limit.
  std::int64_t read_bytes = 0;
  std::int64_t write_bytes = 0;
  /// The floating-point operations that any implementation has to do, if they take more time than the bytes.
  std::int64_t operations = 0;
  /// Makes inputs and outputs in `arena` and the call on them.
  std::function<Call(Arena& arena)> make_call;
  /// Optional: makes the call that the `limit` column runs instead of streaming, on separate buffers. The call
  /// overwrites none of its inputs, and gets no workspace in its context.
  std::function<Call(Arena& arena)> make_limit;
  std::int64_t limit_bytes = 0;  ///< of the buffers of make_limit
};

/// Rows that are printed together. The title has their common properties, the names of the rows the other ones.
struct Table {
  std::string op;
  DType dtype = DType::bfloat16;
  std::vector<Row> rows;
};

/// A table with a row make_row(case, arguments...) for each case.
template <typename Case, typename MakeRow, typename... Arguments>
Table make_table(const std::string& op, DType dtype, const std::vector<Case>& cases, MakeRow make_row,
                 const Arguments&... arguments) {
  Table table{.op = op, .dtype = dtype};
  for (const Case& item : cases) table.rows.push_back(make_row(item, arguments...));
  return table;
}

/// A case with one thing changed.
template <typename Case, typename Change>
Case with(Case item, Change change) {
  change(item);
  return item;
}

enum class Sweep {
  quick,      ///< a few minutes on a quiet device for all operators together: the published tables as far as they fit
              ///< in this time, and layouts that the published tables lack
  published,  ///< every row of the published tables, no others
};

/// A shape from the user.
struct Shape {
  std::map<std::string, std::int64_t> sizes;  ///< by axis
  Dims grid = {};                             ///< of lrpe_cosine, instead of a length
};

struct Request {
  Sweep sweep = Sweep::quick;
  Device device = kCpu;
  DType dtype = DType::bfloat16;
  bool has_dtype = false;  ///< the user named the dtype: tables of other dtypes are left out
};

/// An operator's benchmark, which <op>_bench.cpp defines. cli/bench.cpp lists all of them.
struct Operator {
  std::string name;
  std::vector<Table> (*tables)(const Request& request);

  /// The axes of a shape from the user, all required, and the calls of a training step on it.
  std::vector<std::string> axes;
  std::vector<Row> (*rows_of_shape)(const Shape& shape, DType dtype);
};

// ----------------------------------------------------------------------------- shared by several operators

inline std::int64_t bytes_of(DType dtype) { return static_cast<std::int64_t>(size_of(dtype)); }

inline std::int64_t elements_of(const Dims& shape) {
  std::int64_t elements = 1;
  for (const std::int64_t size : shape) elements *= size;
  return elements;
}

/// The shape of the rows along `axis`.
inline Dims without_axis(const Dims& shape, int axis) {
  Dims rows;
  for (int other = 0; other < shape.size(); ++other) {
    if (other != axis) rows.push_back(shape[other]);
  }
  return rows;
}

/// first, 2 * first, ..., last.
inline std::vector<std::int64_t> doublings(std::int64_t first, std::int64_t last) {
  std::vector<std::int64_t> sizes;
  for (std::int64_t size = first; size <= last; size *= 2) sizes.push_back(size);
  return sizes;
}

/// Classes drawn evenly. If half of the rows are ignored, they come in runs of 32, like prompts before their answers.
TensorView class_targets(Arena& arena, const Dims& shape, std::int64_t classes, bool half_is_ignored);

}  // namespace eaves::bench
