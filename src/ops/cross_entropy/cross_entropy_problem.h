// The checks of a call's arguments, and their conversion to the problem that a backend gets.
#pragma once

#include "ops/cross_entropy/cross_entropy_backend.h"

namespace eaves::cross_entropy_calls {

inline constexpr const char* kForward = "cross_entropy_forward";
inline constexpr const char* kBackward = "cross_entropy_backward";
inline constexpr const char* kForwardBackward = "cross_entropy_forward_backward";
inline constexpr const char* kRescale = "cross_entropy_rescale";
inline constexpr const char* kShardForward = "cross_entropy_shard_forward";
inline constexpr const char* kMerge = "cross_entropy_merge";

CrossEntropyForwardProblem make_problem(const CrossEntropyForwardArgs& args);
CrossEntropyBackwardProblem make_problem(const CrossEntropyBackwardArgs& args);
CrossEntropyInPlaceProblem make_problem(const CrossEntropyForwardBackwardArgs& args);
CrossEntropyRescaleProblem make_problem(const CrossEntropyRescaleArgs& args);
CrossEntropyShardProblem make_problem(const CrossEntropyShardArgs& args);
CrossEntropyMergeProblem make_problem(const CrossEntropyMergeArgs& args);

}  // namespace eaves::cross_entropy_calls
