// The second step of the fused path with a guessed shift (fused.h): the product, with exps or without, and the
// statistics of each row from the product's sums.
#include <algorithm>
#include <cmath>

#include "cuda/softmax.cuh"
#include "ops/cross_entropy/cross_entropy_statistics.cuh"
#include "ops/linear_cross_entropy/fused/sums.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#pragma nv_diag_suppress 177  // only repeat_rows calls these functions, and its clusters need compute capability 9.0
#endif

namespace eaves::cuda {
namespace {

/// Multiplies the exps of a row by 2^-`exponent`. Exps of lost tiles, or all of them (`is_all`), left float32's range
/// and are computed from their logits again. A cluster calls it, each block for a part of the row. Rows of exps start
/// on 16 bytes.
__device__ __noinline__ void lower_exps(const LostTiles& lost, const LogitFactors<bfloat16>& factors, std::int64_t row,
                                        std::int64_t classes, const FastTransform& transform, float shift,
                                        float exponent, bool is_all, int block, bfloat16* exps) {
  constexpr int kSize = Vector<bfloat16>::kSize;
  static_assert(kClasses % kSize == 0);  // all classes of a vector are in one tile
  const float power = exp2f(-exponent);
  const std::int64_t whole = classes / kSize * kSize;
  const int thread = block * kRepeatThreads + static_cast<int>(threadIdx.x);
  if (!is_all) {
#pragma unroll 4
    for (std::int64_t column = std::int64_t{thread} * kSize; column < whole;
         column += kRepeatBlocks * kRepeatThreads * kSize) {
      if (lost.has_class(column)) continue;
      auto* at = reinterpret_cast<Vector<bfloat16>*>(exps + column);
      float values[kSize];
      unpack(*at, values);
#pragma unroll
      for (float& value : values) value *= power;
      *at = pack<bfloat16>(values);
    }
    const std::int64_t column = whole + thread;
    if (column < classes && !lost.has_class(column)) {
      exps[column] = round_to<bfloat16>(load_as_accumulator(exps[column]) * power);
    }
  }
  lost.for_each(classes, is_all, [&](std::int64_t first, std::int64_t end) {
    factors.for_each_logit(row, first, end, block, [&](std::int64_t column, float logit) {
      const float of_logit = exp2_approximate(transform.exponent_above(logit, shift) - exponent);
      exps[column] = round_to<bfloat16>(of_logit * transform.derivative(logit));
    });
  });
}

/// The correction that the exps of a row need before the products with them.
struct Lowering {
  float exponent;        ///< E becomes E * 2^-exponent
  bool becomes_nothing;  ///< E becomes 0: the row has no gradient, and E is not finite

  __device__ bool is_needed() const { return becomes_nothing || exponent != 0.0f; }
};

/// Called by one thread: stores the statistics, with exps also row_factor and target_gradient.
template <bool kHasExps>
__device__ Lowering store_row(const GradientOfRows& rows, std::int64_t row, const Sums& sums, bool is_any_lost,
                              const ClassStatistics<float>& state, float* statistics) {
  const TargetClass<float> target = store_row_statistics(rows, row, state, statistics);
  Lowering lowering{};
  if constexpr (kHasExps) {
    const SplitLse<float> lse = split_lse(softmax_anchor(state.softmax.max), logf(state.softmax.sum));
    const RowGradient<float> gradient = rows.row(row, lse);
    const bool is_nothing =
        rows.is_kept ? rows.targets.is_ignored(row) : gradient.softmax_factor == 0.0f && gradient.target_factor == 0.0f;
    const float anchor = softmax_anchor(state.softmax.max);
    // m and g of a shard depend on the other shards; m of kept exps comes with the backward.
    const bool is_later = rows.is_shard || rows.is_kept;
    const float of_softmax = is_nothing ? 0.0f : (is_later ? 1.0f : gradient.softmax_factor) * rows.transform.scale;
    const bool has_none = rows.is_shard && state.softmax.sum == 0.0f;  // all logits are -infinity: S and the exps are 0
    // A margin for the m that multiplies f later.
    const double room = rows.is_kept ? 0x1p30 : 1.0;
    const auto is_usual = [&](double value) { return value > 0x1p-100 * room && value < 0x1p95 / room; };
    const double exact_factor = double(of_softmax) / sums.sum;
    const double with_factor = rows.is_shard ? exact_factor * double(gradient.target_factor) : exact_factor;
    const bool is_in_range = is_usual(sums.sum) && (with_factor == 0.0 || is_usual(1.0 / fabs(with_factor)));
    auto factor = has_none ? of_softmax : static_cast<float>(exact_factor);
    if (!rows.targets.is_ignored(row) && !has_none && (is_any_lost || !is_in_range)) {
      const double exact = double(anchor) * kLog2EExact * rows.transform.stretch + double(log2f(state.softmax.sum)) -
                           double(rows.memory.shift[row]);
      lowering.exponent = static_cast<float>(rint(exact));
      // With lse = infinity the exps become 0, or NaN if they are infinite; with lse = -infinity they become NaN.
      const bool is_finite = fabsf(lowering.exponent) < infinity<float>();
      factor = of_softmax * (is_finite ? exp2f(static_cast<float>(double(lowering.exponent) - exact)) : 1.0f);
    }
    const float distance = gradient.log_probability(target.logit);
    rows.memory.row_factor[row] = is_nothing ? 0.0f : factor;
    const bool has_target = !is_nothing && rows.targets.column(row) >= 0;
    rows.memory.target_gradient[row] =
        has_target ? rows.of_target(rows.memory.target_logit[row], distance, gradient) : 0.0f;
    const bool is_finite = sums.sum < infinity<double>() && fabsf(lowering.exponent) < infinity<float>();
    lowering.becomes_nothing = is_nothing && !is_finite;
  }
  return lowering;
}

/// The target's part of the gradients is added apart from E (fused.h).
__device__ void clear_target(const GradientOfRows& rows, std::int64_t row) {
  const int column = rows.targets.column(row);
  if (column >= 0) static_cast<bfloat16*>(rows.in.to)[row * rows.in.stride + column] = round_to<bfloat16>(0.0f);
}

constexpr int kRowsOfBlock = 8;  // 8 floats: the sums of a tile for these rows are 32 bytes

/// Adds up the tiles of each row, and finishes each row with no logit to compute again.
template <bool kHasExps>
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
  static_assert(kExpProductRows % kRowsOfBlock == 0);  // the sums have rows up to a whole tile
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
  mark_more_rows(rows.memory, row, rows.memory.target[row]);
  Sums sums;
  is_lost = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    sums.sum += shared_sums[i][in_block];
    sums.moment += shared_moments[i][in_block];
    is_lost |= shared_lost[i][in_block];
  }
  const bool is_ignored = rows.targets.is_ignored(row);  // the statistics of an ignored row are not used
  const float shift = rows.memory.shift[row];
  bool is_repeated = !is_ignored && (is_lost != 0 || sums.have_to_be_repeated(shift));
  if (!is_repeated) {
    ClassStatistics<float> state;
    if (!is_ignored) state = statistics_of_sums(sums, shift, rows.transform);
    const Lowering lowering = store_row<kHasExps>(rows, row, sums, false, state, statistics);
    is_repeated = lowering.is_needed();
    if constexpr (kHasExps) {
      if (!is_repeated) clear_target(rows, row);
    }
  }
  // The order of the list does not matter: every cluster computes the same result for a row.
  if (is_repeated) rows.memory.repeated_rows[atomicAdd(rows.memory.repeated_count, 1)] = static_cast<std::int32_t>(row);
}

/// The other rows: each cluster takes one row after the other.
template <typename T, bool kHasExps>
__global__ void __launch_bounds__(kRepeatThreads)
    repeat_rows(const __grid_constant__ GradientOfRows rows, const __grid_constant__ SumsOfTiles tiles,
                const __grid_constant__ LogitFactors<T> factors, float* statistics) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // the GPUs of the product
  const Targets& targets = rows.targets;
  const auto cluster = cooperative_groups::this_cluster();
  const auto block = static_cast<int>(cluster.block_rank());
  const int clusters = static_cast<int>(gridDim.x) / kRepeatBlocks;
  const int count = *rows.memory.repeated_count;
  __shared__ LostTiles lost;
  __shared__ Lowering shared;  // written by the first block of the cluster
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
      shared = store_row<kHasExps>(rows, row, sums, is_any_lost, state, statistics);
    }
    if constexpr (kHasExps) {
      cluster.sync();  // `shared` is written
      const Lowering lowering = *cluster.map_shared_rank(&shared, 0);
      auto* exps = static_cast<bfloat16*>(rows.in.to) + row * rows.in.stride;
      if (lowering.becomes_nothing) {
        for (std::int64_t column = block * kRepeatThreads + threadIdx.x; column < targets.classes;
             column += kRepeatBlocks * kRepeatThreads) {
          exps[column] = round_to<bfloat16>(0.0f);
        }
      } else if (lowering.is_needed()) {
        lower_exps(lost, factors, row, targets.classes, rows.transform, shift, lowering.exponent, is_all_lost, block,
                   exps);
      }
      cluster.sync();  // every block has written its exps and read `shared`
      if (threadIdx.x == 0 && block == 0) clear_target(rows, row);
    }
    __syncthreads();  // before `lost` changes
  }
#endif
}

template <typename T, bool kHasExps>
void add_and_repeat(const FusedRows& rows, const GradientOfRows& of_rows, float* statistics) {
  void* stream = rows.context.stream;
  const SumsOfTiles tiles(rows);
  launch(rows.op, add_tiles<kHasExps>,
         {.blocks = ceil_divide(rows.rows, kRowsOfBlock), .threads = kThreads, .stream = stream}, of_rows, tiles,
         rows.rows, statistics);
  constexpr std::int64_t kClusters = 33;  // most of them find no row
  launch(rows.op, repeat_rows<T, kHasExps>,
         {.blocks = std::min(rows.rows, kClusters) * kRepeatBlocks,
          .threads = kRepeatThreads,
          .cluster_blocks = kRepeatBlocks,
          .stream = stream},
         of_rows, tiles, LogitFactors<T>(rows), statistics);
}

}  // namespace

void write_statistics(const FusedRows& rows, float* statistics) {
  exp_product(rows.op, product_of(rows), ExpProductSums{rows.memory.sums, rows.memory.moments}, rows.context);
  dispatch_half(rows.dtype, [&]<typename T>() { add_and_repeat<T, false>(rows, gradient_of(rows, {}), statistics); });
}

void write_exps(const FusedRows& rows, const FusedGradient& gradient, float* statistics) {
  const FusedMemory& memory = rows.memory;
  exp_product(rows.op, product_of(rows), ExpProductSums{memory.sums, memory.moments, gradient.to, gradient.stride},
              rows.context);
  add_and_repeat<bfloat16, true>(rows, gradient_of(rows, gradient), statistics);
}

}  // namespace eaves::cuda
