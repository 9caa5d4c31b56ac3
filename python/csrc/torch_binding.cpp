#include "torch_binding.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <torch/csrc/stable/ops.h>

#include <array>

#include "core/check.h"

namespace eaves::binding {
namespace {

/// Torch's numbers for the dtypes of eaves, in the order of eaves::DType. They are asked for once: the functions belong
/// to the stable interface, the numbers do not.
const std::array<std::int32_t, 10>& torch_dtypes() {
  static const std::array<std::int32_t, 10> dtypes = {
      aoti_torch_dtype_float32(), aoti_torch_dtype_float64(), aoti_torch_dtype_float16(), aoti_torch_dtype_bfloat16(),
      aoti_torch_dtype_int8(),    aoti_torch_dtype_int16(),   aoti_torch_dtype_int32(),   aoti_torch_dtype_int64(),
      aoti_torch_dtype_uint8(),   aoti_torch_dtype_bool()};
  static_assert(static_cast<std::size_t>(DType::boolean) + 1 == 10);
  return dtypes;
}

[[noreturn]] void refuse(Name name, const std::string& what) {
  throw Unsupported(name.op, std::string("`") + name.argument + "` " + what);
}

DType dtype_of_number(std::int32_t number, Name name) {
  const auto& dtypes = torch_dtypes();
  for (std::size_t i = 0; i < dtypes.size(); ++i) {
    if (dtypes[i] == number) return static_cast<DType>(i);
  }
  refuse(name,
         "has a dtype that eaves does not support, expected float16, bfloat16, float32, float64, int8, int16, int32, "
         "int64, uint8 or bool");
}

std::int32_t number_of(DType dtype) { return torch_dtypes()[static_cast<std::size_t>(dtype)]; }

std::int32_t number_of(DeviceType type) {
  return type == DeviceType::cpu ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda();
}

Device device_of(const Tensor& tensor, Name name) {
  std::int32_t type = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  if (type == aoti_torch_device_type_cpu()) return kCpu;
  if (type != aoti_torch_device_type_cuda())
    refuse(name, "is on a device that eaves does not support, expected cpu or cuda");
  return {DeviceType::cuda, tensor.get_device_index()};
}

TensorView view_of(const Tensor& tensor, void* data, Name name) {
  std::int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  const auto shape = tensor.sizes();
  const auto strides = tensor.strides();
  if (shape.size() > static_cast<std::size_t>(kMaxRank)) {
    refuse(name, "has " + std::to_string(shape.size()) + " axes, expected at most " + std::to_string(kMaxRank));
  }
  return TensorView::strided(data, dtype_of_number(dtype, name), Dims(shape.data(), shape.size()),
                             Dims(strides.data(), strides.size()), device_of(tensor, name));
}

/// Looked up and not linked, so that a torch without CUDA loads the same library. Python loads torch's libraries
/// locally, and only the handle of the library that has the function finds it.
void* current_cuda_stream(int device_index) {
  using Function = AOTITorchError (*)(std::int32_t device_index, void** stream);
  static const auto function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    void* symbol = library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<Function>(symbol);
  }();
  if (function == nullptr) throw Unsupported("a tensor is on a GPU, but this PyTorch has no CUDA");
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(function(device_index, &stream));
  return stream;
}

/// Runs a loop of eaves on torch's threads. Called from one of torch's own parallel loops, it stays on that thread.
void run_on_torch_threads(void* /*pool*/, std::int64_t count, ParallelFor::Body body, void* body_data) {
  struct Loop {
    ParallelFor::Body body;
    void* data;
  } loop{body, body_data};
  const auto run = [](std::int64_t begin, std::int64_t end, void* data) {
    const Loop& loop = *static_cast<const Loop*>(data);
    loop.body(loop.data, begin, end);
  };
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, count, 1, run, &loop));
}

/// New memory of a CPU costs more than the computation that fills it: the kernel hands it out page by page, at the
/// first write to each. Pages of 2 MiB are handed out 512 times less often. If they are not allowed, nothing changes.
void ask_for_huge_pages(const TensorView& view) {
  constexpr std::uintptr_t kHugePage = std::uintptr_t{2} << 20;
  const std::size_t bytes = static_cast<std::size_t>(view.element_count()) * size_of(view.dtype);
  if (bytes < 2 * kHugePage || view.device.type != DeviceType::cpu) return;
  const auto data = reinterpret_cast<std::uintptr_t>(view.data);
  const std::uintptr_t begin = (data + kHugePage - 1) / kHugePage * kHugePage;
  const std::uintptr_t end = (data + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

/// Allocates the memory that `view` describes from torch's allocator.
NewTensor allocate(TensorView view) {
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(view.shape.size(), view.shape.begin(), view.strides.begin(), number_of(view.dtype),
                               number_of(view.device.type), view.device.index, &handle) != TORCH_SUCCESS) {
    throw OutOfMemory("PyTorch has no memory on " + check::to_string(view.device) + " for a tensor of shape " +
                      check::to_string(view.shape) + ", " + name_of(view.dtype));
  }
  Tensor tensor(handle);
  view.data = tensor.mutable_data_ptr();
  ask_for_huge_pages(view);
  return {std::move(tensor), view};
}

}  // namespace

TensorView input(const Tensor& tensor, Name name) {
  return view_of(tensor, const_cast<void*>(tensor.const_data_ptr()), name);
}

TensorView optional_input(const OptionalTensor& tensor, Name name) {
  return tensor.has_value() ? input(*tensor, name) : TensorView{};
}

TensorView output(const Tensor& tensor) { return view_of(tensor, tensor.mutable_data_ptr(), {"eaves", "the result"}); }

DType dtype_of(ScalarType type, Name name) {
  return dtype_of_number(torch::stable::detail::to<std::int32_t>(torch::stable::detail::from(type)), name);
}

Dims dims_of(const std::vector<std::int64_t>& values) { return Dims(values.data(), values.size()); }

NewTensor empty_output(const Dims& shape, DType dtype, Device device) {
  return allocate(TensorView::contiguous(static_cast<void*>(nullptr), dtype, shape, device));
}

Tensor empty(const Dims& shape, DType dtype, Device device) { return empty_output(shape, dtype, device).tensor; }

NewTensor empty_like(const Tensor& like, const TensorView& view) {
  // Each call looks up torch's own function by its name; most layouts do not need it.
  if (like.is_contiguous()) return allocate(view);
  try {
    Tensor tensor = torch::stable::empty_like(like);
    const TensorView result = output(tensor);
    ask_for_huge_pages(result);
    return {std::move(tensor), result};
  } catch (const std::runtime_error&) {
    throw OutOfMemory("PyTorch has no memory for a tensor of " + std::to_string(like.numel()) + " elements");
  }
}

Call::Call(Device device) : device_(device) {
  if (device.type == DeviceType::cuda) {
    context_.stream = current_cuda_stream(device.index);
  } else {
    context_.parallel_for.run = run_on_torch_threads;
    context_.threads = static_cast<int>(torch::stable::get_num_threads());
  }
}

void Call::take_workspace(std::size_t bytes) {
  if (bytes == 0) return;
  constexpr std::size_t kAlignment = 256;  // of a workspace; torch aligns memory of the CPU to 64 bytes
  workspace_ = empty({static_cast<std::int64_t>(bytes + kAlignment)}, DType::uint8, device_);
  void* data = workspace_->mutable_data_ptr();
  std::size_t space = bytes + kAlignment;
  context_.workspace = {std::align(kAlignment, bytes, data, space), bytes};
}

}  // namespace eaves::binding
