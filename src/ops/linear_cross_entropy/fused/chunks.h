// The chunks of linear_cross_entropy on the fused path: the order of its steps (fused.h).
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
            .targets = {targets.data, targets.dtype},
            .target_stride = targets.strides[0],
            .class_weight = floats(memory_.class_weight),
            .options = problem_.options,
            .memory = memory_.fused,
            .context = loss_context_};
  }

  FusedGradient fused_gradient(std::int64_t first, std::int64_t rows, std::int64_t classes) const {
    const TensorView grad_loss = grad_loss_at(first, rows);
    return {.grad_loss = floats(grad_loss.data),
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
    multiply_samples(fused);
    guess_shifts(fused);
    if (!shape_.has_exps()) {
      write_statistics(fused, statistics);
      if (!fused.is_shard) merge_statistics(first, rows, 1);
      return;
    }
    const FusedGradient gradient = fused_gradient(first, rows, classes);
    write_exps(fused, gradient, statistics);
    if (fused.is_shard) problem_.shard->gather(first, rows);
    if (problem_.grad_hidden != nullptr) multiply_grad_hidden(first, rows, 0, classes, nullptr);
    if (fused.is_shard) {
      merge_gathered_statistics(first, rows);
      finish_exps_of_shard(fused, gradient, statistics, floats(gathered_statistics(first)), problem_.shard->shards);
    } else {
      merge_statistics(first, rows, 1);
    }
    if (problem_.grad_hidden != nullptr) {
      const std::int64_t* indices = problem_.skips_ignored ? memory_.row_indices : nullptr;
      write_grad_hidden(fused, {problem_.view, indices, first, rows}, memory_.grad_hidden, problem_.grad_hidden,
                        problem_.grad_hidden_dtype);
      tell_grad_hidden(first, rows);
    }
    if (problem_.grad_head != nullptr) {
      scale_hidden(fused);
      multiply_grad_head(first, rows, 0, classes, {memory_.fused.scaled_hidden, problem_.features()}, nullptr);
    }
    if (problem_.grad_bias != nullptr) add_bias_gradient(fused, gradient, first == 0, memory_.grad_bias);
    if (problem_.grad_head != nullptr || problem_.grad_bias != nullptr) {
      add_targets(fused, problem_.grad_head, problem_.grad_head_dtype, problem_.grad_head_stride, memory_.grad_bias);
    }
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
    cuda::write_gradient(fused_rows(first, rows, first_class, classes), fused_gradient(first, rows, classes));
  }
};

}  // namespace eaves::cuda
