// FullLoss, the reduction of rows with every option of cross_entropy, for cuda/row_reduce.cuh. It makes one pass over
// the logits, as PlainLoss does, with more arithmetic for each element.
#pragma once

#include "cuda/row_reduce.cuh"
#include "ops/cross_entropy/cross_entropy_loss.cuh"
#include "ops/cross_entropy/cross_entropy_statistics.cuh"

namespace eaves::cuda {

/// kHasSquare: the sum of p^2 is wanted. A template parameter, because a kernel with both kinds of loops is so large
/// that nvcc 13.0 no longer reads members of the operation from constant memory, but loads them in each batch.
template <typename T, typename View, bool kHasSquare>
struct FullLoss {
  using Element = T;
  using A = Accumulator<T>;
  using State = ClassStatistics<A>;
  using Merge = MergeStatistics;
  using Prepared = typename LossRows<T, View>::Prepared;

  LossRows<T, View> rows;
  LossPlan plan;
  A* statistics;  ///< of a shard, written instead of the loss; nullptr: write the loss

  EAVES_HOST_DEVICE const View& view() const { return rows.in.view; }

  template <int kVectors>
  __device__ State reduce(std::int64_t row, std::int64_t first, std::int64_t count, int thread, int threads,
                          Prepared& prepared) const {
    const auto at = view().rows.offsets(row);
    const Span<const T> span(rows.in.logits + at.of[kLogits] + first, count);
    T edge{};  // loaded with the first batch, used last
    if (thread < span.edges) edge = span.edge(thread);
    bool is_asked = false;
    bool is_wanted = true;
    const auto ask = [&] {
      if (!is_asked) is_wanted = rows.check_target(at, thread, prepared);
      is_asked = true;
      return is_wanted;
    };
    if (rows.checks_target_first(count) && !ask()) return State{};
    RunningStatistics<A, kHasSquare> running;
    const auto load_batch = [&](Vector<T>(&batch)[kVectors], int i) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) batch[v] = load_past_l1(span.vector_address(i + v * threads));
    };
    add_vectors<kVectors>(running, static_cast<int>(span.vectors), thread, threads, first + span.head,
                          at.of[kSoftTargets], load_batch, ask, [&](int i) { return span.vector_address(i); });
    if (!ask()) return State{};
#pragma unroll 1
    for (int e = thread; e < span.edges; e += threads) {
      if (e != thread) edge = span.edge(e);
      const std::int64_t column = first + span.edge_index(e);
      add_element(running, load_as_accumulator(edge), at.of[kSoftTargets] + column, column);
    }
    return finished(running, rows.in.terms);
  }

  /// Adds vectors thread, thread + threads, ... of `vectors` contiguous ones that start at column `first`.
  /// `load_batch(batch, i)` loads the kVectors vectors i, i + threads, ...; `address_of(i)` is the address of vector i.
  /// `is_wanted()` tells whether the row is read: it is called after the loads of every batch are issued, and always
  /// returns the same.
  template <int kVectors, typename LoadBatch, typename IsWanted, typename AddressOf>
  __device__ void add_vectors(RunningStatistics<A, kHasSquare>& running, int vectors, int thread, int threads,
                              std::int64_t first, std::int64_t soft_row, LoadBatch load_batch, IsWanted is_wanted,
                              AddressOf address_of) const {
    const int step = threads * Vector<T>::kSize;
    const auto column_of = [&](int i) { return first + std::int64_t{i} * Vector<T>::kSize; };
    int i = thread;
    do {
      with_variant([&]<bool kIsCapped, Factors kFactors>() {
        for (; i + (kVectors - 1) * threads < vectors; i += kVectors * threads) {
          Vector<T> batch[kVectors];
          load_batch(batch, i);
          if (!is_wanted()) return;
          if (!add_batch<kIsCapped, kFactors>(running, batch, column_of(i), step, soft_row)) return;
        }
      });
      if (!is_wanted()) return;
        // Vector by vector: a batch that try_add_batch() refused, or the last batch, which is incomplete.
#pragma unroll 1
      for (const int end = min(vectors, i + kVectors * threads); i < end; i += threads) {
        add_vector(running, address_of(i), column_of(i), soft_row);
      }
    } while (i < vectors);
  }

  template <int kColumns, int kLaneRows>
  __device__ void reduce_columns(State (&states)[kLaneRows], std::int64_t row, std::int64_t first, std::int64_t last,
                                 int step) const {
    static_assert(kLaneRows == 1);
    const auto at = view().rows.offsets(row);
    RunningStatistics<A, kHasSquare> running;
    for (std::int64_t begin = first; begin < last; begin += kColumns * step) {
      const auto column_of = [&](int c) { return begin + c * step; };
      T batch[kColumns];  // loaded at once; the loop that adds them is long, and not unrolled
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (column_of(c) < last)
          batch[c] = rows.in.logits[at.of[kLogits] + column_offset(view(), kLogits, column_of(c))];
      }
#pragma unroll 1
      for (int c = 0; c < kColumns && column_of(c) < last; ++c) {
        add_element(running, load_as_accumulator(batch[c]),
                    at.of[kSoftTargets] + column_offset(view(), kSoftTargets, column_of(c)), column_of(c));
      }
    }
    states[0] = finished(running, rows.in.terms);
  }

  __device__ State reduce_strided(std::int64_t row, std::int64_t first, std::int64_t last, int step) const {
    const auto at = view().rows.offsets(row);
    RunningStatistics<A, kHasSquare> running;
    for (std::int64_t column = first; column < last; column += step) {
      add_element(running, load_as_accumulator(rows.in.logits[at.of[kLogits] + column_offset(view(), kLogits, column)]),
                  at.of[kSoftTargets] + column_offset(view(), kSoftTargets, column), column);
    }
    return finished(running, rows.in.terms);
  }

  __device__ Prepared prepare(std::int64_t row) const { return rows.prepare(row); }

  __device__ void finish(std::int64_t row, const State& state, const Prepared& prepared) const {
    if (statistics == nullptr) return rows.finish(row, state, prepared);
    const TargetClass<A> target_class = rows.target_class(prepared);
    State stored = state;
    if (stored.best != kNoClass) stored.best += rows.in.terms.first_class;
    store_statistics(stored, target_class, rows.in.terms,
                     statistics + view().rows.offsets(row).of[kPerRow] * kCrossEntropyStatistics);
  }

  /// `soft_offset` is the offset of the element's soft target.
  __device__ void add_element(RunningStatistics<A, kHasSquare>& running, A z, std::int64_t soft_offset,
                              std::int64_t column) const {
    const A u = !plan.has_logit_sum ? A(0) : rows.in.has_factors ? factor_of(rows.in, soft_offset, column) : A(1);
    add_logit(running, z, u, column, rows.in.terms);
  }

 private:
  /// Calls `function`, which contains a loop over the row, with the options of the loop as template parameters.
  template <typename Function>
  __device__ auto with_variant(Function function) const {
    const auto call = [&]<bool kIsCapped>() {
      if (!plan.has_logit_sum) return function.template operator()<kIsCapped, Factors::none>();
      if (!rows.in.has_factors) return function.template operator()<kIsCapped, Factors::one>();
      return function.template operator()<kIsCapped, Factors::loaded>();
    };
    return rows.in.terms.softcap != A(0) ? call.template operator()<true>() : call.template operator()<false>();
  }

  template <bool kIsCapped, Factors kFactors, int kVectors>
  __device__ bool add_batch(RunningStatistics<A, kHasSquare>& running, const Vector<T> (&batch)[kVectors],
                            std::int64_t first, int step, std::int64_t soft_row) const {
    return try_add_batch<kIsCapped, kFactors>(running, batch, first, step, rows.in.terms, plan,
                                              [&](int v, A(&u)[Vector<T>::kSize]) {
                                                load_factors(rows.in, soft_row, first + v * step, u);
                                                return total_of(u);
                                              });
  }

  /// Adds any vector of a contiguous row. If try_add_batch() refuses it, its elements are added one by one; they are
  /// read from memory again, so that this loop need not be unrolled.
  __device__ void add_vector(RunningStatistics<A, kHasSquare>& running, const Vector<T>* vector, std::int64_t column,
                             std::int64_t soft_row) const {
    const Vector<T> batch[1] = {*vector};
    const bool is_taken = with_variant([&]<bool kIsCapped, Factors kFactors>() {
      return add_batch<kIsCapped, kFactors>(running, batch, column, 0, soft_row);
    });
    if (is_taken) return;
#pragma unroll 1
    for (int i = 0; i < Vector<T>::kSize; ++i) {
      add_element(running, load_as_accumulator(reinterpret_cast<const T*>(vector)[i]), soft_row + column + i,
                  column + i);
    }
    running.settle();
  }
};

template <typename T, typename View, bool kHasSquare>
inline constexpr bool kIsHeavy<FullLoss<T, View, kHasSquare>> = true;
template <typename View, bool kHasSquare>  // float64 is for checks: one kernel is enough
inline constexpr bool kHasVectors<FullLoss<double, View, kHasSquare>> = false;

}  // namespace eaves::cuda
