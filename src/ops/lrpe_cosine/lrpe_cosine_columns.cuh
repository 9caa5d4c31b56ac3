// The reductions of each column (batch entry, head, feature) of a softmax over the sequence: the logsumexp in the
// forward, the sum of a * g in the backward. Pieces of the sequence are reduced, then merged in order. Also the sums
// for the gradient of theta.
#pragma once

#include "cuda/row_launch.cuh"
#include "ops/lrpe_cosine/lrpe_cosine_plan.h"

namespace eaves::cuda {

/// Merges the states of each feature over the rows of a block, in order, and calls finish(feature, merged) in one
/// thread for each feature. `states` are the states of the thread's kWidth features. May be called repeatedly.
template <int kWidth, typename State, typename Merge, typename Finish>
__device__ void merge_rows(const LrpeTiling& tiling, const LrpePlace& place, const State (&states)[kWidth], Merge merge,
                           Finish finish) {
  // Raw bytes: a State may have default member values, and shared memory cannot be initialised.
  __shared__ alignas(State) unsigned char storage[kLrpeThreads * kWidth * sizeof(State)];
  auto* all = reinterpret_cast<State*>(storage);
  const std::uint32_t block_features = tiling.lanes() * kWidth;
  const std::uint32_t lane = threadIdx.x & (tiling.lanes() - 1);
  __syncthreads();  // every thread has read the states of an earlier call
#pragma unroll
  for (int i = 0; i < kWidth; ++i) all[place.row * block_features + lane * kWidth + i] = states[i];
  __syncthreads();
  const std::int64_t first_feature = std::int64_t{place.vector - lane} * kWidth;
  const std::int64_t features = std::int64_t{tiling.vectors} * kWidth;
  for (std::uint32_t i = threadIdx.x; i < block_features && first_feature + i < features; i += kLrpeThreads) {
    State state = all[i];
    for (std::uint32_t row = 1; row < tiling.block_rows(); ++row) state = merge(state, all[row * block_features + i]);
    finish(first_feature + i, state);
  }
}

// ---- forward: logsumexp of the columns -----------------------------------------------------------------------------

/// `partials` is [row_blocks, B * H * D].
template <typename T, int kWidth>
__global__ void __launch_bounds__(kLrpeThreads, 512 / kLrpeThreads)
    reduce_columns(const __grid_constant__ LrpeTiling tiling, const T* x,
                   const __grid_constant__ LrpeCosineStrides strides, std::int64_t heads,
                   SoftmaxState<Accumulator<T>>* partials) {
  using State = SoftmaxState<Accumulator<T>>;
  let_next_kernel_start();
  const LrpePlace place = find_place(tiling);
  const std::int64_t batch = divide(place.head, heads);
  const std::int64_t head = place.head - batch * heads;
  const std::int64_t block_span = std::int64_t{tiling.steps} * kLrpeColumnsAtATime * tiling.block_rows();
  const std::int64_t first = place.row_block * block_span;
  State states[kWidth];
  if (place.vector < tiling.vectors) {
    const T* column = x + batch * strides[0] + head * strides[1] + std::int64_t{place.vector} * kWidth * strides[3];
    accumulate_columns<kLrpeColumnsAtATime>(states, column, strides[2], first + place.row,
                                            min(first + block_span, tiling.rows),
                                            static_cast<int>(tiling.block_rows()));
  }
  const std::int64_t features = std::int64_t{tiling.vectors} * kWidth;
  State* const partial = partials + (std::int64_t{place.row_block} * tiling.heads + place.head) * features;
  merge_rows<kWidth>(tiling, place, states, MergeSoftmax{},
                     [&](std::int64_t feature, const State& state) { partial[feature] = state; });
}

// Warps of a block, which share the partials of 32 columns.
inline constexpr int kLrpeMergeWarps = 8;

/// Writes the logsumexp of a column as a number `high` and its rounding error `low`, which is NaN if `high` is
/// infinite.
template <typename A>
__device__ void write_lse(const SoftmaxState<A>& state, A* high, A* low) {
  const double anchor = softmax_anchor(state.max);
  const double log_sum = ::log(static_cast<double>(state.sum));
  const double sum = anchor + log_sum;
  const double added = sum - anchor;
  const double lost = (anchor - (sum - added)) + (log_sum - added);  // the exact error of the sum (Knuth's TwoSum)
  const A rounded = static_cast<A>(sum);
  *high = rounded;
  *low = static_cast<A>((sum - static_cast<double>(rounded)) + lost);
}

template <typename A>
__global__ void __launch_bounds__(32 * kLrpeMergeWarps)
    merge_columns(const SoftmaxState<A>* partials, std::int64_t columns, std::int64_t features,
                  std::int64_t partial_count, A* lse) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  reduce_pieces<kLrpeMergeWarps>(
      partials, columns, partial_count, MergeSoftmax{}, [&](std::int64_t column, const SoftmaxState<A>& state) {
        const std::int64_t group = divide(column, features);
        A* const high = lse + group * features + column;  // 2 * group * features + the feature
        write_lse(state, high, high + features);
      });
}

template <typename A>
__global__ void __launch_bounds__(32 * kLrpeMergeWarps)
    merge_column_dots(const A* partials, std::int64_t columns, std::int64_t, std::int64_t partial_count, A* sums) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  reduce_pieces<kLrpeMergeWarps>(partials, columns, partial_count, Plus{},
                                 [&](std::int64_t column, A sum) { sums[column] = sum; });
}

/// Launches `merge` over the partials of B * H * D columns.
template <typename A, typename State>
void launch_merge_columns(const char* op, void (*merge)(const State*, std::int64_t, std::int64_t, std::int64_t, A*),
                          const LrpeCosineShape& shape, const LrpePlan& plan, const void* partials, void* columns,
                          void* stream) {
  const std::int64_t count = shape.batch * shape.heads * shape.features;
  launch(op, merge,
         {.blocks = ceil_divide(count, 32),
          .threads = dim3(32, kLrpeMergeWarps),
          .starts_before_previous_ends = plan.has_dependent_launch,
          .stream = stream},
         static_cast<const State*>(partials), count, shape.features, std::int64_t{plan.columns.row_blocks},
         static_cast<A*>(columns));
}

/// The logsumexp of x over the sequence, [B, H, 2, D], in two kernels.
template <typename T>
void reduce_sequence(const char* op, const LrpeCosineForwardProblem& problem, const LrpePlan& plan,
                     const LrpeScratch& scratch, void* lse, void* stream) {
  using A = Accumulator<T>;
  const LrpeTiling& tiling = plan.columns;
  auto* const partials = static_cast<SoftmaxState<A>*>(scratch.partials);
  const LaunchShape shape{.blocks = blocks_of(tiling), .threads = kLrpeThreads, .stream = stream};
  const auto* x = static_cast<const T*>(problem.x);
  if (plan.has_vectors) {
    launch(op, reduce_columns<T, kLrpeVectorWidth<T>>, shape, tiling, x, problem.x_strides, problem.shape.heads,
           partials);
  } else {
    launch(op, reduce_columns<T, 1>, shape, tiling, x, problem.x_strides, problem.shape.heads, partials);
  }
  launch_merge_columns(op, merge_columns<A>, problem.shape, plan, partials, lse, stream);
}

// ---- backward: the gradient of theta -------------------------------------------------------------------------------

/// Sums the features, heads and partials of each element of grad_theta, `partials` [H, partial_count, D]: one block of
/// kThreads for each element.
template <typename Sum, int kThreads>
__global__ void __launch_bounds__(kThreads)
    finish_theta(const __grid_constant__ LrpeCosineAngles angles, const Sum* partials, std::int64_t heads,
                 std::int64_t partial_count, std::int64_t features, void* grad_theta, std::int64_t head_stride,
                 std::int64_t feature_stride) {
  wait_for_previous_kernel();
  const std::int64_t theta_head = divide(blockIdx.x, angles.theta_features);
  const std::int64_t theta_feature = blockIdx.x - theta_head * angles.theta_features;
  // A single angle serves all features of its axis. Otherwise an element of theta serves the same feature of each axis.
  const bool is_one = angles.theta_features == 1;
  const std::int64_t with_axis = min(features, angles.axes * angles.axis_features);
  const std::int64_t stride = is_one ? 1 : angles.axis_features;
  const std::int64_t per_row = is_one                      ? with_axis
                               : with_axis > theta_feature ? (with_axis - theta_feature - 1) / stride + 1
                                                           : 0;
  const std::int64_t first_row = angles.theta_heads == 1 ? 0 : theta_head * partial_count;
  const std::int64_t rows = angles.theta_heads == 1 ? heads * partial_count : partial_count;
  double sum = 0.0;
#pragma unroll 4
  for (std::int64_t i = threadIdx.x; i < rows * per_row; i += kThreads) {
    const std::int64_t row = divide(i, per_row);
    sum += partials[(first_row + row) * features + theta_feature + (i - row * per_row) * stride];
  }
  sum = reduce_block<kThreads>(sum, Plus{});
  if (threadIdx.x != 0) return;
  const std::int64_t at = theta_head * head_stride + theta_feature * feature_stride;
  switch (angles.theta_dtype) {
    case DType::bfloat16:
      static_cast<bfloat16*>(grad_theta)[at] = round_to<bfloat16>(sum);
      break;
    case DType::float16:
      static_cast<float16*>(grad_theta)[at] = round_to<float16>(sum);
      break;
    case DType::float64:
      static_cast<double*>(grad_theta)[at] = sum;
      break;
    default:
      static_cast<float*>(grad_theta)[at] = static_cast<float>(sum);
  }
}

}  // namespace eaves::cuda
