#include "runtime/backend.h"

#include <new>
#include <string>

#include "core/check.h"
#include "cuda/device.h"
#include "eaves/error.h"

namespace eaves {
namespace {

constexpr std::align_val_t kCpuAlignment{256};  // what a workspace promises

}  // namespace

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
  if (device.type == DeviceType::cuda) require_cuda(op, device);
  if (bytes == 0) return;
  if (context.workspace.data != nullptr) {
    check::workspace(op, context.workspace.data, context.workspace.bytes, bytes);
    return;
  }
  if (device.type == DeviceType::cpu) {
    context_.workspace = {::operator new(bytes, kCpuAlignment), bytes};
    is_owned_ = true;
    return;
  }
  if constexpr (kHasCuda) {
    context_.workspace = {cuda::allocate_in_stream_order(device, bytes, context.stream), bytes};
    is_owned_ = true;
  }
}

Scratch::~Scratch() {
  if (!is_owned_) return;
  if (device_.type == DeviceType::cpu) {
    ::operator delete(context_.workspace.data, kCpuAlignment);
  } else if constexpr (kHasCuda) {
    cuda::deallocate_in_stream_order(device_, context_.workspace.data, context_.stream);
  }
}

}  // namespace eaves
