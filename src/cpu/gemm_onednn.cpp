// Each tile of c is one call of oneDNN on one thread: on OpenMP's threads or on the caller's pool, without a second
// pool beside them. Where c has 16 bits, or the sums are not yet the result, a tile's sums go to memory of the thread
// first, which stays in the last cache.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/gemm_onednn.cpp"
#include <hwy/foreach_target.h>  // first: compiles this file once per level of vector instructions

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/numeric.h"
#include "cpu/gemm_finish.h"
#include "cpu/gemm_onednn.h"
#include "cpu/gemm_own.h"
#include "cpu/onednn.h"
#include "cpu/parallel.h"

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {
namespace {

template <typename C>
void finish(const Gemm& tile, const float* sums) {
  const auto width = static_cast<std::int64_t>(pack_size<C>());
  const float alpha = tile.alpha != nullptr ? *static_cast<const float*>(tile.alpha) : 1.0f;
  for (std::int64_t column = 0; column < tile.n; column += width) {
    finish_sums<C>(tile, alpha, sums + column, tile.n, 0, tile.m, column, std::min(width, tile.n - column));
  }
}

void finish_tile(const Gemm& tile, const float* sums) {
  tile.c_dtype == DType::float32 ? finish<float>(tile, sums) : finish<bfloat16>(tile, sums);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eaves::cpu {
namespace {

HWY_EXPORT(finish_tile);

/// The most rows and columns of a tile: larger ones are no faster ([512, 1024] x 4096 and x 32768).
constexpr std::int64_t kMostOfTile = 1024;
/// A tile is halved while threads have nothing to do, as long as it has more rows or columns than this.
constexpr std::int64_t kLeastTile = 128;
/// Rows and columns of a tile are multiples of this, but at the end.
constexpr std::int64_t kTileStep = 16;

/// oneDNN adds up an element in one order however large the tile is, but float32 in the layout of logits, where it has
/// two: such a product is cut for so many threads, however many there are.
constexpr std::int64_t kThreadsOfTwoOrders = 8;

struct Tiles {
  std::int64_t rows, columns;  ///< of a tile
  std::int64_t down, across;   ///< tiles
  std::int64_t count() const { return down * across; }
};

Tiles tiles_of(const Gemm& product, std::int64_t down, std::int64_t across) {
  const auto part = [](std::int64_t all, std::int64_t parts) {
    return ceil_divide(ceil_divide(all, parts), kTileStep) * kTileStep;
  };
  const std::int64_t rows = part(product.m, down);
  const std::int64_t columns = part(product.n, across);
  return {rows, columns, ceil_divide(product.m, rows), ceil_divide(product.n, columns)};
}

/// As few tiles as give each thread as many as the others.
Tiles cut(const Gemm& product, const ExecutionContext& context) {
  const bool has_two_orders = product.dtype == DType::float32 && !product.a.is_transposed && product.b.is_transposed;
  const std::int64_t threads = has_two_orders        ? kThreadsOfTwoOrders
                               : context.threads > 0 ? context.threads
                                                     : default_threads();
  Tiles tiles = tiles_of(product, ceil_divide(product.m, kMostOfTile), ceil_divide(product.n, kMostOfTile));
  while (tiles.count() < threads && std::max(tiles.rows, tiles.columns) > kLeastTile) {
    tiles = tiles.rows > tiles.columns ? tiles_of(product, 2 * tiles.down, tiles.across)
                                       : tiles_of(product, tiles.down, 2 * tiles.across);
  }
  for (std::int64_t more = 1; more < threads && tiles.count() % threads != 0; ++more) {
    const Tiles finer = tiles_of(product, tiles.down, tiles.across + more);
    if (finer.columns >= kLeastTile && finer.count() % threads == 0) tiles = finer;
  }
  return tiles;
}

Gemm tile_at(const Gemm& product, const Tiles& tiles, std::int64_t index) {
  const std::int64_t row = index % tiles.down * tiles.rows;
  const std::int64_t column = index / tiles.down * tiles.columns;
  const auto moved = [](const void* data, DType dtype, std::int64_t elements) {
    return static_cast<const char*>(data) + elements * static_cast<std::int64_t>(size_of(dtype));
  };
  Gemm tile = product;
  tile.m = std::min(tiles.rows, product.m - row);
  tile.n = std::min(tiles.columns, product.n - column);
  tile.a.data = moved(product.a.data, product.dtype, product.a.is_transposed ? row : row * product.a.stride);
  tile.b.data = moved(product.b.data, product.dtype, product.b.is_transposed ? column * product.b.stride : column);
  tile.c = const_cast<char*>(moved(product.c, product.c_dtype, row * product.c_stride + column));
  if (product.bias != nullptr) tile.bias = static_cast<const float*>(product.bias) + column;
  return tile;
}

/// Memory of this thread for sums, until the next call, and for what is read behind them.
float* sums_of(std::int64_t count) {
  thread_local std::vector<float> sums;
  const auto wanted = static_cast<std::size_t>(count) + HWY_MAX_BYTES;
  if (sums.size() < wanted) sums.resize(wanted);
  return sums.data();
}

/// A row by itself would be added up in an order of its own: it is multiplied twice, as two rows.
bool multiply_row(const Gemm& tile, float* sums) {
  const std::size_t size = size_of(tile.dtype);
  const std::int64_t step = tile.a.is_transposed ? tile.a.stride : 1;
  thread_local std::vector<char> rows;
  rows.resize(2 * static_cast<std::size_t>(tile.k) * size);
  for (std::int64_t p = 0; p < 2 * tile.k; ++p) {
    std::memcpy(rows.data() + static_cast<std::size_t>(p) * size,
                static_cast<const char*>(tile.a.data) + static_cast<std::size_t>(p % tile.k * step) * size, size);
  }
  return onednn_gemm(tile.dtype, 2, tile.n, tile.k, {rows.data(), tile.k}, tile.b, sums, tile.n, false);
}

void multiply_tile(const Gemm& tile) {
  const bool is_plain = tile.c_dtype == DType::float32 && tile.alpha == nullptr && tile.bias == nullptr && tile.m > 1;
  const auto by_onednn = [&](float* to, std::int64_t stride, bool accumulates) {
    return onednn_gemm(tile.dtype, tile.m, tile.n, tile.k, tile.a, tile.b, to, stride, accumulates);
  };
  if (is_plain) {
    if (by_onednn(static_cast<float*>(tile.c), tile.c_stride, tile.accumulates)) return;
  } else {
    float* sums = sums_of(std::max<std::int64_t>(2, tile.m) * tile.n);
    if (tile.m == 1 ? multiply_row(tile, sums) : by_onednn(sums, tile.n, false)) {
      return HWY_DYNAMIC_DISPATCH(finish_tile)(tile, sums);
    }
  }
  own_gemm(tile, {.threads = 1});  // oneDNN found no memory, and wrote nothing
}

/// Do its rows, or columns where it is transposed, lie one behind the other?
bool is_dense(const GemmMatrix& matrix, std::int64_t rows, std::int64_t columns) {
  return matrix.stride >= (matrix.is_transposed ? rows : columns);
}

}  // namespace

bool can_multiply_by_onednn(const Gemm& product) {
  // A call costs about a microsecond. Without m: a row's sums must not depend on how many rows there are.
  constexpr std::int64_t kFewFactors = 4096;
  return product.k > 0 && product.n * product.k >= kFewFactors && has_onednn_gemm(product.dtype) && is_dense(product.a, product.m, product.k) &&
         is_dense(product.b, product.k, product.n) && product.c_stride >= product.n;
}

void multiply_by_onednn(const Gemm& product, const ExecutionContext& context) {
  const Tiles tiles = cut(product, context);
  parallel_for(context, tiles.count(), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t index = begin; index < end; ++index) multiply_tile(tile_at(product, tiles, index));
  });
}

}  // namespace eaves::cpu
#endif  // HWY_ONCE
