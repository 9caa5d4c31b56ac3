// logsumexp over any axes of a tensor, and its gradient.
//
//   forward    lse  = log(sum over axes of exp(x))
//   backward   dx   = g * exp(x - lse)
//
// The forward reads x once and computes m + log(sum exp(x - m)) (M. Milakov, N. Gimelshein, "Online normalizer
// calculation for softmax", arXiv:1805.02867). It computes in float32, or in float64 for float64 inputs, and rounds
// once.
//
// Edge cases:
//   no elements, or all of them -inf    lse = -inf, gradient 0   (PyTorch's gradient is NaN)
//   a +inf among them, no NaN           lse = +inf, gradient g * exp(x - inf): 0 at the finite x, NaN at the +inf
//   a NaN among them                    lse = NaN, gradient NaN
#pragma once

#include "eaves/context.h"
#include "eaves/tensor.h"

#pragma GCC visibility push(default)  // exported if eaves is built into a shared library
namespace eaves {

// Each member has `= {}`, so that a call may leave out any of them without a compiler's warning.

struct LogsumexpForwardArgs {
  /// x, any shape and strides; float16, bfloat16, float32 or float64.
  TensorView x = {};

  /// The reduced axes, each in [-rank, rank), none twice. Empty: all axes.
  Dims axes = {};

  /// `out` and `lse` keep the reduced axes with size 1.
  bool keepdim = false;

  /// out, optional; shape of x without `axes`, any strides; dtype of x, or float32.
  TensorView out = {};

  /// out, optional; float32, or float64 for a float64 x. The backward needs this precision: a bfloat16 lse around 12 is
  /// off by 3 %, and so would be every gradient. The shape is one of two. Either that of `out`, with any strides; or,
  /// for any keepdim, the shape of x without `axes` plus a last axis of size 2 with unit stride, which holds the
  /// rounded lse and the remainder of that rounding. A float32 lse around 1e4 is off by 5e-4; with the remainder it is
  /// off by 1e-7 of log(sum exp(x - m)). A call needs at least one of `out` and `lse`; neither may overlap x or the
  /// other.
  TensorView lse = {};
};

struct LogsumexpBackwardArgs {
  /// g = dL/d(out), shape of the forward's `out`; dtype of x, or float32; any strides, including 0.
  TensorView grad_out = {};

  /// x, as in the forward.
  TensorView x = {};

  /// lse, as the forward wrote it.
  TensorView lse = {};

  /// As in the forward.
  Dims axes = {};
  bool keepdim = false;

  /// out; dL/dx, shape and dtype of x, any strides that give each element an address of its own; must not overlap x,
  /// lse or grad_out.
  TensorView grad_x = {};
};

/// Both throw InvalidArgument (an argument is not as documented above, or the workspace is too small), Unsupported (the
/// tensors are on a GPU and this build or machine has no CUDA), DeviceError (the launch failed).
void logsumexp_forward(const LogsumexpForwardArgs& args, const ExecutionContext& context = {});
void logsumexp_backward(const LogsumexpBackwardArgs& args, const ExecutionContext& context = {});

/// Bytes of scratch memory that the call needs: 0 for most shapes, below 1 MiB for all.
std::size_t logsumexp_forward_workspace_bytes(const LogsumexpForwardArgs& args, const ExecutionContext& context = {});
std::size_t logsumexp_backward_workspace_bytes(const LogsumexpBackwardArgs& args, const ExecutionContext& context = {});

}  // namespace eaves
#pragma GCC visibility pop
