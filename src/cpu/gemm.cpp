// A product is cut into tiles of c, each computed by one thread from start to end, with no word from another. For a
// tile, some depth (indices of k) at a time, the factors are copied into panels that the innermost loop reads from end
// to end. A factor is copied once for each tile that needs it; tiles are large enough for that to cost little, and
// small enough that there are kTasks of them. Where c is too small for so many and k is long, parts of k are tasks of
// their own.
//
// An element of c is summed in one order whatever the cut: sums over kDepth words are added up one after the other to
// the sum of a part of k, those of the parts likewise. How k is cut into parts depends on k alone.
//
// A panel of a is kRows rows, one of b a pack of columns; for each word of the depth their words lie side by side. A
// word is an accumulator, 16-bit numbers having been widened, or a pair of bfloat16 for the instruction that takes two
// products at once (cpu/gemm_bfloat16_dot.h). Panels are filled up with zeros: what these make of infinities is in rows
// and columns that are not read.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/gemm.cpp"
#include <hwy/foreach_target.h>  // first: compiles this file once per level of vector instructions

#include <hwy/aligned_allocator.h>
#include <hwy/cache_control.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

#include "core/dispatch.h"
#include "core/numeric.h"
#include "cpu/gemm.h"
#include "cpu/gemm_bfloat16_dot.h"
#include "cpu/onednn.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

#ifndef EAVES_CPU_GEMM_ONCE
#define EAVES_CPU_GEMM_ONCE
namespace eaves::cpu {
namespace {

/// Words that are multiplied before the sum goes to memory. A panel of a is 6 KiB then and stays in the first cache;
/// one of b, 64 KiB with AVX-512, stays in the second.
constexpr std::int64_t kDepth = 256;

/// The most rows and columns of a tile. Its sums, 1 MiB of float32, and its panels of a, 512 KiB, stay in the second
/// or the last cache, and a word that is copied has 512 uses.
constexpr std::int64_t kTileRows = 512;
constexpr std::int64_t kTileColumns = 512;

/// The most columns where parts of k are tasks. Each tile goes through all of k rows of b, and through as many pages of
/// memory: the fewer of them side by side, the fewer times.
constexpr std::int64_t kColumnsOfLongSums = 2048;

/// The most columns where k is at most kShortSum. Then c is most of what moves, in pieces as wide as a tile.
constexpr std::int64_t kShortSum = 512;
constexpr std::int64_t kColumnsOfShortSums = 1024;

/// A tile is halved while there are fewer tasks than this, as long as it has more rows or columns than kLeastTile:
/// below that copies cost more than another thread brings.
constexpr std::int64_t kTasks = 32;
constexpr std::int64_t kLeastTile = 128;

/// k is cut into at most so many parts, of at least so many indices each.
constexpr std::int64_t kMostParts = 8;
constexpr std::int64_t kLeastPart = 4096;

/// The most memory for the sums of parts that are tasks of their own.
constexpr std::int64_t kMostPartialBytes = std::int64_t{72} << 20;

/// Panels of a that are filled at the same time, where their rows lie side by side: more would push each other out of
/// the first cache, their addresses being a power of two apart.
constexpr std::int64_t kPanelsAtATime = 16;

/// What a thread keeps from call to call.
enum class Scratch { a_panels, b_panels, sums, total, partials };
constexpr int kScratches = 5;

/// At least `count` elements, until the next call for the same one on this thread. They grow to what the largest tile
/// needs, the partial sums to kMostPartialBytes.
template <typename E>
E* scratch(Scratch which, std::int64_t count) {
  struct Buffer {
    hwy::AlignedFreeUniquePtr<std::byte[]> data;
    std::size_t size = 0;
  };
  thread_local Buffer buffers[kScratches];
  Buffer& buffer = buffers[static_cast<int>(which)];
  const std::size_t wanted = static_cast<std::size_t>(count) * sizeof(E);
  if (buffer.size < wanted) {
    buffer = {};
    buffer.data = hwy::AllocateAligned<std::byte>(wanted);
    if (buffer.data == nullptr) throw std::bad_alloc();
    buffer.size = wanted;
  }
  return reinterpret_cast<E*>(buffer.data.get());
}

/// Rows of a or columns of b ("lines"); element p of line i is at data[i * line_stride + p * depth_stride], and one of
/// the strides is 1.
template <typename T>
struct Lines {
  const T* data;
  std::int64_t line_stride;
  std::int64_t depth_stride;
  bool is_depth_contiguous;

  const T* at(std::int64_t line, std::int64_t p) const { return data + line * line_stride + p * depth_stride; }
};

template <typename T>
Lines<T> make_lines(const GemmMatrix& matrix, bool is_depth_contiguous) {
  const auto* data = static_cast<const T*>(matrix.data);
  if (is_depth_contiguous) return {data, matrix.stride, 1, true};
  return {data, 1, matrix.stride, false};
}

/// What becomes of the sums.
template <typename A>
struct Finish {
  A alpha;
  bool has_alpha;
  bool accumulates;
  const A* bias;  ///< nullptr: none

  bool is_plain() const { return !has_alpha && !accumulates && bias == nullptr; }
};

template <typename A>
Finish<A> make_finish(const Gemm& product) {
  // An infinite alpha must not make a NaN of a sum of nothing.
  const bool has_alpha = product.alpha != nullptr && product.k > 0;
  return {has_alpha ? *static_cast<const A*>(product.alpha) : A{1}, has_alpha, product.accumulates,
          static_cast<const A*>(product.bias)};
}

/// `count` cut into equal parts of at most `most`, each a multiple of `step`: the size of a part.
std::int64_t part_of(std::int64_t count, std::int64_t most, std::int64_t step) {
  const std::int64_t parts = ceil_divide(count, std::max(most, step));
  return ceil_divide(ceil_divide(count, parts), step) * step;
}

/// How a product becomes tasks.
struct Cut {
  std::int64_t rows, columns;  ///< of a tile
  std::int64_t row_tiles, column_tiles;
  std::int64_t part;  ///< indices of k
  std::int64_t parts;
  bool are_parts_tasks;

  std::int64_t tiles() const { return row_tiles * column_tiles; }
  std::int64_t elements() const { return rows * columns; }
  std::int64_t tasks() const { return tiles() * (are_parts_tasks ? parts : 1); }
};

std::int64_t most_columns(const Gemm& product, const Cut& cut) {
  if (cut.are_parts_tasks) return kColumnsOfLongSums;
  return product.k <= kShortSum ? kColumnsOfShortSums : kTileColumns;
}

void cut_tiles(const Gemm& product, std::int64_t row_step, std::int64_t column_step, Cut* cut) {
  const auto set = [&](std::int64_t rows, std::int64_t columns) {
    cut->rows = part_of(product.m, rows, row_step);
    cut->columns = part_of(product.n, columns, column_step);
    cut->row_tiles = ceil_divide(product.m, cut->rows);
    cut->column_tiles = ceil_divide(product.n, cut->columns);
  };
  set(kTileRows, most_columns(product, *cut));
  while (cut->tasks() < kTasks && std::max(cut->rows, cut->columns) > kLeastTile) {
    cut->rows > cut->columns ? set(cut->rows / 2, cut->columns) : set(cut->rows, cut->columns / 2);
  }
}

/// Multiples of `depth` are a part, of row_step and column_step the sizes of a tile.
Cut make_cut(const Gemm& product, std::int64_t depth, std::int64_t row_step, std::int64_t column_step,
             std::int64_t accumulator_bytes) {
  Cut cut{};
  const std::int64_t part = ceil_divide(ceil_divide(product.k, kMostParts), depth) * depth;
  cut.part = std::max(part, kLeastPart);
  cut.parts = std::max<std::int64_t>(1, ceil_divide(product.k, cut.part));
  cut.are_parts_tasks = cut.parts > 1;
  cut_tiles(product, row_step, column_step, &cut);
  if (!cut.are_parts_tasks || cut.tasks() * cut.elements() * accumulator_bytes <= kMostPartialBytes) return cut;
  cut.are_parts_tasks = false;
  cut_tiles(product, row_step, column_step, &cut);
  return cut;
}

}  // namespace
}  // namespace eaves::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {
namespace {

// As many sums as the registers hold, beside what they are multiplied from: 6 or 3 packs.
constexpr std::int64_t kRows = HWY_TARGET <= HWY_AVX3 ? 6 : 3;

/// kIsPaired: words are pairs of bfloat16.
template <typename T, bool kIsPaired>
using Word = std::conditional_t<kIsPaired, std::uint32_t, Accumulator<T>>;

// ------------------------------------------------------------------------------------------------------ into panels

/// `words` words of a line whose elements lie side by side; through `buffer` where they are not in memory as they are.
template <typename T, bool kIsPaired>
const Word<T, kIsPaired>* line_words(const T* from, std::int64_t elements, std::int64_t words,
                                     Word<T, kIsPaired>* buffer) {
  if constexpr (kIsPaired) {
    if (elements % 8 == 0 && reinterpret_cast<std::uintptr_t>(from) % sizeof(*buffer) == 0) {
      return reinterpret_cast<const std::uint32_t*>(from);  // only loaded as vectors
    }
    buffer[words - 1] = 0;  // an odd number of elements leaves half of it
    std::memcpy(buffer, from, static_cast<std::size_t>(elements) * sizeof(T));
    return buffer;
  } else if constexpr (sizeof(T) == 2) {
    widen(from, elements, buffer);
    return buffer;
  } else {
    return from;
  }
}

#if HWY_TARGET != HWY_SCALAR

/// The words w to w + 4 of every fourth line, a block of 16 bytes each.
template <class D, typename W>
HWY_INLINE hn::Vec<D> load_blocks(D d, const W* const* lines, std::int64_t w) {
  if constexpr (hn::MaxLanes(D()) <= 4) {
    return hn::LoadU(d, lines[0] + w);
  } else {
    const hn::Half<D> half;
    constexpr std::int64_t kLines = hn::MaxLanes(D()) / 2;
    return hn::Combine(d, load_blocks(half, lines + kLines, w), load_blocks(half, lines, w));
  }
}

/// to[w][0..lanes) = the words w of as many lines as a vector has lanes. Returns how many words it did: no rest.
template <class D, typename W>
std::int64_t interleave(D d, const W* const* lines, std::int64_t words, std::int64_t width, W* to) {
  const hn::Repartition<std::uint64_t, D> d64;
  const auto wide = [&](auto v) HWY_ATTR { return hn::BitCast(d64, v); };
  const auto store = [&](auto v, std::int64_t w) HWY_ATTR { hn::StoreU(hn::BitCast(d, v), d, to + w * width); };
  std::int64_t w = 0;
  for (; w + 4 <= words; w += 4) {
    const auto r0 = load_blocks(d, lines, w);
    const auto r1 = load_blocks(d, lines + 1, w);
    const auto r2 = load_blocks(d, lines + 2, w);
    const auto r3 = load_blocks(d, lines + 3, w);
    const auto low01 = wide(hn::InterleaveLower(d, r0, r1));
    const auto low23 = wide(hn::InterleaveLower(d, r2, r3));
    const auto high01 = wide(hn::InterleaveUpper(d, r0, r1));
    const auto high23 = wide(hn::InterleaveUpper(d, r2, r3));
    store(hn::InterleaveLower(d64, low01, low23), w);
    store(hn::InterleaveUpper(d64, low01, low23), w + 1);
    store(hn::InterleaveLower(d64, high01, high23), w + 2);
    store(hn::InterleaveUpper(d64, high01, high23), w + 3);
  }
  return w;
}

/// to[w][0..2) = the words w of two lines, as interleave() does.
template <typename W>
std::int64_t interleave_two(const W* const* lines, std::int64_t words, std::int64_t width, W* to) {
  const hn::FixedTag<W, 4> d;
  const hn::Half<decltype(d)> half;
  std::int64_t w = 0;
  for (; w + 4 <= words; w += 4) {
    const auto r0 = hn::LoadU(d, lines[0] + w);
    const auto r1 = hn::LoadU(d, lines[1] + w);
    const auto low = hn::InterleaveLower(d, r0, r1);
    const auto high = hn::InterleaveUpper(d, r0, r1);
    hn::StoreU(hn::LowerHalf(half, low), half, to + w * width);
    hn::StoreU(hn::UpperHalf(half, low), half, to + (w + 1) * width);
    hn::StoreU(hn::LowerHalf(half, high), half, to + (w + 2) * width);
    hn::StoreU(hn::UpperHalf(half, high), half, to + (w + 3) * width);
  }
  return w;
}

#endif

/// The lines that interleave() takes: whole lines of a cache are written then.
#if HWY_HAVE_SCALABLE || HWY_TARGET == HWY_SCALAR
constexpr std::int64_t kMostTurned = 4;
#else
constexpr std::int64_t kMostTurned = HWY_LANES(std::uint32_t);
#endif

/// to[w][0..count) = the words w of `count` lines, kMostTurned at most.
template <typename W>
void turn(const W* const* lines, std::int64_t count, std::int64_t words, std::int64_t width, W* to) {
  std::int64_t done = 0;
#if HWY_TARGET != HWY_SCALAR
  if constexpr (sizeof(W) == 4) {
    if (count == kMostTurned) done = interleave(hn::FixedTag<W, kMostTurned>(), lines, words, width, to);
    if (count == 4 && done == 0) done = interleave(hn::FixedTag<W, 4>(), lines, words, width, to);
    if (count == 2) done = interleave_two(lines, words, width, to);
  }
#endif
  for (std::int64_t w = done; w < words; ++w) {
    for (std::int64_t line = 0; line < count; ++line) to[w * width + line] = lines[line][w];
  }
}

/// Of `left` lines, how many are turned next.
constexpr std::int64_t turned_of(std::int64_t left) {
  return left >= kMostTurned ? kMostTurned : std::min<std::int64_t>(4, left);
}

/// Lines whose depth lies side by side, turned.
template <typename T, bool kIsPaired>
void pack_across(const Lines<T>& lines, std::int64_t first, std::int64_t count, std::int64_t p, std::int64_t elements,
                 std::int64_t width, Word<T, kIsPaired>* to) {
  using W = Word<T, kIsPaired>;
  const std::int64_t words = kIsPaired ? ceil_divide(elements, 2) : elements;
  HWY_ALIGN W buffers[kMostTurned][kDepth + kMaxPackSize<T>];
  for (std::int64_t line = 0; line < width;) {
    const std::int64_t here = turned_of(width - line);
    const W* from[kMostTurned];
    for (std::int64_t i = 0; i < here; ++i) {
      if (line + i < count) {
        from[i] = line_words<T, kIsPaired>(lines.at(first + line + i, p), elements, words, buffers[i]);
      } else {
        std::fill_n(buffers[i], words, W{});
        from[i] = buffers[i];
      }
    }
    turn(from, here, words, width, to + line);
    line += here;
  }
}

/// to[i] = the word of from[i], and of next[i] where words are pairs (nullptr: 0), for i < count. Writes whole packs.
template <typename T, bool kIsPaired>
void make_words(const T* from, const T* next, std::int64_t count, Word<T, kIsPaired>* to) {
  if constexpr (!kIsPaired) {
    widen(from, count, to);
  } else {
    std::int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
    const hn::ScalableTag<std::uint16_t> d;
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
    for (; i + lanes <= count; i += lanes) {
      const auto high = next != nullptr ? hn::LoadU(d, &next[i].bits) : hn::Zero(d);
      hn::StoreInterleaved2(hn::LoadU(d, &from[i].bits), high, d, reinterpret_cast<std::uint16_t*>(to + i));
    }
#endif
    for (; i < count; ++i) to[i] = from[i].bits | (next != nullptr ? next[i].bits : 0u) << 16;
  }
}

template <typename E>
void prefetch(const E* from, std::int64_t count) {
  constexpr std::int64_t kLine = 64 / sizeof(E);
  for (std::int64_t i = 0; i < count; i += kLine) hwy::Prefetch(from + i);
}

/// Rows of memory that are asked for before they are copied.
constexpr std::int64_t kRowsAhead = 16;

/// Lines that lie side by side at each depth, some panels of kRows at a time.
template <typename T, bool kIsPaired>
void pack_narrow(const Lines<T>& lines, std::int64_t first, std::int64_t count, std::int64_t p, std::int64_t elements,
                 Word<T, kIsPaired>* to) {
  using W = Word<T, kIsPaired>;
  constexpr std::int64_t kPerWord = kIsPaired ? 2 : 1;
  const std::int64_t words = ceil_divide(elements, kPerWord);
  HWY_ALIGN W row[kPanelsAtATime * kRows + 2 * kMaxPackSize<T>] = {};  // zeros behind the last line
  for (std::int64_t w = 0; w < words; ++w) {
    const std::int64_t i = p + w * kPerWord;
    const T* next = kIsPaired && i + 1 < p + elements ? lines.at(first, i + 1) : nullptr;
    make_words<T, kIsPaired>(lines.at(first, i), next, count, row);
    for (std::int64_t line = 0; line < count; line += kRows) {
      // A length that the compiler knows makes this a few instructions.
      std::memcpy(to + line * words + w * kRows, row + line, static_cast<std::size_t>(kRows) * sizeof(W));
    }
  }
}

/// Lines that lie side by side at each depth, into panels of a pack. Memory is read along its rows: the panels of one
/// row after the other would read pieces a power of two apart, which push each other out of every cache.
template <typename T, bool kIsPaired>
void pack_wide(const Lines<T>& lines, std::int64_t first, std::int64_t count, std::int64_t p, std::int64_t elements,
               Word<T, kIsPaired>* to) {
  using W = Word<T, kIsPaired>;
  constexpr std::int64_t kPerWord = kIsPaired ? 2 : 1;
  const auto width = static_cast<std::int64_t>(pack_size<T>());
  const std::int64_t words = ceil_divide(elements, kPerWord);
  HWY_ALIGN W row[2 * kMaxPackSize<T>] = {};  // zeros behind the last line
  for (std::int64_t w = 0; w < words; ++w) {
    const std::int64_t i = p + w * kPerWord;
    const T* next = kIsPaired && i + 1 < p + elements ? lines.at(first, i + 1) : nullptr;
    for (std::int64_t ahead = i + kRowsAhead; ahead < std::min(i + kRowsAhead + kPerWord, p + elements); ++ahead) {
      prefetch(lines.at(first, ahead), count);
    }
    for (std::int64_t line = 0; line < count; line += width) {
      W* at = to + line * words + w * width;
      const std::int64_t here = std::min(width, count - line);
      make_words<T, kIsPaired>(lines.at(first + line, i), next != nullptr ? next + line : nullptr, here,
                               here == width ? at : row);
      if (here < width) std::memcpy(at, row, static_cast<std::size_t>(width) * sizeof(W));
    }
  }
}

/// A share of lines whose depth lies side by side, on its way to the caches: piece `piece` of `pieces`.
template <typename T>
void prefetch_lines(const Lines<T>& lines, std::int64_t first, std::int64_t count, std::int64_t p,
                    std::int64_t elements, std::int64_t piece, std::int64_t pieces) {
  for (std::int64_t i = piece * count / pieces; i < (piece + 1) * count / pieces; ++i) {
    prefetch(lines.at(first + i, p), elements);
  }
}

/// `count` lines, into panels of `width` one after the other.
template <typename T, bool kIsPaired>
void pack_panels_across(const Lines<T>& lines, std::int64_t first, std::int64_t count, std::int64_t p,
                        std::int64_t elements, std::int64_t width, Word<T, kIsPaired>* to) {
  const std::int64_t words = kIsPaired ? ceil_divide(elements, 2) : elements;
  for (std::int64_t line = 0; line < count; line += width) {
    const std::int64_t next = line + width;
    prefetch_lines(lines, first + next, std::min(width, count - next), p, elements, 0, 1);
    pack_across<T, kIsPaired>(lines, first + line, std::min(width, count - line), p, elements, width,
                              to + line * words);
  }
}

template <typename T, bool kIsPaired>
void pack_a(const Lines<T>& lines, std::int64_t first, std::int64_t count, std::int64_t p, std::int64_t elements,
            Word<T, kIsPaired>* to) {
  if (lines.is_depth_contiguous) {
    return pack_panels_across<T, kIsPaired>(lines, first, count, p, elements, kRows, to);
  }
  constexpr std::int64_t kStep = kPanelsAtATime * kRows;
  const std::int64_t words = kIsPaired ? ceil_divide(elements, 2) : elements;
  for (std::int64_t line = 0; line < count; line += kStep) {
    pack_narrow<T, kIsPaired>(lines, first + line, std::min(kStep, count - line), p, elements, to + line * words);
  }
}

template <typename T, bool kIsPaired>
void pack_b(const Lines<T>& lines, std::int64_t first, std::int64_t count, std::int64_t p, std::int64_t elements,
            Word<T, kIsPaired>* to) {
  if (!lines.is_depth_contiguous) return pack_wide<T, kIsPaired>(lines, first, count, p, elements, to);
  const auto width = static_cast<std::int64_t>(pack_size<T>());
  pack_panels_across<T, kIsPaired>(lines, first, count, p, elements, width, to);
}

// ------------------------------------------------------------------------------------------------------ the product

/// sums = a * b, or +=, of two panels; `stride` is that between rows of sums.
template <typename A>
void multiply_panels(const A* a, const A* b, std::int64_t words, A* to, std::int64_t stride, bool is_first) {
  const Tag<A> d;
  const std::size_t n = hn::Lanes(d);
  Pack<A> sums[kRows];
  for (auto& sum : sums) sum = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  for (std::int64_t word = 0; word < words; ++word, a += kRows, b += 4 * n) {
    const Pack<A> columns = {hn::Load(d, b), hn::Load(d, b + n), hn::Load(d, b + 2 * n), hn::Load(d, b + 3 * n)};
    for (std::int64_t row = 0; row < kRows; ++row) {
      const auto factor = hn::Set(d, a[row]);
      sums[row] = {hn::MulAdd(factor, columns.v0, sums[row].v0), hn::MulAdd(factor, columns.v1, sums[row].v1),
                   hn::MulAdd(factor, columns.v2, sums[row].v2), hn::MulAdd(factor, columns.v3, sums[row].v3)};
    }
  }
  for (const auto& sum : sums) {
    const auto store = [&](VectorOf<A> value, A* at)
                           HWY_ATTR { hn::Store(is_first ? value : hn::Add(hn::Load(d, at), value), d, at); };
    store(sum.v0, to);
    store(sum.v1, to + n);
    store(sum.v2, to + 2 * n);
    store(sum.v3, to + 3 * n);
    to += stride;
  }
}

/// to[i] += from[i]; `count` is a multiple of a pack, as the size of a tile is.
template <typename A>
void add_sums(const A* from, std::int64_t count, A* to) {
  const Tag<A> d;
  const auto n = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t i = 0; i < count; i += n) hn::Store(hn::Add(hn::Load(d, to + i), hn::Load(d, from + i)), d, to + i);
}

/// The first `count` of a pack of accumulators, the rest of it 0, in the order of load_in_order().
template <typename C, typename A>
Pack<C> load_some_in_order(const A* from, std::int64_t count) {
  if (count >= static_cast<std::int64_t>(pack_size<A>())) return load_in_order<C>(from);
  HWY_ALIGN A padded[kMaxPackSize<A>] = {};
  std::memcpy(padded, from, static_cast<std::size_t>(count) * sizeof(A));
  return load_in_order<C>(padded);
}

/// The sums of `rows` rows and a pack of columns or the first `columns` of it, to c. `bias` is that of the columns.
template <typename C, typename A>
void finish_panel(const A* sums, std::int64_t stride, std::int64_t rows, std::int64_t columns, const Finish<A>& finish,
                  const A* bias, C* c, std::int64_t c_stride) {
  const Tag<A> d;
  const auto alpha = hn::Set(d, finish.alpha);
  for (std::int64_t row = 0; row < rows; ++row, sums += stride, c += c_stride) {
    Pack<C> sum = load_in_order<C>(sums);
    if (finish.accumulates || bias != nullptr) {
      const Pack<C> to = finish.accumulates ? load_some(c, columns, C{}) : load_some_in_order<C>(bias, columns);
      sum = {hn::MulAdd(alpha, sum.v0, to.v0), hn::MulAdd(alpha, sum.v1, to.v1), hn::MulAdd(alpha, sum.v2, to.v2),
             hn::MulAdd(alpha, sum.v3, to.v3)};
    } else if (finish.has_alpha) {
      sum = {hn::Mul(alpha, sum.v0), hn::Mul(alpha, sum.v1), hn::Mul(alpha, sum.v2), hn::Mul(alpha, sum.v3)};
    }
    store_some(sum, c, columns);
  }
}

/// One product, and how it is cut. Sums of a tile lie row by row, as many to a row as the cut has columns.
template <typename T, typename C, bool kIsPaired>
class Product {
  using A = Accumulator<T>;
  using W = Word<T, kIsPaired>;

 public:
  Product(const Gemm& product, const ExecutionContext& context, GemmEngine engine)
      : product_(product),
        context_(context),
        a_(make_lines<T>(product.a, !product.a.is_transposed)),
        b_(make_lines<T>(product.b, product.b.is_transposed)),
        panel_columns_(static_cast<std::int64_t>(pack_size<T>())),
        finish_(make_finish<A>(product)),
        uses_onednn_(engine == GemmEngine::onednn && product.k > 0 && has_onednn_gemm(product.dtype)),
        cut_(make_cut(product, kDepth * kPerWord, kRows, panel_columns_, sizeof(A))) {}

  void run() const {
    if (cut_.are_parts_tasks) return run_parts();
    const std::int64_t cost = cut_.elements() * std::max<std::int64_t>(1, product_.k);
    for_each(cut_.tiles(), cost, [&](std::int64_t index) { multiply_tile(tile_at(index)); });
  }

 private:
  static constexpr std::int64_t kPerWord = kIsPaired ? 2 : 1;

  struct Tile {
    std::int64_t row, column, rows, columns;
  };

  Tile tile_at(std::int64_t index) const {
    const std::int64_t row = index % cut_.row_tiles * cut_.rows;
    const std::int64_t column = index / cut_.row_tiles * cut_.columns;
    return {row, column, std::min(cut_.rows, product_.m - row), std::min(cut_.columns, product_.n - column)};
  }

  C* c_at(std::int64_t row, std::int64_t column) const {
    return static_cast<C*>(product_.c) + row * product_.c_stride + column;
  }

  /// Each index costs about `products` multiplications.
  template <typename Body>
  void for_each(std::int64_t count, std::int64_t products, Body&& body) const {
    constexpr std::int64_t kProductsPerExponential = 16;
    parallel_for(context_, count, grain_for(products / kProductsPerExponential),
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t index = begin; index < end; ++index) body(index);
                 });
  }

  // ------------------------------------------------------------------------------------------------ tiles and parts

  /// The parts of all tiles, and when they are there their sums.
  void run_parts() const {
    A* partials = scratch<A>(Scratch::partials, cut_.tasks() * cut_.elements());
    const auto sums_of = [&](std::int64_t tile, std::int64_t part) {
      return partials + (tile * cut_.parts + part) * cut_.elements();
    };
    for_each(cut_.tasks(), cut_.elements() * cut_.part, [&](std::int64_t task) {
      // Tiles of one part after each other: they share what they read.
      const std::int64_t tile = task % cut_.tiles();
      const std::int64_t part = task / cut_.tiles();
      multiply_part(tile_at(tile), part, sums_of(tile, part));
    });
    for_each(cut_.tiles(), cut_.elements() * cut_.parts, [&](std::int64_t tile) {
      A* total = sums_of(tile, 0);
      for (std::int64_t part = 1; part < cut_.parts; ++part) add_sums(sums_of(tile, part), cut_.elements(), total);
      finish_tile(tile_at(tile), total);
    });
  }

  void multiply_tile(const Tile& tile) const {
    if (cut_.parts == 1 && (writes_c_directly(tile) || multiply_and_finish(tile))) return;
    A* total = scratch<A>(Scratch::total, cut_.elements());
    multiply_part(tile, 0, total);
    for (std::int64_t part = 1; part < cut_.parts; ++part) {
      A* sums = scratch<A>(Scratch::sums, cut_.elements());
      multiply_part(tile, part, sums);
      add_sums(sums, cut_.elements(), total);
    }
    finish_tile(tile, total);
  }

  /// By oneDNN, where its sums are the result.
  bool writes_c_directly(const Tile& tile) const {
    if constexpr (std::is_same_v<C, float>) {
      if (!uses_onednn_ || !finish_.is_plain()) return false;
      return multiply_by_onednn(tile, 0, product_.k, c_at(tile.row, tile.column), product_.c_stride);
    }
    return false;
  }

  /// By our own loops, each panel finished while its sums are in the first cache.
  bool multiply_and_finish(const Tile& tile) const {
    if (uses_onednn_) return false;
    const bool is_one_depth = product_.k <= kDepth * kPerWord;
    multiply_by_loops(tile, 0, product_.k, is_one_depth ? nullptr : scratch<A>(Scratch::sums, cut_.elements()), true);
    return true;
  }

  void multiply_part(const Tile& tile, std::int64_t part, A* sums) const {
    const std::int64_t begin = part * cut_.part;
    const std::int64_t end = std::min(product_.k, begin + cut_.part);
    if (uses_onednn_ && multiply_by_onednn(tile, begin, end, sums, cut_.columns)) return;
    multiply_by_loops(tile, begin, end, sums, false);
  }

  bool multiply_by_onednn(const Tile& tile, std::int64_t begin, std::int64_t end, A* to, std::int64_t stride) const {
    if constexpr (std::is_same_v<A, float>) {
      const GemmMatrix a{a_.at(tile.row, begin), product_.a.stride, product_.a.is_transposed};
      const GemmMatrix b{b_.at(tile.column, begin), product_.b.stride, product_.b.is_transposed};
      return onednn_gemm(product_.dtype, tile.rows, tile.columns, end - begin, a, b, to, stride);
    }
    return false;
  }

  void finish_tile(const Tile& tile, const A* sums) const {
    for (std::int64_t column = 0; column < tile.columns; column += panel_columns_) {
      finish(tile, 0, tile.rows, column, sums + column, cut_.columns);
    }
  }

  /// Rows [row, row + rows) of the panel at `column` of a tile, to c.
  void finish(const Tile& tile, std::int64_t row, std::int64_t rows, std::int64_t column, const A* sums,
              std::int64_t stride) const {
    const A* bias = finish_.bias != nullptr ? finish_.bias + tile.column + column : nullptr;
    finish_panel(sums, stride, rows, std::min(panel_columns_, tile.columns - column), finish_, bias,
                 c_at(tile.row + row, tile.column + column), product_.c_stride);
  }

  // ------------------------------------------------------------------------------------------------- our own loops

  /// Some depth of a tile, copied: all panels of a, and one of b or all.
  struct Panels {
    W* a;
    W* b;
    std::int64_t p;
    std::int64_t elements;
    std::int64_t words;
    bool is_first;
    bool is_last;
  };

  /// To `sums`, and where `finishes` on to c. Without `sums` there must be one depth alone, and it finishes.
  void multiply_by_loops(const Tile& tile, std::int64_t begin, std::int64_t end, A* sums, bool finishes) const {
    const std::int64_t depth = std::clamp<std::int64_t>(end - begin, 1, kDepth * kPerWord);
    const std::int64_t most_words = ceil_divide(depth, kPerWord);
    W* a = scratch<W>(Scratch::a_panels, cut_.rows * most_words);
    W* b = scratch<W>(Scratch::b_panels, (has_all_panels(sums) ? cut_.columns : panel_columns_) * most_words);
    // A sum over nothing is one as well.
    for (std::int64_t p = begin; p == begin || p < end; p += depth) {
      const std::int64_t elements = std::min(depth, end - p);
      const std::int64_t words = ceil_divide(elements, kPerWord);
      const Panels panels{a, b, p, elements, words, p == begin, finishes && p + depth >= end};
      pack_a<T, kIsPaired>(a_, tile.row, tile.rows, p, elements, a);
      if (has_all_panels(sums)) pack_b<T, kIsPaired>(b_, tile.column, tile.columns, p, elements, b);
      sums == nullptr ? multiply_row_by_row(tile, panels) : multiply_panel_by_panel(tile, panels, sums);
    }
  }

  /// Where a product is little beside its result: c is gone through along its rows.
  void multiply_row_by_row(const Tile& tile, const Panels& panels) const {
    HWY_ALIGN A local[kRows * kMaxPackSize<T>];
    for (std::int64_t row = 0; row < tile.rows; row += kRows) {
      for (std::int64_t column = 0; column < tile.columns; column += panel_columns_) {
        multiply_block(tile, row, column, panels, panels.b + column * panels.words, local, panel_columns_);
      }
    }
  }

  /// Are all panels of b copied before the first has a use?
  bool has_all_panels(const A* sums) const { return sums == nullptr || !b_.is_depth_contiguous; }

  /// Each panel of b has one use after the other, while the next one is on its way.
  void multiply_panel_by_panel(const Tile& tile, const Panels& panels, A* sums) const {
    const std::int64_t pieces = ceil_divide(tile.rows, kRows);
    for (std::int64_t column = 0; column < tile.columns; column += panel_columns_) {
      const bool is_copied = has_all_panels(sums);
      W* b = panels.b + (is_copied ? column * panels.words : 0);
      if (!is_copied) {
        pack_b<T, kIsPaired>(b_, tile.column + column, std::min(panel_columns_, tile.columns - column), panels.p,
                             panels.elements, b);
      }
      for (std::int64_t row = 0; row < tile.rows; row += kRows) {
        if (!is_copied) prefetch_panel(tile, column + panel_columns_, panels, row / kRows, pieces);
        multiply_block(tile, row, column, panels, b, sums + row * cut_.columns + column, cut_.columns);
      }
    }
  }

  /// kRows rows with a panel of b.
  void multiply_block(const Tile& tile, std::int64_t row, std::int64_t column, const Panels& panels, const W* b, A* to,
                      std::int64_t stride) const {
    const std::int64_t rows = std::min(kRows, tile.rows - row);
    prefetch_results(tile, row, rows, column, panels, to);
    const W* a = panels.a + row * panels.words;
    if constexpr (kIsPaired) {
      bfloat16_dot(a, b, panels.words, to, stride, panels.is_first);
    } else {
      multiply_panels(a, b, panels.words, to, stride, panels.is_first);
    }
    if (panels.is_last) finish(tile, row, rows, column, to, stride);
  }

  /// Asked for before a product, there when it is.
  void prefetch_results(const Tile& tile, std::int64_t row, std::int64_t rows, std::int64_t column,
                        const Panels& panels, const A* sums) const {
    for (std::int64_t i = 0; !panels.is_first && i < kRows; ++i) prefetch(sums + i * cut_.columns, panel_columns_);
    if (!panels.is_last) return;
    const std::int64_t columns = std::min(panel_columns_, tile.columns - column);
    for (std::int64_t i = 0; i < rows; ++i) prefetch(c_at(tile.row + row + i, tile.column + column), columns);
  }

  /// A piece of the panel of b that is copied next, so that memory is read while the product is computed.
  void prefetch_panel(const Tile& tile, std::int64_t column, const Panels& panels, std::int64_t piece,
                      std::int64_t pieces) const {
    const std::int64_t columns = std::min(panel_columns_, tile.columns - column);
    if (columns <= 0) return;
    prefetch_lines(b_, tile.column + column, columns, panels.p, panels.elements, piece, pieces);
  }

  const Gemm& product_;
  const ExecutionContext& context_;
  Lines<T> a_;
  Lines<T> b_;
  std::int64_t panel_columns_;
  Finish<A> finish_;
  bool uses_onednn_;
  Cut cut_;
};

template <typename T, bool kIsPaired>
void run_with_c(const Gemm& product, const ExecutionContext& context, GemmEngine engine) {
  if (product.c_dtype == product.dtype) {
    Product<T, T, kIsPaired>(product, context, engine).run();
  } else {
    Product<T, Accumulator<T>, kIsPaired>(product, context, engine).run();
  }
}

}  // namespace

void run_gemm(const Gemm& product, const ExecutionContext& context, GemmEngine engine) {
  dispatch_floating_point(product.dtype, [&]<typename T>() {
    if constexpr (std::is_same_v<T, bfloat16> && kRows == kDotRows) {
      if (pack_size<T>() == kDotColumns && has_bfloat16_dot()) return run_with_c<T, true>(product, context, engine);
    }
    run_with_c<T, false>(product, context, engine);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eaves::cpu {
namespace {
HWY_EXPORT(run_gemm);
}  // namespace

void gemm(const Gemm& product, const ExecutionContext& context, GemmEngine engine) {
  HWY_DYNAMIC_DISPATCH(run_gemm)(product, context, engine);
}

}  // namespace eaves::cpu
#endif  // HWY_ONCE
