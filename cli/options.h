// Values that several commands take from the command line, and how sizes are written. Every refusal names the argument
// and what was expected.
#pragma once

#include <cstdint>
#include <string>

#include "eaves/tensor.h"

namespace eaves::cli {

/// What --device names: "cpu", "cuda" or "cuda:1". Throws InvalidArgument for another word, Unsupported where there is
/// no such GPU, with the reason.
Device parse_device(const std::string& text);

/// A GPU where one is usable, else the CPU.
Device default_device();

/// "bfloat16" or "bf16"; `argument` is the name that a refusal begins with.
DType parse_dtype(const std::string& argument, const std::string& text);

/// "4096", "64K", "64M", "2G" (powers of 1024) in bytes.
std::int64_t parse_bytes(const std::string& argument, const std::string& text);

/// "0,2" or "4,8,8"; `expected` is what a refusal asks for: "sizes such as 8 or 4,8,8".
Dims parse_list(const std::string& argument, const std::string& text, const char* expected, char separator = ',');

/// "1.5 GiB"; one decimal, the largest unit that leaves a number of at least 1.
std::string format_bytes(std::int64_t bytes);

}  // namespace eaves::cli
