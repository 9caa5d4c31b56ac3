// row_sum over the last axis of a tensor.
//
//   forward    out = sum over the last axis of x
//
// The sum is kept in float32 (float64 for float64 inputs) and rounded once. Without columns it is 0.
#pragma once

#include "eaves/context.h"
#include "eaves/tensor.h"

#pragma GCC visibility push(default)  // of a shared library, this is seen from outside
namespace eaves {

struct RowSumForwardArgs {
  /// x, at least one axis, any strides; float16, bfloat16, float32 or float64.
  TensorView x = {};

  /// out; shape of x without its last axis, dtype of x, any strides.
  TensorView out = {};
};

/// Throws InvalidArgument (an argument is not as documented above), Unsupported (the tensors are on a GPU and this
/// build or machine has no CUDA), DeviceError (the launch failed).
void row_sum_forward(const RowSumForwardArgs& args, const ExecutionContext& context = {});

}  // namespace eaves
#pragma GCC visibility pop
