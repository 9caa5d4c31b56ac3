// How much of linear_cross_entropy is computed at once, and where everything lies in the workspace.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/dispatch.h"
#include "core/environment.h"
#include "core/numeric.h"
#include "cuda/exp_product.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_backend.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_policy.h"

namespace eaves {

/// What a product that ends in exponentials (cuda/exp_product.h) gets of each row and gives for it; see
/// linear_cross_entropy_fused.h.
struct ExpProductMemory {
  void* samples;  ///< [rows, sampled_classes()] logits, float32
  float* shift;
  std::int32_t* target;
  float* target_logit;
  float* sums;
  float* moments;
  std::int32_t* repeated_count;  ///< of rows some of whose logits are computed again, and the rows
  std::int32_t* repeated_rows;
  float* constant;  ///< of the backward, and the next
  float* slope;
  float* row_factor;  ///< of both at once, as what follows
  float* target_gradient;
  std::int32_t* first_of_class;  ///< [classes], 0 before the targets are known: rows left from its first one on
  std::int32_t* has_more_rows;   ///< [rows], of the first row of a class: 1 where later rows have that class too
  void* scaled_x;                ///< where grad_x has been before
};

/// How many logits of a row are computed before the others, at equal distances, to guess the largest.
inline std::int64_t sampled_classes(std::int64_t classes) { return std::clamp<std::int64_t>(classes / 64, 64, 1024); }
inline std::int64_t sample_distance(std::int64_t classes) { return classes / sampled_classes(classes); }

/// True if rows may be left out: ignored ones, and rows of weight 0, which soft targets have too.
inline bool leaves_out_rows(const LinearCrossEntropyProblem& problem) {
  return problem.skips_ignored_rows && (!problem.has_soft_targets() || problem.row_weight != nullptr);
}

/// True if the soft targets of a block are copied together. Else all rows of them are read in their own memory.
inline bool gathers_soft_targets(const LinearCrossEntropyProblem& problem) {
  return problem.has_soft_targets() && leaves_out_rows(problem);
}

/// What is in the workspace; nullptr where a problem has no use for it.
struct LinearCrossEntropyMemory {
  // For all rows; where rows are gathered, of those that are computed, in the order in which they are.
  std::int64_t* row_indices;  ///< of the problem's view
  std::int64_t* targets;      ///< ignore_index for rows of weight 0
  void* grad_loss;            ///< where it is per row, as accumulators
  void* row_weight;           ///< where rows are gathered
  LossOutputs per_row;        ///< no divisor
  void* grad_lse;
  void* grad_entropy;

  void* numbers;  ///< kNumbers places of 8 bytes: accumulators one behind the other, the count in the last place

  // For all classes, as accumulators.
  void* bias;
  void* class_weight;
  double* grad_bias;  ///< sums of any number of rows

  // For a block.
  void* x;             ///< gathered rows
  void* soft_targets;  ///< likewise
  void* grad_x;        ///< the same, to be scattered; accumulators where that is not all of them
  void* logits;        ///< accumulators, and over them their gradient
  void* statistics;    ///< of each block of classes of a forward, of each row: cross_entropy.h
  Workspace loss;      ///< of the calls of cross_entropy
  Workspace product;   ///< of the matrix products
  ExpProductMemory exp_product;
};

/// The numbers of a call on the device. A gradient is multiplied by kScale = kAlpha * kRest: the products multiply by
/// kAlpha, the gradient of the logits by kRest. kAlpha is kScale, or 1 if kScale is not finite: a product would turn
/// the zeros of rows that do not count into NaN.
enum LinearCrossEntropyNumber {
  kScale,  ///< dL/d(loss) over the divisor, or 1 if that is per row
  kAlpha,
  kRest,
  kDivisor,
  kRowCount,  ///< how many rows are computed, an int64 (where the device counts them)
  kNumbers
};

template <typename A>
EAVES_HOST_DEVICE void put_scale(double given, A* numbers) {
  const A scale = static_cast<A>(given);
  const bool is_finite = scale - scale == A(0);
  numbers[kScale] = scale;
  numbers[kAlpha] = is_finite ? scale : A(1);
  numbers[kRest] = is_finite ? A(1) : scale;
}

/// Distance between rows of logits: whole cache lines, of 16 bits half ones.
inline std::int64_t logits_stride(std::int64_t classes) { return ceil_divide(classes, 32) * 32; }

/// Can x (and its gradient) be given to the products as it is, in the order of the per-row tensors?
inline bool is_matrix(const LinearCrossEntropyProblem& problem) {
  using namespace linear_cross_entropy_tensors;
  const auto& rows = problem.view.rows;
  const auto& columns = problem.view.columns;
  const std::int64_t features = problem.features();
  if (rows.rank > 1 || columns.rank > 1) return false;
  const auto has_unit_stride = [&](int tensor) { return columns.rank == 0 || columns.strides[tensor][0] == 1; };
  const auto is_row_major = [&](int tensor) { return rows.rank == 0 || rows.strides[tensor][0] >= features; };
  if (!has_unit_stride(kX) || !is_row_major(kX)) return false;
  if (!has_unit_stride(kGradX) || !is_row_major(kGradX)) return false;
  return rows.rank == 0 || rows.strides[kPerRow][0] == 1;
}

/// Rows may turn out to be left out, or have to be copied anyway. No target marks a row of weight 0 among soft
/// targets: the way back from the copies makes its outputs 0.
inline bool may_gather(const LinearCrossEntropyProblem& problem) {
  const bool has_weighted_soft_targets = problem.has_soft_targets() && problem.row_weight != nullptr;
  return !is_matrix(problem) || leaves_out_rows(problem) || has_weighted_soft_targets;
}

/// Is a row cut into blocks of classes?
inline bool cuts_classes(const LinearCrossEntropyProblem& problem) {
  if (problem.mode == LinearCrossEntropyMode::backward) return true;
  if (problem.ends_in_product || problem.shard != nullptr) return false;
  // Statistics hold the class of the largest logit as an accumulator: float32 knows integers up to 2^24.
  const bool knows_argmax = problem.outputs.argmax == nullptr || problem.accumulator() == DType::float64 ||
                            problem.classes <= std::int64_t{1} << 24;
  return !problem.wants_gradients() && knows_argmax;
}

/// Is grad_x of a block summed in accumulators, to be rounded at the end? Where it is a sum of several products.
inline bool is_grad_x_wide(const LinearCrossEntropyProblem& problem, const LinearCrossEntropyBlock& block) {
  const bool is_on_gpu = problem.device.type == DeviceType::cuda;
  const bool is_cut =
      is_sum_of_two_products(problem.dtype, problem.classes) && problem.weight.stride % kGemmVector == 0;
  return problem.has_powers() || block.classes < problem.classes || (is_on_gpu && is_cut);
}

/// Lays out the workspace from `base` on; with nullptr only counts. Returns the number of bytes. What a call may have
/// or not stands in of_largest_shard() too.
inline std::size_t lay_out(const LinearCrossEntropyProblem& problem, const LinearCrossEntropyBlock& block, void* base,
                           LinearCrossEntropyMemory& memory) {
  std::size_t used = 0;
  const auto take = [&](bool is_needed, std::int64_t count, std::size_t size) -> void* {
    if (!is_needed) return nullptr;
    void* taken = base == nullptr ? nullptr : static_cast<char*>(base) + used;
    used += (static_cast<std::size_t>(count) * size + 255) / 256 * 256;
    return taken;
  };
  const std::size_t number = size_of(problem.accumulator());
  const std::size_t element = size_of(problem.dtype);
  const bool is_backward = problem.mode == LinearCrossEntropyMode::backward;
  const bool gathers = may_gather(problem);
  const std::int64_t rows = problem.rows();
  const LossOutputs& wanted = problem.outputs;
  const bool keeps_losses = !is_backward && (gathers || problem.is_reduced());

  memory = {};
  memory.row_indices = static_cast<std::int64_t*>(take(gathers, rows, 8));
  memory.targets = static_cast<std::int64_t*>(
      take((gathers || problem.row_weight != nullptr) && !problem.has_soft_targets(), rows, 8));
  memory.grad_loss = take(!problem.is_reduced() && problem.grad_loss.data != nullptr, rows, number);
  memory.row_weight = take(gathers && problem.row_weight != nullptr, rows, number);
  memory.per_row.loss = take(keeps_losses, rows, number);
  memory.per_row.z_loss = take(keeps_losses && wanted.z_loss != nullptr, rows, number);
  memory.per_row.argmax = static_cast<std::int64_t*>(take(gathers && wanted.argmax != nullptr, rows, 8));
  for (const auto output : kRowOutputs) {
    memory.per_row.*output = take(gathers && wanted.*output != nullptr, rows, number);
  }
  memory.per_row.lse = {take(gathers && wanted.lse.data != nullptr, wanted.lse.row(rows), number), wanted.lse.is_split};
  memory.grad_lse = take(problem.grad_lse != nullptr, rows, number);
  memory.grad_entropy = take(problem.grad_entropy != nullptr, rows, number);
  memory.numbers = take(true, kNumbers, 8);

  memory.bias = take(problem.bias.data != nullptr, problem.classes, number);
  memory.class_weight = take(problem.class_weight.data != nullptr, problem.classes, number);
  memory.grad_bias = static_cast<double*>(take(problem.grad_bias != nullptr, problem.classes, sizeof(double)));

  const bool has_powers = problem.has_powers();
  const bool is_wide = is_grad_x_wide(problem, block);
  memory.x = take(gathers, block.rows * problem.features(), element);
  memory.soft_targets =
      take(gathers_soft_targets(problem), block.rows * logits_stride(block.classes), size_of(problem.targets.dtype));
  memory.grad_x = take(problem.grad_x != nullptr && (gathers || is_wide), block.rows * problem.features(),
                       is_wide || problem.grad_x_dtype == problem.accumulator() ? number : element);
  std::int64_t logits_of_row = logits_stride(block.classes);
  // In the forward samples alone, in float32.
  if (problem.mode == LinearCrossEntropyMode::forward && problem.ends_in_product) {
    logits_of_row = 2 * sampled_classes(problem.classes);
  }
  memory.logits = take(true, block.rows * logits_of_row, problem.ends_in_product ? element : number);
  if (problem.ends_in_product) {
    const std::int64_t sums = cuda::exp_product_sums(block.rows, block.classes);
    const auto take_floats = [&](bool is_needed, std::int64_t count) {
      return static_cast<float*>(take(is_needed, count, sizeof(float)));
    };
    ExpProductMemory& exp_product = memory.exp_product;
    exp_product.shift = take_floats(true, block.rows);
    exp_product.target = static_cast<std::int32_t*>(take(true, block.rows, sizeof(std::int32_t)));
    exp_product.target_logit = take_floats(true, block.rows);
    exp_product.sums = take_floats(!is_backward, sums);
    exp_product.moments = take_floats(!is_backward, sums);
    exp_product.repeated_count = static_cast<std::int32_t*>(take(!is_backward, 1, sizeof(std::int32_t)));
    exp_product.repeated_rows = static_cast<std::int32_t*>(take(!is_backward, block.rows, sizeof(std::int32_t)));
    exp_product.samples = memory.logits;  // read before the product writes there
    exp_product.constant = take_floats(is_backward, block.rows);
    exp_product.slope = take_floats(is_backward, block.rows);
    exp_product.row_factor = take_floats(has_powers, block.rows);
    exp_product.target_gradient = take_floats(has_powers, block.rows);
    const bool adds_targets = has_powers && (problem.grad_weight != nullptr || problem.grad_bias != nullptr);
    exp_product.first_of_class = static_cast<std::int32_t*>(take(adds_targets, problem.classes, sizeof(std::int32_t)));
    exp_product.has_more_rows = static_cast<std::int32_t*>(take(adds_targets, block.rows, sizeof(std::int32_t)));
    const bool scales_x = has_powers && problem.grad_weight != nullptr;
    exp_product.scaled_x = scales_x && problem.grad_x != nullptr
                               ? memory.grad_x
                               : take(scales_x, block.rows * problem.features(), element);
  }
  const bool has_product_statistics = problem.ends_in_product && problem.shard == nullptr;
  memory.statistics = take(!is_backward && (has_product_statistics || block.classes < problem.classes),
                           ceil_divide(problem.classes, block.classes) * block.rows * kCrossEntropyStatistics,
                           size_of(problem.statistics_dtype()));
  if (problem.device.type == DeviceType::cuda) {
    // Twice what cross_entropy.h says at most: any of its calls, whatever its options.
    memory.loss.bytes = 2 * ((std::size_t{1} << 20) + static_cast<std::size_t>(block.rows) * 40);
    memory.loss.data = take(true, static_cast<std::int64_t>(memory.loss.bytes), 1);
    memory.product.bytes = kGemmWorkspaceBytes;
    memory.product.data = take(true, static_cast<std::int64_t>(memory.product.bytes), 1);
  }
  return used;
}

inline std::size_t workspace_bytes(const LinearCrossEntropyProblem& problem, const LinearCrossEntropyBlock& block) {
  LinearCrossEntropyMemory memory;
  return lay_out(problem, block, nullptr, memory);
}

/// The part of the workspace that is there for every row, whatever the blocks: a limit for blocks comes on top of it.
inline std::size_t per_row_bytes(const LinearCrossEntropyProblem& problem) {
  LinearCrossEntropyProblem without_rows = problem;
  without_rows.view.row_count = 0;
  return workspace_bytes(problem, {0, 1}) - workspace_bytes(without_rows, {0, 1});
}

/// What is computed at once where the limit is too little for anything.
inline LinearCrossEntropyBlock least_block(const LinearCrossEntropyProblem& problem) {
  const LinearCrossEntropyPolicy& policy = policy_of(problem.device);
  return {std::min(problem.rows(), policy.least_rows),
          cuts_classes(problem) ? std::min(problem.classes, policy.least_classes) : problem.classes};
}

/// Chunks, where there are several, have a multiple of so many rows: whole tiles, and clusters of tiles where logits
/// end in their product. Of few rows tiles alone: half a cluster for nothing costs less than more passes over
/// grad_weight.
inline std::int64_t row_tile_of(const LinearCrossEntropyProblem& problem, std::int64_t rows) {
  const bool is_of_clusters = problem.ends_in_product && rows >= 2 * cuda::kExpProductClusterRows;
  return is_of_clusters ? cuda::kExpProductClusterRows : policy_of(problem.device).row_tile;
}

/// The most rows, with so many classes, whose workspace is within `limit`; at least those of the least block. Pieces of
/// equal size.
inline std::int64_t rows_within(const LinearCrossEntropyProblem& problem, std::int64_t classes, std::size_t limit) {
  const std::int64_t all = problem.rows();
  if (all <= 1 || workspace_bytes(problem, {all, classes}) <= limit) return all;
  std::int64_t low = least_block(problem).rows;
  std::int64_t high = all + 1;  // too many
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (workspace_bytes(problem, {middle, classes}) <= limit ? low : high) = middle;
  }
  const std::int64_t chunks = ceil_divide(all, low);
  const std::int64_t tile = row_tile_of(problem, low);
  const std::int64_t even = ceil_divide(ceil_divide(all, chunks), tile) * tile;
  if (even <= low) return even;
  return low < tile ? low : low / tile * tile;
}

/// What blocks of classes cost, in seconds: products, whose last wave of tiles may be nearly empty; their factors, the
/// weight again for each chunk of rows and x for each block of classes; and passes over the sums of grad_x, for each
/// block of classes, and over grad_weight, for each chunk of rows.
inline double seconds_of(const LinearCrossEntropyProblem& problem, const LinearCrossEntropyBlock& block) {
  const LinearCrossEntropyPolicy& policy = policy_of(problem.device);
  const auto waste = [&](std::int64_t rows, std::int64_t columns) {
    const std::int64_t tiles = ceil_divide(rows, policy.row_tile) * ceil_divide(columns, policy.class_tile);
    const std::int64_t waves = ceil_divide(tiles, policy.tiles_at_once);
    return static_cast<double>(waves * policy.tiles_at_once) / static_cast<double>(tiles);
  };
  const auto read_and_written = [](DType dtype) { return 2.0 * static_cast<double>(size_of(dtype)); };
  const auto all = static_cast<double>(problem.rows());
  const auto features = static_cast<double>(problem.features());
  const auto classes = static_cast<double>(problem.classes);
  const std::int64_t chunks = ceil_divide(problem.rows(), block.rows);
  const std::int64_t blocks = ceil_divide(problem.classes, block.classes);
  const double of_product = 2.0 * all * features * classes / policy.operations_per_second;
  double products = waste(block.rows, block.classes);
  const auto of_weight = classes * features * static_cast<double>(size_of(problem.dtype));
  const auto of_x = all * features * static_cast<double>(size_of(problem.dtype));
  double passes = static_cast<double>(chunks) * of_weight * (problem.grad_x != nullptr ? 2.0 : 1.0) +
                  static_cast<double>(blocks) * of_x * (problem.grad_weight != nullptr ? 2.0 : 1.0);
  if (problem.grad_x != nullptr) {
    products += waste(block.rows, problem.features());
    if (blocks > 1) passes += static_cast<double>(blocks) * all * features * read_and_written(problem.accumulator());
  }
  if (problem.grad_weight != nullptr) {
    products += waste(block.classes, problem.features());
    passes += static_cast<double>(chunks - 1) * classes * features * read_and_written(problem.grad_weight_dtype);
  }
  return of_product * products + passes / policy.bytes_per_second +
         static_cast<double>(chunks * blocks) * policy.seconds_per_block +
         static_cast<double>(blocks) * all * policy.seconds_per_part;
}

/// The most classes, with so many rows, whose workspace is within `limit`; 0 where not even one is. In the forward all
/// or whole tiles.
inline std::int64_t classes_within(const LinearCrossEntropyProblem& problem, std::int64_t rows, std::size_t limit) {
  // All may fit where a few less do not: they need no sums of grad_x.
  if (workspace_bytes(problem, {rows, problem.classes}) <= limit) return problem.classes;
  std::int64_t step = 1;
  std::int64_t low = 0;
  if (problem.mode != LinearCrossEntropyMode::backward) {
    // A row has logits of one block and statistics of every block. Of blocks thinner than these both together are more.
    const double least = std::sqrt(static_cast<double>(problem.classes) * kCrossEntropyStatistics);
    step = policy_of(problem.device).class_tile;
    low = ceil_divide(static_cast<std::int64_t>(least), step);
    if (low * step >= problem.classes || workspace_bytes(problem, {rows, low * step}) > limit) return 0;
  }
  std::int64_t high = ceil_divide(problem.classes, step);
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (workspace_bytes(problem, {rows, middle * step}) <= limit ? low : high) = middle;
  }
  return low * step;
}

/// The cheapest rows and classes.
inline LinearCrossEntropyBlock blocks_within(const LinearCrossEntropyProblem& problem, std::size_t limit) {
  const std::int64_t all = problem.rows();
  if (all == 0 || workspace_bytes(problem, {all, problem.classes}) <= limit) return {all, problem.classes};
  const LinearCrossEntropyPolicy& policy = policy_of(problem.device);
  const std::int64_t fewest = least_block(problem).classes;
  LinearCrossEntropyBlock best{rows_within(problem, fewest, limit), fewest};
  double least =
      workspace_bytes(problem, best) <= limit ? seconds_of(problem, best) : std::numeric_limits<double>::infinity();
  constexpr std::int64_t kFewChunks = 64;    // each number of them is tried; beyond, every doubling
  constexpr std::int64_t kMostSmaller = 40;  // class tiles that a block may have less than fit
  for (std::int64_t chunks = 1; chunks <= all; chunks += chunks < kFewChunks ? 1 : chunks) {
    const std::int64_t even = ceil_divide(all, chunks);
    const std::int64_t tile = row_tile_of(problem, even);
    const std::int64_t rows = chunks == 1 ? all : std::min(all, ceil_divide(even, tile) * tile);
    const std::int64_t most = classes_within(problem, rows, limit);
    const auto consider = [&](std::int64_t classes) {
      const LinearCrossEntropyBlock block{rows, classes};
      if (workspace_bytes(problem, block) > limit) return;  // statistics of more blocks
      const double seconds = seconds_of(problem, block);
      if (seconds < least) {
        least = seconds;
        best = block;
      }
    };
    if (most < fewest) continue;
    if (most == problem.classes || most < policy.class_tile) {
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

/// The limit of a call whose context brings no workspace: the caller's, or else the policy's, beside what the call
/// needs for every row.
inline std::size_t limit_without_workspace(const LinearCrossEntropyProblem& problem) {
  if (problem.workspace_limit != 0) return problem.workspace_limit;
  const LinearCrossEntropyPolicy& policy = policy_of(problem.device);
  const std::size_t rows = per_row_bytes(problem);
  if (problem.mode == LinearCrossEntropyMode::backward) return rows + policy.backward_bytes;
  if (problem.shard != nullptr && problem.classes != problem.shard->classes) {
    // As many rows as one call with all classes would have, but for what a shard's may have more, which is little. (The
    // loss alone too: a shard has its classes at once.)
    LinearCrossEntropyProblem whole = problem;
    whole.classes = problem.shard->classes;
    whole.grad_x = nullptr;
    const std::int64_t of_whole = rows_within(whole, whole.classes, limit_without_workspace(whole));
    return workspace_bytes(problem, {of_whole, problem.classes});
  }
  if (problem.mode == LinearCrossEntropyMode::forward && problem.shard == nullptr) {
    return rows + (problem.ends_in_product ? policy.fused_forward_bytes : policy.forward_bytes);
  }
  const std::int64_t enough = std::min(problem.rows(), policy.enough_rows);
  const std::size_t wanted = workspace_bytes(problem, {enough, problem.classes}) - rows;
  return rows + (problem.has_powers() ? std::clamp(wanted, policy.fused_least_bytes, policy.fused_most_bytes)
                                      : std::clamp(wanted, policy.least_bytes, policy.most_bytes));
}

/// The classes that a block has whatever the number of rows, and however they lie: the cheapest of `usual_rows`. (Not
/// from a workspace that a context brings: its size follows from the rows.)
inline std::int64_t batch_invariant_classes(const LinearCrossEntropyProblem& problem) {
  LinearCrossEntropyProblem usual = problem;
  usual.view.row_count = policy_of(problem.device).usual_rows;
  // As if rows were gathered: that takes memory, and whether they are depends on the rows.
  usual.skips_ignored_rows = true;
  if (!gathers_soft_targets(usual)) usual.targets.dtype = DType::int64;
  return blocks_within(usual, limit_without_workspace(usual)).classes;
}

/// The problem by which those of all shards are planned, whichever it is: of the largest, with all that a call may
/// have, because a shard may be frozen, or its x lie otherwise, so that another keeps its logits in memory. Without
/// shards the problem itself.
inline LinearCrossEntropyProblem of_largest_shard(LinearCrossEntropyProblem problem) {
  if (problem.shard == nullptr) return problem;
  problem.classes = std::max(problem.classes, problem.shard->most_classes);
  problem.skips_ignored_rows = true;
  if (!gathers_soft_targets(problem)) problem.targets.dtype = DType::int64;
  problem.ends_in_product = false;
  if (problem.mode == LinearCrossEntropyMode::forward) return problem;
  static std::byte address;
  void* present = &address;
  problem.bias.data = problem.class_weight.data = problem.row_weight = present;
  problem.grad_loss.data = problem.grad_lse = problem.grad_entropy = present;
  problem.grad_x = problem.grad_weight = problem.grad_bias = present;
  problem.grad_x_dtype = problem.grad_weight_dtype = problem.accumulator();
  if (problem.mode != LinearCrossEntropyMode::backward) return problem;
  problem.outputs.lse = {present, true};
  problem.outputs.entropy = problem.outputs.target_mass = present;
  return problem;
}

inline LinearCrossEntropyBlock plan_block(const LinearCrossEntropyProblem& problem, std::size_t limit) {
  if (!cuts_classes(problem)) return {rows_within(problem, problem.classes, limit), problem.classes};
  if (!is_batch_invariant()) return blocks_within(problem, limit);
  const std::int64_t classes = batch_invariant_classes(problem);
  return {rows_within(problem, classes, limit), classes};
}

}  // namespace eaves
