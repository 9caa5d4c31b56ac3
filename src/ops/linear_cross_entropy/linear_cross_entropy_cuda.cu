// linear_cross_entropy on a GPU: what its chunks (linear_cross_entropy_chunks.h) need beside matrix products and the
// loss. All of it moves less memory than those by the number of features or classes.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "core/dispatch.h"
#include "core/mean_loss.h"
#include "cuda/device.h"
#include "cuda/gemm.h"
#include "cuda/launch.cuh"
#include "cuda/loads.cuh"
#include "cuda/reduce.cuh"
#include "cuda/row_sums.cuh"
#include "cuda/vector.cuh"
#include "ops/linear_cross_entropy/linear_cross_entropy_backend.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_chunks.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_fused.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_plan.h"

namespace eaves::cuda {
namespace {

using namespace linear_cross_entropy_tensors;

constexpr int kThreads = 256;
constexpr int kSelectThreads = 1024;  // of the one block that counts rows: a position depends on all rows before it
constexpr int kWarps = kSelectThreads / 32;
constexpr std::int64_t kMostBlocks = 4096;

// ---- rows ----------------------------------------------------------------------------------------------------------

/// What every kernel knows of the rows.
struct Rows {
  LinearCrossEntropyView view;
  TypedNumbers targets;  ///< nullptr: soft ones
  std::int64_t ignore_index;
  TypedNumbers row_weight;  ///< nullptr: 1

  explicit Rows(const LinearCrossEntropyProblem& problem)
      : view(problem.view),
        targets(problem.has_soft_targets() ? TypedNumbers{} : problem.targets),
        ignore_index(problem.options.ignore_index),
        row_weight{problem.row_weight, problem.accumulator()} {}

  /// False for a row that is ignored, and for one of weight 0. `at` are its offsets.
  template <typename Offsets>
  __device__ bool counts(const Offsets& at) const {
    if (row_weight.data != nullptr && number_at<double>(row_weight, at.of[kPerRow]) == 0.0) return false;
    return targets.data == nullptr || integer_at(targets, at.of[kTargets]) != ignore_index;
  }
};

// ---- the selection -------------------------------------------------------------------------------------------------

template <typename A>
struct Selection {
  Rows rows;
  TypedNumbers class_weight;  ///< data nullptr: 1
  std::int64_t classes;
  TypedNumbers grad_loss;     ///< data nullptr: 1
  std::int64_t* row_indices;  ///< nullptr: all rows are computed, in the order of the view
  bool leaves_out;            ///< rows that do not count; with row_indices
  std::int64_t* targets;
  A* row_gradients;  ///< nullptr where the loss is reduced
  A* numbers;
  std::int64_t* count;
  const A* given_divisor;  ///< nullptr: the weights of the rows
  A* divisor;              ///< out, or nullptr
  bool is_reduced;
  bool is_mean;
};

/// How many threads before this one have `is_counted`, and in `total` how many in all. For a whole block.
__device__ int position_in_block(bool is_counted, int& total) {
  __shared__ int counts[kWarps];
  const unsigned mask = __ballot_sync(~0u, is_counted);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __syncthreads();
  if (lane == 0) counts[warp] = __popc(mask);
  __syncthreads();
  int before = 0;
  total = 0;
#pragma unroll 1
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) before += counts[i];
    total += counts[i];
  }
  return before + __popc(mask & ((1u << lane) - 1));
}

/// One block, which takes the rows in their order.
template <typename A>
__global__ void __launch_bounds__(kSelectThreads) select_rows(const __grid_constant__ Selection<A> in) {
  const std::int64_t rows = in.rows.view.row_count;
  double weight = 0.0;
  std::int64_t selected = 0;
  for (std::int64_t first = 0; first < rows; first += kSelectThreads) {
    const std::int64_t row = first + threadIdx.x;
    const auto at = in.rows.view.rows.offsets(row < rows ? row : rows - 1);
    const bool is_counted = row < rows && in.rows.counts(at);
    // All soft targets are read in the order of the per-row tensors.
    std::int64_t position = in.rows.targets.data == nullptr ? at.of[kPerRow] : row;
    if (in.leaves_out) {
      int total = 0;
      position = selected + position_in_block(is_counted, total);
      selected += total;
    }
    const bool is_kept = in.leaves_out ? is_counted : row < rows;
    if (is_kept) {
      if (in.row_indices != nullptr) in.row_indices[position] = row;
      if (in.targets != nullptr) {
        in.targets[position] = is_counted ? integer_at(in.rows.targets, at.of[kTargets]) : in.rows.ignore_index;
      }
      if (in.row_gradients != nullptr) in.row_gradients[position] = number_at<A>(in.grad_loss, at.of[kGradLoss]);
    }
    if (is_counted) {
      const std::int64_t target = in.rows.targets.data == nullptr ? 0 : integer_at(in.rows.targets, at.of[kTargets]);
      const bool has_weight = in.class_weight.data != nullptr && in.rows.targets.data != nullptr;
      // A target out of range makes its row's loss NaN, whatever its class weighs.
      const TypedNumbers& weights = in.rows.row_weight;
      const double row_weight = weights.data == nullptr ? 1.0 : number_at<double>(weights, at.of[kPerRow]);
      const bool is_in_range = target >= 0 && target < in.classes;
      weight += row_weight * (has_weight && is_in_range ? double(number_at<A>(in.class_weight, target)) : 1.0);
    }
  }
  const double sum = reduce_block<kSelectThreads>(weight, Plus{});
  if (threadIdx.x != 0) return;
  const A divisor = in.given_divisor != nullptr ? *in.given_divisor : static_cast<A>(divisor_of_sum(sum));
  double scale = 1.0;
  if (in.is_reduced) {
    if (in.grad_loss.data != nullptr) scale = double(number_at<A>(in.grad_loss, 0));
    if (in.is_mean) scale = mean_gradient(scale, double(divisor));
  }
  put_scale(scale, in.numbers);
  in.numbers[kDivisor] = divisor;
  if (in.divisor != nullptr) *in.divisor = divisor;
  *in.count = in.leaves_out ? selected : rows;
}

// ---- features ------------------------------------------------------------------------------------------------------

/// Rows of features, one side of which is a matrix without gaps and the other a tensor of the problem.
struct FeatureRows {
  LinearCrossEntropyView view;
  const std::int64_t* row_indices;  ///< nullptr: those of the view
  std::int64_t first;
  std::int64_t count;

  __device__ std::int64_t row(std::int64_t i) const {
    return row_indices == nullptr ? first + i : row_indices[first + i];
  }
  __device__ std::int64_t feature(int tensor, std::int64_t i) const {
    return view.columns.rank == 1 ? i * view.columns.strides[tensor][0] : view.columns.offsets(i).of[tensor];
  }
};

/// A block a row.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    gather_features(const __grid_constant__ FeatureRows rows, const T* x, T* to) {
  const std::int64_t features = rows.view.column_count;
  for (std::int64_t i = blockIdx.x; i < rows.count; i += gridDim.x) {
    const std::int64_t row = rows.row(i);
    T* into = to + i * features;
    const T* from = x + rows.view.rows.offsets(row).of[kX];
    const bool has_unit_stride = rows.view.columns.rank == 1 && rows.view.columns.strides[kX][0] == 1;
    const std::uint64_t addresses = reinterpret_cast<std::uint64_t>(from) | reinterpret_cast<std::uint64_t>(into) |
                                    static_cast<std::uint64_t>(features) * sizeof(T);
    if (has_unit_stride && addresses % 16 == 0) {
      const std::int64_t vectors = features * static_cast<std::int64_t>(sizeof(T)) / 16;
      for (std::int64_t f = threadIdx.x; f < vectors; f += kThreads) {
        reinterpret_cast<uint4*>(into)[f] = reinterpret_cast<const uint4*>(from)[f];
      }
    } else {
      for (std::int64_t f = threadIdx.x; f < features; f += kThreads) into[f] = from[rows.feature(kX, f)];
    }
  }
}

/// A block a row.
template <typename N>
__global__ void __launch_bounds__(kThreads)
    gather_targets(const __grid_constant__ FeatureRows rows, const N* targets, std::int64_t target_stride,
                   std::int64_t classes, N* to, std::int64_t stride) {
  for (std::int64_t i = blockIdx.x; i < rows.count; i += gridDim.x) {
    const N* from = targets + rows.view.rows.offsets(rows.row(i)).of[kPerRow] * target_stride;
    for (std::int64_t v = threadIdx.x; v < classes; v += kThreads) to[i * stride + v] = from[v];
  }
}

/// A block a row. From S, T or its accumulator.
template <typename S, typename T>
__global__ void __launch_bounds__(kThreads)
    scatter_features(const __grid_constant__ FeatureRows rows, const S* from, T* grad_x) {
  const std::int64_t features = rows.view.column_count;
  for (std::int64_t i = blockIdx.x; i < rows.count; i += gridDim.x) {
    const std::int64_t row = rows.row(i);
    T* into = grad_x + rows.view.rows.offsets(row).of[kGradX];
    for (std::int64_t f = threadIdx.x; f < features; f += kThreads) {
      into[rows.feature(kGradX, f)] = round_to<T>(load_as_accumulator(from[i * features + f]));
    }
  }
}

/// What makes the gradient of x of a product with powers (linear_cross_entropy_fused.h).
template <typename T>
struct RowsOfPowers {
  const float* factor;
  const float* target_gradient;
  const std::int32_t* target;
  const T* weight;
  std::int64_t stride;

  explicit RowsOfPowers(const FusedRows& rows)
      : factor(rows.memory.row_factor),
        target_gradient(rows.memory.target_gradient),
        target(rows.memory.target),
        weight(static_cast<const T*>(rows.weight.data)),
        stride(rows.weight.stride) {}
};

/// A block a row. D is T, or float of a shard.
template <typename T, typename D>
__global__ void __launch_bounds__(kThreads)
    write_gradient_of_powers(const __grid_constant__ FeatureRows rows, const float* from, D* grad_x,
                             const __grid_constant__ RowsOfPowers<T> powers) {
  const std::int64_t features = rows.view.column_count;
  const std::int64_t i = blockIdx.x;
  const float factor = powers.factor[i];
  const float of_target = powers.target_gradient[i];
  const T* weight = powers.weight + max(powers.target[i], 0) * powers.stride;
  D* into = grad_x + rows.view.rows.offsets(rows.row(i)).of[kGradX];
  const auto gradient_of = [&](float product, float of_weight) {
    const float gradient = factor == 0.0f ? 0.0f : factor * product;
    return of_target == 0.0f ? gradient : fmaf(of_target, of_weight, gradient);
  };
  const bool has_unit_stride = rows.view.columns.rank == 1 && rows.view.columns.strides[kGradX][0] == 1;
  if (has_unit_stride && reinterpret_cast<std::uint64_t>(into) % 16 == 0) {
    constexpr int kSize = Vector<T>::kSize;  // of which features are whole ones: cuda/exp_product.h
    for (std::int64_t f = std::int64_t{threadIdx.x} * kSize; f < features; f += kThreads * kSize) {
      const auto* products = reinterpret_cast<const float4*>(from + i * features + f);
      const float4 low = products[0], high = products[1];
      const float of_products[kSize] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      float values[kSize];
      unpack(*reinterpret_cast<const Vector<T>*>(weight + f), values);
#pragma unroll
      for (int k = 0; k < kSize; ++k) values[k] = gradient_of(of_products[k], values[k]);
      if constexpr (std::is_same_v<D, T>) {
        *reinterpret_cast<Vector<T>*>(into + f) = pack<T>(values);
      } else {
        auto* vectors = reinterpret_cast<float4*>(into + f);
        vectors[0] = make_float4(values[0], values[1], values[2], values[3]);
        vectors[1] = make_float4(values[4], values[5], values[6], values[7]);
      }
    }
    return;
  }
  for (std::int64_t f = threadIdx.x; f < features; f += kThreads) {
    into[rows.feature(kGradX, f)] = round_to<D>(gradient_of(from[i * features + f], load_as_accumulator(weight[f])));
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    clear_uncounted(const __grid_constant__ Rows rows, FeatureRows features, T* grad_x) {
  for (std::int64_t row = blockIdx.x; row < rows.view.row_count; row += gridDim.x) {
    const auto at = rows.view.rows.offsets(row);
    if (rows.counts(at)) continue;
    for (std::int64_t f = threadIdx.x; f < rows.view.column_count; f += kThreads) {
      grad_x[at.of[kGradX] + features.feature(kGradX, f)] = T{};
    }
  }
}

// ---- numbers -------------------------------------------------------------------------------------------------------

template <typename N>
__global__ void __launch_bounds__(kThreads)
    gather_numbers_of(const __grid_constant__ Rows rows, const std::int64_t* row_indices, const N* from, N* to,
                      std::int64_t count) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) {
    const std::int64_t row = row_indices == nullptr ? i : row_indices[i];
    const auto at = rows.view.rows.offsets(row);
    to[i] = rows.counts(at) ? from[at.of[kPerRow]] : N{};
  }
}

template <typename N>
__global__ void __launch_bounds__(kThreads)
    scatter_numbers_of(const __grid_constant__ Rows rows, const std::int64_t* row_indices, const N* from, N* to,
                       std::int64_t count) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) {
    const auto at = rows.view.rows.offsets(row_indices == nullptr ? i : row_indices[i]);
    to[at.of[kPerRow]] = rows.counts(at) ? from[i] : N{};
  }
}

template <typename A>
__global__ void __launch_bounds__(kThreads) widen_numbers(TypedNumbers from, A* to, std::int64_t count) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) {
    to[i] = number_at<A>(from, i);
  }
}

constexpr int kSumLanes = 32;  // of a block: as many columns
constexpr int kSumRows = 16;   // that walk down a column side by side

template <typename T, typename A = Accumulator<T>>
__global__ void __launch_bounds__(kSumLanes* kSumRows)
    sum_bias_gradient(const T* from, std::int64_t rows, std::int64_t columns, std::int64_t stride,
                      const float* row_factor, const A* scale, bool is_first, double* to) {
  __shared__ double sums[kSumRows][kSumLanes];
  const std::int64_t column = std::int64_t{blockIdx.x} * kSumLanes + threadIdx.x;
  double sum = 0.0;
  if (column < columns) {
#pragma unroll 8
    for (std::int64_t row = threadIdx.y; row < rows; row += kSumRows) {
      A value = load_as_accumulator(from[row * stride + column]);
      if (row_factor != nullptr) value = row_factor[row] == 0.0f ? A(0) : value * A(row_factor[row]);
      sum += double(value);
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  double all = 0.0;
#pragma unroll
  for (int i = 0; i < kSumRows; ++i) all += sums[i][threadIdx.x];
  if (scale != nullptr) all *= double(*scale);
  to[column] = is_first ? all : to[column] + all;
}

template <typename N>
__global__ void __launch_bounds__(kThreads)
    write_numbers(const double* from, N* to, std::int64_t count, bool accumulates) {
  using A = Accumulator<N>;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) {
    to[i] = round_to<N>(A((accumulates ? double(load_as_accumulator(to[i])) : 0.0) + from[i]));
  }
}

template <typename A>
struct LossesOfRows {
  const A* losses;
  __device__ double operator()(std::int64_t row) const { return double(losses[row]); }
};

template <typename A>
struct WriteLoss {
  const A* divisor;  ///< nullptr but for the mean
  bool has_normalizer;
  A* to;

  __device__ void operator()(double sum) const {
    *to = static_cast<A>(divisor == nullptr ? sum : mean_of(sum, double(*divisor), has_normalizer));
  }
};

// ---- host ----------------------------------------------------------------------------------------------------------

bool is_being_captured(const char* op, void* stream) {
  cudaStreamCaptureStatus status{};
  check_status(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), op);
  return status != cudaStreamCaptureStatusNone;
}

std::int64_t blocks_for(std::int64_t count) {
  return std::clamp<std::int64_t>(ceil_divide(count, kThreads), 1, kMostBlocks);
}

template <typename T>
class Steps {
 public:
  static constexpr bool kHasExpProduct = true;

  using A = Accumulator<T>;

  Steps(const LinearCrossEntropyProblem& problem, const LinearCrossEntropyMemory& memory,
        const ExecutionContext& context)
      : problem_(problem), memory_(memory), context_(context), rows_(problem) {
    context_.workspace = memory.product;
  }

  std::int64_t select_rows() {
    const bool is_mean = problem_.options.reduction == Reduction::mean;
    const bool is_backward = problem_.mode == LinearCrossEntropyMode::backward;
    const Selection<A> selection{
        .rows = rows_,
        .class_weight = problem_.shard == nullptr ? problem_.class_weight : TypedNumbers{},
        .classes = problem_.all_classes(),
        .grad_loss = problem_.grad_loss,
        .row_indices = row_indices(),
        .leaves_out = leaves_out_rows(problem_),
        .targets = memory_.targets,
        .row_gradients = static_cast<A*>(memory_.grad_loss),
        .numbers = numbers(),
        .count = row_count(),
        .given_divisor =
            static_cast<const A*>(is_backward ? (is_mean ? problem_.outputs.divisor : nullptr) : problem_.normalizer),
        .divisor = static_cast<A*>(is_backward ? nullptr : problem_.outputs.divisor),
        .is_reduced = problem_.is_reduced(),
        .is_mean = is_mean};
    run(cuda::select_rows<A>, {.threads = kSelectThreads}, selection);
    count_ = problem_.rows();
    if (selection.leaves_out) {
      copy_to_host(problem_.op, problem_.device, &count_, row_count(), sizeof(count_), context_.stream);
    }
    return count_;
  }

  void gather_x(std::int64_t first, std::int64_t count) {
    run(gather_features<T>, {.blocks = std::min(count, kMostBlocks), .threads = kThreads}, feature_rows(first, count),
        static_cast<const T*>(problem_.x), static_cast<T*>(memory_.x));
  }

  void gather_soft_targets(std::int64_t first, std::int64_t count, std::int64_t first_class, std::int64_t classes,
                           std::int64_t stride) {
    const auto gather = [&]<typename N>() {
      run(gather_targets<N>, {.blocks = std::min(count, kMostBlocks), .threads = kThreads}, feature_rows(first, count),
          static_cast<const N*>(problem_.targets.data) + first_class, problem_.soft_target_stride, classes,
          static_cast<N*>(memory_.soft_targets), stride);
    };
    problem_.targets.dtype == DType::float64 ? gather.template operator()<double>()
                                             : gather.template operator()<float>();
  }

  void scatter_grad_x(std::int64_t first, std::int64_t count, DType dtype) {
    const auto scatter = [&](const auto* from, auto* to) {
      using S = std::remove_cvref_t<decltype(*from)>;
      using D = std::remove_pointer_t<decltype(to)>;
      run(scatter_features<S, D>, {.blocks = std::min(count, kMostBlocks), .threads = kThreads},
          feature_rows(first, count), from, to);
    };
    // A grad_x in accumulators, of a shard, comes from accumulators alone.
    if (problem_.grad_x_dtype != kDTypeOf<T>) {
      scatter(static_cast<const A*>(memory_.grad_x), static_cast<A*>(problem_.grad_x));
    } else if (dtype == kDTypeOf<T>) {
      scatter(static_cast<const T*>(memory_.grad_x), static_cast<T*>(problem_.grad_x));
    } else {
      scatter(static_cast<const A*>(memory_.grad_x), static_cast<T*>(problem_.grad_x));
    }
  }

  void clear_grad_x() {
    const auto clear = [&](auto* grad_x) {
      using D = std::remove_pointer_t<decltype(grad_x)>;
      run(clear_uncounted<D>,
          {.blocks = std::clamp<std::int64_t>(problem_.rows(), 1, kMostBlocks), .threads = kThreads}, rows_,
          feature_rows(0, problem_.rows()), grad_x);
    };
    if (problem_.grad_x_dtype == kDTypeOf<T>) return clear(static_cast<T*>(problem_.grad_x));
    clear(static_cast<A*>(problem_.grad_x));
  }

  template <typename N>
  void gather_numbers(const N* from, N* to, std::int64_t count, bool gathers) {
    run(gather_numbers_of<N>, {.blocks = blocks_for(count), .threads = kThreads}, rows_,
        static_cast<const std::int64_t*>(gathers ? row_indices() : nullptr), from, to, count);
  }

  template <typename N>
  void scatter_numbers(const N* from, N* to, std::int64_t count) {
    const auto bytes = static_cast<std::size_t>(problem_.rows()) * sizeof(N);
    check_status(cudaMemsetAsync(to, 0, bytes, stream()), problem_.op);
    if (count == 0) return;
    run(scatter_numbers_of<N>, {.blocks = blocks_for(count), .threads = kThreads}, rows_, row_indices(), from, to,
        count);
  }

  void widen(TypedNumbers from, std::int64_t count, void* to) {
    run(widen_numbers<A>, {.blocks = blocks_for(count), .threads = kThreads}, from, static_cast<A*>(to), count);
  }

  void add_bias_gradient(const void* from, std::int64_t rows, std::int64_t columns, std::int64_t stride,
                         const float* row_factor, const void* scale, bool is_first, double* to) {
    run(sum_bias_gradient<T, A>, {.blocks = ceil_divide(columns, kSumLanes), .threads = dim3(kSumLanes, kSumRows)},
        static_cast<const T*>(from), rows, columns, stride, row_factor, static_cast<const A*>(scale), is_first, to);
  }

  void write_grad_bias() {
    const auto write = [&](auto* to) {
      using N = std::remove_pointer_t<decltype(to)>;
      run(write_numbers<N>, {.blocks = blocks_for(problem_.classes), .threads = kThreads},
          static_cast<const double*>(memory_.grad_bias), to, problem_.classes, problem_.accumulates);
    };
    if (problem_.grad_bias_dtype == kDTypeOf<T>) {
      write(static_cast<T*>(problem_.grad_bias));
    } else {
      write(static_cast<A*>(problem_.grad_bias));
    }
  }

  void clear_parameters() {
    const auto rows = static_cast<std::size_t>(problem_.classes);
    if (problem_.grad_weight != nullptr) {
      const std::size_t element = size_of(problem_.grad_weight_dtype);
      const auto width = static_cast<std::size_t>(problem_.features()) * element;
      const auto pitch = static_cast<std::size_t>(problem_.grad_weight_stride) * element;
      check_status(cudaMemset2DAsync(problem_.grad_weight, pitch, 0, width, rows, stream()), problem_.op);
    }
    if (problem_.grad_bias != nullptr) {
      check_status(cudaMemsetAsync(problem_.grad_bias, 0, rows * size_of(problem_.grad_bias_dtype), stream()),
                   problem_.op);
    }
  }

  /// One block is enough: it reads one number a row, after products that compute a whole row of logits for each.
  void reduce_losses(const void* losses, void* to) {
    const bool is_mean = problem_.options.reduction == Reduction::mean;
    const WriteLoss<A> write{is_mean ? numbers() + kDivisor : nullptr, problem_.normalizer != nullptr,
                             static_cast<A*>(to)};
    run(sum_rows<double, LossesOfRows<A>, WriteLoss<A>>, {.threads = kSumThreads},
        LossesOfRows<A>{static_cast<const A*>(losses)}, count_, count_, write);
  }

  void product(const Gemm& product) { gemm(problem_.op, product, context_); }

  void guess_shifts(const FusedRows& rows) {
    const std::int64_t samples = sampled_classes(rows.classes);
    product({.m = rows.rows,
             .n = samples,
             .k = problem_.features(),
             .dtype = problem_.dtype,
             .a = rows.x,
             .b = {rows.weight.data, rows.weight.stride * sample_distance(rows.classes), true},
             .c_dtype = DType::float32,
             .c = memory_.exp_product.samples,
             .c_stride = samples});
    cuda::guess_shifts(problem_.op, rows, context_.stream);
  }

  void sum_exponentials(const FusedRows& rows, float* statistics) {
    statistics_of_product(problem_.op, rows, statistics, context_);
  }

  void write_gradient(const FusedRows& rows, const FusedGradient& gradient) {
    gradient_by_product(problem_.op, rows, gradient, context_);
  }

  void write_powers(const FusedRows& rows, const FusedGradient& gradient, float* statistics) {
    powers_of_product(problem_.op, rows, gradient, problem_.shard != nullptr, statistics, context_);
  }

  void finish_powers_of_shard(const FusedRows& rows, const FusedGradient& gradient, const float* statistics,
                              const float* gathered) {
    cuda::finish_powers_of_shard(problem_.op, rows, gradient, statistics, gathered, problem_.shard->shards,
                                 context_.stream);
  }

  void write_grad_x(const FusedRows& rows, std::int64_t first) {
    if constexpr (std::is_same_v<T, bfloat16>) {
      const auto write = [&](auto* grad_x) {
        using D = std::remove_pointer_t<decltype(grad_x)>;
        run(write_gradient_of_powers<T, D>, {.blocks = rows.rows, .threads = kThreads}, feature_rows(first, rows.rows),
            static_cast<const float*>(memory_.grad_x), grad_x, RowsOfPowers<T>(rows));
      };
      if (problem_.grad_x_dtype == kDTypeOf<T>) return write(static_cast<T*>(problem_.grad_x));
      write(static_cast<float*>(problem_.grad_x));
    }
  }

  void scale_x(const FusedRows& rows, void* to) { scale_rows(problem_.op, rows, to, context_.stream); }

  void add_targets(const FusedRows& rows) {
    cuda::add_targets(problem_.op, rows, problem_.grad_weight, problem_.grad_weight_dtype, problem_.grad_weight_stride,
                      memory_.grad_bias, context_.stream);
  }

 private:
  template <typename... Parameters, typename... Arguments>
  void run(void (*kernel)(Parameters...), LaunchShape shape, const Arguments&... arguments) {
    shape.stream = context_.stream;
    launch<Parameters...>(problem_.op, kernel, shape, static_cast<Parameters>(arguments)...);
  }

  cudaStream_t stream() const { return static_cast<cudaStream_t>(context_.stream); }
  A* numbers() const { return static_cast<A*>(memory_.numbers); }
  std::int64_t* row_count() const { return static_cast<std::int64_t*>(memory_.numbers) + kRowCount; }

  /// nullptr where all rows are computed, in the order of the view.
  std::int64_t* row_indices() const {
    return problem_.skips_ignored_rows || problem_.has_soft_targets() ? memory_.row_indices : nullptr;
  }
  FeatureRows feature_rows(std::int64_t first, std::int64_t count) const {
    return {problem_.view, row_indices(), first, count};
  }

  const LinearCrossEntropyProblem& problem_;
  const LinearCrossEntropyMemory& memory_;
  ExecutionContext context_;
  std::int64_t count_ = 0;  ///< rows that are computed
  Rows rows_;
};

}  // namespace

void linear_cross_entropy(const LinearCrossEntropyProblem& given, const LinearCrossEntropyBlock& block,
                          const ExecutionContext& context) {
  const DeviceGuard guard(given.device);
  require_gemm(given.op);
  LinearCrossEntropyProblem problem = given;
  // A capture cannot wait for the number of rows that count: all are computed. That takes less workspace.
  if (problem.skips_ignored_rows && is_being_captured(given.op, context.stream)) problem.skips_ignored_rows = false;
  LinearCrossEntropyMemory memory;
  lay_out(problem, block, context.workspace.data, memory);
  dispatch_floating_point(problem.dtype, [&]<typename T>() {
    Steps<T> steps(problem, memory, context);
    LinearCrossEntropyChunks<Steps<T>>(problem, block, memory, context, steps).run();
  });
}

}  // namespace eaves::cuda
