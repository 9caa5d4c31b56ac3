// The backward of logsumexp on a GPU: g * exp(x - lse) by cuda/row_map.cuh, with g and lse of each row.
#include "core/dispatch.h"
#include "cuda/device.h"
#include "cuda/math.cuh"
#include "cuda/row_map.cuh"
#include "ops/logsumexp/logsumexp_backend.h"

namespace eaves::cuda {
namespace {

constexpr const char* kOp = "logsumexp_backward";

using namespace logsumexp_tensors;

template <typename A>
struct RowGradient {
  A lse;
  A grad_out;

  /// g * exp(x - lse). exponential() takes the difference before its product with log2(e): the difference is exact near
  /// 0, for the largest results, and a rounded lse * log2(e) is not.
  __device__ A operator()(A x, std::int64_t) const {
    return lse == -infinity<A>() ? A(0) : grad_out * exponential(x - lse);
  }
};

template <typename T, typename View>
struct LogsumexpGradient {
  using Element = T;
  using A = Accumulator<T>;

  View rows;
  const T* in;
  T* out;
  KeptLse lse;
  const void* grad_out;
  DType grad_out_dtype;

  EAVES_HOST_DEVICE const View& view() const { return rows; }

  template <typename Offsets>
  __device__ auto row(const Offsets& at) const {
    // grad_out has the dtype of x, or float32.
    const A g = grad_out_dtype == kDTypeOf<T> ? load_as_accumulator(static_cast<const T*>(grad_out)[at.of[kGradOut]])
                                              : static_cast<const float*>(grad_out)[at.of[kGradOut]];
    const SplitLse<A> kept = lse.load<A>(at.of[kLse]);
    return Elementwise<T, RowGradient<A>>{{kept.high, g * exponential(-kept.low)}};
  }
};

}  // namespace

template <typename T, typename View>
inline constexpr bool kRowIsCheap<LogsumexpGradient<T, View>> = true;

namespace {

template <typename T>
void backward(const LogsumexpBackwardProblem& problem, const ExecutionContext& context) {
  map_rows<T>(kOp, problem.view, problem.x, problem.grad_x, problem.device, context.stream,
              [&]<typename View>(const View& view) {
                return LogsumexpGradient<T, View>{view,
                                                  static_cast<const T*>(problem.x),
                                                  static_cast<T*>(problem.grad_x),
                                                  problem.lse,
                                                  problem.grad_out,
                                                  problem.grad_out_dtype};
              });
}

}  // namespace

void logsumexp_backward(const LogsumexpBackwardProblem& problem, const ExecutionContext& context) {
  const DeviceGuard guard(problem.device);
  dispatch_floating_point(problem.x_dtype, [&]<typename T>() { backward<T>(problem, context); });
}

}  // namespace eaves::cuda
