// The steps that a backend implements for the loop of linear_cross_entropy (linear_cross_entropy_chunks.h).
#pragma once

#include <cstdint>

#include "core/gemm.h"
#include "core/typed_numbers.h"
#include "eaves/tensor.h"

namespace eaves {

/// Per-row numbers are accumulators; a split number is a pair of them. Rows are counted in the order of the selection;
/// with `gathers` = false in the order of the view.
class LinearCrossEntropySteps {
 public:
  virtual ~LinearCrossEntropySteps() = default;

  /// Selects the rows to compute, and finds the divisor and the scale. Fills memory.numbers, and memory.row_indices,
  /// targets and grad_loss if present. Returns the number of computed rows.
  virtual std::int64_t select_rows() = 0;

  /// Copies rows of hidden to memory.hidden.
  virtual void gather_hidden(std::int64_t first, std::int64_t count) = 0;
  /// Copies soft targets of these rows and classes to memory.soft_targets; `stride` is the distance between its rows.
  virtual void gather_soft_targets(std::int64_t first, std::int64_t count, std::int64_t first_class,
                                   std::int64_t classes, std::int64_t stride) = 0;
  /// Copies memory.grad_hidden, which has this dtype, times `scale` (nullptr: 1) to the rows of grad_hidden.
  virtual void scatter_grad_hidden(std::int64_t first, std::int64_t count, DType dtype, const void* scale) = 0;
  /// Sets grad_hidden of the rows that are not computed to 0.
  virtual void clear_grad_hidden() = 0;

  /// Copies the per-row numbers of the computed rows, 0 for rows that do not count. Numbers that are not split are
  /// divided by `divisor`; nullptr: 1.
  virtual void gather_numbers(const void* from, void* to, std::int64_t count, bool is_split, bool gathers,
                              const void* divisor) = 0;
  /// Copies the numbers of the computed rows back to their places; 0 for the other rows.
  virtual void scatter_numbers(const void* from, void* to, std::int64_t count, bool is_split) = 0;
  virtual void scatter_argmax(const std::int64_t* from, std::int64_t* to, std::int64_t count) = 0;
  /// Converts to accumulators.
  virtual void widen(TypedNumbers from, std::int64_t count, void* to) = 0;

  /// Copies [rows, columns] accumulators to memory.logits.
  virtual void copy_logits(const void* from, std::int64_t from_stride, std::int64_t rows, std::int64_t columns,
                           std::int64_t stride) = 0;

  virtual void product(const Gemm& gemm) = 0;
  /// The sums of the columns times `scale`; added to `to` unless `is_first`.
  virtual void add_bias_gradient(const void* from, std::int64_t rows, std::int64_t columns, std::int64_t stride,
                                 const void* scale, bool is_first, double* to) = 0;
  /// Rounds memory.grad_bias to grad_bias.
  virtual void write_grad_bias() = 0;
  /// Sets grad_head and grad_bias to 0.
  virtual void clear_parameters() = 0;
  /// The reduced loss, from the losses of the computed rows.
  virtual void reduce_losses(const void* losses, void* to) = 0;
};

}  // namespace eaves
