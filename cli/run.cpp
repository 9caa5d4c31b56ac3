// See run.h.
#include "cli/run.h"

#include <fmt/format.h>

#include <cstdint>
#include <utility>

#include "cli/commands.h"
#include "cli/operators.h"
#include "cli/options.h"
#include "core/check.h"
#include "eaves/error.h"
#include "runtime/runtime.h"

namespace eaves::cli {
namespace {

MappedFile map_input(const RunArguments& arguments) { return MappedFile("--input", arguments.input_path); }

// What a wrong name could have been: the names in the file, as many as fit a line.
std::string list_names(const StoredTensors& tensors) {
  constexpr std::size_t kShown = 8;
  std::string list;
  std::size_t count = 0;
  for (const auto& [name, tensor] : tensors) {
    if (count++ == kShown) return list + fmt::format(" and {} more", tensors.size() - kShown);
    list += (list.empty() ? "" : ", ") + in_quotes(name);
  }
  return list.empty() ? "none" : list;
}

}  // namespace

void RunArguments::add_to(CLI::App& command) {
  command.add_option("--input", input_path, "A safetensors file")->required();
  command.add_option("--output", output_path, "The safetensors file to write; replaced if it exists")->required();
  command.add_option("--device", device, "cpu, cuda or cuda:N")->capture_default_str();
  command.add_option("--threads", threads, "CPU threads; 0: all")->check(CLI::Range(0, 4096))->capture_default_str();
}

Run::Run(const RunArguments& arguments)
    : arguments_(arguments),
      device_(parse_device(arguments.device)),
      file_(map_input(arguments)),
      tensors_(parse_safetensors(file_.bytes(), arguments.input_path)),
      arena_(device_) {
  context_.threads = arguments.threads;
  if (file_.is_same_file(arguments.output_path)) {
    throw InvalidArgument(fmt::format("--output: {} is the input file, expected another one", arguments.output_path));
  }
  output_file_.emplace("--output", arguments.output_path);
}

Run::Found Run::find(const std::string& argument, const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    throw InvalidArgument(fmt::format("{}: {} has no tensor {}, expected one of: {}", argument, arguments_.input_path,
                                      in_quotes(name), list_names(tensors_)));
  }
  const StoredTensor& stored = found->second;
  if (!stored.dtype) {
    throw InvalidArgument(
        fmt::format("{}: tensor {} of {} has dtype {}, which is unsupported; expected BOOL, U8, I8, "
                    "I16, I32, I64, F16, BF16, F32 or F64",
                    argument, in_quotes(name), arguments_.input_path, stored.dtype_name));
  }
  return {stored, *stored.dtype};
}

TensorView Run::input(const std::string& argument, const std::string& name) {
  const auto [stored, dtype] = find(argument, name);
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(stored.data.data()) % size_of(dtype) == 0;
  if (device_ == kCpu && is_aligned) {
    return TensorView::contiguous(static_cast<const void*>(stored.data.data()), dtype, stored.shape);
  }
  void* data = arena_.allocate(stored.data.size());
  runtime::copy(data, device_, stored.data.data(), kCpu, stored.data.size());
  return TensorView::contiguous(data, dtype, stored.shape, device_);
}

TensorView Run::output(const std::string& name, DType dtype, const Dims& shape) {
  TensorView view = arena_.output(dtype, shape);
  outputs_.push_back({name, view});
  return view;
}

TensorView Run::output_over_input(const std::string& name, const std::string& argument, const std::string& input_name) {
  const auto [stored, dtype] = find(argument, input_name);
  const TensorView view = output(name, dtype, stored.shape);
  runtime::copy(view.data, device_, stored.data.data(), kCpu, stored.data.size());
  return view;
}

TensorView Run::filled(DType dtype, const Dims& shape, double number) {
  return arena_.filled(dtype, shape, {&number, 1});
}

void Run::finish() {
  runtime::synchronize(device_);
  bench::Arena host_arena(kCpu);
  for (NamedTensor& output : outputs_) {
    if (device_ == kCpu) continue;
    const std::size_t bytes = static_cast<std::size_t>(output.view.element_count()) * size_of(output.view.dtype);
    void* host = host_arena.allocate(bytes);
    runtime::copy(host, kCpu, output.view.data, device_, bytes);
    output.view = TensorView::contiguous(host, output.view.dtype, output.view.shape);
  }
  write_safetensors(*output_file_, outputs_);
  output_file_->commit();
  std::string list;
  for (const NamedTensor& output : outputs_) {
    list += fmt::format("{}{} {} {}", list.empty() ? "" : ", ", output.name, name_of(output.view.dtype),
                        check::to_string(output.view.shape));
  }
  fmt::print("{}: {}\n", arguments_.output_path, list);
}

void add_run_command(CLI::App& program) {
  CLI::App* command = program.add_subcommand("run", "Apply an operator to tensors of a safetensors file.");
  command->footer("Example:\n  eaves run logsumexp --input in.safetensors --tensor x --output out.safetensors");
  command->require_subcommand(1);
  for (const Operator& item : registered_operators()) item.add_run(*command);
}

}  // namespace eaves::cli
