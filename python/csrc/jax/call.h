// A call of the core as eaves.jax describes it. A description is JSON, made while JAX traces:
//
//   {"function": "cross_entropy_forward", "tensors": ["logits", "targets", "loss"],
//    "numbers": {"ignore_index": -100, "reduction": 0, "label_smoothing": 0.1},
//    "permutations": {"logits": [1, 0]},   // optional: the order in which the core takes the axes of a tensor
//    "op": "cross_entropy", "names": {"z_loss_weight": "z_loss"}}   // the user's names, for errors
//
// `tensors` names members of the function's arguments: first the tensors that are read, then the tensors that are
// written. A tensor that is not named is absent. `numbers` has every other member that differs from its default. This
// code knows no more of a function of the core than the members of its arguments; shapes and types come from the
// buffers.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eaves/context.h"
#include "eaves/tensor.h"

namespace eaves::jax {

class Call {
 public:
  virtual ~Call() = default;

  /// Throws InvalidArgument if `description` is anything else.
  static std::unique_ptr<const Call> parse(std::string_view description);

  /// As parse(), but once in this process; the call lives as long as the process.
  static const Call& of(std::string_view description);

  /// `tensors` are views in the order of the description. Both functions check all arguments, as the core does.
  virtual std::size_t workspace_bytes(std::span<const TensorView> tensors) const = 0;
  virtual void run(std::span<const TensorView> tensors, const ExecutionContext& context) const = 0;
};

}  // namespace eaves::jax
