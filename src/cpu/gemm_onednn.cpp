// c is cut into tiles. A tile is one call of oneDNN on one thread, OpenMP's or one of the caller's pool, so that oneDNN
// opens no pool of its own. Where c has 16 bits, or alpha, a bias or what c holds follow, oneDNN writes float32 sums to
// memory of the thread, and the epilogue (gemm_finish.h) writes c.
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

/// `sums` has kPaddingOfSums elements more than the tile.
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
constexpr std::int64_t kMaxTile = 1024;
/// The least that is left of them where tiles are made smaller for more threads.
constexpr std::int64_t kMinTile = 128;
/// Tiles begin at multiples of this.
constexpr std::int64_t kTileStep = 16;

/// oneDNN's order of summation in float32 depends on the size of the tile, so tiles follow the shape alone: as for so
/// many threads. More may have nothing to do in a small product. In bfloat16 it does not depend on it, from two rows
/// and two columns on.
constexpr std::int64_t kThreadsOfFloat32 = 8;

/// Room behind the sums, because finish_sums() reads the last row as a whole pack: 4 of Highway's largest vectors, of
/// 2048 bits. (Highway's own constant is one of the level, and this part is not compiled for each.)
constexpr std::int64_t kPaddingOfSums = 4 * 2048 / 32;

/// How many tiles.
struct Cut {
  std::int64_t row_tiles, column_tiles;
  std::int64_t count() const { return row_tiles * column_tiles; }
};

/// Halved until each thread has a tile, then cut into more columns of tiles until their number is a multiple of the
/// threads, where there is such a cut.
Cut cut_of(const Gemm& product, const ExecutionContext& context) {
  const std::int64_t asked = context.threads > 0 ? context.threads : default_threads();
  const std::int64_t threads = product.dtype == DType::float32 ? kThreadsOfFloat32 : asked;
  Cut cut{ceil_divide(product.m, kMaxTile), ceil_divide(product.n, kMaxTile)};
  const auto rows = [&] { return product.m / cut.row_tiles; };
  const auto columns = [&] { return product.n / cut.column_tiles; };
  while (cut.count() < threads && std::max(rows(), columns()) >= 2 * kMinTile) {
    (rows() > columns() ? cut.row_tiles : cut.column_tiles) *= 2;
  }
  for (Cut finer = cut; finer.column_tiles < cut.column_tiles + threads; ++finer.column_tiles) {
    if (product.n / finer.column_tiles < kMinTile) break;
    if (finer.count() % threads == 0) return finer;
  }
  return cut;
}

/// Where part `index` of `parts` begins.
std::int64_t begin_of(std::int64_t all, std::int64_t parts, std::int64_t index) {
  return index == parts ? all : all * index / parts / kTileStep * kTileStep;
}

Gemm tile_at(const Gemm& product, const Cut& cut, std::int64_t index) {
  const std::int64_t tile_row = index % cut.row_tiles;
  const std::int64_t tile_column = index / cut.row_tiles;
  const std::int64_t row = begin_of(product.m, cut.row_tiles, tile_row);
  const std::int64_t column = begin_of(product.n, cut.column_tiles, tile_column);
  const auto moved = [](const void* data, DType dtype, std::int64_t elements) {
    return static_cast<const char*>(data) + elements * static_cast<std::int64_t>(size_of(dtype));
  };
  Gemm tile = product;
  tile.m = begin_of(product.m, cut.row_tiles, tile_row + 1) - row;
  tile.n = begin_of(product.n, cut.column_tiles, tile_column + 1) - column;
  tile.a.data = moved(product.a.data, product.dtype, product.a.is_transposed ? row : row * product.a.stride);
  tile.b.data = moved(product.b.data, product.dtype, product.b.is_transposed ? column * product.b.stride : column);
  tile.c = const_cast<char*>(moved(product.c, product.c_dtype, row * product.c_stride + column));
  if (product.bias != nullptr) tile.bias = static_cast<const float*>(product.bias) + column;
  return tile;
}

/// Memory of this thread, until the next call.
float* sums_of(std::int64_t count) {
  thread_local std::vector<float> sums;
  const auto wanted = static_cast<std::size_t>(count + kPaddingOfSums);
  if (sums.size() < wanted) sums.resize(wanted);
  return sums.data();
}

/// oneDNN adds up a single row in another order than several, so it gets the row twice, and the second result is left.
bool multiply_row(const Gemm& tile, float* sums) {
  const std::size_t size = size_of(tile.dtype);
  const auto step = static_cast<std::size_t>(tile.a.is_transposed ? tile.a.stride : 1);
  const auto k = static_cast<std::size_t>(tile.k);
  thread_local std::vector<char> rows;
  rows.resize(2 * k * size);
  for (std::size_t p = 0; p < k; ++p) {
    std::memcpy(&rows[p * size], static_cast<const char*>(tile.a.data) + p * step * size, size);
  }
  std::memcpy(&rows[k * size], rows.data(), k * size);
  return onednn_gemm(tile.dtype, 2, tile.n, tile.k, {rows.data(), tile.k}, tile.b, sums, tile.n);
}

void multiply_tile(const Gemm& tile) {
  const auto by_onednn = [&](float* to, std::int64_t stride) {
    return onednn_gemm(tile.dtype, tile.m, tile.n, tile.k, tile.a, tile.b, to, stride);
  };
  const bool is_done = tile.alpha == nullptr && tile.bias == nullptr && !tile.accumulates;
  if (is_done && tile.c_dtype == DType::float32 && tile.m > 1) {
    if (by_onednn(static_cast<float*>(tile.c), tile.c_stride)) return;
  } else {
    float* sums = sums_of(std::max<std::int64_t>(2, tile.m) * tile.n);
    if (tile.m == 1 ? multiply_row(tile, sums) : by_onednn(sums, tile.n)) {
      return HWY_DYNAMIC_DISPATCH(finish_tile)(tile, sums);
    }
  }
  own_gemm(tile, {.threads = 1});  // oneDNN found no memory, and wrote nothing
}

/// oneDNN refuses a stride that is smaller than a row, or than a column of a transposed matrix.
bool has_disjoint_rows(const GemmMatrix& matrix, std::int64_t rows, std::int64_t columns) {
  return matrix.stride >= (matrix.is_transposed ? rows : columns);
}

}  // namespace

bool can_multiply_by_onednn(const Gemm& product) {
  // A single column would be added up in another order, and a call costs about a microsecond. Neither looks at m, so
  // that a row's sums do not depend on how many rows there are.
  constexpr std::int64_t kLeastElementsOfB = 4096;
  return product.n >= kTileStep && product.n * product.k >= kLeastElementsOfB && has_onednn_gemm(product.dtype) &&
         has_disjoint_rows(product.a, product.m, product.k) && has_disjoint_rows(product.b, product.k, product.n) &&
         product.c_stride >= product.n;
}

void multiply_by_onednn(const Gemm& given, const ExecutionContext& context) {
  Gemm product = given;
  const float alpha = given.alpha != nullptr ? *static_cast<const float*>(given.alpha) : 1.0f;
  if (given.alpha != nullptr) product.alpha = &alpha;  // read before anything is written
  const Cut cut = cut_of(product, context);
  const std::int64_t of_a_tile = product.m * product.n / cut.count() * product.k;
  parallel_for(context, cut.count(), grain_for_products(of_a_tile), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t index = begin; index < end; ++index) multiply_tile(tile_at(product, cut, index));
  });
}

}  // namespace eaves::cpu
#endif  // HWY_ONCE
