// The commands of the program: each function adds one to the command line, with what runs when it is chosen.
#pragma once

#include <CLI/CLI.hpp>

namespace eaves::cli {

void add_info_command(CLI::App& program);
void add_bench_command(CLI::App& program);
void add_run_command(CLI::App& program);

}  // namespace eaves::cli
