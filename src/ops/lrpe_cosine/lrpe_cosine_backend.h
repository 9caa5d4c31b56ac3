// What a backend of lrpe_cosine gets: a problem that has been checked. It may be empty where something is owed all the
// same: the lse of a sequence of no tokens, and grad_theta, whose elements are 0 where nothing is summed. Strides are
// in elements, over the axes b, h, n, d. Sizes and strides of theta are normalised: one head and one angle repeat by
// strides of 0.
#pragma once

#include <array>

#include "eaves/context.h"
#include "eaves/lrpe_cosine.h"
#include "ops/lrpe_cosine/lrpe_cosine_angles.h"

namespace eaves {

/// What changes the loads of a kernel. The elementwise activations are chosen at run time; `none` among them would cost
/// its backward 5 to 18 % (H200, bf16: a third tensor to load, registers for it).
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
  const void* x;  ///< nullptr where it is not needed
  LrpeCosineStrides x_strides;
  const void* lse;  ///< [B, H, 2, D] contiguous; nullptr but for LrpeKind::sequence_softmax
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
/// The context's workspace has at least the bytes that the other two say.
void lrpe_cosine_forward(const LrpeCosineForwardProblem& problem, const ExecutionContext& context);
void lrpe_cosine_backward(const LrpeCosineBackwardProblem& problem, const ExecutionContext& context);
std::size_t lrpe_cosine_forward_workspace_bytes(const LrpeCosineForwardProblem& problem);
std::size_t lrpe_cosine_backward_workspace_bytes(const LrpeCosineBackwardProblem& problem);
}  // namespace cuda

}  // namespace eaves
