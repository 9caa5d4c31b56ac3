// The mean of the losses of rows, and its gradient.
#pragma once

#include "core/numeric.h"

namespace eaves {

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
