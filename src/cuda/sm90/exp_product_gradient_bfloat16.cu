#include "cuda/sm90/exp_product.cuh"
#include "cuda/sm90/exp_product_kernels.h"

namespace eaves::cuda::sm90 {

void gradient_of_bfloat16(const char* op, const ExpProduct& product, const ExpProductGradient& to, int multiprocessors,
                          void* stream) {
  using Element = cutlass::bfloat16_t;
  using Tree = fusion::Sm90EVT<Compute<Gradient, Element>, Exponents, Rows, Rows>;
  const typename Tree::Arguments tree{exponents_of(product), {to.constant, 0.0f, {}}, {to.slope, 0.0f, {}}, {}};
  Kernel<Element, Element, Tree>::run(op, product, tree, to.to, to.stride, multiprocessors, stream);
}

}  // namespace eaves::cuda::sm90
