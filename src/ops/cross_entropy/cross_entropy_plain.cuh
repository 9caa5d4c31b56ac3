// PlainLoss, the reduction of rows for cuda/row_reduce.cuh if the loss needs only the softmax and the target's logit.
#pragma once

#include "cuda/row_reduce.cuh"
#include "cuda/softmax.cuh"
#include "ops/cross_entropy/cross_entropy_loss.cuh"

namespace eaves::cuda {

template <typename T, typename View>
struct PlainLoss {
  using Element = T;
  using A = Accumulator<T>;
  using State = SoftmaxState<A>;
  using Merge = MergeSoftmax;
  using Prepared = typename LossRows<T, View>::Prepared;

  LossRows<T, View> rows;

  EAVES_HOST_DEVICE const View& view() const { return rows.in.view; }

  template <int kVectors>
  __device__ State reduce(std::int64_t row, std::int64_t first, std::int64_t count, int thread, int threads,
                          Prepared& prepared) const {
    const auto at = view().rows.offsets(row);
    const T* const logits = rows.in.logits + at.of[kLogits] + first;
    State state;
    if (rows.checks_target_first(count)) {
      if (!rows.check_target(at, thread, prepared)) return state;
      accumulate_row<kVectors, false>(state, logits, count, thread, threads, [] { return true; });
    } else {
      // The row is loaded through L1, because the load of the target's logit comes last and is faster from L1. H100,
      // [4096, 4096] and [4096, 8192] bf16: 20.1 and 30.7 us, past L1 21.5 and 31.9.
      accumulate_row<kVectors, true>(state, logits, count, thread, threads,
                                     [&] { return rows.check_target(at, thread, prepared); });
    }
    return state;
  }

  template <int kColumns, int kLaneRows>
  __device__ void reduce_columns(State (&states)[kLaneRows], std::int64_t row, std::int64_t first, std::int64_t last,
                                 int step) const {
    accumulate_columns<kColumns>(states, rows.in.logits + view().rows.offsets(row).of[kLogits],
                                 view().column_strides[kLogits], first, last, step);
  }

  __device__ State reduce_strided(std::int64_t row, std::int64_t first, std::int64_t last, int step) const {
    const T* logits = rows.in.logits + view().rows.offsets(row).of[kLogits];
    State state;
    for (std::int64_t column = first; column < last; column += step) {
      accumulate(state, load_as_accumulator(logits[column_offset(view(), kLogits, column)]));
    }
    return state;
  }

  __device__ Prepared prepare(std::int64_t row) const { return rows.prepare(row); }

  __device__ void finish(std::int64_t row, const State& state, const Prepared& prepared) const {
    rows.finish(row, {.softmax = state}, prepared);
  }
};

}  // namespace eaves::cuda
