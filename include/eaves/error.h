// The three kinds of "no". Each is thrown before anything is launched or written, and its message names the
// operator, the argument, what it is and what was expected.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <utility>

#pragma GCC visibility push(default)  // of a shared library, this is seen from outside
namespace eaves {

/// The parts of the first two kinds: an operator, and a sentence about one of its arguments. Python and the command
/// line have other names for arguments, and put them into the sentence. So every name of an argument stands in
/// backticks in sentence(): "`out` is on cpu, expected cuda:0 (as `x`)". what() has no backticks.
class Refusal {
 public:
  const std::string& op() const { return op_; }  ///< "logsumexp_forward"; empty: it is about no operator
  std::string argument() const;                  ///< "out"; empty: the sentence is about none
  const std::string& sentence() const { return sentence_; }

  /// The sentence with the names that `name_of` gives the arguments.
  std::string sentence_with(const std::function<std::string(const std::string&)>& name_of) const;

 protected:
  Refusal(std::string op, std::string sentence) : op_(std::move(op)), sentence_(std::move(sentence)) {}
  std::string message() const;

 private:
  std::string op_, sentence_;
};

/// The caller is wrong: a shape, dtype, device or value that the operator's header excludes.
class InvalidArgument : public Refusal, public std::invalid_argument {
 public:
  InvalidArgument(const std::string& op, const std::string& sentence)
      : Refusal(op, sentence), std::invalid_argument(message()) {}
  explicit InvalidArgument(const std::string& sentence) : Refusal("", sentence), std::invalid_argument(sentence) {}
};

/// The call is legal, but this build or this machine cannot do it; the message says what is missing.
class Unsupported : public Refusal, public std::runtime_error {
 public:
  Unsupported(const std::string& op, const std::string& sentence)
      : Refusal(op, sentence), std::runtime_error(message()) {}
  explicit Unsupported(const std::string& sentence) : Refusal("", sentence), std::runtime_error(sentence) {}
};

/// The device refused: out of memory, a failed launch, a driver too old. Carries the runtime's own words.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace eaves
#pragma GCC visibility pop
