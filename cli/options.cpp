// Parses with std::from_chars throughout: no locale, no exceptions, and unread characters are noticed.
#include "cli/options.h"

#include <fmt/format.h>

#include <charconv>
#include <limits>
#include <optional>
#include <string_view>

#include "eaves/error.h"
#include "eaves/system.h"
#include "runtime/runtime.h"
#include "testing/dtype_names.h"

namespace eaves::cli {
namespace {

std::optional<std::int64_t> parse_number(std::string_view text) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

}  // namespace

Device parse_device(const std::string& text) {
  if (text == "cpu") return kCpu;
  std::optional<std::int64_t> index;
  if (text == "cuda") index = 0;
  if (text.rfind("cuda:", 0) == 0) index = parse_number(std::string_view(text).substr(5));
  if (!index || *index < 0) {
    throw InvalidArgument(fmt::format("--device: is \"{}\", expected cpu, cuda, or cuda:N for another GPU", text));
  }
  const int gpus = runtime::gpu_count();
  if (gpus == 0) {
    throw Unsupported(
        fmt::format("--device: is {}, but eaves finds no GPU that it can use: {}", text, system_info().cuda_missing));
  }
  if (*index >= gpus) {
    throw Unsupported(
        fmt::format("--device: is {}, but eaves can use {} GPU{}, counted from 0", text, gpus, gpus == 1 ? "" : "s"));
  }
  return {DeviceType::cuda, static_cast<int>(*index)};
}

Device default_device() { return runtime::gpu_count() > 0 ? kCuda : kCpu; }

DType parse_dtype(const std::string& argument, const std::string& text) {
  if (const auto dtype = bench::dtype_from_name(text)) return *dtype;
  throw InvalidArgument(fmt::format(
      "{}: is \"{}\", expected bfloat16 (bf16), float16 (fp16), float32 (fp32) or float64 (fp64)", argument, text));
}

std::int64_t parse_bytes(const std::string& argument, const std::string& text) {
  std::string_view digits = text;
  int shift = 0;
  if (!digits.empty()) {
    constexpr std::string_view kUnits = "KMGT";
    if (const auto unit = kUnits.find(digits.back()); unit != std::string_view::npos) {
      shift = 10 * (static_cast<int>(unit) + 1);
      digits.remove_suffix(1);
    }
  }
  const auto number = parse_number(digits);
  if (!number || *number < 0 || *number > (std::numeric_limits<std::int64_t>::max() >> shift)) {
    throw InvalidArgument(
        fmt::format("{}: is \"{}\", expected a number of bytes such as 4096, 64M or 2G", argument, text));
  }
  return *number << shift;
}

Dims parse_list(const std::string& argument, const std::string& text, const char* expected, char separator) {
  Dims list;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    const auto number = parse_number(std::string_view(text).substr(begin, end - begin));
    if (!number || list.size() == kMaxRank) {
      throw InvalidArgument(fmt::format("{}: is \"{}\", expected up to {} {}", argument, text, kMaxRank, expected));
    }
    list.push_back(*number);
    begin = end + 1;
  }
  return list;
}

std::string format_bytes(std::int64_t bytes) {
  static constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024.0 && unit < 4) {
    value /= 1024.0;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} bytes", bytes) : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

}  // namespace eaves::cli
