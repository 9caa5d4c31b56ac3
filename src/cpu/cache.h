// The last cache of the machine, and when a store should bypass the caches: one question, asked by every loop that
// writes a tensor.
#pragma once

#include <cstddef>

namespace eaves::cpu {

/// The size of the last cache: what the C library says, else what the kernel says, else 32 MiB.
std::size_t last_cache_bytes();

/// True when an output of `bytes` is better written by non-temporal stores. Ordinary ones read each line before they
/// replace it, which costs a third of a copy's bandwidth in memory (Zen 4, two threads, 64 MiB: 59 GB/s against 83)
/// and nothing inside of the last cache (8 MiB: 145 GB/s, non-temporal 57). A tensor that takes up more than half of
/// that cache is not found there by the next reader.
inline bool is_beyond_caches(std::size_t bytes) { return bytes >= last_cache_bytes() / 2; }

}  // namespace eaves::cpu
