// Work in a graph that the GPU does or leaves out by a number in its own memory: conditional nodes of CUDA graphs,
// which need a driver for CUDA 12.4.
#pragma once

#include <cstdint>
#include <functional>

namespace eaves::cuda {

bool is_being_captured(const char* op, void* stream);

/// Adds to the graph that a stream is being captured into. For one thread, on its current device.
///
/// A graph of our own, captured and launched at once, would let calls outside of a graph go without waiting too. But
/// while one thread captures, cudaDeviceSynchronize() of any other is an error, and ends the capture.
class ConditionalWork {
 public:
  /// `stream` is being captured.
  ConditionalWork(const char* op, void* stream);
  ~ConditionalWork();
  ConditionalWork(const ConditionalWork&) = delete;
  ConditionalWork& operator=(const ConditionalWork&) = delete;

  /// Where work goes now: the caller's stream, or while run_if() calls its `work` another one.
  void* stream() const { return current_; }

  /// `work`, which enqueues kernels and memory sets alone, is done where least <= *number <= most when its turn comes.
  /// Not from within `work`.
  void run_if(const std::int64_t* number, std::int64_t least, std::int64_t most, const std::function<void()>& work);

 private:
  const char* op_;
  void* outer_;
  void* inner_;  ///< of what is conditional
  void* current_;
};

}  // namespace eaves::cuda
