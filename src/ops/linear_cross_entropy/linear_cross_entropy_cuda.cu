// The steps of linear_cross_entropy on a GPU (linear_cross_entropy_steps.h). All steps but the products move less
// memory than the products and the loss, by a factor of the number of features or classes.
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
#include "ops/linear_cross_entropy/fused/chunks.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_logits.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_rows.cuh"

namespace eaves::cuda {
namespace {

constexpr int kSelectThreads = 1024;  // one block selects the rows: the position of a row depends on all rows before it
constexpr int kWarps = kSelectThreads / 32;
constexpr std::int64_t kMostBlocks = 4096;

// ---- the selection -------------------------------------------------------------------------------------------------

template <typename A>
struct Selection {
  Rows rows;
  TypedNumbers class_weight;  ///< data nullptr: 1
  std::int64_t classes;
  TypedNumbers grad_loss;     ///< data nullptr: 1
  std::int64_t* row_indices;  ///< nullptr: all rows are computed, in the order of the view
  bool leaves_out;            ///< leaves out the rows that do not count; with row_indices
  std::int64_t* targets;
  A* row_gradients;  ///< divided by kAlpha; nullptr: the loss is reduced
  A* numbers;
  std::int64_t* count;
  const A* given_divisor;  ///< nullptr: the sum of the rows' weights
  A* divisor;              ///< out, or nullptr
  bool is_reduced;
  ScaleInProducts scale_in_products;
  bool is_mean;
};

/// How many threads before this one have `is_counted`; `total` is their number in the whole block. All threads of the
/// block call it.
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

/// One block takes the rows in their order.
template <typename A>
__global__ void __launch_bounds__(kSelectThreads) select_rows(const __grid_constant__ Selection<A> in) {
  const std::int64_t rows = in.rows.view.row_count;
  double weight = 0.0;
  UpstreamRange<A> upstream;
  std::int64_t selected = 0;
  for (std::int64_t first = 0; first < rows; first += kSelectThreads) {
    const std::int64_t row = first + threadIdx.x;
    const auto at = in.rows.view.rows.offsets(row < rows ? row : rows - 1);
    const bool is_counted = row < rows && in.rows.counts(at);
    // The kernels read all soft targets in place, so these rows take the order of the per-row tensors.
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
      if (in.row_gradients != nullptr) {
        const A gradient = number_at<A>(in.grad_loss, at.of[kGradLoss]);
        in.row_gradients[position] = gradient;
        if (is_counted) upstream.add(gradient);
      }
    }
    if (is_counted) {
      const std::int64_t target = in.rows.targets.data == nullptr ? 0 : integer_at(in.rows.targets, at.of[kTargets]);
      const bool has_weight = in.class_weight.data != nullptr && in.rows.targets.data != nullptr;
      // A target out of range counts with a class weight of 1; it makes the loss of its row NaN.
      const TypedNumbers& weights = in.rows.row_weight;
      const double row_weight = weights.data == nullptr ? 1.0 : number_at<double>(weights, at.of[kPerRow]);
      const bool is_in_range = target >= 0 && target < in.classes;
      weight += row_weight * (has_weight && is_in_range ? double(number_at<A>(in.class_weight, target)) : 1.0);
    }
  }
  const double sum = reduce_block<kSelectThreads>(weight, Plus{});
  upstream = reduce_block<kSelectThreads>(upstream, [](const UpstreamRange<A>& a, const UpstreamRange<A>& b) {
    return UpstreamRange<A>{a.least < b.least ? a.least : b.least, a.largest > b.largest ? a.largest : b.largest};
  });
  const std::int64_t count = in.leaves_out ? selected : rows;
  if (threadIdx.x == 0) {
    const A divisor = in.given_divisor != nullptr ? *in.given_divisor : static_cast<A>(divisor_of_sum(sum));
    double scale = double(upstream.scale());
    if (in.is_reduced) {
      if (in.grad_loss.data != nullptr) scale = double(number_at<A>(in.grad_loss, 0));
      if (in.is_mean) scale = mean_gradient(scale, double(divisor));
    }
    put_scale(scale, in.scale_in_products, in.numbers);
    in.numbers[kDivisor] = divisor;
    if (in.divisor != nullptr) *in.divisor = divisor;
    *in.count = count;
  }
  if (in.row_gradients == nullptr) return;
  __syncthreads();  // kAlpha and the gradients are written
  for (std::int64_t i = threadIdx.x; i < count; i += kSelectThreads) in.row_gradients[i] /= in.numbers[kAlpha];
}

template <typename A>
struct LossesOfRows {
  const A* losses;
  __device__ double operator()(std::int64_t row) const { return double(losses[row]); }
};

template <typename A>
struct WriteLoss {
  const A* divisor;  ///< nullptr unless the reduction is the mean
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
  return std::clamp<std::int64_t>(ceil_divide(count, kRowThreads), 1, kMostBlocks);
}

template <typename T>
class Steps final : public LinearCrossEntropySteps {
 public:
  using A = Accumulator<T>;

  Steps(const LinearCrossEntropyProblem& problem, const LinearCrossEntropyMemory& memory,
        const ExecutionContext& context)
      : problem_(problem), memory_(memory), context_(context), rows_(problem) {
    context_.workspace = memory.product;
  }

  std::int64_t select_rows() override {
    const bool is_mean = problem_.options.reduction == Reduction::mean;
    const bool is_backward = problem_.mode == LinearCrossEntropyMode::backward;
    const Selection<A> selection{
        .rows = rows_,
        .class_weight = problem_.shard == nullptr ? problem_.class_weight : TypedNumbers{},
        .classes = problem_.all_classes(),
        .grad_loss = problem_.grad_loss,
        .row_indices = row_indices(),
        .leaves_out = LinearCrossEntropyShape(problem_).leaves_out_rows(),
        .targets = memory_.targets,
        .row_gradients = static_cast<A*>(memory_.grad_loss),
        .numbers = numbers(),
        .count = row_count(),
        .given_divisor =
            static_cast<const A*>(is_backward ? (is_mean ? problem_.outputs.divisor : nullptr) : problem_.normalizer),
        .divisor = static_cast<A*>(is_backward ? nullptr : problem_.outputs.divisor),
        .is_reduced = problem_.is_reduced(),
        .scale_in_products = problem_.scale_in_products(),
        .is_mean = is_mean};
    run(cuda::select_rows<A>, {.threads = kSelectThreads}, selection);
    count_ = problem_.rows();
    if (selection.leaves_out) {
      copy_to_host(problem_.op, problem_.device, &count_, row_count(), sizeof(count_), context_.stream);
    }
    return count_;
  }

  void gather_hidden(std::int64_t first, std::int64_t count) override {
    run(gather_features<T>, {.blocks = std::min(count, kMostBlocks), .threads = kRowThreads},
        feature_rows(first, count), static_cast<const T*>(problem_.hidden), static_cast<T*>(memory_.hidden));
  }

  void gather_soft_targets(std::int64_t first, std::int64_t count, std::int64_t first_class, std::int64_t classes,
                           std::int64_t stride) override {
    const auto gather = [&]<typename N>() {
      run(gather_targets<N>, {.blocks = std::min(count, kMostBlocks), .threads = kRowThreads},
          feature_rows(first, count), static_cast<const N*>(problem_.targets.data) + first_class,
          problem_.soft_target_stride, classes, static_cast<N*>(memory_.soft_targets), stride);
    };
    problem_.targets.dtype == DType::float64 ? gather.template operator()<double>()
                                             : gather.template operator()<float>();
  }

  void scatter_grad_hidden(std::int64_t first, std::int64_t count, DType dtype, const void* scale) override {
    const auto scatter = [&](const auto* from, auto* to) {
      using S = std::remove_cvref_t<decltype(*from)>;
      using D = std::remove_pointer_t<decltype(to)>;
      run(scatter_features<S, D>, {.blocks = std::min(count, kMostBlocks), .threads = kRowThreads},
          feature_rows(first, count), from, static_cast<const A*>(scale), to);
    };
    // A grad_hidden in accumulators belongs to a shard, and comes from accumulators alone.
    if (problem_.grad_hidden_dtype != kDTypeOf<T>) {
      scatter(static_cast<const A*>(memory_.grad_hidden), static_cast<A*>(problem_.grad_hidden));
    } else if (dtype == kDTypeOf<T>) {
      scatter(static_cast<const T*>(memory_.grad_hidden), static_cast<T*>(problem_.grad_hidden));
    } else {
      scatter(static_cast<const A*>(memory_.grad_hidden), static_cast<T*>(problem_.grad_hidden));
    }
  }

  void clear_grad_hidden() override {
    const auto clear = [&](auto* grad_hidden) {
      using D = std::remove_pointer_t<decltype(grad_hidden)>;
      run(clear_uncounted<D>,
          {.blocks = std::clamp<std::int64_t>(problem_.rows(), 1, kMostBlocks), .threads = kRowThreads}, rows_,
          feature_rows(0, problem_.rows()), grad_hidden);
    };
    if (problem_.grad_hidden_dtype == kDTypeOf<T>) return clear(static_cast<T*>(problem_.grad_hidden));
    clear(static_cast<A*>(problem_.grad_hidden));
  }

  void gather_numbers(const void* from, void* to, std::int64_t count, bool is_split, bool gathers,
                      const void* divisor) override {
    const auto gather = [&]<typename N>() {
      run(gather_numbers_of<N, A>, {.blocks = blocks_for(count), .threads = kRowThreads}, rows_,
          static_cast<const std::int64_t*>(gathers ? row_indices() : nullptr), static_cast<const N*>(from),
          static_cast<N*>(to), count, static_cast<const A*>(divisor));
    };
    is_split ? gather.template operator()<SplitLse<A>>() : gather.template operator()<A>();
  }

  void scatter_numbers(const void* from, void* to, std::int64_t count, bool is_split) override {
    is_split ? scatter(static_cast<const SplitLse<A>*>(from), static_cast<SplitLse<A>*>(to), count)
             : scatter(static_cast<const A*>(from), static_cast<A*>(to), count);
  }

  void scatter_argmax(const std::int64_t* from, std::int64_t* to, std::int64_t count) override {
    scatter(from, to, count);
  }

  void widen(TypedNumbers from, std::int64_t count, void* to) override {
    run(widen_numbers<A>, {.blocks = blocks_for(count), .threads = kRowThreads}, from, static_cast<A*>(to), count);
  }

  void add_bias_gradient(const void* from, std::int64_t rows, std::int64_t columns, std::int64_t stride,
                         const void* scale, bool is_first, double* to) override {
    run(sum_bias_gradient<T, A>, {.blocks = ceil_divide(columns, kSumLanes), .threads = dim3(kSumLanes, kSumRows)},
        static_cast<const T*>(from), rows, columns, stride, static_cast<const float*>(nullptr),
        static_cast<const A*>(scale), is_first, to);
  }

  void write_grad_bias() override {
    const auto write = [&](auto* to) {
      using N = std::remove_pointer_t<decltype(to)>;
      run(write_numbers<N>, {.blocks = blocks_for(problem_.classes), .threads = kRowThreads},
          static_cast<const double*>(memory_.grad_bias), to, problem_.classes, problem_.accumulates);
    };
    if (problem_.grad_bias_dtype == kDTypeOf<T>) {
      write(static_cast<T*>(problem_.grad_bias));
    } else {
      write(static_cast<A*>(problem_.grad_bias));
    }
  }

  void clear_parameters() override {
    const auto rows = static_cast<std::size_t>(problem_.classes);
    if (problem_.grad_head != nullptr) {
      const std::size_t element = size_of(problem_.grad_head_dtype);
      const auto width = static_cast<std::size_t>(problem_.features()) * element;
      const auto pitch = static_cast<std::size_t>(problem_.grad_head_stride) * element;
      check_status(cudaMemset2DAsync(problem_.grad_head, pitch, 0, width, rows, stream()), problem_.op);
    }
    if (problem_.grad_bias != nullptr) {
      check_status(cudaMemsetAsync(problem_.grad_bias, 0, rows * size_of(problem_.grad_bias_dtype), stream()),
                   problem_.op);
    }
  }

  /// One block is enough: it reads one number per row, and the products before it compute a whole row of logits for
  /// each number.
  void reduce_losses(const void* losses, void* to) override {
    const bool is_mean = problem_.options.reduction == Reduction::mean;
    const WriteLoss<A> write{is_mean ? numbers() + kDivisor : nullptr, problem_.normalizer != nullptr,
                             static_cast<A*>(to)};
    run(sum_rows<double, LossesOfRows<A>, WriteLoss<A>>, {.threads = kSumThreads},
        LossesOfRows<A>{static_cast<const A*>(losses)}, count_, count_, write);
  }

  void copy_logits(const void* from, std::int64_t from_stride, std::int64_t rows, std::int64_t columns,
                   std::int64_t stride) override {
    const auto bytes = [](std::int64_t elements) { return static_cast<std::size_t>(elements) * sizeof(A); };
    check_status(cudaMemcpy2DAsync(memory_.logits, bytes(stride), from, bytes(from_stride), bytes(columns),
                                   static_cast<std::size_t>(rows), cudaMemcpyDeviceToDevice, this->stream()),
                 problem_.op);
  }

  void product(const Gemm& product) override { gemm(problem_.op, product, context_); }

 private:
  template <typename... Parameters, typename... Arguments>
  void run(void (*kernel)(Parameters...), LaunchShape shape, const Arguments&... arguments) {
    shape.stream = context_.stream;
    launch<Parameters...>(problem_.op, kernel, shape, static_cast<Parameters>(arguments)...);
  }

  template <typename N>
  void scatter(const N* from, N* to, std::int64_t count) {
    const auto bytes = static_cast<std::size_t>(problem_.rows()) * sizeof(N);
    check_status(cudaMemsetAsync(to, 0, bytes, stream()), problem_.op);
    if (count == 0) return;
    run(scatter_numbers_of<N>, {.blocks = blocks_for(count), .threads = kRowThreads}, rows_, row_indices(), from, to,
        count);
  }

  cudaStream_t stream() const { return static_cast<cudaStream_t>(context_.stream); }
  A* numbers() const { return static_cast<A*>(memory_.numbers); }
  std::int64_t* row_count() const { return static_cast<std::int64_t*>(memory_.numbers) + kRowCount; }

  /// nullptr: all rows are computed, in the order of the view.
  std::int64_t* row_indices() const {
    return problem_.skips_ignored || problem_.has_soft_targets() ? memory_.row_indices : nullptr;
  }
  FeatureRows feature_rows(std::int64_t first, std::int64_t count) const {
    return {problem_.view, row_indices(), first, count};
  }

  const LinearCrossEntropyProblem& problem_;
  const LinearCrossEntropyMemory& memory_;
  ExecutionContext context_;
  std::int64_t count_ = 0;  ///< computed rows
  Rows rows_;
};

}  // namespace

void linear_cross_entropy(const LinearCrossEntropyProblem& given, const LinearCrossEntropyBlock& block,
                          const ExecutionContext& context) {
  const DeviceGuard guard(given.device);
  require_gemm(given.op);
  LinearCrossEntropyProblem problem = given;
  // A capture cannot wait for the number of rows that count, so all rows are computed. That takes less workspace.
  if (problem.skips_ignored && is_being_captured(given.op, context.stream)) problem.skips_ignored = false;
  LinearCrossEntropyMemory memory;
  lay_out(problem, block, context.workspace.data, memory);
  dispatch_floating_point(problem.dtype, [&]<typename T>() {
    Steps<T> steps(problem, memory, context);
    if (problem.is_fused) return FusedChunks(problem, block, memory, context, steps).run();
    LinearCrossEntropyOfLogits(problem, block, memory, context, steps).run();
  });
}

}  // namespace eaves::cuda
