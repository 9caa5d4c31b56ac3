// The accuracy contract, measured: for every dtype and activation the worst error against the float64 oracle, as a
// share of the bound in testing/tolerance.h; the error of a sum over a long sequence; and the precision of angles at
// positions in the millions. The tests print the tables that docs/numerics.md shows, and fail if a share exceeds 1.
#include <algorithm>
#include <cstdio>
#include <limits>
#include <vector>

#include "ops/lrpe_cosine/lrpe_cosine_test_case.h"
#include "testing/cases.h"
#include "testing/devices.h"

namespace eaves::testing {
namespace {

constexpr double kHalfPi = 1.5707963267948966;

class LrpeCosineAccuracy : public OnEachDevice {
 protected:
  const char* device_name() const { return GetParam() == DeviceType::cpu ? "CPU" : "GPU"; }
};
EAVES_EACH_DEVICE(LrpeCosineAccuracy);

/// theta of usual models, 10000^(-d / E): from one radian for each position to one for 10,000 positions.
double rate(std::int64_t d, std::int64_t angles) {
  return std::pow(10000.0, -static_cast<double>(d % angles) / static_cast<double>(angles));
}

double rate_of_64(std::int64_t i) { return rate(i, 64); }

TEST_P(LrpeCosineAccuracy, EveryResultIsWithinTheContract) {
  std::printf("| %s | activation | out | lse | grad_x | grad_theta |\n|---|---|---|---|---|---|\n", device_name());
  for (const auto& [dtype, activation] :
       combine<DType, LrpeCosineActivation>(floating_point_dtypes(), every_activation())) {
    LrpeCosineShares worst;
    const LrpeCosineCase sequence = with_activation({.dtype = dtype,
                                                     .shape = {1, 1, 400, 64},
                                                     .theta_shape = {1, 64},
                                                     .theta_dtype = DType::float32,
                                                     .is_plain = true,
                                                     .angle = rate_of_64},
                                                    activation);
    LrpeCosineCase grid = sequence;
    grid.grid = {20, 20};
    grid.theta_shape = {1, 32};
    LrpeCosineCase strided = sequence;
    strided.x_placement = with_strides({0, 0, 128, 2});
    strided.out_placement = strided.grad_out_placement = with_strides({0, 0, 256, 2});
    for (const LrpeCosineCase& layout : {sequence, grid, strided}) worst.raise(check_lrpe_cosine(layout));
    std::printf("| %s | %s | %.2f | %.2f | %.2f | %.2f |\n", name_of(dtype), activation.name, worst.out, worst.lse,
                worst.grad_x, worst.grad_theta);
    EXPECT_LE(std::max({worst.out, worst.lse, worst.grad_x, worst.grad_theta}), 1.0)
        << name_of(dtype) << ", " << activation.name;
  }
}

TEST_P(LrpeCosineAccuracy, ThetasGradientOverLongSequences) {
  // The error of a float32 sum of N terms, divided by the sum of their sizes. The rounding of float32 is 6e-8 in this
  // unit.
  std::printf("| %s: N | x float32 | x bfloat16 |\n|---|---|---|\n", device_name());
  for (const std::int64_t positions : {100, 1000, 10000, 100000}) {
    std::printf("| %lld", static_cast<long long>(positions));
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      const LrpeCosineShares shares = check_lrpe_cosine({.dtype = dtype,
                                                         .shape = {1, 1, positions, 4},
                                                         .theta_shape = {1, 4},
                                                         .theta_dtype = DType::float32,
                                                         .angle = [](std::int64_t i) { return rate(i, 4); }});
      std::printf(" | %.1e", shares.grad_theta_error);
      EXPECT_LE(shares.grad_theta, 1.0);
    }
    std::printf(" |\n");
  }
}

TEST_P(LrpeCosineAccuracy, ErrorsDoNotGrowWithThePosition) {
  std::printf("| %s: position | bfloat16, half units in the last place | float32, share of \\|x\\| |\n|---|---|---|\n",
              device_name());
  for (const std::int64_t position : {10, 1000, 100000, 1000000, 10000000}) {
    double worst[2] = {};
    for (const DType dtype : {DType::bfloat16, DType::float32}) {
      const LrpeCosineCase test_case{.dtype = dtype,
                                     .shape = {1, 1, 64, 64},
                                     .theta_shape = {1, 64},
                                     .theta_dtype = DType::float32,
                                     .offset = position,
                                     .angle = rate_of_64};
      check_lrpe_cosine(test_case);
      LrpeCosineRun run(test_case);
      run.run();
      const reference::LrpeCosine exact(run.x.host(), run.angles(&TestTensor::host), Activation::none, -1);
      for (std::int64_t i = 0; i < 64 * 128; ++i) {
        const std::int64_t n = i / 128, d = i % 128;
        const double expected = exact.out(0, 0, n, d);
        const double error = std::abs(run.out.get(i) - expected);
        double& of_dtype = worst[dtype == DType::float32];
        of_dtype = std::max(of_dtype, dtype == DType::float32 ? error / std::abs(exact.x(0, 0, n, d % 64))
                                                              : error / (0.5 * unit_in_last_place(dtype, expected)));
      }
    }
    std::printf("| %lld | %.3f | %.1e |\n", static_cast<long long>(position), worst[0], worst[1]);
  }
}

// ------------------------------------------------------------------------------------------ angles of every size

TEST_P(LrpeCosineAccuracy, PositionsOfAnySizeKeepTheContract) {
  constexpr std::int64_t kOne = 1;
  const std::vector<std::int64_t> offsets = {
      1000000,  // an angle in 16 bits would be off by whole turns
      1000003,
      -1000000,          // before the start
      (kOne << 24) - 3,  // up to and beyond the last integer that float32 tells from its neighbours
      100000000,         // neighbours share an angle
      (kOne << 31) - 2,  // across the range of int32
      (kOne << 32) - 2, -(kOne << 31) - 2, kOne << 40,
      kOne << 62,  // the largest legal offset
      -(kOne << 62),
  };
  for (const auto& [offset, dtype, activation] :
       combine<std::int64_t, DType, LrpeCosineActivation>(offsets, floating_point_dtypes(), every_activation())) {
    check_lrpe_cosine(with_activation({.dtype = dtype,
                                       .shape = {1, 2, 6, 64},
                                       .theta_shape = {2, 64},
                                       .theta_dtype = activation.dim == -1 ? DType::float32 : dtype,
                                       .offset = offset,
                                       .angle = rate_of_64},
                                      activation));
  }
}

TEST_P(LrpeCosineAccuracy, OffsetsThatAreReadOnTheDeviceMayBeAsLarge) {
  constexpr std::int64_t kOne = 1;
  for (const DType dtype : floating_point_dtypes()) {
    LrpeCosineCase test_case{.dtype = dtype,
                             .shape = {3, 1, 4, 64},
                             .theta_shape = {1, 64},
                             .theta_dtype = DType::float32,
                             .offsets = {1000000, (kOne << 40) + 5, -(kOne << 33)},
                             .angle = rate_of_64};
    check_lrpe_cosine(test_case);
    test_case.offsets = {};
    test_case.positions = {1000000, (kOne << 31) - 1, -(kOne << 31), 70000};
    for (const DType integers : {DType::int32, DType::int64}) {
      test_case.integers = integers;
      check_lrpe_cosine(test_case);
    }
    test_case.positions[1] = kOne << 52;
    check_lrpe_cosine(test_case);
  }
}

/// A float32 angle, and its cosine and sine as out has them for x = 1 at position 1.
struct CosineAndSine {
  double cosine, sine, angle;
};

std::vector<CosineAndSine> cosines_and_sines(Device device, DType dtype, const std::vector<double>& angles) {
  const auto count = static_cast<std::int64_t>(angles.size());
  LrpeCosineRun run({.device = device,
                     .dtype = dtype,
                     .shape = {1, 1, 1, count},
                     .theta_shape = {1, count},
                     .offset = 1,
                     .value = [](std::int64_t) { return 1.0; },
                     .angle = [&](std::int64_t i) { return angles[static_cast<std::size_t>(i)]; }});
  run_between_canaries(run);
  std::vector<CosineAndSine> results;
  for (std::int64_t i = 0; i < count; ++i)
    results.push_back({run.out.get(i), run.out.get(count + i), run.theta.get(i)});
  return results;
}

TEST_P(LrpeCosineAccuracy, AnglesNextToMultiplesOfAQuarterTurnKeepTheirRelativePrecision) {
  // Here a cosine or a sine is close to 0, and all its digits come from the reduction of the angle. The angles are the
  // float32 neighbours of k * pi / 2, and 16367173 * 2^72, which is closest to such a multiple of all float32 numbers.
  std::vector<double> angles = {16367173.0 * 0x1p72, -16367173.0 * 0x1p72};
  for (const double k : {1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 8.0, 100.0, 355.0, 1001.0, 65536.0, 1e5, 636619.0, 636620.0, 1e6,
                         1e7, 1e9, 1e12}) {
    const auto nearest = static_cast<float>(k * kHalfPi);
    for (const float angle : {std::nextafter(nearest, 0.0f), nearest, std::nextafter(nearest, 1e30f)}) {
      angles.push_back(angle);
      angles.push_back(-angle);
    }
  }
  for (const CosineAndSine& result : cosines_and_sines(device(), DType::float32, angles)) {
    const double cosine = std::cos(result.angle), sine = std::sin(result.angle);
    EXPECT_EQ(difference(DType::float32, result.cosine, cosine, std::abs(cosine)), "") << "cos(" << result.angle << ")";
    EXPECT_EQ(difference(DType::float32, result.sine, sine, std::abs(sine)), "") << "sin(" << result.angle << ")";
  }
}

TEST_P(LrpeCosineAccuracy, AnglesOfEverySizeHaveTheirCosineAndSine) {
  std::vector<double> angles = {0.0, 1.0, 0.5, 3.14159, 3.1415927, 1.5707964, 0.78539816, 1e30, -1e30, 3.4e38, 1e-30};
  for (double size = 1e-12; size < 1e38; size *= 1.37) {
    angles.push_back(size);
    angles.push_back(-size);
  }
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    for (const CosineAndSine& result : cosines_and_sines(device(), dtype, angles)) {
      const double cosine = std::cos(result.angle), sine = std::sin(result.angle);
      // The errors are relative to the cosine and the sine, not to 1.
      EXPECT_EQ(difference(dtype, result.cosine, cosine, std::abs(cosine)), "") << "cos(" << result.angle << ")";
      EXPECT_EQ(difference(dtype, result.sine, sine, std::abs(sine)), "") << "sin(" << result.angle << ")";
    }
  }
}

TEST_P(LrpeCosineAccuracy, AProductThatLeavesFloat32IsNaNAndOneThatUnderflowsIsZero) {
  const double theta[] = {1e30, -1e30, 1e-42, 0.0, -0.0, 1e-38};
  check_lrpe_cosine({.dtype = DType::float32,
                     .shape = {1, 1, 3, 6},
                     .theta_shape = {1, 6},
                     .positions = {1000000000, 1, -1},  // 1e39 is beyond float32
                     .has_grad_theta = false,
                     .angle = [&](std::int64_t i) { return theta[i]; }});
}

TEST_P(LrpeCosineAccuracy, ASoftmaxFarFromZeroIsAsPreciseAsAtZero) {
  // An lse of 10000 rounded to float32 is off by up to 5e-4, and this would be the relative error of the softmax.
  for (const auto& [mean, dtype, activation, batch] : combine<double, DType, LrpeCosineActivation, std::int64_t>(
           {30.0, 100.0, 1000.0, 10000.0, -30.0, -10000.0}, {DType::float32, DType::bfloat16},
           {every_activation()[4], every_activation()[5]}, {1, 3})) {
    SCOPED_TRACE("mean " + std::to_string(mean));
    check_lrpe_cosine(with_activation(
        {.dtype = dtype,
         .shape = {batch, 2, 200, 64},
         .theta_shape = {2, 64},
         .theta_dtype = DType::float32,
         .is_plain = true,
         .value = [=](std::int64_t i) { return mean + random_normal(73, static_cast<std::uint64_t>(i)); },
         .angle = rate_of_64},
        activation));
  }
}

TEST_P(LrpeCosineAccuracy, HeavyTailedInputsKeepTheContract) {
  for (const auto& [dtype, activation] :
       combine<DType, LrpeCosineActivation>(floating_point_dtypes(), every_activation())) {
    check_lrpe_cosine(with_activation({.dtype = dtype,
                                       .shape = {1, 2, 100, 32},
                                       .theta_shape = {2, 32},
                                       .theta_dtype = DType::float32,
                                       .value =
                                           [](std::int64_t i) {
                                             const double z = random_normal(71, static_cast<std::uint64_t>(i));
                                             return 3.0 * z * z * z;
                                           },
                                       .angle = [](std::int64_t i) { return rate(i, 32); }},
                                      activation));
  }
}

}  // namespace
}  // namespace eaves::testing
