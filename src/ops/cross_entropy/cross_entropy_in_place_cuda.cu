// Forward and backward of cross_entropy at once, in place. Rows of at most 64 KiB stay in the registers of a block
// between their statistics and their gradient: every logit is read once and its gradient is written once. Anything else
// (longer or strided rows, float64) goes through the two separate passes.
#include <algorithm>

#include "core/dispatch.h"
#include "cuda/device.h"
#include "ops/cross_entropy/cross_entropy_backend.h"
#include "ops/cross_entropy/cross_entropy_gradient.cuh"
#include "ops/cross_entropy/cross_entropy_rows.cuh"

namespace eaves::cuda {
namespace {

constexpr const char* kOp = "cross_entropy_forward_backward";

// ---- what is done with a row
// -----------------------------------------------------------------------------------------

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

/// kThreads threads a row: lanes of a warp, or the threads of a block.
template <typename Operation, int kThreads, int kVectors>
__global__ void __launch_bounds__(kThreads < kLanesBlock ? kLanesBlock : kThreads,
                                  1024 / (kThreads < kLanesBlock ? kLanesBlock : kThreads))
    row_in_registers(const __grid_constant__ Operation operation) {
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

  // load, whether the row counts or not: to wait for its target first would cost every row more
  const Span<T> span(operation.logits + at.of[kLogits], operation.view().column_count);
  const int left = static_cast<int>(span.vectors) - thread;
  Vector<T>* address = span.vector_address(thread);
  Vector<T> batch[kVectors];
  T edges[kEdges];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    batch[v] = v * kThreads < left ? load(address + v * kThreads) : minus_infinity<T>();
  }
#pragma unroll
  for (int e = 0; e < kEdges; ++e) {
    if (thread + e * kThreads < span.edges) edges[e] = span.edge(thread + e * kThreads);
  }
  TargetClass<A> target_class;
  if (is_read) {
    target_class = operation.loss.rows.target_class(operation.loss.rows.prepare(target, at.of[kLogits]));
  }

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

// ---- host ----------------------------------------------------------------------------------------------------------

/// The longest row that 512 threads hold with 8 vectors each. H200, bf16, milliseconds, one read and one write of the
/// same bytes: [4096, 32768] 0.131, this way 0.150, in two passes 0.202; longer rows were tried in clusters of blocks,
/// [4096, 65536] 0.375 against 0.395 in two passes, [4096, 131072] 0.829 against 0.770, and in a ring of shared memory,
/// 0.403 and 0.898.
constexpr std::int64_t kRegisterRowBytes = 65536;

bool is_fused(const CrossEntropyInPlaceProblem& problem) {
  const CrossEntropyInputs& inputs = problem.forward.inputs;
  if (inputs.view.row_count == 0 || inputs.view.column_count == 0) return false;
  if (inputs.logits_dtype == DType::float64 || inputs.view.layout != RowLayout::contiguous ||
      !ShortRowView<3, 6>::fits(inputs.view)) {
    return false;
  }
  const auto row_bytes = inputs.view.column_count * static_cast<std::int64_t>(size_of(inputs.logits_dtype));
  return row_bytes <= kRegisterRowBytes;
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
  if (row_bytes <= 16384) return run.template operator()<128, 8>();
  if (row_bytes <= 32768) return run.template operator()<256, 8>();
  return run.template operator()<512, 8>();
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
  const std::int64_t row_bytes = inputs.view.column_count * static_cast<std::int64_t>(sizeof(T));
  const auto run = [&](const auto& operation) {
    launch_rows_in_registers(operation, row_bytes, finds_divisor && properties(inputs.device).compute_capability >= 90,
                             context.stream);
  };
  auto* const logits = static_cast<T*>(const_cast<void*>(inputs.logits));
  const OwnOrFloat<T> grad_loss{problem.grad_loss, problem.grad_loss_dtype != kDTypeOf<T>};
  if (is_plain(forward)) {
    run(InPlace<T, View, PlainLoss<T, View>, PlainGradient<T, View>>{{rows}, logits, grad_loss, divisor});
  } else {
    run(InPlace<T, View, FullLoss<T, View>, FullGradient<T, View>>{FullLoss<T, View>(rows, wanted_statistics(forward)),
                                                                   logits, grad_loss, divisor});
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
