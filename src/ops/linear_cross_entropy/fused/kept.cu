// Exponentials that a forward keeps for the backward (fused.h).
#include "ops/linear_cross_entropy/fused/rows.cuh"

namespace eaves::cuda {
namespace {

/// The last elements of a row of kept exps hold these numbers.
struct KeptNumbers {
  float row_factor;  ///< scale / S
  float target_logit;
};
static_assert(sizeof(KeptNumbers) == kKeptNumbers * sizeof(bfloat16));

__device__ bfloat16* exps_of(const FusedGradient& gradient, std::int64_t row) {
  return static_cast<bfloat16*>(gradient.to) + row * gradient.stride;
}
__device__ KeptNumbers* numbers_of(const FusedGradient& gradient, std::int64_t row) {
  return reinterpret_cast<KeptNumbers*>(exps_of(gradient, row) + gradient.stride - kKeptNumbers);
}

__device__ bool has_no_gradient(const RowGradient<float>& row) {
  return row.softmax_factor == 0.0f && row.target_factor == 0.0f && row.slope == 0.0f;
}

/// One thread per row.
__global__ void __launch_bounds__(kThreads)
    keep_numbers(const __grid_constant__ FusedGradient gradient, const __grid_constant__ FusedMemory memory,
                 std::int64_t count) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) *numbers_of(gradient, i) = {memory.row_factor[i], memory.target_logit[i]};
}

/// One thread per row.
__global__ void __launch_bounds__(kThreads)
    finish_rows(const __grid_constant__ GradientOfRows rows, std::int64_t count) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const RowGradient<float> row = rows.row(i);
  const KeptNumbers kept = *numbers_of(rows.in, i);
  const int column = rows.targets.column(i);
  const bool has_target = column >= 0 && !has_no_gradient(row);
  const float distance = has_target ? row.log_probability(rows.transform.value(kept.target_logit)) : 0.0f;
  rows.memory.row_factor[i] = row.softmax_factor == 0.0f ? 0.0f : kept.row_factor * row.softmax_factor;
  rows.memory.target_gradient[i] = has_target ? rows.of_target(kept.target_logit, distance, row) : 0.0f;
  rows.memory.target[i] = column;
  put_first_of_class(rows.memory, i, column);
}

/// One block per row: marks the first row of each class with several rows. If lse is not finite, the exps may be NaN;
/// in a row without a gradient they then become 0.
__global__ void __launch_bounds__(kThreads)
    finish_exps(const __grid_constant__ GradientOfRows rows, std::int64_t count, std::int64_t classes) {
  const std::int64_t i = blockIdx.x;
  if (threadIdx.x == 0) mark_more_rows(rows.memory, i, rows.memory.target[i]);
  const RowGradient<float> row = rows.row(i);
  if (row.lse.high - row.lse.high == 0.0f || !has_no_gradient(row)) return;
  bfloat16* exps = exps_of(rows.in, i);
  for (std::int64_t v = threadIdx.x; v < classes; v += kThreads) exps[v] = round_to<bfloat16>(0.0f);
}

/// Several blocks per row, each with a part of the classes. With q = (the forward's row_factor) / scale, so that
/// p = q * E is the softmax:
///   dL/dz = p * (m + slope * log(p)) * scale = E * (row_factor + q * slope * scale * log(p))
__global__ void __launch_bounds__(kThreads)
    write_gradient_of_exps(const __grid_constant__ GradientOfRows rows, std::int64_t classes) {
  constexpr int kSize = Vector<bfloat16>::kSize;
  const std::int64_t i = blockIdx.x;
  bfloat16* exps = exps_of(rows.in, i);
  const int column = rows.memory.target[i];
  const float of_target = rows.memory.target_gradient[i];
  const float row_factor = rows.memory.row_factor[i];
  const float of_row = numbers_of(rows.in, i)->row_factor;
  const float slope = rows.row(i).slope * kUnit<float> * of_row;
  const float log2_factor = log2f(of_row / rows.transform.scale);
  const auto gradient_of = [&](float exp, std::int64_t v) {
    if (v == column) return of_target;
    if (row_factor == 0.0f && slope == 0.0f) return 0.0f;  // even if the exp is not finite
    const float of_entropy = slope == 0.0f || exp == 0.0f ? 0.0f : slope * (__log2f(exp) + log2_factor);
    return exp * (row_factor + of_entropy);
  };
  const std::int64_t whole = classes / kSize * kSize;
  const std::int64_t thread = std::int64_t{blockIdx.y} * kThreads + threadIdx.x;
  const std::int64_t threads = std::int64_t{gridDim.y} * kThreads;
#pragma unroll 4
  for (std::int64_t v = thread * kSize; v < whole; v += threads * kSize) {
    auto* at = reinterpret_cast<Vector<bfloat16>*>(exps + v);
    float values[kSize];
    unpack(*at, values);
#pragma unroll
    for (int k = 0; k < kSize; ++k) values[k] = gradient_of(values[k], v + k);
    *at = pack<bfloat16>(values);
  }
  if (const std::int64_t v = whole + thread; v < classes) {
    exps[v] = round_to<bfloat16>(gradient_of(load_as_accumulator(exps[v]), v));
  }
}

}  // namespace

void keep_numbers(const FusedRows& rows, const FusedGradient& gradient) {
  launch(rows.op, keep_numbers,
         {.blocks = ceil_divide(rows.rows, kThreads), .threads = kThreads, .stream = rows.context.stream}, gradient,
         rows.memory, rows.rows);
}

void finish_kept_exps(const FusedRows& rows, const FusedGradient& gradient) {
  void* stream = rows.context.stream;
  clear_first_of_class(rows);
  const GradientOfRows of_rows = gradient_of(rows, gradient);
  launch(rows.op, finish_rows, {.blocks = ceil_divide(rows.rows, kThreads), .threads = kThreads, .stream = stream},
         of_rows, rows.rows);
  launch(rows.op, finish_exps, {.blocks = rows.rows, .threads = kThreads, .stream = stream}, of_rows, rows.rows,
         rows.classes);
}

void write_gradient_of_exps(const FusedRows& rows, const FusedGradient& gradient) {
  constexpr std::int64_t kClassesOfBlock = 16384;
  launch(rows.op, write_gradient_of_exps,
         {.blocks = rows.rows,
          .blocks_y = ceil_divide(rows.classes, kClassesOfBlock),
          .threads = kThreads,
          .stream = rows.context.stream},
         gradient_of(rows, gradient), rows.classes);
}

}  // namespace eaves::cuda
