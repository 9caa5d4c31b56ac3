// The version of eaves: the one place where it is written; CMake and the program read it from here.
#pragma once

#define EAVES_VERSION_MAJOR 0
#define EAVES_VERSION_MINOR 2
#define EAVES_VERSION_PATCH 0
#define EAVES_VERSION "0.2.0"
