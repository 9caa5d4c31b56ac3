// Every sentence with which logsumexp refuses a call, and that nothing is written when it does.
#include <gtest/gtest.h>

#include <cmath>
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

/// Arguments of a legal call, for a test to spoil one of them.
class LogsumexpErrors : public ::testing::Test {
 protected:
  template <typename T>
  TensorView view(std::vector<T>& memory, DType dtype, const Dims& shape) {
    return TensorView::contiguous(static_cast<void*>(memory.data()), dtype, shape);
  }

  std::vector<float> x_ = std::vector<float>(24, 1.0f);  // room for 12 elements of float64, so that none overlaps out
  std::vector<float> grad_out_ = std::vector<float>(12, 1.0f);
  UnwrittenOutput out_{"out", 12}, lse_{"lse", 12}, grad_x_{"grad_x", 12};

  LogsumexpForwardArgs forward_ = {
      .x = view(x_, DType::float32, {4, 3}), .axes = {1}, .out = out_.view({4}), .lse = lse_.view({4})};
  LogsumexpBackwardArgs backward_ = {.grad_out = view(grad_out_, DType::float32, {4}),
                                     .x = view(x_, DType::float32, {4, 3}),
                                     .lse = lse_.view({4}),
                                     .axes = {1},
                                     .grad_x = grad_x_.view({4, 3})};

  void expect_nothing_written() {
    for (const UnwrittenOutput* output : {&out_, &lse_, &grad_x_}) output->expect_unwritten();
  }
  void expect_refused(const LogsumexpForwardArgs& args, const std::string& message) {
    expect_message([&] { logsumexp_forward(args); }, message);
    expect_message([&] { logsumexp_forward_workspace_bytes(args); }, message);
    expect_nothing_written();
  }
  void expect_refused(const LogsumexpBackwardArgs& args, const std::string& message) {
    expect_message([&] { logsumexp_backward(args); }, message);
    expect_message([&] { logsumexp_backward_workspace_bytes(args); }, message);
    expect_nothing_written();
  }
};

TEST_F(LogsumexpErrors, TheArgumentsThatTheseTestsSpoilAreLegal) {
  EXPECT_NO_THROW(logsumexp_forward(forward_));
  EXPECT_NO_THROW(logsumexp_backward(backward_));
}

TEST_F(LogsumexpErrors, MissingTensors) {
  auto no_x = forward_;
  no_x.x = {};
  expect_refused(no_x, "logsumexp_forward: x is missing");
  auto no_outputs = forward_;
  no_outputs.out = no_outputs.lse = {};
  expect_refused(no_outputs, "logsumexp_forward: out and lse are both missing, expected at least one");
  auto no_lse = backward_;
  no_lse.lse = {};
  expect_refused(no_lse, "logsumexp_backward: lse is missing");
  auto no_grad_out = backward_;
  no_grad_out.grad_out = {};
  expect_refused(no_grad_out, "logsumexp_backward: grad_out is missing");
  auto no_grad_x = backward_;
  no_grad_x.grad_x = {};
  expect_refused(no_grad_x, "logsumexp_backward: grad_x is missing");
}

TEST_F(LogsumexpErrors, Axes) {
  auto args = forward_;
  args.axes = {2};
  expect_refused(args, "logsumexp_forward: axes contains 2, expected -2 to 1 (x has 2 axes)");
  args.axes = {-3};
  expect_refused(args, "logsumexp_forward: axes contains -3, expected -2 to 1 (x has 2 axes)");
  args.axes = {1, -1};
  expect_refused(args, "logsumexp_forward: axes is [1, -1], expected each axis once (axis -1 is there twice)");
  auto backward = backward_;
  backward.axes = {5};
  expect_refused(backward, "logsumexp_backward: axes contains 5, expected -2 to 1 (x has 2 axes)");
}

TEST_F(LogsumexpErrors, Shapes) {
  auto args = forward_;
  args.out = out_.view({3});
  expect_refused(args, "logsumexp_forward: out has shape [3], expected [4] (x without its reduced axes)");
  args = forward_;
  args.keepdim = true;
  expect_refused(args, "logsumexp_forward: out has shape [4], expected [4, 1] (x with its reduced axes of size 1)");
  args = forward_;
  args.lse = lse_.view({4, 1});
  expect_refused(args, "logsumexp_forward: lse has shape [4, 1], expected [4] (x without its reduced axes)");
  auto backward = backward_;
  backward.grad_out = view(grad_out_, DType::float32, {1});
  expect_refused(backward, "logsumexp_backward: grad_out has shape [1], expected [4] (x without its reduced axes)");
  backward = backward_;
  backward.lse = lse_.view({12});
  expect_refused(backward, "logsumexp_backward: lse has shape [12], expected [4] (x without its reduced axes)");
  backward = backward_;
  backward.grad_x = grad_x_.view({12});
  expect_refused(backward, "logsumexp_backward: grad_x has shape [12], expected [4, 3] (that of x)");
}

TEST_F(LogsumexpErrors, Dtypes) {
  auto args = forward_;
  args.out.dtype = DType::bfloat16;
  expect_refused(args, "logsumexp_forward: out has dtype bfloat16, expected float32 (that of x, or float32)");
  args = forward_;
  args.x.dtype = DType::bfloat16;
  args.out.dtype = DType::float16;
  expect_refused(args,
                 "logsumexp_forward: out has dtype float16, expected bfloat16 or float32 (that of x, or float32)");
  args = forward_;
  args.lse.dtype = DType::bfloat16;
  expect_refused(
      args, "logsumexp_forward: lse has dtype bfloat16, expected float32 (float32, or float64 where x is float64)");
  for (const DType dtype : integer_dtypes()) {
    args = forward_;
    args.x.dtype = dtype;
    auto backward = backward_;
    backward.x.dtype = dtype;
    const std::string refusal = std::string(": x has dtype ") + name_of(dtype) +
                                ", expected float32 or float64 or float16 or bfloat16 (convert other types first)";
    expect_refused(args, "logsumexp_forward" + refusal);
    expect_refused(backward, "logsumexp_backward" + refusal);
  }
  auto backward = backward_;
  backward.grad_out.dtype = DType::float16;
  expect_refused(backward, "logsumexp_backward: grad_out has dtype float16, expected float32 (that of x, or float32)");
  backward = backward_;
  backward.lse.dtype = DType::float16;
  expect_refused(
      backward, "logsumexp_backward: lse has dtype float16, expected float32 (float32, or float64 where x is float64)");
  args = forward_;
  args.x.dtype = args.out.dtype = DType::float64;
  args.lse.dtype = DType::float32;
  expect_refused(args,
                 "logsumexp_forward: lse has dtype float32, expected float64 (float32, or float64 where x is float64)");
  backward = backward_;
  backward.grad_x.dtype = DType::bfloat16;
  expect_refused(backward, "logsumexp_backward: grad_x has dtype bfloat16, expected float32 (that of x)");
  args = forward_;
  args.x.dtype = static_cast<DType>(77);
  expect_refused(args, "logsumexp_forward: x has dtype 77, expected one of enum DType");
}

TEST_F(LogsumexpErrors, Devices) {
  auto args = forward_;
  args.out.device = kCuda;
  expect_refused(args, "logsumexp_forward: out is on cuda:0, expected cpu (as x)");
  args = forward_;
  args.x.device = {DeviceType::cpu, 1};
  expect_refused(args, "logsumexp_forward: x is on CPU 1, expected 0, the only one");
  args = forward_;
  args.x.device = {DeviceType::cuda, -1};
  expect_refused(args, "logsumexp_forward: x is on cuda:-1, expected a device index of 0 or more");
  auto backward = backward_;
  backward.grad_out.device = kCuda;
  expect_refused(backward, "logsumexp_backward: grad_out is on cuda:0, expected cpu (as x)");
  backward = backward_;
  backward.lse.device = kCuda;
  expect_refused(backward, "logsumexp_backward: lse is on cuda:0, expected cpu (as x)");
  backward = backward_;
  backward.grad_x.device = kCuda;
  expect_refused(backward, "logsumexp_backward: grad_x is on cuda:0, expected cpu (as x)");
}

TEST_F(LogsumexpErrors, AGpuThatIsNotThere) {
  auto args = forward_;
  args.x.device = args.out.device = args.lse.device = {DeviceType::cuda, 63};
  expect_message_begins<Unsupported>([&] { logsumexp_forward(args); },
                                     "logsumexp_forward: the tensors are on cuda:63, but ");
  expect_nothing_written();
}

TEST_F(LogsumexpErrors, Memory) {
  auto args = forward_;
  args.x.data = nullptr;
  expect_refused(args, "logsumexp_forward: x has shape [4, 3] but no memory (data is null)");
  args = forward_;
  args.x.data = reinterpret_cast<char*>(x_.data()) + 2;
  expect_refused(args,
                 "logsumexp_forward: x is not aligned to its elements, expected an address divisible by 4 for float32");
  args = forward_;
  args.x.shape = {4, -3};
  expect_refused(args, "logsumexp_forward: x has shape [4, -3], expected no negative sizes");
  args = forward_;
  args.x.shape = {std::int64_t{1} << 40, std::int64_t{1} << 40};
  expect_refused(args,
                 "logsumexp_forward: x has shape [1099511627776, 1099511627776], expected fewer than 2^63 elements");
  args = forward_;
  args.x.strides = {std::int64_t{1} << 62, 1};
  expect_refused(args,
                 "logsumexp_forward: x has shape [4, 3] and strides [4611686018427387904, 1], which reach beyond the "
                 "address space");
  args = forward_;
  args.x.strides = {3};
  expect_refused(args, "logsumexp_forward: x has shape [4, 3] and strides [3], expected one stride per axis");
}

TEST_F(LogsumexpErrors, OutputsThatShareMemory) {
  auto args = forward_;
  args.out.strides = {0};
  expect_refused(args,
                 "logsumexp_forward: out has shape [4] and strides [0], so that elements share memory; expected an "
                 "address for each, because it is written");
  args = forward_;
  args.out = view(x_, DType::float32, {4});
  expect_refused(args, "logsumexp_forward: out overlaps x, expected memory of its own");
  args = forward_;
  args.lse = args.out;
  expect_refused(args, "logsumexp_forward: out overlaps lse, expected memory of its own");
  auto backward = backward_;
  backward.grad_x = backward.x;
  expect_refused(backward, "logsumexp_backward: grad_x overlaps x, expected memory of its own");
  backward = backward_;
  backward.grad_x.strides = {2, 1};
  expect_refused(backward,
                 "logsumexp_backward: grad_x has shape [4, 3] and strides [2, 1], so that elements share memory; "
                 "expected an address for each, because it is written");
  backward = backward_;
  backward.lse.data = grad_x_.memory.data() + 5;
  expect_refused(backward, "logsumexp_backward: grad_x overlaps lse, expected memory of its own");
  backward = backward_;
  backward.grad_out.data = grad_x_.memory.data();
  expect_refused(backward, "logsumexp_backward: grad_x overlaps grad_out, expected memory of its own");
}

TEST_F(LogsumexpErrors, TheLseIsCheckedAsTheOutIs) {
  auto args = forward_;
  args.lse = view(x_, DType::float32, {4});
  expect_refused(args, "logsumexp_forward: lse overlaps x, expected memory of its own");
  args = forward_;
  args.lse.strides = {0};
  expect_refused(args,
                 "logsumexp_forward: lse has shape [4] and strides [0], so that elements share memory; expected an "
                 "address for each, because it is written");
}

TEST_F(LogsumexpErrors, OutputsWhoseElementsShareMemoryInOtherWays) {
  auto args = backward_;
  std::vector<float> memory(32);  // these strides reach beyond what the 12 elements need, and before the first
  args.grad_x.data = memory.data() + 8;
  for (const Dims& strides : {Dims{1, 1}, Dims{2, 1}, Dims{-1, 1}, Dims{3, 2}, Dims{3, 6}}) {
    args.grad_x.strides = strides;
    if (strides == Dims{3, 2}) {
      // 0 2 4, 3 5 7, 6 8 10, 9 11 13: all different, though neither stride steps over the other axis.
      EXPECT_NO_THROW(logsumexp_backward_workspace_bytes(args));
    } else {
      EXPECT_THROW(logsumexp_backward_workspace_bytes(args), InvalidArgument) << strides[0] << ", " << strides[1];
    }
  }
}

TEST_F(LogsumexpErrors, TensorsThatOverlapByPartOfAnElement) {
  // A float64 x over memory of which an output takes the second half of the first element.
  std::vector<double> memory(12);
  std::vector<double> lse(4);
  auto args = forward_;
  args.x = view(memory, DType::float64, {4, 3});
  args.lse = view(lse, DType::float64, {4});
  args.out = TensorView::strided(reinterpret_cast<float*>(memory.data()) + 1, DType::float32, {4}, {6});
  expect_refused(args, "logsumexp_forward: out overlaps x, expected memory of its own");
}

TEST_F(LogsumexpErrors, DisjointColumnsOfOneBufferAreLegalWhateverTheirStrides) {
  // x and out interleave over 100000 rows, with strides of which one is a multiple of the other.
  struct Strides {
    std::int64_t x, out, column;
  };
  for (const Strides& strides : {Strides{8, 16, 6}, Strides{16, 8, 6}, Strides{9, 18, 7}}) {
    std::vector<float> buffer(static_cast<std::size_t>(100000 * 18 + 18), 1.0f);
    auto args = forward_;
    args.x = TensorView::strided(buffer.data(), DType::float32, {100000, 6}, {strides.x, 1});
    args.out = TensorView::strided(buffer.data() + strides.column, DType::float32, {100000}, {strides.out});
    args.lse = {};
    EXPECT_NO_THROW(logsumexp_forward_workspace_bytes(args)) << strides.x << ", " << strides.out;
    args.out.data = buffer.data() + 5;
    EXPECT_THROW(logsumexp_forward_workspace_bytes(args), InvalidArgument) << strides.x << ", " << strides.out;
  }
}

TEST_F(LogsumexpErrors, AViewPutTogetherByHand) {
  auto args = forward_;
  args.out.is_present = false;
  expect_refused(args,
                 "logsumexp_forward: out has data but counts as missing, expected a view made by contiguous() or "
                 "strided()");
}

TEST_F(LogsumexpErrors, Threads) {
  for (const int threads : {-7, 200000}) {
    const std::string what = ": threads is " + std::to_string(threads) + ", expected 0 (all) to 4096";
    expect_message([&] { logsumexp_forward(forward_, {.threads = threads}); }, "logsumexp_forward" + what);
    expect_message([&] { logsumexp_backward(backward_, {.threads = threads}); }, "logsumexp_backward" + what);
  }
}

TEST_F(LogsumexpErrors, StridesOfAnEmptyTensorMayBeAnything) {
  auto args = forward_;
  args.x = TensorView::strided(x_.data(), DType::float32, {4, 0, 3}, {std::int64_t{1} << 62, std::int64_t{1} << 62, 7});
  args.axes = {1, 2};
  EXPECT_NO_THROW(logsumexp_forward(args));
  EXPECT_EQ(lse_.memory[3], -std::numeric_limits<float>::infinity());
}

TEST_F(LogsumexpErrors, MemoryThatInterleavesWithoutSharingIsLegal) {
  // x and its gradient are the two halves of each row of one buffer; out is a column between them.
  std::vector<float> buffer(4 * 7, 1.0f);
  const Dims strides = {7, 1};
  const auto half = [&](int start) {
    return TensorView::strided(static_cast<void*>(buffer.data() + start), DType::float32, {4, 3}, strides);
  };
  auto forward = forward_;
  forward.x = half(0);
  forward.out = TensorView::strided(static_cast<void*>(buffer.data() + 3), DType::float32, {4}, {7});
  EXPECT_NO_THROW(logsumexp_forward(forward));
  EXPECT_NEAR(buffer[3], 1.0f + std::log(3.0f), 1e-6f);
  auto backward = backward_;
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
