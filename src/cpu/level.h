// The level of vector instructions on this machine. Every file that is compiled once per level chooses the same level.
#pragma once

namespace eaves::cpu {

/// Highway's name of that level: "AVX3".
const char* level_name();

}  // namespace eaves::cpu
