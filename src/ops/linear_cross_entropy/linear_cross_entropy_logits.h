// linear_cross_entropy with logits in memory: a product writes the logits of a block; the public functions of
// cross_entropy compute their loss, and write their gradient over them.
#pragma once

#include <algorithm>

#include "eaves/cross_entropy.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_chunks.h"

namespace eaves {

class LinearCrossEntropyOfLogits final : public LinearCrossEntropyChunks {
 public:
  using LinearCrossEntropyChunks::LinearCrossEntropyChunks;

 private:
  void forward(std::int64_t first, std::int64_t rows) override {
    const std::int64_t classes = problem_.classes;
    if (problem_.shard != nullptr) return forward_of_shard(first, rows);
    if (block_.classes < classes) return forward_in_blocks(first, rows);
    multiply_logits(first, rows, 0, classes);
    CrossEntropyForwardArgs loss{.logits = logits_view(first, rows, 0, classes),
                                 .targets = targets_at(first, rows, 0, classes),
                                 .class_weight = class_weight_at(0, classes),
                                 .row_weight = numbers_at(row_weight_, first, rows),
                                 .options = row_options(),
                                 .skips_ignored = true};
    put_outputs(loss, first, rows);
    if (!problem_.wants_gradients()) return cross_entropy_forward(loss, loss_context_);
    CrossEntropyForwardBackwardArgs args{.forward = loss};
    if (problem_.is_reduced() || problem_.grad_loss.data != nullptr) args.grad_loss = grad_loss_at(first, rows);
    if (is_gradient_narrow()) args.grad_logits = gradient_view(rows, classes);
    cross_entropy_forward_backward(args, loss_context_);
    multiply_gradients(first, rows, 0, classes);
  }

  void write_gradient(std::int64_t first, std::int64_t rows, std::int64_t first_class, std::int64_t classes) override {
    // For loss and gradient of a shard at once, the logits are already in memory.
    if (shape_.is_backward()) {
      is_kept(first) ? copy_logits(first, rows, first_class, classes)
                     : multiply_logits(first, rows, first_class, classes);
    }
    cross_entropy_backward({.grad_loss = grad_loss_at(first, rows),
                            .grad_lse = numbers_at(grad_lse_, first, rows),
                            .grad_entropy = numbers_at(grad_entropy_, first, rows),
                            .logits = block_of_logits(rows, classes),
                            .targets = targets_at(first, rows, first_class, classes),
                            .class_weight = class_weight_at(first_class, classes),
                            .row_weight = numbers_at(row_weight_, first, rows),
                            .options = row_options(),
                            .lse = lse_at(first, rows),
                            .entropy = numbers_at(per_row_.entropy, first, rows),
                            .target_mass = numbers_at(per_row_.target_mass, first, rows),
                            .first_class = problem_.first_class() + first_class,
                            .classes = problem_.all_classes(),
                            .grad_logits = gradient_view(rows, classes)},
                           loss_context_);
  }

  /// The loss alone, in blocks of classes: the statistics of the blocks are merged.
  void forward_in_blocks(std::int64_t first, std::int64_t rows) {
    const std::int64_t blocks = ceil_divide(problem_.classes, block_.classes);
    for (std::int64_t block = 0; block < blocks; ++block) {
      const std::int64_t first_class = block * block_.classes;
      const std::int64_t classes = std::min(block_.classes, problem_.classes - first_class);
      multiply_logits(first, rows, first_class, classes);
      cross_entropy_shard_forward(
          {.logits = logits_view(first, rows, first_class, classes),
           .targets = targets_at(first, rows, first_class, classes),
           .class_weight = class_weight_at(first_class, classes),
           .options = row_options(),
           .first_class = first_class,
           .classes = problem_.classes,
           .is_for_mean_logit = per_row_.mean_logit != nullptr,
           .statistics = statistics_view({rows, kCrossEntropyStatistics}, block * rows * kCrossEntropyStatistics)},
          loss_context_);
    }
    merge_statistics(first, rows, blocks);
  }

  /// For a shard: its statistics alone; or loss and gradient at once, which gather the statistics of all shards in
  /// between.
  void forward_of_shard(std::int64_t first, std::int64_t rows) {
    const std::int64_t classes = problem_.classes;
    const LinearCrossEntropyShard& shard = *problem_.shard;
    if (classes != 0) multiply_logits(first, rows, 0, classes);
    cross_entropy_shard_forward(
        {.logits = logits_view(first, rows, 0, classes),
         .targets = targets_at(first, rows, 0, classes),
         .class_weight = class_weight_at(0, classes),
         .options = row_options(),
         .first_class = shard.first_class,
         .classes = shard.classes,
         .is_for_mean_logit = shard.is_for_mean_logit,
         .statistics = TensorView::contiguous(shard_statistics(first), problem_.accumulator(),
                                              {rows, kCrossEntropyStatistics}, problem_.device)},
        loss_context_);
    if (problem_.mode == LinearCrossEntropyMode::forward) return;
    shard.gather(first, rows);
    merge_gathered_statistics(first, rows);
    if (problem_.wants_gradients()) backward(first, rows);
  }

  void gather_soft_targets(std::int64_t first, std::int64_t rows, std::int64_t first_class, std::int64_t classes) {
    if (memory_.soft_targets == nullptr) return;
    steps_.gather_soft_targets(first, rows, first_class, classes, logits_stride(classes));
  }

  /// Copies kept logits of a block, after gathering its soft targets.
  void copy_logits(std::int64_t first, std::int64_t rows, std::int64_t first_class, std::int64_t classes) {
    gather_soft_targets(first, rows, first_class, classes);
    const TensorView kept = logits_view(first, rows, first_class, classes);
    steps_.copy_logits(kept.data, kept.strides[0], rows, classes, logits_stride(classes));
  }
  void multiply_logits(std::int64_t first, std::int64_t rows, std::int64_t first_class, std::int64_t classes) {
    gather_soft_targets(first, rows, first_class, classes);
    const TensorView logits = logits_view(first, rows, first_class, classes);
    GemmMatrix head = head_at(first_class);
    head.is_transposed = !head.is_transposed;
    const TensorView bias = numbers_at(memory_.bias, first_class, classes);
    steps_.product({.m = rows,
                    .n = classes,
                    .k = problem_.features(),
                    .dtype = problem_.dtype,
                    .a = hidden_at(first),
                    .b = head,
                    .c_dtype = problem_.accumulator(),
                    .c = logits.data,
                    .c_stride = logits.strides[0],
                    .bias = bias.data});
  }
};

}  // namespace eaves
