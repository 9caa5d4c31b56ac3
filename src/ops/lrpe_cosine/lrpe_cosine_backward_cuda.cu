// The backward of lrpe_cosine on a GPU: one kernel that reads both halves of dL/d(out), x where it is needed, and
// writes dL/d(x), for rows of whole vectors, and one for all others (lrpe_cosine_row_per_warp.cuh). The terms of
// dL/d(theta) are summed on the way, and finished by a second, small kernel. A softmax over the sequence needs the sum
// of a * g of each column first.
#include "core/dispatch.h"
#include "ops/lrpe_cosine/lrpe_cosine_columns.cuh"
#include "ops/lrpe_cosine/lrpe_cosine_device.cuh"
#include "ops/lrpe_cosine/lrpe_cosine_plan.h"
#include "ops/lrpe_cosine/lrpe_cosine_row_per_warp.cuh"

namespace eaves::cuda {
namespace {

constexpr const char* kOp = "lrpe_cosine_backward";

template <typename T>
struct BackwardArguments {
  LrpeTiling tiling;
  std::int64_t batch;
  std::int64_t heads;
  std::int64_t positions;
  std::int64_t features;
  Activation activation;
  const T* grad_out;
  const T* x;
  T* grad_x;                          ///< or nullptr
  const Accumulator<T>* lse;          ///< [B, H, 2, D], of a softmax over the sequence
  const Accumulator<T>* column_dots;  ///< [B, H, D], likewise: sum of a * g
  Accumulator<T>* partials;           ///< [H, partials, D] of theta; [partials, B * H * D] of column_dots
  LrpeCosineStrides grad_out_strides;
  LrpeCosineStrides x_strides;
  LrpeCosineStrides grad_x_strides;
  LrpeCosineAngles angles;
};

/// What a thread of the backward has of one token: the vectors that it loads, and what becomes of them.
template <typename T, LrpeKind kKind, bool kHasThetaGradient>
struct TokenGradient {
  using A = Accumulator<T>;
  static constexpr int kWidth = kLrpeVectorWidth<T>;
  using Lanes = Side<T, kWidth>;
  static constexpr bool kReadsX = kKind != LrpeKind::none || kHasThetaGradient;
  Lanes grad_cosine;
  Lanes grad_sine;
  Lanes x;

  /// Where a token is not there, what is neutral in every sum over the lanes of the warp.
  __device__ void read(const BackwardArguments<T>& p, bool is_there, const T* from, const T* x_from) {
    if (!is_there) {
      grad_cosine = Lanes{};
      grad_sine = Lanes{};
      x = Lanes::minus_infinity();
      return;
    }
    grad_cosine = Lanes::read(from);
    grad_sine = Lanes::read(from + p.features * p.grad_out_strides[3]);
    if constexpr (kReadsX) x = Lanes::read(x_from);
  }

  /// dL/d(x) in grad_x, and in theta_terms what theta's gradient has of each feature, but for the position. All lanes
  /// of the warp call it where the softmax is over the features.
  __device__ void compute(const BackwardArguments<T>& p, bool is_there, const TokenAngles<T, kWidth>& token,
                          std::int64_t group, std::int64_t feature, A (&grad_x)[kWidth],
                          A (&theta_terms)[kWidth]) const {
    A a[kWidth];
    A cosine_part[kWidth];
    A sine_part[kWidth];
    grad_cosine.unpack(cosine_part);
    grad_sine.unpack(sine_part);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      grad_x[i] = fma(cosine_part[i], token.cosine[i], sine_part[i] * token.sine[i]);
      theta_terms[i] = fma(sine_part[i], token.cosine[i], -cosine_part[i] * token.sine[i]);
    }
    if constexpr (kReadsX) x.unpack(a);
    if constexpr (kKind == LrpeKind::elementwise) {
      A derivative[kWidth];
      activate<T>(p.activation, a, derivative);
      // What relu holds back, it holds back whatever it is: 0 times NaN would come through.
      const bool is_relu = p.activation == Activation::relu;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        grad_x[i] = is_relu && derivative[i] == A(0) ? A(0) : grad_x[i] * derivative[i];
      }
    }
    if constexpr (kKind == LrpeKind::feature_softmax) {
      feature_softmax<T>(a, p.tiling.lanes());
      A dot = A(0);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) dot = fma(a[i], grad_x[i], dot);
      // A lane without features has no angles either.
      dot = over_lanes(is_there ? dot : A(0), p.tiling.lanes(), Plus{});
#pragma unroll
      for (int i = 0; i < kWidth; ++i) grad_x[i] = a[i] * (grad_x[i] - dot);
    }
    if constexpr (kKind == LrpeKind::sequence_softmax) {
      if (is_there) {
        const ColumnLse<A, kWidth> lse(p.lse, group, feature, p.features);
        A sums[kWidth] = {};
        if (p.grad_x != nullptr) load_accumulators<kWidth>(p.column_dots + group * p.features + feature, sums);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          a[i] = precise_exponential<T>(lse.log_softmax(a[i], i));
          grad_x[i] = a[i] * (grad_x[i] - sums[i]);
        }
      }
    }
    if constexpr (kHasThetaGradient) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) theta_terms[i] *= a[i];
    }
  }
};

/// Shared angles: kLrpeSlots batch entries are loaded before the first is used. Others: one token.
template <typename T, LrpeKind kKind, bool kIsShared, bool kHasThetaGradient>
__global__ void __launch_bounds__(kLrpeThreads) backpropagate(const __grid_constant__ BackwardArguments<T> p) {
  using A = Accumulator<T>;
  using Gradient = TokenGradient<T, kKind, kHasThetaGradient>;
  constexpr int kWidth = Gradient::kWidth;
  let_next_kernel_start();
  const LrpePlace place = find_place(p.tiling);
  const bool has_features = place.vector < p.tiling.vectors;
  const std::int64_t head = place.head;
  const std::int64_t feature = has_features ? std::int64_t{place.vector} * kWidth : 0;
  const std::int64_t block_rows = p.tiling.block_rows();
  const std::int64_t first_row = std::int64_t{place.row_block} * p.tiling.steps * block_rows + place.row;
  const T* const grad_head = p.grad_out + head * p.grad_out_strides[1] + feature * p.grad_out_strides[3];
  const T* const x_head = p.x + head * p.x_strides[1] + feature * p.x_strides[3];
  T* const grad_x_head = p.grad_x + head * p.grad_x_strides[1] + feature * p.grad_x_strides[3];

  TokenAngles<T, kWidth> token;
  A theta_terms[kWidth];
  const auto finish = [&](const Gradient& gradient, bool is_there, std::int64_t b, std::int64_t offset) {
    A grad_x[kWidth];
    gradient.compute(p, is_there, token, b * p.heads + head, feature, grad_x, theta_terms);
    if (is_there && p.grad_x != nullptr) Side<T, kWidth>::write(grad_x_head + offset, grad_x);
  };
  A theta_sums[kWidth] = {};
  if constexpr (kKind == LrpeKind::sequence_softmax) wait_for_previous_kernel();

  if constexpr (kIsShared) {
    const std::int64_t first_batch = place.chunk * p.tiling.chunk;
    const std::int64_t last_batch = min(first_batch + p.tiling.chunk, p.batch);
    const FeatureAngles<T, kWidth> theta(p.angles, head, feature);
    std::int64_t row = first_row;
    for (std::uint32_t step = 0; step < p.tiling.steps; ++step, row += block_rows) {
      const bool has_row = has_features && row < p.tiling.rows;
      if (kKind != LrpeKind::feature_softmax && !has_row) break;
      const T* const grad_row = grad_head + row * p.grad_out_strides[2];
      const T* const x_row = x_head + row * p.x_strides[2];
      const std::int64_t grad_x_row = row * p.grad_x_strides[2];
      A token_sums[kWidth] = {};
      for (std::int64_t base = first_batch; base < last_batch; base += kLrpeSlots) {
        Gradient slots[kLrpeSlots];
#pragma unroll
        for (int s = 0; s < kLrpeSlots; ++s) {
          slots[s].read(p, has_row && base + s < last_batch, grad_row + (base + s) * p.grad_out_strides[0],
                        x_row + (base + s) * p.x_strides[0]);
        }
        if (has_row && base == first_batch) token.compute(p.angles, theta, 0, row);
#pragma unroll
        for (int s = 0; s < kLrpeSlots; ++s) {
          const bool is_there = has_row && base + s < last_batch;
          if (kKind != LrpeKind::feature_softmax && !is_there) continue;
          finish(slots[s], is_there, base + s, grad_x_row + (base + s) * p.grad_x_strides[0]);
          if (kHasThetaGradient && is_there) {
#pragma unroll
            for (int i = 0; i < kWidth; ++i) token_sums[i] += theta_terms[i];
          }
        }
      }
      if (kHasThetaGradient && has_row && row >= p.angles.extra_tokens) {
        TokenAngles<T, kWidth>::for_each_position(p.angles, theta, 0, row, [&](int i, A position) {
          theta_sums[i] = fma(position, token_sums[i], theta_sums[i]);
        });
      }
    }
  } else {
    const LrpeCosineStrides* const strides[] = {&p.grad_out_strides, &p.x_strides, &p.grad_x_strides};
    LrpeToken<3> at(first_row, p.positions, strides);
    const FeatureAngles<T, kWidth> theta(p.angles, head, feature);
    for (std::uint32_t step = 0; step < p.tiling.steps; ++step) {
      const bool is_there = has_features && at.row < p.tiling.rows;
      if (kKind != LrpeKind::feature_softmax && !is_there) break;
      Gradient gradient;
      gradient.read(p, is_there, grad_head + at.offsets[0], x_head + at.offsets[1]);
      if (is_there) token.compute(p.angles, theta, at.batch, at.n);
      finish(gradient, is_there, at.batch, at.offsets[2]);
      if (kHasThetaGradient && is_there && at.n >= p.angles.extra_tokens) {
        TokenAngles<T, kWidth>::for_each_position(p.angles, theta, at.batch, at.n, [&](int i, A position) {
          theta_sums[i] = fma(position, theta_terms[i], theta_sums[i]);
        });
      }
      at.advance(block_rows, p.positions, strides);
    }
  }
  if constexpr (kHasThetaGradient) {
    const std::int64_t partial = std::int64_t{place.row_block} * p.tiling.chunks + place.chunk;
    const std::int64_t partials = std::int64_t{p.tiling.row_blocks} * p.tiling.chunks;
    A* const sums = p.partials + (head * partials + partial) * p.features;
    merge_rows<kWidth>(p.tiling, place, theta_sums, Plus{}, [&](std::int64_t d, A sum) { sums[d] = sum; });
  }
}

/// sum of a * g over the tokens of a row block, for kBatches batch entries with the same angles: `partials` is
/// [row_blocks, B * H * D]. The tiling's heads are heads of every kBatches batch entries.
template <typename T, int kWidth, int kBatches>
__global__ void __launch_bounds__(kLrpeThreads, 4) sum_column_dots(const __grid_constant__ BackwardArguments<T> p) {
  using A = Accumulator<T>;
  using Lanes = Side<T, kWidth>;
  let_next_kernel_start();
  const LrpePlace place = find_place(p.tiling);
  const std::int64_t chunk = divide(place.head, p.heads);
  const std::int64_t h = place.head - chunk * p.heads;
  const std::int64_t first_batch = chunk * kBatches;
  const bool has_features = place.vector < p.tiling.vectors;
  const std::int64_t feature = has_features ? std::int64_t{place.vector} * kWidth : 0;
  const std::int64_t block_rows = p.tiling.block_rows();
  A sums[kBatches][kWidth] = {};
  if (has_features) {
    const T* const grad_head =
        p.grad_out + first_batch * p.grad_out_strides[0] + h * p.grad_out_strides[1] + feature * p.grad_out_strides[3];
    const T* const x_head = p.x + first_batch * p.x_strides[0] + h * p.x_strides[1] + feature * p.x_strides[3];
    const std::int64_t sine_half = p.features * p.grad_out_strides[3];
    const FeatureAngles<T, kWidth> theta(p.angles, h, feature);
    const std::int64_t first = std::int64_t{place.row_block} * p.tiling.steps * block_rows;
    const std::int64_t last = min(first + p.tiling.steps * block_rows, p.tiling.rows);
    for (std::int64_t n = first + place.row; n < last; n += block_rows) {
      TokenAngles<T, kWidth> token;
      constexpr int kAtATime = kBatches < 2 ? 1 : 2;
#pragma unroll
      for (int base = 0; base < kBatches; base += kAtATime) {
        Lanes cosine_batch[kAtATime], sine_batch[kAtATime], x_batch[kAtATime];
#pragma unroll
        for (int s = 0; s < kAtATime; ++s) {
          if (first_batch + base + s >= p.batch) break;
          const T* const from = grad_head + (base + s) * p.grad_out_strides[0] + n * p.grad_out_strides[2];
          cosine_batch[s] = Lanes::read(from);
          sine_batch[s] = Lanes::read(from + sine_half);
          x_batch[s] = Lanes::read(x_head + (base + s) * p.x_strides[0] + n * p.x_strides[2]);
        }
        if (base == 0) token.compute(p.angles, theta, first_batch, n);
#pragma unroll
        for (int s = 0; s < kAtATime; ++s) {
          if (first_batch + base + s >= p.batch) break;
          A grad_cosine[kWidth], grad_sine[kWidth], a[kWidth];
          cosine_batch[s].unpack(grad_cosine);
          sine_batch[s].unpack(grad_sine);
          x_batch[s].unpack(a);
          A high[kWidth];
          load_accumulators<kWidth>(p.lse + 2 * ((first_batch + base + s) * p.heads + h) * p.features + feature, high);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) {
            const A g = fma(grad_cosine[i], token.cosine[i], grad_sine[i] * token.sine[i]);
            sums[base + s][i] = fma(precise_exponential<T>(a[i] - high[i]), g, sums[base + s][i]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int s = 0; s < kBatches; ++s) {
    if (first_batch + s >= p.batch) break;
    const std::int64_t group = (first_batch + s) * p.heads + h;
    // The other part of lse is a factor of the whole column.
    const ColumnLse<A, kWidth> lse(p.lse, group, feature, p.features);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sums[s][i] *= precise_exponential<T>(-lse.low[i]);
    A* const partial = p.partials + (place.row_block * p.batch * p.heads + group) * p.features;
    merge_rows<kWidth>(p.tiling, place, sums[s], Plus{}, [&](std::int64_t d, A sum) { partial[d] = sum; });
  }
}

/// `sums` summed over the threads that have the same features, in all of them. May be called again and again.
template <int kWidth, typename A>
__device__ void sum_short_columns(A (&sums)[kWidth]) {
  constexpr int kFeatures = kShortColumnLanes * kWidth;
  __shared__ A warp_sums[kMostShortColumnThreads / 32][kFeatures];
  __shared__ alignas(16) A block_sums[kFeatures];
  const unsigned lane = threadIdx.x % kShortColumnLanes;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
#pragma unroll
    for (int mask = kShortColumnLanes; mask < 32; mask *= 2) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], mask);
    if (threadIdx.x % 32 < kShortColumnLanes) warp_sums[threadIdx.x / 32][lane * kWidth + i] = sums[i];
  }
  __syncthreads();
  if (threadIdx.x < kFeatures) {
    A sum = A(0);
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += warp_sums[warp][threadIdx.x];
    block_sums[threadIdx.x] = sum;
  }
  __syncthreads();
  load_accumulators<kWidth>(block_sums + lane * kWidth, sums);
}

/// A softmax over a short sequence: a block has kShortColumnLanes vectors of features of a batch entry's head, for all
/// tokens, which stay in its registers between the sum of a * g and the gradient. `partials` is [H, B, D].
template <typename T, bool kHasThetaGradient>
__global__ void __launch_bounds__(kMostShortColumnThreads)
    backpropagate_short_columns(const __grid_constant__ BackwardArguments<T> p) {
  using A = Accumulator<T>;
  constexpr int kWidth = kLrpeVectorWidth<T>;
  using Lanes = Side<T, kWidth>;
  let_next_kernel_start();
  const std::uint32_t pieces = (p.tiling.vectors + kShortColumnLanes - 1) / kShortColumnLanes;
  const std::uint32_t group = blockIdx.x / pieces;
  const std::uint32_t b = group / p.tiling.heads;
  const std::uint32_t h = group - b * p.tiling.heads;
  const std::uint32_t vector = (blockIdx.x - group * pieces) * kShortColumnLanes + threadIdx.x % kShortColumnLanes;
  const bool has_features = vector < p.tiling.vectors;
  const std::int64_t feature = has_features ? std::int64_t{vector} * kWidth : 0;
  const auto column_of = [&](auto* tensor, const LrpeCosineStrides& strides) {
    return tensor + b * strides[0] + h * strides[1] + feature * strides[3];
  };
  const T* const grad_out = column_of(p.grad_out, p.grad_out_strides);
  const T* const x = column_of(p.x, p.x_strides);
  const std::int64_t sine_half = p.features * p.grad_out_strides[3];
  const int first = static_cast<int>(threadIdx.x / kShortColumnLanes);
  const int step = static_cast<int>(blockDim.x / kShortColumnLanes);
  const int last = has_features ? static_cast<int>(p.positions) : 0;

  Lanes cosine_batch[kShortColumnTokens], sine_batch[kShortColumnTokens], x_batch[kShortColumnTokens];
#pragma unroll
  for (int t = 0; t < kShortColumnTokens; ++t) {
    const int n = first + t * step;
    if (n >= last) break;
    const T* const from = grad_out + n * p.grad_out_strides[2];
    cosine_batch[t] = Lanes::read(from);
    sine_batch[t] = Lanes::read(from + sine_half);
    x_batch[t] = Lanes::read(x + n * p.x_strides[2]);
  }
  const FeatureAngles<T, kWidth> theta(p.angles, h, feature);
  const ColumnLse<A, kWidth> lse(p.lse, group, feature, p.features);
  A a[kShortColumnTokens][kWidth], g[kShortColumnTokens][kWidth];
  A sums[kWidth] = {};
  A theta_sums[kWidth] = {};
#pragma unroll
  for (int t = 0; t < kShortColumnTokens; ++t) {
    const int n = first + t * step;
    if (n >= last) break;
    TokenAngles<T, kWidth> token;
    token.compute(p.angles, theta, b, n);
    A cosine_part[kWidth], sine_part[kWidth];
    cosine_batch[t].unpack(cosine_part);
    sine_batch[t].unpack(sine_part);
    x_batch[t].unpack(a[t]);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      a[t][i] = precise_exponential<T>(lse.log_softmax(a[t][i], i));
      g[t][i] = fma(cosine_part[i], token.cosine[i], sine_part[i] * token.sine[i]);
      sums[i] = fma(a[t][i], g[t][i], sums[i]);
    }
    if (kHasThetaGradient && n >= p.angles.extra_tokens) {
      TokenAngles<T, kWidth>::for_each_position(p.angles, theta, b, n, [&](int i, A position) {
        const A term = fma(sine_part[i], token.cosine[i], -cosine_part[i] * token.sine[i]);
        theta_sums[i] = fma(position, a[t][i] * term, theta_sums[i]);
      });
    }
  }
  if (p.grad_x != nullptr) {
    sum_short_columns<kWidth>(sums);
    T* const grad_x = column_of(p.grad_x, p.grad_x_strides);
#pragma unroll
    for (int t = 0; t < kShortColumnTokens; ++t) {
      const int n = first + t * step;
      if (n >= last) break;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) g[t][i] = a[t][i] * (g[t][i] - sums[i]);
      Lanes::write(grad_x + n * p.grad_x_strides[2], g[t]);
    }
  }
  if constexpr (kHasThetaGradient) {
    sum_short_columns<kWidth>(theta_sums);
    if (threadIdx.x >= kShortColumnLanes || !has_features) return;
    A* const partial = p.partials + (h * p.batch + b) * p.features + feature;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) partial[i] = theta_sums[i];
  }
}

template <typename T>
BackwardArguments<T> make_arguments(const LrpeCosineBackwardProblem& problem, const LrpeTiling& tiling,
                                    const LrpeScratch& scratch) {
  return {.tiling = tiling,
          .batch = problem.shape.batch,
          .heads = problem.shape.heads,
          .positions = problem.shape.positions,
          .features = problem.shape.features,
          .activation = problem.activation,
          .grad_out = static_cast<const T*>(problem.grad_out),
          .x = static_cast<const T*>(problem.x),
          .grad_x = static_cast<T*>(problem.grad_x),
          .lse = static_cast<const Accumulator<T>*>(problem.lse),
          .column_dots = static_cast<const Accumulator<T>*>(scratch.columns),
          .partials = static_cast<Accumulator<T>*>(scratch.partials),
          .grad_out_strides = problem.grad_out_strides,
          .x_strides = problem.x_strides,
          .grad_x_strides = problem.grad_x_strides,
          .angles = problem.angles};
}

template <typename T>
void sum_sequence(const LrpeCosineBackwardProblem& problem, const LrpePlan& plan, const LrpeScratch& scratch,
                  void* stream) {
  using A = Accumulator<T>;
  const LrpeTiling& tiling = plan.columns;
  const BackwardArguments<T> arguments = make_arguments<T>(problem, tiling, scratch);
  const LaunchShape shape{.blocks = blocks_of(tiling), .threads = kLrpeThreads, .stream = stream};
  constexpr int kVector = kLrpeVectorWidth<T>;
  if (!plan.has_vectors) {
    launch(kOp, sum_column_dots<T, 1, 1>, shape, arguments);
  } else if constexpr (kVector > 1) {
    plan.is_shared ? launch(kOp, sum_column_dots<T, kVector, kLrpeColumnBatches>, shape, arguments)
                   : launch(kOp, sum_column_dots<T, kVector, 1>, shape, arguments);
  }
  launch_merge_columns(kOp, merge_column_dots<A>, problem.shape, plan, scratch.partials, scratch.columns, stream);
}

/// `Sum` is what the partials are.
template <typename Sum>
void launch_finish_theta(const LrpeCosineBackwardProblem& problem, const LrpePlan& plan, std::int64_t partials,
                         const LrpeScratch& scratch, void* stream) {
  const std::int64_t elements = problem.angles.theta_heads * problem.angles.theta_features;
  if (problem.grad_theta == nullptr || elements == 0) return;
  // One angle of all heads has many more terms than one of many.
  const std::int64_t terms = partials * problem.shape.heads * problem.shape.features / elements;
  const bool is_long = terms > 1 << 14;
  launch(kOp, is_long ? finish_theta<Sum, 1024> : finish_theta<Sum, 128>,
         {.blocks = elements,
          .threads = is_long ? 1024 : 128,
          .starts_before_previous_ends = plan.has_dependent_launch && partials > 0,
          .stream = stream},
         problem.angles, static_cast<const Sum*>(scratch.partials), problem.shape.heads, partials,
         problem.shape.features, problem.grad_theta, problem.grad_theta_head_stride, problem.grad_theta_feature_stride);
}

template <typename T>
void backward(const LrpeCosineBackwardProblem& problem, const ExecutionContext& context) {
  using A = Accumulator<T>;
  const LrpePlan plan = plan_backward(kOp, problem);
  const LrpeScratch scratch(context.workspace, plan);
  const LrpeCosineShape& shape = problem.shape;
  if (shape.batch * shape.heads * shape.positions * shape.features == 0) {
    return launch_finish_theta<A>(problem, plan, 0, scratch, context.stream);
  }
  if (plan.has_short_columns) {
    if constexpr (kLrpeVectorWidth < T >> 1) {
      const std::int64_t lane_threads = ceil_divide(shape.positions, kShortColumnTokens);
      launch(
          kOp,
          problem.grad_theta != nullptr ? backpropagate_short_columns<T, true> : backpropagate_short_columns<T, false>,
          {.blocks = shape.batch * shape.heads * ceil_divide(plan.tiling.vectors, kShortColumnLanes),
           .threads = static_cast<unsigned>(ceil_divide(lane_threads * kShortColumnLanes, 32) * 32),
           .stream = context.stream},
          make_arguments<T>(problem, plan.tiling, scratch));
    }
    return launch_finish_theta<A>(problem, plan, plan.theta_partials, scratch, context.stream);
  }
  const bool has_column_dots = plan.kind == LrpeKind::sequence_softmax && problem.grad_x != nullptr;
  if (has_column_dots) sum_sequence<T>(problem, plan, scratch, context.stream);
  if (plan.has_row_per_warp) {
    launch(kOp, backpropagate_row_per_warp<T>,
           {.blocks = ceil_divide(shape.heads * plan.warps_per_head, kRowPerWarpThreads / 32),
            .threads = kRowPerWarpThreads,
            .stream = context.stream},
           problem, plan.warps_per_head, static_cast<const A*>(scratch.columns),
           problem.grad_theta != nullptr ? static_cast<double*>(scratch.partials) : nullptr);
    return launch_finish_theta<double>(problem, plan, plan.theta_partials, scratch, context.stream);
  }
  if constexpr (kLrpeVectorWidth < T >> 1) {
    const LaunchShape launch_shape{.blocks = blocks_of(plan.tiling),
                                   .blocks_y = plan.tiling.chunks,
                                   .threads = kLrpeThreads,
                                   .starts_before_previous_ends = has_column_dots && plan.has_dependent_launch,
                                   .stream = context.stream};
    const BackwardArguments<T> arguments = make_arguments<T>(problem, plan.tiling, scratch);
    dispatch_plan(plan, [&]<LrpeKind kKind, bool kIsShared>() {
      problem.grad_theta != nullptr ? launch(kOp, backpropagate<T, kKind, kIsShared, true>, launch_shape, arguments)
                                    : launch(kOp, backpropagate<T, kKind, kIsShared, false>, launch_shape, arguments);
    });
    launch_finish_theta<A>(problem, plan, plan.theta_partials, scratch, context.stream);
  }
}

}  // namespace

std::size_t lrpe_cosine_backward_workspace_bytes(const LrpeCosineBackwardProblem& problem) {
  return plan_backward(kOp, problem).workspace_bytes;
}

void lrpe_cosine_backward(const LrpeCosineBackwardProblem& problem, const ExecutionContext& context) {
  const DeviceGuard guard(problem.device);
  dispatch_floating_point(problem.dtype, [&]<typename T>() { backward<T>(problem, context); });
}

}  // namespace eaves::cuda
