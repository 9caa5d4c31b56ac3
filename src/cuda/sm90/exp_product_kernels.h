// The kernels of exp_product.h. Each has a file of its own, because each takes a minute to compile.
#pragma once

#include "cuda/exp_product.h"

namespace eaves::cuda::sm90 {

struct Launch {
  int in_turn;  ///< row clusters that run through all classes together; a power of two
  int multiprocessors;
  void* stream;
};

void sums_of_bfloat16(const char* op, const ExpProduct& product, const ExpProductSums& to, const Launch& launch);
void sums_of_float16(const char* op, const ExpProduct& product, const ExpProductSums& to, const Launch& launch);
void exps_of_bfloat16(const char* op, const ExpProduct& product, const ExpProductSums& to, const Launch& launch);
void softmax_of_bfloat16(const char* op, const ExpProduct& product, const ExpProductSoftmax& to, const Launch& launch);
void softmax_of_float16(const char* op, const ExpProduct& product, const ExpProductSoftmax& to, const Launch& launch);
void gradient_of_bfloat16(const char* op, const ExpProduct& product, const ExpProductGradient& to,
                          const Launch& launch);

}  // namespace eaves::cuda::sm90
