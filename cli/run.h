// What `eaves run <operator>` does whatever the operator: input tensors from a mapped file, onto the device; outputs
// back and into a file that appears whole or not at all. An operator's own part is cli/run_<operator>.cpp.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/atomic_file.h"
#include "cli/safetensors.h"
#include "eaves/context.h"
#include "testing/benchmark.h"

namespace eaves::cli {

/// The arguments that every operator has.
struct RunArguments {
  std::string input_path;
  std::string output_path;
  std::string device = "cpu";
  int threads = 0;

  void add_to(CLI::App& command);
};

class Run {
 public:
  /// Reads the input's header and creates the output's temporary file; nothing is computed before both have succeeded.
  explicit Run(const RunArguments& arguments);

  /// The tensor of the input that `argument` names, on the device. On the CPU it is the mapped file itself, except
  /// where the file has put it at an address that its element type cannot be read from.
  TensorView input(const std::string& argument, const std::string& name);

  /// The same where there is a name, and no tensor where it is empty.
  TensorView optional_input(const std::string& argument, const std::string& name) {
    return name.empty() ? TensorView{} : input(argument, name);
  }

  /// Memory for a result, which finish() writes to the output file under `name`.
  TensorView output(const std::string& name, DType dtype, const Dims& shape);

  /// The same, holding the input that `argument` names: for operators that compute in place.
  TensorView output_over_input(const std::string& name, const std::string& argument, const std::string& input_name);

  /// Memory full of one number, for what the operator takes or gives and no file has.
  TensorView filled(DType dtype, const Dims& shape, double number);

  ExecutionContext context() const { return context_; }

  void finish();

 private:
  struct Found {
    const StoredTensor& stored;
    DType dtype;
  };
  Found find(const std::string& argument, const std::string& name) const;

  RunArguments arguments_;
  Device device_;
  ExecutionContext context_;
  MappedFile file_;
  StoredTensors tensors_;
  std::optional<AtomicFile> output_file_;
  bench::Arena arena_;
  std::vector<NamedTensor> outputs_;
};

}  // namespace eaves::cli
