// The steps of a softmax with options: the soft cap, weighted sums, the terms of an entropy, and their gradients. Each
// function is one pass over a block of a row, which holds accumulators in the order of the columns and fits L1. A row
// without options needs only softmax.h. Compiled once per level of vector instructions, like simd.h.
#include <algorithm>
#include <cstdint>

#include "core/numeric.h"
#include "cpu/exp.h"
#include "cpu/simd.h"
#include "cpu/softmax.h"

#if defined(EAVES_CPU_WEIGHTED_SOFTMAX_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EAVES_CPU_WEIGHTED_SOFTMAX_H_
#undef EAVES_CPU_WEIGHTED_SOFTMAX_H_
#else
#define EAVES_CPU_WEIGHTED_SOFTMAX_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {

/// Calls `body(i, n)` for each vector of a block: `i` is its first element, and its first `n` lanes are in the block.
/// Blocks are padded to whole vectors (Block), so the lanes beyond may be read and written.
template <typename A, typename Body>
HWY_INLINE void for_each_vector(std::int64_t count, Body&& body) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(Tag<A>()));
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) body(i, lanes);
  if (i < count) body(i, count - i);
}

/// The index of the first element that equals `value`, or `count`.
template <typename A>
std::int64_t find_first(const A* x, std::int64_t count, A value) {
  std::int64_t i = 0;
  while (i < count && !(x[i] == value)) ++i;
  return i;
}

template <typename A>
void scale_block(A* x, std::int64_t count, A scale) {
  const Tag<A> d;
  const auto scales = hn::Set(d, scale);
  for_each_vector<A>(count, [&](std::int64_t i, std::int64_t)
                                HWY_ATTR { hn::StoreU(hn::Mul(hn::LoadU(d, x + i), scales), d, x + i); });
}

/// to = softcap * tanh(scale * x / softcap), and its derivative unless `derivative` is nullptr. `to` may be `x`.
template <typename A>
void softcap_block(const A* x, std::int64_t count, A scale, A softcap, A* to, A* derivative) {
  const Tag<A> d;
  const auto inner = hn::Set(d, scale / softcap);
  const auto outer = hn::Set(d, softcap);
  const auto scales = hn::Set(d, scale);
  for_each_vector<A>(count, [&](std::int64_t i, std::int64_t) HWY_ATTR {
    const auto mapped = tanh_and_derivative(d, hn::Mul(hn::LoadU(d, x + i), inner));
    hn::StoreU(hn::Mul(outer, mapped.tanh), d, to + i);
    if (derivative != nullptr) hn::StoreU(hn::Mul(scales, mapped.derivative), d, derivative + i);
  });
}

struct ExpSums {
  double sum;     ///< of exp(x - anchor)
  double moment;  ///< of exp(x - anchor) * (x - anchor); a term is 0 if its exponential is
  double square;  ///< of exp(x - anchor)^2
};

template <typename A>
ExpSums exp_sums(const A* x, std::int64_t count, A anchor) {
  const Tag<A> d;
  const auto shift = hn::Set(d, anchor);
  const auto zero = hn::Zero(d);
  CompensatedSum<A> s0{zero, zero}, s1{zero, zero};
  auto m0 = zero, m1 = zero, q0 = zero, q1 = zero;
  const auto add = [&](VectorOf<A> v, CompensatedSum<A>& sum, VectorOf<A>& moment, VectorOf<A>& square) HWY_ATTR {
    const auto difference = hn::Sub(v, shift);
    const auto e = exp_term(d, difference);
    sum.add(e);
    moment = hn::Add(moment, hn::IfThenZeroElse(hn::Eq(e, zero), hn::Mul(e, difference)));
    square = hn::MulAdd(e, e, square);
  };
  for_each_pack(x, static_cast<std::size_t>(count), -infinity<A>(), [&](const Pack<A>& pack) HWY_ATTR {
    add(pack.v0, s0, m0, q0);
    add(pack.v1, s1, m1, q1);
    add(pack.v2, s0, m0, q0);
    add(pack.v3, s1, m1, q1);
  });
  return {total_of(s0, s1), hn::GetLane(hn::SumOfLanes(d, hn::Add(m0, m1))),
          hn::GetLane(hn::SumOfLanes(d, hn::Add(q0, q1)))};
}

/// Sum of x - center.
template <typename A>
double sum_of_differences(const A* x, std::int64_t count, A center) {
  const Tag<A> d;
  const auto shift = hn::Set(d, center);
  auto s0 = hn::Zero(d), s1 = hn::Zero(d);
  for_each_pack(x, static_cast<std::size_t>(count), center, [&](const Pack<A>& pack) HWY_ATTR {
    s0 = hn::Add(s0, hn::Add(hn::Sub(pack.v0, shift), hn::Sub(pack.v1, shift)));
    s1 = hn::Add(s1, hn::Add(hn::Sub(pack.v2, shift), hn::Sub(pack.v3, shift)));
  });
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(s0, s1)));
}

struct WeightedSums {
  double weighted_sum;  ///< of u * (x - center); a term is 0 if its u is
  double weight_sum;    ///< of u
};

template <typename A>
WeightedSums weighted_sums(const A* x, const A* u, std::int64_t count, A center) {
  const Tag<A> d;
  const auto shift = hn::Set(d, center);
  const auto zero = hn::Zero(d);
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto weighted_sum = zero, weight_sum = zero;
  for_each_vector<A>(count, [&](std::int64_t i, std::int64_t n) HWY_ATTR {
    auto weight = hn::LoadU(d, u + i);
    if (n < lanes) weight = hn::IfThenElseZero(hn::FirstN(d, static_cast<std::size_t>(n)), weight);
    const auto product = hn::Mul(weight, hn::Sub(hn::LoadU(d, x + i), shift));
    weighted_sum = hn::Add(weighted_sum, hn::IfThenZeroElse(hn::Eq(weight, zero), product));
    weight_sum = hn::Add(weight_sum, weight);
  });
  return {hn::GetLane(hn::SumOfLanes(d, weighted_sum)), hn::GetLane(hn::SumOfLanes(d, weight_sum))};
}

/// u = w * u.
template <typename A>
void multiply_block(const A* w, std::int64_t count, A* u) {
  const Tag<A> d;
  for_each_vector<A>(count, [&](std::int64_t i, std::int64_t)
                                HWY_ATTR { hn::StoreU(hn::Mul(hn::LoadU(d, w + i), hn::LoadU(d, u + i)), d, u + i); });
}

/// u = factor * u + term.
template <typename A>
void blend_block(A* u, std::int64_t count, A factor, A term) {
  const Tag<A> d;
  const auto factors = hn::Set(d, factor);
  const auto terms = hn::Set(d, term);
  for_each_vector<A>(count, [&](std::int64_t i, std::int64_t)
                                HWY_ATTR { hn::StoreU(hn::MulAdd(hn::LoadU(d, u + i), factors, terms), d, u + i); });
}

/// The coefficients of a row's gradient, p * (softmax_factor + slope * (x - lse)) - constant with p = exp(x - lse). The
/// first term is 0 if p is.
template <typename A>
struct SoftmaxGradient {
  A lse, softmax_factor, slope, constant;
};

/// Replaces x by its gradient.
template <typename A>
void gradient_block(A* x, std::int64_t count, const SoftmaxGradient<A>& gradient) {
  const Tag<A> d;
  const auto zero = hn::Zero(d);
  const auto lse = hn::Set(d, gradient.lse);
  const auto softmax_factor = hn::Set(d, gradient.softmax_factor);
  const auto constant = hn::Set(d, gradient.constant);
  if (gradient.slope == A(0)) {
    for_each_vector<A>(count, [&](std::int64_t i, std::int64_t) HWY_ATTR {
      const auto p = exp(d, hn::Sub(hn::LoadU(d, x + i), lse));
      hn::StoreU(hn::MulSub(p, softmax_factor, constant), d, x + i);
    });
    return;
  }
  const auto slope = hn::Set(d, gradient.slope);
  for_each_vector<A>(count, [&](std::int64_t i, std::int64_t) HWY_ATTR {
    const auto difference = hn::Sub(hn::LoadU(d, x + i), lse);
    const auto p = exp(d, difference);
    const auto product = hn::Mul(p, hn::MulAdd(slope, difference, softmax_factor));
    hn::StoreU(hn::Sub(hn::IfThenZeroElse(hn::Eq(p, zero), product), constant), d, x + i);
  });
}

/// x = x - factor * u.
template <typename A>
void subtract_block(const A* u, std::int64_t count, A factor, A* x) {
  const Tag<A> d;
  const auto factors = hn::Set(d, factor);
  for_each_vector<A>(count, [&](std::int64_t i, std::int64_t) HWY_ATTR {
    hn::StoreU(hn::NegMulAdd(factors, hn::LoadU(d, u + i), hn::LoadU(d, x + i)), d, x + i);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();
#endif  // per target
