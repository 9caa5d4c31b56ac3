// The stream that an operator's time on a CPU is compared with: the fastest plain loops over memory that we know, with
// the widest loads and stores, on as many threads as the operator gets.
#pragma once

#include <cstddef>

#include "eaves/context.h"

namespace eaves::cpu {

/// Reads `read_bytes` from `source` and at the same time writes `write_bytes` to `destination`; either may be 0. Both
/// pointers are aligned to 64 bytes, the widest vector.
void stream_bytes(const void* source, std::size_t read_bytes, void* destination, std::size_t write_bytes,
                  const ExecutionContext& context);

}  // namespace eaves::cpu
