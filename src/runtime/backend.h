// The part of an operator's <op>.cpp between a checked problem and a backend: whether there is a CUDA backend, and
// scratch memory. Calls into namespace cuda stand behind `if constexpr (kHasCuda)`, so that a build without CUDA links.
#pragma once

#include <cstddef>

#include "core/build_config.h"
#include "core/row_targets.h"
#include "eaves/context.h"
#include "eaves/tensor.h"

namespace eaves {

inline constexpr bool kHasCuda = EAVES_HAVE_CUDA;

/// Returns if this build can use `device`, a GPU; else throws Unsupported with the reason.
void require_cuda(const char* op, Device device);

/// The memory of a GPU in bytes; 0 for a CPU, and for a GPU that this build cannot use.
std::size_t memory_of(Device device);

/// Throws InvalidArgument for the first target that is out of range (core/loss_checks.h). Targets on a GPU are checked
/// only with EAVES_CHECK_TARGETS=1 in the environment: the call copies them and waits for the copy.
void check_targets(const char* op, Device device, const RowTargets& targets, const Dims& row_shape,
                   std::int64_t classes, std::int64_t ignore_index, const ExecutionContext& context);

/// The scratch memory of one call: the caller's workspace if there is one, else memory of its own. On a GPU its own
/// memory comes from the device's default pool, in stream order: nothing waits, and a graph can capture it.
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
