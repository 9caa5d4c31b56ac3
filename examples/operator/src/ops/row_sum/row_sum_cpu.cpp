// row_sum on the CPU: rows in parallel; vectors along a row of unit stride, single elements along any other row.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/row_sum/row_sum_cpu.cpp"
#include <hwy/foreach_target.h>  // first: compiles this file once per level of vector instructions
//
#include "core/dispatch.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "ops/row_sum/row_sum_backend.h"

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {
namespace {

template <typename T>
Accumulator<T> sum_of(const T* x, std::int64_t count) {
  const Tag<T> d;
  auto s0 = hn::Zero(d), s1 = hn::Zero(d), s2 = hn::Zero(d), s3 = hn::Zero(d);
  // The last pack is filled up with zeros, which are neutral in a sum.
  for_each_pack(x, static_cast<std::size_t>(count), T{}, [&](const Pack<T>& pack) HWY_ATTR {
    s0 = hn::Add(s0, pack.v0);
    s1 = hn::Add(s1, pack.v1);
    s2 = hn::Add(s2, pack.v2);
    s3 = hn::Add(s3, pack.v3);
  });
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3))));
}

template <typename T>
Accumulator<T> sum_of_row(const RowSumView& view, const T* x) {
  if (view.layout == RowLayout::contiguous) return sum_of(x, view.column_count);
  Accumulator<T> sum{};
  for (std::int64_t column = 0; column < view.column_count; ++column) {
    sum += load_as_accumulator(x[view.columns.offsets(column).of[0]]);
  }
  return sum;
}

}  // namespace

void forward(const RowSumForwardProblem& problem, const ExecutionContext& context) {
  const RowSumView& view = problem.view;
  dispatch_floating_point(problem.dtype, [&]<typename T>() {
    parallel_for(context, view.row_count, grain_for(view.column_count), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        const auto at = view.rows.offsets(row);
        const auto sum = sum_of_row(view, static_cast<const T*>(problem.x) + at.of[0]);
        static_cast<T*>(problem.out)[at.of[2]] = round_to<T>(sum);
      }
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eaves::cpu {
namespace {
HWY_EXPORT(forward);
}  // namespace

void row_sum_forward(const RowSumForwardProblem& problem, const ExecutionContext& context) {
  HWY_DYNAMIC_DISPATCH(forward)(problem, context);
}

}  // namespace eaves::cpu
#endif  // HWY_ONCE
