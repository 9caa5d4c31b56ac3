// The plan of linear_cross_entropy: how many rows and classes it computes at once.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/environment.h"
#include "cuda/exp_product.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_memory.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_policy.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_shape.h"

namespace eaves {

/// The part of the workspace that every row needs under any plan. A limit for blocks comes on top of it.
inline std::size_t per_row_bytes(const LinearCrossEntropyShape& shape) {
  LinearCrossEntropyShape without_rows = shape;
  without_rows.rows = 0;
  return workspace_bytes(shape, {0, 1}) - workspace_bytes(without_rows, {0, 1});
}

/// The block under a limit that is too small for any block.
inline LinearCrossEntropyBlock least_block(const LinearCrossEntropyShape& shape) {
  const LinearCrossEntropyPolicy& policy = policy_of(shape.device);
  return {std::min(shape.rows, policy.least_rows),
          shape.cuts_classes() ? std::min(shape.classes, policy.least_classes) : shape.classes};
}

/// If there are several chunks, their rows are a multiple of this: whole tiles, on the fused path whole clusters of
/// tiles. A chunk of few rows takes whole tiles there too: half an empty cluster costs less than more passes over
/// grad_head.
inline std::int64_t row_tile_of(const LinearCrossEntropyShape& shape, std::int64_t rows) {
  const bool is_of_clusters = shape.is_fused && rows >= 2 * cuda::kExpProductClusterRows;
  return is_of_clusters ? cuda::kExpProductClusterRows : policy_of(shape.device).row_tile;
}

/// The most rows, with so many classes, that keep the workspace within `limit`; at least the rows of the least block.
/// The chunks have equal sizes.
inline std::int64_t rows_within(const LinearCrossEntropyShape& shape, std::int64_t classes, std::size_t limit) {
  const std::int64_t all = shape.rows;
  if (all <= 1 || workspace_bytes(shape, {all, classes}) <= limit) return all;
  std::int64_t low = least_block(shape).rows;
  std::int64_t high = all + 1;  // too many rows
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (workspace_bytes(shape, {middle, classes}) <= limit ? low : high) = middle;
  }
  const std::int64_t chunks = ceil_divide(all, low);
  const std::int64_t tile = row_tile_of(shape, low);
  const std::int64_t even = ceil_divide(ceil_divide(all, chunks), tile) * tile;
  if (even <= low) return even;
  return low < tile ? low : low / tile * tile;
}

/// The cost of a call in these blocks, in seconds. It counts the products, with a last wave of tiles that may be nearly
/// empty; the reading of their factors, the head for each chunk of rows and hidden for each block of classes; and
/// passes over sums, of grad_hidden for each block of classes and of grad_head for each chunk of rows.
inline double seconds_of(const LinearCrossEntropyShape& shape, const LinearCrossEntropyBlock& block) {
  const LinearCrossEntropyPolicy& policy = policy_of(shape.device);
  const auto waste = [&](std::int64_t rows, std::int64_t columns) {
    const std::int64_t tiles = ceil_divide(rows, policy.row_tile) * ceil_divide(columns, policy.class_tile);
    const std::int64_t waves = ceil_divide(tiles, policy.tiles_at_once);
    return static_cast<double>(waves * policy.tiles_at_once) / static_cast<double>(tiles);
  };
  const auto read_and_written = [](DType dtype) { return 2.0 * static_cast<double>(size_of(dtype)); };
  const auto all = static_cast<double>(shape.rows);
  const auto features = static_cast<double>(shape.features);
  const auto classes = static_cast<double>(shape.classes);
  const std::int64_t chunks = ceil_divide(shape.rows, block.rows);
  const std::int64_t blocks = ceil_divide(shape.classes, block.classes);
  const double of_product = 2.0 * all * features * classes / policy.operations_per_second;
  double products = waste(block.rows, block.classes);
  const auto of_head = classes * features * static_cast<double>(size_of(shape.dtype));
  const auto of_hidden = all * features * static_cast<double>(size_of(shape.dtype));
  double passes = static_cast<double>(chunks) * of_head * (shape.has_grad_hidden ? 2.0 : 1.0) +
                  static_cast<double>(blocks) * of_hidden * (shape.has_grad_head ? 2.0 : 1.0);
  if (shape.has_grad_hidden) {
    products += waste(block.rows, shape.features);
    if (blocks > 1) passes += static_cast<double>(blocks) * all * features * read_and_written(shape.accumulator());
  }
  if (shape.has_grad_head) {
    products += waste(block.classes, shape.features);
    passes += static_cast<double>(chunks - 1) * classes * features * read_and_written(shape.grad_head_dtype);
  }
  return of_product * products + passes / policy.bytes_per_second +
         static_cast<double>(chunks * blocks) * policy.seconds_per_block +
         static_cast<double>(blocks) * all * policy.seconds_per_part;
}

/// The most classes, with so many rows, that keep the workspace within `limit`; 0 if not even one class does. In the
/// forward all classes or whole tiles.
inline std::int64_t classes_within(const LinearCrossEntropyShape& shape, std::int64_t rows, std::size_t limit) {
  // All classes may fit although fewer do not: they need no sums of grad_hidden.
  if (workspace_bytes(shape, {rows, shape.classes}) <= limit) return shape.classes;
  std::int64_t step = 1;
  std::int64_t low = 0;
  if (!shape.is_backward()) {
    // A row has the logits of one block and the statistics of every block. With blocks thinner than this, both together
    // take more memory.
    const double least = std::sqrt(static_cast<double>(shape.classes) * kCrossEntropyStatistics);
    step = policy_of(shape.device).class_tile;
    low = ceil_divide(static_cast<std::int64_t>(least), step);
    if (low * step >= shape.classes || workspace_bytes(shape, {rows, low * step}) > limit) return 0;
  }
  std::int64_t high = ceil_divide(shape.classes, step);
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (workspace_bytes(shape, {rows, middle * step}) <= limit ? low : high) = middle;
  }
  return low * step;
}

/// The rows and classes of the cheapest block.
inline LinearCrossEntropyBlock blocks_within(const LinearCrossEntropyShape& shape, std::size_t limit) {
  const std::int64_t all = shape.rows;
  if (all == 0 || workspace_bytes(shape, {all, shape.classes}) <= limit) return {all, shape.classes};
  const LinearCrossEntropyPolicy& policy = policy_of(shape.device);
  const std::int64_t fewest = least_block(shape).classes;
  LinearCrossEntropyBlock best{rows_within(shape, fewest, limit), fewest};
  double least =
      workspace_bytes(shape, best) <= limit ? seconds_of(shape, best) : std::numeric_limits<double>::infinity();
  constexpr std::int64_t kFewChunks = 64;    // up to here every number of chunks is tried, beyond it every doubling
  constexpr std::int64_t kMostSmaller = 40;  // how many class tiles fewer than fit are tried
  for (std::int64_t chunks = 1; chunks <= all; chunks += chunks < kFewChunks ? 1 : chunks) {
    const std::int64_t even = ceil_divide(all, chunks);
    const std::int64_t tile = row_tile_of(shape, even);
    const std::int64_t rows = chunks == 1 ? all : std::min(all, ceil_divide(even, tile) * tile);
    const std::int64_t most = classes_within(shape, rows, limit);
    const auto consider = [&](std::int64_t classes) {
      const LinearCrossEntropyBlock block{rows, classes};
      if (workspace_bytes(shape, block) > limit) return;  // more blocks have more statistics
      const double seconds = seconds_of(shape, block);
      if (seconds < least) {
        least = seconds;
        best = block;
      }
    };
    if (most < fewest) continue;
    if (most == shape.classes || most < policy.class_tile) {
      consider(most);
      continue;
    }
    const std::int64_t class_tiles = most / policy.class_tile;
    for (std::int64_t less = 0; less < std::min(class_tiles, kMostSmaller); ++less) {
      consider((class_tiles - less) * policy.class_tile);
    }
  }
  return best;
}

/// The limit of a call without a workspace in its context: the caller's limit, or else the policy's on top of the bytes
/// that every row needs.
inline std::size_t limit_without_workspace(const LinearCrossEntropyShape& shape) {
  if (shape.workspace_limit != 0) return shape.workspace_limit;
  const LinearCrossEntropyPolicy& policy = policy_of(shape.device);
  const std::size_t rows = per_row_bytes(shape);
  if (shape.is_backward()) {
    const bool is_wide = shape.classes >= policy.wide_classes && shape.kept_rows == 0;  // a kept part: memory is short
    return rows + (is_wide ? policy.wide_backward_bytes : policy.backward_bytes);
  }
  if (shape.is_shard && shape.classes != shape.all_classes) {
    // As many rows as one call with all classes would have; the little that a shard needs beyond it is added. The loss
    // alone too: a shard computes all of its classes at once.
    LinearCrossEntropyShape whole = shape;
    whole.classes = shape.all_classes;
    whole.has_grad_hidden = false;
    const std::int64_t of_whole = rows_within(whole, whole.classes, limit_without_workspace(whole));
    return workspace_bytes(shape, {of_whole, shape.classes});
  }
  if (shape.mode == LinearCrossEntropyMode::forward && !shape.is_shard) {
    return rows + (shape.is_fused ? policy.fused_forward_bytes : policy.forward_bytes);
  }
  const std::int64_t enough = std::min(shape.rows, policy.enough_rows);
  const std::size_t wanted = workspace_bytes(shape, {enough, shape.classes}) - rows;
  if (shape.has_exps()) return rows + std::min(wanted, policy.fused_most_bytes);
  std::size_t most = policy.most_bytes;
  // The ranks of a shard need one plan, and their GPUs may differ.
  if (shape.device_bytes != 0 && !shape.is_shard) most = std::min(most, shape.device_bytes / policy.most_share);
  return rows + std::clamp(wanted, policy.least_bytes, std::max(policy.least_bytes, most));
}

/// The classes of a block for any number and any layout of rows: the classes of the cheapest block of `usual_rows`. A
/// workspace of the context must not decide: its size follows from the rows.
inline std::int64_t batch_invariant_classes(const LinearCrossEntropyShape& shape) {
  LinearCrossEntropyShape usual = shape;
  usual.rows = policy_of(shape.device).usual_rows;
  // As if rows were gathered: gathering takes memory, and the rows decide whether it happens.
  usual.skips_ignored = true;
  if (!usual.gathers_soft_targets()) usual.targets_dtype = DType::int64;
  return blocks_within(usual, limit_without_workspace(usual)).classes;
}

/// Loss and gradients at once on a GPU take the cheapest number of rows: a smaller chunk with a full last wave of tiles
/// may cost less. H200, 151,936 classes: chunks of 1792 rows take 69.2 ms, chunks of 1024 rows 68.6 ms.
inline std::int64_t rows_at_once(const LinearCrossEntropyShape& shape, std::size_t limit) {
  const std::int64_t most = rows_within(shape, shape.classes, limit);
  const bool is_at_once = shape.mode == LinearCrossEntropyMode::forward_backward;
  if (!is_at_once || shape.device.type == DeviceType::cpu || most == shape.rows) return most;
  constexpr std::int64_t kMostChunks = 64;
  std::int64_t best = most;
  double least = seconds_of(shape, {most, shape.classes});
  for (std::int64_t chunks = ceil_divide(shape.rows, most); chunks <= kMostChunks; ++chunks) {
    const std::int64_t even = ceil_divide(shape.rows, chunks);
    const std::int64_t tile = row_tile_of(shape, even);
    const std::int64_t rows = ceil_divide(even, tile) * tile;
    const double seconds = seconds_of(shape, {rows, shape.classes});
    if (rows >= most || seconds >= least) continue;
    best = rows;
    least = seconds;
  }
  return best;
}

inline LinearCrossEntropyBlock plan_block(const LinearCrossEntropyShape& shape, std::size_t limit) {
  if (shape.multiplies_kept_exps_alone()) {
    // Rows with 32 MiB of accumulators for grad_hidden.
    const std::int64_t enough = ceil_divide((std::int64_t{8} << 20) / shape.features, std::int64_t{128}) * 128;
    return {std::min(enough, rows_within(shape, shape.classes, limit)), shape.classes};
  }
  if (!shape.cuts_classes()) return {rows_at_once(shape, limit), shape.classes};
  if (!is_batch_invariant()) return blocks_within(shape, limit);
  const std::int64_t classes = batch_invariant_classes(shape);
  return {rows_within(shape, classes, limit), classes};
}

}  // namespace eaves
