// exp_product() that keeps sums alone.
#pragma once

#include "cuda/sm90/exp_product.cuh"

namespace eaves::cuda::sm90 {

/// t, 2^t, its sum, 2^t * t, its sum; a visitor's inputs are the numbers of others.
using Sums =
    fusion::Sm90TopologicalVisitor<float,
                                   cute::tuple<cute::seq<>, cute::seq<0>, cute::seq<1>, cute::seq<2, 0>, cute::seq<3>>,
                                   Exponents, Compute<Power>, Sum, Compute<Moment>, Sum>;

template <typename Element>
void run_sums(const char* op, const ExpProduct& product, const ExpProductSums& to, int multiprocessors, void* stream) {
  using Tree = WithoutResult<Element, Sums>;
  const typename Sums::Arguments tree{exponents_of(product), {}, {to.sums, 0.0f, {}}, {}, {to.moments, 0.0f, {}}};
  Kernel<Element, void, Tree>::run(op, product, tree, nullptr, 0, multiprocessors, stream);
}

}  // namespace eaves::cuda::sm90
