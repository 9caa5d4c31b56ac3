// Launch numbers of row kernels as data, apart from the kernels: the threads that share a row, by the row's bytes. A
// row costs as much as its bytes, so one table serves every element type and every operator that reads a row once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/rows.h"

namespace eaves::cuda {

/// True for an operation (row_reduce.cuh, row_map.cuh) that does much arithmetic for each element. Its speed depends on
/// registers, and it has fewer kernels because they take long to compile.
template <typename Operation>
inline constexpr bool kIsHeavy = false;

/// The threads that share a row: up to 32 of them are lanes of a warp, more are a block.
struct RowThreads {
  int threads = 0;
  int vectors = 0;  ///< 16-byte vectors that each thread loads before it uses the first

  friend constexpr bool operator==(const RowThreads&, const RowThreads&) = default;
};

/// H100, 4096 rows of bf16, cold caches, microseconds (forward of logsumexp; a plain read of the same bytes):
///
///   row bytes       4 Ki   8 Ki  16 Ki  32 Ki  64 Ki 128 Ki 256 Ki
///   32 x 4          10.7
///   64 x 4          11.3
///   64 x 8                 16.8   28.2
///   128 x 4                16.4   27.9
///   128 x 8                       27.3   49.2   92.7  179.7  354.3
///   256 x 4                       26.7   48.5   92.0  177.5  348.9
///   256 x 8                              48.1   90.9  176.3  348.4
///   512 x 4                              47.9   90.0  175.0  345.3
///   1024 x 2                             57.6   91.7  175.6  344.3
///   plain read       9.7   14.6   25.4   46.0   88.5  172.2  339.9
///
/// H200, 32 KiB: 512 x 4 39.4, which is 1.13 times a plain read. Rows of 16 and 64 KiB take 1.07 and 1.06 times theirs.
/// Rows of 32 KiB therefore have 256 x 4, which was not measured there.
///
/// H100, 524,288 rows of 96 and 128 bf16: 8 x 4 62.0 and 62.8, 4 x 4 40.2 and 52.6.
///
/// Small blocks win for short rows: a block's waits (for its first load, for its reduction) are hidden by its many
/// neighbours. Long rows need few vectors a thread, which leaves registers for more threads.
inline RowThreads row_threads(std::int64_t row_bytes) {
  if (row_bytes <= 32) return {2, 1};
  if (row_bytes <= 128) return {2, 4};
  if (row_bytes <= 256) return {4, 4};
  if (row_bytes <= 512) return {8, 4};
  if (row_bytes <= 4096) return {32, 4};
  if (row_bytes <= 8192) return {128, 4};
  if (row_bytes <= 32768) return {256, 4};
  return {512, 4};
}

/// A row of at least so many bytes is long: a kernel may ask whether the row is wanted before it reads it
/// (checks_target_first() of cross_entropy).
inline constexpr std::int64_t kLongRowBytes = 65536;

/// Rows cut into pieces. 8 rows of 2^24 bf16, microseconds with the merging: H100, 512 x 4 93.6, 256 x 8 94.5 (a plain
/// read: 88.3); H200, 256 x 8 and 256 pieces a row 67.8, 128 pieces 68.6, 64 pieces 68.7.
inline constexpr RowThreads kPieceThreads{512, 4};
inline constexpr std::int64_t kPiecesPerMultiprocessor = 16;

/// The pieces of a row: several if there are too few rows to fill the GPU or a row has more than 16 GiB, else 1.
struct RowSplit {
  std::int64_t pieces = 1;
  std::int64_t piece_columns = 0;
  bool is_cluster = false;  ///< the pieces are the blocks of one cluster; else they meet in the workspace
};

inline RowSplit split_rows(std::int64_t rows, std::int64_t columns, std::int64_t element_bytes, int multiprocessors,
                           bool has_clusters) {
  constexpr std::int64_t kSmallestPieceBytes = 16384;     // below it, starting a block costs more than its bytes
  constexpr std::int64_t kLargestPieceBytes = 1LL << 34;  // for_each_batch counts vectors in 32 bits
  constexpr std::int64_t kLargestCluster = 8;             // the largest that every GPU with clusters supports
  // Rows that would leave multiprocessors empty are cut into many pieces, which end at nearly the same time.
  const std::int64_t enough_rows = 2 * multiprocessors;
  const std::int64_t wanted_pieces = kPiecesPerMultiprocessor * multiprocessors;
  const std::int64_t row_bytes = columns * element_bytes;
  if (columns == 0 || (rows >= enough_rows && row_bytes <= kLargestPieceBytes)) return {1, columns, false};
  const std::int64_t most = std::max<std::int64_t>(1, row_bytes / kSmallestPieceBytes);
  std::int64_t pieces =
      std::max(std::min(ceil_divide(wanted_pieces, rows), most), ceil_divide(row_bytes, kLargestPieceBytes));
  // The pieces of a short row meet in a cluster, which saves the second launch.
  const bool is_cluster = has_clusters && pieces > 1 && most <= 2 * kLargestCluster;
  if (is_cluster) {
    pieces = 2;
    while (2 * pieces <= most && pieces < kLargestCluster) pieces *= 2;
  }
  // A large piece is a multiple of the bytes that its block loads at once, because a last batch that is half empty
  // costs as much as a full one. Every piece is a multiple of 256 bytes, so that pieces keep the row's alignment.
  constexpr std::int64_t kBatchBytes = kPieceThreads.threads * kPieceThreads.vectors * 16;
  const std::int64_t piece_bytes = ceil_divide(row_bytes, pieces);
  const std::int64_t unit_bytes = !is_cluster && piece_bytes >= kBatchBytes ? kBatchBytes : 256;
  const std::int64_t piece_columns = ceil_divide(piece_bytes, unit_bytes) * unit_bytes / element_bytes;
  if (!is_cluster) pieces = ceil_divide(columns, piece_columns);
  return {pieces, piece_columns, is_cluster};
}

/// True if every row of tensor `first` starts at the same place between 16-byte boundaries as in tensor `second`: a
/// vector of one is then a vector of the other.
template <typename View>
bool lie_alike(const View& view, int first, const void* a, int second, const void* b, std::int64_t element_bytes) {
  if ((reinterpret_cast<std::uintptr_t>(a) - reinterpret_cast<std::uintptr_t>(b)) % 16 != 0) return false;
  for (int axis = 0; axis < view.rows.rank; ++axis) {
    if ((view.rows.strides[first][axis] - view.rows.strides[second][axis]) * element_bytes % 16 != 0) return false;
  }
  return true;
}

/// Transposed layout: true if the rows side by side are whole vectors that start on 16 bytes in every column.
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

/// A tile of the transposed layout is 32 lanes wide. Each lane has a vector of rows, or one row if vectors do not fit.
struct TransposedTiles {
  std::int64_t tiles_per_lane_axis = 1;
  std::int64_t tiles = 1;   ///< side by side, over all rows
  std::int64_t pieces = 1;  ///< one below the other: columns are cut if there are too few tiles
  std::int64_t piece_columns = 0;
};

/// `blocks_per_multiprocessor`: as many as run at the same time if pieces are merged, more if they are not.
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
