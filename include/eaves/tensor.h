// Views of tensors: a pointer, an element type, a device, a shape and strides. A view owns no memory; a copy of a view
// copies no elements.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#pragma GCC visibility push(default)  // exported if eaves is built into a shared library
namespace eaves {

/// Element types. Operators compute on bfloat16, float16, float32 and float64; int32 and int64 are indices.
enum class DType : std::uint8_t { float32, float64, float16, bfloat16, int8, int16, int32, int64, uint8, boolean };

/// Bytes of one element.
std::size_t size_of(DType dtype);

/// The name in users' spelling: "bfloat16", "int64", "bool".
const char* name_of(DType dtype);

/// True for float16, bfloat16, float32 and float64.
bool is_floating_point(DType dtype);

enum class DeviceType : std::uint8_t { cpu, cuda };

/// The device that holds a tensor and runs an operator. `index` counts GPUs; it is 0 on the CPU.
struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;

  friend bool operator==(const Device&, const Device&) = default;
};

inline constexpr Device kCpu{DeviceType::cpu, 0};
inline constexpr Device kCuda{DeviceType::cuda, 0};

/// The most axes of a tensor.
inline constexpr int kMaxRank = 16;

/// A short list of 64-bit numbers, one per axis: a shape, strides in elements, or a list of axes. It never allocates.
class Dims {
 public:
  Dims() = default;
  /// Both throw InvalidArgument for more than kMaxRank entries.
  Dims(std::initializer_list<std::int64_t> values);
  Dims(const std::int64_t* values, std::size_t count);

  int size() const { return size_; }
  bool empty() const { return size_ == 0; }
  std::int64_t operator[](int i) const { return values_[i]; }
  std::int64_t& operator[](int i) { return values_[i]; }
  const std::int64_t* begin() const { return values_.data(); }
  const std::int64_t* end() const { return values_.data() + size_; }
  void push_back(std::int64_t value);

  friend bool operator==(const Dims& a, const Dims& b) {
    if (a.size_ != b.size_) return false;
    for (int i = 0; i < a.size_; ++i) {
      if (a.values_[i] != b.values_[i]) return false;
    }
    return true;
  }

 private:
  std::array<std::int64_t, kMaxRank> values_{};
  int size_ = 0;
};

/// A view of a tensor. A default-constructed view stands for an absent optional tensor.
struct TensorView {
  void* data = nullptr;  ///< element [0, ..., 0]; operators write only through views that their header marks "out"
  DType dtype = DType::float32;
  Device device = kCpu;
  Dims shape;
  Dims strides;  ///< in elements; 0 repeats an element, a negative stride runs backwards

  /// True if the caller passed a tensor, even an empty or a zero-dimensional one.
  bool is_present = false;

  /// A row-major (C order) view of `data`.
  static TensorView contiguous(void* data, DType dtype, const Dims& shape, Device device = kCpu);
  static TensorView contiguous(const void* data, DType dtype, const Dims& shape, Device device = kCpu);

  /// A view with the caller's strides, one for each axis of `shape`. Throws InvalidArgument for another number of
  /// strides.
  static TensorView strided(void* data, DType dtype, const Dims& shape, const Dims& strides, Device device = kCpu);
  static TensorView strided(const void* data, DType dtype, const Dims& shape, const Dims& strides,
                            Device device = kCpu);

  /// Number of elements: the product of `shape`, 1 for a zero-dimensional tensor.
  std::int64_t element_count() const;
};

}  // namespace eaves
#pragma GCC visibility pop
