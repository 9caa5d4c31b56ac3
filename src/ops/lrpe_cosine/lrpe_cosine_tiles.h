// The code that forward and backward of lrpe_cosine share on the CPU. Sines and cosines are computed for a tile of
// positions at a time, into tables that stay in L1 or L2; every batch entry with the same angles goes through the tile
// before the next tile begins. Rows without unit stride are copied into contiguous memory first, and the rest of a row
// goes through the loop of whole packs. So each direction has one loop, and the bits of a row depend only on the row
// and its position. Compiled once per level of vector instructions, like cpu/simd.h.
#include <hwy/cache_control.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>

#include "core/dispatch.h"
#include "core/rows.h"
#include "cpu/angle.h"
#include "cpu/cache.h"
#include "cpu/exp.h"
#include "cpu/parallel.h"
#include "cpu/row_softmax.h"
#include "cpu/simd.h"
#include "cpu/softmax.h"
#include "ops/lrpe_cosine/lrpe_cosine_backend.h"

#if defined(EAVES_OPS_LRPE_COSINE_TILES_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EAVES_OPS_LRPE_COSINE_TILES_H_
#undef EAVES_OPS_LRPE_COSINE_TILES_H_
#else
#define EAVES_OPS_LRPE_COSINE_TILES_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {

/// Elements of an angle table, and the most features of a chunk of a row.
constexpr std::int64_t kTableElements = 2048;

/// Elements of a tile if a theta head has one user and no sums are taken. The angles do not wait for memory, the rows
/// do, and the two overlap only in short turns. Zen 4, one thread, batch 1, 12 heads of 256 positions and 128 features,
/// from memory, forward: float32 0.41 ms with 2048, 0.31 with 1024, 0.26 with 512, 0.24 with 256; bfloat16 0.27, 0.24,
/// 0.25 and 0.25.
constexpr std::int64_t kUnsharedElements = 512;

/// The most positions of a tile; rows of few features then leave a part of the table unused.
constexpr std::int64_t kMostTileRows = 64;

template <typename T>
std::int64_t padded_to_packs(std::int64_t count) {
  const auto pack = static_cast<std::int64_t>(pack_size<T>());
  static_assert(kTableElements % kMaxPackSize<T> == 0);
  return ceil_divide(count, pack) * pack;
}

inline std::int64_t product_of(const LrpeCosineShape& shape) {
  return shape.batch * shape.heads * shape.positions * shape.features;
}

// --------------------------------------------------------------------------------------------- division of the work

/// A theta head (all heads if theta has one), some tiles of positions, and some users. The users of a theta head are
/// the rows [batch entry, head] that read it: all batch entries, times all heads if theta has one.
struct Task {
  std::int64_t theta_head;
  std::int64_t tile_range;
  std::int64_t first_tile, end_tile;
  std::int64_t first_user, end_user;
};

/// The sums over tiles: none, one for each task, or one for each user of a task.
enum class SumsOverTiles { none, of_tasks, of_users };

/// The cut of the work into tasks, which depends on the shape only.
struct Tasks {
  LrpeCosineShape shape;
  std::int64_t theta_heads;
  std::int64_t users;         ///< of each theta head
  std::int64_t row_features;  ///< features, rounded up to whole packs
  std::int64_t tile_rows;
  std::int64_t tiles;
  std::int64_t tile_ranges;
  std::int64_t user_ranges;
  /// A token's heads lie side by side in memory, so consecutive tasks take the heads of the same tokens. Zen 4, two
  /// threads, [1, 8192, 12, 128] bfloat16, a theta for each head, forward: 7.5 ms; 10.7 to 14.7 ms if each head walks
  /// over all tokens first.
  bool are_heads_inside;

  /// Positions are cut first, because a task of many users computes each angle table once for all of them. With sums of
  /// users, users are cut first, because every piece of the positions has its own sums.
  template <typename T>
  static Tasks make(const LrpeCosineShape& shape, const LrpeCosineStrides& strides, const LrpeCosineAngles& angles,
                    SumsOverTiles sums) {
    Tasks tasks{.shape = shape, .are_heads_inside = strides[1] < strides[2]};
    tasks.theta_heads = angles.theta_heads == 1 ? 1 : shape.heads;
    tasks.users = shape.batch * (shape.heads / tasks.theta_heads);
    tasks.row_features = padded_to_packs<T>(shape.features);
    const std::int64_t chunk = std::min(tasks.row_features, kTableElements);
    const std::int64_t tile = tasks.users > 1 || sums != SumsOverTiles::none ? kTableElements : kUnsharedElements;
    tasks.tile_rows = std::clamp<std::int64_t>(tile / chunk, 1, kMostTileRows);
    tasks.tiles = ceil_divide(shape.positions, tasks.tile_rows);
    // Four tasks for each thread of a large machine, but at most 8 MiB of float64 sums. A task must not be so small
    // that it computes angles for one batch entry without need.
    constexpr std::int64_t kMostTasks = 512;
    constexpr std::int64_t kMostSums = std::int64_t{1} << 20;
    constexpr std::int64_t kSmallestTask = 32768;  // elements; 10 us of work
    const std::int64_t most = std::clamp<std::int64_t>(
        std::min(kMostSums / tasks.row_features, product_of(shape) / kSmallestTask), 1, kMostTasks);
    const std::int64_t wanted = std::max<std::int64_t>(1, most / tasks.theta_heads);
    const std::int64_t wanted_tiles =
        sums == SumsOverTiles::of_users ? std::max<std::int64_t>(1, wanted / tasks.users) : wanted;
    tasks.tile_ranges = std::min(tasks.tiles, wanted_tiles);
    tasks.user_ranges = std::min(tasks.users, std::max<std::int64_t>(1, wanted / tasks.tile_ranges));
    return tasks;
  }

  std::int64_t count() const { return theta_heads * tile_ranges * user_ranges; }

  std::int64_t grain() const { return grain_for(product_of(shape) / count()); }

  Task operator[](std::int64_t index) const {
    const std::int64_t user_range = index % user_ranges;
    const std::int64_t piece = index / user_ranges;
    const std::int64_t tile_range = are_heads_inside ? piece / theta_heads : piece % tile_ranges;
    // The sizes of any two pieces differ by at most one.
    const auto cut = [](std::int64_t size, std::int64_t pieces, std::int64_t at) {
      return size / pieces * at + std::min(at, size % pieces);
    };
    return {.theta_head = are_heads_inside ? piece % theta_heads : piece / tile_ranges,
            .tile_range = tile_range,
            .first_tile = cut(tiles, tile_ranges, tile_range),
            .end_tile = cut(tiles, tile_ranges, tile_range + 1),
            .first_user = cut(users, user_ranges, user_range),
            .end_user = cut(users, user_ranges, user_range + 1)};
  }
};

/// Some positions of one head of one batch entry.
struct TokenTile {
  std::int64_t batch, head;
  std::int64_t begin, end;
};

// ----------------------------------------------------------------------------------------------------- angle tables

/// A row of a table from a given feature on, in the order of the lanes of packs.
template <typename A>
struct AngleRow {
  const A* cosine;
  const A* sine;
  const A* position;  ///< the positions that theta was multiplied with; nullptr if they are not needed
};

/// The angles of a tile. If a row has more features than a chunk, a tile is one row, and row() computes each chunk on
/// demand.
template <typename T>
class AngleTable {
 public:
  using A = Accumulator<T>;

  AngleTable(const LrpeCosineAngles& angles, const Tasks& tasks, std::int64_t theta_head, bool has_positions)
      : angles_(angles),
        features_(tasks.shape.features),
        width_(std::min(tasks.row_features, kTableElements)),
        is_whole_(tasks.row_features <= kTableElements),
        has_positions_(has_positions),
        theta_head_(theta_head) {
    if (is_whole_) load_theta(0);
  }

  /// Calls `ahead(n)` before the angles of row n are computed.
  template <typename Ahead>
  void set(std::int64_t batch, std::int64_t begin, std::int64_t end, Ahead&& ahead) {
    batch_ = batch;
    begin_ = begin;
    chunk_ = -1;
    if (!is_whole_) return;
    for (std::int64_t n = begin; n < end; ++n) {
      ahead(n);
      compute(n, 0);
    }
  }

  /// Elements from a row to the next.
  std::int64_t width() const { return width_; }

  AngleRow<A> row(std::int64_t n, std::int64_t first_feature) {
    if (!is_whole_ && chunk_ != first_feature) {
      load_theta(first_feature);
      compute(n, first_feature);
      chunk_ = first_feature;
    }
    const std::int64_t at = (n - begin_) * width_;
    return {cosines_ + at, sines_ + at, has_positions_ ? positions_ + at : nullptr};
  }

 private:
  void load_theta(std::int64_t first_feature) {
    const std::int64_t count = std::min(features_ - first_feature, width_);
    std::fill_n(theta_, width_, A(0));
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t axis = angles_.axis_of(first_feature + i);
      if (axis >= angles_.axes) break;
      theta_[i] = angles_.theta_of<T>(theta_head_, angles_.theta_feature_of(first_feature + i, axis));
    }
  }

  /// Not inlined: a compiler may contract a product and a sum in one copy of a loop and not in another.
  HWY_NOINLINE void compute(std::int64_t n, std::int64_t first_feature) {
    const Tag<T> d;
    const auto lanes = hn::Lanes(d);
    const std::int64_t at = (n - begin_) * width_;
    if (!angles_.has_angle(n)) {  // the angle is 0, even if theta is infinite or NaN
      std::fill_n(cosines_ + at, width_, A(1));
      std::fill_n(sines_ + at, width_, A(0));
      if (has_positions_) std::fill_n(positions_ + at, width_, A(0));
      return;
    }
    const std::int64_t count = std::min(features_ - first_feature, width_);
    for (std::int64_t i = 0; i < width_;) {
      const std::int64_t axis = i < count ? angles_.axis_of(first_feature + i) : angles_.axes;
      const std::int64_t end =
          axis < angles_.axes ? std::min((axis + 1) * angles_.axis_features - first_feature, count) : width_;
      const A position = axis < angles_.axes ? static_cast<A>(angles_.position(batch_, n, axis)) : A(0);
      std::fill(element_positions_ + i, element_positions_ + end, position);
      i = end;
    }
    for (std::int64_t i = 0; i < width_; i += static_cast<std::int64_t>(pack_size<T>())) {
      const Pack<T> theta = load_in_order<T>(theta_ + i);
      const Pack<T> position = load_in_order<T>(element_positions_ + i);
      const auto store = [&](std::size_t vector, VectorOf<T> v, VectorOf<T> p) HWY_ATTR {
        const auto place = static_cast<std::size_t>(at + i) + vector * lanes;
        const auto angle = sine_and_cosine(d, hn::Mul(v, p));
        hn::Store(angle.cosine, d, cosines_ + place);
        hn::Store(angle.sine, d, sines_ + place);
        if (has_positions_) hn::Store(p, d, positions_ + place);
      };
      store(0, theta.v0, position.v0);
      store(1, theta.v1, position.v1);
      store(2, theta.v2, position.v2);
      store(3, theta.v3, position.v3);
    }
  }

  const LrpeCosineAngles& angles_;
  std::int64_t features_;
  std::int64_t width_;
  bool is_whole_;
  bool has_positions_;
  std::int64_t theta_head_;
  std::int64_t batch_ = 0;
  std::int64_t begin_ = 0;
  std::int64_t chunk_ = -1;
  HWY_ALIGN A cosines_[kTableElements];
  HWY_ALIGN A sines_[kTableElements];
  HWY_ALIGN A positions_[kTableElements];
  HWY_ALIGN A theta_[kTableElements];  // this and the next in the order of the elements
  HWY_ALIGN A element_positions_[kTableElements];
};

/// Calls `body(index, task, tile, next, table)` for every tile of every user of a task, from many threads. `next` is
/// the tile of the next user, or of the same user if it is the last. Calls `ahead(tile, n)` before the angles of each
/// row n are computed.
template <typename T, typename Ahead, typename Body>
void for_each_tile(const Tasks& tasks, const LrpeCosineAngles& angles, bool has_positions,
                   const ExecutionContext& context, Ahead&& ahead, Body&& body) {
  const std::int64_t heads_of_entry = tasks.shape.heads / tasks.theta_heads;
  const bool is_shared = angles.are_shared_by_batch();
  parallel_for(context, tasks.count(), tasks.grain(), [&](std::int64_t begin_task, std::int64_t end_task) {
    for (std::int64_t index = begin_task; index < end_task; ++index) {
      const Task task = tasks[index];
      AngleTable<T> table(angles, tasks, task.theta_head, has_positions);
      for (std::int64_t t = task.first_tile; t < task.end_tile; ++t) {
        const std::int64_t begin = t * tasks.tile_rows;
        const std::int64_t end = std::min(begin + tasks.tile_rows, tasks.shape.positions);
        const auto tile_of = [&](std::int64_t user) -> TokenTile {
          return {user / heads_of_entry, task.theta_head + user % heads_of_entry, begin, end};
        };
        for (std::int64_t user = task.first_user; user < task.end_user; ++user) {
          const TokenTile tile = tile_of(user);
          if (user == task.first_user || (!is_shared && user % heads_of_entry == 0)) {
            table.set(tile.batch, begin, end, [&](std::int64_t n) { ahead(tile, n); });
          }
          body(index, task, tile, tile_of(std::min(user + 1, task.end_user - 1)), table);
        }
      }
    }
    hwy::FlushStream();
  });
}

// ---------------------------------------------------------------------------------------------------------- tensors

/// A tensor with rows that are read as contiguous memory.
template <typename T>
struct InputTensor {
  const T* data;
  LrpeCosineStrides strides;

  const T* at(const TokenTile& tile, std::int64_t n, std::int64_t feature) const {
    return data + tile.batch * strides[0] + tile.head * strides[1] + n * strides[2] + feature * strides[3];
  }
  /// `buffer` has `count` elements.
  const T* row(const TokenTile& tile, std::int64_t n, std::int64_t feature, std::int64_t count, T* buffer) const {
    const T* from = at(tile, n, feature);
    if (strides[3] == 1) return from;
    for (std::int64_t i = 0; i < count; ++i) buffer[i] = from[i * strides[3]];
    return buffer;
  }
};

/// A tensor with rows that are written: in place if they have unit stride, otherwise through a buffer.
template <typename T>
struct OutputTensor {
  T* data;
  LrpeCosineStrides strides;
  bool is_past_caches;

  /// A row of this tensor has `halves` times the features of x.
  OutputTensor(void* to, const LrpeCosineStrides& strides, const LrpeCosineShape& shape, std::int64_t halves)
      : data(static_cast<T*>(to)), strides(strides) {
    constexpr std::uintptr_t kLine = 64;
    const auto is_aligned = [](std::int64_t elements) {
      return static_cast<std::uint64_t>(elements) * sizeof(T) % kLine == 0;
    };
    // Only whole cache lines are written past the caches, and packs that start on one.
    is_past_caches = strides[3] == 1 && is_aligned(strides[0]) && is_aligned(strides[1]) && is_aligned(strides[2]) &&
                     is_aligned(shape.features) && reinterpret_cast<std::uintptr_t>(to) % kLine == 0 &&
                     is_beyond_caches(static_cast<std::size_t>(product_of(shape) * halves) * sizeof(T));
  }

  T* at(const TokenTile& tile, std::int64_t n, std::int64_t feature) const {
    return data + tile.batch * strides[0] + tile.head * strides[1] + n * strides[2] + feature * strides[3];
  }
  T* row(const TokenTile& tile, std::int64_t n, std::int64_t feature, T* buffer) const {
    return strides[3] == 1 ? at(tile, n, feature) : buffer;
  }
  /// Call after the memory of row() is written.
  void finish(const TokenTile& tile, std::int64_t n, std::int64_t feature, std::int64_t count, const T* buffer) const {
    if (strides[3] == 1) return;
    T* to = at(tile, n, feature);
    for (std::int64_t i = 0; i < count; ++i) to[i * strides[3]] = buffer[i];
  }
};

/// Prefetches memory that is read or written soon. The fence affects only the compiler: GCC removes calls of functions
/// that only prefetch.
template <typename T>
HWY_INLINE void fetch_ahead(const T* row, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += 64 / static_cast<std::int64_t>(sizeof(T))) hwy::Prefetch(row + i);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

/// Memory for a chunk of a row without unit stride.
template <typename T>
struct RowBuffer {
  HWY_ALIGN T elements[kTableElements];
};

/// Stores a pack, or its first `count` elements if it has more.
template <typename T>
HWY_INLINE void store_result(bool is_past_caches, const Pack<T>& pack, T* to, std::int64_t count) {
  if (count < static_cast<std::int64_t>(pack_size<T>())) {
    store_first(pack, to, static_cast<std::size_t>(count));
  } else if (is_past_caches) {
    store_pack<true>(pack, to);
  } else {
    store_pack<false>(pack, to);
  }
}

// ------------------------------------------------------------------------------------------------------ activations

/// The parameters of a softmax a = scale * exp(x - shift). `dot` is the sum of a * g over the softmax, for the
/// backward.
template <typename A>
struct Normalizer {
  A shift = A(0);
  A scale = A(1);
  A dot = A(0);
};

/// The Normalizer of each feature of a softmax over the sequence, in the order of the elements, padded to whole packs.
template <typename A>
struct Normalizers {
  const A* shift = nullptr;
  const A* scale = nullptr;  ///< nullptr: 1
  const A* dot = nullptr;    ///< nullptr: 0

  Normalizers from(std::int64_t feature) const {
    const auto move = [feature](const A* values) { return values == nullptr ? nullptr : values + feature; };
    return {move(shift), move(scale), move(dot)};
  }
};

/// A pack of `value`, or for a softmax over the sequence of `values` from `at` on.
template <LrpeKind kKind, typename T>
HWY_INLINE Pack<T> spread(Accumulator<T> value, const Accumulator<T>* values, std::int64_t at) {
  const Tag<T> d;
  if constexpr (kKind == LrpeKind::sequence_softmax) {
    if (values != nullptr) return load_in_order<T>(values + at);
  }
  const auto v = hn::Set(d, value);
  return {v, v, v, v};
}

/// e^x for x <= 0 down to the smallest normal number; exp() returns 0 a little earlier. 5 units in the last place.
HWY_INLINE Float exp_of_negative(FloatTag d, Float x) {
  const Float root = exp(d, hn::Mul(x, hn::Set(d, 0.5f)));
  return hn::Mul(root, root);
}
HWY_INLINE VectorOf<double> exp_of_negative(Tag<double> d, VectorOf<double> x) { return exp(d, x); }

/// exp(-|x|) and 1 / (1 + exp(-|x|)): neither overflows, and 1 - sigmoid(|x|) is their product.
template <typename V>
struct Logistic {
  V exponential, reciprocal;
};

template <typename T>
HWY_INLINE Logistic<VectorOf<T>> logistic_of_size(VectorOf<T> x) {
  const Tag<T> d;
  const auto one = hn::Set(d, Accumulator<T>(1));
  const auto e = exp_of_negative(d, hn::Neg(hn::Abs(x)));
  return {e, hn::Div(one, hn::Add(one, e))};
}

/// activation(x). `shift` and `scale` are used by a softmax only.
template <LrpeKind kKind, typename T>
HWY_INLINE VectorOf<T> activated(Activation activation, VectorOf<T> x, VectorOf<T> shift, VectorOf<T> scale) {
  const Tag<T> d;
  if constexpr (kKind != LrpeKind::elementwise) return hn::Mul(scale, exp_of_negative(d, hn::Sub(x, shift)));
  if (activation == Activation::none) return x;
  const auto is_negative = hn::Lt(x, hn::Zero(d));
  if (activation == Activation::relu) return hn::IfThenElse(is_negative, hn::Zero(d), x);  // keeps a NaN
  const auto [e, r] = logistic_of_size<T>(x);
  const auto s = hn::IfThenElse(is_negative, hn::Mul(e, r), r);
  return activation == Activation::silu ? hn::Mul(x, s) : s;
}

/// Shift and scale of a softmax over the features of a row. `fetch(feature, count)` returns `count` features as
/// contiguous memory.
template <typename T, typename Fetch>
Normalizer<Accumulator<T>> normalizer_of_row(std::int64_t features, Fetch&& fetch) {
  using A = Accumulator<T>;
  A max = -infinity<A>();
  for (std::int64_t first = 0; first < features; first += kTableElements) {
    const std::int64_t count = std::min(kTableElements, features - first);
    max = std::max(max, max_of(fetch(first, count), count));
  }
  // An infinite maximum is subtracted too: it makes the sum NaN, as in the formula.
  double sum = 0.0;
  for (std::int64_t first = 0; first < features; first += kTableElements) {
    const std::int64_t count = std::min(kTableElements, features - first);
    sum += sum_of_exp(fetch(first, count), count, max);
  }
  return {.shift = max, .scale = static_cast<A>(1.0 / sum)};
}

/// Shift and scale of a softmax from its statistics. The logsumexp is the shift, so that the large elements have small
/// exponents; the scale corrects its rounding. For example, for 16 equal elements so large that log(16) is lost beside
/// them, the scale is 1 / 16.
template <typename A>
Normalizer<A> normalizer_of(const RowState& state) {
  const double lse = state.lse();
  // If all elements are -inf, -inf - -inf makes them NaN. If one is +inf, all become NaN.
  if (!std::isfinite(lse)) return {.shift = lse > 0 ? nan_of<A>() : static_cast<A>(lse)};
  const A shift = static_cast<A>(lse);
  return {.shift = shift, .scale = static_cast<A>(std::exp(static_cast<double>(shift) - state.max) / state.sum)};
}

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();
#endif  // per target
