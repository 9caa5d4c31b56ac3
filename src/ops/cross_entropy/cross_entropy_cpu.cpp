// Placeholder.
#include "ops/cross_entropy/cross_entropy_backend.h"

#include "eaves/error.h"
namespace eaves::cpu {
void cross_entropy_check_targets(const char*, const CrossEntropyInputs&) {}
void cross_entropy_forward(const CrossEntropyForwardProblem&, const ExecutionContext&) { throw Unsupported("todo"); }
void cross_entropy_backward(const CrossEntropyBackwardProblem&, const ExecutionContext&) { throw Unsupported("todo"); }
void cross_entropy_in_place(const CrossEntropyInPlaceProblem&, const ExecutionContext&) { throw Unsupported("todo"); }
void cross_entropy_shard_forward(const CrossEntropyShardProblem&, const ExecutionContext&) { throw Unsupported("todo"); }
void cross_entropy_merge(const CrossEntropyMergeProblem&, const ExecutionContext&) { throw Unsupported("todo"); }
}  // namespace eaves::cpu
