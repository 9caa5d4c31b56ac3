// Rows whose columns have any strides, or a type without vectors: copied block by block into contiguous accumulators,
// so that such a row runs through the same loops as a contiguous one, and back. Compiled once per level of vector
// instructions, like simd.h.
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

/// Calls body(done, n, offset, stride) for the stretches of columns [begin, begin + count) that have one stride in
/// tensor number `tensor`: `n` elements from `offset` on.
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

/// Columns [begin, begin + count) of a row into contiguous memory.
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

/// The way back: rounds the elements of columns [begin, begin + count) and puts them where they belong.
template <typename T, int kTensors>
void scatter(const Accumulator<T>* elements, const StridedLoop<kTensors>& columns, int tensor, std::int64_t begin,
             std::int64_t count, T* row) {
  for_each_run(columns, tensor, begin, count,
               [&](std::int64_t done, std::int64_t n, std::int64_t offset, std::int64_t stride) {
                 T* to = row + offset;
                 for (std::int64_t i = 0; i < n; ++i) to[i * stride] = round_to<T>(elements[done + i]);
               });
}

/// gather() into a block of its own, as what loops over blocks read from.
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
