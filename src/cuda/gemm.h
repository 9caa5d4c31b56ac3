// Matrix products on a GPU, by cuBLASLt, which is loaded when the first one is asked for; on Hopper some of them by
// CUTLASS.
#pragma once

#include "core/gemm.h"
#include "eaves/context.h"

namespace eaves::cuda {

/// Throws Unsupported with the reason where cuBLASLt cannot be loaded.
void require_gemm(const char* op);

/// Does gemm() add this product to a gradient by sm90/weight_gradient.h? That reads alpha on the device at no cost,
/// where each of cuBLASLt's algorithms takes up to a tenth longer. H200, cuBLASLt 13.1, [12288, 4096], a step over the
/// three products, with cuBLASLt and so: 16,384 classes 1.12 and 1.07, 8192 (fewer tiles than it asks for) 1.12
/// and 1.12, 4096 1.12 and 1.15.
bool takes_weight_gradient(const Gemm& product, int device);

/// Enqueues the product on the stream of `context`, on the current device; its workspace has kGemmWorkspaceBytes.
/// Throws Unsupported where cuBLASLt has no algorithm for it, DeviceError where the launch fails.
void gemm(const char* op, const Gemm& product, const ExecutionContext& context);

}  // namespace eaves::cuda
