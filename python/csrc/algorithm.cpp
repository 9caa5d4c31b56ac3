// Questions that Python asks about linear_cross_entropy before a call, for PyTorch and JAX. python/eaves/_algorithm.py
// asks through ctypes: an operator of PyTorch would cost a small call more time, and tracers would see it.
#include <cstdint>
#include <exception>
#include <limits>
#include <string_view>

#include "core/dispatch.h"
#include "eaves/linear_cross_entropy.h"

namespace {

using namespace eaves;

DType dtype_named(const char* name) {
  for (const DType each : {DType::float16, DType::bfloat16, DType::float64}) {
    if (name_of(each) == std::string_view(name)) return each;
  }
  return DType::float32;
}

Device device_of(int index) { return index < 0 ? kCpu : Device{DeviceType::cuda, index}; }

}  // namespace

/// True if the algorithm is speed. `device` is the index of a GPU, or -1 for the CPU. With -1 for `rows` the sizes are
/// unknown.
extern "C" __attribute__((visibility("default"))) bool eaves_suits_speed(
    const char* dtype, int device, int reduction, bool has_grad_hidden_alone, bool has_output_gradients,
    bool accumulates, bool is_shard, std::int64_t workspace_limit, std::int64_t rows, std::int64_t features,
    std::int64_t classes, bool is_head_transposed, bool has_soft_targets) {
  const LinearCrossEntropyAlgorithmArgs args{.rows = rows,
                                             .features = features,
                                             .classes = classes,
                                             .dtype = dtype_named(dtype),
                                             .device = device_of(device),
                                             .reduction = static_cast<Reduction>(reduction),
                                             .is_head_transposed = is_head_transposed,
                                             .has_soft_targets = has_soft_targets,
                                             .has_grad_hidden_alone = has_grad_hidden_alone,
                                             .has_output_gradients = has_output_gradients,
                                             .accumulates = accumulates,
                                             .is_shard = is_shard,
                                             .workspace_limit = static_cast<std::size_t>(workspace_limit)};
  try {
    return linear_cross_entropy_algorithm(args) == LinearCrossEntropyAlgorithm::speed;
  } catch (const std::exception&) {  // must not cross into ctypes; the call itself refuses such sizes
    return false;
  }
}

/// The bytes per row that a forward with a loss per row keeps, if it has many rows; 0: it refuses such sizes.
extern "C" __attribute__((visibility("default"))) std::int64_t eaves_kept_row_bytes(const char* dtype, int device,
                                                                                    std::int64_t features,
                                                                                    std::int64_t classes,
                                                                                    double softcap, bool has_entropy) {
  constexpr std::int64_t kManyRows = 4096;
  std::uintptr_t address = 0;
  const auto view = [&](DType of, const Dims& shape) {  // memory that nothing reads
    address += std::uintptr_t{1} << 40;
    return TensorView::contiguous(reinterpret_cast<void*>(address), of, shape, device_of(device));
  };
  const DType of = dtype_named(dtype);
  try {
    LinearCrossEntropyForwardArgs args{.inputs = {.hidden = view(of, {kManyRows, features}),
                                                  .head = view(of, {classes, features}),
                                                  .targets = view(DType::int64, {kManyRows}),
                                                  .options = {.reduction = Reduction::none, .softcap = softcap}}};
    args.outputs.loss = view(accumulator_dtype(of), {kManyRows});
    if (has_entropy) args.outputs.entropy = view(accumulator_dtype(of), {kManyRows});
    const LinearCrossEntropyKept kept = linear_cross_entropy_kept(args, std::numeric_limits<std::size_t>::max());
    return kept.columns * static_cast<std::int64_t>(size_of(kept.dtype));
  } catch (const std::exception&) {
    return 0;
  }
}
