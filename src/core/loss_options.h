// The table of the losses' scalar options. The checks, the command line and the bindings of PyTorch and JAX are made
// from it. A new option needs a row here, a member of CrossEntropyOptions (include/eaves/cross_entropy.h), a term in
// the formula (ops/cross_entropy/cross_entropy_math.h) and a parameter of the Python functions.
//
// plan_of() (ops/cross_entropy/cross_entropy_problem.cpp) chooses the kernels: it must know an option that changes the
// logits, or that makes the gradient need more of a row than its lse. An option that changes the logits also goes into
// the transforms (cross_entropy_transform.cuh and cross_entropy_rows_cpu.h there), and suits_fused_path()
// (linear_cross_entropy.cpp) may refuse it.
#pragma once

#include <limits>

#include "eaves/cross_entropy.h"

namespace eaves {

struct LossOption {
  const char* name;  ///< of the member, and in messages
  double CrossEntropyOptions::*value;
  double smallest;
  double largest;
  bool zero_is_none;     ///< 0, the default, leaves the option out, whatever `smallest` is
  const char* expected;  ///< the range in an error's words
  const char* flag;      ///< on the command line
  const char* help;
};

// Most calls compute in float32, so every call refuses a value that float32 would round to 0 or to infinity.
inline constexpr double kSmallestOption = std::numeric_limits<float>::min();
inline constexpr double kLargestOption = std::numeric_limits<float>::max();

inline constexpr LossOption kLossOptions[] = {
    {"label_smoothing", &CrossEntropyOptions::label_smoothing, 0.0, 1.0, true, "0 to 1", "--label-smoothing",
     "Share of each target, 0 to 1, that is spread evenly over the classes"},
    {"scale", &CrossEntropyOptions::scale, kSmallestOption, kLargestOption, false,
     "a positive number in the range of float32", "--scale", "Factor of the logits"},
    {"softcap", &CrossEntropyOptions::softcap, kSmallestOption, kLargestOption, true,
     "a positive number in the range of float32", "--softcap",
     "Soft cap of the logits: softcap * tanh(scale * logits / softcap); 0: no cap"},
    {"z_loss_weight", &CrossEntropyOptions::z_loss_weight, 0.0, kLargestOption, true,
     "0 or a positive number in the range of float32", "--z-loss",
     "Weight of lse^2 in the loss; above 0 the output z_loss is written too"},
};

}  // namespace eaves
