// Forward and backward of cross_entropy at once, in place: every logit is read once and its gradient is written once.
// Between the statistics of a row and its gradient the row stays on chip:
//
//   row_in_registers   rows of at most 16 KiB: in the registers of a few threads, many rows at a time
//   rows_in_shared     longer ones: in a ring of shared memory, through which the blocks of a cluster pull the slices
//   of
//                      one row after the other. While the gradient of a row is written, the next ones arrive.
//
// Anything else (strided rows, float64, rows beyond eight multiprocessors) goes through the two separate passes.
#include <cooperative_groups.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "core/dispatch.h"
#include "cuda/async_copy.cuh"
#include "cuda/device.h"
#include "ops/cross_entropy/cross_entropy_backend.h"
#include "ops/cross_entropy/cross_entropy_gradient.cuh"
#include "ops/cross_entropy/cross_entropy_rows.cuh"

namespace eaves::cuda {
namespace {

constexpr const char* kOp = "cross_entropy_forward_backward";

// ---- what both kernels do with a row -------------------------------------------------------------------------------

template <typename T, typename View, typename Loss, typename Gradient>
struct InPlace {
  using Element = T;
  using A = Accumulator<T>;
  using State = typename Loss::State;
  using Merge = typename Loss::Merge;

  Loss loss;
  T* logits;
  OwnOrFloat<T> grad_loss;  ///< its data nullptr: 1
  const A* divisor;         ///< nullptr but for the mean

  EAVES_HOST_DEVICE const View& view() const { return loss.view(); }

  /// The function that maps the row's logits to its gradient. Reads what the kernel before has written.
  template <typename Offsets>
  __device__ Gradient gradient(const ClassStatistics<A>& statistics, std::int64_t target,
                               const TargetClass<A>& target_class, const Offsets& at) const {
    const LossInputs<T, View>& in = loss.rows.in;
    const RowLoss<A> row = row_loss(statistics, target_class, !in.terms.is_ignored(target), in.terms);
    RowGradientInputs<A> inputs{};
    inputs.target = target;
    inputs.lse = row.lse;
    inputs.target_mass = row.target_mass;
    inputs.grad_loss = mean_gradient(grad_loss.data == nullptr ? A(1) : grad_loss[at.of[kGradLoss]], divisor);
    return Gradient(in, gradient_of_row(in, inputs), at.of[kSoftTargets]);
  }
};

// ---- short rows ----------------------------------------------------------------------------------------------------

/// kThreads threads a row: lanes of a warp, or the threads of a block.
template <typename Operation, int kThreads, int kVectors>
__global__ void __launch_bounds__(kThreads < kLanesBlock ? kLanesBlock : kThreads)
    row_in_registers(Operation operation) {
  using T = typename Operation::Element;
  using A = Accumulator<T>;
  using State = typename Operation::State;
  using Merge = typename Operation::Merge;
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kBlock = kThreads < kLanesBlock ? kLanesBlock : kThreads;
  constexpr int kEdges = (2 * (kSize - 1) + kThreads - 1) / kThreads;
  let_next_kernel_start();
  const std::int64_t row = (std::int64_t{blockIdx.x} * kBlock + threadIdx.x) / kThreads;
  const int thread = threadIdx.x % kThreads;
  // Rows beyond the last take part in the reductions as copies of it, and write nothing.
  const bool is_row = row < operation.view().row_count;
  const auto at = operation.view().rows.offsets(is_row ? row : operation.view().row_count - 1);
  const std::int64_t target = operation.loss.rows.in.target_at(at.of[kTargets]);
  const bool is_read = operation.loss.rows.is_read(target);

  // load
  const Span<T> span(operation.logits + at.of[kLogits], operation.view().column_count);
  const int left = static_cast<int>(span.vectors) - thread;
  Vector<T>* address = span.vector_address(thread);
  Vector<T> batch[kVectors];
  T edges[kEdges];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    batch[v] = is_read && v * kThreads < left ? load(address + v * kThreads) : minus_infinity<T>();
  }
#pragma unroll
  for (int e = 0; e < kEdges; ++e) {
    if (is_read && thread + e * kThreads < span.edges) edges[e] = span.edge(thread + e * kThreads);
  }
  TargetClass<A> target_class;
  if (is_read) target_class = operation.loss.rows.target_class(at.of[kLogits], target);

  // reduce
  State state;
  if (is_read) {
    const std::int64_t first = span.head + std::int64_t{thread} * kSize;
    const int vectors = left <= 0 ? 0 : (left + kThreads - 1) / kThreads;
    operation.loss.take_batch(state, batch, BatchPlace{first, kThreads * kSize, min(vectors, kVectors), kSize}, at);
#pragma unroll
    for (int e = 0; e < kEdges; ++e) {
      if (thread + e * kThreads >= span.edges) continue;
      Vector<T> single[1] = {minus_infinity<T>()};
      memcpy(&single[0], &edges[e], sizeof(T));
      operation.loss.take_batch(state, single, BatchPlace{span.edge_index(thread + e * kThreads), 1, 1, 1}, at);
    }
  }
  if constexpr (kThreads < kLanesBlock) {
    state = reduce_lanes<kThreads>(state, Merge{});
  } else {
    state = reduce_block<kThreads>(state, Merge{});
    __shared__ alignas(State) unsigned char storage[sizeof(State)];
    if (threadIdx.x == 0) *reinterpret_cast<State*>(storage) = state;
    __syncthreads();  // also: the target's logit has been read before any gradient is written
    state = *reinterpret_cast<State*>(storage);
  }
  __syncwarp();  // the same for rows of a warp
  const ClassStatistics<A> statistics = operation.loss.statistics_of(state);

  // finish
  wait_for_previous_kernel();
  if (!is_row) return;
  if (thread == 0) {
    write_row<A>(operation.loss.rows.outputs, at.of[kPerRow], statistics, target, target_class,
                 operation.loss.rows.in.terms, is_read);
  }
  const auto gradient = operation.gradient(statistics, target, target_class, at);

  // store
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (v * kThreads >= left) break;
    store(address + v * kThreads,
          is_read ? gradient(batch[v], span.head + (std::int64_t{thread} + v * kThreads) * kSize) : Vector<T>{});
  }
#pragma unroll
  for (int e = 0; e < kEdges; ++e) {
    const int edge = thread + e * kThreads;
    if (edge >= span.edges) continue;
    span.edge(edge) =
        round_to<T>(is_read ? gradient(load_as_accumulator(edges[e]), span.edge_index(edge)) : Accumulator<T>(0));
  }
}

// ---- long rows -----------------------------------------------------------------------------------------------------

constexpr int kRingThreads = 512;  // that compute; one warp more starts the copies
constexpr int kChunkVectors = 2;   // of each thread
constexpr int kChunkBytes = kRingThreads * kChunkVectors * 16;
constexpr int kRingChunks = 13;  // 208 KiB, nearly all that a block can have
// Of a row in each block. A slice whose gradient is written and the next one, of which the statistics are known, are in
// the ring together, and the chunks that are left have to be on their way meanwhile.
constexpr int kMostSliceChunks = 5;
constexpr int kLargestCluster = 8;  // that every GPU with clusters takes
// Rows whose statistics are being exchanged. A block may be three rows ahead of what another one still reads: it waits
// for row j before it publishes row j + 2, and all have published row j + 2 only when they have read row j.
constexpr int kExchanges = 4;

/// What a block says of its slice of a row.
template <typename State, typename A>
struct SliceResult {
  State state;
  TargetClass<A> target_class;  ///< from block 0 alone
};

template <typename State, typename A>
struct alignas(128) RingMemory {
  unsigned char chunks[kRingChunks][kChunkBytes];
  Barrier full[kRingChunks];
  Barrier empty[kRingChunks];
  Barrier exchanged[kExchanges];
  // Raw bytes: the types have default member values, and shared memory cannot be initialised.
  alignas(16) unsigned char results[kExchanges][kLargestCluster][sizeof(SliceResult<State, A>)];
  alignas(16) unsigned char warp_states[kRingThreads / 32][sizeof(State)];
};

/// How rows are cut into the slices of a cluster's blocks.
struct RingPlan {
  int blocks;  ///< of a cluster
  int chunks;  ///< of a slice, at most kMostSliceChunks
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

/// Waits for the computing threads of the block alone.
__device__ inline void sync_ring_threads() { asm volatile("bar.sync 1, %0;" ::"n"(kRingThreads) : "memory"); }

/// A position in the ring, and in which round.
struct RingPlace {
  int chunk = 0;
  unsigned parity = 0;

  __device__ void advance() {
    if (++chunk == kRingChunks) {
      chunk = 0;
      parity ^= 1;
    }
  }
};

/// The part of a row's vectors that chunk `c` of block `rank` holds.
struct ChunkPart {
  std::int64_t first;
  int vectors;
};

template <typename T>
__device__ ChunkPart part_of(const Span<T>& span, const RingPlan& plan, unsigned rank, int c) {
  constexpr int kVectors = kRingThreads * kChunkVectors;
  // Slices are whole vectors of equal number, so that all blocks have equal work.
  const std::int64_t slice = ceil_divide(span.vectors, plan.blocks);
  const std::int64_t end = min((rank + 1) * slice, span.vectors);
  const std::int64_t first = rank * slice + std::int64_t{c} * kVectors;
  return {first, static_cast<int>(max(std::int64_t{0}, min(std::int64_t{kVectors}, end - first)))};
}

#endif

template <typename Operation>
__global__ void __launch_bounds__(kRingThreads + 32, 1) rows_in_shared(Operation operation, RingPlan plan) {
#if __CUDA_ARCH__ >= 900
  using T = typename Operation::Element;
  using A = Accumulator<T>;
  using State = typename Operation::State;
  using Merge = typename Operation::Merge;
  using Result = SliceResult<State, A>;
  constexpr int kSize = Vector<T>::kSize;
  extern __shared__ unsigned char dynamic_memory[];
  auto& memory =
      *reinterpret_cast<RingMemory<State, A>*>((reinterpret_cast<std::uintptr_t>(dynamic_memory) + 127) / 128 * 128);
  const auto& rows = operation.loss.rows;
  const std::int64_t row_count = operation.view().row_count;
  const unsigned rank = blockIdx.x;
  const std::int64_t first_row = blockIdx.y;
  const std::int64_t row_step = gridDim.y;

  let_next_kernel_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kRingChunks; ++i) {
      init_barrier(&memory.full[i], 1);
      init_barrier(&memory.empty[i], kRingThreads / 32);
    }
    for (int i = 0; i < kExchanges; ++i) init_barrier(&memory.exchanged[i], plan.blocks);
    publish_barriers();
  }
  cooperative_groups::this_cluster().sync();

  if (threadIdx.x >= kRingThreads) {
    // The copying warp: one thread, as far ahead as the ring lets it.
    if (threadIdx.x == kRingThreads) {
      RingPlace place;
      for (std::int64_t row = first_row; row < row_count; row += row_step) {
        const auto at = operation.view().rows.offsets(row);
        if (!rows.is_read(rows.in.target_at(at.of[kTargets]))) continue;
        const Span<T> span(operation.logits + at.of[kLogits], operation.view().column_count);
        for (int c = 0; c < plan.chunks; ++c, place.advance()) {
          const ChunkPart part = part_of(span, plan, rank, c);
          wait(&memory.empty[place.chunk], place.parity ^ 1);  // in the first round it is empty
          arrive_expecting(&memory.full[place.chunk], part.vectors * 16);
          if (part.vectors > 0) {
            copy_bulk(memory.chunks[place.chunk], span.vector_address(part.first), part.vectors * 16,
                      &memory.full[place.chunk]);
          }
        }
      }
    }
  } else {
    /// What a thread keeps of a row between its statistics and its gradient.
    struct Pending {
      std::int64_t row;
      std::int64_t target;
      bool is_read;
      T edge;
      RingPlace place;
    };
    const int thread = static_cast<int>(threadIdx.x);
    RingPlace place;
    int exchange = 0;  // of the row whose statistics come next

    const auto find_statistics = [&](std::int64_t row) {
      Pending pending{.row = row};
      const auto at = operation.view().rows.offsets(row);
      pending.target = rows.in.target_at(at.of[kTargets]);
      pending.is_read = rows.is_read(pending.target);
      pending.place = place;
      if (!pending.is_read) return pending;
      const Span<T> span(operation.logits + at.of[kLogits], operation.view().column_count);
      if (rank == 0 && thread < span.edges) pending.edge = span.edge(thread);
      TargetClass<A> target_class;
      if (rank == 0 && thread == 0) target_class = rows.target_class(at.of[kLogits], pending.target);

      State state;
      for (int c = 0; c < plan.chunks; ++c, place.advance()) {
        const ChunkPart part = part_of(span, plan, rank, c);
        wait(&memory.full[place.chunk], place.parity);
        const auto* vectors = reinterpret_cast<const Vector<T>*>(memory.chunks[place.chunk]);
        Vector<T> batch[kChunkVectors];
        int count = 0;
#pragma unroll
        for (int v = 0; v < kChunkVectors; ++v) {
          const bool is_there = thread + v * kRingThreads < part.vectors;
          batch[v] = is_there ? vectors[thread + v * kRingThreads] : minus_infinity<T>();
          count += is_there;
        }
        operation.loss.take_batch(
            state, batch, BatchPlace{span.head + (part.first + thread) * kSize, kRingThreads * kSize, count, kSize},
            at);
      }
      if (rank == 0 && thread < span.edges) {
        Vector<T> single[1] = {minus_infinity<T>()};
        memcpy(&single[0], &pending.edge, sizeof(T));
        operation.loss.take_batch(state, single, BatchPlace{span.edge_index(thread), 1, 1, 1}, at);
      }
      // The block's state to every block of the cluster.
      state = reduce_lanes<32>(state, Merge{});
      if (thread % 32 == 0) *reinterpret_cast<State*>(memory.warp_states[thread / 32]) = state;
      sync_ring_threads();
      if (thread < 32) {
        state = *reinterpret_cast<State*>(memory.warp_states[thread % (kRingThreads / 32)]);
        state = reduce_lanes<kRingThreads / 32>(state, Merge{});
        target_class.logit = __shfl_sync(0xffffffffu, target_class.logit, 0);
        target_class.weight = __shfl_sync(0xffffffffu, target_class.weight, 0);
        if (thread < plan.blocks) {
          auto* result = reinterpret_cast<Result*>(memory.results[exchange][rank]);
          *cooperative_groups::this_cluster().map_shared_rank(result, thread) = Result{state, target_class};
          arrive_at_block(&memory.exchanged[exchange], thread);
        }
      }
      sync_ring_threads();  // before the next row's warps write their states
      return pending;
    };

    int read_exchange = 0;
    unsigned read_parity = 0;
    const auto write_gradient = [&](const Pending& pending) {
      const auto at = operation.view().rows.offsets(pending.row);
      const Span<T> span(operation.logits + at.of[kLogits], operation.view().column_count);
      ClassStatistics<A> statistics;
      TargetClass<A> target_class;
      if (pending.is_read) {
        wait(&memory.exchanged[read_exchange], read_parity);
        State state;
        for (int block = 0; block < plan.blocks; ++block) {
          const auto& result = *reinterpret_cast<const Result*>(memory.results[read_exchange][block]);
          state = block == 0 ? result.state : Merge{}(state, result.state);
          if (block == 0) target_class = result.target_class;
        }
        statistics = operation.loss.statistics_of(state);
        if (++read_exchange == kExchanges) {
          read_exchange = 0;
          read_parity ^= 1;
        }
      }
      if (rank == 0 && thread == 0) {
        write_row<A>(rows.outputs, at.of[kPerRow], statistics, pending.target, target_class, rows.in.terms,
                     pending.is_read);
      }
      const auto gradient = operation.gradient(statistics, pending.target, target_class, at);
      RingPlace from = pending.place;
      for (int c = 0; c < plan.chunks; ++c, from.advance()) {
        const ChunkPart part = part_of(span, plan, rank, c);
        const auto* vectors = reinterpret_cast<const Vector<T>*>(memory.chunks[from.chunk]);
        Vector<T>* to = span.vector_address(part.first);
#pragma unroll
        for (int v = 0; v < kChunkVectors; ++v) {
          const int i = thread + v * kRingThreads;
          if (i >= part.vectors) break;
          store(to + i, pending.is_read ? gradient(vectors[i], span.head + (part.first + i) * kSize) : Vector<T>{});
        }
        if (pending.is_read) {
          __syncwarp();
          if (thread % 32 == 0) arrive(&memory.empty[from.chunk]);
        }
      }
      if (rank == 0 && thread < span.edges) {
        span.edge(thread) =
            round_to<T>(pending.is_read ? gradient(load_as_accumulator(pending.edge), span.edge_index(thread)) : A(0));
      }
    };

    // The statistics of a row are known before the gradient of the one before is written: what the blocks tell each
    // other is on its way meanwhile.
    if (first_row < row_count) {
      const auto next = [&](std::int64_t row) {
        const Pending pending = find_statistics(row);
        if (pending.is_read) exchange = (exchange + 1) % kExchanges;
        return pending;
      };
      Pending pending = next(first_row);
      wait_for_previous_kernel();
      for (std::int64_t row = first_row + row_step; row < row_count; row += row_step) {
        const Pending following = next(row);
        write_gradient(pending);
        pending = following;
      }
      write_gradient(pending);
    }
  }
  cooperative_groups::this_cluster().sync();  // a block that ended would take its shared memory with it
#endif
}

// ---- twice ---

template <typename Operation, int kThreads, int kVectors>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) row_twice(Operation operation) {
  using A = typename Operation::A;
  using State = typename Operation::State;
  using Merge = typename Operation::Merge;
  let_next_kernel_start();
  const std::int64_t row = blockIdx.x;
  const auto at = operation.view().rows.offsets(row);
  const std::int64_t columns = operation.view().column_count;
  const std::int64_t target = operation.loss.rows.in.target_at(at.of[kTargets]);
  const bool is_read = operation.loss.rows.is_read(target);
  TargetClass<A> target_class;
  if (is_read) target_class = operation.loss.rows.target_class(at.of[kLogits], target);
  State state;
  if (is_read) {
    state = operation.loss.template reduce<kVectors>(row, 0, columns, threadIdx.x, kThreads);
    state = reduce_block<kThreads>(state, Merge{});
    __shared__ alignas(State) unsigned char storage[sizeof(State)];
    if (threadIdx.x == 0) *reinterpret_cast<State*>(storage) = state;
    __syncthreads();  // also: every logit has been read before a gradient is written
    state = *reinterpret_cast<State*>(storage);
  }
  const ClassStatistics<A> statistics = operation.loss.statistics_of(state);
  wait_for_previous_kernel();
  if (threadIdx.x == 0) {
    write_row<A>(operation.loss.rows.outputs, at.of[kPerRow], statistics, target, target_class,
                 operation.loss.rows.in.terms, is_read);
  }
  auto* logits = operation.logits + at.of[kLogits];
  transform<4>(static_cast<const typename Operation::Element*>(logits), logits, columns, 0, INT32_MAX, threadIdx.x,
               kThreads, [&] { return operation.gradient(statistics, target, target_class, at); });
}

// ---- host ----------------------------------------------------------------------------------------------------------

constexpr std::int64_t kRegisterRowBytes = 16384;

bool is_fused(const CrossEntropyInPlaceProblem& problem) {
  const CrossEntropyInputs& inputs = problem.forward.inputs;
  if (inputs.view.row_count == 0 || inputs.view.column_count == 0) return false;
  if (inputs.logits_dtype == DType::float64 || inputs.view.layout != RowLayout::contiguous ||
      !ShortRowView<3, 6>::fits(inputs.view)) {
    return false;
  }
  const auto row_bytes = inputs.view.column_count * static_cast<std::int64_t>(size_of(inputs.logits_dtype));
  if (row_bytes <= kRegisterRowBytes) return true;
  return properties(inputs.device).compute_capability >= 90 &&
         row_bytes <= std::int64_t{kLargestCluster} * kMostSliceChunks * kChunkBytes;
}

/// The workspace of a call: that of a reduced loss, then the divisor that the gradients need before the loss is known,
/// then what the two separate passes keep between them.
struct InPlaceWorkspace {
  LossWorkspace loss;
  std::size_t forward_bytes = 0;  ///< of the separate forward
  std::size_t lse_bytes = 0;
  std::size_t mass_bytes = 0;
  std::size_t divisor_bytes = 0;

  bool is_fused;

  explicit InPlaceWorkspace(const CrossEntropyInPlaceProblem& problem)
      : loss(problem.forward.inputs.options.reduction, problem.forward.inputs.view.row_count,
             size_of(accumulator_dtype(problem.forward.inputs.logits_dtype)), 0),
        is_fused(cuda::is_fused(problem)) {
    const CrossEntropyInputs& inputs = problem.forward.inputs;
    if (inputs.options.reduction == Reduction::mean) divisor_bytes = 256;
    if (is_fused) return;
    const std::size_t per_row = LossWorkspace::aligned(static_cast<std::size_t>(inputs.view.row_count) *
                                                       size_of(accumulator_dtype(inputs.logits_dtype)));
    forward_bytes = LossWorkspace::aligned(cross_entropy_forward_workspace_bytes(problem.forward));
    lse_bytes = mass_bytes = per_row;
  }
  std::size_t bytes() const {
    return (is_fused ? loss.bytes() : forward_bytes) + lse_bytes + mass_bytes + divisor_bytes;
  }
};

/// What rows weigh in the mean, from their targets alone.
template <typename T, typename View>
struct TargetWeights {
  LossInputs<T, View> in;

  __device__ LossSums operator()(std::int64_t row) const {
    if (in.terms.is_soft) return {.weight = 1.0};
    const std::int64_t target = in.target_at(in.view.rows.offsets(row).of[kTargets]);
    if (in.terms.is_ignored(target)) return {};
    return {.weight = in.terms.is_in_range(target) ? double(in.weight_of(target)) : 1.0};
  }
};

template <typename Operation>
void launch_rows_in_registers(const Operation& operation, std::int64_t row_bytes, bool follows_kernel, void* stream) {
  const auto run = [&]<int kThreads, int kVectors>() {
    constexpr int kBlock = kThreads < kLanesBlock ? kLanesBlock : kThreads;
    launch(kOp, row_in_registers<Operation, kThreads, kVectors>,
           {.blocks = ceil_divide(operation.view().row_count, kBlock / kThreads),
            .threads = kBlock,
            .starts_before_previous_ends = follows_kernel,
            .stream = stream},
           operation);
  };
  if (row_bytes <= 512) return run.template operator()<8, 4>();
  if (row_bytes <= 2048) return run.template operator()<32, 4>();
  if (row_bytes <= 8192) return run.template operator()<128, 4>();
  return run.template operator()<128, 8>();
}

template <typename Operation>
void launch_rows_in_shared(const Operation& operation, std::int64_t row_bytes, bool follows_kernel, void* stream) {
  using Memory = RingMemory<typename Operation::State, typename Operation::A>;
  RingPlan plan{.blocks = 1, .chunks = 0};
  while (ceil_divide(row_bytes, plan.blocks * kChunkBytes) > 4 && plan.blocks < kLargestCluster) plan.blocks *= 2;
  plan.chunks = static_cast<int>(ceil_divide(ceil_divide(row_bytes, plan.blocks), kChunkBytes));
  LaunchShape shape{.blocks = plan.blocks,
                    .threads = kRingThreads + 32,
                    .shared_bytes = sizeof(Memory) + 128,
                    .is_row_cluster = true,
                    .starts_before_previous_ends = follows_kernel,
                    .stream = stream};
  const auto kernel = rows_in_shared<Operation>;
  // Asked once for each kernel and size of cluster: the answer is that of the first device, and all are alike.
  static std::atomic<int> most_clusters[kLargestCluster + 1];
  int clusters = most_clusters[plan.blocks];
  if (clusters == 0) most_clusters[plan.blocks] = clusters = most_active_clusters(kOp, kernel, shape);
  shape.blocks_y = std::min<std::int64_t>(clusters, operation.view().row_count);
  launch(kOp, kernel, shape, operation, plan);
}

template <typename T>
void in_place(const CrossEntropyInPlaceProblem& problem, const ExecutionContext& context) {
  using A = Accumulator<T>;
  using View = ShortRowView<3, 6>;
  const CrossEntropyForwardProblem& forward = problem.forward;
  const CrossEntropyInputs& inputs = forward.inputs;
  const bool is_mean = inputs.options.reduction == Reduction::mean;
  const InPlaceWorkspace workspace(problem);
  char* const memory = static_cast<char*>(context.workspace.data);
  const RowOutputs<A> outputs =
      row_outputs<A>(forward.outputs, inputs.options.reduction, inputs.view.row_count, workspace.loss.arrays(memory));
  const View view(inputs.view);
  const LossInputs<T, View> in(view, inputs);

  const A* divisor = static_cast<const A*>(forward.normalizer);
  const bool finds_divisor = is_mean && divisor == nullptr;
  if (finds_divisor) {
    auto* found = reinterpret_cast<A*>(memory + workspace.loss.bytes());
    divisor = found;
    launch_sum_losses(
        kOp, TargetWeights<T, View>{in}, inputs.view.row_count,
        ReducedOutputs<A>{.is_mean = true, .normalizer = nullptr, .loss = nullptr, .z_loss = nullptr, .divisor = found},
        workspace.loss.sums(memory), inputs.device, context.stream);
  }

  const LossRows<T, View> rows{in, outputs, false};
  const WantedStatistics wanted{.linear = inputs.has_soft_targets() || inputs.options.label_smoothing > 0.0,
                                .moment = outputs.entropy != nullptr,
                                .best = outputs.argmax != nullptr};
  const std::int64_t row_bytes = inputs.view.column_count * static_cast<std::int64_t>(sizeof(T));
  const auto run = [&](const auto& operation) {
    const bool follows_kernel = finds_divisor && properties(inputs.device).compute_capability >= 90;
    if (const char* twice = std::getenv("EAVES_X"); twice != nullptr && row_bytes > kRegisterRowBytes) {
      using Operation = std::remove_cvref_t<decltype(operation)>;
      const int which = std::atoi(twice);
      const auto go = [&]<int kThreads, int kVectors>() {
        launch(kOp, row_twice<Operation, kThreads, kVectors>,
               {.blocks = inputs.view.row_count,
                .threads = kThreads,
                .starts_before_previous_ends = follows_kernel,
                .stream = context.stream},
               operation);
      };
      if (which == 256) go.template operator()<256, 8>();
      if (which == 512) go.template operator()<512, 4>();
      if (which == 1024) go.template operator()<1024, 4>();
    } else if (row_bytes <= kRegisterRowBytes) {
      launch_rows_in_registers(operation, row_bytes, follows_kernel, context.stream);
    } else {
      launch_rows_in_shared(operation, row_bytes, follows_kernel, context.stream);
    }
  };
  auto* const logits = static_cast<T*>(const_cast<void*>(inputs.logits));
  const OwnOrFloat<T> grad_loss{problem.grad_loss, problem.grad_loss_dtype != kDTypeOf<T>};
  const bool is_plain =
      !wanted.linear && !wanted.moment && !wanted.best && inputs.options.scale == 1.0 && inputs.options.softcap == 0.0;
  if (is_plain) {
    run(InPlace<T, View, PlainLoss<T, View>, PlainGradient<T, View>>{{rows}, logits, grad_loss, divisor});
  } else {
    run(InPlace<T, View, FullLoss<T, View>, FullGradient<T, View>>{FullLoss<T, View>(rows, wanted), logits, grad_loss,
                                                                   divisor});
  }
  reduce_losses<A>(kOp, inputs, outputs, forward.normalizer, forward.outputs, workspace.loss.sums(memory),
                   context.stream);
}

/// The forward, then the backward over the logits.
void in_two_passes(const CrossEntropyInPlaceProblem& problem, const ExecutionContext& context) {
  const InPlaceWorkspace workspace(problem);
  char* memory = static_cast<char*>(context.workspace.data);
  const auto take = [&](std::size_t bytes) {
    char* taken = memory;
    memory += bytes;
    return taken;
  };
  ExecutionContext forward_context = context;
  forward_context.workspace = {take(workspace.forward_bytes), workspace.forward_bytes};
  CrossEntropyForwardProblem forward = problem.forward;
  const CrossEntropyInputs& inputs = forward.inputs;
  const bool is_mean = inputs.options.reduction == Reduction::mean;
  void* const own_lse = take(workspace.lse_bytes);
  void* const own_mass = take(workspace.mass_bytes);
  void* const own_divisor = take(workspace.divisor_bytes);
  if (forward.outputs.lse == nullptr) forward.outputs.lse = own_lse;
  if (forward.outputs.target_mass == nullptr) forward.outputs.target_mass = own_mass;
  if (is_mean && forward.outputs.divisor == nullptr) forward.outputs.divisor = own_divisor;
  cross_entropy_forward(forward, forward_context);
  if (inputs.view.row_count == 0 || inputs.view.column_count == 0) return;
  cross_entropy_backward({.inputs = inputs,
                          .grad_loss_dtype = problem.grad_loss_dtype,
                          .grad_loss = problem.grad_loss,
                          .grad_lse = nullptr,
                          .grad_entropy = nullptr,
                          .lse = forward.outputs.lse,
                          .entropy = nullptr,
                          .target_mass = forward.outputs.target_mass,
                          .divisor = is_mean ? forward.outputs.divisor : nullptr,
                          .grad_logits = const_cast<void*>(inputs.logits)},
                         context);
}

}  // namespace

std::size_t cross_entropy_in_place_workspace_bytes(const CrossEntropyInPlaceProblem& problem) {
  return InPlaceWorkspace(problem).bytes();
}

void cross_entropy_in_place(const CrossEntropyInPlaceProblem& problem, const ExecutionContext& context) {
  const CrossEntropyInputs& inputs = problem.forward.inputs;
  const DeviceGuard guard(inputs.device);
  if (!is_fused(problem)) return in_two_passes(problem, context);
  dispatch_floating_point(inputs.logits_dtype, [&]<typename T>() {
    if constexpr (!std::is_same_v<T, double>) in_place<T>(problem, context);
  });
}

}  // namespace eaves::cuda
