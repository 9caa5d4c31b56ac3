// Launch numbers of row kernels as data, apart from the kernels: how many threads share a row, by the row's bytes.
// What a row costs is its bytes, so one table serves every element type and every operator that reads a row once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/rows.h"

namespace eaves::cuda {

/// Of an operation (row_reduce.cuh, row_map.cuh): it has so much arithmetic for an element that registers are what
/// counts, and is so long to compile that it has fewer kernels.
template <typename Operation>
inline constexpr bool kIsHeavy = false;

/// Threads that share a row: up to 32 they are lanes of a warp, beyond that a block.
struct RowThreads {
  int threads = 0;
  int vectors = 0;  ///< 16-byte vectors that each thread loads before it uses the first

  friend constexpr bool operator==(const RowThreads&, const RowThreads&) = default;
};

/// H200, 4096 rows of bf16, cold L2, microseconds (forward of logsumexp; a plain read of the same bytes):
///
///   row bytes       2 Ki   4 Ki   8 Ki  16 Ki  32 Ki  64 Ki 128 Ki 256 Ki
///   32 x 4           7.6    9.4   13.7   21.3   36     67    143    265
///   128 x 4         11.4   11.8   13.1   20.7   35.9   66.4  129.7  253.1
///   128 x 8         15.1   15.4   16.1   20.4   35.2   65.4  123.2  241.8
///   256 x 8         21.4   26.2   26.6   27.6   34.7   65.0  122.4  238.7
///   512 x 8         37.1   42.3   52.9   54.6   56.9   65.4  122.3  237.1
///   plain read       6.1    7.9   11.6   18.6   32.6   62.0  118.4  232.1
///
/// H100, 524,288 rows of 96 and 128 bf16, forward of logsumexp, microseconds: 8 x 4 62.0 and 62.8, 4 x 4 40.2 and
/// 52.6.
///
/// Small blocks win: what a block waits for (its first load, its reduction) is hidden by its many neighbours.
inline RowThreads row_threads(std::int64_t row_bytes) {
  if (row_bytes <= 32) return {2, 1};
  if (row_bytes <= 128) return {2, 4};
  if (row_bytes <= 256) return {4, 4};
  if (row_bytes <= 512) return {8, 4};
  if (row_bytes <= 4096) return {32, 4};
  if (row_bytes <= 8192) return {128, 4};
  if (row_bytes <= 16384) return {128, 8};
  return {256, 8};
}

/// A row of so many bytes is long. It may be asked whether it is wanted before it is read (asks_first() of cross
/// entropy).
inline constexpr std::int64_t kLongRowBytes = 65536;

/// A block of a heavy operator asks L2 for the start of a long row, or piece of one, before its threads load. H100,
/// cross entropy of [4096, 32768] bf16 with smoothing, with an entropy and with softcap, without and with it: 110 and
/// 103, 109 and 102, 119 and 114 us. Without options it gains nothing, and half of the rows ignored take 57 us instead
/// of 53.
inline constexpr std::int64_t kPrefetchedBytes = 8192;

/// Rows that are cut into pieces. H200, 8 rows of 2^24 bf16, microseconds with the merging (a plain read: 62.0):
/// 256 x 8 and 256 pieces a row 67.8, 128 pieces 68.6, 64 pieces 68.7; 512 x 8 and 32 pieces a row 68.1.
inline constexpr RowThreads kPieceThreads{256, 8};
inline constexpr std::int64_t kPiecesPerMultiprocessor = 16;

/// Into how many pieces a row is cut because there are too few rows to fill the GPU, 1 where there are enough.
struct RowSplit {
  std::int64_t pieces = 1;
  std::int64_t piece_columns = 0;
  bool is_cluster = false;  ///< the pieces are the blocks of one cluster; otherwise they meet in the workspace
};

inline RowSplit split_rows(std::int64_t rows, std::int64_t columns, std::int64_t element_bytes, int multiprocessors,
                           bool has_clusters) {
  constexpr std::int64_t kSmallestPieceBytes = 16384;     // below it, starting a block costs more than its bytes
  constexpr std::int64_t kLargestPieceBytes = 1LL << 34;  // for_each_batch counts vectors in 32 bits
  constexpr std::int64_t kLargestCluster = 8;             // the largest that every GPU with clusters takes
  // Rows that would leave multiprocessors empty are cut, into many pieces: they even out the end.
  const std::int64_t enough_rows = 2 * multiprocessors;
  const std::int64_t wanted_pieces = kPiecesPerMultiprocessor * multiprocessors;
  const std::int64_t row_bytes = columns * element_bytes;
  if (columns == 0 || (rows >= enough_rows && row_bytes <= kLargestPieceBytes)) return {1, columns, false};
  const std::int64_t most = std::max<std::int64_t>(1, row_bytes / kSmallestPieceBytes);
  std::int64_t pieces =
      std::max(std::min(ceil_divide(wanted_pieces, rows), most), ceil_divide(row_bytes, kLargestPieceBytes));
  // A short row's pieces meet in a cluster, which saves the second launch.
  const bool is_cluster = has_clusters && pieces > 1 && most <= 2 * kLargestCluster;
  if (is_cluster) {
    pieces = 2;
    while (2 * pieces <= most && pieces < kLargestCluster) pieces *= 2;
  }
  // A piece is a multiple of what its block loads at once, where it is as large: a last batch that is half empty costs
  // as much as a full one. In any case a multiple of 256 bytes, so that pieces keep the alignment of the row.
  constexpr std::int64_t kBatchBytes = kPieceThreads.threads * kPieceThreads.vectors * 16;
  const std::int64_t piece_bytes = ceil_divide(row_bytes, pieces);
  const std::int64_t unit_bytes = !is_cluster && piece_bytes >= kBatchBytes ? kBatchBytes : 256;
  const std::int64_t piece_columns = ceil_divide(piece_bytes, unit_bytes) * unit_bytes / element_bytes;
  if (!is_cluster) pieces = ceil_divide(columns, piece_columns);
  return {pieces, piece_columns, is_cluster};
}

/// Every row of tensor `first` starts at the same place between 16-byte boundaries as in tensor `second`, so that a
/// vector of one is a vector of the other.
template <typename View>
bool lie_alike(const View& view, int first, const void* a, int second, const void* b, std::int64_t element_bytes) {
  if ((reinterpret_cast<std::uintptr_t>(a) - reinterpret_cast<std::uintptr_t>(b)) % 16 != 0) return false;
  for (int axis = 0; axis < view.rows.rank; ++axis) {
    if ((view.rows.strides[first][axis] - view.rows.strides[second][axis]) * element_bytes % 16 != 0) return false;
  }
  return true;
}

/// Transposed layout: the rows side by side are whole vectors that start on 16 bytes, in every column.
template <typename View>
bool columns_are_aligned(const View& view, int tensor, const void* data, std::int64_t element_bytes) {
  const std::int64_t vector_elements = 16 / element_bytes;
  const int lane_axis = view.rows.rank - 1;
  if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0 || view.rows.sizes[lane_axis] % vector_elements != 0)
    return false;
  for (int axis = 0; axis < lane_axis; ++axis) {
    if (view.rows.strides[tensor][axis] % vector_elements != 0) return false;
  }
  return view.columns.strides[tensor][0] % vector_elements == 0;
}

/// A tile of the transposed layout is 32 lanes wide, each with a vector of rows (or with one, where vectors do not
/// fit).
struct TransposedTiles {
  std::int64_t tiles_per_lane_axis = 1;
  std::int64_t tiles = 1;   ///< beside each other, over all rows
  std::int64_t pieces = 1;  ///< below each other: the columns are cut where there are too few tiles
  std::int64_t piece_columns = 0;
};

/// `blocks_per_multiprocessor`: as many as run at the same time where pieces have to be merged, more where they do not.
inline TransposedTiles tile_transposed(std::int64_t outer_rows, std::int64_t lane_rows, std::int64_t columns,
                                       std::int64_t rows_per_tile, int multiprocessors,
                                       std::int64_t blocks_per_multiprocessor) {
  constexpr std::int64_t kFewestColumns = 64;
  TransposedTiles tiles;
  tiles.tiles_per_lane_axis = ceil_divide(lane_rows, rows_per_tile);
  tiles.tiles = outer_rows * tiles.tiles_per_lane_axis;
  const std::int64_t wanted = multiprocessors * blocks_per_multiprocessor;
  const std::int64_t most = std::max<std::int64_t>(1, columns / kFewestColumns);
  tiles.pieces = std::clamp<std::int64_t>(wanted / tiles.tiles, 1, most);
  tiles.piece_columns = ceil_divide(columns, tiles.pieces);
  tiles.pieces = columns == 0 ? 1 : ceil_divide(columns, tiles.piece_columns);
  return tiles;
}

}  // namespace eaves::cuda
