// What the losses' registrations share: their options, and outputs that a call may have or not.
//
// Which outputs a call has is a set of bits, because each costs the host an allocation: a forward gives a list with the
// loss and then what was asked for, in the order of the bits. python/eaves/_loss.py has the same numbers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "eaves/cross_entropy.h"
#include "torch_binding.h"

namespace eaves::binding {

using OptionalTensor = std::optional<Tensor>;

namespace outputs {
inline constexpr std::int64_t kLse = 1;
inline constexpr std::int64_t kDivisor = 2;
inline constexpr std::int64_t kArgmax = 4;
inline constexpr std::int64_t kEntropy = 8;
inline constexpr std::int64_t kZLoss = 16;
inline constexpr std::int64_t kTargetMass = 32;
inline constexpr std::int64_t kOfIgnoredRows = 64;  ///< no output: lse, entropy and argmax of rows that are ignored too
}  // namespace outputs

static_assert(static_cast<int>(Reduction::none) == 0 && static_cast<int>(Reduction::sum) == 1 &&
              static_cast<int>(Reduction::mean) == 2);

inline TensorView optional_input(const OptionalTensor& tensor, Name name) {
  return tensor.has_value() ? input(*tensor, name) : TensorView{};
}

inline CrossEntropyOptions options_of(std::int64_t ignore_index, std::int64_t reduction, double label_smoothing,
                                      double scale, double softcap, double z_loss_weight) {
  // A number beyond the enum's type would wrap into it.
  const std::int64_t in_type = std::clamp<std::int64_t>(reduction, 0, std::numeric_limits<std::uint8_t>::max());
  return {.ignore_index = ignore_index,
          .reduction = static_cast<Reduction>(in_type),
          .label_smoothing = label_smoothing,
          .scale = scale,
          .softcap = softcap,
          .z_loss_weight = z_loss_weight};
}

/// The outputs that `wanted` names, made and put into `views`, which has a member for each.
template <typename Views>
std::vector<Tensor> make_loss_outputs(Views& views, Reduction reduction, const Dims& row_shape, DType dtype,
                                      Device device, std::int64_t wanted) {
  const Dims loss_shape = reduction == Reduction::none ? row_shape : Dims{};
  std::vector<Tensor> tensors;
  tensors.reserve(10);  // three gradients may follow
  const auto make = [&](TensorView& view, const Dims& shape, DType of) {
    NewTensor made = empty_output(shape, of, device);
    tensors.push_back(std::move(made.tensor));
    view = made.view;
  };
  make(views.loss, loss_shape, dtype);
  if (wanted & outputs::kLse) make(views.lse, row_shape, dtype);
  if (wanted & outputs::kDivisor) make(views.divisor, {}, dtype);
  if (wanted & outputs::kArgmax) make(views.argmax, row_shape, DType::int64);
  if (wanted & outputs::kEntropy) make(views.entropy, row_shape, dtype);
  if (wanted & outputs::kZLoss) make(views.z_loss, loss_shape, dtype);
  if (wanted & outputs::kTargetMass) make(views.target_mass, row_shape, dtype);
  return tensors;
}

}  // namespace eaves::binding
