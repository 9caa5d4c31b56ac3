// A head cut into shards, against the oracle of the whole head: the statistics of each shard, their merge, and the
// gradients of each shard by both algorithms. The shards are computed one after the other, so the numbers that they
// exchange exist before.
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "eaves/linear_cross_entropy.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_test_case.h"
#include "testing/cases.h"
#include "testing/devices.h"
#include "testing/refusals.h"

namespace eaves::testing {
namespace {

/// Row weights without zeros: the callbacks of a shard count the rows that count, and here these are all rows.
double not_zero(std::int64_t row) { return 0.5 + 0.25 * static_cast<double>(row % 5); }

class LinearCrossEntropyShards : public OnEachDevice {};
EAVES_EACH_DEVICE(LinearCrossEntropyShards);

class LinearCrossEntropyFusedShardsOnGpu : public OnGpuWithFusedPath {};

constexpr std::int64_t kS = kCrossEntropyStatistics;

/// The classes [first, first + size) of a tensor along `axis`; an absent tensor stays absent.
TensorView part_of(TensorView view, std::int64_t first, std::int64_t size, int axis = 0) {
  if (!view.is_present) return view;
  const std::int64_t bytes = first * view.strides[axis] * static_cast<std::int64_t>(size_of(view.dtype));
  view.data = static_cast<char*>(view.data) + bytes;
  view.shape[axis] = size;
  return view;
}

LinearCrossEntropyInputs part_of(LinearCrossEntropyInputs inputs, std::int64_t first, std::int64_t size) {
  inputs.head = part_of(inputs.head, first, size);
  inputs.bias = part_of(inputs.bias, first, size);
  inputs.class_weight = part_of(inputs.class_weight, first, size);
  if (is_floating_point(inputs.targets.dtype)) {
    inputs.targets = part_of(inputs.targets, first, size, inputs.targets.shape.size() - 1);
  }
  return inputs;
}

/// Computes all results of a run by shards, in the run's buffers.
class Shards {
 public:
  Shards(LinearCrossEntropyRun& run, const std::vector<std::int64_t>& sizes)
      : run_(run),
        case_(run.test_case()),
        sizes_(sizes),
        count_(static_cast<std::int64_t>(sizes.size())),
        rows_(run.results.lse.host().element_count()),
        statistics_(case_.device, run.result_dtype(), {count_, rows_, kS}),
        own_(case_.device, run.result_dtype(), {rows_, kS}),
        gathered_(case_.device, run.result_dtype(), {count_, rows_, kS}) {}

  void run() {
    const LinearCrossEntropyForwardArgs whole = run_.forward_args();
    each([&](std::int64_t index, const LinearCrossEntropyShard& shard, std::int64_t size) {
      linear_cross_entropy_shard_forward(
          {.inputs = part_of(whole.inputs, shard.first_class, size),
           .shard = shard,
           .statistics = TensorView::contiguous(rows_at(statistics_, index * rows_), run_.result_dtype(), own_shape(),
                                                case_.device)});
    });
    merge(whole);
    backward();
    at_once();
    run_.download();
  }

  int fused_shards() const { return fused_shards_; }

 private:
  template <typename Body>
  void each(Body&& body) {
    std::int64_t first = 0;
    for (std::int64_t index = 0; index < count_; ++index) {
      const std::int64_t size = sizes_[static_cast<std::size_t>(index)];
      const std::int64_t most = *std::max_element(sizes_.begin(), sizes_.end());
      body(index,
           LinearCrossEntropyShard{.first_class = first,
                                   .classes = case_.classes,
                                   .most_classes = most,
                                   .is_for_mean_logit = case_.wants_mean_logit,
                                   .is_for_argmax_or_sum_sq = case_.wants_all_of_row},
           size);
      first += size;
    }
    ASSERT_EQ(first, case_.classes);
  }

  Dims own_shape() const {
    Dims shape = case_.row_shape;
    shape.push_back(kS);
    return shape;
  }

  /// The address of the statistics from this row on.
  void* rows_at(const TestTensor& tensor, std::int64_t row) const {
    return static_cast<char*>(tensor.view().data) + row * kS * static_cast<std::int64_t>(size_of(run_.result_dtype()));
  }

  void merge(const LinearCrossEntropyForwardArgs& whole) {
    Dims shape = {count_};
    for (const std::int64_t size : own_shape()) shape.push_back(size);
    const LinearCrossEntropyOutputs& to = whole.outputs;
    cross_entropy_merge(
        {.statistics = TensorView::contiguous(rows_at(statistics_, 0), run_.result_dtype(), shape, case_.device),
         .targets = run_.is_soft() ? TensorView{} : whole.inputs.targets,
         .row_weight = whole.inputs.row_weight,
         .normalizer = whole.normalizer,
         .options = case_.options,
         .classes = case_.classes,
         .has_class_weight = whole.inputs.class_weight.is_present,
         .has_soft_targets = run_.is_soft(),
         .skips_ignored = true,
         .loss = to.loss,
         .lse = to.lse,
         .argmax = to.argmax,
         .entropy = to.entropy,
         .sum_sq = to.sum_sq,
         .mean_logit = to.mean_logit,
         .z_loss = to.z_loss,
         .target_mass = to.target_mass,
         .divisor = to.divisor});
  }

  /// The gradients of a shard, with a tensor for its part of grad_hidden.
  LinearCrossEntropyGradients part_of_gradients(LinearCrossEntropyGradients gradients, std::int64_t first,
                                                std::int64_t size) {
    if (gradients.grad_hidden.is_present) {
      // In the result dtype, so that parts are not rounded before they are added.
      parts_.push_back(std::make_unique<TestTensor>(case_.device, run_.result_dtype(), gradients.grad_hidden.shape));
      parts_.back()->fill([](std::int64_t) { return 0.0; });  // a shard without classes leaves the zeros
      gradients.grad_hidden = parts_.back()->view();
    }
    gradients.grad_head = part_of(gradients.grad_head, first, size);
    gradients.grad_bias = part_of(gradients.grad_bias, first, size);
    return gradients;
  }

  /// Writes the sum of the parts.
  void add_parts(TestTensor& grad_hidden) {
    runtime::synchronize(case_.device);
    for (auto& part : parts_) {
      part->download();
      EXPECT_EQ(part->canary_damage(), "") << "around a shard's grad_hidden";
    }
    if (!parts_.empty()) {
      grad_hidden.fill([&](std::int64_t i) {
        double sum = 0.0;
        for (auto& part : parts_) sum += part->get(i);
        return sum;
      });
    }
    parts_.clear();
  }

  /// The chunks in a shard's callbacks are the same for all shards.
  void expect_chunks_of_all(const std::vector<std::pair<std::int64_t, std::int64_t>>& own, std::int64_t shard) {
    if (shard == 0) chunks_ = own;
    EXPECT_EQ(own, chunks_) << "shard " << shard;
  }

  void backward() {
    std::int64_t rows_told = 0;
    each([&](std::int64_t index, LinearCrossEntropyShard shard, std::int64_t size) {
      std::vector<std::pair<std::int64_t, std::int64_t>> chunks;
      LinearCrossEntropyBackwardArgs args = run_.backward_args();
      args.inputs = part_of(args.inputs, shard.first_class, size);
      args.gradients = part_of_gradients(args.gradients, shard.first_class, size);
      shard.grad_hidden_is_complete = [&](std::int64_t first, std::int64_t rows) {
        EXPECT_EQ(first, rows_told % rows_);
        rows_told += rows;
        chunks.emplace_back(first, rows);
      };
      args.shard = shard;
      linear_cross_entropy_backward(args);
      if (args.gradients.grad_hidden.is_present) expect_chunks_of_all(chunks, index);
    });
    EXPECT_EQ(rows_told, count_ * rows_);
    add_parts(run_.gradients.hidden);
  }

  void at_once() {
    each([&](std::int64_t index, LinearCrossEntropyShard shard, std::int64_t size) {
      std::vector<std::pair<std::int64_t, std::int64_t>> chunks;
      LinearCrossEntropyForwardBackwardArgs args = run_.at_once_args();
      args.forward.inputs = part_of(args.forward.inputs, shard.first_class, size);
      args.gradients = part_of_gradients(args.gradients, shard.first_class, size);
      shard.shards = count_;
      shard.statistics = own_.view();
      shard.gathered = gathered_.view();
      // NaN until finish_gather(): the call must not read `gathered` before.
      shard.gather = [&](std::int64_t first, std::int64_t rows) {
        chunks.emplace_back(first, rows);
        runtime::synchronize(case_.device);
        gathered_.fill([](std::int64_t) { return std::numeric_limits<double>::quiet_NaN(); });
      };
      shard.finish_gather = [&](std::int64_t first, std::int64_t rows) {
        EXPECT_EQ(chunks.back(), std::pair(first, rows));
        const auto bytes = static_cast<std::size_t>(rows * kS) * size_of(run_.result_dtype());
        runtime::synchronize(case_.device);
        for (std::int64_t of = 0; of < count_; ++of) {
          runtime::copy(rows_at(gathered_, count_ * first + of * rows), case_.device,
                        rows_at(statistics_, of * rows_ + first), case_.device, bytes);
        }
      };
      args.shard = shard;
      const std::size_t stated = linear_cross_entropy_forward_backward_workspace_bytes(args);
      TestTensor workspace(case_.device, DType::float32, {static_cast<std::int64_t>(stated / sizeof(float)) + 64});
      ExecutionContext context;
      context.workspace = {workspace.view().data, stated};
      linear_cross_entropy_forward_backward(args, context);
      expect_chunks_of_all(chunks, index);
      fused_shards_ += make_problem(args).is_fused ? 1 : 0;
    });
    add_parts(run_.gradients_at_once.hidden);
  }

  LinearCrossEntropyRun& run_;
  const LinearCrossEntropyCase& case_;
  std::vector<std::int64_t> sizes_;
  std::int64_t count_, rows_;
  std::vector<std::pair<std::int64_t, std::int64_t>> chunks_;
  int fused_shards_ = 0;  ///< shards on the fused path with loss and gradients at once
  TestTensor statistics_, own_, gathered_;
  std::vector<std::unique_ptr<TestTensor>> parts_;
};

/// `fused` is the number of shards that take the fused path.
void check_shards(const LinearCrossEntropyCase& test_case, const std::vector<std::int64_t>& sizes, int fused = 0) {
  SCOPED_TRACE(description_of(test_case) + ", " + std::to_string(sizes.size()) + " shards");
  LinearCrossEntropyRun run(test_case);
  Shards shards(run, sizes);
  shards.run();
  EXPECT_EQ(shards.fused_shards(), fused);
  if (::testing::Test::HasFatalFailure()) return;
  for (auto& [name, tensor] : run.outputs()) EXPECT_EQ(tensor->canary_damage(), "") << "around " << name;
  LinearCrossEntropyComparison comparison(run);
  EXPECT_EQ(comparison.compare(), "");
}

/// No row is ignored, so the statistics of the rows that count are adjacent.
LinearCrossEntropyCase case_of(Device device, DType dtype) {
  LinearCrossEntropyCase c{.device = device, .dtype = dtype, .row_shape = {5, 6}, .classes = 120};
  c.target = [](std::int64_t row) { return static_cast<double>(row * 37 % 120); };
  return c;
}

const std::vector<std::vector<std::int64_t>> kCuts = {{120}, {40, 80}, {7, 0, 64, 49}};

TEST_P(LinearCrossEntropyShards, TheirMergeAndTheirGradientsAreThoseOfTheWhole) {
  for (const auto& [dtype, sizes, reduction] : combine<DType, std::vector<std::int64_t>, Reduction>(
           floating_point_dtypes(), kCuts, {Reduction::none, Reduction::sum, Reduction::mean})) {
    LinearCrossEntropyCase c = case_of(device(), dtype);
    c.options.reduction = reduction;
    c.wants_mean_logit = true;
    check_shards(c, sizes);
    c.workspace_limit = 4000;  // several chunks
    c.bias_dtype = DType::float32;
    check_shards(c, sizes);
  }
}

TEST_P(LinearCrossEntropyShards, TakeEveryOption) {
  for (const auto& [dtype, reduction] :
       combine<DType, Reduction>(floating_point_dtypes(), {Reduction::none, Reduction::mean})) {
    LinearCrossEntropyCase c = case_of(device(), dtype);
    c.options = {.reduction = reduction, .label_smoothing = 0.1, .scale = 0.7, .softcap = 5.0, .z_loss_weight = 0.01};
    c.has_row_weight = true;
    c.row_weight = not_zero;
    c.has_normalizer = reduction == Reduction::mean;  // a shard does not have all weights
    c.class_weight_dtype = DType::float32;
    c.bias_dtype = dtype;
    c.accumulates = true;
    check_shards(c, kCuts[2]);
  }
}

TEST_P(LinearCrossEntropyShards, TakeSoftTargets) {
  for (const auto& [dtype, reduction, sizes] : combine<DType, Reduction, std::vector<std::int64_t>>(
           floating_point_dtypes(), {Reduction::none, Reduction::sum, Reduction::mean}, kCuts)) {
    LinearCrossEntropyCase c = case_of(device(), dtype);
    c.target = nullptr;
    c.targets_dtype = accumulator_dtype(dtype);
    c.options.reduction = reduction;
    check_shards(c, sizes);
    if (size_of(dtype) >= 4) {  // 16-bit gradients are rounded after each chunk, and the whole head has fewer chunks
      c.workspace_limit = 4000;
      check_shards(c, sizes);
      c.workspace_limit = 0;
    }
    c.options.label_smoothing = 0.1;
    c.options.softcap = 5.0;
    c.has_row_weight = true;
    c.row_weight = not_zero;
    c.class_weight_dtype = DType::float32;
    check_shards(c, sizes);
  }
}

/// Shards with 4096 classes and more take the fused path; a smaller shard keeps its logits in memory.
TEST_F(LinearCrossEntropyFusedShardsOnGpu, MatchTheWhole) {
  const auto check = [](auto change) {
    for (const Reduction reduction : {Reduction::none, Reduction::mean}) {
      LinearCrossEntropyCase c{.device = kCuda, .dtype = DType::bfloat16, .row_shape = {131}, .features = 40};
      c.classes = 8300;
      c.options.reduction = reduction;
      c.wants_all_of_row = false;
      c.target = [](std::int64_t row) { return static_cast<double>(row * 3701 % 8300); };
      change(c);
      for (const std::vector<std::int64_t>& sizes : {std::vector<std::int64_t>{4099, 0, 101, 4100}, {4200, 4100}}) {
        const bool suits = c.dtype == DType::bfloat16 && !c.class_weight_dtype;
        check_shards(c, sizes, suits ? 2 : 0);
      }
    }
  };
  check([](LinearCrossEntropyCase&) {});
  check([](LinearCrossEntropyCase& c) { c.dtype = DType::float16; });
  check([](LinearCrossEntropyCase& c) {
    c.options.scale = 0.7, c.options.z_loss_weight = 0.01, c.has_row_weight = true, c.accumulates = true;
    c.row_weight = not_zero;
    c.workspace_limit = 4 << 20;  // several chunks
    c.row_shape = {390};
  });
  check([](LinearCrossEntropyCase& c) { c.options.softcap = 5.0, c.bias_dtype = DType::float32; });
  check([](LinearCrossEntropyCase& c) {
    // One class has nearly all of a row, so the gradient of the bias consists of 131 numbers: too few to compare.
    c.deviation = 16.0, c.wanted.bias = false;
  });
  for (const double of_first : {20.0, -20.0}) {  // one shard has nearly all of the softmax
    check([=](LinearCrossEntropyCase& c) {
      c.bias_dtype = DType::float32;
      c.bias = [=](std::int64_t column) { return column < 4150 ? of_first : 0.0; };
    });
  }
  check([](LinearCrossEntropyCase& c) {
    c.target = [](std::int64_t row) { return row % 5 == 4 ? -100.0 : static_cast<double>(row * 3701 % 8300); };
  });
  check([](LinearCrossEntropyCase& c) {
    c.class_weight_dtype = DType::float32;
    c.has_normalizer = c.options.reduction == Reduction::mean;
  });
  check([](LinearCrossEntropyCase& c) {  // no class of the first shard counts
    c.bias_dtype = DType::float32;
    c.bias = [](std::int64_t column) { return column < 4200 ? -std::numeric_limits<double>::infinity() : 0.0; };
    c.target = [](std::int64_t row) { return static_cast<double>(4200 + row * 37 % 4100); };
  });
}

TEST_P(LinearCrossEntropyShards, RefuseWhatIsNoShard) {
  LinearCrossEntropyCase c = case_of(device(), DType::float32);
  LinearCrossEntropyRun run(c);
  const LinearCrossEntropyShard all{.first_class = 0, .classes = 120};
  TestTensor statistics(device(), DType::float32, {5, 6, kS});
  const auto forward = [&](const LinearCrossEntropyShard& shard) {
    return [&, shard] {
      linear_cross_entropy_shard_forward(
          {.inputs = run.forward_args().inputs, .shard = shard, .statistics = statistics.view()});
    };
  };
  const std::string op = "linear_cross_entropy_shard_forward: ";
  expect_message(forward({}), op + "shard.classes is 0, expected the number of classes of all shards");
  expect_message(forward({.first_class = 1, .classes = 120}),
                 op + "head begins with class 1 and has 120 classes, expected a part of 120 classes");
  const auto at_once = [&](const LinearCrossEntropyShard& shard) {
    return [&, shard] {
      LinearCrossEntropyForwardBackwardArgs args = run.at_once_args();
      args.shard = shard;
      linear_cross_entropy_forward_backward(args);
    };
  };
  LinearCrossEntropyShard shard = all;
  TestTensor gathered(device(), DType::float32, {5, 6, kS});
  shard.statistics = statistics.view();
  shard.gathered = gathered.view();
  expect_message(at_once(shard),
                 "linear_cross_entropy_forward_backward: shard.gather is missing, expected a function that gathers the "
                 "statistics of all shards");
  shard.shards = 2;
  expect_message(at_once(shard),
                 "linear_cross_entropy_forward_backward: shard.gathered has 300 elements, expected at least 600");
}

}  // namespace
}  // namespace eaves::testing
