// The calls of cross_entropy: repeated runs, workspaces, threads, streams, graphs. cross_entropy_test.cpp checks the
// values.
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "eaves/cross_entropy.h"
#include "eaves/error.h"
#include "ops/cross_entropy/cross_entropy_test_case.h"
#include "runtime/runtime.h"
#include "testing/calls.h"
#include "testing/devices.h"

namespace eaves::testing {
namespace {

class CrossEntropyCalls : public OnEachDevice {};
EAVES_EACH_DEVICE(CrossEntropyCalls);

double normal(std::int64_t i) { return 3.0 * random_normal(47, static_cast<std::uint64_t>(i)); }

/// Shapes that reach every kernel of a backend, without options and with options that select another kernel.
std::vector<CrossEntropyCase> cases_of_every_kind(Device device) {
  const std::pair<Dims, int> shapes[] = {
      {{50, 40}, 1},   {{50, 3000}, 1}, {{2, 400003}, 1}, {{70, 30001}, 1},
      {{5000, 72}, 0}, {{5000, 33}, 0}, {{6, 50, 70}, 1}, {{20011, 3}, 1},
  };
  std::vector<CrossEntropyCase> cases;
  for (const auto& [shape, axis] : shapes) {
    for (const Reduction reduction : {Reduction::none, Reduction::mean}) {
      CrossEntropyCase plain{.device = device,
                             .dtype = DType::bfloat16,
                             .shape = shape,
                             .class_axis = axis,
                             .options = {.reduction = reduction},
                             .value = normal};
      cases.push_back(plain);
      if (reduction == Reduction::none) continue;
      CrossEntropyCase everything = plain;
      everything.dtype = DType::float32;
      everything.options.label_smoothing = 0.1;
      everything.options.softcap = 20.0;
      everything.options.z_loss_weight = 0.01;
      everything.weight_dtype = DType::float32;
      everything.has_grad_entropy = true;
      cases.push_back(everything);
      CrossEntropyCase soft = plain;
      soft.targets_dtype = DType::bfloat16;
      cases.push_back(soft);
    }
  }
  return cases;
}

std::size_t workspace_bytes(CrossEntropyRun& run) {
  return std::max(cross_entropy_forward_workspace_bytes(run.forward_args()),
                  cross_entropy_forward_backward_workspace_bytes(run.in_place_args()));
}

TEST_P(CrossEntropyCalls, TwoRunsAreBitwiseEqual) {
  for (const CrossEntropyCase& test_case : cases_of_every_kind(device())) {
    expect_two_runs_equal<CrossEntropyRun>(test_case, description_of(test_case));
  }
}

TEST_P(CrossEntropyCalls, CallsThatFollowEachOtherMayShareAWorkspace) {
  // Every call cuts its rows into pieces, and must not overwrite states that another call has yet to merge.
  const CrossEntropyCase long_rows{.dtype = DType::bfloat16, .shape = {2, 400003}, .value = normal};
  const CrossEntropyCase long_columns{.dtype = DType::bfloat16, .shape = {20000, 72}, .class_axis = 0, .value = normal};
  // In place, these two calls keep their divisors at the same address, and still compute them when their first rows
  // begin.
  const CrossEntropyCase many_rows{
      .dtype = DType::bfloat16, .shape = {200000, 24}, .wants_all_of_row = false, .value = normal};
  CrossEntropyCase few_count = many_rows;
  few_count.target = [](std::int64_t row) { return row % 8 == 0 ? 5.0 : CrossEntropyOptions{}.ignore_index; };
  expect_a_workspace_can_be_shared<CrossEntropyRun>(
      std::vector<CrossEntropyCase>{long_rows, long_columns, many_rows, few_count}, 10, workspace_bytes);
}

TEST_P(CrossEntropyCalls, AWorkspaceOfTheStatedSizeIsEnoughAndAsSmallAsTheHeaderSays) {
  for (const CrossEntropyCase& test_case : cases_of_every_kind(device())) {
    SCOPED_TRACE(description_of(test_case));
    CrossEntropyRun own(test_case), given(test_case);
    own.run();
    const std::size_t forward_bytes = cross_entropy_forward_workspace_bytes(given.forward_args());
    const std::size_t in_place_bytes = cross_entropy_forward_backward_workspace_bytes(given.in_place_args());
    const auto rows = static_cast<std::size_t>(reference::row_count_of(given.forward_args()));
    const std::size_t most = (std::size_t{1} << 20) + (given.reduction() == Reduction::none ? 0 : 12 * rows);
    EXPECT_LE(forward_bytes, most);
    EXPECT_LE(in_place_bytes, most);
    EXPECT_EQ(cross_entropy_backward_workspace_bytes(given.backward_args()), 0u);

    call_with_workspace(device(), forward_bytes, true,
                        [&](const ExecutionContext& context) { cross_entropy_forward(given.forward_args(), context); });
    cross_entropy_backward(given.backward_args());
    call_with_workspace(device(), in_place_bytes, true, [&](const ExecutionContext& context) {
      cross_entropy_forward_backward(given.in_place_args(), context);
    });
    given.download();
    EXPECT_TRUE(own.results_equal(given));
  }
}

TEST_P(CrossEntropyCalls, CallsFromSeveralThreadsDoNotDisturbEachOther) {
  // The rows of the second shape are cut into pieces: every call has scratch memory of its own.
  for (const Dims& shape : {Dims{64, 3000}, Dims{2, 100003}}) {
    const CrossEntropyCase test_case{.dtype = DType::bfloat16, .shape = shape, .value = normal};
    expect_undisturbed_by_other_threads<CrossEntropyRun>(test_case, check::to_string(shape),
                                                         [](CrossEntropyRun& run, const ExecutionContext& context) {
                                                           for (int repetition = 0; repetition < 10; ++repetition) {
                                                             cross_entropy_forward(run.forward_args(), context);
                                                             cross_entropy_backward(run.backward_args(), context);
                                                           }
                                                           cross_entropy_forward_backward(run.in_place_args(), context);
                                                         });
  }
}

class CrossEntropyOnCpu : public ::testing::Test {};

TEST_F(CrossEntropyOnCpu, TheNumberOfThreadsAndAPoolOfTheCallerChangeNoBit) {
  for (const CrossEntropyCase& test_case : cases_of_every_kind(kCpu)) {
    expect_equal_on_any_threads<CrossEntropyRun>(test_case, description_of(test_case));
  }
}

class CrossEntropyOnGpu : public OnGpu {};

TEST_F(CrossEntropyOnGpu, ACudaGraphReplaysForwardBackwardAndBothInPlace) {
  for (const CrossEntropyCase& test_case : cases_of_every_kind(kCuda)) {
    CrossEntropyRun plain(test_case), captured(test_case);
    plain.run();
    const runtime::Stream stream(kCuda);
    const ExecutionContext context{.stream = stream.handle()};
    runtime::capture_and_replay(
        kCuda, stream.handle(),
        [&] {
          cross_entropy_forward(captured.forward_args(), context);
          cross_entropy_backward(captured.backward_args(), context);
        },
        3);
    // Replayed once, because the call overwrites its input.
    runtime::capture_and_replay(
        kCuda, stream.handle(), [&] { cross_entropy_forward_backward(captured.in_place_args(), context); }, 1);
    captured.download();
    EXPECT_TRUE(captured.results_equal(plain)) << description_of(test_case);
  }
}

}  // namespace
}  // namespace eaves::testing
