// lrpe_cosine: linearized relative positional encoding by cosines and sines, over sequences and over grids of any
// number of axes, with an activation in front.
//
// x is [B, H, N, D] (batch, heads, positions, features); theta is [H or 1, E] with any E; out is [B, H, N, 2 D]:
//
//   a    = activation(x)
//   phi  = theta[h, d mod E] * position            of feature d in head h, see below
//   out  = [ a * cos(phi), a * sin(phi) ]          the cosine half first
//
//   dx      = da/dx applied to ( g_cos * cos(phi) + g_sin * sin(phi) )      with [g_cos, g_sin] = dL/d(out)
//   dtheta  = sum over batch, positions and features of theta's element:
//             position * a * ( g_sin * cos(phi) - g_cos * sin(phi) )
//
// Positions. The first `extra_tokens` = l of the N have angle 0. The others are the cells of a grid (n_1, ..., n_m),
// row by row, the last axis fastest: N = l + n_1 * ... * n_m. Feature d belongs to axis j = d / E, and its position is
// offset + i_j, where i_j is the cell's coordinate on that axis. Features at or beyond m * E have angle 0. An ordinary
// sequence is a grid of one axis, and only there E = 1 means one angle for all features of a head.
//
// The angle is the product in float32 (the position rounded to it), reduced and evaluated to float32 rounding for any
// size; everything else is in float32 too and rounded once, or in float64 where x is float64. An activation that is
// infinite times a sine that is 0 is NaN, as in the formula. The encoding is that of Z. Qin et al., "Linearized
// Relative Positional Encoding", arXiv:2307.09270, with cosine and sine as separate halves.
#pragma once

#include "eaves/context.h"
#include "eaves/tensor.h"

#pragma GCC visibility push(default)  // of a shared library, this is seen from outside
namespace eaves {

enum class Activation : std::uint8_t {
  none,
  relu,  ///< derivative 0 at 0
  sigmoid,
  silu,     ///< x * sigmoid(x)
  softmax,  ///< over the axis activation_dim; all of it -inf, or a +inf in it: NaN, as in PyTorch
};

// `= {}` after each member: a call may leave out any of them without a compiler's warning.

/// What makes an angle. At most one of positions, cu_seqlens and an offset (offset and offsets add up) may be given.
struct LrpeAngles {
  /// [H or 1, E], any strides, 0 among them; dtype of x, or float32.
  TensorView theta = {};

  /// n_1, ..., n_m, whose product is N - extra_tokens. Empty: one axis of N - extra_tokens.
  Dims grid = {};

  /// l, in [0, N].
  std::int64_t extra_tokens = 0;

  /// Added to every coordinate: the position of the first token that is decoded.
  std::int64_t offset = 0;

  /// optional; one for each batch entry, [B], or one element for all; int32 or int64, any strides. Read on the device.
  TensorView offsets = {};

  /// optional, one axis only; [N] or [B, N], int32 or int64, any strides: the positions themselves. Those of extra
  /// tokens are not read.
  TensorView positions = {};

  /// optional, one axis only, without extra tokens; [S + 1], int32 or int64, contiguous: where each of S packed
  /// sequences starts on the N axis, and N at last, in increasing order. Positions count from the start of each, the
  /// same in every batch entry (positions [B, N] tell entries apart). Not with a softmax over the sequence
  /// (Unsupported). On the CPU other contents are refused; on a GPU they give positions without meaning.
  TensorView cu_seqlens = {};
};

struct LrpeCosineForwardArgs {
  /// x, [B, H, N, D], any strides (a tensor [B, N, H, D] is a view of it); float16, bfloat16, float32 or float64.
  TensorView x = {};

  LrpeAngles angles = {};
  Activation activation = Activation::none;

  /// Of a softmax: -1, over the features, or -2, over the sequence: the N axis, extra tokens among it.
  int activation_dim = -1;

  /// out; [B, H, N, 2 D], dtype of x, any strides that give every element its own place; must not overlap x.
  TensorView out = {};

  /// out, optional, only of a softmax over the sequence; [B, H, 2, D], contiguous, float32 (float64 where x is
  /// float64): the logsumexp of x over the sequence, which the backward needs, as a number and what its rounding has
  /// lost: exp(x - lse) is as precise as a softmax by its maximum, however large lse is. The second is NaN where the
  /// first is infinite.
  TensorView lse = {};
};

struct LrpeCosineBackwardArgs {
  /// dL/d(out), [B, H, N, 2 D], dtype of x, any strides, 0 among them.
  TensorView grad_out = {};

  /// x, as in the forward. May be absent where it is not needed: no activation, and no grad_theta.
  TensorView x = {};

  /// As in the forward.
  LrpeAngles angles = {};
  Activation activation = Activation::none;
  int activation_dim = -1;

  /// lse, as the forward wrote it; only of a softmax over the sequence.
  TensorView lse = {};

  /// out, optional; dL/dx, [B, H, N, D], dtype of grad_out, any strides that give every element its own place; must
  /// overlap no input.
  TensorView grad_x = {};

  /// out, optional; dL/d(theta), shape and dtype of theta, any strides that give every element its own place; must
  /// overlap no input. Summed in float32 or better, in the same order on every run: on the CPU that of the
  /// shape, on a GPU also of its size, of how the tensors lie, and of whether positions are given for each batch entry.
  TensorView grad_theta = {};
};

/// Throws InvalidArgument (an argument is not as documented above, or the workspace is too small), Unsupported (the
/// tensors are on a GPU and this build or machine has no CUDA; a softmax over packed sequences), DeviceError (the
/// launch failed).
void lrpe_cosine_forward(const LrpeCosineForwardArgs& args, const ExecutionContext& context = {});
void lrpe_cosine_backward(const LrpeCosineBackwardArgs& args, const ExecutionContext& context = {});

/// Bytes of scratch that the call needs: on the CPU 0; on a GPU 0 for most calls, for a softmax over the sequence at
/// most 4 MiB beside four accumulators for each of B x H x D columns, and for grad_theta at most 4 MiB or one
/// accumulator for each of H x D features, whichever is more.
std::size_t lrpe_cosine_forward_workspace_bytes(const LrpeCosineForwardArgs& args,
                                                const ExecutionContext& context = {});
std::size_t lrpe_cosine_backward_workspace_bytes(const LrpeCosineBackwardArgs& args,
                                                 const ExecutionContext& context = {});

}  // namespace eaves
#pragma GCC visibility pop
