// Tensors beyond 2^31 elements: every index that does not fit 32 bits. The tests need gigabytes, so their names start
// with Slow; a test is skipped, with the reason, if memory is short. A CPU would take minutes for most of them: its
// tensors have a few elements that are as far apart, and it touches little of their memory.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "eaves/cross_entropy.h"
#include "runtime/runtime.h"
#include "testing/cases.h"
#include "testing/devices.h"
#include "testing/memory.h"

namespace eaves::testing {
namespace {

class SlowCrossEntropy : public OnEachDevice {};
EAVES_EACH_DEVICE(SlowCrossEntropy);

struct LargeShape {
  Dims shape;
  int class_axis;
  Dims strides = shape.size() == 2 ? Dims{shape[1], 1} : Dims{};

  bool is_dense() const { return strides[0] == shape[1]; }
  std::int64_t span() const { return (shape[0] - 1) * strides[0] + (shape[1] - 1) * strides[1] + 1; }
  TensorView view(const Memory& memory, Device device) const {
    return TensorView::strided(memory.data(), DType::bfloat16, shape, strides, device);
  }
  /// The bytes of logits and their gradient. If elements are far apart, the memory between them is not touched, so one
  /// tensor has to fit, not both.
  std::int64_t bytes() const { return (is_dense() ? 4 : 2) * span(); }
  void fill_with_zeros(const Memory& memory, Device device) const {
    const std::int64_t rows = is_dense() ? 1 : shape[0];
    const std::int64_t row_bytes = 2 * (is_dense() ? span() : shape[1]);
    for (std::int64_t i = 0; i < rows; ++i) {
      runtime::fill_bytes(device, static_cast<char*>(memory.data()) + 2 * i * strides[0], 0,
                          static_cast<std::size_t>(row_bytes));
    }
  }
};

/// The logits are 0 (bytes of zeros) except for the last class of the first row and of the last row, which lies beyond
/// 2^31. The last class is the target of the last row; class 0 is the target of all other rows.
void check_large(Device device, const LargeShape& large) {
  constexpr double kMarker = 12.0;
  constexpr std::uint16_t kMarkerBits = 0x4140;  // 12 in bfloat16
  constexpr double kWithin = 0.004;              // of a gradient in bfloat16
  const int class_axis = large.class_axis;
  const std::int64_t count = large.span();
  ASSERT_GT(count, std::int64_t{1} << 31);
  const std::int64_t rows = large.shape[1 - class_axis];
  const std::int64_t columns = large.shape[class_axis];
  const std::int64_t bytes = large.bytes() + rows * 32;
  if (runtime::free_memory_bytes(device) < bytes + (std::int64_t{1} << 30)) {
    GTEST_SKIP() << "needs " << (bytes >> 20) << " MiB, " << (runtime::free_memory_bytes(device) >> 20) << " are free";
  }
  const LargeMemory logits(device, count * 2);
  const LargeMemory grad_logits(device, count * 2);
  const Memory targets(device, rows * 8), argmax(device, rows * 8);
  const Memory loss(device, rows * 4), lse(device, rows * 4), grad_loss(device, rows * 4);
  large.fill_with_zeros(logits, device);
  const auto element = [&](std::int64_t row, std::int64_t column) {
    return row * large.strides[1 - class_axis] + column * large.strides[class_axis];
  };
  for (const std::int64_t row : {std::int64_t{0}, rows - 1}) {
    runtime::copy(static_cast<std::uint16_t*>(logits.data()) + element(row, columns - 1), device, &kMarkerBits, kCpu,
                  2);
  }
  std::vector<std::int64_t> classes(static_cast<std::size_t>(rows), 0);
  classes.back() = columns - 1;
  targets.write(classes);
  grad_loss.write(std::vector<float>(classes.size(), 1.0f));

  const CrossEntropyForwardArgs forward{.logits = large.view(logits, device),
                                        .targets = targets.view(DType::int64, {rows}),
                                        .class_axis = class_axis,
                                        .options = {.reduction = Reduction::none},
                                        .loss = loss.view(DType::float32, {rows}),
                                        .lse = lse.view(DType::float32, {rows}),
                                        .argmax = argmax.view(DType::int64, {rows})};
  const auto check_losses = [&] {
    const std::vector<float> losses = loss.read<float>(rows);
    const std::vector<float> lses = lse.read<float>(rows);
    const std::vector<std::int64_t> best = argmax.read<std::int64_t>(rows);
    const auto others = static_cast<double>(columns);
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto at = static_cast<std::size_t>(row);
      const bool is_marked = row == 0 || row == rows - 1;
      const double exact = is_marked ? std::log(others - 1.0 + std::exp(kMarker)) : std::log(others);
      const double scale = is_marked ? std::max(kMarker, exact) : exact;
      ASSERT_NEAR(lses[at], exact, 2e-6 * scale) << "row " << row;
      ASSERT_NEAR(losses[at], row == rows - 1 ? exact - kMarker : exact, 2e-6 * scale) << "row " << row;
      ASSERT_EQ(best[at], is_marked ? columns - 1 : 0) << "row " << row;
    }
  };
  const auto check_gradients = [&](const Memory& gradients) {
    const std::vector<float> lses = lse.read<float>(rows);
    for (const auto& [row, column] : combine<std::int64_t, std::int64_t>(
             {std::int64_t{0}, rows / 2, rows - 1}, {std::int64_t{0}, std::int64_t{1}, columns - 1})) {
      std::uint16_t bits = 0;
      runtime::copy(&bits, kCpu, static_cast<std::uint16_t*>(gradients.data()) + element(row, column), device, 2);
      const float gradient = std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
      const bool is_marked = column == columns - 1 && (row == 0 || row == rows - 1);
      const double log_p = (is_marked ? kMarker : 0.0) - lses[static_cast<std::size_t>(row)];
      const bool is_target = column == classes[static_cast<std::size_t>(row)];
      const double exact = is_target ? std::expm1(log_p) : std::exp(log_p);
      EXPECT_NEAR(gradient, exact, kWithin * std::abs(exact)) << "row " << row << ", class " << column;
    }
  };

  cross_entropy_forward(forward);
  check_losses();
  cross_entropy_backward({.grad_loss = grad_loss.view(DType::float32, {rows}),
                          .logits = forward.logits,
                          .targets = forward.targets,
                          .class_axis = class_axis,
                          .options = forward.options,
                          .lse = forward.lse,
                          .grad_logits = large.view(grad_logits, device)});
  check_gradients(grad_logits);
  for (const Memory* written : {&loss, &lse}) written->write(std::vector<float>(classes.size(), -1.0f));
  cross_entropy_forward_backward({.forward = forward});
  check_losses();
  check_gradients(logits);
}

LargeShape many_rows(Device device) {
  if (device.type == DeviceType::cpu) return {{3, 1000}, 1, {(1 << 30) + 5, 1}};
  return {{70001, 32768}, 1};
}

TEST_P(SlowCrossEntropy, ManyRowsBeyond2To31Elements) { check_large(device(), many_rows(device())); }

TEST_P(SlowCrossEntropy, OneRowBeyond2To31Elements) { check_large(device(), {{1, (std::int64_t{1} << 31) + 77}, 1}); }

TEST_P(SlowCrossEntropy, ClassesSideBySideBeyond2To31Elements) {
  const LargeShape few = {{40, 48}, 0, {(1 << 26) + 5, 1}};
  check_large(device(), device().type == DeviceType::cpu ? few : LargeShape{{2100003, 1024}, 0});
}

TEST_P(SlowCrossEntropy, SoftTargetsBeyond2To31Elements) {
  // The soft targets are the logits' memory itself: 0 except for a 1 at the last class of the last row.
  const LargeShape large = many_rows(device());
  const std::int64_t rows = large.shape[0];
  const std::int64_t columns = large.shape[1];
  const std::int64_t count = large.span();
  if (runtime::free_memory_bytes(device()) < large.bytes() + (std::int64_t{1} << 30)) {
    GTEST_SKIP() << "this device has too little memory";
  }
  const LargeMemory logits(device(), count * 2);
  const LargeMemory grad_logits(device(), count * 2);
  const Memory loss(device(), rows * 4), lse(device(), rows * 4), target_mass(device(), rows * 4), one(device(), 4);
  large.fill_with_zeros(logits, device());
  const std::uint16_t marker = 0x3f80;  // 1 in bfloat16
  runtime::copy(static_cast<std::uint16_t*>(logits.data()) + count - 1, device(), &marker, kCpu, 2);
  one.write(std::vector<float>{1.0f});
  const TensorView view = large.view(logits, device());
  cross_entropy_forward({.logits = view,
                         .targets = view,
                         .options = {.reduction = Reduction::none},
                         .loss = loss.view(DType::float32, {rows}),
                         .lse = lse.view(DType::float32, {rows}),
                         .target_mass = target_mass.view(DType::float32, {rows})});
  cross_entropy_backward({.grad_loss = TensorView::strided(one.data(), DType::float32, {rows}, {0}, device()),
                          .logits = view,
                          .targets = view,
                          .options = {.reduction = Reduction::none},
                          .lse = lse.view(DType::float32, {rows}),
                          .target_mass = target_mass.view(DType::float32, {rows}),
                          .grad_logits = large.view(grad_logits, device())});
  const double lse_of_last = std::log(static_cast<double>(columns - 1) + std::exp(1.0));
  const std::vector<float> losses = loss.read<float>(rows);
  for (std::int64_t row = 0; row + 1 < rows; ++row) ASSERT_EQ(losses[static_cast<std::size_t>(row)], 0.0f) << row;
  EXPECT_NEAR(losses.back(), lse_of_last - 1.0, 2e-6 * lse_of_last);
  std::uint16_t bits[2] = {};
  runtime::copy(bits, kCpu, static_cast<std::uint16_t*>(grad_logits.data()) + count - 2, device(), 4);
  const double of_other = std::exp(-lse_of_last);
  EXPECT_NEAR(std::bit_cast<float>(static_cast<std::uint32_t>(bits[0]) << 16), of_other, 0.004 * of_other);
  EXPECT_NEAR(std::bit_cast<float>(static_cast<std::uint32_t>(bits[1]) << 16), std::exp(1.0 - lse_of_last) - 1.0,
              0.004);
}

}  // namespace
}  // namespace eaves::testing
