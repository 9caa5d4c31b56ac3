// Tensors beyond 2^31 elements: every index that would not survive 32 bits. Slow (gigabytes), so their names start
// with Slow; they are skipped, with the reason, where memory is short.
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
};

/// x is 0 everywhere (bytes of zeros) but for one element of each of the first and the last row, at the end of the
/// row: the last one lies beyond 2^31.
void check_large(Device device, const Shape& large) {
  constexpr double kMarker = 20.0;
  const std::int64_t count = large.shape[0] * large.shape[1];
  ASSERT_GT(count, std::int64_t{1} << 31);
  const std::int64_t rows = large.shape[1 - large.axis];
  const std::int64_t columns = large.shape[large.axis];
  const std::int64_t bytes = 2 * count * 2 + 2 * rows * 4;
  if (runtime::free_memory_bytes(device) < bytes + (std::int64_t{1} << 30)) {
    GTEST_SKIP() << "needs " << (bytes >> 20) << " MiB, " << (runtime::free_memory_bytes(device) >> 20) << " are free";
  }
  const Memory x(device, count * 2);
  const Memory grad_x(device, count * 2);
  const Memory lse(device, rows * 4);
  const Memory grad_out(device, rows * 4);
  runtime::fill_bytes(device, x.data(), 0, static_cast<std::size_t>(count) * 2);
  const std::uint16_t marker = 0x41a0;  // 20 in bfloat16
  const auto element = [&](std::int64_t row, std::int64_t column) {
    return large.axis == 1 ? row * columns + column : column * rows + row;
  };
  for (const std::int64_t row : {std::int64_t{0}, rows - 1}) {
    runtime::copy(static_cast<std::uint16_t*>(x.data()) + element(row, columns - 1), device, &marker, kCpu, 2);
  }
  const std::vector<float> ones(static_cast<std::size_t>(rows), 1.0f);
  runtime::copy(grad_out.data(), device, ones.data(), kCpu, ones.size() * 4);

  const TensorView x_view = TensorView::contiguous(x.data(), DType::bfloat16, large.shape, device);
  const TensorView lse_view = TensorView::contiguous(lse.data(), DType::float32, {rows}, device);
  logsumexp_forward({.x = x_view, .axes = {large.axis}, .lse = lse_view});
  logsumexp_backward({.grad_out = TensorView::contiguous(grad_out.data(), DType::float32, {rows}, device),
                      .x = x_view,
                      .lse = lse_view,
                      .axes = {large.axis},
                      .grad_x = TensorView::contiguous(grad_x.data(), DType::bfloat16, large.shape, device)});

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

TEST_P(SlowLogsumexp, ManyRowsBeyond2To31Elements) { check_large(device(), {{70001, 32768}, 1}); }

TEST_P(SlowLogsumexp, OneRowBeyond2To31Elements) { check_large(device(), {{1, (std::int64_t{1} << 31) + 77}, 1}); }

TEST_P(SlowLogsumexp, ColumnsBeyond2To31Elements) { check_large(device(), {{2100003, 1024}, 0}); }

TEST_P(SlowLogsumexp, PromotedRowsBeyond2To31Elements) {
  const std::int64_t columns = (std::int64_t{1} << 30) + 7;
  const std::int64_t bytes = 3 * columns;
  if (runtime::free_memory_bytes(device()) < bytes + (std::int64_t{1} << 30)) GTEST_SKIP() << "too little memory";
  const Memory x(device(), bytes);
  const Memory lse(device(), 3 * 4);
  runtime::fill_bytes(device(), x.data(), 0, static_cast<std::size_t>(bytes));
  const std::int8_t marker = 30;  // e^30 is far above the sum of all others
  runtime::copy(static_cast<std::int8_t*>(x.data()) + bytes - 1, device(), &marker, kCpu, 1);
  logsumexp_forward({.x = TensorView::contiguous(x.data(), DType::int8, {3, columns}, device()),
                     .axes = {1},
                     .lse = TensorView::contiguous(lse.data(), DType::float32, {3}, device())});
  float result[3] = {};
  runtime::copy(result, kCpu, lse.data(), device(), sizeof(result));
  const double of_zeros = std::log(static_cast<double>(columns));
  EXPECT_NEAR(result[0], of_zeros, 2e-6 * of_zeros);
  EXPECT_NEAR(result[1], of_zeros, 2e-6 * of_zeros);
  EXPECT_NEAR(result[2], std::log(static_cast<double>(columns - 1) + std::exp(30.0)), 2e-6 * 30.0);
}

TEST_P(SlowLogsumexp, StridedElementsBeyond2To31) {
  // Every second element of memory, forward and backward: the element loops of each backend.
  const std::int64_t columns = (std::int64_t{1} << 30) + 7;
  const std::int64_t x_bytes = 2 * columns * 2;
  const std::int64_t grad_bytes = columns * 2;
  if (runtime::free_memory_bytes(device()) < x_bytes + grad_bytes + (std::int64_t{1} << 30)) {
    GTEST_SKIP() << "too little memory";
  }
  const Memory x(device(), x_bytes);
  const Memory grad_x(device(), grad_bytes);
  const Memory scalars(device(), 8);
  runtime::fill_bytes(device(), x.data(), 0, static_cast<std::size_t>(x_bytes));
  const std::uint16_t marker = 0x41f0;  // 30 in bfloat16
  runtime::copy(static_cast<std::uint16_t*>(x.data()) + 2 * (columns - 1), device(), &marker, kCpu, 2);
  const float one = 1.0f;
  runtime::copy(static_cast<float*>(scalars.data()) + 1, device(), &one, kCpu, 4);
  const TensorView x_view = TensorView::strided(x.data(), DType::bfloat16, {1, columns}, {2 * columns, 2}, device());
  const TensorView lse = TensorView::contiguous(scalars.data(), DType::float32, {1}, device());
  logsumexp_forward({.x = x_view, .axes = {1}, .lse = lse});
  logsumexp_backward(
      {.grad_out = TensorView::contiguous(static_cast<float*>(scalars.data()) + 1, DType::float32, {1}, device()),
       .x = x_view,
       .lse = lse,
       .axes = {1},
       .grad_x = TensorView::contiguous(grad_x.data(), DType::bfloat16, {1, columns}, device())});
  float result = 0.0f;
  runtime::copy(&result, kCpu, scalars.data(), device(), 4);
  const double exact = std::log(static_cast<double>(columns - 1) + std::exp(30.0));
  EXPECT_NEAR(result, exact, 2e-6 * exact);
  std::uint16_t last = 0;
  runtime::copy(&last, kCpu, static_cast<std::uint16_t*>(grad_x.data()) + columns - 1, device(), 2);
  EXPECT_NEAR(std::bit_cast<float>(static_cast<std::uint32_t>(last) << 16), std::exp(30.0 - exact), 0.004);
}

}  // namespace
}  // namespace eaves::testing
