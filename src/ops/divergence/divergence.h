// The divergence of two distributions over the classes, row by row, and the gradient of the student's logits: the
// passes of a distillation loss over the logits of a chunk. These kernels are for a GPU;
// python/eaves/_chunked/divergence.py has the same in PyTorch's operators, for the CPU and float64.
//
// z = logits / temperature; s = softmax(z) of the student, t = softmax(z) of the teacher. The divergence is a sum over
// the classes. With f' the derivative of a summand by s, the gradient of the student's z is s * (f' - centre),
// centre = sum s * f'. A summand with probability 0 is 0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "eaves/context.h"
#include "eaves/tensor.h"

#pragma GCC visibility push(default)  // exported for the Python package
namespace eaves {

enum class Divergence : std::uint8_t {
  forward,  ///< sum t * (log t - log s)
  reverse,  ///< sum s * (log s - log t)
  /// with m = beta * t + (1 - beta) * s: beta * sum t * (log t - log m) + (1 - beta) * sum s * (log s - log m)
  jsd,
  total_variation,  ///< sum |s - t| / 2
};

/// The logits of u = values + bias: scale * u, or with a soft cap softcap * tanh(scale * u / softcap).
struct Distribution {
  TensorView values = {};  ///< [rows, classes], rows of unit stride; float32, for a teacher also float16 or bfloat16
  TensorView bias = {};    ///< [classes], contiguous float32; or absent
  double scale = 1.0;
  double softcap = 0.0;              ///< 0: none
  bool holds_probabilities = false;  ///< the logits are log(values)
};

/// One float32 number per row, [rows], any stride; if absent, `constant` for all rows.
struct RowNumber {
  TensorView values = {};
  double constant = 0.0;
};

struct DivergenceInputs {
  Distribution student = {};
  Distribution teacher = {};
  RowNumber temperature = {{}, 1.0};
  Divergence divergence = Divergence::forward;
  double beta = 0.5;
  /// optional; [rows], int64: the classes for a cross entropy of the student's logits at temperature 1
  TensorView targets = {};
};

/// Columns of `statistics`. An lse has two columns: the largest z, and the logarithm of sum exp(z - largest).
enum class DivergenceStatistic : std::uint8_t {
  divergence,
  lse,
  teacher_lse = 3,
  centre = 5,
  entropy,   ///< of s
  hard_lse,  ///< of the student's logits at temperature 1
  hard_loss = 9,
};
inline constexpr std::int64_t kDivergenceStatistics = 10;

struct DivergenceForwardArgs {
  DivergenceInputs inputs = {};
  TensorView statistics = {};  ///< out; [rows, kDivergenceStatistics], contiguous float32. No divergence is negative.
};

struct DivergenceBackwardArgs {
  DivergenceInputs inputs = {};
  TensorView lse = {};          ///< [rows, 2], float32, the last axis with unit stride
  TensorView teacher_lse = {};  ///< likewise
  TensorView hard_lse = {};     ///< likewise; with targets
  RowNumber centre = {};
  RowNumber entropy = {};
  RowNumber hard_loss = {};

  /// Upstream gradients. A row with upstream gradients that are all 0 has the gradient 0 for any logits.
  RowNumber grad_divergence = {};
  RowNumber grad_lse = {};
  RowNumber grad_entropy = {};
  RowNumber grad_hard_loss = {};  ///< with targets

  /// out; dL/d(student's values), rows of unit stride; float32, float16 or bfloat16. In float32 it may share the memory
  /// of the student's values, which may also be the teacher's.
  TensorView grad_values = {};
};

void divergence_forward(const DivergenceForwardArgs& args, const ExecutionContext& context);
std::size_t divergence_forward_workspace_bytes(const DivergenceForwardArgs& args, const ExecutionContext& context);
void divergence_backward(const DivergenceBackwardArgs& args, const ExecutionContext& context);

}  // namespace eaves
#pragma GCC visibility pop

namespace eaves::cuda {
/// `context.workspace` holds divergence_workspace_bytes().
void divergence_forward(const DivergenceForwardArgs& args, const ExecutionContext& context);
void divergence_backward(const DivergenceBackwardArgs& args, const ExecutionContext& context);
std::size_t divergence_workspace_bytes(std::int64_t rows, std::int64_t classes);
}  // namespace eaves::cuda
