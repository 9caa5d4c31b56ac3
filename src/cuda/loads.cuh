// How a thread gets the vectors that it walks along, a batch at a time: loads into registers, or copies through shared
// memory that run ahead of their use. Each is an object for transform() of vector.cuh:
//
//   begin(first, left, threads)     before the first batch: its first vector, how many are left, their distance
//   load(batch, first, threads)     asks for a batch
//   receive(batch)                  has it in registers
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

/// Without a hint to the caches. Where elements are stored too, hints cost more than they save, though each is read
/// once. H100, bf16, gradient of logsumexp, [4096, 131072]: 0.709 ms, with L1::no_allocate 0.717; of cross entropy,
/// [1048576, 64]: 100 us, with L1::no_allocate and streaming stores 113.
template <typename T>
__device__ Vector<T> load(const Vector<T>* address) {
  Vector<T> v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.words.x), "=r"(v.words.y), "=r"(v.words.z), "=r"(v.words.w)
               : "l"(address));
  return v;
}

/// The same past L1, where rows are only read, and each element once. H100, bf16, cross entropy: [4096, 32768] with
/// smoothing 103 us, through L1 113; [1048576, 64] 66 us, through L1 72.
template <typename T>
__device__ Vector<T> load_past_l1(const Vector<T>* address) {
  Vector<T> v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.words.x), "=r"(v.words.y), "=r"(v.words.z), "=r"(v.words.w)
               : "l"(address));
  return v;
}

/// As load(), from memory that the kernel writes later, where another thread's element may lie over this one. load()
/// promises that nothing is written there, and may then be done as late as its first use, behind a barrier too.
template <typename T>
__device__ Vector<T> load_before_overwriting(const Vector<T>* address) {
  Vector<T> v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.words.x), "=r"(v.words.y), "=r"(v.words.z), "=r"(v.words.w)
               : "l"(address)
               : "memory");
  return v;
}

/// Straight into registers. Where threads do little with a batch, others load in the meantime.
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

/// Copies a vector to shared memory, whose address is `to`, some time before wait_for_copies() says so to this thread.
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
/// What was copied since the last call is one batch, also where it is nothing.
__device__ inline void end_batch_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// For all batches but the last kOnTheirWay.
template <int kOnTheirWay>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kOnTheirWay) : "memory");
}

/// A ring of kSlots batches in shared memory, in which each of the kThreads threads of a block has its own vectors,
/// kVectors of a batch. All slots but one are on their way: into the one whose batch was used last, the next is copied.
template <typename T, int kThreads, int kVectors, int kSlots>
class VectorRing {
 public:
  static constexpr int kVectorCount = kSlots * kVectors * kThreads;  ///< of the shared memory

  __device__ explicit VectorRing(const void* shared)
      : begin_(static_cast<std::uint32_t>(__cvta_generic_to_shared(shared)) + threadIdx.x * kVectorBytes),
        read_(begin_),
        written_(begin_) {}

  /// Once for each batch, the first kSlots - 1 times before anything is read: `send(function(v))` calls that function,
  /// the address of vector v, or does not call it.
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

/// Through a ring of shared memory: for kernels with so much arithmetic that their registers hold too few loads.
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
  /// The next batch, if it is whole.
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
