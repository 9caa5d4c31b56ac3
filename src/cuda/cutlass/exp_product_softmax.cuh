// exp_product() with the online softmax.
#pragma once

#include "cuda/cutlass/exp_product.cuh"

namespace eaves::cuda {

template <typename Sm, typename Element>
void run_softmax(const char* op, const ExpProduct& product, const ExpProductSoftmax& to, const Launch& launch) {
  Kernel<Sm, Element, void, OnlineSoftmax<Sm>>::run(op, product, {to.shifts, to.sums, to.moments, whole_rows(product)},
                                                    nullptr, 0, launch);
}

}  // namespace eaves::cuda
