// A call of the core as eaves.jax describes it. A description is JSON, made while JAX traces:
//
//   {"function": "cross_entropy_forward", "tensors": ["logits", "targets", "loss"],
//    "numbers": {"ignore_index": -100, "reduction": 0, "label_smoothing": 0.1},
//    "permutations": {"logits": [1, 0]},   // optional: the order in which the core takes the axes of a tensor
//    "op": "cross_entropy", "names": {"z_loss_weight": "z_loss"}}   // of the user's function, for errors
//
// `tensors` names members of the function's arguments, those that are read and then those that are written: a tensor
// that is not named is absent. `numbers` are all other members that are not to have their defaults. So a function of
// the core is known here by the members of its arguments and nothing else; shapes and types are those of the buffers.
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

  /// Throws InvalidArgument for a description of anything else.
  static std::unique_ptr<const Call> parse(std::string_view description);

  /// The same, parsed once in this process; lives as long as it does.
  static const Call& of(std::string_view description);

  /// Views of the tensors in the order of the description. Both check all arguments, as the core does.
  virtual std::size_t workspace_bytes(std::span<const TensorView> tensors) const = 0;
  virtual void run(std::span<const TensorView> tensors, const ExecutionContext& context) const = 0;
};

}  // namespace eaves::jax
