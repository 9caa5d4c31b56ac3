// Asynchronous copies into shared memory, from global memory and between the blocks of a cluster. An mbarrier completes
// them. They need compute capability 9.0.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>
#include <cstring>

#include "cuda/reduce.cuh"

namespace eaves::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

/// The arrival, once, of a number of bytes (an mbarrier in shared memory). One thread initialises it and states the
/// bytes.
struct alignas(8) Arrival {
  std::uint64_t state;
};

namespace detail {

__device__ inline std::uint32_t shared_address(const void* address) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(address));
}

}  // namespace detail

__device__ inline void initialise(Arrival& arrival) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(detail::shared_address(&arrival)) : "memory");
}

/// Shows the arrivals to the copy engine and to the cluster. It is called after the last initialise(). The threads of
/// the block then wait at a barrier before they use the arrivals, and threads of other blocks at the barrier of the
/// cluster.
__device__ inline void publish_arrivals() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void expect(Arrival& arrival, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(detail::shared_address(&arrival)),
               "r"(bytes)
               : "memory");
}

__device__ inline void wait_for(const Arrival& arrival) {
  asm volatile(
      "{\n"
      ".reg .pred has_arrived;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 has_arrived, [%0], 0;\n"
      "@!has_arrived bra again;\n"
      "}\n" ::"r"(detail::shared_address(&arrival))
      : "memory");
}

/// Called by one thread. `to`, `from` and `bytes` are multiples of 16; `from` is global memory.
__device__ inline void copy_to_shared(void* to, const void* from, std::uint32_t bytes, Arrival& arrival) {
  expect(arrival, bytes);
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   detail::shared_address(to)),
               "l"(from), "r"(bytes), "r"(detail::shared_address(&arrival))
               : "memory");
}

// ---- blocks of a cluster -------------------------------------------------------------------------------------------

/// The first call says that this thread has started; the second waits until every thread of the cluster has, because a
/// block's shared memory exists from its start. All threads call both, once in a kernel.
__device__ inline void arrive_at_cluster_start() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ inline void wait_for_cluster_start() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

/// The states that the blocks of a cluster, at most kMostBlocks, send each other; in shared memory. A barrier of the
/// cluster would also do, at the cost of a fence over all memory in each of its threads.
template <typename State, int kMostBlocks>
struct ClusterStates {
  static_assert(sizeof(State) % 8 == 0 && (kMostBlocks & (kMostBlocks - 1)) == 0);
  Arrival arrival;
  std::uint64_t states[kMostBlocks][sizeof(State) / 8];

  /// Called by the thread that calls publish_arrivals().
  __device__ void prepare() { initialise(arrival); }
  __device__ void expect_states() { expect(arrival, cluster().num_blocks() * sizeof(State)); }

  /// Merges the states of the blocks' first warps. Every thread of the cluster gets the same result. The cluster must
  /// have started. After the call the blocks may overwrite memory that the first warps read before it.
  template <typename Merge>
  __device__ State reduce(const State& state, Merge merge) {
    const unsigned lane = threadIdx.x % 32;
    if (threadIdx.x < cluster().num_blocks()) send(state, threadIdx.x);
    wait_for(arrival);
    // Each block reads only its own memory, and may therefore end before the others.
    State other;
    if (lane % kMostBlocks < cluster().num_blocks()) memcpy(&other, states[lane % kMostBlocks], sizeof(State));
    return reduce_lanes<kMostBlocks>(other, merge);
  }

 private:
  __device__ static auto cluster() { return cooperative_groups::this_cluster(); }

  __device__ void send(const State& state, unsigned block) {
    const auto in_block = [block](const void* own) {
      std::uint32_t address;
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(detail::shared_address(own)), "r"(block));
      return address;
    };
    std::uint64_t words[sizeof(State) / 8];
    memcpy(words, &state, sizeof(State));
    const std::uint32_t to = in_block(states[cluster().block_rank()]);
    const std::uint32_t at = in_block(&arrival);
#pragma unroll
    for (unsigned i = 0; i < sizeof(State) / 8; ++i) {
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to + 8 * i),
                   "l"(words[i]), "r"(at)
                   : "memory");
    }
  }
};

#endif

}  // namespace eaves::cuda
