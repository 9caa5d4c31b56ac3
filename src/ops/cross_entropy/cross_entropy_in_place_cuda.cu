// Forward and backward of cross_entropy at once, in place: which way a call takes. Rows that do not stay on the chip
// (strided or huge ones, float64, longer rows with options, GPUs without clusters) go through the two separate passes.
#include "ops/cross_entropy/cross_entropy_in_place.cuh"

namespace eaves::cuda {
namespace {

/// The forward, then the backward over the logits.
void in_two_passes(const CrossEntropyInPlaceProblem& problem, const ExecutionContext& context) {
  const InPlaceWorkspace workspace(problem);
  char* memory = static_cast<char*>(context.workspace.data);
  const auto take = [&](std::size_t bytes) {
    char* taken = memory;
    memory += bytes;
    return taken;
  };
  ExecutionContext forward_context = context;
  forward_context.workspace = {take(workspace.forward_bytes), workspace.forward_bytes};
  CrossEntropyForwardProblem forward = problem.forward;
  const CrossEntropyInputs& inputs = forward.inputs;
  const bool is_mean = inputs.options.reduction == Reduction::mean;
  void* const own_lse = take(workspace.lse_bytes);
  void* const own_mass = take(workspace.mass_bytes);
  void* const own_divisor = take(workspace.divisor_bytes);
  if (forward.outputs.lse == nullptr) forward.outputs.lse = own_lse;
  if (forward.outputs.target_mass == nullptr) forward.outputs.target_mass = own_mass;
  if (is_mean && forward.outputs.divisor == nullptr) forward.outputs.divisor = own_divisor;
  cross_entropy_forward(forward, forward_context);
  if (inputs.view.row_count == 0 || inputs.view.column_count == 0) return;
  cross_entropy_backward({.inputs = inputs,
                          .grad_loss_dtype = problem.grad_loss_dtype,
                          .grad_loss = problem.grad_loss,
                          .grad_lse = nullptr,
                          .grad_entropy = nullptr,
                          .lse = forward.outputs.lse,
                          .entropy = nullptr,
                          .target_mass = forward.outputs.target_mass,
                          .divisor = is_mean ? forward.outputs.divisor : nullptr,
                          .grad_dtype = problem.grad_dtype,
                          .grad_logits = const_cast<void*>(inputs.logits)},
                         context);
}

}  // namespace

std::size_t cross_entropy_in_place_workspace_bytes(const CrossEntropyInPlaceProblem& problem) {
  return InPlaceWorkspace(problem).bytes();
}

void cross_entropy_in_place(const CrossEntropyInPlaceProblem& problem, const ExecutionContext& context) {
  const CrossEntropyInputs& inputs = problem.forward.inputs;
  const DeviceGuard guard(inputs.device);
  if (!is_fused(problem)) return in_two_passes(problem, context);
  if (problem.grad_dtype != inputs.logits_dtype) return narrow_in_place(problem, context);
  dispatch_floating_point(inputs.logits_dtype, [&]<typename T>() {
    if constexpr (!std::is_same_v<T, double>) in_place<T, T>(problem, context);
  });
}

}  // namespace eaves::cuda
