// Every message with which logsumexp refuses a call; a refused call writes nothing.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "eaves/error.h"
#include "eaves/logsumexp.h"
#include "eaves/system.h"
#include "testing/cases.h"
#include "testing/refusals.h"

namespace eaves::testing {
namespace {

using Forward = LogsumexpForwardArgs;
using Backward = LogsumexpBackwardArgs;

/// The arguments of a legal call. A test makes one of them illegal.
class LogsumexpErrors : public ::testing::Test {
 protected:
  template <typename T>
  TensorView view(std::vector<T>& memory, DType dtype, const Dims& shape) {
    return TensorView::contiguous(static_cast<void*>(memory.data()), dtype, shape);
  }

  std::vector<float> x_ = std::vector<float>(24, 1.0f);  // room for 12 elements of float64, so that none overlaps out
  std::vector<float> grad_out_ = std::vector<float>(12, 1.0f);
  UnwrittenOutput out_{"out", 12}, lse_{"lse", 12}, grad_x_{"grad_x", 12};

  std::function<void()> unwritten_ = [this] { expect_nothing_written(); };

  EntryPoint<Forward> forward_ = {
      "logsumexp_forward",
      logsumexp_forward,
      logsumexp_forward_workspace_bytes,
      unwritten_,
      {.x = view(x_, DType::float32, {4, 3}), .axes = {1}, .out = out_.view({4}), .lse = lse_.view({4})}};
  EntryPoint<Backward> backward_ = {"logsumexp_backward",
                                    logsumexp_backward,
                                    logsumexp_backward_workspace_bytes,
                                    unwritten_,
                                    {.grad_out = view(grad_out_, DType::float32, {4}),
                                     .x = view(x_, DType::float32, {4, 3}),
                                     .lse = lse_.view({4}),
                                     .axes = {1},
                                     .grad_x = grad_x_.view({4, 3})}};

  void expect_nothing_written() {
    for (const UnwrittenOutput* output : {&out_, &lse_, &grad_x_}) output->expect_unwritten();
  }
};

TEST_F(LogsumexpErrors, TheArgumentsThatTheseTestsSpoilAreLegal) {
  EXPECT_NO_THROW(logsumexp_forward(forward_.legal));
  EXPECT_NO_THROW(logsumexp_backward(backward_.legal));
}

TEST_F(LogsumexpErrors, MissingTensors) {
  forward_.refuses({
      {&Forward::x, missing(), "x is missing"},
      {[](Forward& a) { a.out = a.lse = {}; }, "out and lse are both missing, expected at least one"},
  });
  backward_.refuses({
      {&Backward::lse, missing(), "lse is missing"},
      {&Backward::grad_out, missing(), "grad_out is missing"},
      {&Backward::grad_x, missing(), "grad_x is missing"},
  });
}

TEST_F(LogsumexpErrors, Axes) {
  const Dims twice = {1, -1};
  forward_.refuses({
      {[](Forward& a) { a.axes = {2}; }, "axes contains 2, expected -2 to 1 (x has 2 axes)"},
      {[](Forward& a) { a.axes = {-3}; }, "axes contains -3, expected -2 to 1 (x has 2 axes)"},
      {[&](Forward& a) { a.axes = twice; }, "axes is [1, -1], expected each axis once (axis -1 appears twice)"},
  });
  backward_.refuses({{[](Backward& a) { a.axes = {5}; }, "axes contains 5, expected -2 to 1 (x has 2 axes)"}});
}

TEST_F(LogsumexpErrors, Shapes) {
  forward_.refuses({
      {&Forward::out, out_.view({3}), "out has shape [3], expected [4] (x without its reduced axes)"},
      {[](Forward& a) { a.keepdim = true; }, "out has shape [4], expected [4, 1] (x with its reduced axes of size 1)"},
      {&Forward::lse, lse_.view({4, 1}), "lse has shape [4, 1], expected [4] (x without its reduced axes)"},
  });
  backward_.refuses({
      {&Backward::grad_out, of_shape({1}), "grad_out has shape [1], expected [4] (x without its reduced axes)"},
      {&Backward::lse, lse_.view({12}), "lse has shape [12], expected [4] (x without its reduced axes)"},
      {&Backward::grad_x, grad_x_.view({12}), "grad_x has shape [12], expected [4, 3] (as x)"},
  });
}

TEST_F(LogsumexpErrors, Dtypes) {
  const std::string as_x = " (as x, or float32)";
  const std::string result = " (float32, or float64 where x is float64)";
  forward_.refuses({
      {&Forward::out, of_dtype(DType::bfloat16), "out has dtype bfloat16, expected float32" + as_x},
      {[](Forward& a) { a.x.dtype = DType::bfloat16, a.out.dtype = DType::float16; },
       "out has dtype float16, expected bfloat16 or float32" + as_x},
      {&Forward::lse, of_dtype(DType::bfloat16), "lse has dtype bfloat16, expected float32" + result},
      {[](Forward& a) { a.x.dtype = a.out.dtype = DType::float64; },
       "lse has dtype float32, expected float64" + result},
      {&Forward::x, of_dtype(static_cast<DType>(77)), "x has dtype 77, expected one of enum DType"},
  });
  for (const DType dtype : integer_dtypes()) {
    const std::string refusal = std::string("x has dtype ") + name_of(dtype) +
                                ", expected float32 or float64 or float16 or bfloat16 (a floating-point type)";
    forward_.refuses({{&Forward::x, of_dtype(dtype), refusal}});
    backward_.refuses({{&Backward::x, of_dtype(dtype), refusal}});
  }
  backward_.refuses({
      {&Backward::grad_out, of_dtype(DType::float16), "grad_out has dtype float16, expected float32" + as_x},
      {&Backward::lse, of_dtype(DType::float16), "lse has dtype float16, expected float32" + result},
      {&Backward::grad_x, of_dtype(DType::bfloat16), "grad_x has dtype bfloat16, expected float32 (as x)"},
  });
}

TEST_F(LogsumexpErrors, Devices) {
  forward_.refuses({
      {&Forward::out, on_device(kCuda), "out is on cuda:0, expected cpu (as x)"},
      {&Forward::x, on_device({DeviceType::cpu, 1}), "x is on CPU 1, expected CPU 0, the only one"},
      {&Forward::x, on_device({DeviceType::cuda, -1}), "x is on cuda:-1, expected a device index of 0 or more"},
  });
  backward_.refuses({
      {&Backward::grad_out, on_device(kCuda), "grad_out is on cuda:0, expected cpu (as x)"},
      {&Backward::lse, on_device(kCuda), "lse is on cuda:0, expected cpu (as x)"},
      {&Backward::grad_x, on_device(kCuda), "grad_x is on cuda:0, expected cpu (as x)"},
  });
}

TEST_F(LogsumexpErrors, AGpuThatIsNotThere) {
  Forward args = forward_.legal;
  args.x.device = args.out.device = args.lse.device = {DeviceType::cuda, 63};
  expect_message_begins<Unsupported>([&] { logsumexp_forward(args); },
                                     "logsumexp_forward: the tensors are on cuda:63, but ");
  expect_nothing_written();
}

TEST_F(LogsumexpErrors, Memory) {
  const std::int64_t huge = std::int64_t{1} << 40;
  forward_.refuses({
      {&Forward::x, at_address(nullptr), "x has shape [4, 3] but a null pointer as data, expected an address"},
      {&Forward::x, at_address(reinterpret_cast<char*>(x_.data()) + 2),
       "x is not aligned to its elements, expected an address divisible by 4 for float32"},
      {&Forward::x, of_shape({4, -3}), "x has shape [4, -3], expected no negative sizes"},
      {&Forward::x, of_shape({huge, huge}),
       "x has shape [1099511627776, 1099511627776], expected fewer than 2^63 elements"},
      {&Forward::x, of_strides({std::int64_t{1} << 62, 1}),
       "x has shape [4, 3] and strides [4611686018427387904, 1], expected elements within the address space"},
      {&Forward::x, of_strides({3}), "x has shape [4, 3] and strides [3], expected a stride for each axis"},
      {&Forward::out, counted_as_missing(),
       "out has data but counts as missing, expected a view made by contiguous() or strided()"},
  });
}

TEST_F(LogsumexpErrors, OutputsThatShareMemory) {
  forward_.refuses({
      {&Forward::out, of_strides({0}), sharing("out has shape [4] and strides [0]")},
      {&Forward::lse, of_strides({0}), sharing("lse has shape [4] and strides [0]")},
      {&Forward::out, view(x_, DType::float32, {4}), overlapping("out", "x")},
      {&Forward::lse, view(x_, DType::float32, {4}), overlapping("lse", "x")},
      {&Forward::lse, out_.view({4}), overlapping("out", "lse")},
  });
  float* const grad_x = grad_x_.memory.data();
  backward_.refuses({
      {&Backward::grad_x, view(x_, DType::float32, {4, 3}), overlapping("grad_x", "x")},
      {&Backward::grad_x, of_strides({2, 1}), sharing("grad_x has shape [4, 3] and strides [2, 1]")},
      {&Backward::lse, at_address(grad_x + 5), overlapping("grad_x", "lse")},
      {&Backward::grad_out, at_address(grad_x), overlapping("grad_x", "grad_out")},
  });
}

TEST_F(LogsumexpErrors, OutputsWhoseElementsShareMemoryInOtherWays) {
  Backward args = backward_.legal;
  std::vector<float> memory(32);  // the strides reach beyond 12 elements, and before the first
  args.grad_x.data = memory.data() + 8;
  for (const Dims& strides : {Dims{1, 1}, Dims{2, 1}, Dims{-1, 1}, Dims{3, 2}, Dims{3, 6}}) {
    args.grad_x.strides = strides;
    if (strides == Dims{3, 2}) {
      // Offsets 0 2 4, 3 5 7, 6 8 10, 9 11 13 are all different, although neither stride steps over the other axis.
      EXPECT_NO_THROW(logsumexp_backward_workspace_bytes(args));
    } else {
      EXPECT_THROW(logsumexp_backward_workspace_bytes(args), InvalidArgument) << strides[0] << ", " << strides[1];
    }
  }
}

TEST_F(LogsumexpErrors, TensorsThatOverlapByPartOfAnElement) {
  // A float64 x, and an output over the second half of its first element.
  std::vector<double> memory(12);
  std::vector<double> lse(4);
  forward_.legal.x = view(memory, DType::float64, {4, 3});
  forward_.legal.lse = view(lse, DType::float64, {4});
  float* const second_half = reinterpret_cast<float*>(memory.data()) + 1;
  forward_.refuses(
      {{&Forward::out, TensorView::strided(second_half, DType::float32, {4}, {6}), overlapping("out", "x")}});
}

TEST_F(LogsumexpErrors, DisjointColumnsOfOneBufferAreLegalWhateverTheirStrides) {
  // x and out interleave over 100000 rows, and one stride is a multiple of the other.
  struct Strides {
    std::int64_t x, out, column;
  };
  for (const Strides& strides : {Strides{8, 16, 6}, Strides{16, 8, 6}, Strides{9, 18, 7}}) {
    std::vector<float> buffer(static_cast<std::size_t>(100000 * 18 + 18), 1.0f);
    Forward args = forward_.legal;
    args.x = TensorView::strided(buffer.data(), DType::float32, {100000, 6}, {strides.x, 1});
    args.out = TensorView::strided(buffer.data() + strides.column, DType::float32, {100000}, {strides.out});
    args.lse = {};
    EXPECT_NO_THROW(logsumexp_forward_workspace_bytes(args)) << strides.x << ", " << strides.out;
    args.out.data = buffer.data() + 5;
    EXPECT_THROW(logsumexp_forward_workspace_bytes(args), InvalidArgument) << strides.x << ", " << strides.out;
  }
}

TEST_F(LogsumexpErrors, Threads) {
  forward_.refuses_numbers_of_threads();
  backward_.refuses_numbers_of_threads();
}

TEST_F(LogsumexpErrors, StridesOfAnEmptyTensorMayBeAnything) {
  Forward args = forward_.legal;
  args.x = TensorView::strided(x_.data(), DType::float32, {4, 0, 3}, {std::int64_t{1} << 62, std::int64_t{1} << 62, 7});
  args.axes = {1, 2};
  EXPECT_NO_THROW(logsumexp_forward(args));
  EXPECT_EQ(lse_.memory[3], -std::numeric_limits<float>::infinity());
}

TEST_F(LogsumexpErrors, MemoryThatInterleavesWithoutSharingIsLegal) {
  // Each row of one buffer holds a row of x, then a column of out, then a row of x's gradient.
  std::vector<float> buffer(4 * 7, 1.0f);
  const Dims strides = {7, 1};
  const auto half = [&](int start) {
    return TensorView::strided(static_cast<void*>(buffer.data() + start), DType::float32, {4, 3}, strides);
  };
  Forward forward = forward_.legal;
  forward.x = half(0);
  forward.out = TensorView::strided(static_cast<void*>(buffer.data() + 3), DType::float32, {4}, {7});
  EXPECT_NO_THROW(logsumexp_forward(forward));
  EXPECT_NEAR(buffer[3], 1.0f + std::log(3.0f), 1e-6f);
  Backward backward = backward_.legal;
  backward.x = half(0);
  backward.lse = forward.out;
  backward.grad_x = half(4);
  EXPECT_NO_THROW(logsumexp_backward(backward));
  EXPECT_NEAR(buffer[4], 1.0f / 3.0f, 1e-6f);
}

TEST_F(LogsumexpErrors, MoreAxesThanSixteen) {
  EXPECT_THROW((Dims{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17}), InvalidArgument);
}

}  // namespace
}  // namespace eaves::testing
