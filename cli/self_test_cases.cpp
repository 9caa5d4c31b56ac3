// The cases of the self-test. The tests' own cases, oracles and tolerances do the work; here are the smallest sizes
// that reach each kernel. A comment names the kernel of a GPU; a CPU runs the same calls, and has fewer kernels.
#include "cli/self_test_cases.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <set>
#include <utility>

#include "cuda/cutlass/weight_gradient.h"
#include "cuda/device.h"
#include "cuda/exp_product.h"
#include "eaves/system.h"
#include "ops/cross_entropy/cross_entropy_case.h"
#include "ops/divergence/divergence_case.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_case.h"
#include "ops/logsumexp/logsumexp_case.h"
#include "ops/lrpe_cosine/lrpe_cosine_case.h"
#include "runtime/backend.h"
#include "runtime/runtime.h"
#include "testing/gemm_case.h"

namespace eaves::cli {
namespace {

using namespace testing;
using Cases = std::vector<SelfTestCase>;

const std::vector<DType> kDTypes = {DType::bfloat16, DType::float16, DType::float32};

/// A variable of the environment, for as long as this object lives. Every call reads them (core/environment.h).
class Setting {
 public:
  Setting(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    setenv(name, value, 1);
  }
  ~Setting() { before_ ? setenv(name_, before_->c_str(), 1) : unsetenv(name_); }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

/// Has this build, and this device, the products of src/cuda/cutlass?
bool has_fused_product([[maybe_unused]] Device device) {
  if constexpr (kHasCuda) return cuda::has_exp_product(device);
  return false;
}

/// Has this build, and this device, the product of cuda/cutlass/weight_gradient.h?
bool has_weight_gradient([[maybe_unused]] Device device) {
  if constexpr (kHasCuda && EAVES_HAVE_CUTLASS) {
    return device.type == DeviceType::cuda && cuda::properties(device).compute_capability == 90;
  }
  return false;
}

bool is_gpu(Device device) { return device.type == DeviceType::cuda; }

bool is_any(Device) { return true; }

void add(Cases& cases, const char* family, const char* name, bool (*is_on)(Device),
         std::function<void(Device, SelfTestResult&)> run) {
  cases.push_back({family, name, std::move(run), is_on});
}

double normal(std::int64_t i) { return 3.0 * random_normal(71, static_cast<std::uint64_t>(i)); }

// ---- rows: logsumexp and cross_entropy -----------------------------------------------------------------------------

/// Rows of unit stride. The bytes of a row choose the kernel (cuda/row_policy.h). Each size is run as it is, and with
/// one element less in each row: rows that start at different places between 16-byte boundaries.
struct Rows {
  const char* name;
  std::int64_t rows;
  std::int64_t bytes;
  bool is_whole = false;  ///< with batch invariance, which cuts no row
};

constexpr Rows kRows[] = {
    {"2 lanes a row", 70, 32},                         // row_per_lanes<2, 1>; map_per_element
    {"2 lanes a row, 4 vectors each", 70, 128},        // row_per_lanes<2, 4>; map_per_lanes<4, 2>
    {"4 lanes a row", 70, 256},                        // row_per_lanes<4, 4>; map_per_lanes<4, 4>
    {"8 lanes a row", 70, 512},                        // row_per_lanes<8, 4>; map_per_lanes<8, 4>
    {"a warp a row", 9, 2048},                         // row_per_lanes<32, 4>; map_per_piece; row_in_registers<32, 4>
    {"a warp a row, 8 vectors each", 5, 4096},         // the same; row_in_registers<32, 8>
    {"a block of 128 threads a row", 5, 8192},         // row_per_block<128, 4>; row_in_registers<128, 4>
    {"a block of 256 threads a row", 5, 16384},        // row_per_block<256, 4>; row_in_registers<128, 8>
    {"a block of 512 threads a row", 3, 36864, true},  // row_per_block<512, 4>; row_in_cluster
    {"a cluster of 2 a row", 3, 32768},   // row_per_block in a cluster, or pieces; row_in_registers<256, 8>
    {"a cluster of 8 a row", 2, 131072},  // the same; row_in_cluster of several blocks
    {"a row in 32 pieces", 1, 524288},    // row_per_block, merge_pieces<8>
    {"a row in 128 pieces", 1, 2097152},  // row_per_block, merge_pieces<32>
};

/// Rows across the memory, or without unit stride.
struct Layout {
  const char* name;
  Dims shape;
  int axis;
  Placement placement;
};

const Layout kLayouts[] = {
    {"vectors of rows side by side", {300, 264}, 0, {}},           // row_per_column<vector>; map_per_column<vector>
    {"rows side by side", {300, 33}, 0, {}},                       // row_per_column<1>; map_per_column<1>
    {"rows side by side, in pieces", {6000, 40}, 0, {}},           // row_per_column, merge_pieces
    {"every third column", {6, 500}, 1, with_strides({1500, 3})},  // row_per_stride; map_per_element
};

/// Takes `compare(dtype, shape)` for each dtype with 16-byte vectors and with one element less. The longest rows come
/// in one dtype, because the oracle is slow.
template <typename Compare>
void for_each_size(const Rows& rows, SelfTestResult& result, const Compare& compare) {
  const Setting whole("EAVES_BATCH_INVARIANT", rows.is_whole ? "1" : "0");
  for (const DType dtype : kDTypes) {
    const std::int64_t columns = rows.bytes / static_cast<std::int64_t>(size_of(dtype));
    if (rows.bytes >= 131072 && dtype != DType::bfloat16) continue;
    result.add(compare(dtype, Dims{rows.rows, columns}));
    if (rows.bytes < 131072) result.add(compare(dtype, Dims{rows.rows, columns - 1}));
  }
}

void add_logsumexp(Cases& cases) {
  for (const Rows& rows : kRows) {
    add(cases, "logsumexp", rows.name, is_any, [rows](Device device, SelfTestResult& result) {
      for_each_size(rows, result, [&](DType dtype, const Dims& shape) {
        return compare_logsumexp({.device = device, .dtype = dtype, .shape = shape, .axes = {1}, .value = normal});
      });
    });
  }
  for (const Layout& layout : kLayouts) {
    add(cases, "logsumexp", layout.name, is_any, [layout](Device device, SelfTestResult& result) {
      for (const DType dtype : kDTypes) {
        result.add(compare_logsumexp({.device = device,
                                      .dtype = dtype,
                                      .shape = layout.shape,
                                      .axes = {layout.axis},
                                      .x_placement = layout.placement,
                                      .value = normal}));
      }
    });
  }
}

/// All options at once, apart from weights.
constexpr CrossEntropyOptions kAllOptions = {
    .reduction = Reduction::mean, .label_smoothing = 0.1, .scale = 0.7, .softcap = 15.0, .z_loss_weight = 0.01};

void add_cross_entropy(Cases& cases) {
  // On a GPU each case also runs without argmax, entropy and sum_sq: PlainLoss instead of FullLoss.
  for (const Rows& rows : kRows) {
    add(cases, "cross_entropy", rows.name, is_any, [rows](Device device, SelfTestResult& result) {
      for_each_size(rows, result, [&](DType dtype, const Dims& shape) {
        return compare_cross_entropy({.device = device,
                                      .dtype = dtype,
                                      .shape = shape,
                                      .options = {.reduction = Reduction::mean},
                                      .value = normal});
      });
    });
  }
  // One case per change, for sizes of a heavy operation: lanes, a block, a cluster in place (from 16 KiB a row on).
  const auto add_each = [&](const char* name, std::vector<std::int64_t> columns, auto change) {
    add(cases, "cross_entropy", name, is_any, [=](Device device, SelfTestResult& result) {
      for (const DType dtype : kDTypes) {
        for (const std::int64_t classes : columns) {
          CrossEntropyCase c{.device = device, .dtype = dtype, .shape = {7, classes}, .value = normal};
          change(c);
          result.add(compare_cross_entropy(c));
        }
      }
    });
  };
  const std::vector<std::int64_t> sizes = {100, 1000, 8192, 9001};
  // FullLoss of row_per_lanes<32, 2> and row_per_block<256, 4>; FullGradient; row_in_cluster with options
  add_each("label smoothing, soft cap, z-loss", sizes, [](CrossEntropyCase& c) {
    c.options = kAllOptions;
    c.has_row_weight = true;
  });
  add_each("gradients of lse and entropy, mean logit", sizes,
           [](CrossEntropyCase& c) { c.has_grad_lse = c.has_grad_entropy = c.wants_mean_logit = true; });
  // weighted_rows, from 8 KiB a row on
  add_each("weighted classes and smoothing", sizes, [](CrossEntropyCase& c) {
    c.options.label_smoothing = 0.1;
    c.weight_dtype = DType::float32;
    c.wants_all_of_row = false;
  });
  add_each("weighted classes, smoothing and soft cap", {9002}, [](CrossEntropyCase& c) {  // with columns behind vectors
    c.options = kAllOptions;
    c.weight_dtype = DType::float32;
    c.logits_placement = c.grad_logits_placement = with_strides({9008, 1});
    c.wants_all_of_row = false;
  });
  add_each("soft targets", sizes, [](CrossEntropyCase& c) { c.targets_dtype = DType::float32; });
  add_each("ignored rows skipped", sizes, [](CrossEntropyCase& c) { c.skips_ignored = true; });
  for (const Layout& layout : kLayouts) {
    add_each(layout.name, {0}, [layout](CrossEntropyCase& c) {
      c.shape = layout.shape;
      c.class_axis = layout.axis;
      c.logits_placement = c.grad_logits_placement = layout.placement;
      c.options.label_smoothing = 0.1;
    });
  }
  // rescale_rows
  add(cases, "cross_entropy", "gradients times an upstream gradient", is_any,
      [](Device device, SelfTestResult& result) {
        for (const DType dtype : kDTypes) {
          for (const std::int64_t classes : {40, 5003}) {
            result.add(compare_rescale({.device = device, .dtype = dtype, .shape = {7, classes}}));
            result.add(compare_rescale({.device = device, .dtype = dtype, .shape = {7, classes}, .is_per_row = false}));
          }
        }
      });
  // shard statistics by FullLoss, merge_shards, the backward of a shard
  add(cases, "cross_entropy", "classes in shards", is_any, [](Device device, SelfTestResult& result) {
    for (const DType dtype : kDTypes) {
      CrossEntropyCase c{.device = device, .dtype = dtype, .shape = {7, 3001}, .value = normal};
      result.add(compare_cross_entropy_in_shards(c, {1000, 0, 1, 2000}));
      c.options = kAllOptions;
      result.add(compare_cross_entropy_in_shards(c, {1000, 0, 1, 2000}));
    }
  });
  // narrow_rows, row_in_registers and row_in_cluster with a gradient of 16 bits over float32 logits
  add(cases, "cross_entropy", "16-bit gradient over float32 logits", is_any, [](Device device, SelfTestResult& result) {
    for (const DType narrow : {DType::bfloat16, DType::float16}) {
      for (const std::int64_t classes : {30, 1000, 5000, 20000}) {
        CrossEntropyCase c{.device = device,
                           .narrow_dtype = narrow,
                           .shape = {5, classes},
                           .logits_placement = with_strides({classes + 4 - classes % 4, 1}),
                           .value = normal};
        result.add(compare_cross_entropy(c));
        c.options = kAllOptions;
        result.add(compare_cross_entropy(c));
      }
    }
  });
}

// ---- products ------------------------------------------------------------------------------------------------------

void add_products(Cases& cases) {
  const auto add_each = [&](const char* name, std::vector<GemmCase> products) {
    add(cases, "product", name, is_any, [=](Device device, SelfTestResult& result) {
      for (const GemmDTypes& dtypes : gemm_dtypes()) {
        for (GemmCase product : products) {
          // A bias is added to accumulators alone.
          product.has_bias = product.has_bias && dtypes.c == accumulator_dtype(dtypes.factors);
          result.add(compare_gemm(device, dtypes, product,
                                  [&](const Gemm& gemm) { runtime::matrix_product(device, gemm, {}); }));
        }
      }
    });
  };
  add_each("of logits", {{.m = 48, .n = 64, .k = 32, .is_b_transposed = true, .has_bias = true},
                         {.m = 61, .n = 93, .k = 45, .is_b_transposed = true, .has_bias = true, .padding = 3}});
  add_each("of a gradient of hidden",
           {{.m = 48, .n = 64, .k = 320, .has_alpha = true}, {.m = 61, .n = 93, .k = 450, .has_alpha = true}});
  // "add_product" of log-probabilities and divergences: float32 sums of 16-bit factors
  add_each(
      "added to a gradient of the head",
      {{.m = 64, .n = 96, .k = 48, .is_a_transposed = true, .accumulates = true},
       {.m = 61, .n = 93, .k = 45, .is_a_transposed = true, .has_alpha = true, .accumulates = true, .padding = 3}});
  if constexpr (EAVES_HAVE_CUTLASS) {
    add(cases, "fused product", "added to a gradient of the head by CUTLASS", has_weight_gradient,
        [](Device device, SelfTestResult& result) {
          const GemmCase product{.m = 391,
                                 .n = 264,
                                 .k = 700,
                                 .is_a_transposed = true,
                                 .has_alpha = true,
                                 .accumulates = true,
                                 .padding_of_a = 1};
          result.add(compare_gemm(device, {DType::bfloat16, DType::bfloat16}, product, [&](const Gemm& gemm) {
            const cuda::DeviceGuard guard(device);
            const int all = cuda::properties(device).multiprocessors;
            cuda::weight_gradient("self-test", gemm, all, nullptr);
          }));
        });
  }
}

// ---- linear_cross_entropy ------------------------------------------------------------------------------------------

using Change = std::function<void(LinearCrossEntropyCase&)>;

/// Both algorithms, forward_backward and backward, each with a mean and with a gradient for each row.
void compare_linear(LinearCrossEntropyCase c, const Change& change, SelfTestResult& result) {
  for (const Reduction reduction : {Reduction::none, Reduction::mean}) {
    c.options.reduction = reduction;
    change(c);
    result.add(compare_linear_cross_entropy(c));
  }
}

void add_linear_cross_entropy(Cases& cases) {
  // Logits in memory: on a GPU products of cuBLASLt, and cross_entropy over their float32 results.
  const auto add_in_memory = [&](const char* name, const Change& change) {
    add(cases, "linear_cross_entropy", name, is_any, [=](Device device, SelfTestResult& result) {
      const Setting never("EAVES_FUSED_PRODUCT", "0");
      for (const DType dtype : kDTypes) {
        compare_linear({.device = device,
                        .dtype = dtype,
                        .row_shape = {80},
                        .features = 64,
                        .classes = 500,
                        .deviation = 4.0,
                        .bias_dtype = dtype},
                       change, result);
      }
    });
  };
  add_in_memory("loss, and gradients by both algorithms", [](LinearCrossEntropyCase&) {});
  add_in_memory("classes and features off every vector",
                [](LinearCrossEntropyCase& c) { c.features = 61, c.classes = 501; });
  add_in_memory("chunks of rows, blocks of classes",
                [](LinearCrossEntropyCase& c) { c.workspace_limit = size_of(accumulator_dtype(c.dtype)) * 16000; });
  add_in_memory("every option", [](LinearCrossEntropyCase& c) {
    c.options.label_smoothing = 0.1, c.options.softcap = 30.0, c.options.z_loss_weight = 1e-4;
    c.class_weight_dtype = DType::float32;
    c.has_grad_lse = c.has_grad_entropy = true;
  });
  add_in_memory("soft targets", [](LinearCrossEntropyCase& c) { c.targets_dtype = DType::float32; });
  // select_rows, gather and scatter
  add_in_memory("ignored rows skipped", [](LinearCrossEntropyCase& c) { c.skips_ignored = c.has_row_weight = true; });
  add_in_memory("float32 gradients of the head, added", [](LinearCrossEntropyCase& c) {
    c.accumulates = true;
    c.grad_head_dtype = c.grad_bias_dtype = DType::float32;
  });
  add_in_memory("kept logits", [](LinearCrossEntropyCase& c) { c.kept_rows = 50; });
  // The forward and backward of linear_log_prob: the loss of each row, at a temperature.
  add_in_memory("log-probabilities at a temperature", [](LinearCrossEntropyCase& c) {
    c.options.scale = 1.0 / 0.7;
    c.wants_entropy_alone = c.has_grad_entropy = true;
  });

  // The fused path (fused/fused.h). One tile of rows and nearly the fewest classes, with a remainder in each
  // direction.
  const auto add_fused = [&](const char* name, const Change& change) {
    add(cases, "fused product", name, has_fused_product, [=](Device device, SelfTestResult& result) {
      const Setting always("EAVES_FUSED_PRODUCT", "1");
      LinearCrossEntropyCase c{.device = device, .dtype = DType::bfloat16, .row_shape = {131}, .features = 40};
      c.classes = 4099;
      c.wants_all_of_row = c.wanted.bias = false;
      compare_linear(c, change, result);
    });
  };
  // ExpProductSoftmax of the loss alone, ExpProductGradient of the backward, exps of both at once
  add_fused("each kernel", [](LinearCrossEntropyCase&) {});
  add_fused("float16", [](LinearCrossEntropyCase& c) { c.dtype = DType::float16; });
  add_fused("soft cap and scale", [](LinearCrossEntropyCase& c) { c.options.softcap = 3.0, c.options.scale = 2.0; });
  add_fused("entropy and its gradient",
            [](LinearCrossEntropyCase& c) { c.wants_all_of_row = c.wants_entropy_alone = c.has_grad_entropy = true; });
  add_fused("class weights", [](LinearCrossEntropyCase& c) { c.class_weight_dtype = DType::float32; });
  add_fused("soft cap, bias, row weights, ignored rows skipped, added", [](LinearCrossEntropyCase& c) {
    c.row_shape = {290}, c.options.softcap = 5.0;
    c.bias_dtype = DType::float32, c.wanted.bias = true;
    c.has_row_weight = c.has_grad_lse = c.accumulates = c.skips_ignored = true;
  });
  add_fused("kept exponentials", [](LinearCrossEntropyCase& c) { c.row_shape = {300}, c.kept_rows = 160; });
  // tiles and rows that are computed again, because a guess was too far off
  add_fused("rows far from their sampled logits",
            [](LinearCrossEntropyCase& c) { c.deviation = 256.0, c.options.reduction = Reduction::none; });
  // tiles_in_turn() of cuda/exp_product.cpp: 1 for the cases above, 2 here
  add_fused("2 tiles in turn", [](LinearCrossEntropyCase& c) { c.row_shape = {512}; });
  add_fused("4 tiles in turn, the loss alone", [](LinearCrossEntropyCase& c) {
    c.row_shape = {1024}, c.classes = 24 * cuda::kExpProductClasses;
    c.wanted = {.hidden = false, .head = false, .bias = false};
  });
  // ExpProductSums: the loss alone, with a guess, because of the few features
  add(cases, "fused product", "the loss alone with a guess", has_fused_product,
      [](Device device, SelfTestResult& result) {
        const Setting faster("EAVES_FUSED_PRODUCT", "auto");
        const Setting invariant("EAVES_BATCH_INVARIANT", "1");
        for (const DType dtype : {DType::bfloat16, DType::float16}) {
          LinearCrossEntropyCase c{.device = device, .dtype = dtype, .row_shape = {131}, .features = 40};
          c.classes = 16387;
          c.wants_all_of_row = c.wants_entropy_alone = true;
          c.wanted = {.hidden = false, .head = false, .bias = false};
          result.add(compare_linear_cross_entropy(c));
        }
      });
}

// ---- lrpe_cosine ---------------------------------------------------------------------------------------------------

void add_lrpe_cosine(Cases& cases) {
  // Forward and backward with every activation and dtype: kinds none, elementwise and both softmaxes.
  const auto add_each = [&](const char* name, const LrpeCosineCase& sizes) {
    add(cases, "lrpe_cosine", name, is_any, [=](Device device, SelfTestResult& result) {
      for (const DType dtype : kDTypes) {
        for (const LrpeCosineActivation& activation : every_activation()) {
          LrpeCosineCase c = with_activation(sizes, activation);
          c.device = device;
          c.dtype = dtype;
          result.add(compare_lrpe_cosine(c));
          c.has_grad_theta = false;
          result.add(compare_lrpe_cosine(c));
        }
      }
    });
  };
  // encode, backpropagate; backpropagate_whole_columns over the sequence
  add_each("1d", {.shape = {1, 2, 40, 64}, .theta_shape = {2, 64}});
  add_each("1d, angles shared by the batch", {.shape = {5, 2, 40, 64}, .theta_shape = {2, 64}});
  add_each("2d", {.shape = {2, 2, 35, 96}, .theta_shape = {2, 48}, .grid = {5, 7}});
  add_each("3d, with tokens before the grid",
           {.shape = {2, 2, 63, 96}, .theta_shape = {1, 32}, .grid = {4, 5, 3}, .extra_tokens = 3});
  // reduce_sequence and sum_column_dots: too many tokens for one block
  add_each("1d, columns in pieces", {.shape = {2, 1, 700, 32}, .theta_shape = {1, 32}});
  // encode_rows, backpropagate_row_per_warp; finish_theta over all heads and features
  add_each("features off every vector", {.shape = {2, 3, 19, 37}, .theta_shape = {1, 1}});
}

// ---- divergence ----------------------------------------------------------------------------------------------------

/// The passes over the logits of a distillation loss, which a GPU alone has. With and without vectors, in one piece of
/// a row and in several (merge_pieces_of_rows), with each kind of gradient (Terms of write_gradient).
void add_divergence(Cases& cases) {
  const auto add_each = [&](const char* name, Divergence divergence) {
    add(cases, "divergence", name, is_gpu, [=](Device device, SelfTestResult& result) {
      for (const DType dtype : kDTypes) {  // of the teacher and of the gradient
        for (const std::int64_t classes : {37, 20000, 33001}) {
          DivergenceCase c{.device = device,
                           .divergence = divergence,
                           .rows = 3,
                           .classes = classes,
                           .teacher_dtype = dtype,
                           .grad_dtype = dtype};
          result.add(compare_divergence(c));
          c.grad_hard_loss = 1.1;
          result.add(compare_divergence(c));
          c.grad_lse = -0.3, c.grad_entropy = 0.9;
          c.softcap = 5.0, c.scale = 0.7, c.temperature = 2.0, c.has_bias = true;
          result.add(compare_divergence(c));
        }
      }
    });
  };
  add_each("forward", Divergence::forward);
  add_each("reverse", Divergence::reverse);
  add_each("Jensen-Shannon", Divergence::jsd);
  add_each("total variation", Divergence::total_variation);
}

}  // namespace

std::vector<SelfTestCase> self_test_cases() {
  Cases cases;
  add_logsumexp(cases);
  add_cross_entropy(cases);
  add_products(cases);
  add_linear_cross_entropy(cases);
  add_lrpe_cosine(cases);
  add_divergence(cases);
  return cases;
}

int self_test(const std::function<void(const std::string& line)>& say, const std::vector<SelfTestCase>& cases) {
  std::vector<std::pair<std::string, Device>> devices = {{"cpu", kCpu}};
  std::set<std::string> names;
  for (const GpuInfo& gpu : system_info().gpus) {
    if (!names.insert(gpu.name).second) continue;
    devices.emplace_back("gpu " + std::to_string(gpu.index), Device{DeviceType::cuda, gpu.index});
  }
  int runs = 0;
  std::vector<std::string> failures;
  std::set<std::string> absent;
  const auto say_row = [&](const char* device, const char* family, const char* name, const char* error,
                           const char* result, const char* ms) {
    char line[256];
    std::snprintf(line, sizeof(line), "| %-6s | %-20s | %-52s | %13s | %-7s | %6s |", device, family, name, error,
                  result, ms);
    say(line);
  };
  say_row("device", "family", "case", "error / bound", "result", "ms");
  say_row("---", "---", "---", "---:", "---", "---:");
  for (const auto& [name, device] : devices) {
    for (const SelfTestCase& one : cases) {
      if (!one.is_on(device)) {
        absent.insert(name + " has no kernels of this family: " + one.family);
        continue;
      }
      const auto start = std::chrono::steady_clock::now();
      SelfTestResult result;
      try {
        one.run(device, result);
      } catch (const std::exception& error) {
        result.failure = error.what();
      }
      const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;
      char share[32], ms[32];
      std::snprintf(share, sizeof(share), "%.2f", result.share);
      std::snprintf(ms, sizeof(ms), "%.0f", elapsed.count());
      say_row(name.c_str(), one.family.c_str(), one.name.c_str(), share, result.failure.empty() ? "ok" : "differs", ms);
      ++runs;
      if (result.failure.empty()) continue;
      failures.push_back(name + ", " + one.family + ", " + one.name + ": " + result.failure);
    }
  }
  say("");
  for (const std::string& sentence : absent) say(sentence);
  for (const std::string& failure : failures) say(failure);
  const std::string of_all = " of " + std::to_string(runs) + " lines ";
  say(failures.empty() ? std::to_string(runs) + of_all + "agree with the oracles"
                       : std::to_string(failures.size()) + of_all + "differ: please open an issue with this report");
  return static_cast<int>(failures.size());
}

}  // namespace eaves::cli
