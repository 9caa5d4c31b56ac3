// What the loop of linear_cross_entropy (linear_cross_entropy_chunks.h) asks of a backend.
#pragma once

#include <cstdint>

#include "core/gemm.h"
#include "core/typed_numbers.h"
#include "eaves/tensor.h"

namespace eaves {

/// Numbers of rows are accumulators, or two for each row if they are split. Rows are counted in the order of the
/// selection, or where `gathers` is false in the order of the view.
class LinearCrossEntropySteps {
 public:
  virtual ~LinearCrossEntropySteps() = default;

  /// Finds the rows that are computed, the divisor and the scale; fills memory.row_indices, targets and grad_loss,
  /// where they are there, and numbers. Returns how many rows are computed.
  virtual std::int64_t select_rows() = 0;

  /// To memory.hidden.
  virtual void gather_hidden(std::int64_t first, std::int64_t count) = 0;
  /// To memory.soft_targets, of these rows and classes; `stride` is its distance between rows.
  virtual void gather_soft_targets(std::int64_t first, std::int64_t count, std::int64_t first_class,
                                   std::int64_t classes, std::int64_t stride) = 0;
  /// From memory.grad_hidden, in which it has this dtype, times `scale`; nullptr: 1.
  virtual void scatter_grad_hidden(std::int64_t first, std::int64_t count, DType dtype, const void* scale) = 0;
  /// grad_hidden of rows that are not computed becomes 0.
  virtual void clear_grad_hidden() = 0;

  /// 0 for rows that do not count. Numbers that are not split are divided by `divisor`; nullptr: 1.
  virtual void gather_numbers(const void* from, void* to, std::int64_t count, bool is_split, bool gathers,
                              const void* divisor) = 0;
  /// 0 for rows that are not computed.
  virtual void scatter_numbers(const void* from, void* to, std::int64_t count, bool is_split) = 0;
  virtual void scatter_argmax(const std::int64_t* from, std::int64_t* to, std::int64_t count) = 0;
  /// To accumulators.
  virtual void widen(TypedNumbers from, std::int64_t count, void* to) = 0;

  /// Of `rows` and `columns` accumulators, to memory.logits.
  virtual void copy_logits(const void* from, std::int64_t from_stride, std::int64_t rows, std::int64_t columns,
                           std::int64_t stride) = 0;

  virtual void product(const Gemm& gemm) = 0;
  /// Sums of columns, times `scale`; added to `to` unless `is_first`.
  virtual void add_bias_gradient(const void* from, std::int64_t rows, std::int64_t columns, std::int64_t stride,
                                 const void* scale, bool is_first, double* to) = 0;
  /// From memory.grad_bias.
  virtual void write_grad_bias() = 0;
  /// grad_head and grad_bias become 0.
  virtual void clear_parameters() = 0;
  /// The losses of the rows that are computed.
  virtual void reduce_losses(const void* losses, void* to) = 0;
};

}  // namespace eaves
