#include "runtime/backend.h"

#include <string>

#include "core/check.h"
#include "cuda/device.h"
#include "eaves/error.h"

namespace eaves {

void require_cuda(const char* op, Device device) {
  if constexpr (kHasCuda) {
    cuda::require_device(op, device);
  } else {
    throw Unsupported(std::string(op) + ": the tensors are on " + check::to_string(device) +
                      ", but this build of eaves has no CUDA backend; build it where a CUDA toolkit is installed");
  }
}

Scratch::Scratch(const char* op, Device device, std::size_t bytes, const ExecutionContext& context)
    : device_(device), context_(context) {
  require_cuda(op, device);
  if (bytes == 0) return;
  if (context.workspace.data != nullptr) {
    check::workspace(op, context.workspace.data, context.workspace.bytes, bytes);
    return;
  }
  if constexpr (kHasCuda) {
    context_.workspace = {cuda::allocate_in_stream_order(device, bytes, context.stream), bytes};
    is_owned_ = true;
  }
}

Scratch::~Scratch() {
  if constexpr (kHasCuda) {
    if (is_owned_) cuda::deallocate_in_stream_order(device_, context_.workspace.data, context_.stream);
  }
}

}  // namespace eaves
