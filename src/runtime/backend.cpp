#include "runtime/backend.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <new>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/environment.h"
#include "core/loss_checks.h"
#include "cuda/device.h"
#include "eaves/error.h"

namespace eaves {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

/// The alignment that a workspace promises; a workspace with huge pages has their alignment.
std::align_val_t cpu_alignment(std::size_t bytes) { return std::align_val_t{bytes < 2 * kHugePage ? 256 : kHugePage}; }

/// New memory costs a page fault at the first write to each page. With pages of 4 KiB the faults cost several times as
/// much as a pass over the memory. If huge pages are not allowed, nothing changes.
void* allocate_on_cpu(std::size_t bytes) {
  void* data = ::operator new(bytes, cpu_alignment(bytes));
#ifdef __linux__
  if (bytes >= 2 * kHugePage) madvise(data, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
  return data;
}

}  // namespace

std::size_t memory_of(Device device) {
  if constexpr (kHasCuda) {
    if (device.type == DeviceType::cuda && device.index < cuda::gpu_count())
      return cuda::properties(device).memory_bytes;
  }
  return 0;
}

void check_targets(const char* op, Device device, const RowTargets& targets, const Dims& row_shape,
                   std::int64_t classes, std::int64_t ignore_index, const ExecutionContext& context) {
  if (device.type == DeviceType::cpu) return check::targets_are_in_range(op, targets, row_shape, classes, ignore_index);
  if (!checks_targets_on_gpu()) return;
  require_cuda(op, device);
  if constexpr (kHasCuda) {
    // Copies the run of memory between the first and the last target.
    std::int64_t low = 0;
    std::int64_t high = 0;
    for (int axis = 0; axis < targets.rows.rank; ++axis) {
      const std::int64_t reach = (targets.rows.sizes[axis] - 1) * targets.rows.strides[0][axis];
      (reach < 0 ? low : high) += reach;
    }
    const auto bytes = static_cast<std::int64_t>(size_of(targets.classes.dtype));
    const auto* from = static_cast<const char*>(targets.classes.data) + low * bytes;
    std::vector<char> copy(static_cast<std::size_t>((high - low + 1) * bytes));
    cuda::copy_to_host(op, device, copy.data(), from, copy.size(), context.stream);
    RowTargets on_host = targets;
    on_host.classes.data = copy.data() - low * bytes;
    check::targets_are_in_range(op, on_host, row_shape, classes, ignore_index);
  }
}

void require_cuda(const char* op, Device device) {
  if constexpr (kHasCuda) {
    cuda::require_device(op, device);
  } else {
    throw Unsupported(op, "the tensors are on " + check::to_string(device) +
                              ", but this build of eaves has no CUDA backend; install a CUDA toolkit and build again");
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
    context_.workspace = {allocate_on_cpu(bytes), bytes};
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
    ::operator delete(context_.workspace.data, cpu_alignment(context_.workspace.bytes));
  } else if constexpr (kHasCuda) {
    cuda::deallocate_in_stream_order(device_, context_.workspace.data, context_.stream);
  }
}

}  // namespace eaves
