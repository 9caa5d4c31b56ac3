// logsumexp on the CPU: the inputs and outputs of a row. The loops are in cpu/row_softmax.h.
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

/// Calls `store(i, lse)` with a SplitLse for each state. The lse of a row does not depend on its neighbours, although a
/// vector of rows shares one call of the logarithm.
template <typename Store>
void for_each_lse(const RowState* states, std::int64_t count, Store&& store) {
  const Tag<double> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  HWY_ALIGN double logs[hn::MaxLanes(d)];
  for (std::int64_t first = 0; first < count; first += lanes) {
    const std::int64_t taken = std::min(lanes, count - first);
    for (std::int64_t i = 0; i < lanes; ++i) logs[i] = states[first + std::min(i, taken - 1)].sum;
    hn::Store(hn::Log(d, hn::Load(d, logs)), d, logs);
    for (std::int64_t i = 0; i < taken; ++i) {
      const RowState& state = states[first + i];
      // Highway's logarithm takes normal numbers only. If the largest element is finite, the sum is at least 1.
      const bool is_normal = state.sum >= 1e-300 && state.sum <= 1e300;
      store(first + i, split_lse(softmax_anchor(state.max), is_normal ? logs[i] : std::log(state.sum)));
    }
  }
}

/// Writes the result of a row.
template <typename T, typename Out>
HWY_INLINE void store(const LogsumexpForwardProblem& problem, std::int64_t row, const SplitLse<double>& lse) {
  const auto offsets = problem.view.rows.offsets(row);
  if (problem.lse.data != nullptr) problem.lse.store(offsets.of[kLse], rounded<Accumulator<T>>(lse));
  if (problem.out != nullptr) static_cast<Out*>(problem.out)[offsets.of[kOut]] = round_to<Out>(lse.high);
}

template <typename T>
ScaledSoftmax<Accumulator<T>> load_scalars(const LogsumexpBackwardProblem& problem, std::int64_t row) {
  using A = Accumulator<T>;
  const auto offsets = problem.view.rows.offsets(row);
  // Not number_at(), which is compiled for every processor: an Intel Xeon waits for its instructions after the loops of
  // the previous row, and rows of 64 elements take five times as long.
  const A* const kept = static_cast<const A*>(problem.lse.data) + offsets.of[kLse];
  const A lse = kept[0];
  // A row with only -inf has the gradient 0, which x - inf gives.
  if (lse == -infinity<A>()) return {.lse = infinity<A>(), .scale = A(0)};
  A scale = problem.grad_out_dtype == kDTypeOf<T>
                ? load_as_accumulator(static_cast<const T*>(problem.grad_out)[offsets.of[kGradOut]])
                : static_cast<A>(static_cast<const float*>(problem.grad_out)[offsets.of[kGradOut]]);
  // With low, the rounding error of lse, e^-low is a factor of the whole row, almost always close to 1.
  const double lost = problem.lse.is_split ? -static_cast<double>(kept[1]) : 0.0;
  if (lost != 0.0) {
    scale = static_cast<A>(scale * (std::abs(lost) < 1e-4 ? 1.0 + lost * (1.0 + 0.5 * lost) : std::exp(lost)));
  }
  return {.lse = lse, .scale = scale};
}

}  // namespace

void forward(const LogsumexpForwardProblem& problem, const ExecutionContext& context) {
  dispatch_floating_point(problem.x_dtype, [&]<typename T>() {
    const bool is_out_of_x = problem.out_dtype == kDTypeOf<T>;
    reduce_softmax<T>(problem.view, {static_cast<const T*>(problem.x), kX}, context,
                      [&](std::int64_t first_row, std::int64_t count, const RowState* states) {
                        for_each_lse(states, count, [&](std::int64_t i, const SplitLse<double>& lse) {
                          is_out_of_x ? store<T, T>(problem, first_row + i, lse)
                                      : store<T, float>(problem, first_row + i, lse);
                        });
                      });
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
