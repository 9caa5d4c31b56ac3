// The first step of the fused path with a guessed shift (fused.h): the target of each row, and the guess at its largest
// logit.
#include "ops/linear_cross_entropy/fused/rows.cuh"

namespace eaves::cuda {
namespace {

/// float32 holds 2^t for t from -126 to 127. Usually a row's largest exponential is less than 2^127 (e^88) times the
/// largest sampled one, unless the samples themselves are spread widely: normal logits with a deviation of 64, say. A
/// row with such samples gets up to kMostRoom more room above, and still counts exponentials down to 2^-36 of the
/// largest sample.
constexpr float kUsualSpread = 60.0f;
constexpr float kMostRoom = 90.0f;
/// Samples farther below the largest are classes that a bias masks (-1e4 is an exponent of -14427). They say nothing
/// about the spread of the other classes.
constexpr float kMasked = 4096.0f;

/// One warp per row.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    guess_shift(const __grid_constant__ Targets targets, std::int64_t rows, const T* hidden, std::int64_t hidden_stride,
                const T* head, std::int64_t head_stride, std::int64_t features, int sample_count, const float* bias,
                std::int64_t classes_per_sample, const __grid_constant__ FastTransform transform,
                const __grid_constant__ FusedMemory memory) {
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
    if (!(exponent > largest - kMasked)) continue;
    sum += exponent;
    count += 1.0f;
  }
  const float mean = reduce_lanes<32>(sum, Plus{}) / reduce_lanes<32>(count, Plus{});
  const float room = fminf(fmaxf(largest - mean - kUsualSpread, 0.0f), kMostRoom);
  const int column = targets.column(row);
  if (column >= 0) {
    float of_target[1];
    multiply<1, T>(hidden + row * hidden_stride, {head + column * head_stride}, features, of_target);
    largest = fmaxf(largest, transform.exponent(of_target[0] + (bias == nullptr ? 0.0f : bias[column])));
  }
  if (threadIdx.x % 32 != 0) return;
  memory.target[row] = column;
  memory.shift[row] = targets.is_ignored(row)              ? infinity<float>()  // 2^t becomes 0
                      : fabsf(largest) < infinity<float>() ? largest + room
                                                           : 0.0f;
  put_first_of_class(memory, row, column);
}

}  // namespace

void guess_shifts(const FusedRows& rows) {
  clear_first_of_class(rows);
  dispatch_half(rows.dtype, [&]<typename T>() {
    launch(rows.op, guess_shift<T>,
           {.blocks = ceil_divide(rows.rows, kWarps), .threads = kThreads, .stream = rows.context.stream},
           Targets(rows), rows.rows, static_cast<const T*>(rows.hidden.data), rows.hidden.stride,
           static_cast<const T*>(rows.head.data), rows.head.stride, rows.features,
           static_cast<int>(sampled_classes(rows.classes)), rows.bias, sample_distance(rows.classes),
           FastTransform(rows.options), rows.memory);
  });
}

}  // namespace eaves::cuda
