// What a call says when it is refused, and outputs that tell whether it wrote before that.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "eaves/error.h"
#include "eaves/tensor.h"

namespace eaves::testing {

/// What a call says when it is refused; empty where it is not.
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

/// For a message whose end depends on the machine.
template <typename Error = InvalidArgument, typename Call>
void expect_message_begins(const Call& call, const std::string& start) {
  const std::string message = refusal_of<Error>(call);
  EXPECT_EQ(message.substr(0, start.size()), start) << message;
}

/// CPU memory of an output, which has to be as it was when a call was refused.
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

}  // namespace eaves::testing
