// How linear_cross_entropy cuts its work: blocks that stay within the limit, of whole tiles where they can be, and the
// choice between the two ways to the gradients. No device is needed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <vector>

#include "eaves/linear_cross_entropy.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_plan.h"

namespace eaves::testing {
namespace {

using Mode = LinearCrossEntropyMode;

struct Sizes {
  std::int64_t rows;
  std::int64_t features;
  std::int64_t classes;
};

/// As a test of the plan reads it; pointers are looked at, not followed.
LinearCrossEntropyProblem problem_of(Mode mode, const Sizes& sizes, DType dtype, Device device, bool gathers) {
  static char something;
  AxisSet axes;
  axes.contains[1] = true;
  const Dims strides = {sizes.features, 1};
  const Dims per_row = {1, 0};
  const bool has_gradients = mode != Mode::forward;
  return {.mode = mode,
          .op = "",
          .view = make_row_view<2, 5>({sizes.rows, sizes.features}, axes, {strides, strides, per_row, per_row, {0, 0}}),
          .device = device,
          .dtype = dtype,
          .classes = sizes.classes,
          .targets = {&something, DType::int64},
          .options = {.reduction = Reduction::mean},
          .skips_ignored_rows = gathers,
          .outputs = {.lse = &something},
          .grad_x = has_gradients ? &something : nullptr,
          .grad_weight = has_gradients ? &something : nullptr};
}

/// Runs `check(problem, limit)` for sizes of tests and of models, on both devices.
template <typename Check>
void for_each_problem(Check check) {
  constexpr std::size_t kMebibyte = std::size_t{1} << 20;
  for (const Mode mode : {Mode::forward, Mode::forward_backward, Mode::backward}) {
    for (const Sizes& sizes : {Sizes{1, 1, 1}, Sizes{23, 16, 24}, Sizes{300, 24, 601}, Sizes{8192, 4096, 131072},
                               Sizes{4099, 2048, 50257}, Sizes{std::int64_t{1} << 20, 4096, 262144}}) {
      for (const DType dtype : {DType::bfloat16, DType::float64}) {
        for (const Device device : {kCpu, kCuda}) {
          for (const bool gathers : {false, true}) {
            const LinearCrossEntropyProblem problem = problem_of(mode, sizes, dtype, device, gathers);
            for (const std::size_t limit : {std::size_t{1}, std::size_t{9000}, kMebibyte, 40 * kMebibyte,
                                            160 * kMebibyte, 1088 * kMebibyte, 40000 * kMebibyte}) {
              SCOPED_TRACE("mode " + std::to_string(static_cast<int>(mode)) + ", " + std::to_string(sizes.rows) +
                           " rows, " + std::to_string(sizes.features) + " features, " + std::to_string(sizes.classes) +
                           " classes, limit " + std::to_string(limit));
              check(problem, limit);
            }
          }
        }
      }
    }
  }
}

std::size_t least_bytes(const LinearCrossEntropyProblem& problem) {
  return workspace_bytes(problem, least_block(problem));
}

TEST(LinearCrossEntropyPlan, BlocksAreWithinTheLimitWhereThatSuffices) {
  for_each_problem([](const LinearCrossEntropyProblem& problem, std::size_t limit) {
    const LinearCrossEntropyBlock block = plan_block(problem, limit);
    ASSERT_GE(block.rows, 1);
    ASSERT_GE(block.classes, 1);
    ASSERT_LE(block.rows, problem.rows());
    ASSERT_LE(block.classes, problem.classes);
    ASSERT_LE(workspace_bytes(problem, block), std::max(limit, least_bytes(problem)));
  });
}

TEST(LinearCrossEntropyPlan, ALimitThatIsTooLittleForAnythingTakesTheLeastBlock) {
  for_each_problem([](const LinearCrossEntropyProblem& problem, std::size_t) {
    const LinearCrossEntropyBlock block = plan_block(problem, 1);  // less than one row
    ASSERT_EQ(block.rows, std::min(problem.rows(), policy_of(problem.device).least_rows));
    const std::int64_t least = std::min(problem.classes, policy_of(problem.device).least_classes);
    ASSERT_EQ(block.classes, cuts_classes(problem) ? least : problem.classes);
  });
}

TEST(LinearCrossEntropyPlan, WhereGradientsAreComputedAtOnceABlockHasAllClasses) {
  for_each_problem([](const LinearCrossEntropyProblem& problem, std::size_t limit) {
    if (problem.mode != Mode::forward_backward) return;
    ASSERT_EQ(plan_block(problem, limit).classes, problem.classes);
  });
}

TEST(LinearCrossEntropyPlan, WhatFitsIsOneBlock) {
  for_each_problem([](const LinearCrossEntropyProblem& problem, std::size_t limit) {
    if (workspace_bytes(problem, {problem.rows(), problem.classes}) > limit) return;
    const LinearCrossEntropyBlock block = plan_block(problem, limit);
    ASSERT_EQ(block.rows, problem.rows());
    ASSERT_EQ(block.classes, problem.classes);
  });
}

TEST(LinearCrossEntropyPlan, BlocksAreOfWholeTilesWhereTheyAreLargerThanOne) {
  for_each_problem([](const LinearCrossEntropyProblem& problem, std::size_t limit) {
    const LinearCrossEntropyBlock block = plan_block(problem, limit);
    if (!cuts_classes(problem) && block.rows < problem.rows() && block.rows > policy_of(problem.device).row_tile) {
      ASSERT_EQ(block.rows % policy_of(problem.device).row_tile, 0);
    }
    if (block.classes < problem.classes && block.classes > policy_of(problem.device).class_tile) {
      ASSERT_EQ(block.classes % policy_of(problem.device).class_tile, 0);
    }
  });
}

TEST(LinearCrossEntropyPlan, AWorkspaceOfTheStatedSizeIsCutNoWorse) {
  for_each_problem([](const LinearCrossEntropyProblem& problem, std::size_t limit) {
    const LinearCrossEntropyBlock block = plan_block(problem, limit);
    // Where the smallest chunk is too large, and of sizes at which a part's rounding to 256 bytes holds another row.
    if (workspace_bytes(problem, block) > limit || limit < (std::size_t{1} << 20)) return;
    const LinearCrossEntropyBlock again = plan_block(problem, workspace_bytes(problem, block));
    if (cuts_classes(problem)) {
      ASSERT_LE(seconds_of(problem, again), seconds_of(problem, block));
    } else {
      ASSERT_EQ(again.rows, block.rows);
    }
  });
}

TEST(LinearCrossEntropyPlan, ALimitBelowATileIsUsedForRows) {
  const LinearCrossEntropyProblem problem =
      problem_of(Mode::backward, {512, 4096, 32768}, DType::bfloat16, kCpu, false);
  const std::size_t limit = per_row_bytes(problem) + 400'000;
  const LinearCrossEntropyBlock block = plan_block(problem, limit);
  EXPECT_GT(block.rows, 8);
  EXPECT_GT(workspace_bytes(problem, block), limit / 2);
}

TEST(LinearCrossEntropyPlan, MoreClassesThanFloat32CountsAreNotCutWhereTheArgmaxIsWanted) {
  static std::int64_t argmax;
  LinearCrossEntropyProblem problem =
      problem_of(Mode::forward, {64, 8, (std::int64_t{1} << 24) + 2}, DType::bfloat16, kCuda, false);
  EXPECT_LT(plan_block(problem, std::size_t{102} << 20).classes, problem.classes);
  problem.outputs.argmax = &argmax;
  EXPECT_EQ(plan_block(problem, std::size_t{102} << 20).classes, problem.classes);
}

TEST(LinearCrossEntropyPlan, ManyRowsAreCutBeforeBlocksOfClassesBecomeThin) {
  // More chunks than are tried one by one: rows of a million tokens, with their x and the sums of its gradient.
  const LinearCrossEntropyProblem problem =
      problem_of(Mode::backward, {std::int64_t{1} << 20, 4096, 131072}, DType::bfloat16, kCuda, true);
  EXPECT_GE(plan_block(problem, std::size_t{160} << 20).classes, policy_of(problem.device).class_tile);
}

TEST(LinearCrossEntropyPlan, WithBatchInvarianceTheClassesOfABlockDoNotFollowTheRows) {
  const auto classes_of = [](Mode mode, Device device, std::size_t limit) {
    std::set<std::int64_t> classes;
    for (const std::int64_t rows : {1, 7, 100, 1000, 4099, 65536}) {
      for (const bool gathers : {false, true}) {
        LinearCrossEntropyProblem problem = problem_of(mode, {rows, 512, 50257}, DType::bfloat16, device, gathers);
        problem.workspace_limit = limit;
        if (mode == Mode::backward && rows == 7) problem.targets.dtype = problem.accumulator();  // probabilities
        classes.insert(plan_block(problem, limit_without_workspace(problem)).classes);
      }
    }
    return classes;
  };
  for (const Device device : {kCpu, kCuda}) {
    for (const std::size_t limit : {std::size_t{0}, std::size_t{64} << 20}) {
      EXPECT_GT(classes_of(Mode::backward, device, limit).size(), 1u);
      setenv("EAVES_BATCH_INVARIANT", "1", 1);
      for (const Mode mode : {Mode::forward, Mode::forward_backward, Mode::backward}) {
        EXPECT_EQ(classes_of(mode, device, limit).size(), 1u) << "mode " << int(mode) << ", limit " << limit;
      }
      unsetenv("EAVES_BATCH_INVARIANT");
    }
  }
}

TEST(LinearCrossEntropyPlan, PartsOfTheWorkspaceAreAlignedAndDoNotOverlap) {
  for_each_problem([](const LinearCrossEntropyProblem& problem, std::size_t limit) {
    const LinearCrossEntropyBlock block = plan_block(problem, limit);
    LinearCrossEntropyMemory memory;
    char* const base = reinterpret_cast<char*>(std::uintptr_t{256});
    const std::size_t bytes = lay_out(problem, block, base, memory);
    ASSERT_EQ(bytes, workspace_bytes(problem, block));
    std::vector<char*> parts;
    for (void* part : {static_cast<void*>(memory.row_indices), static_cast<void*>(memory.targets), memory.grad_loss,
                       memory.per_row.loss, memory.per_row.lse.data, memory.numbers, memory.bias, memory.class_weight,
                       static_cast<void*>(memory.grad_bias), memory.x, memory.grad_x, memory.logits, memory.loss.data,
                       memory.product.data}) {
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

/// A call of the forward whose dL/d(loss) comes later; nothing of it is read.
struct Call {
  explicit Call(DType dtype, Reduction reduction = Reduction::mean)
      : args{.inputs = {.x = view(dtype, {4096, 64}),
                        .weight = view(dtype, {1000, 64}),
                        .targets = view(DType::int64, {4096}),
                        .options = {.reduction = reduction}},
             .outputs = {.loss = view(DType::float32, reduction == Reduction::none ? Dims{4096} : Dims{})}} {}

  TensorView view(DType dtype, const Dims& shape) {
    address += std::uintptr_t{1} << 30;
    return TensorView::contiguous(reinterpret_cast<void*>(address), dtype, shape);
  }

  std::uintptr_t address = 0;
  LinearCrossEntropyForwardArgs args;
};

TEST(LinearCrossEntropyPlan, TheSpeedyWayIsChosenWhereTheWorkspaceHasRoomForAChunk) {
  Call call(DType::bfloat16);
  EXPECT_EQ(linear_cross_entropy_algorithm(call.args), LinearCrossEntropyAlgorithm::speed);
  call.args.inputs.workspace_limit = 4000;  // not one row of logits
  EXPECT_EQ(linear_cross_entropy_algorithm(call.args), LinearCrossEntropyAlgorithm::recompute);
  const ExecutionContext large{.workspace = {reinterpret_cast<void*>(std::uintptr_t{256}), std::size_t{64} << 20}};
  EXPECT_EQ(linear_cross_entropy_algorithm(call.args, large), LinearCrossEntropyAlgorithm::speed);
  const ExecutionContext small{.workspace = {reinterpret_cast<void*>(std::uintptr_t{256}), 4000}};
  call.args.inputs.workspace_limit = 0;
  EXPECT_EQ(linear_cross_entropy_algorithm(call.args, small), LinearCrossEntropyAlgorithm::recompute);
}

TEST(LinearCrossEntropyPlan, WhatAGradientThatComesLaterCannotFinishIsComputedInTheBackward) {
  EXPECT_EQ(linear_cross_entropy_algorithm(Call(DType::float32).args), LinearCrossEntropyAlgorithm::speed);
  EXPECT_EQ(linear_cross_entropy_algorithm(Call(DType::float16).args), LinearCrossEntropyAlgorithm::recompute);
  EXPECT_EQ(linear_cross_entropy_algorithm(Call(DType::bfloat16, Reduction::none).args),
            LinearCrossEntropyAlgorithm::recompute);
}

}  // namespace
}  // namespace eaves::testing
