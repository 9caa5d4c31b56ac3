// The order of the steps of fused.h, chunk by chunk.
#pragma once

#include "ops/linear_cross_entropy/fused/fused.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_chunks.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_rows.cuh"

namespace eaves::cuda {

class FusedChunks final : public LinearCrossEntropyChunks {
 public:
  using LinearCrossEntropyChunks::LinearCrossEntropyChunks;

 private:
  static const float* floats(const void* numbers) { return static_cast<const float*>(numbers); }

  FusedRows fused_rows(std::int64_t first, std::int64_t rows, std::int64_t first_class, std::int64_t classes) const {
    const TensorView targets = targets_at(first, rows, 0, classes);
    FusedMemory memory = memory_.fused;
    if (adds_targets_at_end()) {
      memory.first_row = first;
      memory.target += first;
      memory.target_gradient += first;
    }
    return {.op = problem_.op,
            .device = problem_.device,
            .dtype = problem_.dtype,
            .rows = rows,
            .features = problem_.features(),
            .hidden = hidden_at(first),
            .head = head_at(first_class),
            .bias = floats(numbers_at(memory_.bias, first_class, classes).data),
            .first_class = problem_.first_class() + first_class,
            .classes = classes,
            .all_classes = problem_.all_classes(),
            .is_shard = problem_.shard != nullptr,
            .is_kept = problem_.mode == LinearCrossEntropyMode::forward && first < problem_.kept.rows,
            .targets = {targets.data, targets.dtype},
            .target_stride = targets.strides[0],
            .class_weight = floats(memory_.class_weight),
            .options = problem_.options,
            .memory = memory,
            .context = loss_context_};
  }

  /// Adds the targets' parts of all chunks in one pass, so that a 16-bit grad_head has one rounding for them. The pass
  /// reads all rows of hidden; gathered rows are in memory for one chunk only.
  bool adds_targets_at_end() const { return shape_.has_exps() && !gathers_; }

  /// `alpha` multiplies the upstream gradients here; nullptr if the products multiply by it. With exps it belongs here,
  /// into their float32 row factors.
  FusedGradient fused_gradient(std::int64_t first, std::int64_t rows, std::int64_t classes, const void* alpha) const {
    const TensorView grad_loss = grad_loss_at(first, rows);
    return {.alpha = floats(alpha),
            .grad_loss = floats(grad_loss.data),
            .grad_loss_stride = grad_loss.strides[0],
            .row_weight = floats(numbers_at(row_weight_, first, rows).data),
            .grad_lse = floats(numbers_at(grad_lse_, first, rows).data),
            .grad_entropy = floats(numbers_at(grad_entropy_, first, rows).data),
            .lse = kept_lse(first),
            .entropy = floats(numbers_at(per_row_.entropy, first, rows).data),
            .target_weight = problem_.shard == nullptr || memory_.class_weight == nullptr
                                 ? nullptr
                                 : floats(numbers_at(per_row_.target_mass, first, rows).data),
            .to = memory_.logits,
            .stride = gradient_stride(classes)};
  }

  void forward(std::int64_t first, std::int64_t rows) override {
    const std::int64_t classes = problem_.classes;
    const FusedRows fused = fused_rows(first, rows, 0, classes);
    auto* statistics = static_cast<float*>(fused.is_shard ? shard_statistics(first) : memory_.statistics);
    if (!shape_.has_online_softmax()) {
      multiply_samples(fused);
      guess_shifts(fused);
    }
    if (!shape_.has_exps()) {
      if (shape_.has_online_softmax()) {
        write_online_statistics(fused, statistics);
      } else if (fused.is_kept) {
        const FusedGradient gradient{.to = kept_exps(first), .stride = problem_.kept.stride};
        write_exps(fused, gradient, statistics);
        keep_numbers(fused, gradient);
      } else {
        write_statistics(fused, statistics);
      }
      if (!fused.is_shard) merge_statistics(first, rows, 1);
      return;
    }
    const GemmMatrix exps{memory_.logits, gradient_stride(classes)};
    const FusedGradient gradient = fused_gradient(first, rows, classes, alpha());
    write_exps(fused, gradient, statistics);
    if (fused.is_shard) problem_.shard->gather(first, rows);
    if (problem_.grad_hidden != nullptr) multiply_grad_hidden(first, rows, 0, classes, exps, nullptr);
    if (fused.is_shard) {
      merge_gathered_statistics(first, rows);
      finish_exps_of_shard(fused, gradient, statistics, floats(gathered_statistics(first)), problem_.shard->shards);
    } else {
      merge_statistics(first, rows, 1);
    }
    if (problem_.grad_hidden != nullptr) {
      write_grad_hidden_of(fused, first);
      tell_grad_hidden(first, rows);
    }
    if (problem_.grad_head != nullptr) {
      const GemmMatrix scaled{memory_.fused.scaled_hidden, problem_.features()};
      copy_hidden(fused, memory_.fused.row_factor, memory_.fused.scaled_hidden, scaled.stride);
      multiply_grad_head(first, rows, 0, classes, exps, scaled, nullptr);
    }
    if (problem_.grad_bias != nullptr) add_bias_gradient(fused, gradient, first == 0, memory_.grad_bias);
    if (!adds_targets_at_end()) {
      add_targets_of(fused);
    } else if (first + rows == count_) {
      add_targets_of(fused_rows(0, count_, 0, classes));
    }
  }

  void write_grad_hidden_of(const FusedRows& fused, std::int64_t first) {
    const std::int64_t* indices = problem_.skips_ignored ? memory_.row_indices : nullptr;
    write_grad_hidden(fused, {problem_.view, indices, first, fused.rows}, memory_.grad_hidden, problem_.grad_hidden,
                      problem_.grad_hidden_dtype);
  }

  // ---- kept exps ---------------------------------------------------------------------------------------------------

  void* kept_exps(std::int64_t first) const {
    return element(problem_.kept.data, problem_.kept.dtype, first * problem_.kept.stride);
  }

  /// Calls function(fused rows, gradient, exps, first row) for each chunk, after gathering its hidden if needed.
  /// `alpha` as in fused_gradient().
  template <typename Function>
  void for_each_kept_chunk(std::int64_t rows, std::int64_t at_once, const void* alpha, Function function) {
    for (std::int64_t first = 0; first < rows; first += at_once) {
      const std::int64_t count = std::min(at_once, rows - first);
      if (gathers_) steps_.gather_hidden(first, count);
      FusedGradient gradient = fused_gradient(first, count, problem_.classes, alpha);
      gradient.to = kept_exps(first);
      gradient.stride = problem_.kept.stride;
      function(fused_rows(first, count, 0, problem_.classes), gradient, GemmMatrix{gradient.to, gradient.stride},
               first);
    }
  }

  /// The memory of grad_hidden, which the call writes last, as space for f x, a matrix of the same shape; nullptr if
  /// its dtype, strides or alignment do not suit.
  GemmMatrix memory_of_grad_hidden() const {
    using namespace linear_cross_entropy_tensors;
    const auto& loop = problem_.view.rows;
    const std::int64_t stride = loop.rank == 0 ? problem_.features() : loop.strides[kGradHidden][0];
    const bool suits = shape_.is_matrix && problem_.grad_hidden_dtype == problem_.dtype && stride % kGemmVector == 0 &&
                       reinterpret_cast<std::uintptr_t>(problem_.grad_hidden) % 16 == 0;
    return {suits ? problem_.grad_hidden : nullptr, stride};
  }

  void add_targets_of(const FusedRows& fused) {
    if (problem_.grad_head == nullptr && problem_.grad_bias == nullptr) return;
    add_targets(fused, problem_.grad_head, problem_.grad_head_dtype, problem_.grad_head_stride, memory_.grad_bias);
  }

  /// The products of forward(), but dW is one product over all kept rows if f x has memory for all of them. With
  /// dL/d(entropy) the exps become the gradient of the logits, which is then the factor of both products. The rows are
  /// finished all at once; chunk by chunk, before each of the two products, if the rows are gathered or f x has no
  /// memory.
  void backward_of_kept_exps(std::int64_t rows) override {
    const std::int64_t classes = problem_.classes;
    const bool is_of_logits = problem_.grad_entropy != nullptr;
    const bool copies_hidden = problem_.grad_head != nullptr && (gathers_ || !is_of_logits);
    const GemmMatrix copy = memory_of_grad_hidden();
    const bool is_one_product = !copies_hidden || copy.data != nullptr;
    const bool is_whole = is_one_product && !gathers_;
    const void* in_factor = is_of_logits ? nullptr : alpha();
    const void* in_product = is_of_logits ? alpha() : nullptr;
    for_each_kept_chunk(
        rows, is_whole ? rows : block_.rows, in_factor,
        [&](const FusedRows& fused, const FusedGradient& gradient, const GemmMatrix& exps, std::int64_t first) {
          finish_kept_exps(fused, gradient);
          if (is_of_logits) write_gradient_of_exps(fused, gradient);
          if (copies_hidden) {
            const GemmMatrix chunk =
                is_one_product ? GemmMatrix{element(copy.data, problem_.dtype, first * copy.stride), copy.stride}
                               : GemmMatrix{memory_.fused.scaled_hidden, problem_.features()};
            copy_hidden(fused, is_of_logits ? nullptr : memory_.fused.row_factor, const_cast<void*>(chunk.data),
                        chunk.stride);
            if (!is_one_product) multiply_grad_head(first, fused.rows, 0, classes, exps, chunk, in_product);
          }
          if (problem_.grad_bias == nullptr) return;
          if (is_of_logits) {
            steps_.add_bias_gradient(exps.data, fused.rows, classes, exps.stride, in_product, first == 0,
                                     memory_.grad_bias);
          } else {
            add_bias_gradient(fused, gradient, first == 0, memory_.grad_bias);
          }
        });
    const GemmMatrix all{problem_.kept.data, problem_.kept.stride};
    if (problem_.grad_head != nullptr && is_one_product) {
      multiply_grad_head(0, rows, 0, classes, all, copies_hidden ? copy : hidden_at(0), in_product);
    }
    const bool is_rounded_by_product = is_of_logits && !gathers_ && shape_.is_matrix &&
                                       problem_.grad_hidden_dtype == problem_.dtype &&
                                       !is_sum_of_two_products(problem_.dtype, classes);
    if (is_rounded_by_product) {
      if (problem_.grad_hidden != nullptr) multiply_grad_hidden(0, rows, 0, classes, all, in_product, false);
      return;
    }
    for_each_kept_chunk(
        rows, block_.rows, in_factor,
        [&](FusedRows fused, const FusedGradient& gradient, const GemmMatrix& exps, std::int64_t first) {
          if (problem_.grad_hidden != nullptr) multiply_grad_hidden(first, fused.rows, 0, classes, exps, in_product);
          if (is_of_logits) {
            if (problem_.grad_hidden != nullptr) finish_grad_hidden(first, fused.rows);
            return;
          }
          if (is_whole) {
            fused.memory.row_factor += first;
            fused.memory.target_gradient += first;
            fused.memory.target += first;
          } else {
            finish_kept_exps(fused, gradient);
          }
          if (problem_.grad_hidden != nullptr) write_grad_hidden_of(fused, first);
          if (!is_whole) add_targets_of(fused);
        });
    if (is_whole && !is_of_logits) add_targets_of(fused_rows(0, rows, 0, classes));
  }

  void multiply_samples(const FusedRows& rows) {
    const std::int64_t samples = sampled_classes(rows.classes);
    steps_.product({.m = rows.rows,
                    .n = samples,
                    .k = rows.features,
                    .dtype = rows.dtype,
                    .a = rows.hidden,
                    .b = {rows.head.data, rows.head.stride * sample_distance(rows.classes), true},
                    .c_dtype = DType::float32,
                    .c = rows.memory.samples,
                    .c_stride = samples});
  }

  void write_gradient(std::int64_t first, std::int64_t rows, std::int64_t first_class, std::int64_t classes) override {
    cuda::write_gradient(fused_rows(first, rows, first_class, classes), fused_gradient(first, rows, classes, nullptr));
  }
};

}  // namespace eaves::cuda
