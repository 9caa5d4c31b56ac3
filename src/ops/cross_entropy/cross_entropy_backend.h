// The interface between the calls of cross_entropy and its backends: checked problems, in rows and columns instead of
// axes.
#pragma once

#include <cstddef>

#include "core/loss_outputs.h"
#include "core/row_targets.h"
#include "core/rows.h"
#include "eaves/context.h"
#include "eaves/cross_entropy.h"
#include "eaves/tensor.h"

namespace eaves {

/// Indices of the tensors in a problem's view. The first three have rows and columns, the others one element per row.
namespace cross_entropy_tensors {
inline constexpr int kLogits = 0;
inline constexpr int kGradLogits = 1;   ///< in the forward: the logits again
inline constexpr int kSoftTargets = 2;  ///< with hard targets: the logits again
inline constexpr int kTargets = 3;      ///< hard targets
inline constexpr int kPerRow = 4;       ///< contiguous: the per-row outputs, and the per-row inputs of the backward
inline constexpr int kGradLoss = 5;     ///< strides are 0 if the loss is reduced
}  // namespace cross_entropy_tensors

using CrossEntropyView = RowView<3, 6>;

/// The work of a call beyond a plain softmax.
struct LossPlan {
  bool has_transform = false;  ///< z' is not z
  bool has_logit_sum = false;  ///< sum_v u_v z'_v is needed: soft targets, smoothing or mean_logit
  bool has_factors = false;    ///< u_v is not 1: soft targets, or smoothing over weighted classes
  bool has_moment = false;     ///< the entropy or its gradient is needed
  bool has_square = false;     ///< sum_v p_v^2 is needed
  bool has_best = false;       ///< the class of the largest logit is needed

  bool needs_only_softmax() const {
    return !has_transform && !has_logit_sum && !has_moment && !has_square && !has_best;
  }
};

struct CrossEntropyInputs {
  CrossEntropyView view;
  Device device;
  DType logits_dtype;
  const void* logits;
  TypedNumbers targets;      ///< int32 or int64; soft targets: logits_dtype or float32
  TypedNumbers weight;       ///< logits_dtype or float32; nullptr: no class weights
  const void* row_weight;    ///< per row, in the dtype of the outputs (float32 or float64); nullptr: no row weights
  std::int64_t first_class;  ///< the class of column 0; 0 without shards
  std::int64_t classes;      ///< V, over all shards
  CrossEntropyOptions options;
  LossPlan plan;
  Dims row_shape;  ///< the shape of hard targets: an error names a target by its index in it

  bool has_soft_targets() const { return is_floating_point(targets.dtype); }
  /// Requires hard targets and at least one row.
  RowTargets row_targets() const {
    return {view, cross_entropy_tensors::kTargets, cross_entropy_tensors::kPerRow, targets};
  }
};

struct CrossEntropyForwardProblem {
  CrossEntropyInputs inputs;
  bool skips_ignored;
  const void* normalizer;  ///< nullptr: the mean divides by the weights of the rows
  LossOutputs outputs;
};

struct CrossEntropyBackwardProblem {
  CrossEntropyInputs inputs;
  TypedNumbers grad_loss;  ///< nullptr: 1 (in place only)
  const void* grad_lse;
  const void* grad_entropy;
  KeptLse lse;
  const void* entropy;
  const void* target_mass;
  const void* divisor;  ///< nullptr unless the reduction is the mean
  DType grad_dtype;     ///< the logits' dtype, or 16 bits over float32 logits (CrossEntropyInPlaceProblem)
  void* grad_logits;    ///< may equal inputs.logits
};

/// Forward and backward in place: the gradient overwrites inputs.logits. If grad_dtype has 16 bits and the logits are
/// float32, the rows are contiguous and start on 16 bytes, the gradient takes the first half of each row, and the
/// view's kGradLogits counts elements of grad_dtype.
struct CrossEntropyInPlaceProblem {
  CrossEntropyForwardProblem forward;
  DType grad_dtype;
  TypedNumbers grad_loss;  ///< nullptr: 1
};

/// Tensors 0 and 1 of the view are the gradient.
struct CrossEntropyRescaleProblem {
  CrossEntropyView view;
  Device device;
  DType dtype;
  void* grad_logits;
  TypedNumbers grad_loss;
};

struct CrossEntropyShardProblem {
  CrossEntropyInputs inputs;
  void* statistics;  ///< [rows, kCrossEntropyStatistics]
  DType statistics_dtype;
};

struct CrossEntropyMergeProblem {
  CrossEntropyInputs inputs;  ///< without logits and class weights; the view has rows only
  bool has_weight;
  bool skips_ignored;
  std::int64_t shards;
  const void* statistics;  ///< [shards, rows, kCrossEntropyStatistics]
  DType statistics_dtype;
  const void* normalizer;
  LossOutputs outputs;
};

namespace cpu {
/// All require hard targets in range: the calls have checked them.
void cross_entropy(const CrossEntropyForwardProblem& problem, const ExecutionContext& context);
void cross_entropy(const CrossEntropyBackwardProblem& problem, const ExecutionContext& context);
void cross_entropy(const CrossEntropyInPlaceProblem& problem, const ExecutionContext& context);
void cross_entropy(const CrossEntropyRescaleProblem& problem, const ExecutionContext& context);
void cross_entropy(const CrossEntropyShardProblem& problem, const ExecutionContext& context);
void cross_entropy(const CrossEntropyMergeProblem& problem, const ExecutionContext& context);
}  // namespace cpu

namespace cuda {
/// `context.workspace` has at least cross_entropy_workspace_bytes().
void cross_entropy(const CrossEntropyForwardProblem& problem, const ExecutionContext& context);
void cross_entropy(const CrossEntropyBackwardProblem& problem, const ExecutionContext& context);
void cross_entropy(const CrossEntropyInPlaceProblem& problem, const ExecutionContext& context);
void cross_entropy(const CrossEntropyRescaleProblem& problem, const ExecutionContext& context);
void cross_entropy(const CrossEntropyShardProblem& problem, const ExecutionContext& context);
void cross_entropy(const CrossEntropyMergeProblem& problem, const ExecutionContext& context);
std::size_t cross_entropy_workspace_bytes(const CrossEntropyForwardProblem& problem);
std::size_t cross_entropy_workspace_bytes(const CrossEntropyInPlaceProblem& problem);
std::size_t cross_entropy_workspace_bytes(const CrossEntropyShardProblem& problem);
std::size_t cross_entropy_workspace_bytes(const CrossEntropyMergeProblem& problem);
inline std::size_t cross_entropy_workspace_bytes(const CrossEntropyBackwardProblem&) { return 0; }
inline std::size_t cross_entropy_workspace_bytes(const CrossEntropyRescaleProblem&) { return 0; }
}  // namespace cuda

}  // namespace eaves
