// The position that theta is multiplied with, for each feature of a token, on host and device. Only this file knows
// grids, extra tokens, offsets, explicit positions and packed sequences.
#pragma once

#include <cstdint>

#include "core/dispatch.h"
#include "core/divider.h"
#include "core/rows.h"
#include "eaves/tensor.h"

namespace eaves {

/// A list of integers of 32 or 64 bits, in the memory of the device.
struct IntegerList {
  const void* data = nullptr;
  bool is_64_bit = false;

  EAVES_HOST_DEVICE std::int64_t operator[](std::int64_t i) const {
    return is_64_bit ? static_cast<const std::int64_t*>(data)[i] : static_cast<const std::int32_t*>(data)[i];
  }
};

/// Passed to kernels by value.
struct LrpeCosineAngles {
  // theta
  const void* theta = nullptr;
  DType theta_dtype = DType::float32;
  std::int64_t theta_heads = 1;
  std::int64_t theta_features = 1;  ///< E, the size of theta's last axis
  std::int64_t theta_head_stride = 0;
  std::int64_t theta_feature_stride = 0;
  std::int64_t axis_features = 1;  ///< features of an axis: E, or all if one angle serves all features

  // positions
  /// True without offsets, positions and cu_seqlens on the device and with fewer than 2^31 tokens. Then position() is
  /// computed_position().
  bool computes_positions = false;
  std::int64_t extra_tokens = 0;
  std::int64_t offset = 0;
  IntegerList offsets;             ///< data is nullptr without offsets
  std::int64_t offset_stride = 0;  ///< over batch entries
  IntegerList positions;           ///< data is nullptr without positions
  std::int64_t position_batch_stride = 0;
  std::int64_t position_stride = 0;
  IntegerList cu_seqlens;      ///< data is nullptr without packed sequences
  std::int64_t sequences = 0;  ///< S
  int axes = 1;                ///< m
  std::int64_t grid[kMaxRank] = {};
  std::int64_t cells_behind[kMaxRank] = {};  ///< product of the sizes of the faster axes
  Divider by_grid[kMaxRank];
  Divider by_cells_behind[kMaxRank];

  /// False for an extra token: its angle is 0 even if theta is infinite or NaN.
  EAVES_HOST_DEVICE bool has_angle(std::int64_t n) const { return n >= extra_tokens; }

  /// Does every batch entry have the same angles?
  EAVES_HOST_DEVICE bool are_shared_by_batch() const {
    return (offsets.data == nullptr || offset_stride == 0) && (positions.data == nullptr || position_batch_stride == 0);
  }

  /// The axis of a feature. The angle is 0 if the axis is `axes` or greater.
  EAVES_HOST_DEVICE std::int64_t axis_of(std::int64_t feature) const {
    if (feature < axis_features) return 0;
    return axes == 1 ? 1 : divide(feature, axis_features);
  }

  /// The index in theta, from 0 to E - 1, for a feature on an axis.
  EAVES_HOST_DEVICE std::int64_t theta_feature_of(std::int64_t feature, std::int64_t axis) const {
    return theta_features == 1 ? 0 : feature - axis * axis_features;
  }

  /// position() with computes_positions, which most calls have; short enough to be inlined.
  EAVES_HOST_DEVICE std::int64_t computed_position(std::int64_t n, std::int64_t axis) const {
    if (axes == 1) return n + (offset - extra_tokens);
    const std::uint32_t cell = by_cells_behind[axis].divide(static_cast<std::uint32_t>(n - extra_tokens));
    return offset + (cell - by_grid[axis].divide(cell) * static_cast<std::uint32_t>(grid[axis]));
  }

  /// The position of token n of a batch entry on an axis. n is no extra token, and axis is below `axes`.
  EAVES_HOST_DEVICE std::int64_t position(std::int64_t batch, std::int64_t n, std::int64_t axis) const {
    if (computes_positions) return computed_position(n, axis);
    if (positions.data != nullptr) return positions[batch * position_batch_stride + n * position_stride];
    if (cu_seqlens.data != nullptr) return n - sequence_start(n);
    std::int64_t coordinate = n - extra_tokens;
    if (axes > 1) {
      coordinate = divide(coordinate, cells_behind[axis]);
      // The slowest axis needs no remainder.
      if (axis > 0) coordinate -= divide(coordinate, grid[axis]) * grid[axis];
    }
    // Unsigned, because the contents of offsets are not checked, and an overflow must not be undefined behaviour.
    auto sum = static_cast<std::uint64_t>(offset) + static_cast<std::uint64_t>(coordinate);
    if (offsets.data != nullptr) sum += static_cast<std::uint64_t>(offsets[batch * offset_stride]);
    return static_cast<std::int64_t>(sum);
  }

  /// theta of a head and a feature, in the type that angles are computed in.
  template <typename T>
  EAVES_HOST_DEVICE Accumulator<T> theta_of(std::int64_t head, std::int64_t theta_feature) const {
    const std::int64_t at = head * theta_head_stride + theta_feature * theta_feature_stride;
    return theta_dtype == kDTypeOf<T> ? load_as_accumulator(static_cast<const T*>(theta)[at])
                                      : static_cast<Accumulator<T>>(static_cast<const float*>(theta)[at]);
  }

 private:
  /// The start of the packed sequence of token n: the last entry at or before n. Reads entries 0 to S - 1 only.
  EAVES_HOST_DEVICE std::int64_t sequence_start(std::int64_t n) const {
    std::int64_t low = 0;
    std::int64_t high = sequences;  // n belongs to a sequence below this one
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      if (cu_seqlens[middle] <= n) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return cu_seqlens[low];
  }
};

}  // namespace eaves
