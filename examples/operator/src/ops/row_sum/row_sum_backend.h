// The problem that a backend of row_sum gets: checked, not empty, in rows and columns. Tensors of `view`: 0 is x, 2 is
// out. The view has four tensors, so x also stands for 1 and out for 3.
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
