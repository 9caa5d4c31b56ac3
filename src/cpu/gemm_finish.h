// The epilogue of a product: alpha, bias or what c holds, and the one rounding to c. Compiled once per level of vector
// instructions, like simd.h.
#include <algorithm>
#include <cstdint>

#include "core/gemm.h"
#include "cpu/simd.h"

#if defined(EAVES_CPU_GEMM_FINISH_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EAVES_CPU_GEMM_FINISH_H_
#undef EAVES_CPU_GEMM_FINISH_H_
#else
#define EAVES_CPU_GEMM_FINISH_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {

/// c = alpha * sums + bias, or c += alpha * sums, rounded once: `rows` rows of `columns` columns, at most a pack, from
/// [row, column] on. Rows of sums lie `stride` apart; the last one, too, is read as a whole pack.
template <typename C, typename A>
void finish_sums(const Gemm& product, A alpha, const A* sums, std::int64_t stride, std::int64_t row, std::int64_t rows,
                 std::int64_t column, std::int64_t columns) {
  const auto factor = hn::Set(Tag<A>(), alpha);
  HWY_ALIGN A bias[kMaxPackSize<A>] = {};
  if (product.bias != nullptr) std::copy_n(static_cast<const A*>(product.bias) + column, columns, bias);
  for (std::int64_t i = row; i < row + rows; ++i, sums += stride) {
    C* c = static_cast<C*>(product.c) + i * product.c_stride + column;
    const Pack<C> sum = load_in_order<C>(sums);
    const Pack<C> to = product.accumulates ? load_some(c, columns, C{}) : load_in_order<C>(bias);
    store_some(Pack<C>{hn::MulAdd(factor, sum.v0, to.v0), hn::MulAdd(factor, sum.v1, to.v1),
                       hn::MulAdd(factor, sum.v2, to.v2), hn::MulAdd(factor, sum.v3, to.v3)},
               c, columns);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();

#endif  // EAVES_CPU_GEMM_FINISH_H_
