// Tests of the promises of every operator's calls: a call writes its outputs only, threads of the caller do not disturb
// each other, and neither the number of threads nor the caller's pool changes a bit. A Run is constructed from a case,
// and has run(context), download(), results_equal(other), inputs() and named outputs().
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "eaves/context.h"
#include "eaves/error.h"
#include "runtime/runtime.h"
#include "testing/runs.h"
#include "testing/tensor.h"

namespace eaves::testing {

/// Runs a call, and fails if an input or a byte around an output has changed.
template <typename Run>
void run_between_canaries(Run& run, const ExecutionContext& context = {}) {
  EXPECT_EQ(damage_by_run(run, context), "");
}

/// Fails unless two runs give the same bits.
template <typename Run, typename Case>
void expect_two_runs_equal(const Case& test_case, const std::string& description) {
  Run first(test_case), second(test_case);
  first.run();
  second.run();
  EXPECT_TRUE(first.results_equal(second)) << description;
}

/// Fails unless a graph of run.launch(), replayed `times` times, gives the results of a run.
template <typename Run, typename Case>
void expect_replayed_by_a_graph(const Case& test_case, const std::string& description, int times = 3) {
  Run plain(test_case), captured(test_case);
  plain.run();
  const runtime::Stream stream(kCuda);
  runtime::capture_and_replay(
      kCuda, stream.handle(), [&] { captured.launch({.stream = stream.handle()}); }, times);
  captured.download();
  EXPECT_TRUE(captured.results_equal(plain)) << description;
}

/// Fails unless consecutive calls can share one workspace: no call may overwrite states that another call has yet to
/// merge.
template <typename Run, typename Case, typename BytesOf>
void expect_a_workspace_can_be_shared(const std::vector<Case>& cases, int repetitions, BytesOf bytes_of) {
  std::vector<std::unique_ptr<Run>> alone, together;
  std::size_t bytes = 0;
  for (const Case& test_case : cases) {
    alone.push_back(std::make_unique<Run>(test_case));
    together.push_back(std::make_unique<Run>(test_case));
    alone.back()->run();
    bytes = std::max(bytes, bytes_of(*together.back()));
  }
  TestTensor workspace(cases[0].device, DType::uint8, {static_cast<std::int64_t>(bytes)});
  const ExecutionContext context{.workspace = {workspace.view().data, bytes}};
  for (int repetition = 0; repetition < repetitions; ++repetition) {
    if constexpr (requires(Run & run) { run.restore(); }) {
      for (const auto& run : together) run->restore();
    }
    for (const auto& run : together) run->launch(context);
  }
  for (std::size_t i = 0; i < cases.size(); ++i) {
    together[i]->download();
    EXPECT_TRUE(together[i]->results_equal(*alone[i])) << "case " << i;
  }
}

/// Calls with a workspace of `bytes`, and fails if a byte around it has changed. If `are_least` is set, one byte less
/// must be refused.
template <typename Call>
void call_with_workspace(Device device, std::size_t bytes, bool are_least, Call call) {
  TestTensor workspace(device, DType::uint8, {static_cast<std::int64_t>(bytes)});
  call(ExecutionContext{.workspace = {workspace.view().data, bytes}});
  if (are_least && bytes > 0) {
    EXPECT_THROW(call(ExecutionContext{.workspace = {workspace.view().data, bytes - 1}}), InvalidArgument);
  }
  runtime::synchronize(device);
  workspace.download();
  EXPECT_EQ(workspace.canary_damage(), "");
}

/// The central difference quotient of the objective in element i of `tensor`.
template <typename Objective>
double difference_quotient(TestTensor& tensor, std::int64_t i, double step, Objective objective) {
  const double original = tensor.get(i);
  const auto objective_at = [&](double value) {
    tensor.set(i, value);
    tensor.upload();
    return objective();
  };
  const double above = objective_at(original + step), below = objective_at(original - step);
  tensor.set(i, original);
  tensor.upload();
  return (above - below) / (2.0 * step);
}

/// Fails unless four runs at the same time, each on its own stream by `launch(run, context)`, give the results of one
/// run alone.
template <typename Run, typename Case, typename Launch>
void expect_undisturbed_by_other_threads(const Case& test_case, const std::string& description, Launch launch) {
  Run alone(test_case);
  alone.run();
  std::vector<std::unique_ptr<Run>> runs;
  for (int i = 0; i < 4; ++i) runs.push_back(std::make_unique<Run>(test_case));
  std::vector<std::thread> threads;
  for (auto& run : runs) {
    threads.emplace_back([&] {
      const runtime::Stream stream(test_case.device);
      launch(*run, ExecutionContext{.stream = stream.handle()});
      runtime::synchronize(test_case.device);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (auto& run : runs) {
    run->download();
    EXPECT_TRUE(run->results_equal(alone)) << description;
  }
}

/// On the CPU: fails unless the results are equal with any number of threads, and on a pool that runs the pieces one at
/// a time in reverse order.
template <typename Run, typename Case>
void expect_equal_on_any_threads(const Case& test_case, const std::string& description) {
  const ParallelFor backwards = {.run = [](void*, std::int64_t count, ParallelFor::Body body, void* data) {
    for (std::int64_t i = count; i-- > 0;) body(data, i, i + 1);
  }};
  Run one(test_case);
  one.run({.threads = 1});
  for (const ExecutionContext& context :
       {ExecutionContext{.threads = 2}, ExecutionContext{.threads = 5}, ExecutionContext{.parallel_for = backwards}}) {
    Run other(test_case);
    other.run(context);
    EXPECT_TRUE(one.results_equal(other)) << description << ", threads " << context.threads;
  }
}

}  // namespace eaves::testing
