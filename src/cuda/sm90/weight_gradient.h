// The gradient of a weight on Hopper (compute capability 9.0), as a product of CUTLASS: c += alpha a^T b in bfloat16, a
// sum over rows. Unlike cuBLASLt it adds in float32 and rounds once. Which products take it: takes_weight_gradient() in
// gemm.h.
#pragma once

#include <cstdint>

#include "core/gemm.h"

namespace eaves::cuda::sm90 {

/// The tile of c that a warpgroup computes.
inline constexpr std::int64_t kWeightGradientClasses = 192;
inline constexpr std::int64_t kWeightGradientFeatures = 128;

/// `product` accumulates, has bfloat16 throughout, a transposed and b not; m, n and k are of 32 bits. Rows of the three
/// matrices start at multiples of 16 bytes, and n is a multiple of kGemmVector: the last vector of a row is written
/// whole.
void weight_gradient(const char* op, const Gemm& product, int multiprocessors, void* stream);

}  // namespace eaves::cuda::sm90
