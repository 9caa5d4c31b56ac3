// The weights of rows, the mean of their losses, and its gradient.
#pragma once

#include "core/numeric.h"

namespace eaves {

/// A number of a row, its loss or the gradient of that, times the row's weight. A weight of 0 makes any number 0,
/// infinities and NaN too.
template <typename A>
EAVES_HOST_DEVICE A weigh(A number, A row_weight) {
  return row_weight == A(0) ? A(0) : number * row_weight;
}

/// The mean's divisor, from the sum of the rows' weights. Divided by infinite weights, loss and gradient are NaN.
EAVES_HOST_DEVICE inline double divisor_of_sum(double weights) {
  return weights - weights == 0.0 ? weights : nan_of<double>();
}

/// The mean of losses from their sum. Nothing counts: 0. A divisor of the caller's is taken as it is, but for 0 / 0.
EAVES_HOST_DEVICE inline double mean_of(double sum, double divisor, bool has_normalizer) {
  return divisor == 0.0 && (!has_normalizer || sum == 0.0) ? 0.0 : sum / divisor;
}

/// dL/d(loss of a row) from dL/d(mean). Where nothing counts, the mean is 0 and so is its gradient.
template <typename A>
EAVES_HOST_DEVICE A mean_gradient(A gradient, A divisor) {
  return divisor == A(0) ? A(0) : gradient / divisor;
}

}  // namespace eaves
