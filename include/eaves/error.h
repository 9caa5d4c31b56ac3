// The three kinds of error. The message of each names the operator, the argument, its actual value and the expected
// value. InvalidArgument and Unsupported are thrown before the call launches or writes anything, with one exception: a
// matrix product for which cuBLASLt has no algorithm is Unsupported at its turn. A DeviceError may come at any time.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <utility>

#pragma GCC visibility push(default)  // exported if eaves is built into a shared library
namespace eaves {

/// The operator and the sentence of an InvalidArgument or an Unsupported. Python and the command line have other names
/// for the arguments and put these into the sentence. So sentence() has each argument's name in backticks: "`out` is on
/// cpu, expected cuda:0 (as `x`)". what() has no backticks.
class Refusal {
 public:
  const std::string& op() const { return op_; }  ///< "logsumexp_forward"; empty if the error concerns no operator
  std::string argument() const;                  ///< "out"; empty if the sentence is about no argument
  const std::string& sentence() const { return sentence_; }

  /// The sentence with each argument's name replaced by name_of(name).
  std::string sentence_with(const std::function<std::string(const std::string&)>& name_of) const;

 protected:
  Refusal(std::string op, std::string sentence) : op_(std::move(op)), sentence_(std::move(sentence)) {}
  std::string message() const;

 private:
  std::string op_, sentence_;
};

/// The caller is wrong: the operator's header excludes this shape, dtype, device or value.
class InvalidArgument : public Refusal, public std::invalid_argument {
 public:
  InvalidArgument(const std::string& op, const std::string& sentence)
      : Refusal(op, sentence), std::invalid_argument(message()) {}
  explicit InvalidArgument(const std::string& sentence) : Refusal("", sentence), std::invalid_argument(sentence) {}
};

/// The call is legal, but this build or machine cannot run it. The message names the missing part.
class Unsupported : public Refusal, public std::runtime_error {
 public:
  Unsupported(const std::string& op, const std::string& sentence)
      : Refusal(op, sentence), std::runtime_error(message()) {}
  explicit Unsupported(const std::string& sentence) : Refusal("", sentence), std::runtime_error(sentence) {}
};

/// The device failed: out of memory, a failed launch, a driver that is too old. The message quotes the CUDA runtime.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace eaves
#pragma GCC visibility pop
