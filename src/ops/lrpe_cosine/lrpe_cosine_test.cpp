// lrpe_cosine against its oracle, on every device: grids, thetas, layouts, sizes, and the ways to give a position.
// Other tests:
//
//   lrpe_cosine_edges_test.cpp      special values
//   lrpe_cosine_calls_test.cpp      optional tensors, workspaces, threads, streams, graphs
//   lrpe_cosine_errors_test.cpp     refused arguments
//   lrpe_cosine_accuracy_test.cpp   angles of any size
//   lrpe_cosine_large_test.cpp      tensors beyond 2^31 elements
#include "eaves/lrpe_cosine.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "ops/lrpe_cosine/lrpe_cosine_test_case.h"
#include "testing/cases.h"
#include "testing/devices.h"

namespace eaves::testing {
namespace {

class LrpeCosine : public OnEachDevice {};
EAVES_EACH_DEVICE(LrpeCosine);

/// A grid, with a number of features and a shape of theta.
struct Geometry {
  std::int64_t batch, heads;
  Dims grid;
  std::int64_t features;
  Dims theta;
  const char* reason;

  std::int64_t cells() const { return std::accumulate(grid.begin(), grid.end(), std::int64_t{1}, std::multiplies<>()); }
};

const std::vector<Geometry> kGeometries = {
    {2, 3, {17}, 8, {3, 8}, "one axis, one vector of 16-bit elements"},
    {1, 1, {1}, 1, {1, 1}, "one of everything"},
    {3, 1, {5}, 3, {1, 3}, "shorter than any vector; one head in both"},
    {2, 2, {19}, 64, {2, 64}, "an angle for each feature"},
    {2, 2, {19}, 64, {2, 1}, "one angle for all features of a head"},
    {2, 3, {19}, 64, {1, 64}, "one head of theta for all"},
    {2, 3, {19}, 64, {1, 1}, "one angle for all"},
    {1, 4, {33}, 64, {4, 24}, "features beyond E have no angle"},
    {1, 4, {33}, 64, {4, 20}, "likewise, and E is no multiple of a vector"},
    {1, 2, {9}, 64, {2, 100}, "more angles than features: the rest of theta has gradient 0"},
    {2, 2, {3, 5}, 96, {2, 48}, "two axes that share the features evenly"},
    {2, 2, {5, 3}, 96, {1, 40}, "two axes, and features without one"},
    {1, 3, {4, 3}, 96, {3, 64}, "a second axis cut at D"},
    {1, 3, {4, 3}, 96, {3, 96}, "a second axis that owns nothing"},
    {1, 3, {4, 3}, 96, {3, 200}, "likewise, and unused angles"},
    {2, 2, {7, 1}, 64, {2, 32}, "a last axis of size 1"},
    {2, 2, {1, 7}, 64, {2, 32}, "a first axis of size 1"},
    {2, 2, {3, 4}, 8, {2, 3}, "axes that meet within a vector"},
    {2, 2, {3, 4}, 64, {2, 1}, "one angle an axis: only two features have one"},
    {2, 2, {2, 3, 4}, 127, {2, 43}, "three axes, all sizes odd"},
    {1, 2, {4, 1, 3}, 128, {2, 32}, "three axes, features left over"},
    {1, 2, {2, 3, 1, 4}, 256, {2, 64}, "four axes"},
    {1, 2, {2, 3, 2, 2}, 128, {1, 5}, "four axes of fewer features than a vector"},
    {1, 2, {2, 1, 3, 1, 2}, 300, {2, 60}, "five axes"},
    {1, 1, {1, 2, 1, 1, 2, 1, 1, 1, 3, 1, 1, 1, 2, 1, 1, 1}, 40, {1, 2}, "as many axes as there can be"},
    {1, 2, {7}, 300, {2, 300}, "D between powers of two"},
    {1, 2, {5, 3}, 300, {2, 7}, "small axes of a long row"},
    {2, 1, {3}, 1030, {1, 1030}, "more features than a block of a GPU takes at once"},
    {1, 1, {2, 3}, 1030, {1, 515}, "likewise, with axes that meet off every vector"},
    {1, 1, {2, 1}, 2500, {1, 600}, "likewise, and features without an axis"},
};

TEST_P(LrpeCosine, EveryGridThetaAndActivationMatchesTheOracle) {
  // Not the full product: the other properties cycle with periods that have no common factor, so that all pairs occur.
  constexpr DType kDTypes[] = {DType::bfloat16, DType::float16, DType::float32, DType::float64};
  constexpr std::int64_t kExtraTokens[] = {0, 1, 10};
  std::size_t number = 0;
  for (const auto& [geometry, activation] : combine<Geometry, LrpeCosineActivation>(kGeometries, every_activation())) {
    SCOPED_TRACE(geometry.reason);
    for (const DType dtype : kDTypes) {
      const std::int64_t extra_tokens = kExtraTokens[number % 3];
      const Dims shape = {geometry.batch, geometry.heads, extra_tokens + geometry.cells(), geometry.features};
      const Dims out_shape = {shape[0], shape[1], shape[2], 2 * shape[3]};
      const HeadLayout& layout = head_layouts()[number % 5 < 3 ? number % 5 % 2 : number % head_layouts().size()];
      SCOPED_TRACE(layout.reason);
      const bool is_one_axis = geometry.grid.size() == 1;
      check_lrpe_cosine(with_activation(
          {.dtype = dtype,
           .shape = shape,
           .theta_shape = geometry.theta,
           .theta_dtype = number % 7 < 3 ? dtype : DType::float32,
           .grid = is_one_axis && number % 2 == 0 ? Dims{} : geometry.grid,  // empty: one axis of all tokens
           .extra_tokens = extra_tokens,
           .offset = number % 4 == 1 ? 3 : 0,
           .x_placement = layout.of(shape),
           .out_placement = layout.of(out_shape),
           .grad_out_placement = layout.of(out_shape),
           .grad_x_placement = layout.of(shape)},
          activation));
      ++number;
    }
    ++number;
  }
}

TEST_P(LrpeCosine, EveryLayoutOfEveryTensorMatchesTheOracle) {
  // x, out, grad_out and grad_x have a layout each. With 32 features, vectors fit if the layout allows them.
  const Dims shape = {2, 3, 7, 32};
  const Dims out_shape = {2, 3, 7, 64};
  const std::vector<HeadLayout>& layouts = head_layouts();
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    SCOPED_TRACE(layouts[i].reason);
    // one layout for all tensors (a step of 0), and different ones
    for (const auto& [activation, dtype, step] :
         combine<LrpeCosineActivation, DType, std::size_t>(every_activation(), floating_point_dtypes(), {0, 1})) {
      const auto layout = [&](std::size_t tensor) { return layouts[(i + tensor * step) % layouts.size()]; };
      check_lrpe_cosine(with_activation({.dtype = dtype,
                                         .shape = shape,
                                         .theta_shape = {3, 16},
                                         .grid = {2, 3},
                                         .extra_tokens = 1,
                                         .x_placement = layout(0).of(shape),
                                         .out_placement = layout(1).of(out_shape),
                                         .grad_out_placement = layout(2).of(out_shape),
                                         .grad_x_placement = layout(3).of(shape)},
                                        activation));
    }
  }
}

TEST_P(LrpeCosine, EveryNumberOfFeaturesMatchesTheOracle) {
  struct Features {
    std::int64_t count;
    const char* reason;
  };
  const std::vector<Features> all = {
      {1, "one"},
      {2, "one vector of float64"},
      {3, "no vector fits"},
      {4, "one vector of float32"},
      {7, "one short of a vector of 16-bit elements"},
      {8, "one such vector"},
      {9, "one more"},
      {16, "two"},
      {24, "three: no power of two"},
      {31, "odd, below a warp's lanes"},
      {64, "a head of common models"},
      {96, "likewise"},
      {127, "odd, one short of the next"},
      {128, "a head of common models"},
      {129, "odd"},
      {192, "a head of common models"},
      {256, "the largest head of common models"},
      {257, "one more"},
      {512, "a power of two beyond"},
      {1024, "as many as a block of a GPU has threads"},
      {1030, "more"},
      {4096, "more than a block of a GPU takes at once, in vectors"},
      {4100, "likewise, one element at a time"},
  };
  for (const auto& [features, activation, dtype, misalignment] :
       combine<Features, LrpeCosineActivation, DType, std::int64_t>(all, every_activation(),
                                                                    {DType::bfloat16, DType::float32}, {0, 1})) {
    SCOPED_TRACE(features.reason);
    check_lrpe_cosine(with_activation({.dtype = dtype,
                                       .shape = {1, 2, 3, features.count},
                                       .theta_shape = {2, features.count},
                                       .theta_dtype = DType::float32,
                                       .offset = 5,
                                       .x_placement = contiguous_at(misalignment),
                                       .theta_placement = contiguous_at(misalignment),
                                       .out_placement = contiguous_at(misalignment),
                                       .grad_out_placement = contiguous_at(misalignment),
                                       .grad_x_placement = contiguous_at(misalignment),
                                       .grad_theta_placement = contiguous_at(misalignment)},
                                      activation));
  }
}

TEST_P(LrpeCosine, BatchesThatShareAnglesOfLongRowsMatchTheOracle) {
  // More vectors of features than a GPU's block has threads, and batch sizes that are no multiple of the loads.
  for (const DType dtype : {DType::bfloat16, DType::float16, DType::float32}) {
    const std::int64_t features = dtype == DType::float32 ? 1024 : 2048;  // 256 vectors
    for (const LrpeCosineActivation& activation :
         {every_activation()[0], every_activation()[3], every_activation()[5]}) {
      for (const auto& [batch, positions] : combine<std::int64_t, std::int64_t>({2, 5}, {1, 9})) {
        const std::int64_t heads = positions == 1 ? 2 : 1;
        check_lrpe_cosine(with_activation({.dtype = dtype,
                                           .shape = {batch, heads, positions, features},
                                           .theta_shape = {heads, features},
                                           .theta_dtype = DType::float32,
                                           .offset = 1},
                                          activation));
      }
    }
  }
}

TEST_P(LrpeCosine, EveryNumberOfPositionsMatchesTheOracle) {
  struct Positions {
    std::int64_t count;
    const char* reason;
  };
  const std::vector<Positions> all = {
      {1, "one"},
      {2, "two"},
      {31, "one short of a warp"},
      {33, "one more"},
      {127, "one short of 128"},
      {257, "one more than 256"},
      {512, "the last that a block of a GPU has whole, of a softmax over the sequence"},
      {513, "one more"},
      {1000, "no power of two"},
      {4099, "a prime: pieces of a sum or of a softmax that are not full"},
  };
  for (const auto& [positions, activation, dtype, is_transposed] :
       combine<Positions, LrpeCosineActivation, DType, bool>(all, every_activation(), {DType::bfloat16, DType::float32},
                                                             {false, true})) {
    SCOPED_TRACE(positions.reason);
    const std::int64_t heads = positions.count < 4000 ? 2 : 1;
    const Dims shape = {1, heads, positions.count, 16};
    const HeadLayout& layout = head_layouts()[is_transposed ? 1 : 0];
    check_lrpe_cosine(with_activation({.dtype = dtype,
                                       .shape = shape,
                                       .theta_shape = {heads, 12},
                                       .theta_dtype = DType::float32,
                                       .x_placement = layout.of(shape),
                                       .out_placement = layout.of({1, heads, positions.count, 32}),
                                       .grad_x_placement = layout.of(shape)},
                                      activation));
  }
}

TEST_P(LrpeCosine, BatchesWithAndWithoutAnglesInCommonMatchTheOracle) {
  struct Case {
    Dims shape, theta, grid;
    std::int64_t extra_tokens;
    const char* reason;
  };
  const std::vector<Case> cases = {
      {{3, 2, 70, 64}, {2, 64}, {}, 0, "more tokens than a block of a GPU has rows: it serves the batch"},
      {{9, 1, 261, 16}, {1, 16}, {}, 1, "a batch that is cut too"},
      {{2, 1, 512, 32}, {1, 32}, {}, 1, "as many tokens as a block has whole, of a softmax over the sequence"},
      {{9, 1, 777, 16}, {1, 16}, {}, 1, "a batch that is cut, with more tokens than a block has whole"},
      {{5, 2, 601, 24}, {2, 10}, {24, 25}, 1, "likewise, a grid"},
      {{5, 3, 61, 32}, {1, 1}, {}, 0, "one angle"},
      {{4, 2, 85, 48}, {2, 10}, {12, 7}, 1, "a grid, features without an angle"},
      {{3, 1, 9, 520}, {1, 520}, {}, 0, "long rows"},
      {{3, 1, 40, 31}, {1, 31}, {}, 0, "no vector fits"},
  };
  for (const auto& [c, activation, dtype] :
       combine<Case, LrpeCosineActivation, DType>(cases, every_activation(), {DType::bfloat16, DType::float32})) {
    SCOPED_TRACE(c.reason);
    LrpeCosineCase test_case = with_activation({.dtype = dtype,
                                                .shape = c.shape,
                                                .theta_shape = c.theta,
                                                .theta_dtype = DType::float32,
                                                .grid = c.grid,
                                                .extra_tokens = c.extra_tokens},
                                               activation);
    check_lrpe_cosine(test_case);
    for (std::int64_t b = 0; b < c.shape[0]; ++b) test_case.offsets.push_back(7 * b);
    check_lrpe_cosine(test_case);
  }
}

TEST_P(LrpeCosine, MoreTokensThanASumHasPiecesMatchTheOracle) {
  // Scratch memory limits the number of partials of theta's gradient, so heads times features decide how many tokens
  // each partial sums. The two sizes are with and without vectors.
  for (const auto& [features, activation] :
       combine<std::int64_t, LrpeCosineActivation>({1032, 1030}, {every_activation()[0], every_activation()[5]})) {
    check_lrpe_cosine(with_activation({.dtype = DType::bfloat16,
                                       .shape = {1, 32, 37, features},
                                       .theta_shape = {32, 100},
                                       .theta_dtype = DType::float32,
                                       .grid = {37}},
                                      activation));
  }
}

TEST_P(LrpeCosine, HeadsThatLieInsideOfATokenMatchTheOracle) {
  // An angle for each head, and so many tokens that a CPU cuts them into two pieces: it takes all heads of the first
  // piece, then all heads of the second.
  const Dims shape = {1, 4, 1100, 64}, out_shape = {1, 4, 1100, 128};
  const HeadLayout& layout = head_layouts()[1];
  for (const LrpeCosineActivation& activation : {every_activation()[0], every_activation()[5]}) {
    check_lrpe_cosine(with_activation({.dtype = DType::float32,
                                       .shape = shape,
                                       .theta_shape = {4, 64},
                                       .grid = {1100},
                                       .x_placement = layout.of(shape),
                                       .out_placement = layout.of(out_shape),
                                       .grad_out_placement = layout.of(out_shape),
                                       .grad_x_placement = layout.of(shape)},
                                      activation));
  }
}

TEST_P(LrpeCosine, MoreThan65535PositionsHeadsOrBatchesMatchTheOracle) {
  // 65535 is the most blocks along y and z of a launch grid.
  constexpr std::int64_t kMany = 70001;
  for (const Dims& shape : {Dims{1, 1, kMany, 2}, Dims{1, kMany, 1, 2}, Dims{kMany, 1, 1, 2}, Dims{300, 300, 1, 1}}) {
    for (const LrpeCosineActivation& activation :
         {every_activation()[3], every_activation()[4], every_activation()[5]}) {
      check_lrpe_cosine(with_activation({.dtype = DType::bfloat16,
                                         .shape = shape,
                                         .theta_shape = {shape[1], 2},
                                         .theta_dtype = DType::float32,
                                         .offset = 1},
                                        activation));
    }
  }
}

TEST_P(LrpeCosine, ThetaAndItsGradientMayLieAnywhere) {
  struct Case {
    Dims shape;
    Placement theta;
    Placement grad_theta;
    const char* reason;
  };
  const std::vector<Case> cases = {
      {{3, 16}, with_strides({40, 1}), with_strides({17, 1}), "rows of wider tensors"},
      {{3, 16}, with_strides({1, 3}), with_strides({1, 3}), "transposed"},
      {{3, 16}, with_strides({-16, -1}), with_strides({33, -2}), "in reverse order"},
      {{3, 16}, with_strides({0, 1}), {}, "one head, expanded: each head has a gradient of its own"},
      {{3, 16}, with_strides({1, 0}), {}, "one angle, expanded: each feature has a gradient of its own"},
      {{3, 16}, with_strides({0, 0}), contiguous_at(1), "both"},
      {{3, 1}, with_strides({5, 7}), with_strides({2, 9}), "one angle a head, with gaps"},
      {{1, 16}, with_strides({999, 3}), with_strides({999, 2}), "one head, with gaps"},
      {{1, 1}, with_strides({999, 999}), with_strides({-5, 5}), "one element: no stride counts"},
      {{3, 16}, contiguous_at(1), contiguous_at(3), "off every boundary"},
  };
  for (const auto& [c, grid, dtype] :
       combine<Case, Dims, DType>(cases, {Dims{}, Dims{3, 5}}, floating_point_dtypes())) {
    SCOPED_TRACE(c.reason);
    for (const DType theta_dtype : {dtype, DType::float32}) {
      check_lrpe_cosine({.dtype = dtype,
                         .shape = {2, 3, 16, 32},
                         .theta_shape = c.shape,
                         .theta_dtype = theta_dtype,
                         .grid = grid,
                         .extra_tokens = 1,
                         .activation = Activation::silu,
                         .theta_placement = c.theta,
                         .grad_theta_placement = c.grad_theta});
    }
  }
}

TEST_P(LrpeCosine, AnUpstreamGradientAndXMayBeExpanded) {
  const Dims shape = {2, 3, 7, 24};
  for (const auto& [activation, dtype] :
       combine<LrpeCosineActivation, DType>(every_activation(), floating_point_dtypes())) {
    LrpeCosineCase plain = with_activation({.dtype = dtype, .shape = shape, .theta_shape = {3, 24}}, activation);
    for (const Dims& strides : {Dims{0, 0, 0, 0}, Dims{0, 0, 48, 1}, Dims{7, 0, 1, 0}}) {
      LrpeCosineCase of_gradient = plain;
      of_gradient.grad_out_placement = with_strides(strides);
      check_lrpe_cosine(of_gradient);
      LrpeCosineCase of_x = plain;
      of_x.x_placement = with_strides(strides);
      check_lrpe_cosine(of_x);
    }
  }
}

TEST_P(LrpeCosine, ExtraTokensAreActivatedAndNothingElse) {
  // Compared exactly: an angle of 0 has cosine 1 and sine 0 for every theta, and adds nothing to theta's gradient.
  for (const auto& [dtype, grid] : combine<DType, Dims>(floating_point_dtypes(), {Dims{}, Dims{2, 2}, Dims{4}})) {
    LrpeCosineRun run({.dtype = dtype,
                       .shape = {2, 2, 7, 20},
                       .theta_shape = {2, 10},
                       .grid = grid,
                       .extra_tokens = 3,
                       .offset = 1000,
                       .angle = [](std::int64_t) { return std::numeric_limits<double>::quiet_NaN(); },
                       .upstream = [](std::int64_t i) { return i / 40 % 7 < 3 ? 1.0 + i % 40 : 0.0; }});
    run_between_canaries(run);
    for (std::int64_t i = 0; i < 2 * 2 * 7 * 20; ++i) {
      const std::int64_t n = i / 20 % 7, d = i % 20, at = i / 20 * 40 + d;
      if (n < 3 || (grid.size() != 2 && d >= 10)) {
        ASSERT_EQ(run.out.get(at), run.x.get(i)) << "element " << i;
        ASSERT_EQ(run.out.get(at + 20), 0.0) << "element " << i;
        ASSERT_EQ(run.grad_x.get(i), run.grad_out.get(at)) << "element " << i;
      } else {
        ASSERT_TRUE(std::isnan(run.out.get(at)) && std::isnan(run.out.get(at + 20))) << "element " << i;
        ASSERT_TRUE(std::isnan(run.grad_x.get(i))) << "element " << i;
      }
    }
  }
}

TEST_P(LrpeCosine, WhatHasNoAngleAddsNothingToThetasGradient) {
  // A NaN in an extra token, or in a feature beyond the axes, makes no NaN in theta's gradient.
  for (const LrpeCosineActivation& activation : {every_activation()[0], every_activation()[3], every_activation()[5]}) {
    const bool is_over_sequence = activation.dim == -2;
    check_lrpe_cosine(with_activation({.dtype = DType::float32,
                                       .shape = {1, 2, 11, 24},
                                       .theta_shape = {2, 8},
                                       .grid = {3, 3},
                                       .extra_tokens = 2,
                                       .value =
                                           [&](std::int64_t i) {
                                             const bool is_extra = i / 24 % 11 < 2, is_beyond = i % 24 >= 16;
                                             return (is_extra && !is_over_sequence) || is_beyond
                                                        ? std::numeric_limits<double>::quiet_NaN()
                                                        : random_normal(64, static_cast<std::uint64_t>(i));
                                           }},
                                      activation));
  }
}

TEST_P(LrpeCosine, PositionsGivenInAnyWayMatchTheOracle) {
  constexpr std::int64_t kBatch = 2;
  constexpr std::int64_t kPositions = 11;
  std::vector<std::int64_t> any, any_of_each;
  for (std::int64_t i = 0; i < kBatch * kPositions; ++i) {
    any_of_each.push_back(i * 7919 % 3001 - 1500);  // both signs, unordered
    if (i < kPositions) any.push_back(i * i);
  }
  LrpeCosineCase plain{.shape = {kBatch, 3, kPositions, 24}, .theta_shape = {3, 24}};
  std::vector<LrpeCosineCase> cases;
  const auto add = [&](auto change) {
    LrpeCosineCase changed = plain;
    change(changed);
    cases.push_back(changed);
  };
  add([&](LrpeCosineCase& c) { c.positions = any; });
  add([&](LrpeCosineCase& c) { c.positions = any_of_each; });
  add([&](LrpeCosineCase& c) { c.positions = any, c.extra_tokens = 4; });
  add([&](LrpeCosineCase& c) { c.positions = any, c.grid = {kPositions}; });
  add([&](LrpeCosineCase& c) { c.positions = any_of_each, c.positions_placement = with_strides({1, kBatch}); });
  add([&](LrpeCosineCase& c) { c.positions = any_of_each, c.positions_placement = with_strides({-20, -1}); });
  add([&](LrpeCosineCase& c) { c.positions.assign(kPositions, 13), c.positions_placement = with_strides({0}); });
  add([&](LrpeCosineCase& c) { c.offset = -4; });
  add([&](LrpeCosineCase& c) { c.offsets = {100}; });
  add([&](LrpeCosineCase& c) { c.offsets = {100, -7}; });
  add([&](LrpeCosineCase& c) { c.offsets = {100, -7}, c.offsets_placement = with_strides({-3}), c.offset = 50; });
  add([&](LrpeCosineCase& c) { c.offsets = {100, 100}, c.offsets_placement = with_strides({0}), c.extra_tokens = 3; });
  add([&](LrpeCosineCase& c) { c.offsets = {5, 6}, c.grid = {2, 5}, c.extra_tokens = 1, c.theta_shape = {3, 10}; });
  add([&](LrpeCosineCase& c) { c.cu_seqlens = {0, 4, 9, 11}; });
  add([&](LrpeCosineCase& c) { c.cu_seqlens = {0, 11}, c.grid = {11}; });
  add([&](LrpeCosineCase& c) { c.cu_seqlens = {0, 0, 0, 4, 4, 11, 11}; });                 // empty sequences
  add([&](LrpeCosineCase& c) { c.cu_seqlens = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}; });  // all positions 0
  for (LrpeCosineCase& c : cases) {
    for (const auto& [integers, dtype, activation] : combine<DType, DType, LrpeCosineActivation>(
             {DType::int32, DType::int64}, floating_point_dtypes(), every_activation())) {
      if (activation.dim == -2 && !c.cu_seqlens.empty()) continue;  // refused
      c.integers = integers;
      c.dtype = dtype;
      c.theta_dtype = DType::float32;
      check_lrpe_cosine(with_activation(c, activation));
    }
  }
}

TEST_P(LrpeCosine, ManyPackedSequencesMatchTheOracle) {
  // 400 sequences of 0 to 4 tokens, for a binary search of many steps.
  std::vector<std::int64_t> starts = {0};
  for (std::int64_t s = 0; s < 400; ++s) starts.push_back(starts.back() + s * s % 5);
  for (const DType integers : {DType::int32, DType::int64}) {
    check_lrpe_cosine({.dtype = DType::bfloat16,
                       .shape = {2, 1, starts.back(), 16},
                       .theta_shape = {1, 16},
                       .cu_seqlens = starts,
                       .integers = integers,
                       .activation = Activation::relu});
  }
}

// ----------------------------------------------------------------------------------------------- bitwise equality

TEST_P(LrpeCosine, TheSamePositionsGivenInAnotherWayChangeNoBit) {
  constexpr std::int64_t kPositions = 45;
  std::vector<std::int64_t> once, for_each_batch;
  for (std::int64_t n = 0; n < kPositions; ++n) once.push_back(n + 3);
  for (int b = 0; b < 2; ++b) for_each_batch.insert(for_each_batch.end(), once.begin(), once.end());
  for (const auto& [activation, dtype, theta] : combine<LrpeCosineActivation, DType, Dims>(
           every_activation(), floating_point_dtypes(), {Dims{3, 24}, Dims{1, 1}})) {
    const LrpeCosineCase plain = with_activation(
        {.dtype = dtype, .shape = {2, 3, kPositions, 24}, .theta_shape = theta, .offset = 3}, activation);
    SCOPED_TRACE(description_of(plain));
    LrpeCosineRun expected(plain);
    expected.run();
    const auto expect_equal = [&](const char* what, auto change) {
      LrpeCosineCase changed = plain;
      changed.offset = 0;
      change(changed);
      LrpeCosineRun run(changed);
      run_between_canaries(run);
      // With angles for each batch entry, a GPU may sum in another order.
      const bool is_for_each_batch = changed.offsets.size() > 1 || changed.positions.size() > kPositions;
      const bool has_order = device().type == DeviceType::cpu || !is_for_each_batch;
      EXPECT_TRUE(has_order ? run.results_equal(expected) : run.elementwise_results_equal(expected)) << what;
    };
    expect_equal("a grid of one axis", [&](LrpeCosineCase& c) { c.grid = {kPositions}, c.offset = 3; });
    for (const DType integers : {DType::int32, DType::int64}) {
      expect_equal("one offset", [&](LrpeCosineCase& c) { c.integers = integers, c.offsets = {3}; });
      expect_equal("offsets", [&](LrpeCosineCase& c) { c.integers = integers, c.offsets = {1, 1}, c.offset = 2; });
      expect_equal("positions [N]", [&](LrpeCosineCase& c) { c.integers = integers, c.positions = once; });
      expect_equal("positions [B, N]", [&](LrpeCosineCase& c) { c.integers = integers, c.positions = for_each_batch; });
      expect_equal("positions [B, N], expanded", [&](LrpeCosineCase& c) {
        c.integers = integers, c.positions = for_each_batch, c.positions_placement = with_strides({0, 2});
      });
    }
  }
}

TEST_P(LrpeCosine, PackedSequencesAreTheSequencesOneByOneBitForBit) {
  const std::vector<std::int64_t> starts = {0, 0, 5, 17, 17, 18, 40};
  std::vector<std::int64_t> positions;
  for (std::size_t s = 0; s + 1 < starts.size(); ++s) {
    for (std::int64_t n = starts[s]; n < starts[s + 1]; ++n) positions.push_back(n - starts[s]);
  }
  for (const LrpeCosineActivation& activation : every_activation()) {
    if (activation.dim == -2) continue;
    for (const DType dtype : floating_point_dtypes()) {
      LrpeCosineCase packed = with_activation(
          {.dtype = dtype, .shape = {2, 3, 40, 24}, .theta_shape = {3, 24}, .cu_seqlens = starts}, activation);
      SCOPED_TRACE(description_of(packed));
      LrpeCosineRun expected(packed);
      expected.run();
      packed.integers = DType::int32;
      LrpeCosineRun of_int32(packed);
      of_int32.run();
      EXPECT_TRUE(of_int32.results_equal(expected)) << "int32";
      packed.cu_seqlens = {};
      LrpeCosineCase of_positions = packed;
      of_positions.positions = positions;
      LrpeCosineRun as_positions(of_positions);
      as_positions.run();
      EXPECT_TRUE(as_positions.results_equal(expected)) << "positions";
      LrpeCosineRun one_by_one(packed);
      for (std::size_t s = 0; s + 1 < starts.size(); ++s) {
        const auto part = [&](const TensorView& view) { return slice(view, 2, starts[s], starts[s + 1] - starts[s]); };
        LrpeCosineForwardArgs forward = one_by_one.forward_args();
        forward.x = part(forward.x), forward.out = part(forward.out);
        lrpe_cosine_forward(forward);
        LrpeCosineBackwardArgs backward = one_by_one.backward_args();
        backward.x = part(backward.x), backward.grad_out = part(backward.grad_out);
        backward.grad_x = part(backward.grad_x), backward.grad_theta = {};
        lrpe_cosine_backward(backward);
      }
      one_by_one.download();
      EXPECT_TRUE(one_by_one.elementwise_results_equal(expected)) << "one by one";
    }
  }
}

TEST_P(LrpeCosine, OneTokenAtAnOffsetIsThatRowOfTheWholeBitForBit) {
  // Decoding: a model gets the same numbers token by token as in training. 1000 is beyond a table of small angles.
  for (const LrpeCosineActivation& activation : every_activation()) {
    if (activation.dim == -2) continue;
    for (const auto& [dtype, first, theta] : combine<DType, std::int64_t, Dims>(
             floating_point_dtypes(), {0, 1000}, {Dims{3, 24}, Dims{1, 1}, Dims{3, 40}})) {
      const LrpeCosineCase whole_case =
          with_activation({.dtype = dtype, .shape = {2, 3, 37, 40}, .theta_shape = theta, .offset = first}, activation);
      LrpeCosineRun whole(whole_case), one_by_one(whole_case);
      whole.run();
      for (std::int64_t n = 0; n < 37; ++n) {
        LrpeCosineForwardArgs forward = one_by_one.forward_args();
        forward.x = slice(forward.x, 2, n), forward.out = slice(forward.out, 2, n);
        forward.angles.offset += n;
        lrpe_cosine_forward(forward);
        LrpeCosineBackwardArgs backward = one_by_one.backward_args();
        backward.x = slice(backward.x, 2, n), backward.grad_out = slice(backward.grad_out, 2, n);
        backward.grad_x = slice(backward.grad_x, 2, n), backward.grad_theta = {};
        backward.angles.offset += n;
        lrpe_cosine_backward(backward);
      }
      one_by_one.download();
      EXPECT_TRUE(one_by_one.elementwise_results_equal(whole)) << description_of(whole_case);
    }
  }
}

TEST_P(LrpeCosine, ABatchOfOneIsThatEntryOfALargerBatchBitForBit) {
  for (const auto& [activation, dtype, is_grid] :
       combine<LrpeCosineActivation, DType, bool>(every_activation(), floating_point_dtypes(), {false, true})) {
    const LrpeCosineCase batch_case = with_activation({.dtype = dtype,
                                                       .shape = {5, 3, 37, 24},
                                                       .theta_shape = {3, 12},
                                                       .grid = is_grid ? Dims{5, 7} : Dims{},
                                                       .extra_tokens = is_grid ? 2 : 0},
                                                      activation);
    LrpeCosineRun batch(batch_case), one_by_one(batch_case);
    batch.run();
    for (std::int64_t b = 0; b < 5; ++b) {
      LrpeCosineForwardArgs forward = one_by_one.forward_args();
      for (TensorView* view : {&forward.x, &forward.out, &forward.lse}) *view = slice(*view, 0, b);
      lrpe_cosine_forward(forward);
      LrpeCosineBackwardArgs backward = one_by_one.backward_args();
      for (TensorView* view : {&backward.x, &backward.grad_out, &backward.lse, &backward.grad_x}) {
        *view = slice(*view, 0, b);
      }
      backward.grad_theta = {};
      lrpe_cosine_backward(backward);
    }
    one_by_one.download();
    EXPECT_TRUE(one_by_one.elementwise_results_equal(batch)) << description_of(batch_case);
  }
}

}  // namespace
}  // namespace eaves::testing
