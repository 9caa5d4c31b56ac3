// Which vector instructions this machine gets: every file that is compiled once per level chooses the same one.
#pragma once

namespace eaves::cpu {

/// Highway's name of the vector instructions chosen on this machine: "AVX3".
const char* level_name();

}  // namespace eaves::cpu
