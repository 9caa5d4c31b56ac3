#include <cutlass/functional.h>

#include "cuda/sm90/exp_product.cuh"
#include "cuda/sm90/exp_product_kernels.h"

namespace eaves::cuda::sm90 {

void powers_of_bfloat16(const char* op, const ExpProduct& product, const ExpProductSums& to, int multiprocessors,
                        void* stream) {
  using Element = cutlass::bfloat16_t;
  using Inputs = cute::tuple<cute::seq<>, cute::seq<0>, cute::seq<1>, cute::seq<2, 0>, cute::seq<3>, cute::seq<1>>;
  using Tree = fusion::Sm90TopologicalVisitor<float, Inputs, Exponents, Compute<Power>, Sum, Compute<Moment>, Sum,
                                              Compute<cutlass::epilogue::thread::Identity, Element>>;
  const typename Tree::Arguments tree{exponents_of(product), {}, {to.sums, 0.0f, {}}, {}, {to.moments, 0.0f, {}}, {}};
  Kernel<Element, Element, Tree>::run(op, product, tree, to.powers, to.stride, multiprocessors, stream);
}

}  // namespace eaves::cuda::sm90
