// Work that a backward saves: rows with logits or exponentials that the forward has kept, and rows without an upstream
// gradient.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "ops/linear_cross_entropy/linear_cross_entropy_test_case.h"
#include "testing/devices.h"

namespace eaves::testing {
namespace {

constexpr std::size_t kEnough = std::size_t{1} << 40;

/// Checks a case with several numbers of kept rows. A proper part is more than half of the rows that count, so that
/// sums of grad_head meet once.
void check_kept(LinearCrossEntropyCase c, const std::vector<std::int64_t>& rows) {
  for (const std::int64_t kept : rows) {
    c.kept_rows = kept;
    check_linear_cross_entropy(c);
  }
}

/// The options of calls that keep their logits.
template <typename Check>
void with_each_option(LinearCrossEntropyCase base, const std::vector<Reduction>& reductions, Check check) {
  const auto with = [&](auto change) {
    LinearCrossEntropyCase c = base;
    change(c);
    check(c);
  };
  for (const Reduction reduction : reductions) {
    base.options.reduction = reduction;
    with([](LinearCrossEntropyCase&) {});
    with([](LinearCrossEntropyCase& c) { c.has_grad_entropy = c.has_grad_lse = c.wants_all_of_row = true; });
    with([](LinearCrossEntropyCase& c) { c.options.scale = 0.7, c.options.z_loss_weight = 0.01; });
    with([](LinearCrossEntropyCase& c) { c.options.softcap = 3.0, c.options.scale = 2.0; });
    with([](LinearCrossEntropyCase& c) { c.bias_dtype = DType::float32, c.wanted.bias = true, c.accumulates = true; });
    with([](LinearCrossEntropyCase& c) { c.class_weight_dtype = DType::float32, c.has_row_weight = true; });
    with([](LinearCrossEntropyCase& c) { c.skips_ignored = c.has_split_lse = true; });
    with([](LinearCrossEntropyCase& c) { c.wanted.hidden = false, c.grad_head_dtype = DType::float32; });
    with([](LinearCrossEntropyCase& c) { c.wanted.head = false; });
  }
}

class LinearCrossEntropyKept : public OnEachDevice {};

TEST_P(LinearCrossEntropyKept, LogitsMatchTheOracle) {
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
    LinearCrossEntropyCase base{.device = device(), .dtype = dtype, .row_shape = {5, 7}, .classes = 71};
    base.wanted.bias = false;
    with_each_option(base, {Reduction::none, Reduction::sum, Reduction::mean}, [](const LinearCrossEntropyCase& c) {
      check_kept(c, {0, 18, 35, 50});
    });
    base.options.label_smoothing = 0.1;
    check_kept(base, {18, 35});
    base.targets_dtype = DType::float32;
    check_kept(base, {18, 35});
    base.skips_ignored = base.has_row_weight = true;
    check_kept(base, {18, 35});
  }
}

TEST_P(LinearCrossEntropyKept, LogitsInSeveralChunksAndBlocksMatchTheOracle) {
  LinearCrossEntropyCase c{.device = device(), .dtype = DType::float32, .row_shape = {300}, .features = 24};
  c.classes = 700;
  c.wanted.bias = false;
  c.workspace_limit = 250000;
  check_kept(c, {0, 160, 300});
}

TEST_P(LinearCrossEntropyKept, LogitsGiveTheBitsOfARecomputingBackward) {
  LinearCrossEntropyCase c{.device = device(), .dtype = DType::float32, .row_shape = {96}, .features = 32};
  c.classes = 512;
  c.has_grad_entropy = c.has_grad_lse = true;
  LinearCrossEntropyRun recomputed(c);
  recomputed.run();
  c.kept_rows = 96;
  LinearCrossEntropyRun kept(c);
  kept.run();
  EXPECT_TRUE(kept.gradients.hidden.bytes() == recomputed.gradients.hidden.bytes());
  EXPECT_TRUE(kept.gradients.head.bytes() == recomputed.gradients.head.bytes());
}

/// The rows of a transposed hidden are computed in another order than the rows of the per-row tensors. The strides of
/// the backward's tensors may change that order.
TEST_P(LinearCrossEntropyKept, NothingIsKeptOfRowsInAnotherOrder) {
  LinearCrossEntropyCase c{.device = device(), .dtype = DType::float32, .row_shape = {5, 7}, .classes = 71};
  c.hidden_placement = with_strides({16, 80, 1});
  LinearCrossEntropyRun transposed(c);
  EXPECT_EQ(linear_cross_entropy_kept(transposed.forward_args(), kEnough).rows, 0);
  c.hidden_placement = {};
  c.kept_rows = 35;
  c.grad_hidden_placement = with_strides({16, 80, 1});
  c.grad_loss_placement = with_strides({1, 5});
  c.options.reduction = Reduction::none;
  check_linear_cross_entropy(c);
  const TestTensor kept(device(), DType::float32, {1, logits_stride(c.classes)});
  LinearCrossEntropyForwardArgs args = transposed.forward_args();
  args.kept = kept.view();
  EXPECT_THROW(linear_cross_entropy_forward(args), InvalidArgument);
}

TEST_P(LinearCrossEntropyKept, RefusesATensorOfAnotherShape) {
  LinearCrossEntropyCase c{.device = device(), .dtype = DType::bfloat16, .row_shape = {8}};
  c.kept_rows = 8;
  LinearCrossEntropyRun run(c);
  const auto refuses = [&](const TestTensor& kept) {
    LinearCrossEntropyForwardArgs forward = run.forward_args();
    forward.kept = kept.view();
    EXPECT_THROW(linear_cross_entropy_forward(forward), InvalidArgument);
    LinearCrossEntropyBackwardArgs backward = run.backward_args();
    backward.kept = kept.view();
    EXPECT_THROW(linear_cross_entropy_backward(backward), InvalidArgument);
  };
  const std::int64_t columns = run.kept->view().shape[1];
  refuses(TestTensor(device(), DType::float32, {8, columns + 32}));
  refuses(TestTensor(device(), DType::float64, {8, columns}));
  refuses(TestTensor(device(), DType::float32, {8 * columns}));
  refuses(TestTensor(device(), DType::bfloat16, {8, kept_exps_stride(c.classes)}));  // so few classes keep no exps
  refuses(TestTensor(device(), DType::float32, {8, columns}, with_strides({2 * columns, 1})));
}

/// hidden may hold anything in these rows.
TEST_P(LinearCrossEntropyKept, RowsWithoutUpstreamGradientsAreLeftOut) {
  LinearCrossEntropyCase plain{.device = device(), .dtype = DType::float32, .row_shape = {50}, .classes = 71};
  plain.options.reduction = Reduction::none;
  plain.skips_ignored = plain.has_grad_lse = plain.has_grad_entropy = true;
  plain.wanted.bias = false;
  LinearCrossEntropyCase half = plain;
  half.dtype = DType::bfloat16;
  half.has_grad_lse = half.has_grad_entropy = false;
  LinearCrossEntropyCase chunks = plain;
  chunks.workspace_limit = 4000;
  LinearCrossEntropyCase soft = plain;
  soft.targets_dtype = DType::float32;
  soft.has_row_weight = true;
  for (const LinearCrossEntropyCase& c : {plain, half, chunks, soft}) {
    SCOPED_TRACE(description_of(c));
    LinearCrossEntropyRun run(c), spoilt(c);
    const auto has_upstream = [](std::int64_t i) { return i % 3 == 0 || i > 40; };
    for (LinearCrossEntropyRun* of : {&run, &spoilt}) {
      for (TestTensor* upstream : {&of->grad_loss, &of->grad_lse, &of->grad_entropy}) {
        for (std::int64_t i = 0; i < 50; ++i) {
          if (!has_upstream(i)) upstream->set(i, i % 2 == 0 ? 0.0 : -0.0);
        }
        upstream->upload();
      }
    }
    for (std::int64_t i = 0; i < 50; ++i) {
      if (!has_upstream(i)) spoilt.hidden.set(i * c.features, std::numeric_limits<double>::quiet_NaN());
    }
    spoilt.hidden.upload();
    run.run();
    LinearCrossEntropyComparison comparison(run);
    EXPECT_EQ(comparison.compare(), "");
    spoilt.run();
    EXPECT_TRUE(spoilt.gradients.hidden.bytes() == run.gradients.hidden.bytes());
    EXPECT_TRUE(spoilt.gradients.head.bytes() == run.gradients.head.bytes());
  }
}

EAVES_EACH_DEVICE(LinearCrossEntropyKept);

// ---- exponentials --------------------------------------------------------------------------------------------------

class LinearCrossEntropyKeptOnGpu : public OnGpuWithFusedPath {};

LinearCrossEntropyCase exps_case(std::int64_t rows = 300, std::int64_t classes = 4099) {
  LinearCrossEntropyCase c{.device = kCuda, .dtype = DType::bfloat16, .row_shape = {rows}, .features = 40};
  c.classes = classes;
  c.wants_all_of_row = false;
  c.wanted.bias = false;
  return c;
}

bool keeps_exps(const LinearCrossEntropyCase& c) {
  LinearCrossEntropyRun run(c);
  return linear_cross_entropy_kept(run.forward_args(), kEnough).dtype == DType::bfloat16;
}

TEST_F(LinearCrossEntropyKeptOnGpu, CallsThatKeepExpsAndCallsThatKeepLogits) {
  EXPECT_TRUE(keeps_exps(exps_case()));
  const auto expect_logits = [](auto change) {
    LinearCrossEntropyCase c = exps_case();
    change(c);
    EXPECT_FALSE(keeps_exps(c)) << description_of(c);
  };
  expect_logits([](LinearCrossEntropyCase& c) { c.dtype = DType::float16; });
  expect_logits([](LinearCrossEntropyCase& c) { c.dtype = DType::float32; });
  expect_logits([](LinearCrossEntropyCase& c) { c.classes = 4095; });
  expect_logits([](LinearCrossEntropyCase& c) { c.options.label_smoothing = 0.1; });
  expect_logits([](LinearCrossEntropyCase& c) { c.targets_dtype = DType::float32; });
  expect_logits([](LinearCrossEntropyCase& c) { c.wants_all_of_row = true; });  // argmax
  expect_logits(
      [](LinearCrossEntropyCase& c) { c.wants_all_of_row = c.wants_entropy_alone = true, c.options.softcap = 5.0; });
}

TEST_F(LinearCrossEntropyKeptOnGpu, ExpsMatchTheOracle) {
  with_each_option(exps_case(), {Reduction::none, Reduction::mean}, [](LinearCrossEntropyCase c) {
    c.wants_entropy_alone = c.has_grad_entropy;
    EXPECT_TRUE(keeps_exps(c)) << description_of(c);
    check_kept(c, {160, 300});
  });
  LinearCrossEntropyCase c = exps_case();
  c.wants_all_of_row = c.wants_entropy_alone = c.has_grad_entropy = c.skips_ignored = c.accumulates = true;
  c.bias_dtype = DType::bfloat16, c.wanted.bias = true;
  check_kept(c, {160, 300});
}

TEST_F(LinearCrossEntropyKeptOnGpu, ExpsOfEverySizeMatchTheOracle) {
  // Class counts next to whole vectors and whole tiles of 192 classes; one chunk and several.
  for (const std::int64_t classes : {4096, 4103, 4417, 4608}) check_kept(exps_case(257, classes), {200, 257});
  LinearCrossEntropyCase many = exps_case(1000);
  check_kept(many, {0, 1000});
  many.workspace_limit = 900000;
  many.skips_ignored = true;
  check_kept(many, {600, 1000});
  many.grad_hidden_placement = with_strides({40, 1}, 1);  // not on 16 bytes, so hidden is copied chunk by chunk
  check_kept(many, {1000});
}

TEST_F(LinearCrossEntropyKeptOnGpu, ExpsOfEntropiesOfEverySizeMatchTheOracle) {
  for (const std::int64_t classes : {4096, 4103, 4417}) {
    LinearCrossEntropyCase c = exps_case(257, classes);
    c.wants_all_of_row = c.wants_entropy_alone = c.has_grad_entropy = true;
    check_kept(c, {200, 257});
    c.options.scale = 0.6;
    check_kept(c, {257});
  }
}

/// Rows with a logit far from all samples, with and without a gradient of the entropy.
TEST_F(LinearCrossEntropyKeptOnGpu, RowsFarFromTheirSampledLogitsMatchTheOracle) {
  for (const double apart : {-200.0, 100.0, 300.0}) {
    for (const bool has_entropy : {false, true}) {
      LinearCrossEntropyCase c = exps_case();
      c.wants_all_of_row = c.wants_entropy_alone = c.has_grad_entropy = has_entropy;
      const std::int64_t features = c.features;
      const auto is_first = [=](std::int64_t i) { return i % features == 0; };
      c.hidden = [=](std::int64_t i) { return is_first(i) ? 1.0 : random_normal(7, static_cast<std::uint64_t>(i)); };
      c.head = [=](std::int64_t i) {
        if (is_first(i)) return i / features % 64 == 5 ? apart : 0.0;
        return 0.3 * random_normal(8, static_cast<std::uint64_t>(i));
      };
      check_kept(c, {160, 300});
    }
  }
}

TEST_F(LinearCrossEntropyKeptOnGpu, RowsWithoutUpstreamGradientsGetZeros) {
  for (const bool has_entropy : {false, true}) {
    LinearCrossEntropyCase c = exps_case();
    c.options.reduction = Reduction::none;
    c.wants_all_of_row = c.wants_entropy_alone = c.has_grad_entropy = has_entropy;
    c.kept_rows = 300;
    LinearCrossEntropyRun run(c);
    run.grad_loss.fill([](std::int64_t i) { return i % 3 == 0 ? 0.0 : 1.0; });
    run.grad_entropy.fill([](std::int64_t i) { return i % 3 == 0 ? 0.0 : 0.5; });
    // Row 3 gets NaN statistics. (With a gradient of the entropy, the product reads hidden unscaled.)
    if (!has_entropy) run.hidden.set(3 * c.features, std::numeric_limits<double>::infinity());
    run.hidden.upload();
    run.run();
    bool has_others = false;
    for (std::int64_t i = 0; i < 300; ++i) {
      for (std::int64_t d = 0; d < c.features; ++d) {
        const double gradient = run.gradients.hidden.get(i * c.features + d);
        EXPECT_TRUE(i % 3 != 0 || gradient == 0.0) << "row " << i;
        has_others = has_others || gradient != 0.0;
      }
    }
    EXPECT_TRUE(has_others);
    for (std::int64_t i = 0; i < 10 * c.features; ++i) EXPECT_TRUE(std::isfinite(run.gradients.head.get(i)));
  }
}

TEST_F(LinearCrossEntropyKeptOnGpu, ExpsWithoutEntropiesServeASecondBackward) {
  LinearCrossEntropyCase c = exps_case();
  c.kept_rows = 200;
  LinearCrossEntropyRun once(c), twice(c);
  once.run();
  twice.launch();
  linear_cross_entropy_backward(twice.backward_args());
  twice.download();
  EXPECT_TRUE(twice.results_equal(once));
}

}  // namespace
}  // namespace eaves::testing
