// Values that several commands take from the command line, and how sizes are written. Every refusal names the argument
// and the expected value.
#pragma once

#include <cstdint>
#include <string>

#include "eaves/tensor.h"

namespace eaves::cli {

/// The device of --device: "cpu", "cuda" or "cuda:1". Throws InvalidArgument for another word, and Unsupported with the
/// reason if there is no such GPU.
Device parse_device(const std::string& text);

/// A GPU if one is usable, else the CPU.
Device default_device();

/// "bfloat16" or "bf16". A refusal begins with `argument`.
DType parse_dtype(const std::string& argument, const std::string& text);

/// "4096", "64K", "64M", "2G" (powers of 1024) in bytes.
std::int64_t parse_bytes(const std::string& argument, const std::string& text);

/// "0,2" or "4,8,8". `expected` describes the list in a refusal: "sizes such as 8 or 4,8,8".
Dims parse_list(const std::string& argument, const std::string& text, const char* expected, char separator = ',');

/// "1.5 GiB": one decimal, in the largest unit that gives a number of at least 1.
std::string format_bytes(std::int64_t bytes);

}  // namespace eaves::cli
