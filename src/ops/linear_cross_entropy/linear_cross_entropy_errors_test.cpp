// Every message that refuses a call of linear_cross_entropy, and that a refused call writes nothing.
// linear_cross_entropy_edges_test.cpp has targets out of range, linear_cross_entropy_calls_test.cpp has workspaces.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/check.h"
#include "eaves/error.h"
#include "eaves/linear_cross_entropy.h"
#include "testing/refusals.h"

namespace eaves::testing {
namespace {

using Inputs = LinearCrossEntropyInputs;
using Gradients = LinearCrossEntropyGradients;
using Forward = LinearCrossEntropyForwardArgs;
using AtOnce = LinearCrossEntropyForwardBackwardArgs;
using Backward = LinearCrossEntropyBackwardArgs;
using Rescale = LinearCrossEntropyRescaleArgs;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

const std::string kPerRow = ", expected [4] (one per row of hidden)";
const std::string kResultDtype = ", expected float32 (float32, or float64 where hidden is float64)";
const std::string kOnlyTheMean = " is given, but only the mean divides by a number; expected reduction mean";

/// Arguments of a legal call of each kind, for a test to spoil one argument: four rows of two features, three classes.
class LinearCrossEntropyErrors : public ::testing::Test {
 protected:
  TensorView ones(const Dims& shape, DType dtype = DType::float32) {
    return TensorView::contiguous(ones_.data(), dtype, shape);
  }
  Inputs inputs() {
    return {.hidden = ones({4, 2}),
            .head = ones({3, 2}),
            .targets = TensorView::contiguous(targets_.data(), DType::int64, {4})};
  }
  Gradients gradients() {
    return {.grad_hidden = grad_hidden_.view({4, 2}),
            .grad_head = grad_head_.view({3, 2}),
            .grad_bias = grad_bias_.view({3})};
  }
  void expect_nothing_written() {
    for (const UnwrittenOutput* output :
         {&loss_, &lse_, &argmax_, &entropy_, &divisor_, &grad_hidden_, &grad_head_, &grad_bias_}) {
      output->expect_unwritten();
    }
  }

  /// All three calls refuse these inputs with the same message.
  void refuse_inputs(const std::vector<Refusal<Inputs>>& table) const {
    for (const Refusal<Inputs>& row : table) {
      forward_.refuses({{[&](Forward& a) { row.spoil(a.inputs); }, row.sentence}});
      at_once_.refuses({{[&](AtOnce& a) { row.spoil(a.forward.inputs); }, row.sentence}});
      backward_.refuses({{[&](Backward& a) { row.spoil(a.inputs); }, row.sentence}});
    }
  }
  void refuse_gradients(const std::vector<Refusal<Gradients>>& table) const {
    for (const Refusal<Gradients>& row : table) {
      at_once_.refuses({{[&](AtOnce& a) { row.spoil(a.gradients); }, row.sentence}});
      backward_.refuses({{[&](Backward& a) { row.spoil(a.gradients); }, row.sentence}});
    }
  }

  std::vector<std::int64_t> targets_ = {0, 1, 2, 0};
  std::vector<float> ones_ = std::vector<float>(64, 1.0f);
  UnwrittenOutput loss_{"loss"}, lse_{"lse"}, argmax_{"argmax"}, entropy_{"entropy"}, divisor_{"divisor"},
      grad_hidden_{"grad_hidden"}, grad_head_{"grad_head"}, grad_bias_{"grad_bias"};
  std::function<void()> unwritten_ = [this] { expect_nothing_written(); };

  EntryPoint<Forward> forward_ = {"linear_cross_entropy_forward",
                                  linear_cross_entropy_forward,
                                  linear_cross_entropy_forward_workspace_bytes,
                                  unwritten_,
                                  {.inputs = inputs(),
                                   .outputs = {.loss = loss_.view({}),
                                               .lse = lse_.view({4}),
                                               .argmax = argmax_.view({4}, DType::int64),
                                               .entropy = entropy_.view({4}),
                                               .divisor = divisor_.view({})}}};
  EntryPoint<AtOnce> at_once_ = {"linear_cross_entropy_forward_backward",
                                 linear_cross_entropy_forward_backward,
                                 linear_cross_entropy_forward_backward_workspace_bytes,
                                 unwritten_,
                                 {.forward = forward_.legal, .grad_loss = ones({}), .gradients = gradients()}};
  EntryPoint<Backward> backward_ = {
      "linear_cross_entropy_backward",
      linear_cross_entropy_backward,
      linear_cross_entropy_backward_workspace_bytes,
      unwritten_,
      {.grad_loss = ones({}), .inputs = inputs(), .lse = ones({4}), .divisor = ones({}), .gradients = gradients()}};
};

TEST_F(LinearCrossEntropyErrors, TheArgumentsThatTheseTestsSpoilAreLegal) {
  EXPECT_NO_THROW(linear_cross_entropy_forward(forward_.legal));
  EXPECT_NO_THROW(linear_cross_entropy_forward_backward(at_once_.legal));
  EXPECT_NO_THROW(linear_cross_entropy_backward(backward_.legal));
  EXPECT_NO_THROW(linear_cross_entropy_rescale({.gradients = gradients(), .grad_loss = ones({})}));
}

TEST_F(LinearCrossEntropyErrors, ASentenceHasTheNamesOfArgumentsInBackticks) {
  forward_.legal.inputs.bias = ones({4});
  try {
    linear_cross_entropy_forward(forward_.legal);
    FAIL() << "it was not refused";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.op(), "linear_cross_entropy_forward");
    EXPECT_EQ(error.argument(), "bias");
    EXPECT_EQ(error.sentence(), "`bias` has shape [4], expected [3] (one per class of `head`)");
    EXPECT_EQ(error.sentence_with([](const std::string& name) { return "the " + name; }),
              "the bias has shape [4], expected [3] (one per class of the head)");
  }
  EXPECT_EQ(InvalidArgument("--input: the file `hidden` is empty").argument(), "");
}

TEST_F(LinearCrossEntropyErrors, Inputs) {
  refuse_inputs({
      {&Inputs::hidden, missing(), "hidden is missing"},
      {&Inputs::hidden, ones({}), "hidden has no axis, expected [..., features]"},
      {&Inputs::hidden, ones({4, 0}), "hidden has shape [4, 0], expected at least one feature"},
      {&Inputs::hidden, of_dtype(DType::int32),
       "hidden has dtype int32, expected float32 or float64 or float16 or bfloat16 (hidden states are floating-point "
       "numbers)"},
      {&Inputs::head, missing(), "head is missing"},
      {&Inputs::head, of_dtype(DType::bfloat16),
       "head has dtype bfloat16, expected float32 (as hidden; convert one of them)"},
      {&Inputs::head, ones({3, 5}), "head has shape [3, 5], expected [3, 2] ([classes, features of hidden])"},
      {&Inputs::head, ones({6}), "head has shape [6], expected [1, 2] ([classes, features of hidden])"},
      {&Inputs::head, ones({0, 2}), "head has no classes, expected at least one"},
      {&Inputs::targets, missing(), "targets is missing"},
      {&Inputs::targets, ones({5}, DType::int32), "targets has shape [5], expected [4] (one per row of hidden [4, 2])"},
      {&Inputs::targets, ones({4}, DType::uint8),
       "targets has dtype uint8, expected int64 or int32 (classes; soft targets have a floating-point type)"},
      {&Inputs::targets, ones({4, 2}),
       "targets has shape [4, 2], expected [4, 3] (soft targets: one distribution per row of hidden)"},
      {&Inputs::targets, TensorView::strided(ones_.data(), DType::float32, {4, 3}, {1, 4}),
       "targets has probabilities with strides [1, 4], expected unit stride along the classes and one distance between "
       "rows"},
      {&Inputs::targets, ones({4, 3}, DType::bfloat16),
       "targets has dtype bfloat16, expected float32 (soft targets: float32, or float64 if hidden is float64)"},
      {&Inputs::bias, ones({4}), "bias has shape [4], expected [3] (one per class of head)"},
      {&Inputs::bias, TensorView::strided(ones_.data(), DType::float32, {3}, {2}),
       "bias has shape [3] and strides [2], expected a contiguous tensor"},
      {&Inputs::bias, ones({3}, DType::bfloat16), "bias has dtype bfloat16, expected float32 (as hidden, or float32)"},
      {&Inputs::class_weight, ones({4}), "class_weight has shape [4], expected [3] (one per class of head)"},
      {&Inputs::row_weight, ones({3}), "row_weight has shape [3]" + kPerRow},
      {&Inputs::row_weight, ones({4}, DType::float16), "row_weight has dtype float16" + kResultDtype},
      {&Inputs::head, on_device(kCuda), "head is on cuda:0, expected cpu (as hidden)"},
      {&Inputs::targets, on_device(kCuda), "targets is on cuda:0, expected cpu (as hidden)"},
      {[&](Inputs& inputs) {
         inputs.bias = ones({3});
         inputs.bias.device = kCuda;
       },
       "bias is on cuda:0, expected cpu (as hidden)"},
  });
  for (const Dims& strides : {Dims{4, 2}, Dims{1, 1}, Dims{0, 1}, Dims{-2, 1}, Dims{1, 2}}) {
    refuse_inputs(
        {{&Inputs::head, of_strides(strides),
          "head has strides " + check::to_string(strides) +
              ", expected unit stride along one axis, and along the other axis at least the size of the first"}});
  }
}

TEST_F(LinearCrossEntropyErrors, Options) {
  refuse_inputs({
      {[](Inputs& inputs) { inputs.options.label_smoothing = 1.5; }, "label_smoothing is 1.5, expected 0 to 1"},
      {[](Inputs& inputs) { inputs.options.scale = 0.0; },
       "scale is 0, expected a positive number in the range of float32"},
      {[](Inputs& inputs) { inputs.options.softcap = -30.0; },
       "softcap is -30, expected a positive number in the range of float32, or 0 for none"},
      {[](Inputs& inputs) { inputs.options.z_loss_weight = kNaN; },
       "z_loss_weight is nan, expected 0 or a positive number in the range of float32"},
      {[](Inputs& inputs) { inputs.options.reduction = static_cast<Reduction>(7); },
       "reduction is 7, expected one of enum Reduction"},
  });
}

TEST_F(LinearCrossEntropyErrors, WhatTheBackwardNeedsOfTheForward) {
  const std::string written = " is missing, expected the forward's output";
  backward_.refuses({
      {&Backward::lse, missing(), "lse" + written},
      {&Backward::divisor, missing(), "divisor" + written + ", because reduction is mean"},
      {&Backward::grad_entropy, ones({4}), "entropy" + written + ", because grad_entropy is given"},
      {[&](Backward& a) {
         a.inputs.targets = ones({4, 3});
       },
       "target_mass" + written + ", because the targets are soft"},
      {[&](Backward& a) { a.inputs.class_weight = ones({3}); },
       "target_mass" + written + ", because class_weight is given"},
  });
}

TEST_F(LinearCrossEntropyErrors, OutputsOfTheForward) {
  UnwrittenOutput mean_logit("mean_logit");
  at_once_.refuses({{[](AtOnce& a) { a.forward.outputs.loss = {}; }, "loss is missing"}});
  forward_.refuses({
      {[](Forward& a) { a.outputs.loss = {}; }, "loss is missing"},
      {[&](Forward& a) { a.outputs.lse = lse_.view({3}); }, "lse has shape [3]" + kPerRow},
      {[&](Forward& a) { a.outputs.loss = loss_.view({4}); }, "loss has shape [4], expected one element"},
      {[&](Forward& a) { a.outputs.entropy = entropy_.view({4}, DType::float64); },
       "entropy has dtype float64" + kResultDtype},
      {[&](Forward& a) { a.outputs.argmax = argmax_.view({4}, DType::int32); },
       "argmax has dtype int32, expected int64 (classes)"},
      {[](Forward& a) { a.inputs.options.reduction = Reduction::sum; }, "divisor" + kOnlyTheMean},
      {[&](Forward& a) {
         a.inputs.options.reduction = Reduction::sum;
         a.outputs.divisor = {};
         a.normalizer = ones({});
       },
       "normalizer" + kOnlyTheMean},
      {[&](Forward& a) { a.normalizer = ones({2}); }, "normalizer has shape [2], expected one element"},
      {[&](Forward& a) {
         a.outputs.mean_logit = mean_logit.view({4});
         a.inputs.targets = ones({4, 3});
       },
       "mean_logit is given, but soft targets, and class_weight beside label_smoothing, have no mean logit; leave it "
       "out"},
      {[&](Forward& a) { a.outputs.lse = ones({4}); }, overlapping("lse", "hidden")},
      {[&](Forward& a) { a.outputs.entropy = lse_.view({4}); }, overlapping("entropy", "lse")},
  });
  mean_logit.expect_unwritten();
  forward_.accepts([&](Forward& a) {
    a.inputs.options.reduction = Reduction::none;
    a.outputs.loss = loss_.view({4});
    a.outputs.divisor = {};
  });
}

TEST_F(LinearCrossEntropyErrors, GradientsOfTheWrongKind) {
  refuse_gradients({
      {&Gradients::grad_hidden, on_device(kCuda), "grad_hidden is on cuda:0, expected cpu (as hidden)"},
      {&Gradients::grad_hidden, grad_hidden_.view({8}), "grad_hidden has shape [8], expected [4, 2] (as hidden)"},
      {&Gradients::grad_hidden, of_dtype(DType::bfloat16),
       "grad_hidden has dtype bfloat16, expected float32 (as hidden)"},
      {&Gradients::grad_hidden, of_strides({0, 1}), sharing("grad_hidden has shape [4, 2] and strides [0, 1]")},
      {&Gradients::grad_head, on_device(kCuda), "grad_head is on cuda:0, expected cpu (as hidden)"},
      {&Gradients::grad_head, grad_head_.view({2, 3}), "grad_head has shape [2, 3], expected [3, 2] (as head)"},
      {&Gradients::grad_head, of_dtype(DType::float64),
       "grad_head has dtype float64, expected float32 (as head, or as the loss)"},
      {&Gradients::grad_bias, grad_bias_.view({4}), "grad_bias has shape [4], expected [3] (one per class of head)"},
      {&Gradients::grad_bias, of_dtype(DType::float16),
       "grad_bias has dtype float16, expected float32 (as hidden, or as the loss)"},
      {&Gradients::grad_hidden, ones({4, 2}), overlapping("grad_hidden", "hidden")},
      {&Gradients::grad_head, grad_hidden_.view({3, 2}), overlapping("grad_head", "grad_hidden")},
      {&Gradients::grad_bias, grad_head_.view({3}), overlapping("grad_bias", "grad_head")},
  });
  for (const Dims& strides : {Dims{1, 3}, Dims{4, 2}, Dims{1, 1}, Dims{-2, 1}}) {
    refuse_gradients(
        {{&Gradients::grad_head, of_strides(strides),
          "grad_head has strides " + check::to_string(strides) +
              ", expected unit stride along the features, and along the classes at least the number of features"}});
  }
}

TEST_F(LinearCrossEntropyErrors, UpstreamGradients) {
  backward_.refuses({
      {&Backward::grad_loss, missing(), "grad_loss is missing"},
      {&Backward::grad_loss, ones({4}), "grad_loss has shape [4], expected one element"},
      {[](Backward& a) {
         a.inputs.options.reduction = Reduction::none;
         a.divisor = {};
       },
       "grad_loss has shape []" + kPerRow},
      {&Backward::grad_loss, of_dtype(DType::float16),
       "grad_loss has dtype float16, expected float32 (as the loss, or hidden)"},
      {&Backward::grad_lse, ones({3}), "grad_lse has shape [3]" + kPerRow},
      {&Backward::lse, of_dtype(DType::float16), "lse has dtype float16" + kResultDtype},
      {&Backward::lse, ones({4, 2}, DType::float64), "lse has dtype float64" + kResultDtype},
  });
}

TEST_F(LinearCrossEntropyErrors, NothingIsRescaledWhereOneGradientIsRefused) {
  std::vector<double> two = {2.0};
  const Refusal<Rescale> table[] = {
      {&Rescale::grad_loss, missing(), "grad_loss is missing"},
      {&Rescale::grad_loss, ones({4}), "grad_loss has shape [4], expected one element"},
      {&Rescale::grad_loss, TensorView::contiguous(two.data(), DType::float64, {}),
       "grad_loss has dtype float64, expected float32 (float32, or float64 where grad_hidden is float64)"},
      {[](Rescale& a) { a.gradients.grad_head.dtype = DType::int32; },
       "grad_head has dtype int32, expected float32 or float64 or float16 or bfloat16 (gradients are floating-point "
       "numbers)"},
      {[&](Rescale& a) { a.gradients.grad_bias = grad_hidden_.view({3}); }, overlapping("grad_bias", "grad_hidden")},
      {[](Rescale& a) { a.gradients.accumulates = true; },
       "accumulates is set, but rescaling needs the gradients of one call alone; leave it out"},
  };
  for (const Refusal<Rescale>& row : table) {
    ones_[0] = 2.0f;  // the factor
    Rescale args{.gradients = gradients(), .grad_loss = ones({})};
    row.spoil(args);
    expect_message([&] { linear_cross_entropy_rescale(args); }, "linear_cross_entropy_rescale: " + row.sentence);
    expect_nothing_written();
  }
}

TEST_F(LinearCrossEntropyErrors, TheNumberOfThreads) { forward_.refuses_numbers_of_threads(); }

TEST_F(LinearCrossEntropyErrors, AGpuThatIsNotThere) {
  Forward args = forward_.legal;
  for (TensorView* view : {&args.inputs.hidden, &args.inputs.head, &args.inputs.targets, &args.outputs.loss,
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
