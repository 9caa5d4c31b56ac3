// The fused path of linear_cross_entropy on a GPU: the logits end in their product (cuda/exp_product.h) as
// exponentials, and are never in memory. For a row x_i of hidden, x [N, d], the head W [V, d] and the row's target y:
//
//   z  = x_i W^T + bias                      float32, in the product's accumulators
//   z' = scale * z,  or softcap * tanh(scale / softcap * z)
//   t  = z' * log2(e) - shift_i,  E = 2^t    so softmax_i = E / sum(E), whatever the shift
//   dL/dz = (m_i * softmax_i - h_i * [v = y]) * dz'/dz    m, h: softmax_factor and target_factor of RowGradient
//
// The loss alone, with kLeastOnlineFeatures or more (softmax.cu). An online softmax: for each tile of 192 classes the
// product finds the largest z' * log2(e), which is the shift of the tile, and writes S = sum(E), for an entropy
// M = sum(E * t), and z of the target. The tiles are moved to the row's largest shift and
// added in float64. Then lse = (shift + log2(S)) / log2(e), and M gives the entropy. No row's time or result depends on
// other logits.
//
// Every other loss (shifts.cu, statistics.cu); exps need a shift before them. shift_i is a guess at the row's largest
// z' * log2(e): the largest of up to 1024 samples at equal distances, and of the target's. S and M of all tiles count
// from it. The logits of a tile with S > 2^120 are computed again, one by one, and all logits of a row whose guess was
// too far off: S is 0 or infinite, or lse is next to 0 and has lost its digits. The host waits for none of this.
//
// Loss and gradients at once (exps.cu). The product also writes E in bfloat16, whose range is float32's, times the
// derivative of tanh. The gradients are products with E, put right by a factor for each row. The target's element is
// most of the gradient: its E becomes 0, and its part is added in float32.
//
//   f_i = scale * m_i / S_i                  row_factor
//   g_i = dL/dz of the target                target_gradient
//   dX_i = f_i * (E W)_i + g_i * W_y         float32 up to here, rounded once
//   dW = E^T (f x) + g_i * x_i in row y      f x in bfloat16: x is rounded a second time
//   dbias = sum(f_i * E) + g_i at y          float64
//
// Where S or 1 / f is not within 2^-100 to 2^95, E is multiplied by a power of two, so that f x keeps its range. A
// shard knows S and m of all classes only when the statistics are gathered: finish_exps_of_shard() finishes f and g
// then.
//
// Exps that a forward keeps for the backward (kept.cu) are those of both at once with m = 1: the backward multiplies
// row_factor by m. With dL/d(entropy) it writes the gradient of the logits over them, from log(softmax) = log(f E).
//
// The backward (gradient.cu). lse is known: shift = lse * log2(e), and E is the softmax. The product writes
// E * (constant_i + slope_i * t), rounded once; the slope is the entropy's. Then the target's element is put right.
#pragma once

#include <cstdint>

#include "cuda/exp_product.h"
#include "eaves/cross_entropy.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_memory.h"

namespace eaves::cuda {

struct FeatureRows;

/// Some rows and a block of classes.
struct FusedRows {
  const char* op;
  Device device;
  DType dtype;
  std::int64_t rows;
  std::int64_t features;
  GemmMatrix hidden;
  GemmMatrix head;    ///< of the block's classes
  const float* bias;  ///< of the block's classes; nullptr: 0
  std::int64_t first_class;
  std::int64_t classes;      ///< of the block
  std::int64_t all_classes;  ///< V, of all shards
  bool is_shard;
  bool is_kept;          ///< the exps are for a backward: what the gradient is made of is not known yet
  TypedNumbers targets;  ///< from the first row on
  std::int64_t target_stride;
  const float* class_weight;  ///< of the head's classes; nullptr: 1
  CrossEntropyOptions options;
  FusedMemory memory;
  ExecutionContext context;
};

/// What the gradient of a row is made of, per row and contiguous, as in cross_entropy_backward.
struct FusedGradient {
  const float* alpha;             ///< one number that all upstream gradients are multiplied by; nullptr: 1
  const float* grad_loss;         ///< nullptr: 1
  std::int64_t grad_loss_stride;  ///< 0 or 1
  const float* row_weight;        ///< this and the next two: nullptr where there are none
  const float* grad_lse;          ///< of the backward, as those that follow
  const float* grad_entropy;
  KeptLse lse;
  const float* entropy;        ///< with grad_entropy
  const float* target_weight;  ///< of a shard with class weights; nullptr: class_weight has that of every target
  void* to;                    ///< [rows, classes], the dtype of hidden: exps, or the gradient of the logits
  std::int64_t stride;
};

/// The loss alone, with no shift before the product: the targets, the product with its online softmax, and statistics
/// [rows, kCrossEntropyStatistics] (cross_entropy.h).
void write_online_statistics(const FusedRows& rows, float* statistics);

/// Before another product: each row's shift and target. Clears first_of_class unless it is nullptr.
void guess_shifts(const FusedRows& rows);

/// The product, and statistics.
void write_statistics(const FusedRows& rows, float* statistics);

/// The same, exps, row_factor and target_gradient. hidden and head are of bfloat16.
void write_exps(const FusedRows& rows, const FusedGradient& gradient, float* statistics);

/// row_factor and target_gradient of a shard, by the statistics of all: [shards, rows, kCrossEntropyStatistics].
void finish_exps_of_shard(const FusedRows& rows, const FusedGradient& gradient, const float* statistics,
                          const float* gathered, std::int64_t shards);

/// dX from E W; `to` is grad_hidden of all rows.
void write_grad_hidden(const FusedRows& rows, const FeatureRows& place, const void* product, void* to, DType dtype);

/// hidden, each row times its factor, or with nullptr as it is.
void copy_hidden(const FusedRows& rows, const float* factor, void* to, std::int64_t stride);

/// The exps' part of grad_bias.
void add_bias_gradient(const FusedRows& rows, const FusedGradient& gradient, bool is_first, double* grad_bias);

/// The targets' part of grad_head, [classes, features], and grad_bias, [classes]; nullptr where one is not wanted.
/// Bitwise repeatable.
void add_targets(const FusedRows& rows, void* grad_head, DType dtype, std::int64_t stride, double* grad_bias);

/// Behind write_exps(): row_factor and target_logit, to the last elements of each row of exps.
void keep_numbers(const FusedRows& rows, const FusedGradient& gradient);

/// What write_exps() leaves where nothing is kept, from the numbers of keep_numbers(): row_factor, target_gradient and
/// what add_targets() reads.
void finish_kept_exps(const FusedRows& rows, const FusedGradient& gradient);

/// The gradient of the logits, over their kept exps.
void write_gradient_of_exps(const FusedRows& rows, const FusedGradient& gradient);

/// The gradient of the logits in the backward.
void write_gradient(const FusedRows& rows, const FusedGradient& gradient);

}  // namespace eaves::cuda
