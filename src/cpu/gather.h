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

/// Calls body(done, n, offsets, strides) for the stretches of columns [begin, begin + count) that have one stride.
template <typename Body>
void for_each_run(const StridedLoop<2>& columns, std::int64_t begin, std::int64_t count, Body&& body) {
  const std::int64_t stride_of_none[2] = {0, 0};
  const int inner = columns.rank - 1;
  for (std::int64_t done = 0; done < count;) {
    const auto offsets = columns.offsets(begin + done);
    if (inner < 0) {
      body(done, count - done, offsets.of, stride_of_none);
      return;
    }
    const std::int64_t size = columns.sizes[inner];
    const std::int64_t n = std::min(size - (begin + done) % size, count - done);
    const std::int64_t stride[2] = {columns.strides[0][inner], columns.strides[1][inner]};
    body(done, n, offsets.of, stride);
    done += n;
  }
}

/// Columns of any strides and type, gathered block by block into what loops over contiguous memory read. `tensor` is
/// 0 or 1, whose strides to take.
template <typename T>
class Gather {
 public:
  using Element = Accumulator<T>;
  Gather(const StridedLoop<2>& columns, const T* row, int tensor) : columns_(columns), row_(row), tensor_(tensor) {}

  const Element* operator()(std::int64_t begin, std::int64_t count) {
    for_each_run(columns_, begin, count,
                 [&](std::int64_t done, std::int64_t n, const std::int64_t* offset, const std::int64_t* stride) {
                   const T* from = row_ + offset[tensor_];
                   for (std::int64_t i = 0; i < n; ++i)
                     buffer_.elements[done + i] = load_as_accumulator(from[i * stride[tensor_]]);
                 });
    return buffer_.elements;
  }

 private:
  const StridedLoop<2>& columns_;
  const T* row_;
  int tensor_;
  Block<Element> buffer_;
};

/// The way back: rounds the elements of columns [begin, begin + count) and puts them where they belong.
template <typename T>
void scatter(const Accumulator<T>* elements, const StridedLoop<2>& columns, std::int64_t begin, std::int64_t count,
             T* row, int tensor) {
  for_each_run(columns, begin, count,
               [&](std::int64_t done, std::int64_t n, const std::int64_t* offset, const std::int64_t* stride) {
                 T* to = row + offset[tensor];
                 for (std::int64_t i = 0; i < n; ++i) to[i * stride[tensor]] = round_to<T>(elements[done + i]);
               });
}

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();
#endif  // per target
