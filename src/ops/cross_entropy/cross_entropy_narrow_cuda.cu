// Gradients of 16 bits over float32 logits, each row's in the first half of its place. A gradient that is written lies
// over logits of smaller columns: a block takes a row in the order of its columns, and writes a piece when all of it
// has been loaded.
#include "cuda/launch.cuh"
#include "ops/cross_entropy/cross_entropy_in_place.cuh"

namespace eaves::cuda {
namespace {

constexpr const char* kOp = "cross_entropy_backward";
constexpr int kNarrowThreads = 256;
constexpr int kNarrowVectors = 4;  // that a thread loads before it stores the first

template <typename Out, typename Function>
__device__ void narrow_row(const Span<float>& span, const Function& function) {
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
        store_gradient<Out>(span, span.vector_address(i), i, function(batch[v], i * kSize));
      }
    }
  }
  __syncthreads();  // a row without vectors: all edges have been loaded
  if (has_edge) store_gradient_edge<Out>(span, thread, function(edge, span.edge_index(thread)));
}

/// A block a row.
template <typename Operation, typename Out>
__global__ void __launch_bounds__(kNarrowThreads) narrow_rows(const __grid_constant__ Operation operation) {
  const std::int64_t row = blockIdx.x;
  const auto at = operation.view().rows.offsets(row);
  const Span<float> span(operation.out + at.of[kLogits], operation.view().column_count);
  if constexpr (Operation::kIsHeavy) {
    operation.for_variant([&](const auto& function_of) { narrow_row<Out>(span, function_of(row)); });
  } else {
    narrow_row<Out>(span, operation.row(row));
  }
}

template <typename Out>
void narrow_backward_to(const CrossEntropyBackwardProblem& problem, const ExecutionContext& context) {
  const CrossEntropyInputs& inputs = problem.inputs;
  const auto run_view = [&]<template <typename, typename> typename Function, typename View>(const View& view) {
    using Operation = CrossEntropyGradient<float, View, Function<float, View>>;
    const Operation operation{static_cast<const float*>(inputs.logits), static_cast<float*>(problem.grad_logits),
                              GradientInputs<float, View>(view, problem)};
    launch(kOp, narrow_rows<Operation, Out>,
           {.blocks = view.row_count, .threads = kNarrowThreads, .stream = context.stream}, operation);
  };
  const auto run = [&]<template <typename, typename> typename Function>() {
    using Short = ShortRowView<3, 6>;
    if (Short::fits(inputs.view)) return run_view.template operator()<Function, Short>(Short(inputs.view));
    run_view.template operator()<Function, CrossEntropyView>(inputs.view);
  };
  has_plain_gradient(problem) ? run.template operator()<PlainGradient>() : run.template operator()<FullGradient>();
}

}  // namespace

void narrow_in_place(const CrossEntropyInPlaceProblem& problem, const ExecutionContext& context) {
  if (problem.grad_dtype == DType::bfloat16) {
    in_place<float, bfloat16>(problem, context);
  } else {
    in_place<float, float16>(problem, context);
  }
}

void narrow_backward(const CrossEntropyBackwardProblem& problem, const ExecutionContext& context) {
  if (problem.grad_dtype == DType::bfloat16) {
    narrow_backward_to<bfloat16>(problem, context);
  } else {
    narrow_backward_to<float16>(problem, context);
  }
}

}  // namespace eaves::cuda
