// The kernels of cross_entropy's forward and backward at once, in place. A row stays on the chip between its statistics
// and its gradient: every logit is read once and its gradient is written once.
//
//   row_in_registers   short rows, in the registers of a block or of some lanes
//   row_in_cluster     longer ones, in the shared memory of a cluster of small blocks
#pragma once

#include <algorithm>

#include "core/dispatch.h"
#include "cuda/arrival.cuh"
#include "cuda/device.h"
#include "ops/cross_entropy/cross_entropy_backend.h"
#include "ops/cross_entropy/cross_entropy_gradient.cuh"
#include "ops/cross_entropy/cross_entropy_rows.cuh"

namespace eaves::cuda {

inline constexpr const char* kInPlaceOp = "cross_entropy_forward_backward";

// ---- policy --------------------------------------------------------------------------------------------------------

/// The longest row that stays in registers, and how: with much arithmetic, whose registers the vectors would take, a
/// shorter one. H200, [4096, 32768] bf16, 64 KiB a row: 512 x 8 in registers 1.175 of one read and one write of the
/// same bytes, in a cluster 1.178.
template <bool kIsHeavy>
inline constexpr RowThreads kMostInRegisters = kIsHeavy ? RowThreads{128, 4} : RowThreads{256, 8};
template <bool kIsHeavy>
inline constexpr std::int64_t kRegisterRowBytes =
    16 * kMostInRegisters<kIsHeavy>.threads* kMostInRegisters<kIsHeavy>.vectors;

/// Of a longer row, each block of a cluster keeps a piece in shared memory: so little that six blocks share a
/// multiprocessor, and some load while others wait for their cluster or store. More blocks than the most that every GPU
/// with clusters takes are not to be had, so that beyond them pieces grow. H200, [4096, 65536] and [4096, 131072] bf16,
/// of one read and one write of the same bytes: 1.12 and 1.08; in two passes 1.53 and 1.51, in the registers of
/// clusters of blocks with 64 KiB each 1.44 and 1.62, in a ring of shared memory of one or two large blocks 1.6 to 2.0.
inline constexpr std::int64_t kPieceBytes = 32768;
inline constexpr std::int64_t kMostPieceBytes = 204800;
inline constexpr std::int64_t kDeclaredSharedBytes = 4096;  // at most, of a block beside its piece
inline constexpr int kMostClusterBlocks = 8;
inline constexpr int kClusterThreads = 256;  // of a block
inline constexpr int kClusterVectors = 4;    // that a thread takes at once

inline constexpr int kClusterBlocksPerMultiprocessor = 6;

struct RowPieces {
  int blocks;            ///< of the cluster
  std::int64_t vectors;  ///< of each but the last, which may have fewer
};

inline RowPieces cut_row(std::int64_t row_bytes) {
  int blocks = 2;  // a block by itself cannot send to a cluster
  while (blocks < kMostClusterBlocks && row_bytes > blocks * kPieceBytes) blocks *= 2;
  constexpr std::int64_t kLineVectors = 8;  // pieces of whole cache lines, where the row starts on one
  return {blocks, ceil_divide(ceil_divide(row_bytes / 16, blocks), kLineVectors) * kLineVectors};
}

// ---- what is done with a row ---------------------------------------------------------------------------------------

/// Out is narrower than T where only the gradient is: it then takes the first half of each row.
template <typename T, typename View, typename Loss, typename Gradient, typename Out = T>
struct InPlace {
  using Element = T;
  using Result = Out;
  using A = Accumulator<T>;
  using State = typename Loss::State;
  using Running = typename Loss::Running;
  using Merge = typename Loss::Merge;
  static constexpr bool kIsHeavy = Loss::kIsHeavy;

  Loss loss;
  T* logits;
  OwnOrFloat<T> grad_loss;  ///< its data nullptr: 1
  const A* divisor;         ///< nullptr but for the mean

  EAVES_HOST_DEVICE const View& view() const { return loss.view(); }

  /// What a row has beside its logits.
  struct Beside {
    typename Loss::Prepared prepared;
    A grad_loss;
  };

  /// Loads it: while the logits are on their way, so that nobody waits for it at the end of the row. Reads what the
  /// kernel before has written.
  template <typename Offsets>
  __device__ Beside load_beside(std::int64_t target, const Offsets& at) const {
    wait_for_previous_kernel();
    // First what does not wait for the target.
    const A of_row = mean_gradient(grad_loss.data == nullptr ? A(1) : grad_loss[at.of[kGradLoss]], divisor);
    return {loss.rows.prepare(target, at.of[kLogits]), of_row};
  }

  /// Takes an element outside of the row's vectors into what is known of the row.
  template <typename Offsets>
  __device__ void take_edge(Running& running, T edge, std::int64_t column, const Offsets& at) const {
    Vector<T> single[1] = {minus_infinity<T>()};
    memcpy(&single[0], &edge, sizeof(T));
    loss.take_batch(running, single, BatchPlace{column, 1, 1, 1}, at);
  }

  /// Writes what is wanted of the row where `writes_row`, one of its threads, and returns the function that maps its
  /// logits to its gradient.
  template <typename Offsets>
  __device__ Gradient finish(const State& state, const Beside& beside, const Offsets& at, bool writes_row) const {
    const LossInputs<T, View>& in = loss.rows.in;
    const std::int64_t target = beside.prepared.target;
    const ClassStatistics<A> statistics = loss.statistics_of(state);
    const TargetClass<A> target_class = loss.rows.target_class(beside.prepared);
    if (writes_row) {
      write_row<A>(loss.rows.outputs, at.of[kPerRow], statistics, target, target_class, in.terms,
                   loss.rows.is_read(target));
    }
    const RowLoss<A> row = row_loss(statistics, target_class, !in.terms.is_ignored(target), in.terms);
    RowGradientInputs<A> inputs{};
    inputs.target = target;
    inputs.lse = row.lse;
    inputs.target_mass = row.target_mass;
    inputs.grad_loss = beside.grad_loss;
    return Gradient(in, gradient_of_row(in, inputs), at.of[kSoftTargets]);
  }
};

/// Element or vector `i` of a row's gradient, where `address` is that of its logits.
template <typename Out, typename T>
__device__ void store_gradient(const Span<T>& span, Vector<T>* address, std::int64_t i, const Vector<T>& gradient) {
  if constexpr (std::is_same_v<Out, T>) {
    store(address, gradient);
  } else {
    store_narrow(reinterpret_cast<Out*>(span.begin) + i * Vector<T>::kSize, gradient);  // such rows have no head
  }
}
template <typename Out, typename T>
__device__ void store_gradient_edge(const Span<T>& span, int edge, Accumulator<T> gradient) {
  reinterpret_cast<Out*>(span.begin)[span.edge_index(edge)] = round_to<Out>(gradient);
}

// ---- kernels -------------------------------------------------------------------------------------------------------

/// kThreads threads a row: lanes of a warp, or the threads of a block.
template <typename Operation, int kThreads, int kVectors>
__global__ void __launch_bounds__(kThreads < kLanesBlock ? kLanesBlock : kThreads,
                                  (Operation::kIsHeavy ? 768 : 1024) /
                                      (kThreads < kLanesBlock ? kLanesBlock : kThreads))
    row_in_registers(const __grid_constant__ Operation operation) {
  using T = typename Operation::Element;
  using Out = typename Operation::Result;
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

  // load, whether the row counts or not: to wait for its target first would cost every row more
  const Span<T> span(operation.logits + at.of[kLogits], operation.view().column_count);
  const int left = static_cast<int>(span.vectors) - thread;
  Vector<T>* address = span.vector_address(thread);
  Vector<T> batch[kVectors];
  T edges[kEdges];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    batch[v] = v * kThreads < left ? load_before_overwriting(address + v * kThreads) : minus_infinity<T>();
  }
#pragma unroll
  for (int e = 0; e < kEdges; ++e) {
    if (thread + e * kThreads < span.edges) edges[e] = span.edge(thread + e * kThreads);
  }
  const auto beside = operation.load_beside(target, at);

  // reduce
  typename Operation::Running running;
  if (is_read) {
    const std::int64_t first = span.head + std::int64_t{thread} * kSize;
    const int vectors = left <= 0 ? 0 : (left + kThreads - 1) / kThreads;
    operation.loss.take_batch(running, batch, BatchPlace{first, kThreads * kSize, min(vectors, kVectors), kSize}, at);
#pragma unroll
    for (int e = 0; e < kEdges; ++e) {
      const int edge = thread + e * kThreads;
      if (edge < span.edges) operation.take_edge(running, edges[e], span.edge_index(edge), at);
    }
  }
  State state = operation.loss.finished(running);
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

  // finish, store
  const auto gradient = operation.finish(state, beside, at, thread == 0 && is_row);
  if (!is_row) return;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (v * kThreads >= left) break;
    const std::int64_t i = std::int64_t{thread} + v * kThreads;
    store_gradient<Out>(span, address + v * kThreads, i,
                        is_read ? gradient(batch[v], span.head + i * kSize) : Vector<T>{});
  }
#pragma unroll
  for (int e = 0; e < kEdges; ++e) {
    const int edge = thread + e * kThreads;
    if (edge >= span.edges) continue;
    store_gradient_edge<Out>(
        span, edge, is_read ? gradient(load_as_accumulator(edges[e]), span.edge_index(edge)) : Accumulator<T>(0));
  }
}

/// A cluster a row, its vectors in pieces of `piece_vectors`. What the threads of a block take at once arrives at once:
/// the statistics begin with the first of it.
template <typename Operation, int kThreads, int kVectors>
__global__ void __launch_bounds__(kThreads, kClusterBlocksPerMultiprocessor)
    row_in_cluster(const __grid_constant__ Operation operation, int piece_vectors) {
#if __CUDA_ARCH__ >= 900
  using T = typename Operation::Element;
  using Out = typename Operation::Result;
  using State = typename Operation::State;
  using Merge = typename Operation::Merge;
  using Beside = typename Operation::Beside;
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kBatch = kThreads * kVectors;
  extern __shared__ __align__(128) unsigned char storage[];
  __shared__ Arrival arrivals[ceil_divide(kMostPieceBytes / 16, kBatch)];
  __shared__ ClusterStates<State, kMostClusterBlocks> cluster_states;
  __shared__ alignas(Beside) unsigned char beside_storage[sizeof(Beside)];
  __shared__ alignas(T) unsigned char edge_storage[2 * kSize * sizeof(T)];
  let_next_kernel_start();
  const auto rank = static_cast<int>(cooperative_groups::this_cluster().block_rank());
  const int thread = static_cast<int>(threadIdx.x);
  const auto at = operation.view().rows.offsets(blockIdx.x / cooperative_groups::this_cluster().num_blocks());
  const std::int64_t target = operation.loss.rows.in.target_at(at.of[kTargets]);
  const bool is_read = operation.loss.rows.is_read(target);
  const Span<T> span(operation.logits + at.of[kLogits], operation.view().column_count);
  const std::int64_t first = std::int64_t{rank} * piece_vectors;
  const auto vectors = static_cast<int>(max(min(span.vectors - first, std::int64_t{piece_vectors}), std::int64_t{0}));
  const bool has_edge = rank == 0 && thread < span.edges;
  Vector<T>* const address = span.vector_address(first);
  auto* const piece = reinterpret_cast<Vector<T>*>(storage);
  auto* const beside = reinterpret_cast<Beside*>(beside_storage);
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
  __syncthreads();  // before anyone waits for an arrival, it must be one
  arrive_at_cluster_start();
  if (has_edge && is_read) edges[thread] = span.edge(thread);
  if (thread == 0) *beside = operation.load_beside(target, at);

  // reduce
  typename Operation::Running running;
  if (is_read) {
    const auto take = [&]<int kTaken>(int i) {
      Vector<T> batch[kTaken];
#pragma unroll
      for (int v = 0; v < kTaken; ++v) batch[v] = piece[i + v * kThreads];
      operation.loss.take_batch(running, batch, BatchPlace{column_of(i), kThreads * kSize, kTaken, kSize}, at);
    };
#pragma unroll 1
    for (int begin = 0; begin < vectors; begin += kBatch) {
      wait_for(arrivals[begin / kBatch]);
      int i = begin + thread;
      if (i + (kVectors - 1) * kThreads < vectors) {
        take.template operator()<kVectors>(i);
      } else {
#pragma unroll 1
        for (; i < vectors; i += kThreads) take.template operator()<1>(i);
      }
    }
    if (has_edge) operation.take_edge(running, edges[thread], span.edge_index(thread), at);
  }
  State state = reduce_block<kThreads>(operation.loss.finished(running), Merge{});
  wait_for_cluster_start();
  // The target's logit has been read, in the first warps, before any block writes a gradient.
  state = cluster_states.reduce(state, Merge{});

  // finish, store
  const auto gradient = operation.finish(state, *beside, at, rank == 0 && thread == 0);
#pragma unroll 4
  for (int i = thread; i < vectors; i += kThreads) {
    store_gradient<Out>(span, address + i, first + i, is_read ? gradient(piece[i], column_of(i)) : Vector<T>{});
  }
  if (has_edge) {
    store_gradient_edge<Out>(
        span, thread,
        is_read ? gradient(load_as_accumulator(edges[thread]), span.edge_index(thread)) : Accumulator<T>(0));
  }
#endif
}

// ---- host ----------------------------------------------------------------------------------------------------------

inline bool is_fused(const CrossEntropyInPlaceProblem& problem) {
  const CrossEntropyInputs& inputs = problem.forward.inputs;
  if (inputs.view.row_count == 0 || inputs.view.column_count == 0) return false;
  if (inputs.logits_dtype == DType::float64 || inputs.view.layout != RowLayout::contiguous ||
      !ShortRowView<3, 6>::fits(inputs.view)) {
    return false;
  }
  const auto row_bytes = inputs.view.column_count * static_cast<std::int64_t>(size_of(inputs.logits_dtype));
  if (!is_plain(problem.forward)) {
    return problem.grad_dtype == inputs.logits_dtype && row_bytes <= kRegisterRowBytes<true>;
  }
  if (row_bytes <= kRegisterRowBytes<false>) return true;
  const DeviceProperties& gpu = properties(inputs.device);
  const std::int64_t most_piece_bytes = std::min(kMostPieceBytes, gpu.shared_bytes_per_block - kDeclaredSharedBytes);
  return gpu.compute_capability >= 90 && cut_row(row_bytes).vectors * 16 <= most_piece_bytes;
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
    return {.weight = in.terms.is_in_range(target) ? double(in.weight_in(in.column_of_class(target))) : 1.0};
  }
};

template <typename Operation>
void launch_rows_in_registers(const Operation& operation, std::int64_t row_bytes, bool follows_kernel, void* stream) {
  const auto run = [&]<int kThreads, int kVectors>() {
    constexpr int kBlock = kThreads < kLanesBlock ? kLanesBlock : kThreads;
    launch(kInPlaceOp, row_in_registers<Operation, kThreads, kVectors>,
           {.blocks = ceil_divide(operation.view().row_count, kBlock / kThreads),
            .threads = kBlock,
            .starts_before_previous_ends = follows_kernel,
            .stream = stream},
           operation);
  };
  if (row_bytes <= 512) return run.template operator()<8, 4>();
  if (row_bytes <= 2048) return run.template operator()<32, 4>();
  if constexpr (Operation::kIsHeavy) {
    run.template operator()<kMostInRegisters<true>.threads, kMostInRegisters<true>.vectors>();
  } else {
    if (row_bytes <= 4096) return run.template operator()<32, 8>();
    if (row_bytes <= 8192) return run.template operator()<128, 4>();
    if (row_bytes <= 16384) return run.template operator()<128, 8>();
    run.template operator()<kMostInRegisters<false>.threads, kMostInRegisters<false>.vectors>();
  }
}

template <typename Operation>
void launch_rows_in_clusters(const Operation& operation, std::int64_t row_bytes, bool follows_kernel, void* stream) {
  const RowPieces pieces = cut_row(row_bytes);
  launch(kInPlaceOp, row_in_cluster<Operation, kClusterThreads, kClusterVectors>,
         {.blocks = operation.view().row_count * pieces.blocks,
          .threads = kClusterThreads,
          .cluster_blocks = pieces.blocks,
          .shared_bytes = static_cast<std::size_t>(pieces.vectors) * 16,
          .starts_before_previous_ends = follows_kernel,
          .stream = stream},
         operation, static_cast<int>(pieces.vectors));
}

/// Of a problem that is fused.
template <typename T, typename Out>
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
        kInPlaceOp, TargetWeights<T, View>{in}, inputs.view.row_count,
        ReducedOutputs<A>{.is_mean = true, .normalizer = nullptr, .loss = nullptr, .z_loss = nullptr, .divisor = found},
        workspace.loss.sums(memory), inputs.device, context.stream);
  }

  const LossRows<T, View> rows{in, outputs, false};
  const std::int64_t row_bytes = inputs.view.column_count * static_cast<std::int64_t>(sizeof(T));
  const auto run = [&](const auto& operation) {
    const bool follows_kernel = finds_divisor && properties(inputs.device).compute_capability >= 90;
    if constexpr (!std::remove_cvref_t<decltype(operation)>::kIsHeavy) {
      if (row_bytes > kRegisterRowBytes<false>) {
        return launch_rows_in_clusters(operation, row_bytes, follows_kernel, context.stream);
      }
    }
    launch_rows_in_registers(operation, row_bytes, follows_kernel, context.stream);
  };
  auto* const logits = static_cast<T*>(const_cast<void*>(inputs.logits));
  const OwnOrFloat<T> grad_loss{problem.grad_loss, problem.grad_loss_dtype != kDTypeOf<T>};
  if (is_plain(forward)) {
    run(InPlace<T, View, PlainLoss<T, View>, PlainGradient<T, View>, Out>{{rows}, logits, grad_loss, divisor});
  } else if constexpr (std::is_same_v<T, Out>) {
    run(InPlace<T, View, FullLoss<T, View>, FullGradient<T, View>>{FullLoss<T, View>(rows, wanted_statistics(forward)),
                                                                   logits, grad_loss, divisor});
  }
  reduce_losses<A>(kInPlaceOp, inputs, outputs, forward.normalizer, forward.outputs, workspace.loss.sums(memory),
                   context.stream);
}

}  // namespace eaves::cuda
