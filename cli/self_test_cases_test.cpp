// The self-test's verdict. cli_test.cpp runs all of its cases, as `eaves info --self-test`.
#include "cli/self_test_cases.h"

#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>

#include "cli/commands.h"
#include "eaves/error.h"
#include "eaves/system.h"
#include "ops/logsumexp/logsumexp_case.h"

namespace eaves::testing {
namespace {

using cli::print_self_test;
using cli::self_test;
using cli::SelfTestCase;
using cli::SelfTestResult;

/// Compares a run of logsumexp after one number of its gradient was changed.
std::function<void(Device, SelfTestResult&)> comparison_after_adding(double number) {
  return [=](Device device, SelfTestResult& result) {
    LogsumexpRun run({.device = device, .shape = {3, 10}, .axes = {1}, .value = [](std::int64_t i) {
                        return static_cast<double>(i % 4);
                      }});
    run.run();
    run.grad_x.set(17, run.grad_x.get(17) + number);
    result.add(compare_results(run));
  };
}

bool is_any(Device) { return true; }

/// The CPU and the kinds of GPUs.
int count_devices() {
  std::set<std::string> names;
  for (const GpuInfo& gpu : system_info().gpus) names.insert(gpu.name);
  return 1 + static_cast<int>(names.size());
}

TEST(SelfTest, AWrongNumberAndAnExceptionAreLinesThatDiffer) {
  const SelfTestCase right{"logsumexp", "right", comparison_after_adding(0.0), is_any};
  const SelfTestCase wrong{"logsumexp", "wrong", comparison_after_adding(1e-3), is_any};
  const SelfTestCase absent{"of another", "absent", wrong.run, [](Device) { return false; }};
  const SelfTestCase broken{"logsumexp", "broken",
                            [](Device, SelfTestResult&) { throw DeviceError("the device is gone"); }, is_any};
  std::string report;
  const auto say = [&](const std::string& line) { report += line + "\n"; };
  EXPECT_EQ(self_test(say, {right, absent}), 0) << report;
  EXPECT_EQ(self_test(say, {right, wrong, broken}), 2 * count_devices()) << report;
  EXPECT_EQ(report.find("absent"), std::string::npos) << report;
  EXPECT_NE(report.find("cpu has no kernels of this family: of another\n"), std::string::npos) << report;
  EXPECT_NE(report.find("cpu, logsumexp, wrong: gradient of element 17: expected"), std::string::npos) << report;
  EXPECT_NE(report.find("cpu, logsumexp, broken: the device is gone\n"), std::string::npos) << report;
}

TEST(SelfTest, ALineThatDiffersIsAnErrorOfTheProgram) {
  // main() ends with exit code 1 for a DeviceError.
  EXPECT_NO_THROW(print_self_test({{"logsumexp", "right", comparison_after_adding(0.0), is_any}}));
  EXPECT_THROW(print_self_test({{"logsumexp", "wrong", comparison_after_adding(1e-3), is_any}}), DeviceError);
}

}  // namespace
}  // namespace eaves::testing
