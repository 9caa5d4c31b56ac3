// The calls of logsumexp: repeated runs, workspaces, threads, streams, graphs. logsumexp_test.cpp checks the values.
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "eaves/error.h"
#include "eaves/logsumexp.h"
#include "ops/logsumexp/logsumexp_test_case.h"
#include "runtime/runtime.h"
#include "testing/calls.h"
#include "testing/devices.h"

namespace eaves::testing {
namespace {

class LogsumexpCalls : public OnEachDevice {};
EAVES_EACH_DEVICE(LogsumexpCalls);

double normal(std::int64_t i) { return random_normal(7, static_cast<std::uint64_t>(i)); }

/// Shapes that reach every kernel of a backend.
const std::vector<std::pair<Dims, Dims>>& shapes_of_every_kind() {
  static const std::vector<std::pair<Dims, Dims>> shapes = {
      {{50, 40}, {1}},   {{50, 3000}, {1}},     {{2, 400003}, {1}},   {{70, 70001}, {1}},  {{5000, 72}, {0}},
      {{5000, 33}, {0}}, {{6, 50, 70}, {0, 2}}, {{1, 300, 1000}, {}}, {{2048, 2052}, {0}},
  };
  return shapes;
}

TEST_P(LogsumexpCalls, TwoRunsAreBitwiseEqual) {
  for (const auto& [shape, axes] : shapes_of_every_kind()) {
    for (const DType dtype : {DType::bfloat16, DType::float32}) {
      const LogsumexpCase test_case{.dtype = dtype, .shape = shape, .axes = axes, .value = normal};
      expect_two_runs_equal<LogsumexpRun>(test_case, check::to_string(shape));
    }
  }
}

TEST_P(LogsumexpCalls, CallsThatFollowEachOtherMayShareAWorkspace) {
  // Both calls cut their rows into pieces, and the second must not overwrite states that the first has yet to merge.
  const LogsumexpCase long_rows{.dtype = DType::bfloat16, .shape = {2, 400003}, .axes = {1}, .value = normal};
  const LogsumexpCase long_columns{.dtype = DType::bfloat16, .shape = {20000, 72}, .axes = {0}, .value = normal};
  expect_a_workspace_can_be_shared<LogsumexpRun>(
      std::vector<LogsumexpCase>{long_rows, long_columns}, 20,
      [](LogsumexpRun& run) { return logsumexp_forward_workspace_bytes(run.forward_args()); });
}

TEST_P(LogsumexpCalls, AWorkspaceOfTheStatedSizeIsEnoughAndIsBelow1MiB) {
  for (const auto& [shape, axes] : shapes_of_every_kind()) {
    LogsumexpRun own({.dtype = DType::bfloat16, .shape = shape, .axes = axes, .value = normal});
    LogsumexpRun given({.dtype = DType::bfloat16, .shape = shape, .axes = axes, .value = normal});
    own.run();
    const std::size_t bytes = logsumexp_forward_workspace_bytes(given.forward_args());
    EXPECT_LE(bytes, std::size_t{1} << 20);
    EXPECT_EQ(logsumexp_backward_workspace_bytes(given.backward_args()), 0u);
    TestTensor workspace(device(), DType::uint8, {static_cast<std::int64_t>(bytes)});
    given.run({.workspace = {workspace.view().data, bytes}});
    EXPECT_TRUE(own.results_equal(given)) << check::to_string(shape);
    workspace.download();
    EXPECT_EQ(workspace.canary_damage(), "") << check::to_string(shape);
    if (bytes > 0) {
      EXPECT_THROW(given.run({.workspace = {workspace.view().data, bytes - 1}}), InvalidArgument);
    }
  }
}

TEST_P(LogsumexpCalls, CallsFromSeveralThreadsDoNotDisturbEachOther) {
  // The rows of the second shape are cut into pieces: every call has scratch memory of its own.
  for (const Dims& shape : {Dims{64, 3000}, Dims{2, 100003}}) {
    const LogsumexpCase test_case{.dtype = DType::bfloat16, .shape = shape, .axes = {1}, .value = normal};
    expect_undisturbed_by_other_threads<LogsumexpRun>(test_case, check::to_string(shape),
                                                      [](LogsumexpRun& run, const ExecutionContext& context) {
                                                        for (int repetition = 0; repetition < 20; ++repetition)
                                                          run.launch(context);
                                                      });
  }
}

class LogsumexpOnCpu : public ::testing::Test {};

TEST_F(LogsumexpOnCpu, TheNumberOfThreadsAndAPoolOfTheCallerChangeNoBit) {
  for (const auto& [shape, axes] : shapes_of_every_kind()) {
    const LogsumexpCase test_case{
        .device = kCpu, .dtype = DType::bfloat16, .shape = shape, .axes = axes, .value = normal};
    expect_equal_on_any_threads<LogsumexpRun>(test_case, check::to_string(shape));
  }
}

class LogsumexpOnGpu : public OnGpu {};

TEST_F(LogsumexpOnGpu, ACudaGraphReplaysForwardAndBackward) {
  for (const auto& [shape, axes] : shapes_of_every_kind()) {
    const LogsumexpCase test_case{
        .device = kCuda, .dtype = DType::bfloat16, .shape = shape, .axes = axes, .value = normal};
    expect_replayed_by_a_graph<LogsumexpRun>(test_case, check::to_string(shape));
  }
}

}  // namespace
}  // namespace eaves::testing
