// The version of eaves. CMake, the wheel and the program read it from this file. A test compares the numbers with the
// text.
#pragma once

#define EAVES_VERSION_MAJOR 0
#define EAVES_VERSION_MINOR 2
#define EAVES_VERSION_PATCH 0
#define EAVES_VERSION "0.2.0"
