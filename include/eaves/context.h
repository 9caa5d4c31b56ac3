// The context of a call: its stream, its scratch memory, its CPU threads. The default context suits a simple call: all
// CPU threads, the default stream, and scratch memory that the call takes and gives back.
#pragma once

#include <cstddef>
#include <cstdint>

#pragma GCC visibility push(default)  // exported if eaves is built into a shared library
namespace eaves {

/// Scratch memory on the operator's device, aligned to 256 bytes. Two calls that run at the same time must not share
/// it.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// A caller's thread pool. `run` calls `body(body_data, begin, end)` for disjoint pieces that cover [0, count),
/// possibly on several threads at the same time, and returns when all pieces are done. `body` does not throw.
struct ParallelFor {
  using Body = void (*)(void* body_data, std::int64_t begin, std::int64_t end);
  void (*run)(void* pool, std::int64_t count, Body body, void* body_data) = nullptr;
  void* pool = nullptr;
};

struct ExecutionContext {
  /// GPU: a cudaStream_t of the device that holds the tensors; nullptr is the default stream of that device. A call
  /// enqueues its work on the stream and returns. It waits for the device in two cases alone, both at the caller's
  /// request: EAVES_CHECK_TARGETS=1, and skips_ignored of linear_cross_entropy.
  void* stream = nullptr;

  /// Empty: the call takes the scratch memory that it needs (on a GPU from the stream's own memory pool, in stream
  /// order) and gives it back. Not empty: the call uses this memory; if it needs more, it throws InvalidArgument with
  /// the number of bytes.
  Workspace workspace = {};

  /// CPU: the most threads that a call uses; 0: as many as OpenMP would use (OMP_NUM_THREADS, or every core). The limit
  /// is 4096.
  int threads = 0;

  /// CPU: replaces OpenMP if `run` is set. `threads` then only bounds the number of pieces of the work (0: 64 pieces).
  ParallelFor parallel_for = {};
};

}  // namespace eaves
#pragma GCC visibility pop
