// Label smoothing over weighted classes: a block takes two rows at a time and loads each weight once for both. With one
// row at a time, L2 would deliver as many bytes of weights as of logits. H200, [4096, 131072] bf16 with weights,
// smoothing, softcap and entropy: 0.456 ms, by the reduction of cross_entropy_full.cuh 0.530 ms.
#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "ops/cross_entropy/cross_entropy_loss.cuh"
#include "ops/cross_entropy/cross_entropy_statistics.cuh"

namespace eaves::cuda {
namespace {

// H100, [4096, 32768] bf16 with smoothing over weights: 114 us, with 256 threads, 4 slots and 3 blocks 131.
constexpr int kRows = 2;     // of a block
constexpr int kVectors = 2;  // of each row, for a thread at a time; the kernel is written for 2
constexpr int kThreads = 128;
constexpr int kSlots = 3;                    // for batches: all but one are being loaded
constexpr int kBlocks = 8;                   // of a multiprocessor
constexpr std::int64_t kFewestBytes = 8192;  // of a row: two batches of all threads

template <typename T>
using Ring = VectorRing<T, kThreads, kRows * kVectors, kSlots>;

template <typename T, typename View, bool kIsCapped>
__global__ void __launch_bounds__(kThreads, kBlocks)
    weighted_rows(const __grid_constant__ LossRows<T, View> rows, LossPlan plan) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kStep = kThreads * kSize;
  let_next_kernel_start();
  const LossInputs<T, View>& in = rows.in;
  const std::int64_t first_row = std::int64_t{blockIdx.x} * kRows;
  const int row_count = static_cast<int>(min(std::int64_t{kRows}, in.view.row_count - first_row));
  const T* logits[kRows];
  const Vector<T>* next[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    // A missing second row is a copy of the last row, and is not written.
    logits[r] = in.logits + in.view.rows.offsets(first_row + min(r, row_count - 1)).of[kLogits];
    next[r] = reinterpret_cast<const Vector<T>*>(logits[r]) + threadIdx.x;
  }
  // A ring of batches. Each batch holds the vectors of one row, then the vectors of the other; vectors beyond the end
  // of a row are not copied.
  extern __shared__ uint4 storage[];
  Ring<T> ring(storage);
  const int vectors = static_cast<int>(in.view.column_count / kSize);
  int left_to_send = vectors - static_cast<int>(threadIdx.x);
  const auto send = [&] {
    ring.send([&](auto address) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (left_to_send <= v * kThreads) return;
#pragma unroll
        for (int r = 0; r < kRows; ++r) copy_ahead(address(r * kVectors + v), next[r] + v * kThreads);
      }
    });
    left_to_send -= kVectors * kThreads;
#pragma unroll
    for (int r = 0; r < kRows; ++r) next[r] += kVectors * kThreads;
  };

  RunningStatistics<float, false> running[kRows];
  const auto add_element = [&](int r, int column) {
    add_logit(running[r], load_as_accumulator(logits[r][column]), in.weight_in(column), column, in.terms);
  };
  const auto add_batch = [&]<int kTaken>(int column, std::integral_constant<int, kTaken>) {
    float weights[kTaken][kSize];
    float masses[kTaken];
#pragma unroll
    for (int v = 0; v < kTaken; ++v) load_run<T, true>(in.weight, column + v * kStep, weights[v]);
    ring.wait();
    send();
#pragma unroll
    for (int v = 0; v < kTaken; ++v) masses[v] = total_of(weights[v]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Vector<T> batch[kTaken];
#pragma unroll
      for (int v = 0; v < kTaken; ++v) batch[v] = ring.read(r * kVectors + v);
      const auto loaded = [&](int v, float(&u)[kSize]) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) u[i] = weights[v][i];
        return masses[v];
      };
      // The elements of a refused batch are read from memory again, so that their loop need not be unrolled.
      if (try_add_batch<kIsCapped, Factors::loaded>(running[r], batch, column, kStep, in.terms, plan, loaded)) continue;
#pragma unroll 1
      for (int i = 0; i < kTaken * kSize; ++i) add_element(r, column + i / kSize * kStep + i % kSize);
      running[r].settle();
    }
  };
#pragma unroll
  for (int i = 0; i < kSlots - 1; ++i) send();
  int column = static_cast<int>(threadIdx.x) * kSize;
  const int whole = vectors * kSize;
#pragma unroll 1
  for (; column < whole; column += kVectors * kStep) {
    if (column + (kVectors - 1) * kStep < whole) {
      add_batch(column, std::integral_constant<int, kVectors>{});
    } else {
      add_batch(column, std::integral_constant<int, 1>{});  // kVectors is 2: only the first vector exists
    }
    ring.go_on();
  }
  if (whole + threadIdx.x < in.view.column_count) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) add_element(r, whole + threadIdx.x);
  }

  ClassStatistics<float> mine;  // of row `threadIdx.x`
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r > 0) __syncthreads();  // the previous reduction no longer uses its shared memory
    const ClassStatistics<float> state = reduce_block<kThreads>(finished(running[r], in.terms), MergeStatistics{});
    if (threadIdx.x == r) mine = state;
  }
  if (threadIdx.x < row_count) rows.finish(first_row + threadIdx.x, mine, rows.prepare(first_row + threadIdx.x));
}

}  // namespace

bool share_weights(const CrossEntropyInputs& inputs) {
  const auto element_bytes = static_cast<std::int64_t>(size_of(inputs.logits_dtype));
  const std::int64_t columns = inputs.view.column_count;
  // This kernel is compiled without squares.
  if (!inputs.plan.has_factors || inputs.plan.has_square || inputs.has_soft_targets() ||
      columns * element_bytes < kFewestBytes || columns > INT32_MAX / 2) {
    return false;
  }
  // The vectors of the logits and of the weights have to start at the same columns, in every row.
  const auto is_aligned = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; };
  const auto& rows = inputs.view.rows;
  return is_aligned(inputs.logits) && is_aligned(inputs.weight.data) &&
         std::all_of(rows.strides[kLogits], rows.strides[kLogits] + rows.rank,
                     [&](std::int64_t stride) { return stride * element_bytes % 16 == 0; });
}

template <typename T>
void reduce_weighted(const char* op, const CrossEntropyInputs& inputs, bool skips_ignored,
                     const RowOutputs<float>& outputs, void* stream) {
  using View = ShortRowView<3, 6>;
  const LossRows<T, View> rows{LossInputs<T, View>(View(inputs.view), inputs), outputs, !skips_ignored};
  const LaunchShape shape{.blocks = ceil_divide(inputs.view.row_count, kRows),
                          .threads = kThreads,
                          .shared_bytes = Ring<T>::kVectorCount * sizeof(Vector<T>),
                          .stream = stream};
  launch(op, rows.in.terms.softcap != 0.0f ? weighted_rows<T, View, true> : weighted_rows<T, View, false>, shape, rows,
         inputs.plan);
}

template void reduce_weighted<float>(const char*, const CrossEntropyInputs&, bool, const RowOutputs<float>&, void*);
template void reduce_weighted<float16>(const char*, const CrossEntropyInputs&, bool, const RowOutputs<float>&, void*);
template void reduce_weighted<bfloat16>(const char*, const CrossEntropyInputs&, bool, const RowOutputs<float>&, void*);

}  // namespace eaves::cuda
