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

TEST_P(LogsumexpAccuracy, EveryResultIsWithinTheContract) {
  std::printf("| %s | inputs | lse | out | gradient |\n|---|---|---|---|---|\n",
              GetParam() == DeviceType::cpu ? "CPU" : "GPU");
  for (const auto& [dtype, inputs] : combine<DType, Inputs>(floating_point_dtypes(), kInputs)) {
    LogsumexpShares worst;
    for (const std::int64_t columns : {1000, 50257}) {
      const LogsumexpCase rows{.dtype = dtype, .shape = {4, columns}, .axes = {1}, .value = inputs.value};
      LogsumexpCase side_by_side = rows;
      side_by_side.shape = {columns, 4};
      side_by_side.axes = {0};
      LogsumexpCase strided = rows;
      strided.x_placement = with_strides({2 * columns, 2});
      for (const LogsumexpCase& layout : {rows, side_by_side, strided}) worst.raise(check_logsumexp(layout));
    }
    std::printf("| %s | %s | %.2f | %.2f | %.2f |\n", name_of(dtype), inputs.name, worst.lse, worst.out,
                worst.gradient);
    EXPECT_LE(worst.worst(), 1.0) << name_of(dtype) << ", " << inputs.name;
  }
}

}  // namespace
}  // namespace eaves::testing
