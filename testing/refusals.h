// Tests of refused calls: their messages, and outputs that show whether a refused call has written.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "eaves/context.h"
#include "eaves/error.h"
#include "eaves/tensor.h"

namespace eaves::testing {

/// The message of a refused call; empty if the call is not refused.
template <typename Error = InvalidArgument, typename Call>
std::string refusal_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

template <typename Error = InvalidArgument, typename Call>
void expect_message(const Call& call, const std::string& message) {
  EXPECT_EQ(refusal_of<Error>(call), message) << "empty: it was not refused";
}

/// For a message that ends differently on each machine.
template <typename Error = InvalidArgument, typename Call>
void expect_message_begins(const Call& call, const std::string& start) {
  const std::string message = refusal_of<Error>(call);
  EXPECT_EQ(message.substr(0, start.size()), start) << message;
}

/// CPU memory of an output, which a refused call must not change.
struct UnwrittenOutput {
  static constexpr float kBefore = -5.0f;

  explicit UnwrittenOutput(std::string name_of_it, std::size_t count = 144)
      : name(std::move(name_of_it)), memory(count, kBefore) {}

  TensorView view(const Dims& shape, DType dtype = DType::float32) {
    return TensorView::contiguous(static_cast<void*>(memory.data()), dtype, shape);
  }
  void expect_unwritten() const {
    EXPECT_EQ(memory, std::vector<float>(memory.size(), kBefore)) << name << " was written";
  }

  std::string name;
  std::vector<float> memory;
};

/// A change that makes one tensor of a call illegal.
using ChangeView = std::function<void(TensorView&)>;

// clang-format off
inline ChangeView missing() { return [](TensorView& view) { view = {}; }; }
inline ChangeView counted_as_missing() { return [](TensorView& view) { view.is_present = false; }; }
inline ChangeView of_dtype(DType dtype) { return [=](TensorView& view) { view.dtype = dtype; }; }
inline ChangeView of_shape(const Dims& shape) { return [=](TensorView& view) { view.shape = shape; }; }
inline ChangeView of_strides(const Dims& strides) { return [=](TensorView& view) { view.strides = strides; }; }
inline ChangeView on_device(Device device) { return [=](TensorView& view) { view.device = device; }; }
inline ChangeView at_address(void* data) { return [=](TensorView& view) { view.data = data; }; }
// clang-format on

/// A row of a table: a change that makes legal arguments illegal, and the message behind the operator's name.
template <typename Args>
struct Refusal {
  Refusal(std::function<void(Args&)> change, std::string what) : spoil(std::move(change)), sentence(std::move(what)) {}
  Refusal(TensorView Args::*tensor, ChangeView change, std::string what)
      : spoil([=](Args& args) { change(args.*tensor); }), sentence(std::move(what)) {}
  Refusal(TensorView Args::*tensor, TensorView other, std::string what)
      : spoil([=](Args& args) { args.*tensor = other; }), sentence(std::move(what)) {}

  std::function<void(Args&)> spoil;
  std::string sentence;
};

/// An entry point and the query of its workspace: both refuse the same arguments with the same message, and write
/// nothing.
template <typename Args>
struct EntryPoint {
  std::string name;
  void (*call)(const Args&, const ExecutionContext&);
  std::size_t (*workspace_bytes)(const Args&, const ExecutionContext&);
  std::function<void()> expect_nothing_written;
  Args legal;

  template <typename Error = InvalidArgument>
  void refuses(const std::vector<Refusal<Args>>& table) const {
    for (const Refusal<Args>& row : table) {
      Args args = legal;
      row.spoil(args);
      const std::string message = name + ": " + row.sentence;
      expect_message<Error>([&] { call(args, {}); }, message);
      expect_message<Error>([&] { workspace_bytes(args, {}); }, message);
      expect_nothing_written();
    }
  }
  void refuses_numbers_of_threads() const {
    for (const int threads : {-7, 200000}) {
      const std::string what = ": threads is " + std::to_string(threads) + ", expected 0 (all) to 4096";
      expect_message([&] { call(legal, {.threads = threads}); }, name + what);
      expect_nothing_written();
    }
  }
  void accepts(const std::function<void(Args&)>& change) const {
    Args args = legal;
    change(args);
    EXPECT_NO_THROW(workspace_bytes(args, {})) << name;
  }
};

/// The message for an output with elements that share memory.
inline std::string sharing(const std::string& what) {
  return what + ", in which elements share memory; expected an address for each element, because the tensor is written";
}
inline std::string overlapping(const std::string& name, const std::string& with) {
  return name + " overlaps " + with + ", expected memory of its own";
}

}  // namespace eaves::testing
