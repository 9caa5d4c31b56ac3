// The parts that a build of eaves has and lacks on this machine, for `eaves info` and for the Python package.
#pragma once

#include <string>
#include <vector>

#include "eaves/system.h"

namespace eaves::cli {

/// One sentence for each missing part and its consequence.
std::vector<std::string> missing_parts(const SystemInfo& system);

/// The JSON of `eaves info --json`.
std::string system_json(const SystemInfo& system);

}  // namespace eaves::cli
