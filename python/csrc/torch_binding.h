// Between PyTorch and eaves. Torch's tensors become views; its stream, threads and allocator become an execution
// context. The three kinds of error cross a boundary that lets only runtime_error through. Registrations of operators
// share everything here. No other folder includes torch.
//
// The binding uses only PyTorch's stable C interface (TORCH_TARGET_VERSION names its release), so that one binary
// serves every Python, and every PyTorch from that release on. Source: torch/csrc/stable,
// torch/csrc/inductor/aoti_torch/c.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "eaves/context.h"
#include "eaves/error.h"
#include "eaves/tensor.h"

namespace eaves::binding {

using Tensor = torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using ScalarType = torch::headeronly::ScalarType;

/// The operator and the argument under the user's names, for messages.
struct Name {
  const char* op;
  const char* argument;
};

/// A view of a tensor that the call reads. Throws Unsupported for a dtype, device or rank that eaves does not have.
TensorView input(const Tensor& tensor, Name name);
TensorView optional_input(const OptionalTensor& tensor, Name name);

/// A view of a tensor that the call writes.
TensorView output(const Tensor& tensor);

DType dtype_of(ScalarType type, Name name);
Dims dims_of(const std::vector<std::int64_t>& values);

/// A new contiguous tensor from torch's allocator. Throws OutOfMemory.
Tensor empty(const Dims& shape, DType dtype, Device device);

/// A new tensor and the view through which the call writes it, made without asking torch for the tensor's layout again.
struct NewTensor {
  Tensor tensor;
  TensorView view;
};
NewTensor empty_output(const Dims& shape, DType dtype, Device device);

/// A new tensor in the layout that torch.empty_like would choose: the layout of `like`, whose view is `view`, if its
/// elements lie side by side.
NewTensor empty_like(const Tensor& like, const TensorView& view);

/// The resources of an operator's call: torch's current stream of the device or torch's threads, and scratch memory
/// from torch's allocator, which lives as long as this object.
class Call {
 public:
  explicit Call(Device device);
  const ExecutionContext& context() const { return context_; }
  void take_workspace(std::size_t bytes);

 private:
  Device device_;
  ExecutionContext context_;
  std::optional<Tensor> workspace_;
};

/// Runs an operator of the core on the stream, the threads and the memory of torch:
///   run<logsumexp_forward, &logsumexp_forward_workspace_bytes>(args, args.x.device);
/// An operator that needs no workspace leaves out the second function. Most operators need none on the CPU.
template <auto* function, auto workspace_bytes = nullptr, bool kNeedsItOnCpu = false, typename Args>
void run(const Args& args, Device device) {
  Call call(device);
  if constexpr (!std::is_null_pointer_v<decltype(workspace_bytes)>) {
    // Asking for the bytes checks the arguments a second time.
    if (kNeedsItOnCpu || device.type != DeviceType::cpu) call.take_workspace(workspace_bytes(args, call.context()));
  }
  function(args, call.context());
}

/// Thrown if torch's allocator refuses.
class OutOfMemory : public DeviceError {
 public:
  using DeviceError::DeviceError;
};

/// Torch turns every exception into a RuntimeError with its message. The message therefore begins with the kind of the
/// error, and has the names of arguments in backticks (eaves/error.h). python/eaves/_torch/operator.py knows the same
/// marks, and raises the exception of that kind again, in its own names.
inline constexpr const char* kInvalidArgumentMark = "eaves.InvalidArgument: ";
inline constexpr const char* kUnsupportedMark = "eaves.Unsupported: ";
inline constexpr const char* kOutOfMemoryMark = "eaves.OutOfMemory: ";

/// The arguments of a call, each read once and in the order of the schema. An argument that was read owns its memory.
class Arguments {
 public:
  Arguments(const StableIValue* values, std::uint64_t count) : values_(values), end_(values + count) {}

  /// Reads an argument of a type that torch has, or the several arguments of `T::read`.
  template <typename T>
  T read() {
    if constexpr (requires { T::read(*this); }) {
      return T::read(*this);
    } else {
      if (values_ == end_) throw std::runtime_error("eaves: the schema has fewer arguments than the function");
      return torch::stable::detail::to<T>(*values_++);
    }
  }

 private:
  const StableIValue* values_;
  const StableIValue* end_;
};

template <auto* function>
struct Boxed;

template <typename Result, typename... Parameters, Result (*function)(Parameters...)>
struct Boxed<function> {
  static void call(StableIValue* stack, std::uint64_t count, std::uint64_t /*results*/) {
    try {
      Arguments arguments(stack, count);
      std::tuple<Parameters...> parameters{arguments.read<Parameters>()...};  // in their order, because of the braces
      if constexpr (std::is_void_v<Result>) {
        std::apply(function, std::move(parameters));
      } else {
        give(stack, std::apply(function, std::move(parameters)));
      }
    } catch (const InvalidArgument& error) {
      throw std::runtime_error(kInvalidArgumentMark + error.op() + ": " + error.sentence());
    } catch (const Unsupported& error) {
      throw std::runtime_error(kUnsupportedMark + error.op() + ": " + error.sentence());
    } catch (const OutOfMemory& error) {
      throw std::runtime_error(std::string(kOutOfMemoryMark) + ": " + error.what());
    }
  }

  template <typename T>
  static void give(StableIValue* stack, const T& result) {
    *stack = torch::stable::detail::from(result);
  }
  template <typename... T>
  static void give(StableIValue* stack, const std::tuple<T...>& results) {
    std::apply([&](const T&... each) { ((*stack++ = torch::stable::detail::from(each)), ...); }, results);
  }
};

/// The argument of m.impl(): `function` with its errors marked, in torch's calling convention.
#define EAVES_BOX(function) (&::eaves::binding::Boxed<&function>::call)

/// Registers, for both devices, the functions that `implement(library)` adds to a library.
#define EAVES_IMPLEMENT(implement)                                       \
  STABLE_TORCH_LIBRARY_IMPL(eaves, CPU, library) { implement(library); } \
  STABLE_TORCH_LIBRARY_IMPL(eaves, CUDA, library) { implement(library); }

using Library = torch::stable::detail::StableLibrary;

}  // namespace eaves::binding
