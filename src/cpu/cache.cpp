// Finds the size of the last-level cache, once: from the C library, else from the kernel, else by a guess.
#include "cpu/cache.h"

#include <unistd.h>

#include <fstream>

namespace eaves::cpu {
namespace {

std::size_t find_last_cache_bytes() {
#ifdef _SC_LEVEL3_CACHE_SIZE
  if (const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE); bytes > 0) return static_cast<std::size_t>(bytes);
#endif
  // Arm machines report the size only here, in KiB: "32768K".
  std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");
  if (std::size_t kib = 0; file >> kib && kib > 0) return kib * 1024;
  return std::size_t{32} << 20;  // a large guess: a benchmark that believed in a smaller cache would measure it warm
}

}  // namespace

std::size_t last_cache_bytes() {
  static const std::size_t bytes = find_last_cache_bytes();
  return bytes;
}

}  // namespace eaves::cpu
