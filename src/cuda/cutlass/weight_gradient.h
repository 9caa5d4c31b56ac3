// The gradient of a weight on Hopper (compute capability 9.0), as a product of CUTLASS: c += alpha a^T b in bfloat16, a
// sum over rows. It adds in float32 and rounds once, unlike cuBLASLt. takes_weight_gradient() in gemm.h says which
// products take it.
#pragma once

#include <cstdint>

#include "core/gemm.h"

namespace eaves::cuda {

/// The tile of c of one warpgroup.
inline constexpr std::int64_t kWeightGradientClasses = 192;
inline constexpr std::int64_t kWeightGradientFeatures = 128;

/// `product` accumulates, is bfloat16 throughout, has a transposed and b not; m, n and k fit in 32 bits. The rows of
/// the three matrices start at multiples of 16 bytes. n is a multiple of kGemmVector, because the kernel writes the
/// last vector of a row whole.
void weight_gradient(const char* op, const Gemm& product, int multiprocessors, void* stream);

}  // namespace eaves::cuda
