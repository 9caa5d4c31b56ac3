// The backward of lrpe_cosine on the CPU, by the tiles of lrpe_cosine_tiles.h. The gradient of theta is summed in
// float32 over a tile of one batch entry, and in float64 over the tiles of a task. The cut into tasks depends on the
// shape only, and their sums are merged in order.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/lrpe_cosine/lrpe_cosine_backward_cpu.cpp"
#include <hwy/foreach_target.h>  // first: compiles this file once per level of vector instructions
//
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "ops/lrpe_cosine/lrpe_cosine_tiles.h"

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {
namespace {

template <typename T>
struct BackwardTensors {
  InputTensor<T> grad_out;
  InputTensor<T> x;        ///< data is nullptr if x is not needed
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
RowInputs<T> inputs_of(const BackwardTensors<T>& tensors, std::int64_t features, const TokenTile& tile, std::int64_t n,
                       std::int64_t first, std::int64_t count, InputBuffers<T>& buffers) {
  return {tensors.grad_out.row(tile, n, first, count, buffers.cosine_gradient.elements),
          tensors.grad_out.row(tile, n, features + first, count, buffers.sine_gradient.elements),
          tensors.x.data == nullptr ? nullptr : tensors.x.row(tile, n, first, count, buffers.x.elements)};
}

/// a = activation(x), and the gradient of x.
template <typename V>
struct Differentiated {
  V a, grad_x;
};

/// Computes both from x and the gradient g of a. The activation is a template parameter: chosen at run time it costs up
/// to 22 % of a backward in the cache (Zen 4, none in float32; silu 15 %).
template <LrpeKind kKind, Activation kActivation, typename T>
HWY_INLINE Differentiated<VectorOf<T>> differentiate(VectorOf<T> x, VectorOf<T> g, VectorOf<T> shift, VectorOf<T> scale,
                                                     VectorOf<T> dot) {
  const Tag<T> d;
  if constexpr (kKind != LrpeKind::elementwise) {
    const auto a = activated<kKind, T>(kActivation, x, shift, scale);
    return {a, hn::Mul(a, hn::Sub(g, dot))};
  } else if constexpr (kActivation == Activation::none) {
    return {x, g};
  } else if constexpr (kActivation == Activation::relu) {
    // The gradient passes where x is NaN. It is 0 for x <= 0, even if g is NaN.
    const auto gradient = hn::IfThenElse(hn::Le(x, hn::Zero(d)), hn::Zero(d), g);
    return {activated<kKind, T>(kActivation, x, shift, scale), gradient};
  } else {
    const auto [e, r] = logistic_of_size<T>(x);
    const auto is_negative = hn::Lt(x, hn::Zero(d));
    const auto small = hn::Mul(e, r);
    const auto s = hn::IfThenElse(is_negative, small, r);
    if constexpr (kActivation == Activation::sigmoid) return {s, hn::Mul(hn::Mul(small, r), g)};
    const auto rest = hn::IfThenElse(is_negative, r, small);  // 1 - s
    const auto one = hn::Set(d, Accumulator<T>(1));
    return {hn::Mul(x, s), hn::Mul(hn::Mul(s, hn::MulAdd(x, rest, one)), g)};
  }
}

/// The filling of the last pack of a row of x; it must not count in a softmax over the row.
template <LrpeKind kKind, typename T>
T x_fill() {
  return kKind == LrpeKind::feature_softmax ? minus_infinity<T>() : T{};
}

/// The terms of the gradients of a vector of features.
template <typename V>
struct GradientTerms {
  V a, cosine_gradient, sine_gradient, cosine, sine;
  V gradient;  ///< of a
  V grad_x;
};

/// Calls `body(i, n, t0, t1, t2, t3)` for every pack of `count` features: the pack starts at feature i, `n` features
/// are left, and t0 to t3 are the GradientTerms of its vectors.
template <LrpeKind kKind, Activation kActivation, typename T, typename Body>
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
    if (inputs.x != nullptr) x = load_some(inputs.x + i, n, x_fill<kKind, T>());
    const Pack<T> shift = spread<kKind, T>(row.shift, columns.shift, i);
    const Pack<T> scale = spread<kKind, T>(row.scale, columns.scale, i);
    const Pack<T> dot = spread<kKind, T>(row.dot, columns.dot, i);
    const auto terms = [&](std::size_t vector, VectorOf<T> x, VectorOf<T> g_cos, VectorOf<T> g_sin, VectorOf<T> shift,
                           VectorOf<T> scale, VectorOf<T> dot) HWY_ATTR -> GradientTerms<VectorOf<T>> {
      const auto at = static_cast<std::size_t>(i) + vector * lanes;
      const auto cosine = hn::Load(d, angles.cosine + at);
      const auto sine = hn::Load(d, angles.sine + at);
      const auto gradient = hn::MulAdd(g_cos, cosine, hn::Mul(g_sin, sine));
      const auto [a, grad_x] = differentiate<kKind, kActivation, T>(x, gradient, shift, scale, dot);
      return {a, g_cos, g_sin, cosine, sine, gradient, grad_x};
    };
    body(i, n, terms(0, x.v0, g_cos.v0, g_sin.v0, shift.v0, scale.v0, dot.v0),
         terms(1, x.v1, g_cos.v1, g_sin.v1, shift.v1, scale.v1, dot.v1),
         terms(2, x.v2, g_cos.v2, g_sin.v2, shift.v2, scale.v2, dot.v2),
         terms(3, x.v3, g_cos.v3, g_sin.v3, shift.v3, scale.v3, dot.v3));
  }
}

/// The sums of a tile, one for each lane of its packs. Call clear() first.
template <typename T>
struct TileSums {
  using A = Accumulator<T>;
  HWY_ALIGN A lanes[kTableElements];

  void clear(std::int64_t count) { std::fill_n(lanes, padded_to_packs<T>(count), A(0)); }

  /// Adds the sums to `to`, which is in the order of the elements.
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

/// The statistics of a softmax over the features, and its sum of a * g.
template <typename T>
Normalizer<Accumulator<T>> feature_normalizer(const BackwardTensors<T>& tensors, std::int64_t features,
                                              const TokenTile& tile, std::int64_t n, AngleTable<T>& table,
                                              InputBuffers<T>& buffers) {
  using A = Accumulator<T>;
  const Tag<T> d;
  Normalizer<A> row = normalizer_of_row<T>(features, [&](std::int64_t first, std::int64_t count) {
    return tensors.x.row(tile, n, first, count, buffers.x.elements);
  });
  double dot = 0.0;
  for (std::int64_t first = 0; first < features; first += kTableElements) {
    const std::int64_t count = std::min(kTableElements, features - first);
    auto s0 = hn::Zero(d), s1 = hn::Zero(d), s2 = hn::Zero(d), s3 = hn::Zero(d);
    for_each_terms<LrpeKind::feature_softmax, Activation::softmax, T>(
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

/// Writes the gradient of x of a tile, and adds the terms of theta's gradient to `theta_sums`, unless it is nullptr.
template <LrpeKind kKind, Activation kActivation, typename T>
void differentiate_tile(const BackwardTensors<T>& tensors, const LrpeCosineAngles& angles, std::int64_t features,
                        const TokenTile& tile, const Normalizers<Accumulator<T>>& columns, AngleTable<T>& table,
                        double* theta_sums) {
  using A = Accumulator<T>;
  const Tag<T> d;
  const auto lanes = hn::Lanes(d);
  InputBuffers<T> buffers;
  RowBuffer<T> grad_x_buffer;
  TileSums<T> sums;
  std::array<Normalizer<A>, kMostTileRows> rows;
  if constexpr (kKind == LrpeKind::feature_softmax) {
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
      const bool has_theta_terms = theta_sums != nullptr && angles.has_angle(n);
      for_each_terms<kKind, kActivation, T>(
          inputs_of(tensors, features, tile, n, first, count, buffers), count, angle, row, chunk,
          [&](std::int64_t i, std::int64_t present, const auto& t0, const auto& t1, const auto& t2, const auto& t3)
              HWY_ATTR {
                if (grad_x != nullptr) {
                  const Pack<T> result{t0.grad_x, t1.grad_x, t2.grad_x, t3.grad_x};
                  store_result(tensors.grad_x.is_past_caches, result, grad_x + i, present);
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

template <typename T>
auto differentiate_tile_of(LrpeKind kind, Activation activation) {
  using enum Activation;
  if (kind == LrpeKind::feature_softmax) return &differentiate_tile<LrpeKind::feature_softmax, softmax, T>;
  if (kind == LrpeKind::sequence_softmax) return &differentiate_tile<LrpeKind::sequence_softmax, softmax, T>;
  if (activation == none) return &differentiate_tile<LrpeKind::elementwise, none, T>;
  if (activation == relu) return &differentiate_tile<LrpeKind::elementwise, relu, T>;
  if (activation == sigmoid) return &differentiate_tile<LrpeKind::elementwise, sigmoid, T>;
  return &differentiate_tile<LrpeKind::elementwise, silu, T>;
}

/// Adds the a * g of a softmax over the sequence to `dots`, one for each feature.
template <typename T>
void sum_tile(const BackwardTensors<T>& tensors, std::int64_t features, const TokenTile& tile,
              const Normalizers<Accumulator<T>>& columns, AngleTable<T>& table, double* dots) {
  const Tag<T> d;
  const auto lanes = hn::Lanes(d);
  InputBuffers<T> buffers;
  TileSums<T> sums;
  for (std::int64_t first = 0; first < features; first += kTableElements) {
    const std::int64_t count = std::min(kTableElements, features - first);
    const Normalizers<Accumulator<T>> chunk = columns.from(first);
    sums.clear(count);
    for (std::int64_t n = tile.begin; n < tile.end; ++n) {
      for_each_terms<LrpeKind::sequence_softmax, Activation::softmax, T>(
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

/// Shift and scale of every softmax over the sequence, [B * H, features rounded up to packs] each, and its sum of a *
/// g, which only the gradient of x needs. Shift and scale come from the two numbers of the lse: exp((x - high) - low) =
/// exp(-low) * exp(x - high), NaN for every x if low is NaN.
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
    const Tasks tasks = Tasks::make<T>(shape, problem.grad_out_strides, problem.angles, SumsOverTiles::of_users);
    const auto ahead = [](const TokenTile&, std::int64_t) {};
    // Only one task adds to the sums of each piece of the positions of each head.
    std::vector<double> pieces(static_cast<std::size_t>(tasks.tile_ranges) * size);
    for_each_tile<T>(
        tasks, problem.angles, false, context, ahead,
        [&](std::int64_t, const Task& task, const TokenTile& tile, const TokenTile&, AngleTable<T>& table) {
          const std::int64_t head = tile.batch * shape.heads + tile.head;
          sum_tile(tensors, shape.features, tile, of(tile, shape.heads), table,
                   pieces.data() + (task.tile_range * heads + head) * width);
        });
    for (std::size_t i = 0; i < size; ++i) {
      double sum = 0.0;
      for (std::size_t piece = 0; piece < static_cast<std::size_t>(tasks.tile_ranges); ++piece) {
        sum += pieces[piece * size + i];
      }
      dots[i] = static_cast<A>(sum);
    }
  }

  Normalizers<A> of(const TokenTile& tile, std::int64_t heads) const {
    const std::int64_t at = (tile.batch * heads + tile.head) * width;
    return {.shift = shift.data() + at, .scale = scale.data() + at, .dot = dots.data() + at};
  }
};

/// Merges the tasks' sums, [tasks, features rounded up to packs], in their order; there may be none. Writes every
/// element of the gradient.
void write_theta_gradient(const LrpeCosineBackwardProblem& problem, const Tasks* tasks,
                          const std::vector<double>& sums) {
  const LrpeCosineAngles& angles = problem.angles;
  const std::int64_t width = angles.theta_features;
  std::vector<double> gradient(static_cast<std::size_t>(angles.theta_heads * width));
  for (std::int64_t index = 0; tasks != nullptr && index < tasks->count(); ++index) {
    const double* task = sums.data() + index * tasks->row_features;
    double* row = gradient.data() + (*tasks)[index].theta_head * width;
    for (std::int64_t feature = 0; feature < problem.shape.features; ++feature) {
      const std::int64_t axis = angles.axis_of(feature);
      if (axis >= angles.axes) break;
      row[angles.theta_feature_of(feature, axis)] += task[feature];
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
  const bool has_theta = problem.grad_theta != nullptr;
  const Tasks tasks = Tasks::make<T>(shape, problem.grad_out_strides, problem.angles,
                                     has_theta ? SumsOverTiles::of_tasks : SumsOverTiles::none);
  std::vector<double> theta_sums(has_theta ? static_cast<std::size_t>(tasks.count() * tasks.row_features) : 0);
  const bool is_over_sequence = problem.kind == LrpeKind::sequence_softmax;
  const SequenceSums<T> sequences = is_over_sequence ? SequenceSums<T>(problem, tensors, context) : SequenceSums<T>();
  const auto differentiate = differentiate_tile_of<T>(problem.kind, problem.activation);
  const auto ahead = [&](const TokenTile& tile, std::int64_t n) {
    if (tensors.grad_out.strides[3] == 1) fetch_ahead(tensors.grad_out.at(tile, n, 0), 2 * shape.features);
  };
  for_each_tile<T>(tasks, problem.angles, has_theta, context, ahead,
                   [&](std::int64_t index, const Task&, const TokenTile& tile, const TokenTile&, AngleTable<T>& table) {
                     const Normalizers<A> columns =
                         is_over_sequence ? sequences.of(tile, shape.heads) : Normalizers<A>{};
                     differentiate(tensors, problem.angles, shape.features, tile, columns, table,
                                   has_theta ? theta_sums.data() + index * tasks.row_features : nullptr);
                   });
  if (has_theta) write_theta_gradient(problem, &tasks, theta_sums);
}

}  // namespace

void backward(const LrpeCosineBackwardProblem& problem, const ExecutionContext& context) {
  dispatch_floating_point(problem.dtype, [&]<typename T>() { backward_of<T>(problem, context); });
}

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eaves::cpu {
namespace {
HWY_EXPORT(backward);
}  // namespace

void lrpe_cosine_backward(const LrpeCosineBackwardProblem& problem, const ExecutionContext& context) {
  HWY_DYNAMIC_DISPATCH(backward)(problem, context);
}

}  // namespace eaves::cpu
#endif  // HWY_ONCE
