// Maps rows element by element, with a few numbers of each row: the form of every gradient. A kernel only has to find a
// row's numbers once and to stream its elements:
//
//   map_per_lanes      short rows, many in a block      (unit stride)
//   map_per_piece      long rows, a block a piece       (unit stride)
//   map_per_column     rows side by side                (the row runs along another axis)
//   map_per_element    anything else
//
// An operator describes its function as a struct that kernels take by value:
//
//   struct Operation {            // for elements of type T, template of the view's type
//     using Element = T;
//     const View& view() const;   // ShortRowView, or RowView for map_per_element
//     const T* in; T* out;        // tensors 0 and 1 of the view; may be the same
//     auto row(const Offsets& at) const;  // loads the numbers of the row whose tensors lie at `at`. Returns a function
//                                         // of (element, column), and of (vector, column of its first element) as
//                                         // transform() takes it. A function that differs in one column of its row may
//                                         // have target_column(), outside of the row if there is none, and
//                                         // target(element), other(element)
//     // if kIsHeavy (row_policy.h):
//     bool has_factors() const;  // does the function load a factor of each element?
//     void for_variant<kHasFactors>(body) const;  // calls `body` with a function like row(), specialised in
//                                                 // the options of all rows, so that loops are compiled for them
//   };
//
// Operations that differ from most are specialised in kIsHeavy (row_policy.h) and kRowIsCheap (below).
#pragma once

#include <algorithm>
#include <cstdint>
#include <new>

#include "core/rows.h"
#include "cuda/columns.cuh"
#include "cuda/device.h"
#include "cuda/launch.cuh"
#include "cuda/row_policy.h"
#include "cuda/vector.cuh"

namespace eaves::cuda {

inline constexpr int kMapLanesBlock = 128;  // threads of a block of short rows
// Threads of a block of long rows. H200, gradient of logsumexp, bf16, [4096, 131072] and [4096, 1024], threads x
// vectors: 32 x 4 0.504 ms and 7.6 us, 64 x 2 0.501 and 8.1, 128 x 2 0.501 and 9.1, 64 x 4 0.509 and 8.3, 32 x 2 0.639
// and 9.4, 128 x 1 0.618 and 9.5; a plain copy 0.511 and 6.8.
inline constexpr int kMapThreads = 32;
inline constexpr int kMapVectors = 4;  // vectors that a thread loads before it stores the first
// A thread of a heavy operator takes more batches, one after the other. The batches are smaller, because a loop over
// many elements has more instructions than a multiprocessor keeps at hand. All slots but one hold batches on their way.
// H200, [4096, 131072] bf16, every option of cross entropy: 4 vectors, 4 batches and 3 slots 0.766 ms, these 0.714.
inline constexpr int kHeavyMapVectors = 2;
inline constexpr int kHeavyMapBatches = 8;
inline constexpr int kHeavyMapSlots = 6;
// Blocks of a multiprocessor, which bounds registers; 0 leaves the choice to the compiler. More threads hide the loads
// of an element's factors. H100, gradient of cross entropy, [4096, 32768] bf16: with soft targets 281 us, 313 with 20
// blocks; with smoothing over weighted classes 198, 206 with 20 blocks. Softcap has no factors: 192 with 25 blocks, 186
// with 20.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ % 100 != 0 || __CUDA_ARCH__ >= 1200)
template <bool kIsHeavy, bool kHasFactors>  // a multiprocessor of these GPUs has at most 16 or 24 blocks
inline constexpr int kMapBlocks = 0;
#else
template <bool kIsHeavy, bool kHasFactors>
inline constexpr int kMapBlocks = kHasFactors ? 25
                                  : kIsHeavy  ? 20
                                              : 0;
#endif
inline constexpr int kMapColumnWarps = 8;  // warps of a block that walk down columns side by side
inline constexpr int kMapColumns = 4;      // columns that a thread loads before it stores the first
inline constexpr int kMapColumnBlocks =
    32;  // blocks for each multiprocessor: many and short ones, because nothing is merged

/// True if row() loads only a number or two, which more lanes may repeat. Operations specialise it.
template <typename Operation>
inline constexpr bool kRowIsCheap = false;

/// True for a row's function that differs in a single column.
template <typename Function, typename T>
inline constexpr bool kHasTarget = requires(const Function& function, Accumulator<T> element) {
  function.target_column();
  function.target(element);
  function.other(element);
};

/// Short rows: kLanes lanes have a row, and each loads kVectors vectors before it stores the first.
template <typename Operation, int kLanes, int kVectors>
__global__ void __launch_bounds__(kMapLanesBlock) map_per_lanes(const __grid_constant__ Operation operation) {
  const std::int64_t row = (std::int64_t{blockIdx.x} * kMapLanesBlock + threadIdx.x) / kLanes;
  if (row >= operation.view().row_count) return;
  const auto at = operation.view().rows.offsets(row);
  transform<kVectors>(operation.in + at.of[0], operation.out + at.of[1], operation.view().column_count, 0, INT32_MAX,
                      threadIdx.x % kLanes, kLanes, DirectLoads{}, [&] { return operation.row(at); });
}

/// The vectors of a piece of a long row.
template <typename Operation>
inline constexpr int kMapPieceVectors = kMapThreads*(kIsHeavy<Operation> ? kHeavyMapVectors* kHeavyMapBatches
                                                                         : kMapVectors);

/// Long rows: a block has a piece, and each thread one batch of its vectors, or a few if the operation is heavy. Only
/// heavy operations have kHasFactors.
template <typename Operation, bool kHasFactors>
__global__ void __launch_bounds__(kMapThreads, (kMapBlocks<kIsHeavy<Operation>, kHasFactors>))
    map_per_piece(const __grid_constant__ Operation operation, unsigned pieces, Divider by_pieces) {
  const unsigned row = by_pieces.divide(blockIdx.x);
  // The offsets are computed again when the row's numbers are loaded: six offsets of 64 bits would otherwise stay in
  // registers. H100, bf16, every option of cross entropy, [4096, 131072]: 0.82 ms, with offsets in registers 0.90.
  const auto at = operation.view().rows.offsets(row);
  const auto map = [&]<int kVectors>(std::integral_constant<int, kVectors>, auto loads, auto make_row) {
    transform<kVectors>(operation.in + at.of[0], operation.out + at.of[1], operation.view().column_count,
                        blockIdx.x - row * pieces, kMapPieceVectors<Operation>, threadIdx.x, kMapThreads, loads,
                        [&] { return make_row(operation.view().rows.offsets(row)); });
  };
  if constexpr (kIsHeavy<Operation>) {
    using T = typename Operation::Element;
    using Loads = LoadsAhead<T, kMapThreads, kHeavyMapVectors, kHeavyMapSlots>;
    __shared__ Vector<T> shared[Loads::Ring::kVectorCount];
    operation.template for_variant<kHasFactors>(
        [&](auto make_row) { map(std::integral_constant<int, kHeavyMapVectors>{}, Loads(shared), make_row); });
  } else {
    map(std::integral_constant<int, kMapVectors>{}, DirectLoads{}, [&](const auto& of) { return operation.row(of); });
  }
}

/// As in row_per_column, each thread owns kLaneRows neighbouring rows and walks down their columns. One thread of the
/// block finds a row's numbers for all warps. H100, gradient of cross entropy, classes of [4, 32768, 1024] bf16 side by
/// side: 197 us, and 240 if each warp finds them. For a heavy operation each warp finds them: its function refers to
/// the kernel's arguments, which the compiler would not recognise in a function read from shared memory.
template <typename Operation, int kLaneRows>
__global__ void __launch_bounds__(32 * kMapColumnWarps)
    map_per_column(const __grid_constant__ Operation operation, TransposedTiles tiles) {
  using T = typename Operation::Element;
  constexpr int kTileRows = 32 * kLaneRows;
  const Tile tile = find_tile<kTileRows>(operation.view(), tiles);
  const auto& rows = operation.view().rows;
  const auto row_of = [&](int i) {
    return operation.row(rows.offsets(tile.outer_row + tile.lane_row + i));  // i: counted from the tile's first
  };
  using Function = decltype(row_of(0));
  // Raw bytes, because a function need not have a default constructor. The rows of a thread lie 32 apart; the rows of a
  // warp's threads lie side by side.
  __shared__ alignas(Function) unsigned char storage[kIsHeavy<Operation> ? 1 : kTileRows * sizeof(Function)];
  auto* const shared = reinterpret_cast<Function*>(storage);
  if constexpr (!kIsHeavy<Operation>) {
    const int count = static_cast<int>(min(std::int64_t{kTileRows}, tile.lane_axis_size - tile.lane_row));
    for (int i = static_cast<int>(threadIdx.y * 32 + threadIdx.x); i < count; i += 32 * kMapColumnWarps) {
      new (shared + i % kLaneRows * 32 + i / kLaneRows) Function(row_of(i));
    }
    __syncthreads();
  }
  const std::int64_t lane_row = tile.lane_row + threadIdx.x * kLaneRows;
  if (lane_row >= tile.lane_axis_size) return;
  const auto at = rows.offsets(tile.outer_row + lane_row);
  const auto& strides = operation.view().column_strides;
  const T* const in = operation.in + at.of[0];
  T* const out = operation.out + at.of[1];
  const auto map_all = [&](auto function) {
    transform_columns<kMapColumns, Side<T, kLaneRows>, kLaneRows>(
        in, strides[0], out, strides[1], tile.first_column + threadIdx.y, tile.last_column, kMapColumnWarps, function);
  };
  const auto map = [&](const Function(&functions)[kLaneRows]) {
    if constexpr (kHasTarget<Function, T>) {
      // Outside of the loop over columns, because it would be most of the loop's code. The thread whose loop covers the
      // column handles it, and overwrites an element that it has stored itself.
      std::int64_t targets[kLaneRows];
      T results[kLaneRows];
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        const std::int64_t column = functions[r].target_column();
        const bool is_own = column >= tile.first_column && column < tile.last_column &&
                            (column - tile.first_column) % kMapColumnWarps == threadIdx.y;
        targets[r] = is_own ? column : -1;
        if (is_own) results[r] = round_to<T>(functions[r].target(load_as_accumulator(in[column * strides[0] + r])));
      }
      map_all([&](Accumulator<T> value, int r, std::int64_t) { return functions[r].other(value); });
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        if (targets[r] >= 0) out[targets[r] * strides[1] + r] = results[r];
      }
    } else {
      map_all([&](Accumulator<T> value, int r, std::int64_t column) { return functions[r](value, column); });
    }
  };
  const auto function_of = [&](int r) {
    if constexpr (kIsHeavy<Operation>) {
      return row_of(static_cast<int>(threadIdx.x) * kLaneRows + r);
    } else {
      return shared[r * 32 + threadIdx.x];
    }
  };
  [&]<int... kRows>(std::integer_sequence<int, kRows...>) {
    const Function functions[kLaneRows] = {function_of(kRows)...};
    map(functions);
  }
  (std::make_integer_sequence<int, kLaneRows>{});
}

/// A thread takes one element at a time, whatever the layout.
template <typename Operation>
__global__ void __launch_bounds__(256) map_per_element(const __grid_constant__ Operation operation) {
  using T = typename Operation::Element;
  const auto& view = operation.view();
  const std::int64_t elements = view.row_count * view.column_count;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += step) {
    const std::int64_t row = divide(i, view.column_count);
    const std::int64_t column = i - row * view.column_count;
    const auto row_at = view.rows.offsets(row);
    const auto column_at = view.columns.offsets(column);
    const auto function = operation.row(row_at);
    const T value = operation.in[row_at.of[0] + column_at.of[0]];
    operation.out[row_at.of[1] + column_at.of[1]] = round_to<T>(function(load_as_accumulator(value), column));
  }
}

/// Maps every row of a view, which has at least one row and column. `make(view)` returns the operation for either type
/// of view.
template <typename T, typename View, typename MakeOperation>
void map_rows(const char* op, const View& view, const void* in, const void* out, Device device, void* stream,
              MakeOperation make) {
  using Short = ShortRowView<View::kColumns, View::kAll>;
  constexpr auto kElementBytes = static_cast<std::int64_t>(sizeof(T));
  const std::int64_t row_bytes = view.column_count * kElementBytes;
  if (Short::fits(view) && view.layout == RowLayout::contiguous && row_bytes >= 64 &&
      lie_alike(view, 0, in, 1, out, kElementBytes)) {
    const auto operation = make(Short(view));
    using Operation = std::remove_cvref_t<decltype(operation)>;
    if (row_bytes <= 512) {
      const auto map = [&]<int kLanes, int kVectors>() {
        launch(op, map_per_lanes<Operation, kLanes, kVectors>,
               {.blocks = ceil_divide(view.row_count, kMapLanesBlock / kLanes),
                .threads = kMapLanesBlock,
                .stream = stream},
               operation);
      };
      // As few lanes as row_threads() gives: each has kMapVectors vectors, and few lanes repeat row(). If row() is
      // cheap, whole lines side by side matter more. H100, bf16, [1048576, 64], by 2, 4 and 8 lanes: gradient of
      // logsumexp 105, 95 and 106 us, of cross entropy 111, 112 and 160. Rows of 64 bytes have too few vectors for
      // that.
      if constexpr (!kIsHeavy<Operation>) {
        if constexpr (kRowIsCheap<Operation>) {
          if (row_bytes > 64 && row_bytes <= 128) return map.template operator()<4, 2>();
        }
        const int lanes = row_threads(row_bytes).threads;
        if (lanes == 2) return map.template operator()<2, kMapVectors>();
        if (lanes == 4) return map.template operator()<4, kMapVectors>();
      }
      return map.template operator()<8, kMapVectors>();
    }
    // Pieces consist of whole vectors, wherever the first vector starts.
    const std::int64_t vectors = view.column_count / Vector<T>::kSize;
    const std::int64_t pieces = std::max<std::int64_t>(1, ceil_divide(vectors, kMapPieceVectors<Operation>));
    const auto map = [&](auto kernel) {
      launch(op, kernel, {.blocks = view.row_count * pieces, .threads = kMapThreads, .stream = stream}, operation,
             static_cast<unsigned>(pieces), Divider(static_cast<std::uint32_t>(pieces)));
    };
    if constexpr (kIsHeavy<Operation>) {
      if (operation.has_factors()) return map(map_per_piece<Operation, true>);
    }
    return map(map_per_piece<Operation, false>);
  }
  if (Short::fits(view) && view.layout == RowLayout::transposed) {
    const auto operation = make(Short(view));
    using Operation = std::remove_cvref_t<decltype(operation)>;
    const std::int64_t lane_axis_size = view.rows.sizes[view.rows.rank - 1];
    const bool is_aligned =
        columns_are_aligned(view, 0, in, kElementBytes) && columns_are_aligned(view, 1, out, kElementBytes);
    const int lane_rows = is_aligned ? Vector<T>::kSize : 1;
    const TransposedTiles tiles = tile_transposed(view.row_count / lane_axis_size, lane_axis_size, view.column_count,
                                                  32 * lane_rows, properties(device).multiprocessors, kMapColumnBlocks);
    const LaunchShape shape{
        .blocks = tiles.tiles * tiles.pieces, .threads = dim3(32, kMapColumnWarps), .stream = stream};
    return is_aligned ? launch(op, map_per_column<Operation, Vector<T>::kSize>, shape, operation, tiles)
                      : launch(op, map_per_column<Operation, 1>, shape, operation, tiles);
  }
  const auto operation = make(view);
  // Enough blocks to fill any GPU; each thread steps through the remaining elements.
  const std::int64_t blocks = std::min<std::int64_t>(ceil_divide(view.row_count * view.column_count, 256), 1 << 20);
  launch(op, map_per_element<std::remove_cvref_t<decltype(operation)>>,
         {.blocks = blocks, .threads = 256, .stream = stream}, operation);
}

}  // namespace eaves::cuda
