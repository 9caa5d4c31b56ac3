// `eaves run <operator>`: reads input tensors from a mapped file onto the device, calls the operator, and writes the
// outputs into a file that appears whole or not at all. run_operators.cpp has the operators, each with a table of
// arguments.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "cli/atomic_file.h"
#include "cli/safetensors.h"
#include "eaves/context.h"
#include "eaves/error.h"
#include "testing/benchmark.h"

namespace eaves::cli {

/// A flag, a number, a text (the name of a tensor, "" if it is not given), or a list of texts.
using Value = std::variant<bool, int, std::int64_t, double, std::string, std::vector<std::string>>;

/// An argument of an operator on the command line. It has the type of its default.
struct Argument {
  std::string flag;  ///< "--tensor"
  Value value;
  std::string help;
  bool is_required = false;
  std::vector<std::string> words = {};  ///< the words that a text may be; none: any but the empty one
  std::string member = {};  ///< the core's name, "logits"; "": from the flag, "class_axis" of "--class-axis"

  std::string core_name() const;
};

/// The arguments that every operator has, and by their flags the arguments of one operator.
struct RunArguments {
  std::string input_path;
  std::string output_path;
  std::string device = "cpu";
  int threads = 0;
  std::map<std::string, Value> values = {};
};

class Run {
 public:
  /// Reads the input's header and creates the output's temporary file. Nothing is computed before both succeed.
  explicit Run(const RunArguments& arguments);

  /// The value of a flag.
  template <typename T>
  const T& get(const std::string& flag) const {
    return std::get<T>(arguments_.values.at(flag));
  }
  bool is_set(const std::string& flag) const { return get<bool>(flag); }
  const std::string& text(const std::string& flag) const { return get<std::string>(flag); }

  /// The input tensor that `flag` names, on the device; absent if the flag is not given. On the CPU it is the mapped
  /// file itself, unless the tensor's address in the file does not suit its element type.
  TensorView input(const std::string& flag);

  /// Memory for a result, which finish() writes to the output file under `name`.
  TensorView output(const std::string& name, DType dtype, const Dims& shape);

  /// An output for the lse of rows, as the two numbers that a backward takes, on an axis of 2 behind the rows' axes.
  /// The file gets the first number, in `shape`.
  TensorView lse_output(DType dtype, Dims rows, const Dims& shape);

  /// An output() that holds the input that `flag` names, for operators that compute in place.
  TensorView output_over_input(const std::string& name, const std::string& flag);

  /// Memory filled with one number, for arguments and results of the operator that are in no file.
  TensorView filled(DType dtype, const Dims& shape, double number);

  ExecutionContext context() const { return context_; }

  void finish();

 private:
  const StoredTensor& find(const std::string& flag) const;

  RunArguments arguments_;
  Device device_;
  ExecutionContext context_;
  MappedFile file_;
  StoredTensors tensors_;
  std::optional<AtomicFile> output_file_;
  bench::Arena arena_;
  std::vector<NamedTensor> outputs_;
  Dims lse_shape_;             ///< shape of lse_output() in the file
  const void* lse_ = nullptr;  ///< memory of lse_output()
};

struct RunOperator {
  std::string name;
  std::string help;
  std::string example;  ///< the words behind "eaves run <name> --input in.safetensors"
  std::vector<Argument> arguments;
  void (*call)(Run& run);
};

std::span<const RunOperator> run_operators();

/// Runs the operator from the input file to the output file. Rethrows the core's refusals in the words of the command
/// line: with the operator's name there, and with flags for its arguments.
void run_operator(const RunOperator& item, const RunArguments& arguments);

/// The sentence of such a refusal.
std::string in_flags(const RunOperator& item, const Refusal& refusal);

}  // namespace eaves::cli
