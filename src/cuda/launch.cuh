// The one launcher: every kernel of the library starts here. Its launch shape is written as designated initialisers.
//
//   launch(op, row_per_lanes<Operation, 32, 4>, {.blocks = 4096, .threads = 128, .stream = stream}, operation, 32);
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "cuda/error.cuh"

namespace eaves::cuda {

struct LaunchShape {
  std::int64_t blocks = 1;    ///< along x, below 2^31
  std::int64_t blocks_y = 1;  ///< below 2^16
  dim3 threads = 1;
  int cluster_blocks = 1;                    ///< neighbours along x, at most 8, that form one cluster; divides `blocks`
  std::size_t shared_bytes = 0;              ///< `extern __shared__` of a block, beside what the kernel declares
  bool starts_before_previous_ends = false;  ///< programmatic dependent launch: the kernel calls
                                             ///< wait_for_previous_kernel() before it reads the previous kernel's
                                             ///< results
  void* stream = nullptr;
};

/// Dynamic shared memory that a kernel gets without asking: 48 KiB, less 8 KiB that it may declare.
inline constexpr std::size_t kSharedBytesWithoutAsking = 40960;

template <typename... Parameters>
void launch(const char* op, void (*kernel)(Parameters...), const LaunchShape& shape, Parameters... arguments) {
  if (shape.blocks > INT32_MAX || shape.blocks_y > UINT16_MAX) {
    throw Unsupported(op, "needs " + std::to_string(shape.blocks) + " x " + std::to_string(shape.blocks_y) +
                              " blocks, but a GPU takes at most 2147483647 x 65535");
  }
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks), static_cast<unsigned>(shape.blocks_y));
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(shape.stream);
  config.attrs = attributes;
  if (shape.shared_bytes > kSharedBytesWithoutAsking) {
    check_status(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared_bytes)),
        op);
  }
  if (shape.cluster_blocks > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(shape.cluster_blocks);
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
  }
  if (shape.starts_before_previous_ends) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  check_status(cudaLaunchKernelEx(&config, kernel, arguments...), op);
}

/// Called by a kernel before it reads results of the previous kernel in the stream. Afterwards all blocks of that
/// kernel have ended and their writes are visible.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Allows the next kernel to start once every block of this one has called it. The next kernel then takes
/// multiprocessors as they become free and waits there, instead of being launched after the end. A kernel calls it at
/// its start, or after wait_for_previous_kernel() if the next kernel, before its own wait, reads memory that the
/// previous kernel may still write.
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace eaves::cuda
