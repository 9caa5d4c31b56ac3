// How the CPU cuts up products, at every level of vector instructions: sizes around those of panels, blocks and depths,
// threads, engines. What a product is on every device is in core/gemm_test.cpp.
#include "cpu/gemm.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cfenv>
#include <cstdint>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "cpu/gemm_own.h"
#include "cpu/onednn.h"
#include "testing/cases.h"
#include "testing/gemm_test_case.h"

namespace eaves::cpu {
namespace {

using testing::check_gemm;
using testing::combine;
using testing::GemmCase;
using testing::GemmDTypes;
using testing::GemmRun;

void check(GemmDTypes dtypes, const GemmCase& test, const ExecutionContext& context = {},
           GemmEngine engine = GemmEngine::own) {
  check_gemm(kCpu, dtypes, test, [&](const Gemm& product) { gemm(product, context, engine); });
}

template <typename Body>
void for_each_dtype(const Body& body) {
  for (const GemmDTypes dtypes : testing::gemm_dtypes()) body(dtypes);
}

constexpr GemmDTypes kFloat32{DType::float32, DType::float32};
constexpr GemmDTypes kFloat16{DType::float16, DType::float16};
constexpr GemmDTypes kBfloat16{DType::bfloat16, DType::bfloat16};
constexpr GemmDTypes kBfloat16ToFloat32{DType::bfloat16, DType::float32};

// At every level of vector instructions that this machine has.
class CpuGemm : public ::testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};
INSTANTIATE_TEST_SUITE_P(Levels, CpuGemm, ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& info) { return std::string(hwy::TargetName(info.param)); });

TEST_P(CpuGemm, IsTheProductInEveryLayout) {
  for_each_dtype([](GemmDTypes dtypes) {
    for (const auto& [is_a_transposed, is_b_transposed, padding] :
         combine<bool, bool, std::int64_t>({false, true}, {false, true}, {0, 5})) {
      check(dtypes, {13, 71, 37, is_a_transposed, is_b_transposed, false, false, false, padding});
      check(dtypes, {13, 71, 40, is_a_transposed, is_b_transposed, true, true, false, padding});
    }
  });
}

TEST_P(CpuGemm, ScalesAddsABiasAndAccumulates) {
  for_each_dtype([](GemmDTypes dtypes) {
    for (const auto& [has_alpha, k] : combine<bool, std::int64_t>({false, true}, {8, 600, 1201})) {
      // 600 terms are more than one depth, so that sums have been in memory.
      check(dtypes, {7, 66, k, false, true, has_alpha, true, false});
      check(dtypes, {7, 66, k, true, false, has_alpha, false, true});
      check(dtypes, {7, 66, k, false, false, has_alpha, false, false, 3});
    }
  });
}

TEST_P(CpuGemm, TakesAnySize) {
  for_each_dtype([](GemmDTypes dtypes) {
    // One less and one more than a panel of rows (6 or 3) or columns (4 vectors), few terms, and none.
    for (const auto& [m, n, k] : combine<std::int64_t, std::int64_t, std::int64_t>(
             {1, 5, 6, 7}, {1, 15, 16, 17, 33, 63, 64, 65}, {0, 1, 3, 8})) {
      check(dtypes, {m, n, k, false, true, true, n % 2 == 0});
      check(dtypes, {m, n, k, true, false, false, false, n % 2 == 0});
    }
  });
}

TEST_P(CpuGemm, TakesSizesOfMoreThanOneTile) {
  // 512 rows and columns are the most of a tile, 256 terms the depth. Each case is one or more than those: where there
  // are few tiles, they are smaller.
  check(kFloat32, {521, 70, 11, true, false});
  check(kBfloat16ToFloat32, {5, 1031, 19, false, true});
  check(kBfloat16, {515, 517, 5, true, true, true, false, true});
  check(kBfloat16ToFloat32, {101, 67, 1031, false, true});
  check(kFloat32, {101, 67, 517, true, false, true, true});
  check(kFloat16, {97, 67, 263, true, true});
}

TEST_P(CpuGemm, TakesLongSums) {
  for_each_dtype([](GemmDTypes dtypes) {
    check(dtypes, {7, 70, 8200, false, false, true, true});
    check(dtypes, {7, 9, 4097, true, true, false, false, true, 1});
  });
}

/// Each piece on a thread of its own.
const ParallelFor kPool = {[](void* /*pool*/, std::int64_t count, ParallelFor::Body body, void* body_data) {
                             std::vector<std::thread> threads;
                             for (std::int64_t i = 0; i < count; ++i) {
                               threads.emplace_back([=] { body(body_data, i, i + 1); });
                             }
                             for (std::thread& thread : threads) thread.join();
                           },
                           nullptr};

void expect_same_on_any_threads(GemmDTypes dtypes, const GemmCase& test, GemmEngine engine) {
  const auto bytes_on = [&](const ExecutionContext& context) {
    GemmRun run(kCpu, dtypes, test);
    gemm(run.product(), context, engine);
    return run.c.bytes();
  };
  const auto on_one = bytes_on({.threads = 1});
  for (const int threads : {2, 3, 7, 24}) EXPECT_TRUE(bytes_on({.threads = threads}) == on_one) << threads;
  EXPECT_TRUE(bytes_on({.threads = 5, .parallel_for = kPool}) == on_one);
}

TEST_P(CpuGemm, DoesNotDependOnTheThreads) {
  for_each_dtype([](GemmDTypes dtypes) {
    expect_same_on_any_threads(dtypes, {211, 307, 600, true, true, true, false, true, 1}, GemmEngine::own);
    expect_same_on_any_threads(dtypes, {30, 70, 9000, false, false}, GemmEngine::own);
  });
}

TEST_P(CpuGemm, SumsInAnOrderThatDependsOnTheDepthAlone) {
  // 7 rows and 70 columns lie in one tile, 600 and 300 in several.
  const std::int64_t k = 9000;
  GemmRun large(kCpu, kBfloat16ToFloat32, {600, 300, k, false, true});
  GemmRun small(kCpu, kBfloat16ToFloat32, {600, 300, k, false, true});
  Gemm part = small.product();
  part.m = 7;
  part.n = 70;
  gemm(large.product(), {}, GemmEngine::own);
  gemm(part, {}, GemmEngine::own);
  for (std::int64_t i = 0; i < part.m; ++i) {
    for (std::int64_t j = 0; j < part.n; ++j) EXPECT_EQ(small.c_at(i, j), large.c_at(i, j)) << i << ", " << j;
  }
}

TEST_P(CpuGemm, MultipliesNothingBehindTheEdges) {
  // What the product before has left there may be slow, as subnormal numbers are. Infinities show it: 0 times one.
  const auto infinite = [](std::int64_t, std::int64_t) { return std::numeric_limits<double>::infinity(); };
  const auto number = [](std::int64_t i, std::int64_t j) { return static_cast<double>((i + j) % 2); };
  for_each_dtype([&](GemmDTypes dtypes) {
    for (const auto& [is_a_transposed, is_b_transposed] : combine<bool, bool>({false, true}, {false, true})) {
      const auto case_of = [&](std::int64_t m, std::int64_t n, std::int64_t k, auto value) {
        return GemmCase{.m = m,
                        .n = n,
                        .k = k,
                        .is_a_transposed = is_a_transposed,
                        .is_b_transposed = is_b_transposed,
                        .a = value,
                        .b = value};
      };
      for (const std::int64_t m : {5, 64}) {
        GemmRun before(kCpu, dtypes, case_of(72, 128, 32, infinite));
        GemmRun run(kCpu, dtypes, case_of(m, 7, 9, number));
        own_gemm(before.product(), {.threads = 1});
        std::feclearexcept(FE_ALL_EXCEPT);
        own_gemm(run.product(), {.threads = 1});
        EXPECT_FALSE(std::fetestexcept(FE_INVALID)) << m << is_a_transposed << is_b_transposed;
      }
    }
  });
}

TEST_P(CpuGemm, WorksFromSeveralThreadsAtOnce) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([] { check(kBfloat16ToFloat32, {65, 130, 600, false, true}, {.threads = 2}); });
  }
  for (std::thread& thread : threads) thread.join();
}

// ---------------------------------------------------------------------------------------------------------- oneDNN

class CpuGemmByOneDnn : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_onednn_gemm(DType::float32))
      GTEST_SKIP() << "oneDNN is not installed (libdnnl.so.3 or libdnnl.so.2 with OpenMP)";
  }
};

TEST_F(CpuGemmByOneDnn, IsTheProductInEveryLayout) {
  // Types that it does not know, float16 and float64, stay with our own loops.
  for_each_dtype([](GemmDTypes dtypes) {
    for (const auto& [is_a_transposed, is_b_transposed] : combine<bool, bool>({false, true}, {false, true})) {
      const auto check_here = [&](GemmCase test) {
        test.is_a_transposed = is_a_transposed;
        test.is_b_transposed = is_b_transposed;
        check(dtypes, test, {}, GemmEngine::onednn);
      };
      check_here({.m = 13, .n = 71, .k = 37, .padding = 5});
      check_here({.m = 13, .n = 71, .k = 37, .has_alpha = true, .has_bias = true});
      check_here({.m = 7, .n = 600, .k = 40, .has_alpha = true, .accumulates = true});
      check_here({.m = 5, .n = 9, .k = 4099, .accumulates = true});
      check_here({.m = 5, .n = 9, .k = 0, .has_bias = true});
    }
  });
}

TEST_F(CpuGemmByOneDnn, DoesNotDependOnTheThreads) {
  for_each_dtype([](GemmDTypes dtypes) {
    expect_same_on_any_threads(dtypes, {211, 307, 600, true, true, true, false, true, 1}, GemmEngine::onednn);
    expect_same_on_any_threads(dtypes, {30, 70, 9000, false, false}, GemmEngine::onednn);
  });
  // More than a tile, in the layouts of logits and of their gradients; columns and rows of which one could be left.
  for (const GemmDTypes dtypes : {kFloat32, kBfloat16}) {
    expect_same_on_any_threads(dtypes, {270, 1100, 300, false, true}, GemmEngine::onednn);
    expect_same_on_any_threads(dtypes, {561, 673, 100, false, false}, GemmEngine::onednn);
    expect_same_on_any_threads(dtypes, {1100, 561, 100, true, false}, GemmEngine::onednn);
    expect_same_on_any_threads(dtypes, {229, 546, 611, true, true, false, false, true}, GemmEngine::onednn);
  }
  expect_same_on_any_threads(kBfloat16ToFloat32, {4, 65537, 100, false, true}, GemmEngine::onednn);
}

TEST_F(CpuGemmByOneDnn, ReadsNothingBehindItsSums) {  // a pack of which one column is there; under the sanitizers
  check(kBfloat16, {16, 961, 64, false, true, true}, {}, GemmEngine::onednn);
}

TEST_F(CpuGemmByOneDnn, ARowOfBfloat16DoesNotDependOnTheOthers) {
  if (!has_onednn_gemm(DType::bfloat16)) GTEST_SKIP() << "this CPU has no instructions for bfloat16";
  for (const auto& [accumulates, k, is_b_transposed] :
       combine<bool, std::int64_t, bool>({false, true}, {394, 1000, 4100}, {false, true})) {
    const GemmCase test{280, 100, k, false, is_b_transposed, false, false, accumulates};
    GemmRun all(kCpu, kBfloat16ToFloat32, test);
    gemm(all.product(), {}, GemmEngine::onednn);
    for (const std::int64_t rows : {1, 2, 7, 100, 257}) {
      GemmRun some(kCpu, kBfloat16ToFloat32, test);
      Gemm part = some.product();
      part.m = rows;
      gemm(part, {}, GemmEngine::onednn);
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < part.n; ++j) ASSERT_EQ(some.c_at(i, j), all.c_at(i, j)) << rows << ", " << k;
      }
    }
  }
}

TEST(CpuGemmDescription, NamesAnEngine) {
  const std::string description = gemm_description();
  EXPECT_TRUE(description.find("eaves (") == 0 || description.find("oneDNN ") == 0) << description;
}

}  // namespace
}  // namespace eaves::cpu
