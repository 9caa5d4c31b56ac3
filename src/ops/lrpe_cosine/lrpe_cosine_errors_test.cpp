// Every message with which lrpe_cosine refuses a call; a refused call writes nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "eaves/error.h"
#include "eaves/lrpe_cosine.h"
#include "eaves/system.h"
#include "testing/refusals.h"

namespace eaves::testing {
namespace {

using Forward = LrpeCosineForwardArgs;
using Backward = LrpeCosineBackwardArgs;

const std::string kFloating = ", expected float32 or float64 or float16 or bfloat16 (a floating-point type)";
const std::string kCountsAsMissing =
    " has data but counts as missing, expected a view made by contiguous() or strided()";

/// The arguments of a legal call: two batch entries, three heads, four positions, two features, and a softmax over the
/// sequence, which has the most arguments. A test makes one of them illegal.
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

  std::function<void()> unwritten_ = [this] { expect_nothing_written(); };

  EntryPoint<Forward> forward_ = {"lrpe_cosine_forward",
                                  lrpe_cosine_forward,
                                  lrpe_cosine_forward_workspace_bytes,
                                  unwritten_,
                                  {.x = view(x_, DType::float32, {2, 3, 4, 2}),
                                   .angles = {.theta = view(theta_, DType::float32, {3, 2})},
                                   .activation = Activation::softmax,
                                   .activation_dim = -2,
                                   .out = out_.view({2, 3, 4, 4}),
                                   .lse = lse_.view({2, 3, 2, 2})}};
  EntryPoint<Backward> backward_ = {"lrpe_cosine_backward",
                                    lrpe_cosine_backward,
                                    lrpe_cosine_backward_workspace_bytes,
                                    unwritten_,
                                    {.grad_out = view(grad_out_, DType::float32, {2, 3, 4, 4}),
                                     .x = view(x_, DType::float32, {2, 3, 4, 2}),
                                     .angles = {.theta = view(theta_, DType::float32, {3, 2})},
                                     .activation = Activation::softmax,
                                     .activation_dim = -2,
                                     .lse = view(lse_in_, DType::float32, {2, 3, 2, 2}),
                                     .grad_x = grad_x_.view({2, 3, 4, 2}),
                                     .grad_theta = grad_theta_.view({3, 2})}};

  TensorView integers(const Dims& shape) { return view(integers_, DType::int64, shape); }
  /// A list of integers in the memory of an output.
  static TensorView integers_in(std::vector<float>& memory, const Dims& shape) {
    return view(memory, DType::int64, shape);
  }

  void expect_nothing_written() {
    for (const UnwrittenOutput* output : {&out_, &lse_, &grad_x_, &grad_theta_}) output->expect_unwritten();
    EXPECT_EQ(x_, std::vector<float>(x_.size(), 1.0f)) << "x was written";
  }

  /// Expects that forward and backward refuse a call with the same message. `change` gets the arguments of one of them;
  /// "<x>" in the message is the tensor that gives the sizes.
  template <typename Error = InvalidArgument, typename Change>
  void both_refuse(Change change, const std::string& sentence) {
    std::string of_forward = sentence, of_backward = sentence;
    if (const std::size_t at = sentence.find("<x>"); at != std::string::npos) {
      of_forward.replace(at, 3, "x");
      of_backward.replace(at, 3, "grad_out");
    }
    forward_.refuses<Error>({{change, of_forward}});
    backward_.refuses<Error>({{change, of_backward}});
  }
  /// The same for a change of one tensor of the angles.
  void both_refuse(TensorView LrpeAngles::*tensor, const TensorView& other, const std::string& sentence) {
    both_refuse([&](auto& args) { args.angles.*tensor = other; }, sentence);
  }
  void both_refuse(TensorView LrpeAngles::*tensor, const ChangeView& change, const std::string& sentence) {
    both_refuse([&](auto& args) { change(args.angles.*tensor); }, sentence);
  }
};

TEST_F(LrpeCosineErrors, TheArgumentsThatTheseTestsSpoilAreLegal) {
  EXPECT_NO_THROW(lrpe_cosine_forward(forward_.legal));
  EXPECT_NO_THROW(lrpe_cosine_backward(backward_.legal));
  EXPECT_EQ(std::count(out_.memory.begin(), out_.memory.end(), out_.kBefore), 0) << "out was not written";
  EXPECT_EQ(std::count(grad_x_.memory.begin(), grad_x_.memory.end(), grad_x_.kBefore), 0) << "grad_x was not written";
}

TEST_F(LrpeCosineErrors, MissingTensors) {
  forward_.refuses({
      {&Forward::x, missing(), "x is missing"},
      {&Forward::out, missing(), "out is missing"},
  });
  both_refuse(&LrpeAngles::theta, missing(), "theta is missing");
  backward_.refuses({
      {&Backward::grad_out, missing(), "grad_out is missing"},
      {[](Backward& a) { a.grad_x = a.grad_theta = {}; },
       "grad_x and grad_theta are both missing, expected at least one"},
      {&Backward::lse, missing(),
       "lse is missing, expected the forward's output, because the softmax is over the sequence"},
  });
}

TEST_F(LrpeCosineErrors, AnXThatTheBackwardNeeds) {
  const char* const sentence = "x is missing, but an activation and grad_theta need it";
  for (const Activation activation : {Activation::none, Activation::relu, Activation::sigmoid, Activation::silu}) {
    const auto spoil = [&](Backward& args) { args.x = args.lse = {}, args.activation = activation; };
    backward_.refuses({{spoil, sentence}});  // x is needed for grad_theta
    if (activation == Activation::none) continue;
    backward_.refuses({{[&](Backward& args) { spoil(args), args.grad_theta = {}; }, sentence}});
  }
  backward_.legal.x = backward_.legal.lse = backward_.legal.grad_theta = {};
  backward_.legal.activation = Activation::none;
  EXPECT_NO_THROW(lrpe_cosine_backward(backward_.legal));
}

TEST_F(LrpeCosineErrors, Activations) {
  both_refuse([](auto& args) { args.activation = static_cast<Activation>(9); },
              "activation is 9, expected one of enum Activation");
  for (const int dim : {0, 1, 2, 3, -3}) {
    both_refuse([&](auto& args) { args.activation_dim = dim; },
                "activation_dim is " + std::to_string(dim) + ", expected -1 (the features) or -2 (the sequence)");
  }
  const char* const lse = "lse is given, but only a softmax over the sequence has an lse; leave it out";
  both_refuse([](auto& args) { args.activation_dim = -1; }, lse);
  both_refuse([](auto& args) { args.activation = Activation::silu; }, lse);
}

TEST_F(LrpeCosineErrors, Shapes) {
  const std::string half = ", expected [2, 3, 4, 2] (grad_out with half its features)";
  forward_.refuses({
      {&Forward::x, view(x_, DType::float32, {6, 4, 2}),
       "x has shape [6, 4, 2], expected four axes (batch, heads, positions, features)"},
      {&Forward::out, out_.view({2, 3, 4, 2}),
       "out has shape [2, 3, 4, 2], expected [2, 3, 4, 4] (x with twice its features)"},
  });
  backward_.refuses({
      {&Backward::grad_out, view(grad_out_, DType::float32, {2, 3, 16}),
       "grad_out has shape [2, 3, 16], expected four axes (batch, heads, positions, twice the features)"},
      {&Backward::grad_out, view(grad_out_, DType::float32, {2, 3, 4, 3}),
       "grad_out has shape [2, 3, 4, 3], expected an even number of features (x with twice its features)"},
      {&Backward::x, view(x_, DType::float32, {2, 3, 2, 4}), "x has shape [2, 3, 2, 4]" + half},
      {&Backward::grad_x, grad_x_.view({3, 2, 4, 2}), "grad_x has shape [3, 2, 4, 2]" + half},
      {&Backward::grad_theta, grad_theta_.view({1, 2}), "grad_theta has shape [1, 2], expected [3, 2] (as theta)"},
  });
  const std::string lse = ", expected [2, 3, 2, 2] (for each column of x the logsumexp and its rounding error)";
  both_refuse([&](auto& args) { args.lse = lse_.view({12}); }, "lse has shape [12]" + lse);
  const TensorView without_pairs = lse_.view({2, 3, 2});
  both_refuse([&](auto& args) { args.lse = without_pairs; }, "lse has shape [2, 3, 2]" + lse);
  // x is checked even if it is not read.
  backward_.legal.activation = Activation::none;
  backward_.legal.lse = backward_.legal.grad_theta = {};
  backward_.refuses({{&Backward::x, view(x_, DType::float32, {2, 3, 2, 4}), "x has shape [2, 3, 2, 4]" + half}});
}

TEST_F(LrpeCosineErrors, Thetas) {
  const std::pair<Dims, const char*> table[] = {
      {{2}, "has shape [2], expected two axes (heads, features)"},
      {{1, 3, 2}, "has shape [1, 3, 2], expected two axes (heads, features)"},
      {{2, 2}, "has 2 heads, expected 3 (as <x>) or 1"},
      {{4, 2}, "has 4 heads, expected 3 (as <x>) or 1"},
      {{0, 2}, "has 0 heads, expected 3 (as <x>) or 1"},
  };
  for (const auto& [shape, what] : table) {
    both_refuse(&LrpeAngles::theta, view(theta_, DType::float32, shape), std::string("theta ") + what);
  }
}

TEST_F(LrpeCosineErrors, GridsAndExtraTokens) {
  for (const std::int64_t extra : {-1, 5}) {
    both_refuse([&](auto& args) { args.angles.extra_tokens = extra; },
                "extra_tokens is " + std::to_string(extra) + ", expected 0 to the number of positions, 4");
  }
  const std::int64_t huge = std::int64_t{1} << 32;  // a product of 2^64 that would wrap around to 0, and on to 4
  for (const Dims& grid : {Dims{3}, Dims{2, 3}, Dims{-2, -2}, Dims{4, 0}, Dims{huge, huge}, Dims{4, huge, huge, 1}}) {
    both_refuse([&](auto& args) { args.angles.grid = grid; },
                "grid is " + check::to_string(grid) +
                    ", expected sizes whose product is 4 (4 positions, of which 0 are extra tokens)");
  }
  both_refuse([&](auto& args) { args.angles.grid = {4}, args.angles.extra_tokens = 1; },
              "grid is [4], expected sizes whose product is 3 (4 positions, of which 1 are extra tokens)");
}

TEST_F(LrpeCosineErrors, Offsets) {
  const std::int64_t largest = std::int64_t{1} << 62;
  for (const std::int64_t offset : {largest + 1, -largest - 1, std::numeric_limits<std::int64_t>::min()}) {
    both_refuse([&](auto& args) { args.angles.offset = offset; },
                "offset is " + std::to_string(offset) + ", expected -2^62 to 2^62");
  }
  for (const Dims& shape : {Dims{3}, Dims{2, 2}, Dims{0}}) {
    both_refuse(
        &LrpeAngles::offsets, integers(shape),
        "offsets has shape " + check::to_string(shape) + ", expected [2] (one for each batch entry, or one for all)");
  }
  both_refuse(&LrpeAngles::offsets, view(theta_, DType::float32, {2}),
              "offsets has dtype float32, expected int64 or int32 (positions are integers)");
}

TEST_F(LrpeCosineErrors, Positions) {
  both_refuse(&LrpeAngles::positions, integers({3}), "positions has shape [3], expected [4] (one for each token)");
  for (const Dims& shape : {Dims{1, 4}, Dims{2, 3}, Dims{}}) {
    both_refuse(&LrpeAngles::positions, integers(shape),
                "positions has shape " + check::to_string(shape) +
                    ", expected [2, 4] (one for each token, or for each token of each batch entry)");
  }
  TensorView narrow = integers({4});
  narrow.dtype = DType::int16;
  both_refuse(&LrpeAngles::positions, narrow,
              "positions has dtype int16, expected int64 or int32 (positions are integers)");
}

TEST_F(LrpeCosineErrors, PackedSequences) {
  const auto packed_refuse = [&](const Dims& shape, const ChangeView& change, const std::string& what) {
    both_refuse(
        [&](auto& args) {
          args.activation = Activation::none;
          args.lse = {};
          args.angles.cu_seqlens = integers(shape);
          change(args.angles.cu_seqlens);
        },
        "cu_seqlens has " + what);
  };
  const ChangeView unchanged = [](TensorView&) {};
  for (const Dims& shape : {Dims{2, 4}, Dims{0}, Dims{}}) {
    packed_refuse(
        shape, unchanged,
        "shape " + check::to_string(shape) + ", expected one axis with one entry more than there are sequences");
  }
  packed_refuse({4}, of_strides({2}), "shape [4] and strides [2], expected a contiguous tensor");
  packed_refuse({4}, of_dtype(DType::uint8), "dtype uint8, expected int64 or int32 (positions are integers)");
  const std::pair<std::vector<std::int64_t>, const char*> starts[] = {
      {{1, 2, 4}, "1 at index 0"}, {{-1, 4}, "-1 at index 0"},  {{0, 3, 2, 4}, "2 at index 2"},
      {{0, 2, 3}, "3 at index 2"}, {{0, 2, 5}, "5 at index 2"}, {{0, 5, 4}, "4 at index 2"},
      {{0}, "0 at index 0"},       {{4}, "4 at index 0"}};
  for (const auto& [list, found] : starts) {
    integers_ = list;
    packed_refuse({static_cast<std::int64_t>(list.size())}, unchanged,
                  std::string(found) + ", expected numbers that do not decrease from 0 to the number of positions, 4");
  }
}

TEST_F(LrpeCosineErrors, ASoftmaxOverPackedSequences) {
  both_refuse<Unsupported>(
      [&](auto& args) { args.angles.cu_seqlens = integers({4}); },
      "cu_seqlens is given with a softmax over the sequence, which would mix the packed sequences; "
      "give positions for a softmax over the whole axis, or call once for each sequence");
}

TEST_F(LrpeCosineErrors, TwoWaysToGiveAPosition) {
  const auto refuse = [&](const char* name, const char* what, auto change) {
    both_refuse(
        [&](auto& args) {
          args.activation = Activation::none;
          args.lse = {};
          change(args.angles);
        },
        std::string(name) + " " + what);
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
  forward_.refuses({
      {&Forward::x, of_dtype(DType::int32), "x has dtype int32" + kFloating},
      {&Forward::out, of_dtype(DType::bfloat16), "out has dtype bfloat16, expected float32 (as x)"},
      {[](Forward& a) {
         a.x.dtype = a.out.dtype = DType::bfloat16;
         a.angles.theta.dtype = DType::float16;
       },
       "theta has dtype float16, expected bfloat16 or float32 (as x, or float32)"},
  });
  both_refuse(&LrpeAngles::theta, of_dtype(DType::bfloat16),
              "theta has dtype bfloat16, expected float32 (as <x>, or float32)");
  both_refuse(&LrpeAngles::theta, of_dtype(static_cast<DType>(77)), "theta has dtype 77, expected one of enum DType");
  both_refuse([](auto& args) { args.lse.dtype = DType::bfloat16; },
              "lse has dtype bfloat16, expected float32 (float32, or float64 where x is float64)");
  backward_.refuses({
      {&Backward::grad_out, of_dtype(DType::boolean), "grad_out has dtype bool" + kFloating},
      {&Backward::x, of_dtype(DType::float16), "x has dtype float16, expected float32 (as grad_out)"},
      {&Backward::grad_x, of_dtype(DType::float16), "grad_x has dtype float16, expected float32 (as grad_out)"},
      {&Backward::grad_theta, of_dtype(DType::float16), "grad_theta has dtype float16, expected float32 (as theta)"},
  });
}

TEST_F(LrpeCosineErrors, Devices) {
  both_refuse([](auto& args) { args.lse.device = kCuda; }, "lse is on cuda:0, expected cpu (as <x>)");
  const std::pair<std::string, TensorView LrpeAngles::*> angles[] = {{"theta", &LrpeAngles::theta},
                                                                     {"offsets", &LrpeAngles::offsets},
                                                                     {"positions", &LrpeAngles::positions},
                                                                     {"cu_seqlens", &LrpeAngles::cu_seqlens}};
  for (const auto& [name, tensor] : angles) {
    TensorView elsewhere =
        name == "theta" ? view(theta_, DType::float32, {3, 2}) : integers({name == "offsets" ? 2 : 4});
    elsewhere.device = kCuda;
    both_refuse(tensor, elsewhere, name + " is on cuda:0, expected cpu (as <x>)");
  }
  forward_.refuses({
      {&Forward::out, on_device(kCuda), "out is on cuda:0, expected cpu (as x)"},
      {&Forward::x, on_device({DeviceType::cpu, 1}), "x is on CPU 1, expected CPU 0, the only one"},
  });
  backward_.refuses({
      {&Backward::x, on_device(kCuda), "x is on cuda:0, expected cpu (as grad_out)"},
      {&Backward::grad_x, on_device(kCuda), "grad_x is on cuda:0, expected cpu (as grad_out)"},
      {&Backward::grad_theta, on_device(kCuda), "grad_theta is on cuda:0, expected cpu (as grad_out)"},
  });
}

TEST_F(LrpeCosineErrors, AGpuThatIsNotThere) {
  const Device absent{DeviceType::cuda, 63};
  Forward forward = forward_.legal;
  forward.x.device = forward.out.device = forward.lse.device = forward.angles.theta.device = absent;
  Backward backward = backward_.legal;
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
  forward_.refuses({
      {&Forward::x, at_address(nullptr), "x has shape [2, 3, 4, 2] but a null pointer as data, expected an address"},
      {&Forward::x, at_address(reinterpret_cast<char*>(x_.data()) + 2),
       "x is not aligned to its elements, expected an address divisible by 4 for float32"},
      {&Forward::x, of_shape({2, 3, -4, 2}), "x has shape [2, 3, -4, 2], expected no negative sizes"},
      {&Forward::x, of_strides({24, 8, 2}),
       "x has shape [2, 3, 4, 2] and strides [24, 8, 2], expected a stride for each axis"},
      {&Forward::out, counted_as_missing(), "out" + kCountsAsMissing},
  });
  TensorView positions = integers({4});
  positions.is_present = false;
  both_refuse(&LrpeAngles::positions, positions, "positions" + kCountsAsMissing);
}

TEST_F(LrpeCosineErrors, OutputsThatShareMemory) {
  const Dims gaps = {24, 8, 4, 2};
  forward_.refuses(
      {{&Forward::out, of_strides({0, 16, 4, 1}), sharing("out has shape [2, 3, 4, 4] and strides [0, 16, 4, 1]")}});
  backward_.refuses({
      {&Backward::grad_x, of_strides({24, 8, 1, 1}),
       sharing("grad_x has shape [2, 3, 4, 2] and strides [24, 8, 1, 1]")},
      {&Backward::grad_theta, of_strides({0, 1}), sharing("grad_theta has shape [3, 2] and strides [0, 1]")},
  });
  both_refuse([&](auto& args) { args.lse.strides = gaps; },
              "lse has shape [2, 3, 2, 2] and strides [24, 8, 4, 2], expected a contiguous tensor");
}

TEST_F(LrpeCosineErrors, OutputsThatOverlap) {
  float* const out = out_.memory.data();
  const TensorView in_out = integers_in(out_.memory, {2, 4});
  forward_.refuses({
      {&Forward::x, at_address(out + 1), overlapping("out", "x")},
      {[&](Forward& a) { a.angles.theta.data = out + 90; }, overlapping("out", "theta")},
      {[&](Forward& a) { a.angles.offsets = integers_in(out_.memory, {2}); }, overlapping("out", "offsets")},
      {[&](Forward& a) { a.angles.offsets = integers_in(lse_.memory, {2}); }, overlapping("lse", "offsets")},
      {[&](Forward& a) { a.angles.positions = in_out; }, overlapping("out", "positions")},
      {[&](Forward& a) { a.angles.positions = integers_in(lse_.memory, {4}); }, overlapping("lse", "positions")},
      {&Forward::lse, at_address(x_.data() + 4), overlapping("lse", "x")},
      {&Forward::lse, at_address(theta_.data()), overlapping("lse", "theta")},
      {&Forward::lse, at_address(out + 6), overlapping("lse", "out")},
  });
  float* const grad_x = grad_x_.memory.data();
  float* const grad_theta = grad_theta_.memory.data();
  backward_.refuses({
      {&Backward::x, at_address(grad_x), overlapping("grad_x", "x")},
      {&Backward::grad_x, at_address(grad_out_.data() + 40), overlapping("grad_x", "grad_out")},
      {&Backward::lse, at_address(grad_x + 20), overlapping("grad_x", "lse")},
      {[&](Backward& a) { a.angles.theta.data = grad_x; }, overlapping("grad_x", "theta")},
      {[&](Backward& a) { a.angles.positions = integers_in(grad_x_.memory, {4}); }, overlapping("grad_x", "positions")},
      {[&](Backward& a) { a.angles.offsets = integers_in(grad_x_.memory, {1}); }, overlapping("grad_x", "offsets")},
      {[&](Backward& a) { a.angles.offsets = integers_in(grad_theta_.memory, {1}); },
       overlapping("grad_theta", "offsets")},
      {[](Backward& a) { a.grad_theta = a.angles.theta; }, overlapping("grad_theta", "theta")},
      {&Backward::x, at_address(grad_theta), overlapping("grad_theta", "x")},
      {&Backward::lse, at_address(grad_theta), overlapping("grad_theta", "lse")},
      {&Backward::grad_theta, at_address(grad_out_.data() + 90), overlapping("grad_theta", "grad_out")},
      {&Backward::grad_theta, at_address(grad_x + 42), overlapping("grad_theta", "grad_x")},
  });
}

TEST_F(LrpeCosineErrors, PackedSequencesThatOverlapAnOutput) {
  // cu_seqlens lies in the output's memory, so this memory has to hold legal starts instead of the usual -5.
  std::vector<std::int64_t> memory(64, 0);
  memory[1] = 4;
  const std::vector<std::int64_t> before = memory;
  const auto pack = [&](auto& args) {
    args.activation = Activation::none;
    args.lse = {};
    args.angles.cu_seqlens = view(memory, DType::int64, {2});
  };
  pack(forward_.legal);
  pack(backward_.legal);
  forward_.refuses({{&Forward::out, at_address(memory.data()), overlapping("out", "cu_seqlens")}});
  backward_.refuses({
      {&Backward::grad_x, at_address(memory.data()), overlapping("grad_x", "cu_seqlens")},
      {&Backward::grad_theta, at_address(memory.data()), overlapping("grad_theta", "cu_seqlens")},
  });
  EXPECT_EQ(memory, before);
}

TEST_F(LrpeCosineErrors, Threads) {
  forward_.refuses_numbers_of_threads();
  backward_.refuses_numbers_of_threads();
}

TEST_F(LrpeCosineErrors, MemoryThatInterleavesWithoutSharingIsLegal) {
  // Each row of one buffer holds a row of x, then a row of out; likewise for the gradients.
  std::vector<float> buffer(24 * 6, 1.0f);
  const Dims strides = {72, 24, 6, 1};
  Forward forward = forward_.legal;
  forward.x = TensorView::strided(buffer.data(), DType::float32, {2, 3, 4, 2}, strides);
  forward.out = TensorView::strided(buffer.data() + 2, DType::float32, {2, 3, 4, 4}, strides);
  EXPECT_NO_THROW(lrpe_cosine_forward(forward));
  EXPECT_NEAR(buffer[2], 0.25f, 1e-6f);
  Backward backward = backward_.legal;
  backward.grad_x = forward.x;
  backward.grad_out = forward.out;
  EXPECT_NO_THROW(lrpe_cosine_backward(backward));
}

}  // namespace
}  // namespace eaves::testing
