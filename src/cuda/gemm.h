// Matrix products on a GPU, by cuBLASLt, which the first product loads. On Hopper CUTLASS computes some of them.
#pragma once

#include "core/gemm.h"
#include "eaves/context.h"

namespace eaves::cuda {

/// Throws Unsupported with the reason if cuBLASLt cannot be loaded.
void require_gemm(const char* op);

/// True if gemm() adds this product to a gradient by cutlass/weight_gradient.h. That kernel reads alpha on the device
/// at no cost; cuBLASLt's algorithms take up to a tenth longer then. H200, cuBLASLt 13.1, x [12288, 4096], time of a
/// step over the time of its three products, by cuBLASLt and by the kernel: 16,384 classes 1.12 and 1.07, 8192 (too few
/// tiles for the kernel) 1.12 and 1.12, 4096 1.12 and 1.15.
bool takes_weight_gradient(const Gemm& product, int device);

/// Enqueues the product on the stream of `context`, on the current device. The workspace of `context` has
/// kGemmWorkspaceBytes. Throws Unsupported if cuBLASLt has no algorithm for the product, DeviceError if the launch
/// fails.
void gemm(const char* op, const Gemm& product, const ExecutionContext& context);

}  // namespace eaves::cuda
