// One list serves both directions.
#include "testing/dtype_names.h"

#include <utility>

namespace eaves::bench {
namespace {

constexpr std::pair<DType, const char*> kShortNames[] = {
    {DType::bfloat16, "bf16"}, {DType::float16, "fp16"}, {DType::float32, "fp32"}, {DType::float64, "fp64"},
    {DType::int8, "i8"},       {DType::int16, "i16"},    {DType::int32, "i32"},    {DType::int64, "i64"},
    {DType::uint8, "u8"},      {DType::boolean, "bool"},
};

}  // namespace

std::string short_name_of(DType dtype) {
  for (const auto& [known, name] : kShortNames) {
    if (known == dtype) return name;
  }
  return name_of(dtype);
}

std::optional<DType> dtype_from_name(std::string_view name) {
  for (const auto& [dtype, short_name] : kShortNames) {
    if (name == short_name || name == name_of(dtype)) return dtype;
  }
  return std::nullopt;
}

}  // namespace eaves::bench
