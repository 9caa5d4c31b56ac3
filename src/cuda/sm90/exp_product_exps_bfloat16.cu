#include "cuda/sm90/exp_product_kernels.h"
#include "cuda/sm90/exp_product_sums.cuh"

namespace eaves::cuda::sm90 {

void exps_of_bfloat16(const char* op, const ExpProduct& product, const ExpProductSums& to, const Launch& launch) {
  run_sums<cutlass::bfloat16_t, cutlass::bfloat16_t>(op, product, to, launch);
}

}  // namespace eaves::cuda::sm90
