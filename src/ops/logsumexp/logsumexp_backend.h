// The interface between the calls of logsumexp and its backends: checked problems with at least one row, in rows and
// columns instead of axes.
#pragma once

#include <cstddef>

#include "core/rows.h"
#include "core/softmax_state.h"
#include "eaves/context.h"
#include "eaves/tensor.h"

namespace eaves {

/// Indices of the tensors in a problem's view. The first two have rows and columns, the others one element per row.
namespace logsumexp_tensors {
inline constexpr int kX = 0;
inline constexpr int kGradX = 1;  ///< in the forward: x again
inline constexpr int kLse = 2;
inline constexpr int kOut = 3;      ///< forward
inline constexpr int kGradOut = 3;  ///< backward
}  // namespace logsumexp_tensors

using LogsumexpView = RowView<2, 4>;

struct LogsumexpForwardProblem {
  LogsumexpView view;
  Device device;
  DType x_dtype;
  DType out_dtype;
  const void* x;
  void* out;    ///< nullptr if not wanted
  KeptLse lse;  ///< data is nullptr if not wanted
};

struct LogsumexpBackwardProblem {
  LogsumexpView view;
  Device device;
  DType x_dtype;
  DType grad_out_dtype;
  const void* x;
  KeptLse lse;
  const void* grad_out;
  void* grad_x;
};

namespace cpu {
void logsumexp_forward(const LogsumexpForwardProblem& problem, const ExecutionContext& context);
void logsumexp_backward(const LogsumexpBackwardProblem& problem, const ExecutionContext& context);
}  // namespace cpu

namespace cuda {
/// `context.workspace` has at least logsumexp_forward_workspace_bytes(problem).
void logsumexp_forward(const LogsumexpForwardProblem& problem, const ExecutionContext& context);
void logsumexp_backward(const LogsumexpBackwardProblem& problem, const ExecutionContext& context);
std::size_t logsumexp_forward_workspace_bytes(const LogsumexpForwardProblem& problem);
}  // namespace cuda

}  // namespace eaves
