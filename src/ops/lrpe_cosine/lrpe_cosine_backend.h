// The interface between the calls of lrpe_cosine and its backends: checked problems. A problem may be empty and still
// have outputs: the lse of a sequence without tokens, and grad_theta, which is 0 then. Strides are in elements, over
// the axes b, h, n, d. Strides of theta are normalised: one head and one angle repeat by strides of 0.
#pragma once

#include <array>

#include "eaves/context.h"
#include "eaves/lrpe_cosine.h"
#include "ops/lrpe_cosine/lrpe_cosine_angles.h"

namespace eaves {

/// The kinds of activations with different loads in a kernel. The elementwise activations are chosen at run time.
/// `none` is a kind of its own: among them its backward would cost 5 to 18 % more, to load a third tensor into
/// registers (H200, bf16).
enum class LrpeKind : std::uint8_t { none, elementwise, feature_softmax, sequence_softmax };

struct LrpeCosineShape {
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t positions = 0;  ///< N
  std::int64_t features = 0;   ///< D; out has twice as many
};

/// Strides over b, h, n, d.
using LrpeCosineStrides = std::array<std::int64_t, 4>;

struct LrpeCosineForwardProblem {
  Device device;
  DType dtype;
  LrpeCosineShape shape;
  LrpeCosineAngles angles;
  LrpeKind kind;
  Activation activation;  ///< of LrpeKind::elementwise
  const void* x;
  LrpeCosineStrides x_strides;
  void* out;
  LrpeCosineStrides out_strides;
  void* lse;  ///< [B, H, 2, D] contiguous, or nullptr
};

struct LrpeCosineBackwardProblem {
  Device device;
  DType dtype;
  LrpeCosineShape shape;
  LrpeCosineAngles angles;
  LrpeKind kind;
  Activation activation;  ///< of LrpeKind::elementwise
  const void* grad_out;
  LrpeCosineStrides grad_out_strides;
  const void* x;  ///< nullptr if it is not needed
  LrpeCosineStrides x_strides;
  const void* lse;  ///< [B, H, 2, D] contiguous; nullptr unless the kind is sequence_softmax
  void* grad_x;     ///< or nullptr
  LrpeCosineStrides grad_x_strides;
  void* grad_theta;  ///< or nullptr
  std::int64_t grad_theta_head_stride;
  std::int64_t grad_theta_feature_stride;
};

namespace cpu {
void lrpe_cosine_forward(const LrpeCosineForwardProblem& problem, const ExecutionContext& context);
void lrpe_cosine_backward(const LrpeCosineBackwardProblem& problem, const ExecutionContext& context);
}  // namespace cpu

namespace cuda {
/// The context's workspace has at least the bytes that the two functions below return.
void lrpe_cosine_forward(const LrpeCosineForwardProblem& problem, const ExecutionContext& context);
void lrpe_cosine_backward(const LrpeCosineBackwardProblem& problem, const ExecutionContext& context);
std::size_t lrpe_cosine_forward_workspace_bytes(const LrpeCosineForwardProblem& problem);
std::size_t lrpe_cosine_backward_workspace_bytes(const LrpeCosineBackwardProblem& problem);
}  // namespace cuda

}  // namespace eaves
