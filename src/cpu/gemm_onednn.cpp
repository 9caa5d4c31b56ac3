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

/// `sums` has kMostPackSize elements more than the tile.
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
/// Tiles begin at multiples of this.
constexpr std::int64_t kTileStep = 16;

/// How oneDNN adds up an element of float32 depends on the size of the tile, so these are cut for so many threads,
/// however many there are. Of bfloat16 it does not, for two rows and columns or more.
constexpr std::int64_t kThreadsOfFloat32 = 8;

/// Memory behind the sums, which is read with them: a pack of Highway's largest vectors, of 2048 bits.
constexpr std::int64_t kMostPackSize = 4 * 2048 / 32;

/// How many tiles.
struct Cut {
  std::int64_t down, across;
  std::int64_t count() const { return down * across; }
};

/// As few tiles as give each thread as many as the others.
Cut cut_of(const Gemm& product, const ExecutionContext& context) {
  const std::int64_t asked = context.threads > 0 ? context.threads : default_threads();
  const std::int64_t threads = product.dtype == DType::float32 ? kThreadsOfFloat32 : asked;
  Cut cut{ceil_divide(product.m, kMostOfTile), ceil_divide(product.n, kMostOfTile)};
  const auto rows = [&] { return product.m / cut.down; };
  const auto columns = [&] { return product.n / cut.across; };
  while (cut.count() < threads && std::max(rows(), columns()) >= 2 * kLeastTile) {
    (rows() > columns() ? cut.down : cut.across) *= 2;
  }
  for (std::int64_t more = 1; more < threads && cut.count() % threads != 0; ++more) {
    const Cut finer{cut.down, cut.across + more};
    if (finer.count() % threads == 0 && product.n / finer.across >= kLeastTile) cut = finer;
  }
  return cut;
}

/// Where part `index` of `parts` begins.
std::int64_t begin_of(std::int64_t all, std::int64_t parts, std::int64_t index) {
  return index == parts ? all : all * index / parts / kTileStep * kTileStep;
}

Gemm tile_at(const Gemm& product, const Cut& cut, std::int64_t index) {
  const std::int64_t down = index % cut.down;
  const std::int64_t across = index / cut.down;
  const std::int64_t row = begin_of(product.m, cut.down, down);
  const std::int64_t column = begin_of(product.n, cut.across, across);
  const auto moved = [](const void* data, DType dtype, std::int64_t elements) {
    return static_cast<const char*>(data) + elements * static_cast<std::int64_t>(size_of(dtype));
  };
  Gemm tile = product;
  tile.m = begin_of(product.m, cut.down, down + 1) - row;
  tile.n = begin_of(product.n, cut.across, across + 1) - column;
  tile.a.data = moved(product.a.data, product.dtype, product.a.is_transposed ? row : row * product.a.stride);
  tile.b.data = moved(product.b.data, product.dtype, product.b.is_transposed ? column * product.b.stride : column);
  tile.c = const_cast<char*>(moved(product.c, product.c_dtype, row * product.c_stride + column));
  if (product.bias != nullptr) tile.bias = static_cast<const float*>(product.bias) + column;
  return tile;
}

/// Memory of this thread, until the next call.
float* sums_of(std::int64_t count) {
  thread_local std::vector<float> sums;
  const auto wanted = static_cast<std::size_t>(count + kMostPackSize);
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

/// Do its rows, or columns where it is transposed, lie one behind the other?
bool is_dense(const GemmMatrix& matrix, std::int64_t rows, std::int64_t columns) {
  return matrix.stride >= (matrix.is_transposed ? rows : columns);
}

}  // namespace

bool can_multiply_by_onednn(const Gemm& product) {
  // A call costs about a microsecond, and one column is added up in an order of its own. Without m: a row's sums must
  // not depend on how many rows there are.
  constexpr std::int64_t kFewFactors = 4096;
  const bool is_worth_it = product.n >= kTileStep && product.n * product.k >= kFewFactors;
  return is_worth_it && has_onednn_gemm(product.dtype) && is_dense(product.a, product.m, product.k) &&
         is_dense(product.b, product.k, product.n) && product.c_stride >= product.n;
}

void multiply_by_onednn(const Gemm& given, const ExecutionContext& context) {
  Gemm product = given;
  const float alpha = given.alpha != nullptr ? *static_cast<const float*>(given.alpha) : 1.0f;
  if (given.alpha != nullptr) product.alpha = &alpha;  // read before anything is written
  const Cut cut = cut_of(product, context);
  constexpr std::int64_t kProductsPerExponential = 16;  // as grain_for() counts
  const std::int64_t of_a_tile = product.m * product.n / cut.count() * product.k / kProductsPerExponential;
  parallel_for(context, cut.count(), grain_for(of_a_tile), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t index = begin; index < end; ++index) multiply_tile(tile_at(product, cut, index));
  });
}

}  // namespace eaves::cpu
#endif  // HWY_ONCE
