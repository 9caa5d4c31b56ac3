#include "cuda/sm90/exp_product.cuh"
#include "cuda/sm90/exp_product_kernels.h"

namespace eaves::cuda::sm90 {

void gradient_of_bfloat16(const char* op, const ExpProduct& product, const ExpProductGradient& to,
                          const Launch& launch) {
  using Element = cutlass::bfloat16_t;
  Kernel<Element, Element, GradientOfLogits>::run(op, product, {to.constant, to.slope}, to.to, to.stride, launch);
}

}  // namespace eaves::cuda::sm90
