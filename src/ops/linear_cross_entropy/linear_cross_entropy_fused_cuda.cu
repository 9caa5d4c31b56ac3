// The kernels of linear_cross_entropy_fused.h: the guess, the statistics, the gradient.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/dispatch.h"
#include "cuda/launch.cuh"
#include "cuda/math.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"
#include "ops/cross_entropy/cross_entropy_math.h"
#include "ops/cross_entropy/cross_entropy_statistics.cuh"
#include "ops/linear_cross_entropy/linear_cross_entropy_fused.h"

namespace eaves::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kClasses = static_cast<int>(kExpProductClasses);

constexpr double kLog2EExact = std::numbers::log2e;

/// The scale of logits, as kernels compute with it.
struct Factor {
  float factor;    ///< of t: scale * log2(e)
  double stretch;  ///< factor / (scale * log2(e)): what its rounding does to exponents
  float scale;

  explicit Factor(const CrossEntropyOptions& options)
      : factor(static_cast<float>(options.scale * kLog2EExact)),
        stretch(static_cast<double>(factor) / (options.scale * kLog2EExact)),
        scale(static_cast<float>(options.scale)) {}

  /// (z' - anchor) * log2(e) - t.
  __device__ float rest_of(float shift, float anchor) const {
    return static_cast<float>(double(shift) / stretch - double(anchor) * kLog2EExact);
  }
};

CrossEntropyTerms<float> terms_of(const FusedRows& rows) {
  CrossEntropyInputs inputs{};
  inputs.targets = rows.targets;
  inputs.classes = rows.all_classes;
  inputs.options = rows.options;
  inputs.weight.data = rows.class_weight;
  return CrossEntropyTerms<float>(inputs);
}

struct Targets {
  TypedNumbers targets;
  std::int64_t stride;
  std::int64_t first_class;
  std::int64_t classes;

  explicit Targets(const FusedRows& rows)
      : targets(rows.targets), stride(rows.target_stride), first_class(rows.first_class), classes(rows.classes) {}

  __device__ std::int64_t of(std::int64_t row) const { return integer_at(targets, row * stride); }
  /// -1 where the class is in another block, or is none.
  __device__ int column(std::int64_t row) const {
    const std::int64_t column = of(row) - first_class;
    return column >= 0 && column < classes ? static_cast<int>(column) : -1;
  }
};

/// x of a row times a row of the weight, by a warp; every lane gets it.
template <typename T>
__device__ float dot(const T* x, const T* weight, std::int64_t features) {
  constexpr int kSize = Vector<T>::kSize;
  float sum = 0.0f;
  for (std::int64_t i = threadIdx.x % 32 * kSize; i < features; i += 32 * kSize) {
    float a[kSize];
    float b[kSize];
    unpack(*reinterpret_cast<const Vector<T>*>(x + i), a);
    unpack(*reinterpret_cast<const Vector<T>*>(weight + i), b);
#pragma unroll
    for (int k = 0; k < kSize; ++k) sum = fmaf(a[k], b[k], sum);
  }
  return reduce_lanes<32>(sum, Plus{});
}

// ---- the guess -----------------------------------------------------------------------------------------------------

/// 2^t stays within float32 up to t = 127, and counts down to -126. A row's largest logit is seldom 2^127 (e^88) times
/// the largest sampled one, unless the samples themselves are spread widely: normal logits with a deviation
/// of 64, say. Those rows get more room above, up to kMostRoom, and still count what is
/// 2^-36 of the largest sample.
constexpr float kUsualSpread = 60.0f;
constexpr float kMostRoom = 90.0f;

/// A warp a row.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    guess_shift(const __grid_constant__ Targets targets, std::int64_t rows, const T* x, std::int64_t x_stride,
                const T* weight, std::int64_t weight_stride, std::int64_t features, const float* samples,
                int sample_count, float factor, float* shift, std::int32_t* target) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  float largest = -infinity<float>();
  float sum = 0.0f;
  for (int i = threadIdx.x % 32; i < sample_count; i += 32) {
    const float exponent = samples[row * sample_count + i] * factor;
    largest = fmaxf(largest, exponent);
    sum += exponent;
  }
  largest = reduce_lanes<32>(largest, [](float a, float b) { return fmaxf(a, b); });
  const float mean = reduce_lanes<32>(sum, Plus{}) / static_cast<float>(sample_count);
  const float room = fminf(fmaxf(largest - mean - kUsualSpread, 0.0f), kMostRoom);
  const int column = targets.column(row);
  if (column >= 0)
    largest = fmaxf(largest, dot(x + row * x_stride, weight + column * weight_stride, features) * factor);
  if (threadIdx.x % 32 != 0) return;
  target[row] = column;
  shift[row] = fabsf(largest) < infinity<float>() ? largest + room : 0.0f;
}

// ---- statistics ----------------------------------------------------------------------------------------------------

struct SumsOfTiles {
  const float* sums;
  const float* moments;
  std::int64_t tiles;
  std::int64_t rows;  ///< up to a whole tile

  explicit SumsOfTiles(const FusedRows& of)
      : sums(of.memory.sums),
        moments(of.memory.moments),
        tiles(ceil_divide(of.classes, kExpProductClasses)),
        rows(ceil_divide(of.rows, kExpProductRows) * kExpProductRows) {}

  __device__ float sum(std::int64_t tile, std::int64_t row) const { return sums[tile * rows + row]; }
  __device__ float moment(std::int64_t tile, std::int64_t row) const { return moments[tile * rows + row]; }
  /// Did the tile leave the range in which sums over 2^11 tiles stay within float32's? A NaN did not: it is one.
  __device__ bool is_lost(std::int64_t tile, std::int64_t row) const { return sum(tile, row) > 0x1p108f; }
};

/// x and the weight, for logits that are computed again.
template <typename T>
struct LogitFactors {
  const T* x;
  std::int64_t x_stride;
  const T* weight;
  std::int64_t weight_stride;
  std::int64_t features;

  explicit LogitFactors(const FusedRows& rows)
      : x(static_cast<const T*>(rows.x.data)),
        x_stride(rows.x.stride),
        weight(static_cast<const T*>(rows.weight.data)),
        weight_stride(rows.weight.stride),
        features(rows.features) {}

  /// By a warp.
  __device__ float logit(std::int64_t row, std::int64_t column) const {
    return dot(x + row * x_stride, weight + column * weight_stride, features);
  }
};

/// Of the classes of a tile, from logits that are computed again. By a block, of which thread 0 gets it.
template <typename T>
__device__ __noinline__ ClassStatistics<float> statistics_of_tile(const LogitFactors<T>& factors, std::int64_t row,
                                                                  std::int64_t first, std::int64_t end, float scale) {
  ClassStatistics<float> state;
  for (std::int64_t column = first + threadIdx.x / 32; column < end; column += kWarps) {
    const float z = factors.logit(row, column) * scale;
    ClassStatistics<float> one;
    one.softmax = {z == z ? z : -infinity<float>(), exponential(z - softmax_anchor(z))};
    state = MergeStatistics{}(state, one);
  }
  if (threadIdx.x % 32 != 0) state = {};
  __syncthreads();  // the block may still read what the last call has left in shared memory
  return reduce_block<kThreads>(state, MergeStatistics{});
}

/// From sums of 2^t and 2^t * t. Where the guess was far off, the anchor is next to the row's lse: a sum that is so far
/// from 1 could not be merged.
__device__ ClassStatistics<float> statistics_of_sums(float sum, float moment, float shift, const Factor& factor) {
  constexpr float kFar = 0x1p24f;
  const bool is_far = (sum > kFar && sum < infinity<float>()) || (sum > 0.0f && sum < 1.0f / kFar);
  const int exponent = is_far ? ilogbf(sum) : 0;
  const double exact = double(shift) / factor.stretch + exponent;
  const auto anchor = static_cast<float>(exact / kLog2EExact);
  const auto rest = static_cast<float>(exact - double(anchor) * kLog2EExact);
  const float correction = exp2_approximate(rest);
  ClassStatistics<float> state;
  state.softmax = {anchor, scalbnf(sum, -exponent) * correction};
  // z' - anchor = (t - exponent + rest) / log2(e)
  state.moment = kUnit<float> * correction * scalbnf(fmaf(rest - static_cast<float>(exponent), sum, moment), -exponent);
  return state;
}

/// A block a row.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    finish_statistics(const __grid_constant__ Targets targets, const __grid_constant__ Factor factor,
                      const __grid_constant__ SumsOfTiles tiles, const __grid_constant__ LogitFactors<T> factors,
                      const float* class_weight, const float* shift, const float* target_logit,
                      const __grid_constant__ CrossEntropyTerms<float> terms, float* statistics) {
  const std::int64_t row = blockIdx.x;
  struct Sums {
    float sum = 0.0f;
    float moment = 0.0f;
  };
  const bool is_ignored = terms.is_ignored(targets.of(row));  // its statistics are not used
  const auto has_to_be_repeated = [&](const Sums& sums) {
    // The guess was too high, or there is no finite logit; or it was too low.
    if (sums.sum == 0.0f || sums.sum == infinity<float>() || fabsf(sums.moment) == infinity<float>()) return true;
    // Far from the guess exponents lose digits, which count where lse is next to 0.
    constexpr float kFar = 20.0f;
    constexpr float kNextToZero = 4.0f;
    const float exponent = log2f(sums.sum);
    return fabsf(exponent) > kFar && fabsf(exponent + shift[row]) < kNextToZero;
  };
  Sums own;
  bool has_lost = false;
  for (std::int64_t tile = threadIdx.x; tile < tiles.tiles; tile += kThreads) {
    if (!is_ignored && tiles.is_lost(tile, row)) {
      has_lost = true;
      continue;
    }
    own.sum += tiles.sum(tile, row);
    own.moment += tiles.moment(tile, row);
  }
  const bool is_any_lost = __syncthreads_or(has_lost) != 0;
  const Sums sums = reduce_block<kThreads>(own, [](const Sums& a, const Sums& b) {
    return Sums{a.sum + b.sum, a.moment + b.moment};
  });
  const bool is_all_lost = __syncthreads_or(threadIdx.x == 0 && !is_ignored && has_to_be_repeated(sums)) != 0;

  ClassStatistics<float> state;
  if (threadIdx.x == 0 && !is_all_lost) state = statistics_of_sums(sums.sum, sums.moment, shift[row], factor);
  if (is_any_lost || is_all_lost) {
    for (std::int64_t tile = 0; tile < tiles.tiles; ++tile) {
      if (!is_all_lost && !tiles.is_lost(tile, row)) continue;
      const auto again =
          statistics_of_tile(factors, row, tile * kClasses, min((tile + 1) * kClasses, targets.classes), factor.scale);
      if (threadIdx.x == 0) state = MergeStatistics{}(state, again);
    }
  }
  if (threadIdx.x != 0) return;
  TargetClass<float> target;
  const int column = targets.column(row);
  if (column >= 0) {
    target.logit = target_logit[row] * factor.scale;
    target.weight = class_weight == nullptr ? 1.0f : class_weight[targets.of(row)];
  }
  store_statistics(state, target, terms, statistics + row * kCrossEntropyStatistics);
}

// ---- the gradient --------------------------------------------------------------------------------------------------

struct GradientOfRows {
  Targets targets;
  Factor factor;
  CrossEntropyTerms<float> terms;
  const float* class_weight;
  FusedGradient in;
  ExpProductMemory memory;

  __device__ RowGradient<float> row(std::int64_t i) const {
    RowGradientInputs<float> inputs{};
    inputs.target = targets.of(i);
    inputs.lse = in.lse[i];
    inputs.grad_loss = in.grad_loss[i * in.grad_loss_stride] * (in.row_weight == nullptr ? 1.0f : in.row_weight[i]);
    if (in.grad_lse != nullptr) inputs.grad_lse = in.grad_lse[i];
    if (in.grad_entropy != nullptr) {
      inputs.grad_entropy = in.grad_entropy[i];
      inputs.entropy = in.entropy[i];
    }
    inputs.target_weight = 1.0f;
    if (!terms.is_ignored(inputs.target)) {
      if (!terms.is_in_range(inputs.target)) {
        inputs.grad_loss = nan_of<float>();
      } else if (class_weight != nullptr) {
        inputs.target_weight = class_weight[inputs.target];
      }
    }
    return row_gradient(inputs, terms);
  }

  /// The gradient of the logit of the row's target, in which softmax - 1 would cancel.
  __device__ float of_target(std::int64_t i, const RowGradient<float>& row) const {
    if (row.mass == 0.0f && row.hard == 0.0f && row.slope == 0.0f) return 0.0f;
    const float d = memory.target_logit[i] * factor.scale - row.lse;
    const float p = exponential(d);
    float gradient = row.target < 0 ? p * row.mass : fmaf(std::expm1(d), row.hard, p * row.rest);
    // 0 * -infinity must be 0. fmax() drops a NaN, but then p is one.
    if (row.slope != 0.0f) gradient = fmaf(p, row.slope * fmaxf(d, -1e30f), gradient);
    return gradient * factor.scale;
  }
};

/// A thread a row: shift and coefficients for the product. With c = log2(e), d = z' - lse and d * c = t + rest:
///   softmax * (mass + slope * d) = 2^t * 2^rest * (mass + slope / c * (t + rest)) = 2^t * (constant + slope' * t)
/// times scale = dz'/dz. An infinite lse has no rest.
__global__ void __launch_bounds__(kThreads)
    prepare_gradient(const __grid_constant__ GradientOfRows rows, std::int64_t count) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const RowGradient<float> row = rows.row(i);
  const auto shift = static_cast<float>(double(row.lse) * kLog2EExact * rows.factor.stretch);
  const float rest = rows.factor.rest_of(shift, row.lse);
  const float correction = exp2_approximate(rest) * rows.factor.scale;
  const bool is_finite = row.lse - row.lse == 0.0f;
  const float slope =
      row.slope == 0.0f ? 0.0f : row.slope * kUnit<float> * (is_finite ? correction : rows.factor.scale);
  rows.memory.shift[i] = shift;
  rows.memory.target[i] = rows.targets.column(i);
  rows.memory.slope[i] = slope;
  const float constant = row.mass == 0.0f ? 0.0f : row.mass * (is_finite ? correction : rows.factor.scale);
  rows.memory.constant[i] = slope == 0.0f || !is_finite ? constant : fmaf(slope, rest, constant);
}

/// A thread a row: the target's element.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    finish_gradient(const __grid_constant__ GradientOfRows rows, std::int64_t count) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const int column = rows.memory.target[i];
  if (column < 0) return;
  static_cast<T*>(rows.in.to)[i * rows.in.stride + column] = round_to<T>(rows.of_target(i, rows.row(i)));
}

// ---- host ----------------------------------------------------------------------------------------------------------

ExpProduct product_of(const FusedRows& rows) {
  return {.device = rows.device,
          .rows = rows.rows,
          .classes = rows.classes,
          .features = rows.features,
          .dtype = rows.dtype,
          .x = rows.x,
          .weight = rows.weight,
          .factor = Factor(rows.options).factor,
          .shift = rows.memory.shift,
          .target = rows.memory.target,
          .target_logit = rows.memory.target_logit};
}

template <typename Body>
void dispatch_half(DType dtype, Body body) {
  dtype == DType::bfloat16 ? body.template operator()<bfloat16>() : body.template operator()<float16>();
}

}  // namespace

void guess_shifts(const char* op, const FusedRows& rows, int sample_count, void* stream) {
  dispatch_half(rows.dtype, [&]<typename T>() {
    launch(op, guess_shift<T>, {.blocks = ceil_divide(rows.rows, kWarps), .threads = kThreads, .stream = stream},
           Targets(rows), rows.rows, static_cast<const T*>(rows.x.data), rows.x.stride,
           static_cast<const T*>(rows.weight.data), rows.weight.stride, rows.features,
           static_cast<const float*>(rows.memory.samples), sample_count, Factor(rows.options).factor, rows.memory.shift,
           rows.memory.target);
  });
}

namespace {

void finish(const char* op, const FusedRows& rows, float* statistics, const ExecutionContext& context) {
  dispatch_half(rows.dtype, [&]<typename T>() {
    launch(op, finish_statistics<T>, {.blocks = rows.rows, .threads = kThreads, .stream = context.stream},
           Targets(rows), Factor(rows.options), SumsOfTiles(rows), LogitFactors<T>(rows), rows.class_weight,
           static_cast<const float*>(rows.memory.shift), static_cast<const float*>(rows.memory.target_logit),
           terms_of(rows), statistics);
  });
}

ExpProductSums sums_of(const FusedRows& rows) { return {rows.memory.sums, rows.memory.moments}; }

GradientOfRows gradient_of(const FusedRows& rows, const FusedGradient& gradient) {
  return {Targets(rows), Factor(rows.options), terms_of(rows), rows.class_weight, gradient, rows.memory};
}

}  // namespace

void statistics_of_product(const char* op, const FusedRows& rows, float* statistics, const ExecutionContext& context) {
  exp_product(op, product_of(rows), sums_of(rows), context);
  finish(op, rows, statistics, context);
}

void gradient_by_product(const char* op, const FusedRows& rows, const FusedGradient& gradient,
                         const ExecutionContext& context) {
  const GradientOfRows of_rows = gradient_of(rows, gradient);
  const LaunchShape shape{.blocks = ceil_divide(rows.rows, kThreads), .threads = kThreads, .stream = context.stream};
  launch(op, prepare_gradient, shape, of_rows, rows.rows);
  exp_product(op, product_of(rows),
              ExpProductGradient{rows.memory.constant, rows.memory.slope, gradient.to, gradient.stride}, context);
  launch(op, finish_gradient<bfloat16>, shape, of_rows, rows.rows);
}

}  // namespace eaves::cuda
