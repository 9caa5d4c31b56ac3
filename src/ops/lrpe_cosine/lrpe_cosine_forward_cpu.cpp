// The forward of lrpe_cosine on the CPU: tiles (lrpe_cosine_tiles.h) are read once and written twice, times the cosines
// and times the sines. The statistics of a softmax over the sequence are computed first.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/lrpe_cosine/lrpe_cosine_forward_cpu.cpp"
#include <hwy/foreach_target.h>  // first: compiles this file once per level of vector instructions
//
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "ops/lrpe_cosine/lrpe_cosine_tiles.h"

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {
namespace {

template <typename T>
struct ForwardTensors {
  Activation activation;
  InputTensor<T> x;
  OutputTensor<T> out;
};

/// Encodes a row of `count` contiguous features.
template <LrpeKind kKind, typename T>
HWY_INLINE void encode_row(Activation activation, bool is_past_caches, const T* x, std::int64_t count,
                           const AngleRow<Accumulator<T>>& angles, const Normalizer<Accumulator<T>>& row,
                           const Normalizers<Accumulator<T>>& columns, T* cosine_half, T* sine_half) {
  const Tag<T> d;
  const auto lanes = hn::Lanes(d);
  const auto step = static_cast<std::int64_t>(pack_size<T>());
  for (std::int64_t i = 0; i < count; i += step) {
    const std::int64_t n = count - i;
    Pack<T> a = load_some(x + i, n, T{});
    const Pack<T> shift = spread<kKind, T>(row.shift, columns.shift, i);
    const Pack<T> scale = spread<kKind, T>(row.scale, columns.scale, i);
    a = {activated<kKind, T>(activation, a.v0, shift.v0, scale.v0),
         activated<kKind, T>(activation, a.v1, shift.v1, scale.v1),
         activated<kKind, T>(activation, a.v2, shift.v2, scale.v2),
         activated<kKind, T>(activation, a.v3, shift.v3, scale.v3)};
    const auto times = [&](const Accumulator<T>* table) HWY_ATTR -> Pack<T> {
      return {hn::Mul(a.v0, hn::Load(d, table)), hn::Mul(a.v1, hn::Load(d, table + lanes)),
              hn::Mul(a.v2, hn::Load(d, table + 2 * lanes)), hn::Mul(a.v3, hn::Load(d, table + 3 * lanes))};
    };
    store_result(is_past_caches, times(angles.cosine + i), cosine_half + i, n);
    store_result(is_past_caches, times(angles.sine + i), sine_half + i, n);
  }
}

/// Encodes rows of unit stride that fit one chunk; the loop only advances pointers.
template <LrpeKind kKind, typename T>
void encode_rows(const ForwardTensors<T>& tensors, std::int64_t features, const TokenTile& tile, const TokenTile& next,
                 const Normalizers<Accumulator<T>>& columns, AngleTable<T>& table) {
  const T* x = tensors.x.at(tile, tile.begin, 0);
  const T* ahead = tensors.x.at(next, tile.begin, 0);
  T* out = tensors.out.at(tile, tile.begin, 0);
  AngleRow<Accumulator<T>> angles = table.row(tile.begin, 0);
  const std::int64_t width = table.width();
  for (std::int64_t n = tile.begin; n < tile.end; ++n) {
    Normalizer<Accumulator<T>> row;
    if constexpr (kKind == LrpeKind::feature_softmax) {
      row = normalizer_of_row<T>(features, [&](std::int64_t first, std::int64_t) { return x + first; });
    }
    if (tensors.out.is_past_caches) {
      // Prefetches the same row of the next batch entry: it is too far away for the hardware prefetcher.
      fetch_ahead(ahead, features);
    }
    encode_row<kKind>(tensors.activation, tensors.out.is_past_caches, x, features, angles, row, columns, out,
                      out + features);
    x += tensors.x.strides[2];
    ahead += tensors.x.strides[2];
    out += tensors.out.strides[2];
    angles.cosine += width;
    angles.sine += width;
  }
}

template <LrpeKind kKind, typename T>
void encode_tile(const ForwardTensors<T>& tensors, std::int64_t features, const TokenTile& tile, const TokenTile& next,
                 const Normalizers<Accumulator<T>>& columns, AngleTable<T>& table) {
  using A = Accumulator<T>;
  if (tensors.x.strides[3] == 1 && tensors.out.strides[3] == 1 && features <= kTableElements) {
    return encode_rows<kKind>(tensors, features, tile, next, columns, table);
  }
  RowBuffer<T> x_buffer, cosine_buffer, sine_buffer;
  for (std::int64_t n = tile.begin; n < tile.end; ++n) {
    const auto fetch = [&](std::int64_t first, std::int64_t count) {
      return tensors.x.row(tile, n, first, count, x_buffer.elements);
    };
    Normalizer<A> row;
    if constexpr (kKind == LrpeKind::feature_softmax) row = normalizer_of_row<T>(features, fetch);
    for (std::int64_t first = 0; first < features; first += kTableElements) {
      const std::int64_t count = std::min(kTableElements, features - first);
      const Normalizers<A> chunk = columns.from(first);
      T* cosine_half = tensors.out.row(tile, n, first, cosine_buffer.elements);
      T* sine_half = tensors.out.row(tile, n, features + first, sine_buffer.elements);
      encode_row<kKind>(tensors.activation, false, fetch(first, count), count, table.row(n, first), row, chunk,
                        cosine_half, sine_half);
      tensors.out.finish(tile, n, first, count, cosine_half);
      tensors.out.finish(tile, n, features + first, count, sine_half);
    }
  }
}

/// Shift and scale of every softmax over the sequence, [B * H, features rounded up to packs] each.
template <typename A>
struct SequenceNormalizers {
  std::int64_t width;
  std::vector<A> shift, scale;

  SequenceNormalizers(std::int64_t heads, std::int64_t width)
      : width(width), shift(static_cast<std::size_t>(heads * width)), scale(shift.size()) {}
};

/// A logsumexp as a number `high` and its rounding error `low`. If `high` is infinite, `low` is inf - inf, a NaN.
template <typename A>
struct SplitLse {
  A high, low;

  explicit SplitLse(const RowState& state) {
    const double anchor = softmax_anchor(state.max);
    const double log_sum = std::log(state.sum);
    const double total = anchor + log_sum;
    const double added = total - anchor;
    const double lost = (anchor - (total - added)) + (log_sum - added);  // exactly: TwoSum
    high = static_cast<A>(total);
    low = static_cast<A>((total - static_cast<double>(high)) + lost);
  }
};

/// Computes the normalizers, and writes the lse if the caller wants it.
template <typename T>
void reduce_sequences(const LrpeCosineForwardProblem& problem, const ExecutionContext& context,
                      SequenceNormalizers<Accumulator<T>>& normalizers) {
  using A = Accumulator<T>;
  const LrpeCosineShape& shape = problem.shape;
  const LrpeCosineStrides& s = problem.x_strides;
  AxisSet sequence;
  sequence.contains[2] = true;
  const Dims x_strides{s[0], s[1], s[2], s[3]};
  const Dims normalizer_strides{shape.heads * normalizers.width, normalizers.width, 0, 1};
  const Dims lse_strides{2 * shape.heads * shape.features, 2 * shape.features, 0, 1};
  const auto view = make_row_view<2, 4>(Dims{shape.batch, shape.heads, shape.positions, shape.features}, sequence,
                                        {x_strides, x_strides, normalizer_strides, lse_strides});
  const auto store = [&](std::int64_t row, const RowState& state) {
    const auto offsets = view.rows.offsets(row);
    const Normalizer<A> normalizer = normalizer_of<A>(state);
    normalizers.shift[static_cast<std::size_t>(offsets.of[2])] = normalizer.shift;
    normalizers.scale[static_cast<std::size_t>(offsets.of[2])] = normalizer.scale;
    if (problem.lse == nullptr) return;
    const SplitLse<A> lse(state);
    A* const high = static_cast<A*>(problem.lse) + offsets.of[3];
    high[0] = lse.high;
    high[shape.features] = lse.low;
  };
  reduce_softmax<T>(view, {static_cast<const T*>(problem.x), 0}, context, row_by_row(store));
}

template <typename T>
void forward_of(const LrpeCosineForwardProblem& problem, const ExecutionContext& context) {
  using A = Accumulator<T>;
  const LrpeCosineShape& shape = problem.shape;
  if (shape.positions == 0) {  // an empty problem has only the lse to write
    A* lse = static_cast<A*>(problem.lse);
    for (std::int64_t head = 0; head < shape.batch * shape.heads; ++head) {
      lse = std::fill_n(lse, shape.features, -infinity<A>());
      lse = std::fill_n(lse, shape.features, nan_of<A>());
    }
    return;
  }
  const bool is_over_sequence = problem.kind == LrpeKind::sequence_softmax;
  const Tasks tasks = Tasks::make<T>(shape, problem.x_strides, problem.angles, SumsOverTiles::none);
  SequenceNormalizers<A> normalizers(is_over_sequence ? shape.batch * shape.heads : 0, tasks.row_features);
  if (is_over_sequence) reduce_sequences<T>(problem, context, normalizers);

  const ForwardTensors<T> tensors{problem.activation,
                                  {static_cast<const T*>(problem.x), problem.x_strides},
                                  {problem.out, problem.out_strides, shape, 2}};
  const auto encode = problem.kind == LrpeKind::feature_softmax ? encode_tile<LrpeKind::feature_softmax, T>
                      : is_over_sequence                        ? encode_tile<LrpeKind::sequence_softmax, T>
                                                                : encode_tile<LrpeKind::elementwise, T>;
  // Prefetches out and not x, which is half as long: prefetching x makes all float32 rows slower.
  const auto ahead = [&](const TokenTile& tile, std::int64_t n) {
    const bool is_in_caches = tensors.out.strides[3] == 1 && !tensors.out.is_past_caches;
    if (is_in_caches) fetch_ahead(tensors.out.at(tile, n, 0), 2 * shape.features);
  };
  for_each_tile<T>(tasks, problem.angles, false, context, ahead,
                   [&](std::int64_t, const Task&, const TokenTile& tile, const TokenTile& next, AngleTable<T>& table) {
                     Normalizers<A> columns;
                     if (is_over_sequence) {
                       const std::int64_t at = (tile.batch * shape.heads + tile.head) * normalizers.width;
                       columns = {.shift = normalizers.shift.data() + at, .scale = normalizers.scale.data() + at};
                     }
                     encode(tensors, shape.features, tile, next, columns, table);
                   });
}

}  // namespace

void forward(const LrpeCosineForwardProblem& problem, const ExecutionContext& context) {
  dispatch_floating_point(problem.dtype, [&]<typename T>() { forward_of<T>(problem, context); });
}

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eaves::cpu {
namespace {
HWY_EXPORT(forward);
}  // namespace

void lrpe_cosine_forward(const LrpeCosineForwardProblem& problem, const ExecutionContext& context) {
  HWY_DYNAMIC_DISPATCH(forward)(problem, context);
}

}  // namespace eaves::cpu
#endif  // HWY_ONCE
