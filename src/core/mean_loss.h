// The weights of rows, the mean of their losses, and its gradient.
#pragma once

#include "core/numeric.h"

namespace eaves {

/// number * row_weight, for a row's loss or its gradient. A weight of 0 gives 0 even for infinities and NaN.
template <typename A>
EAVES_HOST_DEVICE A weigh(A number, A row_weight) {
  return row_weight == A(0) ? A(0) : number * row_weight;
}

/// The mean's divisor: the sum of the rows' weights, or NaN if that sum is infinite, so that loss and gradient are NaN.
EAVES_HOST_DEVICE inline double divisor_of_sum(double weights) {
  return weights - weights == 0.0 ? weights : nan_of<double>();
}

/// The mean of losses: sum / divisor. A divisor of 0 means that no row counts, and gives 0. The caller's normalizer may
/// be 0 too: then only 0 / 0 gives 0.
EAVES_HOST_DEVICE inline double mean_of(double sum, double divisor, bool has_normalizer) {
  return divisor == 0.0 && (!has_normalizer || sum == 0.0) ? 0.0 : sum / divisor;
}

/// dL/d(loss of a row) from dL/d(mean). A divisor of 0 means that no row counts: mean and gradient are 0.
template <typename A>
EAVES_HOST_DEVICE A mean_gradient(A gradient, A divisor) {
  return divisor == A(0) ? A(0) : gradient / divisor;
}

}  // namespace eaves
