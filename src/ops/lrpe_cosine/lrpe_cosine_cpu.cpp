#include "ops/lrpe_cosine/lrpe_cosine_backend.h"
namespace eaves::cpu {
void lrpe_cosine_forward(const LrpeCosineForwardProblem&, const ExecutionContext&) {}
void lrpe_cosine_backward(const LrpeCosineBackwardProblem&, const ExecutionContext&) {}
}  // namespace eaves::cpu
