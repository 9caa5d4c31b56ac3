// The workspace of linear_cross_entropy: its contents and their layout.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "core/dispatch.h"
#include "core/numeric.h"
#include "cuda/exp_product.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_backend.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_shape.h"

namespace eaves {

/// The numbers of a chunk on the fused path (fused/fused.h).
struct FusedMemory {
  void* samples;  ///< [rows, sampled_classes()] logits, float32
  float* shift;   ///< one number per row, like most members
  std::int32_t* target;
  float* target_logit;
  float* tile_shifts;  ///< [tiles, rows up to a whole tile], for an online softmax; this and the next two: sums.cuh
  float* sums;
  float* moments;
  std::int32_t* repeated_count;  ///< the number of rows with logits to compute again, and the rows
  std::int32_t* repeated_rows;
  float* constant;  ///< this and the next: in the backward
  float* slope;
  float* row_factor;  ///< this and the next members: with exps
  float* target_gradient;
  // add_targets() may add the targets of several chunks together. The chunk's target and target_gradient then begin at
  // element `first_row` of all.
  std::int64_t first_row;
  std::int32_t* first_of_class;  ///< [classes], INT32_MAX minus the first row of the class; 0: no row
  std::int32_t* has_more_rows;   ///< [rows], for the first row of a class: 1 if later rows have that class too
  void* scaled_hidden;           ///< f x; may reuse the memory of grad_hidden
};

/// The number of logits of a row that are computed before the product, at equal distances, to guess the largest.
inline std::int64_t sampled_classes(std::int64_t classes) { return std::clamp<std::int64_t>(classes / 64, 64, 1024); }
inline std::int64_t sample_distance(std::int64_t classes) { return classes / sampled_classes(classes); }

/// The contents of the workspace; nullptr for members that a problem does not need.
struct LinearCrossEntropyMemory {
  // For all rows. If rows are gathered: for the computed rows, in their order.
  std::int64_t* row_indices;  ///< rows of the problem's view
  std::int64_t* targets;      ///< ignore_index for rows of weight 0
  void* grad_loss;            ///< if there is one per row: accumulators, divided by kAlpha
  void* row_weight;           ///< if rows are gathered
  LossOutputs per_row;        ///< without the divisor
  void* grad_lse;
  void* grad_entropy;

  void* numbers;  ///< kNumbers places of 8 bytes: adjacent accumulators, the count in the last place

  // For all classes, as accumulators.
  void* bias;
  void* class_weight;
  double* grad_bias;  ///< sums over any number of rows

  // For a block.
  void* hidden;        ///< gathered rows
  void* soft_targets;  ///< gathered
  void* grad_hidden;   ///< gathered, for the scatter; accumulators if it is wide (is_grad_hidden_wide())
  void* logits;        ///< accumulators, overwritten with their gradient
  void* statistics;    ///< of each row, for each block of classes in a forward: cross_entropy.h
  Workspace loss;      ///< for the calls of cross_entropy
  Workspace product;   ///< for the matrix products
  FusedMemory fused;
};

/// The numbers of a call on the device. The scale is kAlpha * kRest: the products multiply by kAlpha, their factor
/// includes kRest. kAlpha is 1 if the scale is 0 or not finite: 0 times an infinite sum, or infinity times 0, would be
/// NaN.
enum LinearCrossEntropyNumber {
  kAlpha,
  kRest,
  kDivisor,
  kRowCount,  ///< the number of computed rows, an int64 (if the device counts them)
  kNumbers
};

/// The range of the upstream gradients of rows, without zeros and NaN.
template <typename A>
struct UpstreamRange {
  A least = infinity<A>();
  A largest = -infinity<A>();

  EAVES_HOST_DEVICE void add(A gradient) {
    if (gradient != A(0) && gradient < least) least = gradient;
    if (gradient != A(0) && gradient > largest) largest = gradient;
  }
  /// The number, if all rows have the same, else 1.
  EAVES_HOST_DEVICE A scale() const { return least == largest ? least : A(1); }
};

template <typename A>
EAVES_HOST_DEVICE void put_scale(double given, ScaleInProducts part, A* numbers) {
  const A scale = static_cast<A>(given);
  A alpha = A(1);
  if (part != ScaleInProducts::nothing && scale != A(0) && scale - scale == A(0)) {
    int exponent = 0;
    alpha = part == ScaleInProducts::all ? scale : A(2) * std::frexp(scale, &exponent);
  }
  numbers[kAlpha] = alpha;
  numbers[kRest] = scale / alpha;
}

/// Distance between rows of logits, and between rows of 16-bit exps and gradients on the fused path: whole cache lines.
/// (H200, 3072 rows of 151643 exps: with half a line, cuBLASLt's product with the head takes 5.4 ms instead of 4.75.)
inline std::int64_t logits_stride(std::int64_t classes) { return ceil_divide(classes, 32) * 32; }
inline std::int64_t exps_stride(std::int64_t classes) { return ceil_divide(classes, 64) * 64; }

/// The elements at the end of a row of kept exps that hold its numbers, and the length of such a row.
inline constexpr std::int64_t kKeptNumbers = 4;
inline std::int64_t kept_exps_stride(std::int64_t classes) { return exps_stride(classes + kKeptNumbers); }

/// True if grad_hidden of a block is in accumulators and rounded at the end: if it is a sum of several products, or a
/// product with exps, which still needs the row factors.
inline bool is_grad_hidden_wide(const LinearCrossEntropyShape& shape, const LinearCrossEntropyBlock& block) {
  const bool is_on_gpu = shape.device.type == DeviceType::cuda;
  const bool is_cut = is_sum_of_two_products(shape.dtype, shape.classes) && shape.has_head_vectors;
  const bool is_of_exps = shape.has_exps() || (shape.is_backward() && shape.keeps_exps);
  return is_of_exps || block.classes < shape.classes || (is_on_gpu && is_cut);
}

/// Lays out the workspace from `base` on and returns its bytes; with nullptr it only counts. Any tensor that is counted
/// here has to be in of_largest_shard() too.
inline std::size_t lay_out(const LinearCrossEntropyShape& shape, const LinearCrossEntropyBlock& block, void* base,
                           LinearCrossEntropyMemory& memory) {
  std::size_t used = 0;
  const auto take = [&](bool is_needed, std::int64_t count, std::size_t size) -> void* {
    if (!is_needed) return nullptr;
    void* taken = base == nullptr ? nullptr : static_cast<char*>(base) + used;
    used += (static_cast<std::size_t>(count) * size + 255) / 256 * 256;
    return taken;
  };
  const std::size_t number = size_of(shape.accumulator());
  const std::size_t element = size_of(shape.dtype);
  const bool is_backward = shape.is_backward();
  const bool gathers = shape.may_gather();
  const std::int64_t rows = shape.rows;
  const bool keeps_losses = !is_backward && (gathers || shape.is_reduced);

  memory = {};
  memory.row_indices = static_cast<std::int64_t*>(take(gathers, rows, 8));
  memory.targets =
      static_cast<std::int64_t*>(take((gathers || shape.has_row_weight) && !shape.has_soft_targets(), rows, 8));
  memory.grad_loss = take(!shape.is_reduced && shape.has_grad_loss, rows, number);
  memory.row_weight = take(gathers && shape.has_row_weight, rows, number);
  memory.per_row.loss = take(keeps_losses, rows, number);
  memory.per_row.z_loss = take(keeps_losses && shape.has_z_loss, rows, number);
  memory.per_row.argmax = static_cast<std::int64_t*>(take(gathers && shape.has_argmax, rows, 8));
  memory.per_row.entropy = take(gathers && shape.has_entropy, rows, number);
  memory.per_row.sum_sq = take(gathers && shape.has_sum_sq, rows, number);
  memory.per_row.mean_logit = take(gathers && shape.has_mean_logit, rows, number);
  memory.per_row.target_mass = take(gathers && shape.has_target_mass, rows, number);
  memory.per_row.lse.is_split = shape.has_split_lse;
  memory.per_row.lse.data = take(gathers && shape.has_lse, memory.per_row.lse.row(rows), number);
  memory.grad_lse = take(shape.has_grad_lse, rows, number);
  memory.grad_entropy = take(shape.has_grad_entropy, rows, number);
  memory.numbers = take(true, kNumbers, 8);

  memory.bias = take(shape.has_bias, shape.classes, number);
  memory.class_weight = take(shape.has_class_weight, shape.classes, number);
  memory.grad_bias = static_cast<double*>(take(shape.has_grad_bias, shape.classes, sizeof(double)));

  const bool has_exps = shape.has_exps() || shape.keeps_exps;
  const bool is_wide = is_grad_hidden_wide(shape, block);
  memory.hidden = take(gathers, block.rows * shape.features, element);
  memory.soft_targets =
      take(shape.gathers_soft_targets(), block.rows * logits_stride(block.classes), size_of(shape.targets_dtype));
  memory.grad_hidden = take(shape.has_grad_hidden && (gathers || is_wide), block.rows * shape.features,
                            is_wide || shape.grad_hidden_dtype == shape.accumulator() ? number : element);
  const bool is_online = shape.has_online_softmax();
  std::int64_t logits_of_row = shape.is_fused ? exps_stride(block.classes) : logits_stride(block.classes);
  // Other fused forwards have nothing but samples here, in float32.
  if (shape.mode == LinearCrossEntropyMode::forward && shape.is_fused) {
    logits_of_row = 2 * sampled_classes(shape.classes);
  }
  const bool has_kept_logits = shape.keeps_logits && shape.kept_rows >= rows && !is_backward;
  memory.logits = take(!is_online && !has_kept_logits && !shape.multiplies_kept_exps_alone(),
                       block.rows * logits_of_row, shape.is_fused ? element : number);
  if (shape.is_fused) {
    const std::int64_t sums = cuda::exp_product_sums(block.rows, block.classes);
    const auto take_floats = [&](bool is_needed, std::int64_t count) {
      return static_cast<float*>(take(is_needed, count, sizeof(float)));
    };
    FusedMemory& fused = memory.fused;
    const std::int64_t finished = is_backward ? std::max(block.rows, shape.kept_rows) : block.rows;  // finished at once
    const std::int64_t with_target = shape.has_exps() ? rows : finished;
    const bool has_moments = !is_online || shape.has_entropy || shape.is_shard;
    fused.shift = take_floats(!is_online, block.rows);
    fused.target = static_cast<std::int32_t*>(take(true, with_target, sizeof(std::int32_t)));
    fused.target_logit = take_floats(true, block.rows);
    fused.tile_shifts = take_floats(is_online, sums);
    fused.sums = take_floats(!is_backward, sums);
    fused.moments = take_floats(!is_backward && has_moments, sums);
    const bool repeats_rows = !is_backward && !is_online;
    fused.repeated_count = static_cast<std::int32_t*>(take(repeats_rows, 1, sizeof(std::int32_t)));
    fused.repeated_rows = static_cast<std::int32_t*>(take(repeats_rows, block.rows, sizeof(std::int32_t)));
    fused.samples = memory.logits;  // the samples are read before the product writes its exps there
    fused.constant = take_floats(is_backward, block.rows);
    fused.slope = take_floats(is_backward, block.rows);
    fused.row_factor = take_floats(has_exps, finished);
    fused.target_gradient = take_floats(has_exps, with_target);
    const bool adds_targets = has_exps && (shape.has_grad_head || shape.has_grad_bias);
    fused.first_of_class = static_cast<std::int32_t*>(take(adds_targets, shape.classes, sizeof(std::int32_t)));
    fused.has_more_rows = static_cast<std::int32_t*>(take(adds_targets, with_target, sizeof(std::int32_t)));
    const bool scales_hidden = has_exps && shape.has_grad_head;
    fused.scaled_hidden = scales_hidden && shape.has_grad_hidden
                              ? memory.grad_hidden
                              : take(scales_hidden, block.rows * shape.features, element);
  }
  const bool has_fused_statistics = shape.is_fused && !shape.is_shard;
  memory.statistics = take(!is_backward && (has_fused_statistics || block.classes < shape.classes),
                           ceil_divide(shape.classes, block.classes) * block.rows * kCrossEntropyStatistics,
                           size_of(shape.statistics_dtype()));
  if (shape.device.type == DeviceType::cuda) {
    // Twice the most that cross_entropy.h states: enough for each of its calls with any options.
    memory.loss.bytes = 2 * ((std::size_t{1} << 20) + static_cast<std::size_t>(block.rows) * 40);
    memory.loss.data = take(true, static_cast<std::int64_t>(memory.loss.bytes), 1);
    memory.product.bytes = is_online ? 0 : kGemmWorkspaceBytes;
    memory.product.data = take(true, static_cast<std::int64_t>(memory.product.bytes), 1);
  }
  return used;
}

inline std::size_t workspace_bytes(const LinearCrossEntropyShape& shape, const LinearCrossEntropyBlock& block) {
  LinearCrossEntropyMemory memory;
  return lay_out(shape, block, nullptr, memory);
}

}  // namespace eaves
