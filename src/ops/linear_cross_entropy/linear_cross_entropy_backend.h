// The interface of the backends of linear_cross_entropy: a checked problem in rows, features and classes instead of
// axes. All calls share one struct; members that a call does not have are nullptr.
#pragma once

#include <cstddef>

#include "core/dispatch.h"
#include "core/environment.h"
#include "core/gemm.h"
#include "core/loss_outputs.h"
#include "core/rows.h"
#include "core/typed_numbers.h"
#include "eaves/context.h"
#include "eaves/linear_cross_entropy.h"
#include "eaves/tensor.h"

namespace eaves {

/// Indices of the tensors in a problem's view. The first two have rows and features, the others one element per row.
namespace linear_cross_entropy_tensors {
inline constexpr int kHidden = 0;
inline constexpr int kGradHidden = 1;  ///< hidden again if it is absent
inline constexpr int kTargets = 2;     ///< hard targets
inline constexpr int kPerRow = 3;      ///< all per-row outputs of a forward, also as inputs of the backward: contiguous
inline constexpr int kGradLoss = 4;    ///< strides of 0 for a reduced loss
}  // namespace linear_cross_entropy_tensors

using LinearCrossEntropyView = RowView<2, 5>;

enum class LinearCrossEntropyMode { forward, forward_backward, backward };

/// The `kept` tensor: one row for each of the first computed rows. It holds their logits, or in bfloat16 their exps
/// (fused/fused.h) with the numbers of the row in the last elements.
struct KeptRows {
  void* data;  ///< nullptr: nothing is kept
  DType dtype;
  std::int64_t rows;
  std::int64_t stride;

  bool are_exps() const { return data != nullptr && dtype == DType::bfloat16; }
  bool are_logits() const { return data != nullptr && dtype != DType::bfloat16; }
};

/// The part of the scale that the products multiply by, in float32. The scale is dL/d(loss) over the mean's divisor, if
/// all rows have the same number or 0. The rest of the scale is in the products' factor, the gradient of the logits. A
/// 16-bit factor has at most a power of two: it would round any other number the same way in the target's element of
/// every row.
enum class ScaleInProducts : std::uint8_t { nothing, all_but_power_of_two, all };

struct LinearCrossEntropyProblem {
  LinearCrossEntropyMode mode;
  const char* op;
  LinearCrossEntropyView view;
  Device device;
  DType dtype;  ///< of hidden and head
  const void* hidden;
  GemmMatrix head;  ///< [classes, features]
  std::int64_t classes;
  TypedNumbers bias;
  TypedNumbers targets;  ///< int32 or int64, or soft targets: float32 or float64
  std::int64_t soft_target_stride;
  TypedNumbers class_weight;
  const void* row_weight;  ///< accumulators, per row; nullptr: 1
  CrossEntropyOptions options;
  Dims row_shape;
  bool skips_ignored;
  std::size_t workspace_limit;  ///< the caller's; 0: none

  const void* normalizer;
  LossOutputs outputs;  ///< in the backward inputs, as the forward wrote them; the divisor with Reduction::mean

  TypedNumbers grad_loss;  ///< nullptr: 1
  const void* grad_lse;
  const void* grad_entropy;

  void* grad_hidden;
  DType grad_hidden_dtype;
  void* grad_head;
  DType grad_head_dtype;
  std::int64_t grad_head_stride;
  void* grad_bias;
  DType grad_bias_dtype;
  bool accumulates;

  KeptRows kept;

  /// The shard in the caller's arguments, if the classes are a shard; nullptr without shards.
  const LinearCrossEntropyShard* shard;
  void* statistics;  ///< of a shard, outside of the backward
  std::int64_t first_class() const { return shard == nullptr ? 0 : shard->first_class; }
  std::int64_t all_classes() const { return shard == nullptr ? classes : shard->classes; }

  bool is_fused;  ///< takes the fused path (fused/fused.h), with no logits in memory

  std::int64_t rows() const { return view.row_count; }
  std::int64_t features() const { return view.column_count; }
  DType accumulator() const { return accumulator_dtype(dtype); }
  bool has_soft_targets() const { return is_floating_point(targets.dtype); }
  bool is_reduced() const { return options.reduction != Reduction::none; }

  ScaleInProducts scale_in_products() const {
    const bool is_one = grad_loss.data == nullptr && options.reduction != Reduction::mean;
    // A row must not depend on the upstream gradients of the other rows.
    const bool keeps_rows_apart = !is_reduced() && is_batch_invariant();
    if (size_of(dtype) != 2 || is_one || keeps_rows_apart) return ScaleInProducts::nothing;
    // In a float16 factor the power of two may underflow. But beside dL/d(lse) or dL/d(entropy) it stays there: these
    // are divided by the products' part of the scale, and may overflow if that is all of it.
    const bool is_alone = grad_lse == nullptr && grad_entropy == nullptr;
    return is_alone ? ScaleInProducts::all : ScaleInProducts::all_but_power_of_two;
  }
  bool wants_gradients() const { return grad_hidden != nullptr || grad_head != nullptr || grad_bias != nullptr; }
};

/// Check the arguments of a call; throw InvalidArgument.
LinearCrossEntropyProblem make_problem(const LinearCrossEntropyForwardArgs& args);
LinearCrossEntropyProblem make_problem(const LinearCrossEntropyForwardBackwardArgs& args);
LinearCrossEntropyProblem make_problem(const LinearCrossEntropyBackwardArgs& args);
LinearCrossEntropyProblem make_problem(const LinearCrossEntropyShardForwardArgs& args);

/// True if a call can take the fused path, and that path is faster. The other members of `problem` have to be set.
bool suits_fused_path(const LinearCrossEntropyProblem& problem);

/// True if a forward can keep exps.
bool suits_kept_exps(const LinearCrossEntropyProblem& problem);

/// The rows and classes of the logits that are computed at once; see linear_cross_entropy_plan.h.
struct LinearCrossEntropyBlock {
  std::int64_t rows;
  std::int64_t classes;
};

namespace cpu {
/// Targets have to be in range, and `context.workspace` has to have the block's size (linear_cross_entropy_plan.h).
void linear_cross_entropy(const LinearCrossEntropyProblem& problem, const LinearCrossEntropyBlock& block,
                          const ExecutionContext& context);
}  // namespace cpu

namespace cuda {
void linear_cross_entropy(const LinearCrossEntropyProblem& problem, const LinearCrossEntropyBlock& block,
                          const ExecutionContext& context);
}  // namespace cuda

}  // namespace eaves
