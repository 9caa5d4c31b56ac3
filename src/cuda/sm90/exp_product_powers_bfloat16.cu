#include "cuda/sm90/exp_product.cuh"
#include "cuda/sm90/exp_product_kernels.h"

namespace eaves::cuda::sm90 {

void powers_of_bfloat16(const char* op, const ExpProduct& product, const ExpProductSums& to, int multiprocessors,
                        void* stream) {
  using Element = cutlass::bfloat16_t;
  using Result = Compute<TimesDerivative, Element>;
  using Tree = TreeWith<cute::seq<kExponents>, cute::seq<5>, cute::seq<5, kExponents>, cute::seq<7>,
                        cute::seq<5, kLogits, kToTanh>>::Nodes<Compute<Power>, Sum, Compute<Moment>, Sum, Result>;
  const auto tree =
      arguments_of<Tree>(product, typename Compute<Power>::Arguments{}, typename Sum::Arguments{to.sums, 0.0f, {}},
                         typename Compute<Moment>::Arguments{}, typename Sum::Arguments{to.moments, 0.0f, {}},
                         typename Result::Arguments{});
  Kernel<Element, Element, Tree>::run(op, product, tree, to.powers, to.stride, multiprocessors, stream);
}

}  // namespace eaves::cuda::sm90
