// The sizes that tests run over, each with its reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "eaves/tensor.h"
#include "testing/tensor.h"

namespace eaves::testing {

/// Every combination of one element of each list; the last list changes fastest.
template <typename... T>
std::vector<std::tuple<T...>> combine(const std::vector<T>&... lists) {
  const std::size_t count = (std::size_t{1} * ... * lists.size());
  std::vector<std::tuple<T...>> all;
  for (std::size_t i = 0; i < count; ++i) {
    std::size_t rest = count;
    const auto element_of = [&](const auto& list) {
      rest /= list.size();
      return list[i / rest % list.size()];
    };
    all.push_back(std::tuple<T...>{element_of(lists)...});  // braces: from left to right
  }
  return all;
}

struct RowLength {
  std::int64_t columns;
  const char* reason;
};

inline const std::vector<RowLength>& row_lengths() {
  static const std::vector<RowLength> lengths = {
      {1, "one element: lse is x"},
      {2, "one 16-byte vector of float64"},
      {3, "shorter than any vector but that"},
      {7, "one short of a vector of 16-bit elements"},
      {8, "one vector of 16-bit elements"},
      {9, "one more"},
      {15, "one short of a CPU vector of float32 (AVX-512), and of 32 bytes of 16-bit elements"},
      {17, "one more than that"},
      {63, "one short of 128 bytes of 16-bit elements, where 2 lanes a row become 4"},
      {65, "one more"},
      {100, "no multiple of anything"},
      {128, "256 bytes of 16-bit elements, where 4 lanes a row become 8"},
      {129, "one more"},
      {255, "one short of 512 bytes of 16-bit elements, where 8 lanes a row become 32"},
      {257, "one more"},
      {1000, "several rounds of a CPU vector, with a tail"},
      {2047, "one short of 4 KiB of 16-bit elements, where lanes become a block of 128 threads"},
      {2049, "one more"},
      {4095, "one short of 8 KiB, where a thread loads 8 vectors at once instead of 4"},
      {4097, "one more"},
      {8191, "one short of 16 KiB, where a block has 256 threads"},
      {8193, "one more"},
      {16385, "one more than one batch of such a block"},
      {32771, "a prime beyond two batches"},
      {50257, "the vocabulary of GPT-2: odd"},
  };
  return lengths;
}

struct RowCount {
  std::int64_t rows;
  std::int64_t columns;
  const char* reason;
};

/// Few rows, long enough to be shared by blocks of a GPU and threads of a CPU.
inline const std::vector<RowCount>& few_long_rows() {
  static const std::vector<RowCount> cases = {
      {1, 1 << 20, "one row: pieces that meet in the workspace"},
      {1, (1 << 22) + 13, "more than 64 pieces: the wider merging kernel; a last piece much shorter than the others"},
      {3, 300007, "rows that start at different places between 16-byte boundaries"},
      {33, 262144, "one row more than the merging kernel has lanes"},
      {70, 65537, "a cluster of 8 blocks a row"},
      {150, 24576, "a cluster of 2, 4 or 8, by the bytes of an element"},
      {200, 20011, "a cluster whose last piece is short"},
      {280, 8199, "so many that a GPU cuts none"},
      {280, 32777, "the same with rows of more than 64 KiB"},
  };
  return cases;
}

/// The dtypes that operators compute on.
inline const std::vector<DType>& floating_point_dtypes() {
  static const std::vector<DType> dtypes = {DType::bfloat16, DType::float16, DType::float32, DType::float64};
  return dtypes;
}

/// The dtypes of indices, and other dtypes that no operator computes on.
inline const std::vector<DType>& integer_dtypes() {
  static const std::vector<DType> dtypes = {DType::int8,  DType::int16, DType::int32,
                                            DType::int64, DType::uint8, DType::boolean};
  return dtypes;
}

/// The layout of a tensor [batch, heads, positions, features] in memory.
struct HeadLayout {
  const char* reason;
  Placement (*of)(const Dims& shape);
};

inline const std::vector<HeadLayout>& head_layouts() {
  static const std::vector<HeadLayout> layouts = {
      {"contiguous", [](const Dims&) { return Placement{}; }},
      {"[batch, positions, heads, features] in memory",
       [](const Dims& s) {
         return with_strides({s[1] * s[2] * s[3], s[3], s[1] * s[3], 1});
       }},
      {"one element off every boundary", [](const Dims&) { return contiguous_at(1); }},
      {"a third of [batch, positions, 3, heads, features], a fused projection",
       [](const Dims& s) {
         return with_strides({3 * s[1] * s[2] * s[3], s[3], 3 * s[1] * s[3], 1}, s[1] * s[3]);
       }},
      {"rows with a gap of one, each aligned differently",
       [](const Dims& s) {
         return with_strides({s[1] * s[2] * (s[3] + 1), s[2] * (s[3] + 1), s[3] + 1, 1});
       }},
      {"every second feature",
       [](const Dims& s) {
         return with_strides({2 * s[1] * s[2] * s[3], 2 * s[2] * s[3], 2 * s[3], 2});
       }},
      {"features in reverse order",
       [](const Dims& s) {
         return with_strides({s[1] * s[2] * s[3], s[2] * s[3], s[3], -1});
       }},
      {"positions and heads in reverse order",
       [](const Dims& s) {
         return with_strides({s[1] * s[2] * s[3], -s[2] * s[3], -s[3], 1});
       }},
      {"positions innermost",
       [](const Dims& s) {
         return with_strides({s[1] * s[2] * s[3], s[2] * s[3], 1, s[2]});
       }},
  };
  return layouts;
}

}  // namespace eaves::testing
