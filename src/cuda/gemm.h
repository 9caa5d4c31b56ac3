// Matrix products on a GPU, by cuBLASLt, which is loaded when the first one is asked for.
#pragma once

#include "core/gemm.h"
#include "eaves/context.h"

namespace eaves::cuda {

/// Throws Unsupported with the reason where cuBLASLt cannot be loaded.
void require_gemm(const char* op);

/// Enqueues the product on the stream of `context`, on the current device; its workspace has kGemmWorkspaceBytes.
/// Throws Unsupported where cuBLASLt has no algorithm for it, DeviceError where the launch fails.
void gemm(const char* op, const Gemm& product, const ExecutionContext& context);

}  // namespace eaves::cuda
