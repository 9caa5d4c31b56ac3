#include "cpu/gemm_bfloat16_dot.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define EAVES_HAS_BFLOAT16_DOT 1
#include <immintrin.h>
#else
#define EAVES_HAS_BFLOAT16_DOT 0
#endif

namespace eaves::cpu {

#if EAVES_HAS_BFLOAT16_DOT

bool has_bfloat16_dot() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bf16"); }

// 24 sums, 4 vectors of b and one pair of a: 29 of the 32 registers.
__attribute__((target("avx512f,avx512bf16"))) void bfloat16_dot(const std::uint32_t* a, const std::uint32_t* b,
                                                                std::int64_t words, float* to, std::int64_t stride,
                                                                bool is_first) {
  constexpr int kVectors = 4;
  __m512 sums[kDotRows][kVectors];
  for (auto& row : sums) {
    for (auto& sum : row) sum = _mm512_setzero_ps();
  }
  for (std::int64_t word = 0; word < words; ++word) {
    __m512i columns[kVectors];
    for (int i = 0; i < kVectors; ++i) columns[i] = _mm512_load_si512(b + word * kDotColumns + i * 16);
    for (int row = 0; row < kDotRows; ++row) {
      const __m512i pair = _mm512_set1_epi32(static_cast<int>(a[word * kDotRows + row]));
      for (int i = 0; i < kVectors; ++i)
        sums[row][i] = _mm512_dpbf16_ps(sums[row][i], (__m512bh)pair, (__m512bh)columns[i]);
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kDotRows; ++row) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      float* at = to + row * stride + i * 16;
      _mm512_store_ps(at, is_first ? sums[row][i] : _mm512_add_ps(_mm512_load_ps(at), sums[row][i]));
    }
  }
}

#else

bool has_bfloat16_dot() { return false; }
void bfloat16_dot(const std::uint32_t*, const std::uint32_t*, std::int64_t, float*, std::int64_t, bool) {}

#endif

}  // namespace eaves::cpu
