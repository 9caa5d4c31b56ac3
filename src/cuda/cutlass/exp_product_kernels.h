// The kernels of exp_product.h. Each has a file of its own, because each takes a minute to compile. The build compiles
// a file once for each kind of tensor core, with its name in EAVES_SM.
#pragma once

#include "cuda/exp_product.h"

namespace eaves::cuda {

struct Sm90;   ///< compute capability 9.0
struct Sm100;  ///< compute capability 10.0 and 10.3

struct Launch {
  int in_turn;  ///< row clusters that run through all classes together; a power of two
  int multiprocessors;
  void* stream;
};

template <typename Sm>
void sums_of_bfloat16(const char* op, const ExpProduct& product, const ExpProductSums& to, const Launch& launch);
template <typename Sm>
void sums_of_float16(const char* op, const ExpProduct& product, const ExpProductSums& to, const Launch& launch);
template <typename Sm>
void exps_of_bfloat16(const char* op, const ExpProduct& product, const ExpProductSums& to, const Launch& launch);
template <typename Sm>
void softmax_of_bfloat16(const char* op, const ExpProduct& product, const ExpProductSoftmax& to, const Launch& launch);
template <typename Sm>
void softmax_of_float16(const char* op, const ExpProduct& product, const ExpProductSoftmax& to, const Launch& launch);
template <typename Sm>
void gradient_of_bfloat16(const char* op, const ExpProduct& product, const ExpProductGradient& to,
                          const Launch& launch);

}  // namespace eaves::cuda
