// Every message with which cross_entropy refuses a call; a refused call writes nothing. Targets out of range are in
// cross_entropy_edges_test.cpp.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "eaves/cross_entropy.h"
#include "eaves/error.h"
#include "eaves/system.h"
#include "testing/refusals.h"

namespace eaves::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

using Forward = CrossEntropyForwardArgs;
using Backward = CrossEntropyBackwardArgs;
using InPlace = CrossEntropyForwardBackwardArgs;
using Shard = CrossEntropyShardArgs;
using Merge = CrossEntropyMergeArgs;
using Rescale = CrossEntropyRescaleArgs;

/// Tensors of one kind of arguments, with their names.
template <typename Args>
using Named = std::vector<std::pair<std::string, TensorView Args::*>>;

const std::string kPerRow = ", expected [4] (one per row of logits)";
const std::string kResultDtype = " has dtype bfloat16, expected float32 (float32, or float64 where logits is float64)";
const std::string kCountsAsMissing =
    " has data but counts as missing, expected a view made by contiguous() or strided()";
const std::string kMeanLogit =
    "mean_logit is given, but soft targets, and class_weight beside label_smoothing, have no mean logit; leave it out";

/// The arguments of a legal call of each kind, four rows of three classes. A test makes one of them illegal.
class CrossEntropyErrors : public ::testing::Test {
 protected:
  TensorView logits_view() { return TensorView::contiguous(logits_.data(), DType::float32, {4, 3}); }
  TensorView in_logits(const Dims& shape, int first = 0) {
    return TensorView::contiguous(logits_.data() + first, DType::float32, shape);
  }
  TensorView targets_view() { return TensorView::contiguous(targets_.data(), DType::int64, {4}); }
  TensorView ones(const Dims& shape, DType dtype = DType::float32) {
    return TensorView::contiguous(ones_.data(), dtype, shape);
  }

  void expect_nothing_written() {
    for (const UnwrittenOutput* output :
         {&loss_, &lse_, &argmax_, &entropy_, &z_loss_, &target_mass_, &divisor_, &grad_logits_, &statistics_}) {
      output->expect_unwritten();
    }
    EXPECT_EQ(logits_, std::vector<float>(12, 1.0f)) << "logits was written";
    EXPECT_EQ(wide_, std::vector<float>(36, 1.0f)) << "logits was written";
  }

  std::vector<float> logits_ = std::vector<float>(12, 1.0f);
  std::vector<float> wide_ = std::vector<float>(36, 1.0f);
  std::vector<std::int64_t> targets_ = {0, 1, 2, 0};
  std::vector<float> ones_ = std::vector<float>(144, 1.0f);
  UnwrittenOutput loss_{"loss"}, lse_{"lse"}, argmax_{"argmax"}, entropy_{"entropy"}, z_loss_{"z_loss"},
      target_mass_{"target_mass"}, divisor_{"divisor"}, grad_logits_{"grad_logits"}, statistics_{"statistics"};
  std::function<void()> unwritten_ = [this] { expect_nothing_written(); };

  EntryPoint<Forward> forward_ = {"cross_entropy_forward",
                                  cross_entropy_forward,
                                  cross_entropy_forward_workspace_bytes,
                                  unwritten_,
                                  {.logits = logits_view(),
                                   .targets = targets_view(),
                                   .class_weight = ones({3}),
                                   .loss = loss_.view({}),
                                   .lse = lse_.view({4}),
                                   .argmax = argmax_.view({4}, DType::int64),
                                   .entropy = entropy_.view({4}),
                                   .z_loss = z_loss_.view({}),
                                   .target_mass = target_mass_.view({4}),
                                   .divisor = divisor_.view({})}};
  EntryPoint<Backward> backward_ = {"cross_entropy_backward",
                                    cross_entropy_backward,
                                    cross_entropy_backward_workspace_bytes,
                                    unwritten_,
                                    {.grad_loss = ones({}),
                                     .logits = logits_view(),
                                     .targets = targets_view(),
                                     .lse = ones({4}),
                                     .divisor = ones({}),
                                     .grad_logits = grad_logits_.view({4, 3})}};
  EntryPoint<InPlace> in_place_ = {"cross_entropy_forward_backward",
                                   cross_entropy_forward_backward,
                                   cross_entropy_forward_backward_workspace_bytes,
                                   unwritten_,
                                   {.forward = forward_.legal, .grad_loss = ones({})}};
  EntryPoint<Rescale> rescale_ = {"cross_entropy_rescale",
                                  cross_entropy_rescale,
                                  cross_entropy_rescale_workspace_bytes,
                                  unwritten_,
                                  {.grad_logits = grad_logits_.view({4, 3}), .grad_loss = ones({4})}};
  EntryPoint<Shard> shard_ = {"cross_entropy_shard_forward",
                              cross_entropy_shard_forward,
                              cross_entropy_shard_forward_workspace_bytes,
                              unwritten_,
                              {.logits = logits_view(),
                               .targets = targets_view(),
                               .class_weight = ones({3}),
                               .first_class = 0,
                               .classes = 6,
                               .statistics = statistics_.view({4, kCrossEntropyStatistics})}};
  EntryPoint<Merge> merge_ = {"cross_entropy_merge",
                              cross_entropy_merge,
                              cross_entropy_merge_workspace_bytes,
                              unwritten_,
                              {.statistics = ones({2, 4, kCrossEntropyStatistics}),
                               .targets = targets_view(),
                               .classes = 6,
                               .loss = loss_.view({}),
                               .lse = lse_.view({4})}};
};

TEST_F(CrossEntropyErrors, TheArgumentsThatTheseTestsSpoilAreLegal) {
  EXPECT_NO_THROW(cross_entropy_forward(forward_.legal));
  EXPECT_NO_THROW(cross_entropy_backward(backward_.legal));
  EXPECT_NO_THROW(cross_entropy_shard_forward(shard_.legal));
  EXPECT_NO_THROW(cross_entropy_merge(merge_.legal));
  EXPECT_NO_THROW(cross_entropy_rescale(rescale_.legal));
  EXPECT_NO_THROW(cross_entropy_forward_backward(in_place_.legal));
}

TEST_F(CrossEntropyErrors, WeightsOfRows) {
  const std::pair<TensorView, const char*> table[] = {
      {ones({3}), "row_weight has shape [3], expected [4] (one per row of logits)"},
      {ones({4}, DType::bfloat16),
       "row_weight has dtype bfloat16, expected float32 (float32, or float64 where logits is float64)"},
      {TensorView::strided(ones_.data(), DType::float32, {4}, {2}),
       "row_weight has shape [4] and strides [2], expected a contiguous tensor"}};
  for (const auto& [view, sentence] : table) {
    forward_.refuses({{&Forward::row_weight, view, sentence}});
    backward_.refuses({{&Backward::row_weight, view, sentence}});
    in_place_.refuses({{[&, &view = view](InPlace& a) { a.forward.row_weight = view; }, sentence}});
    merge_.refuses({{&Merge::row_weight, view, sentence}});
  }
}

TEST_F(CrossEntropyErrors, AMeanLogitWhereTheSumHasFactors) {
  UnwrittenOutput mean_logit("mean_logit");
  forward_.legal.mean_logit = merge_.legal.mean_logit = mean_logit.view({4});
  forward_.accepts([](Forward&) {});
  forward_.accepts([](Forward& a) { a.options.label_smoothing = 0.1, a.class_weight = {}; });
  forward_.refuses({
      {[](Forward& a) { a.options.label_smoothing = 0.1; }, kMeanLogit},
      {[&](Forward& a) {
         a.class_weight = {};
         a.targets = ones({4, 3});
       },
       kMeanLogit},
  });
  merge_.refuses({{[](Merge& a) { a.has_class_weight = true, a.options.label_smoothing = 0.1; }, kMeanLogit}});
  mean_logit.expect_unwritten();
}

TEST_F(CrossEntropyErrors, MissingTensors) {
  for (const auto& [name, tensor] :
       Named<Forward>{{"logits", &Forward::logits}, {"targets", &Forward::targets}, {"loss", &Forward::loss}}) {
    forward_.refuses({{tensor, missing(), name + " is missing"}});
  }
  for (const auto& [name, tensor] : Named<Backward>{{"logits", &Backward::logits},
                                                    {"targets", &Backward::targets},
                                                    {"grad_loss", &Backward::grad_loss},
                                                    {"grad_logits", &Backward::grad_logits}}) {
    backward_.refuses({{tensor, missing(), name + " is missing"}});
  }
  in_place_.refuses({
      {[](InPlace& a) { a.forward.logits = {}; }, "logits is missing"},
      {[](InPlace& a) { a.forward.loss = {}; }, "loss is missing"},
  });
  shard_.refuses({
      {&Shard::logits, missing(), "logits is missing"},
      {&Shard::statistics, missing(), "statistics is missing"},
  });
  merge_.refuses({
      {&Merge::statistics, missing(), "statistics is missing"},
      {&Merge::targets, missing(), "targets is missing"},
      {&Merge::loss, missing(), "loss is missing"},
  });
}

TEST_F(CrossEntropyErrors, WhatTheBackwardNeedsOfTheForward) {
  const std::string written = " is missing, expected the forward's output";
  backward_.refuses({
      {&Backward::lse, missing(), "lse" + written},
      {&Backward::divisor, missing(), "divisor" + written + ", because reduction is mean"},
      {&Backward::grad_entropy, ones({4}), "entropy" + written + ", because grad_entropy is given"},
      {&Backward::targets, ones({4, 3}), "target_mass" + written + ", because the targets are soft"},
      {[&](Backward& a) { a.class_weight = ones({3}), a.options.label_smoothing = 0.1; },
       "target_mass" + written + ", because class_weight and label_smoothing are given"},
      {[&](Backward& a) { a.class_weight = ones({3}), a.classes = 6; },
       "target_mass is missing, expected the merge's output, because class_weight is given and logits has a part of "
       "the "
       "classes"},
  });
  backward_.accepts([&](Backward& a) { a.class_weight = ones({3}); });
  backward_.accepts([&](Backward& a) { a.classes = 6, a.options.label_smoothing = 0.1; });
}

TEST_F(CrossEntropyErrors, TheClassAxis) {
  const std::string of_two = ", expected -2 to 1 (logits has 2 axes)";
  forward_.refuses({
      {[](Forward& a) { a.class_axis = 2; }, "class_axis is 2" + of_two},
      {[](Forward& a) { a.class_axis = -3; }, "class_axis is -3" + of_two},
      {&Forward::logits, ones({}), "logits has no axes, expected at least one"},
  });
  backward_.refuses({{[](Backward& a) { a.class_axis = 7; }, "class_axis is 7" + of_two}});
  in_place_.refuses({{[](InPlace& a) { a.forward.class_axis = 7; }, "class_axis is 7" + of_two}});
  shard_.refuses({{[](Shard& a) { a.class_axis = 7; }, "class_axis is 7" + of_two}});
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
      {{.scale = 0.0}, "scale is 0, expected a positive number in the range of float32"},
      {{.scale = -1.0}, "scale is -1, expected a positive number in the range of float32"},
      {{.scale = kNaN}, "scale is nan, expected a positive number in the range of float32"},
      {{.scale = kInfinity}, "scale is inf, expected a positive number in the range of float32"},
      {{.softcap = -30.0}, "softcap is -30, expected a positive number in the range of float32, or 0 for none"},
      {{.softcap = kNaN}, "softcap is nan, expected a positive number in the range of float32, or 0 for none"},
      {{.softcap = kInfinity}, "softcap is inf, expected a positive number in the range of float32, or 0 for none"},
      {{.scale = 1e300}, "scale is 1e+300, expected a positive number in the range of float32"},
      {{.softcap = 1e-50}, "softcap is 1e-50, expected a positive number in the range of float32, or 0 for none"},
      {{.z_loss_weight = 1e300}, "z_loss_weight is 1e+300, expected 0 or a positive number in the range of float32"},
      {{.z_loss_weight = -1e-4}, "z_loss_weight is -0.0001, expected 0 or a positive number in the range of float32"},
      {{.z_loss_weight = kNaN}, "z_loss_weight is nan, expected 0 or a positive number in the range of float32"},
      {{.z_loss_weight = kInfinity}, "z_loss_weight is inf, expected 0 or a positive number in the range of float32"},
      {{.reduction = static_cast<Reduction>(7)}, "reduction is 7, expected one of enum Reduction"},
  };
  for (const Case& c : cases) {
    const auto spoil = [&](auto& args) { args.options = c.options; };
    forward_.refuses({{spoil, c.message}});
    backward_.refuses({{spoil, c.message}});
    in_place_.refuses({{[&](InPlace& a) { spoil(a.forward); }, c.message}});
    shard_.refuses({{spoil, c.message}});
    merge_.refuses({{spoil, c.message}});
  }
}

TEST_F(CrossEntropyErrors, ShapesOfInputs) {
  forward_.refuses({
      {&Forward::targets, of_shape({3}), "targets has shape [3], expected [4] (one per row of logits [4, 3])"},
      {&Forward::targets, ones({4}), "targets has shape [4], expected [4, 3] (soft targets: as logits)"},
      {&Forward::class_weight, ones({4}), "class_weight has shape [4], expected [3] (one per class of logits)"},
      {&Forward::normalizer, ones({2}), "normalizer has shape [2], expected one element"},
  });
  backward_.refuses({
      {&Backward::grad_loss, ones({4}), "grad_loss has shape [4], expected one element"},
      {[&](Backward& a) { a.options.reduction = Reduction::none, a.divisor = {}; }, "grad_loss has shape []" + kPerRow},
      {&Backward::grad_logits, grad_logits_.view({3, 4}), "grad_logits has shape [3, 4], expected [4, 3] (as logits)"},
      {&Backward::divisor, ones({4}), "divisor has shape [4], expected one element"},
  });
  for (const auto& [name, tensor] : Named<Backward>{{"grad_lse", &Backward::grad_lse},
                                                    {"grad_entropy", &Backward::grad_entropy},
                                                    {"lse", &Backward::lse},
                                                    {"entropy", &Backward::entropy},
                                                    {"target_mass", &Backward::target_mass}}) {
    if (name == "grad_entropy") backward_.legal.entropy = ones({4});
    backward_.refuses({{tensor, ones({5}), name + " has shape [5]" + kPerRow}});
  }
}

TEST_F(CrossEntropyErrors, RowsWithTargetsAndNoClasses) {
  const std::string sentence = "logits has shape [4, 0], expected at least one class";
  targets_.assign(4, -100);  // ignored
  const auto spoil = [&](auto& args) { args.logits = in_logits({4, 0}), args.class_weight = {}; };
  forward_.refuses({{spoil, sentence}});
  in_place_.refuses({{[&](InPlace& a) { spoil(a.forward); }, sentence}});
  backward_.legal.grad_logits = grad_logits_.view({4, 0});
  backward_.refuses({{spoil, sentence}});
}

TEST_F(CrossEntropyErrors, ShapesOfOutputs) {
  for (const auto& [name, tensor] : Named<Forward>{{"lse", &Forward::lse},
                                                   {"argmax", &Forward::argmax},
                                                   {"entropy", &Forward::entropy},
                                                   {"target_mass", &Forward::target_mass}}) {
    const auto spoil = [&tensor = tensor](Forward& a) { (a.*tensor).shape = {4, 1}, (a.*tensor).strides = {1, 1}; };
    forward_.refuses({{spoil, name + " has shape [4, 1]" + kPerRow}});
    in_place_.refuses({{[&](InPlace& a) { spoil(a.forward); }, name + " has shape [4, 1]" + kPerRow}});
  }
  forward_.refuses({
      {&Forward::loss, loss_.view({4}), "loss has shape [4], expected one element"},
      {&Forward::z_loss, z_loss_.view({4}), "z_loss has shape [4], expected one element"},
      {&Forward::divisor, divisor_.view({4}), "divisor has shape [4], expected one element"},
  });
  forward_.legal.options.reduction = Reduction::none;
  forward_.legal.divisor = {};
  forward_.refuses({
      {&Forward::z_loss, z_loss_.view({4}), "loss has shape []" + kPerRow},
      {&Forward::loss, loss_.view({4}), "z_loss has shape []" + kPerRow},
  });
}

TEST_F(CrossEntropyErrors, WhatOnlyTheMeanHas) {
  const std::string why = " is given, but only the mean divides by a number; expected reduction mean";
  for (const Reduction reduction : {Reduction::none, Reduction::sum}) {
    const Dims shape = reduction == Reduction::sum ? Dims{} : Dims{4};
    forward_.legal.options.reduction = backward_.legal.options.reduction = merge_.legal.options.reduction = reduction;
    forward_.legal.loss = merge_.legal.loss = loss_.view(shape);
    forward_.legal.z_loss = z_loss_.view(shape);
    forward_.refuses({{[](Forward&) {}, "divisor" + why}, {&Forward::normalizer, ones({}), "normalizer" + why}});
    backward_.refuses({{&Backward::grad_loss, ones(shape), "divisor" + why}});
    merge_.refuses({{&Merge::normalizer, ones({}), "normalizer" + why}});
  }
}

TEST_F(CrossEntropyErrors, Dtypes) {
  const std::string soft = " (soft targets: as logits, or float32)";
  forward_.refuses({
      {&Forward::logits, TensorView::contiguous(targets_.data(), DType::int64, {4, 1}),
       "logits has dtype int64, expected float32 or float64 or float16 or bfloat16 (logits are floating-point "
       "numbers)"},
      {&Forward::targets, of_dtype(DType::int16),
       "targets has dtype int16, expected int64 or int32 (classes; soft targets have a floating-point type)"},
      {&Forward::targets, ones({4, 3}, DType::bfloat16), "targets has dtype bfloat16, expected float32" + soft},
      {&Forward::class_weight, of_dtype(DType::float16),
       "class_weight has dtype float16, expected float32 (as logits, or float32)"},
      {&Forward::normalizer, ones({}, DType::bfloat16), "normalizer" + kResultDtype},
      {&Forward::argmax, of_dtype(DType::int32), "argmax has dtype int32, expected int64 (classes)"},
  });
  for (const auto& [name, tensor] : Named<Forward>{{"loss", &Forward::loss},
                                                   {"lse", &Forward::lse},
                                                   {"entropy", &Forward::entropy},
                                                   {"z_loss", &Forward::z_loss},
                                                   {"divisor", &Forward::divisor},
                                                   {"target_mass", &Forward::target_mass}}) {
    forward_.refuses({{tensor, of_dtype(DType::bfloat16), name + kResultDtype}});
  }
  backward_.refuses({
      {&Backward::grad_loss, of_dtype(DType::float16),
       "grad_loss has dtype float16, expected float32 (as the loss, or logits)"},
      {&Backward::grad_logits, of_dtype(DType::bfloat16),
       "grad_logits has dtype bfloat16, expected float32 (as logits)"},
      {&Backward::lse, of_dtype(DType::float16),
       "lse has dtype float16, expected float32 (float32, or float64 where logits is float64)"},
      {&Backward::grad_lse, ones({4}, DType::bfloat16), "grad_lse" + kResultDtype},
  });
  shard_.refuses({
      {&Shard::targets, ones({4, 3}, DType::float64), "targets has dtype float64, expected float32" + soft},
      {&Shard::statistics, of_dtype(DType::bfloat16), "statistics" + kResultDtype},
  });
  merge_.refuses({
      {&Merge::statistics, of_dtype(DType::float16),
       "statistics has dtype float16, expected float32 or float64 (the statistics of the shards)"},
      {&Merge::targets, of_dtype(DType::uint8), "targets has dtype uint8, expected int64 or int32 (classes)"},
  });
}

TEST_F(CrossEntropyErrors, Devices) {
  const std::string elsewhere = " is on cuda:0, expected cpu (as logits)";
  for (const auto& [name, tensor] : Named<Forward>{{"targets", &Forward::targets},
                                                   {"class_weight", &Forward::class_weight},
                                                   {"loss", &Forward::loss},
                                                   {"lse", &Forward::lse},
                                                   {"argmax", &Forward::argmax},
                                                   {"divisor", &Forward::divisor}}) {
    forward_.refuses({{tensor, on_device(kCuda), name + elsewhere}});
  }
  for (const auto& [name, tensor] : Named<Backward>{{"grad_loss", &Backward::grad_loss},
                                                    {"targets", &Backward::targets},
                                                    {"lse", &Backward::lse},
                                                    {"divisor", &Backward::divisor},
                                                    {"grad_logits", &Backward::grad_logits}}) {
    backward_.refuses({{tensor, on_device(kCuda), name + elsewhere}});
  }
  shard_.refuses({{&Shard::statistics, on_device(kCuda), "statistics" + elsewhere}});
  merge_.refuses({{&Merge::targets, on_device(kCuda), "targets is on cuda:0, expected cpu (as statistics)"}});
}

TEST_F(CrossEntropyErrors, AGpuThatIsNotThere) {
  Forward args = forward_.legal;
  for (TensorView* view : {&args.logits, &args.targets, &args.class_weight, &args.loss, &args.lse, &args.argmax,
                           &args.entropy, &args.z_loss, &args.target_mass, &args.divisor}) {
    view->device = {DeviceType::cuda, 63};
  }
  expect_message_begins<Unsupported>([&] { cross_entropy_forward(args); },
                                     "cross_entropy_forward: the tensors are on cuda:63, but ");
  expect_nothing_written();
}

TEST_F(CrossEntropyErrors, Memory) {
  const std::string contiguous = ", expected a contiguous tensor";
  forward_.refuses({
      {&Forward::logits, at_address(nullptr),
       "logits has shape [4, 3] but a null pointer as data, expected an address"},
      {&Forward::logits, at_address(reinterpret_cast<char*>(logits_.data()) + 2),
       "logits is not aligned to its elements, expected an address divisible by 4 for float32"},
      {&Forward::logits, of_strides({3}), "logits has shape [4, 3] and strides [3], expected a stride for each axis"},
      {&Forward::class_weight, of_strides({2}), "class_weight has shape [3] and strides [2]" + contiguous},
  });
  for (const auto& [name, tensor] : Named<Forward>{{"lse", &Forward::lse},
                                                   {"argmax", &Forward::argmax},
                                                   {"entropy", &Forward::entropy},
                                                   {"target_mass", &Forward::target_mass}}) {
    forward_.refuses({{tensor, of_strides({2}), name + " has shape [4] and strides [2]" + contiguous}});
  }
  backward_.refuses({{&Backward::lse, of_strides({0}), "lse has shape [4] and strides [0]" + contiguous}});
  shard_.refuses(
      {{&Shard::statistics, of_strides({1, 4}), "statistics has shape [4, 10] and strides [1, 4]" + contiguous}});
  merge_.refuses({{&Merge::statistics, of_strides({10, 20, 1}),
                   "statistics has shape [2, 4, 10] and strides [10, 20, 1]" + contiguous}});
}

TEST_F(CrossEntropyErrors, AViewPutTogetherByHand) {
  backward_.legal.grad_lse = ones({4});
  forward_.legal.normalizer = ones({});
  forward_.refuses({
      {&Forward::lse, counted_as_missing(), "lse" + kCountsAsMissing},
      {&Forward::class_weight, counted_as_missing(), "class_weight" + kCountsAsMissing},
      {&Forward::normalizer, counted_as_missing(), "normalizer" + kCountsAsMissing},
  });
  backward_.refuses({{&Backward::grad_lse, counted_as_missing(), "grad_lse" + kCountsAsMissing}});
  in_place_.refuses({{&InPlace::grad_loss, counted_as_missing(), "grad_loss" + kCountsAsMissing}});
}

TEST_F(CrossEntropyErrors, OutputsThatShareMemory) {
  const TensorView of_targets = TensorView::contiguous(targets_.data(), DType::float32, {});
  forward_.refuses({
      {&Forward::lse, in_logits({4}), overlapping("lse", "logits")},
      {&Forward::entropy, lse_.view({4}), overlapping("entropy", "lse")},
      {&Forward::loss, of_targets, overlapping("loss", "targets")},
      {&Forward::z_loss, loss_.view({}), overlapping("z_loss", "loss")},
      {[&](Forward& a) { a.divisor = a.normalizer = ones({}); }, overlapping("divisor", "class_weight")},
      {[&](Forward& a) { a.divisor = a.normalizer = ones({}), a.class_weight = {}; },
       overlapping("divisor", "normalizer")},
  });
  backward_.refuses({
      {&Backward::grad_logits, of_strides({2, 1}), sharing("grad_logits has shape [4, 3] and strides [2, 1]")},
      {&Backward::grad_logits, ones({4, 3}), overlapping("grad_logits", "grad_loss")},
  });
  backward_.legal.grad_loss = grad_logits_.view({});
  backward_.refuses({{&Backward::grad_logits, ones({4, 3}), overlapping("grad_logits", "lse")}});
  // A gradient that overlaps the logits with other strides; in place, logits that overlap soft targets and a per-row
  // tensor.
  backward_.legal.grad_loss = ones({});
  backward_.legal.grad_logits = logits_view();
  backward_.refuses({
      {&Backward::logits, of_strides({2, 1}), overlapping("grad_logits", "logits")},
      {[&](Backward& a) { a.target_mass = ones({4}), a.targets = logits_view(); }, overlapping("logits", "targets")},
      {&Backward::lse, in_logits({4}, 5), overlapping("logits", "lse")},
  });
  in_place_.refuses({
      {[](InPlace& a) {
         of_strides({0, 1})(a.forward.logits);
       },
       sharing("logits has shape [4, 3] and strides [0, 1]")},
      {[&](InPlace& a) { a.forward.class_weight = in_logits({3}); }, overlapping("logits", "class_weight")},
      {&InPlace::grad_loss, in_logits({}), overlapping("logits", "grad_loss")},
      {[&](InPlace& a) { a.forward.lse = in_logits({4}); }, overlapping("lse", "logits")},
      {[&](InPlace& a) { a.forward.normalizer = in_logits({}); }, overlapping("logits", "normalizer")},
  });
  shard_.refuses({{&Shard::logits, statistics_.view({4, 3}), overlapping("statistics", "logits")}});
  merge_.refuses({{&Merge::lse, ones({4}), overlapping("lse", "statistics")}});
}

/// Legal calls with a narrower gradient: rows of three classes, four float32 apart. A test makes one argument illegal.
class CrossEntropyNarrowErrors : public CrossEntropyErrors {
 protected:
  CrossEntropyNarrowErrors() {
    backward_.legal.logits = in_place_.legal.forward.logits = wide_view({4, 1});
    backward_.legal.grad_logits = in_place_.legal.grad_logits = narrow_view({8, 1});
  }

  TensorView wide_view(const Dims& strides, int first = 0) {
    return TensorView::strided(wide_.data() + first, DType::float32, {4, 3}, strides);
  }
  TensorView narrow_view(const Dims& strides, int first = 0) {
    return TensorView::strided(static_cast<void*>(wide_.data() + first), DType::bfloat16, {4, 3}, strides);
  }

  void expect_both_refused(const TensorView& logits, const TensorView& grad_logits, const std::string& message,
                           int class_axis = -1) {
    const auto spoil = [&](auto& args) { args.logits = logits, args.class_axis = class_axis; };
    backward_.refuses({{[&](Backward& a) { spoil(a), a.grad_logits = grad_logits; }, message}});
    in_place_.refuses({{[&](InPlace& a) { spoil(a.forward), a.grad_logits = grad_logits; }, message}});
  }

  /// The message that the gradient does not lie in the first halves of the rows.
  static std::string misplaced(const std::string& strides, const std::string& logits_strides) {
    return "grad_logits has dtype bfloat16 and strides " + strides + " over logits with strides " + logits_strides +
           "; a gradient of 16 bits over logits in float32 needs the address of logits, classes on the last axis with "
           "unit "
           "stride, rows that start at multiples of 16 bytes, and twice the other strides of logits";
  }
};

TEST_F(CrossEntropyNarrowErrors, TheArgumentsThatTheseTestsSpoilAreLegal) {
  EXPECT_NO_THROW(cross_entropy_backward(backward_.legal));
  EXPECT_NO_THROW(cross_entropy_forward_backward(in_place_.legal));
}

TEST_F(CrossEntropyNarrowErrors, Dtypes) {
  TensorView integers = narrow_view({8, 1});
  integers.dtype = DType::int16;
  expect_both_refused(
      wide_view({4, 1}), integers,
      "grad_logits has dtype int16, expected float16 or bfloat16 (a gradient of 16 bits over logits in float32)");
  in_place_.refuses({
      {&InPlace::grad_logits, wide_view({4, 1}),
       "grad_logits has dtype float32, expected float16 or bfloat16 (a gradient of 16 bits over logits in float32)"},
      {[&](InPlace& a) { a.forward.logits = a.grad_logits; },
       "logits has dtype bfloat16, expected float32 (grad_logits has 16 bits)"},
  });
  // A narrower gradient has to overwrite the logits, and the logits must not be float64.
  backward_.refuses({
      {&Backward::grad_logits, grad_logits_.view({4, 3}, DType::bfloat16),
       "grad_logits has dtype bfloat16, expected float32 (as logits)"},
      {&Backward::logits, of_dtype(DType::float64), "grad_logits has dtype bfloat16, expected float64 (as logits)"},
  });
}

TEST_F(CrossEntropyNarrowErrors, Places) {
  // The gradient starts elsewhere, even within the same row.
  in_place_.refuses({
      {&InPlace::grad_logits, grad_logits_.view({4, 3}, DType::bfloat16), misplaced("[3, 1]", "[4, 1]")},
      {&InPlace::grad_logits, narrow_view({8, 1}, 1), misplaced("[8, 1]", "[4, 1]")},
  });
  // No row starts on 16 bytes, or only the first one does.
  expect_both_refused(wide_view({4, 1}, 1), narrow_view({8, 1}, 1), misplaced("[8, 1]", "[4, 1]"));
  expect_both_refused(wide_view({3, 1}), narrow_view({6, 1}), misplaced("[6, 1]", "[3, 1]"));
  expect_both_refused(wide_view({5, 1}), narrow_view({10, 1}), misplaced("[10, 1]", "[5, 1]"));
  // Strides are not twice as many elements.
  expect_both_refused(wide_view({4, 1}), narrow_view({4, 1}), misplaced("[4, 1]", "[4, 1]"));
  expect_both_refused(wide_view({4, 1}), narrow_view({8, 2}), misplaced("[8, 2]", "[4, 1]"));
  // The classes have no unit stride, or are another axis.
  expect_both_refused(wide_view({8, 2}), narrow_view({16, 2}), misplaced("[16, 2]", "[8, 2]"));
  expect_both_refused(wide_view({4, 1}), narrow_view({8, 1}), misplaced("[8, 1]", "[4, 1]"), 0);
  expect_both_refused(wide_view({4, 1}), narrow_view({8, 1}), misplaced("[8, 1]", "[4, 1]"), -2);
}

TEST_F(CrossEntropyNarrowErrors, ShapesAndDevices) {
  TensorView narrow = narrow_view({8, 1});
  narrow.shape = {4, 2};
  expect_both_refused(wide_view({4, 1}), narrow, "grad_logits has shape [4, 2], expected [4, 3] (as logits)");
  narrow = narrow_view({8, 1});
  narrow.device = kCuda;
  expect_both_refused(wide_view({4, 1}), narrow, "grad_logits is on cuda:0, expected cpu (as logits)");
  in_place_.refuses({{&InPlace::grad_logits, counted_as_missing(), "grad_logits" + kCountsAsMissing}});
}

TEST_F(CrossEntropyNarrowErrors, SoftTargetsOfAnotherLayout) {
  const TensorView targets = TensorView::strided(ones_.data(), DType::float32, {4, 3}, {1, 4});
  const std::string message =
      "targets has probabilities with strides [1, 4], expected unit stride along the classes (grad_logits has 16 bits)";
  backward_.refuses({{[&](Backward& a) { a.targets = targets, a.target_mass = ones({4}); }, message}});
  in_place_.refuses({{[&](InPlace& a) { a.forward.targets = targets; }, message}});
}

TEST_F(CrossEntropyErrors, PartsOfAVocabulary) {
  struct Part {
    std::int64_t first_class, classes;
    const char* message;
  };
  const Part parts[] = {
      {4, 6, "logits begins with class 4 and has 3 classes, expected a part of 6 classes"},
      {-1, 6, "logits begins with class -1 and has 3 classes, expected a part of 6 classes"},
      {0, 2, "logits begins with class 0 and has 3 classes, expected a part of 2 classes"},
      {1, 0, "logits begins with class 1 and has 3 classes, expected a part of 3 classes"},
      {0, -5, "logits begins with class 0 and has 3 classes, expected a part of -5 classes"},
      {std::numeric_limits<std::int64_t>::max(), 6,
       "logits begins with class 9223372036854775807 and has 3 classes, expected a part of 6 classes"},
  };
  for (const Part& part : parts) {
    const auto spoil = [&](auto& args) { args.first_class = part.first_class, args.classes = part.classes; };
    shard_.refuses({{spoil, part.message}});
    backward_.refuses({{spoil, part.message}});
  }
  shard_.accepts([](Shard& a) { a.first_class = 3; });
}

TEST_F(CrossEntropyErrors, ShapesOfStatistics) {
  shard_.refuses({{&Shard::statistics, statistics_.view({4, 8}),
                   "statistics has shape [4, 8], expected [4, 10] (the statistics of each row of logits)"}});
  merge_.refuses({
      {&Merge::statistics, ones({2, 5, 10}),
       "statistics has shape [2, 5, 10], expected [2, 4, 10] (the statistics of each shard and each row)"},
      {&Merge::statistics, ones({4, 10}),
       "statistics has shape [4, 10], expected [4, 4, 10] (the statistics of each shard and each row)"},
      {[](Merge& a) { a.classes = 0; }, "classes is 0, expected the number of classes of all shards"},
      {&Merge::lse, lse_.view({5}), "lse has shape [5]" + kPerRow},
  });
}

TEST_F(CrossEntropyErrors, Rescaling) {
  rescale_.refuses({
      {&Rescale::grad_logits, missing(), "grad_logits is missing"},
      {&Rescale::grad_loss, missing(), "grad_loss is missing"},
      {[](Rescale& a) { a.class_axis = 2; }, "class_axis is 2, expected -2 to 1 (grad_logits has 2 axes)"},
      {&Rescale::grad_loss, ones({3}), "grad_loss has shape [3]" + kPerRow},
      {&Rescale::grad_logits, of_dtype(DType::int32),
       "grad_logits has dtype int32, expected float32 or float64 or float16 or bfloat16 (gradients are floating-point "
       "numbers)"},
      {&Rescale::grad_loss, of_dtype(DType::bfloat16),
       "grad_loss has dtype bfloat16, expected float32 (as the loss, or logits)"},
      {&Rescale::grad_logits, of_strides({1, 1}), sharing("grad_logits has shape [4, 3] and strides [1, 1]")},
      {&Rescale::grad_loss, grad_logits_.view({4}), overlapping("grad_logits", "grad_loss")},
      {&Rescale::grad_loss, on_device(kCuda), "grad_loss is on cuda:0, expected cpu (as grad_logits)"},
  });
}

TEST_F(CrossEntropyErrors, Threads) {
  forward_.refuses_numbers_of_threads();
  backward_.refuses_numbers_of_threads();
  in_place_.refuses_numbers_of_threads();
  shard_.refuses_numbers_of_threads();
  merge_.refuses_numbers_of_threads();
  rescale_.refuses_numbers_of_threads();
}

TEST_F(CrossEntropyErrors, StridesOfAnEmptyTensorMayBeAnything) {
  Forward args = forward_.legal;
  args.logits = TensorView::strided(logits_.data(), DType::float32, {4, 0}, {std::int64_t{1} << 62, 7});
  args.class_weight = TensorView::contiguous(ones_.data(), DType::float32, {0});
  args.targets = TensorView::strided(ones_.data(), DType::float32, {4, 0}, {7, std::int64_t{1} << 62});
  EXPECT_NO_THROW(cross_entropy_forward(args));
  EXPECT_EQ(lse_.memory[3], -std::numeric_limits<float>::infinity());
  EXPECT_EQ(loss_.memory[0], 0.0f);
}

TEST_F(CrossEntropyErrors, MemoryThatInterleavesWithoutSharingIsLegal) {
  // Each row of one buffer holds a row of logits, then a row of their gradient.
  std::vector<float> buffer(4 * 7, 1.0f);
  const auto half = [&](int start) {
    return TensorView::strided(static_cast<void*>(buffer.data() + start), DType::float32, {4, 3}, {7, 1});
  };
  Forward forward = forward_.legal;
  forward.logits = half(0);
  EXPECT_NO_THROW(cross_entropy_forward(forward));
  EXPECT_NEAR(lse_.memory[3], 1.0f + std::log(3.0f), 1e-6f);
  Backward backward = backward_.legal;
  backward.logits = half(0);
  backward.grad_logits = half(4);
  backward.lse = forward.lse;
  EXPECT_NO_THROW(cross_entropy_backward(backward));
  EXPECT_NEAR(buffer[5], 1.0f / 3.0f, 1e-6f);
  EXPECT_EQ(buffer[3], 1.0f);
}

}  // namespace
}  // namespace eaves::testing
