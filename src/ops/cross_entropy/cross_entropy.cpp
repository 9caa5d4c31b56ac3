// The calls of cross_entropy. Each makes a checked problem of its arguments (cross_entropy_problem.h), and runs it on
// the device of the tensors, unless there is nothing to write.
#include "eaves/cross_entropy.h"

#include <type_traits>

#include "core/check.h"
#include "core/loss_checks.h"
#include "ops/cross_entropy/cross_entropy_problem.h"
#include "runtime/backend.h"

namespace eaves {
namespace {

using namespace cross_entropy_calls;

const CrossEntropyInputs& inputs_of(const CrossEntropyInPlaceProblem& problem) { return problem.forward.inputs; }
const CrossEntropyInputs& inputs_of(const auto& problem) { return problem.inputs; }

/// Does no output have an element? A reduced loss has one even without rows: the backends write 0.
template <typename Problem>
bool has_nothing_to_do(const Problem& problem) {
  if constexpr (std::is_same_v<Problem, CrossEntropyRescaleProblem>) {
    return problem.view.row_count == 0 || problem.view.column_count == 0;
  } else {
    const CrossEntropyInputs& inputs = inputs_of(problem);
    if constexpr (std::is_same_v<Problem, CrossEntropyBackwardProblem>) {
      return inputs.view.row_count == 0 || inputs.view.column_count == 0;
    }
    const bool writes_a_loss = !std::is_same_v<Problem, CrossEntropyShardProblem>;
    return inputs.view.row_count == 0 && !(writes_a_loss && inputs.options.reduction != Reduction::none);
  }
}

template <typename Problem>
Device device_of(const Problem& problem) {
  if constexpr (std::is_same_v<Problem, CrossEntropyRescaleProblem>) {
    return problem.device;
  } else {
    return inputs_of(problem).device;
  }
}

/// For tensors on the CPU, because the host can read them.
template <typename Problem>
void check_normalizer(const char* op, const Problem& problem) {
  if constexpr (requires { problem.forward; }) {
    check_normalizer(op, problem.forward);
  } else if constexpr (requires { problem.normalizer; }) {
    check::normalizer_is_not_negative(op, {problem.normalizer, accumulator_dtype(problem.inputs.logits_dtype)});
  }
}

template <typename Problem>
std::size_t workspace_bytes(const char* op, const Problem& problem) {
  const Device device = device_of(problem);
  if (device.type == DeviceType::cpu) return 0;
  require_cuda(op, device);
  if constexpr (kHasCuda) return cuda::cross_entropy_workspace_bytes(problem);
  return 0;
}

template <typename Args>
void call(const char* op, const Args& args, const ExecutionContext& context) {
  check::threads(op, context.threads);
  const auto problem = make_problem(args);
  if (has_nothing_to_do(problem)) return;
  if constexpr (!std::is_same_v<Args, CrossEntropyRescaleArgs>) {
    const CrossEntropyInputs& inputs = inputs_of(problem);
    if (!inputs.has_soft_targets() && inputs.view.row_count > 0) {
      check_targets(op, inputs.device, inputs.row_targets(), inputs.row_shape, inputs.classes,
                    inputs.options.ignore_index, context);
    }
  }
  const Device device = device_of(problem);
  if (device.type == DeviceType::cpu) {
    check_normalizer(op, problem);
    return cpu::cross_entropy(problem, context);
  }
  const Scratch scratch(op, device, workspace_bytes(op, problem), context);
  if constexpr (kHasCuda) cuda::cross_entropy(problem, scratch.context());
}

}  // namespace

void cross_entropy_forward(const CrossEntropyForwardArgs& args, const ExecutionContext& context) {
  call(kForward, args, context);
}
void cross_entropy_backward(const CrossEntropyBackwardArgs& args, const ExecutionContext& context) {
  call(kBackward, args, context);
}
void cross_entropy_forward_backward(const CrossEntropyForwardBackwardArgs& args, const ExecutionContext& context) {
  call(kForwardBackward, args, context);
}
void cross_entropy_rescale(const CrossEntropyRescaleArgs& args, const ExecutionContext& context) {
  call(kRescale, args, context);
}
void cross_entropy_shard_forward(const CrossEntropyShardArgs& args, const ExecutionContext& context) {
  call(kShardForward, args, context);
}
void cross_entropy_merge(const CrossEntropyMergeArgs& args, const ExecutionContext& context) {
  call(kMerge, args, context);
}

std::size_t cross_entropy_forward_workspace_bytes(const CrossEntropyForwardArgs& args, const ExecutionContext&) {
  return workspace_bytes(kForward, make_problem(args));
}
std::size_t cross_entropy_backward_workspace_bytes(const CrossEntropyBackwardArgs& args, const ExecutionContext&) {
  make_problem(args);
  return 0;
}
std::size_t cross_entropy_forward_backward_workspace_bytes(const CrossEntropyForwardBackwardArgs& args,
                                                           const ExecutionContext&) {
  return workspace_bytes(kForwardBackward, make_problem(args));
}
std::size_t cross_entropy_rescale_workspace_bytes(const CrossEntropyRescaleArgs& args, const ExecutionContext&) {
  make_problem(args);
  return 0;
}
std::size_t cross_entropy_shard_forward_workspace_bytes(const CrossEntropyShardArgs& args, const ExecutionContext&) {
  return workspace_bytes(kShardForward, make_problem(args));
}
std::size_t cross_entropy_merge_workspace_bytes(const CrossEntropyMergeArgs& args, const ExecutionContext&) {
  return workspace_bytes(kMerge, make_problem(args));
}

}  // namespace eaves
