// Every sentence with which lrpe_cosine refuses a call, and that nothing is written when it does.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "eaves/error.h"
#include "eaves/lrpe_cosine.h"
#include "eaves/system.h"
#include "testing/refusals.h"

namespace eaves::testing {
namespace {

/// Arguments of a legal call, for a test to spoil one of them: two batch entries, three heads, four positions, two
/// features; a softmax over the sequence, which has the most arguments.
class LrpeCosineErrors : public ::testing::Test {
 protected:
  static constexpr std::int64_t kElements = 2 * 3 * 4 * 2;

  template <typename T>
  static TensorView view(std::vector<T>& memory, DType dtype, const Dims& shape) {
    return TensorView::contiguous(static_cast<void*>(memory.data()), dtype, shape);
  }

  std::vector<float> x_ = std::vector<float>(kElements, 1.0f);
  std::vector<float> theta_ = std::vector<float>(48, 0.5f);
  std::vector<float> grad_out_ = std::vector<float>(2 * kElements, 1.0f);
  std::vector<float> lse_in_ = std::vector<float>(24, 2.0f);
  UnwrittenOutput out_{"out", 2 * kElements}, lse_{"lse", 24}, grad_x_{"grad_x", kElements};
  UnwrittenOutput grad_theta_{"grad_theta", 48};
  std::vector<std::int64_t> integers_ = {0, 1, 2, 4, 0, 1, 2, 3};

  LrpeCosineForwardArgs forward_ = {.x = view(x_, DType::float32, {2, 3, 4, 2}),
                                    .angles = {.theta = view(theta_, DType::float32, {3, 2})},
                                    .activation = Activation::softmax,
                                    .activation_dim = -2,
                                    .out = out_.view({2, 3, 4, 4}),
                                    .lse = lse_.view({2, 3, 2, 2})};
  LrpeCosineBackwardArgs backward_ = {.grad_out = view(grad_out_, DType::float32, {2, 3, 4, 4}),
                                      .x = view(x_, DType::float32, {2, 3, 4, 2}),
                                      .angles = {.theta = view(theta_, DType::float32, {3, 2})},
                                      .activation = Activation::softmax,
                                      .activation_dim = -2,
                                      .lse = view(lse_in_, DType::float32, {2, 3, 2, 2}),
                                      .grad_x = grad_x_.view({2, 3, 4, 2}),
                                      .grad_theta = grad_theta_.view({3, 2})};

  TensorView integers(const Dims& shape) { return view(integers_, DType::int64, shape); }

  void expect_nothing_written() {
    for (const UnwrittenOutput* output : {&out_, &lse_, &grad_x_, &grad_theta_}) output->expect_unwritten();
    EXPECT_EQ(x_, std::vector<float>(x_.size(), 1.0f)) << "x was written";
  }

  template <typename Error = InvalidArgument>
  void expect_refused(const LrpeCosineForwardArgs& args, const std::string& message) {
    expect_message<Error>([&] { lrpe_cosine_forward(args); }, message);
    expect_message<Error>([&] { lrpe_cosine_forward_workspace_bytes(args); }, message);
    expect_nothing_written();
  }
  template <typename Error = InvalidArgument>
  void expect_refused(const LrpeCosineBackwardArgs& args, const std::string& message) {
    expect_message<Error>([&] { lrpe_cosine_backward(args); }, message);
    expect_message<Error>([&] { lrpe_cosine_backward_workspace_bytes(args); }, message);
    expect_nothing_written();
  }

  /// What both calls refuse in the same words. `change` gets the arguments of one of them; "<op>" and "<x>" in the
  /// message are its name and that of the tensor that gives the sizes.
  template <typename Error = InvalidArgument, typename Change>
  void expect_both_refused(Change change, const std::string& message) {
    const auto words = [&](const char* op, const char* x) {
      std::string text = message;
      for (const auto& [word, by] : {std::pair{"<op>", op}, std::pair{"<x>", x}}) {
        for (std::size_t at; (at = text.find(word)) != std::string::npos;)
          text.replace(at, std::string(word).size(), by);
      }
      return text;
    };
    auto forward = forward_;
    change(forward);
    expect_refused<Error>(forward, words("lrpe_cosine_forward", "x"));
    auto backward = backward_;
    change(backward);
    expect_refused<Error>(backward, words("lrpe_cosine_backward", "grad_out"));
  }
};

TEST_F(LrpeCosineErrors, TheArgumentsThatTheseTestsSpoilAreLegal) {
  EXPECT_NO_THROW(lrpe_cosine_forward(forward_));
  EXPECT_NO_THROW(lrpe_cosine_backward(backward_));
  EXPECT_EQ(std::count(out_.memory.begin(), out_.memory.end(), out_.kBefore), 0) << "out was not written";
  EXPECT_EQ(std::count(grad_x_.memory.begin(), grad_x_.memory.end(), grad_x_.kBefore), 0) << "grad_x was not written";
}

TEST_F(LrpeCosineErrors, MissingTensors) {
  auto forward = forward_;
  forward.x = {};
  expect_refused(forward, "lrpe_cosine_forward: x is missing");
  forward = forward_;
  forward.out = {};
  expect_refused(forward, "lrpe_cosine_forward: out is missing");
  expect_both_refused([](auto& args) { args.angles.theta = {}; }, "<op>: theta is missing");
  auto backward = backward_;
  backward.grad_out = {};
  expect_refused(backward, "lrpe_cosine_backward: grad_out is missing");
  backward = backward_;
  backward.grad_x = backward.grad_theta = {};
  expect_refused(backward, "lrpe_cosine_backward: grad_x and grad_theta are both missing, expected at least one");
  backward = backward_;
  backward.lse = {};
  expect_refused(
      backward,
      "lrpe_cosine_backward: lse is missing, expected what the forward wrote of the softmax over the sequence");
}

TEST_F(LrpeCosineErrors, AnXThatTheBackwardNeeds) {
  const char* const message = "lrpe_cosine_backward: x is missing, expected it with an activation, and for grad_theta";
  for (const Activation activation : {Activation::none, Activation::relu, Activation::sigmoid, Activation::silu}) {
    auto args = backward_;
    args.x = args.lse = {};
    args.activation = activation;
    expect_refused(args, message);  // of grad_theta
    args.grad_theta = {};
    if (activation != Activation::none) expect_refused(args, message);
  }
  auto args = backward_;
  args.x = args.lse = args.grad_theta = {};
  args.activation = Activation::none;
  EXPECT_NO_THROW(lrpe_cosine_backward(args));
}

TEST_F(LrpeCosineErrors, Activations) {
  expect_both_refused([](auto& args) { args.activation = static_cast<Activation>(9); },
                      "<op>: activation is 9, expected one of enum Activation");
  for (const int dim : {0, 1, 2, 3, -3}) {
    expect_both_refused(
        [&](auto& args) { args.activation_dim = dim; },
        "<op>: activation_dim is " + std::to_string(dim) + ", expected -1 (the features) or -2 (the sequence)");
  }
}

TEST_F(LrpeCosineErrors, AnLseWithoutASoftmaxOverTheSequence) {
  expect_both_refused([](auto& args) { args.activation_dim = -1; },
                      "<op>: lse is given, but only a softmax over the sequence has one");
  expect_both_refused([](auto& args) { args.activation = Activation::silu; },
                      "<op>: lse is given, but only a softmax over the sequence has one");
}

TEST_F(LrpeCosineErrors, Shapes) {
  auto forward = forward_;
  forward.x = view(x_, DType::float32, {6, 4, 2});
  expect_refused(forward,
                 "lrpe_cosine_forward: x has shape [6, 4, 2], expected four axes (batch, heads, positions, features)");
  forward = forward_;
  forward.out = out_.view({2, 3, 4, 2});
  expect_refused(forward,
                 "lrpe_cosine_forward: out has shape [2, 3, 4, 2], expected [2, 3, 4, 4] (x with twice its features)");
  auto backward = backward_;
  backward.grad_out = view(grad_out_, DType::float32, {2, 3, 16});
  expect_refused(backward,
                 "lrpe_cosine_backward: grad_out has shape [2, 3, 16], expected four axes (batch, heads, positions, "
                 "twice the features)");
  backward = backward_;
  backward.grad_out = view(grad_out_, DType::float32, {2, 3, 4, 3});
  expect_refused(backward,
                 "lrpe_cosine_backward: grad_out has shape [2, 3, 4, 3], expected an even number of features (x with "
                 "twice its features)");
  backward = backward_;
  backward.x = view(x_, DType::float32, {2, 3, 2, 4});
  expect_refused(
      backward,
      "lrpe_cosine_backward: x has shape [2, 3, 2, 4], expected [2, 3, 4, 2] (grad_out with half its features)");
  backward = backward_;
  backward.grad_x = grad_x_.view({3, 2, 4, 2});
  expect_refused(
      backward,
      "lrpe_cosine_backward: grad_x has shape [3, 2, 4, 2], expected [2, 3, 4, 2] (grad_out with half its features)");
  backward = backward_;
  backward.grad_theta = grad_theta_.view({1, 2});
  expect_refused(backward, "lrpe_cosine_backward: grad_theta has shape [1, 2], expected [3, 2] (that of theta)");
  expect_both_refused([](auto& args) { args.lse.shape = {12}, args.lse.strides = {1}; },
                      "<op>: lse has shape [12], expected [2, 3, 2, 2] (x without its positions, high and low)");
  expect_both_refused(
      [](auto& args) {
        args.lse.shape = {2, 3, 2}, args.lse.strides = {6, 2, 1};
      },
      "<op>: lse has shape [2, 3, 2], expected [2, 3, 2, 2] (x without its positions, high and low)");
  // Though nothing would be read of it.
  backward = backward_;
  backward.activation = Activation::none;
  backward.lse = backward.grad_theta = {};
  backward.x = view(x_, DType::float32, {2, 3, 2, 4});
  expect_refused(
      backward,
      "lrpe_cosine_backward: x has shape [2, 3, 2, 4], expected [2, 3, 4, 2] (grad_out with half its features)");
}

TEST_F(LrpeCosineErrors, Thetas) {
  const auto with_theta = [&](const Dims& shape, const std::string& what) {
    expect_both_refused([&](auto& args) { args.angles.theta = view(theta_, DType::float32, shape); },
                        "<op>: theta " + what);
  };
  with_theta({2}, "has shape [2], expected two axes (heads, features)");
  with_theta({1, 3, 2}, "has shape [1, 3, 2], expected two axes (heads, features)");
  with_theta({2, 2}, "has 2 heads, expected 3 (as <x>) or 1");
  with_theta({4, 2}, "has 4 heads, expected 3 (as <x>) or 1");
  with_theta({0, 2}, "has 0 heads, expected 3 (as <x>) or 1");
}

TEST_F(LrpeCosineErrors, GridsAndExtraTokens) {
  for (const std::int64_t extra : {-1, 5}) {
    expect_both_refused(
        [&](auto& args) { args.angles.extra_tokens = extra; },
        "<op>: extra_tokens is " + std::to_string(extra) + ", expected 0 to the number of positions, 4");
  }
  const auto with_grid = [&](const Dims& grid, const char* text) {
    expect_both_refused([&](auto& args) { args.angles.grid = grid; },
                        std::string("<op>: grid is ") + text +
                            ", expected sizes whose product is 4 (4 positions, of which 0 are extra tokens)");
  };
  with_grid({3}, "[3]");
  with_grid({2, 3}, "[2, 3]");
  with_grid({-2, -2}, "[-2, -2]");
  with_grid({4, 0}, "[4, 0]");
  const std::int64_t huge = std::int64_t{1} << 32;  // a product of 2^64 that would wrap around to 0, and on to 4
  with_grid({huge, huge}, "[4294967296, 4294967296]");
  with_grid({4, huge, huge, 1}, "[4, 4294967296, 4294967296, 1]");
  expect_both_refused(
      [&](auto& args) { args.angles.grid = {4}, args.angles.extra_tokens = 1; },
      "<op>: grid is [4], expected sizes whose product is 3 (4 positions, of which 1 are extra tokens)");
}

TEST_F(LrpeCosineErrors, Offsets) {
  const std::int64_t largest = std::int64_t{1} << 62;
  for (const std::int64_t offset : {largest + 1, -largest - 1, std::numeric_limits<std::int64_t>::min()}) {
    expect_both_refused([&](auto& args) { args.angles.offset = offset; },
                        "<op>: offset is " + std::to_string(offset) + ", expected -2^62 to 2^62");
  }
  for (const Dims& shape : {Dims{3}, Dims{2, 2}, Dims{0}}) {
    const std::string text = shape.size() == 2 ? "[2, 2]" : (shape[0] == 3 ? "[3]" : "[0]");
    expect_both_refused(
        [&](auto& args) { args.angles.offsets = integers(shape); },
        "<op>: offsets has shape " + text + ", expected [2] (one for each batch entry, or one for all)");
  }
  expect_both_refused([&](auto& args) { args.angles.offsets = view(theta_, DType::float32, {2}); },
                      "<op>: offsets has dtype float32, expected int64 or int32 (positions are integers)");
}

TEST_F(LrpeCosineErrors, Positions) {
  expect_both_refused([&](auto& args) { args.angles.positions = integers({3}); },
                      "<op>: positions has shape [3], expected [4] (one for each token)");
  for (const auto& [shape, text] : {std::pair{Dims{1, 4}, "[1, 4]"}, {Dims{2, 3}, "[2, 3]"}, {Dims{}, "[]"}}) {
    expect_both_refused([&, &shape = shape](auto& args) { args.angles.positions = integers(shape); },
                        std::string("<op>: positions has shape ") + text +
                            ", expected [2, 4] (one for each token, or for each of a batch entry)");
  }
  expect_both_refused(
      [&](auto& args) { args.angles.positions = integers({4}), args.angles.positions.dtype = DType::int16; },
      "<op>: positions has dtype int16, expected int64 or int32 (positions are integers)");
}

TEST_F(LrpeCosineErrors, PackedSequences) {
  const auto packed = [&](auto& args, const Dims& shape) {
    args.activation = Activation::none;
    args.lse = {};
    args.angles.cu_seqlens = integers(shape);
  };
  for (const auto& [shape, text] : {std::pair{Dims{2, 4}, "[2, 4]"}, {Dims{0}, "[0]"}, {Dims{}, "[]"}}) {
    expect_both_refused([&, &shape = shape](auto& args) { packed(args, shape); },
                        std::string("<op>: cu_seqlens has shape ") + text +
                            ", expected one axis with one entry more than there are sequences");
  }
  expect_both_refused(
      [&](auto& args) {
        packed(args, {4});
        args.angles.cu_seqlens.strides = {2};
      },
      "<op>: cu_seqlens has shape [4] and strides [2], expected it to be contiguous");
  expect_both_refused(
      [&](auto& args) {
        packed(args, {4});
        args.angles.cu_seqlens.dtype = DType::uint8;
      },
      "<op>: cu_seqlens has dtype uint8, expected int64 or int32 (positions are integers)");
  const auto with_starts = [&](const std::vector<std::int64_t>& starts, const std::string& found) {
    integers_ = starts;
    expect_both_refused([&](auto& args) { packed(args, {static_cast<std::int64_t>(starts.size())}); },
                        "<op>: cu_seqlens has " + found +
                            ", expected numbers that do not decrease from 0 to the number of positions, 4");
  };
  with_starts({1, 2, 4}, "1 at index 0");
  with_starts({-1, 4}, "-1 at index 0");
  with_starts({0, 3, 2, 4}, "2 at index 2");
  with_starts({0, 2, 3}, "3 at index 2");
  with_starts({0, 2, 5}, "5 at index 2");
  with_starts({0, 5, 4}, "4 at index 2");
  with_starts({0}, "0 at index 0");
  with_starts({4}, "4 at index 0");
}

TEST_F(LrpeCosineErrors, ASoftmaxOverPackedSequences) {
  expect_both_refused<Unsupported>([&](auto& args) { args.angles.cu_seqlens = integers({4}); },
                                   "<op>: cu_seqlens is given with a softmax over the sequence, which would mix the "
                                   "packed sequences; give positions "
                                   "for a softmax over the whole axis, or call once for each sequence");
}

TEST_F(LrpeCosineErrors, TwoWaysToGiveAPosition) {
  const auto refuse = [&](const char* name, const char* what, auto change) {
    expect_both_refused(
        [&](auto& args) {
          args.activation = Activation::none;
          args.lse = {};
          change(args.angles);
        },
        std::string("<op>: ") + name + " " + what);
  };
  const char* const beside_offset = "is given beside an offset, expected one of them";
  const char* const with_grid = "is given with a grid [2, 2], expected a grid of one axis";
  refuse("positions", beside_offset, [&](LrpeAngles& a) { a.positions = integers({4}), a.offset = 1; });
  refuse("positions", beside_offset, [&](LrpeAngles& a) { a.positions = integers({4}), a.offsets = integers({1}); });
  refuse("positions", with_grid, [&](LrpeAngles& a) { a.positions = integers({4}), a.grid = {2, 2}; });
  refuse("cu_seqlens", beside_offset, [&](LrpeAngles& a) { a.cu_seqlens = integers({4}), a.offset = -1; });
  refuse("cu_seqlens", beside_offset, [&](LrpeAngles& a) { a.cu_seqlens = integers({4}), a.offsets = integers({2}); });
  refuse("cu_seqlens", with_grid, [&](LrpeAngles& a) { a.cu_seqlens = integers({4}), a.grid = {2, 2}; });
  refuse("cu_seqlens", "is given beside positions, expected one of them",
         [&](LrpeAngles& a) { a.cu_seqlens = integers({4}), a.positions = integers({4}); });
  refuse("cu_seqlens", "is given with extra tokens, expected none",
         [&](LrpeAngles& a) { a.cu_seqlens = integers({4}), a.extra_tokens = 1; });
}

TEST_F(LrpeCosineErrors, Dtypes) {
  const char* const floating = "float32 or float64 or float16 or bfloat16 (a floating-point type)";
  auto forward = forward_;
  forward.x.dtype = DType::int32;
  expect_refused(forward, std::string("lrpe_cosine_forward: x has dtype int32, expected ") + floating);
  forward = forward_;
  forward.out.dtype = DType::bfloat16;
  expect_refused(forward, "lrpe_cosine_forward: out has dtype bfloat16, expected float32 (that of x)");
  forward = forward_;
  forward.x.dtype = forward.out.dtype = DType::bfloat16;
  forward.angles.theta.dtype = DType::float16;
  expect_refused(forward,
                 "lrpe_cosine_forward: theta has dtype float16, expected bfloat16 or float32 (that of x, or float32)");
  expect_both_refused([](auto& args) { args.angles.theta.dtype = DType::bfloat16; },
                      "<op>: theta has dtype bfloat16, expected float32 (that of <x>, or float32)");
  expect_both_refused([](auto& args) { args.lse.dtype = DType::bfloat16; },
                      "<op>: lse has dtype bfloat16, expected float32 (float32, or float64 where x is float64)");
  auto backward = backward_;
  backward.grad_out.dtype = DType::boolean;
  expect_refused(backward, std::string("lrpe_cosine_backward: grad_out has dtype bool, expected ") + floating);
  backward = backward_;
  backward.x.dtype = DType::float16;
  expect_refused(backward, "lrpe_cosine_backward: x has dtype float16, expected float32 (that of grad_out)");
  backward = backward_;
  backward.grad_x.dtype = DType::float16;
  expect_refused(backward, "lrpe_cosine_backward: grad_x has dtype float16, expected float32 (that of grad_out)");
  backward = backward_;
  backward.grad_theta.dtype = DType::float16;
  expect_refused(backward, "lrpe_cosine_backward: grad_theta has dtype float16, expected float32 (that of theta)");
  expect_both_refused([](auto& args) { args.angles.theta.dtype = static_cast<DType>(77); },
                      "<op>: theta has dtype 77, expected one of enum DType");
}

TEST_F(LrpeCosineErrors, Devices) {
  expect_both_refused([](auto& args) { args.angles.theta.device = kCuda; },
                      "<op>: theta is on cuda:0, expected cpu (as <x>)");
  expect_both_refused([](auto& args) { args.lse.device = kCuda; }, "<op>: lse is on cuda:0, expected cpu (as <x>)");
  expect_both_refused([&](auto& args) { args.angles.offsets = integers({2}), args.angles.offsets.device = kCuda; },
                      "<op>: offsets is on cuda:0, expected cpu (as <x>)");
  expect_both_refused([&](auto& args) { args.angles.positions = integers({4}), args.angles.positions.device = kCuda; },
                      "<op>: positions is on cuda:0, expected cpu (as <x>)");
  expect_both_refused(
      [&](auto& args) { args.angles.cu_seqlens = integers({4}), args.angles.cu_seqlens.device = kCuda; },
      "<op>: cu_seqlens is on cuda:0, expected cpu (as <x>)");
  auto forward = forward_;
  forward.out.device = kCuda;
  expect_refused(forward, "lrpe_cosine_forward: out is on cuda:0, expected cpu (as x)");
  forward = forward_;
  forward.x.device = {DeviceType::cpu, 1};
  expect_refused(forward, "lrpe_cosine_forward: x is on CPU 1, expected 0, the only one");
  auto backward = backward_;
  backward.x.device = kCuda;
  expect_refused(backward, "lrpe_cosine_backward: x is on cuda:0, expected cpu (as grad_out)");
  backward = backward_;
  backward.grad_x.device = kCuda;
  expect_refused(backward, "lrpe_cosine_backward: grad_x is on cuda:0, expected cpu (as grad_out)");
  backward = backward_;
  backward.grad_theta.device = kCuda;
  expect_refused(backward, "lrpe_cosine_backward: grad_theta is on cuda:0, expected cpu (as grad_out)");
}

TEST_F(LrpeCosineErrors, AGpuThatIsNotThere) {
  const Device absent{DeviceType::cuda, 63};
  auto forward = forward_;
  forward.x.device = forward.out.device = forward.lse.device = forward.angles.theta.device = absent;
  auto backward = backward_;
  for (TensorView* view : {&backward.grad_out, &backward.x, &backward.lse, &backward.angles.theta, &backward.grad_x,
                           &backward.grad_theta}) {
    view->device = absent;
  }
  expect_message_begins<Unsupported>([&] { lrpe_cosine_forward(forward); },
                                     "lrpe_cosine_forward: the tensors are on cuda:63, but ");
  expect_message_begins<Unsupported>([&] { lrpe_cosine_backward(backward); },
                                     "lrpe_cosine_backward: the tensors are on cuda:63, but ");
  expect_nothing_written();
}

TEST_F(LrpeCosineErrors, Memory) {
  auto forward = forward_;
  forward.x.data = nullptr;
  expect_refused(forward, "lrpe_cosine_forward: x has shape [2, 3, 4, 2] but no memory (data is null)");
  forward = forward_;
  forward.x.data = reinterpret_cast<char*>(x_.data()) + 2;
  expect_refused(
      forward, "lrpe_cosine_forward: x is not aligned to its elements, expected an address divisible by 4 for float32");
  forward = forward_;
  forward.x.shape = {2, 3, -4, 2};
  expect_refused(forward, "lrpe_cosine_forward: x has shape [2, 3, -4, 2], expected no negative sizes");
  forward = forward_;
  forward.x.strides = {24, 8, 2};
  expect_refused(forward,
                 "lrpe_cosine_forward: x has shape [2, 3, 4, 2] and strides [24, 8, 2], expected one stride per axis");
  forward = forward_;
  forward.out.is_present = false;
  expect_refused(forward,
                 "lrpe_cosine_forward: out has data but counts as missing, expected a view made by contiguous() or "
                 "strided()");
  expect_both_refused(
      [&](auto& args) { args.angles.positions = integers({4}), args.angles.positions.is_present = false; },
      "<op>: positions has data but counts as missing, expected a view made by contiguous() or "
      "strided()");
}

TEST_F(LrpeCosineErrors, OutputsThatShareMemory) {
  const char* const shared = ", so that elements share memory; expected an address for each, because it is written";
  auto forward = forward_;
  forward.out.strides = {0, 16, 4, 1};
  expect_refused(forward,
                 std::string("lrpe_cosine_forward: out has shape [2, 3, 4, 4] and strides [0, 16, 4, 1]") + shared);
  auto backward = backward_;
  backward.grad_x.strides = {24, 8, 1, 1};
  expect_refused(backward,
                 std::string("lrpe_cosine_backward: grad_x has shape [2, 3, 4, 2] and strides [24, 8, 1, 1]") + shared);
  backward = backward_;
  backward.grad_theta.strides = {0, 1};
  expect_refused(backward,
                 std::string("lrpe_cosine_backward: grad_theta has shape [3, 2] and strides [0, 1]") + shared);
  expect_both_refused(
      [](auto& args) {
        args.lse.strides = {24, 8, 4, 2};
      },
      "<op>: lse has shape [2, 3, 2, 2] and strides [24, 8, 4, 2], expected it to be contiguous");
}

TEST_F(LrpeCosineErrors, OutputsThatOverlap) {
  const auto overlaps = [](const char* op, const char* output, const char* other) {
    return std::string("lrpe_cosine_") + op + ": " + output + " overlaps " + other + ", expected memory of its own";
  };
  auto forward = forward_;
  forward.x.data = out_.memory.data() + 1;
  expect_refused(forward, overlaps("forward", "out", "x"));
  forward = forward_;
  forward.angles.theta.data = out_.memory.data() + 90;
  expect_refused(forward, overlaps("forward", "out", "theta"));
  // The lists of integers, as what they take for the memory of an output.
  const auto as_integers = [](std::vector<float>& memory, const Dims& shape) {
    return TensorView::contiguous(static_cast<void*>(memory.data()), DType::int64, shape);
  };
  forward = forward_;
  forward.angles.offsets = as_integers(out_.memory, {2});
  expect_refused(forward, overlaps("forward", "out", "offsets"));
  forward.angles.offsets = as_integers(lse_.memory, {2});
  expect_refused(forward, overlaps("forward", "lse", "offsets"));
  forward = forward_;
  forward.angles.positions = as_integers(out_.memory, {2, 4});
  expect_refused(forward, overlaps("forward", "out", "positions"));
  forward.angles.positions = as_integers(lse_.memory, {4});
  expect_refused(forward, overlaps("forward", "lse", "positions"));
  forward = forward_;
  forward.lse.data = x_.data() + 4;
  expect_refused(forward, overlaps("forward", "lse", "x"));
  forward = forward_;
  forward.lse.data = theta_.data();
  expect_refused(forward, overlaps("forward", "lse", "theta"));
  forward = forward_;
  forward.lse.data = out_.memory.data() + 6;
  expect_refused(forward, overlaps("forward", "lse", "out"));

  auto backward = backward_;
  backward.x.data = grad_x_.memory.data();
  expect_refused(backward, overlaps("backward", "grad_x", "x"));
  backward = backward_;
  backward.grad_x.data = grad_out_.data() + 40;
  expect_refused(backward, overlaps("backward", "grad_x", "grad_out"));
  backward = backward_;
  backward.lse.data = grad_x_.memory.data() + 20;
  expect_refused(backward, overlaps("backward", "grad_x", "lse"));
  backward = backward_;
  backward.angles.theta.data = grad_x_.memory.data();
  expect_refused(backward, overlaps("backward", "grad_x", "theta"));
  backward = backward_;
  backward.angles.positions = as_integers(grad_x_.memory, {4});
  expect_refused(backward, overlaps("backward", "grad_x", "positions"));
  backward = backward_;
  backward.angles.offsets = as_integers(grad_x_.memory, {1});
  expect_refused(backward, overlaps("backward", "grad_x", "offsets"));
  backward.angles.offsets = as_integers(grad_theta_.memory, {1});
  expect_refused(backward, overlaps("backward", "grad_theta", "offsets"));
  backward = backward_;
  backward.grad_theta = backward.angles.theta;
  expect_refused(backward, overlaps("backward", "grad_theta", "theta"));
  backward = backward_;
  backward.x.data = grad_theta_.memory.data();
  expect_refused(backward, overlaps("backward", "grad_theta", "x"));
  backward = backward_;
  backward.lse.data = grad_theta_.memory.data();
  expect_refused(backward, overlaps("backward", "grad_theta", "lse"));
  backward = backward_;
  backward.grad_theta.data = grad_out_.data() + 90;
  expect_refused(backward, overlaps("backward", "grad_theta", "grad_out"));
  backward = backward_;
  backward.grad_theta.data = grad_x_.memory.data() + 42;
  expect_refused(backward, overlaps("backward", "grad_theta", "grad_x"));
}

TEST_F(LrpeCosineErrors, PackedSequencesThatOverlapAnOutput) {
  // Memory whose float32 are not -5: it has to hold legal starts.
  const auto packed = [&](auto& args) {
    integers_.assign(24, 0);
    integers_[1] = 4;
    args.activation = Activation::none;
    args.lse = {};
    args.angles.cu_seqlens = integers({2});
  };
  auto forward = forward_;
  packed(forward);
  std::vector<std::int64_t> memory(64, 0);
  memory[1] = 4;
  forward.angles.cu_seqlens = view(memory, DType::int64, {2});
  forward.out.data = memory.data();
  const std::vector<std::int64_t> before = memory;
  expect_refused(forward, "lrpe_cosine_forward: out overlaps cu_seqlens, expected memory of its own");
  auto backward = backward_;
  packed(backward);
  backward.angles.cu_seqlens = view(memory, DType::int64, {2});
  backward.grad_x.data = memory.data();
  expect_refused(backward, "lrpe_cosine_backward: grad_x overlaps cu_seqlens, expected memory of its own");
  backward.grad_x = backward_.grad_x;
  backward.grad_theta.data = memory.data();
  expect_refused(backward, "lrpe_cosine_backward: grad_theta overlaps cu_seqlens, expected memory of its own");
  EXPECT_EQ(memory, before);
}

TEST_F(LrpeCosineErrors, Threads) {
  for (const int threads : {-7, 200000}) {
    const std::string what = "threads is " + std::to_string(threads) + ", expected 0 (all) to 4096";
    expect_message([&] { lrpe_cosine_forward(forward_, {.threads = threads}); }, "lrpe_cosine_forward: " + what);
    expect_message([&] { lrpe_cosine_backward(backward_, {.threads = threads}); }, "lrpe_cosine_backward: " + what);
    expect_nothing_written();
  }
}

TEST_F(LrpeCosineErrors, MemoryThatInterleavesWithoutSharingIsLegal) {
  // x and out side by side in each row of one buffer, and so are the gradients.
  std::vector<float> buffer(24 * 6, 1.0f);
  const Dims strides = {72, 24, 6, 1};
  auto forward = forward_;
  forward.x = TensorView::strided(buffer.data(), DType::float32, {2, 3, 4, 2}, strides);
  forward.out = TensorView::strided(buffer.data() + 2, DType::float32, {2, 3, 4, 4}, strides);
  EXPECT_NO_THROW(lrpe_cosine_forward(forward));
  EXPECT_NEAR(buffer[2], 0.25f, 1e-6f);
  auto backward = backward_;
  backward.grad_x = forward.x;
  backward.grad_out = forward.out;
  EXPECT_NO_THROW(lrpe_cosine_backward(backward));
}

}  // namespace
}  // namespace eaves::testing
