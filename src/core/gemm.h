// The description of a matrix product that operators pass to every device: row-major matrices with 64-bit sizes, and
// one rounding at the end. A GPU may round twice when it adds to a c of 16 bits: cuBLASLt (13.1, on Hopper, each of its
// algorithms) rounds the product before it adds it. cuda/gemm.h computes products with cuBLASLt, and some on Hopper
// with CUTLASS; cpu/gemm.h computes them with a library or its own loops.
#pragma once

#include <cstddef>
#include <cstdint>

#include "eaves/tensor.h"

namespace eaves {

/// A matrix in memory. Element [i, j] is at i * stride + j, or at j * stride + i if `is_transposed`.
struct GemmMatrix {
  const void* data;
  std::int64_t stride;  ///< in elements, between rows (between columns if transposed)
  bool is_transposed = false;
};

/// c = alpha * a * b + bias, or c += alpha * a * b, with a [m, k], b [k, n], c [m, n]. m and n are not 0; for k = 0 the
/// product is 0.
///
/// Sums are in float32, or in float64 for float64, the "accumulator" type below. Factors keep all of their bits (no
/// TF32).
struct Gemm {
  std::int64_t m;
  std::int64_t n;
  std::int64_t k;
  DType dtype;  ///< of a and b: float32, float64, float16 or bfloat16
  GemmMatrix a;
  GemmMatrix b;
  DType c_dtype;  ///< `dtype`, or the accumulator
  void* c;
  std::int64_t c_stride;        ///< in elements, between rows
  const void* alpha = nullptr;  ///< one accumulator on the device; nullptr: 1
  const void* bias = nullptr;   ///< [n] accumulators, added to each row of a c of accumulators; nullptr: 0
  bool accumulates = false;     ///< c += instead of c =; then no bias
};

/// Elements of 16 bits in one vector of a product on a GPU. The elements behind the last whole vector become a separate
/// product (cuda/gemm.cu).
inline constexpr std::int64_t kGemmVector = 8;

/// True if a sum over k, along which a factor is contiguous, needs two products: one over the whole vectors, one over
/// the rest. The second adds to c, so c must hold accumulators; a narrower c would be rounded twice.
inline bool is_sum_of_two_products(DType dtype, std::int64_t k) {
  return size_of(dtype) == 2 && k > kGemmVector && k % kGemmVector != 0;
}

/// The workspace of a product on a GPU, whatever its size. A product on the CPU needs none.
inline constexpr std::size_t kGemmWorkspaceBytes = std::size_t{8} << 20;

}  // namespace eaves
