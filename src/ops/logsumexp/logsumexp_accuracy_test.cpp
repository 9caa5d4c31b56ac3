// The accuracy contract, measured: for every dtype and kind of input the worst error against the float64 oracle, as a
// share of the bound in testing/tolerance.h. The test prints the table that docs/numerics.md shows, and fails where a
// share exceeds 1.
#include <cstdio>

#include "ops/logsumexp/logsumexp_test_case.h"
#include "testing/cases.h"
#include "testing/devices.h"

namespace eaves::testing {
namespace {

class LogsumexpAccuracy : public OnEachDevice {};
EAVES_EACH_DEVICE(LogsumexpAccuracy);

struct Inputs {
  const char* name;
  double (*value)(std::int64_t i);
};

double normal(std::int64_t i) { return random_normal(21, static_cast<std::uint64_t>(i)); }

const Inputs kInputs[] = {
    {"normal", normal},
    {"deviation 64", [](std::int64_t i) { return 64.0 * normal(i); }},
    {"heavy tails", [](std::int64_t i) { return 3.0 * normal(i) * normal(i) * normal(i); }},
    {"around 1000", [](std::int64_t i) { return 1000.0 + normal(i); }},
    {"all equal", [](std::int64_t i) { return i < 0 ? 0.0 : 0.3; }},
};

/// |result - exact| as a share of the bound.
double share(DType dtype, double result, double exact, double scale) {
  const double error = std::abs(result - exact);
  return error == 0.0 ? 0.0 : error / allowed_error(dtype, exact, scale);
}

TEST_P(LogsumexpAccuracy, EveryResultIsWithinTheContract) {
  constexpr std::int64_t kRows = 8;
  std::printf("| %s | inputs | lse | out | gradient |\n|---|---|---|---|---|\n",
              GetParam() == DeviceType::cpu ? "CPU" : "GPU");
  for (const DType dtype : floating_point_dtypes()) {
    for (const Inputs& inputs : kInputs) {
      double worst_lse = 0.0;
      double worst_out = 0.0;
      double worst_gradient = 0.0;
      for (const std::int64_t columns : {1000, 50257}) {
        LogsumexpRun run(
            {.device = device(), .dtype = dtype, .shape = {kRows, columns}, .axes = {1}, .value = inputs.value});
        run.run();
        const reference::LogsumexpRows exact = reference::logsumexp(run.x.host(), run.axes());
        for (std::int64_t row = 0; row < kRows; ++row) {
          const double lse = exact.lse[static_cast<std::size_t>(row)];
          const double scale = std::max(std::abs(lse), std::abs(exact.max[static_cast<std::size_t>(row)]));
          worst_lse = std::max(worst_lse, share(run.lse.view().dtype, run.lse.get(row), lse, scale));
          worst_out = std::max(worst_out, share(dtype, run.out.get(row), lse, scale));
          std::vector<double> gradients(static_cast<std::size_t>(columns));
          double largest = 0.0;
          for (std::int64_t column = 0; column < columns; ++column) {
            double& gradient = gradients[static_cast<std::size_t>(column)];
            gradient = reference::logsumexp_gradient(run.x.get(row * columns + column), run.lse.get(row),
                                                     run.grad_out.get(row));
            largest = std::max(largest, std::abs(gradient));
          }
          for (std::int64_t column = 0; column < columns; ++column) {
            worst_gradient = std::max(worst_gradient, share(dtype, run.grad_x.get(row * columns + column),
                                                            gradients[static_cast<std::size_t>(column)], largest));
          }
        }
      }
      std::printf("| %s | %s | %.2f | %.2f | %.2f |\n", name_of(dtype), inputs.name, worst_lse, worst_out,
                  worst_gradient);
      EXPECT_LE(worst_lse, 1.0) << name_of(dtype) << ", " << inputs.name;
      EXPECT_LE(worst_out, 1.0) << name_of(dtype) << ", " << inputs.name;
      EXPECT_LE(worst_gradient, 1.0) << name_of(dtype) << ", " << inputs.name;
    }
  }
}

}  // namespace
}  // namespace eaves::testing
