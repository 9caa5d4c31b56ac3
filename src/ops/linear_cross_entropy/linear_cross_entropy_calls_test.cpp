// Calls of linear_cross_entropy rather than values: two runs, workspaces and their limits, threads, streams, graphs.
// linear_cross_entropy_test.cpp checks the values.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "eaves/linear_cross_entropy.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_test_case.h"
#include "runtime/runtime.h"
#include "testing/calls.h"
#include "testing/cases.h"
#include "testing/devices.h"
#include "testing/refusals.h"

namespace eaves::testing {
namespace {

class LinearCrossEntropyCalls : public OnEachDevice {};
EAVES_EACH_DEVICE(LinearCrossEntropyCalls);

/// A case for each path through the operator: rows in place and gathered, all at once and in chunks and blocks.
std::vector<LinearCrossEntropyCase> cases_of_every_kind(Device device) {
  std::vector<LinearCrossEntropyCase> cases;
  for (const auto& [dtype, limit] : combine<DType, std::size_t>({DType::bfloat16, DType::float32}, {0, 60000})) {
    LinearCrossEntropyCase plain{
        .device = device, .dtype = dtype, .row_shape = {67}, .features = 40, .classes = 300, .workspace_limit = limit};
    cases.push_back(plain);
    LinearCrossEntropyCase everything = plain;
    everything.options = {.reduction = Reduction::none, .label_smoothing = 0.1, .softcap = 20.0, .z_loss_weight = 0.01};
    everything.bias_dtype = everything.class_weight_dtype = dtype;
    everything.has_grad_lse = everything.has_grad_entropy = true;
    everything.hidden_placement = everything.grad_hidden_placement = with_strides({80, 2});
    everything.grad_head_dtype = DType::float32;
    cases.push_back(everything);
    LinearCrossEntropyCase skipping = plain;
    skipping.skips_ignored = true;
    skipping.bias_dtype = dtype;
    cases.push_back(skipping);
    LinearCrossEntropyCase soft = plain;
    soft.targets_dtype = DType::float32;
    cases.push_back(soft);
  }
  return cases;
}

TEST_P(LinearCrossEntropyCalls, TwoRunsAreBitwiseEqual) {
  for (const LinearCrossEntropyCase& test_case : cases_of_every_kind(device())) {
    LinearCrossEntropyRun first(test_case), second(test_case);
    first.run();
    second.run();
    EXPECT_TRUE(first.results_equal(second)) << description_of(test_case);
    second.run();  // over the results of the first call
    EXPECT_TRUE(first.results_equal(second)) << description_of(test_case);
  }
}

TEST_P(LinearCrossEntropyCalls, AWorkspaceOfTheStatedSizeIsEnough) {
  for (const LinearCrossEntropyCase& test_case : cases_of_every_kind(device())) {
    SCOPED_TRACE(description_of(test_case));
    LinearCrossEntropyRun own(test_case), given(test_case);
    own.run();
    call_with_workspace(
        device(), linear_cross_entropy_forward_workspace_bytes(given.forward_args()), false,
        [&](const ExecutionContext& context) { linear_cross_entropy_forward(given.forward_args(), context); });
    call_with_workspace(
        device(), linear_cross_entropy_backward_workspace_bytes(given.backward_args()), false,
        [&](const ExecutionContext& context) { linear_cross_entropy_backward(given.backward_args(), context); });
    call_with_workspace(
        device(), linear_cross_entropy_forward_backward_workspace_bytes(given.at_once_args()), false,
        [&](const ExecutionContext& context) { linear_cross_entropy_forward_backward(given.at_once_args(), context); });
    given.download();
    // With a limit, a workspace of just the stated bytes is a smaller limit, which may cut the work in another way.
    if (test_case.workspace_limit == 0) {
      EXPECT_TRUE(own.results_equal(given));
    }
  }
}

TEST_P(LinearCrossEntropyCalls, TheStatedSizeIsThatOfThePlanAndWithinTheLimitWhereThatSuffices) {
  for (const LinearCrossEntropyCase& test_case : cases_of_every_kind(device())) {
    SCOPED_TRACE(description_of(test_case));
    LinearCrossEntropyRun run(test_case);
    const auto expect_plan = [&](LinearCrossEntropyMode mode, std::size_t stated) {
      const LinearCrossEntropyProblem problem = problem_of(run, mode);
      const LinearCrossEntropyBlock block = block_of(run, mode);
      const std::size_t smallest = workspace_bytes(problem, least_block(problem));
      EXPECT_EQ(stated, workspace_bytes(problem, block));
      if (test_case.workspace_limit != 0) {
        EXPECT_LE(stated, std::max(limit_of(test_case), smallest));
      }
    };
    expect_plan(LinearCrossEntropyMode::forward, linear_cross_entropy_forward_workspace_bytes(run.forward_args()));
    expect_plan(LinearCrossEntropyMode::backward, linear_cross_entropy_backward_workspace_bytes(run.backward_args()));
    expect_plan(LinearCrossEntropyMode::forward_backward,
                linear_cross_entropy_forward_backward_workspace_bytes(run.at_once_args()));
  }
}

TEST_P(LinearCrossEntropyCalls, AWorkspaceOfTheCallerIsTheLimit) {
  // The size of the workspace decides the chunks, whatever limit the call names.
  for (const std::size_t limit : {std::size_t{60000}, std::size_t{1} << 20}) {
    const LinearCrossEntropyCase limited{
        .dtype = DType::bfloat16, .row_shape = {67}, .features = 40, .classes = 300, .workspace_limit = limit};
    LinearCrossEntropyCase given = limited;
    given.workspace_limit = 1;
    LinearCrossEntropyRun with_limit(limited), with_workspace(given);
    with_limit.run();
    const std::size_t bytes = limit_of(limited);
    TestTensor workspace(device(), DType::uint8, {static_cast<std::int64_t>(bytes)});
    with_workspace.run({.workspace = {workspace.view().data, bytes}});
    EXPECT_TRUE(with_limit.results_equal(with_workspace));
    workspace.download();
    EXPECT_EQ(workspace.canary_damage(), "");
  }
}

TEST_P(LinearCrossEntropyCalls, AWorkspaceThatIsTooSmallForTheSmallestChunkIsRefused) {
  LinearCrossEntropyCase test_case{.row_shape = {67}, .workspace_limit = 1};
  LinearCrossEntropyRun run(test_case), untouched(test_case);
  const auto expect_refused = [&](const char* op, std::size_t needed, auto call) {
    TestTensor workspace(device(), DType::uint8, {static_cast<std::int64_t>(needed)});
    expect_message(
        [&] {
          call(ExecutionContext{.workspace = {workspace.view().data, needed - 1}});
        },
        std::string(op) + ": workspace has " + std::to_string(needed - 1) + " bytes, expected at least " +
            std::to_string(needed));
  };
  expect_refused("linear_cross_entropy_forward", linear_cross_entropy_forward_workspace_bytes(run.forward_args()),
                 [&](const ExecutionContext& context) { linear_cross_entropy_forward(run.forward_args(), context); });
  expect_refused("linear_cross_entropy_backward", linear_cross_entropy_backward_workspace_bytes(run.backward_args()),
                 [&](const ExecutionContext& context) { linear_cross_entropy_backward(run.backward_args(), context); });
  expect_refused(
      "linear_cross_entropy_forward_backward",
      linear_cross_entropy_forward_backward_workspace_bytes(run.at_once_args()),
      [&](const ExecutionContext& context) { linear_cross_entropy_forward_backward(run.at_once_args(), context); });
  run.download();
  EXPECT_TRUE(run.results_equal(untouched));
}

TEST_P(LinearCrossEntropyCalls, CallsFromSeveralThreadsDoNotDisturbEachOther) {
  for (const LinearCrossEntropyCase& test_case : cases_of_every_kind(device())) {
    expect_undisturbed_by_other_threads<LinearCrossEntropyRun>(
        test_case, description_of(test_case), [](LinearCrossEntropyRun& run, const ExecutionContext& context) {
          for (int repetition = 0; repetition < 3; ++repetition) run.launch(context);
        });
  }
}

class LinearCrossEntropyOnCpu : public ::testing::Test {};

TEST_F(LinearCrossEntropyOnCpu, TheNumberOfThreadsAndAPoolOfTheCallerChangeNoBit) {
  for (const LinearCrossEntropyCase& test_case : cases_of_every_kind(kCpu)) {
    expect_equal_on_any_threads<LinearCrossEntropyRun>(test_case, description_of(test_case));
  }
}

class LinearCrossEntropyOnGpu : public OnGpu {};

TEST_F(LinearCrossEntropyOnGpu, ACudaGraphReplaysForwardBackwardAndBothAtOnce) {
  for (const LinearCrossEntropyCase& test_case : cases_of_every_kind(kCuda)) {
    LinearCrossEntropyRun plain(test_case), captured(test_case);
    plain.run();
    const runtime::Stream stream(kCuda);
    const ExecutionContext context{.stream = stream.handle()};
    runtime::capture_and_replay(
        kCuda, stream.handle(), [&] { captured.launch(context); }, 3);
    captured.download();
    if (test_case.skips_ignored) {  // a capture computes all rows
      SCOPED_TRACE(description_of(test_case));
      EXPECT_EQ(LinearCrossEntropyComparison(captured).compare(), "");
    } else {
      EXPECT_TRUE(captured.results_equal(plain)) << description_of(test_case);
    }
  }
}

TEST_F(LinearCrossEntropyOnGpu, TwoStreamsAtOnceGiveWhatEachGivesAlone) {
  for (const LinearCrossEntropyCase& test_case : cases_of_every_kind(kCuda)) {
    LinearCrossEntropyRun alone(test_case), one(test_case), other(test_case);
    alone.run();
    const runtime::Stream first(kCuda), second(kCuda);
    for (int repetition = 0; repetition < 3; ++repetition) {
      one.launch({.stream = first.handle()});
      other.launch({.stream = second.handle()});
    }
    one.download();
    other.download();
    EXPECT_TRUE(one.results_equal(alone)) << description_of(test_case);
    EXPECT_TRUE(other.results_equal(alone)) << description_of(test_case);
  }
}

}  // namespace
}  // namespace eaves::testing
