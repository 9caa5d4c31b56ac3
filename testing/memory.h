// Device memory that frees itself, for tests with tensors that are too large for a TestTensor's copies and canaries.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "eaves/tensor.h"
#include "runtime/runtime.h"

namespace eaves::testing {

class Memory {
 public:
  Memory(Device device, std::int64_t bytes)
      : device_(device), data_(runtime::allocate(device, static_cast<std::size_t>(bytes))) {}
  ~Memory() { runtime::deallocate(device_, data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* data() const { return data_; }
  TensorView view(DType dtype, const Dims& shape) const { return TensorView::contiguous(data_, dtype, shape, device_); }

  template <typename T>
  std::vector<T> read(std::int64_t count) const {
    std::vector<T> values(static_cast<std::size_t>(count));
    runtime::copy(values.data(), kCpu, data_, device_, values.size() * sizeof(T));
    return values;
  }
  template <typename T>
  void write(const std::vector<T>& values) const {
    runtime::copy(data_, device_, values.data(), kCpu, values.size() * sizeof(T));
  }

 private:
  Device device_;
  void* data_;
};

/// Memory for a large tensor. On the CPU it asks for pages of 2 MiB: to hand out pages of 4 KiB takes longer than all
/// computations in the memory.
class LargeMemory : public Memory {
 public:
  LargeMemory(Device device, std::int64_t bytes) : Memory(device, bytes) {
    if (device.type == DeviceType::cpu) madvise(data(), static_cast<std::size_t>(bytes), MADV_HUGEPAGE);
  }
};

}  // namespace eaves::testing
