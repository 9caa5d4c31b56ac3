// The kernels of linear_cross_entropy_fused.h: the guess, the statistics, the gradient, and both at once.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/dispatch.h"
#include "cuda/launch.cuh"
#include "cuda/math.cuh"
#include "cuda/reduce.cuh"
#include "cuda/softmax.cuh"
#include "cuda/vector.cuh"
#include "ops/cross_entropy/cross_entropy_math.h"
#include "ops/cross_entropy/cross_entropy_statistics.cuh"
#include "ops/linear_cross_entropy/linear_cross_entropy_fused.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#pragma nv_diag_suppress 177  // what repeat_rows alone uses, whose clusters such a GPU does not have
#endif

namespace eaves::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// A row whose logits are computed again is one of a cluster: each of its blocks computes a part of every tile.
constexpr int kRepeatBlocks = 8;
constexpr int kRepeatThreads = 256;
constexpr int kClasses = static_cast<int>(kExpProductClasses);

constexpr double kLog2EExact = std::numbers::log2e;

/// What becomes of a logit z, as kernels compute with it: z' = z * scale, or tanh(z * to_tanh) * softcap.
struct LogitTransform {
  float to_tanh = 0.0f;  ///< scale / softcap; 0: no soft cap
  float outer;           ///< the scale, or the soft cap
  float factor;          ///< of t: outer * log2(e)
  double stretch;        ///< factor / (outer * log2(e)): what its rounding does to exponents
  float scale;           ///< dz'/dz, but for the derivative of tanh

  explicit LogitTransform(const CrossEntropyOptions& options) : scale(static_cast<float>(options.scale)) {
    const bool is_capped = options.softcap != 0.0;
    const double exact = is_capped ? options.softcap : options.scale;
    if (is_capped) to_tanh = static_cast<float>(options.scale / options.softcap);
    outer = static_cast<float>(exact);
    factor = static_cast<float>(exact * kLog2EExact);
    stretch = static_cast<double>(factor) / (exact * kLog2EExact);
  }

  /// z', and z' * log2(e).
  __device__ float value(float z) const { return inner(z) * outer; }
  __device__ float exponent(float z) const { return inner(z) * factor; }
  /// dz'/dz / scale.
  __device__ float derivative(float z) const {
    return to_tanh == 0.0f ? 1.0f : tanh_and_derivative(z * to_tanh).derivative;
  }
  /// z * factor - shift, with one rounding where there is no soft cap, as in the product.
  __device__ float exponent_above(float z, float shift) const { return fmaf(inner(z), factor, -shift); }

  /// (z' - lse) * log2(e) - t.
  __device__ float rest_of(float shift, const SplitLse<float>& lse) const {
    return static_cast<float>((double(shift) / stretch - double(lse.high) * kLog2EExact) -
                              double(lse.low) * kLog2EExact);
  }

 private:
  __device__ float inner(float z) const { return to_tanh == 0.0f ? z : tanh_and_derivative(z * to_tanh).tanh; }
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
  std::int64_t ignore_index;

  explicit Targets(const FusedRows& rows)
      : targets(rows.targets),
        stride(rows.target_stride),
        first_class(rows.first_class),
        classes(rows.classes),
        ignore_index(rows.options.ignore_index) {}

  __device__ std::int64_t of(std::int64_t row) const { return integer_at(targets, row * stride); }
  __device__ bool is_ignored(std::int64_t row) const { return of(row) == ignore_index; }
  /// -1 where the row is ignored, and where the class is in another block, or is none.
  __device__ int column(std::int64_t row) const {
    const std::int64_t column = of(row) - first_class;
    return !is_ignored(row) && column >= 0 && column < classes ? static_cast<int>(column) : -1;
  }
};

/// x of a row times `kCount` rows of the weight, by a warp; every lane gets them. Each is the same whatever the others.
template <int kCount, typename T>
__device__ void multiply(const T* x, const T* const (&weight)[kCount], std::int64_t features,
                         float (&products)[kCount]) {
  constexpr int kSize = Vector<T>::kSize;
#pragma unroll
  for (float& product : products) product = 0.0f;
#pragma unroll 2
  for (std::int64_t i = threadIdx.x % 32 * kSize; i < features; i += 32 * kSize) {
    float a[kSize];
    unpack(*reinterpret_cast<const Vector<T>*>(x + i), a);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      float b[kSize];
      unpack(*reinterpret_cast<const Vector<T>*>(weight[n] + i), b);
#pragma unroll
      for (int k = 0; k < kSize; ++k) products[n] = fmaf(a[k], b[k], products[n]);
    }
  }
#pragma unroll
  for (float& product : products) product = reduce_lanes<32>(product, Plus{});
}

// ---- the guess -----------------------------------------------------------------------------------------------------

/// 2^t stays within float32 up to t = 127, and counts down to -126. A row's largest logit is seldom 2^127 (e^88) times
/// the largest sampled one, unless the samples themselves are spread widely: normal logits with a deviation of 64, say.
/// Those rows get more room above, up to kMostRoom, and still count what is 2^-36 of the largest sample.
constexpr float kUsualSpread = 60.0f;
constexpr float kMostRoom = 90.0f;
/// Farther below the largest are classes that a bias masks: -1e4 is 14427.
constexpr float kMasked = 4096.0f;

/// A warp a row.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    guess_shift(const __grid_constant__ Targets targets, std::int64_t rows, const T* x, std::int64_t x_stride,
                const T* weight, std::int64_t weight_stride, std::int64_t features, int sample_count, const float* bias,
                std::int64_t classes_per_sample, const __grid_constant__ LogitTransform transform,
                const __grid_constant__ ExpProductMemory memory) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row == 0 && threadIdx.x == 0) *memory.repeated_count = 0;
  if (row >= rows) return;
  const auto* samples = static_cast<const float*>(memory.samples);
  const auto exponent_of = [&](int i) {
    const float own_bias = bias == nullptr ? 0.0f : bias[i * classes_per_sample];
    return transform.exponent(samples[row * sample_count + i] + own_bias);
  };
  float largest = -infinity<float>();
  for (int i = threadIdx.x % 32; i < sample_count; i += 32) largest = fmaxf(largest, exponent_of(i));
  largest = reduce_lanes<32>(largest, [](float a, float b) { return fmaxf(a, b); });
  float sum = 0.0f;
  float count = 0.0f;
  for (int i = threadIdx.x % 32; i < sample_count; i += 32) {
    const float exponent = exponent_of(i);
    if (!(exponent > largest - kMasked)) continue;  // a class that is masked says nothing of the others' spread
    sum += exponent;
    count += 1.0f;
  }
  const float mean = reduce_lanes<32>(sum, Plus{}) / reduce_lanes<32>(count, Plus{});
  const float room = fminf(fmaxf(largest - mean - kUsualSpread, 0.0f), kMostRoom);
  const int column = targets.column(row);
  if (column >= 0) {
    float of_target[1];
    multiply<1, T>(x + row * x_stride, {weight + column * weight_stride}, features, of_target);
    largest = fmaxf(largest, transform.exponent(of_target[0] + (bias == nullptr ? 0.0f : bias[column])));
  }
  if (threadIdx.x % 32 != 0) return;
  memory.target[row] = column;
  memory.shift[row] = targets.is_ignored(row)              ? infinity<float>()  // 2^t is 0
                      : fabsf(largest) < infinity<float>() ? largest + room
                                                           : 0.0f;
  if (memory.first_of_class == nullptr) return;
  memory.has_more_rows[row] = 0;
  if (column >= 0) atomicMax(memory.first_of_class + column, static_cast<std::int32_t>(rows - row));
}

// ---- a row's gradient -------------------------------------------------------------------------------------------

/// What the gradient of each row is made of.
struct GradientOfRows {
  Targets targets;
  LogitTransform transform;
  CrossEntropyTerms<float> terms;
  const float* class_weight;
  FusedGradient in;
  ExpProductMemory memory;
  bool is_shard;

  __device__ RowGradient<float> row(std::int64_t i, const SplitLse<float>& lse) const {
    RowGradientInputs<float> inputs{};
    inputs.target = targets.of(i);
    inputs.lse = lse;
    inputs.grad_loss = weigh(in.grad_loss[i * in.grad_loss_stride], in.row_weight == nullptr ? 1.0f : in.row_weight[i]);
    if (in.grad_lse != nullptr) inputs.grad_lse = in.grad_lse[i];
    if (in.grad_entropy != nullptr) {
      inputs.grad_entropy = in.grad_entropy[i];
      inputs.entropy = in.entropy[i];
    }
    inputs.target_weight = 1.0f;
    if (!terms.is_ignored(inputs.target)) {
      if (!terms.is_in_range(inputs.target)) {
        inputs.grad_loss = nan_of<float>();
      } else if (in.target_weight != nullptr) {
        inputs.target_weight = in.target_weight[i];
      } else if (class_weight != nullptr) {
        inputs.target_weight = class_weight[inputs.target];
      }
    }
    return row_gradient(inputs, terms);
  }

  /// As the forward kept it.
  __device__ RowGradient<float> row(std::int64_t i) const { return row(i, in.lse.load<float>(in.lse.row(i))); }

  /// The gradient of the logit z of the row's target, whose z' is `d` above lse, at most 0: softmax - 1 would cancel.
  __device__ float of_target(float z, float d, const RowGradient<float>& row) const {
    if (row.mass == 0.0f && row.hard == 0.0f && row.slope == 0.0f) return 0.0f;
    const float p = exponential(d);
    float gradient = row.target < 0 ? p * row.mass : fmaf(std::expm1(d), row.hard, p * row.rest);
    // 0 * -infinity must be 0. fmax() drops a NaN, but then p is one.
    if (row.slope != 0.0f) gradient = fmaf(p, row.slope * fmaxf(d, -1e30f), gradient);
    return gradient * (transform.scale * transform.derivative(z));
  }
};

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
  /// Did the tile leave the range in which its moment stays within float32's? Not a NaN: it would be one again.
  __device__ bool is_lost(std::int64_t tile, std::int64_t row) const { return sum(tile, row) > 0x1p120f; }
};

/// x and the weight, for logits that are computed again.
template <typename T>
struct LogitFactors {
  const T* x;
  std::int64_t x_stride;
  const T* weight;
  std::int64_t weight_stride;
  const float* bias;
  std::int64_t features;

  explicit LogitFactors(const FusedRows& rows)
      : x(static_cast<const T*>(rows.x.data)),
        x_stride(rows.x.stride),
        weight(static_cast<const T*>(rows.weight.data)),
        weight_stride(rows.weight.stride),
        bias(rows.bias),
        features(rows.features) {}

  /// Calls function(column, z) in lane 0 of a warp for each logit of a row and of classes [first, end) that is of the
  /// calling block of the cluster.
  template <typename Function>
  __device__ void for_each_logit(std::int64_t row, std::int64_t first, std::int64_t end, int block,
                                 Function function) const {
    constexpr int kAtOnce = 3;  // loads on their way
    constexpr int kClassesOfBlock = kClasses / kRepeatBlocks;
    static_assert(kClassesOfBlock == kRepeatThreads / 32 * kAtOnce);
    const std::int64_t column = first + block * kClassesOfBlock + threadIdx.x / 32 * kAtOnce;
    if (column >= end) return;
    const T* weights[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) weights[i] = weight + min(column + i, end - 1) * weight_stride;
    float logits[kAtOnce];
    multiply(x + row * x_stride, weights, features, logits);
    if (threadIdx.x % 32 != 0) return;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (column + i < end) function(column + i, logits[i] + (bias == nullptr ? 0.0f : bias[column + i]));
    }
  }
};

/// Of a row's tiles: in float64, because more than one may be near the end of float32's range.
struct Sums {
  double sum = 0.0;
  double moment = 0.0;

  /// The guess was too high, or there is no finite logit; or it was too low. Or the exponents are far from the guess,
  /// where they lose digits, which count where lse is next to 0.
  __device__ bool have_to_be_repeated(float shift) const {
    if (sum == 0.0 || sum == infinity<double>() || fabs(moment) == infinity<double>()) return true;
    constexpr float kFar = 20.0f;
    constexpr float kNextToZero = 4.0f;
    const auto exponent = static_cast<float>(log2(sum));
    return fabsf(exponent) > kFar && fabsf(exponent + shift) < kNextToZero;
  }
};

/// Where the guess was far off, the anchor is next to the row's lse: a sum that is so far from 1 could not be merged.
__device__ ClassStatistics<float> statistics_of_sums(const Sums& sums, float shift, const LogitTransform& transform) {
  constexpr double kFar = 0x1p24;
  const bool is_far = (sums.sum > kFar && sums.sum < infinity<double>()) || (sums.sum > 0.0 && sums.sum < 1.0 / kFar);
  const int exponent = is_far ? ilogb(sums.sum) : 0;
  const auto sum = static_cast<float>(scalbn(sums.sum, -exponent));
  const auto moment = static_cast<float>(scalbn(sums.moment, -exponent));
  const double exact = double(shift) / transform.stretch + exponent;
  const auto anchor = static_cast<float>(exact / kLog2EExact);
  const auto rest = static_cast<float>(exact - double(anchor) * kLog2EExact);
  const float correction = exp2_approximate(rest);
  ClassStatistics<float> state;
  state.softmax = {anchor, sum * correction};
  // z' - anchor = (t - exponent + rest) / log2(e)
  state.moment = kUnit<float> * correction * fmaf(rest - static_cast<float>(exponent), sum, moment);
  return state;
}

/// The tiles of a row that are computed again. Shared by a block.
struct LostTiles {
  static constexpr int kWords = static_cast<int>(ceil_divide(kMostFusedClasses, kExpProductClasses * 32));
  unsigned words[kWords];

  __device__ void clear() {
    for (int i = static_cast<int>(threadIdx.x); i < kWords; i += kRepeatThreads) words[i] = 0;
  }
  __device__ void add(std::int64_t tile) { atomicOr(&words[tile / 32], 1u << tile % 32); }
  __device__ bool has_class(std::int64_t column) const {
    const std::int64_t tile = column / kClasses;
    return (words[tile / 32] >> tile % 32 & 1) != 0;
  }

  /// Calls function(first class, behind the last one) for each, or for all.
  template <typename Function>
  __device__ void for_each(std::int64_t classes, bool is_all, Function function) const {
    const std::int64_t tiles = ceil_divide(classes, kExpProductClasses);
    for (std::int64_t word = 0; word * 32 < tiles; ++word) {
      for (unsigned left = is_all ? ~0u : words[word]; left != 0; left &= left - 1) {
        const std::int64_t first = (word * 32 + __ffs(static_cast<int>(left)) - 1) * kClasses;
        if (first < classes) function(first, min(first + kClasses, classes));
      }
    }
  }
};

/// Each element of the powers of a row times 2^-`exponent`, those that left float32's range from logits that are
/// computed again. By a cluster, of which each block writes a part. Rows of powers start on 16 bytes.
__device__ __noinline__ void lower_powers(const LostTiles& lost, const LogitFactors<bfloat16>& factors,
                                          std::int64_t row, std::int64_t classes, const LogitTransform& transform,
                                          float shift, float exponent, bool is_all, int block, bfloat16* powers) {
  constexpr int kSize = Vector<bfloat16>::kSize;
  static_assert(kClasses % kSize == 0);  // a vector's classes are of one tile
  const float power = exp2f(-exponent);
  const std::int64_t whole = classes / kSize * kSize;
  const int thread = block * kRepeatThreads + static_cast<int>(threadIdx.x);
  if (!is_all) {
#pragma unroll 4
    for (std::int64_t column = std::int64_t{thread} * kSize; column < whole;
         column += kRepeatBlocks * kRepeatThreads * kSize) {
      if (lost.has_class(column)) continue;
      auto* at = reinterpret_cast<Vector<bfloat16>*>(powers + column);
      float values[kSize];
      unpack(*at, values);
#pragma unroll
      for (float& value : values) value *= power;
      *at = pack<bfloat16>(values);
    }
    const std::int64_t column = whole + thread;
    if (column < classes && !lost.has_class(column)) {
      powers[column] = round_to<bfloat16>(load_as_accumulator(powers[column]) * power);
    }
  }
  lost.for_each(classes, is_all, [&](std::int64_t first, std::int64_t end) {
    factors.for_each_logit(row, first, end, block, [&](std::int64_t column, float logit) {
      const float of_logit = exp2_approximate(transform.exponent_above(logit, shift) - exponent);
      powers[column] = round_to<bfloat16>(of_logit * transform.derivative(logit));
    });
  });
}

/// What a row's powers need before they are a gradient.
struct Lowering {
  float exponent;        ///< each becomes 2^-exponent times as large
  bool becomes_nothing;  ///< or 0

  __device__ bool is_needed() const { return becomes_nothing || exponent != 0.0f; }
};

/// By one thread: the statistics, and with powers row_factor and target_gradient.
template <bool kHasPowers>
__device__ Lowering store_row(const GradientOfRows& rows, std::int64_t row, const Sums& sums, bool is_any_lost,
                              const ClassStatistics<float>& state, float* statistics) {
  const int column = rows.targets.column(row);
  TargetClass<float> target;
  const float of_target = column >= 0 ? rows.memory.target_logit[row] : 0.0f;
  if (column >= 0) {
    target.logit = rows.transform.value(of_target);
    target.weight = rows.class_weight == nullptr ? 1.0f : rows.class_weight[column];
  }
  store_statistics(state, target, rows.terms, statistics + row * kCrossEntropyStatistics);
  Lowering lowering{};
  if constexpr (kHasPowers) {
    const SplitLse<float> lse = split_lse(softmax_anchor(state.softmax.max), logf(state.softmax.sum));
    const RowGradient<float> gradient = rows.row(row, lse);
    const bool is_nothing = gradient.mass == 0.0f && gradient.hard == 0.0f;
    const float anchor = softmax_anchor(state.softmax.max);
    // Of a shard the mass, like the target's gradient, depends on the others.
    const float of_softmax = is_nothing ? 0.0f : (rows.is_shard ? 1.0f : gradient.mass) * rows.transform.scale;
    const bool has_none = rows.is_shard && state.softmax.sum == 0.0f;  // all logits are -infinity, and the powers 0
    // One that is much smaller or larger would leave the range of bfloat16 in what it multiplies.
    const auto is_usual = [](double value) { return value > 0x1p-100 && value < 0x1p95; };
    const double exact_factor = double(of_softmax) / sums.sum;
    const double with_mass = rows.is_shard ? exact_factor * double(gradient.hard) : exact_factor;
    const bool is_in_range = is_usual(sums.sum) && (with_mass == 0.0 || is_usual(1.0 / fabs(with_mass)));
    auto factor = has_none ? of_softmax : static_cast<float>(exact_factor);
    if (!rows.targets.is_ignored(row) && !has_none && (is_any_lost || !is_in_range)) {
      const double exact = double(anchor) * kLog2EExact * rows.transform.stretch + double(log2f(state.softmax.sum)) -
                           double(rows.memory.shift[row]);
      lowering.exponent = static_cast<float>(rint(exact));
      // Beside lse = infinity the powers are 0, and NaN where they are infinite themselves; beside -infinity NaN.
      const bool is_finite = fabsf(lowering.exponent) < infinity<float>();
      factor = of_softmax * (is_finite ? exp2f(static_cast<float>(double(lowering.exponent) - exact)) : 1.0f);
    }
    const float distance = gradient.log_probability(target.logit);
    rows.memory.row_factor[row] = is_nothing ? 0.0f : factor;
    rows.memory.target_gradient[row] = is_nothing || column < 0 ? 0.0f : rows.of_target(of_target, distance, gradient);
    const bool is_finite = sums.sum < infinity<double>() && fabsf(lowering.exponent) < infinity<float>();
    lowering.becomes_nothing = is_nothing && !is_finite;
  }
  return lowering;
}

__device__ void clear_target(const GradientOfRows& rows, std::int64_t row) {
  const int column = rows.targets.column(row);
  if (column >= 0) static_cast<bfloat16*>(rows.in.to)[row * rows.in.stride + column] = round_to<bfloat16>(0.0f);
}

constexpr int kRowsOfBlock = 8;  // whose sums of a tile are 32 bytes

/// Adds up the tiles of each row, and finishes those rows of which nothing has to be computed again.
template <bool kHasPowers>
__global__ void __launch_bounds__(kThreads)
    add_tiles(const __grid_constant__ GradientOfRows rows, const __grid_constant__ SumsOfTiles tiles,
              std::int64_t count, float* statistics) {
  constexpr int kTilesAtOnce = kThreads / kRowsOfBlock;
  const int in_block = static_cast<int>(threadIdx.x) % kRowsOfBlock;
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsOfBlock + in_block;
  __shared__ double shared_sums[kWarps][kRowsOfBlock];
  __shared__ double shared_moments[kWarps][kRowsOfBlock];
  __shared__ int shared_lost[kWarps][kRowsOfBlock];
  Sums own;
  int is_lost = 0;
  static_assert(kExpProductRows % kRowsOfBlock == 0);  // the sums have whole tiles of rows
#pragma unroll 4
  for (std::int64_t tile = threadIdx.x / kRowsOfBlock; tile < tiles.tiles; tile += kTilesAtOnce) {
    own.sum += double(tiles.sum(tile, row));
    own.moment += double(tiles.moment(tile, row));
    is_lost |= tiles.is_lost(tile, row) ? 1 : 0;
  }
#pragma unroll
  for (int mask = kRowsOfBlock; mask < 32; mask *= 2) {
    own.sum += __shfl_xor_sync(~0u, own.sum, mask);
    own.moment += __shfl_xor_sync(~0u, own.moment, mask);
    is_lost |= __shfl_xor_sync(~0u, is_lost, mask);
  }
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x % 32 < kRowsOfBlock) {
    shared_sums[warp][in_block] = own.sum;
    shared_moments[warp][in_block] = own.moment;
    shared_lost[warp][in_block] = is_lost;
  }
  __syncthreads();
  if (threadIdx.x >= kRowsOfBlock || row >= count) return;
  if (const std::int32_t column = rows.memory.target[row]; rows.memory.first_of_class != nullptr && column >= 0) {
    const std::int64_t first = count - rows.memory.first_of_class[column];
    if (first != row) rows.memory.has_more_rows[first] = 1;
  }
  Sums sums;
  is_lost = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    sums.sum += shared_sums[i][in_block];
    sums.moment += shared_moments[i][in_block];
    is_lost |= shared_lost[i][in_block];
  }
  const bool is_ignored = rows.targets.is_ignored(row);  // its statistics are not used
  const float shift = rows.memory.shift[row];
  bool is_repeated = !is_ignored && (is_lost != 0 || sums.have_to_be_repeated(shift));
  if (!is_repeated) {
    ClassStatistics<float> state;
    if (!is_ignored) state = statistics_of_sums(sums, shift, rows.transform);
    const Lowering lowering = store_row<kHasPowers>(rows, row, sums, false, state, statistics);
    is_repeated = lowering.is_needed();
    if constexpr (kHasPowers) {
      if (!is_repeated) clear_target(rows, row);
    }
  }
  // In any order: a row is the same whichever block takes it.
  if (is_repeated) rows.memory.repeated_rows[atomicAdd(rows.memory.repeated_count, 1)] = static_cast<std::int32_t>(row);
}

/// The other rows, of which a cluster takes one after the other.
template <typename T, bool kHasPowers>
__global__ void __launch_bounds__(kRepeatThreads)
    repeat_rows(const __grid_constant__ GradientOfRows rows, const __grid_constant__ SumsOfTiles tiles,
                const __grid_constant__ LogitFactors<T> factors, float* statistics) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // where the product is
  const Targets& targets = rows.targets;
  const auto cluster = cooperative_groups::this_cluster();
  const auto block = static_cast<int>(cluster.block_rank());
  const int clusters = static_cast<int>(gridDim.x) / kRepeatBlocks;
  const int count = *rows.memory.repeated_count;
  __shared__ LostTiles lost;
  __shared__ Lowering shared;  // of the first block
  for (int i = static_cast<int>(blockIdx.x) / kRepeatBlocks; i < count; i += clusters) {
    const std::int64_t row = rows.memory.repeated_rows[i];
    const bool is_ignored = targets.is_ignored(row);
    const float shift = rows.memory.shift[row];
    lost.clear();
    __syncthreads();
    Sums own;
    bool has_lost = false;
    for (std::int64_t tile = threadIdx.x; tile < tiles.tiles; tile += kRepeatThreads) {
      if (!is_ignored && tiles.is_lost(tile, row)) {
        has_lost = true;
        lost.add(tile);
        continue;
      }
      own.sum += double(tiles.sum(tile, row));
      own.moment += double(tiles.moment(tile, row));
    }
    const bool is_any_lost = __syncthreads_or(has_lost) != 0;
    const Sums sums = reduce_block<kRepeatThreads>(own, [](const Sums& a, const Sums& b) {
      return Sums{a.sum + b.sum, a.moment + b.moment};
    });
    const bool is_all_lost = __syncthreads_or(threadIdx.x == 0 && !is_ignored && sums.have_to_be_repeated(shift)) != 0;
    ClassStatistics<float> state;
    lost.for_each(targets.classes, is_all_lost, [&](std::int64_t first, std::int64_t end) {
      factors.for_each_logit(row, first, end, block, [&](std::int64_t, float logit) {
        const float z = rows.transform.value(logit);
        ClassStatistics<float> one;
        one.softmax = {z == z ? z : -infinity<float>(), exponential(z - softmax_anchor(z))};
        state = MergeStatistics{}(state, one);
      });
    });
    state = reduce_block<kRepeatThreads>(state, MergeStatistics{});
    if (threadIdx.x == 0 && block == 0 && !is_all_lost && !is_ignored) {
      state = MergeStatistics{}(statistics_of_sums(sums, shift, rows.transform), state);
    }
    state = reduce_cluster(state, MergeStatistics{});
    if (threadIdx.x == 0 && block == 0) {
      shared = store_row<kHasPowers>(rows, row, sums, is_any_lost, state, statistics);
    }
    if constexpr (kHasPowers) {
      cluster.sync();  // `shared` is there
      const Lowering lowering = *cluster.map_shared_rank(&shared, 0);
      auto* powers = static_cast<bfloat16*>(rows.in.to) + row * rows.in.stride;
      if (lowering.becomes_nothing) {
        for (std::int64_t column = block * kRepeatThreads + threadIdx.x; column < targets.classes;
             column += kRepeatBlocks * kRepeatThreads) {
          powers[column] = round_to<bfloat16>(0.0f);
        }
      } else if (lowering.is_needed()) {
        lower_powers(lost, factors, row, targets.classes, rows.transform, shift, lowering.exponent, is_all_lost, block,
                     powers);
      }
      cluster.sync();  // every block has written its powers and read `shared`
      if (threadIdx.x == 0 && block == 0) clear_target(rows, row);
    }
    __syncthreads();  // before `lost` changes
  }
#endif
}

/// The part of a shard in the softmax of all.
__device__ float share_of(const SoftmaxState<float>& own, const SoftmaxState<float>& all) {
  if (all.max == infinity<float>()) return own.max == infinity<float>() ? 1.0f : 0.0f;
  if (all.max == -infinity<float>()) return nan_of<float>();
  return own.sum == 0.0f ? 0.0f : exponential(softmax_anchor(own.max) - all.max) * (own.sum / all.sum);
}

/// A thread a row.
__global__ void __launch_bounds__(kThreads)
    finish_shard(const __grid_constant__ GradientOfRows rows, std::int64_t count, const float* statistics,
                 const float* gathered, std::int64_t shards) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const auto softmax_at = [&](const float* of) {
    return stored_statistics<float>(of + i * kCrossEntropyStatistics).softmax;
  };
  SoftmaxState<float> all;
  for (std::int64_t shard = 0; shard < shards; ++shard) {
    all = MergeSoftmax{}(all, softmax_at(gathered + shard * count * kCrossEntropyStatistics));
  }
  const RowGradient<float> gradient = rows.row(i, split_lse(softmax_anchor(all.max), logf(all.sum)));
  const bool is_nothing = gradient.mass == 0.0f && gradient.hard == 0.0f;
  rows.memory.row_factor[i] *= is_nothing ? 0.0f : gradient.mass * share_of(softmax_at(statistics), all);
  const bool has_target = !is_nothing && rows.targets.column(i) >= 0;
  const float z = has_target ? rows.memory.target_logit[i] : 0.0f;
  const float distance = gradient.log_probability(rows.transform.value(z));
  rows.memory.target_gradient[i] = has_target ? rows.of_target(z, distance, gradient) : 0.0f;
}

// ---- the gradient --------------------------------------------------------------------------------------------------

/// A thread a row: shift and coefficients for the product. With c = log2(e), d = z' - lse and d * c = t + rest:
///   softmax * (mass + slope * d) = 2^t * 2^rest * (mass + slope / c * (t + rest)) = 2^t * (constant + slope' * t)
/// times scale = dz'/dz. An infinite lse has no rest.
__global__ void __launch_bounds__(kThreads)
    prepare_gradient(const __grid_constant__ GradientOfRows rows, std::int64_t count) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const RowGradient<float> row = rows.row(i);
  const auto shift = static_cast<float>(double(row.lse.high) * kLog2EExact * rows.transform.stretch);
  const float rest = rows.transform.rest_of(shift, row.lse);
  const float correction = exp2_approximate(rest) * rows.transform.scale;
  const bool is_finite = row.lse.high - row.lse.high == 0.0f;
  const float slope =
      row.slope == 0.0f ? 0.0f : row.slope * kUnit<float> * (is_finite ? correction : rows.transform.scale);
  rows.memory.shift[i] = shift;
  rows.memory.target[i] = rows.targets.column(i);
  rows.memory.slope[i] = slope;
  const float constant = row.mass == 0.0f ? 0.0f : row.mass * (is_finite ? correction : rows.transform.scale);
  rows.memory.constant[i] = slope == 0.0f || !is_finite ? constant : fmaf(slope, rest, constant);
}

/// A thread a row: the target's element.
__global__ void __launch_bounds__(kThreads)
    finish_gradient(const __grid_constant__ GradientOfRows rows, std::int64_t count) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const int column = rows.memory.target[i];
  if (column < 0) return;
  const RowGradient<float> row = rows.row(i);
  const float z = rows.memory.target_logit[i];
  const float distance = row.log_probability(rows.transform.value(z));
  static_cast<bfloat16*>(rows.in.to)[i * rows.in.stride + column] =
      round_to<bfloat16>(rows.of_target(z, distance, row));
}

// ---- both at once --------------------------------------------------------------------------------------------------

/// x times each row's factor. A block a row; rows of x start on 16 bytes.
__global__ void __launch_bounds__(kThreads)
    scale_rows(const bfloat16* x, std::int64_t x_stride, const float* factor, std::int64_t features, bfloat16* to) {
  constexpr int kSize = Vector<bfloat16>::kSize;
  const std::int64_t row = blockIdx.x;
  const float own = factor[row];
  for (std::int64_t i = std::int64_t{threadIdx.x} * kSize; i < features; i += kThreads * kSize) {
    float values[kSize];
    unpack(*reinterpret_cast<const Vector<bfloat16>*>(x + row * x_stride + i), values);
#pragma unroll
    for (float& value : values) value = own == 0.0f ? 0.0f : value * own;  // a row of NaN may count for nothing
    *reinterpret_cast<Vector<bfloat16>*>(to + row * features + i) = pack<bfloat16>(values);
  }
}

/// kSize elements from an address that suits.
template <int kSize, typename T>
__device__ void load_elements(const T* from, float (&values)[kSize]) {
  if constexpr (kSize == 1) {
    values[0] = load_as_accumulator(*from);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; i += Vector<T>::kSize) {
      float part[Vector<T>::kSize];
      unpack(*reinterpret_cast<const Vector<T>*>(from + i), part);
#pragma unroll
      for (int k = 0; k < Vector<T>::kSize; ++k) values[i + k] = part[k];
    }
  }
}
template <int kSize, typename T>
__device__ void store_elements(const float (&values)[kSize], T* to) {
  if constexpr (kSize == 1) {
    *to = round_to<T>(values[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; i += Vector<T>::kSize) {
      float part[Vector<T>::kSize];
#pragma unroll
      for (int k = 0; k < Vector<T>::kSize; ++k) part[k] = values[i + k];
      *reinterpret_cast<Vector<T>*>(to + i) = pack<T>(part);
    }
  }
}

/// Adds the sum of target_gradient * x, over the rows with a target, to that class's grad_weight, and the sum of
/// target_gradient to its grad_bias; each may be nullptr. A block for each row and some features, of which the first
/// row of a class does it, and looks for the others only where there are some.
template <typename G, int kSize>
__global__ void __launch_bounds__(kThreads)
    add_targets(const __grid_constant__ ExpProductMemory memory, std::int64_t rows, const bfloat16* x,
                std::int64_t x_stride, std::int64_t features, G* grad_weight, std::int64_t stride, double* grad_bias) {
  const std::int64_t first = blockIdx.x;
  const std::int32_t own = memory.target[first];
  if (own < 0 || rows - memory.first_of_class[own] != first) return;
  const std::int64_t i = (std::int64_t{blockIdx.y} * kThreads + threadIdx.x) * kSize;
  const bool has_features = grad_weight != nullptr && i < features;
  const bool has_bias = grad_bias != nullptr && blockIdx.y == 0 && threadIdx.x == 0;
  G* to = grad_weight + own * stride + i;
  float sums[kSize];
  double bias_sum = 0.0;
  if (has_features) load_elements<kSize>(to, sums);
  const auto add = [&](std::int64_t row) {
    const float gradient = memory.target_gradient[row];
    bias_sum += double(gradient);
    if (!has_features) return;
    float values[kSize];
    load_elements<kSize>(x + row * x_stride + i, values);
#pragma unroll
    for (int k = 0; k < kSize; ++k) sums[k] = gradient == 0.0f ? sums[k] : fmaf(gradient, values[k], sums[k]);
  };
  add(first);
  constexpr int kPart = 1024;  // rows that are looked at in turn
  constexpr int kRounds = kPart / kThreads;
  const auto warp = static_cast<int>(threadIdx.x) / 32;
  const auto lane = static_cast<int>(threadIdx.x) % 32;
  __shared__ unsigned of_class[kPart / 32];  // a bit a row
  for (std::int64_t begin = memory.has_more_rows[first] != 0 ? first + 1 : rows; begin < rows; begin += kPart) {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const std::int64_t row = begin + round * kThreads + threadIdx.x;
      const unsigned found = __ballot_sync(~0u, row < rows && memory.target[row] == own);
      if (lane == 0) of_class[round * kWarps + warp] = found;
    }
    __syncthreads();
    if (has_features || has_bias) {
      for (int word = 0; word < kPart / 32; ++word) {
        for (unsigned left = of_class[word]; left != 0; left &= left - 1) {
          add(begin + word * 32 + __ffs(static_cast<int>(left)) - 1);
        }
      }
    }
    __syncthreads();
  }
  if (has_features) store_elements<kSize>(sums, to);
  if (has_bias) grad_bias[own] += bias_sum;
}

// ---- host ----------------------------------------------------------------------------------------------------------

ExpProduct product_of(const FusedRows& rows) {
  const LogitTransform transform(rows.options);
  return {.device = rows.device,
          .rows = rows.rows,
          .classes = rows.classes,
          .features = rows.features,
          .dtype = rows.dtype,
          .x = rows.x,
          .weight = rows.weight,
          .bias = rows.bias,
          .to_tanh = transform.to_tanh,
          .factor = transform.factor,
          .shift = rows.memory.shift,
          .target = rows.memory.target,
          .target_logit = rows.memory.target_logit};
}

template <typename Body>
void dispatch_half(DType dtype, Body body) {
  dtype == DType::bfloat16 ? body.template operator()<bfloat16>() : body.template operator()<float16>();
}

}  // namespace

void guess_shifts(const char* op, const FusedRows& rows, void* stream) {
  if (std::int32_t* first_of_class = rows.memory.first_of_class; first_of_class != nullptr) {
    const std::size_t bytes = static_cast<std::size_t>(rows.classes) * sizeof(std::int32_t);
    check_status(cudaMemsetAsync(first_of_class, 0, bytes, static_cast<cudaStream_t>(stream)), op);
  }
  dispatch_half(rows.dtype, [&]<typename T>() {
    launch(op, guess_shift<T>, {.blocks = ceil_divide(rows.rows, kWarps), .threads = kThreads, .stream = stream},
           Targets(rows), rows.rows, static_cast<const T*>(rows.x.data), rows.x.stride,
           static_cast<const T*>(rows.weight.data), rows.weight.stride, rows.features,
           static_cast<int>(sampled_classes(rows.classes)), rows.bias, sample_distance(rows.classes),
           LogitTransform(rows.options), rows.memory);
  });
}

namespace {

GradientOfRows gradient_of(const FusedRows& rows, const FusedGradient& gradient, bool is_shard) {
  return {Targets(rows), LogitTransform(rows.options), terms_of(rows), rows.class_weight, gradient, rows.memory,
          is_shard};
}

template <typename T, bool kHasPowers>
void finish(const char* op, const FusedRows& rows, const GradientOfRows& of_rows, float* statistics, void* stream) {
  const SumsOfTiles tiles(rows);
  launch(op, add_tiles<kHasPowers>,
         {.blocks = ceil_divide(rows.rows, kRowsOfBlock), .threads = kThreads, .stream = stream}, of_rows, tiles,
         rows.rows, statistics);
  constexpr std::int64_t kClusters = 33;  // most have nothing to do
  launch(op, repeat_rows<T, kHasPowers>,
         {.blocks = std::min(rows.rows, kClusters) * kRepeatBlocks,
          .threads = kRepeatThreads,
          .cluster_blocks = kRepeatBlocks,
          .stream = stream},
         of_rows, tiles, LogitFactors<T>(rows), statistics);
}

}  // namespace

void statistics_of_product(const char* op, const FusedRows& rows, float* statistics, const ExecutionContext& context) {
  exp_product(op, product_of(rows), ExpProductSums{rows.memory.sums, rows.memory.moments}, context);
  dispatch_half(rows.dtype, [&]<typename T>() {
    finish<T, false>(op, rows, gradient_of(rows, {}, false), statistics, context.stream);
  });
}

void powers_of_product(const char* op, const FusedRows& rows, const FusedGradient& gradient, bool is_shard,
                       float* statistics, const ExecutionContext& context) {
  const ExpProductMemory& memory = rows.memory;
  exp_product(op, product_of(rows), ExpProductSums{memory.sums, memory.moments, gradient.to, gradient.stride}, context);
  finish<bfloat16, true>(op, rows, gradient_of(rows, gradient, is_shard), statistics, context.stream);
}

void finish_powers_of_shard(const char* op, const FusedRows& rows, const FusedGradient& gradient,
                            const float* statistics, const float* gathered, std::int64_t shards, void* stream) {
  launch(op, finish_shard, {.blocks = ceil_divide(rows.rows, kThreads), .threads = kThreads, .stream = stream},
         gradient_of(rows, gradient, true), rows.rows, statistics, gathered, shards);
}

void scale_rows(const char* op, const FusedRows& rows, void* to, void* stream) {
  launch(op, scale_rows, {.blocks = rows.rows, .threads = kThreads, .stream = stream},
         static_cast<const bfloat16*>(rows.x.data), rows.x.stride, static_cast<const float*>(rows.memory.row_factor),
         rows.features, static_cast<bfloat16*>(to));
}

void add_targets(const char* op, const FusedRows& rows, void* grad_weight, DType dtype, std::int64_t stride,
                 double* grad_bias, void* stream) {
  const auto add = [&](auto* to) {
    using G = std::remove_pointer_t<decltype(to)>;
    // x and features suit vectors: cuda/exp_product.h.
    const bool suits =
        (reinterpret_cast<std::uintptr_t>(to) | static_cast<std::uintptr_t>(stride) * sizeof(G)) % 16 == 0;
    const int size = suits ? Vector<bfloat16>::kSize : 1;
    launch(op, suits ? add_targets<G, Vector<bfloat16>::kSize> : add_targets<G, 1>,
           {.blocks = rows.rows,
            .blocks_y = grad_weight == nullptr ? 1 : ceil_divide(rows.features, std::int64_t{kThreads} * size),
            .threads = kThreads,
            .stream = stream},
           rows.memory, rows.rows, static_cast<const bfloat16*>(rows.x.data), rows.x.stride, rows.features, to, stride,
           grad_bias);
  };
  dtype == DType::bfloat16 ? add(static_cast<bfloat16*>(grad_weight)) : add(static_cast<float*>(grad_weight));
}

void gradient_by_product(const char* op, const FusedRows& rows, const FusedGradient& gradient,
                         const ExecutionContext& context) {
  const GradientOfRows of_rows = gradient_of(rows, gradient, false);
  const LaunchShape shape{.blocks = ceil_divide(rows.rows, kThreads), .threads = kThreads, .stream = context.stream};
  launch(op, prepare_gradient, shape, of_rows, rows.rows);
  exp_product(op, product_of(rows),
              ExpProductGradient{rows.memory.constant, rows.memory.slope, gradient.to, gradient.stride}, context);
  launch(op, finish_gradient, shape, of_rows, rows.rows);
}

}  // namespace eaves::cuda
