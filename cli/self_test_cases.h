// `eaves info --self-test`: every family of kernels of every kind of device, compared with the oracles of the tests.
// Programs without a test framework run it: the program and the Python package.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "eaves/tensor.h"

#pragma GCC visibility push(default)  // for the Python package
namespace eaves::cli {

/// The worst error of some calls, as a share of the error that testing/tolerance.h allows.
struct SelfTestResult {
  double share = 0.0;
  std::string failure = {};  ///< on the first result outside of the contract; empty: all are within it

  /// Takes the worse of this result and the shares of an operator's comparison.
  template <typename Shares>
  void add(const Shares& shares) {
    if (shares.worst() > share) share = shares.worst();
    if (failure.empty()) failure = shares.failure;
  }
};

/// One line of the table: the calls that reach one kernel, or a few.
struct SelfTestCase {
  std::string family;
  std::string name;
  std::function<void(Device device, SelfTestResult& result)> run;
  bool (*is_on)(Device device);  ///< has this device the kernels?
};

std::vector<SelfTestCase> self_test_cases();

/// Runs the cases on the CPU and on one GPU of each kind, and passes the lines of a Markdown table to `say`, one by one
/// as they are known. Returns the number of lines that differ. An exception in a case is a line that differs too.
int self_test(const std::function<void(const std::string& line)>& say,
              const std::vector<SelfTestCase>& cases = self_test_cases());

}  // namespace eaves::cli
#pragma GCC visibility pop
