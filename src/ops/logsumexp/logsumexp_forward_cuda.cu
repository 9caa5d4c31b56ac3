// The forward of logsumexp on a GPU: cuda/row_reduce.cuh over SoftmaxStates. If vectors fit, a thread adds many
// elements to its state at once (cuda/softmax.cuh, cuda/columns.cuh).
#include "core/dispatch.h"
#include "cuda/device.h"
#include "cuda/row_reduce.cuh"
#include "cuda/softmax.cuh"
#include "ops/logsumexp/logsumexp_backend.h"

namespace eaves::cuda {
namespace {

constexpr const char* kOp = "logsumexp_forward";

using namespace logsumexp_tensors;

template <typename T, typename View>
struct Logsumexp {
  using Element = T;
  using A = Accumulator<T>;
  using State = SoftmaxState<A>;
  using Merge = MergeSoftmax;
  struct Prepared {};

  View rows;
  const T* x;
  DType out_dtype;
  void* out;    ///< nullptr if not wanted
  KeptLse lse;  ///< data is nullptr if not wanted

  EAVES_HOST_DEVICE const View& view() const { return rows; }

  __device__ const T* elements(std::int64_t row) const { return x + rows.rows.offsets(row).of[kX]; }

  template <int kVectors>
  __device__ State reduce(std::int64_t row, std::int64_t first, std::int64_t count, int thread, int threads,
                          Prepared&) const {
    State state;
    accumulate_row<kVectors, false>(state, elements(row) + first, count, thread, threads, [] { return true; });
    return state;
  }

  template <int kColumns, int kLaneRows>
  __device__ void reduce_columns(State (&states)[kLaneRows], std::int64_t row, std::int64_t first, std::int64_t last,
                                 int step) const {
    accumulate_columns<kColumns>(states, elements(row), rows.column_strides[kX], first, last, step);
  }

  __device__ State reduce_strided(std::int64_t row, std::int64_t first, std::int64_t last, int step) const {
    const T* const from = elements(row);
    State state;
    for (std::int64_t column = first; column < last; column += step) {
      accumulate(state, load_as_accumulator(from[rows.columns.offsets(column).of[kX]]));
    }
    return state;
  }

  __device__ Prepared prepare(std::int64_t) const { return {}; }

  __device__ void finish(std::int64_t row, const State& state, const Prepared&) const {
    const auto at = rows.rows.offsets(row);
    const SplitLse<A> split = split_lse(softmax_anchor(state.max), A(std::log(state.sum)));
    const A result = split.high;
    if (lse.data != nullptr) lse.store(at.of[kLse], split);
    if (out == nullptr) return;
    const std::int64_t offset = at.of[kOut];
    switch (out_dtype) {
      case DType::bfloat16:
        static_cast<bfloat16*>(out)[offset] = round_to<bfloat16>(result);
        break;
      case DType::float16:
        static_cast<float16*>(out)[offset] = round_to<float16>(result);
        break;
      case DType::float64:
        static_cast<double*>(out)[offset] = result;
        break;
      default:
        static_cast<float*>(out)[offset] = static_cast<float>(result);
    }
  }
};

ReductionPlan plan_of(const LogsumexpForwardProblem& problem) {
  return plan_reduction(problem.view, problem.x, problem.x_dtype, true, problem.device);
}

template <typename T>
void forward(const LogsumexpForwardProblem& problem, const ExecutionContext& context) {
  reduce_rows<T>(
      kOp, plan_of(problem), problem.view, problem.device, context.workspace.data, context.stream,
      [&]<typename View>(const View& view) {
        return Logsumexp<T, View>{view, static_cast<const T*>(problem.x), problem.out_dtype, problem.out, problem.lse};
      });
}

}  // namespace

std::size_t logsumexp_forward_workspace_bytes(const LogsumexpForwardProblem& problem) {
  const std::size_t state_bytes =
      problem.x_dtype == DType::float64 ? sizeof(SoftmaxState<double>) : sizeof(SoftmaxState<float>);
  return plan_of(problem).workspace_bytes(problem.view.row_count, state_bytes);
}

void logsumexp_forward(const LogsumexpForwardProblem& problem, const ExecutionContext& context) {
  const DeviceGuard guard(problem.device);
  dispatch_floating_point(problem.x_dtype, [&]<typename T>() { forward<T>(problem, context); });
}

}  // namespace eaves::cuda
