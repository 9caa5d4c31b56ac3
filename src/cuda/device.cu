#include "cuda/device.h"

#include <array>
#include <mutex>
#include <string>

#include "cuda/error.cuh"
#include "cuda/runtime.h"

namespace eaves::cuda {
namespace {

constexpr int kMaxDevices = 64;

struct CachedProperties {
  std::once_flag once;
  DeviceProperties value;
};

std::array<CachedProperties, kMaxDevices>& cache() {
  static std::array<CachedProperties, kMaxDevices> entries;
  return entries;
}

}  // namespace

void require_device(const char* op, Device device) {
  const int count = runtime::gpu_count();
  if (device.index < count && device.index < kMaxDevices) return;
  const std::string name = "cuda:" + std::to_string(device.index);
  if (count == 0)
    throw Unsupported(std::string(op) + ": the tensors are on " + name + ", but " + runtime::gpus().missing);
  throw Unsupported(std::string(op) + ": the tensors are on " + name + ", but this machine has " +
                    std::to_string(count) + " usable GPU" + (count == 1 ? "" : "s") + ", counted from 0");
}

const DeviceProperties& properties(Device device) {
  CachedProperties& entry = cache().at(device.index);
  std::call_once(entry.once, [&] {
    const auto attribute = [&](cudaDeviceAttr which) {
      int value = 0;
      check_status(cudaDeviceGetAttribute(&value, which, device.index), "device properties");
      return value;
    };
    entry.value.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
    entry.value.compute_capability =
        10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
  });
  return entry.value;
}

DeviceGuard::DeviceGuard(Device device) {
  check_status(cudaGetDevice(&previous_), "current device");
  if (previous_ == device.index) return;
  check_status(cudaSetDevice(device.index), "device switch");
  is_switched_ = true;
}

DeviceGuard::~DeviceGuard() {
  if (is_switched_) cudaSetDevice(previous_);
}

void* allocate_in_stream_order(Device device, std::size_t bytes, void* stream) {
  const DeviceGuard guard(device);
  void* data = nullptr;
  check_status(cudaMallocAsync(&data, bytes, static_cast<cudaStream_t>(stream)), "workspace");
  return data;
}

void deallocate_in_stream_order(Device device, void* data, void* stream) noexcept {
  // Without DeviceGuard, which may throw: what cannot be given back here is given back when the context ends.
  int previous = 0;
  if (cudaGetDevice(&previous) != cudaSuccess || cudaSetDevice(device.index) != cudaSuccess) return;
  cudaFreeAsync(data, static_cast<cudaStream_t>(stream));
  cudaSetDevice(previous);
}

}  // namespace eaves::cuda
