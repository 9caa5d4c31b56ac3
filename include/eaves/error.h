// The three kinds of "no". Each is thrown before anything is launched or written, and its message names the
// operator, the argument, what it is and what was expected.
#pragma once

#include <stdexcept>

#pragma GCC visibility push(default)  // of a shared library, this is seen from outside
namespace eaves {

/// The caller is wrong: a shape, dtype, device or value that the operator's header excludes.
class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// The call is legal, but this build or this machine cannot do it; the message says what is missing.
class Unsupported : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The device refused: out of memory, a failed launch, a driver too old. Carries the runtime's own words.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace eaves
#pragma GCC visibility pop
