// The forward of lrpe_cosine on a GPU: one kernel that reads x and writes both halves of out. A softmax over the
// sequence has its column statistics first (lrpe_cosine_columns.cuh); one over more features than a warp holds goes row
// by row (lrpe_cosine_long_rows.cuh).
#include "core/dispatch.h"
#include "ops/lrpe_cosine/lrpe_cosine_columns.cuh"
#include "ops/lrpe_cosine/lrpe_cosine_device.cuh"
#include "ops/lrpe_cosine/lrpe_cosine_long_rows.cuh"
#include "ops/lrpe_cosine/lrpe_cosine_plan.h"

namespace eaves::cuda {
namespace {

constexpr const char* kOp = "lrpe_cosine_forward";

template <typename T>
struct EncodeArguments {
  LrpeTiling tiling;
  std::int64_t batch;
  std::int64_t positions;
  std::int64_t features;
  LrpeActivation activation;
  const T* x;
  T* out;
  const Accumulator<T>* lse;  ///< [B, H, D]
  LrpeCosineStrides x_strides;
  LrpeCosineStrides out_strides;
  LrpeCosineAngles angles;
};

/// kSlots loads are in flight: of batch entries where angles are shared, else of tokens.
template <typename T, int kWidth, LrpeKind kKind, bool kIsShared, int kSlots>
__global__ void __launch_bounds__(kLrpeThreads) encode(const __grid_constant__ EncodeArguments<T> p) {
  using A = Accumulator<T>;
  using Lanes = Side<T, kWidth>;
  let_next_kernel_start();
  const LrpePlace place = find_place(p.tiling);
  const bool has_features = place.vector < p.tiling.vectors;
  const std::int64_t head = place.head;
  const std::int64_t feature = std::int64_t{place.vector} * kWidth;
  const std::int64_t block_rows = p.tiling.block_rows();
  const std::int64_t first_row = std::int64_t{place.row_block} * (kIsShared ? 1 : kSlots) * block_rows + place.row;
  const std::int64_t step_rows = kIsShared ? 0 : block_rows;
  const std::int64_t first_batch = kIsShared ? place.chunk * p.tiling.chunk : 0;
  const std::int64_t last_batch = kIsShared ? min(first_batch + p.tiling.chunk, p.batch) : 1;
  const T* const x_head = p.x + head * p.x_strides[1] + feature * p.x_strides[3];
  T* const out_head = p.out + head * p.out_strides[1] + feature * p.out_strides[3];
  const std::int64_t sine_half = p.features * p.out_strides[3];

  // The features of a token are a softmax's row: all lanes of its warp go on, with -inf where they have none.
  if (kKind != LrpeKind::feature_softmax && (!has_features || first_row >= p.tiling.rows)) return;
  if constexpr (kKind == LrpeKind::sequence_softmax) wait_for_previous_kernel();

  TokenAngles<T, kWidth> token;
  FeatureAngles<T, kWidth> theta(p.angles, head, has_features ? feature : 0);
  for (std::int64_t base = first_batch; base < last_batch; base += kSlots) {
    Lanes batch[kSlots];
    std::int64_t b[kSlots];
    std::int64_t n[kSlots];
    bool is_there[kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const std::int64_t row = first_row + s * step_rows;
      if constexpr (kIsShared) {
        b[s] = base + s;
        n[s] = row;
        is_there[s] = b[s] < last_batch && row < p.tiling.rows && has_features;
      } else {
        b[s] = divide(row, p.positions);
        n[s] = row - b[s] * p.positions;
        is_there[s] = row < p.tiling.rows && has_features;
      }
      batch[s] =
          is_there[s] ? Lanes::read(x_head + b[s] * p.x_strides[0] + n[s] * p.x_strides[2]) : Lanes::minus_infinity();
    }
    if (kIsShared && base == first_batch) token.compute(p.angles, theta, 0, n[0]);
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      A a[kWidth];
      batch[s].unpack(a);
      if constexpr (kKind == LrpeKind::elementwise) activate<T>(p.activation, a);
      if constexpr (kKind == LrpeKind::feature_softmax) feature_softmax<T>(a, p.tiling.lanes());
      if (!is_there[s]) continue;
      if constexpr (kKind == LrpeKind::sequence_softmax) {
        A lse[kWidth];
        load_accumulators<kWidth>(p.lse + (b[s] * p.tiling.heads + head) * p.features + feature, lse);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) a[i] = precise_exponential<T>(a[i] - lse[i]);
      }
      if constexpr (!kIsShared) token.compute(p.angles, theta, b[s], n[s]);
      T* const to = out_head + b[s] * p.out_strides[0] + n[s] * p.out_strides[2];
      A product[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) product[i] = a[i] * token.cosine[i];
      Lanes::write(to, product);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) product[i] = a[i] * token.sine[i];
      Lanes::write(to + sine_half, product);
    }
  }
}

template <typename T, int kWidth, LrpeKind kKind, bool kIsShared, int kSlots>
void launch_encode(const LrpeCosineForwardProblem& problem, const LrpePlan& plan, const void* lse,
                   const ExecutionContext& context) {
  const EncodeArguments<T> arguments{.tiling = plan.tiling,
                                     .batch = problem.shape.batch,
                                     .positions = problem.shape.positions,
                                     .features = problem.shape.features,
                                     .activation = problem.activation,
                                     .x = static_cast<const T*>(problem.x),
                                     .out = static_cast<T*>(problem.out),
                                     .lse = static_cast<const Accumulator<T>*>(lse),
                                     .x_strides = problem.x_strides,
                                     .out_strides = problem.out_strides,
                                     .angles = problem.angles};
  launch(kOp, encode<T, kWidth, kKind, kIsShared, kSlots>,
         {.blocks = std::int64_t{plan.tiling.heads} * plan.tiling.row_blocks,
          .blocks_y = std::int64_t{plan.tiling.chunks} * lane_groups(plan.tiling),
          .threads = kLrpeThreads,
          .starts_before_previous_ends = kKind == LrpeKind::sequence_softmax && plan.has_dependent_launch,
          .stream = context.stream},
         arguments);
}

template <typename T>
void forward(const LrpeCosineForwardProblem& problem, const ExecutionContext& context) {
  const LrpePlan plan = plan_forward(problem);
  if (plan.has_long_rows) return encode_long_rows<T>(kOp, problem, context.stream);
  const void* lse = nullptr;
  if (plan.kind == LrpeKind::sequence_softmax) {
    const LrpeScratch scratch(context.workspace, problem.shape, problem.dtype);
    lse = problem.lse != nullptr ? problem.lse : scratch.columns;
    reduce_sequence<T>(kOp, problem, plan, scratch, const_cast<void*>(lse), context.stream);
    if (problem.shape.positions == 0) return;
  }
  dispatch_plan<T>(plan, [&]<int kWidth, LrpeKind kKind, bool kIsShared>() {
    launch_encode<T, kWidth, kKind, kIsShared, lrpe_slots(kIsShared)>(problem, plan, lse, context);
  });
}

}  // namespace

std::size_t lrpe_cosine_forward_workspace_bytes(const LrpeCosineForwardProblem& problem) {
  return plan_forward(problem).workspace_bytes;
}

void lrpe_cosine_forward(const LrpeCosineForwardProblem& problem, const ExecutionContext& context) {
  const DeviceGuard guard(problem.device);
  dispatch_floating_point(problem.dtype, [&]<typename T>() { forward<T>(problem, context); });
}

}  // namespace eaves::cuda
