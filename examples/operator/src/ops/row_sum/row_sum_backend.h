// What a backend of row_sum gets: a problem that has been checked, is not empty, and speaks of rows and columns.
// Tensors of `view`: 0 is x (and 1, for want of another), 2 is out (and 3).
#pragma once

#include "core/rows.h"
#include "eaves/context.h"

namespace eaves {

using RowSumView = RowView<2, 4>;

struct RowSumForwardProblem {
  RowSumView view;
  Device device;
  DType dtype;
  const void* x;
  void* out;
};

namespace cpu {
void row_sum_forward(const RowSumForwardProblem& problem, const ExecutionContext& context);
}  // namespace cpu

namespace cuda {
void row_sum_forward(const RowSumForwardProblem& problem, const ExecutionContext& context);
}  // namespace cuda

}  // namespace eaves
