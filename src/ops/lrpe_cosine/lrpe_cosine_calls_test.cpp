// The calls of lrpe_cosine: repeated runs, optional tensors, workspaces, threads, streams, graphs. lrpe_cosine_test.cpp
// checks the values.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "eaves/error.h"
#include "ops/lrpe_cosine/lrpe_cosine_test_case.h"
#include "runtime/runtime.h"
#include "testing/calls.h"
#include "testing/cases.h"
#include "testing/devices.h"

namespace eaves::testing {
namespace {

class LrpeCosineCalls : public OnEachDevice {};
EAVES_EACH_DEVICE(LrpeCosineCalls);

/// Shapes that reach every kernel of a backend, with every activation.
std::vector<LrpeCosineCase> cases_of_every_kind(Device device) {
  struct Shape {
    Dims shape, theta, grid;
    bool is_transposed;
  };
  const std::vector<Shape> shapes = {
      {{2, 4, 70, 64}, {4, 64}, {}, false},    // the usual
      {{2, 4, 70, 64}, {1, 1}, {}, true},      // one angle, with a gradient summed over all elements; heads inside
      {{1, 1, 9001, 8}, {1, 8}, {}, false},    // a long sequence: pieces of sums and of softmaxes
      {{1, 1, 1500, 33}, {1, 33}, {}, false},  // no vector fits
      {{3, 2, 60, 128}, {2, 32}, {4, 5, 3}, false},  // a grid
      {{1, 2, 6, 2500}, {2, 600}, {2, 3}, false},    // long rows
      {{40, 30, 2, 16}, {30, 16}, {}, false},        // many short ones
  };
  std::vector<LrpeCosineCase> cases;
  for (const auto& [s, activation] : combine<Shape, LrpeCosineActivation>(shapes, every_activation())) {
    const HeadLayout& layout = head_layouts()[s.is_transposed ? 1 : 0];
    cases.push_back(with_activation({.device = device,
                                     .dtype = cases.size() % 3 == 2 ? DType::float32 : DType::bfloat16,
                                     .shape = s.shape,
                                     .theta_shape = s.theta,
                                     .theta_dtype = DType::float32,
                                     .grid = s.grid,
                                     .x_placement = layout.of(s.shape),
                                     .out_placement = layout.of({s.shape[0], s.shape[1], s.shape[2], 2 * s.shape[3]})},
                                    activation));
  }
  // Positions on the device: a call must not read them back.
  const LrpeCosineCase plain{
      .device = device, .dtype = DType::bfloat16, .shape = {2, 3, 40, 64}, .theta_shape = {3, 64}};
  for (int kind = 0; kind < 3; ++kind) {
    cases.push_back(plain);
    if (kind == 0) cases.back().offsets = {1000, 7};
    if (kind == 1) cases.back().cu_seqlens = {0, 0, 13, 40};
    if (kind == 2) cases.back().positions.assign(40, 5);
  }
  return cases;
}

/// The header's limit of the workspace on a GPU, for this many columns of a softmax over the sequence, in float32 or
/// less.
std::size_t most_workspace_bytes(std::int64_t columns) {
  constexpr std::size_t kAccumulators = 4;
  return (std::size_t{4} << 20) + kAccumulators * sizeof(float) * static_cast<std::size_t>(columns);
}

TEST_P(LrpeCosineCalls, TwoRunsAreBitwiseEqual) {
  for (const LrpeCosineCase& test_case : cases_of_every_kind(device())) {
    expect_two_runs_equal<LrpeCosineRun>(test_case, description_of(test_case));
  }
}

TEST_P(LrpeCosineCalls, WhatIsAskedForBesideAResultChangesNoBitOfIt) {
  for (const LrpeCosineCase& test_case : cases_of_every_kind(device())) {
    SCOPED_TRACE(description_of(test_case));
    LrpeCosineRun all(test_case);
    all.run();
    LrpeCosineCase changed = test_case;
    changed.has_grad_theta = false;
    changed.has_x_in_backward = test_case.activation != Activation::none;  // not needed without an activation
    LrpeCosineRun only_x(changed);
    const std::vector<unsigned char> no_grad_theta = only_x.grad_theta.bytes();
    run_between_canaries(only_x);
    EXPECT_TRUE(only_x.elementwise_results_equal(all)) << "grad_x alone";
    EXPECT_EQ(only_x.grad_theta.bytes(), no_grad_theta) << "grad_theta was written";
    changed = test_case;
    changed.has_grad_x = false;
    LrpeCosineRun only_theta(changed);
    const std::vector<unsigned char> no_grad_x = only_theta.grad_x.bytes();
    run_between_canaries(only_theta);
    EXPECT_TRUE(only_theta.has_written());
    EXPECT_EQ(only_theta.grad_theta.bytes(), all.grad_theta.bytes()) << "grad_theta alone";
    EXPECT_EQ(only_theta.grad_x.bytes(), no_grad_x) << "grad_x was written";
    if (!all.has_lse()) continue;
    changed = test_case;
    changed.has_lse = false;
    LrpeCosineRun without_lse(changed);
    const std::vector<unsigned char> no_lse = without_lse.lse.bytes();
    run_between_canaries(without_lse);
    EXPECT_EQ(without_lse.out.bytes(), all.out.bytes()) << "without lse";
    EXPECT_EQ(without_lse.lse.bytes(), no_lse) << "lse was written";
  }
}

TEST_P(LrpeCosineCalls, AnXThatIsNotNeededIsNotRead) {
  // Without an activation dL/dx does not depend on x: if it did, the NaN of x would show.
  LrpeCosineCase test_case{
      .dtype = DType::bfloat16, .shape = {2, 3, 20, 64}, .theta_shape = {3, 64}, .has_grad_theta = false};
  LrpeCosineRun expected(test_case);
  expected.run();
  test_case.value = [](std::int64_t) { return std::numeric_limits<double>::quiet_NaN(); };
  LrpeCosineRun run(test_case);
  run.run();
  EXPECT_TRUE(expected.has_written());
  EXPECT_EQ(run.grad_x.bytes(), expected.grad_x.bytes());
}

TEST_P(LrpeCosineCalls, CallsThatFollowEachOtherMayShareAWorkspace) {
  // Every call sums in pieces, and must not overwrite partial sums that another call has yet to add up.
  expect_a_workspace_can_be_shared<LrpeCosineRun>(cases_of_every_kind(device()), 2, [](LrpeCosineRun& run) {
    return std::max(lrpe_cosine_forward_workspace_bytes(run.forward_args()),
                    lrpe_cosine_backward_workspace_bytes(run.backward_args()));
  });
}

TEST_P(LrpeCosineCalls, AWorkspaceOfTheStatedSizeIsEnoughAndAsSmallAsTheHeaderSays) {
  for (const LrpeCosineCase& test_case : cases_of_every_kind(device())) {
    SCOPED_TRACE(description_of(test_case));
    LrpeCosineRun own(test_case), given(test_case);
    own.run();
    const Dims& shape = test_case.shape;
    const std::int64_t columns = shape[0] * shape[1] * shape[3];
    const std::size_t most =
        device().type == DeviceType::cpu ? 0 : most_workspace_bytes(own.is_over_sequence() ? columns : 0);
    const auto call_with = [&](std::size_t bytes, auto call) {
      EXPECT_LE(bytes, most);
      call_with_workspace(device(), bytes, true, call);
    };
    call_with(lrpe_cosine_forward_workspace_bytes(given.forward_args()),
              [&](const ExecutionContext& context) { lrpe_cosine_forward(given.forward_args(), context); });
    call_with(lrpe_cosine_backward_workspace_bytes(given.backward_args()),
              [&](const ExecutionContext& context) { lrpe_cosine_backward(given.backward_args(), context); });
    given.download();
    EXPECT_TRUE(own.results_equal(given));
  }
}

TEST_P(LrpeCosineCalls, CallsFromSeveralThreadsDoNotDisturbEachOther) {
  for (const LrpeCosineActivation& activation : {every_activation()[3], every_activation()[5]}) {
    const LrpeCosineCase test_case = with_activation(
        {.dtype = DType::bfloat16, .shape = {2, 2, 3001, 16}, .theta_shape = {2, 16}, .theta_dtype = DType::float32},
        activation);
    expect_undisturbed_by_other_threads<LrpeCosineRun>(test_case, description_of(test_case),
                                                       [](LrpeCosineRun& run, const ExecutionContext& context) {
                                                         for (int repetition = 0; repetition < 10; ++repetition)
                                                           run.launch(context);
                                                       });
  }
}

class LrpeCosineOnCpu : public ::testing::Test {};

TEST_F(LrpeCosineOnCpu, TheNumberOfThreadsAndAPoolOfTheCallerChangeNoBit) {
  for (const LrpeCosineCase& test_case : cases_of_every_kind(kCpu)) {
    expect_equal_on_any_threads<LrpeCosineRun>(test_case, description_of(test_case));
  }
}

class LrpeCosineOnGpu : public OnGpu {};

/// A tensor without memory, for a call that reads none of it.
TensorView made_up(int number, DType dtype, const Dims& shape) {
  return TensorView::contiguous(reinterpret_cast<void*>(std::uintptr_t{1} << 44 | std::uintptr_t(number) << 40), dtype,
                                shape, kCuda);
}

TEST_F(LrpeCosineOnGpu, AWorkspaceOfALargeCallIsAsSmallAsTheHeaderSays) {
  const auto expect_at_most = [](std::size_t most, const Dims& shape, const LrpeCosineActivation& activation,
                                 bool has_grad_theta) {
    const Dims out_shape = {shape[0], shape[1], shape[2], 2 * shape[3]};
    const bool is_over_sequence = activation.dim == -2;
    for (const bool has_lse : {true, false}) {
      if (has_lse && !is_over_sequence) continue;
      const LrpeCosineForwardArgs forward{
          .x = made_up(1, DType::bfloat16, shape),
          .angles = {.theta = made_up(2, DType::bfloat16, {shape[1], shape[3]})},
          .activation = activation.activation,
          .activation_dim = activation.dim,
          .out = made_up(3, DType::bfloat16, out_shape),
          .lse = has_lse ? made_up(4, DType::float32, {shape[0], shape[1], 2, shape[3]}) : TensorView{}};
      EXPECT_LE(lrpe_cosine_forward_workspace_bytes(forward), most)
          << "forward of " << check::to_string(shape) << (has_lse ? ", with lse" : "");
      if (is_over_sequence && !has_lse) continue;
      const LrpeCosineBackwardArgs backward{
          .grad_out = made_up(5, DType::bfloat16, out_shape),
          .x = forward.x,
          .angles = forward.angles,
          .activation = activation.activation,
          .activation_dim = activation.dim,
          .lse = forward.lse,
          .grad_x = made_up(6, DType::bfloat16, shape),
          .grad_theta = has_grad_theta ? made_up(7, DType::bfloat16, {shape[1], shape[3]}) : TensorView{}};
      EXPECT_LE(lrpe_cosine_backward_workspace_bytes(backward), most) << "backward of " << check::to_string(shape);
    }
  };
  const LrpeCosineActivation none = every_activation()[0], over_sequence = every_activation()[5];
  for (const bool has_grad_theta : {false, true}) {
    expect_at_most(most_workspace_bytes(64 * 32 * 1024), {64, 32, 4096, 1024}, over_sequence, has_grad_theta);
  }
  expect_at_most(most_workspace_bytes(0), {1024, 64, 64, 128}, none, true);
}

TEST_F(LrpeCosineOnGpu, ACudaGraphReplaysForwardAndBackward) {
  for (const LrpeCosineCase& test_case : cases_of_every_kind(kCuda)) {
    expect_replayed_by_a_graph<LrpeCosineRun>(test_case, description_of(test_case));
  }
}

}  // namespace
}  // namespace eaves::testing
