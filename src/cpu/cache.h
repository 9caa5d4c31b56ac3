// When a store should bypass the caches: one question, asked by every loop that writes a tensor.
#pragma once

#include <unistd.h>

#include <cstddef>

namespace eaves::cpu {

/// True when an output of `bytes` is better written by non-temporal stores. Ordinary ones read each line before they
/// replace it, which costs a third of a copy's bandwidth in memory (Zen 4, two threads, 64 MiB: 59 GB/s against 83)
/// and nothing inside of the last cache (8 MiB: 145 GB/s, non-temporal 57). A tensor that takes up more than half of
/// that cache is not found there by whoever reads it next.
inline bool is_beyond_caches(std::size_t bytes) {
  static const std::size_t threshold = [] {
#if defined(_SC_LEVEL3_CACHE_SIZE)
    const long last_cache_bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
    if (last_cache_bytes > 0) return static_cast<std::size_t>(last_cache_bytes) / 2;
#endif
    return std::size_t{8} << 20;
  }();
  return bytes >= threshold;
}

}  // namespace eaves::cpu
