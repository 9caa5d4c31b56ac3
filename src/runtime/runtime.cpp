// The CPU side of runtime/runtime.h, and the branch to the CUDA side (src/cuda/runtime.h has the same names). A build
// without CUDA throws Unsupported for a GPU; it links because of `if constexpr (kHasCuda)`.
#include "runtime/runtime.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "cpu/cache.h"
#include "cpu/gemm.h"
#include "cpu/parallel.h"
#include "cpu/stream.h"
#include "cuda/device.h"
#include "cuda/gemm.h"
#include "cuda/runtime.h"
#include "eaves/error.h"
#include "runtime/backend.h"

namespace eaves::runtime {
namespace {

constexpr std::size_t kPageBytes = 4096;

[[noreturn]] void refuse_cuda() {
  throw Unsupported("this build of eaves has no CUDA backend; install a CUDA toolkit and build again");
}

bool is_cpu(Device device) { return device.type == DeviceType::cpu; }

// The number at the start of a file. "max" and a missing file mean no limit.
std::int64_t read_number(const char* path) {
  std::ifstream file(path);
  std::int64_t number = 0;
  return (file >> number) ? number : std::numeric_limits<std::int64_t>::max();
}

std::int64_t available_cpu_memory_bytes() {
  std::int64_t available = std::numeric_limits<std::int64_t>::max();
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    if (line.rfind("MemAvailable:", 0) == 0) available = std::atoll(line.c_str() + 13) * 1024;
  }
  // The system may kill a container for its memory long before the machine has run out.
  const std::int64_t limit = read_number("/sys/fs/cgroup/memory.max");
  if (limit != std::numeric_limits<std::int64_t>::max()) {
    const std::int64_t used = read_number("/sys/fs/cgroup/memory.current");
    available = std::min(available, std::max<std::int64_t>(0, limit - used));
  }
  return available;
}

std::string cpu_model_name() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    const auto colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "CPU";
}

}  // namespace

int gpu_count() {
  if constexpr (kHasCuda) return cuda::gpu_count();
  return 0;
}

std::int64_t free_memory_bytes(Device device) {
  if (is_cpu(device)) return available_cpu_memory_bytes();
  if constexpr (kHasCuda) return cuda::runtime::free_memory_bytes(device);
  refuse_cuda();
}

void* allocate(Device device, std::size_t bytes) {
  if (is_cpu(device)) {
    // Linux grants memory that it does not have, and kills the process that writes to it. Large requests are therefore
    // compared with the available memory first.
    constexpr std::size_t kWorthAsking = std::size_t{64} << 20;
    const bool is_too_large = bytes > std::numeric_limits<std::size_t>::max() - kPageBytes ||
                              (bytes >= kWorthAsking && bytes > static_cast<std::size_t>(available_cpu_memory_bytes()));
    const std::size_t rounded = std::max(kPageBytes, (bytes + kPageBytes - 1) / kPageBytes * kPageBytes);
    void* data = is_too_large ? nullptr : std::aligned_alloc(kPageBytes, rounded);
    if (data == nullptr) throw DeviceError("out of memory: " + std::to_string(bytes) + " bytes on the CPU");
    return data;
  }
  if constexpr (kHasCuda) return cuda::runtime::allocate(device, bytes);
  refuse_cuda();
}

void deallocate(Device device, void* data) noexcept {
  if (is_cpu(device)) {
    std::free(data);
    return;
  }
  if constexpr (kHasCuda) cuda::runtime::deallocate(device, data);
}

void copy(void* destination, Device destination_device, const void* source, Device source_device, std::size_t bytes) {
  if (bytes == 0) return;  // null pointers are legal here, and memcpy must not see them
  if (is_cpu(destination_device) && is_cpu(source_device)) {
    std::memcpy(destination, source, bytes);
    return;
  }
  if constexpr (!kHasCuda) refuse_cuda();
  if constexpr (kHasCuda) cuda::runtime::copy(destination, destination_device, source, source_device, bytes);
}

void fill_bytes(Device device, void* data, unsigned char value, std::size_t bytes) {
  if (bytes == 0) return;
  if (is_cpu(device)) {
    std::memset(data, value, bytes);
    return;
  }
  if constexpr (!kHasCuda) refuse_cuda();
  if constexpr (kHasCuda) cuda::runtime::fill_bytes(device, data, value, bytes);
}

void synchronize(Device device) {
  if (is_cpu(device)) return;
  if constexpr (!kHasCuda) refuse_cuda();
  if constexpr (kHasCuda) cuda::runtime::synchronize(device);
}

Stream::Stream(Device device) : device_(device) {
  if (is_cpu(device)) return;
  if constexpr (!kHasCuda) refuse_cuda();
  if constexpr (kHasCuda) handle_ = cuda::runtime::create_stream(device);
}

Stream::~Stream() {
  if constexpr (kHasCuda) {
    if (handle_ != nullptr) cuda::runtime::destroy_stream(device_, handle_);
  }
}

struct Stopwatch::Impl {
  Device device;
  std::chrono::steady_clock::time_point cpu_start, cpu_stop;
  void* gpu_start = nullptr;
  void* gpu_stop = nullptr;

  explicit Impl(Device on) : device(on) {
    if (is_cpu(device)) return;
    if constexpr (!kHasCuda) refuse_cuda();
    if constexpr (kHasCuda) {
      gpu_start = cuda::runtime::create_event(device);
      gpu_stop = cuda::runtime::create_event(device);
    }
  }

  ~Impl() {
    if constexpr (kHasCuda) {
      if (gpu_start != nullptr) cuda::runtime::destroy_event(device, gpu_start);
      if (gpu_stop != nullptr) cuda::runtime::destroy_event(device, gpu_stop);
    }
  }
};

Stopwatch::Stopwatch(Device device) : impl_(std::make_unique<Impl>(device)) {}
Stopwatch::~Stopwatch() = default;

void Stopwatch::start(void* stream) {
  if (is_cpu(impl_->device)) {
    impl_->cpu_start = std::chrono::steady_clock::now();
    return;
  }
  if constexpr (kHasCuda) cuda::runtime::record_event(impl_->device, impl_->gpu_start, stream);
}

void Stopwatch::stop(void* stream) {
  if (is_cpu(impl_->device)) {
    impl_->cpu_stop = std::chrono::steady_clock::now();
    return;
  }
  if constexpr (kHasCuda) cuda::runtime::record_event(impl_->device, impl_->gpu_stop, stream);
}

double Stopwatch::elapsed_ms() {
  if (is_cpu(impl_->device)) {
    return std::chrono::duration<double, std::milli>(impl_->cpu_stop - impl_->cpu_start).count();
  }
  if constexpr (kHasCuda) return cuda::runtime::elapsed_ms(impl_->device, impl_->gpu_start, impl_->gpu_stop);
  refuse_cuda();
}

void capture_and_replay(Device device, void* stream, const std::function<void()>& enqueue, int replays) {
  if (is_cpu(device)) throw InvalidArgument("capture_and_replay: the device is the CPU, expected a GPU");
  if constexpr (!kHasCuda) refuse_cuda();
  if constexpr (kHasCuda) cuda::runtime::capture_and_replay(device, stream, enqueue, replays);
}

void stream_bytes(Device device, const void* source, std::size_t read_bytes, void* destination, std::size_t write_bytes,
                  const ExecutionContext& context) {
  if (is_cpu(device)) {
    cpu::stream_bytes(source, read_bytes, destination, write_bytes, context);
    return;
  }
  if constexpr (!kHasCuda) refuse_cuda();
  if constexpr (kHasCuda) cuda::runtime::stream_bytes(device, source, read_bytes, destination, write_bytes, context);
}

void matrix_product(Device device, const Gemm& product, const ExecutionContext& context) {
  if (is_cpu(device)) {
    cpu::gemm(product, context);
    return;
  }
  if constexpr (!kHasCuda) refuse_cuda();
  if constexpr (kHasCuda) {
    constexpr const char* kCaller = "matrix_product";
    cuda::require_gemm(kCaller);
    const cuda::DeviceGuard guard(device);
    const Scratch scratch(kCaller, device, kGemmWorkspaceBytes, context);
    cuda::gemm(kCaller, product, scratch.context());
  }
}

std::size_t last_cache_bytes(Device device) {
  if (is_cpu(device)) return cpu::last_cache_bytes();
  if constexpr (kHasCuda) return cuda::runtime::last_cache_bytes(device);
  refuse_cuda();
}

std::string device_name(Device device) {
  if (is_cpu(device)) {
    const int threads = cpu::default_threads();
    return cpu_model_name() + " (" + std::to_string(threads) + (threads == 1 ? " thread)" : " threads)");
  }
  if constexpr (kHasCuda) return cuda::runtime::device_name(device);
  refuse_cuda();
}

}  // namespace eaves::runtime
