// Matrix products by loops of our own, of any type, size and stride (cpu/gemm.h chooses).
#pragma once

#include "core/gemm.h"
#include "eaves/context.h"

namespace eaves::cpu {

void own_gemm(const Gemm& product, const ExecutionContext& context);

}  // namespace eaves::cpu
