// logsumexp on the CPU: what is read and written for a row. The loops are those of cpu/row_softmax.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/logsumexp/logsumexp_cpu.cpp"
#include <hwy/foreach_target.h>  // first: compiles this file once per level of vector instructions

#include "core/dispatch.h"
#include "core/softmax_state.h"
#include "cpu/row_softmax.h"
#include "ops/logsumexp/logsumexp_backend.h"

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {
namespace {

using namespace logsumexp_tensors;

/// Writes the result of a row.
template <typename T, typename Out>
void store(const LogsumexpForwardProblem& problem, std::int64_t row, const RowState& state) {
  const auto offsets = problem.view.rows.offsets(row);
  const double lse = state.lse();
  if (problem.lse != nullptr) {
    if (problem.lse_dtype == DType::float64) {
      static_cast<double*>(problem.lse)[offsets.of[kLse]] = lse;
    } else {
      static_cast<float*>(problem.lse)[offsets.of[kLse]] = static_cast<float>(lse);
    }
  }
  if (problem.out != nullptr) static_cast<Out*>(problem.out)[offsets.of[kOut]] = round_to<Out>(lse);
}

template <typename T>
ScaledSoftmax<Accumulator<T>> load_scalars(const LogsumexpBackwardProblem& problem, std::int64_t row) {
  using A = Accumulator<T>;
  const auto offsets = problem.view.rows.offsets(row);
  const auto exact = number_at<double>(problem.lse, offsets.of[kLse]);
  const A lse = static_cast<A>(exact);
  // A row of nothing but -inf: its gradient is 0, and x - inf makes it so.
  if (lse == -infinity<A>()) return {.lse = infinity<A>(), .scale = A(0)};
  A scale = problem.grad_out_dtype == kDTypeOf<T>
                ? load_as_accumulator(static_cast<const T*>(problem.grad_out)[offsets.of[kGradOut]])
                : static_cast<A>(static_cast<const float*>(problem.grad_out)[offsets.of[kGradOut]]);
  // What the lse loses when it is rounded to A is one factor of the row.
  if (exact != lse && std::isfinite(lse)) scale = static_cast<A>(scale * std::exp(lse - exact));
  return {.lse = lse, .scale = scale};
}

}  // namespace

void forward(const LogsumexpForwardProblem& problem, const ExecutionContext& context) {
  dispatch_floating_point(problem.x_dtype, [&]<typename T>() {
    const auto store_row = problem.out_dtype == kDTypeOf<T> ? store<T, T> : store<T, float>;
    reduce_softmax<T>(problem.view, {static_cast<const T*>(problem.x), kX}, context,
                      [&](std::int64_t row, const RowState& state) { store_row(problem, row, state); });
  });
}

void backward(const LogsumexpBackwardProblem& problem, const ExecutionContext& context) {
  dispatch_floating_point(problem.x_dtype, [&]<typename T>() {
    write_softmax<T>(problem.view, {static_cast<const T*>(problem.x), kX}, {static_cast<T*>(problem.grad_x), kGradX},
                     context, [&](std::int64_t row, const ColumnPiece&) { return load_scalars<T>(problem, row); });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eaves::cpu {
namespace {
HWY_EXPORT(forward);
HWY_EXPORT(backward);
}  // namespace

void logsumexp_forward(const LogsumexpForwardProblem& problem, const ExecutionContext& context) {
  HWY_DYNAMIC_DISPATCH(forward)(problem, context);
}

void logsumexp_backward(const LogsumexpBackwardProblem& problem, const ExecutionContext& context) {
  HWY_DYNAMIC_DISPATCH(backward)(problem, context);
}

}  // namespace eaves::cpu
#endif  // HWY_ONCE
