// Rows through 16-byte loads and stores, whatever their alignment and length. The loop, its tail and the elements
// before the first 16-byte boundary are handled here once, for reductions and for elementwise kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/numeric.h"
#include "cuda/loads.cuh"

namespace eaves::cuda {

namespace detail {

template <typename T>
__device__ T bits_as(std::uint32_t bits) {
  static_assert(sizeof(T) <= sizeof(bits));
  T value;
  memcpy(&value, &bits, sizeof(T));
  return value;
}

template <typename T>
__device__ std::uint32_t bits_of(T value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof(T));
  return bits;
}

/// Two elements of 16 bits.
template <typename T>
__device__ auto pair_of(std::uint32_t bits) {
  return bits_as<std::conditional_t<std::is_same_v<T, bfloat16>, __nv_bfloat162, __half2>>(bits);
}

}  // namespace detail

/// The elements in the type of the arithmetic.
template <typename T>
__device__ void unpack(const Vector<T>& v, Accumulator<T> (&values)[Vector<T>::kSize]) {
  const std::uint32_t words[4] = {v.words.x, v.words.y, v.words.z, v.words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, bfloat16>) {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    } else if constexpr (std::is_same_v<T, float16>) {
      const float2 pair = __half22float2(detail::bits_as<__half2>(words[i]));
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    } else if constexpr (std::is_same_v<T, float>) {
      values[i] = __uint_as_float(words[i]);
    } else if (i % 2 == 1) {
      values[i / 2] = __hiloint2double(static_cast<int>(words[i]), static_cast<int>(words[i - 1]));
    }
  }
}

/// Rounds each value once, to nearest even.
template <typename T>
__device__ Vector<T> pack(const Accumulator<T> (&values)[Vector<T>::kSize]) {
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, bfloat16>) {
      words[i] = detail::bits_of(__floats2bfloat162_rn(values[2 * i], values[2 * i + 1]));
    } else if constexpr (std::is_same_v<T, float16>) {
      words[i] = detail::bits_of(__floats2half2_rn(values[2 * i], values[2 * i + 1]));
    } else if constexpr (std::is_same_v<T, float>) {
      words[i] = __float_as_uint(values[i]);
    } else if (i % 2 == 0) {
      words[i] = static_cast<std::uint32_t>(__double2loint(values[i / 2]));
    } else {
      words[i] = static_cast<std::uint32_t>(__double2hiint(values[i / 2]));
    }
  }
  return {make_uint4(words[0], words[1], words[2], words[3])};
}

/// Rounds float32 elements to 16 bits and stores them at `to`, which is aligned to 8 bytes.
template <typename T>
__device__ void store_narrow(T* to, const Vector<float>& v) {
  float values[4];
  unpack(v, values);
  uint2 words;
  if constexpr (std::is_same_v<T, bfloat16>) {
    words.x = detail::bits_of(__floats2bfloat162_rn(values[0], values[1]));
    words.y = detail::bits_of(__floats2bfloat162_rn(values[2], values[3]));
  } else {
    words.x = detail::bits_of(__floats2half2_rn(values[0], values[1]));
    words.y = detail::bits_of(__floats2half2_rn(values[2], values[3]));
  }
  *reinterpret_cast<uint2*>(to) = words;
}

/// -inf in every element, which is neutral for maxima and sums of exponentials.
template <typename T>
__device__ Vector<T> minus_infinity() {
  if constexpr (std::is_same_v<T, bfloat16>) return {make_uint4(0xff80ff80u, 0xff80ff80u, 0xff80ff80u, 0xff80ff80u)};
  if constexpr (std::is_same_v<T, float16>) return {make_uint4(0xfc00fc00u, 0xfc00fc00u, 0xfc00fc00u, 0xfc00fc00u)};
  if constexpr (std::is_same_v<T, float>) return {make_uint4(0xff800000u, 0xff800000u, 0xff800000u, 0xff800000u)};
  if constexpr (std::is_same_v<T, double>) return {make_uint4(0u, 0xfff00000u, 0u, 0xfff00000u)};
}

/// `v` with its first element replaced.
template <typename T>
__device__ Vector<T> with_first(Vector<T> v, T element) {
  memcpy(&v, &element, sizeof(T));
  return v;
}

/// The larger of each pair of elements; NaN loses. Types of 16 bits take two elements at a time, without a conversion.
template <typename T>
__device__ Vector<T> max_each(const Vector<T>& a, const Vector<T>& b) {
  if constexpr (sizeof(T) == 2) {
    const auto max = [](std::uint32_t left, std::uint32_t right) {
      return detail::bits_of(__hmax2(detail::pair_of<T>(left), detail::pair_of<T>(right)));
    };
    return {make_uint4(max(a.words.x, b.words.x), max(a.words.y, b.words.y), max(a.words.z, b.words.z),
                       max(a.words.w, b.words.w))};
  } else {
    Accumulator<T> left[Vector<T>::kSize];
    Accumulator<T> right[Vector<T>::kSize];
    unpack(a, left);
    unpack(b, right);
#pragma unroll
    for (int i = 0; i < Vector<T>::kSize; ++i) left[i] = fmax(left[i], right[i]);
    return pack<T>(left);
  }
}

/// The maximum over all vectors, element by element.
template <typename T, int kVectors>
__device__ Vector<T> max_each(const Vector<T> (&batch)[kVectors]) {
  Vector<T> max = batch[0];
#pragma unroll
  for (int v = 1; v < kVectors; ++v) max = max_each(max, batch[v]);
  return max;
}

namespace detail {

/// The largest element of a vector; -inf if all are NaN.
template <typename T>
__device__ Accumulator<T> max_within(const Vector<T>& v) {
  if constexpr (sizeof(T) == 2) {
    const auto max = [](std::uint32_t a, std::uint32_t b) { return bits_of(__hmax2(pair_of<T>(a), pair_of<T>(b))); };
    const std::uint32_t largest = max(max(v.words.x, v.words.y), max(v.words.z, v.words.w));
    Accumulator<T> values[Vector<T>::kSize];
    unpack(Vector<T>{make_uint4(largest, 0u, 0u, 0u)}, values);
    return fmax(fmax(values[0], values[1]), -infinity<Accumulator<T>>());
  } else {
    Accumulator<T> values[Vector<T>::kSize];
    unpack(v, values);
    Accumulator<T> max = -infinity<Accumulator<T>>();
#pragma unroll
    for (int i = 0; i < Vector<T>::kSize; ++i) max = fmax(max, values[i]);
    return max;
  }
}

}  // namespace detail

/// The largest element of a batch; -inf if all are NaN.
template <typename T, int kVectors>
__device__ Accumulator<T> max_of(const Vector<T> (&batch)[kVectors]) {
  return detail::max_within(max_each(batch));
}

/// The largest |element| that is not NaN; 0 if all are NaN.
template <typename T, int kVectors>
__device__ Accumulator<T> max_of_sizes(const Vector<T> (&batch)[kVectors]) {
  Vector<T> sizes[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const auto size = [](std::uint32_t word) {
      if constexpr (sizeof(T) == 2) return detail::bits_of(__habs2(detail::pair_of<T>(word)));
      return word & 0x7fffffffu;
    };
    const uint4& w = batch[v].words;
    sizes[v].words = make_uint4(size(w.x), size(w.y), size(w.z), size(w.w));
  }
  return fmax(max_of(sizes), Accumulator<T>(0));
}

/// A run of elements of unit stride: the elements before a 16-byte boundary, whole vectors, the elements after the last
/// boundary.
template <typename T>
struct Span {
  T* begin;
  int head;              ///< elements before the first vector
  std::int64_t vectors;  ///< whole vectors
  int edges;             ///< elements outside of them, head and tail

  __device__ Span(T* first, std::int64_t count) : begin(first) {
    const auto misaligned = static_cast<int>(reinterpret_cast<std::uintptr_t>(first) % 16 / sizeof(T));
    head = misaligned == 0 ? 0 : Vector<T>::kSize - misaligned;
    if (head > count) head = static_cast<int>(count);
    vectors = (count - head) / Vector<T>::kSize;
    edges = static_cast<int>(count - vectors * Vector<T>::kSize);
  }

  __device__ auto vector_address(std::int64_t i) const {
    using Target = std::conditional_t<std::is_const_v<T>, const Vector<std::remove_const_t<T>>, Vector<T>>;
    return reinterpret_cast<Target*>(begin + head) + i;
  }

  /// Edge element `i`: the head's elements come first, then the tail's.
  __device__ std::int64_t edge_index(int i) const { return i < head ? i : vectors * Vector<T>::kSize + i; }
  __device__ T& edge(int i) const { return begin[edge_index(i)]; }
};

/// Shares a run of elements among `threads` threads and calls `body(batch)` in each thread with kVectors vectors at a
/// time. All vectors of a batch are loaded before the first is used; places without an element hold `fill`. The run has
/// fewer than 2^31 vectors, because 32-bit indices leave registers for loads; longer rows are cut into pieces. Each
/// thread asks `is_wanted()` once, when its first elements are on their way, and leaves out the rest of the run if the
/// answer is no. kThroughL1: an element is loaded again soon, like the target's logit.
template <int kVectors, bool kThroughL1, typename T, typename Body, typename IsWanted>
__device__ void for_each_batch(const T* first, std::int64_t count, int thread, int threads, const Vector<T>& fill,
                               IsWanted is_wanted, Body body) {
  const Span<const T> span(first, count);
  // The edge elements are loaded with the first batch and used last, so that they add no wait.
  T edge{};
  if (thread < span.edges) edge = span.edge(thread);

  const auto load_vector = [](const Vector<T>* address) { return kThroughL1 ? load(address) : load_past_l1(address); };
  const Vector<T>* address = span.vector_address(thread);
  int left = static_cast<int>(span.vectors) - thread;
  bool is_first = true;
  for (; left > (kVectors - 1) * threads; left -= kVectors * threads, address += kVectors * threads) {
    Vector<T> batch[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) batch[v] = load_vector(address + v * threads);
    if (is_first && !is_wanted()) return;
    is_first = false;
    body(batch);
  }
  if (left > 0) {
    Vector<T> batch[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) batch[v] = v * threads < left ? load_vector(address + v * threads) : fill;
    if (is_first && !is_wanted()) return;
    is_first = false;
    body(batch);
  }
  if (is_first && !is_wanted()) return;
  // More than one round only if fewer than 2 * (kSize - 1) threads share the run.
  for (int i = thread; i < span.edges; i += threads) {
    if (i != thread) edge = span.edge(i);
    const Vector<T> single[1] = {with_first(fill, edge)};
    body(single);
  }
}

/// A function of (element, its column), with the interface that transform() takes.
template <typename T, typename Function>
struct Elementwise {
  Function function;

  __device__ Accumulator<T> operator()(Accumulator<T> value, std::int64_t column) const {
    return function(value, column);
  }
  __device__ Vector<T> operator()(const Vector<T>& v, std::int64_t column) const {
    Accumulator<T> values[Vector<T>::kSize];
    unpack(v, values);
#pragma unroll
    for (int i = 0; i < Vector<T>::kSize; ++i) values[i] = function(values[i], column + i);
    return pack<T>(values);
  }
};

/// Shares a piece of two runs of equal length among `threads` threads and writes `function(in)` to `out`. The addresses
/// of `out` and `in` are equal modulo 16; they may be the same. A piece is `piece_vectors` vectors, counted from the
/// first 16-byte boundary, so that every piece starts on one; piece 0 also has the edge elements. `make_function()` is
/// called when the first vectors are on their way, so that its own loads for the whole run do not delay them. H200, a
/// bf16 gradient with two numbers for each row: [4096, 32768] 0.1281 ms, with those loads first 0.1292. The function
/// maps (vector, column of its first element) to a vector, and (element, column) to an element. `loads` is an object of
/// loads.cuh.
template <int kVectors, typename T, typename Loads, typename MakeFunction>
__device__ void transform(const T* in, T* out, std::int64_t count, std::int64_t piece, int piece_vectors, int thread,
                          int threads, Loads loads, MakeFunction make_function) {
  constexpr int kSize = Vector<T>::kSize;
  const Span<const T> source(in, count);
  const Span<T> target(out, count);
  const std::int64_t first = piece * piece_vectors;
  const Vector<T>* from = source.vector_address(first + thread);
  Vector<T>* to = target.vector_address(first + thread);
  std::int64_t column = source.head + (first + thread) * kSize;
  int left = static_cast<int>(min(source.vectors - first, std::int64_t{piece_vectors})) - thread;

  Vector<T> batch[kVectors];
  const auto load_batch = [&] {
    const bool is_whole = left > (kVectors - 1) * threads;
    if (is_whole) loads.load(batch, from, threads);
    return is_whole;
  };
  loads.begin(from, left, threads);
  bool has_batch = load_batch();
  const auto function = make_function();
  while (has_batch) {
    loads.receive(batch);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) to[v * threads] = function(batch[v], column + v * threads * kSize);
    from += kVectors * threads;
    to += kVectors * threads;
    column += kVectors * threads * kSize;
    left -= kVectors * threads;
    has_batch = load_batch();
  }
  for (; left > 0; left -= threads, from += threads, to += threads, column += threads * kSize) {
    *to = function(load(from), column);
  }
  if (piece != 0) return;
  for (int i = thread; i < source.edges; i += threads) {
    target.edge(i) = round_to<T>(function(load_as_accumulator(source.edge(i)), source.edge_index(i)));
  }
}

}  // namespace eaves::cuda
