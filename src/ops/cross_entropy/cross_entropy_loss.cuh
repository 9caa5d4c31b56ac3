// From the statistics of a row to what is written for it, and from the rows' losses to one.
#pragma once

#include "cuda/launch.cuh"
#include "ops/cross_entropy/cross_entropy_device.cuh"

namespace eaves::cuda {

/// Where the results of rows go, each nullptr where not wanted: the outputs themselves, or with a reduced loss the
/// workspace.
template <typename A>
struct RowOutputs {
  A* loss;
  A* z_loss;
  A* weight;  ///< what the row counts in a mean
  A* lse;
  std::int64_t* argmax;
  A* entropy;
  A* target_mass;
};

/// How many per-row arrays of the workspace a reduced loss needs; RowOutputs has them in this order.
inline constexpr int kReducedArrays = 3;

template <typename A>
RowOutputs<A> row_outputs(const CrossEntropyOutputs& outputs, Reduction reduction, std::int64_t rows, void* workspace) {
  const auto of = [](void* data) { return static_cast<A*>(data); };
  A* const arrays = static_cast<A*>(workspace);
  const bool is_reduced = reduction != Reduction::none;
  return {.loss = is_reduced ? arrays : of(outputs.loss),
          .z_loss = outputs.z_loss == nullptr ? nullptr
                    : is_reduced              ? arrays + rows
                                              : of(outputs.z_loss),
          .weight = reduction == Reduction::mean ? arrays + 2 * rows : nullptr,
          .lse = of(outputs.lse),
          .argmax = outputs.argmax,
          .entropy = of(outputs.entropy),
          .target_mass = of(outputs.target_mass)};
}

/// Writes a row. `target` is its class, and `target_class` what is known of that class.
template <typename A>
__device__ void write_row(const RowOutputs<A>& outputs, std::int64_t at, const ClassStatistics<A>& statistics,
                          std::int64_t target, const TargetClass<A>& target_class, const CrossEntropyTerms<A>& terms,
                          bool is_read = true) {
  const bool is_ignored = terms.is_ignored(target);
  RowLoss<A> row = row_loss(statistics, target_class, !is_ignored, terms);
  if (!is_ignored && !terms.is_soft && !terms.is_in_range(target)) row.loss = row.z_loss = nan_of<A>();
  if (!is_read) row = RowLoss<A>{};
  if (outputs.loss != nullptr) outputs.loss[at] = row.loss;
  if (outputs.z_loss != nullptr) outputs.z_loss[at] = row.z_loss;
  if (outputs.weight != nullptr) outputs.weight[at] = is_ignored ? A(0) : terms.is_soft ? A(1) : target_class.weight;
  if (outputs.lse != nullptr) outputs.lse[at] = row.lse;
  if (outputs.argmax != nullptr)
    outputs.argmax[at] = is_read && terms.is_in_range(statistics.best) ? statistics.best : 0;
  if (outputs.entropy != nullptr) outputs.entropy[at] = row.entropy;
  if (outputs.target_mass != nullptr) outputs.target_mass[at] = row.target_mass;
}

// ---- all rows to one loss ------------------------------------------------------------------------------------------

struct LossSums {
  double loss = 0.0;
  double z_loss = 0.0;
  double weight = 0.0;
};

struct AddLossSums {
  __device__ LossSums operator()(const LossSums& a, const LossSums& b) const {
    return {a.loss + b.loss, a.z_loss + b.z_loss, a.weight + b.weight};
  }
};

/// The sums of row `i` as the kernels above have left them.
template <typename A>
struct WrittenRows {
  const A* loss;
  const A* z_loss;
  const A* weight;

  __device__ LossSums operator()(std::int64_t i) const {
    return {loss[i], z_loss == nullptr ? 0.0 : double(z_loss[i]), weight == nullptr ? 0.0 : double(weight[i])};
  }
};

/// Partial sums of the blocks before.
struct WrittenSums {
  const LossSums* sums;
  __device__ LossSums operator()(std::int64_t i) const { return sums[i]; }
};

/// Where the reduced loss goes.
template <typename A>
struct ReducedOutputs {
  bool is_mean;
  const A* normalizer;
  A* loss;
  A* z_loss;
  A* divisor;

  __device__ void operator()(const LossSums& sums) const {
    const double by = normalizer != nullptr ? double(*normalizer) : sums.weight;
    if (divisor != nullptr) *divisor = static_cast<A>(by);
    const auto divided = [&](double sum) {
      if (!is_mean) return static_cast<A>(sum);
      // Nothing counts: 0. A divisor of the caller's is taken as it is, but for 0 / 0.
      return by == 0.0 && (normalizer == nullptr || sum == 0.0) ? A(0) : static_cast<A>(sum / by);
    };
    if (loss != nullptr) *loss = divided(sums.loss);
    if (z_loss != nullptr) *z_loss = divided(sums.z_loss);
  }
};

inline constexpr int kSumThreads = 512;
inline constexpr std::int64_t kRowsPerSumBlock = 16384;  // from there on, several blocks

/// Adds up the rows of a block in an order that depends on nothing but their number, and hands the sum to `finish`.
template <typename Source, typename Finish>
__global__ void __launch_bounds__(kSumThreads) sum_losses(Source source, std::int64_t count, Finish finish) {
  // In this order: the next kernel may be one that reads, before it waits, what the previous one still writes.
  wait_for_previous_kernel();
  let_next_kernel_start();
  const std::int64_t first = blockIdx.x * kRowsPerSumBlock;
  const std::int64_t last = min(first + kRowsPerSumBlock, count);
  LossSums sums;
#pragma unroll 8  // the loads do not wait for each other
  for (std::int64_t i = first + threadIdx.x; i < last; i += kSumThreads) sums = AddLossSums{}(sums, source(i));
  sums = reduce_block<kSumThreads>(sums, AddLossSums{});
  if (threadIdx.x == 0) finish(sums);
}

struct WriteSums {
  LossSums* sums;
  __device__ void operator()(const LossSums& value) const { sums[blockIdx.x] = value; }
};

/// Bytes of partial sums for so many rows.
inline std::size_t sum_losses_workspace_bytes(std::int64_t rows) {
  return rows <= kRowsPerSumBlock ? 0
                                  : static_cast<std::size_t>(ceil_divide(rows, kRowsPerSumBlock)) * sizeof(LossSums);
}

/// `partial` has sum_losses_workspace_bytes(rows).
template <typename Source, typename Finish>
void launch_sum_losses(const char* op, const Source& source, std::int64_t rows, const Finish& finish, void* partial,
                       Device device, void* stream) {
  const bool has_dependent_launch = properties(device).compute_capability >= 90;
  const auto shape = [&](std::int64_t blocks) {
    return LaunchShape{.blocks = blocks,
                       .threads = kSumThreads,
                       .starts_before_previous_ends = has_dependent_launch,
                       .stream = stream};
  };
  if (rows <= kRowsPerSumBlock) return launch(op, sum_losses<Source, Finish>, shape(1), source, rows, finish);
  auto* sums = static_cast<LossSums*>(partial);
  const std::int64_t blocks = ceil_divide(rows, kRowsPerSumBlock);
  launch(op, sum_losses<Source, WriteSums>, shape(blocks), source, rows, WriteSums{sums});
  launch_sum_losses(op, WrittenSums{sums}, blocks, finish, sums + blocks, device, stream);
}

/// The workspace of a call with a reduced loss: per-row arrays, partial sums, then whatever else the call needs.
struct LossWorkspace {
  std::size_t arrays_bytes = 0;
  std::size_t sums_bytes = 0;
  std::size_t other_bytes = 0;

  static std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

  LossWorkspace(Reduction reduction, std::int64_t rows, std::size_t element_bytes, std::size_t other)
      : other_bytes(other) {
    if (reduction == Reduction::none) return;
    arrays_bytes = aligned(kReducedArrays * static_cast<std::size_t>(rows) * element_bytes);
    sums_bytes = aligned(2 * sum_losses_workspace_bytes(rows));  // a sum of sums needs room for its own
  }
  std::size_t bytes() const { return arrays_bytes + sums_bytes + other_bytes; }
  void* arrays(void* workspace) const { return workspace; }
  void* sums(void* workspace) const { return static_cast<char*>(workspace) + arrays_bytes; }
  void* other(void* workspace) const { return static_cast<char*>(workspace) + arrays_bytes + sums_bytes; }
};

/// After the rows: the reduced loss, where there is one.
template <typename A>
void reduce_losses(const char* op, const CrossEntropyInputs& inputs, const RowOutputs<A>& rows, const void* normalizer,
                   const CrossEntropyOutputs& outputs, void* sums, void* stream) {
  if (inputs.options.reduction == Reduction::none) return;
  launch_sum_losses(op, WrittenRows<A>{rows.loss, rows.z_loss, rows.weight}, inputs.view.row_count,
                    ReducedOutputs<A>{.is_mean = inputs.options.reduction == Reduction::mean,
                                      .normalizer = static_cast<const A*>(normalizer),
                                      .loss = static_cast<A*>(outputs.loss),
                                      .z_loss = static_cast<A*>(outputs.z_loss),
                                      .divisor = static_cast<A*>(outputs.divisor)},
                    sums, inputs.device, stream);
}

}  // namespace eaves::cuda
