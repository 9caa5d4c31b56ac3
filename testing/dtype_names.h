// The short names of element types ("bf16") in table titles, result files and on the command line. The library's own
// names ("bfloat16") come from name_of() of eaves/tensor.h.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "eaves/tensor.h"

namespace eaves::bench {

/// "bf16", "fp16", "fp32", "fp64", "i8", ..., "bool".
std::string short_name_of(DType dtype);

/// The dtype of either spelling, "bf16" or "bfloat16"; nothing if no dtype has this name.
std::optional<DType> dtype_from_name(std::string_view name);

}  // namespace eaves::bench
