// See run.h.
#include "cli/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cli/options.h"
#include "core/check.h"
#include "eaves/error.h"
#include "runtime/runtime.h"

namespace eaves::cli {
namespace {

// Help after a wrong name: the names in the file, as many as fit a line.
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

Run::Run(const RunArguments& arguments)
    : arguments_(arguments),
      device_(parse_device(arguments.device)),
      file_("--input", arguments.input_path),
      tensors_(parse_safetensors(file_.bytes(), arguments.input_path)),
      arena_(device_) {
  context_.threads = arguments.threads;
  if (file_.is_same_file(arguments.output_path)) {
    throw InvalidArgument(
        fmt::format("--output: {} is the input file, expected a different file", arguments.output_path));
  }
  output_file_.emplace("--output", arguments.output_path);
}

const StoredTensor& Run::find(const std::string& flag) const {
  const std::string& name = text(flag);
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    throw InvalidArgument(fmt::format("{}: {} has no tensor {}, expected one of: {}", flag, arguments_.input_path,
                                      in_quotes(name), list_names(tensors_)));
  }
  if (!found->second.dtype) {
    throw InvalidArgument(
        fmt::format("{}: tensor {} of {} has dtype {}, which is unsupported; expected BOOL, U8, I8, "
                    "I16, I32, I64, F16, BF16, F32 or F64",
                    flag, in_quotes(name), arguments_.input_path, found->second.dtype_name));
  }
  return found->second;
}

TensorView Run::input(const std::string& flag) {
  if (text(flag).empty()) return {};
  const StoredTensor& stored = find(flag);
  const DType dtype = *stored.dtype;
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(stored.data.data()) % size_of(dtype) == 0;
  if (device_ == kCpu && is_aligned) {
    return TensorView::contiguous(static_cast<const void*>(stored.data.data()), dtype, stored.shape);
  }
  void* data = arena_.allocate(stored.data.size());
  runtime::copy(data, device_, stored.data.data(), kCpu, stored.data.size());
  return TensorView::contiguous(data, dtype, stored.shape, device_);
}

TensorView Run::output(const std::string& name, DType dtype, const Dims& shape) {
  outputs_.push_back({name, arena_.output(dtype, shape)});
  return outputs_.back().view;
}

TensorView Run::lse_output(DType dtype, Dims rows, const Dims& shape) {
  rows.push_back(2);
  const TensorView view = output("lse", dtype, rows);
  lse_shape_ = shape;
  lse_ = view.data;
  return view;
}

TensorView Run::output_over_input(const std::string& name, const std::string& flag) {
  const StoredTensor& stored = find(flag);
  const TensorView view = output(name, *stored.dtype, stored.shape);
  runtime::copy(view.data, device_, stored.data.data(), kCpu, stored.data.size());
  return view;
}

TensorView Run::filled(DType dtype, const Dims& shape, double number) {
  return arena_.filled(dtype, shape, {&number, 1});
}

namespace {

/// The first number of each pair along the last axis, in the memory of `pairs`.
TensorView first_numbers(const TensorView& pairs, const Dims& shape) {
  const std::size_t size = size_of(pairs.dtype);
  auto* const to = static_cast<char*>(pairs.data);
  for (std::int64_t i = 1; i < pairs.element_count() / 2; ++i) {
    std::memcpy(to + static_cast<std::size_t>(i) * size, to + static_cast<std::size_t>(2 * i) * size, size);
  }
  return TensorView::contiguous(pairs.data, pairs.dtype, shape);
}

}  // namespace

void Run::finish() {
  runtime::synchronize(device_);
  file_.check_unchanged();
  bench::Arena host_arena(kCpu);
  std::string list;
  for (auto& [name, view] : outputs_) {
    const bool is_lse = view.data == lse_ && lse_ != nullptr;
    if (device_ != kCpu) {
      const std::size_t bytes = static_cast<std::size_t>(view.element_count()) * size_of(view.dtype);
      void* host = host_arena.allocate(bytes);
      runtime::copy(host, kCpu, view.data, device_, bytes);
      view = TensorView::contiguous(host, view.dtype, view.shape);
    }
    if (is_lse) view = first_numbers(view, lse_shape_);
    list +=
        fmt::format("{}{} {} {}", list.empty() ? "" : ", ", name, name_of(view.dtype), check::to_string(view.shape));
  }
  write_safetensors(*output_file_, outputs_);
  output_file_->commit();
  fmt::print("{}: {}\n", arguments_.output_path, list);
}

std::string Argument::core_name() const {
  std::string name = flag.substr(2);
  std::replace(name.begin(), name.end(), '-', '_');
  return member.empty() ? name : member;
}

std::string in_flags(const RunOperator& item, const Refusal& refusal) {
  if (refusal.op().empty()) return refusal.sentence();
  return item.name + ": " + refusal.sentence_with([&](const std::string& name) {
    for (const Argument& argument : item.arguments) {
      if (argument.core_name() == name) return argument.flag;
    }
    return name;
  });
}

void run_operator(const RunOperator& item, const RunArguments& arguments) {
  Run run(arguments);
  try {
    item.call(run);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(in_flags(item, error));
  } catch (const Unsupported& error) {
    throw Unsupported(in_flags(item, error));
  }
  run.finish();
}

}  // namespace eaves::cli
