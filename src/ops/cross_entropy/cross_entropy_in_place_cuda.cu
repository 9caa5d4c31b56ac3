// Forward and backward of cross_entropy at once, in place. A row stays on the chip between its statistics and its
// gradient: every logit is read once and its gradient is written once.
//
//   row_in_registers   short rows, in the registers of a block or of some lanes
//   row_in_cluster     longer rows and rows with options, in a cluster's shared memory (cross_entropy_in_place.cuh)
//   in_two_passes      the forward, then the backward over the logits: strided or huge rows, float64, GPUs without
//                      clusters; with options also short rows, the sum of p^2, and a softcap beside factors u
#include <algorithm>

#include "core/dispatch.h"
#include "cuda/device.h"
#include "ops/cross_entropy/cross_entropy_in_place.cuh"

namespace eaves::cuda {
namespace {

constexpr const char* kOp = "cross_entropy_forward_backward";

// ---- policy --------------------------------------------------------------------------------------------------------

/// The threads and vectors of the longest row that stays in registers. H200, [4096, 32768] bf16, 64 KiB a row, time
/// divided by the time of one read and one write of the same bytes: with 512 x 8 in registers 1.175, in a
/// cluster 1.178.
constexpr RowThreads kMostInRegisters{256, 8};
constexpr std::int64_t kRegisterRowBytes = 16 * kMostInRegisters.threads * kMostInRegisters.vectors;

constexpr int kShortBlock = 128;  // threads of a block if a row takes at most a warp

/// Rows with options stay on the chip from this size on. H100, bf16 with smoothing, with softcap, with an entropy:
/// [4096, 16384] 119, 159 and 117 us, in two passes 155, 176 and 164; [4096, 8192] 88, 113 and 86, in two passes 88,
/// 110 and 100; [4096, 4096] 82, 100 and 82, in two passes 53, 78 and 66.
constexpr std::int64_t kFewestBytesWithOptions = 16384;

// ---- kernels -------------------------------------------------------------------------------------------------------

/// kThreads threads for each row: some lanes of a warp, or a whole block.
template <typename T, bool kIsNarrow, int kThreads, int kVectors>
__global__ void __launch_bounds__(kThreads < kShortBlock ? kShortBlock : kThreads,
                                  1024 / (kThreads < kShortBlock ? kShortBlock : kThreads))
    row_in_registers(const __grid_constant__ InPlace<T, false> operation) {
  using State = SoftmaxState<Accumulator<T>>;
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kBlock = kThreads < kShortBlock ? kShortBlock : kThreads;
  constexpr int kEdges = (2 * (kSize - 1) + kThreads - 1) / kThreads;
  let_next_kernel_start();
  const std::int64_t row = (std::int64_t{blockIdx.x} * kBlock + threadIdx.x) / kThreads;
  const int thread = threadIdx.x % kThreads;
  // Threads beyond the last row take part in the reductions with a copy of this row, and write nothing.
  const bool is_row = row < operation.view().row_count;
  const auto at = operation.view().rows.offsets(is_row ? row : operation.view().row_count - 1);
  const std::int64_t target = operation.rows.in.target_at(at.of[kTargets]);
  const bool is_read = operation.rows.is_read(target);

  // load, even if the row is ignored: to wait for its target first would slow down every row
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
  auto prefetched = operation.prefetch(target, at);

  // reduce
  State state;
  if (is_read) {
    accumulate(state, batch);
#pragma unroll
    for (int e = 0; e < kEdges; ++e) {
      if (thread + e * kThreads < span.edges) accumulate_edge(state, edges[e]);
    }
  }
  prefetched.grad_loss = operation.divided(prefetched.grad_loss, at.of[kPerRow]);
  if constexpr (kThreads < kShortBlock) {
    state = reduce_lanes<kThreads>(state, MergeSoftmax{});
  } else {
    state = reduce_block<kThreads>(state, MergeSoftmax{});
    __shared__ alignas(State) unsigned char storage[sizeof(State)];
    if (threadIdx.x == 0) *reinterpret_cast<State*>(storage) = state;
    __syncthreads();  // also orders the read of the target's logit before the first store of a gradient
    state = *reinterpret_cast<State*>(storage);
  }
  __syncwarp();  // the same order for rows that share a warp

  // finish, store
  const auto gradient = operation.finish(state, prefetched, at, thread == 0 && is_row);
  if (!is_row) return;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (v * kThreads >= left) break;
    const std::int64_t i = std::int64_t{thread} + v * kThreads;
    store_gradient<kIsNarrow>(span, operation.grad_dtype, i,
                              is_read ? gradient(batch[v], span.head + i * kSize) : Vector<T>{});
  }
#pragma unroll
  for (int e = 0; e < kEdges; ++e) {
    const int edge = thread + e * kThreads;
    if (edge >= span.edges) continue;
    store_gradient_edge<kIsNarrow>(
        span, operation.grad_dtype, edge,
        is_read ? gradient(load_as_accumulator(edges[e]), span.edge_index(edge)) : Accumulator<T>(0));
  }
}

// ---- host ----------------------------------------------------------------------------------------------------------

/// Does a row stay on the chip between its statistics and its gradient?
bool stays_on_chip(const CrossEntropyInPlaceProblem& problem) {
  const CrossEntropyInputs& inputs = problem.forward.inputs;
  if (inputs.view.row_count == 0 || inputs.view.column_count == 0) return false;
  if (inputs.logits_dtype == DType::float64 || inputs.view.layout != RowLayout::contiguous ||
      !ShortRowView<3, 6>::fits(inputs.view)) {
    return false;
  }
  const auto row_bytes = inputs.view.column_count * static_cast<std::int64_t>(size_of(inputs.logits_dtype));
  if (suits_plain_loss(inputs) && row_bytes <= kRegisterRowBytes) return true;
  if (!suits_plain_loss(inputs)) {
    // A softcap with factors u needs so much arithmetic that two kernels are faster. H100, [4096, 131072] bf16 with
    // smoothing over weighted classes, softcap and entropy: 1.29 ms, on the chip 1.52.
    const bool is_slower = inputs.plan.has_factors && inputs.options.softcap != 0.0;
    if (inputs.plan.has_square || is_slower || row_bytes < kFewestBytesWithOptions) return false;
  }
  const DeviceProperties& gpu = properties(inputs.device);
  const std::int64_t most_piece_bytes = std::min(kMostPieceBytes, gpu.shared_bytes_per_block - kDeclaredSharedBytes);
  return gpu.compute_capability >= 90 && cut_row(row_bytes).vectors * 16 <= most_piece_bytes;
}

/// The workspace of a call. On the chip: the workspace of a reduced loss, then the divisor, because the gradients need
/// it before the loss is known. In two passes: the workspace of the forward, then lse, target_mass and divisor for the
/// backward.
struct InPlaceWorkspace {
  LossWorkspace loss;
  std::size_t forward_bytes = 0;  ///< of the separate forward
  std::size_t lse_bytes = 0;
  std::size_t mass_bytes = 0;
  std::size_t divisor_bytes = 0;

  bool is_on_chip;

  explicit InPlaceWorkspace(const CrossEntropyInPlaceProblem& problem)
      : loss(problem.forward.inputs.options.reduction, problem.forward.inputs.view.row_count,
             size_of(accumulator_dtype(problem.forward.inputs.logits_dtype)), 0),
        is_on_chip(stays_on_chip(problem)) {
    const CrossEntropyInputs& inputs = problem.forward.inputs;
    if (inputs.options.reduction == Reduction::mean) divisor_bytes = 256;
    if (is_on_chip) return;
    const std::size_t per_row = LossWorkspace::aligned(static_cast<std::size_t>(inputs.view.row_count) *
                                                       size_of(accumulator_dtype(inputs.logits_dtype)));
    forward_bytes = LossWorkspace::aligned(cross_entropy_workspace_bytes(problem.forward));
    mass_bytes = per_row;
    lse_bytes = LossWorkspace::aligned(static_cast<std::size_t>(inputs.view.row_count) * 2 *
                                       size_of(accumulator_dtype(inputs.logits_dtype)));
  }
  std::size_t bytes() const {
    return (is_on_chip ? loss.bytes() : forward_bytes) + lse_bytes + mass_bytes + divisor_bytes;
  }
};

/// The weights of the rows in the mean's divisor, from their targets alone.
template <typename T, typename View>
struct TargetWeights {
  LossInputs<T, View> in;

  struct Loaded {
    std::int64_t target;
    std::int64_t per_row;
  };

  __device__ Loaded load(std::int64_t row) const {
    const auto at = in.view.rows.offsets(row);
    return {in.target_at(at.of[kTargets]), at.of[kPerRow]};
  }
  __device__ LossSums operator()(const Loaded& row) const {
    if (in.terms.is_ignored(row.target)) return {};
    const bool has_class = !in.terms.is_soft && in.terms.is_in_range(row.target);
    const double weight = has_class ? double(in.weight_in(in.column_of_class(row.target))) : 1.0;
    return {.weight = weigh(weight, double(in.row_weight_at(row.per_row)))};
  }
};

/// kIsNarrow: the gradient has 16 bits over float32 logits. H200, [4096, 32768] fp32 with a gradient of float32: 0.2804
/// ms, with one kernel for both widths 0.2920 ms.
template <bool kIsNarrow, typename T>
void launch_plain_rows(const InPlace<T, false>& operation, bool follows_kernel, void* stream) {
  const std::int64_t row_bytes = operation.view().column_count * static_cast<std::int64_t>(sizeof(T));
  if (row_bytes > kRegisterRowBytes) {
    return launch_in_cluster<RowOptions::none, kIsNarrow>(kOp, operation, follows_kernel, stream);
  }
  const auto run = [&]<int kThreads, int kVectors>() {
    constexpr int kBlock = kThreads < kShortBlock ? kShortBlock : kThreads;
    launch(kOp, row_in_registers<T, kIsNarrow, kThreads, kVectors>,
           {.blocks = ceil_divide(operation.view().row_count, kBlock / kThreads),
            .threads = kBlock,
            .starts_before_previous_ends = follows_kernel,
            .stream = stream},
           operation);
  };
  if (row_bytes <= 128) return run.template operator()<2, 4>();
  if (row_bytes <= 256) return run.template operator()<4, 4>();
  if (row_bytes <= 512) return run.template operator()<8, 4>();
  if (row_bytes <= 2048) return run.template operator()<32, 4>();
  if (row_bytes <= 4096) return run.template operator()<32, 8>();
  if (row_bytes <= 8192) return run.template operator()<128, 4>();
  if (row_bytes <= 16384) return run.template operator()<128, 8>();
  run.template operator()<kMostInRegisters.threads, kMostInRegisters.vectors>();
}

/// Runs a problem for which stays_on_chip() is true.
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
    launch_sum_rows<LossSums>(
        kOp, TargetWeights<T, View>{in}, inputs.view.row_count,
        ReducedOutputs<A>{.is_mean = true, .normalizer = nullptr, .loss = nullptr, .z_loss = nullptr, .divisor = found},
        workspace.loss.sums(memory), inputs.device, context.stream);
  }

  const bool follows_kernel = finds_divisor && properties(inputs.device).compute_capability >= 90;
  const auto operation_of = [&]<bool kIsFull>(const typename InPlace<T, kIsFull>::Rows& rows) {
    auto* const logits = static_cast<T*>(const_cast<void*>(inputs.logits));
    return InPlace<T, kIsFull>{rows, logits, problem.grad_dtype, problem.grad_loss, divisor};
  };
  const LossRows<T, View> rows{in, outputs, false};
  if (!suits_plain_loss(inputs)) {
    launch_full_rows(kOp, operation_of.template operator()<true>({rows, inputs.plan, nullptr}), follows_kernel,
                     context.stream);
  } else {
    dispatch_narrow<T>(problem.grad_dtype, [&]<bool kIsNarrow>() {
      launch_plain_rows<kIsNarrow>(operation_of.template operator()<false>({rows}), follows_kernel, context.stream);
    });
  }
  reduce_losses<A>(kOp, inputs, outputs, forward.normalizer, forward.outputs, workspace.loss.sums(memory),
                   context.stream);
}

/// Runs the forward, then the backward over the logits.
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
  const KeptLse wanted = forward.outputs.lse;
  if (!wanted.is_split) forward.outputs.lse = {own_lse, true};
  if (forward.outputs.target_mass == nullptr) forward.outputs.target_mass = own_mass;
  if (is_mean && forward.outputs.divisor == nullptr) forward.outputs.divisor = own_divisor;
  cross_entropy(forward, forward_context);
  if (wanted.data != nullptr && !wanted.is_split) {
    const std::size_t number = size_of(accumulator_dtype(inputs.logits_dtype));
    check_status(cudaMemcpy2DAsync(wanted.data, number, own_lse, 2 * number, number,
                                   static_cast<std::size_t>(inputs.view.row_count), cudaMemcpyDeviceToDevice,
                                   static_cast<cudaStream_t>(context.stream)),
                 kOp);
  }
  if (inputs.view.row_count == 0 || inputs.view.column_count == 0) return;
  const CrossEntropyBackwardProblem backward{.inputs = inputs,
                                             .grad_loss = problem.grad_loss,
                                             .grad_lse = nullptr,
                                             .grad_entropy = nullptr,
                                             .lse = forward.outputs.lse,
                                             .entropy = nullptr,
                                             .target_mass = forward.outputs.target_mass,
                                             .divisor = is_mean ? forward.outputs.divisor : nullptr,
                                             .grad_dtype = problem.grad_dtype,
                                             .grad_logits = const_cast<void*>(inputs.logits)};
  cross_entropy(backward, context);
}

}  // namespace

std::size_t cross_entropy_workspace_bytes(const CrossEntropyInPlaceProblem& problem) {
  return InPlaceWorkspace(problem).bytes();
}

void cross_entropy(const CrossEntropyInPlaceProblem& problem, const ExecutionContext& context) {
  const CrossEntropyInputs& inputs = problem.forward.inputs;
  const DeviceGuard guard(inputs.device);
  if (!stays_on_chip(problem)) return in_two_passes(problem, context);
  dispatch_floating_point(inputs.logits_dtype, [&]<typename T>() {
    if constexpr (!std::is_same_v<T, double>) in_place<T>(problem, context);
  });
}

}  // namespace eaves::cuda
