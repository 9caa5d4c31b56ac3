#include "cuda/sm90/exp_product_kernels.h"
#include "cuda/sm90/exp_product_softmax.cuh"

namespace eaves::cuda::sm90 {

void softmax_of_float16(const char* op, const ExpProduct& product, const ExpProductSoftmax& to, const Launch& launch) {
  run_softmax<cutlass::half_t>(op, product, to, launch);
}

}  // namespace eaves::cuda::sm90
