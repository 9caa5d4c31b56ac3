// Products against float64 loops: every dtype, every layout, sizes around those of panels, blocks and depths.
#include "cpu/gemm.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "core/dispatch.h"
#include "core/numeric.h"
#include "cpu/onednn.h"
#include "testing/tensor.h"
#include "testing/tolerance.h"

namespace eaves::cpu {
namespace {

struct Case {
  std::int64_t m;
  std::int64_t n;
  std::int64_t k;
  bool is_a_transposed = false;
  bool is_b_transposed = false;
  bool has_alpha = false;
  bool has_bias = false;
  bool accumulates = false;
  std::int64_t padding = 0;  ///< of every stride
};

/// What is read and written by one product. c starts with numbers of its own; what lies between its rows must stay.
template <typename T, typename C>
struct Operands {
  using A = Accumulator<T>;

  explicit Operands(const Case& test) : test(test) {
    a_stride = (test.is_a_transposed ? test.m : test.k) + test.padding;
    b_stride = (test.is_b_transposed ? test.k : test.n) + test.padding;
    c_stride = test.n + test.padding;
    fill(a, a_stride * (test.is_a_transposed ? test.k : test.m), 1);
    fill(b, b_stride * (test.is_b_transposed ? test.n : test.k), 2);
    fill(c, c_stride * test.m, 3);
    fill(bias, test.n, 4);
    before = c;
  }

  template <typename E>
  static void fill(std::vector<E>& to, std::int64_t count, std::uint64_t seed) {
    to.resize(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < to.size(); ++i) to[i] = round_to<E>(static_cast<A>(testing::random_normal(seed, i)));
  }

  double a_at(std::int64_t i, std::int64_t p) const {
    return load_as_accumulator(a[static_cast<std::size_t>(test.is_a_transposed ? p * a_stride + i : i * a_stride + p)]);
  }
  double b_at(std::int64_t p, std::int64_t j) const {
    return load_as_accumulator(b[static_cast<std::size_t>(test.is_b_transposed ? j * b_stride + p : p * b_stride + j)]);
  }

  Gemm product() {
    return {.m = test.m,
            .n = test.n,
            .k = test.k,
            .dtype = kDTypeOf<T>,
            .a = {a.data(), a_stride, test.is_a_transposed},
            .b = {b.data(), b_stride, test.is_b_transposed},
            .c_dtype = kDTypeOf<C>,
            .c = c.data(),
            .c_stride = c_stride,
            .alpha = test.has_alpha ? &alpha : nullptr,
            .bias = test.has_bias ? bias.data() : nullptr,
            .accumulates = test.accumulates};
  }

  Case test;
  std::int64_t a_stride;
  std::int64_t b_stride;
  std::int64_t c_stride;
  std::vector<T> a;
  std::vector<T> b;
  std::vector<C> c;
  std::vector<C> before;
  std::vector<A> bias;
  A alpha = static_cast<A>(-1.25);
};

/// Sums of rounded products: each addition is off by half a unit of a partial sum, at random, so that the errors of k
/// of them add up to sqrt(k) halves, with a factor of 4 for the worst of many elements; and two more for alpha and c.
double allowed(DType accumulator, DType c, double exact, double scale, std::int64_t k) {
  const double unit = accumulator == DType::float64 ? 0x1p-53 : 0x1p-24;
  const double sum = (4.0 * std::sqrt(static_cast<double>(k)) + 2.0) * unit * scale;
  return sum + (size_of(c) == 2 ? 0.5 * testing::unit_in_last_place(c, exact) : 0.0);
}

template <typename T, typename C>
void check(const Case& test, const ExecutionContext& context = {}, GemmEngine engine = GemmEngine::own) {
  SCOPED_TRACE(std::string(name_of(kDTypeOf<T>)) + " to " + name_of(kDTypeOf<C>) + " [" + std::to_string(test.m) +
               ", " + std::to_string(test.k) + "] x [" + std::to_string(test.k) + ", " + std::to_string(test.n) + "]" +
               (test.is_a_transposed ? " a^T" : "") + (test.is_b_transposed ? " b^T" : ""));
  Operands<T, C> operands(test);
  gemm(operands.product(), context, engine);
  const double alpha = test.has_alpha ? static_cast<double>(operands.alpha) : 1.0;
  for (std::int64_t i = 0; i < test.m; ++i) {
    for (std::int64_t j = 0; j < operands.c_stride; ++j) {
      const auto at = static_cast<std::size_t>(i * operands.c_stride + j);
      if (j >= test.n) {
        ASSERT_EQ(std::memcmp(&operands.c[at], &operands.before[at], sizeof(C)), 0) << "behind row " << i;
        continue;
      }
      double beside = 0.0;
      if (test.has_bias) beside = static_cast<double>(operands.bias[static_cast<std::size_t>(j)]);
      if (test.accumulates) beside = load_as_accumulator(operands.before[at]);
      double sum = 0.0;
      double scale = std::abs(beside);
      for (std::int64_t p = 0; p < test.k; ++p) {
        const double term = alpha * operands.a_at(i, p) * operands.b_at(p, j);
        sum += term;
        scale += std::abs(term);
      }
      const double exact = sum + beside;
      const double bound = allowed(kDTypeOf<Accumulator<T>>, kDTypeOf<C>, exact, scale, test.k);
      ASSERT_EQ(testing::difference_beyond(bound, kDTypeOf<C>, load_as_accumulator(operands.c[at]), exact), "")
          << "at [" << i << ", " << j << "]";
    }
  }
}

/// Every dtype of the factors with every dtype that c may have.
template <typename Body>
void for_each_dtype(Body&& body) {
  body.template operator()<float, float>();
  body.template operator()<double, double>();
  body.template operator()<float16, float16>();
  body.template operator()<float16, float>();
  body.template operator()<bfloat16, bfloat16>();
  body.template operator()<bfloat16, float>();
}

// At every level of vector instructions that this machine has: bfloat16 is in pairs at the best one alone.
class CpuGemm : public ::testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};
INSTANTIATE_TEST_SUITE_P(Levels, CpuGemm, ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& info) { return std::string(hwy::TargetName(info.param)); });

TEST_P(CpuGemm, IsTheProductInEveryLayout) {
  for_each_dtype([]<typename T, typename C>() {
    for (const bool is_a_transposed : {false, true}) {
      for (const bool is_b_transposed : {false, true}) {
        for (const std::int64_t padding : {0, 5}) {
          check<T, C>({13, 71, 37, is_a_transposed, is_b_transposed, false, false, false, padding});
          check<T, C>({13, 71, 40, is_a_transposed, is_b_transposed, true, true, false, padding});
        }
      }
    }
  });
}

TEST_P(CpuGemm, ScalesAddsABiasAndAccumulates) {
  for_each_dtype([]<typename T, typename C>() {
    for (const bool has_alpha : {false, true}) {
      // 600 words are more than one depth, so that sums have been in memory.
      for (const std::int64_t k : {8, 600, 1201}) {
        check<T, C>({7, 66, k, false, true, has_alpha, true, false});
        check<T, C>({7, 66, k, true, false, has_alpha, false, true});
        check<T, C>({7, 66, k, false, false, has_alpha, false, false, 3});
      }
    }
  });
}

TEST_P(CpuGemm, TakesAnySize) {
  for_each_dtype([]<typename T, typename C>() {
    // One less and one more than a panel of rows (6 or 3) or columns (4 vectors), pairs and a half, and 0 terms.
    for (const std::int64_t m : {1, 5, 6, 7}) {
      for (const std::int64_t n : {1, 15, 16, 17, 33, 63, 64, 65}) {
        for (const std::int64_t k : {0, 1, 3, 8}) {
          check<T, C>({m, n, k, false, true, true, n % 2 == 0});
          check<T, C>({m, n, k, true, false, false, false, n % 2 == 0});
        }
      }
    }
  });
}

TEST_P(CpuGemm, TakesSizesOfMoreThanOneTile) {
  // 512 rows and columns are the most of a tile, 96 rows are copied at a time, 512 bfloat16 or 256 others the depth.
  check<float, float>({521, 70, 11, true, false});
  check<bfloat16, float>({5, 1031, 19, false, true});
  check<bfloat16, bfloat16>({515, 517, 5, true, true, true, false, true});
  check<bfloat16, float>({101, 67, 1031, false, true});
  check<float, float>({101, 67, 517, true, false, true, true});
  check<float16, float16>({97, 67, 263, true, true});
}

TEST_P(CpuGemm, AddsThePartsOfALongSum) {
  // More than 4096 terms are summed in parts.
  for_each_dtype([]<typename T, typename C>() {
    check<T, C>({7, 70, 8200, false, false, true, true});
    check<T, C>({7, 9, 4097, true, true, false, false, true, 1});
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

template <typename T, typename C>
void expect_same_on_any_threads(const Case& test, GemmEngine engine) {
  Operands<T, C> one(test);
  gemm(one.product(), {.threads = 1}, engine);
  const auto is_the_same = [&](const ExecutionContext& context) {
    Operands<T, C> other(test);
    gemm(other.product(), context, engine);
    return std::memcmp(one.c.data(), other.c.data(), one.c.size() * sizeof(C)) == 0;
  };
  for (const int threads : {2, 3, 7}) EXPECT_TRUE(is_the_same({.threads = threads})) << threads;
  EXPECT_TRUE(is_the_same({.threads = 5, .parallel_for = kPool}));
}

TEST_P(CpuGemm, DoesNotDependOnTheThreads) {
  for_each_dtype([]<typename T, typename C>() {
    expect_same_on_any_threads<T, C>({211, 307, 600, true, true, true, false, true, 1}, GemmEngine::own);
    expect_same_on_any_threads<T, C>({30, 70, 9000, false, false}, GemmEngine::own);
  });
}

TEST_P(CpuGemm, SumsInAnOrderThatDependsOnTheDepthAlone) {
  // 70 rows and columns lie in one tile, 600 in several, whose parts are tasks of another size.
  const std::int64_t k = 9000;
  Operands<bfloat16, float> large({600, 300, k, false, true});
  Operands<bfloat16, float> small = large;
  small.test.m = 7;
  small.test.n = 70;
  gemm(large.product(), {}, GemmEngine::own);
  gemm(small.product(), {}, GemmEngine::own);
  for (std::int64_t i = 0; i < 7; ++i) {
    const auto row = static_cast<std::size_t>(i * 300);
    EXPECT_EQ(std::memcmp(&small.c[row], &large.c[row], 70 * sizeof(float)), 0) << i;
  }
}

TEST_P(CpuGemm, WorksFromSeveralThreadsAtOnce) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([] { check<bfloat16, float>({65, 130, 600, false, true}, {.threads = 2}); });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(CpuGemm, PassesNanAndInfinitiesOnAsProductsDo) {
  for_each_dtype([]<typename T, typename C>() {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    using A = Accumulator<T>;
    Operands<T, C> operands({4, 3, 5});
    for (T& value : operands.a) value = round_to<T>(A{1});
    for (T& value : operands.b) value = round_to<T>(A{1});
    operands.a[1 * 5 + 2] = round_to<T>(nan_of<A>());
    operands.a[2 * 5 + 2] = round_to<T>(infinity<A>());
    operands.b[2 * 3 + 1] = round_to<T>(A{0});
    operands.b[2 * 3 + 2] = round_to<T>(-infinity<A>());
    gemm(operands.product(), {}, GemmEngine::own);
    const auto c = [&](int i, int j) { return static_cast<double>(load_as_accumulator(operands.c[i * 3 + j])); };
    EXPECT_EQ(c(0, 0), 5.0);
    EXPECT_EQ(c(0, 1), 4.0);
    EXPECT_EQ(c(0, 2), -kInfinity);
    for (const int j : {0, 1, 2}) EXPECT_TRUE(std::isnan(c(1, j))) << j;
    EXPECT_EQ(c(2, 0), kInfinity);
    EXPECT_TRUE(std::isnan(c(2, 1))) << "0 * infinity";
    EXPECT_EQ(c(2, 2), -kInfinity);
    EXPECT_EQ(c(3, 0), 5.0);
  });
}

TEST_P(CpuGemm, ASumOverNothingIsZeroTheBiasOrWhatWasThere) {
  for_each_dtype([]<typename T, typename C>() {
    for (const bool has_bias : {false, true}) {
      for (const bool accumulates : {false, true}) {
        if (has_bias && accumulates) continue;
        Operands<T, C> operands({3, 5, 0, false, false, true, has_bias, accumulates});
        operands.alpha = infinity<Accumulator<T>>();
        gemm(operands.product(), {}, GemmEngine::own);
        for (std::size_t i = 0; i < operands.c.size(); ++i) {
          C expected = has_bias ? round_to<C>(operands.bias[i % 5]) : C{};
          if (accumulates) expected = operands.before[i];
          EXPECT_EQ(load_as_accumulator(operands.c[i]), load_as_accumulator(expected)) << i;
        }
      }
    }
  });
}

// ---------------------------------------------------------------------------------------------------------- oneDNN

class CpuGemmByOneDnn : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_onednn_gemm(DType::float32)) GTEST_SKIP() << "there is no libdnnl.so.3 or libdnnl.so.2 with OpenMP";
  }
};

TEST_F(CpuGemmByOneDnn, IsTheProductInEveryLayout) {
  // Types that it does not know, float16 and float64, stay with our own loops.
  for_each_dtype([]<typename T, typename C>() {
    for (const bool is_a_transposed : {false, true}) {
      for (const bool is_b_transposed : {false, true}) {
        const auto check_here = [&](Case test) {
          test.is_a_transposed = is_a_transposed;
          test.is_b_transposed = is_b_transposed;
          check<T, C>(test, {}, GemmEngine::onednn);
        };
        check_here({.m = 13, .n = 71, .k = 37, .padding = 5});
        check_here({.m = 13, .n = 71, .k = 37, .has_alpha = true, .has_bias = true});
        check_here({.m = 7, .n = 600, .k = 40, .has_alpha = true, .accumulates = true});
        check_here({.m = 5, .n = 9, .k = 4099, .accumulates = true});
        check_here({.m = 5, .n = 9, .k = 0, .has_bias = true});
      }
    }
  });
}

TEST_F(CpuGemmByOneDnn, DoesNotDependOnTheThreads) {
  for_each_dtype([]<typename T, typename C>() {
    expect_same_on_any_threads<T, C>({211, 307, 600, true, true, true, false, true, 1}, GemmEngine::onednn);
    expect_same_on_any_threads<T, C>({30, 70, 9000, false, false}, GemmEngine::onednn);
  });
}

TEST(CpuGemmDescription, NamesAnEngine) {
  const std::string description = gemm_description();
  EXPECT_TRUE(description.find("eaves (") == 0 || description.find("oneDNN ") == 0) << description;
}

}  // namespace
}  // namespace eaves::cpu
