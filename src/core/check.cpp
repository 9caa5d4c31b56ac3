#include "core/check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <utility>

namespace eaves {

std::string Refusal::argument() const {
  return sentence_.starts_with('`') ? sentence_.substr(1, sentence_.find('`', 1) - 1) : "";
}

std::string Refusal::sentence_with(const std::function<std::string(const std::string&)>& name_of) const {
  if (op_.empty()) return sentence_;  // concerns a file or a flag: its name may contain backticks
  std::string text;
  bool is_name = false;
  for (std::size_t begin = 0, end = 0; begin <= sentence_.size(); begin = end + 1, is_name = !is_name) {
    end = std::min(sentence_.find('`', begin), sentence_.size());
    const std::string words = sentence_.substr(begin, end - begin);
    text += is_name ? name_of(words) : words;
  }
  return text;
}

std::string Refusal::message() const {
  return op_ + ": " + sentence_with([](const std::string& name) { return name; });
}

namespace check {
namespace {

/// One term of an address difference: k * stride for an integer k in [low, high]. All strides of a difference are in
/// one unit, bytes or elements.
struct Term {
  std::int64_t stride;
  std::int64_t low;
  std::int64_t high;
};

struct Terms {
  std::array<Term, 2 * kMaxRank + 1> items;
  int size = 0;

  void add(std::int64_t stride, std::int64_t low, std::int64_t high) {
    if (stride < 0) {
      stride = -stride;
      std::swap(low, high);
      low = -low;
      high = -high;
    }
    for (int i = 0; i < size; ++i) {
      if (items[i].stride == stride) {
        items[i].low += low;
        items[i].high += high;
        return;
      }
    }
    items[size++] = {stride, low, high};
  }

  /// Largest strides first.
  void sort() {
    std::sort(items.begin(), items.begin() + size, [](const Term& a, const Term& b) { return a.stride > b.stride; });
  }

  /// Sorts the terms and joins pairs. If large.stride = m * small.stride and `small` takes at least m consecutive
  /// values, then the pair reaches every multiple of small.stride in a range, as one term does. Fewer terms keep the
  /// search short for two tensors with different strides.
  void simplify() {
    sort();
    for (int i = size - 1; i > 0; --i) {
      Term& small = items[i];
      Term& large = items[i - 1];
      if (small.stride == 0 || large.stride % small.stride != 0) continue;
      const std::int64_t multiple = large.stride / small.stride;
      if (small.high - small.low + 1 < multiple) continue;
      large = {small.stride, large.low * multiple + small.low, large.high * multiple + small.high};
      for (int j = i; j + 1 < size; ++j) items[j] = items[j + 1];
      --size;
    }
  }
};

/// True if the terms can sum to `target`; with `excluding_zero`, by a choice other than all zeros. The search is exact.
/// For each term it tries the k that leave a rest within reach of the smaller strides: two or three at most if the
/// strides nest. If they do not, `budget` bounds the search, and a search that exceeds it returns true.
bool reaches(const Terms& terms, int first, __int128 target, bool excluding_zero, int& budget) {
  if (--budget < 0) return true;
  if (first == terms.size) return target == 0 && !excluding_zero;
  __int128 rest_low = 0;
  __int128 rest_high = 0;
  for (int i = first + 1; i < terms.size; ++i) {
    rest_low += static_cast<__int128>(terms.items[i].stride) * terms.items[i].low;
    rest_high += static_cast<__int128>(terms.items[i].stride) * terms.items[i].high;
  }
  const Term& term = terms.items[first];
  if (term.stride == 0) {  // sorts last, and is the only one: add() merges equal strides
    return target == 0 && (!excluding_zero || term.low < 0 || term.high > 0);
  }
  const auto floor_divide = [](__int128 a, __int128 b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); };
  const __int128 low = std::max<__int128>(term.low, -floor_divide(rest_high - target, term.stride));
  const __int128 high = std::min<__int128>(term.high, floor_divide(target - rest_low, term.stride));
  for (__int128 k = low; k <= high; ++k) {
    if (reaches(terms, first + 1, target - k * term.stride, excluding_zero && k == 0, budget)) return true;
  }
  return false;
}

constexpr int kSearchBudget = 10000;

struct ByteRange {
  __int128 begin;
  __int128 end;
};

ByteRange byte_range(const TensorView& view) {
  __int128 low = 0;
  __int128 high = 0;
  for (int axis = 0; axis < view.shape.size(); ++axis) {
    const __int128 reach = static_cast<__int128>(view.shape[axis] - 1) * view.strides[axis];
    (reach < 0 ? low : high) += reach;
  }
  const auto address = static_cast<__int128>(reinterpret_cast<std::uintptr_t>(view.data));
  const auto element = static_cast<__int128>(size_of(view.dtype));
  return {address + low * element, address + (high + 1) * element};
}

bool has_no_gaps(const TensorView& view) {
  std::int64_t expected = 1;
  for (int axis = view.shape.size() - 1; axis >= 0; --axis) {
    if (view.shape[axis] == 1) continue;
    if (view.strides[axis] != expected) return false;
    expected *= view.shape[axis];
  }
  return true;
}

}  // namespace

std::string to_string(const Dims& dims) {
  std::string text = "[";
  for (int i = 0; i < dims.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(dims[i]);
  return text + "]";
}

std::string to_string(Device device) {
  return device.type == DeviceType::cpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

void fail(const std::string& op, const std::string& name, std::string_view what) {
  throw InvalidArgument(op, "`" + name + "` " + std::string(what));
}

void fail(const Argument& argument, std::string_view what) { fail(argument.op, argument.name, what); }

void is_valid(const Argument& argument) {
  const TensorView& view = argument.view;
  if (!view.is_present && view.data != nullptr) {
    fail(argument, "has data but counts as missing, expected a view made by contiguous() or strided()");
  }
  if (!view.is_present) fail(argument, "is missing");
  if (std::string_view(name_of(view.dtype)) == "unknown dtype") {
    fail(argument, "has dtype " + std::to_string(static_cast<int>(view.dtype)) + ", expected one of enum DType");
  }
  if (view.device.type != DeviceType::cpu && view.device.type != DeviceType::cuda) {
    fail(argument, "has device type " + std::to_string(static_cast<int>(view.device.type)) + ", expected cpu or cuda");
  }
  if (view.shape.size() != view.strides.size()) {
    fail(argument, "has shape " + to_string(view.shape) + " and strides " + to_string(view.strides) +
                       ", expected a stride for each axis");
  }
  if (view.device.type == DeviceType::cpu && view.device.index != 0) {
    fail(argument, "is on CPU " + std::to_string(view.device.index) + ", expected CPU 0, the only one");
  }
  if (view.device.index < 0) {
    fail(argument, "is on " + to_string(view.device) + ", expected a device index of 0 or more");
  }
  // The product leaves out sizes of 0, because products over some of the axes must not overflow either.
  std::int64_t count = 1;
  bool is_empty = false;
  for (const std::int64_t size : view.shape) {
    if (size < 0) fail(argument, "has shape " + to_string(view.shape) + ", expected no negative sizes");
    is_empty = is_empty || size == 0;
    if (size != 0 && __builtin_mul_overflow(count, size, &count)) {
      fail(argument, "has shape " + to_string(view.shape) + ", expected fewer than 2^63 elements");
    }
  }
  if (is_empty) return;
  const ByteRange range = byte_range(view);
  if (range.begin < 0 || range.end > static_cast<__int128>(std::numeric_limits<std::uint64_t>::max()) ||
      range.end - range.begin > static_cast<__int128>(std::numeric_limits<std::int64_t>::max())) {
    fail(argument, "has shape " + to_string(view.shape) + " and strides " + to_string(view.strides) +
                       ", expected elements within the address space");
  }
  if (view.data == nullptr)
    fail(argument, "has shape " + to_string(view.shape) + " but a null pointer as data, expected an address");
  if (reinterpret_cast<std::uintptr_t>(view.data) % size_of(view.dtype) != 0) {
    fail(argument, std::string("is not aligned to its elements, expected an address divisible by ") +
                       std::to_string(size_of(view.dtype)) + " for " + name_of(view.dtype));
  }
}

bool is_given(const Argument& argument) {
  if (!argument.view.is_present && argument.view.data == nullptr) return false;
  is_valid(argument);
  return true;
}

void has_shape(const Argument& argument, const Dims& expected, std::string_view why) {
  if (argument.view.shape == expected) return;
  fail(argument, "has shape " + to_string(argument.view.shape) + ", expected " + to_string(expected) + " (" +
                     std::string(why) + ")");
}

void has_dtype(const Argument& argument, std::initializer_list<DType> expected, std::string_view why) {
  std::string names;
  int listed = 0;
  for (const DType& dtype : expected) {
    if (argument.view.dtype == dtype) return;
    if (std::find(expected.begin(), &dtype, dtype) != &dtype) continue;  // not "float32 or float32"
    names += (listed++ == 0 ? "" : " or ") + std::string(name_of(dtype));
  }
  fail(argument, std::string("has dtype ") + name_of(argument.view.dtype) + ", expected " + names + " (" +
                     std::string(why) + ")");
}

void is_on(const Argument& argument, Device device, const char* reference_name) {
  if (argument.view.device == device) return;
  fail(argument, "is on " + to_string(argument.view.device) + ", expected " + to_string(device) + " (as `" +
                     reference_name + "`)");
}

void has_one_element(const Argument& argument) {
  if (argument.view.element_count() == 1) return;
  fail(argument, "has shape " + to_string(argument.view.shape) + ", expected one element");
}

bool has_two_numbers(const TensorView& lse, const Dims& row_shape) {
  const int rank = row_shape.size();
  return lse.is_present && lse.shape.size() == rank + 1 && lse.shape[rank] == 2;
}

void is_contiguous(const Argument& argument) {
  if (argument.view.element_count() == 0 || has_no_gaps(argument.view)) return;
  fail(argument, "has shape " + to_string(argument.view.shape) + " and strides " + to_string(argument.view.strides) +
                     ", expected a contiguous tensor");
}

void is_writable(const Argument& argument) {
  const TensorView& view = argument.view;
  if (view.element_count() < 2 || has_no_gaps(view)) return;
  Terms terms;
  for (int axis = 0; axis < view.shape.size(); ++axis) {
    if (view.shape[axis] > 1) terms.add(view.strides[axis], 1 - view.shape[axis], view.shape[axis] - 1);
  }
  // Steps of +1 and -1 along two axes of equal stride give one address. add() merged such axes into one term, in which
  // the steps cancel, so reaches() would miss them.
  bool equal_strides = false;
  for (int a = 0; a < view.shape.size(); ++a) {
    for (int b = a + 1; b < view.shape.size(); ++b) {
      equal_strides = equal_strides || (view.shape[a] > 1 && view.shape[b] > 1 &&
                                        std::abs(view.strides[a]) == std::abs(view.strides[b]));
    }
  }
  // No simplify(): a joined term can be 0 although neither of its two parts is.
  terms.sort();
  int budget = kSearchBudget;
  if (equal_strides || reaches(terms, 0, 0, true, budget)) {
    fail(argument,
         "has shape " + to_string(view.shape) + " and strides " + to_string(view.strides) +
             ", in which elements share memory; expected an address for each element, because the tensor is written");
  }
}

void do_not_overlap(const Argument& output, const Argument& other) {
  if (output.view.device != other.view.device) return;
  if (output.view.element_count() == 0 || other.view.element_count() == 0) return;
  const ByteRange a = byte_range(output.view);
  const ByteRange b = byte_range(other.view);
  if (a.end <= b.begin || b.end <= a.begin) return;
  // Ranges can overlap although no elements do: the left and right halves of a buffer's rows interleave. So search for
  // two elements that share a byte.
  Terms terms;
  const auto a_bytes = static_cast<std::int64_t>(size_of(output.view.dtype));
  const auto b_bytes = static_cast<std::int64_t>(size_of(other.view.dtype));
  for (int axis = 0; axis < output.view.shape.size(); ++axis) {
    terms.add(output.view.strides[axis] * a_bytes, 0, output.view.shape[axis] - 1);
  }
  for (int axis = 0; axis < other.view.shape.size(); ++axis) {
    terms.add(other.view.strides[axis] * b_bytes, 1 - other.view.shape[axis], 0);
  }
  terms.add(1, 0, a_bytes - 1);
  terms.add(1, 1 - b_bytes, 0);
  terms.simplify();
  int budget = kSearchBudget;
  const auto distance = static_cast<__int128>(reinterpret_cast<std::uintptr_t>(other.view.data)) -
                        static_cast<__int128>(reinterpret_cast<std::uintptr_t>(output.view.data));
  if (reaches(terms, 0, distance, false, budget)) {
    fail(output, std::string("overlaps `") + other.name + "`, expected memory of its own");
  }
}

AxisSet axes(const Argument& argument, const Dims& axes) {
  const int rank = argument.view.shape.size();
  AxisSet set;
  if (axes.empty()) {
    for (int axis = 0; axis < rank; ++axis) set.contains[axis] = true;
    return set;
  }
  // As in PyTorch, a caller may name axis 0 (or -1) of a zero-dimensional tensor.
  const int range = rank == 0 ? 1 : rank;
  for (const std::int64_t axis : axes) {
    if (axis < -range || axis >= range) {
      fail(argument.op, "axes",
           "contains " + std::to_string(axis) + ", expected " + std::to_string(-range) + " to " +
               std::to_string(range - 1) + " (`" + argument.name + "` has " + std::to_string(rank) + " axes)");
    }
    bool& seen = set.contains[axis < 0 ? axis + range : axis];
    if (seen) {
      fail(argument.op, "axes",
           "is " + to_string(axes) + ", expected each axis once (axis " + std::to_string(axis) + " appears twice)");
    }
    seen = true;
  }
  return set;
}

int axis(const Argument& argument, const char* name, int axis) {
  const int rank = argument.view.shape.size();
  if (rank == 0) fail(argument, "has no axes, expected at least one");
  if (axis < -rank || axis >= rank) {
    fail(argument.op, name,
         "is " + std::to_string(axis) + ", expected " + std::to_string(-rank) + " to " + std::to_string(rank - 1) +
             " (`" + argument.name + "` has " + std::to_string(rank) + " axes)");
  }
  return axis < 0 ? axis + rank : axis;
}

void number(const char* op, const char* name, double value, double low, double high, std::string_view expected) {
  if (value >= low && value <= high && std::isfinite(value)) return;  // false for a NaN
  char text[40];
  std::snprintf(text, sizeof(text), "%g", value);
  fail(op, name, std::string("is ") + text + ", expected " + std::string(expected));
}

void threads(const char* op, int threads) {
  constexpr int kMostThreads = 4096;
  if (threads >= 0 && threads <= kMostThreads) return;
  fail(op, "threads", "is " + std::to_string(threads) + ", expected 0 (all) to " + std::to_string(kMostThreads));
}

void workspace(const char* op, const void* data, std::size_t bytes, std::size_t needed_bytes) {
  if (bytes < needed_bytes) {
    fail(op, "workspace", "has " + std::to_string(bytes) + " bytes, expected at least " + std::to_string(needed_bytes));
  }
  if (reinterpret_cast<std::uintptr_t>(data) % 256 != 0) {
    fail(op, "workspace", "is not aligned, expected an address divisible by 256");
  }
}

}  // namespace check
}  // namespace eaves
