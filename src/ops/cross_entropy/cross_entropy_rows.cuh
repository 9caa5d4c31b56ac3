// The two reductions of cross_entropy for cuda/row_reduce.cuh:
//
//   PlainLoss   hard targets and nothing else that needs more of a row than its lse: the pass of logsumexp
//   FullLoss    every option; one pass as well, with more arithmetic for each element
#pragma once

#include "ops/cross_entropy/cross_entropy_loss.cuh"

namespace eaves::cuda {

using namespace cross_entropy_tensors;

/// What a forward needs of the rows beside the softmax.
inline WantedStatistics wanted_statistics(const CrossEntropyForwardProblem& problem) {
  const CrossEntropyInputs& inputs = problem.inputs;
  return {.linear = inputs.has_soft_targets() || inputs.options.label_smoothing > 0.0,
          .moment = problem.outputs.entropy != nullptr,
          .best = problem.outputs.argmax != nullptr};
}

/// Is PlainLoss enough?
inline bool is_plain(const CrossEntropyForwardProblem& problem) {
  const WantedStatistics wanted = wanted_statistics(problem);
  return problem.inputs.logits_dtype != DType::float64 && !wanted.linear && !wanted.moment && !wanted.best &&
         problem.inputs.options.scale == 1.0 && problem.inputs.options.softcap == 0.0;
}

/// What both have in common: the rows' inputs and outputs, and when a row need not be read.
template <typename T, typename View>
struct LossRows {
  using A = Accumulator<T>;

  LossInputs<T, View> in;
  RowOutputs<A> outputs;
  bool reads_ignored_rows;

  __device__ bool is_read(std::int64_t target) const { return reads_ignored_rows || !in.terms.is_ignored(target); }

  /// Of a row's target, as loaded: two loads that depend on each other and are needed at the end of the row. Nothing is
  /// computed from them before, so that nobody waits.
  struct Prepared {
    std::int64_t target = 0;
    T logit{};
    A weight = A(0);
    bool has_logit = false;
  };

  __device__ Prepared prepare(std::int64_t target, std::int64_t logits_offset) const {
    Prepared prepared{.target = target};
    if (in.terms.is_soft || in.terms.is_ignored(target)) return prepared;
    prepared.weight = A(1);
    if (!in.terms.is_in_range(target)) return prepared;
    const std::int64_t column = target - in.terms.first_class;
    prepared.has_logit = column >= 0 && column < in.view.column_count;
    if (!prepared.has_logit) {  // another shard's
      prepared.weight = A(0);
      return prepared;
    }
    if (in.terms.has_weight) prepared.weight = in.weight[column];
    prepared.logit = in.logits[logits_offset + column_offset(in.view, kLogits, column)];
    return prepared;
  }

  __device__ Prepared prepare(std::int64_t row) const {
    const auto at = in.view.rows.offsets(row);
    return prepare(in.target_at(at.of[kTargets]), at.of[kLogits]);
  }

  /// Asked when the first elements of a row are on their way: is the rest of it wanted?
  template <typename Offsets>
  __device__ bool goes_on(const Offsets& at, int thread, Prepared& prepared) const {
    const std::int64_t target = in.target_at(at.of[kTargets]);
    if (thread == 0) prepared = prepare(target, at.of[kLogits]);
    return is_read(target);
  }

  __device__ TargetClass<A> target_class(const Prepared& prepared) const {
    if (!prepared.has_logit) return {A(0), prepared.weight};
    return {transformed<A>(load_as_accumulator(prepared.logit), in.terms), prepared.weight};
  }

  __device__ void finish(std::int64_t row, const ClassStatistics<A>& statistics, const Prepared& prepared) const {
    write_row<A>(outputs, in.view.rows.offsets(row).of[kPerRow], statistics, prepared.target, target_class(prepared),
                 in.terms, is_read(prepared.target));
  }
};

template <typename T, typename View>
struct PlainLoss {
  using Element = T;
  using A = Accumulator<T>;
  using State = SoftmaxState<A>;
  using Merge = MergeSoftmax;
  using Prepared = typename LossRows<T, View>::Prepared;
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
  __device__ State reduce(std::int64_t row, std::int64_t first, std::int64_t count, int thread, int threads,
                          Prepared& prepared) const {
    const auto at = view().rows.offsets(row);
    State state;
    accumulate_row<kVectors>(state, rows.in.logits + at.of[kLogits] + first, count, thread, threads,
                             [&] { return rows.goes_on(at, thread, prepared); });
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
    rows.finish(row, statistics_of(state), prepared);
  }
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
  using Prepared = typename LossRows<T, View>::Prepared;
  static constexpr bool kHasVectors = !std::is_same_v<T, double>;  // float64 is for checks: one kernel is enough
  static constexpr bool kIsHeavy = true;

  LossRows<T, View> rows;
  WantedStatistics wanted;
  StoredStatistics<A>* statistics;  ///< of a shard: written instead of the loss; nullptr otherwise

  FullLoss(const LossRows<T, View>& loss, const WantedStatistics& wanted_statistics,
           StoredStatistics<A>* stored_statistics = nullptr)
      : rows(loss), wanted(wanted_statistics), statistics(stored_statistics) {}

  EAVES_HOST_DEVICE const View& view() const { return rows.in.view; }

  /// Takes what is there of a batch into the state. `place` counts columns from the start of the row.
  template <int kVectors, typename Offsets>
  __device__ void take_batch(State& state, const Vector<T> (&batch)[kVectors], const BatchPlace& place,
                             const Offsets& at) const {
    with_variant([&]<bool kIsCapped, Measure kMeasure>() {
      if (place.vectors == kVectors && place.elements == Vector<T>::kSize) {
        take_whole_batch<kIsCapped, kMeasure>(state, batch, place, at.of[kSoftTargets]);
      } else {
        take_some(state, batch, place, at.of[kSoftTargets]);
      }
    });
  }

  __device__ static const ClassStatistics<A>& statistics_of(const State& state) { return state; }

  template <int kVectors>
  __device__ State reduce(std::int64_t row, std::int64_t first, std::int64_t count, int thread, int threads,
                          Prepared& prepared) const {
    const auto at = view().rows.offsets(row);
    State state;
    with_variant([&]<bool kIsCapped, Measure kMeasure>() {
      for_each_batch<kVectors>(
          rows.in.logits + at.of[kLogits] + first, count, thread, threads, minus_infinity<T>(),
          [&] { return rows.goes_on(at, thread, prepared); },
          [&]<int kTaken, typename IsWhole>(const Vector<T>(&batch)[kTaken], BatchPlace place, IsWhole) {
            place.first += first;
            if constexpr (IsWhole::value) {
              take_whole_batch<kIsCapped, kMeasure>(state, batch, place, at.of[kSoftTargets]);
            } else {
              take_some(state, batch, place, at.of[kSoftTargets]);
            }
          });
    });
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

  __device__ Prepared prepare(std::int64_t row) const { return rows.prepare(row); }

  __device__ void finish(std::int64_t row, const State& state, const Prepared& prepared) const {
    if (statistics == nullptr) return rows.finish(row, state, prepared);
    const TargetClass<A> target_class = rows.target_class(prepared);
    const std::int64_t best =
        state.best == kNoClass ? rows.in.terms.class_count : state.best + rows.in.terms.first_class;
    statistics[view().rows.offsets(row).of[kPerRow]] = {state.softmax.max,   state.softmax.sum, target_class.logit,
                                                        target_class.weight, state.linear,      state.mass,
                                                        state.moment,        state.best_value,  static_cast<A>(best)};
  }

 private:
  /// Calls `function` with what is the same for all of a row as template parameters, around its loop.
  template <typename Function>
  __device__ void with_variant(Function function) const {
    const bool is_loaded = rows.in.terms.has_weight || rows.in.terms.is_soft;
    const auto with_measure = [&]<bool kIsCapped>() {
      if (!wanted.linear) return function.template operator()<kIsCapped, Measure::none>();
      if (is_loaded) return function.template operator()<kIsCapped, Measure::loaded>();
      function.template operator()<kIsCapped, Measure::unit>();
    };
    const bool is_capped = rows.in.terms.softcap != A(0);
    is_capped ? with_measure.template operator()<true>() : with_measure.template operator()<false>();
  }

  template <bool kIsCapped, Measure kMeasure, int kVectors>
  __device__ void take_whole_batch(State& state, const Vector<T> (&batch)[kVectors], const BatchPlace& place,
                                   std::int64_t soft_row) const {
    if constexpr (std::is_same_v<A, float>) {
      if (take_whole<kIsCapped, kMeasure>(state, batch, place.first, place.step, soft_row, rows.in, wanted)) return;
    }
    take_some(state, batch, place, soft_row);
  }

  template <int kVectors>
  __device__ void take_some(State& state, const Vector<T> (&batch)[kVectors], const BatchPlace& place,
                            std::int64_t soft_row) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v >= place.vectors) break;
      state = take_any(state, batch[v], soft_row, place.first + v * place.step, place.elements, rows.in, wanted);
    }
  }
};

}  // namespace eaves::cuda
