// The fused path of linear_cross_entropy on a GPU. The product x W^T (cuda/exp_product.h) takes the exponentials of its
// own accumulators, so the float32 logits are never in memory. x [N, d] is hidden, W [V, d] the head, i a row with the
// target y, v a class:
//
//   z_iv  = x_i . W_v + bias_v                       float32, in the product's accumulators
//   z'_iv = scale * z_iv,  or softcap * tanh(scale / softcap * z_iv)
//   t_iv  = z'_iv * log2(e) - u_i                    u_i: the shift of the row
//   E_iv  = 2^t_iv,  S_i = sum_v E_iv                softmax_iv = E_iv / S_i for any u_i
//   M_i   = sum_v E_iv * t_iv                        the moment, for the entropy
//   lse_i = ln(2) * (u_i + log2(S_i)),  entropy_i = ln(2) * (log2(S_i) - M_i / S_i)
//   dL/dz_iv = (m_i * softmax_iv - h_i * [v = y]) * dz'/dz      m, h: softmax_factor, target_factor of RowGradient
//
// The product writes S and M of each row and each tile of 192 classes, and the logit z_iy of the target.
//
// The loss alone, with at least kLeastOnlineFeatures features: an online softmax (softmax.cu). The product finds the
// shift of each tile, the largest z' * log2(e) among its classes. merge_tiles() moves the tiles of a row to the row's
// largest shift and adds them in float64. All data take the same time, and no row depends on another.
//
// Every other loss (shifts.cu, statistics.cu) guesses the shift before the product: E in memory needs it there, and
// with few features the epilogue is the bottleneck, which a guess makes shorter. u_i is a guess at the row's largest
// z' * log2(e): the largest of up to 1024 sampled classes at equal distances, and of the target. Some logits are
// computed again, one by one: a tile with S > 2^120, or all of a row with a guess that was too far off (S is 0 or
// infinite, or lse is next to 0 and has lost its digits). The host waits for none of this.
//
// Loss and gradients at once (exps.cu). The product writes E, with a soft cap times the derivative of tanh, in
// bfloat16, which has the range of float32; the code calls these numbers exps. No pass divides E by S: one factor for
// each row corrects both products. The target's element is most of the gradient and must not have E's rounding: E_iy
// becomes 0, and its part is added in float32.
//
//   f_i   = scale * m_i / S_i                        row_factor
//   g_i   = dL/dz_iy                                 target_gradient
//   dX_i  = f_i * (E W)_i + g_i * W_y                float32, rounded once
//   dW    = E^T (f x),     dW_y += g_i * x_i         f_i * x_i in bfloat16: x is rounded a second time
//   dbias = sum_i f_i E_i, dbias_y += g_i            float64
//
// If a tile of the row was computed again, or if S or 1 / f leaves the range 2^-100 to 2^95, lower_exps() multiplies
// E_i by a power of two, so that f x keeps its range. A shard knows S and m of all classes only after the gather:
// finish_exps_of_shard() then finishes f and g.
//
// Kept exponentials (kept.cu): a forward writes E with m = 1, and the backward multiplies f by its own m. With
// dL/d(entropy) the backward overwrites E with the gradient of the logits, computed from log(softmax) = log(E / S).
//
// The backward (gradient.cu). lse is known, so u = lse * log2(e) makes E the softmax. The product writes the gradient
// of the logits, E_iv * (constant_i + slope_i * t_iv), with a soft cap times the derivative of tanh, rounded once;
// slope_i belongs to the entropy's gradient. A kernel then overwrites the target's element.
#pragma once

#include <cstdint>

#include "cuda/exp_product.h"
#include "eaves/cross_entropy.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_memory.h"

namespace eaves::cuda {

struct FeatureRows;

/// A range of rows and a block of classes.
struct FusedRows {
  const char* op;
  Device device;
  DType dtype;
  std::int64_t rows;
  std::int64_t features;
  GemmMatrix hidden;
  GemmMatrix head;    ///< the classes of the block
  const float* bias;  ///< the classes of the block; nullptr: 0
  std::int64_t first_class;
  std::int64_t classes;      ///< in the block
  std::int64_t all_classes;  ///< V, in all shards
  bool is_shard;
  bool is_kept;          ///< the exps are for a later backward, so m is not known yet
  TypedNumbers targets;  ///< from the first row of the range on
  std::int64_t target_stride;
  const float* class_weight;  ///< of the head's classes; nullptr: 1
  CrossEntropyOptions options;
  FusedMemory memory;
  ExecutionContext context;
};

/// The inputs of a row's gradient, per row and contiguous, as in cross_entropy_backward.
struct FusedGradient {
  const float* alpha;             ///< one number that multiplies all upstream gradients; nullptr: 1
  const float* grad_loss;         ///< nullptr: 1
  std::int64_t grad_loss_stride;  ///< 0 or 1
  const float* row_weight;        ///< nullptr if absent, like the next two
  const float* grad_lse;          ///< in the backward alone, like the next members
  const float* grad_entropy;
  KeptLse lse;
  const float* entropy;        ///< given with grad_entropy
  const float* target_weight;  ///< for a shard with class weights; nullptr: class_weight has the weight of every target
  void* to;                    ///< out; [rows, classes], dtype of hidden: E, or the gradient of the logits
  std::int64_t stride;
};

/// The loss alone by an online softmax: finds the targets, runs the product, and writes the statistics [rows,
/// kCrossEntropyStatistics] (cross_entropy.h).
void write_online_statistics(const FusedRows& rows, float* statistics);

/// Before each of the other products: the shift and the target of each row. Clears first_of_class unless it is nullptr.
void guess_shifts(const FusedRows& rows);

/// The product, then the statistics of each row.
void write_statistics(const FusedRows& rows, float* statistics);

/// write_statistics() with E, row_factor and target_gradient. hidden and head are bfloat16.
void write_exps(const FusedRows& rows, const FusedGradient& gradient, float* statistics);

/// row_factor and target_gradient of a shard, from the statistics of all shards: [shards, rows,
/// kCrossEntropyStatistics].
void finish_exps_of_shard(const FusedRows& rows, const FusedGradient& gradient, const float* statistics,
                          const float* gathered, std::int64_t shards);

/// dX from the product E W; `to` is grad_hidden of all rows.
void write_grad_hidden(const FusedRows& rows, const FeatureRows& place, const void* product, void* to, DType dtype);

/// hidden with each row times its factor; nullptr: an exact copy.
void copy_hidden(const FusedRows& rows, const float* factor, void* to, std::int64_t stride);

/// Adds sum_i f_i E_i to grad_bias.
void add_bias_gradient(const FusedRows& rows, const FusedGradient& gradient, bool is_first, double* grad_bias);

/// Adds the targets' parts to grad_head, [classes, features], and grad_bias, [classes]; either may be nullptr. Bitwise
/// repeatable.
void add_targets(const FusedRows& rows, void* grad_head, DType dtype, std::int64_t stride, double* grad_bias);

/// After write_exps(): stores row_factor and target_logit in the last elements of each row of exps.
void keep_numbers(const FusedRows& rows, const FusedGradient& gradient);

/// From the stored numbers of keep_numbers(): row_factor, target_gradient and the inputs of add_targets(), as
/// write_exps() leaves them in a call without `kept`.
void finish_kept_exps(const FusedRows& rows, const FusedGradient& gradient);

/// Overwrites the kept exps with the gradient of the logits.
void write_gradient_of_exps(const FusedRows& rows, const FusedGradient& gradient);

/// The gradient of the logits in the backward, from lse.
void write_gradient(const FusedRows& rows, const FusedGradient& gradient);

}  // namespace eaves::cuda
