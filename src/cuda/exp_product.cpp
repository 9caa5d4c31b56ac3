#include "cuda/exp_product.h"

#include <cstdint>
#include <string>

#include "core/build_config.h"
#include "core/environment.h"
#include "cuda/cutlass/exp_product_kernels.h"
#include "cuda/device.h"
#include "eaves/error.h"

namespace eaves::cuda {
namespace {

[[noreturn]] void fail_without_kernel(const char* op, const ExpProduct& product) {
  throw Unsupported(
      op, std::string("this build has no product of ") + name_of(product.dtype) + " that ends in exponentials");
}

/// The number of row clusters that run through all classes together. H200, 2048 and 12288 rows, 4096 to 262,144
/// classes, 1024 to 8192 features, the five kernels, tiles of rows or of classes first, 1 to 8 in turn (288 sizes, one
/// round, noise 2 to 3 %): this order takes 1.03 of the time of each size's fastest order, a table by rows and classes
/// 1.04. At 12288 rows of 4096 classes this order takes 1.00, rows first 1.11. The scheduler rounds the tiles of both
/// axes up to a multiple of `in_turn` and computes the added tiles too: at most 3 %.
int tiles_in_turn(const ExpProduct& product) {
  const std::int64_t clusters = ceil_divide(product.rows, kExpProductClusterRows);
  const std::int64_t tiles = ceil_divide(product.classes, kExpProductClasses);
  const auto is_costly = [&](int in_turn) {
    const auto rounded = [&](std::int64_t count) { return ceil_divide(count, in_turn) * in_turn; };
    return rounded(clusters) * rounded(tiles) * 32 > clusters * tiles * 33;
  };
  int in_turn = 4;
  while (is_costly(in_turn)) in_turn /= 2;
  return in_turn;
}

Launch launch_of(const ExpProduct& product, const ExecutionContext& context) {
  return {tiles_in_turn(product), properties(product.device).multiprocessors, context.stream};
}

/// Runs `run` with the kind of the device's tensor cores, if this build has kernels for it.
template <typename Run>
void with_tensor_cores(const char* op, const ExpProduct& product, Run run) {
  const bool is_sm100 = properties(product.device).compute_capability >= 100;
  if constexpr (EAVES_HAVE_CUTLASS) {
    if (!is_sm100) return run.template operator()<Sm90>();
  }
  if constexpr (EAVES_HAVE_SM100) {
    if (is_sm100) return run.template operator()<Sm100>();
  }
  fail_without_kernel(op, product);
}

}  // namespace

bool takes_exp_product(DType dtype, const GemmMatrix& x, const GemmMatrix& weight, std::int64_t features) {
  const auto is_aligned = [](const GemmMatrix& matrix) {
    return !matrix.is_transposed && reinterpret_cast<std::uintptr_t>(matrix.data) % 16 == 0 && matrix.stride % 8 == 0;
  };
  return size_of(dtype) == 2 && is_aligned(x) && is_aligned(weight) && features % 8 == 0;
}

bool has_exp_product(Device device) {
  if (device.type != DeviceType::cuda || device.index >= gpu_count()) return false;
  const int capability = properties(device).compute_capability;
  if (capability == 90) return EAVES_HAVE_CUTLASS;
  const bool is_sm100 = capability == 100 || capability == 103;
  return EAVES_HAVE_SM100 && is_sm100 && fused_product() > FusedProduct::where_tried;
}

void exp_product(const char* op, const ExpProduct& product, const ExpProductSums& to, const ExecutionContext& context) {
  with_tensor_cores(op, product, [&]<typename Sm>() {
    const auto run = to.exps != nullptr                 ? exps_of_bfloat16<Sm>
                     : product.dtype == DType::bfloat16 ? sums_of_bfloat16<Sm>
                                                        : sums_of_float16<Sm>;
    run(op, product, to, launch_of(product, context));
  });
}

void exp_product(const char* op, const ExpProduct& product, const ExpProductSoftmax& to,
                 const ExecutionContext& context) {
  with_tensor_cores(op, product, [&]<typename Sm>() {
    const auto run = product.dtype == DType::bfloat16 ? softmax_of_bfloat16<Sm> : softmax_of_float16<Sm>;
    run(op, product, to, launch_of(product, context));
  });
}

void exp_product(const char* op, const ExpProduct& product, const ExpProductGradient& to,
                 const ExecutionContext& context) {
  if (product.dtype != DType::bfloat16) fail_without_kernel(op, product);
  with_tensor_cores(op, product,
                    [&]<typename Sm>() { gradient_of_bfloat16<Sm>(op, product, to, launch_of(product, context)); });
}

}  // namespace eaves::cuda
