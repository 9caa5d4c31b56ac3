// A call of logsumexp in a test: a result outside of the contract fails the test.
#pragma once

#include <gtest/gtest.h>

#include "ops/logsumexp/logsumexp_case.h"
#include "testing/calls.h"
#include "testing/devices.h"

namespace eaves::testing {

/// compare_logsumexp(), which must have no failure.
inline LogsumexpShares check_logsumexp(const LogsumexpCase& test_case) {
  const LogsumexpShares shares = compare_logsumexp(test_case);
  EXPECT_EQ(shares.failure, "");
  return shares;
}

}  // namespace eaves::testing
