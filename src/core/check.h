// All wording of argument checks. Each function either returns or throws InvalidArgument with the operator, the
// argument, what it is and what was expected; every operator says the same thing in the same words.
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

/// An argument as error messages speak of it.
struct Argument {
  const char* op;    ///< "logsumexp_forward"
  const char* name;  ///< "grad_out"
  const TensorView& view;
};

/// "<op>: <name> <what>". Here and below names of other arguments stand in backticks (eaves/error.h).
[[noreturn]] void fail(const std::string& op, const std::string& name, std::string_view what);
[[noreturn]] void fail(const Argument& argument, std::string_view what);

/// A tensor was passed, it describes addresses that can exist, and it has memory if it has elements.
void is_valid(const Argument& argument);

/// An argument that may be left out: is it there? One that is, is_valid().
bool is_given(const Argument& argument);

/// `why` explains the expectation: "as `x` without the reduced axes".
void has_shape(const Argument& argument, const Dims& expected, std::string_view why);
void has_dtype(const Argument& argument, std::initializer_list<DType> expected, std::string_view why);
void is_on(const Argument& argument, Device device, const char* reference_name);

/// Any shape that holds one element: a scalar.
void has_one_element(const Argument& argument);

/// True for the lse of rows as two numbers, with an axis of 2 behind the rows'. Never throws.
bool has_two_numbers(const TensorView& lse, const Dims& row_shape);

/// Row-major without gaps.
void is_contiguous(const Argument& argument);

/// Every element has an address of its own, so that it can be written in parallel.
void is_writable(const Argument& argument);

/// No element of `output` shares a byte with one of `other`.
void do_not_overlap(const Argument& output, const Argument& other);

/// Which axes a list names: negative ones count from the end, an empty list names all.
AxisSet axes(const Argument& argument, const Dims& axes);

/// The axis that `axis` names, counted from the start; negative ones count from the end. `name` is the parameter's.
int axis(const Argument& argument, const char* name, int axis);

/// A number in [low, high] (an infinite bound is itself excluded): "cross_entropy_forward: label_smoothing is 1.5,
/// expected 0 to 1".
void number(const char* op, const char* name, double value, double low, double high, std::string_view expected);

/// The number of threads that a call may use is one that can be.
void threads(const char* op, int threads);

/// The caller's workspace, if there is one, is large enough and aligned to 256 bytes.
void workspace(const char* op, const void* data, std::size_t bytes, std::size_t needed_bytes);

}  // namespace eaves::check
#pragma GCC visibility pop
