// The bounds on the distance of a result from the float64 oracle: the accuracy contract of docs/numerics.md, in one
// place. No bound is tuned to an implementation.
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

/// The scale of a logsumexp: the larger of |lse| and |the largest element|, and at least 1/4. An lse close to 0 is the
/// logarithm of a sum close to 1. Each float32 addition to this sum has an error of 2^-24, and a GPU makes about two
/// dozen (within a thread, a warp, a block, a cluster): an absolute error of up to 5e-7, even if lse is smaller.
inline double logsumexp_scale(double lse, double max) {
  return std::max({std::abs(lse), std::isfinite(max) ? std::abs(max) : 0.0, 1.0 / 4.0});
}

/// The scale of a cross entropy's entropy, the difference of lse and the mean of z': both have the error of a
/// logsumexp.
inline double entropy_scale(double entropy, double lse, double max) {
  return std::max(std::abs(entropy), logsumexp_scale(lse, max));
}

/// The scale of a sum of p^2: the absolute error of an exponent z' - lse is a relative error of p.
inline double sum_sq_scale(double sum_sq, double max) {
  return sum_sq * (1.0 + (std::isfinite(max) ? std::abs(max) : 0.0));
}

/// The scale of the part u * (lse - z') of one class in a loss, as if lse and z' did not cancel: their difference has
/// their absolute errors. The scale of a loss is the sum over its classes, and the z-loss; the scale of a reduced loss
/// is the sum over its rows.
inline double class_loss_scale(double mass, double logit, double lse_scale) {
  if (mass == 0.0) return 0.0;
  return std::abs(mass) * std::max(lse_scale, std::isfinite(logit) ? std::abs(logit) : 0.0);
}

/// The scale of a z-loss: twice its size, because a square has twice the relative error.
inline double z_loss_scale(double weight, double lse_scale) {
  return weight == 0.0 ? 0.0 : 2.0 * weight * lse_scale * lse_scale;
}

/// The terms of a cross entropy's gradient in one class. Their scale is the size as if the terms did not cancel,
/// because in a model that has learnt its smoothed targets they cancel almost completely. The scale of a row is the
/// largest scale of its classes. The hard target's p - 1 is one term: as p goes to 1 it is the whole gradient, and has
/// to be precise. Transformed logits, and an lse that the call computes itself, are rounded to a quarter of the
/// contract's 2e-6, and an error of z' - lse is a relative error of p. The scale leaves out the slope of a softcap,
/// which is at most 1 and cancels by itself as tanh goes to 1.
struct GradientTerms {
  double probability = 0.0;      ///< p
  double of_probability = 0.0;   ///< the sum of the absolute factors of p, without of_target
  double of_target = 0.0;        ///< the factor of the hard target's p - 1
  double p_minus_one = 0.0;      ///< the hard target's p - 1, precise
  double of_distribution = 0.0;  ///< the term without p: u without the hard target's part
  double rounded = 0.0;          ///< |z'| if z' is not z, plus |lse| if the call computes lse itself
  double slope = 1.0;            ///< dz'/dz without the softcap
};

inline double gradient_scale(const GradientTerms& terms) {
  const double rounding = terms.rounded / 4.0;
  const double of_p = terms.of_probability * (1.0 + rounding) + terms.of_target * rounding;
  const double of_target = terms.of_target == 0.0 ? 0.0 : terms.of_target * std::abs(terms.p_minus_one);
  return terms.slope *
         ((terms.probability == 0.0 ? 0.0 : terms.probability * of_p) + of_target + terms.of_distribution);
}

/// The scale of an activation, or of its derivative: its size. One of its factors is a sigmoid or an exponential, and
/// this factor is multiplied with at most `beside`. It may be 0 if it would be subnormal, and also up to twice the
/// smallest normal number, if its power of two was rounded down.
inline double activation_scale(DType dtype, double size, double beside) {
  const double smallest = dtype == DType::float64 ? 0x1p-1021 / 1e-13 : 0x1p-125 / 2e-6;
  return std::max(std::abs(size), std::abs(beside) * smallest);
}

/// The scale of an element of a softmax, or of its gradient: its own size, and at least 1/1024 of the largest of its
/// row or column. If |x - lse| exceeds 16, its rounding to float32, which is a relative error of exp(x - lse), is half
/// of the contract's bound.
inline double softmax_scale(double size, double largest) {
  return std::max(std::abs(size), std::abs(largest) / 1024.0);
}

/// The bound on |result - exact|. `scale` is the size of the result's row: logsumexp_scale() for a logsumexp, the
/// largest |gradient| of the row for its gradient, and the functions above for cross_entropy.
///   float32            2e-6 of the scale
///   float16, bfloat16  half a unit in the last place of the exact value, and 1e-6
///   float64            1e-13 of the scale: used for gradient checks, not part of the contract
inline double allowed_error(DType dtype, double exact, double scale) {
  if (dtype == DType::float32) return 2e-6 * scale;
  if (dtype == DType::float64) return 1e-13 * scale;
  return 0.5 * unit_in_last_place(dtype, exact) + 1e-6;
}

/// The bound of an elementwise result with terms of the size `scale`. In 16 bits the contract's 1e-6 is the error of
/// four float32 roundings of terms of size 4, the largest that inputs around 1 give; larger terms have a larger error.
inline double allowed_elementwise_error(DType dtype, double exact, double scale) {
  if (size_of(dtype) != 2) return allowed_error(dtype, exact, scale);
  return 0.5 * unit_in_last_place(dtype, exact) + 1e-6 * std::max(1.0, scale / 4.0);
}

/// The bound of a sum over many terms; `scale` is the sum of their sizes. In 16 bits it is the bound of float32, and
/// one rounding.
inline double allowed_sum_error(DType dtype, double exact, double scale) {
  if (size_of(dtype) != 2) return allowed_error(dtype, exact, scale);
  return 0.5 * unit_in_last_place(dtype, exact) + std::max(1e-6, allowed_error(DType::float32, exact, scale));
}

/// The bound of a gradient of 16 bits over float32 logits, from terms of the size `scale`. It is the bound over logits
/// of 16 bits, with terms that are not much larger than 1 in any test; for larger terms 1e-6 is multiplied by `scale`.
inline double allowed_narrow_error(DType dtype, double exact, double scale) {
  return 0.5 * unit_in_last_place(dtype, exact) + 1e-6 * std::max(1.0, scale);
}

/// The bound of an element of a matrix product; `scale` is the sum of the sizes of its k terms and of the number that
/// is added to them. Each addition has a random error of half a unit of a partial sum, so the errors of k additions add
/// up to sqrt(k) halves; a factor of 4 covers the worst of many elements. Two more halves are for alpha and for the
/// added number.
inline double allowed_product_error(DType dtype, double exact, double scale, std::int64_t k) {
  const double unit = dtype == DType::float64 ? 0x1p-53 : 0x1p-24;
  const double sum = (4.0 * std::sqrt(static_cast<double>(k)) + 2.0) * unit * scale;
  return sum + (size_of(dtype) == 2 ? 0.5 * unit_in_last_place(dtype, exact) : 0.0);
}

/// Is a product rounded to the dtype of c before it is added to c? core/gemm.h defines this.
inline bool rounds_before_adding(Device device, DType c) { return device.type == DeviceType::cuda && size_of(c) == 2; }

/// The largest finite number of a dtype: beyond it and half a unit, a result rounds to infinity.
inline double largest_finite(DType dtype) {
  if (dtype == DType::float16) return 65504.0;
  if (dtype == DType::bfloat16) return 0x1.fep127;
  if (dtype == DType::float32) return 0x1.fffffep127;
  return 0x1.fffffffffffffp1023;
}

/// "1.23e-06", for sentences.
inline std::string short_text(double number) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g", number);
  return text;
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

/// difference_beyond() for the bound of the contract.
inline std::string difference(DType dtype, double result, double exact, double scale) {
  return difference_beyond(allowed_error(dtype, exact, scale), dtype, result, exact);
}

}  // namespace eaves::testing
