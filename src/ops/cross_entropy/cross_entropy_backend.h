// What a backend of cross_entropy gets: a problem that has been checked, has rows, and speaks of rows and columns
// instead of axes.
#pragma once

#include <cstddef>

#include "core/loss_outputs.h"
#include "core/row_targets.h"
#include "core/rows.h"
#include "eaves/context.h"
#include "eaves/cross_entropy.h"
#include "eaves/tensor.h"

namespace eaves {

/// Numbers of the tensors in a problem's view. The first three have rows and columns, the others one element per row.
namespace cross_entropy_tensors {
inline constexpr int kLogits = 0;
inline constexpr int kGradLogits = 1;   ///< in the forward the logits again
inline constexpr int kSoftTargets = 2;  ///< with hard targets the logits again
inline constexpr int kTargets = 3;      ///< hard ones
inline constexpr int kPerRow = 4;       ///< every per-row output, and what the backward takes of them: contiguous
inline constexpr int kGradLoss = 5;     ///< strides of 0 where the loss is reduced
}  // namespace cross_entropy_tensors

using CrossEntropyView = RowView<3, 6>;

/// What of its options a call has to do more for than a plain softmax.
struct LossPlan {
  bool has_transform = false;  ///< z' is not z
  bool has_logit_sum = false;  ///< sum of u_v * z'_v is wanted: soft targets, smoothing or mean_logit
  bool has_factors = false;    ///< and u is not 1: soft targets, or smoothing over weighted classes
  bool has_moment = false;     ///< the entropy, or its gradient
  bool has_square = false;     ///< the sum of p^2
  bool has_best = false;       ///< the class of the largest logit

  bool needs_only_softmax() const {
    return !has_transform && !has_logit_sum && !has_moment && !has_square && !has_best;
  }
};

struct CrossEntropyInputs {
  CrossEntropyView view;
  Device device;
  DType logits_dtype;
  const void* logits;
  TypedNumbers targets;      ///< int32, int64, or of soft targets logits_dtype or float32
  TypedNumbers weight;       ///< logits_dtype or float32; nullptr where there is none
  const void* row_weight;    ///< per row, float32 or float64 as the outputs; nullptr where there is none
  std::int64_t first_class;  ///< of the logits' columns; 0 but for shards
  std::int64_t classes;      ///< V, of all shards
  CrossEntropyOptions options;
  LossPlan plan;
  Dims row_shape;  ///< of hard targets: what an error counts them by

  bool has_soft_targets() const { return is_floating_point(targets.dtype); }
  /// Hard ones; there are rows.
  RowTargets row_targets() const {
    return {view, cross_entropy_tensors::kTargets, cross_entropy_tensors::kPerRow, targets};
  }
};

struct CrossEntropyForwardProblem {
  CrossEntropyInputs inputs;
  bool skips_ignored;
  const void* normalizer;  ///< nullptr: the weights of the rows
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
  const void* divisor;  ///< nullptr but for the mean
  DType grad_dtype;     ///< that of the logits; or 16 bits over float32 logits, see CrossEntropyInPlaceProblem
  void* grad_logits;    ///< may be inputs.logits
};

/// Forward and backward in place: inputs.logits is overwritten. Where grad_dtype is narrower than logits of float32,
/// the rows are contiguous and start on 16 bytes, and the gradient of each takes the first half of its row; the view's
/// kGradLogits then counts elements of grad_dtype.
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
  CrossEntropyInputs inputs;  ///< no logits, no weight; the view has rows alone
  bool has_weight;
  bool skips_ignored;
  std::int64_t shards;
  const void* statistics;  ///< [shards, rows, kCrossEntropyStatistics]
  DType statistics_dtype;
  const void* normalizer;
  LossOutputs outputs;
};

namespace cpu {
/// All rely on targets that are in range.
void cross_entropy(const CrossEntropyForwardProblem& problem, const ExecutionContext& context);
void cross_entropy(const CrossEntropyBackwardProblem& problem, const ExecutionContext& context);
void cross_entropy(const CrossEntropyInPlaceProblem& problem, const ExecutionContext& context);
void cross_entropy(const CrossEntropyRescaleProblem& problem, const ExecutionContext& context);
void cross_entropy(const CrossEntropyShardProblem& problem, const ExecutionContext& context);
void cross_entropy(const CrossEntropyMergeProblem& problem, const ExecutionContext& context);
}  // namespace cpu

namespace cuda {
/// `context.workspace` holds cross_entropy_workspace_bytes().
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
