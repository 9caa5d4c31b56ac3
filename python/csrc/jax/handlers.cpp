// Between XLA and eaves: buffers become views, and XLA's stream or thread pool becomes an execution context. No other
// file includes XLA's headers, and none includes Python's: eaves.jax loads this library by ctypes and hands the
// handlers to JAX by their addresses. XLA's interface is C with a version, so that one binary serves the jaxlib that it
// was built with and every later one.
//
// Scratch memory is the last result of a call that needs any. It is therefore part of XLA's plan for the device's
// memory, also on the CPU, and it exists in each replay of a recorded call (a command buffer).
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <latch>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/self_test_cases.h"
#include "cli/system_report.h"
#include "core/check.h"
#include "core/loss_options.h"
#include "eaves/error.h"
#include "eaves/system.h"
#include "eaves/version.h"
#include "jax/call.h"
#include "xla/ffi/api/ffi.h"

namespace eaves::jax {
namespace {

namespace ffi = xla::ffi;

constexpr std::size_t kAlignment = 256;  // of a workspace; XLA aligns its buffers to 64 bytes, on a GPU to 128 or more

// ---- buffers -------------------------------------------------------------------------------------------------------

DType dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return DType::float32;
    case ffi::DataType::F64:
      return DType::float64;
    case ffi::DataType::F16:
      return DType::float16;
    case ffi::DataType::BF16:
      return DType::bfloat16;
    case ffi::DataType::S32:
      return DType::int32;
    case ffi::DataType::S64:
      return DType::int64;
    default:
      throw Unsupported("eaves.jax: a buffer has a dtype that eaves does not support");
  }
}

TensorView view_of(ffi::AnyBuffer buffer, Device device) {
  const auto dimensions = buffer.dimensions();
  return TensorView::contiguous(buffer.untyped_data(), dtype_of(buffer.element_type()),
                                Dims(dimensions.begin(), dimensions.size()), device);
}

// ---- threads -------------------------------------------------------------------------------------------------------

/// A loop on XLA's threads. The caller takes part, and waits only for pieces that a thread has begun: the caller may
/// itself be one of these threads, and all others may be waiting in the same way.
class Loop {
 public:
  Loop(std::int64_t count, ParallelFor::Body body, void* data)
      : count_(count), body_(body), data_(data), left_(static_cast<std::ptrdiff_t>(count)) {}

  void take_pieces() {
    std::int64_t done = 0;
    for (std::int64_t piece = next_++; piece < count_; piece = next_++, ++done) body_(data_, piece, piece + 1);
    if (done != 0) left_.count_down(done);
  }

  void wait() { left_.wait(); }

 private:
  const std::int64_t count_;
  const ParallelFor::Body body_;
  void* const data_;
  std::atomic<std::int64_t> next_ = 0;
  std::latch left_;  // std::condition_variable needs a newer libstdc++ than the rest
};

void run_on_xla_threads(void* pool, std::int64_t count, ParallelFor::Body body, void* data) {
  auto& threads = *static_cast<ffi::ThreadPool*>(pool);
  // Shared, because a thread may reach the loop after the last piece is done and the caller has returned.
  const auto loop = std::make_shared<Loop>(count, body, data);
  const std::int64_t helpers = std::min(count, threads.num_threads()) - 1;
  for (std::int64_t i = 0; i < helpers; ++i) threads.Schedule([loop] { loop->take_pieces(); });
  loop->take_pieces();
  loop->wait();
}

// ---- handlers ------------------------------------------------------------------------------------------------------

ffi::Error run(std::string_view description, ffi::RemainingArgs operands, ffi::RemainingRets results, Device device,
               ExecutionContext context, std::int64_t workspace_bytes) {
  try {
    std::vector<TensorView> tensors;
    tensors.reserve(operands.size() + results.size());
    for (std::size_t i = 0; i < operands.size(); ++i) {
      tensors.push_back(view_of(operands.get<ffi::AnyBuffer>(i).value(), device));
    }
    const std::size_t written = results.size() - (workspace_bytes > 0 ? 1 : 0);
    for (std::size_t i = 0; i < written; ++i) {
      tensors.push_back(view_of(*results.get<ffi::AnyBuffer>(i).value(), device));
    }
    if (workspace_bytes > 0) {
      ffi::AnyBuffer scratch = *results.get<ffi::AnyBuffer>(written).value();
      void* data = scratch.untyped_data();
      std::size_t space = scratch.size_bytes();
      const auto bytes = static_cast<std::size_t>(workspace_bytes);
      context.workspace = {std::align(kAlignment, bytes, data, space), bytes};
    }
    Call::of(description).run(tensors, context);
    return ffi::Error::Success();
  } catch (const InvalidArgument& error) {
    return ffi::Error::InvalidArgument(error.what());
  } catch (const Unsupported& error) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented, error.what());
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "eaves.jax: out of memory");
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

ffi::Error run_on_cpu(ffi::ThreadPool threads, ffi::RemainingArgs operands, ffi::RemainingRets results,
                      std::string_view description, std::int64_t workspace_bytes) {
  ExecutionContext context;
  context.parallel_for = {run_on_xla_threads, &threads};
  // Four pieces per thread even out the cost of interruptions and of uneven rows.
  context.threads = static_cast<int>(std::clamp<std::int64_t>(threads.num_threads(), 1, 1024)) * 4;
  return run(description, operands, results, kCpu, context, workspace_bytes);
}

ffi::Error run_on_gpu(void* stream, std::int32_t device, ffi::RemainingArgs operands, ffi::RemainingRets results,
                      std::string_view description, std::int64_t workspace_bytes) {
  ExecutionContext context;
  context.stream = stream;
  return run(description, operands, results, {DeviceType::cuda, device}, context, workspace_bytes);
}

// ---- tracing ------------------------------------------------------------------------------------------------------

DType dtype_of(const std::string& name) {
  for (const DType dtype :
       {DType::float32, DType::float64, DType::float16, DType::bfloat16, DType::int32, DType::int64}) {
    if (name == name_of(dtype)) return dtype;
  }
  throw Unsupported("eaves.jax: an array has dtype " + name +
                    ", expected one of bfloat16, float16, float32, float64, int32, int64");
}

/// Views of memory that does not exist yet, each at an address of its own. Integers that the core's check reads on the
/// CPU do exist: they are in `values`.
std::vector<TensorView> views_without_memory(const nlohmann::json& question, Device device,
                                             std::deque<std::vector<std::int64_t>>& values) {
  std::vector<TensorView> views;
  std::uintptr_t next = std::uintptr_t{1} << 44;
  for (const auto& tensor : question.at("tensors")) {
    const auto shape = tensor.at("shape").get<std::vector<std::int64_t>>();
    if (shape.size() > static_cast<std::size_t>(kMaxRank)) {
      throw Unsupported("eaves.jax: an array has " + std::to_string(shape.size()) + " axes, expected at most " +
                        std::to_string(kMaxRank));
    }
    const DType dtype = dtype_of(tensor.at("dtype").get<std::string>());
    views.push_back(
        TensorView::contiguous(reinterpret_cast<void*>(next), dtype, Dims(shape.data(), shape.size()), device));
    const std::uintptr_t bytes = static_cast<std::uintptr_t>(views.back().element_count()) * size_of(dtype);
    next += (bytes / 4096 + 2) * 4096;
    if (const auto& looked_at = tensor.at("values"); !looked_at.empty() && device == kCpu) {
      auto& numbers = values.emplace_back(looked_at.get<std::vector<std::int64_t>>());
      if (dtype == DType::int32) {
        const std::vector<std::int32_t> narrow(numbers.begin(), numbers.end());
        std::memcpy(numbers.data(), narrow.data(), narrow.size() * sizeof(std::int32_t));
      }
      views.back().data = numbers.data();
    }
  }
  // A result over an operand, if XLA is asked for that.
  for (const auto& [written, read] : question.at("aliases").get<std::vector<std::pair<int, int>>>()) {
    views.at(written).data = views.at(read).data;
  }
  return views;
}

}  // namespace
}  // namespace eaves::jax

#define EAVES_EXPORT extern "C" __attribute__((visibility("default")))

EAVES_EXPORT XLA_FFI_Error* eaves_jax_cpu(XLA_FFI_CallFrame* frame);
EAVES_EXPORT XLA_FFI_Error* eaves_jax_cuda(XLA_FFI_CallFrame* frame);
EAVES_EXPORT XLA_FFI_Error* eaves_jax_cuda_products(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(eaves_jax_cpu, eaves::jax::run_on_cpu,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("call")
                                  .Attr<std::int64_t>("workspace_bytes"));

#define EAVES_CUDA_BINDING                                                    \
  xla::ffi::Ffi::Bind()                                                       \
      .Ctx<xla::ffi::PlatformStream<void*>>() /* cudaStream_t is a pointer */ \
      .Ctx<xla::ffi::DeviceOrdinal>()                                         \
      .RemainingArgs()                                                        \
      .RemainingRets()                                                        \
      .Attr<std::string_view>("call")                                         \
      .Attr<std::int64_t>("workspace_bytes")

// A call only enqueues kernels, so that XLA may record it, even its first run. A matrix product is different: the first
// one of a process also makes a handle of cuBLASLt, which no recording allows. Recording would gain nothing for it,
// because its calls take milliseconds.
XLA_FFI_DEFINE_HANDLER_SYMBOL(eaves_jax_cuda, eaves::jax::run_on_gpu, EAVES_CUDA_BINDING,
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(eaves_jax_cuda_products, eaves::jax::run_on_gpu, EAVES_CUDA_BINDING);

/// Checks a call before its memory exists, and gives the bytes of its workspace and of the scratch buffer, which has
/// room to align it; 0 if it needs none. `question` is JSON: the call, the device ("cpu" or "cuda"), the shapes and
/// dtypes of its tensors, the values of integers that the check reads, and the pairs of tensors that share memory.
/// Returns nullptr, or the kind of the error, a colon and its message, which lives until the thread's next question.
EAVES_EXPORT const char* eaves_jax_workspace_bytes(const char* question, std::int64_t* workspace_bytes,
                                                   std::int64_t* buffer_bytes) {
  using namespace eaves;
  thread_local std::string message;
  try {
    const auto asked = nlohmann::json::parse(question);
    const Device device = asked.at("device") == "cpu" ? kCpu : kCuda;
    const auto call = jax::Call::parse(asked.at("call").get<std::string>());
    std::deque<std::vector<std::int64_t>> values;
    const std::size_t bytes = call->workspace_bytes(jax::views_without_memory(asked, device, values));
    *workspace_bytes = static_cast<std::int64_t>(bytes);
    *buffer_bytes = bytes == 0 ? 0 : static_cast<std::int64_t>(bytes + jax::kAlignment);
    return nullptr;
  } catch (const InvalidArgument& error) {
    message = std::string("InvalidArgument:") + error.what();
  } catch (const Unsupported& error) {
    message = std::string("Unsupported:") + error.what();
  } catch (const std::exception& error) {
    message = std::string("DeviceError:") + error.what();
  }
  return message.c_str();
}

/// JSON: the version, and the table of the losses' options. Does not touch a GPU.
EAVES_EXPORT const char* eaves_jax_table() {
  static const std::string text = [] {
    nlohmann::json table = {{"version", EAVES_VERSION}};
    for (const eaves::LossOption& option : eaves::kLossOptions) {
      table["loss_options"].push_back({{"name", option.name},
                                       {"keyword", option.flag + 2},  // without the "--" of the command line
                                       {"default", eaves::CrossEntropyOptions{}.*option.value}});
    }
    return table.dump();
  }();
  return text.c_str();
}

/// The text of `eaves info --json` for this library.
EAVES_EXPORT const char* eaves_jax_system() {
  static const std::string text = eaves::cli::system_json(eaves::system_info());
  return text.c_str();
}

/// The lines of the self-test; writes how many of its cases differ. The text lives until the next call.
EAVES_EXPORT const char* eaves_jax_self_test(std::int64_t* differing) {
  static std::string text;
  text.clear();
  *differing = eaves::cli::self_test([](const std::string& line) { text += line + "\n"; });
  return text.c_str();
}
