// The oracle: the header's formulas of logsumexp and its gradient in float64 loops over indices. It reads the same
// views as the operator, shares no code with the backends, and stays slow and simple.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "core/rows.h"
#include "eaves/tensor.h"
#include "testing/reference.h"

namespace eaves::reference {

/// logsumexp over `axes` of x, in row-major order of the other axes. Exact to a few units in the last place of float64.
struct LogsumexpRows {
  std::vector<double> lse;
  std::vector<double> lse_minus_anchor;  ///< has digits that lse lacks; the anchor is max, or 0 if max is infinite
  std::vector<double> max;               ///< the largest element, -inf for an empty row
  std::vector<std::int64_t> row_of;      ///< the row of each element of x in row-major order
};

inline LogsumexpRows logsumexp(const TensorView& x, const AxisSet& axes) {
  LogsumexpRows rows;
  std::int64_t row_count = 1;
  for (int axis = 0; axis < x.shape.size(); ++axis) {
    if (!axes.contains[axis]) row_count *= x.shape[axis];
  }
  const double infinity = std::numeric_limits<double>::infinity();
  rows.max.assign(static_cast<std::size_t>(row_count), -infinity);
  rows.lse.assign(static_cast<std::size_t>(row_count), -infinity);
  rows.lse_minus_anchor = rows.lse;
  if (x.element_count() == 0) return rows;

  Dims index = x.shape;
  for (int axis = 0; axis < x.shape.size(); ++axis) index[axis] = 0;
  std::vector<double> values;
  do {
    std::int64_t row = 0;
    for (int axis = 0; axis < x.shape.size(); ++axis) {
      if (!axes.contains[axis]) row = row * x.shape[axis] + index[axis];
    }
    rows.row_of.push_back(row);
    values.push_back(element(x, index));
    double& max = rows.max[static_cast<std::size_t>(row)];
    max = std::fmax(max, values.back());
  } while (next_index(index, x.shape));

  std::vector<double>& sum = rows.lse_minus_anchor;  // until its logarithm replaces it
  sum.assign(sum.size(), 0.0);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto row = static_cast<std::size_t>(rows.row_of[i]);
    // An infinite maximum is not subtracted: exp of the element itself is 0, infinity or NaN, as in the formula.
    sum[row] += std::exp(values[i] - (std::isfinite(rows.max[row]) ? rows.max[row] : 0.0));
  }
  for (std::size_t row = 0; row < sum.size(); ++row) {
    sum[row] = std::log(sum[row]);
    rows.lse[row] = sum[row] + (std::isfinite(rows.max[row]) ? rows.max[row] : 0.0);
  }
  return rows;
}

/// g * exp(x - (anchor + lse)), 0 if lse is -inf. `lse` is the number that the backward gets, not the exact one, or its
/// difference from an anchor.
inline double logsumexp_gradient(double x, double lse, double grad_out, double anchor = 0.0) {
  if (lse == -std::numeric_limits<double>::infinity()) return 0.0;
  return grad_out * std::exp((x - anchor) - lse);
}

}  // namespace eaves::reference
