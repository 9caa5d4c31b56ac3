// The numbers of the rows of a call of the losses, and of the call: a forward writes them, a backward reads some.
#pragma once

#include <cstdint>

#include "core/softmax_state.h"

namespace eaves {

/// Each nullptr where not asked for; float32, or float64 for float64 logits.
struct LossOutputs {
  void* loss;  ///< per row, or one element where it is reduced, as is z_loss
  void* z_loss;
  void* divisor;  ///< one element
  // Per row.
  std::int64_t* argmax;
  KeptLse lse;
  void* entropy;
  void* sum_sq;
  void* mean_logit;
  void* target_mass;
};

/// Beside lse, those with a number for each row in the dtype of the loss.
using RowOutput = void* LossOutputs::*;
inline constexpr RowOutput kRowOutputs[] = {&LossOutputs::entropy, &LossOutputs::sum_sq, &LossOutputs::mean_logit,
                                            &LossOutputs::target_mass};

}  // namespace eaves
