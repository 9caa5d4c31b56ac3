// The stream that operators are compared with on a GPU: plain kernels that stream bytes through memory with 16-byte
// accesses and compute next to nothing. No faster plain kernel was found.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace eaves::cuda {

/// Reads `read_bytes` and writes `write_bytes`, both rounded down to multiples of 16.
void stream_bytes(const void* source, std::size_t read_bytes, void* destination, std::size_t write_bytes,
                  cudaStream_t stream);

}  // namespace eaves::cuda
