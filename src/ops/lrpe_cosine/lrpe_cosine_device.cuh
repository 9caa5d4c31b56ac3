// The device code that the kernels of lrpe_cosine share: the tokens and features of a thread, the angles of a thread's
// features, and the activations.
//
// A thread has kWidth neighbouring features: a 16-byte vector, or one element if vectors do not fit
// (lrpe_cosine_row_per_warp.cuh). The lanes of a token are neighbouring threads, and a block has as many tokens as fit.
// If the batch entries share their angles, a thread computes cosine and sine of a token once and walks through the
// batch; otherwise a thread's tokens are neighbours. The backward of a softmax over a short sequence has its own kernel
// (lrpe_cosine_whole_columns.cuh).
#pragma once

#include "cuda/angle.cuh"
#include "cuda/columns.cuh"
#include "cuda/device.h"
#include "cuda/launch.cuh"
#include "cuda/math.cuh"
#include "ops/lrpe_cosine/lrpe_cosine_backend.h"

namespace eaves::cuda {

// H200, [12, 12, 8192, 128] bf16, backward of silu and of a softmax over the features: 128 threads 0.306 and 0.320 ms,
// 256 threads 0.327 and 0.362. Smaller blocks leave fewer registers unused.
inline constexpr int kLrpeThreads = 128;

// ---- threads, tokens and features ---------------------------------------------------------------------------------

/// The cut of the work of one head. Along x of the launch grid: row blocks, and groups of lanes if a token has more
/// vectors than a block has threads. Along y: chunks of the batch.
struct LrpeTiling {
  std::uint32_t log2_lanes = 0;  ///< threads that share a token: a power of two
  std::uint32_t vectors = 0;     ///< of a token: D / kWidth; lanes from this number on are idle
  std::uint32_t heads = 1;
  std::uint32_t row_blocks = 1;    ///< of a head
  std::uint32_t steps = 1;         ///< a block takes its next rows this many times
  bool takes_heads_first = false;  ///< neighbouring blocks take neighbouring heads: these lie closer than tokens
  bool is_reversed = false;        ///< the last row block comes first
  std::int64_t rows = 0;           ///< of a head: N if the batch shares its angles, else B * N
  std::int64_t chunk = 1;          ///< batch entries of a block, if angles are shared
  std::uint32_t chunks = 1;

  EAVES_HOST_DEVICE std::uint32_t lanes() const { return 1u << log2_lanes; }
  EAVES_HOST_DEVICE std::uint32_t block_rows() const { return kLrpeThreads >> log2_lanes; }
};

struct LrpePlace {
  std::uint32_t head;
  std::uint32_t row_block;
  std::uint32_t chunk;
  std::uint32_t vector;
  std::uint32_t row;  ///< within the block
};

__device__ inline LrpePlace find_place(const LrpeTiling& tiling) {
  LrpePlace place;
  std::uint32_t index = blockIdx.x;
  std::uint32_t group = 0;
  if (tiling.vectors > tiling.lanes()) {
    const std::uint32_t groups = (tiling.vectors + tiling.lanes() - 1) >> tiling.log2_lanes;
    index /= groups;
    group = blockIdx.x - index * groups;
  }
  if (tiling.takes_heads_first) {
    place.row_block = index / tiling.heads;
    place.head = index - place.row_block * tiling.heads;
  } else {
    place.head = index / tiling.row_blocks;
    place.row_block = index - place.head * tiling.row_blocks;
  }
  if (tiling.is_reversed) place.row_block = tiling.row_blocks - 1 - place.row_block;
  place.chunk = blockIdx.y;
  place.vector = (group << tiling.log2_lanes) + (threadIdx.x & (tiling.lanes() - 1));
  place.row = threadIdx.x >> tiling.log2_lanes;
  return place;
}

inline std::uint32_t log2_lanes_for(std::int64_t vectors) {
  std::uint32_t log2 = 0;
  while ((1u << log2) < kLrpeThreads && (1 << log2) < vectors) ++log2;
  return log2;
}

/// The number of blocks along x.
inline std::int64_t blocks_of(const LrpeTiling& tiling) {
  return std::int64_t{tiling.heads} * tiling.row_blocks * ceil_divide(tiling.vectors, tiling.lanes());
}

/// Elements of T in a 16-byte vector, a thread's features; 1 for float64, which has no vectors.
template <typename T>
inline constexpr int kLrpeVectorWidth = sizeof(T) == 8 ? 1 : Vector<T>::kSize;

/// Are every token's features whole vectors? The stride of an axis of size 1 does not matter.
inline bool has_vectors(const void* data, const LrpeCosineStrides& strides, const LrpeCosineShape& shape,
                        std::int64_t element_bytes) {
  const std::int64_t size = 16 / element_bytes;
  if (element_bytes == 8 || shape.features % size != 0 || strides[3] != 1) return false;
  if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0) return false;
  return (shape.batch == 1 || strides[0] % size == 0) && (shape.heads == 1 || strides[1] % size == 0) &&
         (shape.positions == 1 || strides[2] % size == 0);
}

/// Loads kWidth neighbouring numbers of an [..., D] tensor of accumulators.
template <int kWidth, typename A>
__device__ void load_accumulators(const A* address, A (&values)[kWidth]) {
  if constexpr (kWidth % 4 == 0 && sizeof(A) == 4) {
#pragma unroll
    for (int i = 0; i < kWidth; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(address + i);
      values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = address[i];
  }
}

/// The logsumexp of a thread's columns, for a softmax over the sequence. `lse` is [B * H, 2, D].
template <typename A, int kWidth>
struct ColumnLse {
  A high[kWidth];
  A low[kWidth];

  __device__ ColumnLse(const A* lse, std::int64_t group, std::int64_t feature, std::int64_t features) {
    const A* const first = lse + 2 * group * features + feature;
    load_accumulators<kWidth>(first, high);
    load_accumulators<kWidth>(first + features, low);
  }

  /// The log of the softmax of x in column i.
  __device__ A log_softmax(A x, int i) const { return (x - high[i]) - low[i]; }
};

// ---- angles --------------------------------------------------------------------------------------------------------

/// theta and the axis of each feature of a thread: the same for all of its tokens.
template <typename T, int kWidth>
struct FeatureAngles {
  using A = Accumulator<T>;
  A theta[kWidth];          ///< 0 if a feature has no axis
  std::int64_t first_axis;  ///< axis of the first feature
  int in_first_axis;        ///< number of the features on this axis; kWidth for most threads
  A largest;                ///< the largest |theta| that is not NaN

  __device__ FeatureAngles(const LrpeCosineAngles& angles, std::int64_t head, std::int64_t first_feature) {
    first_axis = angles.axis_of(first_feature);
    const std::int64_t within = first_feature - first_axis * angles.axis_features;
    in_first_axis = static_cast<int>(min(angles.axis_features - within, std::int64_t{kWidth}));
    const std::int64_t row = head * angles.theta_head_stride;
    angles.theta_dtype == kDTypeOf<T> ? load_theta(angles, static_cast<const T*>(angles.theta) + row, within)
                                      : load_theta(angles, static_cast<const float*>(angles.theta) + row, within);
    largest = A(0);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) largest = fmax(largest, fabs(theta[i]));
  }

 private:
  template <typename Theta>
  __device__ void load_theta(const LrpeCosineAngles& angles, const Theta* row, std::int64_t within) {
    const std::int64_t stride = angles.theta_feature_stride;
    const Theta* from = row + within * stride;
    if (in_first_axis == kWidth) {
      const bool has_axis = first_axis < angles.axes;
      if constexpr (kWidth % 4 == 0) {
        if (has_axis && stride == 1 && reinterpret_cast<std::uintptr_t>(from) % 16 == 0) {
          if constexpr (sizeof(Theta) == 2) {
            return unpack(Vector<Theta>{*reinterpret_cast<const uint4*>(from)}, theta);
          } else {
            return load_accumulators<kWidth>(from, theta);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i, from += stride) {
        theta[i] = has_axis ? static_cast<A>(load_as_accumulator(*from)) : A(0);
      }
      return;
    }
    std::int64_t axis = first_axis;
    std::int64_t feature = within;
#pragma unroll
    for (int i = 0; i < kWidth; ++i, from += stride) {
      theta[i] = axis < angles.axes ? static_cast<A>(load_as_accumulator(*from)) : A(0);
      if (++feature == angles.axis_features) {
        feature = 0;
        ++axis;
        from = row - stride;
      }
    }
  }
};

/// A token of a head, and its offsets in kTensors tensors. `row` counts the tokens of all batch entries behind each
/// other. advance() does not divide as long as the batch entry stays the same.
template <int kTensors>
struct LrpeToken {
  std::int64_t row;
  std::int64_t batch;
  std::int64_t n;
  std::int64_t offsets[kTensors];

  __device__ LrpeToken(std::int64_t first_row, std::int64_t positions,
                       const LrpeCosineStrides* const (&strides)[kTensors])
      : row(first_row), batch(divide(first_row, positions)) {
    n = row - batch * positions;
    find(strides);
  }
  __device__ void advance(std::int64_t rows, std::int64_t positions,
                          const LrpeCosineStrides* const (&strides)[kTensors]) {
    row += rows;
    n += rows;
    if (n < positions) {
#pragma unroll
      for (int t = 0; t < kTensors; ++t) offsets[t] += rows * (*strides[t])[2];
      return;
    }
    batch = divide(row, positions);
    n = row - batch * positions;
    find(strides);
  }

 private:
  __device__ void find(const LrpeCosineStrides* const (&strides)[kTensors]) {
#pragma unroll
    for (int t = 0; t < kTensors; ++t) offsets[t] = batch * (*strides[t])[0] + n * (*strides[t])[2];
  }
};

/// angles.position() without computes_positions. Not inlined: inlined for each feature of a vector, it was half of a
/// kernel's instructions.
__device__ __noinline__ inline std::int64_t general_position(const LrpeCosineAngles& angles, std::int64_t batch,
                                                             std::int64_t n, std::int64_t axis) {
  return angles.position(batch, n, axis);
}

/// Cosine and sine of a thread's features for one token.
template <typename T, int kWidth>
struct TokenAngles {
  using A = Accumulator<T>;
  A cosine[kWidth];
  A sine[kWidth];

  __device__ void compute(const LrpeCosineAngles& angles, const FeatureAngles<T, kWidth>& features, std::int64_t batch,
                          std::int64_t n) {
    if (!angles.has_angle(n)) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) cosine[i] = A(1), sine[i] = A(0);
      return;
    }
    A phi[kWidth];
    A farthest = A(0);
    for_each_position(angles, features, batch, n, [&](int i, A position) {
      phi[i] = features.theta[i] * position;
      farthest = fmax(farthest, fabs(position));
    });
    sine_cosine(phi, farthest * features.largest, sine, cosine);
  }

  /// Calls body(i, position of feature i); the position is 0 if the feature has no angle.
  template <typename Body>
  __device__ static void for_each_position(const LrpeCosineAngles& angles, const FeatureAngles<T, kWidth>& features,
                                           std::int64_t batch, std::int64_t n, Body body) {
    const auto position_on = [&](std::int64_t axis) {
      if (axis >= angles.axes || !angles.has_angle(n)) return A(0);
      return static_cast<A>(angles.computes_positions ? angles.computed_position(n, axis)
                                                      : general_position(angles, batch, n, axis));
    };
    const A first = position_on(features.first_axis);
    if (features.in_first_axis == kWidth) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) body(i, first);
      return;
    }
    A position = first;
    std::int64_t axis = features.first_axis;
    std::int64_t left = features.in_first_axis;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (left == 0) {
        position = position_on(++axis);
        left = angles.axis_features;
      }
      --left;
      body(i, position);
    }
  }
};

// ---- activations ---------------------------------------------------------------------------------------------------

/// e^x, with a relative error of 2e-7 for float32 results: the rounding of x * log2(e) is corrected. 16-bit results are
/// too coarse for the correction.
template <typename T>
__device__ Accumulator<T> precise_exponential(Accumulator<T> x) {
  if constexpr (std::is_same_v<T, float>) {
    const float high = x * kLog2E;
    const float power = exp2_approximate(high);
    // Includes log2(e) - kLog2E, the rounding of log2(e) to float32.
    const float low = fmaf(x, 1.925963e-8f, fmaf(x, kLog2E, -high));
    // Beyond 128 the power is 0 or infinite, and `low` may be inf - inf.
    return fabsf(high) < 128.0f ? fmaf(power, low * 0.693147181f, power) : power;
  } else {
    return exponential(x);
  }
}

__device__ inline float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ inline double reciprocal(double x) { return 1.0 / x; }

/// Replaces x by activation(x), for elementwise activations.
template <typename T, int kWidth>
__device__ void activate(Activation activation, Accumulator<T> (&x)[kWidth]) {
  using A = Accumulator<T>;
  if (activation == Activation::relu) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] = x[i] < A(0) ? A(0) : x[i];  // keeps NaN
    return;
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const A sigmoid = reciprocal(A(1) + precise_exponential<T>(-x[i]));
    x[i] = activation == Activation::silu ? x[i] * sigmoid : sigmoid;
  }
}

/// Replaces x by activation(x), and computes the derivative at x.
template <typename T, int kWidth>
__device__ void activate(Activation activation, Accumulator<T> (&x)[kWidth], Accumulator<T> (&derivative)[kWidth]) {
  using A = Accumulator<T>;
  if (activation == Activation::relu) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      derivative[i] = x[i] <= A(0) ? A(0) : A(1);
      x[i] = x[i] < A(0) ? A(0) : x[i];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    // e^-|x| gives both s(|x|) and s(-|x|): it does not overflow, and no result is 1 minus a number near 1.
    const A power = precise_exponential<T>(-fabs(x[i]));
    const A larger = reciprocal(A(1) + power);
    const A smaller = power * larger;
    const A sigmoid = x[i] < A(0) ? smaller : larger;
    const A slope = larger * smaller;
    if (activation == Activation::silu) {
      derivative[i] = fma(x[i], slope, sigmoid);
      x[i] = x[i] * sigmoid;
    } else {
      derivative[i] = slope;
      x[i] = sigmoid;
    }
  }
}

/// Reduces a value over the lanes of a token, which are neighbours in a warp. All lanes of the warp call it.
template <typename A, typename Combine>
__device__ A over_lanes(A value, std::uint32_t lanes, Combine combine) {
  for (std::uint32_t mask = lanes / 2; mask > 0; mask /= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, mask));
  }
  return value;
}

/// Softmax over a token's features. A thread has kWidth of them; a missing feature is -inf.
template <typename T, int kWidth>
__device__ void feature_softmax(Accumulator<T> (&x)[kWidth], std::uint32_t lanes) {
  using A = Accumulator<T>;
  A max = x[0];
#pragma unroll
  for (int i = 1; i < kWidth; ++i) max = fmax(max, x[i]);
  max = over_lanes(max, lanes, [](A a, A b) { return fmax(a, b); });
  A sum = A(0);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    x[i] = precise_exponential<T>(x[i] - max);  // NaN if all x are -inf, or one is +inf
    sum += x[i];
  }
  sum = over_lanes(sum, lanes, [](A a, A b) { return a + b; });
  const A scale = A(1) / sum;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] *= scale;
}

}  // namespace eaves::cuda
