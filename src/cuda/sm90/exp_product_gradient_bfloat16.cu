#include "cuda/sm90/exp_product.cuh"
#include "cuda/sm90/exp_product_kernels.h"

namespace eaves::cuda::sm90 {

void gradient_of_bfloat16(const char* op, const ExpProduct& product, const ExpProductGradient& to, int multiprocessors,
                          void* stream) {
  using Element = cutlass::bfloat16_t;
  using Result = Compute<Gradient, Element>;
  using Tree =
      TreeWith<cute::seq<>, cute::seq<>, cute::seq<kExponents, 5, 6, kLogits, kToTanh>>::Nodes<Rows, Rows, Result>;
  const auto tree = arguments_of<Tree>(product, typename Rows::Arguments{to.constant, 0.0f, {}},
                                       typename Rows::Arguments{to.slope, 0.0f, {}}, typename Result::Arguments{});
  Kernel<Element, Element, Tree>::run(op, product, tree, to.to, to.stride, multiprocessors, stream);
}

}  // namespace eaves::cuda::sm90
