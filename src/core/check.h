// The argument checks and their wording, shared so that every operator reports the same mistake in the same words. Each
// function either returns or throws InvalidArgument, which names the operator, the argument, its value and the expected
// value.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include "core/rows.h"
#include "eaves/error.h"
#include "eaves/tensor.h"

#pragma GCC visibility push(default)  // for the Python package
namespace eaves::check {

std::string to_string(const Dims& dims);  ///< "[4, 1024]"
std::string to_string(Device device);     ///< "cpu", "cuda:0"

/// An argument and its name in error messages.
struct Argument {
  const char* op;    ///< "logsumexp_forward"
  const char* name;  ///< "grad_out"
  const TensorView& view;
};

/// Throws "<op>: <name> <what>". Backticks enclose the names of other arguments in all messages (eaves/error.h).
[[noreturn]] void fail(const std::string& op, const std::string& name, std::string_view what);
[[noreturn]] void fail(const Argument& argument, std::string_view what);

/// Requires a tensor that was passed, describes addresses that can exist, and has memory if it has elements.
void is_valid(const Argument& argument);

/// True if an optional argument was passed; then it is also checked with is_valid().
bool is_given(const Argument& argument);

/// `why` explains the expectation: "as `x` without the reduced axes".
void has_shape(const Argument& argument, const Dims& expected, std::string_view why);
void has_dtype(const Argument& argument, std::initializer_list<DType> expected, std::string_view why);
void is_on(const Argument& argument, Device device, const char* reference_name);

/// Requires a scalar: any shape that holds one element.
void has_one_element(const Argument& argument);

/// True if `lse` holds two numbers per row: its shape is `row_shape` and a last axis of 2. Never throws.
bool has_two_numbers(const TensorView& lse, const Dims& row_shape);

/// Requires a row-major tensor without gaps.
void is_contiguous(const Argument& argument);

/// Requires a separate address for each element, so that threads can write the tensor in parallel.
void is_writable(const Argument& argument);

/// Requires that no element of `output` shares a byte with an element of `other`.
void do_not_overlap(const Argument& output, const Argument& other);

/// The set of the axes in a list. Negative axes count from the end; an empty list means all axes.
AxisSet axes(const Argument& argument, const Dims& axes);

/// `axis`, counted from the start; a negative `axis` counts from the end. `name` is the parameter's name.
int axis(const Argument& argument, const char* name, int axis);

/// Requires a finite number in [low, high]. Error: "cross_entropy_forward: label_smoothing is 1.5, expected 0 to 1".
void number(const char* op, const char* name, double value, double low, double high, std::string_view expected);

/// Requires a possible number of threads, or 0 for all of them.
void threads(const char* op, int threads);

/// Requires a workspace of at least `needed_bytes`, aligned to 256 bytes.
void workspace(const char* op, const void* data, std::size_t bytes, std::size_t needed_bytes);

}  // namespace eaves::check
#pragma GCC visibility pop
