// Tests Divider's host branch. The operators' tests on a GPU cover its device branch.
#include "core/divider.h"

#include <gtest/gtest.h>

#include <initializer_list>

namespace eaves::testing {
namespace {

constexpr std::uint32_t kLargest = 0x7fffffffu;

TEST(Divider, DividesNextToEveryMultipleAndAtTheEndsOfItsRange) {
  for (const std::uint32_t divisor :
       {1u, 2u, 3u, 5u, 7u, 10u, 42u, 127u, 128u, 1000u, 65537u, 1u << 20, 1u << 30, kLargest - 1, kLargest}) {
    const Divider divider(divisor);
    const auto expect_quotient = [&](std::uint32_t n) {
      ASSERT_EQ(divider.divide(n), n / divisor) << n << " / " << divisor;
    };
    for (std::uint32_t n = 0; n < 1000; ++n) expect_quotient(n), expect_quotient(kLargest - n);
    for (std::uint32_t k = 1; k <= kLargest / divisor && k < 100000; ++k) {
      expect_quotient(k * divisor - 1);
      expect_quotient(k * divisor);
      if (k * divisor < kLargest) expect_quotient(k * divisor + 1);
    }
  }
}

}  // namespace
}  // namespace eaves::testing
