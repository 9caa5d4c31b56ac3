// What an operator's <op>.cpp needs between a checked problem and a backend: is there a CUDA backend at all, and
// scratch memory for it. Calls into namespace cuda stand behind `if constexpr (kHasCuda)`, so that a build without
// CUDA links.
#pragma once

#include <cstddef>

#include "core/build_config.h"
#include "core/row_targets.h"
#include "eaves/context.h"
#include "eaves/tensor.h"

namespace eaves {

inline constexpr bool kHasCuda = EAVES_HAVE_CUDA;

/// Returns when `device`, a GPU, can be used by this build; throws Unsupported with the reason otherwise.
void require_cuda(const char* op, Device device);

/// Throws InvalidArgument for the first target that is out of range (core/loss_checks.h). Of targets on a GPU only
/// where the environment has EAVES_CHECK_TARGETS=1: they are copied, and the call waits for them.
void check_targets(const char* op, Device device, const RowTargets& targets, const Dims& row_shape,
                   std::int64_t classes, std::int64_t ignore_index, const ExecutionContext& context);

/// The scratch memory of one call: the caller's workspace when there is one, otherwise memory of its own, on a GPU from
/// the stream's pool, taken and given back in stream order: nothing waits, and a graph can capture it.
class Scratch {
 public:
  Scratch(const char* op, Device device, std::size_t bytes, const ExecutionContext& context);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  /// The caller's context with this memory as its workspace.
  const ExecutionContext& context() const { return context_; }

 private:
  Device device_;
  ExecutionContext context_;
  bool is_owned_ = false;
};

}  // namespace eaves
