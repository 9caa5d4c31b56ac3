// cross_entropy against its oracle, on every device: row lengths and layouts, with a few options each. Other tests:
//
//   cross_entropy_options_test.cpp   the grid of options
//   cross_entropy_edges_test.cpp     infinities, ignored rows, targets out of range
//   cross_entropy_shards_test.cpp    a vocabulary in shards
//   cross_entropy_calls_test.cpp     workspaces, threads, streams, graphs
//   cross_entropy_errors_test.cpp    refused arguments
//   cross_entropy_large_test.cpp     tensors beyond 2^31 elements
#include "eaves/cross_entropy.h"

#include <gtest/gtest.h>

#include "ops/cross_entropy/cross_entropy_test_case.h"
#include "testing/cases.h"
#include "testing/devices.h"
#include "testing/row_cases.h"

namespace eaves::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class CrossEntropy : public OnEachDevice {};
EAVES_EACH_DEVICE(CrossEntropy);

/// Logits like a model's: a few classes carry most of the probability.
double normal(std::int64_t i) { return 3.0 * random_normal(7, static_cast<std::uint64_t>(i)); }

/// Every term of a row's statistics and gradient.
const CrossEntropyOptions kEveryOption = {
    .reduction = Reduction::none, .label_smoothing = 0.1, .scale = 0.5, .softcap = 20.0, .z_loss_weight = 1e-3};

/// The kinds of targets and options that most tests here take for each shape.
struct Kind {
  DType targets;
  CrossEntropyOptions options;
  bool has_weight;
  bool has_row_gradients;
};

const Kind kPlain = {DType::int64, {.reduction = Reduction::mean}, false, false};
const Kind kEverything = {DType::int32, kEveryOption, true, true};
const Kind kSoft = {DType::float32, {.reduction = Reduction::sum}, false, false};

CrossEntropyCase make_case(DType dtype, const Dims& shape, int class_axis, const Kind& kind) {
  CrossEntropyCase result{.dtype = dtype,
                          .shape = shape,
                          .class_axis = class_axis,
                          .options = kind.options,
                          .targets_dtype = kind.targets,
                          .has_grad_lse = kind.has_row_gradients,
                          .has_grad_entropy = kind.has_row_gradients,
                          .value = normal};
  if (kind.has_weight) result.weight_dtype = dtype;
  return result;
}

TEST_P(CrossEntropy, RowsOfEveryLengthMatchTheOracle) {
  for (const DType dtype : floating_point_dtypes()) {
    int number = 0;
    for (const RowLength& length : row_lengths()) {
      SCOPED_TRACE(length.reason);
      // With a misalignment of 1 no row, or every other row, starts on 16 bytes. Each kind gets both, at alternate
      // lengths.
      const std::int64_t misalignment = ++number % 2;
      CrossEntropyCase plain = make_case(dtype, {5, length.columns}, -1, kPlain);
      plain.logits_placement = plain.grad_logits_placement = contiguous_at(misalignment);
      check_cross_entropy(plain);
      CrossEntropyCase everything = make_case(dtype, {5, length.columns}, -1, kEverything);
      everything.logits_placement = everything.grad_logits_placement = contiguous_at(1 - misalignment);
      check_cross_entropy(everything);
      CrossEntropyCase soft = make_case(dtype, {5, length.columns}, -1, kSoft);
      if (number % 3 == 0) soft.targets_dtype = dtype;
      soft.logits_placement = soft.targets_placement = contiguous_at(misalignment);
      check_cross_entropy(soft);
    }
  }
}

TEST_P(CrossEntropy, RowsWhoseTensorsAreAlignedDifferentlyMatchTheOracle) {
  for (const auto& [dtype, columns, grad_misalignment, kind] : combine<DType, std::int64_t, std::int64_t, Kind>(
           floating_point_dtypes(), {9, 500, 5003}, {1, 3}, {kPlain, kSoft})) {
    CrossEntropyCase test_case = make_case(dtype, {6, columns}, -1, kind);
    test_case.grad_logits_placement = contiguous_at(grad_misalignment);
    test_case.targets_placement = contiguous_at(2);
    check_cross_entropy(test_case);
  }
}

TEST_P(CrossEntropy, FewLongRowsMatchTheOracle) {
  for (const RowCount& rows : few_long_rows()) {
    if (device().type == DeviceType::cpu && rows.rows > 3) break;  // only a GPU has clusters
    SCOPED_TRACE(rows.reason);
    const Dims shape = {rows.rows, rows.columns};
    check_cross_entropy(make_case(DType::bfloat16, shape, 1, kPlain));
    // The oracle takes a second for a few million classes: the larger shapes get fewer rows.
    if (rows.rows > 100) continue;
    const Dims fewer = {std::min<std::int64_t>(rows.rows, 3), rows.columns};
    check_cross_entropy(make_case(DType::float32, fewer, 1, kEverything));
    check_cross_entropy(make_case(DType::bfloat16, fewer, 1, kSoft));
  }
}

TEST_P(CrossEntropy, ManyShortRowsMatchTheOracle) {
  for (const auto& [columns, kind] : combine<std::int64_t, Kind>({1, 2, 5, 24, 64}, {kPlain, kEverything, kSoft})) {
    check_cross_entropy(make_case(DType::bfloat16, {20011, columns}, 1, kind));
  }
}

TEST_P(CrossEntropy, TheMeanCountsWhatManyRowsWeigh) {
  // In place a GPU adds up the divisor before the rows: 8 at a time in each of 512 threads.
  for (const std::int64_t rows : {4096, 5003}) {
    CrossEntropyCase test_case = make_case(DType::bfloat16, {rows, 33}, 1, kPlain);
    test_case.weight_dtype = DType::float32;
    test_case.has_row_weight = true;
    check_cross_entropy(test_case);
  }
}

TEST_P(CrossEntropy, HeavyTailedRowsMatchTheOracle) {
  for (const DType dtype : floating_point_dtypes()) {
    CrossEntropyCase test_case = make_case(dtype, {7, 30001}, 1, kPlain);
    test_case.value = [](std::int64_t i) {
      const double z = random_normal(11, static_cast<std::uint64_t>(i));
      return 3.0 * z * z * z;
    };
    check_cross_entropy(test_case);
  }
}

TEST_P(CrossEntropy, EveryClassAxisMatchesTheOracle) {
  const Dims shape = {3, 4, 5, 6};
  for (int axis = -4; axis < 4; ++axis) {
    for (const auto& [dtype, kind] : combine<DType, Kind>(floating_point_dtypes(), {kPlain, kEverything, kSoft})) {
      CrossEntropyCase test_case = make_case(dtype, shape, axis, kind);
      check_cross_entropy(test_case);
      // The same with the axes of logits in reverse order in memory, and with a gradient of another layout.
      test_case.logits_placement = with_strides({1, 3, 12, 60});
      check_cross_entropy(test_case);
      test_case.grad_logits_placement = with_strides({1, 3, 12, 60});
      check_cross_entropy(test_case);
    }
  }
}

TEST_P(CrossEntropy, ClassesThatAreNotTheLastAxisAreReadInPlaceOfTheirStrides) {
  for (const RowsAcross& c : rows_across()) {
    SCOPED_TRACE(c.reason);
    // Every dtype and every kind, but not every pair, because the shapes are large.
    const std::pair<DType, Kind> pairs[] = {{DType::bfloat16, kPlain},
                                            {DType::bfloat16, kEverything},
                                            {DType::bfloat16, kSoft},
                                            {DType::float32, kEverything},
                                            {DType::float64, kPlain}};
    for (const auto& [dtype, kind] : pairs) {
      CrossEntropyCase test_case = make_case(dtype, c.shape, c.axis, kind);
      if (kind.has_weight) test_case.logits_placement = contiguous_at(1);
      check_cross_entropy(test_case);
    }
  }
}

TEST_P(CrossEntropy, StridesOfEveryKindMatchTheOracle) {
  for (const auto& [c, dtype, kind] :
       combine<StridedRows, DType, Kind>(strided_rows(), floating_point_dtypes(), {kPlain, kEverything, kSoft})) {
    SCOPED_TRACE(c.reason);
    CrossEntropyCase test_case = make_case(dtype, c.shape, c.axis, kind);
    test_case.logits_placement = with_strides(c.strides);
    test_case.runs_in_place = c.has_gaps_only;
    if (kind.has_weight && c.has_gaps_only) test_case.grad_logits_placement = with_strides(c.strides);
    check_cross_entropy(test_case);
  }
}

TEST_P(CrossEntropy, MoreRowAxesThanAKernelTakesInItsShortForm) {
  // Gaps between all axes, so that none can be merged.
  const Dims shape = {2, 3, 2, 3, 2, 50};
  const Dims strides = {2084, 691, 344, 113, 53, 1};
  for (const auto& [dtype, axis, kind] :
       combine<DType, int, Kind>(floating_point_dtypes(), {5, 0}, {kPlain, kEverything, kSoft})) {
    CrossEntropyCase test_case = make_case(dtype, shape, axis, kind);
    test_case.logits_placement = test_case.grad_logits_placement = with_strides(strides);
    check_cross_entropy(test_case);
  }
}

TEST_P(CrossEntropy, TargetsAreReadByTheirStrides) {
  for (const auto& [strides, targets] : combine<Dims, DType>(
           {Dims{0, 0}, Dims{0, 1}, Dims{1, 5}, Dims{-7, 1}, Dims{30, 2}}, {DType::int32, DType::int64})) {
    for (const std::int64_t columns : {30, 3000}) {
      CrossEntropyCase test_case = make_case(DType::bfloat16, {5, 7, columns}, 2, kPlain);
      test_case.targets_dtype = targets;
      test_case.targets_placement = with_strides(strides, 1);
      check_cross_entropy(test_case);
    }
    // Neighbours in memory belong to different rows.
    CrossEntropyCase test_case = make_case(DType::bfloat16, {300, 5, 8}, 0, kPlain);
    test_case.targets_dtype = targets;
    test_case.targets_placement = with_strides({strides[0], strides[1]}, 1);
    check_cross_entropy(test_case);
  }
}

TEST_P(CrossEntropy, SoftTargetsAreReadByTheirStrides) {
  for (const auto& [strides, dtype, logits_strides] :
       combine<Dims, DType, Dims>({Dims{0, 0}, Dims{0, 1}, Dims{1, 0}, Dims{1, 9}, Dims{-900, 1}, Dims{1800, 2}},
                                  {DType::bfloat16, DType::float32}, {Dims{900, 1}, Dims{1, 9}})) {
    CrossEntropyCase test_case = make_case(dtype, {9, 900}, 1, kSoft);
    test_case.targets_placement = with_strides(strides);
    test_case.logits_placement = with_strides(logits_strides);
    check_cross_entropy(test_case);
  }
}

TEST_P(CrossEntropy, AnUpstreamGradientMayBeExpandedStridedOrHave16Bits) {
  for (const auto& [strides, dtype, columns] : combine<Dims, DType, std::int64_t>(
           {Dims{0, 0}, Dims{0, 1}, Dims{1, 5}, Dims{-7, 1}},
           {DType::bfloat16, DType::float16, DType::float32, DType::float64}, {30, 3000})) {
    CrossEntropyCase test_case = make_case(dtype, {5, 7, columns}, 2, kEverything);
    test_case.grad_loss_placement = with_strides(strides, 1);
    test_case.grad_loss_dtype = dtype;
    check_cross_entropy(test_case);
  }
  for (const Reduction reduction : {Reduction::sum, Reduction::mean}) {
    CrossEntropyCase test_case = make_case(DType::bfloat16, {5, 7, 300}, 2, kPlain);
    test_case.options.reduction = reduction;
    test_case.grad_loss_dtype = DType::bfloat16;
    check_cross_entropy(test_case);
  }
}

TEST_P(CrossEntropy, LongRowsThatStartWithMinusInfinityKeepTheirTail) {
  // The first pieces, batches or blocks of a row contain no finite logit.
  for (const DType dtype : {DType::bfloat16, DType::float32}) {
    CrossEntropyCase test_case = make_case(dtype, {2, 200003}, 1, kPlain);
    test_case.value = [](std::int64_t i) { return i % 200003 < 190000 ? -kInfinity : normal(i); };
    test_case.target = [](std::int64_t row) { return 195000.0 + static_cast<double>(row); };
    check_cross_entropy(test_case);
  }
}

TEST_P(CrossEntropy, HugeLogitsDoNotOverflow) {
  for (const DType dtype : floating_point_dtypes()) {
    const double huge = 0.75 * largest_finite(dtype);
    for (const double sign : {1.0, -1.0}) {
      CrossEntropyCase test_case = make_case(dtype, {3, 5000}, 1, kPlain);
      test_case.value = [=](std::int64_t i) { return i % 5000 == 4321 ? sign * huge : 0.25 * huge; };
      test_case.target = [](std::int64_t row) { return row == 0 ? 4321.0 : 17.0; };
      check_cross_entropy(test_case);
    }
    // Every logit raises the maximum so far that the exponential of the difference overflows float32.
    CrossEntropyCase test_case = make_case(dtype, {2, 600}, 1, kPlain);
    test_case.value = [](std::int64_t i) { return 100.0 * static_cast<double>(i % 600) - 30000.0; };
    check_cross_entropy(test_case);
  }
}

TEST_P(CrossEntropy, LargeLogitsOfEitherSignMatchTheOracle) {
  for (double size = 1e3; size < 1e31; size *= 997.0) {
    for (const auto& [sign, dtype, kind] : combine<double, DType, Kind>(
             {1.0, -1.0}, {DType::bfloat16, DType::float32, DType::float64}, {kPlain, kSoft})) {
      CrossEntropyCase test_case = make_case(dtype, {4, 1000}, 1, kind);
      test_case.value = [=](std::int64_t i) { return i % 7 == 3 ? sign * size : sign * 0.5 * size; };
      test_case.has_split_lse = true;
      check_cross_entropy(test_case);
    }
  }
}

TEST_P(CrossEntropy, MaximaThatRiseLateAreFollowedInEveryLayout) {
  // Each quarter of a row raises the maximum, by less and by more than the slack of any kernel.
  for (const auto& [step, dtype, columns] : combine<double, DType, std::int64_t>(
           {3.0, 6.0, 25.0, 70.0}, {DType::bfloat16, DType::float32, DType::float64}, {128, 6000})) {
    const auto rising = [=](std::int64_t column) { return step * static_cast<double>(4 * column / columns); };
    CrossEntropyCase rows = make_case(dtype, {3, columns}, 1, kPlain);
    rows.value = [=](std::int64_t i) { return rising(i % columns); };
    check_cross_entropy(rows);
    CrossEntropyCase strided = rows;
    strided.logits_placement = with_strides({2 * columns, 2});
    check_cross_entropy(strided);
    CrossEntropyCase side_by_side = make_case(dtype, {columns, 16}, 0, kPlain);
    side_by_side.value = [=](std::int64_t i) { return rising(i / 16); };
    check_cross_entropy(side_by_side);
  }
}

TEST_P(CrossEntropy, MaskedLogitsOfAnySizeChangeNothing) {
  // Codebases mask with different numbers; a row may start with many masked classes.
  for (const auto& [mask, dtype, axis] :
       combine<double, DType, int>({-1e4, -1e7, -3e8, -1e9, -1e12, -1e25, -3e38, -kInfinity},
                                   {DType::bfloat16, DType::float32, DType::float64}, {1, 0})) {
    CrossEntropyCase test_case = make_case(dtype, axis == 1 ? Dims{2, 8192} : Dims{8192, 2}, axis, kPlain);
    test_case.value = [=](std::int64_t i) {
      const std::int64_t column = axis == 1 ? i % 8192 : i / 2;
      return column < 6000 ? mask : 0.001 * static_cast<double>(column % 100);
    };
    test_case.target = [](std::int64_t row) { return 6000.0 + 1000.0 * static_cast<double>(row); };
    check_cross_entropy(test_case);
  }
}

TEST_P(CrossEntropy, ManyEqualLogitsKeepTheirPrecision) {
  // The worst case of a running sum: every rounding error points the same way.
  constexpr std::int64_t kClasses = 1 << 18;
  CrossEntropyOptions smoothed = {.label_smoothing = 0.1};
  for (const auto& [others, axis] : combine<double, int>({0.0, -5.0, -77.7}, {1, 0})) {
    CrossEntropyCase test_case =
        make_case(DType::float32, axis == 1 ? Dims{2, kClasses} : Dims{kClasses, 2}, axis, kPlain);
    test_case.options = smoothed;
    test_case.value = [=](std::int64_t i) { return (axis == 1 ? i % kClasses : i / 2) == 0 ? 0.0 : others; };
    check_cross_entropy(test_case);
  }
}

TEST_P(CrossEntropy, ManyLossesAddUpToTheirSum) {
  // Losses of equal size: every rounding of a running float32 sum would point the same way.
  for (const Reduction reduction : {Reduction::sum, Reduction::mean}) {
    CrossEntropyCase test_case = make_case(DType::float32, {300007, 2}, 1, kPlain);
    test_case.options.reduction = reduction;
    test_case.value = [](std::int64_t i) { return 0.1 * static_cast<double>(i % 2); };
    check_cross_entropy(test_case);
  }
}

TEST_P(CrossEntropy, EachOutputCanBeAskedForAlone) {
  for (const Dims& shape : {Dims{6, 40}, Dims{6, 3000}, Dims{2, 70001}}) {
    CrossEntropyCase test_case = make_case(DType::bfloat16, shape, 1, kPlain);
    test_case.options.z_loss_weight = 0.01;
    test_case.wants_mean_logit = true;
    CrossEntropyRun run(test_case);
    run.run();
    using Member = TensorView CrossEntropyForwardArgs::*;
    const std::pair<Member, TestTensor CrossEntropyResults::*> outputs[] = {
        {&CrossEntropyForwardArgs::lse, &CrossEntropyResults::lse},
        {&CrossEntropyForwardArgs::argmax, &CrossEntropyResults::argmax},
        {&CrossEntropyForwardArgs::entropy, &CrossEntropyResults::entropy},
        {&CrossEntropyForwardArgs::sum_sq, &CrossEntropyResults::sum_sq},
        {&CrossEntropyForwardArgs::mean_logit, &CrossEntropyResults::mean_logit},
        {&CrossEntropyForwardArgs::z_loss, &CrossEntropyResults::z_loss},
        {&CrossEntropyForwardArgs::target_mass, &CrossEntropyResults::target_mass},
        {&CrossEntropyForwardArgs::divisor, &CrossEntropyResults::divisor},
    };
    for (const auto& [asked, buffer] : outputs) {
      CrossEntropyRun alone(test_case);
      CrossEntropyForwardArgs args = alone.forward_args();
      for (const auto& [other, unused] : outputs) {
        if (other != asked) args.*other = {};
      }
      cross_entropy_forward(args);
      alone.download();
      const TestTensor& result = alone.results.*buffer;
      const TestTensor& expected = run.results.*buffer;
      const std::int64_t count = result.host().element_count();
      for (std::int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(difference(DType::float32, result.get(i), expected.get(i), std::abs(expected.get(i))), "");
      }
      const double loss = run.results.loss.get(0);
      EXPECT_EQ(difference(DType::float32, alone.results.loss.get(0), loss, std::abs(loss)), "");
      EXPECT_NE(result.get(count - 1), 0.0);
      for (const auto& [other, untouched] : outputs) {
        if (other == asked) continue;
        EXPECT_EQ((alone.results.*untouched).bytes(), (CrossEntropyRun(test_case).results.*untouched).bytes());
      }
    }
  }
}

TEST_P(CrossEntropy, InPlaceAnAbsentUpstreamGradientIsOne) {
  for (const Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean}) {
    CrossEntropyCase test_case = make_case(DType::float32, {6, 700}, 1, kPlain);
    test_case.options.reduction = reduction;
    CrossEntropyRun absent(test_case), ones(test_case);
    ones.grad_loss.fill([](std::int64_t) { return 1.0; });
    CrossEntropyForwardBackwardArgs args = absent.in_place_args();
    args.grad_loss = {};
    cross_entropy_forward_backward(args);
    cross_entropy_forward_backward(ones.in_place_args());
    absent.download();
    ones.download();
    EXPECT_EQ(absent.in_place.bytes(), ones.in_place.bytes());
    EXPECT_NE(absent.in_place.bytes(), absent.logits.bytes());
  }
}

TEST_P(CrossEntropy, RowsThatShareTheirWeightsMatchTheOracle) {
  // A GPU takes two rows at a time if there are enough: here an odd number of rows, with elements behind the last
  // vector, and more batches than the ring holds.
  const std::int64_t rows = device().type == DeviceType::cuda ? 301 : 5;
  struct Case {
    DType dtype;
    DType weight;
    std::int64_t columns;
    double softcap;
  };
  for (const Case& c :
       {Case{DType::bfloat16, DType::bfloat16, 20485, 20.0}, Case{DType::bfloat16, DType::float32, 9003, 0.0},
        Case{DType::float16, DType::float32, 5125, 2.0}, Case{DType::float32, DType::float32, 10241, 0.0},
        Case{DType::float32, DType::float32, 4099, 2.0}}) {
    CrossEntropyCase test_case = make_case(c.dtype, {rows, c.columns}, 1, kEverything);
    test_case.weight_dtype = c.weight;
    test_case.options.softcap = c.softcap;
    test_case.options.label_smoothing = 0.1;
    test_case.runs_in_place = false;
    test_case.logits_placement = with_strides({(c.columns + 7) / 8 * 8, 1});
    check_cross_entropy(test_case);
  }
}

TEST_P(CrossEntropy, ExtremeScalesAndSoftcapsMatchTheOracle) {
  // A huge softcap has no effect. A scale and a softcap work even if float32 cannot represent their powers.
  for (const DType dtype : {DType::bfloat16, DType::float32, DType::float64}) {
    for (const auto& [scale, softcap] : std::vector<std::pair<double, double>>{
             {1.0, 1e4}, {1.0, 1e9}, {1.0, 1e30}, {1.0, 3e38}, {1e-4, 1.0}, {1e4, 1.0}, {1e8, 30.0}, {1e-9, 1e-8}}) {
      for (const int axis : {1, 0}) {
        CrossEntropyCase test_case = make_case(dtype, axis == 1 ? Dims{4, 3001} : Dims{3001, 4}, axis, kEverything);
        test_case.options.scale = scale;
        test_case.options.softcap = softcap;
        check_cross_entropy(test_case);
      }
    }
  }
}

TEST_P(CrossEntropy, AScaledLogitBeyondAllNumbersIsInfinite) {
  for (const int axis : {1, 0}) {
    CrossEntropyRun run({.dtype = DType::float32,
                         .shape = axis == 1 ? Dims{1, 4} : Dims{4, 1},
                         .class_axis = axis,
                         .options = {.reduction = Reduction::none, .scale = 10.0},
                         .value = [](std::int64_t i) { return i == 0 ? 1e38 : static_cast<double>(i); },
                         .target = [](std::int64_t) { return 1.0; }});
    run.run();
    EXPECT_EQ(run.results.lse.get(0), kInfinity);
    EXPECT_EQ(run.results.loss.get(0), kInfinity);
  }
}

TEST_P(CrossEntropy, InPlaceLongRowsMatchTheOracle) {
  // A GPU keeps such a row in pieces, one in each block of a cluster.
  struct Case {
    DType dtype;
    std::int64_t columns;
    std::int64_t misalignment;  ///< of the first row
    const Kind* kind;
    const char* reason;
  };
  const std::vector<Case> cases = {
      {DType::bfloat16, 5003, 1, &kEverything, "with every option: two passes"},
      {DType::float16, 30000, 3, &kPlain, "two pieces"},
      {DType::bfloat16, 40000, 0, &kPlain, "four pieces of whole vectors, the last one shorter"},
      {DType::bfloat16, 40001, 7, &kPlain, "the same with elements before the first vector and behind the last"},
      {DType::bfloat16, 40000, 7, &kSoft, "soft targets"},
      {DType::bfloat16, 65536, 0, &kPlain, "four pieces of equal size"},
      {DType::bfloat16, 65537, 1, &kPlain, "eight would be begun by one element"},
      {DType::bfloat16, 129919, 5, &kPlain, "a vocabulary of 129919: eight pieces, no row starts as the one before"},
      {DType::float32, 129919, 1, &kPlain, "eight larger pieces"},
      {DType::float32, 300001, 3, &kPlain, "pieces that fill the shared memory of a multiprocessor"},
      {DType::float32, 420000, 0, &kPlain, "a row beyond all pieces"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.reason);
    CrossEntropyCase test_case = make_case(c.dtype, {3, c.columns}, 1, *c.kind);
    test_case.logits_placement = contiguous_at(c.misalignment);
    test_case.grad_logits_placement = contiguous_at(c.misalignment);
    test_case.has_normalizer = c.misalignment == 1;
    if (c.kind != &kSoft) {
      // The targets are the elements that a cluster treats apart: the first and the last of a row.
      test_case.target = [=](std::int64_t row) {
        return row == 0   ? static_cast<double>(c.columns - 1)
               : row == 1 ? static_cast<double>(CrossEntropyOptions{}.ignore_index)
                          : 0.0;
      };
    }
    check_cross_entropy(test_case);
    if (device().type == DeviceType::cpu) continue;
    test_case.wants_sum_sq_in_place = true;  // two passes
    check_cross_entropy(test_case);
  }
}

TEST_P(CrossEntropy, AGradientIsRescaledWhereTheUpstreamGradientIsKnownLater) {
  struct Case {
    Dims shape;
    int axis;
    Placement placement;
    const char* reason;
  };
  const std::vector<Case> cases = {
      {{6, 40}, 1, {}, "short rows"},
      {{7, 5003}, 1, contiguous_at(1), "rows that start anywhere"},
      {{3, 100003}, 1, {}, "long rows"},
      {{300, 65}, 0, {}, "rows side by side"},
      {{5, 33, 7}, 1, {}, "the middle axis"},
      {{5, 600}, 1, with_strides({1900, 3}), "every third class"},
      {{2, 3, 2, 3, 2, 50}, 5, with_strides({2084, 691, 344, 113, 53, 1}), "many row axes"},
      {{0, 5}, 1, {}, "no rows"},
      {{5, 0}, 1, {}, "no classes"},
  };
  for (const auto& [c, dtype, is_per_row] : combine<Case, DType, bool>(cases, floating_point_dtypes(), {true, false})) {
    for (const DType factor_dtype : {accumulator_dtype(dtype), dtype}) {
      EXPECT_EQ(compare_rescale({device(), dtype, c.shape, c.axis, c.placement, is_per_row, factor_dtype}).failure, "")
          << c.reason;
    }
  }
}

TEST_P(CrossEntropy, ARescaledNaNIsNaN) {
  for (const DType dtype : floating_point_dtypes()) {
    for (const Dims& shape : {Dims{4, 3}, Dims{4, 40}, Dims{4, 9001}}) {
      TestTensor gradient(device(), dtype, shape);
      gradient.fill([](std::int64_t i) { return i % 5 == 2 ? std::nan("") : 1.0; });
      TestTensor half(device(), accumulator_dtype(dtype), {});
      half.fill([](std::int64_t) { return 0.5; });
      cross_entropy_rescale({.grad_logits = gradient.view(), .grad_loss = half.view()});
      runtime::synchronize(device());
      gradient.download();
      for (std::int64_t i = 0; i < shape[0] * shape[1]; ++i) {
        if (i % 5 == 2) {
          ASSERT_TRUE(std::isnan(gradient.get(i))) << "element " << i;
        } else {
          ASSERT_EQ(gradient.get(i), 0.5) << "element " << i;
        }
      }
    }
  }
}

TEST_P(CrossEntropy, RowsThatAreRescaledByOneKeepTheirBits) {
  // The gradient has NaN with a payload that a product would not keep.
  for (const Dims& shape : {Dims{4, 40}, Dims{4, 9001}}) {
    TestTensor gradient(device(), DType::float32, shape);
    gradient.fill([](std::int64_t i) { return i % 5 == 2 ? std::nan("123") : normal(i); });
    TestTensor one(device(), DType::float32, {});
    one.fill([](std::int64_t) { return 1.0; });
    const std::vector<unsigned char> before = gradient.bytes();
    cross_entropy_rescale({.grad_logits = gradient.view(), .grad_loss = one.view()});
    runtime::synchronize(device());
    gradient.download();
    EXPECT_EQ(gradient.bytes(), before);
  }
}

TEST_P(CrossEntropy, TheBackwardOverTheLogitsIsTheBackwardBesideThem) {
  for (const auto& [shape, axis] : std::vector<std::pair<Dims, int>>{
           {{6, 40}, 1}, {{6, 5003}, 1}, {{2, 100003}, 1}, {{500, 64}, 0}, {{5, 33, 7}, 1}}) {
    for (const auto& [dtype, kind] :
         combine<DType, Kind>({DType::bfloat16, DType::float32}, {kPlain, kEverything, kSoft})) {
      CrossEntropyRun run(make_case(dtype, shape, axis, kind));
      cross_entropy_forward(run.forward_args());
      CrossEntropyBackwardArgs args = run.backward_args();
      cross_entropy_backward(args);
      args.logits = args.grad_logits = run.in_place.view();
      cross_entropy_backward(args);
      run.download();
      EXPECT_EQ(run.in_place.bytes(), run.grad_logits.bytes()) << check::to_string(shape);
      EXPECT_NE(run.in_place.bytes(), run.logits.bytes()) << check::to_string(shape);
    }
  }
}

TEST_P(CrossEntropy, ABackwardTwiceFromOneForwardGivesTheSameBits) {
  CrossEntropyRun run(make_case(DType::bfloat16, {6, 5003}, 1, kEverything));
  cross_entropy_forward(run.forward_args());
  cross_entropy_backward(run.backward_args());
  run.download();
  const std::vector<unsigned char> first = run.grad_logits.bytes();
  cross_entropy_backward(run.backward_args());
  run.download();
  EXPECT_EQ(run.grad_logits.bytes(), first);
}

}  // namespace
}  // namespace eaves::testing
