// exp_product() with sums, with or without exps.
#pragma once

#include "cuda/cutlass/exp_product.cuh"

namespace eaves::cuda {

/// `Result` is the element of the exps, or void.
template <typename Sm, typename Element, typename Result>
void run_sums(const char* op, const ExpProduct& product, const ExpProductSums& to, const Launch& launch) {
  Kernel<Sm, Element, Result, SumExps<Sm>>::run(op, product, {to.sums, to.moments, whole_rows(product)}, to.exps,
                                                to.stride, launch);
}

}  // namespace eaves::cuda
