// Hopper's bulk copies into shared memory and the barriers that count them, one instruction a function. Source: PTX
// ISA, "cp.async.bulk" and "mbarrier".
#pragma once

#include <cstdint>

namespace eaves::cuda {

/// Counts arrivals and bytes of one phase after the other, in shared memory.
using Barrier = std::uint64_t;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void init_barrier(Barrier* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

/// After init_barrier(), before another block of the cluster or a copy uses the barrier.
__device__ inline void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/// Arrives, and lets the phase wait for so many bytes of copies too.
__device__ inline void arrive_expecting(Barrier* barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

/// Arrives at the barrier that block `rank` of the cluster has at the same place; what this thread wrote before is seen
/// by whoever waits there.
__device__ inline void arrive_at_block(Barrier* barrier, unsigned rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

/// Waits until the phase of this parity is over; a fresh barrier is in the phase of parity 0. Sees what other blocks of
/// the cluster wrote before they arrived.
__device__ inline void wait(Barrier* barrier, unsigned parity) {
  std::uint32_t is_over = 0;
  while (is_over == 0) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(is_over)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

/// Copies `bytes` (a multiple of 16, both sides aligned to 16) to shared memory; `barrier` counts them.
__device__ inline void copy_bulk(void* shared, const void* global, std::uint32_t bytes, Barrier* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

#endif

}  // namespace eaves::cuda
