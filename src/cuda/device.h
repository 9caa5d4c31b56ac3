// What operators and the runtime layer ask of a GPU before a launch: is it there, how large is it, memory in stream
// order. No CUDA header is needed to include it. The properties are read once per device and never change.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "eaves/system.h"
#include "eaves/tensor.h"

namespace eaves::cuda {

struct GpuList {
  std::vector<GpuInfo> gpus;   ///< those that the machine code or PTX in this build can run on
  std::string driver_version;  ///< the newest CUDA that the driver runs, "13.0"; empty without a driver
  std::string missing;         ///< why `gpus` is empty, in one sentence; empty where it is not
};

/// Never throws.
GpuList gpus();

/// gpus().gpus.size(), cheaper from the second call on.
int gpu_count();

struct DeviceProperties {
  int multiprocessors = 0;
  int compute_capability = 0;      ///< 80, 90
  int shared_bytes_per_block = 0;  ///< that a kernel may ask for
};

/// Throws Unsupported with the reason when this machine has no such GPU, or no driver that this build can use.
void require_device(const char* op, Device device);

const DeviceProperties& properties(Device device);

/// Makes `device` current for the thread, and on destruction the one that was.
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

/// Memory of the device's default pool. Taking and giving back happen in the order of the stream.
void* allocate_in_stream_order(Device device, std::size_t bytes, void* stream);
void deallocate_in_stream_order(Device device, void* data, void* stream) noexcept;

/// Waits for the stream, and the copy behind what is in it.
void copy_to_host(const char* op, Device device, void* to, const void* from, std::size_t bytes, void* stream);

}  // namespace eaves::cuda
