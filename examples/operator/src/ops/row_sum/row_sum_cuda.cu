// row_sum on a GPU: each block has a row, whatever the strides.
#include "core/dispatch.h"
#include "cuda/device.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "ops/row_sum/row_sum_backend.h"

namespace eaves::cuda {
namespace {

constexpr int kThreads = 128;

/// A state and its merge, for reduce_block.
template <typename A>
struct Sum {
  A value = A(0);
};
struct AddSums {
  template <typename A>
  __device__ Sum<A> operator()(const Sum<A>& a, const Sum<A>& b) const {
    return {a.value + b.value};
  }
};

struct ForwardRows {
  RowSumView view;
  const void* x;
  void* out;
};

template <typename T>
__global__ void __launch_bounds__(kThreads) sum_rows(ForwardRows p) {
  const auto at = p.view.rows.offsets(blockIdx.x);
  const T* x = static_cast<const T*>(p.x) + at.of[0];
  Sum<Accumulator<T>> sum;
  for (std::int64_t column = threadIdx.x; column < p.view.column_count; column += kThreads) {
    sum.value += load_as_accumulator(x[p.view.columns.offsets(column).of[0]]);
  }
  sum = reduce_block<kThreads>(sum, AddSums{});
  if (threadIdx.x == 0) static_cast<T*>(p.out)[at.of[2]] = round_to<T>(sum.value);
}

}  // namespace

void row_sum_forward(const RowSumForwardProblem& problem, const ExecutionContext& context) {
  const DeviceGuard guard(problem.device);
  dispatch_floating_point(problem.dtype, [&]<typename T>() {
    launch("row_sum_forward", sum_rows<T>,
           {.blocks = problem.view.row_count, .threads = kThreads, .stream = context.stream},
           ForwardRows{problem.view, problem.x, problem.out});
  });
}

}  // namespace eaves::cuda
