// Device code that the forwards of cross_entropy share: the target of a row, the outputs of a row, and the reduction of
// the rows' losses to one.
#pragma once

#include "cuda/row_policy.h"
#include "cuda/row_sums.cuh"
#include "eaves/context.h"
#include "ops/cross_entropy/cross_entropy_device.cuh"

namespace eaves::cuda {

using namespace cross_entropy_tensors;

/// The arrays for the results of rows: the outputs themselves, or arrays of the workspace if the loss is reduced.
/// nullptr: not wanted.
template <typename A>
struct RowOutputs {
  A* loss;
  A* z_loss;
  A* weight;  ///< the row's part of the mean's divisor
  KeptLse lse;
  std::int64_t* argmax;
  A* entropy;
  A* sum_sq;
  A* mean_logit;
  A* target_mass;
};

/// A reduced loss needs this many per-row arrays in the workspace: the first members of RowOutputs, in their order.
inline constexpr int kReducedArrays = 3;

template <typename A>
RowOutputs<A> row_outputs(const LossOutputs& outputs, Reduction reduction, std::int64_t rows, void* workspace) {
  const auto of = [](void* data) { return static_cast<A*>(data); };
  A* const arrays = static_cast<A*>(workspace);
  const bool is_reduced = reduction != Reduction::none;
  return {.loss = is_reduced ? arrays : of(outputs.loss),
          .z_loss = outputs.z_loss == nullptr ? nullptr
                    : is_reduced              ? arrays + rows
                                              : of(outputs.z_loss),
          .weight = reduction == Reduction::mean ? arrays + 2 * rows : nullptr,
          .lse = outputs.lse,
          .argmax = outputs.argmax,
          .entropy = of(outputs.entropy),
          .sum_sq = of(outputs.sum_sq),
          .mean_logit = of(outputs.mean_logit),
          .target_mass = of(outputs.target_mass)};
}

/// Writes the results of a row. `target` is its class, `target_class` the logit and the weight of this class.
template <typename T, typename View, typename A = Accumulator<T>>
__device__ void write_row(const RowOutputs<A>& outputs, std::int64_t at, const ClassStatistics<A>& statistics,
                          std::int64_t target, const TargetClass<A>& target_class, const LossInputs<T, View>& in,
                          bool is_read) {
  const CrossEntropyTerms<A>& terms = in.terms;
  const bool is_ignored = terms.is_ignored(target);
  RowLoss<A> row = row_loss(statistics, target_class, !is_ignored, terms);
  if (!is_ignored && !terms.is_soft && !terms.is_in_range(target)) row.loss = row.z_loss = nan_of<A>();
  const A row_weight = is_ignored ? A(0) : in.row_weight_at(at);
  row = weighted(row, row_weight);
  if (!is_read) row = RowLoss<A>{};
  if (outputs.loss != nullptr) outputs.loss[at] = row.loss;
  if (outputs.z_loss != nullptr) outputs.z_loss[at] = row.z_loss;
  if (outputs.weight != nullptr) outputs.weight[at] = weigh(terms.is_soft ? A(1) : target_class.weight, row_weight);
  if (outputs.lse.data != nullptr) outputs.lse.store(outputs.lse.row(at), row.lse);
  if (outputs.argmax != nullptr)
    outputs.argmax[at] = is_read && terms.is_in_range(statistics.best) ? statistics.best : 0;
  if (outputs.entropy != nullptr) outputs.entropy[at] = is_read ? entropy_of(statistics) : A(0);
  if (outputs.sum_sq != nullptr) outputs.sum_sq[at] = is_read ? sum_sq_of(statistics) : A(0);
  if (outputs.mean_logit != nullptr) {
    outputs.mean_logit[at] = is_read ? mean_logit_of(statistics, terms.class_count) : A(0);
  }
  if (outputs.target_mass != nullptr) outputs.target_mass[at] = row.target_mass;
}

/// The inputs and outputs of all rows. Ignored rows are read only if reads_ignored is set.
template <typename T, typename View>
struct LossRows {
  using A = Accumulator<T>;

  LossInputs<T, View> in;
  RowOutputs<A> outputs;
  bool reads_ignored;  ///< !skips_ignored

  __device__ bool is_read(std::int64_t target) const { return reads_ignored || !in.terms.is_ignored(target); }

  /// The target of a row and its logit, as loaded. The second load depends on the first, and both are needed only at
  /// the end of the row: nothing is computed from them earlier, so that no thread waits for them.
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
    if (!prepared.has_logit) {  // another shard has the target
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

  /// Is the target checked before the vectors of a row, or of a piece of it, are loaded? Then the vectors of an ignored
  /// row are not read. H100, bf16, checked after and before the loads: [4096, 32768] with half of the rows ignored 74
  /// and 53 us, with none 95.5 and 95.4; [1048576, 64] 93 and 68. Between the two limits a check before the loads costs
  /// 2 to 10 %.
  __device__ bool checks_target_first(std::int64_t count) const {
    const std::int64_t bytes = count * std::int64_t{sizeof(T)};
    return bytes <= 256 || bytes >= kLongRowBytes;
  }
  /// Is the row read? Thread 0 also fills in `prepared`.
  template <typename Offsets>
  __device__ bool check_target(const Offsets& at, int thread, Prepared& prepared) const {
    const std::int64_t target = in.target_at(at.of[kTargets]);
    if (thread == 0) prepared = prepare(target, at.of[kLogits]);
    return is_read(target);
  }

  __device__ TargetClass<A> target_class(const Prepared& prepared) const {
    if (!prepared.has_logit) return {A(0), prepared.weight};
    return {transformed<A>(load_as_accumulator(prepared.logit), in.terms), prepared.weight};
  }

  __device__ void finish(std::int64_t row, const ClassStatistics<A>& statistics, const Prepared& prepared) const {
    write_row(outputs, in.view.rows.offsets(row).of[kPerRow], statistics, prepared.target, target_class(prepared), in,
              is_read(prepared.target));
  }
};

// ---- sum of the rows -----------------------------------------------------------------------------------------------

struct LossSums {
  double loss = 0.0;
  double z_loss = 0.0;
  double weight = 0.0;

  __device__ friend LossSums operator+(const LossSums& a, const LossSums& b) {
    return {a.loss + b.loss, a.z_loss + b.z_loss, a.weight + b.weight};
  }
};

/// The losses of rows that an earlier kernel has written.
template <typename A>
struct WrittenRows {
  const A* loss;
  const A* z_loss;
  const A* weight;

  __device__ LossSums operator()(std::int64_t i) const {
    return {loss[i], z_loss == nullptr ? 0.0 : double(z_loss[i]), weight == nullptr ? 0.0 : double(weight[i])};
  }
};

/// Writes the reduced loss and its divisor.
template <typename A>
struct ReducedOutputs {
  bool is_mean;
  const A* normalizer;
  A* loss;
  A* z_loss;
  A* divisor;

  __device__ void operator()(const LossSums& sums) const {
    const double by = normalizer != nullptr ? double(*normalizer) : divisor_of_sum(sums.weight);
    if (divisor != nullptr) *divisor = static_cast<A>(by);
    const auto divided = [&](double sum) {
      return static_cast<A>(is_mean ? mean_of(sum, by, normalizer != nullptr) : sum);
    };
    if (loss != nullptr) *loss = divided(sums.loss);
    if (z_loss != nullptr) *z_loss = divided(sums.z_loss);
  }
};

/// The workspace of a call with a reduced loss: per-row arrays, partial sums, then the other scratch of the call.
struct LossWorkspace {
  std::size_t arrays_bytes = 0;
  std::size_t sums_bytes = 0;
  std::size_t other_bytes = 0;

  static std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

  LossWorkspace(Reduction reduction, std::int64_t rows, std::size_t element_bytes, std::size_t other)
      : other_bytes(other) {
    if (reduction == Reduction::none) return;
    arrays_bytes = aligned(kReducedArrays * static_cast<std::size_t>(rows) * element_bytes);
    sums_bytes = aligned(sum_rows_workspace_bytes<LossSums>(rows));
  }
  std::size_t bytes() const { return arrays_bytes + sums_bytes + other_bytes; }
  void* arrays(void* workspace) const { return workspace; }
  void* sums(void* workspace) const { return static_cast<char*>(workspace) + arrays_bytes; }
  void* other(void* workspace) const { return static_cast<char*>(workspace) + arrays_bytes + sums_bytes; }
};

/// Reduces the losses of the rows, after they are written. Does nothing for Reduction::none.
template <typename A>
void reduce_losses(const char* op, const CrossEntropyInputs& inputs, const RowOutputs<A>& rows, const void* normalizer,
                   const LossOutputs& outputs, void* sums, void* stream) {
  if (inputs.options.reduction == Reduction::none) return;
  launch_sum_rows<LossSums>(op, WrittenRows<A>{rows.loss, rows.z_loss, rows.weight}, inputs.view.row_count,
                            ReducedOutputs<A>{.is_mean = inputs.options.reduction == Reduction::mean,
                                              .normalizer = static_cast<const A*>(normalizer),
                                              .loss = static_cast<A*>(outputs.loss),
                                              .z_loss = static_cast<A*>(outputs.z_loss),
                                              .divisor = static_cast<A*>(outputs.divisor)},
                            sums, inputs.device, stream);
}

// ---- choice of the reduction ---------------------------------------------------------------------------------------

/// Is PlainLoss, the pass of logsumexp, enough for this call?
inline bool suits_plain_loss(const CrossEntropyInputs& inputs) {
  return inputs.logits_dtype != DType::float64 && inputs.plan.needs_only_softmax();
}

/// Reduces the rows with every option: to `statistics` in a shard, otherwise to `outputs`. The workspace has at least
/// full_workspace_bytes(). Defined in cross_entropy_full_cuda.cu.
template <typename T>
void reduce_full(const char* op, const CrossEntropyInputs& inputs, bool skips_ignored,
                 const RowOutputs<Accumulator<T>>& outputs, void* statistics, void* workspace, void* stream);
std::size_t full_workspace_bytes(const CrossEntropyInputs& inputs);

/// reduce_full() calls reduce_weighted() for contiguous rows that are not cut into pieces if share_weights() is true.
/// Defined in cross_entropy_weighted_rows_cuda.cu.
bool share_weights(const CrossEntropyInputs& inputs);
template <typename T>
void reduce_weighted(const char* op, const CrossEntropyInputs& inputs, bool skips_ignored,
                     const RowOutputs<float>& outputs, void* stream);

}  // namespace eaves::cuda
