// The short names of element types ("bf16"), as table titles, result files and the command line write them. The
// library's own names ("bfloat16") are name_of() of eaves/tensor.h.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "eaves/tensor.h"

namespace eaves::bench {

/// "bf16", "fp16", "fp32", "fp64", "i8", ..., "bool".
std::string short_name_of(DType dtype);

/// From either spelling, "bf16" or "bfloat16"; nothing where no dtype has that name.
std::optional<DType> dtype_from_name(std::string_view name);

}  // namespace eaves::bench
