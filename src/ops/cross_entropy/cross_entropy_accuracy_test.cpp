// The accuracy contract, measured: for every dtype and kind of input the worst error against the float64 oracle, as a
// share of the bound in testing/tolerance.h. The test prints the table that docs/numerics.md shows, and fails if a
// share exceeds 1.
#include <algorithm>
#include <cstdio>

#include "ops/cross_entropy/cross_entropy_test_case.h"
#include "testing/cases.h"
#include "testing/devices.h"

namespace eaves::testing {
namespace {

class CrossEntropyAccuracy : public OnEachDevice {};
EAVES_EACH_DEVICE(CrossEntropyAccuracy);

struct Inputs {
  const char* name;
  double (*value)(std::int64_t i);
  CrossEntropyOptions options = {};
  DType targets = DType::int64;
};

double normal(std::int64_t i) { return random_normal(57, static_cast<std::uint64_t>(i)); }

const std::vector<Inputs> kInputs = {
    {"normal", normal},
    {"deviation 64", [](std::int64_t i) { return 64.0 * normal(i); }},
    {"heavy tails", [](std::int64_t i) { return 3.0 * normal(i) * normal(i) * normal(i); }},
    {"around 1000", [](std::int64_t i) { return 1000.0 + normal(i); }},
    {"label_smoothing, softcap, z-loss",
     [](std::int64_t i) { return 10.0 * normal(i); },
     {.label_smoothing = 0.1, .softcap = 30.0, .z_loss_weight = 1e-4}},
    {"soft targets", normal, {}, DType::float32},
};

TEST_P(CrossEntropyAccuracy, EveryResultIsWithinTheContract) {
  std::printf("| %s | inputs | loss | lse | entropy | gradient | in place |\n|---|---|---|---|---|---|---|\n",
              GetParam() == DeviceType::cpu ? "CPU" : "GPU");
  for (const auto& [dtype, inputs] : combine<DType, Inputs>(floating_point_dtypes(), kInputs)) {
    CrossEntropyShares worst;
    for (const std::int64_t columns : {1000, 50257}) {
      CrossEntropyCase rows{.dtype = dtype,
                            .shape = {4, columns},
                            .class_axis = 1,
                            .options = inputs.options,
                            .targets_dtype = inputs.targets,
                            .value = inputs.value};
      rows.options.reduction = Reduction::none;
      CrossEntropyCase side_by_side = rows;
      side_by_side.shape = {columns, 4};
      side_by_side.class_axis = 0;
      CrossEntropyCase strided = rows;
      strided.logits_placement = with_strides({2 * columns, 2});
      for (const CrossEntropyCase& layout : {rows, side_by_side, strided}) {
        worst.raise(check_cross_entropy(layout));  // fails above 1
      }
    }
    std::printf("| %s | %s | %.2f | %.2f | %.2f | %.2f | %.2f |\n", name_of(dtype), inputs.name, worst.loss, worst.lse,
                worst.entropy, worst.gradient, worst.in_place);
    EXPECT_LE(std::max({worst.loss, worst.lse, worst.entropy, worst.gradient, worst.in_place}), 1.0)
        << name_of(dtype) << ", " << inputs.name;
  }
}

}  // namespace
}  // namespace eaves::testing
