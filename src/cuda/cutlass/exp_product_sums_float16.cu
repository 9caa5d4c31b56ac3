#include "cuda/cutlass/exp_product_kernels.h"
#include "cuda/cutlass/exp_product_sums.cuh"

namespace eaves::cuda {

template <typename Sm>
void sums_of_float16(const char* op, const ExpProduct& product, const ExpProductSums& to, const Launch& launch) {
  run_sums<Sm, cutlass::half_t, void>(op, product, to, launch);
}

template void sums_of_float16<EAVES_SM>(const char*, const ExpProduct&, const ExpProductSums&, const Launch&);

}  // namespace eaves::cuda
