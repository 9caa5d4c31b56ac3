// The parts of TensorView and DType that need no device.
#include "eaves/tensor.h"

#include "core/check.h"
#include "eaves/error.h"

namespace eaves {

std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
    case DType::int64:
      return 8;
    case DType::float32:
    case DType::int32:
      return 4;
    case DType::float16:
    case DType::bfloat16:
    case DType::int16:
      return 2;
    case DType::int8:
    case DType::uint8:
    case DType::boolean:
      return 1;
  }
  throw InvalidArgument("unknown DType " + std::to_string(static_cast<int>(dtype)));
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return "float32";
    case DType::float64:
      return "float64";
    case DType::float16:
      return "float16";
    case DType::bfloat16:
      return "bfloat16";
    case DType::int8:
      return "int8";
    case DType::int16:
      return "int16";
    case DType::int32:
      return "int32";
    case DType::int64:
      return "int64";
    case DType::uint8:
      return "uint8";
    case DType::boolean:
      return "bool";
  }
  return "unknown dtype";
}

bool is_floating_point(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float64 || dtype == DType::float16 || dtype == DType::bfloat16;
}

Dims::Dims(std::initializer_list<std::int64_t> values) : Dims(values.begin(), values.size()) {}

Dims::Dims(const std::int64_t* values, std::size_t count) {
  if (count > static_cast<std::size_t>(kMaxRank)) {
    throw InvalidArgument("a tensor has " + std::to_string(count) + " axes, expected at most " +
                          std::to_string(kMaxRank));
  }
  for (std::size_t i = 0; i < count; ++i) values_[i] = values[i];
  size_ = static_cast<int>(count);
}

void Dims::push_back(std::int64_t value) {
  if (size_ == kMaxRank) {
    throw InvalidArgument("a tensor has more than " + std::to_string(kMaxRank) + " axes");
  }
  values_[size_++] = value;
}

TensorView TensorView::contiguous(void* data, DType dtype, const Dims& shape, Device device) {
  Dims strides = shape;
  std::int64_t stride = 1;
  for (int axis = shape.size() - 1; axis >= 0; --axis) {
    strides[axis] = stride;
    // An empty axis must not make the strides of the others 0: that would look like repeated elements.
    if (shape[axis] > 1 && __builtin_mul_overflow(stride, shape[axis], &stride)) {
      throw InvalidArgument("a tensor of shape " + check::to_string(shape) + " has more than 2^63 elements");
    }
  }
  return strided(data, dtype, shape, strides, device);
}

TensorView TensorView::contiguous(const void* data, DType dtype, const Dims& shape, Device device) {
  return contiguous(const_cast<void*>(data), dtype, shape, device);
}

TensorView TensorView::strided(void* data, DType dtype, const Dims& shape, const Dims& strides, Device device) {
  if (shape.size() != strides.size()) {
    throw InvalidArgument("a tensor of shape " + check::to_string(shape) + " has strides " + check::to_string(strides) +
                          ", expected one per axis");
  }
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.device = device;
  view.shape = shape;
  view.strides = strides;
  view.is_present = true;
  return view;
}

TensorView TensorView::strided(const void* data, DType dtype, const Dims& shape, const Dims& strides, Device device) {
  return strided(const_cast<void*>(data), dtype, shape, strides, device);
}

std::int64_t TensorView::element_count() const {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  return count;
}

}  // namespace eaves
