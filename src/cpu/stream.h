// The yardstick of the benchmark on a CPU: the fastest plain loops over memory that we know, with the widest loads and
// stores, on as many threads as an operator gets. They compute next to nothing.
#pragma once

#include <cstddef>

#include "eaves/context.h"

namespace eaves::cpu {

/// Reads `read_bytes` from `source` and writes `write_bytes` to `destination`, side by side; either may be 0. Both
/// pointers are aligned to 256 bytes.
void stream_bytes(const void* source, std::size_t read_bytes, void* destination, std::size_t write_bytes,
                  const ExecutionContext& context);

/// Highway's name of the vector instructions chosen on this machine: "AVX3".
const char* level_name();

/// How many threads a call without a limit of its own uses.
int default_threads();

}  // namespace eaves::cpu
