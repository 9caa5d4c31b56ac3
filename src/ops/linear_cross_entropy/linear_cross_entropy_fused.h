// The steps of linear_cross_entropy around a product that ends in exponentials (cuda/exp_product.h), on a GPU: what
// each row gets from it and gives to it. The numbers of a row's softmax come from
//
//   t = z' * log2(e) - shift,   z' = scale * z, or with a soft cap  softcap * tanh(scale / softcap * z)
//
// In the forward `shift` is a guess at the row's largest z' * log2(e), and the row's statistics come from its sums of
// 2^t and 2^t * t. In the backward it is the row's lse, and 2^t is its softmax.
#pragma once

#include <cstdint>

#include "cuda/exp_product.h"
#include "eaves/cross_entropy.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_plan.h"

namespace eaves::cuda {

/// More are not taken: which tiles of a row are computed again is kept as bits in shared memory.
inline constexpr std::int64_t kMostFusedClasses = std::int64_t{1} << 20;

/// Some rows and a block of classes.
struct FusedRows {
  Device device;
  DType dtype;
  std::int64_t rows;
  std::int64_t features;
  GemmMatrix x;
  GemmMatrix weight;  ///< of the block's classes
  const float* bias;  ///< of the block's classes; nullptr: 0
  std::int64_t first_class;
  std::int64_t classes;      ///< of the block
  std::int64_t all_classes;  ///< V, of all shards
  TypedNumbers targets;      ///< from the first row on
  std::int64_t target_stride;
  const float* class_weight;  ///< of the head's classes; nullptr: 1
  CrossEntropyOptions options;
  ExpProductMemory memory;
};

/// Before the product: guesses each row's shift from `samples` [rows, sampled_classes()], the logits of classes taken
/// at equal distances, writes it and the target, and clears first_of_class where that is wanted.
void guess_shifts(const char* op, const FusedRows& rows, void* stream);

/// The product, and statistics [rows, kCrossEntropyStatistics] (cross_entropy.h) from its sums. Where a sum left the
/// range of float32, because a logit is far above the guess, the tile's logits are computed again, one by one.
void statistics_of_product(const char* op, const FusedRows& rows, float* statistics, const ExecutionContext& context);

/// What the gradient of a row is made of, per row and contiguous, as in cross_entropy_backward.
struct FusedGradient {
  const float* grad_loss;
  std::int64_t grad_loss_stride;  ///< 0 or 1
  const float* row_weight;        ///< this and the next two: nullptr where there are none
  const float* grad_lse;          ///< of the backward, as those that follow
  const float* grad_entropy;
  KeptLse lse;
  const float* entropy;        ///< with grad_entropy
  const float* target_weight;  ///< of a shard with class weights; nullptr: class_weight has that of every target
  void* to;                    ///< [rows, classes], the dtype of x
  std::int64_t stride;
};

/// The gradient of the logits, by one product.
void gradient_by_product(const char* op, const FusedRows& rows, const FusedGradient& gradient,
                         const ExecutionContext& context);

/// Both at once: the product, statistics as above, and of the gradient of the logits, before the row's softmax is
/// known, three parts:
///
///   gradient[row, class] = memory.row_factor[row] * powers[row, class]  but of the target memory.target_gradient[row]
///
/// with the powers, 0 for the target, in gradient.to. x and weight are of bfloat16. Where the classes are a shard,
/// finish_powers_of_shard() has to follow.
void powers_of_product(const char* op, const FusedRows& rows, const FusedGradient& gradient, bool is_shard,
                       float* statistics, const ExecutionContext& context);

/// row_factor and target_gradient by the statistics of all shards, [shards, rows, kCrossEntropyStatistics].
void finish_powers_of_shard(const char* op, const FusedRows& rows, const FusedGradient& gradient,
                            const float* statistics, const float* gathered, std::int64_t shards, void* stream);

/// After that: x times memory.row_factor, to [rows, features] of the dtype of x.
void scale_rows(const char* op, const FusedRows& rows, void* to, void* stream);

/// And the targets' part of grad_weight, [classes, features], and grad_bias, [classes], added to them; nullptr where
/// one is not wanted. Bitwise repeatable.
void add_targets(const char* op, const FusedRows& rows, void* grad_weight, DType dtype, std::int64_t stride,
                 double* grad_bias, void* stream);

}  // namespace eaves::cuda
