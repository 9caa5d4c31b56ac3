// The sums that the product of the fused path (fused.h) leaves of each row, and the logits that are computed again
// where a sum left its range.
#pragma once

#include <cmath>

#include "cuda/math.cuh"
#include "ops/linear_cross_entropy/fused/rows.cuh"
#include "ops/linear_cross_entropy/linear_cross_entropy_policy.h"

namespace eaves::cuda {

// A row whose logits are computed again is one of a cluster: each of its blocks computes a part of every tile.
inline constexpr int kRepeatBlocks = 8;
inline constexpr int kRepeatThreads = 256;
inline constexpr int kClasses = static_cast<int>(kExpProductClasses);

struct SumsOfTiles {
  const float* shifts;  ///< nullptr: a row has one shift
  const float* sums;
  const float* moments;
  std::int64_t tiles;
  std::int64_t rows;  ///< up to a whole tile

  explicit SumsOfTiles(const FusedRows& of)
      : shifts(of.memory.tile_shifts),
        sums(of.memory.sums),
        moments(of.memory.moments),
        tiles(ceil_divide(of.classes, kExpProductClasses)),
        rows(ceil_divide(of.rows, kExpProductRows) * kExpProductRows) {}

  __device__ float shift(std::int64_t tile, std::int64_t row) const { return shifts[tile * rows + row]; }
  __device__ float sum(std::int64_t tile, std::int64_t row) const { return sums[tile * rows + row]; }
  __device__ float moment(std::int64_t tile, std::int64_t row) const { return moments[tile * rows + row]; }
  /// Did the tile leave the range in which its moment stays within float32's? Not a NaN: it would be one again.
  __device__ bool is_lost(std::int64_t tile, std::int64_t row) const { return sum(tile, row) > 0x1p120f; }
};

/// Of a row's tiles: in float64, because more than one may be near the end of float32's range.
struct Sums {
  double sum = 0.0;
  double moment = 0.0;

  /// The guess was too high, or there is no finite logit; or it was too low. Or the exponents are far from the guess,
  /// where they lose digits, which count where lse is next to 0.
  __device__ bool have_to_be_repeated(float shift) const {
    if (sum == 0.0 || sum == infinity<double>() || fabs(moment) == infinity<double>()) return true;
    constexpr float kFar = 20.0f;
    constexpr float kNextToZero = 4.0f;
    const auto exponent = static_cast<float>(log2(sum));
    return fabsf(exponent) > kFar && fabsf(exponent + shift) < kNextToZero;
  }
};

/// Where the guess was far off, the anchor is next to the row's lse: a sum that is so far from 1 could not be merged.
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

/// By one thread. Returns the target.
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

  /// Calls function(column, z) in lane 0 of a warp for each logit of a row and of classes [first, end) that is of the
  /// calling block of the cluster.
  template <typename Function>
  __device__ void for_each_logit(std::int64_t row, std::int64_t first, std::int64_t end, int block,
                                 Function function) const {
    constexpr int kAtOnce = 3;  // loads on their way
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

/// The tiles of a row that are computed again. Shared by a block.
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

  /// Calls function(first class, behind the last one) for each, or for all.
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
