// What every operator promises of a call, whatever it computes: it writes its outputs alone, threads of the caller do
// not disturb each other, and neither the number of threads nor the caller's pool changes a bit. A Run is made of a
// case, and has run(context), download(), results_equal(other), inputs() and outputs(), which have names.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "eaves/context.h"
#include "runtime/runtime.h"
#include "testing/tensor.h"

namespace eaves::testing {

/// Fails where an input is not as it was, or a byte around an output.
template <typename Run>
void run_between_canaries(Run& run, const ExecutionContext& context = {}) {
  std::vector<std::vector<unsigned char>> before;
  for (TestTensor* input : run.inputs()) before.push_back(input->bytes());
  run.run(context);
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(run.inputs()[i]->bytes() == before[i]) << "input " << i << " was modified";
  }
  for (auto& [name, tensor] : run.outputs()) EXPECT_EQ(tensor->canary_damage(), "") << "around " << name;
}

/// Four runs at the same time, each on a stream of its own by `launch(run, context)`, come to what one run alone does.
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

/// On the CPU: with any number of threads, and on a pool that runs the pieces in reverse order, one at a time.
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
