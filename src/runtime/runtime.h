// One small interface to a device for tests, benchmarks and the program: memory, copies, streams, clocks. On the CPU it
// is malloc and a steady clock, on a GPU the CUDA runtime. It includes no CUDA header. Operators do not use it: they
// take memory and streams from their caller.
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

/// The number of GPUs that this build can use; 0 without CUDA, a driver or a GPU.
int gpu_count();

/// Bytes that can be allocated now: free device memory, or on the CPU MemAvailable of /proc/meminfo, less if the
/// container's limit leaves less.
std::int64_t free_memory_bytes(Device device);

/// Memory aligned to 256 bytes; on the CPU to 4096, so that tests know the page boundaries. Throws DeviceError if there
/// is not enough.
void* allocate(Device device, std::size_t bytes);
void deallocate(Device device, void* data) noexcept;

/// Waits for the copy. Either side may be on the CPU.
void copy(void* destination, Device destination_device, const void* source, Device source_device, std::size_t bytes);
void fill_bytes(Device device, void* data, unsigned char value, std::size_t bytes);

/// Waits for all work on the device, and throws DeviceError for a failure in it. On the CPU it does nothing.
void synchronize(Device device);

/// A new stream. `handle` is for ExecutionContext::stream; nullptr on the CPU.
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

/// The milliseconds between two points of a stream. On a GPU the points are events, so the host may run ahead;
/// elapsed_ms() waits for the second event.
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

/// Captures the work that `enqueue` puts on `stream` into a CUDA graph, and replays it `replays` times on that stream.
/// Throws DeviceError if the work cannot be captured, InvalidArgument for a device that is no GPU.
void capture_and_replay(Device device, void* stream, const std::function<void()>& enqueue, int replays);

/// The stream that operators are compared with: plain kernels that stream `read_bytes` and `write_bytes` through the
/// device's memory with the widest loads and stores, and compute next to nothing. They read from `source` and write to
/// `destination`, each at least that large and aligned to 64 bytes. On a GPU they are enqueued on `context.stream`.
void stream_bytes(Device device, const void* source, std::size_t read_bytes, void* destination, std::size_t write_bytes,
                  const ExecutionContext& context);

/// The matrix product that operators with products are compared with, by the library that they use. On a GPU it is
/// enqueued on `context.stream`. It takes its scratch memory like an operator.
void matrix_product(Device device, const Gemm& product, const ExecutionContext& context);

/// Bytes of the last cache before memory: a GPU's L2, a CPU's L3.
std::size_t last_cache_bytes(Device device);

/// "NVIDIA H200", "AMD EPYC (2 threads)".
std::string device_name(Device device);

}  // namespace eaves::runtime
#pragma GCC visibility pop
