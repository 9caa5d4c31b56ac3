// What operators and the runtime layer ask of a GPU before a launch: its presence, its properties, memory in stream
// order. It includes no CUDA header. The properties are read once per device and never change.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "eaves/system.h"
#include "eaves/tensor.h"

namespace eaves::cuda {

struct GpuList {
  std::vector<GpuInfo> gpus;   ///< GPUs that the machine code or PTX of this build runs on; also unusable ones before a
                               ///< usable one
  std::string driver_version;  ///< the newest CUDA that the driver runs, "13.0"; empty without a driver
  std::string missing;         ///< why `gpus` is empty, in one sentence; else empty
};

/// Never throws.
GpuList gpus();

/// gpus().gpus.size(), cheaper from the second call on.
int gpu_count();

struct DeviceProperties {
  int multiprocessors = 0;
  int compute_capability = 0;      ///< 80, 90
  int shared_bytes_per_block = 0;  ///< the most that a kernel may ask for
  std::size_t memory_bytes = 0;
};

/// Throws Unsupported with the reason if this machine has no such GPU, or no driver that this build can use.
void require_device(const char* op, Device device);

const DeviceProperties& properties(Device device);

/// Makes `device` the thread's current device, and restores the previous one on destruction.
class DeviceGuard {
 public:
  explicit DeviceGuard(Device device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool is_switched_ = false;
};

/// Allocates from the device's default pool. Allocation and release happen in the order of the stream.
void* allocate_in_stream_order(Device device, std::size_t bytes, void* stream);
void deallocate_in_stream_order(Device device, void* data, void* stream) noexcept;

/// Copies behind the work that is in the stream, and waits for the copy.
void copy_to_host(const char* op, Device device, void* to, const void* from, std::size_t bytes, void* stream);

}  // namespace eaves::cuda
