// The oracle: the header's formula of lrpe_cosine in float64 loops, one element at a time. It shares no code with the
// backends, and computes the positions of grids, packed sequences and the rest in another way.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "eaves/lrpe_cosine.h"
#include "testing/reference.h"

namespace eaves::reference {

/// The coordinate of a cell on one axis of a grid: a digit of a counter, the last digit fastest.
inline std::int64_t coordinate(const std::vector<std::int64_t>& grid, std::int64_t cell, std::size_t axis) {
  for (std::size_t digit = grid.size() - 1; digit > axis; --digit) cell /= grid[digit];
  return cell % grid[axis];
}

/// The tensors lie in CPU memory. x is [B, H, N, D].
class LrpeCosine {
 public:
  LrpeCosine(const TensorView& x, const LrpeAngles& angles, Activation activation, int activation_dim)
      : x_(x),
        angles_(angles),
        activation_(activation),
        over_sequence_(activation_dim == -2),
        is_double_(x.dtype == DType::float64) {
    for (const std::int64_t size : angles.grid) grid_.push_back(size);
    if (grid_.empty()) grid_.push_back(x.shape[2] - angles.extra_tokens);
    if (activation == Activation::softmax) compute_lse();
  }

  double x(std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t d) const { return element(x_, {b, h, n, d}); }

  /// The position of feature d of token n, in the type that angles are computed in; 0 if the angle does not depend on
  /// theta.
  double position(std::int64_t b, std::int64_t n, std::int64_t d) const {
    const std::int64_t axis = axis_of(d);
    if (!has_angle(n, d)) return 0.0;
    if (angles_.positions.is_present) {
      return rounded(angles_.positions.shape.size() == 1 ? element(angles_.positions, {n})
                                                         : element(angles_.positions, {b, n}));
    }
    if (angles_.cu_seqlens.is_present) {
      std::int64_t start = 0;
      for (std::int64_t s = 0; s + 1 < angles_.cu_seqlens.shape[0]; ++s) {
        const auto first = static_cast<std::int64_t>(element(angles_.cu_seqlens, {s}));
        if (first <= n) start = first;
      }
      return rounded(static_cast<double>(n - start));
    }
    double offset = static_cast<double>(angles_.offset);
    if (angles_.offsets.is_present) {
      offset += element(angles_.offsets, angles_.offsets.element_count() == 1 ? 0 : b);
    }
    const std::int64_t on_axis = coordinate(grid_, n - angles_.extra_tokens, static_cast<std::size_t>(axis));
    return rounded(offset + static_cast<double>(on_axis));
  }

  /// The index of feature d in a row of theta.
  std::int64_t theta_feature(std::int64_t d) const {
    return angles_.theta.shape[1] == 1 ? 0 : d % angles_.theta.shape[1];
  }

  double phi(std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t d) const {
    if (!has_angle(n, d)) return 0.0;
    return rounded(element(angles_.theta, {angles_.theta.shape[0] == 1 ? 0 : h, theta_feature(d)}) * position(b, n, d));
  }

  double activated(std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t d) const {
    const double z = x(b, h, n, d);
    switch (activation_) {
      case Activation::none:
        return z;
      case Activation::relu:
        return std::isnan(z) ? z : std::fmax(z, 0.0);
      case Activation::sigmoid:
        return sigmoid(z);
      case Activation::silu:
        return z * sigmoid(z);
      case Activation::softmax:
        return softmax_element(z, static_cast<std::size_t>(lse_index(b, h, n, d)));
    }
    return 0.0;
  }

  /// The lse of the softmax that contains element (b, h, n, d).
  double lse(std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t d) const {
    return lse_[static_cast<std::size_t>(lse_index(b, h, n, d))];
  }

  /// lse - from, for a finite lse: with the digits that a float64 lse of 1e30 lacks.
  double lse_beyond(double from, std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t d) const {
    const auto row = static_cast<std::size_t>(lse_index(b, h, n, d));
    return (anchor_[row] - from) + std::log(sum_[row]);
  }

  /// The largest element of this softmax, at the anchor.
  double largest_activated(std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t d) const {
    return 1.0 / sum_[static_cast<std::size_t>(lse_index(b, h, n, d))];
  }

  /// Element (b, h, n, d) of out, [B, H, N, 2 D].
  double out(std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t d) const {
    const std::int64_t features = x_.shape[3];
    const double a = activated(b, h, n, d % features);
    const double angle = phi(b, h, n, d % features);
    return d < features ? a * std::cos(angle) : a * std::sin(angle);
  }

  /// The number of the softmax that contains element (b, h, n, d).
  std::size_t softmax_of(std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t d) const {
    return static_cast<std::size_t>(lse_index(b, h, n, d));
  }

  struct Gradients {
    std::vector<double> x;              ///< [B, H, N, D]
    std::vector<double> x_scale;        ///< the size of each element if its terms did not cancel
    std::vector<double> x_largest;      ///< the largest |x| of each softmax; see softmax_of
    std::vector<double> scale_largest;  ///< the largest x_scale of each softmax
    std::vector<double> theta;          ///< [theta's heads, E]
    std::vector<double> theta_scale;    ///< the sum of the absolute terms
  };

  Gradients gradients(const TensorView& grad_out) const {
    const Dims& shape = x_.shape;
    const std::int64_t theta_features = angles_.theta.shape[1];
    Gradients result;
    const auto elements = static_cast<std::size_t>(x_.element_count());
    result.x.assign(elements, 0.0);
    result.x_scale.assign(elements, 0.0);
    result.theta.assign(static_cast<std::size_t>(angles_.theta.element_count()), 0.0);
    result.theta_scale = result.theta;
    result.x_largest.assign(lse_.size(), 0.0);
    result.scale_largest.assign(lse_.size(), 0.0);
    std::vector<double> g(elements), g_scale(elements), sum(lse_.size(), 0.0), sum_scale(lse_.size(), 0.0);
    for_each([&](std::int64_t i, std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t d) {
      const auto at = static_cast<std::size_t>(i);
      const double g_cos = element(grad_out, {b, h, n, d});
      const double g_sin = element(grad_out, {b, h, n, d + shape[3]});
      const double angle = phi(b, h, n, d);
      const double a = activated(b, h, n, d);
      g[at] = g_cos * std::cos(angle) + g_sin * std::sin(angle);
      g_scale[at] = std::abs(g_cos * std::cos(angle)) + std::abs(g_sin * std::sin(angle));
      if (activation_ == Activation::softmax) {
        sum[static_cast<std::size_t>(lse_index(b, h, n, d))] += a * g[at];
        sum_scale[static_cast<std::size_t>(lse_index(b, h, n, d))] += std::abs(a) * g_scale[at];
      }
      if (!has_angle(n, d)) return;
      const double p = position(b, n, d);
      const auto theta_at =
          static_cast<std::size_t>((angles_.theta.shape[0] == 1 ? 0 : h) * theta_features + theta_feature(d));
      result.theta[theta_at] += p * a * (g_sin * std::cos(angle) - g_cos * std::sin(angle));
      result.theta_scale[theta_at] +=
          std::abs(p * a) * (std::abs(g_sin * std::cos(angle)) + std::abs(g_cos * std::sin(angle)));
    });
    for_each([&](std::int64_t i, std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t d) {
      const auto at = static_cast<std::size_t>(i);
      if (activation_ == Activation::softmax) {
        const auto row = static_cast<std::size_t>(lse_index(b, h, n, d));
        const double a = activated(b, h, n, d);
        result.x[at] = a * (g[at] - sum[row]);
        result.x_scale[at] = a * (g_scale[at] + sum_scale[row]);
        result.x_largest[row] = std::fmax(result.x_largest[row], std::abs(result.x[at]));
        result.scale_largest[row] = std::fmax(result.scale_largest[row], result.x_scale[at]);
      } else {
        // Where relu has the derivative 0, the gradient is 0 even if g is NaN, as in PyTorch.
        const double of_x = derivative(x(b, h, n, d));
        const bool is_closed = activation_ == Activation::relu && of_x == 0.0;
        result.x[at] = is_closed ? 0.0 : of_x * g[at];
        result.x_scale[at] = derivative_scale(x(b, h, n, d)) * g_scale[at];
      }
    });
    return result;
  }

 private:
  /// Rounds to the type that angles are computed in: float32, or float64 if x is float64.
  double rounded(double value) const { return is_double_ ? value : static_cast<double>(static_cast<float>(value)); }

  /// Does the angle of feature d of token n depend on theta?
  bool has_angle(std::int64_t n, std::int64_t d) const {
    return n >= angles_.extra_tokens && axis_of(d) < static_cast<std::int64_t>(grid_.size());
  }

  /// Not exp(z - lse): an lse of 1e30 lacks the digits of log(sum), and an lse of +inf would give 0.
  double softmax_element(double z, std::size_t row) const {
    if (std::isinf(lse_[row])) return std::numeric_limits<double>::quiet_NaN();
    return std::exp(z - anchor_[row]) / sum_[row];
  }

  static double sigmoid(double z) { return 1.0 / (1.0 + std::exp(-z)); }

  double derivative(double z) const {
    if (activation_ == Activation::none) return 1.0;
    if (activation_ == Activation::relu) return std::isnan(z) ? 1.0 : (z > 0.0 ? 1.0 : 0.0);
    const double s = sigmoid(z);
    const double other = 1.0 / (1.0 + std::exp(z));  // 1 - s, precise
    return activation_ == Activation::sigmoid ? s * other : s + z * s * other;
  }

  /// The size of the derivative if the two terms of silu's did not cancel, as they do at its minimum.
  double derivative_scale(double z) const {
    if (activation_ != Activation::silu) return std::abs(derivative(z));
    const double s = sigmoid(z);
    return s + std::abs(z) * s / (1.0 + std::exp(z));
  }

  std::int64_t axis_of(std::int64_t d) const {
    const std::int64_t size = angles_.theta.shape[1];
    if (size == 0) return static_cast<std::int64_t>(grid_.size());
    return size == 1 && grid_.size() == 1 ? 0 : d / size;
  }

  std::int64_t lse_index(std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t d) const {
    const std::int64_t head = b * x_.shape[1] + h;
    return over_sequence_ ? head * x_.shape[3] + d : head * x_.shape[2] + n;
  }

  template <typename Body>
  void for_each(Body body) const {
    std::int64_t i = 0;
    for (std::int64_t b = 0; b < x_.shape[0]; ++b) {
      for (std::int64_t h = 0; h < x_.shape[1]; ++h) {
        for (std::int64_t n = 0; n < x_.shape[2]; ++n) {
          for (std::int64_t d = 0; d < x_.shape[3]; ++d) body(i++, b, h, n, d);
        }
      }
    }
  }

  void compute_lse() {
    const std::int64_t heads = x_.shape[0] * x_.shape[1];
    const std::size_t rows = static_cast<std::size_t>(heads * (over_sequence_ ? x_.shape[3] : x_.shape[2]));
    anchor_.assign(rows, -std::numeric_limits<double>::infinity());
    sum_.assign(rows, 0.0);
    for_each([&](std::int64_t, std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t d) {
      double& max = anchor_[static_cast<std::size_t>(lse_index(b, h, n, d))];
      max = std::fmax(max, x(b, h, n, d));
    });
    // An infinite maximum is no anchor: without one, exp of the elements is 0, infinity or NaN, as in the formula.
    for (double& max : anchor_) max = std::isfinite(max) ? max : 0.0;
    for_each([&](std::int64_t, std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t d) {
      const auto row = static_cast<std::size_t>(lse_index(b, h, n, d));
      sum_[row] += std::exp(x(b, h, n, d) - anchor_[row]);
    });
    lse_.resize(rows);
    for (std::size_t row = 0; row < rows; ++row) lse_[row] = anchor_[row] + std::log(sum_[row]);
  }

  TensorView x_;
  LrpeAngles angles_;
  Activation activation_;
  bool over_sequence_;
  bool is_double_;
  std::vector<std::int64_t> grid_;
  std::vector<double> lse_, anchor_, sum_;  ///< of each softmax; lse = anchor + log(sum)
};

}  // namespace eaves::reference
