// Tensors for tests: on any device, at any alignment, with any strides, between canaries. A test reads and fills a copy
// in CPU memory; upload() and download() move it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "eaves/tensor.h"

namespace eaves::testing {

/// The places of a test tensor's elements in memory.
struct Placement {
  Dims strides = {};              ///< in elements; ignored unless has_strides
  bool has_strides = false;       ///< otherwise contiguous
  std::int64_t misalignment = 0;  ///< the first address is this many elements after a multiple of 256 bytes
};

Placement contiguous_at(std::int64_t misalignment);
Placement with_strides(const Dims& strides, std::int64_t misalignment = 0);

/// The shape of an lse with two numbers.
inline Dims with_axis_of_2(Dims rows) {
  rows.push_back(2);
  return rows;
}

class TestTensor {
 public:
  TestTensor(Device device, DType dtype, const Dims& shape, const Placement& placement = {});
  ~TestTensor();
  TestTensor(const TestTensor&) = delete;
  TestTensor& operator=(const TestTensor&) = delete;

  /// The tensor on its device, for operators.
  TensorView view() const;
  /// The copy in CPU memory, for the oracle.
  TensorView host() const;

  /// Sets every element of the copy to `value` of its index in row-major order, rounded to the dtype.
  void fill(const std::function<double(std::int64_t)>& value);
  void set(std::int64_t element, double value);
  double get(std::int64_t element) const;

  /// Copies every byte of the other tensor's copy, which must have the same layout in memory.
  void copy_from(const TestTensor& other);

  void upload();
  void download();

  /// Empty if no byte outside of the elements has changed, otherwise the place of the first change. Call download()
  /// first.
  std::string canary_damage() const;

  /// The bytes of the copy, canaries and gaps included: for comparing two runs.
  std::vector<unsigned char> bytes() const { return {host_base_, host_base_ + byte_count_}; }

 private:
  std::int64_t offset_of(std::int64_t element) const;  // in bytes from the start of the memory

  Device device_;
  DType dtype_;
  Dims shape_;
  Dims strides_;
  std::int64_t first_byte_ = 0;
  std::size_t byte_count_ = 0;
  std::vector<unsigned char> host_;
  unsigned char* device_memory_ = nullptr;
  unsigned char* host_base_ = nullptr;  // host_ from its first multiple of 256 on
};

/// Uniform in [0, 1), the same for the same numbers on every machine.
double random_uniform(std::uint64_t seed, std::uint64_t index);
/// Normal with mean 0 and deviation 1.
double random_normal(std::uint64_t seed, std::uint64_t index);

}  // namespace eaves::testing
