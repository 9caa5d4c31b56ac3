// The one loop of a product of bfloat16 that has an instruction of its own: two products and two additions in each lane
// (AVX512_BF16). Highway 1.0 has no level with it, so that it is apart from the levels, and asked for by name.
#pragma once

#include <cstdint>

namespace eaves::cpu {

/// The shape of what bfloat16_dot() computes: that of cpu/gemm.cpp with AVX-512.
inline constexpr std::int64_t kDotRows = 6;
inline constexpr std::int64_t kDotColumns = 64;

/// Does this machine have the instruction?
bool has_bfloat16_dot();

/// to[r * stride + c] = (or +=, unless `is_first`) the sum over w of the two products of a[w][r] and b[w][c], each a
/// pair of bfloat16, for kDotRows rows and kDotColumns columns; `to` and its rows are aligned to a vector. Sums are
/// float32, to nearest; the instruction takes subnormal numbers for 0.
void bfloat16_dot(const std::uint32_t* a, const std::uint32_t* b, std::int64_t words, float* to, std::int64_t stride,
                  bool is_first);

}  // namespace eaves::cpu
