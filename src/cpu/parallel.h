// Loops over independent pieces of work, on OpenMP's threads or on the caller's pool. The number of pieces and the
// choice of threads never change the result of an index. If a result depends on the division (the sum of one long row),
// the operator divides its work by the shape alone and merges in a fixed order.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

#include "eaves/context.h"

namespace eaves::cpu {

/// The number of threads of a call that sets no limit: OpenMP's choice.
int default_threads();

namespace internal {
void parallel_for(const ExecutionContext& context, std::int64_t count, std::int64_t grain, ParallelFor::Body body,
                  void* body_data);
}  // namespace internal

/// Calls `body(begin, end)` for disjoint ranges that cover [0, count), each of at least `grain` indices if there are
/// that many. A body must not rely on the number of ranges: there may be one, or one per index. With at most `grain`
/// indices, or one thread, it is a plain call on this thread. `body` must not throw.
template <typename Body>
void parallel_for(const ExecutionContext& context, std::int64_t count, std::int64_t grain, Body&& body) {
  using Callable = std::remove_reference_t<Body>;
  if (count <= grain) {
    if (count > 0) body(std::int64_t{0}, count);
    return;
  }
  internal::parallel_for(
      context, count, grain,
      [](void* data, std::int64_t begin, std::int64_t end) { (*static_cast<Callable*>(data))(begin, end); },
      const_cast<void*>(static_cast<const void*>(std::addressof(body))));
}

/// The grain of a loop with about `elements` element operations per index. Waking a thread costs about as much as 16384
/// exponentials (3 us on a Zen 4), so no piece should be smaller.
inline std::int64_t grain_for(std::int64_t elements) {
  constexpr std::int64_t kElementsPerPiece = 16384;
  return elements >= kElementsPerPiece ? 1 : kElementsPerPiece / (elements < 1 ? 1 : elements);
}

/// The grain of a loop with about `products` multiplications and additions per index.
inline std::int64_t grain_for_products(std::int64_t products) {
  constexpr std::int64_t kProductsPerExponential = 16;
  return grain_for(products / kProductsPerExponential);
}

}  // namespace eaves::cpu
