// The sums that the product of the fused path (fused.h) writes for each row and tile, and the logits that are computed
// again because a sum left its range.
#pragma once

#include <cmath>

#include "cuda/math.cuh"
#include "ops/linear_cross_entropy/fused/rows.cuh"
#include "ops/linear_cross_entropy/linear_cross_entropy_policy.h"

namespace eaves::cuda {

// A cluster computes the logits of a row again: each of its blocks takes a part of every tile.
inline constexpr int kRepeatBlocks = 8;
inline constexpr int kRepeatThreads = 256;
inline constexpr int kClasses = static_cast<int>(kExpProductClasses);

struct SumsOfTiles {
  const float* shifts;  ///< nullptr: one shift per row
  const float* sums;
  const float* moments;
  std::int64_t tiles;
  std::int64_t rows;  ///< rounded up to whole tiles

  explicit SumsOfTiles(const FusedRows& of)
      : shifts(of.memory.tile_shifts),
        sums(of.memory.sums),
        moments(of.memory.moments),
        tiles(ceil_divide(of.classes, kExpProductClasses)),
        rows(ceil_divide(of.rows, kExpProductRows) * kExpProductRows) {}

  __device__ float shift(std::int64_t tile, std::int64_t row) const { return shifts[tile * rows + row]; }
  __device__ float sum(std::int64_t tile, std::int64_t row) const { return sums[tile * rows + row]; }
  __device__ float moment(std::int64_t tile, std::int64_t row) const { return moments[tile * rows + row]; }
  /// A larger sum may have a moment beyond float32's range. A NaN is not lost: computed again, it would be NaN again.
  __device__ bool is_lost(std::int64_t tile, std::int64_t row) const { return sum(tile, row) > 0x1p120f; }
};

/// Sums over the tiles of a row, in float64, because several tiles may be near the end of float32's range.
struct Sums {
  double sum = 0.0;
  double moment = 0.0;

  /// True if the guess was too high (or no logit is finite), or too low; and if the exponents are far from the guess,
  /// so that they have lost digits, and lse is next to 0, so that these digits count.
  __device__ bool have_to_be_repeated(float shift) const {
    if (sum == 0.0 || sum == infinity<double>() || fabs(moment) == infinity<double>()) return true;
    constexpr float kFar = 20.0f;
    constexpr float kNextToZero = 4.0f;
    const auto exponent = static_cast<float>(log2(sum));
    return fabsf(exponent) > kFar && fabsf(exponent + shift) < kNextToZero;
  }
};

/// If the guess was far off, the anchor moves next to the row's lse: a sum that is so far from 1 could not be merged.
__device__ inline ClassStatistics<float> statistics_of_sums(const Sums& sums, float shift,
                                                            const FastTransform& transform) {
  constexpr double kFar = 0x1p24;
  const bool is_far = (sums.sum > kFar && sums.sum < infinity<double>()) || (sums.sum > 0.0 && sums.sum < 1.0 / kFar);
  const int exponent = is_far ? ilogb(sums.sum) : 0;
  const auto sum = static_cast<float>(scalbn(sums.sum, -exponent));
  const auto moment = static_cast<float>(scalbn(sums.moment, -exponent));
  const double exact = double(shift) / transform.stretch + exponent;
  const auto anchor = static_cast<float>(exact / kLog2EExact);
  const auto rest = static_cast<float>(exact - double(anchor) * kLog2EExact);
  const float correction = exp2_approximate(rest);
  ClassStatistics<float> state;
  state.softmax = {anchor, sum * correction};
  // z' - anchor = (t - exponent + rest) / log2(e)
  state.moment = kUnit<float> * correction * fmaf(rest - static_cast<float>(exponent), sum, moment);
  return state;
}

/// Called by one thread. Returns the target.
__device__ inline TargetClass<float> store_row_statistics(const GradientOfRows& rows, std::int64_t row,
                                                          const ClassStatistics<float>& state, float* statistics) {
  const int column = rows.targets.column(row);
  TargetClass<float> target;
  if (column >= 0) {
    target.logit = rows.transform.value(rows.memory.target_logit[row]);
    target.weight = rows.class_weight == nullptr ? 1.0f : rows.class_weight[column];
  }
  store_statistics(state, target, rows.terms, statistics + row * kCrossEntropyStatistics);
  return target;
}

/// hidden and the head, for logits that are computed again.
template <typename T>
struct LogitFactors {
  const T* hidden;
  std::int64_t hidden_stride;
  const T* head;
  std::int64_t head_stride;
  const float* bias;
  std::int64_t features;

  explicit LogitFactors(const FusedRows& rows)
      : hidden(static_cast<const T*>(rows.hidden.data)),
        hidden_stride(rows.hidden.stride),
        head(static_cast<const T*>(rows.head.data)),
        head_stride(rows.head.stride),
        bias(rows.bias),
        features(rows.features) {}

  /// Calls function(column, z), in lane 0 of a warp, for each logit of a row with a class in [first, end) that belongs
  /// to the calling block of the cluster.
  template <typename Function>
  __device__ void for_each_logit(std::int64_t row, std::int64_t first, std::int64_t end, int block,
                                 Function function) const {
    constexpr int kAtOnce = 3;  // loads in flight
    constexpr int kClassesOfBlock = kClasses / kRepeatBlocks;
    static_assert(kClassesOfBlock == kRepeatThreads / 32 * kAtOnce);
    const std::int64_t column = first + block * kClassesOfBlock + threadIdx.x / 32 * kAtOnce;
    if (column >= end) return;
    const T* weights[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) weights[i] = head + min(column + i, end - 1) * head_stride;
    float logits[kAtOnce];
    multiply(hidden + row * hidden_stride, weights, features, logits);
    if (threadIdx.x % 32 != 0) return;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (column + i < end) function(column + i, logits[i] + (bias == nullptr ? 0.0f : bias[column + i]));
    }
  }
};

/// The lost tiles of a row, as bits in the shared memory of a block.
struct LostTiles {
  static constexpr int kWords = static_cast<int>(ceil_divide(kMostFusedClasses, kExpProductClasses * 32));
  unsigned words[kWords];

  __device__ void clear() {
    for (int i = static_cast<int>(threadIdx.x); i < kWords; i += kRepeatThreads) words[i] = 0;
  }
  __device__ void add(std::int64_t tile) { atomicOr(&words[tile / 32], 1u << tile % 32); }
  __device__ bool has_class(std::int64_t column) const {
    const std::int64_t tile = column / kClasses;
    return (words[tile / 32] >> tile % 32 & 1) != 0;
  }

  /// Calls function(first class, end of its classes) for each lost tile, or for all tiles.
  template <typename Function>
  __device__ void for_each(std::int64_t classes, bool is_all, Function function) const {
    const std::int64_t tiles = ceil_divide(classes, kExpProductClasses);
    for (std::int64_t word = 0; word * 32 < tiles; ++word) {
      for (unsigned left = is_all ? ~0u : words[word]; left != 0; left &= left - 1) {
        const std::int64_t first = (word * 32 + __ffs(static_cast<int>(left)) - 1) * kClasses;
        if (first < classes) function(first, min(first + kClasses, classes));
      }
    }
  }
};

}  // namespace eaves::cuda
