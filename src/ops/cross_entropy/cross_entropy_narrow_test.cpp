// A gradient of 16 bits over float32 logits, in the first half of each row: a store may overwrite logits that have not
// been read yet. The tests check values, canaries behind the rows, and whole calls of the backward and of
// forward_backward. Refused arguments are in cross_entropy_errors_test.cpp.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/numeric.h"
#include "eaves/cross_entropy.h"
#include "ops/cross_entropy/cross_entropy_test_case.h"
#include "testing/calls.h"
#include "testing/cases.h"
#include "testing/devices.h"

namespace eaves::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
const std::vector<DType> kNarrowDtypes = {DType::bfloat16, DType::float16};
const std::vector<Reduction> kReductions = {Reduction::none, Reduction::sum, Reduction::mean};

class CrossEntropyNarrow : public OnEachDevice {};
EAVES_EACH_DEVICE(CrossEntropyNarrow);

double normal(std::int64_t i) { return 3.0 * random_normal(57, static_cast<std::uint64_t>(i)); }

/// Rows that start on 16 bytes, with `gap` vectors of 16 bytes between them.
Placement aligned_rows(std::int64_t columns, std::int64_t gap = 0) {
  return with_strides({((columns + 3) / 4 + gap) * 4, 1});
}

CrossEntropyCase narrow_case(Device device, DType dtype, std::int64_t rows, std::int64_t columns,
                             std::int64_t gap = 0) {
  return {.device = device,
          .narrow_dtype = dtype,
          .shape = {rows, columns},
          .logits_placement = aligned_rows(columns, gap),
          .value = normal};
}

/// The case without options, with each option alone, and with all of them.
std::vector<CrossEntropyCase> with_each_option(const CrossEntropyCase& plain) {
  std::vector<CrossEntropyCase> cases = {plain};
  CrossEntropyCase all = plain;
  const auto add = [&](auto change) {
    cases.push_back(plain);
    change(cases.back());
    change(all);
  };
  add([](CrossEntropyCase& c) { c.weight_dtype = DType::float32; });
  add([](CrossEntropyCase& c) { c.options.label_smoothing = 0.2; });
  add([](CrossEntropyCase& c) { c.options.softcap = 10.0; });
  add([](CrossEntropyCase& c) { c.options.scale = 0.7; });
  add([](CrossEntropyCase& c) { c.options.z_loss_weight = 0.01; });
  add([](CrossEntropyCase& c) { c.has_grad_lse = true; });
  add([](CrossEntropyCase& c) { c.has_grad_entropy = true; });
  add([](CrossEntropyCase& c) { c.has_normalizer = true; });
  add([](CrossEntropyCase& c) { c.options.ignore_index = 1; });
  cases.push_back(all);
  return cases;
}

struct Size {
  std::int64_t rows;
  std::int64_t columns;
  const char* reason;
};

const std::vector<Size> kSizes = {
    {40, 1, "half a float32"},
    {40, 2, "one float32: all of the gradient lies over the first logit"},
    {39, 3, "its last element shares a float32 with nothing"},
    {40, 7, "one short of a vector of 16-bit elements"},
    {1, 8, "one such vector, over the first of two of float32"},
    {40, 9, "one more"},
    {17, 31, "one short of what a CPU reads before it writes (AVX2)"},
    {33, 1000, "several rounds of a CPU vector, with a tail"},
    {5, 1024, "whole vectors alone"},
    {7, 2048, "8 KiB of float32, 4 KiB of 16 bits"},
    {7, 2049, "one more"},
    {5, 8191, "one short of blocks of a CPU, and of 16 KiB of 16-bit elements"},
    {5, 8192, "whole blocks alone"},
    {5, 8193, "one more"},
    {3, 32768, "the smallest piece of a row that a CPU shares among threads"},
    {2, 50257, "the vocabulary of GPT-2: odd"},
    {1, 131072, "one row in pieces, whose statistics meet before anything is written"},
};

TEST_P(CrossEntropyNarrow, EveryLengthMatchesTheOracle) {
  for (const auto& [size, dtype, gap] : combine<Size, DType, std::int64_t>(kSizes, kNarrowDtypes, {0, 1, 5})) {
    SCOPED_TRACE(size.reason);
    check_cross_entropy(narrow_case(device(), dtype, size.rows, size.columns, gap));
  }
}

TEST_P(CrossEntropyNarrow, ManyLongRowsMatchTheOracle) {
  check_cross_entropy(narrow_case(device(), DType::bfloat16, 40, 131072, 2));
  check_cross_entropy(narrow_case(device(), DType::float16, 300, 8200));  // too many rows for pieces
}

TEST_P(CrossEntropyNarrow, EveryOptionMatchesTheOracle) {
  for (const auto& [size, reduction, targets] :
       combine<Size, Reduction, DType>({kSizes[0], kSizes[2], kSizes[6], kSizes[7], kSizes[9], kSizes[13]}, kReductions,
                                       {DType::int64, DType::float32})) {
    SCOPED_TRACE(size.reason);
    const bool is_bfloat16 = (reduction == Reduction::sum) == (targets == DType::int64);
    const DType dtype = is_bfloat16 ? DType::bfloat16 : DType::float16;
    CrossEntropyCase plain = narrow_case(device(), dtype, size.rows, size.columns, 1);
    plain.options.reduction = reduction;
    plain.targets_dtype = targets;
    plain.targets_placement = targets == DType::float32 ? contiguous_at(1) : Placement{};
    for (const CrossEntropyCase& test_case : with_each_option(plain)) {
      check_cross_entropy(test_case);
      if (HasFailure()) return;  // one failure is enough to read
    }
  }
}

TEST_P(CrossEntropyNarrow, LongRowsInPiecesMatchTheOracleWithEveryOption) {
  for (const CrossEntropyCase& test_case : with_each_option(narrow_case(device(), DType::bfloat16, 2, 131075))) {
    check_cross_entropy(test_case);
  }
}

TEST_P(CrossEntropyNarrow, ATargetMayBeAnyClass) {
  // The gradients of two other classes overwrite the target's logit, before or after its own gradient is written.
  constexpr std::int64_t kColumns = 300;
  for (const auto& [dtype, smoothing] : combine<DType, double>(kNarrowDtypes, {0.0, 0.1})) {
    CrossEntropyCase test_case = narrow_case(device(), dtype, kColumns, kColumns);
    test_case.options.label_smoothing = smoothing;
    test_case.target = [](std::int64_t row) { return static_cast<double>(row); };
    check_cross_entropy(test_case);
  }
}

TEST_P(CrossEntropyNarrow, RowsMayLieInAnyOrderAndOnSeveralAxes) {
  const std::pair<Dims, Placement> layouts[] = {
      {{5, 75}, with_strides({-80, 1})},                // backwards
      {{3, 4, 75}, with_strides({4 * 76, 76, 1})},      // axes that merge
      {{3, 4, 75}, with_strides({76, 3 * 76 + 4, 1})},  // axes that do not
      {{1, 75}, with_strides({7, 1})},                  // the stride of an axis of size 1 is not used
      {{4, 1, 75}, with_strides({100, 3, 1})},
      {{75}, with_strides({1})},
  };
  for (const auto& [shape, placement] : layouts) {
    for (const auto& [dtype, class_axis, smoothing] :
         combine<DType, int, double>(kNarrowDtypes, {-1, shape.size() - 1}, {0.0, 0.1})) {
      CrossEntropyCase test_case = narrow_case(device(), dtype, 1, 1);
      test_case.shape = shape;
      test_case.class_axis = class_axis;
      test_case.logits_placement = placement;
      test_case.options.label_smoothing = smoothing;
      test_case.options.reduction = Reduction::none;
      check_cross_entropy(test_case);
    }
  }
}

TEST_P(CrossEntropyNarrow, InfinitiesAndNaNsFollowTheHeader) {
  struct Special {
    double first;
    double second;
    double others;
  };
  const Special specials[] = {
      {-kInfinity, -kInfinity, -kInfinity},
      {-kInfinity, -kInfinity, 0.5},
      {0.25, 0.25, -kInfinity},
      {kInfinity, kInfinity, 0.5},
      {kInfinity, -kInfinity, 0.5},
      {kNaN, kNaN, 0.5},
      {kNaN, kNaN, kNaN},
      {kNaN, kInfinity, 0.5},
      {1e30, -1e30, 0.5},
  };
  constexpr std::int64_t kRows = std::size(specials);
  for (const auto& [dtype, columns] : combine<DType, std::int64_t>(kNarrowDtypes, {2, 8, 40, 1000, 9000})) {
    for (const auto& [at, smoothing] :
         combine<std::int64_t, double>({std::int64_t{0}, columns / 2 - 1, columns - 2}, {0.0, 0.1})) {
      CrossEntropyCase test_case = narrow_case(device(), dtype, kRows, columns);
      test_case.options.reduction = Reduction::none;
      test_case.options.label_smoothing = smoothing;
      test_case.value = [&](std::int64_t i) {
        const Special& special = specials[i / columns];
        if (i % columns == at) return special.first;
        return i % columns == at + 1 ? special.second : special.others;
      };
      test_case.target = [=](std::int64_t row) { return static_cast<double>(row % 2 == 0 ? at : columns - 1); };
      check_cross_entropy(test_case);
    }
  }
}

TEST_P(CrossEntropyNarrow, IgnoredRowsHaveNoGradientWhateverTheyHold) {
  for (const auto& [held, columns, smoothing] :
       combine<double, std::int64_t, double>({kNaN, kInfinity, 1e30}, {3, 40, 1000, 9000, 131075}, {0.0, 0.1})) {
    CrossEntropyCase test_case = narrow_case(device(), DType::bfloat16, 4, columns);
    test_case.options.label_smoothing = smoothing;
    test_case.value = [=](std::int64_t i) { return i / columns % 2 == 0 ? held : normal(i); };
    test_case.target = [](std::int64_t row) { return row % 2 == 0 ? -100.0 : 1.0; };
    check_cross_entropy(test_case);
  }
}

TEST_P(CrossEntropyNarrow, WithoutRowsOrClassesThereIsNothingToWrite) {
  for (const auto& [shape, targets] :
       combine<Dims, DType>({Dims{0, 7}, Dims{3, 0}, Dims{0, 0}}, {DType::int64, DType::float32})) {
    if (shape == Dims{3, 0} && targets == DType::int64) continue;  // refused: no target is legal
    for (const auto& [reduction, smoothing] : combine<Reduction, double>(kReductions, {0.0, 0.1})) {
      CrossEntropyCase test_case = narrow_case(device(), DType::bfloat16, 1, 1);
      test_case.shape = shape;
      test_case.logits_placement = {};
      test_case.targets_dtype = targets;
      test_case.options.reduction = reduction;
      test_case.options.label_smoothing = smoothing;
      test_case.target = [](std::int64_t) { return -100.0; };
      check_cross_entropy(test_case);
    }
  }
}

/// Elements [first, first + size) of the last axis.
TensorView classes_of(TensorView view, std::int64_t first, std::int64_t size) {
  const int axis = view.shape.size() - 1;
  view.data = static_cast<char*>(view.data) + first * static_cast<std::int64_t>(size_of(view.dtype));
  view.shape[axis] = size;
  return view;
}

/// Moves the gradient of columns [first, first + size) from the first half of the shard's row to its place in the
/// gradient of all classes.
void gather_shard(const CrossEntropyRun& run, std::int64_t first, std::int64_t size) {
  const TensorView logits = run.grad_logits.host();
  for (std::int64_t row = 0; row < logits.shape[0]; ++row) {
    char* start = static_cast<char*>(logits.data) + row * logits.strides[0] * 4;
    std::memmove(start + 2 * first, start + 4 * first, static_cast<std::size_t>(2 * size));
  }
}

TEST_P(CrossEntropyNarrow, EachShardOfAVocabularyHasItsGradientInItsOwnFirstHalf) {
  constexpr std::int64_t kColumns = 5003;
  constexpr std::int64_t kStarts[] = {0, 4, 1000, 4096, kColumns};
  for (const DType dtype : kNarrowDtypes) {
    for (CrossEntropyCase test_case : with_each_option(narrow_case(device(), dtype, 9, kColumns, 1))) {
      test_case.runs_in_place = false;
      SCOPED_TRACE(description_of(test_case));
      CrossEntropyRun run(test_case);
      cross_entropy_forward(run.forward_args());
      for (std::size_t shard = 0; shard + 1 < std::size(kStarts); ++shard) {
        const std::int64_t first = kStarts[shard];
        const std::int64_t size = kStarts[shard + 1] - first;
        CrossEntropyBackwardArgs args = run.backward_args();
        args.logits = classes_of(args.logits, first, size);
        args.grad_logits = narrow_view_of(args.logits, dtype);
        if (args.class_weight.is_present) args.class_weight = classes_of(args.class_weight, first, size);
        args.first_class = first;
        args.classes = kColumns;
        cross_entropy_backward(args);
      }
      run.download();
      EXPECT_EQ(run.grad_logits.canary_damage(), "");
      for (std::size_t shard = 0; shard + 1 < std::size(kStarts); ++shard) {
        gather_shard(run, kStarts[shard], kStarts[shard + 1] - kStarts[shard]);
      }
      EXPECT_EQ(CrossEntropyComparison(run).compare(), "");
    }
  }
}

TEST_P(CrossEntropyNarrow, ItsViewCanBeRescaled) {
  for (const DType dtype : kNarrowDtypes) {
    CrossEntropyCase test_case = narrow_case(device(), dtype, 6, 1003, 1);
    test_case.options.reduction = Reduction::none;
    CrossEntropyRun plain(test_case), rescaled(test_case);
    plain.run();
    cross_entropy_forward_backward(rescaled.in_place_args());
    TestTensor factors(device(), DType::float32, {6});
    factors.fill([](std::int64_t row) { return row % 2 == 0 ? 1.0 : 2.0; });
    cross_entropy_rescale({.grad_logits = rescaled.gradient_of(rescaled.in_place.view()), .grad_loss = factors.view()});
    runtime::synchronize(device());
    rescaled.in_place.download();
    EXPECT_EQ(rescaled.in_place.canary_damage(), "");
    for (std::int64_t row = 0; row < 6; ++row) {
      std::vector<double> expected = reference::elements_along(plain.gradient_of(plain.in_place.host()), 1, row);
      for (double& value : expected) value *= factors.get(row);
      EXPECT_EQ(reference::elements_along(rescaled.gradient_of(rescaled.in_place.host()), 1, row), expected);
    }
  }
}

std::vector<CrossEntropyCase> cases_of_every_kind(Device device) {
  std::vector<CrossEntropyCase> cases;
  for (const auto& [rows, columns] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{50, 40}, {50, 3001}, {2, 400003}, {70, 30001}}) {
    for (const DType dtype : kNarrowDtypes) {
      CrossEntropyCase plain = narrow_case(device, dtype, rows, columns, 1);
      cases.push_back(plain);
      plain.options = {.label_smoothing = 0.1, .softcap = 20.0, .z_loss_weight = 0.01};
      plain.weight_dtype = DType::float32;
      plain.has_grad_entropy = true;
      cases.push_back(plain);
    }
  }
  return cases;
}

TEST_P(CrossEntropyNarrow, TwoRunsAreBitwiseEqual) {
  for (const CrossEntropyCase& test_case : cases_of_every_kind(device())) {
    expect_two_runs_equal<CrossEntropyRun>(test_case, description_of(test_case));
  }
}

class CrossEntropyNarrowOnCpu : public ::testing::Test {};

TEST_F(CrossEntropyNarrowOnCpu, TheNumberOfThreadsAndAPoolOfTheCallerChangeNoBit) {
  for (const CrossEntropyCase& test_case : cases_of_every_kind(kCpu)) {
    expect_equal_on_any_threads<CrossEntropyRun>(test_case, description_of(test_case));
  }
}

/// For every class of every row, the narrow gradient is the float32 gradient rounded once.
template <typename T>
void expect_rounded(const CrossEntropyRun& wide, const CrossEntropyRun& narrow) {
  for (std::int64_t row = 0; row < wide.test_case().shape[0]; ++row) {
    const auto expected = reference::elements_along(wide.in_place.host(), 1, row);
    const auto actual = reference::elements_along(narrow.gradient_of(narrow.in_place.host()), 1, row);
    for (std::size_t v = 0; v < expected.size(); ++v) {
      const double rounded = load_as_accumulator(round_to<T>(static_cast<float>(expected[v])));
      ASSERT_EQ(actual[v], rounded) << "row " << row << ", class " << v;
    }
  }
}

TEST_F(CrossEntropyNarrowOnCpu, TheResultsAreThoseOfAGradientInFloat32AndWithOptionsTheGradientIsItsRounding) {
  for (const auto& [dtype, columns] : combine<DType, std::int64_t>(kNarrowDtypes, {9, 1000, 33003})) {
    for (const CrossEntropyCase& narrow_option : with_each_option(narrow_case(kCpu, dtype, 3, columns))) {
      SCOPED_TRACE(description_of(narrow_option));
      CrossEntropyCase wide_option = narrow_option;
      wide_option.narrow_dtype = {};
      CrossEntropyRun narrow(narrow_option), wide(wide_option);
      narrow.run();
      wide.run();
      EXPECT_TRUE(narrow.results.equal(wide.results));
      EXPECT_TRUE(narrow.results_in_place.equal(wide.results_in_place));
      const CrossEntropyOptions& options = narrow_option.options;
      // Without these options the exponential is the shorter one for results of 16 bits.
      if (options.label_smoothing == 0.0 && options.softcap == 0.0 && options.scale == 1.0) continue;
      dtype == DType::float16 ? expect_rounded<float16>(wide, narrow) : expect_rounded<bfloat16>(wide, narrow);
    }
  }
}

class CrossEntropyNarrowOnGpu : public OnGpu {};

TEST_F(CrossEntropyNarrowOnGpu, ACudaGraphReplaysIt) {
  for (const CrossEntropyCase& test_case : cases_of_every_kind(kCuda)) {
    expect_replayed_by_a_graph<CrossEntropyRun>(test_case, description_of(test_case), 1);  // overwrites its input
  }
}

}  // namespace
}  // namespace eaves::testing
