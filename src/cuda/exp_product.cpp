#include "cuda/exp_product.h"

#include <cstdint>
#include <string>

#include "core/build_config.h"
#include "cuda/device.h"
#include "cuda/sm90/exp_product_kernels.h"
#include "eaves/error.h"

namespace eaves::cuda {
namespace {

constexpr bool kHasKernels = EAVES_HAVE_CUTLASS;

[[noreturn]] void fail_without_kernel(const char* op, const ExpProduct& product) {
  throw Unsupported(
      op, std::string("no product of ") + name_of(product.dtype) + " that ends in exponentials is in this build");
}

struct FastestRaster {
  std::int64_t least_rows;
  std::int64_t least_classes;
  sm90::Raster raster;
};

/// H200, 12288 rows of 4096 features, time over that of cuBLAS' product: 4096 classes 0.966 along classes, two in turn
/// (along rows 1.008 to 1.20); 32,768 0.940 along rows, four in turn (one 0.979, eight 0.988); 131,072 0.958 along rows,
/// one (others 0.997 to 1.12). Of up to 4096 rows x stays in L2, and the weight is read once. The first that fits.
constexpr FastestRaster kFastestRasters[] = {
    {4097, 98304, {.is_along_classes = false, .in_turn = 1}},
    {4097, 16384, {.is_along_classes = false, .in_turn = 4}},
    {4097, 0, {.is_along_classes = true, .in_turn = 2}},
    {0, 0, {.is_along_classes = false, .in_turn = 1}},
};

/// The scheduler rounds the tiles of both axes up to a multiple of those in turn, and computes them too: at most 3 %.
sm90::Raster raster_of(const ExpProduct& product) {
  const auto* fastest = kFastestRasters;
  while (product.rows < fastest->least_rows || product.classes < fastest->least_classes) ++fastest;
  sm90::Raster raster = fastest->raster;
  const std::int64_t clusters = ceil_divide(product.rows, kExpProductClusterRows);
  const std::int64_t tiles = ceil_divide(product.classes, kExpProductClasses);
  const auto is_costly = [&](int in_turn) {
    const auto rounded = [&](std::int64_t count) { return ceil_divide(count, in_turn) * in_turn; };
    return rounded(clusters) * rounded(tiles) * 32 > clusters * tiles * 33;
  };
  while (is_costly(raster.in_turn)) raster.in_turn /= 2;
  return raster;
}

sm90::Launch launch_of(const ExpProduct& product, const ExecutionContext& context) {
  return {raster_of(product), properties(product.device).multiprocessors, context.stream};
}

}  // namespace

bool takes_exp_product(DType dtype, const GemmMatrix& x, const GemmMatrix& weight, std::int64_t features) {
  const auto is_aligned = [](const GemmMatrix& matrix) {
    return !matrix.is_transposed && reinterpret_cast<std::uintptr_t>(matrix.data) % 16 == 0 && matrix.stride % 8 == 0;
  };
  return size_of(dtype) == 2 && is_aligned(x) && is_aligned(weight) && features % 8 == 0;
}

bool has_exp_product(Device device) {
  return kHasKernels && device.type == DeviceType::cuda && device.index < gpu_count() &&
         properties(device).compute_capability == 90;
}

void exp_product(const char* op, const ExpProduct& product, const ExpProductSums& to, const ExecutionContext& context) {
  if constexpr (kHasKernels) {
    const auto run = to.exps != nullptr                 ? sm90::exps_of_bfloat16
                     : product.dtype == DType::bfloat16 ? sm90::sums_of_bfloat16
                                                        : sm90::sums_of_float16;
    return run(op, product, to, launch_of(product, context));
  }
  fail_without_kernel(op, product);
}

void exp_product(const char* op, const ExpProduct& product, const ExpProductSoftmax& to,
                 const ExecutionContext& context) {
  if constexpr (kHasKernels) {
    const auto run = product.dtype == DType::bfloat16 ? sm90::softmax_of_bfloat16 : sm90::softmax_of_float16;
    return run(op, product, to, launch_of(product, context));
  }
  fail_without_kernel(op, product);
}

void exp_product(const char* op, const ExpProduct& product, const ExpProductGradient& to,
                 const ExecutionContext& context) {
  if constexpr (kHasKernels) {
    if (product.dtype == DType::bfloat16) {
      return sm90::gradient_of_bfloat16(op, product, to, launch_of(product, context));
    }
  }
  fail_without_kernel(op, product);
}

}  // namespace eaves::cuda
