// A call of cross_entropy in a test: a result outside of the contract fails the test.
#pragma once

#include <gtest/gtest.h>

#include "ops/cross_entropy/cross_entropy_case.h"
#include "testing/calls.h"
#include "testing/devices.h"

namespace eaves::testing {

/// compare_cross_entropy(), which must have no failure.
inline CrossEntropyShares check_cross_entropy(const CrossEntropyCase& test_case) {
  const CrossEntropyShares shares = compare_cross_entropy(test_case);
  EXPECT_EQ(shares.failure, "");
  return shares;
}

}  // namespace eaves::testing
