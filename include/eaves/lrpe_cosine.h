// lrpe_cosine: linearized relative positional encoding by cosines and sines, over sequences and over grids of any
// number of axes, after an optional activation.
//
// x is [B, H, N, D] (batch, heads, positions, features); theta is [H or 1, E] with any E; out is [B, H, N, 2 D]:
//
//   a    = activation(x)
//   phi  = theta[h, d mod E] * position            for feature d of head h
//   out  = [ a * cos(phi), a * sin(phi) ]          the cosine half first
//
//   dx      = da/dx applied to ( g_cos * cos(phi) + g_sin * sin(phi) )      with [g_cos, g_sin] = dL/d(out)
//   dtheta  = sum, over the batch, the positions and the features that share theta's element, of
//             position * a * ( g_sin * cos(phi) - g_cos * sin(phi) )
//
// Positions. The first `extra_tokens` = l of the N tokens have angle 0. The other tokens are the cells of a grid (n_1,
// ..., n_m) in row-major order, the last axis fastest: N = l + n_1 * ... * n_m. Feature d belongs to axis j = d / E.
// Its position is offset + i_j, with i_j the cell's coordinate on axis j. Features at or beyond m * E have angle 0. An
// ordinary sequence is a grid of one axis; only there E = 1 means one angle for all features of a head.
//
// The angle is theta times the position, which is rounded to float32; the product is in float32. Its sine and cosine
// are exact to float32 rounding for angles of any size. All other arithmetic is in float32, or in float64 for a float64
// x, with one rounding at the end. An infinite activation times a sine of 0 is NaN, as in the formula. The encoding
// follows Z. Qin et al., "Linearized Relative Positional Encoding", arXiv:2307.09270, with cosine and sine as separate
// halves.
#pragma once

#include "eaves/context.h"
#include "eaves/tensor.h"

#pragma GCC visibility push(default)  // exported if eaves is built into a shared library
namespace eaves {

enum class Activation : std::uint8_t {
  none,
  relu,  ///< derivative 0 at 0
  sigmoid,
  silu,     ///< x * sigmoid(x)
  softmax,  ///< over the axis activation_dim; NaN, as in PyTorch, if all elements are -inf or one is +inf
};

// Each member has `= {}`, so that a call may leave out any of them without a compiler's warning.

/// The angles of a call. A call may give at most one of positions, cu_seqlens and an offset (offset and offsets add
/// up).
struct LrpeAngles {
  /// [H or 1, E], any strides, including 0; dtype of x, or float32.
  TensorView theta = {};

  /// n_1, ..., n_m, with product N - extra_tokens. Empty: one axis of N - extra_tokens.
  Dims grid = {};

  /// l, in [0, N].
  std::int64_t extra_tokens = 0;

  /// Added to every coordinate. For decoding: the position of the first decoded token.
  std::int64_t offset = 0;

  /// optional; [B], one offset for each batch entry, or one element for all; int32 or int64, any strides. Read on the
  /// device.
  TensorView offsets = {};

  /// optional, one axis only; [N] or [B, N], int32 or int64, any strides: the position of each token. The positions of
  /// extra tokens are not read.
  TensorView positions = {};

  /// optional, one axis only, without extra tokens; [S + 1], int32 or int64, contiguous: the start of each of S packed
  /// sequences on the N axis, in increasing order, then N. Positions count from the start of the sequence, equally in
  /// every batch entry (positions [B, N] can differ between entries). Unsupported with a softmax over the sequence. The
  /// CPU refuses other contents; a GPU computes meaningless positions from them.
  TensorView cu_seqlens = {};
};

struct LrpeCosineForwardArgs {
  /// x, [B, H, N, D], any strides (a [B, N, H, D] tensor is passed as such a view); float16, bfloat16, float32 or
  /// float64.
  TensorView x = {};

  LrpeAngles angles = {};
  Activation activation = Activation::none;

  /// The axis of a softmax: -1, over the features, or -2, over the sequence, which is the N axis with its extra tokens.
  int activation_dim = -1;

  /// out; [B, H, N, 2 D], dtype of x, any strides that give each element an address of its own; must not overlap x.
  TensorView out = {};

  /// out, optional, only for a softmax over the sequence; [B, H, 2, D], contiguous, float32 (float64 for a float64 x):
  /// the logsumexp of x over the sequence, which the backward needs. The first number is the rounded lse, the second is
  /// the remainder of the rounding: with both, exp(x - lse) is as precise as a softmax by its maximum, however large
  /// lse is. The second number is NaN if the first is infinite.
  TensorView lse = {};
};

struct LrpeCosineBackwardArgs {
  /// dL/d(out), [B, H, N, 2 D], dtype of x, any strides, including 0.
  TensorView grad_out = {};

  /// x, as in the forward. May be absent without an activation and without grad_theta, which alone read it.
  TensorView x = {};

  /// As in the forward.
  LrpeAngles angles = {};
  Activation activation = Activation::none;
  int activation_dim = -1;

  /// lse, as the forward wrote it; only for a softmax over the sequence.
  TensorView lse = {};

  /// out, optional; dL/dx, [B, H, N, D], dtype of grad_out, any strides that give each element an address of its own;
  /// must overlap no input.
  TensorView grad_x = {};

  /// out, optional; dL/d(theta), shape and dtype of theta, any strides that give each element an address of its own;
  /// must overlap no input. Its sums are in float32 or better, in the same order on every run. On the CPU the shape
  /// decides the order; on a GPU also the number of multiprocessors, the layout of the tensors, and whether the call
  /// gives positions for each batch entry.
  TensorView grad_theta = {};
};

/// Both throw InvalidArgument (an argument is not as documented above, or the workspace is too small), Unsupported (the
/// tensors are on a GPU and this build or machine has no CUDA; a softmax over packed sequences), DeviceError (the
/// launch failed).
void lrpe_cosine_forward(const LrpeCosineForwardArgs& args, const ExecutionContext& context = {});
void lrpe_cosine_backward(const LrpeCosineBackwardArgs& args, const ExecutionContext& context = {});

/// Bytes of scratch memory that the call needs. CPU: 0. GPU: 0 for most calls; for a softmax over the sequence at most
/// 4 MiB plus four accumulators for each of B x H x D columns; for grad_theta at most the larger of 4 MiB and one
/// accumulator for each of H x D features.
std::size_t lrpe_cosine_forward_workspace_bytes(const LrpeCosineForwardArgs& args,
                                                const ExecutionContext& context = {});
std::size_t lrpe_cosine_backward_workspace_bytes(const LrpeCosineBackwardArgs& args,
                                                 const ExecutionContext& context = {});

}  // namespace eaves
#pragma GCC visibility pop
