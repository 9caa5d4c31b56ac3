// Reductions of any state over lanes, a block and a cluster. A state is a small struct. A function merges two states;
// it is commutative, and a value-initialised state is neutral. Example: SoftmaxState with MergeSoftmax. The order of
// merging depends on the sizes alone, so that two runs are bitwise equal.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>
#include <cstring>

namespace eaves::cuda {

/// The merge of sums.
struct Plus {
  template <typename Sum>
  __device__ Sum operator()(const Sum& a, const Sum& b) const {
    return a + b;
  }
};

template <typename State>
__device__ State shuffle_xor(const State& state, int lane_mask) {
  static_assert(sizeof(State) % sizeof(std::uint32_t) == 0);
  std::uint32_t words[sizeof(State) / sizeof(std::uint32_t)];
  memcpy(words, &state, sizeof(State));
  for (std::uint32_t& word : words) word = __shfl_xor_sync(0xffffffffu, word, lane_mask);
  State result;
  memcpy(&result, words, sizeof(State));
  return result;
}

/// Reduces each group of kLanes neighbouring lanes; every lane gets its group's result. All 32 lanes of the warp call
/// it.
template <int kLanes, typename State, typename Merge>
__device__ State reduce_lanes(State state, Merge merge) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) state = merge(state, shuffle_xor(state, mask));
  return state;
}

/// Reduces the threads of a block, kThreads or fewer whole warps. The first warp gets the result.
template <int kThreads, typename State, typename Merge>
__device__ State reduce_block(State state, Merge merge, int threads = kThreads) {
  constexpr int kWarps = kThreads / 32;
  static_assert(kThreads % 32 == 0 && kWarps <= 32 && (kWarps & (kWarps - 1)) == 0);
  // Raw bytes: a State may have default member values, and shared memory cannot be initialised.
  __shared__ alignas(State) unsigned char storage[kWarps * sizeof(State)];
  State* warp_states = reinterpret_cast<State*>(storage);
  state = reduce_lanes<32>(state, merge);
  if (threadIdx.x % 32 == 0) warp_states[threadIdx.x / 32] = state;
  __syncthreads();
  if (threadIdx.x < 32) {
    const int warp = threadIdx.x % kWarps;
    state = warp * 32 < threads ? warp_states[warp] : State{};
    state = reduce_lanes<kWarps>(state, merge);
  }
  return state;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
/// Reduces the blocks of a cluster. Each block has its state in thread 0; thread 0 of block 0 gets the result.
template <typename State, typename Merge>
__device__ State reduce_cluster(State state, Merge merge) {
  const auto cluster = cooperative_groups::this_cluster();
  __shared__ alignas(State) unsigned char storage[sizeof(State)];
  State* block_state = reinterpret_cast<State*>(storage);
  if (threadIdx.x == 0) *block_state = state;
  cluster.sync();  // every block has started and stored its state
  if (cluster.block_rank() == 0 && threadIdx.x == 0) {
    for (unsigned other = 1; other < cluster.num_blocks(); ++other) {
      state = merge(state, *cluster.map_shared_rank(block_state, other));
    }
  }
  cluster.sync();  // a block that ended would take its shared memory with it
  return state;
}
#endif

}  // namespace eaves::cuda
