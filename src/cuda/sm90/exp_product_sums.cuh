// exp_product() with sums, and with the powers or without.
#pragma once

#include "cuda/sm90/exp_product.cuh"

namespace eaves::cuda::sm90 {

/// `Result`: the element of the powers, or void.
template <typename Element, typename Result>
void run_sums(const char* op, const ExpProduct& product, const ExpProductSums& to, int multiprocessors, void* stream) {
  const std::int64_t stride = ceil_divide(product.rows, kExpProductRows) * kExpProductRows;
  Kernel<Element, Result, SumPowers>::run(op, product, {to.sums, to.moments, stride}, to.powers, to.stride,
                                          multiprocessors, stream);
}

}  // namespace eaves::cuda::sm90
