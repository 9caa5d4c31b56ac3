#include "cpu/parallel.h"

#include <algorithm>

#ifdef _OPENMP
#include <omp.h>
#else
#include <thread>
#endif

// The thread sanitizer does not see how libgomp synchronises its threads. These macros tell it the two orders of a
// parallel region: code before the region happens before every piece, and every piece happens before code after the
// region. Then it reports no false race, and still finds a race between two pieces.
#if defined(__SANITIZE_THREAD__)
extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#define EAVES_TSAN_ACQUIRE(address) __tsan_acquire(address)
#define EAVES_TSAN_RELEASE(address) __tsan_release(address)
#else
#define EAVES_TSAN_ACQUIRE(address) static_cast<void>(address)
#define EAVES_TSAN_RELEASE(address) static_cast<void>(address)
#endif

namespace eaves::cpu {
namespace {

/// A loop divided into `pieces` ranges of nearly equal length.
struct Pieces {
  std::int64_t count;
  std::int64_t pieces;
  ParallelFor::Body body;
  void* body_data;

  // The first count % pieces ranges are longer by one. This form does not overflow for a count near 2^63.
  std::int64_t begin_of(std::int64_t piece) const { return count / pieces * piece + std::min(piece, count % pieces); }
  void run(std::int64_t first, std::int64_t last) const {
    for (std::int64_t piece = first; piece < last; ++piece) body(body_data, begin_of(piece), begin_of(piece + 1));
  }
};

#ifdef _OPENMP

// Threads take the pieces one by one, so that a preempted thread does not hold up a whole share of the work. The
// sanitizer skips this small function, because OpenMP's own reads of the shared variables would look like races; GCC
// copies the attribute to the function that it makes of the region.
__attribute__((no_sanitize("thread"), noinline)) void run_on_openmp(const Pieces& work, int threads) {
  char before = 0;
  char after = 0;
  EAVES_TSAN_RELEASE(&before);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) default(shared)
  for (std::int64_t piece = 0; piece < work.pieces; ++piece) {
    EAVES_TSAN_ACQUIRE(&before);
    work.body(work.body_data, work.begin_of(piece), work.begin_of(piece + 1));
    EAVES_TSAN_RELEASE(&after);
  }
  EAVES_TSAN_ACQUIRE(&after);
}

#else  // a build for callers with a pool (the PyTorch extension): a call without one stays on its thread

void run_on_openmp(const Pieces& work, int /*threads*/) { work.run(0, work.pieces); }

#endif

}  // namespace

int default_threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
#endif
}

namespace internal {

void parallel_for(const ExecutionContext& context, std::int64_t count, std::int64_t grain, ParallelFor::Body body,
                  void* body_data) {
  constexpr std::int64_t kPiecesPerThread = 4;  // evens out interruptions and uneven rows
  constexpr std::int64_t kPiecesForPool = 64;
  const std::int64_t most_pieces = std::max<std::int64_t>(1, count / std::max<std::int64_t>(1, grain));
  Pieces work{count, 1, body, body_data};

  if (context.parallel_for.run != nullptr) {
    work.pieces = std::min(most_pieces, context.threads > 0 ? context.threads : kPiecesForPool);
    if (work.pieces > 1) {
      const auto run = [](void* data, std::int64_t first, std::int64_t last) {
        static_cast<const Pieces*>(data)->run(first, last);
      };
      context.parallel_for.run(context.parallel_for.pool, work.pieces, run, &work);
      return;
    }
  } else {
    const int wanted = context.threads > 0 ? context.threads : default_threads();
    const int threads = static_cast<int>(std::min<std::int64_t>(wanted, most_pieces));
    if (threads > 1) {
      work.pieces = std::min(most_pieces, threads * kPiecesPerThread);
      run_on_openmp(work, threads);
      return;
    }
  }
  body(body_data, 0, count);
}

}  // namespace internal
}  // namespace eaves::cpu
