// What an operator declares so that the harness can measure it: tables, rows, the bytes a row has to move (or another
// limit of its own), and how to make the buffers and the call. No timing code is here or in any operator; no operator
// is named in the harness.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "eaves/context.h"
#include "eaves/tensor.h"

namespace eaves::bench {

/// Device memory whose sum the harness reports as the row's peak. Everything that a Call allocates comes from here.
class Arena {
 public:
  explicit Arena(Device device) : device_(device) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  Device device() const { return device_; }
  std::int64_t bytes() const { return bytes_; }

  /// Memory with nothing in it yet.
  void* allocate(std::size_t bytes);

  /// A contiguous tensor of normal random numbers with mean 0, never zeros; `seed` fixes them.
  TensorView normal(DType dtype, const Dims& shape, std::uint64_t seed, double deviation = 1.0);

  /// A contiguous tensor of any dtype with these numbers, again and again until it is full: targets, weights, and
  /// whatever else must not be normal numbers. Throws InvalidArgument where there are none to fill it with.
  TensorView filled(DType dtype, const Dims& shape, std::span<const double> numbers);

  /// A contiguous tensor that the call writes.
  TensorView output(DType dtype, const Dims& shape);

 private:
  Device device_;
  std::int64_t bytes_ = 0;
  std::vector<void*> blocks_;
};

/// One call with its buffers, ready to run again and again.
class Call {
 public:
  virtual ~Call() = default;
  virtual std::size_t workspace_bytes(const ExecutionContext& context) const = 0;
  virtual void run(const ExecutionContext& context) = 0;

  /// Puts back the inputs that run() has overwritten; called before each run() but the first, and not timed. May wait
  /// for the device.
  virtual void restore() {}
};

/// One row of a table.
struct Row {
  std::int64_t axis_value = 0;  ///< what stands in the table's first column: n, v
  /// The keys of "shape" in the result file, in order: {"batch", 4}, {"dim", 1024}, {"n", 32768}.
  std::vector<std::pair<std::string, std::int64_t>> shape;
  /// The keys of "options" that differ from the defaults, values as JSON text: {"axis", "0"}, {"layout", "\"first\""}.
  std::vector<std::pair<std::string, std::string>> options;
  /// What any implementation has to read and write: what the `limit` column streams, where the row has no other.
  std::int64_t read_bytes = 0;
  std::int64_t write_bytes = 0;
  /// Floating-point operations that any implementation has to do, where these and not the bytes are what takes time.
  std::int64_t operations = 0;
  /// Makes inputs and outputs in `arena` and the call on them.
  std::function<std::unique_ptr<Call>(Arena& arena)> make_call;
  /// Optional: makes what the `limit` column runs instead of streaming, on buffers of its own. It overwrites none of
  /// its inputs, and finds no workspace in its context.
  std::function<std::unique_ptr<Call>(Arena& arena)> make_limit;
  std::int64_t limit_bytes = 0;  ///< of those buffers
};

/// One pair of tables of the output (speed, memory), one mode, rows along one axis.
struct Table {
  std::string op;    ///< "logsumexp"
  std::string mode;  ///< "fwd", "bwd", "fwd+bwd"
  /// What the title begins with where that is not `op`: a published table may have another name for it.
  std::string title_op = {};
  /// What follows "<op>-speed-<mode>-" in the title: "batch4-dim1024-bf16".
  std::string title_suffix;
  std::string axis_name;  ///< head of the first column: "n"
  DType dtype = DType::bfloat16;
  /// The axis and the title say what a row is, whatever its options: none is named behind the numbers.
  bool axis_tells_all = false;
  std::vector<Row> rows;
};

enum class Sweep {
  quick,  ///< what a quiet device shows in a few minutes, all operators together: the seed tables where they fit
          ///< in that time, and the layouts that the seed tables leave out
  seed,   ///< every row of the seed tables, no others
};

struct Request {
  Sweep sweep = Sweep::quick;
  Device device = kCpu;
  DType dtype = DType::bfloat16;
  bool has_dtype = false;  ///< the user named the dtype: tables of other dtypes are left out
};

/// What <op>_bench.cpp defines. The list of all of them is registered_operators(), in cli/operators.cpp.
struct Operator {
  std::string name;
  std::vector<Table> (*tables)(const Request& request);
};

}  // namespace eaves::bench
