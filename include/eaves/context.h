// Where a call runs and what it may use. A default-constructed context is right for a simple call: all CPU threads,
// the default stream, scratch memory taken and given back by the call itself.
#pragma once

#include <cstddef>
#include <cstdint>

#pragma GCC visibility push(default)  // of a shared library, this is seen from outside
namespace eaves {

/// Scratch memory on the device where the operator runs, aligned to 256 bytes. The same memory must not serve two
/// calls that run at the same time.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// A caller's thread pool: calls `body(body_data, begin, end)` for disjoint pieces that cover [0, count), possibly
/// at the same time on several threads, and returns when all are done. `body` does not throw.
struct ParallelFor {
  using Body = void (*)(void* body_data, std::int64_t begin, std::int64_t end);
  void (*run)(void* pool, std::int64_t count, Body body, void* body_data) = nullptr;
  void* pool = nullptr;
};

struct ExecutionContext {
  /// GPU: a cudaStream_t of the device that the tensors are on; nullptr is that device's default stream. A call
  /// enqueues its work there and returns. It waits for the device only where the caller asks for what needs it:
  /// EAVES_CHECK_TARGETS=1, and skips_ignored of linear_cross_entropy.
  void* stream = nullptr;

  /// Empty: the operator takes what it needs (on a GPU from the stream's own memory pool, in stream order) and gives
  /// it back. Not empty: used as it is, and a call that needs more throws InvalidArgument with the number of bytes.
  Workspace workspace = {};

  /// CPU: how many threads a call may use; 0 means as many as OpenMP would (OMP_NUM_THREADS, or every core),
  /// 4096 is the most.
  int threads = 0;

  /// CPU: replaces OpenMP when `run` is set; `threads` then only bounds how finely the work is cut (0: 64 pieces).
  ParallelFor parallel_for = {};
};

}  // namespace eaves
#pragma GCC visibility pop
