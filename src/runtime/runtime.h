// One small face for what tests, benchmarks and the program need of a device: memory, copies, streams, clocks. On the
// CPU it is malloc and a steady clock; with CUDA it is the CUDA runtime. No CUDA header is needed to use it.
// Operators do not use it: they take memory and streams from their caller.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "core/gemm.h"
#include "eaves/context.h"
#include "eaves/tensor.h"

#pragma GCC visibility push(default)  // for the Python package
namespace eaves::runtime {

/// Number of GPUs that the backend in this build can use; 0 without CUDA, a driver or a GPU.
int gpu_count();

/// Memory that can be taken now, in bytes: free device memory, or MemAvailable of /proc/meminfo.
std::int64_t free_memory_bytes(Device device);

/// Memory aligned to 256 bytes (on the CPU to 4096, so that a page boundary is where tests expect one). Throws
/// DeviceError when there is none.
void* allocate(Device device, std::size_t bytes);
void deallocate(Device device, void* data) noexcept;

/// Waits for the copy. Either side may be on the CPU.
void copy(void* destination, Device destination_device, const void* source, Device source_device, std::size_t bytes);
void fill_bytes(Device device, void* data, unsigned char value, std::size_t bytes);

/// Waits for everything on the device (nothing to do on the CPU) and throws DeviceError for what failed meanwhile.
void synchronize(Device device);

/// A stream of its own; the handle is what ExecutionContext::stream takes, nullptr on the CPU.
class Stream {
 public:
  explicit Stream(Device device);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  void* handle() const { return handle_; }

 private:
  Device device_;
  void* handle_ = nullptr;
};

/// The time between two points of a stream, in milliseconds. On a GPU the points are events, so the host may run
/// ahead; elapsed_ms() waits for the second.
class Stopwatch {
 public:
  explicit Stopwatch(Device device);
  ~Stopwatch();
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  void start(void* stream);
  void stop(void* stream);
  double elapsed_ms();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Captures what `enqueue` puts on `stream` into a CUDA graph and replays it `replays` times on that stream.
/// Throws DeviceError where something in it cannot be captured. Devices other than GPUs: InvalidArgument.
void capture_and_replay(Device device, void* stream, const std::function<void()>& enqueue, int replays);

/// The stream that operators are compared with: plain kernels that stream `read_bytes` and `write_bytes` through the
/// device's memory, with the widest loads and stores, and compute next to nothing. They read from `source` and write to
/// `destination`, each at least that large and aligned to 64 bytes. On a GPU they are enqueued on `context.stream`.
void stream_bytes(Device device, const void* source, std::size_t read_bytes, void* destination, std::size_t write_bytes,
                  const ExecutionContext& context);

/// What operators that multiply matrices are compared with: one product by the library that they take it from, on a GPU
/// enqueued on `context.stream`. It takes its scratch memory like an operator.
void matrix_product(Device device, const Gemm& product, const ExecutionContext& context);

/// Bytes of the last cache before memory: L2 of a GPU, L3 of a CPU.
std::size_t last_cache_bytes(Device device);

/// "NVIDIA H200", "AMD EPYC (2 threads)".
std::string device_name(Device device);

}  // namespace eaves::runtime
#pragma GCC visibility pop
