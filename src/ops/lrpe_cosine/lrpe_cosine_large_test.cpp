// Tensors too large for an oracle that computes every element. Tests beyond 2^31 elements, for every index that does
// not fit 32 bits, need gigabytes, so their names start with Slow; a test is skipped, with the reason, if memory is
// short. A CPU would take minutes for each: its tensors have a few rows that lie as far apart instead.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <vector>

#include "eaves/lrpe_cosine.h"
#include "runtime/runtime.h"
#include "testing/cases.h"
#include "testing/devices.h"
#include "testing/memory.h"
#include "testing/tolerance.h"

namespace eaves::testing {
namespace {

class LrpeCosineSampled : public OnEachDevice {};
EAVES_EACH_DEVICE(LrpeCosineSampled);
class SlowLrpeCosine : public OnEachDevice {};
EAVES_EACH_DEVICE(SlowLrpeCosine);

struct LargeCase {
  Dims shape;
  bool is_transposed;  ///< [B, N, H, D] in memory
  Activation activation;
  int activation_dim;
  std::int64_t gap = 1;  ///< the distance of rows in memory, in rows
};

/// x is constant except for marked elements at the start, in the middle and at the end, the last of them beyond 2^31.
/// grad_out is 0 except at the marked elements. Every result has a closed formula, because a row and a column have at
/// most one marked element.
class LargeCheck {
 public:
  LargeCheck(Device device, const LargeCase& large) : device_(device), case_(large), shape_(large.shape) {
    const std::int64_t rows = shape_[0] * shape_[1] * shape_[2];
    for (const std::int64_t row : {std::int64_t{0}, rows / 2 + 1, rows - 1}) {
      const std::int64_t d = row == 0 ? 3 : (row == rows - 1 ? shape_[3] - 1 : 17);
      marked_.push_back({row / (shape_[1] * shape_[2]), row / shape_[2] % shape_[1], row % shape_[2], d});
    }
  }

  void run_beyond_2_to_31() {
    ASSERT_GT(shape_[0] * shape_[1] * shape_[2] * shape_[3] * case_.gap, std::int64_t{1} << 31);
    run();
  }

  void run() {
    const std::int64_t count = shape_[0] * shape_[1] * shape_[2] * shape_[3] * case_.gap;
    const std::int64_t columns = shape_[0] * shape_[1] * shape_[3];
    // The bytes of all tensors, or of the largest one if rows are far apart, because the memory between them is not
    // touched. Then lse, and a workspace of four accumulators for each column.
    const std::int64_t bytes = (case_.gap == 1 ? 8 : 4) * count + 24 * columns;
    if (runtime::free_memory_bytes(device_) < bytes + (std::int64_t{1} << 30)) {
      GTEST_SKIP() << "needs " << (bytes >> 20) << " MiB, " << (runtime::free_memory_bytes(device_) >> 20)
                   << " are free";
    }
    // grad_out reuses the memory of out, which has been checked by then.
    const LargeMemory x(device_, 2 * count), out(device_, 4 * count), grad_x(device_, 2 * count);
    const Memory theta(device_, 4 * kAngles), grad_theta(device_, 4 * kAngles), lse(device_, 8 * columns);
    fill(x, shape_[3], kByte);
    for (const Index& at : marked_) write(x, shape_[3], at, at[3], kMarkerBits);
    std::vector<float> rates;
    for (std::int64_t d = 0; d < kAngles; ++d) rates.push_back(rate(d));
    theta.write(rates);

    const bool has_lse = case_.activation == Activation::softmax && case_.activation_dim == -2;
    const TensorView lse_view = has_lse ? lse.view(DType::float32, {shape_[0], shape_[1], 2, shape_[3]}) : TensorView{};
    const LrpeAngles angles{.theta = theta.view(DType::float32, {1, kAngles})};
    lrpe_cosine_forward({.x = view(x, shape_[3]),
                         .angles = angles,
                         .activation = case_.activation,
                         .activation_dim = case_.activation_dim,
                         .out = view(out, 2 * shape_[3]),
                         .lse = lse_view});
    for (const Index& at : neighbours()) {
      expect(read(out, 2 * shape_[3], at, at[3]), activated(at) * std::cos(phi(at)), activated(at), "cosine half", at);
      expect(read(out, 2 * shape_[3], at, at[3] + shape_[3]), activated(at) * std::sin(phi(at)), activated(at),
             "sine half", at);
    }

    fill(out, 2 * shape_[3], 0);
    for (const Index& at : marked_) {
      write(out, 2 * shape_[3], at, at[3], kOneBits);
      write(out, 2 * shape_[3], at, at[3] + shape_[3], kTwoBits);
    }
    lrpe_cosine_backward({.grad_out = view(out, 2 * shape_[3]),
                          .x = view(x, shape_[3]),
                          .angles = angles,
                          .activation = case_.activation,
                          .activation_dim = case_.activation_dim,
                          .lse = lse_view,
                          .grad_x = view(grad_x, shape_[3]),
                          .grad_theta = grad_theta.view(DType::float32, {1, kAngles})});
    for (const Index& at : neighbours()) {
      expect(read(grad_x, shape_[3], at, at[3]), gradient(at), 3.0 * activated(at), "grad_x", at);
    }
    std::vector<double> exact(kAngles, 0.0), scale = exact;
    for (const Index& at : marked_) {
      if (at[3] >= kAngles) continue;
      const double size = static_cast<float>(at[2]) * activated(at);
      exact[static_cast<std::size_t>(at[3])] += size * (2.0 * std::cos(phi(at)) - std::sin(phi(at)));
      scale[static_cast<std::size_t>(at[3])] +=
          std::abs(size) * (std::abs(2.0 * std::cos(phi(at))) + std::abs(std::sin(phi(at))));
    }
    const std::vector<float> actual = grad_theta.read<float>(kAngles);
    for (std::size_t d = 0; d < exact.size(); ++d) {
      EXPECT_EQ(difference(DType::float32, actual[d], exact[d], scale[d]), "") << "grad_theta of feature " << d;
    }
  }

 private:
  using Index = std::array<std::int64_t, 4>;

  static constexpr unsigned char kByte = 0x3f;  // 0x3f3f is 0.746 in bfloat16
  static constexpr double kValue = 0.74609375;
  static constexpr std::uint16_t kMarkerBits = 0x4140, kOneBits = 0x3f80, kTwoBits = 0x4000;
  static constexpr double kMarker = 12.0;
  static constexpr std::int64_t kAngles = 20;  ///< few: angles take most of a CPU's time; other features have angle 0

  static float rate(std::int64_t d) { return std::pow(10.0f, -static_cast<float>(d % 7)) * 0.7f; }

  /// The float32 product of theta and the position rounded to float32.
  static double phi(const Index& at) { return at[3] < kAngles ? rate(at[3]) * static_cast<float>(at[2]) : 0.0f; }

  /// Fills the rows one by one, or all at once if they touch.
  void fill(const Memory& memory, std::int64_t features, unsigned char byte) const {
    const std::int64_t rows = shape_[0] * shape_[1] * shape_[2];
    const std::int64_t runs = case_.gap == 1 ? 1 : rows;
    for (std::int64_t run = 0; run < runs; ++run) {
      runtime::fill_bytes(device_, static_cast<char*>(memory.data()) + 2 * run * features * case_.gap, byte,
                          static_cast<std::size_t>(2 * features * rows / runs));
    }
  }

  Dims strides(std::int64_t features) const {
    const std::int64_t row = features * case_.gap, plane = shape_[1] * shape_[2] * row;
    return case_.is_transposed ? Dims{plane, row, shape_[1] * row, 1} : Dims{plane, shape_[2] * row, row, 1};
  }
  TensorView view(const Memory& memory, std::int64_t features) const {
    return TensorView::strided(memory.data(), DType::bfloat16, {shape_[0], shape_[1], shape_[2], features},
                               strides(features), device_);
  }
  std::uint16_t* place(const Memory& memory, std::int64_t features, const Index& at, std::int64_t d) const {
    const Dims s = strides(features);
    return static_cast<std::uint16_t*>(memory.data()) + at[0] * s[0] + at[1] * s[1] + at[2] * s[2] + d;
  }
  void write(const Memory& memory, std::int64_t features, const Index& at, std::int64_t d, std::uint16_t bits) const {
    runtime::copy(place(memory, features, at, d), device_, &bits, kCpu, 2);
  }
  double read(const Memory& memory, std::int64_t features, const Index& at, std::int64_t d) const {
    std::uint16_t bits = 0;
    runtime::copy(&bits, kCpu, place(memory, features, at, d), device_, 2);
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }

  /// The marked elements, and others of their rows and columns.
  std::vector<Index> neighbours() const {
    std::vector<Index> all;
    for (const auto& [at, step] : combine<Index, std::int64_t>(marked_, {-1, 0, 1})) {
      Index in_row = at, in_column = at;
      in_row[3] = (at[3] + step + shape_[3]) % shape_[3];
      in_column[2] = (at[2] + step + shape_[2]) % shape_[2];
      all.push_back(in_row);
      all.push_back(in_column);
    }
    return all;
  }

  bool is_marked(const Index& at) const { return std::find(marked_.begin(), marked_.end(), at) != marked_.end(); }

  /// The marked elements in the softmax of `at`.
  std::vector<Index> marked_beside(const Index& at) const {
    std::vector<Index> beside;
    const int own_axis = case_.activation_dim == -1 ? 3 : 2;
    for (Index marked : marked_) {
      const Index original = marked;
      marked[static_cast<std::size_t>(own_axis)] = at[static_cast<std::size_t>(own_axis)];
      if (marked == at) beside.push_back(original);
    }
    return beside;
  }

  double activated(const Index& at) const {
    const double z = is_marked(at) ? kMarker : kValue;
    if (case_.activation == Activation::none) return z;
    if (case_.activation == Activation::silu) return z / (1.0 + std::exp(-z));
    const auto others = static_cast<double>(marked_beside(at).size());
    const auto size = static_cast<double>(case_.activation_dim == -1 ? shape_[3] : shape_[2]);
    return std::exp(z) / ((size - others) * std::exp(kValue) + others * std::exp(kMarker));
  }

  /// dL/d(activated): 1 * cos + 2 * sin at a marked element, else 0.
  double upstream(const Index& at) const { return is_marked(at) ? std::cos(phi(at)) + 2.0 * std::sin(phi(at)) : 0.0; }

  double gradient(const Index& at) const {
    if (case_.activation == Activation::softmax) {
      double sum = 0.0;
      for (const Index& marked : marked_beside(at)) sum += activated(marked) * upstream(marked);
      return activated(at) * (upstream(at) - sum);
    }
    if (case_.activation == Activation::none) return upstream(at);
    const double z = is_marked(at) ? kMarker : kValue, s = 1.0 / (1.0 + std::exp(-z));
    return upstream(at) * (s + z * s * (1.0 - s));
  }

  void expect(double actual, double exact, double size, const char* what, const Index& at) const {
    EXPECT_EQ(
        difference_beyond(allowed_elementwise_error(DType::bfloat16, exact, size), DType::bfloat16, actual, exact), "")
        << what << " [" << at[0] << ", " << at[1] << ", " << at[2] << ", " << at[3] << "]";
  }

  Device device_;
  LargeCase case_;
  Dims shape_;
  std::vector<Index> marked_;
};

TEST_P(LrpeCosineSampled, MoreElementsThanAGpuHasThreadsForMatchAClosedFormula) {
  LargeCheck(device(), {{2, 8, 30011, 64}, false, Activation::none, -1}).run();
  LargeCheck(device(), {{1, 8, 30011, 65}, true, Activation::silu, -1}).run();
  LargeCheck(device(), {{2, 8, 30011, 64}, true, Activation::softmax, -1}).run();
  LargeCheck(device(), {{2, 8, 30011, 64}, true, Activation::softmax, -2}).run();
}

TEST_P(LrpeCosineSampled, MoreFeaturesThan65535BlocksHaveThreads) {
  // One token. Vectors do not fit the odd number of features, and 65535 blocks of 128 threads miss the last feature.
  constexpr std::int64_t kFeatures = 65535 * 128 + 1;
  constexpr std::uint16_t kMarkerBits = 0x4140, kOneBits = 0x3f80, kTwoBits = 0x4000;
  constexpr double kMarker = 12.0, kValue = 0.74609375;  // 0x3f3f in bfloat16
  constexpr float kTheta = 0.7f;
  constexpr std::int64_t kPosition = 3;
  const double phi = kTheta * static_cast<float>(kPosition);
  const std::int64_t marked[] = {0, kFeatures / 2, kFeatures - 2, kFeatures - 1};
  const Memory x(device(), 2 * kFeatures), out(device(), 4 * kFeatures), grad_x(device(), 2 * kFeatures);
  const Memory theta(device(), 4), grad_theta(device(), 4);
  const auto write = [&](const Memory& memory, std::int64_t at, std::uint16_t bits) {
    runtime::copy(static_cast<std::uint16_t*>(memory.data()) + at, device(), &bits, kCpu, 2);
  };
  const auto expect = [&](const std::vector<std::uint16_t>& results, std::int64_t at, double exact, const char* what) {
    const double actual = std::bit_cast<float>(std::uint32_t{results[static_cast<std::size_t>(at)]} << 16);
    EXPECT_EQ(
        difference_beyond(allowed_elementwise_error(DType::bfloat16, exact, kMarker), DType::bfloat16, actual, exact),
        "")
        << what << " " << at;
  };
  const Dims shape = {1, 1, 1, kFeatures}, out_shape = {1, 1, 1, 2 * kFeatures};
  const LrpeAngles angles{.theta = theta.view(DType::float32, {1, 1}), .offset = kPosition};
  theta.write(std::vector<float>{kTheta});
  runtime::fill_bytes(device(), x.data(), 0x3f, static_cast<std::size_t>(2 * kFeatures));
  for (const std::int64_t at : marked) write(x, at, kMarkerBits);

  lrpe_cosine_forward(
      {.x = x.view(DType::bfloat16, shape), .angles = angles, .out = out.view(DType::bfloat16, out_shape)});
  runtime::synchronize(device());
  const auto halves = out.read<std::uint16_t>(2 * kFeatures);
  const auto expect_out = [&](std::int64_t at, double value) {
    expect(halves, at, value * std::cos(phi), "cosine half");
    expect(halves, at + kFeatures, value * std::sin(phi), "sine half");
  };
  for (const std::int64_t at : marked) expect_out(at, kMarker);
  for (std::int64_t at = 1; at < kFeatures / 2; at += 9973) expect_out(at, kValue);
  for (std::int64_t at = kFeatures / 2 + 1; at < kFeatures - 2; at += 9973) expect_out(at, kValue);

  // grad_out is 0 except at the marked features: 1 in the cosine half, 2 in the sine half.
  runtime::fill_bytes(device(), out.data(), 0, static_cast<std::size_t>(4 * kFeatures));
  for (const std::int64_t at : marked) {
    write(out, at, kOneBits);
    write(out, at + kFeatures, kTwoBits);
  }
  runtime::fill_bytes(device(), grad_x.data(), 0x3f, static_cast<std::size_t>(2 * kFeatures));
  lrpe_cosine_backward({.grad_out = out.view(DType::bfloat16, out_shape),
                        .x = x.view(DType::bfloat16, shape),
                        .angles = angles,
                        .grad_x = grad_x.view(DType::bfloat16, shape),
                        .grad_theta = grad_theta.view(DType::float32, {1, 1})});
  runtime::synchronize(device());
  const auto gradients = grad_x.read<std::uint16_t>(kFeatures);
  for (const std::int64_t at : marked) expect(gradients, at, std::cos(phi) + 2.0 * std::sin(phi), "grad_x");
  EXPECT_EQ(std::count(gradients.begin(), gradients.end(), 0),
            kFeatures - static_cast<std::int64_t>(std::size(marked)));
  const double size = static_cast<double>(std::size(marked)) * kPosition * kMarker;
  EXPECT_EQ(difference(DType::float32, grad_theta.read<float>(1)[0], size * (2.0 * std::cos(phi) - std::sin(phi)),
                       size * (2.0 * std::abs(std::cos(phi)) + std::abs(std::sin(phi)))),
            "");
}

constexpr std::int64_t kFarApart = std::int64_t{1} << 20;

TEST_P(SlowLrpeCosine, ALongSequenceBeyond2To31Elements) {
  const LargeCase few = {{1, 1, 37, 64}, false, Activation::none, -1, kFarApart};
  const LargeCase all = {{1, 1, (std::int64_t{1} << 25) + 77, 64}, false, Activation::none, -1};
  LargeCheck(device(), device().type == DeviceType::cpu ? few : all).run_beyond_2_to_31();
}

TEST_P(SlowLrpeCosine, ManyHeadsBeyond2To31Elements) {
  const LargeCase few = {{2, 2, 9, 64}, false, Activation::silu, -1, kFarApart};
  const LargeCase all = {{2100, 16, 1003, 64}, false, Activation::silu, -1};
  LargeCheck(device(), device().type == DeviceType::cpu ? few : all).run_beyond_2_to_31();
}

TEST_P(SlowLrpeCosine, HeadsInsideBeyond2To31Elements) {
  const LargeCase few = {{2, 2, 9, 65}, true, Activation::silu, -1, kFarApart};
  const LargeCase all = {{3, 12, 932077, 65}, true, Activation::silu, -1};
  LargeCheck(device(), device().type == DeviceType::cpu ? few : all).run_beyond_2_to_31();
}

TEST_P(SlowLrpeCosine, ASoftmaxOverTheFeaturesBeyond2To31Elements) {
  const LargeCase few = {{1, 2, 9, 128}, false, Activation::softmax, -1, kFarApart};
  const LargeCase all = {{2, 5, 1700003, 128}, false, Activation::softmax, -1};
  LargeCheck(device(), device().type == DeviceType::cpu ? few : all).run_beyond_2_to_31();
}

TEST_P(SlowLrpeCosine, ASoftmaxOverASequenceBeyond2To31Elements) {
  const LargeCase few = {{1, 2, 18, 64}, false, Activation::softmax, -2, kFarApart};
  const LargeCase all = {{1, 2, 16800011, 64}, false, Activation::softmax, -2};
  LargeCheck(device(), device().type == DeviceType::cpu ? few : all).run_beyond_2_to_31();
}

}  // namespace
}  // namespace eaves::testing
