#include "cuda/runtime.h"

#include <cuda_runtime.h>

#include <memory>

#include "cuda/device.h"
#include "cuda/error.cuh"
#include "cuda/stream.cuh"

namespace eaves::cuda::runtime {
namespace {

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

std::int64_t free_memory_bytes(Device device) {
  const DeviceGuard guard(device);
  std::size_t free = 0;
  std::size_t total = 0;
  check_status(cudaMemGetInfo(&free, &total), "free memory");
  return static_cast<std::int64_t>(free);
}

void* allocate(Device device, std::size_t bytes) {
  const DeviceGuard guard(device);
  void* data = nullptr;
  check_status(cudaMalloc(&data, bytes == 0 ? 256 : bytes), "allocation");
  return data;
}

void deallocate(Device device, void* data) noexcept {
  static_cast<void>(device);  // CUDA finds the device by the address
  cudaFree(data);
}

void copy(void* destination, Device destination_device, const void* source, Device source_device, std::size_t bytes) {
  const DeviceGuard guard(destination_device.type == DeviceType::cuda ? destination_device : source_device);
  check_status(cudaMemcpy(destination, source, bytes, cudaMemcpyDefault), "copy");
  check_status(cudaDeviceSynchronize(), "copy");  // the last part of a copy from pageable memory may still be on its
                                                  // way
}

void fill_bytes(Device device, void* data, unsigned char value, std::size_t bytes) {
  const DeviceGuard guard(device);
  check_status(cudaMemset(data, value, bytes), "fill");
  check_status(cudaDeviceSynchronize(), "fill");
}

void synchronize(Device device) {
  const DeviceGuard guard(device);
  check_status(cudaDeviceSynchronize(), "device");
}

void* create_stream(Device device) {
  const DeviceGuard guard(device);
  cudaStream_t stream = nullptr;
  check_status(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  return stream;
}

void destroy_stream(Device device, void* stream) noexcept {
  static_cast<void>(device);
  cudaStreamDestroy(as_stream(stream));
}

void* create_event(Device device) {
  const DeviceGuard guard(device);
  cudaEvent_t event = nullptr;
  check_status(cudaEventCreate(&event), "event");
  return event;
}

void destroy_event(Device device, void* event) noexcept {
  static_cast<void>(device);
  cudaEventDestroy(static_cast<cudaEvent_t>(event));
}

void record_event(Device device, void* event, void* stream) {
  const DeviceGuard guard(device);
  check_status(cudaEventRecord(static_cast<cudaEvent_t>(event), as_stream(stream)), "event");
}

double elapsed_ms(Device device, void* start, void* stop) {
  const DeviceGuard guard(device);
  check_status(cudaEventSynchronize(static_cast<cudaEvent_t>(stop)), "event");
  float elapsed = 0.0f;
  check_status(cudaEventElapsedTime(&elapsed, static_cast<cudaEvent_t>(start), static_cast<cudaEvent_t>(stop)),
               "event");
  return elapsed;
}

void capture_and_replay(Device device, void* stream, const std::function<void()>& enqueue, int replays) {
  const DeviceGuard guard(device);
  check_status(cudaStreamBeginCapture(as_stream(stream), cudaStreamCaptureModeThreadLocal), "graph capture");
  cudaGraph_t graph = nullptr;
  try {
    enqueue();
  } catch (...) {
    cudaStreamEndCapture(as_stream(stream), &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    throw;
  }
  check_status(cudaStreamEndCapture(as_stream(stream), &graph), "graph capture");
  cudaGraphExec_t executable = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  check_status(status, "graph");
  for (int replay = 0; replay < replays; ++replay) {
    const cudaError_t launched = cudaGraphLaunch(executable, as_stream(stream));
    if (launched != cudaSuccess) {
      cudaGraphExecDestroy(executable);
      check_status(launched, "graph");
    }
  }
  const cudaError_t finished = cudaStreamSynchronize(as_stream(stream));
  cudaGraphExecDestroy(executable);
  check_status(finished, "graph");
}

void stream_bytes(Device device, const void* source, std::size_t read_bytes, void* destination, std::size_t write_bytes,
                  const ExecutionContext& context) {
  const DeviceGuard guard(device);
  cuda::stream_bytes(source, read_bytes, destination, write_bytes, as_stream(context.stream));
}

std::size_t last_cache_bytes(Device device) {
  int bytes = 0;
  check_status(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device.index), "device properties");
  return static_cast<std::size_t>(bytes);
}

std::string device_name(Device device) {
  cudaDeviceProp properties{};
  check_status(cudaGetDeviceProperties(&properties, device.index), "device properties");
  return properties.name;
}

}  // namespace eaves::cuda::runtime
