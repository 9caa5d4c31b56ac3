// Every sentence with which linear_cross_entropy refuses a call, and that nothing is written when it does. Targets out
// of range are in linear_cross_entropy_edges_test.cpp, workspaces in linear_cross_entropy_calls_test.cpp.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "core/check.h"
#include "eaves/error.h"
#include "eaves/linear_cross_entropy.h"
#include "testing/refusals.h"

namespace eaves::testing {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// Arguments of a legal call of each kind, for a test to spoil one of them: four rows of two features, three classes.
class LinearCrossEntropyErrors : public ::testing::Test {
 protected:
  TensorView ones(const Dims& shape, DType dtype = DType::float32) {
    return TensorView::contiguous(ones_.data(), dtype, shape);
  }
  TensorView strided(const Dims& shape, const Dims& strides) {
    return TensorView::strided(ones_.data(), DType::float32, shape, strides);
  }
  LinearCrossEntropyInputs inputs() { return {.x = ones({4, 2}), .weight = ones({3, 2}), .targets = targets_view()}; }
  TensorView targets_view() { return TensorView::contiguous(targets_.data(), DType::int64, {4}); }
  LinearCrossEntropyGradients gradients() {
    return {
        .grad_x = grad_x_.view({4, 2}), .grad_weight = grad_weight_.view({3, 2}), .grad_bias = grad_bias_.view({3})};
  }

  std::vector<std::int64_t> targets_ = {0, 1, 2, 0};
  std::vector<float> ones_ = std::vector<float>(64, 1.0f);
  UnwrittenOutput loss_{"loss"}, lse_{"lse"}, argmax_{"argmax"}, entropy_{"entropy"}, divisor_{"divisor"},
      grad_x_{"grad_x"}, grad_weight_{"grad_weight"}, grad_bias_{"grad_bias"};

  LinearCrossEntropyForwardArgs forward_ = {.inputs = inputs(),
                                            .outputs = {.loss = loss_.view({}),
                                                        .lse = lse_.view({4}),
                                                        .argmax = argmax_.view({4}, DType::int64),
                                                        .entropy = entropy_.view({4}),
                                                        .divisor = divisor_.view({})}};
  LinearCrossEntropyForwardBackwardArgs at_once_ = {
      .forward = forward_, .grad_loss = ones({}), .gradients = gradients()};
  LinearCrossEntropyBackwardArgs backward_ = {
      .grad_loss = ones({}), .inputs = inputs(), .lse = ones({4}), .divisor = ones({}), .gradients = gradients()};

  void expect_nothing_written() {
    for (const UnwrittenOutput* output :
         {&loss_, &lse_, &argmax_, &entropy_, &divisor_, &grad_x_, &grad_weight_, &grad_bias_}) {
      output->expect_unwritten();
    }
  }
  void expect_refused(const LinearCrossEntropyForwardArgs& args, const std::string& what) {
    const std::string message = "linear_cross_entropy_forward: " + what;
    expect_message([&] { linear_cross_entropy_forward(args); }, message);
    expect_message([&] { linear_cross_entropy_forward_workspace_bytes(args); }, message);
    expect_nothing_written();
  }
  void expect_refused(const LinearCrossEntropyForwardBackwardArgs& args, const std::string& what) {
    const std::string message = "linear_cross_entropy_forward_backward: " + what;
    expect_message([&] { linear_cross_entropy_forward_backward(args); }, message);
    expect_message([&] { linear_cross_entropy_forward_backward_workspace_bytes(args); }, message);
    expect_nothing_written();
  }
  void expect_refused(const LinearCrossEntropyBackwardArgs& args, const std::string& what) {
    const std::string message = "linear_cross_entropy_backward: " + what;
    expect_message([&] { linear_cross_entropy_backward(args); }, message);
    expect_message([&] { linear_cross_entropy_backward_workspace_bytes(args); }, message);
    expect_nothing_written();
  }

  /// An input that all three calls refuse with the same words.
  template <typename Spoil>
  void expect_inputs_refused(const Spoil& spoil, const std::string& what) {
    LinearCrossEntropyForwardArgs forward = forward_;
    spoil(forward.inputs);
    expect_refused(forward, what);
    LinearCrossEntropyForwardBackwardArgs at_once = at_once_;
    spoil(at_once.forward.inputs);
    expect_refused(at_once, what);
    LinearCrossEntropyBackwardArgs backward = backward_;
    spoil(backward.inputs);
    expect_refused(backward, what);
  }

  /// A gradient that both calls refuse with the same words.
  template <typename Spoil>
  void expect_gradients_refused(const Spoil& spoil, const std::string& what) {
    LinearCrossEntropyForwardBackwardArgs at_once = at_once_;
    spoil(at_once.gradients);
    expect_refused(at_once, what);
    LinearCrossEntropyBackwardArgs backward = backward_;
    spoil(backward.gradients);
    expect_refused(backward, what);
  }
};

using Inputs = LinearCrossEntropyInputs;
using Gradients = LinearCrossEntropyGradients;

TEST_F(LinearCrossEntropyErrors, TheArgumentsThatTheseTestsSpoilAreLegal) {
  EXPECT_NO_THROW(linear_cross_entropy_forward(forward_));
  EXPECT_NO_THROW(linear_cross_entropy_forward_backward(at_once_));
  EXPECT_NO_THROW(linear_cross_entropy_backward(backward_));
  EXPECT_NO_THROW(linear_cross_entropy_rescale({.gradients = gradients(), .grad_loss = ones({})}));
}

TEST_F(LinearCrossEntropyErrors, WeightsOfRowsAndMeanLogits) {
  expect_inputs_refused([&](Inputs& inputs) { inputs.row_weight = ones({3}); },
                        "row_weight has shape [3], expected [4] (one per row of x)");
  expect_inputs_refused([&](Inputs& inputs) { inputs.row_weight = ones({4}, DType::float16); },
                        "row_weight has dtype float16, expected float32 (float32, or float64 where x is float64)");
  UnwrittenOutput mean_logit("mean_logit");
  auto forward = forward_;
  forward.outputs.mean_logit = mean_logit.view({4});
  forward.inputs.targets = ones({4, 3});
  expect_refused(
      forward, "mean_logit is given with soft targets, or with weights and label_smoothing: there is none with those");
  mean_logit.expect_unwritten();
}

TEST_F(LinearCrossEntropyErrors, MissingTensors) {
  expect_inputs_refused([](Inputs& inputs) { inputs.x = {}; }, "x is missing");
  expect_inputs_refused([](Inputs& inputs) { inputs.weight = {}; }, "weight is missing");
  expect_inputs_refused([](Inputs& inputs) { inputs.targets = {}; }, "targets is missing");
  auto forward = forward_;
  forward.outputs.loss = {};
  expect_refused(forward, "loss is missing");
  auto at_once = at_once_;
  at_once.forward.outputs.loss = {};
  expect_refused(at_once, "loss is missing");
  auto backward = backward_;
  backward.grad_loss = {};
  expect_refused(backward, "grad_loss is missing");
}

TEST_F(LinearCrossEntropyErrors, WhatTheBackwardNeedsOfTheForward) {
  auto args = backward_;
  args.lse = {};
  expect_refused(args, "lse is missing, expected it as the forward wrote it");
  args = backward_;
  args.divisor = {};
  expect_refused(args, "divisor is missing, expected it as the forward wrote it (reduction is mean)");
  args = backward_;
  args.grad_entropy = ones({4});
  expect_refused(args, "entropy is missing, expected it as the forward wrote it (grad_entropy is given)");
  args = backward_;
  args.inputs.targets = ones({4, 3});
  expect_refused(args, "target_mass is missing, expected it as the forward wrote it (targets are soft)");
  args = backward_;
  args.inputs.class_weight = ones({3});
  expect_refused(args, "target_mass is missing, expected it as the forward wrote it (class_weight is given)");
}

TEST_F(LinearCrossEntropyErrors, TheShapeOfX) {
  expect_inputs_refused([&](Inputs& inputs) { inputs.x = ones({}); }, "x has no axis, expected [..., features]");
  expect_inputs_refused(
      [&](Inputs& inputs) {
        inputs.x = ones({4, 0});
      },
      "x has shape [4, 0], expected at least one feature");
  expect_inputs_refused(
      [&](Inputs& inputs) {
        inputs.x = ones({4, 2}, DType::int32);
      },
      "x has dtype int32, expected float32 or float64 or float16 or bfloat16 (integers are "
      "multiplied with nothing)");
}

TEST_F(LinearCrossEntropyErrors, TheWeight) {
  expect_inputs_refused(
      [&](Inputs& inputs) {
        inputs.weight = ones({3, 2}, DType::bfloat16);
      },
      "weight has dtype bfloat16, expected float32 (that of x (a product of two types would round "
      "one of them: convert it))");
  expect_inputs_refused(
      [&](Inputs& inputs) {
        inputs.weight = ones({3, 5});
      },
      "weight has shape [3, 5], expected [3, 2] ([classes, features of x])");
  expect_inputs_refused([&](Inputs& inputs) { inputs.weight = ones({6}); },
                        "weight has shape [6], expected [1, 2] ([classes, features of x])");
  expect_inputs_refused(
      [&](Inputs& inputs) {
        inputs.weight = ones({0, 2});
      },
      "weight has no classes, expected at least one");
  for (const Dims& strides : {Dims{4, 2}, Dims{1, 1}, Dims{0, 1}, Dims{-2, 1}, Dims{1, 2}}) {
    const std::string written = check::to_string(strides);
    expect_inputs_refused(
        [&](Inputs& inputs) {
          inputs.weight = strided({3, 2}, strides);
        },
        "weight has strides " + written +
            ", expected unit stride along one axis and at least the other's size along the other");
  }
}

TEST_F(LinearCrossEntropyErrors, TheTargets) {
  expect_inputs_refused([&](Inputs& inputs) { inputs.targets = ones({5}, DType::int32); },
                        "targets has shape [5], expected [4] (one per row of x [4, 2])");
  expect_inputs_refused([&](Inputs& inputs) { inputs.targets = ones({4}, DType::uint8); },
                        "targets has dtype uint8, expected int64 or int32 (classes; or a floating-point type for soft "
                        "targets)");
  expect_inputs_refused(
      [&](Inputs& inputs) {
        inputs.targets = ones({4, 2});
      },
      "targets has shape [4, 2], expected [4, 3] (soft targets: one distribution per row of x)");
  expect_inputs_refused(
      [&](Inputs& inputs) {
        inputs.targets = strided({4, 3}, {1, 4});
      },
      "targets are distributions with strides [1, 4], expected rows at one distance and classes "
      "with unit stride");
  expect_inputs_refused(
      [&](Inputs& inputs) {
        inputs.targets = ones({4, 3}, DType::bfloat16);
      },
      "targets has dtype bfloat16, expected float32 (soft targets: float32, or float64 where x is "
      "float64)");
}

TEST_F(LinearCrossEntropyErrors, WhatIsPerClass) {
  expect_inputs_refused([&](Inputs& inputs) { inputs.bias = ones({4}); },
                        "bias has shape [4], expected [3] (one per class of weight)");
  expect_inputs_refused([&](Inputs& inputs) { inputs.bias = strided({3}, {2}); },
                        "bias has shape [3] and strides [2], expected it to be contiguous");
  expect_inputs_refused([&](Inputs& inputs) { inputs.bias = ones({3}, DType::bfloat16); },
                        "bias has dtype bfloat16, expected float32 (that of x, or float32)");
  expect_inputs_refused([&](Inputs& inputs) { inputs.class_weight = ones({4}); },
                        "class_weight has shape [4], expected [3] (one per class of weight)");
}

TEST_F(LinearCrossEntropyErrors, Options) {
  expect_inputs_refused([](Inputs& inputs) { inputs.options.label_smoothing = 1.5; },
                        "label_smoothing is 1.5, expected 0 to 1");
  expect_inputs_refused([](Inputs& inputs) { inputs.options.scale = 0.0; },
                        "scale is 0, expected a positive number that float32 has");
  expect_inputs_refused([](Inputs& inputs) { inputs.options.softcap = -30.0; },
                        "softcap is -30, expected a positive number that float32 has, or 0 for none");
  expect_inputs_refused([](Inputs& inputs) { inputs.options.z_loss_weight = kNaN; },
                        "z_loss_weight is nan, expected 0 or a positive number that float32 has");
  expect_inputs_refused([](Inputs& inputs) { inputs.options.reduction = static_cast<Reduction>(7); },
                        "reduction is 7, expected one of enum Reduction");
}

TEST_F(LinearCrossEntropyErrors, TensorsOnAnotherDevice) {
  const auto on_gpu = [](TensorView view) {
    view.device = kCuda;
    return view;
  };
  expect_inputs_refused([&](Inputs& inputs) { inputs.weight = on_gpu(inputs.weight); },
                        "weight is on cuda:0, expected cpu (as x)");
  expect_inputs_refused([&](Inputs& inputs) { inputs.targets = on_gpu(inputs.targets); },
                        "targets is on cuda:0, expected cpu (as x)");
  expect_inputs_refused([&](Inputs& inputs) { inputs.bias = on_gpu(ones({3})); },
                        "bias is on cuda:0, expected cpu (as x)");
  expect_gradients_refused([&](Gradients& of) { of.grad_x = on_gpu(of.grad_x); },
                           "grad_x is on cuda:0, expected cpu (as x)");
  expect_gradients_refused([&](Gradients& of) { of.grad_weight = on_gpu(of.grad_weight); },
                           "grad_weight is on cuda:0, expected cpu (as x)");
}

TEST_F(LinearCrossEntropyErrors, OutputsOfTheForward) {
  auto args = forward_;
  args.outputs.lse = lse_.view({3});
  expect_refused(args, "lse has shape [3], expected [4] (one per row of x)");
  args = forward_;
  args.outputs.loss = loss_.view({4});
  expect_refused(args, "loss has shape [4], expected one element");
  args.inputs.options.reduction = Reduction::none;
  args.outputs.divisor = {};
  EXPECT_NO_THROW(linear_cross_entropy_forward_workspace_bytes(args));
  args.outputs.entropy = entropy_.view({4}, DType::float64);
  expect_refused(args, "entropy has dtype float64, expected float32 (float32, or float64 where x is float64)");
  args = forward_;
  args.outputs.argmax = argmax_.view({4}, DType::int32);
  expect_refused(args, "argmax has dtype int32, expected int64 (a class of each row)");
  args = forward_;
  args.inputs.options.reduction = Reduction::sum;
  expect_refused(args, "divisor is given, but only the mean divides: expected reduction mean, or no such argument");
  args.outputs.divisor = {};
  args.normalizer = ones({});
  expect_refused(args, "normalizer is given, but only the mean divides: expected reduction mean, or no such argument");
  args = forward_;
  args.normalizer = ones({2});
  expect_refused(args, "normalizer has shape [2], expected one element");
}

TEST_F(LinearCrossEntropyErrors, GradientsOfTheWrongKind) {
  expect_gradients_refused([&](Gradients& of) { of.grad_x = grad_x_.view({8}); },
                           "grad_x has shape [8], expected [4, 2] (that of x)");
  expect_gradients_refused(
      [&](Gradients& of) {
        of.grad_x = grad_x_.view({4, 2}, DType::bfloat16);
      },
      "grad_x has dtype bfloat16, expected float32 (that of x)");
  expect_gradients_refused(
      [&](Gradients& of) {
        of.grad_x = TensorView::strided(grad_x_.memory.data(), DType::float32, {4, 2}, {0, 1});
      },
      "grad_x has shape [4, 2] and strides [0, 1], so that elements share memory; expected an address for each, "
      "because it is written");
  expect_gradients_refused(
      [&](Gradients& of) {
        of.grad_weight = grad_weight_.view({2, 3});
      },
      "grad_weight has shape [2, 3], expected [3, 2] (that of weight)");
  expect_gradients_refused(
      [&](Gradients& of) {
        of.grad_weight = grad_weight_.view({3, 2}, DType::float64);
      },
      "grad_weight has dtype float64, expected float32 (that of weight, or that of the loss)");
  for (const Dims& strides : {Dims{1, 3}, Dims{4, 2}, Dims{1, 1}, Dims{-2, 1}}) {
    const std::string written = check::to_string(strides);
    expect_gradients_refused(
        [&](Gradients& of) {
          of.grad_weight = TensorView::strided(grad_weight_.memory.data(), DType::float32, {3, 2}, strides);
        },
        "grad_weight has strides " + written +
            ", expected features with unit stride, and classes at least as far apart");
  }
  expect_gradients_refused([&](Gradients& of) { of.grad_bias = grad_bias_.view({4}); },
                           "grad_bias has shape [4], expected [3] (one per class of weight)");
  expect_gradients_refused([&](Gradients& of) { of.grad_bias = grad_bias_.view({3}, DType::float16); },
                           "grad_bias has dtype float16, expected float32 (that of x, or that of the loss)");
}

TEST_F(LinearCrossEntropyErrors, UpstreamGradients) {
  auto args = backward_;
  args.grad_loss = ones({4});
  expect_refused(args, "grad_loss has shape [4], expected one element");
  args = backward_;
  args.inputs.options.reduction = Reduction::none;
  args.divisor = {};
  expect_refused(args, "grad_loss has shape [], expected [4] (one per row of x)");
  args = backward_;
  args.grad_loss = ones({}, DType::float16);
  expect_refused(args, "grad_loss has dtype float16, expected float32 (that of the loss, or of x)");
  args = backward_;
  args.grad_lse = ones({3});
  expect_refused(args, "grad_lse has shape [3], expected [4] (one per row of x)");
  args = backward_;
  args.lse = ones({4}, DType::float16);
  expect_refused(args, "lse has dtype float16, expected float32 (float32, or float64 where x is float64)");
  args.lse = ones({4, 2}, DType::float64);
  expect_refused(args, "lse has dtype float64, expected float32 (float32, or float64 where x is float64)");
}

TEST_F(LinearCrossEntropyErrors, OutputsHaveMemoryOfTheirOwn) {
  auto forward = forward_;
  forward.outputs.lse = ones({4});
  expect_refused(forward, "lse overlaps x, expected memory of its own");
  forward = forward_;
  forward.outputs.entropy = lse_.view({4});
  expect_refused(forward, "entropy overlaps lse, expected memory of its own");
  expect_gradients_refused(
      [&](Gradients& of) {
        of.grad_x = ones({4, 2});
      },
      "grad_x overlaps x, expected memory of its own");
  expect_gradients_refused(
      [&](Gradients& of) {
        of.grad_weight = grad_x_.view({3, 2});
      },
      "grad_weight overlaps grad_x, expected memory of its own");
  expect_gradients_refused([&](Gradients& of) { of.grad_bias = grad_weight_.view({3}); },
                           "grad_bias overlaps grad_weight, expected memory of its own");
}

TEST_F(LinearCrossEntropyErrors, RescalingNeedsOneFactor) {
  expect_message([&] { linear_cross_entropy_rescale({.gradients = gradients(), .grad_loss = {}}); },
                 "linear_cross_entropy_rescale: grad_loss is missing");
  expect_message([&] { linear_cross_entropy_rescale({.gradients = gradients(), .grad_loss = ones({4})}); },
                 "linear_cross_entropy_rescale: grad_loss has shape [4], expected one element");
  expect_nothing_written();
}

TEST_F(LinearCrossEntropyErrors, NothingIsRescaledWhereOneGradientIsRefused) {
  LinearCrossEntropyGradients spoilt = gradients();
  spoilt.grad_weight = grad_weight_.view({3, 2}, DType::int32);
  std::vector<float> two = {2.0f};
  const TensorView factor = TensorView::contiguous(two.data(), DType::float32, {});
  expect_message([&] { linear_cross_entropy_rescale({.gradients = spoilt, .grad_loss = factor}); },
                 "linear_cross_entropy_rescale: grad_weight has dtype int32, expected float32 or float64 or "
                 "float16 or bfloat16 (integers are no gradients)");
  spoilt = gradients();
  spoilt.grad_bias = grad_x_.view({3});
  expect_message([&] { linear_cross_entropy_rescale({.gradients = spoilt, .grad_loss = factor}); },
                 "linear_cross_entropy_rescale: grad_bias overlaps grad_x, expected memory of its own");
  spoilt = gradients();
  spoilt.accumulates = true;
  expect_message(
      [&] { linear_cross_entropy_rescale({.gradients = spoilt, .grad_loss = factor}); },
      "linear_cross_entropy_rescale: accumulates is set, expected gradients of one call, without what was there "
      "before");
  std::vector<double> wide = {2.0};
  const TensorView wide_factor = TensorView::contiguous(wide.data(), DType::float64, {});
  expect_message(
      [&] { linear_cross_entropy_rescale({.gradients = gradients(), .grad_loss = wide_factor}); },
      "linear_cross_entropy_rescale: grad_loss has dtype float64, expected float32 (float32, or float64 where "
      "grad_x is float64)");
  expect_nothing_written();
}

TEST_F(LinearCrossEntropyErrors, TheNumberOfThreads) {
  expect_message([&] { linear_cross_entropy_forward(forward_, {.threads = -1}); },
                 "linear_cross_entropy_forward: threads is -1, expected 0 (all) to 4096");
  expect_nothing_written();
}

TEST_F(LinearCrossEntropyErrors, AGpuThatIsNotThere) {
  LinearCrossEntropyForwardArgs args = forward_;
  for (TensorView* view : {&args.inputs.x, &args.inputs.weight, &args.inputs.targets, &args.outputs.loss,
                           &args.outputs.lse, &args.outputs.argmax, &args.outputs.entropy, &args.outputs.divisor}) {
    view->device = {DeviceType::cuda, 63};
  }
  const std::string start = "linear_cross_entropy_forward: the tensors are on cuda:63, but ";
  expect_message_begins<Unsupported>([&] { linear_cross_entropy_forward(args); }, start);
  expect_message_begins<Unsupported>([&] { linear_cross_entropy_forward_workspace_bytes(args); }, start);
  expect_nothing_written();
}

}  // namespace
}  // namespace eaves::testing
