// The shared part of the losses' registrations: their options, and outputs that a call may leave out.
//
// A set of bits says which outputs a call has, because each costs the host an allocation. A forward returns a list of
// the loss and the other outputs in the order of the bits. python/eaves/_torch/outputs.py has the same numbers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <utility>
#include <vector>

#include "core/loss_options.h"
#include "eaves/cross_entropy.h"
#include "torch_binding.h"

namespace eaves::binding {

namespace outputs {
inline constexpr std::int64_t kLse = 1;
inline constexpr std::int64_t kDivisor = 2;
inline constexpr std::int64_t kArgmax = 4;
inline constexpr std::int64_t kEntropy = 8;
inline constexpr std::int64_t kZLoss = 16;
inline constexpr std::int64_t kTargetMass = 32;
inline constexpr std::int64_t kSumSq = 64;
inline constexpr std::int64_t kMeanLogit = 128;
inline constexpr std::int64_t kOfIgnoredRows = 256;  ///< no output: ignored rows have outputs too
inline constexpr std::int64_t kSplitLse = 512;       ///< no output: lse is two numbers, [rows..., 2]
}  // namespace outputs

static_assert(static_cast<int>(Reduction::none) == 0 && static_cast<int>(Reduction::sum) == 1 &&
              static_cast<int>(Reduction::mean) == 2);
// python/eaves/_parallel/statistics.py and jax/_shards.py have the same numbers.
static_assert(kCrossEntropyStatistics == 10 && static_cast<int>(CrossEntropyStatistic::largest) == 0 &&
              static_cast<int>(CrossEntropyStatistic::best_value) == 7 &&
              static_cast<int>(CrossEntropyStatistic::best) == 8);

/// The options of every schema. SymInt, because torch.compile compiles again for each value of an int. `numbers` has
/// one for each of kLossOptions, in its order, or is empty if all have their defaults: an empty list costs the host
/// least.
#define EAVES_OPTIONS "SymInt ignore_index, int reduction, float[] numbers"

struct Options : CrossEntropyOptions {
  static Options read(Arguments& arguments) {
    Options options;
    options.ignore_index = arguments.read<std::int64_t>();
    // A number beyond the enum's type would wrap into it.
    const std::int64_t most = std::numeric_limits<std::uint8_t>::max();
    options.reduction = static_cast<Reduction>(std::clamp<std::int64_t>(arguments.read<std::int64_t>(), 0, most));
    const auto numbers = arguments.read<std::vector<double>>();
    if (numbers.empty()) return options;
    if (numbers.size() != std::size(kLossOptions)) throw InvalidArgument("numbers: expected one for each option");
    auto number = numbers.begin();
    for (const LossOption& option : kLossOptions) options.*option.value = *number++;
    return options;
  }
};

#define EAVES_UPSTREAM "Tensor grad_loss, Tensor? grad_lse, Tensor? grad_entropy"
#define EAVES_SAVED "Tensor lse, Tensor? entropy, Tensor? target_mass, Tensor? divisor"

/// The arguments of a backward beside its forward's: the gradients of the outputs, and the tensors that the forward
/// saved.
struct Upstream {
  Tensor grad_loss;
  OptionalTensor grad_lse, grad_entropy;

  static Upstream read(Arguments& arguments) {
    return {arguments.read<Tensor>(), arguments.read<OptionalTensor>(), arguments.read<OptionalTensor>()};
  }
};

struct Saved {
  Tensor lse;
  OptionalTensor entropy, target_mass, divisor;

  static Saved read(Arguments& arguments) {
    return {arguments.read<Tensor>(), arguments.read<OptionalTensor>(), arguments.read<OptionalTensor>(),
            arguments.read<OptionalTensor>()};
  }
};

/// Puts views of these tensors into the arguments of a backward, which have a member for each.
template <typename Args>
void put(Args& args, const Upstream& upstream, const Saved& saved, const char* op) {
  args.grad_loss = input(upstream.grad_loss, {op, "grad_loss"});
  args.grad_lse = optional_input(upstream.grad_lse, {op, "grad_lse"});
  args.grad_entropy = optional_input(upstream.grad_entropy, {op, "grad_entropy"});
  args.lse = input(saved.lse, {op, "lse"});
  args.entropy = optional_input(saved.entropy, {op, "entropy"});
  args.target_mass = optional_input(saved.target_mass, {op, "target_mass"});
  args.divisor = optional_input(saved.divisor, {op, "divisor"});
}

/// Makes the outputs that `wanted` names, and puts their views into `views`, which has a member for each.
template <typename Views>
std::vector<Tensor> make_loss_outputs(Views& views, Reduction reduction, const Dims& row_shape, DType dtype,
                                      Device device, std::int64_t wanted) {
  const Dims loss_shape = reduction == Reduction::none ? row_shape : Dims{};
  std::vector<Tensor> tensors;
  tensors.reserve(12);  // three gradients may follow
  const auto make = [&](TensorView& view, const Dims& shape, DType of) {
    NewTensor made = empty_output(shape, of, device);
    tensors.push_back(std::move(made.tensor));
    view = made.view;
  };
  make(views.loss, loss_shape, dtype);
  if (wanted & outputs::kLse) {
    Dims lse_shape = row_shape;
    if (wanted & outputs::kSplitLse) lse_shape.push_back(2);
    make(views.lse, lse_shape, dtype);
  }
  if (wanted & outputs::kDivisor) make(views.divisor, {}, dtype);
  if (wanted & outputs::kArgmax) make(views.argmax, row_shape, DType::int64);
  if (wanted & outputs::kEntropy) make(views.entropy, row_shape, dtype);
  if (wanted & outputs::kZLoss) make(views.z_loss, loss_shape, dtype);
  if (wanted & outputs::kTargetMass) make(views.target_mass, row_shape, dtype);
  if (wanted & outputs::kSumSq) make(views.sum_sq, row_shape, dtype);
  if (wanted & outputs::kMeanLogit) make(views.mean_logit, row_shape, dtype);
  return tensors;
}

}  // namespace eaves::binding
