// c is cut into tiles, each computed by one thread from start to end. For a tile, kDepth indices of k at a time, the
// factors are copied into panels that the innermost loop reads from end to end: a panel of a is kRows rows, one of b a
// pack of columns, both of accumulators, 16-bit numbers having been widened. The product of two panels is a block of
// sums that fits the registers. Panels at the edge are filled up, with zeros or the last column again, because what
// was there could be slow, as subnormal numbers are: those rows and columns of a block are not written to c.
//
// An element of c is summed in one order whatever the tile: sums over kDepth terms are added up one after the other.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/gemm_own.cpp"
#include <hwy/foreach_target.h>  // first: compiles this file once per level of vector instructions

#include <hwy/aligned_allocator.h>

#include <algorithm>
#include <cstdint>
#include <new>

#include "core/dispatch.h"
#include "cpu/gemm_finish.h"
#include "cpu/gemm_own.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {
namespace {

/// As many sums as the registers hold, beside what they are multiplied from: 6 or 3 packs.
constexpr std::int64_t kRows = HWY_TARGET <= HWY_AVX3 ? 6 : 3;

/// With 6 rows a panel of a is 6 KiB of float32 and stays in L1; one of b, 64 KiB with AVX-512, in L2.
constexpr std::int64_t kDepth = 256;

/// The most rows and columns of a tile: its sums, 1 MiB of float32, and its panels of a, 512 KiB, stay in L2 or L3,
/// and a number that is copied has 512 uses. Halved while there are fewer tiles than kTiles; below
/// kMinTile copies cost more than another thread brings.
constexpr std::int64_t kMaxTile = 512;
constexpr std::int64_t kMinTile = 128;
constexpr std::int64_t kTiles = 32;

template <typename T>
const T* element(const GemmMatrix& matrix, std::int64_t i, std::int64_t j) {
  return static_cast<const T*>(matrix.data) + (matrix.is_transposed ? j * matrix.stride + i : i * matrix.stride + j);
}

/// Rows of a from `from` on, in panels of kRows. Within a panel they keep their layout, so that none is turned.
template <typename T>
void pack_a(const T* from, const GemmMatrix& a, std::int64_t rows, std::int64_t depth, Accumulator<T>* to) {
  if (!a.is_transposed) {
    for (std::int64_t i = 0; i < rows; ++i) widen(from + i * a.stride, depth, to + i * kDepth);
    for (std::int64_t i = rows; i % kRows != 0; ++i) std::fill_n(to + i * kDepth, depth, Accumulator<T>{0});
    return;
  }
  HWY_ALIGN Accumulator<T> column[kMaxTile + kRows + kMaxPackSize<T>];
  std::fill_n(column + rows, kRows, Accumulator<T>{0});
  for (std::int64_t p = 0; p < depth; ++p) {
    widen(from + p * a.stride, rows, column);
    for (std::int64_t i = 0; i < rows; i += kRows) std::copy_n(column + i, kRows, to + i * kDepth + p * kRows);
  }
}

/// One panel: at each depth a pack, of which `columns` are there.
template <typename T, typename A = Accumulator<T>>
void pack_b(const T* from, const GemmMatrix& b, std::int64_t columns, std::int64_t depth, A* to) {
  const auto width = static_cast<std::int64_t>(pack_size<T>());
  if (!b.is_transposed) {
    for (std::int64_t p = 0; p < depth; ++p) widen(from + p * b.stride, columns, to + p * width);
    return;
  }
  if (columns < width) std::fill_n(to, depth * width, A{0});
  // Transposed four columns at a time, and some of their depth, so that what it is spread over stays in L1.
  const Tag<A> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  HWY_ALIGN A pieces[4][kMaxPackSize<T>], turned[kMaxPackSize<T>];
  for (std::int64_t p = 0; p < depth; p += width) {
    for (std::int64_t j = 0; j < columns; j += 4) {
      for (std::int64_t i = 0; i < 4; ++i) {
        widen(from + std::min(j + i, columns - 1) * b.stride + p, std::min(width, depth - p), pieces[i]);
      }
      for (std::int64_t q = 0; q < width; q += lanes) {
        hn::StoreInterleaved4(hn::Load(d, pieces[0] + q), hn::Load(d, pieces[1] + q), hn::Load(d, pieces[2] + q),
                              hn::Load(d, pieces[3] + q), d, turned);
        for (std::int64_t r = 0; r < lanes; ++r) std::copy_n(turned + 4 * r, 4, to + (p + q + r) * width + j);
      }
    }
  }
}

/// sums[row][pack] = a * b, or += unless `is_first`, of two panels; that of a as pack_a() makes it.
template <typename A>
void multiply_panels(const A* a, bool is_a_transposed, const A* b, std::int64_t depth, bool is_first, A* sums) {
  const std::int64_t line_step = is_a_transposed ? 1 : kDepth, depth_step = is_a_transposed ? kRows : 1;
  const Tag<A> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  VectorOf<A> block[kRows][4];
  for (auto& row : block) std::fill_n(row, 4, hn::Zero(d));
  for (std::int64_t p = 0; p < depth; ++p, a += depth_step, b += 4 * lanes) {
    const VectorOf<A> columns[4] = {hn::Load(d, b), hn::Load(d, b + lanes), hn::Load(d, b + 2 * lanes),
                                    hn::Load(d, b + 3 * lanes)};
    for (std::int64_t row = 0; row < kRows; ++row) {
      const auto factor = hn::Set(d, a[row * line_step]);
      for (int i = 0; i < 4; ++i) block[row][i] = hn::MulAdd(factor, columns[i], block[row][i]);
    }
  }
  for (const auto& row : block) {
    for (int i = 0; i < 4; ++i, sums += lanes) {
      hn::Store(is_first ? row[i] : hn::Add(hn::Load(d, sums), row[i]), d, sums);
    }
  }
}

/// Rows [top, bottom) and columns [left, right) of c.
template <typename T, typename C, typename A = Accumulator<T>>
void multiply_tile(const Gemm& product, A alpha, std::int64_t top, std::int64_t bottom, std::int64_t left,
                   std::int64_t right) {
  constexpr std::int64_t kRowsOfScratch = kMaxTile + kRows, kPanel = kDepth * kMaxPackSize<A>;
  thread_local hwy::AlignedFreeUniquePtr<A[]> scratch;
  if (scratch == nullptr) scratch = hwy::AllocateAligned<A>(kRowsOfScratch * (kDepth + kMaxTile) + kPanel);
  if (scratch == nullptr) throw std::bad_alloc();
  A* const b = scratch.get();
  A* const a = b + kPanel;
  const auto width = static_cast<std::int64_t>(pack_size<T>());
  for (std::int64_t p = 0; p == 0 || p < product.k; p += kDepth) {  // a sum over nothing is one as well
    const std::int64_t depth = std::min(kDepth, product.k - p);
    pack_a(element<T>(product.a, top, p), product.a, bottom - top, depth, a);
    A* sums = a + kRowsOfScratch * kDepth;
    for (std::int64_t column = left; column < right; column += width) {
      const std::int64_t columns = std::min(width, right - column);
      pack_b(element<T>(product.b, p, column), product.b, columns, depth, b);
      for (std::int64_t row = top; row < bottom; row += kRows, sums += kRows * width) {
        multiply_panels(a + (row - top) * kDepth, product.a.is_transposed, b, depth, p == 0, sums);
        if (p + depth < product.k) continue;
        finish_sums<C>(product, alpha, sums, width, row, std::min(kRows, bottom - row), column, columns);
      }
    }
  }
}

template <typename T, typename C, typename A = Accumulator<T>>
void multiply(const Gemm& product, const ExecutionContext& context) {
  // An infinite alpha must not make a NaN of a sum of nothing.
  const A alpha = product.alpha != nullptr && product.k > 0 ? *static_cast<const A*>(product.alpha) : A{1};
  std::int64_t most = kMaxTile;
  while (most > kMinTile && ceil_divide(product.m, most) * ceil_divide(product.n, most) < kTiles) most /= 2;
  // Tiles of equal size, but for what panels leave over.
  const auto size_of_tile = [&](std::int64_t count, std::int64_t panel) {
    return ceil_divide(ceil_divide(count, ceil_divide(count, std::max(most, panel))), panel) * panel;
  };
  const std::int64_t rows = size_of_tile(product.m, kRows);
  const std::int64_t columns = size_of_tile(product.n, static_cast<std::int64_t>(pack_size<T>()));
  const std::int64_t row_tiles = ceil_divide(product.m, rows);
  const auto multiply_tiles = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t top = i % row_tiles * rows, left = i / row_tiles * columns;
      multiply_tile<T, C>(product, alpha, top, std::min(top + rows, product.m), left,
                          std::min(left + columns, product.n));
    }
  };
  const std::int64_t grain = grain_for_products(rows * columns * std::max<std::int64_t>(1, product.k));
  parallel_for(context, row_tiles * ceil_divide(product.n, columns), grain, multiply_tiles);
}

}  // namespace

void run_own_gemm(const Gemm& product, const ExecutionContext& context) {
  dispatch_floating_point(product.dtype, [&]<typename T>() {
    if (product.c_dtype == product.dtype) return multiply<T, T>(product, context);
    multiply<T, Accumulator<T>>(product, context);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eaves::cpu {
HWY_EXPORT(run_own_gemm);

void own_gemm(const Gemm& product, const ExecutionContext& context) {
  HWY_DYNAMIC_DISPATCH(run_own_gemm)(product, context);
}

}  // namespace eaves::cpu
#endif  // HWY_ONCE
