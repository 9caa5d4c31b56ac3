// Whole products by oneDNN (cpu/onednn.h), cut into tiles of one thread each.
#pragma once

#include "core/gemm.h"
#include "eaves/context.h"

namespace eaves::cpu {

/// Can oneDNN compute it, and is a call worth it? Types that it multiplies here, a b that is not tiny, and rows
/// (columns of a transposed matrix) that do not overlap.
bool can_multiply_by_onednn(const Gemm& product);

/// The number of threads changes no bit.
void multiply_by_onednn(const Gemm& product, const ExecutionContext& context);

}  // namespace eaves::cpu
