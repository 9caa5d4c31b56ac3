// Division by a number that is known before a kernel starts, as a multiplication and a shift. A division takes a GPU
// twenty instructions.
#pragma once

#include <bit>
#include <cstdint>

#include "core/numeric.h"

namespace eaves {

/// n / divisor for 0 <= n < 2^31 and 1 <= divisor < 2^31 (T. Granlund, P. Montgomery, "Division by invariant integers
/// using multiplication", 1994).
class Divider {
 public:
  Divider() = default;
  explicit Divider(std::uint32_t divisor)
      : shift_(static_cast<std::uint32_t>(std::bit_width(divisor - 1))),
        multiplier_(static_cast<std::uint32_t>(((((std::uint64_t{1} << shift_) - divisor) << 32) / divisor) + 1)) {}

  EAVES_HOST_DEVICE std::uint32_t divide(std::uint32_t n) const {
#ifdef __CUDA_ARCH__
    return (__umulhi(n, multiplier_) + n) >> shift_;
#else
    return static_cast<std::uint32_t>((((std::uint64_t{n} * multiplier_) >> 32) + n) >> shift_);
#endif
  }

 private:
  std::uint32_t shift_ = 0;
  std::uint32_t multiplier_ = 1;
};

}  // namespace eaves
