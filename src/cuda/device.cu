#include "cuda/device.h"

#include <cuda_runtime.h>

#include <array>
#include <mutex>
#include <string>

#include "core/build_config.h"
#include "core/check.h"
#include "cuda/architectures.h"
#include "cuda/error.cuh"

namespace eaves::cuda {
namespace {

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

/// The oldest major compute capability that a build runs on.
constexpr int kOldestMajor = 8;

/// The reason that this build cannot run on the GPU; empty if it can.
std::string obstacle(const GpuInfo& gpu) {
  const int major = gpu.compute_capability_major, minor = gpu.compute_capability_minor;
  if (major < kOldestMajor)
    return "eaves needs a GPU of compute capability 8.0 or newer, and the GPUs of this machine are older";
  if (has_code_for(EAVES_CUDA_ARCHITECTURES, major, minor)) return "";
  return std::string("eaves was built for ") + EAVES_CUDA_ARCHITECTURES + ", but this GPU has compute capability " +
         std::to_string(major) + "." + std::to_string(minor) + "; build again with CUDA_TARGETS=all";
}

GpuList find_gpus() {
  GpuList list;
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
    list.missing = "no NVIDIA driver was found on this machine";
    return list;
  }
  list.driver_version = version_text(driver);
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    cudaGetLastError();
    list.missing = std::string("CUDA finds no usable GPU: ") + cudaGetErrorString(status) + " (driver for CUDA " +
                   list.driver_version + ", eaves built with CUDA " + EAVES_CUDA_VERSION + ")";
    return list;
  }
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) continue;
    GpuInfo gpu;
    gpu.index = index;
    gpu.name = properties.name;
    gpu.compute_capability_major = properties.major;
    gpu.compute_capability_minor = properties.minor;
    gpu.multiprocessors = properties.multiProcessorCount;
    gpu.memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
    gpu.l2_bytes = properties.l2CacheSize;
    int clock_khz = 0;
    cudaDeviceGetAttribute(&clock_khz, cudaDevAttrMemoryClockRate, index);
    // Two transfers per clock.
    gpu.memory_bandwidth = 2.0 * clock_khz * 1e3 * properties.memoryBusWidth / 8.0;
    list.gpus.push_back(gpu);
  }
  // Device numbers are CUDA's: an unusable GPU stays in the list if a usable one follows it.
  while (!list.gpus.empty()) {
    list.missing = obstacle(list.gpus.back());
    if (list.missing.empty()) break;
    list.gpus.pop_back();
  }
  return list;
}

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

GpuList gpus() { return find_gpus(); }

int gpu_count() {
  static const int count = static_cast<int>(find_gpus().gpus.size());
  return count;
}

void require_device(const char* op, Device device) {
  const int count = gpu_count();
  if (device.index < count && device.index < kMaxDevices) return;
  const std::string name = check::to_string(device);
  if (count == 0) throw Unsupported(op, "the tensors are on " + name + ", but " + gpus().missing);
  throw Unsupported(op, "the tensors are on " + name + ", but eaves can use " + std::to_string(count) + " GPU" +
                            (count == 1 ? "" : "s") + ", counted from 0");
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
    entry.value.shared_bytes_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    cudaDeviceProp all{};
    check_status(cudaGetDeviceProperties(&all, device.index), "device properties");
    entry.value.memory_bytes = all.totalGlobalMem;
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
  // No DeviceGuard here, because it may throw. Memory that cannot be freed here is freed when the context ends.
  int previous = 0;
  if (cudaGetDevice(&previous) != cudaSuccess || cudaSetDevice(device.index) != cudaSuccess) return;
  cudaFreeAsync(data, static_cast<cudaStream_t>(stream));
  cudaSetDevice(previous);
}

void copy_to_host(const char* op, Device device, void* to, const void* from, std::size_t bytes, void* stream) {
  const DeviceGuard guard(device);
  check_status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, static_cast<cudaStream_t>(stream)), op);
  check_status(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), op);
}

}  // namespace eaves::cuda
