// The forward of lrpe_cosine on a GPU: one kernel for rows of whole vectors, which reads x and writes both halves of
// out, and one kernel for all other rows (lrpe_cosine_row_per_warp.cuh). The column statistics of a softmax over the
// sequence are computed first (lrpe_cosine_columns.cuh).
#include "core/dispatch.h"
#include "ops/lrpe_cosine/lrpe_cosine_columns.cuh"
#include "ops/lrpe_cosine/lrpe_cosine_device.cuh"
#include "ops/lrpe_cosine/lrpe_cosine_plan.h"
#include "ops/lrpe_cosine/lrpe_cosine_row_per_warp.cuh"

namespace eaves::cuda {
namespace {

constexpr const char* kOp = "lrpe_cosine_forward";

template <typename T>
struct EncodeArguments {
  LrpeTiling tiling;
  std::int64_t batch;
  std::int64_t positions;
  std::int64_t features;
  Activation activation;
  const T* x;
  T* out;
  const Accumulator<T>* lse;  ///< [B, H, 2, D]
  LrpeCosineStrides x_strides;
  LrpeCosineStrides out_strides;
  LrpeCosineAngles angles;
};

/// A thread loads several vectors before it uses the first: with shared angles of kLrpeSlots batch entries, otherwise
/// of kLrpeTokens tokens.
template <typename T, LrpeKind kKind, bool kIsShared>
__global__ void __launch_bounds__(kLrpeThreads, !kIsShared                            ? 6
                                                : kKind == LrpeKind::sequence_softmax ? 5
                                                                                      : 1)
    encode(const __grid_constant__ EncodeArguments<T> p) {
  using A = Accumulator<T>;
  constexpr int kWidth = kLrpeVectorWidth<T>;
  using Lanes = Side<T, kWidth>;
  let_next_kernel_start();
  const LrpePlace place = find_place(p.tiling);
  const bool has_features = place.vector < p.tiling.vectors;
  const std::int64_t head = place.head;
  const std::int64_t feature = has_features ? std::int64_t{place.vector} * kWidth : 0;
  const std::int64_t block_rows = p.tiling.block_rows();
  const std::int64_t first_row =
      std::int64_t{place.row_block} * p.tiling.steps * (kIsShared ? 1 : kLrpeTokens) * block_rows + place.row;
  // A softmax over the features reduces over the warp: all its lanes go on, with -inf for missing features.
  if (kKind != LrpeKind::feature_softmax && (!has_features || first_row >= p.tiling.rows)) return;
  const T* const x_head = p.x + head * p.x_strides[1] + feature * p.x_strides[3];
  T* const out_head = p.out + head * p.out_strides[1] + feature * p.out_strides[3];
  const std::int64_t sine_half = p.features * p.out_strides[3];

  const auto read = [&](bool is_there, std::int64_t offset) {
    return is_there ? Lanes::read(x_head + offset) : Lanes::minus_infinity();
  };
  TokenAngles<T, kWidth> token;
  const auto write = [&](const Lanes& x, bool is_there, std::int64_t b, std::int64_t offset, auto prepare_angles) {
    A a[kWidth];
    x.unpack(a);
    if constexpr (kKind == LrpeKind::elementwise) activate<T>(p.activation, a);
    if constexpr (kKind == LrpeKind::feature_softmax) feature_softmax<T>(a, p.tiling.lanes());
    if (!is_there) return;
    prepare_angles();
    if constexpr (kKind == LrpeKind::sequence_softmax) {
      const ColumnLse<A, kWidth> lse(p.lse, b * p.tiling.heads + head, feature, p.features);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) a[i] = precise_exponential<T>(lse.log_softmax(a[i], i));
    }
    T* const to = out_head + offset;
    A product[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) product[i] = a[i] * token.cosine[i];
    Lanes::write(to, product);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) product[i] = a[i] * token.sine[i];
    Lanes::write(to + sine_half, product);
  };

  if constexpr (kKind == LrpeKind::sequence_softmax) wait_for_previous_kernel();
  if constexpr (kIsShared) {
    const std::int64_t first_batch = place.chunk * p.tiling.chunk;
    const std::int64_t last_batch = min(first_batch + p.tiling.chunk, p.batch);
    const bool has_row = has_features && first_row < p.tiling.rows;
    const std::int64_t x_row = first_row * p.x_strides[2];
    const std::int64_t out_row = first_row * p.out_strides[2];
    Lanes batch[kLrpeSlots];
    const auto read_slots = [&](std::int64_t base) {
#pragma unroll
      for (int s = 0; s < kLrpeSlots; ++s) {
        batch[s] = read(has_row && base + s < last_batch, x_row + (base + s) * p.x_strides[0]);
      }
    };
    read_slots(first_batch);  // in flight while the angles are computed
    if (has_row) token.compute(p.angles, FeatureAngles<T, kWidth>(p.angles, head, feature), 0, first_row);
    for (std::int64_t base = first_batch; base < last_batch; base += kLrpeSlots) {
      if (base != first_batch) read_slots(base);
#pragma unroll
      for (int s = 0; s < kLrpeSlots; ++s) {
        write(batch[s], has_row && base + s < last_batch, base + s, out_row + (base + s) * p.out_strides[0], [] {});
      }
    }
  } else {
    const LrpeCosineStrides* const strides[] = {&p.x_strides, &p.out_strides};
    LrpeToken<2> next(first_row, p.positions, strides);
    const FeatureAngles<T, kWidth> theta(p.angles, head, feature);
    for (std::uint32_t step = 0; step < p.tiling.steps; ++step) {
      std::int64_t b[kLrpeTokens], n[kLrpeTokens], offset[kLrpeTokens];
      bool is_there[kLrpeTokens];
      Lanes x[kLrpeTokens];
#pragma unroll
      for (int s = 0; s < kLrpeTokens; ++s) {
        is_there[s] = has_features && next.row < p.tiling.rows;
        x[s] = read(is_there[s], next.offsets[0]);
        b[s] = next.batch, n[s] = next.n, offset[s] = next.offsets[1];
        next.advance(block_rows, p.positions, strides);
      }
#pragma unroll
      for (int s = 0; s < kLrpeTokens; ++s) {
        write(x[s], is_there[s], b[s], offset[s], [&] { token.compute(p.angles, theta, b[s], n[s]); });
      }
    }
  }
}

template <typename T>
EncodeArguments<T> make_arguments(const LrpeCosineForwardProblem& problem, const LrpePlan& plan, const void* lse) {
  return {.tiling = plan.tiling,
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
}

template <typename T>
void forward(const LrpeCosineForwardProblem& problem, const ExecutionContext& context) {
  const LrpePlan plan = plan_forward(kOp, problem);
  void* lse = nullptr;
  if (plan.kind == LrpeKind::sequence_softmax) {
    const LrpeScratch scratch(context.workspace, plan);
    lse = problem.lse != nullptr ? problem.lse : scratch.columns;
    reduce_sequence<T>(kOp, problem, plan, scratch, lse, context.stream);
    if (problem.shape.positions == 0) return;
  }
  if (plan.has_row_per_warp) return encode_rows<T>(kOp, problem, lse, context.stream);
  if constexpr (kLrpeVectorWidth < T >> 1) {
    dispatch_plan(plan, [&]<LrpeKind kKind, bool kIsShared>() {
      launch(kOp, encode<T, kKind, kIsShared>,
             {.blocks = blocks_of(plan.tiling),
              .blocks_y = plan.tiling.chunks,
              .threads = kLrpeThreads,
              .starts_before_previous_ends = kKind == LrpeKind::sequence_softmax && plan.has_dependent_launch,
              .stream = context.stream},
             make_arguments<T>(problem, plan, lse));
    });
  }
}

}  // namespace

std::size_t lrpe_cosine_forward_workspace_bytes(const LrpeCosineForwardProblem& problem) {
  return plan_forward(kOp, problem).workspace_bytes;
}

void lrpe_cosine_forward(const LrpeCosineForwardProblem& problem, const ExecutionContext& context) {
  const DeviceGuard guard(problem.device);
  dispatch_floating_point(problem.dtype, [&]<typename T>() { forward<T>(problem, context); });
}

}  // namespace eaves::cuda
