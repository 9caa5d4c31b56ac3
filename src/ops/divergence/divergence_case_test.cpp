// The oracle of the self-test's cases: its gradient is the slope of its outputs, and the comparison finds a wrong
// number. The kernels are tested in python/tests/divergence_test.py, and on a GPU here too.
#include <gtest/gtest.h>

#include <vector>

#include "ops/divergence/divergence_case.h"
#include "testing/cases.h"
#include "testing/devices.h"

namespace eaves::testing {
namespace {

const std::vector<Divergence> kAll = {Divergence::forward, Divergence::reverse, Divergence::jsd,
                                      Divergence::total_variation};

DivergenceCase with_all_gradients(Divergence divergence, double softcap, double temperature) {
  return {.device = kCpu,
          .divergence = divergence,
          .classes = 9,
          .scale = 0.7,
          .softcap = softcap,
          .temperature = temperature,
          .grad_divergence = 0.7,
          .grad_lse = -0.3,
          .grad_entropy = 0.9,
          .grad_hard_loss = 1.1};
}

TEST(DivergenceOracle, ItsGradientIsTheSlopeOfItsOutputs) {
  for (const auto& [divergence, softcap, temperature] :
       combine<Divergence, double, double>(kAll, {0.0, 4.0}, {1.0, 2.5})) {
    const DivergenceCase c = with_all_gradients(divergence, softcap, temperature);
    std::vector<double> student, teacher;
    for (std::uint64_t v = 0; v < 9; ++v) {
      student.push_back(random_normal(1, v));
      teacher.push_back(random_normal(2, v));
    }
    const auto objective = [&] {
      const DivergenceOracle row(c, student, teacher, 4);
      return c.grad_divergence * row.divergence + c.grad_lse * row.lse + c.grad_entropy * row.entropy +
             c.grad_hard_loss * row.hard_loss;
    };
    const std::vector<double> gradient = DivergenceOracle(c, student, teacher, 4).gradient;
    for (std::size_t v = 0; v < student.size(); ++v) {
      constexpr double kStep = 1e-6;
      const double value = student[v];
      student[v] = value + kStep;
      const double above = objective();
      student[v] = value - kStep;
      const double below = objective();
      student[v] = value;
      EXPECT_NEAR(gradient[v], (above - below) / (2.0 * kStep), 1e-8) << "class " << v;
    }
  }
}

TEST(DivergenceComparison, FindsAWrongNumber) {
  for (const Divergence divergence : kAll) {
    DivergenceRun run(with_all_gradients(divergence, 0.0, 1.0));
    for (std::int64_t row = 0; row < 5; ++row) {
      const DivergenceOracle exact = run.oracle(row);
      const auto statistic = [&](DivergenceStatistic which, double value) {
        run.statistics.set(row * kDivergenceStatistics + static_cast<int>(which), value);
      };
      statistic(DivergenceStatistic::divergence, exact.divergence);
      statistic(DivergenceStatistic::lse, exact.lse);
      run.statistics.set(row * kDivergenceStatistics + static_cast<int>(DivergenceStatistic::lse) + 1, 0.0);
      statistic(DivergenceStatistic::entropy, exact.entropy);
      statistic(DivergenceStatistic::hard_loss, exact.hard_loss);
      for (std::int64_t v = 0; v < 9; ++v)
        run.grad_values.set(row * 9 + v, exact.gradient[static_cast<std::size_t>(v)]);
    }
    EXPECT_EQ(DivergenceComparison(run).compare(), "");
    for (auto& [name, tensor] : run.outputs()) {
      const double right = tensor->get(20);
      tensor->set(20, right + 1e-4);  // row 2: its divergence, and a class of its gradient
      EXPECT_NE(DivergenceComparison(run).compare(), "") << name;
      tensor->set(20, right);
    }
  }
}

class DivergenceOnGpu : public OnGpu {};

TEST_F(DivergenceOnGpu, ItsKernelsMatchTheOracle) {
  for (const auto& [divergence, softcap, temperature] :
       combine<Divergence, double, double>(kAll, {0.0, 4.0}, {1.0, 2.5})) {
    DivergenceCase c = with_all_gradients(divergence, softcap, temperature);
    c.device = kCuda;
    for (const std::int64_t classes : {9, 20000, 33001}) {
      c.classes = classes;
      EXPECT_EQ(compare_divergence(c).failure, "");
    }
  }
}

}  // namespace
}  // namespace eaves::testing
