// The backward of the fused path (fused.h): one product writes the gradient of the logits.
#include "ops/linear_cross_entropy/fused/rows.cuh"

namespace eaves::cuda {
namespace {

/// One thread per row: shift, constant and slope for the product. With c = log2(e), d = z' - lse, d * c = t + rest and
/// m = softmax_factor:
///   softmax * (m + slope * d) = 2^t * 2^rest * (m + slope / c * (t + rest)) = 2^t * (constant + slope' * t)
/// All of it is times scale = dz'/dz. For an infinite lse, rest counts as 0.
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
  const float constant =
      row.softmax_factor == 0.0f ? 0.0f : row.softmax_factor * (is_finite ? correction : rows.transform.scale);
  rows.memory.constant[i] = slope == 0.0f || !is_finite ? constant : fmaf(slope, rest, constant);
}

/// One thread per row: overwrites the target's element.
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

}  // namespace

void write_gradient(const FusedRows& rows, const FusedGradient& gradient) {
  const GradientOfRows of_rows = gradient_of(rows, gradient);
  const LaunchShape shape{
      .blocks = ceil_divide(rows.rows, kThreads), .threads = kThreads, .stream = rows.context.stream};
  launch(rows.op, prepare_gradient, shape, of_rows, rows.rows);
  exp_product(rows.op, product_of(rows),
              ExpProductGradient{rows.memory.constant, rows.memory.slope, gradient.to, gradient.stride}, rows.context);
  launch(rows.op, finish_gradient, shape, of_rows, rows.rows);
}

}  // namespace eaves::cuda
