// The list of operators that the program can measure and run: the one place in cli/ where their names stand.
#pragma once

#include <span>

#include "testing/benchmark.h"

namespace eaves::cli {

std::span<const bench::Operator> registered_operators();

}  // namespace eaves::cli
