// Loads for a thread that walks along vectors, a batch at a time: into registers, or by copies through shared memory
// that run ahead of their use. Each class is an argument of transform() in vector.cuh:
//
//   begin(first, left, threads)     before the first batch: its first vector, the vectors left, their distance
//   load(batch, first, threads)     asks for a batch
//   receive(batch)                  has the batch in registers
#pragma once

#include <cstdint>

#include "core/numeric.h"

namespace eaves::cuda {

/// 16 bytes of elements.
template <typename T>
struct Vector {
  static constexpr int kSize = 16 / sizeof(T);
  uint4 words;
};

/// Loads without a hint to the caches. In kernels that also store elements, hints cost more than they save, though each
/// element is read once. H100, bf16, gradient of logsumexp, [4096, 131072]: 0.709 ms, with L1::no_allocate 0.717;
/// gradient of cross entropy, [1048576, 64]: 100 us, with L1::no_allocate and streaming stores 113.
template <typename T>
__device__ Vector<T> load(const Vector<T>* address) {
  Vector<T> v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.words.x), "=r"(v.words.y), "=r"(v.words.z), "=r"(v.words.w)
               : "l"(address));
  return v;
}

/// Loads past L1, for kernels that only read their rows, each element once. H100, bf16, cross entropy: [4096, 32768]
/// with smoothing 103 us, through L1 113; [1048576, 64] 66 us, through L1 72.
template <typename T>
__device__ Vector<T> load_past_l1(const Vector<T>* address) {
  Vector<T> v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.words.x), "=r"(v.words.y), "=r"(v.words.z), "=r"(v.words.w)
               : "l"(address));
  return v;
}

/// Loads from memory that the kernel writes later, if another thread's element may lie over this one. load() promises
/// memory that no thread writes, and the compiler may therefore delay it to its first use, even behind a barrier.
template <typename T>
__device__ Vector<T> load_before_overwriting(const Vector<T>* address) {
  Vector<T> v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.words.x), "=r"(v.words.y), "=r"(v.words.z), "=r"(v.words.w)
               : "l"(address)
               : "memory");
  return v;
}

/// Loads straight into registers. If threads do little with a batch, other threads load in the meantime.
struct DirectLoads {
  template <typename T>
  __device__ void begin(const Vector<T>*, int, int) {}
  template <typename T, int kVectors>
  __device__ void load(Vector<T> (&batch)[kVectors], const Vector<T>* first, int threads) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) batch[v] = cuda::load(first + v * threads);
  }
  template <typename T, int kVectors>
  __device__ void receive(Vector<T> (&)[kVectors]) {}
};

/// Copies a vector to shared memory at address `to`. It has arrived when this thread has waited for its batch.
template <typename T>
__device__ void copy_ahead(std::uint32_t to, const Vector<T>* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
template <typename T>
__device__ Vector<T> load_shared(std::uint32_t from) {
  Vector<T> v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.words.x), "=r"(v.words.y), "=r"(v.words.z), "=r"(v.words.w)
               : "r"(from)
               : "memory");
  return v;
}
/// Ends a batch: all copies since the last call, possibly none.
__device__ inline void end_batch_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits for all batches but the last kOnTheirWay.
template <int kOnTheirWay>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kOnTheirWay) : "memory");
}

/// A ring of kSlots batches in shared memory. Each of the kThreads threads of a block has vectors of its own, kVectors
/// in a batch. All slots but one are on their way; the next batch is copied into the slot that was read last.
template <typename T, int kThreads, int kVectors, int kSlots>
class VectorRing {
 public:
  static constexpr int kVectorCount = kSlots * kVectors * kThreads;  ///< of its shared memory

  __device__ explicit VectorRing(const void* shared)
      : begin_(static_cast<std::uint32_t>(__cvta_generic_to_shared(shared)) + threadIdx.x * kVectorBytes),
        read_(begin_),
        written_(begin_) {}

  /// Called once for each batch, and kSlots - 1 times before the first read. `send(address_of)` starts the batch's
  /// copies: address_of(v) is the address of vector v. It may leave out a vector.
  template <typename Send>
  __device__ void send(Send send) {
    send([&](int v) { return written_ + v * kThreads * kVectorBytes; });
    end_batch_of_copies();
    advance(written_);
  }
  __device__ void wait() { wait_for_copies<kSlots - 2>(); }
  /// Vector v of the batch that has arrived.
  __device__ Vector<T> read(int v) const { return load_shared<T>(read_ + v * kThreads * kVectorBytes); }
  __device__ void go_on() { advance(read_); }

 private:
  static constexpr std::uint32_t kVectorBytes = 16;
  static constexpr std::uint32_t kSlotBytes = kVectors * kThreads * kVectorBytes;

  __device__ void advance(std::uint32_t& slot) const {
    slot += kSlotBytes;
    if (slot == begin_ + kSlots * kSlotBytes) slot = begin_;
  }

  std::uint32_t begin_;
  std::uint32_t read_;
  std::uint32_t written_;
};

/// Loads through a ring of shared memory, for kernels with so much arithmetic that their registers hold too few loads.
template <typename T, int kThreads, int kVectors, int kSlots>
class LoadsAhead {
 public:
  using Ring = VectorRing<T, kThreads, kVectors, kSlots>;

  __device__ explicit LoadsAhead(const void* shared) : ring_(shared) {}

  __device__ void begin(const Vector<T>* first, int left, int threads) {
    next_ = first;
    left_ = left;
    threads_ = threads;
#pragma unroll
    for (int i = 0; i < kSlots - 1; ++i) send();
  }
  __device__ void load(Vector<T> (&)[kVectors], const Vector<T>*, int) {}
  __device__ void receive(Vector<T> (&batch)[kVectors]) {
    ring_.wait();
    send();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) batch[v] = ring_.read(v);
    ring_.go_on();
  }

 private:
  /// Sends the next batch if it is whole.
  __device__ void send() {
    ring_.send([&](auto address) {
      if (left_ <= (kVectors - 1) * threads_) return;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) copy_ahead(address(v), next_ + v * threads_);
    });
    next_ += kVectors * threads_;
    left_ -= kVectors * threads_;
  }

  Ring ring_;
  const Vector<T>* next_ = nullptr;
  int left_ = 0;
  int threads_ = 0;
};

}  // namespace eaves::cuda
