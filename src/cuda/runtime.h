// The CUDA side of runtime/runtime.h: src/runtime/runtime.cpp serves the CPU itself and forwards every call for a GPU
// to the function of the same name here. Compiled only if EAVES_HAVE_CUDA is 1. It includes no CUDA header.
//
// Every function that takes a Device leaves the caller's current device unchanged. A missing driver never keeps a
// program from starting: gpus() reports it, and every other function throws DeviceError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "eaves/context.h"
#include "eaves/tensor.h"

namespace eaves::cuda::runtime {

std::int64_t free_memory_bytes(Device device);

/// Aligned to 256 bytes.
void* allocate(Device device, std::size_t bytes);
void deallocate(Device device, void* data) noexcept;

/// At least one side is a GPU. Waits for the copy.
void copy(void* destination, Device destination_device, const void* source, Device source_device, std::size_t bytes);
void fill_bytes(Device device, void* data, unsigned char value, std::size_t bytes);
void synchronize(Device device);

/// A cudaStream_t (not blocking with the default stream).
void* create_stream(Device device);
void destroy_stream(Device device, void* stream) noexcept;

/// A cudaEvent_t with timing.
void* create_event(Device device);
void destroy_event(Device device, void* event) noexcept;
void record_event(Device device, void* event, void* stream);

/// Milliseconds between two recorded events. Waits for the second.
double elapsed_ms(Device device, void* start, void* stop);

void capture_and_replay(Device device, void* stream, const std::function<void()>& enqueue, int replays);

void stream_bytes(Device device, const void* source, std::size_t read_bytes, void* destination, std::size_t write_bytes,
                  const ExecutionContext& context);

/// Bytes of L2.
std::size_t last_cache_bytes(Device device);

std::string device_name(Device device);

}  // namespace eaves::cuda::runtime
