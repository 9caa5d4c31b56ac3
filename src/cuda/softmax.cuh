// SoftmaxState on a GPU: how elements enter it, and how two states merge. A thread takes many elements at a time: first
// their maximum, then one rescaling of its sum, then one exponential per element.
#pragma once

#include "core/softmax_state.h"
#include "cuda/math.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"

namespace eaves::cuda {

/// The merge of two SoftmaxStates, for reductions.
struct MergeSoftmax {
  template <typename A>
  __device__ SoftmaxState<A> operator()(const SoftmaxState<A>& a, const SoftmaxState<A>& b) const {
    return merge(a, b, [](A x) { return exponential(x); });
  }
};

/// reduce_lanes() for SoftmaxState, with fewer steps that wait for each other: first the maximum, then one rescaling,
/// then the sum.
template <int kLanes, typename A>
__device__ SoftmaxState<A> reduce_lanes(const SoftmaxState<A>& state, MergeSoftmax) {
  A max = state.max;
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) max = fmax(max, __shfl_xor_sync(0xffffffffu, max, mask));
  A sum = state.max == max ? state.sum : state.sum * exponential(state.max - max);
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
  return {max, sum};
}

/// The sum of `function` over a batch. It adds up each vector as a tree, which is shorter and more exact than a running
/// sum.
template <typename T, int kVectors, typename Function>
__device__ Accumulator<T> sum_of(const Vector<T> (&batch)[kVectors], Function function) {
  Accumulator<T> sum{};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    Accumulator<T> values[Vector<T>::kSize];
    unpack(batch[v], values);
#pragma unroll
    for (int i = 0; i < Vector<T>::kSize; ++i) values[i] = function(values[i]);
#pragma unroll
    for (int width = Vector<T>::kSize / 2; width > 0; width /= 2) {
#pragma unroll
      for (int i = 0; i < width; ++i) values[i] += values[i + width];
    }
    sum += values[0];
  }
  return sum;
}

/// Raises the state's maximum to `max`, which is at least as large, before exponentials with that anchor are added.
template <typename A>
__device__ void raise_max(SoftmaxState<A>& state, A max) {
  if (state.max != max) state.sum *= exponential(state.max - max);
  state.max = max;
}

/// Takes a batch of vectors into the state: one rescaling, one exponential per element.
template <typename T, int kVectors>
__device__ void accumulate(SoftmaxState<Accumulator<T>>& state, const Vector<T> (&batch)[kVectors]) {
  using A = Accumulator<T>;
  const A max = fmax(state.max, max_of(batch));
  raise_max(state, max);
  const A anchors[1] = {softmax_anchor(max)};
  with_exponential_minus(anchors, [&](auto exponential_minus_anchor, auto corrected) {
    state.sum += corrected(sum_of(batch, [&](A x) { return exponential_minus_anchor(x, 0); }), 0);
  });
}

template <typename A>
__device__ void accumulate(SoftmaxState<A>& state, A value) {
  state = MergeSoftmax{}(
      state, SoftmaxState<A>{value == value ? value : -infinity<A>(), exponential(value - softmax_anchor(value))});
}

/// Takes a run of elements, shared by `threads` threads, into the state. `is_wanted` and kThroughL1: for_each_batch().
template <int kVectors, bool kThroughL1, typename T, typename IsWanted>
__device__ void accumulate_row(SoftmaxState<Accumulator<T>>& state, const T* first, std::int64_t count, int thread,
                               int threads, IsWanted is_wanted) {
  for_each_batch<kVectors, kThroughL1>(first, count, thread, threads, minus_infinity<T>(), is_wanted,
                                       [&](const auto& batch) { accumulate(state, batch); });
}

}  // namespace eaves::cuda
