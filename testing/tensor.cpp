#include "testing/tensor.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/runtime.h"
#include "testing/dispatch.h"
#include "testing/reference.h"

namespace eaves::testing {
namespace {

constexpr std::int64_t kCanaryBytes = 512;
constexpr unsigned char kCanary = 0xa5;

}  // namespace

Placement contiguous_at(std::int64_t misalignment) { return {.misalignment = misalignment}; }

Placement with_strides(const Dims& strides, std::int64_t misalignment) {
  return {.strides = strides, .has_strides = true, .misalignment = misalignment};
}

TestTensor::TestTensor(Device device, DType dtype, const Dims& shape, const Placement& placement)
    : device_(device), dtype_(dtype), shape_(shape) {
  strides_ = placement.has_strides ? placement.strides
                                   : TensorView::contiguous(static_cast<void*>(nullptr), dtype, shape).strides;
  std::int64_t low = 0;
  std::int64_t high = 0;
  for (int axis = 0; axis < shape.size(); ++axis) {
    const std::int64_t reach = std::max<std::int64_t>(shape[axis] - 1, 0) * strides_[axis];
    (reach < 0 ? low : high) += reach;
  }
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  // The memory before element [0, ..., 0] is rounded up, so that `misalignment` is the misalignment of this element.
  const std::int64_t before = (-low * element + 255) / 256 * 256;
  first_byte_ = kCanaryBytes + before + placement.misalignment * element;
  byte_count_ = static_cast<std::size_t>(first_byte_ + (high + 1) * element + kCanaryBytes);
  host_.assign(byte_count_ + 256, kCanary);
  host_base_ = host_.data() + (256 - reinterpret_cast<std::uintptr_t>(host_.data()) % 256) % 256;
  if (device.type == DeviceType::cuda) {
    device_memory_ = static_cast<unsigned char*>(runtime::allocate(device, byte_count_));
  }
  upload();
}

TestTensor::~TestTensor() {
  if (device_memory_ != nullptr) runtime::deallocate(device_, device_memory_);
}

TensorView TestTensor::view() const {
  unsigned char* base = device_memory_ != nullptr ? device_memory_ : host_base_;
  return TensorView::strided(static_cast<void*>(base + first_byte_), dtype_, shape_, strides_, device_);
}

TensorView TestTensor::host() const {
  return TensorView::strided(static_cast<void*>(host_base_ + first_byte_), dtype_, shape_, strides_, kCpu);
}

std::int64_t TestTensor::offset_of(std::int64_t element) const {
  std::int64_t offset = 0;
  for (int axis = shape_.size() - 1; axis >= 0; --axis) {
    offset += element % shape_[axis] * strides_[axis];
    element /= shape_[axis];
  }
  return first_byte_ + offset * static_cast<std::int64_t>(size_of(dtype_));
}

void TestTensor::set(std::int64_t element, double value) {
  dispatch_any(dtype_, [&]<typename T>() {
    T rounded{};
    if constexpr (std::is_same_v<T, boolean>) {
      rounded.byte = value != 0.0;
    } else {
      rounded = round_to<T>(value);
    }
    std::memcpy(host_base_ + offset_of(element), &rounded, sizeof(T));
  });
}

double TestTensor::get(std::int64_t element) const {
  return dispatch_any(dtype_, [&]<typename T>() {
    T value;
    std::memcpy(&value, host_base_ + offset_of(element), sizeof(T));
    return reference::exact(value);
  });
}

void TestTensor::fill(const std::function<double(std::int64_t)>& value) {
  const std::int64_t count = host().element_count();
  for (std::int64_t element = 0; element < count; ++element) set(element, value(element));
  upload();
}

void TestTensor::copy_from(const TestTensor& other) {
  if (other.byte_count_ != byte_count_ || other.first_byte_ != first_byte_) {
    throw InvalidArgument("a test copies a tensor to one that lies differently");
  }
  std::memcpy(host_base_, other.host_base_, byte_count_);
  upload();
}

void TestTensor::upload() {
  if (device_memory_ == nullptr) return;
  runtime::copy(device_memory_, device_, host_base_, kCpu, byte_count_);
}

void TestTensor::download() {
  if (device_memory_ == nullptr) return;
  runtime::copy(host_base_, kCpu, device_memory_, device_, byte_count_);
}

std::string TestTensor::canary_damage() const {
  std::vector<bool> is_element(byte_count_, false);
  const std::int64_t count = host().element_count();
  const auto mark = [&](std::int64_t first, std::int64_t elements) {
    const auto begin = is_element.begin() + static_cast<std::ptrdiff_t>(first);
    std::fill(begin, begin + static_cast<std::ptrdiff_t>(elements) * static_cast<std::ptrdiff_t>(size_of(dtype_)),
              true);
  };
  // All at once if there are no gaps, because the largest tensors have none.
  if (strides_ == TensorView::contiguous(static_cast<void*>(nullptr), dtype_, shape_).strides) {
    mark(first_byte_, count);
  } else {
    for (std::int64_t element = 0; element < count; ++element) mark(offset_of(element), 1);
  }
  for (std::size_t byte = 0; byte < byte_count_; ++byte) {
    if (!is_element[byte] && host_base_[byte] != kCanary) {
      return "byte " + std::to_string(static_cast<std::int64_t>(byte) - first_byte_) +
             " from the first element was overwritten";
    }
  }
  return "";
}

double random_uniform(std::uint64_t seed, std::uint64_t index) {
  // splitmix64
  std::uint64_t z = seed * 0x9e3779b97f4a7c15u + (index + 1) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  return static_cast<double>(z >> 11) * 0x1p-53;
}

double random_normal(std::uint64_t seed, std::uint64_t index) {
  const double u = 1.0 - random_uniform(seed, 2 * index);
  const double v = random_uniform(seed, 2 * index + 1);
  return std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586 * v);
}

}  // namespace eaves::testing
