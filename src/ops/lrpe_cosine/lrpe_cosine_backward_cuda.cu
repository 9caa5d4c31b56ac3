// The backward of lrpe_cosine on a GPU: one kernel for rows of whole vectors, which reads both halves of dL/d(out) and,
// if needed, x, and writes dL/d(x); and one kernel for all other rows (lrpe_cosine_row_per_warp.cuh). These kernels
// also sum the terms of dL/d(theta), and a second, small kernel finishes the sums. A softmax over the sequence needs
// the sum of a * g of each column first; for a short sequence one kernel does both (lrpe_cosine_whole_columns.cuh).
#include "core/dispatch.h"
#include "ops/lrpe_cosine/lrpe_cosine_columns.cuh"
#include "ops/lrpe_cosine/lrpe_cosine_device.cuh"
#include "ops/lrpe_cosine/lrpe_cosine_plan.h"
#include "ops/lrpe_cosine/lrpe_cosine_row_per_warp.cuh"
#include "ops/lrpe_cosine/lrpe_cosine_token_gradient.cuh"
#include "ops/lrpe_cosine/lrpe_cosine_whole_columns.cuh"

namespace eaves::cuda {
namespace {

constexpr const char* kOp = "lrpe_cosine_backward";

/// With shared angles a thread loads kLrpeSlots batch entries before it uses the first, otherwise one token.
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
      if (kHasThetaGradient && has_row && p.angles.has_angle(row)) {
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
      if (kHasThetaGradient && is_there && p.angles.has_angle(at.n)) {
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

/// Sums a * g over the tokens of a row block, for kBatches batch entries with the same angles. `partials` is
/// [row_blocks, B * H * D]. A head of the tiling is a head of kBatches batch entries.
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
    // e^-lse.low is a factor of the whole column.
    const ColumnLse<A, kWidth> lse(p.lse, group, feature, p.features);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sums[s][i] *= precise_exponential<T>(-lse.low[i]);
    A* const partial = p.partials + (place.row_block * p.batch * p.heads + group) * p.features;
    merge_rows<kWidth>(p.tiling, place, sums[s], Plus{}, [&](std::int64_t d, A sum) { partial[d] = sum; });
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

/// `Sum` is the type of the partials.
template <typename Sum>
void launch_finish_theta(const LrpeCosineBackwardProblem& problem, const LrpePlan& plan, std::int64_t partials,
                         const LrpeScratch& scratch, void* stream) {
  const std::int64_t elements = problem.angles.theta_heads * problem.angles.theta_features;
  if (problem.grad_theta == nullptr || elements == 0) return;
  // A single angle for all heads sums many more terms than one of many angles.
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
  if (plan.has_whole_columns) {
    if constexpr (kLrpeVectorWidth < T >> 1) {
      const std::int64_t column_threads = ceil_divide(shape.positions, kLrpeWholeColumnTokens);
      launch(
          kOp,
          problem.grad_theta != nullptr ? backpropagate_whole_columns<T, true> : backpropagate_whole_columns<T, false>,
          {.blocks = shape.batch * shape.heads * ceil_divide(plan.tiling.vectors, kLrpeWholeColumnLanes),
           .threads = static_cast<unsigned>(ceil_divide(column_threads * kLrpeWholeColumnLanes, 32) * 32),
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
