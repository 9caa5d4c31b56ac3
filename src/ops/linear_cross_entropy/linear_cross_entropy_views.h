// The tensors of a chunk of linear_cross_entropy: views for the calls of cross_entropy, matrices for the products.
// `first` and `rows` count the computed rows.
#pragma once

#include "eaves/cross_entropy.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_backend.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_memory.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_shape.h"

namespace eaves {

class LinearCrossEntropyViews {
 protected:
  LinearCrossEntropyViews(const LinearCrossEntropyProblem& problem, const LinearCrossEntropyMemory& memory)
      : problem_(problem), shape_(problem), memory_(memory) {}

  /// Elements [first, first + rows) of a tensor with one number per row; absent if `data` is nullptr.
  TensorView numbers_at(const void* data, DType dtype, std::int64_t first, std::int64_t rows) const {
    if (data == nullptr) return {};
    const auto* at = static_cast<const char*>(data) + static_cast<std::size_t>(first) * size_of(dtype);
    return TensorView::contiguous(static_cast<const void*>(at), dtype, {rows}, problem_.device);
  }
  TensorView numbers_at(const void* data, std::int64_t first, std::int64_t rows) const {
    return numbers_at(data, problem_.accumulator(), first, rows);
  }

  /// The lse of the rows from `first` on, in per_row_.
  KeptLse kept_lse(std::int64_t first) const {
    const KeptLse& lse = per_row_.lse;
    if (lse.data == nullptr) return {};
    return {element(lse.data, problem_.accumulator(), lse.row(first)), lse.is_split};
  }
  TensorView lse_at(std::int64_t first, std::int64_t rows) const {
    const KeptLse lse = kept_lse(first);
    if (lse.data == nullptr) return {};
    Dims shape = {rows};
    if (lse.is_split) shape.push_back(2);
    return TensorView::contiguous(lse.data, problem_.accumulator(), shape, problem_.device);
  }

  const void* number(LinearCrossEntropyNumber which) const {
    return static_cast<const char*>(memory_.numbers) + which * size_of(problem_.accumulator());
  }

  TensorView targets_at(std::int64_t first, std::int64_t rows, std::int64_t first_class, std::int64_t classes) const {
    using namespace linear_cross_entropy_tensors;
    const TypedNumbers& targets = problem_.targets;
    const auto at = [&](std::int64_t element) {
      return static_cast<const void*>(static_cast<const char*>(targets.data) +
                                      element * static_cast<std::int64_t>(size_of(targets.dtype)));
    };
    if (memory_.soft_targets != nullptr) {
      return TensorView::strided(memory_.soft_targets, targets.dtype, {rows, classes}, {logits_stride(classes), 1},
                                 problem_.device);
    }
    if (problem_.has_soft_targets()) {
      const std::int64_t stride = problem_.soft_target_stride;
      return TensorView::strided(at(first * stride + first_class), targets.dtype, {rows, classes}, {stride, 1},
                                 problem_.device);
    }
    if (gathers_ || row_weight_ != nullptr) return numbers_at(memory_.targets, DType::int64, first, rows);
    const auto& loop = problem_.view.rows;
    const std::int64_t stride = loop.rank == 0 ? 0 : loop.strides[kTargets][0];
    return TensorView::strided(at(first * stride), targets.dtype, {rows}, {stride}, problem_.device);
  }

  TensorView class_weight_at(std::int64_t first_class, std::int64_t classes) const {
    return numbers_at(memory_.class_weight, first_class, classes);
  }

  /// The number that the products multiply the gradient of the logits by; nullptr: 1.
  const void* alpha() const {
    return problem_.scale_in_products() == ScaleInProducts::nothing ? nullptr : number(kAlpha);
  }

  /// dL/d(loss) of rows, divided by alpha().
  TensorView grad_loss_at(std::int64_t first, std::int64_t rows) const {
    if (problem_.is_reduced() || problem_.grad_loss.data == nullptr) {
      return TensorView::strided(number(kRest), problem_.accumulator(), {rows}, {0}, problem_.device);
    }
    return numbers_at(memory_.grad_loss, first, rows);
  }

  CrossEntropyOptions row_options() const {
    CrossEntropyOptions options = problem_.options;
    options.reduction = Reduction::none;
    return options;
  }

  /// True if the forward keeps the logits of the chunk from this row on.
  bool is_kept(std::int64_t first) const { return problem_.kept.are_logits() && first < problem_.kept.rows; }
  /// The logits of a block in the forward.
  TensorView logits_view(std::int64_t first, std::int64_t rows, std::int64_t first_class, std::int64_t classes) const {
    const KeptRows& kept = problem_.kept;
    if (!is_kept(first)) return block_of_logits(rows, classes);
    return TensorView::strided(element(kept.data, kept.dtype, first * kept.stride + first_class),
                               problem_.accumulator(), {rows, classes}, {kept.stride, 1}, problem_.device);
  }
  TensorView block_of_logits(std::int64_t rows, std::int64_t classes) const {
    return TensorView::strided(memory_.logits, problem_.accumulator(), {rows, classes}, {logits_stride(classes), 1},
                               problem_.device);
  }
  /// A 16-bit gradient lies in the first half of each row of logits.
  bool is_gradient_narrow() const { return size_of(problem_.dtype) == 2; }
  std::int64_t gradient_stride(std::int64_t classes) const {
    return shape_.is_fused ? exps_stride(classes) : logits_stride(classes) * (is_gradient_narrow() ? 2 : 1);
  }
  TensorView gradient_view(std::int64_t rows, std::int64_t classes) const {
    return TensorView::strided(memory_.logits, problem_.dtype, {rows, classes}, {gradient_stride(classes), 1},
                               problem_.device);
  }

  GemmMatrix hidden_at(std::int64_t first) const {
    using namespace linear_cross_entropy_tensors;
    if (gathers_) return {memory_.hidden, problem_.features()};
    const auto& loop = problem_.view.rows;
    const std::int64_t stride = loop.rank == 0 ? problem_.features() : loop.strides[kHidden][0];
    return {element(problem_.hidden, problem_.dtype, first * stride), stride};
  }

  /// The head from this class on; transposed if its classes have unit stride.
  GemmMatrix head_at(std::int64_t first_class) const {
    const GemmMatrix& head = problem_.head;
    const std::int64_t offset = head.is_transposed ? first_class : first_class * head.stride;
    return {element(head.data, problem_.dtype, offset), head.stride, head.is_transposed};
  }

  static const void* element(const void* data, DType dtype, std::int64_t offset) {
    return static_cast<const char*>(data) + offset * static_cast<std::int64_t>(size_of(dtype));
  }
  static void* element(void* data, DType dtype, std::int64_t offset) {
    return static_cast<char*>(data) + offset * static_cast<std::int64_t>(size_of(dtype));
  }

  TensorView statistics_view(const Dims& shape, std::int64_t offset = 0) const {
    void* at = element(memory_.statistics, shape_.statistics_dtype(), offset);
    return TensorView::contiguous(at, shape_.statistics_dtype(), shape, problem_.device);
  }

  /// The statistics of the rows from `first` on: of this shard, and of all shards.
  void* shard_statistics(std::int64_t first) const {
    return element(problem_.statistics, problem_.accumulator(), first * kCrossEntropyStatistics);
  }
  const void* gathered_statistics(std::int64_t first) const {
    const LinearCrossEntropyShard& shard = *problem_.shard;
    return element(static_cast<const void*>(shard.gathered.data), problem_.accumulator(),
                   shard.shards * first * kCrossEntropyStatistics);
  }

  const LinearCrossEntropyProblem& problem_;
  const LinearCrossEntropyShape shape_;
  const LinearCrossEntropyMemory& memory_;
  // These depend on the computed rows; LinearCrossEntropyChunks sets them.
  bool gathers_ = false;
  LossOutputs per_row_{};
  const void* row_weight_ = nullptr;
  void* grad_lse_ = nullptr;
  void* grad_entropy_ = nullptr;
};

}  // namespace eaves
