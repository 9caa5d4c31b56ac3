#include "cuda/cutlass/exp_product.cuh"
#include "cuda/cutlass/exp_product_kernels.h"

namespace eaves::cuda {

template <typename Sm>
void gradient_of_bfloat16(const char* op, const ExpProduct& product, const ExpProductGradient& to,
                          const Launch& launch) {
  using Element = cutlass::bfloat16_t;
  Kernel<Sm, Element, Element, GradientOfLogits<Sm>>::run(op, product, {to.constant, to.slope}, to.to, to.stride,
                                                          launch);
}

template void gradient_of_bfloat16<EAVES_SM>(const char*, const ExpProduct&, const ExpProductGradient&, const Launch&);

}  // namespace eaves::cuda
