// A run of a case, without a test framework, for the tests and for `eaves info --self-test`. A Run is constructed from
// a case, and has test_case(), launch(context), inputs() and named outputs().
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "eaves/context.h"
#include "runtime/runtime.h"
#include "testing/tensor.h"

namespace eaves::testing {

/// The device of the running test, and of its cases unless they name another.
inline Device& device_of_test() {
  static Device device = kCpu;
  return device;
}

/// The part that the Runs of all operators share: `Run` derives from CallsOf<Run>.
template <typename Run>
class CallsOf {
 public:
  void download() {
    Run& self = static_cast<Run&>(*this);
    runtime::synchronize(self.test_case().device);
    for (TestTensor* tensor : self.inputs()) tensor->download();
    for (auto& [name, tensor] : self.outputs()) tensor->download();
  }
  void run(const ExecutionContext& context = {}) {
    static_cast<Run&>(*this).launch(context);
    download();
  }
};

/// Runs a call. Empty, or a sentence if an input or a byte around an output has changed.
template <typename Run>
std::string damage_by_run(Run& run, const ExecutionContext& context = {}) {
  std::vector<std::vector<unsigned char>> before;
  for (TestTensor* input : run.inputs()) before.push_back(input->bytes());
  run.run(context);
  for (std::size_t i = 0; i < before.size(); ++i) {
    if (run.inputs()[i]->bytes() != before[i]) return "input " + std::to_string(i) + " was modified";
  }
  for (auto& [name, tensor] : run.outputs()) {
    const std::string damage = tensor->canary_damage();
    if (!damage.empty()) return std::string("around ") + name + ": " + damage;
  }
  return "";
}

/// The shares of a run by a Comparison, which has compare() and `shares`. A failure begins with `description`.
template <typename Comparison, typename Run>
auto shares_of_run(Run& run, const std::string& description) {
  const std::string damage = damage_by_run(run);
  Comparison comparison(run);
  const std::string failure = damage.empty() ? comparison.compare() : damage;
  if (!failure.empty()) comparison.shares.failure = description + ": " + failure;
  return comparison.shares;
}

}  // namespace eaves::testing
