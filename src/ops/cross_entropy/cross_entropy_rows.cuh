// The two reductions of cross_entropy for cuda/row_reduce.cuh:
//
//   PlainLoss   hard targets and nothing else that needs more of a row than its lse: the pass of logsumexp
//   FullLoss    every option; one pass as well, with more arithmetic for each element
#pragma once

#include "cuda/row_reduce.cuh"
#include "cuda/softmax.cuh"
#include "ops/cross_entropy/cross_entropy_loss.cuh"
#include "ops/cross_entropy/cross_entropy_statistics.cuh"

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
    const std::int64_t column = in.column_of_class(target);
    prepared.has_logit = column >= 0;
    if (!prepared.has_logit) {  // another shard's
      prepared.weight = A(0);
      return prepared;
    }
    prepared.weight = in.weight_in(column);
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
  using Running = State;
  using Merge = MergeSoftmax;
  using Prepared = typename LossRows<T, View>::Prepared;
  static constexpr bool kHasVectors = true;
  static constexpr bool kIsHeavy = false;

  LossRows<T, View> rows;

  EAVES_HOST_DEVICE const View& view() const { return rows.in.view; }

  /// Takes what is there of a batch; the rest of it is -inf.
  template <int kVectors, typename Offsets>
  __device__ void take_batch(Running& state, const Vector<T> (&batch)[kVectors], const BatchPlace&,
                             const Offsets&) const {
    accumulate(state, batch);
  }

  __device__ State finished(const Running& state) const { return state; }
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
  using Running = RunningStatistics<A>;
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

  /// Takes what is there of a batch. `place` counts columns from the start of the row, which is in memory still.
  template <int kVectors, typename Offsets>
  __device__ void take_batch(Running& running, const Vector<T> (&batch)[kVectors], const BatchPlace& place,
                             const Offsets& at) const {
    with_variant([&]<bool kIsCapped, Measure kMeasure>() {
      const bool is_whole = place.vectors == kVectors && place.elements == Vector<T>::kSize;
      take_batch<kIsCapped, kMeasure>(running, batch, place, is_whole, at);
    });
  }

  __device__ State finished(const Running& running) const { return cuda::finished(running, rows.in.terms); }
  __device__ static const ClassStatistics<A>& statistics_of(const State& state) { return state; }

  template <int kVectors>
  __device__ State reduce(std::int64_t row, std::int64_t first, std::int64_t count, int thread, int threads,
                          Prepared& prepared) const {
    const auto at = view().rows.offsets(row);
    return with_variant([&]<bool kIsCapped, Measure kMeasure>() {
      Running running;
      for_each_batch<kVectors>(
          rows.in.logits + at.of[kLogits] + first, count, thread, threads, minus_infinity<T>(),
          [&] { return rows.goes_on(at, thread, prepared); },
          [&]<int kTaken, typename IsWhole>(const Vector<T>(&batch)[kTaken], BatchPlace place, IsWhole) {
            place.first += first;
            take_batch<kIsCapped, kMeasure>(running, batch, place, IsWhole::value, at);
          });
      return finished(running);
    });
  }

  template <int kColumns, int kLaneRows>
  __device__ void reduce_columns(State (&states)[kLaneRows], std::int64_t row, std::int64_t first, std::int64_t last,
                                 int step) const {
    using Lanes = Side<T, kLaneRows>;
    constexpr int kAtATime = 2;  // instead of kColumns: more would be ten thousands of instructions
    const auto at = view().rows.offsets(row);
    Running running[kLaneRows];
    for_each_batch_of_columns<kAtATime, Lanes>(
        rows.in.logits + at.of[kLogits], view().column_strides[kLogits], first, last, step,
        [&](const Lanes(&batch)[kAtATime], std::int64_t column) {
#pragma unroll
          for (int c = 0; c < kAtATime; ++c) {
            if (column + c * step >= last) break;
            A values[kLaneRows];
            batch[c].unpack(values);
            const std::int64_t at_column = column + c * step;
            const std::int64_t soft = at.of[kSoftTargets] + at_column * view().column_strides[kSoftTargets];
#pragma unroll
            for (int r = 0; r < kLaneRows; ++r) take_element(running[r], values[r], soft + r, at_column);
          }
        });
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) states[r] = finished(running[r]);
  }

  __device__ State reduce_strided(std::int64_t row, std::int64_t first, std::int64_t last, int step) const {
    const auto at = view().rows.offsets(row);
    Running running;
    for (std::int64_t column = first; column < last; column += step) {
      take_element(running,
                   load_as_accumulator(rows.in.logits[at.of[kLogits] + column_offset(view(), kLogits, column)]),
                   at.of[kSoftTargets] + column_offset(view(), kSoftTargets, column), column);
    }
    return finished(running);
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

  /// Takes what take_whole() has left of a batch in a row of unit stride: vector by vector, and at last element by
  /// element. The logits are read once more, so that the loops need not be unrolled.
  template <bool kIsCapped, Measure kMeasure>
  __device__ void take_again(Running& running, const BatchPlace& place, std::int64_t logits_row,
                             std::int64_t soft_row) const {
#pragma unroll 1
    for (int v = 0; v < place.vectors; ++v) {
      const std::int64_t column = place.first + v * place.step;
      const T* from = rows.in.logits + logits_row + column;
      if constexpr (std::is_same_v<A, float>) {
        if (place.elements == Vector<T>::kSize) {
          // In place the row is overwritten later.
          const Vector<T> batch[1] = {load_before_overwriting(reinterpret_cast<const Vector<T>*>(from))};
          if (take_whole<kIsCapped, kMeasure>(running, batch, column, place.step, rows.in.terms, wanted,
                                              MeasureLoader<T, View>{rows.in, soft_row, column, place.step})) {
            continue;
          }
        }
      }
#pragma unroll 1
      for (int i = 0; i < place.elements; ++i) {
        take_element(running, load_as_accumulator(from[i]), soft_row + column + i, column + i);
      }
    }
  }

 private:
  /// Calls `function` with what is the same for all of a row as template parameters, around its loop.
  template <typename Function>
  __device__ auto with_variant(Function function) const {
    const auto with_measure = [&]<bool kIsCapped>() {
      if (!wanted.linear) return function.template operator()<kIsCapped, Measure::none>();
      if (rows.in.is_measure_loaded()) return function.template operator()<kIsCapped, Measure::loaded>();
      return function.template operator()<kIsCapped, Measure::unit>();
    };
    const bool is_capped = rows.in.terms.softcap != A(0);
    return is_capped ? with_measure.template operator()<true>() : with_measure.template operator()<false>();
  }

  template <bool kIsCapped, Measure kMeasure, int kVectors, typename Offsets>
  __device__ void take_batch(Running& running, const Vector<T> (&batch)[kVectors], const BatchPlace& place,
                             bool is_whole, const Offsets& at) const {
    const std::int64_t soft_row = at.of[kSoftTargets];
    if constexpr (std::is_same_v<A, float>) {
      if (is_whole &&
          take_whole<kIsCapped, kMeasure>(running, batch, place.first, place.step, rows.in.terms, wanted,
                                          MeasureLoader<T, View>{rows.in, soft_row, place.first, place.step})) {
        return;
      }
    }
    take_again<kIsCapped, kMeasure>(running, place, at.of[kLogits], soft_row);
  }

  /// `soft_offset` is where its soft target lies.
  __device__ void take_element(Running& running, A z, std::int64_t soft_offset, std::int64_t column) const {
    take(running, z, wanted.linear ? measure_of(rows.in, soft_offset, column) : A(0), column, rows.in.terms);
  }
};

}  // namespace eaves::cuda
