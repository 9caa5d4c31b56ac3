// exp_product() with the online softmax.
#pragma once

#include "cuda/sm90/exp_product.cuh"

namespace eaves::cuda::sm90 {

template <typename Element>
void run_softmax(const char* op, const ExpProduct& product, const ExpProductSoftmax& to, const Launch& launch) {
  Kernel<Element, void, OnlineSoftmax>::run(op, product, {to.shifts, to.sums, to.moments, whole_rows(product)}, nullptr,
                                            0, launch);
}

}  // namespace eaves::cuda::sm90
