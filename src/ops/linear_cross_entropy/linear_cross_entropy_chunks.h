// The loop of linear_cross_entropy for every device: chunk by chunk it computes the loss and the gradient of the
// logits, and multiplies that gradient in two products. A derived class computes loss and gradient:
// linear_cross_entropy_logits.h with logits in memory, fused/chunks.h on the fused path. A backend implements the other
// steps: linear_cross_entropy_steps.h.
#pragma once

#include <algorithm>

#include "core/environment.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_steps.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_views.h"

namespace eaves {

class LinearCrossEntropyChunks : protected LinearCrossEntropyViews {
 public:
  LinearCrossEntropyChunks(const LinearCrossEntropyProblem& problem, const LinearCrossEntropyBlock& block,
                           const LinearCrossEntropyMemory& memory, const ExecutionContext& context,
                           LinearCrossEntropySteps& steps)
      : LinearCrossEntropyViews(problem, memory), block_(block), loss_context_(context), steps_(steps) {
    loss_context_.workspace = memory.loss;
  }
  virtual ~LinearCrossEntropyChunks() = default;

  void run() {
    count_ = steps_.select_rows();
    const bool leaves_out = count_ != problem_.rows();
    // With batch invariance hidden is copied even if no row is left out: the address and the stride of hidden decide
    // the algorithm of cuBLASLt, and an ignored row must not change it for the other rows.
    gathers_ = memory_.row_indices != nullptr &&
               (leaves_out || !shape_.is_matrix || is_batch_invariant() || problem_.has_soft_targets());
    if (problem_.bias.data != nullptr) steps_.widen(problem_.bias, problem_.classes, memory_.bias);
    if (problem_.class_weight.data != nullptr) {
      steps_.widen(problem_.class_weight, problem_.classes, memory_.class_weight);
    }
    choose_per_row();
    if (count_ == 0 && problem_.wants_gradients() && !problem_.accumulates) steps_.clear_parameters();
    const std::int64_t kept = std::min(problem_.kept.rows, count_);
    const bool multiplies_kept_exps = shape_.is_backward() && shape_.keeps_exps && kept != 0;
    if (multiplies_kept_exps) backward_of_kept_exps(kept);
    if (problem_.grad_hidden != nullptr && leaves_out) steps_.clear_grad_hidden();
    std::int64_t rows = 0;
    for (std::int64_t first = multiplies_kept_exps ? kept : 0; first < count_; first += rows) {
      rows = std::min(block_.rows, (first < kept ? kept : count_) - first);
      if (gathers_) steps_.gather_hidden(first, rows);
      if (problem_.mode == LinearCrossEntropyMode::backward) {
        backward(first, rows);
      } else {
        forward(first, rows);
      }
    }
    if (count_ != 0 && problem_.grad_bias != nullptr) steps_.write_grad_bias();
    finish_per_row();
  }

 protected:
  /// The loss of rows, and their gradients if the problem wants them.
  virtual void forward(std::int64_t first, std::int64_t rows) = 0;

  /// The gradients of the first rows, whose exps the forward kept. It may use grad_hidden as scratch memory until it
  /// returns.
  virtual void backward_of_kept_exps(std::int64_t /*rows*/) {}

  /// Writes the gradient of the logits of these rows and classes to gradient_view().
  virtual void write_gradient(std::int64_t first, std::int64_t rows, std::int64_t first_class,
                              std::int64_t classes) = 0;

  /// The gradients, from lse.
  void backward(std::int64_t first, std::int64_t rows) {
    for (std::int64_t first_class = 0; first_class < problem_.classes; first_class += block_.classes) {
      const std::int64_t classes = std::min(block_.classes, problem_.classes - first_class);
      write_gradient(first, rows, first_class, classes);
      multiply_gradients(first, rows, first_class, classes);
    }
    if (problem_.classes == 0) tell_grad_hidden(first, rows);
  }

  // ---- products ----------------------------------------------------------------------------------------------------

  /// Both products with the gradient of the logits of these rows and classes, which lies in the memory of the logits.
  void multiply_gradients(std::int64_t first, std::int64_t rows, std::int64_t first_class, std::int64_t classes) {
    const GemmMatrix gradient{memory_.logits, gradient_stride(classes)};
    if (problem_.grad_hidden != nullptr) {
      multiply_grad_hidden(first, rows, first_class, classes, gradient, alpha());
      if (first_class + classes == problem_.classes) finish_grad_hidden(first, rows);
    }
    if (problem_.grad_head != nullptr) {
      multiply_grad_head(first, rows, first_class, classes, gradient, hidden_at(first), alpha());
    }
    if (problem_.grad_bias != nullptr) {
      steps_.add_bias_gradient(memory_.logits, rows, classes, gradient_stride(classes), alpha(), first == 0,
                               memory_.grad_bias + first_class);
    }
  }

  /// Writes the product to memory.grad_hidden, or straight to grad_hidden if it needs no other step.
  void multiply_grad_hidden(std::int64_t first, std::int64_t rows, std::int64_t first_class, std::int64_t classes,
                            const GemmMatrix& gradient, const void* alpha) {
    multiply_grad_hidden(first, rows, first_class, classes, gradient, alpha, is_grad_hidden_wide(shape_, block_));
  }
  void multiply_grad_hidden(std::int64_t first, std::int64_t rows, std::int64_t first_class, std::int64_t classes,
                            const GemmMatrix& gradient, const void* alpha, bool is_wide) {
    using namespace linear_cross_entropy_tensors;
    Gemm product{.m = rows,
                 .n = problem_.features(),
                 .k = classes,
                 .dtype = problem_.dtype,
                 .a = gradient,
                 .b = head_at(first_class),
                 .c_dtype = is_wide ? problem_.accumulator() : problem_.grad_hidden_dtype,
                 .c = memory_.grad_hidden,
                 .c_stride = problem_.features(),
                 .alpha = is_wide ? nullptr : alpha,  // finish_grad_hidden() multiplies once, instead of each product
                 .accumulates = first_class != 0};
    if (!is_wide && !gathers_) {
      const auto& loop = problem_.view.rows;
      product.c_stride = loop.rank == 0 ? problem_.features() : loop.strides[kGradHidden][0];
      product.c = element(problem_.grad_hidden, problem_.grad_hidden_dtype, first * product.c_stride);
    }
    steps_.product(product);
  }

  void multiply_grad_head(std::int64_t first, std::int64_t rows, std::int64_t first_class, std::int64_t classes,
                          const GemmMatrix& gradient, const GemmMatrix& hidden, const void* alpha) {
    steps_.product({.m = classes,
                    .n = problem_.features(),
                    .k = rows,
                    .dtype = problem_.dtype,
                    .a = {gradient.data, gradient.stride, true},
                    .b = hidden,
                    .c_dtype = problem_.grad_head_dtype,
                    .c = element(problem_.grad_head, problem_.grad_head_dtype, first_class * problem_.grad_head_stride),
                    .c_stride = problem_.grad_head_stride,
                    .alpha = alpha,
                    .accumulates = first != 0 || problem_.accumulates});
  }

  /// Moves the product of multiply_grad_hidden() to grad_hidden.
  void finish_grad_hidden(std::int64_t first, std::int64_t rows) {
    const bool is_wide = is_grad_hidden_wide(shape_, block_);
    if (is_wide || gathers_) {
      steps_.scatter_grad_hidden(first, rows, is_wide ? problem_.accumulator() : problem_.grad_hidden_dtype,
                                 is_wide ? alpha() : nullptr);
    }
    tell_grad_hidden(first, rows);
  }

  // ---- statistics --------------------------------------------------------------------------------------------------

  /// Sets the outputs of rows in the arguments of a forward or a merge.
  template <typename Args>
  void put_outputs(Args& args, std::int64_t first, std::int64_t rows) const {
    args.loss = numbers_at(per_row_.loss, first, rows);
    args.lse = lse_at(first, rows);
    args.argmax = numbers_at(per_row_.argmax, DType::int64, first, rows);
    args.entropy = numbers_at(per_row_.entropy, first, rows);
    args.sum_sq = numbers_at(per_row_.sum_sq, first, rows);
    args.mean_logit = numbers_at(per_row_.mean_logit, first, rows);
    args.z_loss = numbers_at(per_row_.z_loss, first, rows);
    args.target_mass = numbers_at(per_row_.target_mass, first, rows);
  }

  void merge_statistics(std::int64_t first, std::int64_t rows, std::int64_t blocks) {
    merge_statistics(first, rows, statistics_view({blocks, rows, kCrossEntropyStatistics}));
  }
  void merge_statistics(std::int64_t first, std::int64_t rows, const TensorView& statistics) {
    const bool is_soft = problem_.has_soft_targets();
    CrossEntropyMergeArgs merge{.statistics = statistics,
                                .targets = is_soft ? TensorView{} : targets_at(first, rows, 0, problem_.classes),
                                .row_weight = numbers_at(row_weight_, first, rows),
                                .options = row_options(),
                                .classes = problem_.all_classes(),
                                .has_class_weight = memory_.class_weight != nullptr,
                                .has_soft_targets = is_soft,
                                .skips_ignored = true};
    put_outputs(merge, first, rows);
    cross_entropy_merge(merge, loss_context_);
  }

  void merge_gathered_statistics(std::int64_t first, std::int64_t rows) {
    const LinearCrossEntropyShard& shard = *problem_.shard;
    if (shard.finish_gather != nullptr) shard.finish_gather(first, rows);
    merge_statistics(first, rows,
                     TensorView::contiguous(gathered_statistics(first), problem_.accumulator(),
                                            {shard.shards, rows, kCrossEntropyStatistics}, problem_.device));
  }

  void tell_grad_hidden(std::int64_t first, std::int64_t rows) const {
    const bool is_wanted = problem_.shard != nullptr && problem_.shard->grad_hidden_is_complete != nullptr;
    if (is_wanted && problem_.grad_hidden != nullptr) problem_.shard->grad_hidden_is_complete(first, rows);
  }

 private:
  // ---- one number for each row -------------------------------------------------------------------------------------

  /// The per-row tensors of the chunks: the caller's memory, or the workspace if rows are gathered or losses are
  /// reduced. In the backward they are inputs.
  void choose_per_row() {
    const LossOutputs& given = problem_.outputs;
    per_row_ = gathers_ ? memory_.per_row : given;
    grad_lse_ = memory_.grad_lse;
    grad_entropy_ = memory_.grad_entropy;
    row_weight_ = problem_.row_weight;
    if (gathers_ && row_weight_ != nullptr) {
      gather(row_weight_, memory_.row_weight, true);
      row_weight_ = memory_.row_weight;
    }
    if (problem_.mode != LinearCrossEntropyMode::backward) {
      if (problem_.is_reduced()) {
        per_row_.loss = memory_.per_row.loss;
        per_row_.z_loss = memory_.per_row.z_loss;
      }
      return;
    }
    if (gathers_) {
      for (const auto output : kRowOutputs) gather(given.*output, memory_.per_row.*output, true);
      gather(given.lse.data, memory_.per_row.lse.data, true, given.lse.is_split);
    }
    // Divided by alpha, because the products multiply these gradients by alpha too.
    gather(problem_.grad_lse, grad_lse_, gathers_, false, alpha());
    gather(problem_.grad_entropy, grad_entropy_, gathers_, false, alpha());
  }

  void gather(const void* from, void* to, bool gathers, bool is_split = false, const void* divisor = nullptr) {
    if (from != nullptr) steps_.gather_numbers(from, to, count_, is_split, gathers, divisor);
  }

  void finish_per_row() {
    const bool has_statistics_alone = problem_.shard != nullptr && problem_.mode == LinearCrossEntropyMode::forward;
    if (problem_.mode == LinearCrossEntropyMode::backward || has_statistics_alone) return;
    const LossOutputs& to = problem_.outputs;
    const auto scatter = [&](const void* from, void* into, bool is_split = false) {
      if (gathers_ && into != nullptr) steps_.scatter_numbers(from, into, count_, is_split);
    };
    for (const auto output : kRowOutputs) scatter(per_row_.*output, to.*output);
    scatter(per_row_.lse.data, to.lse.data, to.lse.is_split);
    if (gathers_ && to.argmax != nullptr) steps_.scatter_argmax(per_row_.argmax, to.argmax, count_);
    if (problem_.is_reduced()) {
      steps_.reduce_losses(per_row_.loss, to.loss);
      if (to.z_loss != nullptr) steps_.reduce_losses(per_row_.z_loss, to.z_loss);
    } else {
      scatter(per_row_.loss, to.loss);
      scatter(per_row_.z_loss, to.z_loss);
    }
  }

 protected:
  const LinearCrossEntropyBlock block_;
  ExecutionContext loss_context_;
  LinearCrossEntropySteps& steps_;
  std::int64_t count_ = 0;  ///< computed rows
};

}  // namespace eaves
