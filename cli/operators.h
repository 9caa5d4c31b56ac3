// The list of operators that the program can measure and run: the one place in cli/ where their names stand.
#pragma once

#include <CLI/CLI.hpp>
#include <span>

#include "testing/benchmark.h"

namespace eaves::cli {

struct Operator {
  bench::Operator benchmark;       ///< what `eaves bench` measures; its name is the operator's
  void (*add_run)(CLI::App& run);  ///< adds the subcommand of `eaves run`
};

std::span<const Operator> registered_operators();

}  // namespace eaves::cli
