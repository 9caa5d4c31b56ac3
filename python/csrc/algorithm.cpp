// Which algorithm linear_cross_entropy takes, for PyTorch and JAX alike: python/eaves/_algorithm.py asks by ctypes,
// because an operator of PyTorch would cost a small call more, and be seen by tracers.
#include <exception>
#include <string_view>

#include "eaves/linear_cross_entropy.h"

/// Whether it is speed. `device` is the index of a GPU, or -1 for the CPU; without rows (-1) the sizes are unknown.
extern "C" __attribute__((visibility("default"))) bool eaves_suits_speed(
    const char* dtype, int device, int reduction, bool has_grad_hidden_alone, bool has_output_gradients,
    bool accumulates, bool is_shard, std::int64_t workspace_limit, std::int64_t rows, std::int64_t features,
    std::int64_t classes, bool is_head_transposed, bool has_soft_targets) {
  using namespace eaves;
  LinearCrossEntropyAlgorithmArgs args{.rows = rows,
                                       .features = features,
                                       .classes = classes,
                                       .device = device < 0 ? kCpu : Device{DeviceType::cuda, device},
                                       .reduction = static_cast<Reduction>(reduction),
                                       .is_head_transposed = is_head_transposed,
                                       .has_soft_targets = has_soft_targets,
                                       .has_grad_hidden_alone = has_grad_hidden_alone,
                                       .has_output_gradients = has_output_gradients,
                                       .accumulates = accumulates,
                                       .is_shard = is_shard,
                                       .workspace_limit = static_cast<std::size_t>(workspace_limit)};
  for (const DType each : {DType::float16, DType::bfloat16, DType::float32, DType::float64}) {
    if (name_of(each) == std::string_view(dtype)) args.dtype = each;
  }
  try {
    return linear_cross_entropy_algorithm(args) == LinearCrossEntropyAlgorithm::speed;
  } catch (const std::exception&) {  // cannot cross into ctypes; the call itself refuses such sizes
    return false;
  }
}
