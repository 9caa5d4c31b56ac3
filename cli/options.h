// Values that several commands take from the command line, and how sizes are written. Every refusal names the argument
// and what was expected.
#pragma once

#include <CLI/CLI.hpp>
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

/// "-1" or "0,2".
Dims parse_axes(const std::string& argument, const std::string& text);

/// "8" or "4,8,8".
Dims parse_sizes(const std::string& argument, const std::string& text);

/// Refuses an empty text: what a shell makes of an unset variable is not what leaving the option out means.
CLI::Validator is_not_empty();

/// "1.5 GiB"; one decimal, the largest unit that leaves a number of at least 1.
std::string format_bytes(std::int64_t bytes);

}  // namespace eaves::cli
