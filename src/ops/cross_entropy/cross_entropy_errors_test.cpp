// Every sentence with which cross_entropy refuses a call, and that nothing is written when it does. Targets out of
// range are in cross_entropy_edges_test.cpp.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "eaves/cross_entropy.h"
#include "eaves/error.h"
#include "eaves/system.h"
#include "testing/refusals.h"

namespace eaves::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// Arguments of a legal call of each kind, for a test to spoil one of them: four rows of three classes.
class CrossEntropyErrors : public ::testing::Test {
 protected:
  TensorView logits_view() { return TensorView::contiguous(logits_.data(), DType::float32, {4, 3}); }
  TensorView targets_view() { return TensorView::contiguous(targets_.data(), DType::int64, {4}); }
  TensorView weight_view() { return TensorView::contiguous(ones_.data(), DType::float32, {3}); }
  TensorView ones(const Dims& shape) { return TensorView::contiguous(ones_.data(), DType::float32, shape); }

  std::vector<float> logits_ = std::vector<float>(12, 1.0f);
  std::vector<std::int64_t> targets_ = {0, 1, 2, 0};
  std::vector<float> ones_ = std::vector<float>(144, 1.0f);
  UnwrittenOutput loss_{"loss"}, lse_{"lse"}, argmax_{"argmax"}, entropy_{"entropy"}, z_loss_{"z_loss"},
      target_mass_{"target_mass"}, divisor_{"divisor"}, grad_logits_{"grad_logits"}, statistics_{"statistics"};

  CrossEntropyForwardArgs forward_ = {.logits = logits_view(),
                                      .targets = targets_view(),
                                      .weight = weight_view(),
                                      .loss = loss_.view({}),
                                      .lse = lse_.view({4}),
                                      .argmax = argmax_.view({4}, DType::int64),
                                      .entropy = entropy_.view({4}),
                                      .z_loss = z_loss_.view({}),
                                      .target_mass = target_mass_.view({4}),
                                      .divisor = divisor_.view({})};
  CrossEntropyBackwardArgs backward_ = {.grad_loss = ones({}),
                                        .logits = logits_view(),
                                        .targets = targets_view(),
                                        .lse = ones({4}),
                                        .divisor = ones({}),
                                        .grad_logits = grad_logits_.view({4, 3})};
  CrossEntropyForwardBackwardArgs in_place_ = {.forward = forward_, .grad_loss = ones({})};
  CrossEntropyRescaleArgs rescale_ = {.grad_logits = grad_logits_.view({4, 3}), .grad_loss = ones({4})};
  CrossEntropyShardArgs shard_ = {.logits = logits_view(),
                                  .targets = targets_view(),
                                  .weight = weight_view(),
                                  .first_class = 0,
                                  .classes = 6,
                                  .statistics = statistics_.view({4, kCrossEntropyStatistics})};
  CrossEntropyMergeArgs merge_ = {.statistics = ones({2, 4, kCrossEntropyStatistics}),
                                  .targets = targets_view(),
                                  .classes = 6,
                                  .loss = loss_.view({}),
                                  .lse = lse_.view({4})};

  void expect_nothing_written() {
    for (const UnwrittenOutput* output :
         {&loss_, &lse_, &argmax_, &entropy_, &z_loss_, &target_mass_, &divisor_, &grad_logits_, &statistics_}) {
      output->expect_unwritten();
    }
    EXPECT_EQ(logits_, std::vector<float>(12, 1.0f)) << "logits was written";
  }

  void expect_refused(const CrossEntropyForwardArgs& args, const std::string& message) {
    expect_message([&] { cross_entropy_forward(args); }, message);
    expect_message([&] { cross_entropy_forward_workspace_bytes(args); }, message);
    expect_nothing_written();
  }
  void expect_refused(const CrossEntropyBackwardArgs& args, const std::string& message) {
    expect_message([&] { cross_entropy_backward(args); }, message);
    expect_message([&] { cross_entropy_backward_workspace_bytes(args); }, message);
    expect_nothing_written();
  }
  void expect_refused(const CrossEntropyForwardBackwardArgs& args, const std::string& message) {
    expect_message([&] { cross_entropy_forward_backward(args); }, message);
    expect_message([&] { cross_entropy_forward_backward_workspace_bytes(args); }, message);
    expect_nothing_written();
  }
  void expect_refused(const CrossEntropyRescaleArgs& args, const std::string& message) {
    expect_message([&] { cross_entropy_rescale(args); }, message);
    expect_message([&] { cross_entropy_rescale_workspace_bytes(args); }, message);
    expect_nothing_written();
  }
  void expect_refused(const CrossEntropyShardArgs& args, const std::string& message) {
    expect_message([&] { cross_entropy_shard_forward(args); }, message);
    expect_message([&] { cross_entropy_shard_forward_workspace_bytes(args); }, message);
    expect_nothing_written();
  }
  void expect_refused(const CrossEntropyMergeArgs& args, const std::string& message) {
    expect_message([&] { cross_entropy_merge(args); }, message);
    expect_message([&] { cross_entropy_merge_workspace_bytes(args); }, message);
    expect_nothing_written();
  }
};

TEST_F(CrossEntropyErrors, TheArgumentsThatTheseTestsSpoilAreLegal) {
  EXPECT_NO_THROW(cross_entropy_forward(forward_));
  EXPECT_NO_THROW(cross_entropy_backward(backward_));
  EXPECT_NO_THROW(cross_entropy_shard_forward(shard_));
  EXPECT_NO_THROW(cross_entropy_merge(merge_));
  EXPECT_NO_THROW(cross_entropy_rescale(rescale_));
  EXPECT_NO_THROW(cross_entropy_forward_backward(in_place_));
}

TEST_F(CrossEntropyErrors, WeightsOfRows) {
  const auto expect_all_refused = [&](const TensorView& row_weight, const std::string& what) {
    auto forward = forward_;
    forward.row_weight = row_weight;
    expect_refused(forward, "cross_entropy_forward: row_weight " + what);
    auto backward = backward_;
    backward.row_weight = row_weight;
    expect_refused(backward, "cross_entropy_backward: row_weight " + what);
    auto in_place = in_place_;
    in_place.forward.row_weight = row_weight;
    expect_refused(in_place, "cross_entropy_forward_backward: row_weight " + what);
    auto merge = merge_;
    merge.row_weight = row_weight;
    expect_message([&] { cross_entropy_merge(merge); }, "cross_entropy_merge: row_weight " + what);
  };
  expect_all_refused(ones({3}), "has shape [3], expected [4] (one per row of logits)");
  expect_all_refused(TensorView::contiguous(ones_.data(), DType::bfloat16, {4}),
                     "has dtype bfloat16, expected float32 (float32, or float64 where logits is float64)");
  expect_all_refused(TensorView::strided(ones_.data(), DType::float32, {4}, {2}),
                     "has shape [4] and strides [2], expected it to be contiguous");
}

TEST_F(CrossEntropyErrors, AMeanLogitWhereTheSumHasFactors) {
  UnwrittenOutput mean_logit("mean_logit");
  const std::string what =
      "mean_logit is given with soft targets, or with weights and label_smoothing: there is none with those";
  auto forward = forward_;
  forward.mean_logit = mean_logit.view({4});
  EXPECT_NO_THROW(cross_entropy_forward_workspace_bytes(forward));
  forward.options.label_smoothing = 0.1;
  expect_refused(forward, "cross_entropy_forward: " + what);
  forward.weight = {};
  EXPECT_NO_THROW(cross_entropy_forward_workspace_bytes(forward));
  forward.targets = ones({4, 3});
  expect_refused(forward, "cross_entropy_forward: " + what);
  auto merge = merge_;
  merge.mean_logit = mean_logit.view({4});
  merge.has_weight = true;
  merge.options.label_smoothing = 0.1;
  expect_refused(merge, "cross_entropy_merge: " + what);
  mean_logit.expect_unwritten();
}

TEST_F(CrossEntropyErrors, MissingTensors) {
  auto forward = forward_;
  forward.logits = {};
  expect_refused(forward, "cross_entropy_forward: logits is missing");
  forward = forward_;
  forward.targets = {};
  expect_refused(forward, "cross_entropy_forward: targets is missing");
  forward = forward_;
  forward.loss = {};
  expect_refused(forward, "cross_entropy_forward: loss is missing");
  auto backward = backward_;
  backward.logits = {};
  expect_refused(backward, "cross_entropy_backward: logits is missing");
  backward = backward_;
  backward.targets = {};
  expect_refused(backward, "cross_entropy_backward: targets is missing");
  backward = backward_;
  backward.grad_loss = {};
  expect_refused(backward, "cross_entropy_backward: grad_loss is missing");
  backward = backward_;
  backward.grad_logits = {};
  expect_refused(backward, "cross_entropy_backward: grad_logits is missing");
  auto in_place = in_place_;
  in_place.forward.logits = {};
  expect_refused(in_place, "cross_entropy_forward_backward: logits is missing");
  in_place = in_place_;
  in_place.forward.loss = {};
  expect_refused(in_place, "cross_entropy_forward_backward: loss is missing");
  auto shard = shard_;
  shard.logits = {};
  expect_refused(shard, "cross_entropy_shard_forward: logits is missing");
  shard = shard_;
  shard.statistics = {};
  expect_refused(shard, "cross_entropy_shard_forward: statistics is missing");
  auto merge = merge_;
  merge.statistics = {};
  expect_refused(merge, "cross_entropy_merge: statistics is missing");
  merge = merge_;
  merge.targets = {};
  expect_refused(merge, "cross_entropy_merge: targets is missing");
  merge = merge_;
  merge.loss = {};
  expect_refused(merge, "cross_entropy_merge: loss is missing");
}

TEST_F(CrossEntropyErrors, WhatTheBackwardNeedsOfTheForward) {
  auto args = backward_;
  args.lse = {};
  expect_refused(args, "cross_entropy_backward: lse is missing, expected it as the forward wrote it");
  args = backward_;
  args.divisor = {};
  expect_refused(args,
                 "cross_entropy_backward: divisor is missing, expected it as the forward wrote it (reduction is mean)");
  args = backward_;
  args.grad_entropy = ones({4});
  expect_refused(args,
                 "cross_entropy_backward: entropy is missing, expected it as the forward wrote it (grad_entropy is "
                 "given)");
  args = backward_;
  args.targets = ones({4, 3});
  expect_refused(args,
                 "cross_entropy_backward: target_mass is missing, expected it as the forward wrote it (targets are "
                 "soft)");
  args = backward_;
  args.weight = weight_view();
  args.options.label_smoothing = 0.1;
  expect_refused(args,
                 "cross_entropy_backward: target_mass is missing, expected it as the forward wrote it (weight and "
                 "label_smoothing are given)");
  args.options.label_smoothing = 0.0;
  EXPECT_NO_THROW(cross_entropy_backward_workspace_bytes(args));
  args.classes = 6;
  expect_refused(args,
                 "cross_entropy_backward: target_mass is missing, expected it as the merge wrote it (weight is given, "
                 "and logits has a part of the classes)");
  args.weight = {};
  args.options.label_smoothing = 0.1;
  EXPECT_NO_THROW(cross_entropy_backward_workspace_bytes(args));
}

TEST_F(CrossEntropyErrors, TheClassAxis) {
  auto forward = forward_;
  forward.class_axis = 2;
  expect_refused(forward, "cross_entropy_forward: class_axis is 2, expected -2 to 1 (logits has 2 axes)");
  forward.class_axis = -3;
  expect_refused(forward, "cross_entropy_forward: class_axis is -3, expected -2 to 1 (logits has 2 axes)");
  forward = forward_;
  forward.logits = ones({});
  expect_refused(forward, "cross_entropy_forward: logits has no axes, expected at least one");
  auto backward = backward_;
  backward.class_axis = 7;
  expect_refused(backward, "cross_entropy_backward: class_axis is 7, expected -2 to 1 (logits has 2 axes)");
  auto in_place = in_place_;
  in_place.forward.class_axis = 7;
  expect_refused(in_place, "cross_entropy_forward_backward: class_axis is 7, expected -2 to 1 (logits has 2 axes)");
  auto shard = shard_;
  shard.class_axis = 7;
  expect_refused(shard, "cross_entropy_shard_forward: class_axis is 7, expected -2 to 1 (logits has 2 axes)");
}

TEST_F(CrossEntropyErrors, Options) {
  struct Case {
    CrossEntropyOptions options;
    const char* message;
  };
  const Case cases[] = {
      {{.label_smoothing = 1.5}, "label_smoothing is 1.5, expected 0 to 1"},
      {{.label_smoothing = -0.25}, "label_smoothing is -0.25, expected 0 to 1"},
      {{.label_smoothing = kNaN}, "label_smoothing is nan, expected 0 to 1"},
      {{.scale = 0.0}, "scale is 0, expected a positive number that float32 has"},
      {{.scale = -1.0}, "scale is -1, expected a positive number that float32 has"},
      {{.scale = kNaN}, "scale is nan, expected a positive number that float32 has"},
      {{.scale = kInfinity}, "scale is inf, expected a positive number that float32 has"},
      {{.softcap = -30.0}, "softcap is -30, expected a positive number that float32 has, or 0 for none"},
      {{.softcap = kNaN}, "softcap is nan, expected a positive number that float32 has, or 0 for none"},
      {{.softcap = kInfinity}, "softcap is inf, expected a positive number that float32 has, or 0 for none"},
      {{.scale = 1e300}, "scale is 1e+300, expected a positive number that float32 has"},
      {{.softcap = 1e-50}, "softcap is 1e-50, expected a positive number that float32 has, or 0 for none"},
      {{.z_loss_weight = 1e300}, "z_loss_weight is 1e+300, expected 0 or a positive number that float32 has"},
      {{.z_loss_weight = -1e-4}, "z_loss_weight is -0.0001, expected 0 or a positive number that float32 has"},
      {{.z_loss_weight = kNaN}, "z_loss_weight is nan, expected 0 or a positive number that float32 has"},
      {{.z_loss_weight = kInfinity}, "z_loss_weight is inf, expected 0 or a positive number that float32 has"},
      {{.reduction = static_cast<Reduction>(7)}, "reduction is 7, expected one of enum Reduction"},
  };
  for (const Case& c : cases) {
    const auto spoilt = [&](auto args) {
      args.options = c.options;
      return args;
    };
    expect_refused(spoilt(forward_), std::string("cross_entropy_forward: ") + c.message);
    expect_refused(spoilt(backward_), std::string("cross_entropy_backward: ") + c.message);
    auto in_place = in_place_;
    in_place.forward.options = c.options;
    expect_refused(in_place, std::string("cross_entropy_forward_backward: ") + c.message);
    expect_refused(spoilt(shard_), std::string("cross_entropy_shard_forward: ") + c.message);
    expect_refused(spoilt(merge_), std::string("cross_entropy_merge: ") + c.message);
  }
}

TEST_F(CrossEntropyErrors, ShapesOfInputs) {
  auto args = forward_;
  args.targets.shape = {3};
  expect_refused(args, "cross_entropy_forward: targets has shape [3], expected [4] (one per row of logits [4, 3])");
  args = forward_;
  args.targets = ones({4});
  expect_refused(args, "cross_entropy_forward: targets has shape [4], expected [4, 3] (soft targets: that of logits)");
  args = forward_;
  args.weight = ones({4});
  expect_refused(args, "cross_entropy_forward: weight has shape [4], expected [3] (one per class of logits)");
  args = forward_;
  args.normalizer = ones({2});
  expect_refused(args, "cross_entropy_forward: normalizer has shape [2], expected one element");
  auto backward = backward_;
  backward.grad_loss = ones({4});
  expect_refused(backward, "cross_entropy_backward: grad_loss has shape [4], expected one element");
  backward.options.reduction = Reduction::none;
  backward.divisor = {};
  backward.grad_loss = ones({});
  expect_refused(backward, "cross_entropy_backward: grad_loss has shape [], expected [4] (one per row of logits)");
  backward = backward_;
  backward.grad_logits = grad_logits_.view({3, 4});
  expect_refused(backward, "cross_entropy_backward: grad_logits has shape [3, 4], expected [4, 3] (that of logits)");
  for (const auto& [name, member] :
       {std::pair("grad_lse", &CrossEntropyBackwardArgs::grad_lse),
        std::pair("grad_entropy", &CrossEntropyBackwardArgs::grad_entropy),
        std::pair("lse", &CrossEntropyBackwardArgs::lse), std::pair("entropy", &CrossEntropyBackwardArgs::entropy),
        std::pair("target_mass", &CrossEntropyBackwardArgs::target_mass)}) {
    backward = backward_;
    backward.entropy = ones({4});
    backward.*member = ones({5});
    expect_refused(backward, std::string("cross_entropy_backward: ") + name +
                                 " has shape [5], expected [4] (one per row of logits)");
  }
  backward = backward_;
  backward.divisor = ones({4});
  expect_refused(backward, "cross_entropy_backward: divisor has shape [4], expected one element");
}

TEST_F(CrossEntropyErrors, RowsWithTargetsAndNoClasses) {
  const std::string expected = ": logits has shape [4, 0], expected at least one class";
  const TensorView empty = TensorView::contiguous(logits_.data(), DType::float32, {4, 0});
  targets_.assign(4, -100);  // nothing looks at them
  auto forward = forward_;
  forward.logits = empty;
  forward.weight = {};
  expect_refused(forward, "cross_entropy_forward" + expected);
  auto backward = backward_;
  backward.logits = empty;
  backward.grad_logits = grad_logits_.view({4, 0});
  expect_refused(backward, "cross_entropy_backward" + expected);
  auto in_place = in_place_;
  in_place.forward = forward;
  expect_refused(in_place, "cross_entropy_forward_backward" + expected);
}

TEST_F(CrossEntropyErrors, ShapesOfOutputs) {
  const std::pair<const char*, TensorView CrossEntropyForwardArgs::*> per_row[] = {
      {"lse", &CrossEntropyForwardArgs::lse},
      {"argmax", &CrossEntropyForwardArgs::argmax},
      {"entropy", &CrossEntropyForwardArgs::entropy},
      {"target_mass", &CrossEntropyForwardArgs::target_mass}};
  for (const auto& [name, member] : per_row) {
    auto args = forward_;
    (args.*member).shape = {4, 1};
    (args.*member).strides = {1, 1};
    expect_refused(args, std::string("cross_entropy_forward: ") + name +
                             " has shape [4, 1], expected [4] (one per row of logits)");
    auto in_place = in_place_;
    in_place.forward = args;
    expect_refused(in_place, std::string("cross_entropy_forward_backward: ") + name +
                                 " has shape [4, 1], expected [4] (one per row of logits)");
  }
  const std::pair<const char*, TensorView CrossEntropyForwardArgs::*> losses[] = {
      {"loss", &CrossEntropyForwardArgs::loss}, {"z_loss", &CrossEntropyForwardArgs::z_loss}};
  for (const auto& [name, member] : losses) {
    auto args = forward_;
    args.*member = (name == std::string("loss") ? loss_ : z_loss_).view({4});
    expect_refused(args, std::string("cross_entropy_forward: ") + name + " has shape [4], expected one element");
    args = forward_;
    args.options.reduction = Reduction::none;
    args.divisor = {};
    args.loss = loss_.view({4});
    args.z_loss = z_loss_.view({4});
    args.*member = (name == std::string("loss") ? loss_ : z_loss_).view({});
    expect_refused(
        args, std::string("cross_entropy_forward: ") + name + " has shape [], expected [4] (one per row of logits)");
  }
  auto args = forward_;
  args.divisor = divisor_.view({4});
  expect_refused(args, "cross_entropy_forward: divisor has shape [4], expected one element");
}

TEST_F(CrossEntropyErrors, WhatOnlyTheMeanHas) {
  for (const Reduction reduction : {Reduction::none, Reduction::sum}) {
    const std::string why = " is given, but only the mean divides: expected reduction mean, or no such argument";
    const bool is_sum = reduction == Reduction::sum;
    auto args = forward_;
    args.options.reduction = reduction;
    args.loss = loss_.view(is_sum ? Dims{} : Dims{4});
    args.z_loss = z_loss_.view(is_sum ? Dims{} : Dims{4});
    expect_refused(args, "cross_entropy_forward: divisor" + why);
    args.normalizer = ones({});
    expect_refused(args, "cross_entropy_forward: normalizer" + why);
    auto backward = backward_;
    backward.options.reduction = reduction;
    backward.grad_loss = ones(is_sum ? Dims{} : Dims{4});
    expect_refused(backward, "cross_entropy_backward: divisor" + why);
    auto merge = merge_;
    merge.options.reduction = reduction;
    merge.loss = loss_.view(is_sum ? Dims{} : Dims{4});
    merge.normalizer = ones({});
    expect_refused(merge, "cross_entropy_merge: normalizer" + why);
  }
}

TEST_F(CrossEntropyErrors, Dtypes) {
  const char* result = " (float32, or float64 where logits is float64)";
  auto args = forward_;
  args.logits = TensorView::contiguous(targets_.data(), DType::int64, {4, 1});
  expect_refused(args,
                 "cross_entropy_forward: logits has dtype int64, expected float32 or float64 or float16 or bfloat16 "
                 "(integers are no logits)");
  args = forward_;
  args.targets.dtype = DType::int16;
  expect_refused(args,
                 "cross_entropy_forward: targets has dtype int16, expected int64 or int32 (classes; or a "
                 "floating-point type for soft targets)");
  args = forward_;
  args.targets = TensorView::contiguous(ones_.data(), DType::bfloat16, {4, 3});
  expect_refused(args,
                 "cross_entropy_forward: targets has dtype bfloat16, expected float32 (soft targets: that of logits, "
                 "or float32)");
  args = forward_;
  args.weight.dtype = DType::float16;
  expect_refused(args,
                 "cross_entropy_forward: weight has dtype float16, expected float32 (that of logits, or float32)");
  args = forward_;
  args.normalizer = ones({});
  args.normalizer.dtype = DType::bfloat16;
  expect_refused(args, std::string("cross_entropy_forward: normalizer has dtype bfloat16, expected float32") + result);
  args = forward_;
  args.argmax.dtype = DType::int32;
  expect_refused(args, "cross_entropy_forward: argmax has dtype int32, expected int64 (a class of each row)");
  const std::pair<const char*, TensorView CrossEntropyForwardArgs::*> outputs[] = {
      {"loss", &CrossEntropyForwardArgs::loss},       {"lse", &CrossEntropyForwardArgs::lse},
      {"entropy", &CrossEntropyForwardArgs::entropy}, {"z_loss", &CrossEntropyForwardArgs::z_loss},
      {"divisor", &CrossEntropyForwardArgs::divisor}, {"target_mass", &CrossEntropyForwardArgs::target_mass}};
  for (const auto& [name, member] : outputs) {
    args = forward_;
    (args.*member).dtype = DType::bfloat16;
    expect_refused(args,
                   std::string("cross_entropy_forward: ") + name + " has dtype bfloat16, expected float32" + result);
  }
  auto backward = backward_;
  backward.grad_loss.dtype = DType::float16;
  expect_refused(backward,
                 "cross_entropy_backward: grad_loss has dtype float16, expected float32 (that of the loss, or of "
                 "logits)");
  backward = backward_;
  backward.grad_logits.dtype = DType::bfloat16;
  expect_refused(backward, "cross_entropy_backward: grad_logits has dtype bfloat16, expected float32 (that of logits)");
  backward = backward_;
  backward.lse.dtype = DType::float16;
  expect_refused(backward, std::string("cross_entropy_backward: lse has dtype float16, expected float32") + result);
  backward = backward_;
  backward.grad_lse = ones({4});
  backward.grad_lse.dtype = DType::bfloat16;
  expect_refused(backward,
                 std::string("cross_entropy_backward: grad_lse has dtype bfloat16, expected float32") + result);
  auto shard = shard_;
  shard.targets = ones({4, 3});
  shard.targets.dtype = DType::float64;
  expect_refused(shard,
                 "cross_entropy_shard_forward: targets has dtype float64, expected float32 (soft targets: that of "
                 "logits, or float32)");
  shard = shard_;
  shard.statistics.dtype = DType::bfloat16;
  expect_refused(shard,
                 std::string("cross_entropy_shard_forward: statistics has dtype bfloat16, expected float32") + result);
  auto merge = merge_;
  merge.statistics.dtype = DType::float16;
  expect_refused(merge,
                 "cross_entropy_merge: statistics has dtype float16, expected float32 or float64 (as the shards wrote "
                 "them)");
  merge = merge_;
  merge.targets.dtype = DType::uint8;
  expect_refused(merge, "cross_entropy_merge: targets has dtype uint8, expected int64 or int32 (classes)");
}

TEST_F(CrossEntropyErrors, Devices) {
  const std::pair<const char*, TensorView CrossEntropyForwardArgs::*> of_forward[] = {
      {"targets", &CrossEntropyForwardArgs::targets}, {"weight", &CrossEntropyForwardArgs::weight},
      {"loss", &CrossEntropyForwardArgs::loss},       {"lse", &CrossEntropyForwardArgs::lse},
      {"argmax", &CrossEntropyForwardArgs::argmax},   {"divisor", &CrossEntropyForwardArgs::divisor}};
  for (const auto& [name, member] : of_forward) {
    auto args = forward_;
    (args.*member).device = kCuda;
    expect_refused(args, std::string("cross_entropy_forward: ") + name + " is on cuda:0, expected cpu (as logits)");
  }
  const std::pair<const char*, TensorView CrossEntropyBackwardArgs::*> of_backward[] = {
      {"grad_loss", &CrossEntropyBackwardArgs::grad_loss},
      {"targets", &CrossEntropyBackwardArgs::targets},
      {"lse", &CrossEntropyBackwardArgs::lse},
      {"divisor", &CrossEntropyBackwardArgs::divisor},
      {"grad_logits", &CrossEntropyBackwardArgs::grad_logits}};
  for (const auto& [name, member] : of_backward) {
    auto args = backward_;
    (args.*member).device = kCuda;
    expect_refused(args, std::string("cross_entropy_backward: ") + name + " is on cuda:0, expected cpu (as logits)");
  }
  auto shard = shard_;
  shard.statistics.device = kCuda;
  expect_refused(shard, "cross_entropy_shard_forward: statistics is on cuda:0, expected cpu (as logits)");
  auto merge = merge_;
  merge.targets.device = kCuda;
  expect_refused(merge, "cross_entropy_merge: targets is on cuda:0, expected cpu (as statistics)");
}

TEST_F(CrossEntropyErrors, AGpuThatIsNotThere) {
  auto args = forward_;
  for (TensorView* view : {&args.logits, &args.targets, &args.weight, &args.loss, &args.lse, &args.argmax,
                           &args.entropy, &args.z_loss, &args.target_mass, &args.divisor}) {
    view->device = {DeviceType::cuda, 63};
  }
  expect_message_begins<Unsupported>([&] { cross_entropy_forward(args); },
                                     "cross_entropy_forward: the tensors are on cuda:63, but ");
  expect_nothing_written();
}

TEST_F(CrossEntropyErrors, Memory) {
  auto args = forward_;
  args.logits.data = nullptr;
  expect_refused(args, "cross_entropy_forward: logits has shape [4, 3] but no memory (data is null)");
  args = forward_;
  args.logits.data = reinterpret_cast<char*>(logits_.data()) + 2;
  expect_refused(args,
                 "cross_entropy_forward: logits is not aligned to its elements, expected an address divisible by 4 for "
                 "float32");
  args = forward_;
  args.logits.strides = {3};
  expect_refused(args, "cross_entropy_forward: logits has shape [4, 3] and strides [3], expected one stride per axis");
  args = forward_;
  args.weight.strides = {2};
  expect_refused(args, "cross_entropy_forward: weight has shape [3] and strides [2], expected it to be contiguous");
  for (const auto& [name, member] :
       {std::pair("lse", &CrossEntropyForwardArgs::lse), std::pair("argmax", &CrossEntropyForwardArgs::argmax),
        std::pair("entropy", &CrossEntropyForwardArgs::entropy),
        std::pair("target_mass", &CrossEntropyForwardArgs::target_mass)}) {
    args = forward_;
    (args.*member).strides = {2};
    expect_refused(args, std::string("cross_entropy_forward: ") + name +
                             " has shape [4] and strides [2], expected it to be contiguous");
  }
  auto backward = backward_;
  backward.lse.strides = {0};
  expect_refused(backward, "cross_entropy_backward: lse has shape [4] and strides [0], expected it to be contiguous");
  auto shard = shard_;
  shard.statistics.strides = {1, 4};
  expect_refused(shard,
                 "cross_entropy_shard_forward: statistics has shape [4, 10] and strides [1, 4], expected it to be "
                 "contiguous");
  auto merge = merge_;
  merge.statistics.strides = {10, 20, 1};
  expect_refused(merge,
                 "cross_entropy_merge: statistics has shape [2, 4, 10] and strides [10, 20, 1], expected it to be "
                 "contiguous");
}

TEST_F(CrossEntropyErrors, AViewPutTogetherByHand) {
  auto args = forward_;
  args.lse.is_present = false;
  expect_refused(args,
                 "cross_entropy_forward: lse has data but counts as missing, expected a view made by contiguous() or "
                 "strided()");
  args = forward_;
  args.weight.is_present = false;
  expect_refused(args,
                 "cross_entropy_forward: weight has data but counts as missing, expected a view made by contiguous() "
                 "or strided()");
  auto backward = backward_;
  backward.grad_lse = ones({4});
  backward.grad_lse.is_present = false;
  expect_refused(backward,
                 "cross_entropy_backward: grad_lse has data but counts as missing, expected a view made by "
                 "contiguous() or strided()");
  args = forward_;
  args.normalizer = ones({});
  args.normalizer.is_present = false;
  expect_refused(args,
                 "cross_entropy_forward: normalizer has data but counts as missing, expected a view made by "
                 "contiguous() or strided()");
  auto in_place = in_place_;
  in_place.grad_loss.is_present = false;
  expect_refused(in_place,
                 "cross_entropy_forward_backward: grad_loss has data but counts as missing, expected a view made by "
                 "contiguous() or strided()");
}

TEST_F(CrossEntropyErrors, OutputsThatShareMemory) {
  const auto overlapping = [](const char* op, const char* name, const char* with) {
    return std::string(op) + ": " + name + " overlaps " + with + ", expected memory of its own";
  };
  auto args = forward_;
  args.lse = TensorView::contiguous(logits_.data(), DType::float32, {4});
  expect_refused(args, overlapping("cross_entropy_forward", "lse", "logits"));
  args = forward_;
  args.entropy = args.lse;
  expect_refused(args, overlapping("cross_entropy_forward", "entropy", "lse"));
  args = forward_;
  args.loss = TensorView::contiguous(targets_.data(), DType::float32, {});
  expect_refused(args, overlapping("cross_entropy_forward", "loss", "targets"));
  args = forward_;
  args.z_loss = args.loss;
  expect_refused(args, overlapping("cross_entropy_forward", "z_loss", "loss"));
  args = forward_;
  args.divisor = ones({});
  args.normalizer = ones({});
  expect_refused(args, overlapping("cross_entropy_forward", "divisor", "weight"));
  args.weight = {};
  expect_refused(args, overlapping("cross_entropy_forward", "divisor", "normalizer"));

  auto backward = backward_;
  backward.grad_logits.strides = {2, 1};
  expect_refused(backward,
                 "cross_entropy_backward: grad_logits has shape [4, 3] and strides [2, 1], so that elements share "
                 "memory; expected an address for each, because it is written");
  backward = backward_;
  backward.grad_logits = ones({4, 3});
  expect_refused(backward, overlapping("cross_entropy_backward", "grad_logits", "grad_loss"));
  backward.grad_loss = grad_logits_.view({});
  expect_refused(backward, overlapping("cross_entropy_backward", "grad_logits", "lse"));
  // The logits themselves, but not quite.
  backward = backward_;
  backward.logits.strides = {2, 1};
  backward.grad_logits = logits_view();
  expect_refused(backward, overlapping("cross_entropy_backward", "grad_logits", "logits"));
  // In place, over soft targets.
  backward = backward_;
  backward.target_mass = ones({4});
  backward.grad_logits = backward.targets = logits_view();
  expect_refused(backward, overlapping("cross_entropy_backward", "logits", "targets"));
  // In place, over a per-row tensor.
  backward = backward_;
  backward.grad_logits = logits_view();
  backward.lse = TensorView::contiguous(logits_.data() + 5, DType::float32, {4});
  expect_refused(backward, overlapping("cross_entropy_backward", "logits", "lse"));

  auto in_place = in_place_;
  in_place.forward.logits.strides = {0, 1};
  expect_refused(in_place,
                 "cross_entropy_forward_backward: logits has shape [4, 3] and strides [0, 1], so that elements share "
                 "memory; expected an address for each, because it is written");
  in_place = in_place_;
  in_place.forward.weight = TensorView::contiguous(logits_.data(), DType::float32, {3});
  expect_refused(in_place, overlapping("cross_entropy_forward_backward", "logits", "weight"));
  in_place = in_place_;
  in_place.grad_loss = TensorView::contiguous(logits_.data(), DType::float32, {});
  expect_refused(in_place, overlapping("cross_entropy_forward_backward", "logits", "grad_loss"));
  in_place = in_place_;
  in_place.forward.lse = TensorView::contiguous(logits_.data(), DType::float32, {4});
  expect_refused(in_place, overlapping("cross_entropy_forward_backward", "lse", "logits"));
  in_place = in_place_;
  in_place.forward.normalizer = TensorView::contiguous(logits_.data(), DType::float32, {});
  expect_refused(in_place, overlapping("cross_entropy_forward_backward", "logits", "normalizer"));

  auto shard = shard_;
  shard.logits = statistics_.view({4, 3});
  expect_refused(shard, overlapping("cross_entropy_shard_forward", "statistics", "logits"));
  auto merge = merge_;
  merge.lse = ones({4});
  expect_refused(merge, overlapping("cross_entropy_merge", "lse", "statistics"));
}

/// Legal calls with a narrower gradient, for a test to spoil: rows of three classes, four float32 apart.
class CrossEntropyNarrowErrors : public CrossEntropyErrors {
 protected:
  CrossEntropyNarrowErrors() {
    narrow_backward_.logits = narrow_in_place_.forward.logits = wide_view({4, 1});
    narrow_backward_.grad_logits = narrow_in_place_.grad_logits = narrow_view({8, 1});
  }

  TensorView wide_view(const Dims& strides, int first = 0) {
    return TensorView::strided(wide_.data() + first, DType::float32, {4, 3}, strides);
  }
  TensorView narrow_view(const Dims& strides, int first = 0) {
    return TensorView::strided(static_cast<void*>(wide_.data() + first), DType::bfloat16, {4, 3}, strides);
  }

  void expect_both_refused(const TensorView& logits, const TensorView& grad_logits, const std::string& message,
                           int class_axis = -1) {
    auto backward = narrow_backward_;
    backward.logits = logits;
    backward.grad_logits = grad_logits;
    backward.class_axis = class_axis;
    expect_refused(backward, "cross_entropy_backward: " + message);
    auto in_place = narrow_in_place_;
    in_place.forward.logits = logits;
    in_place.forward.class_axis = class_axis;
    in_place.grad_logits = grad_logits;
    expect_refused(in_place, "cross_entropy_forward_backward: " + message);
    EXPECT_EQ(wide_, std::vector<float>(36, 1.0f)) << "logits was written";
  }

  /// That the gradient does not lie in the first halves of the rows.
  static std::string misplaced(const std::string& strides, const std::string& logits_strides) {
    return "grad_logits has dtype bfloat16 and strides " + strides + " over logits with strides " + logits_strides +
           ", expected of a narrower gradient the data of logits, classes as the last axis with unit stride, rows that "
           "start on 16 bytes, and strides of twice as many elements";
  }

  std::vector<float> wide_ = std::vector<float>(36, 1.0f);
  CrossEntropyBackwardArgs narrow_backward_ = backward_;
  CrossEntropyForwardBackwardArgs narrow_in_place_ = in_place_;
};

TEST_F(CrossEntropyNarrowErrors, TheArgumentsThatTheseTestsSpoilAreLegal) {
  EXPECT_NO_THROW(cross_entropy_backward(narrow_backward_));
  EXPECT_NO_THROW(cross_entropy_forward_backward(narrow_in_place_));
}

TEST_F(CrossEntropyNarrowErrors, Dtypes) {
  TensorView narrow = narrow_view({8, 1});
  narrow.dtype = DType::int16;
  expect_both_refused(
      wide_view({4, 1}), narrow,
      "grad_logits has dtype int16, expected float16 or bfloat16 (narrower than the float32 of logits)");
  auto in_place = narrow_in_place_;
  in_place.grad_logits = wide_view({4, 1});
  expect_refused(in_place,
                 "cross_entropy_forward_backward: grad_logits has dtype float32, expected float16 or bfloat16 "
                 "(narrower than the float32 of logits)");
  in_place = narrow_in_place_;
  in_place.forward.logits = narrow_view({8, 1});
  expect_refused(in_place,
                 "cross_entropy_forward_backward: logits has dtype bfloat16, expected float32 (grad_logits is "
                 "narrower)");
  // There is no narrower gradient but over the logits, and none of float64.
  auto backward = narrow_backward_;
  backward.grad_logits = grad_logits_.view({4, 3}, DType::bfloat16);
  expect_refused(backward, "cross_entropy_backward: grad_logits has dtype bfloat16, expected float32 (that of logits)");
  backward = narrow_backward_;
  backward.logits.dtype = DType::float64;
  expect_refused(backward, "cross_entropy_backward: grad_logits has dtype bfloat16, expected float64 (that of logits)");
}

TEST_F(CrossEntropyNarrowErrors, Places) {
  // Elsewhere, be it within the same row.
  auto in_place = narrow_in_place_;
  in_place.grad_logits = grad_logits_.view({4, 3}, DType::bfloat16);
  expect_refused(in_place, "cross_entropy_forward_backward: " + misplaced("[3, 1]", "[4, 1]"));
  in_place.grad_logits = narrow_view({8, 1}, 1);
  expect_refused(in_place, "cross_entropy_forward_backward: " + misplaced("[8, 1]", "[4, 1]"));
  // Rows that do not start on 16 bytes, all of them or all but the first.
  expect_both_refused(wide_view({4, 1}, 1), narrow_view({8, 1}, 1), misplaced("[8, 1]", "[4, 1]"));
  expect_both_refused(wide_view({3, 1}), narrow_view({6, 1}), misplaced("[6, 1]", "[3, 1]"));
  expect_both_refused(wide_view({5, 1}), narrow_view({10, 1}), misplaced("[10, 1]", "[5, 1]"));
  // Strides that are not twice as many.
  expect_both_refused(wide_view({4, 1}), narrow_view({4, 1}), misplaced("[4, 1]", "[4, 1]"));
  expect_both_refused(wide_view({4, 1}), narrow_view({8, 2}), misplaced("[8, 2]", "[4, 1]"));
  // Classes that do not lie behind each other, or on another axis.
  expect_both_refused(wide_view({8, 2}), narrow_view({16, 2}), misplaced("[16, 2]", "[8, 2]"));
  expect_both_refused(wide_view({4, 1}), narrow_view({8, 1}), misplaced("[8, 1]", "[4, 1]"), 0);
  expect_both_refused(wide_view({4, 1}), narrow_view({8, 1}), misplaced("[8, 1]", "[4, 1]"), -2);
}

TEST_F(CrossEntropyNarrowErrors, ShapesAndDevices) {
  TensorView narrow = narrow_view({8, 1});
  narrow.shape = {4, 2};
  expect_both_refused(wide_view({4, 1}), narrow, "grad_logits has shape [4, 2], expected [4, 3] (that of logits)");
  narrow = narrow_view({8, 1});
  narrow.device = kCuda;
  expect_both_refused(wide_view({4, 1}), narrow, "grad_logits is on cuda:0, expected cpu (as logits)");
  auto in_place = narrow_in_place_;
  in_place.grad_logits.is_present = false;
  expect_refused(in_place,
                 "cross_entropy_forward_backward: grad_logits has data but counts as missing, expected a view made by "
                 "contiguous() or strided()");
}

TEST_F(CrossEntropyNarrowErrors, SoftTargetsOfAnotherLayout) {
  const TensorView targets = TensorView::strided(ones_.data(), DType::float32, {4, 3}, {1, 4});
  const std::string message =
      "targets are distributions with strides [1, 4], expected classes with unit stride (grad_logits is narrower than "
      "logits)";
  auto backward = narrow_backward_;
  backward.targets = targets;
  backward.target_mass = ones({4});
  expect_refused(backward, "cross_entropy_backward: " + message);
  auto in_place = narrow_in_place_;
  in_place.forward.targets = targets;
  expect_refused(in_place, "cross_entropy_forward_backward: " + message);
  EXPECT_EQ(wide_, std::vector<float>(36, 1.0f)) << "logits was written";
}

TEST_F(CrossEntropyErrors, PartsOfAVocabulary) {
  const auto refused = [&](std::int64_t first_class, std::int64_t classes, const std::string& message) {
    auto shard = shard_;
    shard.first_class = first_class;
    shard.classes = classes;
    expect_refused(shard, "cross_entropy_shard_forward: " + message);
    auto backward = backward_;
    backward.first_class = first_class;
    backward.classes = classes;
    expect_refused(backward, "cross_entropy_backward: " + message);
  };
  refused(4, 6, "logits has the classes 4 to 4 + 3, expected a part of 6 classes");
  refused(-1, 6, "logits has the classes -1 to -1 + 3, expected a part of 6 classes");
  refused(0, 2, "logits has the classes 0 to 0 + 3, expected a part of 2 classes");
  refused(1, 0, "logits has the classes 1 to 1 + 3, expected a part of 3 classes");
  refused(0, -5, "logits has the classes 0 to 0 + 3, expected a part of -5 classes");
  refused(std::numeric_limits<std::int64_t>::max(), 6,
          "logits has the classes 9223372036854775807 to 9223372036854775807 + 3, expected a part of 6 classes");
  auto last = shard_;
  last.first_class = 3;
  EXPECT_NO_THROW(cross_entropy_shard_forward_workspace_bytes(last));
}

TEST_F(CrossEntropyErrors, ShapesOfStatistics) {
  auto shard = shard_;
  shard.statistics = statistics_.view({4, 8});
  expect_refused(shard,
                 "cross_entropy_shard_forward: statistics has shape [4, 8], expected [4, 10] (the statistics of each "
                 "row of logits)");
  auto merge = merge_;
  merge.statistics = ones({2, 5, 10});
  expect_refused(
      merge, "cross_entropy_merge: statistics has shape [2, 5, 10], expected [2, 4, 10] (of each shard, for each row)");
  merge.statistics = ones({4, 10});
  expect_refused(
      merge, "cross_entropy_merge: statistics has shape [4, 10], expected [4, 4, 10] (of each shard, for each row)");
  merge = merge_;
  merge.classes = 0;
  expect_refused(merge, "cross_entropy_merge: classes is 0, expected the number of classes of all shards");
  merge = merge_;
  merge.lse = lse_.view({5});
  expect_refused(merge, "cross_entropy_merge: lse has shape [5], expected [4] (one per row of logits)");
}

TEST_F(CrossEntropyErrors, Rescaling) {
  auto args = rescale_;
  args.grad_logits = {};
  expect_refused(args, "cross_entropy_rescale: grad_logits is missing");
  args = rescale_;
  args.grad_loss = {};
  expect_refused(args, "cross_entropy_rescale: grad_loss is missing");
  args = rescale_;
  args.class_axis = 2;
  expect_refused(args, "cross_entropy_rescale: class_axis is 2, expected -2 to 1 (grad_logits has 2 axes)");
  args = rescale_;
  args.grad_loss = ones({3});
  expect_refused(args, "cross_entropy_rescale: grad_loss has shape [3], expected [4] (one per row of logits)");
  args = rescale_;
  args.grad_logits.dtype = DType::int32;
  expect_refused(args,
                 "cross_entropy_rescale: grad_logits has dtype int32, expected float32 or float64 or float16 or "
                 "bfloat16 (integers are no gradients)");
  args = rescale_;
  args.grad_loss.dtype = DType::bfloat16;
  expect_refused(args,
                 "cross_entropy_rescale: grad_loss has dtype bfloat16, expected float32 (that of the loss, or of "
                 "logits)");
  args = rescale_;
  args.grad_logits.strides = {1, 1};
  expect_refused(args,
                 "cross_entropy_rescale: grad_logits has shape [4, 3] and strides [1, 1], so that elements share "
                 "memory; expected an address for each, because it is written");
  args = rescale_;
  args.grad_loss = grad_logits_.view({4});
  expect_refused(args, "cross_entropy_rescale: grad_logits overlaps grad_loss, expected memory of its own");
  args = rescale_;
  args.grad_loss.device = kCuda;
  expect_refused(args, "cross_entropy_rescale: grad_loss is on cuda:0, expected cpu (as grad_logits)");
}

TEST_F(CrossEntropyErrors, Threads) {
  for (const int threads : {-7, 200000}) {
    const auto message = [&](const char* op) {
      return std::string(op) + ": threads is " + std::to_string(threads) + ", expected 0 (all) to 4096";
    };
    const ExecutionContext context{.threads = threads};
    expect_message([&] { cross_entropy_forward(forward_, context); }, message("cross_entropy_forward"));
    expect_message([&] { cross_entropy_backward(backward_, context); }, message("cross_entropy_backward"));
    expect_message([&] { cross_entropy_forward_backward(in_place_, context); },
                   message("cross_entropy_forward_backward"));
    expect_message([&] { cross_entropy_shard_forward(shard_, context); }, message("cross_entropy_shard_forward"));
    expect_message([&] { cross_entropy_merge(merge_, context); }, message("cross_entropy_merge"));
    expect_message([&] { cross_entropy_rescale(rescale_, context); }, message("cross_entropy_rescale"));
    expect_nothing_written();
  }
}

TEST_F(CrossEntropyErrors, StridesOfAnEmptyTensorMayBeAnything) {
  auto args = forward_;
  args.logits = TensorView::strided(logits_.data(), DType::float32, {4, 0}, {std::int64_t{1} << 62, 7});
  args.weight = TensorView::contiguous(ones_.data(), DType::float32, {0});
  args.targets = TensorView::strided(ones_.data(), DType::float32, {4, 0}, {7, std::int64_t{1} << 62});
  EXPECT_NO_THROW(cross_entropy_forward(args));
  EXPECT_EQ(lse_.memory[3], -std::numeric_limits<float>::infinity());
  EXPECT_EQ(loss_.memory[0], 0.0f);
}

TEST_F(CrossEntropyErrors, MemoryThatInterleavesWithoutSharingIsLegal) {
  // The logits and their gradient are the two halves of each row of one buffer.
  std::vector<float> buffer(4 * 7, 1.0f);
  const auto half = [&](int start) {
    return TensorView::strided(static_cast<void*>(buffer.data() + start), DType::float32, {4, 3}, {7, 1});
  };
  auto forward = forward_;
  forward.logits = half(0);
  EXPECT_NO_THROW(cross_entropy_forward(forward));
  EXPECT_NEAR(lse_.memory[3], 1.0f + std::log(3.0f), 1e-6f);
  auto backward = backward_;
  backward.logits = half(0);
  backward.grad_logits = half(4);
  backward.lse = forward.lse;
  EXPECT_NO_THROW(cross_entropy_backward(backward));
  EXPECT_NEAR(buffer[5], 1.0f / 3.0f, 1e-6f);
  EXPECT_EQ(buffer[3], 1.0f);
}

}  // namespace
}  // namespace eaves::testing
