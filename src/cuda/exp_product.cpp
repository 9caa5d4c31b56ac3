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
    return run(op, product, to, properties(product.device).multiprocessors, context.stream);
  }
  fail_without_kernel(op, product);
}

void exp_product(const char* op, const ExpProduct& product, const ExpProductGradient& to,
                 const ExecutionContext& context) {
  if constexpr (kHasKernels) {
    if (product.dtype == DType::bfloat16) {
      return sm90::gradient_of_bfloat16(op, product, to, properties(product.device).multiprocessors, context.stream);
    }
  }
  fail_without_kernel(op, product);
}

}  // namespace eaves::cuda
