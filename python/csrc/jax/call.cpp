#include "jax/call.h"

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "core/loss_options.h"
#include "eaves/cross_entropy.h"
#include "eaves/error.h"
#include "eaves/linear_cross_entropy.h"
#include "eaves/logsumexp.h"
#include "eaves/lrpe_cosine.h"

namespace eaves::jax {
namespace {

using nlohmann::json;

// ---- argument members by name --------------------------------------------------------------------------------------

#define EAVES_MEMBER(member) visit(#member, args.member)

template <typename Visit>
void each_member(CrossEntropyOptions& args, Visit&& visit) {
  EAVES_MEMBER(ignore_index);
  EAVES_MEMBER(reduction);
  for (const LossOption& option : kLossOptions) visit(option.name, args.*option.value);
}

template <typename Visit>
void each_member(LogsumexpForwardArgs& args, Visit&& visit) {
  EAVES_MEMBER(x);
  EAVES_MEMBER(axes);
  EAVES_MEMBER(keepdim);
  EAVES_MEMBER(out);
  EAVES_MEMBER(lse);
}

template <typename Visit>
void each_member(LogsumexpBackwardArgs& args, Visit&& visit) {
  EAVES_MEMBER(grad_out);
  EAVES_MEMBER(x);
  EAVES_MEMBER(lse);
  EAVES_MEMBER(axes);
  EAVES_MEMBER(keepdim);
  EAVES_MEMBER(grad_x);
}

/// The outputs of the losses, which several structs share.
template <typename Args, typename Visit>
void each_output(Args& args, Visit&& visit) {
  EAVES_MEMBER(loss);
  EAVES_MEMBER(lse);
  EAVES_MEMBER(argmax);
  EAVES_MEMBER(entropy);
  EAVES_MEMBER(sum_sq);
  EAVES_MEMBER(mean_logit);
  EAVES_MEMBER(z_loss);
  EAVES_MEMBER(target_mass);
  EAVES_MEMBER(divisor);
}

/// The members of a loss's backward beside the arguments of its forward.
template <typename Args, typename Visit>
void each_upstream(Args& args, Visit&& visit) {
  EAVES_MEMBER(grad_loss);
  EAVES_MEMBER(grad_lse);
  EAVES_MEMBER(grad_entropy);
  EAVES_MEMBER(lse);
  EAVES_MEMBER(entropy);
  EAVES_MEMBER(target_mass);
  EAVES_MEMBER(divisor);
}

template <typename Args, typename Visit>
void each_of_logits(Args& args, Visit&& visit) {
  EAVES_MEMBER(logits);
  EAVES_MEMBER(targets);
  EAVES_MEMBER(class_weight);
  EAVES_MEMBER(class_axis);
  each_member(args.options, visit);
}

template <typename Visit>
void each_member(CrossEntropyForwardArgs& args, Visit&& visit) {
  each_of_logits(args, visit);
  EAVES_MEMBER(row_weight);
  EAVES_MEMBER(normalizer);
  EAVES_MEMBER(skips_ignored);
  each_output(args, visit);
}

template <typename Visit>
void each_member(CrossEntropyBackwardArgs& args, Visit&& visit) {
  each_of_logits(args, visit);
  EAVES_MEMBER(row_weight);
  each_upstream(args, visit);
  EAVES_MEMBER(first_class);
  EAVES_MEMBER(classes);
  EAVES_MEMBER(grad_logits);
}

template <typename Visit>
void each_member(CrossEntropyShardArgs& args, Visit&& visit) {
  each_of_logits(args, visit);
  EAVES_MEMBER(first_class);
  EAVES_MEMBER(classes);
  EAVES_MEMBER(is_for_mean_logit);
  EAVES_MEMBER(statistics);
}

template <typename Visit>
void each_member(CrossEntropyMergeArgs& args, Visit&& visit) {
  EAVES_MEMBER(statistics);
  EAVES_MEMBER(targets);
  EAVES_MEMBER(row_weight);
  EAVES_MEMBER(normalizer);
  each_member(args.options, visit);
  EAVES_MEMBER(classes);
  EAVES_MEMBER(has_class_weight);
  EAVES_MEMBER(skips_ignored);
  each_output(args, visit);
}

template <typename Visit>
void each_member(LinearCrossEntropyInputs& args, Visit&& visit) {
  EAVES_MEMBER(hidden);
  EAVES_MEMBER(head);
  EAVES_MEMBER(bias);
  EAVES_MEMBER(targets);
  EAVES_MEMBER(class_weight);
  EAVES_MEMBER(row_weight);
  each_member(args.options, visit);
  EAVES_MEMBER(skips_ignored);
  EAVES_MEMBER(workspace_limit);
}

template <typename Visit>
void each_member(LinearCrossEntropyShard& args, Visit&& visit) {
  EAVES_MEMBER(first_class);
  EAVES_MEMBER(classes);
  EAVES_MEMBER(most_classes);
  EAVES_MEMBER(is_for_mean_logit);
  EAVES_MEMBER(is_for_argmax_or_sum_sq);
}

template <typename Visit>
void each_member(LinearCrossEntropyGradients& args, Visit&& visit) {
  EAVES_MEMBER(grad_hidden);
  EAVES_MEMBER(grad_head);
  EAVES_MEMBER(grad_bias);
}

template <typename Visit>
void each_member(LinearCrossEntropyForwardArgs& args, Visit&& visit) {
  each_member(args.inputs, visit);
  EAVES_MEMBER(normalizer);
  each_output(args.outputs, visit);
}

template <typename Visit>
void each_member(LinearCrossEntropyForwardBackwardArgs& args, Visit&& visit) {
  each_member(args.forward, visit);
  EAVES_MEMBER(grad_loss);
  each_member(args.gradients, visit);
}

template <typename Visit>
void each_member(LinearCrossEntropyBackwardArgs& args, Visit&& visit) {
  each_member(args.inputs, visit);
  each_upstream(args, visit);
  each_member(args.gradients, visit);
  each_member(args.shard, visit);
}

template <typename Visit>
void each_member(LinearCrossEntropyShardForwardArgs& args, Visit&& visit) {
  each_member(args.inputs, visit);
  each_member(args.shard, visit);
  EAVES_MEMBER(statistics);
}

template <typename Visit>
void each_member(LrpeAngles& args, Visit&& visit) {
  EAVES_MEMBER(theta);
  EAVES_MEMBER(grid);
  EAVES_MEMBER(extra_tokens);
  EAVES_MEMBER(offset);
  EAVES_MEMBER(offsets);
  EAVES_MEMBER(positions);
  EAVES_MEMBER(cu_seqlens);
}

template <typename Visit>
void each_member(LrpeCosineForwardArgs& args, Visit&& visit) {
  EAVES_MEMBER(x);
  each_member(args.angles, visit);
  EAVES_MEMBER(activation);
  EAVES_MEMBER(activation_dim);
  EAVES_MEMBER(out);
  EAVES_MEMBER(lse);
}

template <typename Visit>
void each_member(LrpeCosineBackwardArgs& args, Visit&& visit) {
  EAVES_MEMBER(grad_out);
  EAVES_MEMBER(x);
  each_member(args.angles, visit);
  EAVES_MEMBER(activation);
  EAVES_MEMBER(activation_dim);
  EAVES_MEMBER(lse);
  EAVES_MEMBER(grad_x);
  EAVES_MEMBER(grad_theta);
}

#undef EAVES_MEMBER

// ---- calls ---------------------------------------------------------------------------------------------------------

void set(Dims& member, const json& value) {
  member = {};
  for (const json& number : value) member.push_back(number.get<std::int64_t>());
}

template <typename Number>
void set(Number& member, const json& value) {
  if constexpr (std::is_enum_v<Number>) {
    member = static_cast<Number>(value.get<std::uint8_t>());
  } else {
    value.get_to(member);
  }
}

/// "permutations": the axes of a tensor in the core's order, for tensors whose axes are in another order.
using Permutations = std::map<std::string, std::vector<int>>;

TensorView permuted(const TensorView& view, const std::vector<int>& axes) {
  TensorView result = view;
  if (axes.size() != static_cast<std::size_t>(view.shape.size())) return view;  // the core refuses the number of axes
  for (int axis = 0; axis < view.shape.size(); ++axis) {
    result.shape[axis] = view.shape[axes[axis]];
    result.strides[axis] = view.strides[axes[axis]];
  }
  return result;
}

template <typename Args, auto* function, auto* bytes>
class CallOf final : public Call {
 public:
  explicit CallOf(const json& description) {
    std::size_t found = 0;
    for (const json& name : description.at("tensors")) names_.push_back(name.get<std::string>());
    const json& numbers = description.at("numbers");
    each_member(args_, [&]<typename Member>(const char* name, Member& member) {
      if constexpr (std::is_same_v<Member, TensorView>) {
        for (const std::string& each : names_) found += each == name;
      } else if (const auto number = numbers.find(name); number != numbers.end()) {
        set(member, *number);
        ++found;
      }
    });
    if (found != names_.size() + numbers.size()) {
      throw InvalidArgument("eaves.jax: the call " + description.dump() +
                            " has arguments that its function does not take");
    }
    if (description.contains("permutations")) permutations_ = description["permutations"].get<Permutations>();
    description.at("op").get_to(op_);
    description.at("names").get_to(users_names_);
  }

  std::size_t workspace_bytes(std::span<const TensorView> tensors) const override {
    return in_the_users_names([&] { return bytes(with(tensors), {}); });
  }

  void run(std::span<const TensorView> tensors, const ExecutionContext& context) const override {
    in_the_users_names([&] { function(with(tensors), context); });
  }

 private:
  /// Returns the result of `call`. Errors of the core get the names of the user's function and arguments.
  template <typename Body>
  auto in_the_users_names(Body call) const {
    const auto said = [this](const Refusal& error) {
      return op_ + ": " + error.sentence_with([this](const std::string& name) {
        const auto users = users_names_.find(name);
        return users == users_names_.end() ? name : users->second;
      });
    };
    try {
      return call();
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(said(error));
    } catch (const Unsupported& error) {
      throw Unsupported(said(error));
    }
  }

  Args with(std::span<const TensorView> tensors) const {
    if (tensors.size() != names_.size()) {
      throw InvalidArgument("eaves.jax: the call has " + std::to_string(tensors.size()) + " buffers, expected " +
                            std::to_string(names_.size()));
    }
    Args args = args_;
    each_member(args, [&]<typename Member>(std::string_view name, Member& member) {
      if constexpr (std::is_same_v<Member, TensorView>) {
        for (std::size_t i = 0; i < names_.size(); ++i) {
          if (names_[i] != name) continue;
          const auto axes = permutations_.find(names_[i]);
          member = axes == permutations_.end() ? tensors[i] : permuted(tensors[i], axes->second);
        }
      }
    });
    return args;
  }

  Args args_;  ///< without the tensors
  std::vector<std::string> names_;
  Permutations permutations_;
  std::string op_;
  std::map<std::string, std::string> users_names_;
};

using Make = std::unique_ptr<const Call> (*)(const json& description);

#define EAVES_FUNCTION(function, Args)                                                            \
  {                                                                                               \
#function, [](const json& description) -> std::unique_ptr < const Call>                       \
    { return std::make_unique<CallOf<Args, function, function##_workspace_bytes>>(description); } \
  }

const std::map<std::string, Make, std::less<>> kFunctions = {
    EAVES_FUNCTION(logsumexp_forward, LogsumexpForwardArgs),
    EAVES_FUNCTION(logsumexp_backward, LogsumexpBackwardArgs),
    EAVES_FUNCTION(cross_entropy_forward, CrossEntropyForwardArgs),
    EAVES_FUNCTION(cross_entropy_backward, CrossEntropyBackwardArgs),
    EAVES_FUNCTION(cross_entropy_shard_forward, CrossEntropyShardArgs),
    EAVES_FUNCTION(cross_entropy_merge, CrossEntropyMergeArgs),
    EAVES_FUNCTION(linear_cross_entropy_forward, LinearCrossEntropyForwardArgs),
    EAVES_FUNCTION(linear_cross_entropy_forward_backward, LinearCrossEntropyForwardBackwardArgs),
    EAVES_FUNCTION(linear_cross_entropy_backward, LinearCrossEntropyBackwardArgs),
    EAVES_FUNCTION(linear_cross_entropy_shard_forward, LinearCrossEntropyShardForwardArgs),
    EAVES_FUNCTION(lrpe_cosine_forward, LrpeCosineForwardArgs),
    EAVES_FUNCTION(lrpe_cosine_backward, LrpeCosineBackwardArgs),
};

#undef EAVES_FUNCTION

/// Looks up a description without making a string of it.
struct Hash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
};

}  // namespace

std::unique_ptr<const Call> Call::parse(std::string_view description) {
  try {
    const json parsed = json::parse(description);
    const auto function = kFunctions.find(parsed.at("function").get<std::string>());
    if (function == kFunctions.end())
      throw InvalidArgument("eaves.jax: eaves has no function for the call " + parsed.dump());
    return function->second(parsed);
  } catch (const json::exception& error) {
    throw InvalidArgument(std::string("eaves.jax: ") + error.what());
  }
}

const Call& Call::of(std::string_view description) {
  static std::mutex mutex;
  static std::unordered_map<std::string, std::unique_ptr<const Call>, Hash, std::equal_to<>> calls;
  const std::lock_guard lock(mutex);
  auto found = calls.find(description);
  if (found == calls.end()) found = calls.emplace(description, parse(description)).first;
  return *found->second;
}

}  // namespace eaves::jax
