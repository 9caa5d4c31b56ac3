// Launch numbers of row kernels as data, apart from the kernels: how many threads share a row, by the row's bytes.
// What a row costs is its bytes, so one table serves every element type and every operator that reads a row once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/rows.h"

namespace eaves::cuda {

/// Threads that share a row: below 128 they are lanes of a warp, from 128 on a block.
struct RowThreads {
  int threads = 0;
  int vectors = 0;  ///< 16-byte vectors that each thread loads before it uses the first
};

/// Lanes load 4 vectors; 2 and 8 are less even, 1 leaves too few bytes in flight.
inline constexpr int kLaneVectors = 4;

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
/// Small blocks win: what a block waits for (its first load, its reduction) is hidden by its many neighbours.
inline RowThreads row_threads(std::int64_t row_bytes) {
  if (row_bytes <= 64) return {2, kLaneVectors};
  if (row_bytes <= 512) return {8, kLaneVectors};
  if (row_bytes <= 4096) return {32, kLaneVectors};
  if (row_bytes <= 8192) return {128, 4};
  if (row_bytes <= 16384) return {128, 8};
  return {256, 8};
}

/// The shape for rows that are cut into pieces: few blocks, so each has to keep many bytes in flight.
inline constexpr RowThreads kPieceThreads{512, 8};

/// Into how many pieces a row is cut because there are too few rows to fill the GPU, 1 where there are enough.
struct RowSplit {
  std::int64_t pieces = 1;
  std::int64_t piece_columns = 0;
  bool is_cluster = false;  ///< the pieces are the blocks of one cluster; otherwise they meet in the workspace
};

inline RowSplit split_rows(std::int64_t rows, std::int64_t columns, std::int64_t element_bytes, int multiprocessors,
                           bool has_clusters) {
  constexpr std::int64_t kSmallestPieceBytes = 16384;     // below it, starting a block costs more than its bytes
  constexpr std::int64_t kLargestPieceBytes = 1LL << 34;  // Span counts vectors in 32 bits
  constexpr std::int64_t kBlocksPerMultiprocessor = 4;
  constexpr std::int64_t kLargestCluster = 8;  // the largest that every GPU with clusters takes
  const std::int64_t wanted = multiprocessors * kBlocksPerMultiprocessor;
  const std::int64_t row_bytes = columns * element_bytes;
  if (columns == 0 || (rows >= wanted / 2 && row_bytes <= kLargestPieceBytes)) return {1, columns, false};
  const std::int64_t most = std::max<std::int64_t>(1, row_bytes / kSmallestPieceBytes);
  std::int64_t pieces = std::min((wanted + rows - 1) / rows, most);
  bool is_cluster = false;
  if (has_clusters && pieces <= kLargestCluster && pieces > 1) {
    std::int64_t cluster = 2;
    while (cluster < pieces) cluster *= 2;
    pieces = cluster;
    is_cluster = true;
  }
  // Pieces start on multiples of 128 elements, so that they keep the alignment of the row.
  const std::int64_t piece_columns = ((columns + pieces - 1) / pieces + 127) / 128 * 128;
  if (!is_cluster) pieces = (columns + piece_columns - 1) / piece_columns;
  return {pieces, piece_columns, is_cluster};
}

/// A tile of the transposed layout is 32 lanes wide, each with a vector of rows (or with one, where vectors do not
/// fit).
struct TransposedTiles {
  std::int64_t tiles = 1;   ///< beside each other, over all rows
  std::int64_t pieces = 1;  ///< below each other: the columns are cut where there are too few tiles
  std::int64_t piece_columns = 0;
};

inline TransposedTiles tile_transposed(std::int64_t outer_rows, std::int64_t lane_rows, std::int64_t columns,
                                       std::int64_t rows_per_tile, int multiprocessors) {
  constexpr std::int64_t kBlocksPerMultiprocessor = 2;
  constexpr std::int64_t kFewestColumns = 128;
  TransposedTiles tiles;
  tiles.tiles = outer_rows * ((lane_rows + rows_per_tile - 1) / rows_per_tile);
  const std::int64_t wanted = multiprocessors * kBlocksPerMultiprocessor;
  const std::int64_t most = std::max<std::int64_t>(1, columns / kFewestColumns);
  tiles.pieces = std::clamp<std::int64_t>(wanted / tiles.tiles, 1, most);
  tiles.piece_columns = (columns + tiles.pieces - 1) / tiles.pieces;
  tiles.pieces = columns == 0 ? 1 : (columns + tiles.piece_columns - 1) / tiles.piece_columns;
  return tiles;
}

}  // namespace eaves::cuda
