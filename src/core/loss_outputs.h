// The results of a loss, per row and per call. A forward writes them; a backward reads some of them.
#pragma once

#include <cstdint>

#include "core/softmax_state.h"

namespace eaves {

/// nullptr means that the caller does not want the result. Results are float32, or float64 for float64 logits.
struct LossOutputs {
  void* loss;  ///< per row, or one element if it is reduced; z_loss likewise
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

/// The outputs besides lse that hold one number per row in the dtype of the loss.
using RowOutput = void* LossOutputs::*;
inline constexpr RowOutput kRowOutputs[] = {&LossOutputs::entropy, &LossOutputs::sum_sq, &LossOutputs::mean_logit,
                                            &LossOutputs::target_mass};

}  // namespace eaves
