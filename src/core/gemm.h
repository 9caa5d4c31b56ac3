// A matrix product, as operators ask for it on every device: row-major matrices with 64-bit sizes, one rounding at the
// end. But on a GPU a c of 16 bits that is added to may have two: cuBLASLt (13.1, on Hopper, each of its algorithms)
// rounds the product before it adds it. cuda/gemm.h computes it with a library, on Hopper some of them with CUTLASS,
// cpu/gemm.h with a library or loops of its own.
#pragma once

#include <cstddef>
#include <cstdint>

#include "eaves/tensor.h"

namespace eaves {

/// A matrix in memory. Where `is_transposed`, its rows lie as columns: element [i, j] is at j * stride + i.
struct GemmMatrix {
  const void* data;
  std::int64_t stride;  ///< in elements, between rows (between columns where transposed)
  bool is_transposed = false;
};

/// c = alpha * a * b + bias, or c += alpha * a * b, with a [m, k], b [k, n], c [m, n]; none of the sizes is 0 but k,
/// where the product is 0.
///
/// Products are summed in float32 without shortening the factors, in float64 for float64. "Accumulator" below is that
/// type.
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
  const void* bias = nullptr;   ///< [n] accumulators, added to each row, where c has accumulators too; nullptr: 0
  bool accumulates = false;     ///< c += instead of c =; then no bias
};

/// Elements of 16 bits that a product on a GPU takes at once. What is behind the last whole vector of them is a product
/// of its own (cuda/gemm.cu).
inline constexpr std::int64_t kGemmVector = 8;

/// Is a sum over k, along which a factor lies, one of two products? They meet in c, which therefore has to have
/// accumulators: another c would be rounded twice.
inline bool is_sum_of_two_products(DType dtype, std::int64_t k) {
  return size_of(dtype) == 2 && k > kGemmVector && k % kGemmVector != 0;
}

/// What a product on a GPU takes of a workspace, whatever its size; on the CPU nothing.
inline constexpr std::size_t kGemmWorkspaceBytes = std::size_t{8} << 20;

}  // namespace eaves
