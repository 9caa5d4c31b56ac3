// The stream that operators are compared with on a CPU: the fastest plain loops over memory that we know, with the
// widest loads and stores, on as many threads as an operator gets.
#pragma once

#include <cstddef>

#include "eaves/context.h"

namespace eaves::cpu {

/// Reads `read_bytes` from `source` and writes `write_bytes` to `destination`, side by side; either may be 0. Both
/// pointers are aligned to 64 bytes, the widest vector.
void stream_bytes(const void* source, std::size_t read_bytes, void* destination, std::size_t write_bytes,
                  const ExecutionContext& context);

}  // namespace eaves::cpu
