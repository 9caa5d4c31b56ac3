// `eaves run <operator>`: input tensors from a mapped file, onto the device; the operator's call; outputs back and into
// a file that appears whole or not at all. The operators, a table of arguments each, are in run_operators.cpp.
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

/// A flag that is set, a number, a text (of a tensor its name, "" where it is not given), or a list of texts.
using Value = std::variant<bool, int, std::int64_t, double, std::string, std::vector<std::string>>;

/// An argument of an operator on the command line. The type of the default is that of the argument.
struct Argument {
  std::string flag;  ///< "--tensor"
  Value value;
  std::string help;
  bool is_required = false;
  std::vector<std::string> words = {};  ///< of a text: the only ones; none: any but the empty one
  std::string member = {};  ///< the core's name, "logits"; none: as the flag, "class_axis" of "--class-axis"

  std::string core_name() const;
};

/// The arguments that every operator has, and those of its own by their flags.
struct RunArguments {
  std::string input_path;
  std::string output_path;
  std::string device = "cpu";
  int threads = 0;
  std::map<std::string, Value> values = {};
};

class Run {
 public:
  /// Reads the input's header and creates the output's temporary file; nothing is computed before both have succeeded.
  explicit Run(const RunArguments& arguments);

  /// The value of a flag.
  template <typename T>
  const T& get(const std::string& flag) const {
    return std::get<T>(arguments_.values.at(flag));
  }
  bool is_set(const std::string& flag) const { return get<bool>(flag); }
  const std::string& text(const std::string& flag) const { return get<std::string>(flag); }

  /// The tensor of the input that `flag` names, on the device; none where it is not given. On the CPU it is the mapped
  /// file itself, except where the file has put it at an address that its element type cannot be read from.
  TensorView input(const std::string& flag);

  /// Memory for a result, which finish() writes to the output file under `name`.
  TensorView output(const std::string& name, DType dtype, const Dims& shape);

  /// The same of the lse of rows, as the two numbers that a backward takes, on an axis of 2 behind the rows'. The file
  /// gets the first, in `shape`.
  TensorView lse_output(DType dtype, Dims rows, const Dims& shape);

  /// As output(), holding the input that `flag` names: for operators that compute in place.
  TensorView output_over_input(const std::string& name, const std::string& flag);

  /// Memory full of one number, for what the operator takes or gives and no file has.
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
  Dims lse_shape_;             ///< of lse_output(), in the file
  const void* lse_ = nullptr;  ///< its memory
};

struct RunOperator {
  std::string name;
  std::string help;
  std::string example;  ///< what follows "eaves run <name> --input in.safetensors"
  std::vector<Argument> arguments;
  void (*call)(Run& run);
};

std::span<const RunOperator> run_operators();

/// From the input to the output. Throws the core's sentences in the words of the command line: the operator as it is
/// called there, and flags for its arguments.
void run_operator(const RunOperator& item, const RunArguments& arguments);

/// Such a sentence.
std::string in_flags(const RunOperator& item, const Refusal& refusal);

}  // namespace eaves::cli
