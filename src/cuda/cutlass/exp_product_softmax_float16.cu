#include "cuda/cutlass/exp_product_kernels.h"
#include "cuda/cutlass/exp_product_softmax.cuh"

namespace eaves::cuda {

template <typename Sm>
void softmax_of_float16(const char* op, const ExpProduct& product, const ExpProductSoftmax& to, const Launch& launch) {
  run_softmax<Sm, cutlass::half_t>(op, product, to, launch);
}

template void softmax_of_float16<EAVES_SM>(const char*, const ExpProduct&, const ExpProductSoftmax&, const Launch&);

}  // namespace eaves::cuda
