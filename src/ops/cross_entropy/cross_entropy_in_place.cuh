// Forward and backward of a row that stays on the chip in between: every logit is read once, and every gradient is
// written once. The kernel in this file is for long rows: a cluster of small blocks keeps the row in shared memory.
#pragma once

#include <type_traits>

#include "cuda/arrival.cuh"
#include "cuda/row_policy.h"
#include "ops/cross_entropy/cross_entropy_backend.h"
#include "ops/cross_entropy/cross_entropy_full.cuh"
#include "ops/cross_entropy/cross_entropy_gradient.cuh"
#include "ops/cross_entropy/cross_entropy_plain.cuh"

namespace eaves::cuda {

// ---- policy --------------------------------------------------------------------------------------------------------

/// Each block of a cluster keeps a piece of the row in shared memory. Pieces are small, so that several blocks share a
/// multiprocessor: some load while others wait for their cluster or store. A cluster has at most kMostClusterBlocks,
/// the most that every GPU with clusters supports; longer rows get larger pieces. H200, [4096, 65536] and [4096,
/// 131072] bf16, time divided by the time of one read and one write of the same bytes: 1.12 and 1.08; in two
/// passes 1.53 and 1.51; in the registers of clusters of blocks with 64 KiB each 1.44 and 1.62; in a ring of shared
/// memory of one or two large blocks 1.6 to 2.0.
inline constexpr std::int64_t kPieceBytes = 32768;
inline constexpr std::int64_t kMostPieceBytes = 204800;
inline constexpr std::int64_t kDeclaredSharedBytes = 4096;  // of a block beside its piece, at most
inline constexpr int kMostClusterBlocks = 8;

/// The options in a kernel of long rows: none, some without factors u, or some with factors u, which are loaded for
/// each element.
enum class RowOptions { none, some, factors };

/// The threads of a block, and the vectors that each of them takes at a time. With options registers are the limit, so
/// a block has fewer threads. H100, [4096, 32768] bf16 with label smoothing and with softcap: 206 and 282 us; with 2
/// vectors 211 and 298; with 256 threads, 1 vector and 4 blocks of 48 KiB 247 and 332; with 64 threads and 12 blocks of
/// 16 KiB 256 and 358; in two passes 289 and 310. More threads hide the loads of factors: with soft targets 367 us,
/// with the threads of the other options 436.
template <RowOptions kOptions>
inline constexpr RowThreads kClusterThreads = kOptions == RowOptions::some      ? RowThreads{128, 4}
                                              : kOptions == RowOptions::factors ? RowThreads{256, 2}
                                                                                : RowThreads{256, 4};
template <RowOptions kOptions>
inline constexpr int kClusterBlocksPerMultiprocessor = kOptions == RowOptions::factors ? 4 : 6;

struct RowPieces {
  int blocks;            ///< blocks of the cluster
  std::int64_t vectors;  ///< vectors of a piece; the last piece may have fewer
};

inline RowPieces cut_row(std::int64_t row_bytes) {
  int blocks = 2;  // a launch with one block has no cluster, and ClusterStates needs one
  while (blocks < kMostClusterBlocks && row_bytes > blocks * kPieceBytes) blocks *= 2;
  constexpr std::int64_t kLineVectors = 8;  // pieces of whole cache lines, if the row starts on one
  return {blocks, ceil_divide(ceil_divide(row_bytes / 16, blocks), kLineVectors) * kLineVectors};
}

// ---- forward and backward of a row ---------------------------------------------------------------------------------

/// kIsFull: with the options that FullLoss and FullGradient have.
template <typename T, bool kIsFull, typename V = ShortRowView<3, 6>>
struct InPlace : std::conditional_t<kIsFull, FullLoss<T, V, false>, PlainLoss<T, V>> {
  using A = Accumulator<T>;
  using View = V;
  using Rows = std::conditional_t<kIsFull, FullLoss<T, View, false>, PlainLoss<T, View>>;
  using Gradient = std::conditional_t<kIsFull, FullGradient<T, View>, PlainGradient<T, View>>;
  using Rows::rows;
  using typename Rows::State;

  T* logits;
  DType grad_dtype;
  TypedNumbers grad_loss;
  const A* divisor;

  /// The inputs of a row beside its logits.
  struct Prefetched {
    typename LossRows<T, View>::Prepared prepared;
    A grad_loss;  ///< the caller's dL/d(loss); after divided() the row's
  };

  /// Loads them while the loads of the logits are in flight, so that the end of the row does not wait for them.
  template <typename Offsets>
  __device__ Prefetched prefetch(std::int64_t target, const Offsets& at) const {
    // First the load that does not depend on the target.
    const A of_row = gradient_of_loss<T>(grad_loss, at.of[kGradLoss], nullptr);
    return {rows.prepare(target, at.of[kLogits]), of_row};
  }

  /// dL/d(loss of row `per_row`), after the mean's division and times the row's weight. Waits for the previous kernel,
  /// which may still be computing the divisor; no earlier code reads the divisor, so the call comes as late as
  /// possible. Later rows find the divisor in the L1 cache.
  __device__ A divided(A gradient, std::int64_t per_row) const {
    wait_for_previous_kernel();
    if (divisor != nullptr) gradient = mean_gradient(gradient, *divisor);
    return weigh(gradient, rows.in.row_weight_at(per_row));
  }

  /// Returns the function that maps the row's logits to its gradient. The one thread with `writes_row` also writes the
  /// row's outputs.
  template <typename Offsets>
  __device__ Gradient finish(const State& state, const Prefetched& row, const Offsets& at, bool writes_row) const {
    const LossInputs<T, View>& in = rows.in;
    const std::int64_t target = row.prepared.target;
    ClassStatistics<A> statistics;
    if constexpr (kIsFull) {
      statistics = state;
    } else {
      statistics.softmax = state;
    }
    const TargetClass<A> target_class = rows.target_class(row.prepared);
    if (writes_row) {
      write_row(rows.outputs, at.of[kPerRow], statistics, target, target_class, in, rows.is_read(target));
    }
    const RowLoss<A> loss = row_loss(statistics, target_class, !in.terms.is_ignored(target), in.terms);
    RowGradientInputs<A> inputs{};
    inputs.target = target;
    inputs.lse = loss.lse;
    inputs.target_mass = loss.target_mass;
    inputs.grad_loss = row.grad_loss;
    return {in, gradient_of_row(in, inputs, at.of[kPerRow]), at.of[kSoftTargets]};
  }
};

/// Adds an element outside of a row's vectors, as a vector with -infinity in its other elements.
template <typename T>
__device__ void accumulate_edge(SoftmaxState<Accumulator<T>>& state, T edge) {
  const Vector<T> batch[1] = {with_first(minus_infinity<T>(), edge)};
  accumulate(state, batch);
}

// ---- long rows -----------------------------------------------------------------------------------------------------

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // as in arrival.cuh

/// The statistics of a thread's vectors of a piece and, through `add_edges`, of its edges. The piece starts at column
/// `first`.
template <RowOptions kOptions, typename T, typename View, typename AddEdges>
__device__ ClassStatistics<Accumulator<T>> reduce_with_options(const FullLoss<T, View, false>& loss,
                                                               const Vector<T>* piece, int vectors, std::int64_t first,
                                                               std::int64_t soft_row, const Arrival* arrivals,
                                                               AddEdges add_edges) {
  constexpr int kThreads = kClusterThreads<kOptions>.threads;
  constexpr int kVectors = kClusterThreads<kOptions>.vectors;
  constexpr int kBatch = kThreads * kVectors;
  RunningStatistics<Accumulator<T>, false> running;
  loss.template add_vectors<kVectors>(
      running, vectors, threadIdx.x, kThreads, first, soft_row,
      [&](Vector<T>(&batch)[kVectors], int i) {
        wait_for(arrivals[i / kBatch]);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) batch[v] = piece[i + v * kThreads];
      },
      [] { return true; },
      [&](int i) {
        wait_for(arrivals[i / kBatch]);
        return piece + i;
      });
  add_edges([&](Accumulator<T> z, std::int64_t column) { loss.add_element(running, z, soft_row + column, column); });
  return finished(running, loss.rows.in.terms);
}

#endif

/// One cluster for each row, with pieces of `piece_vectors` vectors. A piece arrives in batches of kBatch vectors, as
/// many as the threads of a block take at once, and the statistics begin with the first batch.
template <typename T, RowOptions kOptions, bool kIsNarrow>
__global__ void __launch_bounds__(kClusterThreads<kOptions>.threads, kClusterBlocksPerMultiprocessor<kOptions>)
    row_in_cluster(const __grid_constant__ InPlace<T, kOptions != RowOptions::none> operation, int piece_vectors) {
#if __CUDA_ARCH__ >= 900
  constexpr bool kIsFull = kOptions != RowOptions::none;
  using State = typename InPlace<T, kIsFull>::State;
  using Merge = typename InPlace<T, kIsFull>::Merge;
  using Prefetched = typename InPlace<T, kIsFull>::Prefetched;
  constexpr int kThreads = kClusterThreads<kOptions>.threads;
  constexpr int kVectors = kClusterThreads<kOptions>.vectors;
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kBatch = kThreads * kVectors;
  extern __shared__ __align__(128) unsigned char storage[];
  __shared__ Arrival arrivals[ceil_divide(kMostPieceBytes / 16, kBatch)];
  __shared__ ClusterStates<State, kMostClusterBlocks> cluster_states;
  __shared__ alignas(Prefetched) unsigned char prefetched_storage[sizeof(Prefetched)];
  __shared__ alignas(T) unsigned char edge_storage[2 * kSize * sizeof(T)];
  let_next_kernel_start();
  const auto rank = static_cast<int>(cooperative_groups::this_cluster().block_rank());
  const int thread = static_cast<int>(threadIdx.x);
  const auto at = operation.view().rows.offsets(blockIdx.x / cooperative_groups::this_cluster().num_blocks());
  const std::int64_t target = operation.rows.in.target_at(at.of[kTargets]);
  const bool is_read = operation.rows.is_read(target);
  const Span<T> span(operation.logits + at.of[kLogits], operation.view().column_count);
  const std::int64_t first = std::int64_t{rank} * piece_vectors;
  const auto vectors = static_cast<int>(max(min(span.vectors - first, std::int64_t{piece_vectors}), std::int64_t{0}));
  const bool has_edge = rank == 0 && thread < span.edges;
  Vector<T>* const address = span.vector_address(first);
  auto* const piece = reinterpret_cast<Vector<T>*>(storage);
  auto* const prefetched = reinterpret_cast<Prefetched*>(prefetched_storage);
  auto* const edges = reinterpret_cast<T*>(edge_storage);
  const auto column_of = [&](int i) { return span.head + (first + i) * kSize; };

  // load
  if (thread == 0) {
#pragma unroll 1
    for (int begin = 0; begin < vectors; begin += kBatch) initialise(arrivals[begin / kBatch]);
    cluster_states.prepare();
    publish_arrivals();
    cluster_states.expect_states();
#pragma unroll 1
    for (int begin = 0; is_read && begin < vectors; begin += kBatch) {
      copy_to_shared(piece + begin, address + begin, min(vectors - begin, kBatch) * sizeof(Vector<T>),
                     arrivals[begin / kBatch]);
    }
  }
  __syncthreads();  // a thread may wait for an arrival only after it is initialised
  arrive_at_cluster_start();
  if (has_edge && is_read) edges[thread] = span.edge(thread);
  if (thread == 0) *prefetched = operation.prefetch(target, at);

  // reduce
  State state;
  if (is_read) {
    if constexpr (kIsFull) {
      state = reduce_with_options<kOptions>(operation, piece, vectors, column_of(0), at.of[kSoftTargets], arrivals,
                                            [&](auto add) {
                                              if (has_edge)
                                                add(load_as_accumulator(edges[thread]), span.edge_index(thread));
                                            });
    } else {
      const auto add = [&]<int kTaken>(int i) {
        Vector<T> batch[kTaken];
#pragma unroll
        for (int v = 0; v < kTaken; ++v) batch[v] = piece[i + v * kThreads];
        accumulate(state, batch);
      };
#pragma unroll 1
      for (int begin = 0; begin < vectors; begin += kBatch) {
        wait_for(arrivals[begin / kBatch]);
        int i = begin + thread;
        if (i + (kVectors - 1) * kThreads < vectors) {
          add.template operator()<kVectors>(i);
        } else {
#pragma unroll 1
          for (; i < vectors; i += kThreads) add.template operator()<1>(i);
        }
      }
      if (has_edge) accumulate_edge(state, edges[thread]);
    }
  }
  if (thread == 0) prefetched->grad_loss = operation.divided(prefetched->grad_loss, at.of[kPerRow]);
  state = reduce_block<kThreads>(state, Merge{});
  wait_for_cluster_start();
  // reduce() also orders reads before writes: thread 0 of every block has read the target's logit before any block
  // writes a gradient.
  state = cluster_states.reduce(state, Merge{});

  // finish, store
  const auto function = operation.finish(state, *prefetched, at, rank == 0 && thread == 0);
  const auto store_all = [&](const auto& gradient) {
#pragma unroll(kIsFull ? 1 : 4)  // with options an iteration is long
    for (int i = thread; i < vectors; i += kThreads) {
      store_gradient<kIsNarrow>(span, operation.grad_dtype, first + i,
                                is_read ? gradient(piece[i], column_of(i)) : Vector<T>{});
    }
    if (has_edge) {
      store_gradient_edge<kIsNarrow>(
          span, operation.grad_dtype, thread,
          is_read ? gradient(load_as_accumulator(edges[thread]), span.edge_index(thread)) : Accumulator<T>(0));
    }
  };
  if constexpr (kIsFull) {
    // There is neither GradientVariant<..., true, true>, a softcap with factors, nor FullLoss with kHasSquare:
    // stays_on_chip() refuses the calls that need them. Change both together.
    using View = typename InPlace<T, kIsFull>::View;
    if constexpr (kOptions == RowOptions::factors) {
      store_all(GradientVariant<T, View, false, true>{function});
    } else if (operation.rows.in.terms.softcap == 0.0f) {
      store_all(GradientVariant<T, View, false, false>{function});
    } else {
      store_all(GradientVariant<T, View, true, false>{function});
    }
  } else {
    store_all(function);
  }
#endif
}

/// kIsNarrow: the gradient has 16 bits over float32 logits.
template <RowOptions kOptions, bool kIsNarrow, typename T, bool kIsFull>
void launch_in_cluster(const char* op, const InPlace<T, kIsFull>& operation, bool follows_kernel, void* stream) {
  const RowPieces pieces = cut_row(operation.view().column_count * static_cast<std::int64_t>(sizeof(T)));
  launch(op, row_in_cluster<T, kOptions, kIsNarrow>,
         {.blocks = operation.view().row_count * pieces.blocks,
          .threads = kClusterThreads<kOptions>.threads,
          .cluster_blocks = pieces.blocks,
          .shared_bytes = static_cast<std::size_t>(pieces.vectors) * 16,
          .starts_before_previous_ends = follows_kernel,
          .stream = stream},
         operation, static_cast<int>(pieces.vectors));
}

/// Calls `launch.operator()<kIsNarrow>()`.
template <typename T, typename Launch>
void dispatch_narrow(DType grad_dtype, Launch launch) {
  if constexpr (std::is_same_v<T, float>) {
    if (grad_dtype != DType::float32) return launch.template operator()<true>();
  }
  launch.template operator()<false>();
}

/// Launches row_in_cluster for a call with options. Defined in cross_entropy_in_place_full_cuda.cu.
template <typename T>
void launch_full_rows(const char* op, const InPlace<T, true>& operation, bool follows_kernel, void* stream);

}  // namespace eaves::cuda
