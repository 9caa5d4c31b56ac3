// The backward of cross_entropy on a GPU, by cuda/row_map.cuh: the coefficients once for each row, then one exponential
// for each element.
#include <algorithm>

#include "core/dispatch.h"
#include "cuda/device.h"
#include "cuda/row_map.cuh"
#include "ops/cross_entropy/cross_entropy_backend.h"
#include "ops/cross_entropy/cross_entropy_gradient.cuh"

namespace eaves::cuda {
namespace {

constexpr const char* kOp = "cross_entropy_backward";
constexpr const char* kRescale = "cross_entropy_rescale";

constexpr int kNarrowThreads = 256;
constexpr int kNarrowVectors = 4;  // a thread loads them before it stores the first

constexpr int kRescaleThreads = 256;
constexpr std::int64_t kRescaleBlocks = 8;              // for each multiprocessor
constexpr std::int64_t kRescalePieceColumns = 1 << 16;  // rows are cut: a few long ones have work for all blocks

template <typename T>
void backward(const CrossEntropyBackwardProblem& problem, const ExecutionContext& context) {
  const auto map = [&]<template <typename, typename> typename Function>() {
    map_rows<T>(kOp, problem.inputs.view, problem.inputs.logits, problem.grad_logits, problem.inputs.device,
                context.stream, [&]<typename View>(const View& view) {
                  return CrossEntropyGradient<T, View, Function<T, View>>{static_cast<const T*>(problem.inputs.logits),
                                                                          static_cast<T*>(problem.grad_logits),
                                                                          GradientInputs<T, View>(view, problem)};
                });
  };
  if constexpr (!std::is_same_v<T, double>) {
    if (has_plain_gradient(problem.inputs.plan)) return map.template operator()<PlainGradient>();
  }
  map.template operator()<FullGradient>();
}

template <typename Function>
__device__ void narrow_row(const Span<float>& span, DType dtype, const Function& function) {
  constexpr int kSize = Vector<float>::kSize;
  const int thread = static_cast<int>(threadIdx.x);
  const bool has_edge = thread < span.edges;
  const float edge = has_edge ? span.edge(thread) : 0.0f;
  for (std::int64_t first = thread; first - thread < span.vectors; first += kNarrowThreads * kNarrowVectors) {
    Vector<float> batch[kNarrowVectors];
#pragma unroll
    for (int v = 0; v < kNarrowVectors; ++v) {
      const std::int64_t i = first + v * kNarrowThreads;
      if (i < span.vectors) batch[v] = load_before_overwriting(span.vector_address(i));
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < kNarrowVectors; ++v) {
      const std::int64_t i = first + v * kNarrowThreads;
      if (i < span.vectors) {
        store_gradient<true>(span, dtype, i, function(batch[v], i * kSize));
      }
    }
  }
  __syncthreads();  // for a row without vectors: all edges are loaded before one is stored
  if (has_edge) store_gradient_edge<true>(span, dtype, thread, function(edge, span.edge_index(thread)));
}

/// Writes a gradient of 16 bits over float32 logits, into the first half of each row. A store overwrites logits of
/// smaller columns, so a block takes a row in the order of its columns, and stores a batch after all threads have
/// loaded theirs.
template <typename Operation>
__global__ void __launch_bounds__(kNarrowThreads)
    narrow_rows(const __grid_constant__ Operation operation, DType dtype) {
  const std::int64_t row = blockIdx.x;
  const auto at = operation.view().rows.offsets(row);
  const Span<float> span(operation.out + at.of[kLogits], operation.view().column_count);
  if constexpr (kIsHeavy<Operation>) {
    const auto map = [&](const auto& function_of) { narrow_row(span, dtype, function_of(at)); };
    operation.has_factors() ? operation.template for_variant<true>(map) : operation.template for_variant<false>(map);
  } else {
    narrow_row(span, dtype, operation.row(at));
  }
}

void narrow_backward(const CrossEntropyBackwardProblem& problem, const ExecutionContext& context) {
  // The general view fits every call. A ShortRowView would double the kernels for a few nanoseconds per row.
  using View = CrossEntropyView;
  const auto run = [&]<typename Function>() {
    using Operation = CrossEntropyGradient<float, View, Function>;
    const Operation operation{static_cast<const float*>(problem.inputs.logits),
                              static_cast<float*>(problem.grad_logits),
                              GradientInputs<float, View>(problem.inputs.view, problem)};
    launch(kOp, narrow_rows<Operation>,
           {.blocks = problem.inputs.view.row_count, .threads = kNarrowThreads, .stream = context.stream}, operation,
           problem.grad_dtype);
  };
  has_plain_gradient(problem.inputs.plan) ? run.template operator()<PlainGradient<float, View>>()
                                          : run.template operator()<FullGradient<float, View>>();
}

/// Multiplies each row by its factor, unless the factor is 1. A 0 stays 0 even if the factor is infinite or NaN,
/// because rows that do not count hold zeros. A few blocks take all rows, so that a call with all factors 1 costs next
/// to nothing.
template <typename T, typename View>
__global__ void __launch_bounds__(kRescaleThreads)
    rescale_rows(View view, T* gradient, TypedNumbers factors, std::int64_t pieces, std::int64_t piece_columns) {
  using A = Accumulator<T>;
  for (std::int64_t task = blockIdx.x; task < view.row_count * pieces; task += gridDim.x) {
    const std::int64_t row = divide(task, pieces);
    const auto at = view.rows.offsets(row);
    const A factor = own_or_float_at<T>(factors, at.of[kGradLoss]);
    if (factor == A(1)) continue;
    const std::int64_t first = (task - row * pieces) * piece_columns;
    T* from = gradient + at.of[kLogits];
    if (view.layout == RowLayout::contiguous) {
      const std::int64_t count = min(piece_columns, view.column_count - first);
      transform<4>(static_cast<const T*>(from + first), from + first, count, 0, INT32_MAX, threadIdx.x, kRescaleThreads,
                   DirectLoads{}, [&] {
                     const auto scaled = [factor](A value, std::int64_t) { return weigh(factor, value); };
                     return Elementwise<T, decltype(scaled)>{scaled};
                   });
      continue;
    }
    const std::int64_t last = min(first + piece_columns, view.column_count);
    for (std::int64_t column = first + threadIdx.x; column < last; column += kRescaleThreads) {
      T& value = from[column_offset(view, kLogits, column)];
      value = round_to<T>(weigh(factor, load_as_accumulator(value)));
    }
  }
}

}  // namespace

void cross_entropy(const CrossEntropyRescaleProblem& problem, const ExecutionContext& context) {
  const DeviceGuard guard(problem.device);
  const CrossEntropyView& view = problem.view;
  const std::int64_t pieces = ceil_divide(view.column_count, kRescalePieceColumns);
  const std::int64_t most_blocks = kRescaleBlocks * properties(problem.device).multiprocessors;
  dispatch_floating_point(problem.dtype, [&]<typename T>() {
    launch(kRescale, rescale_rows<T, CrossEntropyView>,
           {.blocks = std::min(view.row_count * pieces, most_blocks),
            .threads = kRescaleThreads,
            .stream = context.stream},
           view, static_cast<T*>(problem.grad_logits), problem.grad_loss, pieces, kRescalePieceColumns);
  });
}

void cross_entropy(const CrossEntropyBackwardProblem& problem, const ExecutionContext& context) {
  const DeviceGuard guard(problem.inputs.device);
  if (problem.grad_dtype != problem.inputs.logits_dtype) return narrow_backward(problem, context);
  dispatch_floating_point(problem.inputs.logits_dtype, [&]<typename T>() { backward<T>(problem, context); });
}

}  // namespace eaves::cuda
