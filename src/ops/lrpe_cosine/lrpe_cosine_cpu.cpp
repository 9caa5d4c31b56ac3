// lrpe_cosine on the CPU. The one idea: sines and cosines are computed for a tile of positions at a time, into tables
// that stay in L1 or L2, and every batch entry that has the same angles goes through the tile before the next one. Rows
// of other strides are copied into contiguous memory first, and the rest of a row goes through the loop of whole packs,
// so that there is one loop for each direction and a row's bits depend on nothing but the row and its position.
//
// The gradient of theta is summed in float32 over a tile of one batch entry, in float64 over the tiles of a part, and
// the parts, cut by the shape alone, are merged in order.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/lrpe_cosine/lrpe_cosine_cpu.cpp"
#include <hwy/foreach_target.h>  // first: compiles this file once per level of vector instructions
//
#include <hwy/cache_control.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

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

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {
namespace {

/// Elements of an angle table, and the most features that are worked on at a time; longer rows go through in chunks.
constexpr std::int64_t kTableElements = 2048;

/// Most positions of a tile: rows of few features fill no table.
constexpr std::int64_t kMostTileRows = 64;

template <typename T>
std::int64_t padded_to_packs(std::int64_t count) {
  const auto pack = static_cast<std::int64_t>(pack_size<T>());
  static_assert(kTableElements % kMaxPackSize<T> == 0);
  return ceil_divide(count, pack) * pack;
}

std::int64_t product_of(const LrpeCosineShape& shape) {
  return shape.batch * shape.heads * shape.positions * shape.features;
}

// ------------------------------------------------------------------------------------------------- sharing the work

/// A theta head (all heads where theta has one), some tiles of positions, and some of the users: what reads the same
/// row of theta, the batch entries, and the heads of each where theta has one.
struct Part {
  std::int64_t theta_head;
  std::int64_t tile_piece;
  std::int64_t first_tile, end_tile;
  std::int64_t first_user, end_user;
};

/// How the work is cut into parts: by the shape alone.
struct Parts {
  LrpeCosineShape shape;
  std::int64_t theta_heads;
  std::int64_t users;         ///< of each theta head
  std::int64_t row_features;  ///< features, rounded up to whole packs
  std::int64_t tile_rows;
  std::int64_t tiles;
  std::int64_t tile_pieces;
  std::int64_t user_pieces;

  /// Parts of many users make the most of the tables, so positions are cut first; but users are where each has sums of
  /// its own for every piece of the positions (`has_sums_of_users`).
  template <typename T>
  static Parts make(const LrpeCosineShape& shape, const LrpeCosineAngles& angles, bool has_sums_of_users) {
    Parts parts{.shape = shape};
    parts.theta_heads = angles.theta_heads == 1 ? 1 : shape.heads;
    parts.users = shape.batch * (shape.heads / parts.theta_heads);
    parts.row_features = padded_to_packs<T>(shape.features);
    const std::int64_t chunk = std::min(parts.row_features, kTableElements);
    parts.tile_rows = std::clamp<std::int64_t>(kTableElements / chunk, 1, kMostTileRows);
    parts.tiles = ceil_divide(shape.positions, parts.tile_rows);
    // Four for each thread of a large machine, but no more than 8 MiB of float64 sums, and none so small that it
    // computes angles for one batch entry where there is no need to.
    constexpr std::int64_t kMostParts = 512;
    constexpr std::int64_t kMostSums = std::int64_t{1} << 20;
    constexpr std::int64_t kSmallestPart = 32768;  // elements; 10 us of work
    const std::int64_t most = std::clamp<std::int64_t>(
        std::min(kMostSums / parts.row_features, product_of(shape) / kSmallestPart), 1, kMostParts);
    const std::int64_t wanted = std::max<std::int64_t>(1, most / parts.theta_heads);
    const std::int64_t wanted_tiles = has_sums_of_users ? std::max<std::int64_t>(1, wanted / parts.users) : wanted;
    parts.tile_pieces = std::min(parts.tiles, wanted_tiles);
    parts.user_pieces = std::min(parts.users, std::max<std::int64_t>(1, wanted / parts.tile_pieces));
    return parts;
  }

  std::int64_t count() const { return theta_heads * tile_pieces * user_pieces; }

  std::int64_t grain() const { return grain_for(product_of(shape) / count()); }

  Part operator[](std::int64_t index) const {
    const std::int64_t user_piece = index % user_pieces;
    const std::int64_t tile_piece = index / user_pieces % tile_pieces;
    // Written so that neighbouring pieces differ by at most one.
    const auto cut = [](std::int64_t size, std::int64_t pieces, std::int64_t piece) {
      return size / pieces * piece + std::min(piece, size % pieces);
    };
    return {.theta_head = index / user_pieces / tile_pieces,
            .tile_piece = tile_piece,
            .first_tile = cut(tiles, tile_pieces, tile_piece),
            .end_tile = cut(tiles, tile_pieces, tile_piece + 1),
            .first_user = cut(users, user_pieces, user_piece),
            .end_user = cut(users, user_pieces, user_piece + 1)};
  }
};

/// Some positions of one head of one batch entry.
struct Tile {
  std::int64_t batch, head;
  std::int64_t begin, end;
};

// ----------------------------------------------------------------------------------------------------- angle tables

/// A row of a table, from a feature on, in the order of the lanes of packs.
template <typename A>
struct AngleRow {
  const A* cosine;
  const A* sine;
  const A* position;  ///< what theta was multiplied with; nullptr where nobody asked
};

/// The angles of a tile. Where a row has more than a chunk of features, a tile is one row, and its chunks are computed
/// when they are asked for.
template <typename T>
class AngleTable {
 public:
  using A = Accumulator<T>;

  AngleTable(const LrpeCosineAngles& angles, const Parts& parts, std::int64_t theta_head, bool has_positions)
      : angles_(angles),
        features_(parts.shape.features),
        width_(std::min(parts.row_features, kTableElements)),
        is_whole_(parts.row_features <= kTableElements),
        has_positions_(has_positions),
        theta_head_(theta_head) {
    if (is_whole_) load_theta(0);
  }

  void set(std::int64_t batch, std::int64_t begin, std::int64_t end) {
    batch_ = batch;
    begin_ = begin;
    chunk_ = -1;
    if (!is_whole_) return;
    for (std::int64_t n = begin; n < end; ++n) compute(n, 0);
  }

  /// From a row to the next.
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
    if (n < angles_.extra_tokens) {  // whatever theta is
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
  HWY_ALIGN A theta_[kTableElements];  // these two in the order of the elements
  HWY_ALIGN A element_positions_[kTableElements];
};

/// Calls `body(part, tile, user, next, table)` for every tile of every user of a part, from many threads; `next` is
/// the tile after it, or itself where it is the last.
template <typename T, typename Body>
void for_each_tile(const Parts& parts, const LrpeCosineAngles& angles, bool has_positions,
                   const ExecutionContext& context, Body&& body) {
  const std::int64_t heads_of_entry = parts.shape.heads / parts.theta_heads;
  const bool is_shared = angles.are_shared_by_batch();
  parallel_for(context, parts.count(), parts.grain(), [&](std::int64_t begin_part, std::int64_t end_part) {
    for (std::int64_t index = begin_part; index < end_part; ++index) {
      const Part part = parts[index];
      AngleTable<T> table(angles, parts, part.theta_head, has_positions);
      for (std::int64_t t = part.first_tile; t < part.end_tile; ++t) {
        const std::int64_t begin = t * parts.tile_rows;
        const std::int64_t end = std::min(begin + parts.tile_rows, parts.shape.positions);
        const auto tile_of = [&](std::int64_t user) -> Tile {
          return {user / heads_of_entry, part.theta_head + user % heads_of_entry, begin, end};
        };
        for (std::int64_t user = part.first_user; user < part.end_user; ++user) {
          const Tile tile = tile_of(user);
          if (user == part.first_user || (!is_shared && user % heads_of_entry == 0)) table.set(tile.batch, begin, end);
          body(index, part, tile, tile_of(std::min(user + 1, part.end_user - 1)), table);
        }
      }
    }
    hwy::FlushStream();
  });
}

// ---------------------------------------------------------------------------------------------------------- tensors

/// A tensor whose rows are read as contiguous memory.
template <typename T>
struct InputTensor {
  const T* data;
  LrpeCosineStrides strides;

  const T* at(const Tile& tile, std::int64_t n, std::int64_t feature) const {
    return data + tile.batch * strides[0] + tile.head * strides[1] + n * strides[2] + feature * strides[3];
  }
  /// `buffer` is as long as `count`.
  const T* row(const Tile& tile, std::int64_t n, std::int64_t feature, std::int64_t count, T* buffer) const {
    const T* from = at(tile, n, feature);
    if (strides[3] == 1) return from;
    for (std::int64_t i = 0; i < count; ++i) buffer[i] = from[i * strides[3]];
    return buffer;
  }
};

/// A tensor whose rows are written, either in place or, of other strides, by way of a buffer.
template <typename T>
struct OutputTensor {
  T* data;
  LrpeCosineStrides strides;
  bool is_past_caches;

  /// `halves` is how many times the features of x a row of this tensor has.
  OutputTensor(void* to, const LrpeCosineStrides& strides, const LrpeCosineShape& shape, std::int64_t halves)
      : data(static_cast<T*>(to)), strides(strides) {
    constexpr std::uintptr_t kLine = 64;
    const auto is_aligned = [](std::int64_t elements) {
      return static_cast<std::uint64_t>(elements) * sizeof(T) % kLine == 0;
    };
    // Whole lines, and packs that begin with one.
    is_past_caches = strides[3] == 1 && is_aligned(strides[0]) && is_aligned(strides[1]) && is_aligned(strides[2]) &&
                     is_aligned(shape.features) && reinterpret_cast<std::uintptr_t>(to) % kLine == 0 &&
                     is_beyond_caches(static_cast<std::size_t>(product_of(shape) * halves) * sizeof(T));
  }

  T* at(const Tile& tile, std::int64_t n, std::int64_t feature) const {
    return data + tile.batch * strides[0] + tile.head * strides[1] + n * strides[2] + feature * strides[3];
  }
  T* row(const Tile& tile, std::int64_t n, std::int64_t feature, T* buffer) const {
    return strides[3] == 1 ? at(tile, n, feature) : buffer;
  }
  /// After row() has been written.
  void finish(const Tile& tile, std::int64_t n, std::int64_t feature, std::int64_t count, const T* buffer) const {
    if (strides[3] == 1) return;
    T* to = at(tile, n, feature);
    for (std::int64_t i = 0; i < count; ++i) to[i * strides[3]] = buffer[i];
  }
};

/// Memory for the rows of tensors of other strides.
template <typename T>
struct RowBuffer {
  HWY_ALIGN T elements[kTableElements];
};

/// The first `count` elements of a pack, or all where there are more.
template <bool kPastCaches, typename T>
HWY_INLINE void store_result(const Pack<T>& pack, T* to, std::int64_t count) {
  if (count >= static_cast<std::int64_t>(pack_size<T>())) {
    store_pack<kPastCaches>(pack, to);
  } else {
    store_first(pack, to, static_cast<std::size_t>(count));
  }
}

// ------------------------------------------------------------------------------------------------------ activations

constexpr bool is_softmax(LrpeActivation activation) {
  return activation == LrpeActivation::feature_softmax || activation == LrpeActivation::sequence_softmax;
}

/// What makes exponentials the elements of a softmax: scale * exp(x - shift). `dot` is the sum of a * g over the
/// softmax, of a backward.
template <typename A>
struct Normalizer {
  A shift = A(0);
  A scale = A(1);
  A dot = A(0);
};

/// The same for each feature of a softmax over the sequence, in the order of the elements, as long as whole packs.
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

/// Of the whole row, or of a pack of features.
template <LrpeActivation kActivation, typename T>
HWY_INLINE Pack<T> spread(Accumulator<T> value, const Accumulator<T>* values, std::int64_t at) {
  const Tag<T> d;
  if constexpr (kActivation == LrpeActivation::sequence_softmax) {
    if (values != nullptr) return load_in_order<T>(values + at);
  }
  const auto v = hn::Set(d, value);
  return {v, v, v, v};
}

/// e^x down to where subnormal numbers begin; exp() is 0 a little earlier. 5 units in the last place.
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

/// activation(x); of a softmax with the normalizer's shift and scale.
template <LrpeActivation kActivation, typename T>
HWY_INLINE VectorOf<T> activated(VectorOf<T> x, VectorOf<T> shift, VectorOf<T> scale) {
  const Tag<T> d;
  if constexpr (kActivation == LrpeActivation::relu) {
    return hn::IfThenElse(hn::Lt(x, hn::Zero(d)), hn::Zero(d), x);  // a NaN stays one
  } else if constexpr (kActivation == LrpeActivation::sigmoid || kActivation == LrpeActivation::silu) {
    const auto [e, r] = logistic_of_size<T>(x);
    const auto s = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), hn::Mul(e, r), r);
    return kActivation == LrpeActivation::sigmoid ? s : hn::Mul(x, s);
  } else if constexpr (is_softmax(kActivation)) {
    return hn::Mul(scale, exp_of_negative(d, hn::Sub(x, shift)));
  }
  return x;
}

/// The gradient of x, from `a` = activation(x) and the gradient g of a.
template <LrpeActivation kActivation, typename T>
HWY_INLINE VectorOf<T> gradient_of(VectorOf<T> x, VectorOf<T> a, VectorOf<T> g, VectorOf<T> dot) {
  const Tag<T> d;
  const auto one = hn::Set(d, Accumulator<T>(1));
  if constexpr (kActivation == LrpeActivation::relu) {
    // A NaN lets its gradient pass; 0 and less let nothing through, not even a NaN.
    return hn::IfThenElse(hn::Le(x, hn::Zero(d)), hn::Zero(d), g);
  } else if constexpr (kActivation == LrpeActivation::sigmoid) {
    const auto [e, r] = logistic_of_size<T>(x);
    return hn::Mul(hn::Mul(hn::Mul(e, r), r), g);
  } else if constexpr (kActivation == LrpeActivation::silu) {
    const auto [e, r] = logistic_of_size<T>(x);
    const auto is_negative = hn::Lt(x, hn::Zero(d));
    const auto small = hn::Mul(e, r);
    const auto s = hn::IfThenElse(is_negative, small, r);
    const auto rest = hn::IfThenElse(is_negative, r, small);  // 1 - s
    return hn::Mul(hn::Mul(s, hn::MulAdd(x, rest, one)), g);
  } else if constexpr (is_softmax(kActivation)) {
    return hn::Mul(a, hn::Sub(g, dot));
  }
  return g;
}

/// What fills up the last pack of a row of x: it must not count in a softmax over it.
template <LrpeActivation kActivation, typename T>
T x_fill() {
  return kActivation == LrpeActivation::feature_softmax ? minus_infinity<T>() : T{};
}

/// Shift and scale of a softmax over the features of a row. `fetch(feature, count)` gives them as contiguous memory.
template <typename T, typename Fetch>
Normalizer<Accumulator<T>> normalizer_of_row(std::int64_t features, Fetch&& fetch) {
  using A = Accumulator<T>;
  A max = -infinity<A>();
  for (std::int64_t first = 0; first < features; first += kTableElements) {
    const std::int64_t count = std::min(kTableElements, features - first);
    max = std::max(max, max_of(fetch(first, count), count));
  }
  // An infinite maximum is subtracted as it is: that makes the sum a NaN, as it should be.
  double sum = 0.0;
  for (std::int64_t first = 0; first < features; first += kTableElements) {
    const std::int64_t count = std::min(kTableElements, features - first);
    sum += sum_of_exp(fetch(first, count), count, max);
  }
  return {.shift = max, .scale = static_cast<A>(1.0 / sum)};
}

/// Shift and scale of a softmax of which the statistics are known. The logsumexp is the shift, so that what counts has
/// a small exponent; what its rounding loses is in the scale, which is 1 / 16 of 16 elements too large for a logarithm
/// beside them.
template <typename A>
Normalizer<A> normalizer_of(const RowState& state) {
  const double lse = state.lse();
  // All of it -inf: -inf - -inf is a NaN. A +inf in it: all of it NaN.
  if (!std::isfinite(lse)) return {.shift = lse > 0 ? nan_of<A>() : static_cast<A>(lse)};
  const A shift = static_cast<A>(lse);
  return {.shift = shift, .scale = static_cast<A>(std::exp(static_cast<double>(shift) - state.max) / state.sum)};
}

/// Calls `body.operator()<activation>()`.
template <typename Body>
decltype(auto) dispatch_activation(LrpeActivation activation, Body&& body) {
  switch (activation) {
    case LrpeActivation::none:
      return body.template operator()<LrpeActivation::none>();
    case LrpeActivation::relu:
      return body.template operator()<LrpeActivation::relu>();
    case LrpeActivation::sigmoid:
      return body.template operator()<LrpeActivation::sigmoid>();
    case LrpeActivation::silu:
      return body.template operator()<LrpeActivation::silu>();
    case LrpeActivation::feature_softmax:
      return body.template operator()<LrpeActivation::feature_softmax>();
    case LrpeActivation::sequence_softmax:
      break;
  }
  return body.template operator()<LrpeActivation::sequence_softmax>();
}

// ---------------------------------------------------------------------------------------------------------- forward

template <typename T>
struct ForwardTensors {
  InputTensor<T> x;
  OutputTensor<T> out;
};

/// A row of `count` contiguous features.
template <LrpeActivation kActivation, bool kPastCaches, typename T>
HWY_INLINE void encode_row(const T* x, std::int64_t count, const AngleRow<Accumulator<T>>& angles,
                           const Normalizer<Accumulator<T>>& row, const Normalizers<Accumulator<T>>& columns,
                           T* cosine_half, T* sine_half) {
  const Tag<T> d;
  const auto lanes = hn::Lanes(d);
  const auto step = static_cast<std::int64_t>(pack_size<T>());
  for (std::int64_t i = 0; i < count; i += step) {
    const std::int64_t n = count - i;
    Pack<T> a = load_some(x + i, n, T{});
    if constexpr (kActivation != LrpeActivation::none) {
      const Pack<T> shift = spread<kActivation, T>(row.shift, columns.shift, i);
      const Pack<T> scale = spread<kActivation, T>(row.scale, columns.scale, i);
      a = {activated<kActivation, T>(a.v0, shift.v0, scale.v0), activated<kActivation, T>(a.v1, shift.v1, scale.v1),
           activated<kActivation, T>(a.v2, shift.v2, scale.v2), activated<kActivation, T>(a.v3, shift.v3, scale.v3)};
    }
    const auto times = [&](const Accumulator<T>* table) HWY_ATTR -> Pack<T> {
      return {hn::Mul(a.v0, hn::Load(d, table)), hn::Mul(a.v1, hn::Load(d, table + lanes)),
              hn::Mul(a.v2, hn::Load(d, table + 2 * lanes)), hn::Mul(a.v3, hn::Load(d, table + 3 * lanes))};
    };
    store_result<kPastCaches>(times(angles.cosine + i), cosine_half + i, n);
    store_result<kPastCaches>(times(angles.sine + i), sine_half + i, n);
  }
}

/// Rows of unit stride that are in one chunk: nothing but pointers that move on.
template <LrpeActivation kActivation, bool kPastCaches, typename T>
void encode_rows(const ForwardTensors<T>& tensors, std::int64_t features, const Tile& tile, const Tile& next,
                 const Normalizers<Accumulator<T>>& columns, AngleTable<T>& table) {
  const T* x = tensors.x.at(tile, tile.begin, 0);
  const T* ahead = tensors.x.at(next, tile.begin, 0);
  T* out = tensors.out.at(tile, tile.begin, 0);
  AngleRow<Accumulator<T>> angles = table.row(tile.begin, 0);
  const std::int64_t width = table.width();
  for (std::int64_t n = tile.begin; n < tile.end; ++n) {
    Normalizer<Accumulator<T>> row;
    if constexpr (kActivation == LrpeActivation::feature_softmax) {
      row = normalizer_of_row<T>(features, [&](std::int64_t first, std::int64_t) { return x + first; });
    }
    if constexpr (kPastCaches) {
      // The same row of the next batch entry: far away in memory, where no prefetcher of the machine would look.
      for (std::int64_t i = 0; i < features; i += 64 / static_cast<std::int64_t>(sizeof(T))) hwy::Prefetch(ahead + i);
    }
    encode_row<kActivation, kPastCaches>(x, features, angles, row, columns, out, out + features);
    x += tensors.x.strides[2];
    ahead += tensors.x.strides[2];
    out += tensors.out.strides[2];
    angles.cosine += width;
    angles.sine += width;
  }
}

template <LrpeActivation kActivation, typename T>
void encode_tile(const ForwardTensors<T>& tensors, std::int64_t features, const Tile& tile, const Tile& next,
                 const Normalizers<Accumulator<T>>& columns, AngleTable<T>& table) {
  using A = Accumulator<T>;
  if (tensors.x.strides[3] == 1 && tensors.out.strides[3] == 1 && features <= kTableElements) {
    const auto encode =
        tensors.out.is_past_caches ? encode_rows<kActivation, true, T> : encode_rows<kActivation, false, T>;
    return encode(tensors, features, tile, next, columns, table);
  }
  RowBuffer<T> x_buffer, cosine_buffer, sine_buffer;
  for (std::int64_t n = tile.begin; n < tile.end; ++n) {
    const auto fetch = [&](std::int64_t first, std::int64_t count) {
      return tensors.x.row(tile, n, first, count, x_buffer.elements);
    };
    Normalizer<A> row;
    if constexpr (kActivation == LrpeActivation::feature_softmax) row = normalizer_of_row<T>(features, fetch);
    for (std::int64_t first = 0; first < features; first += kTableElements) {
      const std::int64_t count = std::min(kTableElements, features - first);
      const Normalizers<A> chunk = columns.from(first);
      T* cosine_half = tensors.out.row(tile, n, first, cosine_buffer.elements);
      T* sine_half = tensors.out.row(tile, n, features + first, sine_buffer.elements);
      encode_row<kActivation, false>(fetch(first, count), count, table.row(n, first), row, chunk, cosine_half,
                                     sine_half);
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

/// A logsumexp as a number and what its rounding has lost, which is a NaN where the number is infinite: inf - inf.
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

/// Also writes the lse, where there is one.
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
  reduce_softmax<T>(view, {static_cast<const T*>(problem.x), 0}, context, [&](std::int64_t row, const RowState& state) {
    const auto offsets = view.rows.offsets(row);
    const Normalizer<A> normalizer = normalizer_of<A>(state);
    normalizers.shift[static_cast<std::size_t>(offsets.of[2])] = normalizer.shift;
    normalizers.scale[static_cast<std::size_t>(offsets.of[2])] = normalizer.scale;
    if (problem.lse == nullptr) return;
    const SplitLse<A> lse(state);
    A* const high = static_cast<A*>(problem.lse) + offsets.of[3];
    high[0] = lse.high;
    high[shape.features] = lse.low;
  });
}

template <typename T>
void forward_of(const LrpeCosineForwardProblem& problem, const ExecutionContext& context) {
  using A = Accumulator<T>;
  const LrpeCosineShape& shape = problem.shape;
  if (shape.positions == 0) {  // what is left to do of an empty problem
    A* lse = static_cast<A*>(problem.lse);
    for (std::int64_t head = 0; head < shape.batch * shape.heads; ++head) {
      lse = std::fill_n(lse, shape.features, -infinity<A>());
      lse = std::fill_n(lse, shape.features, nan_of<A>());
    }
    return;
  }
  const bool is_over_sequence = problem.activation == LrpeActivation::sequence_softmax;
  const Parts parts = Parts::make<T>(shape, problem.angles, false);
  SequenceNormalizers<A> normalizers(is_over_sequence ? shape.batch * shape.heads : 0, parts.row_features);
  if (is_over_sequence) reduce_sequences<T>(problem, context, normalizers);

  const ForwardTensors<T> tensors{{static_cast<const T*>(problem.x), problem.x_strides},
                                  {problem.out, problem.out_strides, shape, 2}};
  const auto encode = dispatch_activation(problem.activation,
                                          []<LrpeActivation kActivation>() { return &encode_tile<kActivation, T>; });
  for_each_tile<T>(parts, problem.angles, false, context,
                   [&](std::int64_t, const Part&, const Tile& tile, const Tile& next, AngleTable<T>& table) {
                     Normalizers<A> columns;
                     if (is_over_sequence) {
                       const std::int64_t at = (tile.batch * shape.heads + tile.head) * normalizers.width;
                       columns = {.shift = normalizers.shift.data() + at, .scale = normalizers.scale.data() + at};
                     }
                     encode(tensors, shape.features, tile, next, columns, table);
                   });
}

// --------------------------------------------------------------------------------------------------------- backward

template <typename T>
struct BackwardTensors {
  InputTensor<T> grad_out;
  InputTensor<T> x;        ///< data is nullptr where it is not needed
  OutputTensor<T> grad_x;  ///< data may be nullptr
};

/// The inputs of some features of a row, as contiguous memory.
template <typename T>
struct RowInputs {
  const T* cosine_gradient;
  const T* sine_gradient;
  const T* x;  ///< or nullptr
};

template <typename T>
struct InputBuffers {
  RowBuffer<T> cosine_gradient, sine_gradient, x;
};

template <typename T>
RowInputs<T> inputs_of(const BackwardTensors<T>& tensors, std::int64_t features, const Tile& tile, std::int64_t n,
                       std::int64_t first, std::int64_t count, InputBuffers<T>& buffers) {
  return {tensors.grad_out.row(tile, n, first, count, buffers.cosine_gradient.elements),
          tensors.grad_out.row(tile, n, features + first, count, buffers.sine_gradient.elements),
          tensors.x.data == nullptr ? nullptr : tensors.x.row(tile, n, first, count, buffers.x.elements)};
}

/// What the gradients of a vector of features are made of.
template <typename V>
struct Terms {
  V x, a, cosine_gradient, sine_gradient, cosine, sine;
  V gradient;  ///< of a
};

/// Calls `body(i, n, terms)` for every pack of `count` features, `terms` four of Terms, of which `n` features are
/// there.
template <LrpeActivation kActivation, typename T, typename Body>
HWY_INLINE void for_each_terms(const RowInputs<T>& inputs, std::int64_t count, const AngleRow<Accumulator<T>>& angles,
                               const Normalizer<Accumulator<T>>& row, const Normalizers<Accumulator<T>>& columns,
                               Body&& body) {
  const Tag<T> d;
  const auto lanes = hn::Lanes(d);
  const auto step = static_cast<std::int64_t>(pack_size<T>());
  for (std::int64_t i = 0; i < count; i += step) {
    const std::int64_t n = count - i;
    const Pack<T> g_cos = load_some(inputs.cosine_gradient + i, n, T{});
    const Pack<T> g_sin = load_some(inputs.sine_gradient + i, n, T{});
    const auto zero = hn::Zero(d);
    Pack<T> x{zero, zero, zero, zero};
    if (inputs.x != nullptr) x = load_some(inputs.x + i, n, x_fill<kActivation, T>());
    const Pack<T> shift = spread<kActivation, T>(row.shift, columns.shift, i);
    const Pack<T> scale = spread<kActivation, T>(row.scale, columns.scale, i);
    const auto terms = [&](std::size_t vector, VectorOf<T> x, VectorOf<T> g_cos, VectorOf<T> g_sin, VectorOf<T> shift,
                           VectorOf<T> scale) HWY_ATTR -> Terms<VectorOf<T>> {
      const auto at = static_cast<std::size_t>(i) + vector * lanes;
      const auto cosine = hn::Load(d, angles.cosine + at);
      const auto sine = hn::Load(d, angles.sine + at);
      return {x,    activated<kActivation, T>(x, shift, scale),     g_cos, g_sin, cosine,
              sine, hn::MulAdd(g_cos, cosine, hn::Mul(g_sin, sine))};
    };
    body(i, n, terms(0, x.v0, g_cos.v0, g_sin.v0, shift.v0, scale.v0),
         terms(1, x.v1, g_cos.v1, g_sin.v1, shift.v1, scale.v1), terms(2, x.v2, g_cos.v2, g_sin.v2, shift.v2, scale.v2),
         terms(3, x.v3, g_cos.v3, g_sin.v3, shift.v3, scale.v3));
  }
}

/// Sums of a tile: one for each lane of its packs, 0 at first.
template <typename T>
struct TileSums {
  using A = Accumulator<T>;
  HWY_ALIGN A lanes[kTableElements];

  void clear(std::int64_t count) { std::fill_n(lanes, padded_to_packs<T>(count), A(0)); }

  /// Adds them to `to`, which is in the order of the elements.
  void add_to(double* to, std::int64_t count) const {
    const Tag<T> d;
    const auto n = hn::Lanes(d);
    HWY_ALIGN A in_order[kMaxPackSize<T>];
    const auto step = static_cast<std::int64_t>(pack_size<T>());
    for (std::int64_t i = 0; i < count; i += step) {
      const A* from = lanes + i;
      store_in_order(
          Pack<T>{hn::Load(d, from), hn::Load(d, from + n), hn::Load(d, from + 2 * n), hn::Load(d, from + 3 * n)},
          in_order);
      for (std::int64_t j = 0; j < std::min(step, count - i); ++j) to[i + j] += in_order[j];
    }
  }
};

/// Of a softmax over the features: its statistics, and the sum of a * g.
template <typename T>
Normalizer<Accumulator<T>> feature_normalizer(const BackwardTensors<T>& tensors, std::int64_t features,
                                              const Tile& tile, std::int64_t n, AngleTable<T>& table,
                                              InputBuffers<T>& buffers) {
  constexpr auto kActivation = LrpeActivation::feature_softmax;
  using A = Accumulator<T>;
  const Tag<T> d;
  Normalizer<A> row = normalizer_of_row<T>(features, [&](std::int64_t first, std::int64_t count) {
    return tensors.x.row(tile, n, first, count, buffers.x.elements);
  });
  double dot = 0.0;
  for (std::int64_t first = 0; first < features; first += kTableElements) {
    const std::int64_t count = std::min(kTableElements, features - first);
    auto s0 = hn::Zero(d), s1 = hn::Zero(d), s2 = hn::Zero(d), s3 = hn::Zero(d);
    for_each_terms<kActivation, T>(
        inputs_of(tensors, features, tile, n, first, count, buffers), count, table.row(n, first), row, {},
        [&](std::int64_t, std::int64_t, const auto& t0, const auto& t1, const auto& t2, const auto& t3) HWY_ATTR {
          s0 = hn::MulAdd(t0.a, t0.gradient, s0);
          s1 = hn::MulAdd(t1.a, t1.gradient, s1);
          s2 = hn::MulAdd(t2.a, t2.gradient, s2);
          s3 = hn::MulAdd(t3.a, t3.gradient, s3);
        });
    dot += hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3))));
  }
  row.dot = static_cast<A>(dot);
  return row;
}

/// `theta_sums` is nullptr where the gradient of theta is not asked for; else the terms of each feature are added.
template <LrpeActivation kActivation, typename T>
void differentiate_tile(const BackwardTensors<T>& tensors, const LrpeCosineAngles& angles, std::int64_t features,
                        const Tile& tile, const Normalizers<Accumulator<T>>& columns, AngleTable<T>& table,
                        double* theta_sums) {
  using A = Accumulator<T>;
  const Tag<T> d;
  const auto lanes = hn::Lanes(d);
  InputBuffers<T> buffers;
  RowBuffer<T> grad_x_buffer;
  TileSums<T> sums;
  std::array<Normalizer<A>, kMostTileRows> rows;
  if constexpr (kActivation == LrpeActivation::feature_softmax) {
    for (std::int64_t n = tile.begin; n < tile.end; ++n) {
      rows[static_cast<std::size_t>(n - tile.begin)] = feature_normalizer(tensors, features, tile, n, table, buffers);
    }
  }
  for (std::int64_t first = 0; first < features; first += kTableElements) {
    const std::int64_t count = std::min(kTableElements, features - first);
    const Normalizers<A> chunk = columns.from(first);
    if (theta_sums != nullptr) sums.clear(count);
    for (std::int64_t n = tile.begin; n < tile.end; ++n) {
      const Normalizer<A>& row = rows[static_cast<std::size_t>(n - tile.begin)];
      const AngleRow<A> angle = table.row(n, first);
      T* grad_x = tensors.grad_x.data == nullptr ? nullptr : tensors.grad_x.row(tile, n, first, grad_x_buffer.elements);
      // The angle of an extra token does not depend on theta.
      const bool has_theta_terms = theta_sums != nullptr && n >= angles.extra_tokens;
      for_each_terms<kActivation, T>(
          inputs_of(tensors, features, tile, n, first, count, buffers), count, angle, row, chunk,
          [&](std::int64_t i, std::int64_t present, const auto& t0, const auto& t1, const auto& t2, const auto& t3)
              HWY_ATTR {
                if (grad_x != nullptr) {
                  const Pack<T> dot = spread<kActivation, T>(row.dot, chunk.dot, i);
                  const Pack<T> result{gradient_of<kActivation, T>(t0.x, t0.a, t0.gradient, dot.v0),
                                       gradient_of<kActivation, T>(t1.x, t1.a, t1.gradient, dot.v1),
                                       gradient_of<kActivation, T>(t2.x, t2.a, t2.gradient, dot.v2),
                                       gradient_of<kActivation, T>(t3.x, t3.a, t3.gradient, dot.v3)};
                  if (tensors.grad_x.is_past_caches) {
                    store_result<true>(result, grad_x + i, present);
                  } else {
                    store_result<false>(result, grad_x + i, present);
                  }
                }
                if (!has_theta_terms) return;
                const auto add = [&](std::size_t vector, const auto& t) HWY_ATTR {
                  const auto at = static_cast<std::size_t>(i) + vector * lanes;
                  const auto slope = hn::MulSub(t.sine_gradient, t.cosine, hn::Mul(t.cosine_gradient, t.sine));
                  const auto position = hn::Load(d, angle.position + at);
                  const auto sum = hn::Load(d, sums.lanes + at);
                  hn::Store(hn::MulAdd(hn::Mul(t.a, slope), position, sum), d, sums.lanes + at);
                };
                add(0, t0);
                add(1, t1);
                add(2, t2);
                add(3, t3);
              });
      if (grad_x != nullptr) tensors.grad_x.finish(tile, n, first, count, grad_x);
    }
    if (theta_sums != nullptr) sums.add_to(theta_sums + first, count);
  }
}

/// Adds the a * g of a softmax over the sequence to `dots`, one for each feature.
template <typename T>
void sum_tile(const BackwardTensors<T>& tensors, std::int64_t features, const Tile& tile,
              const Normalizers<Accumulator<T>>& columns, AngleTable<T>& table, double* dots) {
  constexpr auto kActivation = LrpeActivation::sequence_softmax;
  const Tag<T> d;
  const auto lanes = hn::Lanes(d);
  InputBuffers<T> buffers;
  TileSums<T> sums;
  for (std::int64_t first = 0; first < features; first += kTableElements) {
    const std::int64_t count = std::min(kTableElements, features - first);
    const Normalizers<Accumulator<T>> chunk = columns.from(first);
    sums.clear(count);
    for (std::int64_t n = tile.begin; n < tile.end; ++n) {
      for_each_terms<kActivation, T>(
          inputs_of(tensors, features, tile, n, first, count, buffers), count, table.row(n, first), {}, chunk,
          [&](std::int64_t i, std::int64_t, const auto& t0, const auto& t1, const auto& t2, const auto& t3) HWY_ATTR {
            const auto add = [&](std::size_t vector, const auto& t) HWY_ATTR {
              Accumulator<T>* sum = sums.lanes + static_cast<std::size_t>(i) + vector * lanes;
              hn::Store(hn::MulAdd(t.a, t.gradient, hn::Load(d, sum)), d, sum);
            };
            add(0, t0);
            add(1, t1);
            add(2, t2);
            add(3, t3);
          });
    }
    sums.add_to(dots + first, count);
  }
}

/// Shift and scale of every softmax over the sequence, [B * H, features rounded up to packs] each, and its sum of
/// a * g, which the gradient of x alone needs. They come from the two numbers of its lse:
/// exp((x - high) - low) = exp(-low) * exp(x - high), NaN for every x where low is.
template <typename T>
struct SequenceSums {
  using A = Accumulator<T>;
  std::int64_t width = 0;
  std::vector<A> shift, scale, dots;

  SequenceSums() = default;
  SequenceSums(const LrpeCosineBackwardProblem& problem, const BackwardTensors<T>& tensors,
               const ExecutionContext& context)
      : width(padded_to_packs<T>(problem.shape.features)) {
    const LrpeCosineShape& shape = problem.shape;
    const std::int64_t heads = shape.batch * shape.heads;
    const auto size = static_cast<std::size_t>(heads * width);
    shift.assign(size, A(0));
    scale.assign(size, A(0));
    dots.assign(size, A(0));
    for (std::int64_t head = 0; head < heads; ++head) {
      const A* high = static_cast<const A*>(problem.lse) + head * 2 * shape.features;
      std::copy_n(high, shape.features, shift.data() + head * width);
      std::copy_n(high + shape.features, shape.features, scale.data() + head * width);
    }
    const Tag<T> d;
    for (std::size_t i = 0; i < size; i += hn::Lanes(d)) {
      A* const low = scale.data() + i;
      hn::StoreU(exp(d, hn::Neg(hn::LoadU(d, low))), d, low);
    }
    if (problem.grad_x == nullptr) return;
    const Parts parts = Parts::make<T>(shape, problem.angles, true);
    // Every piece of the positions of every head has one part that adds to it.
    std::vector<double> pieces(static_cast<std::size_t>(parts.tile_pieces) * size);
    for_each_tile<T>(parts, problem.angles, false, context,
                     [&](std::int64_t, const Part& part, const Tile& tile, const Tile&, AngleTable<T>& table) {
                       const std::int64_t head = tile.batch * shape.heads + tile.head;
                       sum_tile(tensors, shape.features, tile, of(tile, shape.heads), table,
                                pieces.data() + (part.tile_piece * heads + head) * width);
                     });
    for (std::size_t i = 0; i < size; ++i) {
      double sum = 0.0;
      for (std::size_t piece = 0; piece < static_cast<std::size_t>(parts.tile_pieces); ++piece) {
        sum += pieces[piece * size + i];
      }
      dots[i] = static_cast<A>(sum);
    }
  }

  Normalizers<A> of(const Tile& tile, std::int64_t heads) const {
    const std::int64_t at = (tile.batch * heads + tile.head) * width;
    return {.shift = shift.data() + at, .scale = scale.data() + at, .dot = dots.data() + at};
  }
};

/// Merges the parts' sums, [parts, features rounded up to packs], in their order; there may be none. Writes every
/// element of the gradient.
void write_theta_gradient(const LrpeCosineBackwardProblem& problem, const Parts* parts,
                          const std::vector<double>& sums) {
  const LrpeCosineAngles& angles = problem.angles;
  const std::int64_t width = angles.theta_features;
  std::vector<double> gradient(static_cast<std::size_t>(angles.theta_heads * width));
  for (std::int64_t index = 0; parts != nullptr && index < parts->count(); ++index) {
    const double* part = sums.data() + index * parts->row_features;
    double* row = gradient.data() + (*parts)[index].theta_head * width;
    for (std::int64_t feature = 0; feature < problem.shape.features; ++feature) {
      const std::int64_t axis = angles.axis_of(feature);
      if (axis >= angles.axes) break;
      row[angles.theta_feature_of(feature, axis)] += part[feature];
    }
  }
  dispatch_floating_point(angles.theta_dtype, [&]<typename Theta>() {
    for (std::int64_t head = 0; head < angles.theta_heads; ++head) {
      for (std::int64_t feature = 0; feature < width; ++feature) {
        const std::int64_t at = head * problem.grad_theta_head_stride + feature * problem.grad_theta_feature_stride;
        static_cast<Theta*>(problem.grad_theta)[at] =
            round_to<Theta>(gradient[static_cast<std::size_t>(head * width + feature)]);
      }
    }
  });
}

template <typename T>
void backward_of(const LrpeCosineBackwardProblem& problem, const ExecutionContext& context) {
  using A = Accumulator<T>;
  const LrpeCosineShape& shape = problem.shape;
  if (product_of(shape) == 0) return write_theta_gradient(problem, nullptr, {});

  const BackwardTensors<T> tensors{{static_cast<const T*>(problem.grad_out), problem.grad_out_strides},
                                   {static_cast<const T*>(problem.x), problem.x_strides},
                                   {problem.grad_x, problem.grad_x_strides, shape, 1}};
  const Parts parts = Parts::make<T>(shape, problem.angles, false);
  const bool has_theta = problem.grad_theta != nullptr;
  std::vector<double> theta_sums(has_theta ? static_cast<std::size_t>(parts.count() * parts.row_features) : 0);
  const bool is_over_sequence = problem.activation == LrpeActivation::sequence_softmax;
  const SequenceSums<T> sequences = is_over_sequence ? SequenceSums<T>(problem, tensors, context) : SequenceSums<T>();
  const auto differentiate = dispatch_activation(
      problem.activation, []<LrpeActivation kActivation>() { return &differentiate_tile<kActivation, T>; });
  for_each_tile<T>(parts, problem.angles, has_theta, context,
                   [&](std::int64_t index, const Part&, const Tile& tile, const Tile&, AngleTable<T>& table) {
                     const Normalizers<A> columns =
                         is_over_sequence ? sequences.of(tile, shape.heads) : Normalizers<A>{};
                     differentiate(tensors, problem.angles, shape.features, tile, columns, table,
                                   has_theta ? theta_sums.data() + index * parts.row_features : nullptr);
                   });
  if (has_theta) write_theta_gradient(problem, &parts, theta_sums);
}

}  // namespace

void forward(const LrpeCosineForwardProblem& problem, const ExecutionContext& context) {
  dispatch_floating_point(problem.dtype, [&]<typename T>() { forward_of<T>(problem, context); });
}

void backward(const LrpeCosineBackwardProblem& problem, const ExecutionContext& context) {
  dispatch_floating_point(problem.dtype, [&]<typename T>() { backward_of<T>(problem, context); });
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

void lrpe_cosine_forward(const LrpeCosineForwardProblem& problem, const ExecutionContext& context) {
  HWY_DYNAMIC_DISPATCH(forward)(problem, context);
}

void lrpe_cosine_backward(const LrpeCosineBackwardProblem& problem, const ExecutionContext& context) {
  HWY_DYNAMIC_DISPATCH(backward)(problem, context);
}

}  // namespace eaves::cpu
#endif  // HWY_ONCE
