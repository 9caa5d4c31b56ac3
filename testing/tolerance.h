// How far a result may be from the float64 oracle: the accuracy contract of docs/numerics.md, in one place. Nothing
// here is tuned to an implementation.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include "eaves/tensor.h"

namespace eaves::testing {

/// Distance between neighbouring numbers of `dtype` around `value`.
inline double unit_in_last_place(DType dtype, double value) {
  int mantissa_bits = 23;
  int smallest_exponent = -126;
  if (dtype == DType::float64) mantissa_bits = 52, smallest_exponent = -1022;
  if (dtype == DType::float16) mantissa_bits = 10, smallest_exponent = -14;
  if (dtype == DType::bfloat16) mantissa_bits = 7;
  int exponent = 0;
  std::frexp(value, &exponent);
  return std::ldexp(1.0, std::max(exponent - 1, smallest_exponent) - mantissa_bits);
}

/// The scale of a logsumexp: the larger of |lse| and |the largest element|, and at least 1/4. Next to zero, lse is the
/// logarithm of a sum next to 1, to which float32 adds with an error of 2^-24 each time, about two dozen times on a GPU
/// (within a thread, a warp, a block, a cluster): an absolute error of up to 5e-7, however small lse is.
inline double logsumexp_scale(double lse, double max) {
  return std::max({std::abs(lse), std::isfinite(max) ? std::abs(max) : 0.0, 1.0 / 4.0});
}

/// The scale of a cross entropy's entropy: lse and the mean of z' are subtracted, each known as a logsumexp is.
inline double entropy_scale(double entropy, double lse, double max) {
  return std::max(std::abs(entropy), logsumexp_scale(lse, max));
}

/// The scale of a sum of p^2: each p is known as well as its exponent z' - lse is.
inline double sum_sq_scale(double sum_sq, double max) {
  return sum_sq * (1.0 + (std::isfinite(max) ? std::abs(max) : 0.0));
}

/// The scale of one class's part u * (lse - z') of a loss, as if lse and z' did not cancel: what is left of two large
/// numbers is known as well as they are. That of a loss is the sum over its classes, and the z-loss; of a reduced loss
/// the sum over its rows.
inline double class_loss_scale(double mass, double logit, double lse_scale) {
  if (mass == 0.0) return 0.0;
  return std::abs(mass) * std::max(lse_scale, std::isfinite(logit) ? std::abs(logit) : 0.0);
}

/// The scale of a z-loss: twice its size, because a square has twice the relative error.
inline double z_loss_scale(double weight, double lse_scale) {
  return weight == 0.0 ? 0.0 : 2.0 * weight * lse_scale * lse_scale;
}

/// The scale of a cross entropy's gradient in one class, as if its terms did not cancel (a model that has learnt its
/// smoothed targets has a gradient of nothing but what is left of them). The scale of a row is the largest of its
/// classes. The hard target's p - 1 is one term: as p goes to 1 it is all that teaches, and has to be precise.
/// Logits that were transformed, and an lse that is computed on the way, have been rounded, to a quarter of the
/// contract's 2e-6: an error of z' - lse is a relative error of p. And a gradient is measured before the slope of a
/// softcap, at most 1, which cancels itself as tanh goes to 1.
struct GradientTerms {
  double probability = 0.0;      ///< p
  double of_probability = 0.0;   ///< the absolute terms that p is multiplied with, added up, without the next
  double of_target = 0.0;        ///< what the hard target's p - 1 is multiplied with
  double p_minus_one = 0.0;      ///< that p - 1, precise
  double of_distribution = 0.0;  ///< what stands beside p: the other part of u
  double rounded = 0.0;          ///< |z'| where z' is not z, and |lse| where the backward was not given one
  double slope = 1.0;            ///< dz'/dz without the softcap
};

inline double gradient_scale(const GradientTerms& terms) {
  const double rounding = terms.rounded / 4.0;
  const double of_p = terms.of_probability * (1.0 + rounding) + terms.of_target * rounding;
  const double of_target = terms.of_target == 0.0 ? 0.0 : terms.of_target * std::abs(terms.p_minus_one);
  return terms.slope *
         ((terms.probability == 0.0 ? 0.0 : terms.probability * of_p) + of_target + terms.of_distribution);
}

/// The scale of an activation, or of its derivative, of this size: the size. What is multiplied with one of its
/// factors, a sigmoid or an exponential, is `beside` at most; a factor that would be subnormal may be 0, and so may one
/// up to twice as large, whose power of two was rounded down.
inline double activation_scale(DType dtype, double size, double beside) {
  const double smallest = dtype == DType::float64 ? 0x1p-1021 / 1e-13 : 0x1p-125 / 2e-6;
  return std::max(std::abs(size), std::abs(beside) * smallest);
}

/// The scale of an element of a softmax, or of its gradient: its own size, and at least 1/1024 of the largest of its
/// row or column. Where the exponent x - lse is beyond 16 in size, its rounding to float32 alone, which is a relative
/// error of exp(x - lse), is half of what the contract allows.
inline double softmax_scale(double size, double largest) {
  return std::max(std::abs(size), std::abs(largest) / 1024.0);
}

/// The bound on |result - exact|. `scale` is the size of the row that the result comes from: for a logsumexp
/// logsumexp_scale(); for its gradient the largest |gradient| of the row; for cross_entropy the functions above.
///   float32            2e-6 of the scale
///   float16, bfloat16  half a unit in the last place of the exact value, and 1e-6
///   float64            1e-13 of the scale: used for gradient checks, not part of the contract
inline double allowed_error(DType dtype, double exact, double scale) {
  if (dtype == DType::float32) return 2e-6 * scale;
  if (dtype == DType::float64) return 1e-13 * scale;
  return 0.5 * unit_in_last_place(dtype, exact) + 1e-6;
}

/// The bound of an elementwise result whose terms have the size `scale`. In 16 bits the contract's 1e-6 is what four
/// roundings in float32 make of terms of size 4, the most that inputs around 1 come to; of larger terms they make more.
inline double allowed_elementwise_error(DType dtype, double exact, double scale) {
  if (size_of(dtype) != 2) return allowed_error(dtype, exact, scale);
  return 0.5 * unit_in_last_place(dtype, exact) + 1e-6 * std::max(1.0, scale / 4.0);
}

/// The bound of a sum over many terms, of which `scale` is the sum of their sizes: in 16 bits what float32 is allowed,
/// rounded once.
inline double allowed_sum_error(DType dtype, double exact, double scale) {
  if (size_of(dtype) != 2) return allowed_error(dtype, exact, scale);
  return 0.5 * unit_in_last_place(dtype, exact) + std::max(1e-6, allowed_error(DType::float32, exact, scale));
}

/// The bound of a gradient of 16 bits that is written over float32 logits, from terms of the size `scale`: as that over
/// logits of 16 bits, which are in no test much larger than 1, and of larger terms as many parts in a million.
inline double allowed_narrow_error(DType dtype, double exact, double scale) {
  return 0.5 * unit_in_last_place(dtype, exact) + 1e-6 * std::max(1.0, scale);
}

/// The bound of an element of a matrix product, of which `scale` is the sum of the sizes of its k terms and of what is
/// added to them. Each addition is off by half a unit of a partial sum, at random, so that the errors of k of them add
/// up to sqrt(k) halves, with a factor of 4 for the worst of many elements; and two more for alpha and what is added.
inline double allowed_product_error(DType dtype, double exact, double scale, std::int64_t k) {
  const double unit = dtype == DType::float64 ? 0x1p-53 : 0x1p-24;
  const double sum = (4.0 * std::sqrt(static_cast<double>(k)) + 2.0) * unit * scale;
  return sum + (size_of(dtype) == 2 ? 0.5 * unit_in_last_place(dtype, exact) : 0.0);
}

/// Is a product rounded to the type of c before it is added to it? As core/gemm.h says.
inline bool rounds_before_adding(Device device, DType c) { return device.type == DeviceType::cuda && size_of(c) == 2; }

/// The largest finite number of a dtype: beyond it and half a unit, a result rounds to infinity.
inline double largest_finite(DType dtype) {
  if (dtype == DType::float16) return 65504.0;
  if (dtype == DType::bfloat16) return 0x1.fep127;
  if (dtype == DType::float32) return 0x1.fffffep127;
  return 0x1.fffffffffffffp1023;
}

/// Empty when `result` is at most `allowed` away from `exact`; otherwise a sentence with expected, actual and distance.
inline std::string difference_beyond(double allowed, DType dtype, double result, double exact) {
  if (std::isnan(exact)) return std::isnan(result) ? "" : "expected NaN, actual " + std::to_string(result);
  if (std::isinf(exact)) return result == exact ? "" : "expected infinity, actual " + std::to_string(result);
  const double unit = unit_in_last_place(dtype, exact);
  const bool overflows = std::abs(exact) >= largest_finite(dtype) + 0.5 * unit;
  if (overflows && std::isinf(result) && std::signbit(result) == std::signbit(exact)) return "";
  const double error = std::abs(result - exact);
  if (error <= allowed) return "";
  char text[200];
  std::snprintf(text, sizeof(text), "expected %.9g, actual %.9g, distance %.3g = %.2f units in the last place of %s",
                exact, result, error, error / unit, name_of(dtype));
  return text;
}

/// Likewise of the contract.
inline std::string difference(DType dtype, double result, double exact, double scale) {
  return difference_beyond(allowed_error(dtype, exact, scale), dtype, result, exact);
}

}  // namespace eaves::testing
