// CUDA's error codes as exceptions.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "eaves/error.h"

namespace eaves::cuda {

/// Throws DeviceError "<who>: <CUDA's words>" unless `status` is cudaSuccess.
inline void check_status(cudaError_t status, const char* who) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears an error that does not stick, or the next call would report it
  throw DeviceError(std::string(who) + ": " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) + ")");
}

}  // namespace eaves::cuda
