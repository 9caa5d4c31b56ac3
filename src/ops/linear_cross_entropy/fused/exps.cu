// The last steps of a chunk with exps (fused.h): gradients from the products with E.
#include <type_traits>

#include "cuda/softmax.cuh"
#include "ops/linear_cross_entropy/fused/rows.cuh"
#include "ops/linear_cross_entropy/linear_cross_entropy_rows.cuh"

namespace eaves::cuda {
namespace {

/// The share of one shard in the softmax's sum over all shards.
__device__ float share_of(const SoftmaxState<float>& own, const SoftmaxState<float>& all) {
  if (all.max == infinity<float>()) return own.max == infinity<float>() ? 1.0f : 0.0f;
  if (all.max == -infinity<float>()) return nan_of<float>();
  return own.sum == 0.0f ? 0.0f : exponential(softmax_anchor(own.max) - all.max) * (own.sum / all.sum);
}

/// One thread per row: row_factor and target_gradient, from the statistics of all shards.
__global__ void __launch_bounds__(kThreads)
    finish_exps_of_shard(const __grid_constant__ GradientOfRows rows, std::int64_t count, const float* statistics,
                         const float* gathered, std::int64_t shards) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const auto softmax_at = [&](const float* of) {
    return stored_statistics<float>(of + i * kCrossEntropyStatistics).softmax;
  };
  SoftmaxState<float> all;
  for (std::int64_t shard = 0; shard < shards; ++shard) {
    all = MergeSoftmax{}(all, softmax_at(gathered + shard * count * kCrossEntropyStatistics));
  }
  const RowGradient<float> gradient = rows.row(i, split_lse(softmax_anchor(all.max), logf(all.sum)));
  const bool is_nothing = gradient.softmax_factor == 0.0f && gradient.target_factor == 0.0f;
  rows.memory.row_factor[i] *= is_nothing ? 0.0f : gradient.softmax_factor * share_of(softmax_at(statistics), all);
  const bool has_target = !is_nothing && rows.targets.column(i) >= 0;
  const float z = has_target ? rows.memory.target_logit[i] : 0.0f;
  const float distance = gradient.log_probability(rows.transform.value(z));
  rows.memory.target_gradient[i] = has_target ? rows.of_target(z, distance, gradient) : 0.0f;
}

/// The inputs that turn a row of E W into a row of dX: f, g and the target's row of the head.
struct RowsOfExps {
  const float* factor;
  const float* target_gradient;
  const std::int32_t* target;
  const bfloat16* head;
  std::int64_t stride;

  explicit RowsOfExps(const FusedRows& rows)
      : factor(rows.memory.row_factor),
        target_gradient(rows.memory.target_gradient),
        target(rows.memory.target),
        head(static_cast<const bfloat16*>(rows.head.data)),
        stride(rows.head.stride) {}
};

/// One block per row. D is bfloat16, or float for a shard.
template <typename D>
__global__ void __launch_bounds__(kThreads)
    write_grad_hidden(const __grid_constant__ FeatureRows rows, const float* from, D* grad_hidden,
                      const __grid_constant__ RowsOfExps exps) {
  const std::int64_t features = rows.view.column_count;
  const std::int64_t i = blockIdx.x;
  const float factor = exps.factor[i];
  const float of_target = exps.target_gradient[i];
  const bfloat16* head = exps.head + max(exps.target[i], 0) * exps.stride;
  D* into = grad_hidden + rows.view.rows.offsets(rows.row(i)).of[kGradHidden];
  const auto gradient_of = [&](float product, float of_head) {
    const float gradient = factor == 0.0f ? 0.0f : factor * product;
    return of_target == 0.0f ? gradient : fmaf(of_target, of_head, gradient);
  };
  const bool has_unit_stride = rows.view.columns.rank == 1 && rows.view.columns.strides[kGradHidden][0] == 1;
  if (has_unit_stride && reinterpret_cast<std::uint64_t>(into) % 16 == 0) {
    constexpr int kSize = Vector<bfloat16>::kSize;  // features is a multiple of it: cuda/exp_product.h
    for (std::int64_t f = std::int64_t{threadIdx.x} * kSize; f < features; f += kThreads * kSize) {
      const auto* products = reinterpret_cast<const float4*>(from + i * features + f);
      const float4 low = products[0], high = products[1];
      const float of_products[kSize] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      float values[kSize];
      unpack(*reinterpret_cast<const Vector<bfloat16>*>(head + f), values);
#pragma unroll
      for (int k = 0; k < kSize; ++k) values[k] = gradient_of(of_products[k], values[k]);
      if constexpr (std::is_same_v<D, bfloat16>) {
        *reinterpret_cast<Vector<bfloat16>*>(into + f) = pack<bfloat16>(values);
      } else {
        auto* vectors = reinterpret_cast<float4*>(into + f);
        vectors[0] = make_float4(values[0], values[1], values[2], values[3]);
        vectors[1] = make_float4(values[4], values[5], values[6], values[7]);
      }
    }
    return;
  }
  for (std::int64_t f = threadIdx.x; f < features; f += kThreads) {
    into[rows.feature(kGradHidden, f)] = round_to<D>(gradient_of(from[i * features + f], load_as_accumulator(head[f])));
  }
}

/// One block per row; rows of hidden start on 16 bytes.
__global__ void __launch_bounds__(kThreads)
    copy_hidden(const bfloat16* hidden, std::int64_t hidden_stride, const float* factor, std::int64_t features,
                bfloat16* to, std::int64_t stride) {
  constexpr int kSize = Vector<bfloat16>::kSize;
  const std::int64_t row = blockIdx.x;
  const float own = factor == nullptr ? 1.0f : factor[row];
  for (std::int64_t i = std::int64_t{threadIdx.x} * kSize; i < features; i += kThreads * kSize) {
    float values[kSize];
    unpack(*reinterpret_cast<const Vector<bfloat16>*>(hidden + row * hidden_stride + i), values);
#pragma unroll
    for (float& value : values)
      value = own == 0.0f ? 0.0f : value * own;  // hidden of a row that does not count may be NaN
    *reinterpret_cast<Vector<bfloat16>*>(to + row * stride + i) = pack<bfloat16>(values);
  }
}

/// Loads kSize elements. With kSize > 1 the address has to be aligned to vectors.
template <int kSize, typename T>
__device__ void load_elements(const T* from, float (&values)[kSize]) {
  if constexpr (kSize == 1) {
    values[0] = load_as_accumulator(*from);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; i += Vector<T>::kSize) {
      float part[Vector<T>::kSize];
      unpack(*reinterpret_cast<const Vector<T>*>(from + i), part);
#pragma unroll
      for (int k = 0; k < Vector<T>::kSize; ++k) values[i + k] = part[k];
    }
  }
}
template <int kSize, typename T>
__device__ void store_elements(const float (&values)[kSize], T* to) {
  if constexpr (kSize == 1) {
    *to = round_to<T>(values[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; i += Vector<T>::kSize) {
      float part[Vector<T>::kSize];
#pragma unroll
      for (int k = 0; k < Vector<T>::kSize; ++k) part[k] = values[i + k];
      *reinterpret_cast<Vector<T>*>(to + i) = pack<T>(part);
    }
  }
}

/// For each class that is a target: adds the sum of target_gradient * hidden over its rows to the class's row of
/// grad_head, and the sum of target_gradient to its element of grad_bias; either may be nullptr. There is a block for
/// each row and each range of features. The blocks of a class's first row do the work; they search for the later rows
/// of the class only if has_more_rows is set.
template <typename G, int kSize>
__global__ void __launch_bounds__(kThreads)
    add_targets(const __grid_constant__ FusedMemory memory, std::int64_t rows, const bfloat16* hidden,
                std::int64_t hidden_stride, std::int64_t features, G* grad_head, std::int64_t stride,
                double* grad_bias) {
  const std::int64_t first = blockIdx.x;
  const std::int32_t own = memory.target[first];
  if (own < 0 || first_row_of(memory, own) != first) return;
  const std::int64_t i = (std::int64_t{blockIdx.y} * kThreads + threadIdx.x) * kSize;
  const bool has_features = grad_head != nullptr && i < features;
  const bool has_bias = grad_bias != nullptr && blockIdx.y == 0 && threadIdx.x == 0;
  G* to = grad_head + own * stride + i;
  float sums[kSize];
  double bias_sum = 0.0;
  if (has_features) load_elements<kSize>(to, sums);
  const auto add = [&](std::int64_t row) {
    const float gradient = memory.target_gradient[row];
    bias_sum += double(gradient);
    if (!has_features) return;
    float values[kSize];
    load_elements<kSize>(hidden + row * hidden_stride + i, values);
#pragma unroll
    for (int k = 0; k < kSize; ++k) sums[k] = gradient == 0.0f ? sums[k] : fmaf(gradient, values[k], sums[k]);
  };
  add(first);
  constexpr int kPart = 1024;  // rows per step of the search
  constexpr int kRounds = kPart / kThreads;
  const auto warp = static_cast<int>(threadIdx.x) / 32;
  const auto lane = static_cast<int>(threadIdx.x) % 32;
  __shared__ unsigned of_class[kPart / 32];  // one bit per row
  for (std::int64_t begin = memory.has_more_rows[first] != 0 ? first + 1 : rows; begin < rows; begin += kPart) {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const std::int64_t row = begin + round * kThreads + threadIdx.x;
      const unsigned found = __ballot_sync(~0u, row < rows && memory.target[row] == own);
      if (lane == 0) of_class[round * kWarps + warp] = found;
    }
    __syncthreads();
    if (has_features || has_bias) {
      for (int word = 0; word < kPart / 32; ++word) {
        for (unsigned left = of_class[word]; left != 0; left &= left - 1) {
          add(begin + word * 32 + __ffs(static_cast<int>(left)) - 1);
        }
      }
    }
    __syncthreads();
  }
  if (has_features) store_elements<kSize>(sums, to);
  if (has_bias) grad_bias[own] += bias_sum;
}

}  // namespace

void finish_exps_of_shard(const FusedRows& rows, const FusedGradient& gradient, const float* statistics,
                          const float* gathered, std::int64_t shards) {
  launch(rows.op, finish_exps_of_shard,
         {.blocks = ceil_divide(rows.rows, kThreads), .threads = kThreads, .stream = rows.context.stream},
         gradient_of(rows, gradient), rows.rows, statistics, gathered, shards);
}

void write_grad_hidden(const FusedRows& rows, const FeatureRows& place, const void* product, void* to, DType dtype) {
  const auto write = [&](auto* grad_hidden) {
    using D = std::remove_pointer_t<decltype(grad_hidden)>;
    launch(rows.op, write_grad_hidden<D>, {.blocks = rows.rows, .threads = kThreads, .stream = rows.context.stream},
           place, static_cast<const float*>(product), grad_hidden, RowsOfExps(rows));
  };
  dtype == DType::bfloat16 ? write(static_cast<bfloat16*>(to)) : write(static_cast<float*>(to));
}

void add_bias_gradient(const FusedRows& rows, const FusedGradient& gradient, bool is_first, double* grad_bias) {
  launch(rows.op, sum_bias_gradient<bfloat16>,
         {.blocks = ceil_divide(rows.classes, kSumLanes),
          .threads = dim3(kSumLanes, kSumRows),
          .stream = rows.context.stream},
         static_cast<const bfloat16*>(gradient.to), rows.rows, rows.classes, gradient.stride,
         static_cast<const float*>(rows.memory.row_factor), static_cast<const float*>(nullptr), is_first, grad_bias);
}

void copy_hidden(const FusedRows& rows, const float* factor, void* to, std::int64_t stride) {
  launch(rows.op, copy_hidden, {.blocks = rows.rows, .threads = kThreads, .stream = rows.context.stream},
         static_cast<const bfloat16*>(rows.hidden.data), rows.hidden.stride, factor, rows.features,
         static_cast<bfloat16*>(to), stride);
}

void add_targets(const FusedRows& rows, void* grad_head, DType dtype, std::int64_t stride, double* grad_bias) {
  const auto add = [&](auto* to) {
    using G = std::remove_pointer_t<decltype(to)>;
    // hidden and features suit vectors already: cuda/exp_product.h.
    const bool suits =
        (reinterpret_cast<std::uintptr_t>(to) | static_cast<std::uintptr_t>(stride) * sizeof(G)) % 16 == 0;
    const int size = suits ? Vector<bfloat16>::kSize : 1;
    launch(rows.op, suits ? add_targets<G, Vector<bfloat16>::kSize> : add_targets<G, 1>,
           {.blocks = rows.rows,
            .blocks_y = grad_head == nullptr ? 1 : ceil_divide(rows.features, std::int64_t{kThreads} * size),
            .threads = kThreads,
            .stream = rows.context.stream},
           rows.memory, rows.rows, static_cast<const bfloat16*>(rows.hidden.data), rows.hidden.stride, rows.features,
           to, stride, grad_bias);
  };
  dtype == DType::bfloat16 ? add(static_cast<bfloat16*>(grad_head)) : add(static_cast<float*>(grad_head));
}

}  // namespace eaves::cuda
