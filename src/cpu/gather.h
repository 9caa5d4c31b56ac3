// Copies a row with any column strides, or of a type without vectors, block by block into contiguous accumulators, and
// back. Such a row then takes the same loops as a contiguous one. Compiled once per level of vector instructions, like
// simd.h.
#include <algorithm>
#include <cstdint>

#include "core/numeric.h"
#include "core/rows.h"
#include "cpu/simd.h"

#if defined(EAVES_CPU_GATHER_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EAVES_CPU_GATHER_H_
#undef EAVES_CPU_GATHER_H_
#else
#define EAVES_CPU_GATHER_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {

/// Divides columns [begin, begin + count) into runs of one stride in tensor number `tensor`, and calls
/// body(done, n, offset, stride) for each: `n` elements from `offset` on, behind the `done` elements of earlier runs.
template <int kTensors, typename Body>
void for_each_run(const StridedLoop<kTensors>& columns, int tensor, std::int64_t begin, std::int64_t count,
                  Body&& body) {
  const int inner = columns.rank - 1;
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t offset = columns.offsets(begin + done).of[tensor];
    if (inner < 0) return body(done, count - done, offset, std::int64_t{0});
    const std::int64_t size = columns.sizes[inner];
    const std::int64_t n = std::min(size - (begin + done) % size, count - done);
    body(done, n, offset, columns.strides[tensor][inner]);
    done += n;
  }
}

/// Copies columns [begin, begin + count) of a row into contiguous memory.
template <typename T, typename A, int kTensors>
void gather(const T* row, const StridedLoop<kTensors>& columns, int tensor, std::int64_t begin, std::int64_t count,
            A* to) {
  for_each_run(columns, tensor, begin, count,
               [&](std::int64_t done, std::int64_t n, std::int64_t offset, std::int64_t stride) {
                 const T* from = row + offset;
                 for (std::int64_t i = 0; i < n; ++i) {
                   to[done + i] = static_cast<A>(load_as_accumulator(from[i * stride]));
                 }
               });
}

/// The inverse of gather(): rounds the elements of columns [begin, begin + count) and writes them to their row.
template <typename T, int kTensors>
void scatter(const Accumulator<T>* elements, const StridedLoop<kTensors>& columns, int tensor, std::int64_t begin,
             std::int64_t count, T* row) {
  for_each_run(columns, tensor, begin, count,
               [&](std::int64_t done, std::int64_t n, std::int64_t offset, std::int64_t stride) {
                 T* to = row + offset;
                 for (std::int64_t i = 0; i < n; ++i) to[i * stride] = round_to<T>(elements[done + i]);
               });
}

/// The source of a loop over blocks: gathers each block into its own buffer.
template <typename T, int kTensors>
class Gather {
 public:
  using Element = Accumulator<T>;
  Gather(const StridedLoop<kTensors>& columns, const T* row, int tensor)
      : columns_(columns), row_(row), tensor_(tensor) {}

  const Element* operator()(std::int64_t begin, std::int64_t count) {
    gather(row_, columns_, tensor_, begin, count, buffer_.elements);
    return buffer_.elements;
  }

 private:
  const StridedLoop<kTensors>& columns_;
  const T* row_;
  int tensor_;
  Block<Element> buffer_;
};

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();
#endif  // per target
