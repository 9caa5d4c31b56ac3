// What a backend of linear_cross_entropy gets: a problem that has been checked and speaks of rows, features and
// classes instead of axes. One struct for all calls: what a call does not have is nullptr.
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

/// Numbers of the tensors in a problem's view. The first two have rows and features, the others one element per row.
namespace linear_cross_entropy_tensors {
inline constexpr int kHidden = 0;
inline constexpr int kGradHidden = 1;  ///< without it hidden again
inline constexpr int kTargets = 2;     ///< hard ones
inline constexpr int kPerRow = 3;      ///< every per-row output, and what the backward takes of them: contiguous
inline constexpr int kGradLoss = 4;    ///< strides of 0 where the loss is reduced
}  // namespace linear_cross_entropy_tensors

using LinearCrossEntropyView = RowView<2, 5>;

enum class LinearCrossEntropyMode { forward, forward_backward, backward };

/// The tensor of a forward that its backward reads, one row for each of the first rows that are computed: their logits,
/// or in bfloat16 their exps (fused/fused.h) with the row's numbers in the last elements.
struct KeptRows {
  void* data;  ///< nullptr: nothing is kept
  DType dtype;
  std::int64_t rows;
  std::int64_t stride;

  bool are_exps() const { return data != nullptr && dtype == DType::bfloat16; }
  bool are_logits() const { return data != nullptr && dtype != DType::bfloat16; }
};

/// The scale is dL/d(loss) over the mean's divisor, if all rows have the same number or 0. Products multiply by a part
/// of it, in float32; the rest is in their factor, the gradient of the logits. A factor of 16 bits has at most a power
/// of two: any other number would be rounded the same way in the target's element of every row.
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
  TypedNumbers targets;  ///< int32 or int64, or soft ones: float32 or float64
  std::int64_t soft_target_stride;
  TypedNumbers class_weight;
  const void* row_weight;  ///< accumulators, per row; nullptr: 1
  CrossEntropyOptions options;
  Dims row_shape;
  bool skips_ignored;
  std::size_t workspace_limit;  ///< the caller's; 0: none

  const void* normalizer;
  LossOutputs outputs;  ///< in the backward those that the forward wrote, which it reads; divisor with the mean

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

  /// Where the classes are those of a shard, what the caller says of it, in the caller's arguments; nullptr without
  /// shards.
  const LinearCrossEntropyShard* shard;
  void* statistics;  ///< of a shard, outside of the backward
  std::int64_t first_class() const { return shard == nullptr ? 0 : shard->first_class; }
  std::int64_t all_classes() const { return shard == nullptr ? classes : shard->classes; }

  bool is_fused;  ///< takes the fused path (fused/fused.h), on which no logits are in memory

  std::int64_t rows() const { return view.row_count; }
  std::int64_t features() const { return view.column_count; }
  DType accumulator() const { return accumulator_dtype(dtype); }
  bool has_soft_targets() const { return is_floating_point(targets.dtype); }
  bool is_reduced() const { return options.reduction != Reduction::none; }

  ScaleInProducts scale_in_products() const {
    const bool is_one = grad_loss.data == nullptr && options.reduction != Reduction::mean;
    // A row must not depend on the numbers of the others.
    const bool keeps_rows_apart = !is_reduced() && is_batch_invariant();
    if (size_of(dtype) != 2 || is_one || keeps_rows_apart) return ScaleInProducts::nothing;
    // The power of two may make a factor of float16 underflow. Without it dL/d(lse) or dL/d(entropy), divided by all of
    // the scale, may overflow.
    const bool is_alone = grad_lse == nullptr && grad_entropy == nullptr;
    return is_alone ? ScaleInProducts::all : ScaleInProducts::all_but_power_of_two;
  }
  bool wants_gradients() const { return grad_hidden != nullptr || grad_head != nullptr || grad_bias != nullptr; }
};

/// Checks the arguments of a call; throws InvalidArgument.
LinearCrossEntropyProblem make_problem(const LinearCrossEntropyForwardArgs& args);
LinearCrossEntropyProblem make_problem(const LinearCrossEntropyForwardBackwardArgs& args);
LinearCrossEntropyProblem make_problem(const LinearCrossEntropyBackwardArgs& args);
LinearCrossEntropyProblem make_problem(const LinearCrossEntropyShardForwardArgs& args);

/// Can a call take the fused path, and is that the faster one? The other members of the problem are read.
bool suits_fused_path(const LinearCrossEntropyProblem& problem);

/// Can a forward keep exps?
bool suits_kept_exps(const LinearCrossEntropyProblem& problem);

/// Rows and classes whose logits are computed at once; see linear_cross_entropy_plan.h.
struct LinearCrossEntropyBlock {
  std::int64_t rows;
  std::int64_t classes;
};

namespace cpu {
/// Relies on targets that are in range, and on a `context.workspace` of the block's size (linear_cross_entropy_plan.h).
void linear_cross_entropy(const LinearCrossEntropyProblem& problem, const LinearCrossEntropyBlock& block,
                          const ExecutionContext& context);
}  // namespace cpu

namespace cuda {
void linear_cross_entropy(const LinearCrossEntropyProblem& problem, const LinearCrossEntropyBlock& block,
                          const ExecutionContext& context);
}  // namespace cuda

}  // namespace eaves
