// The facts of a linear_cross_entropy call that its plan reads: sizes, types, and which tensors the call has. It holds
// no pointers: a rank also plans with the largest shard, and another rank may hold the tensors of that shard.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/dispatch.h"
#include "core/environment.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_backend.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_policy.h"
#include "runtime/backend.h"

namespace eaves {

/// True if the products can read the rows of hidden (and write the rows of its gradient) without a copy, in the order
/// of the per-row tensors.
inline bool is_matrix(const LinearCrossEntropyView& view) {
  using namespace linear_cross_entropy_tensors;
  const auto& rows = view.rows;
  const auto& columns = view.columns;
  if (rows.rank > 1 || columns.rank > 1) return false;
  const auto has_unit_stride = [&](int tensor) { return columns.rank == 0 || columns.strides[tensor][0] == 1; };
  const auto is_row_major = [&](int tensor) { return rows.rank == 0 || rows.strides[tensor][0] >= view.column_count; };
  if (!has_unit_stride(kHidden) || !is_row_major(kHidden)) return false;
  if (!has_unit_stride(kGradHidden) || !is_row_major(kGradHidden)) return false;
  return rows.rank == 0 || rows.strides[kPerRow][0] == 1;
}

struct LinearCrossEntropyShape {
  LinearCrossEntropyMode mode{};
  Device device;
  DType dtype{};  ///< of hidden and head
  DType targets_dtype = DType::int64;
  DType grad_hidden_dtype{};
  DType grad_head_dtype{};
  std::int64_t rows = 0;
  std::int64_t features = 0;
  std::int64_t classes = 0;       ///< of this shard
  std::int64_t all_classes = 0;   ///< of all shards
  std::int64_t most_classes = 0;  ///< of the largest shard
  std::size_t workspace_limit = 0;
  std::size_t device_bytes = 0;  ///< memory of the GPU; 0: unknown
  bool is_shard = false;
  bool is_fused = false;
  bool is_reduced = false;
  bool skips_ignored = false;
  bool is_matrix = true;
  bool has_head_vectors = true;  ///< rows of the head start at multiples of kGemmVector elements

  // The tensors of the call.
  bool has_bias = false;
  bool has_class_weight = false;
  bool has_row_weight = false;
  bool has_grad_loss = false;
  bool has_grad_lse = false;
  bool has_grad_entropy = false;
  bool has_grad_hidden = false;
  bool has_grad_head = false;
  bool has_grad_bias = false;
  bool has_z_loss = false;
  bool has_argmax = false;
  bool has_lse = false;
  bool has_split_lse = false;
  bool has_entropy = false;
  bool has_sum_sq = false;
  bool has_mean_logit = false;
  bool has_target_mass = false;

  std::int64_t kept_rows = 0;
  bool keeps_exps = false;
  bool keeps_logits = false;

  LinearCrossEntropyShape() = default;
  /// Implicit, because a problem has one shape.
  LinearCrossEntropyShape(const LinearCrossEntropyProblem& of)
      : mode(of.mode),
        device(of.device),
        dtype(of.dtype),
        targets_dtype(of.targets.dtype),
        grad_hidden_dtype(of.grad_hidden_dtype),
        grad_head_dtype(of.grad_head_dtype),
        rows(of.rows()),
        features(of.features()),
        classes(of.classes),
        all_classes(of.all_classes()),
        most_classes(of.shard == nullptr ? of.classes : std::max(of.classes, of.shard->most_classes)),
        workspace_limit(of.workspace_limit),
        device_bytes(memory_of(of.device)),
        is_shard(of.shard != nullptr),
        is_fused(of.is_fused),
        is_reduced(of.is_reduced()),
        skips_ignored(of.skips_ignored),
        is_matrix(eaves::is_matrix(of.view)),
        has_head_vectors(of.head.stride % kGemmVector == 0),
        has_bias(of.bias.data != nullptr),
        has_class_weight(of.class_weight.data != nullptr),
        has_row_weight(of.row_weight != nullptr),
        has_grad_loss(of.grad_loss.data != nullptr),
        has_grad_lse(of.grad_lse != nullptr),
        has_grad_entropy(of.grad_entropy != nullptr),
        has_grad_hidden(of.grad_hidden != nullptr),
        has_grad_head(of.grad_head != nullptr),
        has_grad_bias(of.grad_bias != nullptr),
        has_z_loss(of.outputs.z_loss != nullptr),
        has_argmax(of.outputs.argmax != nullptr),
        has_lse(of.outputs.lse.data != nullptr),
        has_split_lse(of.outputs.lse.is_split),
        has_entropy(of.outputs.entropy != nullptr),
        has_sum_sq(of.outputs.sum_sq != nullptr),
        has_mean_logit(of.outputs.mean_logit != nullptr),
        has_target_mass(of.outputs.target_mass != nullptr),
        kept_rows(of.kept.rows),
        keeps_exps(of.kept.are_exps()),
        keeps_logits(of.kept.are_logits()) {}

  bool is_backward() const { return mode == LinearCrossEntropyMode::backward; }
  bool has_exps() const { return is_fused && mode == LinearCrossEntropyMode::forward_backward; }
  /// The loss alone takes an online softmax, which guesses nothing.
  bool has_online_softmax() const {
    const bool is_loss_alone = mode == LinearCrossEntropyMode::forward && kept_rows == 0;
    if (!is_fused || !is_loss_alone) return false;
    return features >= kLeastOnlineFeatures || fused_product() == FusedProduct::wherever_possible;
  }
  /// A backward that computes no logits again.
  bool multiplies_kept_exps_alone() const { return is_backward() && keeps_exps && kept_rows >= rows; }
  bool has_soft_targets() const { return is_floating_point(targets_dtype); }
  bool wants_gradients() const { return has_grad_hidden || has_grad_head || has_grad_bias; }
  DType accumulator() const { return accumulator_dtype(dtype); }
  /// The dtype of statistics between blocks of classes. On the CPU float64: the loss of a class that is almost certain
  /// is part of a sum, and float32 has no digits for that part.
  DType statistics_dtype() const { return device.type == DeviceType::cpu ? DType::float64 : accumulator(); }

  /// Rows may be left out: ignored rows and rows of weight 0; with soft targets rows of weight 0 alone.
  bool leaves_out_rows() const { return skips_ignored && (!has_soft_targets() || has_row_weight); }

  /// The call gathers the soft targets of a block. Otherwise the kernels read all rows of them in place.
  bool gathers_soft_targets() const { return has_soft_targets() && leaves_out_rows(); }

  /// Rows may be gathered: some may be left out, or the layout of hidden needs a copy. Rows of weight 0 with soft
  /// targets are gathered too: no target can mark them as ignored, so the scatter sets their outputs to 0.
  bool may_gather() const { return !is_matrix || leaves_out_rows() || (has_soft_targets() && has_row_weight); }

  /// The plan cuts rows into blocks of classes.
  bool cuts_classes() const {
    if (is_backward()) return true;
    if (is_fused || is_shard) return false;
    // Statistics store the class of the largest logit as an accumulator: float32 has the integers up to 2^24.
    const bool knows_argmax = !has_argmax || accumulator() == DType::float64 || classes <= std::int64_t{1} << 24;
    return !wants_gradients() && knows_argmax;
  }

  /// The shape that plans the calls of all shards: the largest shard, with logits in memory and with all tensors that
  /// any call may have, because a shard may be frozen or have another layout of hidden. Without shards, the shape
  /// itself.
  LinearCrossEntropyShape of_largest_shard() const {
    LinearCrossEntropyShape largest = *this;
    if (!is_shard) return largest;
    largest.classes = most_classes;
    largest.skips_ignored = true;
    if (!largest.gathers_soft_targets()) largest.targets_dtype = DType::int64;
    largest.is_fused = false;
    if (mode == LinearCrossEntropyMode::forward) return largest;
    largest.has_bias = largest.has_class_weight = largest.has_row_weight = true;
    largest.has_grad_loss = largest.has_grad_lse = largest.has_grad_entropy = true;
    largest.has_grad_hidden = largest.has_grad_head = largest.has_grad_bias = true;
    largest.grad_hidden_dtype = largest.grad_head_dtype = accumulator();
    if (!is_backward()) return largest;
    largest.has_lse = largest.has_split_lse = largest.has_entropy = largest.has_target_mass = true;
    return largest;
  }
};

/// True if a backward leaves out rows with upstream gradients that are all 0. Not with shards, because the ranks would
/// have to agree on the rows; not with kept rows, because they are counted as in the forward.
inline bool leaves_out_rows_without_upstream(const LinearCrossEntropyProblem& problem) {
  const LinearCrossEntropyShape shape = problem;
  return shape.is_backward() && shape.leaves_out_rows() && !shape.is_reduced && !shape.is_shard &&
         problem.kept.data == nullptr;
}

}  // namespace eaves
