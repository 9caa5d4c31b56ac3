// The two reductions of cross_entropy for cuda/row_reduce.cuh:
//
//   PlainLoss   hard targets and nothing else that needs more of a row than its lse: the pass of logsumexp
//   FullLoss    every option; one pass as well, with more arithmetic for each element
#pragma once

#include "ops/cross_entropy/cross_entropy_loss.cuh"

namespace eaves::cuda {

using namespace cross_entropy_tensors;

/// What both have in common: the rows' inputs and outputs, and when a row need not be read.
template <typename T, typename View>
struct LossRows {
  using A = Accumulator<T>;

  LossInputs<T, View> in;
  RowOutputs<A> outputs;
  bool reads_ignored_rows;

  /// Asked when the first elements of a row are on their way.
  __device__ bool is_read(std::int64_t target) const { return reads_ignored_rows || !in.terms.is_ignored(target); }

  __device__ TargetClass<A> target_class(std::int64_t logits_offset, std::int64_t target) const {
    TargetClass<A> result;
    if (in.terms.is_soft || in.terms.is_ignored(target)) return result;
    result.weight = A(1);
    if (!in.terms.is_in_range(target)) return result;
    result.weight = in.weight_of(target);
    const std::int64_t column = column_offset(in.view, kLogits, target - in.terms.first_class);
    result.logit = transformed<A>(load_as_accumulator(in.logits[logits_offset + column]), in.terms);
    return result;
  }

  __device__ void finish(std::int64_t row, const ClassStatistics<A>& statistics) const {
    const auto at = in.view.rows.offsets(row);
    const std::int64_t target = in.target_at(at.of[kTargets]);
    write_row<A>(outputs, at.of[kPerRow], statistics, target, target_class(at.of[kLogits], target), in.terms,
                 is_read(target));
  }
};

template <typename T, typename View>
struct PlainLoss {
  using Element = T;
  using A = Accumulator<T>;
  using State = SoftmaxState<A>;
  using Merge = MergeSoftmax;
  static constexpr bool kHasVectors = true;
  static constexpr bool kIsHeavy = false;

  LossRows<T, View> rows;

  EAVES_HOST_DEVICE const View& view() const { return rows.in.view; }

  /// Takes what is there of a batch into the state; the rest of it is -inf.
  template <int kVectors, typename Offsets>
  __device__ void take_batch(State& state, const Vector<T> (&batch)[kVectors], const BatchPlace&,
                             const Offsets&) const {
    accumulate(state, batch);
  }

  __device__ static ClassStatistics<A> statistics_of(const State& state) { return {.softmax = state}; }

  template <int kVectors>
  __device__ State reduce(std::int64_t row, std::int64_t first, std::int64_t count, int thread, int threads) const {
    const auto at = view().rows.offsets(row);
    State state;
    accumulate_row<kVectors>(state, rows.in.logits + at.of[kLogits] + first, count, thread, threads,
                             [&] { return rows.is_read(rows.in.target_at(at.of[kTargets])); });
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

  __device__ void finish(std::int64_t row, const State& state) const { rows.finish(row, statistics_of(state)); }
};

/// The statistics of a row as cross_entropy.h lists them: kCrossEntropyStatistics numbers.
template <typename A>
struct StoredStatistics {
  A max, sum, target_logit, target_weight, linear, mass, moment, best_value, best;

  __device__ ClassStatistics<A> unpacked() const {
    return {{max, sum}, linear, mass, moment, best_value, static_cast<std::int64_t>(best)};
  }
};
static_assert(sizeof(StoredStatistics<float>) == kCrossEntropyStatistics * sizeof(float));

template <typename T, typename View>
struct FullLoss {
  using Element = T;
  using A = Accumulator<T>;
  using State = ClassStatistics<A>;
  using Merge = MergeStatistics;
  static constexpr bool kHasVectors = !std::is_same_v<T, double>;  // float64 is for checks: one kernel is enough
  static constexpr bool kIsHeavy = true;

  LossRows<T, View> rows;
  WantedStatistics wanted;
  StoredStatistics<A>* statistics;  ///< of a shard: written instead of the loss; nullptr otherwise
  bool is_capped;                   ///< by a softcap that take_whole() can do

  FullLoss(const LossRows<T, View>& loss, const WantedStatistics& wanted_statistics,
           StoredStatistics<A>* stored_statistics = nullptr)
      : rows(loss),
        wanted(wanted_statistics),
        statistics(stored_statistics),
        is_capped(loss.in.terms.softcap != A(0)) {}

  EAVES_HOST_DEVICE const View& view() const { return rows.in.view; }

  /// Takes what is there of a batch into the state. `place` counts columns from the start of the row.
  template <int kVectors, typename Offsets>
  __device__ void take_batch(State& state, const Vector<T> (&batch)[kVectors], const BatchPlace& place,
                             const Offsets& at) const {
    if (!is_capped) return take_batch<false, kVectors>(state, batch, place, at.of[kSoftTargets]);
    take_batch<true, kVectors>(state, batch, place, at.of[kSoftTargets]);
  }

  __device__ static const ClassStatistics<A>& statistics_of(const State& state) { return state; }

  template <int kVectors>
  __device__ State reduce(std::int64_t row, std::int64_t first, std::int64_t count, int thread, int threads) const {
    const auto at = view().rows.offsets(row);
    State state;
    const auto run = [&]<bool kIsCapped>() {
      for_each_batch<kVectors>(
          rows.in.logits + at.of[kLogits] + first, count, thread, threads, minus_infinity<T>(),
          [&] { return rows.is_read(rows.in.target_at(at.of[kTargets])); },
          [&]<int kTaken>(const Vector<T>(&batch)[kTaken], const BatchPlace& place) {
            take_batch<kIsCapped>(state, batch,
                                  BatchPlace{first + place.first, place.step, place.vectors, place.elements},
                                  at.of[kSoftTargets]);
          });
    };
    is_capped ? run.template operator()<true>() : run.template operator()<false>();
    return state;
  }

  template <int kColumns, int kLaneRows>
  __device__ void reduce_columns(State (&states)[kLaneRows], std::int64_t row, std::int64_t first, std::int64_t last,
                                 int step) const {
    using Lanes = Side<T, kLaneRows>;
    constexpr int kAtATime = 2;  // instead of kColumns: more would be ten thousands of instructions
    const LossInputs<T, View>& in = rows.in;
    const auto at = view().rows.offsets(row);
    for_each_batch_of_columns<kAtATime, Lanes>(
        in.logits + at.of[kLogits], view().column_strides[kLogits], first, last, step,
        [&](const Lanes(&batch)[kAtATime], std::int64_t column) {
#pragma unroll
          for (int c = 0; c < kAtATime; ++c) {
            if (column + c * step >= last) break;
            A values[kLaneRows];
            batch[c].unpack(values);
            const std::int64_t at_column = column + c * step;
            const std::int64_t soft = at.of[kSoftTargets] + at_column * view().column_strides[kSoftTargets];
#pragma unroll
            for (int r = 0; r < kLaneRows; ++r) {
              const A z[1] = {values[r]};
              const A u[1] = {wanted.linear ? measure_of(in, soft + r, at_column) : A(0)};
              take(states[r], z, u, at_column, step, in.terms, wanted);
            }
          }
        });
  }

  __device__ State reduce_strided(std::int64_t row, std::int64_t first, std::int64_t last, int step) const {
    const LossInputs<T, View>& in = rows.in;
    const auto at = view().rows.offsets(row);
    State state;
    for (std::int64_t column = first; column < last; column += step) {
      const A z[1] = {load_as_accumulator(in.logits[at.of[kLogits] + column_offset(view(), kLogits, column)])};
      const std::int64_t soft = at.of[kSoftTargets] + column_offset(view(), kSoftTargets, column);
      const A u[1] = {wanted.linear ? measure_of(in, soft, column) : A(0)};
      take(state, z, u, column, step, in.terms, wanted);
    }
    return state;
  }

  __device__ void finish(std::int64_t row, const State& state) const {
    if (statistics == nullptr) return rows.finish(row, state);
    const LossInputs<T, View>& in = rows.in;
    const auto at = view().rows.offsets(row);
    const std::int64_t target = in.target_at(at.of[kTargets]);
    const std::int64_t column = target - in.terms.first_class;
    TargetClass<A> own;
    if (column >= 0 && column < view().column_count) own = rows.target_class(at.of[kLogits], target);
    const std::int64_t best = state.best == kNoClass ? in.terms.class_count : state.best + in.terms.first_class;
    statistics[at.of[kPerRow]] = {state.softmax.max, state.softmax.sum, own.logit,
                                  own.weight,        state.linear,      state.mass,
                                  state.moment,      state.best_value,  static_cast<A>(best)};
  }

 private:
  template <bool kIsCapped, int kVectors>
  __device__ void take_batch(State& state, const Vector<T> (&batch)[kVectors], const BatchPlace& place,
                             std::int64_t soft_row) const {
    if constexpr (std::is_same_v<A, float>) {
      if (place.vectors == kVectors && place.elements == Vector<T>::kSize) {
        const auto take = [&]<Measure kMeasure>() {
          return take_whole<kIsCapped, kMeasure>(state, batch, place.first, place.step, soft_row, rows.in, wanted);
        };
        const bool is_loaded = rows.in.terms.has_weight || rows.in.terms.is_soft;
        const bool is_taken = !wanted.linear ? take.template operator()<Measure::none>()
                              : is_loaded    ? take.template operator()<Measure::loaded>()
                                             : take.template operator()<Measure::unit>();
        if (is_taken) return;
      }
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v >= place.vectors) break;
      state = take_any(state, batch[v], soft_row, place.first + v * place.step, place.elements, rows.in, wanted);
    }
  }
};

}  // namespace eaves::cuda
