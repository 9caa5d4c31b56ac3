// The backward of lrpe_cosine on a GPU: one kernel that reads both halves of dL/d(out), x where it is needed, and
// writes dL/d(x); the terms of dL/d(theta) are summed on the way, and finished by a second, small kernel. A softmax
// over the sequence needs the sum of a * g of each column first.
#include "core/dispatch.h"
#include "ops/lrpe_cosine/lrpe_cosine_columns.cuh"
#include "ops/lrpe_cosine/lrpe_cosine_device.cuh"
#include "ops/lrpe_cosine/lrpe_cosine_long_rows.cuh"
#include "ops/lrpe_cosine/lrpe_cosine_plan.h"

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
  LrpeActivation activation;
  const T* grad_out;
  const T* x;
  T* grad_x;                          ///< or nullptr
  const Accumulator<T>* lse;          ///< [B, H, D], of a softmax over the sequence
  const Accumulator<T>* column_sums;  ///< [B, H, D], likewise: sum of a * g
  Accumulator<T>* pieces;             ///< [H, pieces, D] of theta; [B * H, pieces, D] of column_sums
  LrpeCosineStrides grad_out_strides;
  LrpeCosineStrides x_strides;
  LrpeCosineStrides grad_x_strides;
  LrpeCosineAngles angles;
};

/// dL/d(a) of a thread's features: g_cos * cos + g_sin * sin.
template <int kWidth, typename A, typename Token>
__device__ void rotate_back(const A (&grad_cosine)[kWidth], const A (&grad_sine)[kWidth], const Token& token,
                            A (&g)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) g[i] = fma(grad_cosine[i], token.cosine[i], grad_sine[i] * token.sine[i]);
}

/// kSlots tokens or batch entries are in flight, two or three vectors each.
template <typename T, int kWidth, LrpeKind kKind, bool kIsShared, int kSlots, bool kHasThetaGradient>
__global__ void __launch_bounds__(kLrpeThreads) backpropagate(const __grid_constant__ BackwardArguments<T> p) {
  using A = Accumulator<T>;
  using Lanes = Side<T, kWidth>;
  constexpr bool kReadsX = kKind != LrpeKind::none || kHasThetaGradient;
  let_next_kernel_start();
  const LrpePlace place = find_place(p.tiling);
  const bool has_features = place.vector < p.tiling.vectors;
  const std::int64_t head = place.head;
  const std::int64_t feature = has_features ? std::int64_t{place.vector} * kWidth : 0;
  const std::int64_t block_rows = p.tiling.block_rows();
  const std::int64_t first_batch = kIsShared ? place.chunk * p.tiling.chunk : 0;
  const std::int64_t last_batch = kIsShared ? min(first_batch + p.tiling.chunk, p.batch) : 1;
  const T* const grad_head = p.grad_out + head * p.grad_out_strides[1] + feature * p.grad_out_strides[3];
  const T* const x_head = p.x + head * p.x_strides[1] + feature * p.x_strides[3];
  T* const grad_x_head = p.grad_x + head * p.grad_x_strides[1] + feature * p.grad_x_strides[3];
  const std::int64_t sine_half = p.features * p.grad_out_strides[3];
  if constexpr (kKind == LrpeKind::sequence_softmax) wait_for_previous_kernel();

  const FeatureAngles<T, kWidth> theta(p.angles, head, feature);
  A theta_sums[kHasThetaGradient ? kWidth : 1] = {};
  for (std::uint32_t step = 0; step < p.tiling.steps; ++step) {
    const std::int64_t first_row =
        (std::int64_t{place.row_block} * p.tiling.steps + step) * (kIsShared ? 1 : kSlots) * block_rows + place.row;
    TokenAngles<T, kWidth> token;
    A token_sums[kHasThetaGradient ? kWidth : 1] = {};
    for (std::int64_t base = first_batch; base < last_batch; base += kSlots) {
      Lanes cosine_batch[kSlots];
      Lanes sine_batch[kSlots];
      Lanes x_batch[kSlots];
      std::int64_t b[kSlots];
      std::int64_t n[kSlots];
      bool is_there[kSlots];
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        if constexpr (kIsShared) {
          b[s] = base + s;
          n[s] = first_row;
          is_there[s] = b[s] < last_batch && first_row < p.tiling.rows && has_features;
        } else {
          const std::int64_t row = first_row + s * block_rows;
          b[s] = divide(row, p.positions);
          n[s] = row - b[s] * p.positions;
          is_there[s] = row < p.tiling.rows && has_features;
        }
        if (is_there[s]) {
          const T* const from = grad_head + b[s] * p.grad_out_strides[0] + n[s] * p.grad_out_strides[2];
          cosine_batch[s] = Lanes::read(from);
          sine_batch[s] = Lanes::read(from + sine_half);
          if constexpr (kReadsX) x_batch[s] = Lanes::read(x_head + b[s] * p.x_strides[0] + n[s] * p.x_strides[2]);
        } else {
          // Neutral in every sum over the lanes of the warp.
          cosine_batch[s] = Lanes{};
          sine_batch[s] = Lanes{};
          x_batch[s] = Lanes::minus_infinity();
        }
      }
      if (kIsShared && base == first_batch) token.compute(p.angles, theta, 0, n[0]);
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        if (kKind != LrpeKind::feature_softmax && !is_there[s]) continue;
        if constexpr (!kIsShared) token.compute(p.angles, theta, b[s], n[s]);
        A grad_cosine[kWidth];
        A grad_sine[kWidth];
        A g[kWidth];
        A a[kWidth];
        cosine_batch[s].unpack(grad_cosine);
        sine_batch[s].unpack(grad_sine);
        rotate_back(grad_cosine, grad_sine, token, g);
        if constexpr (kReadsX) x_batch[s].unpack(a);
        if constexpr (kKind == LrpeKind::elementwise) {
          A derivative[kWidth];
          activate<T>(p.activation, a, derivative);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) g[i] *= derivative[i];
        }
        if constexpr (kKind == LrpeKind::feature_softmax) {
          feature_softmax<T>(a, p.tiling.lanes());
          A dot = A(0);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) dot = fma(a[i], g[i], dot);
          dot = over_lanes(dot, p.tiling.lanes(), AddSums{});
          if (!is_there[s]) continue;
#pragma unroll
          for (int i = 0; i < kWidth; ++i) g[i] = a[i] * (g[i] - dot);
        }
        if constexpr (kKind == LrpeKind::sequence_softmax) {
          const std::int64_t column = (b[s] * p.heads + head) * p.features + feature;
          A lse[kWidth];
          A sums[kWidth];
          load_accumulators<kWidth>(p.lse + column, lse);
          load_accumulators<kWidth>(p.column_sums + column, sums);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) {
            a[i] = precise_exponential<T>(a[i] - lse[i]);
            g[i] = a[i] * (g[i] - sums[i]);
          }
        }
        if constexpr (kHasThetaGradient) {
#pragma unroll
          for (int i = 0; i < kWidth; ++i) {
            const A term = a[i] * fma(grad_sine[i], token.cosine[i], -grad_cosine[i] * token.sine[i]);
            token_sums[i] = kIsShared ? token_sums[i] + term : term;
          }
          if constexpr (!kIsShared) {
            TokenAngles<T, kWidth>::for_each_position(p.angles, theta, b[s], n[s], [&](int i, A position) {
              theta_sums[i] = fma(position, token_sums[i], theta_sums[i]);
            });
          }
        }
        if (p.grad_x != nullptr) {
          Lanes::write(grad_x_head + b[s] * p.grad_x_strides[0] + n[s] * p.grad_x_strides[2], g);
        }
      }
    }
    if constexpr (kHasThetaGradient && kIsShared) {
      TokenAngles<T, kWidth>::for_each_position(p.angles, theta, 0, first_row, [&](int i, A position) {
        theta_sums[i] = fma(position, token_sums[i], theta_sums[i]);
      });
    }
  }
  if constexpr (kHasThetaGradient) {
    const std::int64_t piece = std::int64_t{place.row_block} * p.tiling.chunks + place.chunk;
    const std::int64_t pieces = std::int64_t{p.tiling.row_blocks} * p.tiling.chunks;
    A* const sums = p.pieces + (head * pieces + piece) * p.features;
    merge_rows<kWidth>(p.tiling, place, theta_sums, AddSums{}, [&](std::int64_t d, A sum) { sums[d] = sum; });
  }
}

/// sum of a * g over the tokens of a piece: `pieces` is [B * H, row_blocks, D].
template <typename T, int kWidth>
__global__ void __launch_bounds__(kLrpeThreads) sum_columns(const __grid_constant__ BackwardArguments<T> p) {
  using A = Accumulator<T>;
  using Lanes = Side<T, kWidth>;
  let_next_kernel_start();
  const LrpePlace place = find_place(p.tiling);
  const std::int64_t b = place.head / p.heads;
  const std::int64_t h = place.head - b * p.heads;
  const bool has_features = place.vector < p.tiling.vectors;
  const std::int64_t feature = has_features ? std::int64_t{place.vector} * kWidth : 0;
  const std::int64_t block_rows = p.tiling.block_rows();
  A sums[kWidth] = {};
  if (has_features) {
    const T* const grad_head =
        p.grad_out + b * p.grad_out_strides[0] + h * p.grad_out_strides[1] + feature * p.grad_out_strides[3];
    const T* const x_head = p.x + b * p.x_strides[0] + h * p.x_strides[1] + feature * p.x_strides[3];
    const std::int64_t sine_half = p.features * p.grad_out_strides[3];
    const FeatureAngles<T, kWidth> theta(p.angles, h, feature);
    A lse[kWidth];
    load_accumulators<kWidth>(p.lse + std::int64_t{place.head} * p.features + feature, lse);
    const std::int64_t first = std::int64_t{place.row_block} * p.tiling.steps * block_rows;
    const std::int64_t last = min(first + p.tiling.steps * block_rows, p.tiling.rows);
#pragma unroll 2
    for (std::int64_t n = first + place.row; n < last; n += block_rows) {
      const T* const from = grad_head + n * p.grad_out_strides[2];
      const Lanes cosine_batch = Lanes::read(from);
      const Lanes sine_batch = Lanes::read(from + sine_half);
      const Lanes x_batch = Lanes::read(x_head + n * p.x_strides[2]);
      TokenAngles<T, kWidth> token;
      token.compute(p.angles, theta, b, n);
      A grad_cosine[kWidth];
      A grad_sine[kWidth];
      A g[kWidth];
      A a[kWidth];
      cosine_batch.unpack(grad_cosine);
      sine_batch.unpack(grad_sine);
      x_batch.unpack(a);
      rotate_back(grad_cosine, grad_sine, token, g);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sums[i] = fma(precise_exponential<T>(a[i] - lse[i]), g[i], sums[i]);
    }
  }
  A* const piece = p.pieces + (std::int64_t{place.head} * p.tiling.row_blocks + place.row_block) * p.features;
  merge_rows<kWidth>(p.tiling, place, sums, AddSums{}, [&](std::int64_t d, A sum) { piece[d] = sum; });
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
          .column_sums = static_cast<const Accumulator<T>*>(scratch.columns),
          .pieces = static_cast<Accumulator<T>*>(scratch.pieces),
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
  const LaunchShape shape{.blocks = std::int64_t{tiling.heads} * tiling.row_blocks,
                          .blocks_y = lane_groups(tiling),
                          .threads = kLrpeThreads,
                          .stream = stream};
  plan.has_vectors ? launch(kOp, sum_columns<T, kLrpeVectorWidth<T>>, shape, arguments)
                   : launch(kOp, sum_columns<T, 1>, shape, arguments);
  const std::int64_t columns = problem.shape.batch * problem.shape.heads * problem.shape.features;
  launch(kOp, merge_column_sums<A>,
         {.blocks = ceil_divide(columns, 128),
          .threads = 128,
          .starts_before_previous_ends = plan.has_dependent_launch,
          .stream = stream},
         static_cast<const A*>(scratch.pieces), columns, problem.shape.features, std::int64_t{tiling.row_blocks},
         static_cast<A*>(scratch.columns));
}

template <typename T>
void launch_finish_theta(const LrpeCosineBackwardProblem& problem, const LrpePlan& plan, std::int64_t pieces,
                         const LrpeScratch& scratch, void* stream) {
  const std::int64_t elements = problem.angles.theta_heads * problem.angles.theta_features;
  if (problem.grad_theta == nullptr || elements == 0) return;
  launch(kOp, finish_theta<T>,
         {.blocks = elements,
          .threads = kLrpeThreads,
          .starts_before_previous_ends = plan.has_dependent_launch && pieces > 0,
          .stream = stream},
         problem.angles, static_cast<const Accumulator<T>*>(scratch.pieces), problem.shape.heads, pieces,
         problem.shape.features, problem.grad_theta, problem.grad_theta_head_stride, problem.grad_theta_feature_stride);
}

template <typename T>
void backpropagate_long_rows(const LrpeCosineBackwardProblem& problem, const LrpePlan& plan, const LrpeScratch& scratch,
                             void* stream) {
  const LrpeCosineShape& shape = problem.shape;
  const bool has_theta = problem.grad_theta != nullptr;
  const std::int64_t rows = shape.batch * shape.positions;
  const std::int64_t pieces = has_theta ? std::min(plan.theta_pieces, rows) : std::min<std::int64_t>(rows, 1 << 16);
  launch(kOp, backpropagate_row_per_warp<T>,
         {.blocks = ceil_divide(shape.heads * pieces, kLongRowsThreads / 32),
          .threads = kLongRowsThreads,
          .stream = stream},
         problem, pieces, has_theta ? static_cast<Accumulator<T>*>(scratch.pieces) : nullptr);
  launch_finish_theta<T>(problem, plan, pieces, scratch, stream);
}

template <typename T>
void backward(const LrpeCosineBackwardProblem& problem, const ExecutionContext& context) {
  const LrpePlan plan = plan_backward(problem);
  const LrpeScratch scratch(context.workspace, problem.shape, problem.dtype);
  const LrpeCosineShape& shape = problem.shape;
  if (shape.batch * shape.heads * shape.positions * shape.features == 0) {
    return launch_finish_theta<T>(problem, plan, 0, scratch, context.stream);
  }
  if (plan.has_long_rows) return backpropagate_long_rows<T>(problem, plan, scratch, context.stream);
  if (plan.kind == LrpeKind::sequence_softmax) sum_sequence<T>(problem, plan, scratch, context.stream);
  const LaunchShape launch_shape{
      .blocks = std::int64_t{plan.tiling.heads} * plan.tiling.row_blocks,
      .blocks_y = std::int64_t{plan.tiling.chunks} * lane_groups(plan.tiling),
      .threads = kLrpeThreads,
      .starts_before_previous_ends = plan.kind == LrpeKind::sequence_softmax && plan.has_dependent_launch,
      .stream = context.stream};
  const BackwardArguments<T> arguments = make_arguments<T>(problem, plan.tiling, scratch);
  dispatch_plan<T>(plan, [&]<int kWidth, LrpeKind kKind, bool kIsShared>() {
    constexpr int kSlots = lrpe_backward_slots(kIsShared);
    problem.grad_theta != nullptr
        ? launch(kOp, backpropagate<T, kWidth, kKind, kIsShared, kSlots, true>, launch_shape, arguments)
        : launch(kOp, backpropagate<T, kWidth, kKind, kIsShared, kSlots, false>, launch_shape, arguments);
  });
  launch_finish_theta<T>(problem, plan, plan.theta_pieces, scratch, context.stream);
}

}  // namespace

std::size_t lrpe_cosine_backward_workspace_bytes(const LrpeCosineBackwardProblem& problem) {
  return plan_backward(problem).workspace_bytes;
}

void lrpe_cosine_backward(const LrpeCosineBackwardProblem& problem, const ExecutionContext& context) {
  const DeviceGuard guard(problem.device);
  dispatch_floating_point(problem.dtype, [&]<typename T>() { backward<T>(problem, context); });
}

}  // namespace eaves::cuda
