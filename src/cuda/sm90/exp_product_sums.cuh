// exp_product() with sums: alone, or with what they are of.
#pragma once

#include "cuda/sm90/exp_product.cuh"

namespace eaves::cuda::sm90 {

/// t, 2^t, its sum, 2^t * t, its sum; and for what is written 2^t again. A visitor's inputs are the numbers of others.
template <typename... Last>
using SumsAnd = fusion::Sm90TopologicalVisitor<
    float,
    std::conditional_t<
        sizeof...(Last) == 0, cute::tuple<cute::seq<>, cute::seq<0>, cute::seq<1>, cute::seq<2, 0>, cute::seq<3>>,
        cute::tuple<cute::seq<>, cute::seq<0>, cute::seq<1>, cute::seq<2, 0>, cute::seq<3>, cute::seq<2>>>,
    Exponents, Compute<Power>, Sum, Compute<Moment>, Sum, Last...>;

template <typename Element>
void run_sums(const char* op, const ExpProduct& product, const ExpProductSums& to, int multiprocessors, void* stream) {
  using Tree = WithoutResult<Element, SumsAnd<>>;
  const typename SumsAnd<>::Arguments tree{exponents_of(product), {}, {to.sums, 0.0f, {}}, {}, {to.moments, 0.0f, {}}};
  Kernel<Element, void, Tree>::run(op, product, tree, nullptr, 0, multiprocessors, stream);
}

}  // namespace eaves::cuda::sm90
