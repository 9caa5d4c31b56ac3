// What a backend of logsumexp gets: a problem that has been checked, is not empty, and speaks of rows and columns
// instead of axes. Tensors of `view`: 0 is x, 1 is grad_x (x again in the forward), 2 and 3 have one element per row.
#pragma once

#include <cstddef>

#include "core/rows.h"
#include "eaves/context.h"
#include "eaves/tensor.h"

namespace eaves {

struct LogsumexpForwardProblem {
  RowView view;  ///< 2 is out, 3 is lse
  Device device;
  DType x_dtype;
  DType out_dtype;
  const void* x;
  void* out;  ///< nullptr where not asked for
  void* lse;  ///< likewise; float32, or float64 for a float64 x
};

struct LogsumexpBackwardProblem {
  RowView view;  ///< 2 is lse, 3 is grad_out
  Device device;
  DType x_dtype;
  DType grad_out_dtype;
  const void* x;
  const void* lse;
  const void* grad_out;
  void* grad_x;
};

namespace cpu {
void logsumexp_forward(const LogsumexpForwardProblem& problem, const ExecutionContext& context);
void logsumexp_backward(const LogsumexpBackwardProblem& problem, const ExecutionContext& context);
}  // namespace cpu

namespace cuda {
/// `context.workspace` holds at least logsumexp_forward_workspace_bytes(problem).
void logsumexp_forward(const LogsumexpForwardProblem& problem, const ExecutionContext& context);
void logsumexp_backward(const LogsumexpBackwardProblem& problem, const ExecutionContext& context);
std::size_t logsumexp_forward_workspace_bytes(const LogsumexpForwardProblem& problem);
}  // namespace cuda

}  // namespace eaves
