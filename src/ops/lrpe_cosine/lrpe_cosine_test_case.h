// A call of lrpe_cosine in a test: a result outside of the contract fails the test.
#pragma once

#include <gtest/gtest.h>

#include "ops/lrpe_cosine/lrpe_cosine_case.h"
#include "testing/calls.h"
#include "testing/devices.h"

namespace eaves::testing {

/// compare_lrpe_cosine(), which must have no failure.
inline LrpeCosineShares check_lrpe_cosine(const LrpeCosineCase& test_case) {
  const LrpeCosineShares shares = compare_lrpe_cosine(test_case);
  EXPECT_EQ(shares.failure, "");
  return shares;
}

}  // namespace eaves::testing
