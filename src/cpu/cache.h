// The size of the last-level cache, and when stores should bypass the caches. Every loop that writes a tensor asks.
#pragma once

#include <cstddef>

namespace eaves::cpu {

/// The size of the last-level cache as the C library reports it, else the kernel, else 32 MiB.
std::size_t last_cache_bytes();

/// True if non-temporal stores should write an output of `bytes`. An ordinary store reads each line before it replaces
/// it. In memory that costs a third of a copy's bandwidth (Zen 4, two threads, 64 MiB: 59 GB/s against 83), in the last
/// cache nothing (8 MiB: 145 GB/s, non-temporal 57). The limit is half of that cache, because the next reader does not
/// find a larger tensor there.
inline bool is_beyond_caches(std::size_t bytes) { return bytes >= last_cache_bytes() / 2; }

}  // namespace eaves::cpu
