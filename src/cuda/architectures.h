// Answers whether the code in this build runs on a GPU. It includes no CUDA header.
#pragma once

#include <charconv>
#include <string_view>

namespace eaves::cuda {

/// `built_for` is written as EAVES_CUDA_ARCHITECTURES: "80" is machine code for 8.x from 8.0 on, "90a" machine code for
/// 9.0 alone, and "90+" PTX, which the driver compiles for every GPU from 9.0 on.
inline bool has_code_for(std::string_view built_for, int major, int minor) {
  const int capability = 10 * major + minor;
  while (!built_for.empty()) {
    const std::string_view entry = built_for.substr(0, built_for.find(';'));
    built_for.remove_prefix(entry.size() == built_for.size() ? entry.size() : entry.size() + 1);
    int number = 0;
    std::from_chars(entry.data(), entry.data() + entry.size(), number);
    if (capability == number) return true;
    const bool is_for_one = entry.find('a') != entry.npos;
    const bool is_ptx = !entry.empty() && entry.back() == '+';
    if (!is_for_one && capability > number && (is_ptx || major == number / 10)) return true;
  }
  return false;
}

}  // namespace eaves::cuda
