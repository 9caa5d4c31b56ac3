// Tensors beyond 2^31 elements: every index that does not fit 32 bits. The tests need gigabytes, so their names start
// with Slow; a test is skipped, with the reason, if memory is short. A CPU would take minutes for most of them: its
// tensors have a few elements that are as far apart, and it touches little of their memory.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "eaves/logsumexp.h"
#include "runtime/runtime.h"
#include "testing/devices.h"
#include "testing/memory.h"

namespace eaves::testing {
namespace {

class SlowLogsumexp : public OnEachDevice {};
EAVES_EACH_DEVICE(SlowLogsumexp);

struct Shape {
  Dims shape;
  std::int64_t axis;
  Dims strides = {shape[1], 1};

  bool is_contiguous() const { return strides[0] == shape[1] && strides[1] == 1; }
  std::int64_t span() const { return (shape[0] - 1) * strides[0] + (shape[1] - 1) * strides[1] + 1; }
  TensorView view(const Memory& memory, Device device) const {
    return TensorView::strided(memory.data(), DType::bfloat16, shape, strides, device);
  }
};

/// x is 0 (bytes of zeros) except for the last element of the first row and of the last row, which lies beyond 2^31.
void check_large(Device device, const Shape& large) {
  constexpr double kMarker = 20.0;
  const std::int64_t count = large.span();
  ASSERT_GT(count, std::int64_t{1} << 31);
  const std::int64_t rows = large.shape[1 - large.axis];
  const std::int64_t columns = large.shape[large.axis];
  // A CPU does not touch the memory between elements that are far apart, so one tensor has to fit, not both.
  const bool is_sparse = device.type == DeviceType::cpu && !large.is_contiguous();
  const std::int64_t bytes = (is_sparse ? 2 : 4) * count + 2 * rows * 4;
  if (runtime::free_memory_bytes(device) < bytes + (std::int64_t{1} << 30)) {
    GTEST_SKIP() << "needs " << (bytes >> 20) << " MiB, " << (runtime::free_memory_bytes(device) >> 20) << " are free";
  }
  const Memory x(device, count * 2);
  const Memory grad_x(device, count * 2);
  const Memory lse(device, rows * 4);
  const Memory grad_out(device, rows * 4);
  const std::uint16_t marker = 0x41a0;  // 20 in bfloat16
  const auto element = [&](std::int64_t row, std::int64_t column) {
    return row * large.strides[1 - large.axis] + column * large.strides[large.axis];
  };
  if (!is_sparse) {
    runtime::fill_bytes(device, x.data(), 0, static_cast<std::size_t>(count) * 2);
  } else {
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t column = 0; column < columns; ++column) {
        static_cast<std::uint16_t*>(x.data())[element(row, column)] = 0;
      }
    }
  }
  for (const std::int64_t row : {std::int64_t{0}, rows - 1}) {
    runtime::copy(static_cast<std::uint16_t*>(x.data()) + element(row, columns - 1), device, &marker, kCpu, 2);
  }
  const std::vector<float> ones(static_cast<std::size_t>(rows), 1.0f);
  runtime::copy(grad_out.data(), device, ones.data(), kCpu, ones.size() * 4);

  const TensorView x_view = large.view(x, device);
  const TensorView lse_view = TensorView::contiguous(lse.data(), DType::float32, {rows}, device);
  logsumexp_forward({.x = x_view, .axes = {large.axis}, .lse = lse_view});
  logsumexp_backward({.grad_out = TensorView::contiguous(grad_out.data(), DType::float32, {rows}, device),
                      .x = x_view,
                      .lse = lse_view,
                      .axes = {large.axis},
                      .grad_x = large.view(grad_x, device)});

  std::vector<float> result(static_cast<std::size_t>(rows));
  runtime::copy(result.data(), kCpu, lse.data(), device, result.size() * 4);
  const double others = static_cast<double>(columns);
  for (std::int64_t row = 0; row < rows; ++row) {
    const bool is_marked = row == 0 || row == rows - 1;
    const double exact = is_marked ? std::log(others - 1.0 + std::exp(kMarker)) : std::log(others);
    ASSERT_NEAR(result[static_cast<std::size_t>(row)], exact, 2e-6 * (is_marked ? kMarker : exact)) << "row " << row;
  }
  const auto gradient = [&](std::int64_t row, std::int64_t column) {
    std::uint16_t bits = 0;
    runtime::copy(&bits, kCpu, static_cast<std::uint16_t*>(grad_x.data()) + element(row, column), device, 2);
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  };
  for (const std::int64_t row : {std::int64_t{0}, rows / 2, rows - 1}) {
    const double lse_of_row = result[static_cast<std::size_t>(row)];
    const double of_zero = std::exp(-lse_of_row);
    EXPECT_NEAR(gradient(row, 0), of_zero, 0.004 * of_zero) << "row " << row;
    const bool is_marked = row == 0 || row == rows - 1;
    const double of_last = is_marked ? std::exp(kMarker - lse_of_row) : of_zero;
    EXPECT_NEAR(gradient(row, columns - 1), of_last, 0.004 * of_last) << "row " << row;
  }
}

TEST_P(SlowLogsumexp, ManyRowsBeyond2To31Elements) {
  const Shape few = {{3, 1000}, 1, {(1 << 30) + 5, 1}};
  check_large(device(), device().type == DeviceType::cpu ? few : Shape{{70001, 32768}, 1});
}

TEST_P(SlowLogsumexp, OneRowBeyond2To31Elements) { check_large(device(), {{1, (std::int64_t{1} << 31) + 77}, 1}); }

TEST_P(SlowLogsumexp, ColumnsBeyond2To31Elements) {
  const Shape few = {{40, 48}, 0, {(1 << 26) + 5, 1}};
  check_large(device(), device().type == DeviceType::cpu ? few : Shape{{2100003, 1024}, 0});
}

TEST_P(SlowLogsumexp, StridedElementsBeyond2To31) {
  // The element loops of each backend: no two elements are neighbours in memory.
  const std::int64_t columns = (std::int64_t{1} << 30) + 7;
  const Shape few = {{1, 40}, 1, {std::int64_t{41} << 26, (1 << 26) + 5}};
  check_large(device(), device().type == DeviceType::cpu ? few : Shape{{1, columns}, 1, {2 * columns, 2}});
}

}  // namespace
}  // namespace eaves::testing
