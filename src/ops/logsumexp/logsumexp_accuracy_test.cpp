// The accuracy contract, measured: for every dtype and kind of input the worst error against the float64 oracle, as a
// share of the bound in testing/tolerance.h. The test prints the table that docs/numerics.md shows, and fails if a
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

const std::vector<Inputs> kInputs = {
    {"normal", normal},
    {"deviation 64", [](std::int64_t i) { return 64.0 * normal(i); }},
    {"heavy tails", [](std::int64_t i) { return 3.0 * normal(i) * normal(i) * normal(i); }},
    {"around 1000", [](std::int64_t i) { return 1000.0 + normal(i); }},
    {"all equal", [](std::int64_t i) { return i < 0 ? 0.0 : 0.3; }},
};

/// |result - exact| divided by the bound.
double share(DType dtype, double result, double exact, double scale) {
  const double error = std::abs(result - exact);
  return error == 0.0 ? 0.0 : error / allowed_error(dtype, exact, scale);
}

/// The worst shares of one call.
struct Shares {
  double lse = 0.0;
  double out = 0.0;
  double gradient = 0.0;
};

void raise(Shares& worst, const LogsumexpCase& test_case) {
  LogsumexpRun run(test_case);
  run.run();
  const reference::LogsumexpRows exact = reference::logsumexp(run.x.host(), run.axes());
  for (std::size_t row = 0; row < exact.lse.size(); ++row) {
    const auto at = static_cast<std::int64_t>(row);
    const double scale = logsumexp_scale(exact.lse[row], exact.max[row]);
    worst.lse = std::max(worst.lse, share(run.lse.view().dtype, run.lse.get(at), exact.lse[row], scale));
    worst.out = std::max(worst.out, share(test_case.dtype, run.out.get(at), exact.lse[row], scale));
  }
  const auto gradient = [&](std::size_t i) {
    return reference::logsumexp_gradient(run.x.get(static_cast<std::int64_t>(i)), run.lse.get(exact.row_of[i]),
                                         run.grad_out.get(exact.row_of[i]));
  };
  std::vector<double> largest(exact.lse.size(), 0.0);
  for (std::size_t i = 0; i < exact.row_of.size(); ++i) {
    double& of_row = largest[static_cast<std::size_t>(exact.row_of[i])];
    of_row = std::max(of_row, std::abs(gradient(i)));
  }
  for (std::size_t i = 0; i < exact.row_of.size(); ++i) {
    const double scale = largest[static_cast<std::size_t>(exact.row_of[i])];
    worst.gradient = std::max(worst.gradient,
                              share(test_case.dtype, run.grad_x.get(static_cast<std::int64_t>(i)), gradient(i), scale));
  }
}

TEST_P(LogsumexpAccuracy, EveryResultIsWithinTheContract) {
  std::printf("| %s | inputs | lse | out | gradient |\n|---|---|---|---|---|\n",
              GetParam() == DeviceType::cpu ? "CPU" : "GPU");
  for (const auto& [dtype, inputs] : combine<DType, Inputs>(floating_point_dtypes(), kInputs)) {
    Shares worst;
    for (const std::int64_t columns : {1000, 50257}) {
      const LogsumexpCase rows{.dtype = dtype, .shape = {4, columns}, .axes = {1}, .value = inputs.value};
      LogsumexpCase side_by_side = rows;
      side_by_side.shape = {columns, 4};
      side_by_side.axes = {0};
      LogsumexpCase strided = rows;
      strided.x_placement = with_strides({2 * columns, 2});
      for (const LogsumexpCase& layout : {rows, side_by_side, strided}) raise(worst, layout);
    }
    std::printf("| %s | %s | %.2f | %.2f | %.2f |\n", name_of(dtype), inputs.name, worst.lse, worst.out,
                worst.gradient);
    EXPECT_LE(worst.lse, 1.0) << name_of(dtype) << ", " << inputs.name;
    EXPECT_LE(worst.out, 1.0) << name_of(dtype) << ", " << inputs.name;
    EXPECT_LE(worst.gradient, 1.0) << name_of(dtype) << ", " << inputs.name;
  }
}

}  // namespace
}  // namespace eaves::testing
