// The backward of cross_entropy on a GPU, by cuda/row_map.cuh: a row's numbers once, then one exponential for each
// element.
#include "core/dispatch.h"
#include "cuda/device.h"
#include "cuda/row_map.cuh"
#include "ops/cross_entropy/cross_entropy_backend.h"
#include "ops/cross_entropy/cross_entropy_gradient.cuh"

namespace eaves::cuda {
namespace {

constexpr const char* kOp = "cross_entropy_backward";
constexpr const char* kRescale = "cross_entropy_rescale";

constexpr int kRescaleThreads = 256;
constexpr std::int64_t kRescaleBlocks = 8;              // of each multiprocessor
constexpr std::int64_t kRescalePieceColumns = 1 << 16;  // of a row: a few long rows still have work for all blocks

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
    if (has_plain_gradient(problem)) return map.template operator()<PlainGradient>();
  }
  map.template operator()<FullGradient>();
}

/// Multiplies rows by their factors, unless it is 1. A few blocks take all rows, so that finding out that there is
/// nothing to do costs next to nothing.
template <typename T, typename View>
__global__ void __launch_bounds__(kRescaleThreads)
    rescale_rows(View view, T* gradient, OwnOrFloat<T> factors, std::int64_t pieces, std::int64_t piece_columns) {
  using A = Accumulator<T>;
  for (std::int64_t task = blockIdx.x; task < view.row_count * pieces; task += gridDim.x) {
    const std::int64_t row = divide(task, pieces);
    const auto at = view.rows.offsets(row);
    const A factor = factors[at.of[kGradLoss]];
    if (factor == A(1)) continue;
    const std::int64_t first = (task - row * pieces) * piece_columns;
    T* from = gradient + at.of[kLogits];
    if (view.layout == RowLayout::contiguous) {
      const std::int64_t count = min(piece_columns, view.column_count - first);
      transform<4>(static_cast<const T*>(from + first), from + first, count, 0, INT32_MAX, threadIdx.x, kRescaleThreads,
                   DirectLoads{}, [&] {
                     const auto scaled = [factor](A value, std::int64_t) { return value * factor; };
                     return Elementwise<T, decltype(scaled)>{scaled};
                   });
      continue;
    }
    const std::int64_t last = min(first + piece_columns, view.column_count);
    for (std::int64_t column = first + threadIdx.x; column < last; column += kRescaleThreads) {
      T& value = from[column_offset(view, kLogits, column)];
      value = round_to<T>(load_as_accumulator(value) * factor);
    }
  }
}

}  // namespace

void cross_entropy_rescale(const CrossEntropyRescaleProblem& problem, const ExecutionContext& context) {
  const DeviceGuard guard(problem.device);
  const CrossEntropyView& view = problem.view;
  const std::int64_t pieces = ceil_divide(view.column_count, kRescalePieceColumns);
  const std::int64_t most_blocks = kRescaleBlocks * properties(problem.device).multiprocessors;
  dispatch_floating_point(problem.dtype, [&]<typename T>() {
    launch(kRescale, rescale_rows<T, CrossEntropyView>,
           {.blocks = std::min(view.row_count * pieces, most_blocks),
            .threads = kRescaleThreads,
            .stream = context.stream},
           view, static_cast<T*>(problem.grad_logits),
           OwnOrFloat<T>{problem.grad_loss, problem.grad_loss_dtype != kDTypeOf<T>}, pieces, kRescalePieceColumns);
  });
}

void cross_entropy_backward(const CrossEntropyBackwardProblem& problem, const ExecutionContext& context) {
  const DeviceGuard guard(problem.inputs.device);
  if (problem.grad_dtype != problem.inputs.logits_dtype) return narrow_backward(problem, context);
  dispatch_floating_point(problem.inputs.logits_dtype, [&]<typename T>() { backward<T>(problem, context); });
}

}  // namespace eaves::cuda
