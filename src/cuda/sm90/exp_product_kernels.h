// The kernels of exp_product.h. Each is a file of its own: it takes a minute to compile.
#pragma once

#include "cuda/exp_product.h"

namespace eaves::cuda::sm90 {

void sums_of_bfloat16(const char* op, const ExpProduct& product, const ExpProductSums& to, int multiprocessors,
                      void* stream);
void sums_of_float16(const char* op, const ExpProduct& product, const ExpProductSums& to, int multiprocessors,
                     void* stream);
void exps_of_bfloat16(const char* op, const ExpProduct& product, const ExpProductSums& to, int multiprocessors,
                      void* stream);
void gradient_of_bfloat16(const char* op, const ExpProduct& product, const ExpProductGradient& to, int multiprocessors,
                          void* stream);

}  // namespace eaves::cuda::sm90
