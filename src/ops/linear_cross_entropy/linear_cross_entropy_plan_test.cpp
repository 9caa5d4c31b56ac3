// The plan of linear_cross_entropy: blocks within the limit, of whole tiles if possible, and the choice of the
// algorithm. The tests need no device.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <vector>

#include "eaves/linear_cross_entropy.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_plan.h"
#include "testing/cases.h"
#include "testing/refusals.h"

namespace eaves::testing {
namespace {

using Mode = LinearCrossEntropyMode;

struct Sizes {
  std::int64_t rows;
  std::int64_t features;
  std::int64_t classes;
};

LinearCrossEntropyShape shape_of(Mode mode, const Sizes& sizes, DType dtype, Device device, bool gathers) {
  LinearCrossEntropyShape shape;
  shape.mode = mode;
  shape.device = device;
  shape.dtype = shape.grad_hidden_dtype = shape.grad_head_dtype = dtype;
  shape.rows = sizes.rows;
  shape.features = sizes.features;
  shape.classes = shape.all_classes = shape.most_classes = sizes.classes;
  shape.is_reduced = true;
  shape.skips_ignored = gathers;
  shape.has_lse = true;
  shape.has_grad_hidden = shape.has_grad_head = mode != Mode::forward;
  return shape;
}

/// Runs `check(shape, limit)` for sizes of tests and of models, on both devices.
template <typename Check>
void for_each_shape(Check check) {
  constexpr std::size_t kMebibyte = std::size_t{1} << 20;
  for (const Mode mode : {Mode::forward, Mode::forward_backward, Mode::backward}) {
    for (const Sizes& sizes : {Sizes{1, 1, 1}, Sizes{23, 16, 24}, Sizes{300, 24, 601}, Sizes{8192, 4096, 131072},
                               Sizes{4099, 2048, 50257}, Sizes{std::int64_t{1} << 20, 4096, 262144}}) {
      for (const auto& [dtype, device, gathers] :
           combine<DType, Device, bool>({DType::bfloat16, DType::float64}, {kCpu, kCuda}, {false, true})) {
        const LinearCrossEntropyShape shape = shape_of(mode, sizes, dtype, device, gathers);
        for (const std::size_t limit : {std::size_t{1}, std::size_t{9000}, kMebibyte, 40 * kMebibyte, 160 * kMebibyte,
                                        1088 * kMebibyte, 40000 * kMebibyte}) {
          SCOPED_TRACE("mode " + std::to_string(static_cast<int>(mode)) + ", " + std::to_string(sizes.rows) +
                       " rows, " + std::to_string(sizes.features) + " features, " + std::to_string(sizes.classes) +
                       " classes, limit " + std::to_string(limit));
          check(shape, limit);
        }
      }
    }
  }
}

std::size_t least_bytes(const LinearCrossEntropyShape& shape) { return workspace_bytes(shape, least_block(shape)); }

TEST(LinearCrossEntropyPlan, BlocksAreWithinTheLimitWhereThatSuffices) {
  for_each_shape([](const LinearCrossEntropyShape& shape, std::size_t limit) {
    const LinearCrossEntropyBlock block = plan_block(shape, limit);
    ASSERT_GE(block.rows, 1);
    ASSERT_GE(block.classes, 1);
    ASSERT_LE(block.rows, shape.rows);
    ASSERT_LE(block.classes, shape.classes);
    ASSERT_LE(workspace_bytes(shape, block), std::max(limit, least_bytes(shape)));
  });
}

TEST(LinearCrossEntropyPlan, ALimitThatIsTooLittleForAnythingTakesTheLeastBlock) {
  for_each_shape([](const LinearCrossEntropyShape& shape, std::size_t) {
    const LinearCrossEntropyBlock block = plan_block(shape, 1);  // less than one row
    ASSERT_EQ(block.rows, std::min(shape.rows, policy_of(shape.device).least_rows));
    const std::int64_t least = std::min(shape.classes, policy_of(shape.device).least_classes);
    ASSERT_EQ(block.classes, shape.cuts_classes() ? least : shape.classes);
  });
}

TEST(LinearCrossEntropyPlan, WhereGradientsAreComputedAtOnceABlockHasAllClasses) {
  for_each_shape([](const LinearCrossEntropyShape& shape, std::size_t limit) {
    if (shape.mode != Mode::forward_backward) return;
    ASSERT_EQ(plan_block(shape, limit).classes, shape.classes);
  });
}

TEST(LinearCrossEntropyPlan, WhatFitsIsOneBlock) {
  for_each_shape([](const LinearCrossEntropyShape& shape, std::size_t limit) {
    if (workspace_bytes(shape, {shape.rows, shape.classes}) > limit) return;
    const LinearCrossEntropyBlock block = plan_block(shape, limit);
    ASSERT_EQ(block.rows, shape.rows);
    ASSERT_EQ(block.classes, shape.classes);
  });
}

TEST(LinearCrossEntropyPlan, BlocksAreOfWholeTilesWhereTheyAreLargerThanOne) {
  for_each_shape([](const LinearCrossEntropyShape& shape, std::size_t limit) {
    const LinearCrossEntropyBlock block = plan_block(shape, limit);
    if (!shape.cuts_classes() && block.rows < shape.rows && block.rows > policy_of(shape.device).row_tile) {
      ASSERT_EQ(block.rows % policy_of(shape.device).row_tile, 0);
    }
    if (block.classes < shape.classes && block.classes > policy_of(shape.device).class_tile) {
      ASSERT_EQ(block.classes % policy_of(shape.device).class_tile, 0);
    }
  });
}

TEST(LinearCrossEntropyPlan, AWorkspaceOfTheStatedSizeIsCutNoWorse) {
  for_each_shape([](const LinearCrossEntropyShape& shape, std::size_t limit) {
    const LinearCrossEntropyBlock block = plan_block(shape, limit);
    // Skips limits below the smallest chunk, and sizes at which the rounding of a part to 256 bytes makes room for
    // another row.
    if (workspace_bytes(shape, block) > limit || limit < (std::size_t{1} << 20)) return;
    const LinearCrossEntropyBlock again = plan_block(shape, workspace_bytes(shape, block));
    if (shape.cuts_classes()) {
      ASSERT_LE(seconds_of(shape, again), seconds_of(shape, block));
    } else {
      ASSERT_EQ(again.rows, block.rows);
    }
  });
}

TEST(LinearCrossEntropyPlan, ALimitBelowATileIsUsedForRows) {
  const LinearCrossEntropyShape shape = shape_of(Mode::backward, {512, 4096, 32768}, DType::bfloat16, kCpu, false);
  const std::size_t limit = per_row_bytes(shape) + 400'000;
  const LinearCrossEntropyBlock block = plan_block(shape, limit);
  EXPECT_GT(block.rows, 8);
  EXPECT_GT(workspace_bytes(shape, block), limit / 2);
}

TEST(LinearCrossEntropyPlan, MoreClassesThanFloat32CountsAreNotCutWhereTheArgmaxIsWanted) {
  LinearCrossEntropyShape shape =
      shape_of(Mode::forward, {64, 8, (std::int64_t{1} << 24) + 2}, DType::bfloat16, kCuda, false);
  EXPECT_LT(plan_block(shape, std::size_t{102} << 20).classes, shape.classes);
  shape.has_argmax = true;
  EXPECT_EQ(plan_block(shape, std::size_t{102} << 20).classes, shape.classes);
}

TEST(LinearCrossEntropyPlan, ManyRowsAreCutBeforeBlocksOfClassesBecomeThin) {
  // More chunks than the plan tries one by one: a million rows, with gathered hidden and sums of its gradient.
  const LinearCrossEntropyShape shape =
      shape_of(Mode::backward, {std::int64_t{1} << 20, 4096, 131072}, DType::bfloat16, kCuda, true);
  EXPECT_GE(plan_block(shape, std::size_t{160} << 20).classes, policy_of(shape.device).class_tile);
}

TEST(LinearCrossEntropyPlan, TheWorkspaceFollowsTheMemoryOfTheGpu) {
  constexpr std::size_t kMebibyte = std::size_t{1} << 20;
  LinearCrossEntropyShape shape =
      shape_of(Mode::forward_backward, {12288, 4096, 262144}, DType::bfloat16, kCuda, false);
  const auto limit_of = [&](std::size_t mebibytes) {
    shape.device_bytes = mebibytes * kMebibyte;
    return (limit_without_workspace(shape) - per_row_bytes(shape)) / kMebibyte;
  };
  EXPECT_EQ(limit_of(0), 1064u);
  EXPECT_EQ(limit_of(81920), 1064u);
  EXPECT_EQ(limit_of(24576), 768u);
  EXPECT_EQ(limit_of(2048), 140u);
  shape.is_shard = true;
  EXPECT_EQ(limit_of(24576), limit_of(0));
}

TEST(LinearCrossEntropyPlan, AnOnlineSoftmaxTakesManyRowsAtOnceInTheMemoryOfAGuess) {
  const auto block_of = [](std::int64_t classes, bool has_entropy) {
    LinearCrossEntropyShape shape = shape_of(Mode::forward, {12288, 4096, classes}, DType::bfloat16, kCuda, false);
    shape.is_fused = true;
    shape.has_entropy = has_entropy;
    const std::size_t limit = limit_without_workspace(shape);
    const LinearCrossEntropyBlock block = plan_block(shape, limit);
    EXPECT_LE(workspace_bytes(shape, block), limit);
    EXPECT_EQ(block.classes, classes);
    EXPECT_TRUE(shape.has_online_softmax());
    shape.features = kLeastOnlineFeatures - 1;
    EXPECT_FALSE(shape.has_online_softmax());
    return block;
  };
  EXPECT_EQ(block_of(4096, true).rows, 12288);
  EXPECT_EQ(block_of(32768, true).rows, 12288);
  EXPECT_EQ(block_of(65536, false).rows, 12288);
  EXPECT_EQ(block_of(65536, true).rows, 6144);
  EXPECT_EQ(block_of(131072, false).rows, 6144);
  constexpr std::size_t kMebibyte = std::size_t{1} << 20;
  LinearCrossEntropyShape least = shape_of(Mode::forward, {12288, 4096, 4096}, DType::bfloat16, kCuda, false);
  least.is_fused = true;
  EXPECT_LT(workspace_bytes(least, {12288, 4096}), 8 * kMebibyte);
}

TEST(LinearCrossEntropyPlan, WithBatchInvarianceTheClassesOfABlockDoNotFollowTheRows) {
  const auto classes_of = [](Mode mode, Device device, std::size_t limit) {
    std::set<std::int64_t> classes;
    for (const auto& [rows, gathers] : combine<std::int64_t, bool>({1, 7, 100, 1000, 4099, 65536}, {false, true})) {
      LinearCrossEntropyShape shape = shape_of(mode, {rows, 512, 50257}, DType::bfloat16, device, gathers);
      shape.workspace_limit = limit;
      if (mode == Mode::backward && rows == 7) shape.targets_dtype = shape.accumulator();  // soft targets
      classes.insert(plan_block(shape, limit_without_workspace(shape)).classes);
    }
    return classes;
  };
  for (const auto& [device, limit] :
       combine<Device, std::size_t>({kCpu, kCuda}, {std::size_t{0}, std::size_t{64} << 20})) {
    EXPECT_GT(classes_of(Mode::backward, device, limit).size(), 1u);
    setenv("EAVES_BATCH_INVARIANT", "1", 1);
    for (const Mode mode : {Mode::forward, Mode::forward_backward, Mode::backward}) {
      EXPECT_EQ(classes_of(mode, device, limit).size(), 1u) << "mode " << int(mode) << ", limit " << limit;
    }
    unsetenv("EAVES_BATCH_INVARIANT");
  }
}

TEST(LinearCrossEntropyPlan, PartsOfTheWorkspaceAreAlignedAndDoNotOverlap) {
  for_each_shape([](const LinearCrossEntropyShape& shape, std::size_t limit) {
    const LinearCrossEntropyBlock block = plan_block(shape, limit);
    LinearCrossEntropyMemory memory;
    char* const base = reinterpret_cast<char*>(std::uintptr_t{256});
    const std::size_t bytes = lay_out(shape, block, base, memory);
    ASSERT_EQ(bytes, workspace_bytes(shape, block));
    std::vector<char*> parts;
    for (void* part : {static_cast<void*>(memory.row_indices), static_cast<void*>(memory.targets), memory.grad_loss,
                       memory.per_row.loss, memory.per_row.lse.data, memory.numbers, memory.bias, memory.class_weight,
                       static_cast<void*>(memory.grad_bias), memory.hidden, memory.grad_hidden, memory.logits,
                       memory.loss.data, memory.product.data}) {
      if (part != nullptr) parts.push_back(static_cast<char*>(part));
    }
    std::sort(parts.begin(), parts.end());
    ASSERT_GE(parts.front(), base);
    ASSERT_LT(parts.back(), base + bytes);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      ASSERT_EQ(reinterpret_cast<std::uintptr_t>(parts[i]) % 256, 0u);
      if (i > 0) {
        ASSERT_NE(parts[i], parts[i - 1]);
      }
    }
  });
}

TEST(LinearCrossEntropyAlgorithm, FollowsFromSizesTypesOutputsAndTheLimit) {
  constexpr std::size_t kMebibyte = std::size_t{1} << 20;
  using Args = LinearCrossEntropyAlgorithmArgs;
  const Args on_cpu{.rows = 4096, .features = 64, .classes = 1000, .dtype = DType::bfloat16};
  const Args on_gpu{.rows = 4096, .features = 64, .classes = 100000, .dtype = DType::bfloat16, .device = kCuda};
  const auto changed = [](Args args, auto change) {
    change(args);
    return args;
  };
  struct Case {
    const char* what;
    Args args;
    bool is_speed;
  };
  const std::vector<Case> cases = {
      {"a CPU's own limit has room for a row", on_cpu, true},
      {"not one row of logits fits", changed(on_cpu, [](Args& args) { args.workspace_limit = 4000; }), false},
      {"one row fits", changed(on_cpu, [](Args& args) { args.workspace_limit = kMebibyte; }), true},
      {"no rows", changed(on_cpu, [](Args& args) { args.rows = 0; }), true},
      {"float32", changed(on_cpu, [](Args& args) { args.dtype = DType::float32; }), true},
      {"float64 and soft targets",
       changed(on_cpu, [](Args& args) { args.dtype = DType::float64, args.has_soft_targets = true; }), true},
      {"float16", changed(on_cpu, [](Args& args) { args.dtype = DType::float16; }), false},
      {"a loss per row", changed(on_cpu, [](Args& args) { args.reduction = Reduction::none; }), false},
      {"a loss per row, with grad_hidden alone",
       changed(on_cpu, [](Args& args) { args.reduction = Reduction::none, args.has_grad_hidden_alone = true; }), true},
      {"a sum", changed(on_cpu, [](Args& args) { args.reduction = Reduction::sum; }), true},
      {"lse gets a gradient", changed(on_cpu, [](Args& args) { args.has_output_gradients = true; }), false},
      {"grad_head is added", changed(on_cpu, [](Args& args) { args.accumulates = true; }), false},
      {"a shard", changed(on_cpu, [](Args& args) { args.is_shard = true; }), true},
      {"a shard with a limit, which has room",
       changed(on_cpu, [](Args& args) { args.is_shard = true, args.workspace_limit = 64 * kMebibyte; }), false},
      {"unknown sizes", changed(on_cpu, [](Args& args) { args.rows = -1; }), true},
      {"unknown sizes with a limit",
       changed(on_cpu, [](Args& args) { args.rows = -1, args.workspace_limit = 64 * kMebibyte; }), false},
      {"a GPU's own limit has room for 384 rows", on_gpu, true},
      {"a limit with room for 384 rows: 147 MiB of logits",
       changed(on_gpu, [](Args& args) { args.workspace_limit = 200 * kMebibyte; }), true},
      {"a limit without: on the fused path half as many bytes",
       changed(on_gpu, [](Args& args) { args.workspace_limit = 100 * kMebibyte, args.is_head_transposed = true; }),
       false},
      {"all rows are fewer than 384",
       changed(on_gpu, [](Args& args) { args.workspace_limit = 100 * kMebibyte, args.rows = 100; }), true},
      {"a head so large that 384 rows of logits are beyond a GPU's own limit",
       changed(on_gpu, [](Args& args) { args.classes = std::int64_t{1} << 21; }), false},
  };
  for (const Case& each : cases) {
    EXPECT_EQ(linear_cross_entropy_algorithm(each.args) == LinearCrossEntropyAlgorithm::speed, each.is_speed)
        << each.what;
  }
}

TEST(LinearCrossEntropyAlgorithm, IsNotChosenForSizesAndTypesThatNoCallHas) {
  const std::string expected = ", expected a floating-point type and at least one feature and one class";
  expect_message([] { linear_cross_entropy_algorithm({.features = 0}); },
                 "linear_cross_entropy_algorithm: hidden has 0 features in float32 for 1 classes" + expected);
  expect_message([] { linear_cross_entropy_algorithm({.classes = 0}); },
                 "linear_cross_entropy_algorithm: hidden has 1 features in float32 for 0 classes" + expected);
  expect_message([] { linear_cross_entropy_algorithm({.dtype = DType::int64}); },
                 "linear_cross_entropy_algorithm: hidden has 1 features in int64 for 1 classes" + expected);
}

}  // namespace
}  // namespace eaves::testing
