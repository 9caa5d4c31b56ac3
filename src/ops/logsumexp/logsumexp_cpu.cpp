// logsumexp on the CPU: rows in parallel, vectors along a row (cpu/softmax.h), or across rows where they lie side by
// side (cpu/columns.h). What is here is the problem: where its tensors are, and what is written for a row.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/logsumexp/logsumexp_cpu.cpp"
#include <hwy/foreach_target.h>  // first: compiles this file once per level of vector instructions
//
#include <hwy/cache_control.h>

#include <algorithm>

#include "core/dispatch.h"
#include "core/softmax_state.h"
#include "cpu/cache.h"
#include "cpu/columns.h"
#include "cpu/gather.h"
#include "cpu/parallel.h"
#include "cpu/row_pieces.h"
#include "cpu/simd.h"
#include "cpu/softmax.h"
#include "ops/logsumexp/logsumexp_backend.h"

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {
namespace {

using namespace logsumexp_tensors;

// ---------------------------------------------------------------------------------------------------------- forward

template <typename T>
RowState reduce_piece(const LogsumexpForwardProblem& problem, const ColumnPiece& piece) {
  const T* x = static_cast<const T*>(problem.x) + problem.view.rows.offsets(piece.group).of[kX];
  if constexpr (kIsFloatingPoint<T>) {
    if (problem.view.layout == RowLayout::contiguous) {
      return reduce_columns<T>(piece.begin, piece.end, [x](std::int64_t column, std::int64_t) { return x + column; });
    }
  }
  Gather<T> gather(problem.view.columns, x, kX);
  return reduce_columns<Accumulator<T>>(piece.begin, piece.end, gather);
}

/// Writes the result of a row.
void store(const LogsumexpForwardProblem& problem, std::int64_t row, const RowState& state) {
  const auto offsets = problem.view.rows.offsets(row);
  const double lse = state.lse();
  if (problem.x_dtype == DType::float64) {
    if (problem.lse != nullptr) static_cast<double*>(problem.lse)[offsets.of[kLse]] = lse;
  } else if (problem.lse != nullptr) {
    static_cast<float*>(problem.lse)[offsets.of[kLse]] = static_cast<float>(lse);
  }
  if (problem.out == nullptr) return;
  dispatch_floating_point(problem.out_dtype, [&]<typename Out>() {
    static_cast<Out*>(problem.out)[offsets.of[kOut]] = round_to<Out>(lse);
  });
}

template <typename T>
void forward_rows(const LogsumexpForwardProblem& problem, const ExecutionContext& context) {
  const ColumnPieces pieces(problem.view.column_count, problem.view.row_count, 1);
  reduce_pieces<RowState, 1>(
      pieces, context, [&](const ColumnPiece& piece, RowState* state) { *state = reduce_piece<T>(problem, piece); },
      [&](std::int64_t row, const RowState* state) { store(problem, row, *state); });
}

template <typename T>
void forward_tiles(const LogsumexpForwardProblem& problem, const ExecutionContext& context) {
  const RowView& view = problem.view;
  const Tiles<T> tiles(view);
  const std::int64_t stride = view.columns.strides[kX][0];
  const auto reduce = [&](const ColumnPiece& piece, RowState* states) {
    const T* x = static_cast<const T*>(problem.x) + view.rows.offsets(tiles.first_row(piece.group)).of[kX];
    reduce_tile(x + piece.begin * stride, stride, piece.end - piece.begin, tiles.width(piece.group), states);
  };
  const auto store_tile = [&](std::int64_t tile, const RowState* states) {
    for (std::int64_t i = 0; i < tiles.width(tile); ++i) store(problem, tiles.first_row(tile) + i, states[i]);
  };
  reduce_pieces<RowState, Tiles<T>::kWidth>(tiles.pieces(view.column_count), context, reduce, store_tile);
}

// --------------------------------------------------------------------------------------------------------- backward

template <typename A>
struct RowScalars {
  A lse;
  A grad_out;
};

template <typename T>
RowScalars<Accumulator<T>> load_scalars(const LogsumexpBackwardProblem& problem, std::int64_t row) {
  using A = Accumulator<T>;
  const auto offsets = problem.view.rows.offsets(row);
  RowScalars<A> scalars{static_cast<const A*>(problem.lse)[offsets.of[kLse]], A(0)};
  if (problem.grad_out_dtype == kDTypeOf<T>) {
    scalars.grad_out = load_as_accumulator(static_cast<const T*>(problem.grad_out)[offsets.of[kGradOut]]);
  } else {
    scalars.grad_out = static_cast<A>(static_cast<const float*>(problem.grad_out)[offsets.of[kGradOut]]);
  }
  // A row of nothing but -inf: its gradient is 0, and x - inf makes it so.
  if (scalars.lse == -infinity<A>()) scalars = {infinity<A>(), A(0)};
  return scalars;
}

template <typename T>
void backward_strided(const LogsumexpBackwardProblem& problem, const T* x, T* grad_x, const ColumnPiece& piece,
                      const RowScalars<Accumulator<T>>& scalars) {
  using A = Accumulator<T>;
  const StridedLoop<2>& columns = problem.view.columns;
  const std::int64_t block = block_size<A>();
  Gather<T> gather(columns, x, kX);
  Block<A> result;
  for (std::int64_t column = piece.begin; column < piece.end; column += block) {
    const std::int64_t count = std::min(block, piece.end - column);
    write_scaled_softmax<false>(gather(column, count), result.elements, count, scalars.lse, scalars.grad_out);
    scatter(result.elements, columns, column, count, grad_x, kGradX);
  }
}

template <typename T>
void backward_rows(const LogsumexpBackwardProblem& problem, const ExecutionContext& context) {
  const RowView& view = problem.view;
  const ColumnPieces pieces(view.column_count, view.row_count, 1);
  const auto bytes = static_cast<std::size_t>(view.row_count * view.column_count) * sizeof(T);
  constexpr std::int64_t kLongEnough = 1024 / sizeof(T);  // a row's ends are stored the ordinary way
  const bool is_non_temporal = is_beyond_caches(bytes) && view.column_count >= kLongEnough;
  parallel_for(context, pieces.tasks(), pieces.grain(), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t task = begin; task < end; ++task) {
      const ColumnPiece piece = pieces[task];
      const auto offsets = view.rows.offsets(piece.group);
      const T* x = static_cast<const T*>(problem.x) + offsets.of[kX];
      T* grad_x = static_cast<T*>(problem.grad_x) + offsets.of[kGradX];
      const auto scalars = load_scalars<T>(problem, piece.group);
      if (view.layout != RowLayout::contiguous) {
        backward_strided(problem, x, grad_x, piece, scalars);
        continue;
      }
      const auto write = is_non_temporal ? write_scaled_softmax<true, T> : write_scaled_softmax<false, T>;
      write(x + piece.begin, grad_x + piece.begin, piece.end - piece.begin, scalars.lse, scalars.grad_out);
    }
    if (is_non_temporal) hwy::FlushStream();
  });
}

template <typename T>
void backward_tiles(const LogsumexpBackwardProblem& problem, const ExecutionContext& context) {
  using A = Accumulator<T>;
  const RowView& view = problem.view;
  const Tiles<T> tiles(view);
  const ColumnPieces pieces = tiles.pieces(view.column_count);
  const auto pack = static_cast<std::int64_t>(pack_size<T>());
  parallel_for(context, pieces.tasks(), pieces.grain(), [&](std::int64_t begin, std::int64_t end) {
    const Tag<T> d;
    const auto lanes = hn::Lanes(d);
    HWY_ALIGN A lse[Tiles<T>::kWidth];
    HWY_ALIGN A grad_out[Tiles<T>::kWidth];
    for (std::int64_t task = begin; task < end; ++task) {
      const ColumnPiece piece = pieces[task];
      const std::int64_t first_row = tiles.first_row(piece.group);
      const std::int64_t width = tiles.width(piece.group);
      for (std::int64_t i = 0; i < ceil_divide(width, pack) * pack; ++i) {
        const std::int64_t row = std::min(element_of<T>(i), width - 1);  // lanes beyond the tile: any row of it
        const auto scalars = load_scalars<T>(problem, first_row + row);
        lse[i] = scalars.lse;
        grad_out[i] = scalars.grad_out;
      }
      const auto offsets = view.rows.offsets(first_row);
      for (std::int64_t column = piece.begin; column < piece.end; ++column) {
        const T* x = static_cast<const T*>(problem.x) + offsets.of[kX] + column * view.columns.strides[kX][0];
        T* grad_x = static_cast<T*>(problem.grad_x) + offsets.of[kGradX] + column * view.columns.strides[kGradX][0];
        for (std::int64_t row = 0; row < width; row += pack) {
          const Pack<T> v = load_some(x + row, width - row, T{});
          const auto map = [&](std::size_t vector, VectorOf<T> value) HWY_ATTR {
            const std::size_t at = static_cast<std::size_t>(row) + vector * lanes;
            return scaled_softmax<T>(value, hn::Load(d, lse + at), hn::Load(d, grad_out + at));
          };
          store_some(Pack<T>{map(0, v.v0), map(1, v.v1), map(2, v.v2), map(3, v.v3)}, grad_x + row, width - row);
        }
      }
    }
  });
}

}  // namespace

void forward(const LogsumexpForwardProblem& problem, const ExecutionContext& context) {
  dispatch_any(problem.x_dtype, [&]<typename T>() {
    if constexpr (kIsFloatingPoint<T>) {
      if (Tiles<T>::fit(problem.view)) return forward_tiles<T>(problem, context);
    }
    forward_rows<T>(problem, context);
  });
}

void backward(const LogsumexpBackwardProblem& problem, const ExecutionContext& context) {
  dispatch_floating_point(problem.x_dtype, [&]<typename T>() {
    if (Tiles<T>::fit(problem.view)) return backward_tiles<T>(problem, context);
    backward_rows<T>(problem, context);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eaves::cpu {
namespace {
HWY_EXPORT(forward);
HWY_EXPORT(backward);
}  // namespace

void logsumexp_forward(const LogsumexpForwardProblem& problem, const ExecutionContext& context) {
  HWY_DYNAMIC_DISPATCH(forward)(problem, context);
}

void logsumexp_backward(const LogsumexpBackwardProblem& problem, const ExecutionContext& context) {
  HWY_DYNAMIC_DISPATCH(backward)(problem, context);
}

}  // namespace eaves::cpu
#endif  // HWY_ONCE
