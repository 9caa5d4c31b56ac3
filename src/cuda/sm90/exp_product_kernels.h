// The kernels of exp_product.h. Each is a file of its own: it takes a minute to compile.
#pragma once

#include "cuda/exp_product.h"

namespace eaves::cuda::sm90 {

/// The order of the tiles of a product. Along rows all tiles of rows are computed for a tile of classes, before the next
/// one; along classes the other way round. `in_turn`, a power of two, are the tiles of the other axis that are taken
/// together.
struct Raster {
  bool is_along_classes;
  int in_turn;
};

struct Launch {
  Raster raster;
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
