// exp_product() that keeps sums alone.
#pragma once

#include "cuda/sm90/exp_product.cuh"

namespace eaves::cuda::sm90 {

/// 2^t, its sum, 2^t * t, its sum.
using Sums = TreeWith<cute::seq<kExponents>, cute::seq<5>, cute::seq<5, kExponents>,
                      cute::seq<7>>::Nodes<Compute<Power>, Sum, Compute<Moment>, Sum>;

template <typename Element>
void run_sums(const char* op, const ExpProduct& product, const ExpProductSums& to, int multiprocessors, void* stream) {
  using Tree = WithoutResult<Element, Sums>;
  const auto tree =
      arguments_of<Sums>(product, typename Compute<Power>::Arguments{}, typename Sum::Arguments{to.sums, 0.0f, {}},
                         typename Compute<Moment>::Arguments{}, typename Sum::Arguments{to.moments, 0.0f, {}});
  Kernel<Element, void, Tree>::run(op, product, tree, nullptr, 0, multiprocessors, stream);
}

}  // namespace eaves::cuda::sm90
