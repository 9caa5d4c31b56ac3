// The reader of safetensors files against bad files: every rule of the format broken once, and a legal file mutated at
// random.
#include "cli/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "eaves/error.h"

namespace eaves::cli {
namespace {

using Bytes = std::vector<std::byte>;

std::string length_prefix(std::uint64_t length) {
  std::string prefix(8, '\0');
  for (int i = 0; i < 8; ++i) prefix[static_cast<std::size_t>(i)] = static_cast<char>(length >> (8 * i));
  return prefix;
}

Bytes to_bytes(const std::string& text) {
  const auto* first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}

// A file with this header, and `data_bytes` bytes of data.
Bytes make_file(const std::string& header, std::size_t data_bytes) {
  return to_bytes(length_prefix(header.size()) + header + std::string(data_bytes, '\1'));
}

// A header with one tensor "x".
std::string one_tensor(const std::string& description) { return "{\"x\":{" + description + "}}"; }

std::string repeated(const std::string& text, int times) {
  std::string result;
  for (int i = 0; i < times; ++i) result += text;
  return result;
}

std::string refusal(const Bytes& file) {
  try {
    parse_safetensors(file, "in.safetensors");
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Safetensors, LegalFileIsReadWhateverTheOrderOfItsNames) {
  // Padded with spaces, as writers do. The first tensor of the header lies second; one tensor is empty, one has no
  // axes, and "b" begins at an odd address.
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2,1],"data_offsets":[1,9]},)"
      R"("a":{"data_offsets":[0,1],"shape":[],"dtype":"BOOL"},)"
      R"("empty":{"dtype":"I64","shape":[0,7],"data_offsets":[9,9]}}   )";
  const Bytes file = make_file(header, 9);
  const StoredTensors tensors = parse_safetensors(file, "in.safetensors");
  ASSERT_EQ(tensors.size(), 3u);
  EXPECT_EQ(tensors.at("a").dtype, DType::boolean);
  EXPECT_EQ(tensors.at("a").shape, Dims{});
  EXPECT_EQ(tensors.at("b").shape, (Dims{2, 1}));
  EXPECT_EQ(tensors.at("b").data.data(), file.data() + 8 + header.size() + 1);
  EXPECT_EQ(tensors.at("b").data.size(), 8u);
  EXPECT_EQ(tensors.at("empty").data.size(), 0u);
  EXPECT_TRUE(parse_safetensors(make_file("{}", 0), "in.safetensors").empty());
}

TEST(Safetensors, DtypesThatTheFormatHasAndEavesLacksAreReadWithoutADtype) {
  for (const char* name : {"U16", "F8_E4M3", "F8_E5M2", "U32", "U64", "C64"}) {
    const std::string header = one_tensor(std::string(R"("dtype":")") + name + R"(","shape":[0],"data_offsets":[0,0])");
    const StoredTensors tensors = parse_safetensors(make_file(header, 0), "in.safetensors");
    EXPECT_EQ(tensors.at("x").dtype_name, name);
    EXPECT_FALSE(tensors.at("x").dtype.has_value());
  }
}

TEST(Safetensors, EveryBrokenRuleHasItsSentence) {
  const std::string f32 = R"("dtype":"F32",)";
  const std::string eight = R"("data_offsets":[0,8])";
  const std::string pair = R"("shape":[2],)";
  struct Case {
    Bytes file;
    const char* sentence;
  };
  const auto with_shape = [&](const std::string& shape) {
    return make_file(one_tensor(f32 + "\"shape\":" + shape + "," + eight), 8);
  };
  const auto with_offsets = [&](const std::string& offsets, std::size_t data_bytes) {
    return make_file(one_tensor(f32 + pair + "\"data_offsets\":" + offsets), data_bytes);
  };
  const char* const no_json = "the header is not valid JSON in UTF-8";
  const char* const fields = "the header's entry \"x\" is not an object with dtype, shape and data_offsets";
  const char* const long_list = "the header has a list of more than 16 values";
  const char* const sizes = "the header's entry \"x\" is not a tensor with sizes from 0 to 2^63 - 1";
  const char* const no_offsets = "the header's entry \"x\" is not a tensor with two data_offsets from 0 to 2^64 - 1";
  const char* const unfit = "\"x\" has 8 bytes, which do not match its shape and dtype";
  const Case cases[] = {
      {{}, "has 0 bytes, too few"},
      {to_bytes("1234567"), "has 7 bytes, too few"},
      {to_bytes(length_prefix(100) + "{}"), "the header length is 100, but only 2 bytes follow"},
      {to_bytes(length_prefix(~0ull) + "{}"), "the header length is 18446744073709551615, expected at most 100000000"},
      {make_file("", 0), "the header does not begin with {"},
      {make_file(" {}", 0), "the header does not begin with {"},
      {make_file("{", 0), no_json},
      {make_file("{} x", 0), no_json},
      {make_file("{\"\xff\":{}}", 0), no_json},
      {make_file("{\"\xed\xa0\x80\":{}}", 0), no_json},  // half a surrogate pair
      {with_shape("[1e999]"), no_json},
      {make_file(std::string("{}\0junk", 7), 0), "the header has a zero byte"},
      // Deep enough to overflow the stack of a recursive parser.
      {make_file("{\"x\":" + repeated("[", 1000000), 0), "the header is nested too deeply"},
      {make_file(repeated("{\"x\":", 1000000), 0), "the header is nested too deeply"},
      {make_file("{\"x\":{},\"x\":{}}", 0), "the header names \"x\" twice in one object"},
      {make_file(one_tensor(f32 + f32 + pair + eight), 8), "the header names \"dtype\" twice in one object"},
      {make_file("{\"__metadata__\":3}", 0), "\"__metadata__\" is not an object of strings"},
      {make_file("{\"__metadata__\":{\"a\":1}}", 0), "\"__metadata__\" is not an object of strings"},
      {make_file("{\"x\":null}", 0), fields},
      {make_file("{\"x\":[[]]}", 0), fields},
      {make_file(one_tensor(f32 + pair + eight + ",\"more\":1"), 8), fields},
      {make_file(one_tensor(pair + eight), 8), fields},
      {make_file(one_tensor(pair + eight + ",\"more\":1"), 8), fields},
      {make_file(one_tensor(R"("dtype":"F33",)" + pair + eight), 8),
       "the header's entry \"x\" is not a tensor of a known dtype"},
      {make_file(one_tensor(R"("dtype":4,)" + pair + eight), 8),
       "the header's entry \"x\" is not a tensor of a known dtype"},
      {with_shape("\"2\""), "the header's entry \"x\" is not a tensor of at most 16 axes"},
      {with_shape("[" + repeated("1,", 16) + "1]"), long_list},
      {with_shape("[" + repeated("1,", 15) + "1]"), unfit},
      // Refused before the end, which is missing.
      {make_file("{\"x\":{\"shape\":[" + repeated("0,", 1000000), 0), long_list},
      {make_file("{\"x\":[" + repeated("[],", 1000000), 0), long_list},
      {make_file("{\"x\":[" + repeated("{},", 1000000), 0), long_list},
      {with_shape("[-2]"), sizes},
      {with_shape("[2.0]"), sizes},
      {with_shape("[\"2\"]"), sizes},
      {with_shape("[9223372036854775808]"), sizes},
      {with_shape("[99999999999999999999]"), sizes},
      {with_shape("[4294967296,4294967296]"), unfit},
      {with_shape("[4611686018427387904]"), unfit},  // times 4 bytes exceeds 64 bits
      {with_shape("[3]"), unfit},
      {make_file(one_tensor(R"("dtype":"F4","shape":[17],"data_offsets":[0,8])"), 8), unfit},  // half a byte too long
      {with_offsets("[0]", 8), no_offsets},
      {with_offsets("[0,8,9]", 8), no_offsets},
      {with_offsets("[-8,0]", 8), no_offsets},
      {with_offsets("8", 8), no_offsets},
      {with_offsets("[8,0]", 8), "\"x\" has data_offsets [8, 0], but the file has 8 bytes of data"},
      {with_offsets("[0,18446744073709551615]", 8),
       "has data_offsets [0, 18446744073709551615], but the file has 8 bytes of data"},
      {with_offsets("[0,8]", 7), "has data_offsets [0, 8], but the file has 7 bytes of data (is the file cut short?)"},
      {with_offsets("[0,8]", 9), "the last 1 bytes belong to no tensor"},
      {with_offsets("[1,9]", 9), "\"x\" begins at byte 1, expected byte 0, right behind the tensor before it"},
      {make_file("{\"x\":{" + f32 + pair + eight + "},\"y\":{" + f32 + pair + R"("data_offsets":[4,12]}})", 12),
       "\"y\" begins at byte 4, expected byte 8, right behind the tensor before it"},
      // Characters that a terminal could act on do not reach it.
      {make_file("{\"\\u001b[2J\xc2\x9b\x7f\":3}", 0), "the header's entry \"\\u001b[2J\\u009b\\u007f\" is not"},
      {make_file("{\"größe\u00a0\":3}", 0), "the header's entry \"größe\u00a0\" is not"},
      {make_file("{\"" + std::string(200, 'n') + "\":3}", 0), "nnnn...\" is not"},
      {make_file("{\"n" + repeated("ö", 100) + "\":3}", 0), "öö...\" is not"},  // cut between two characters
      {make_file("{\"nn" + repeated("ö", 100) + "\":3}", 0), "öö...\" is not"},
  };
  for (const Case& broken : cases) {
    const std::string message = refusal(broken.file);
    EXPECT_NE(message.find(broken.sentence), std::string::npos)
        << "expected: " << broken.sentence << "\nactual:   " << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
}

// Mutates most files only a little, because random bytes would fail the first check.
void mutate(Bytes& file, std::mt19937_64& random) {
  const auto place = [&] { return static_cast<std::size_t>(random() % (file.size() + 1)); };
  const auto insert = [&](const Bytes& piece) {
    file.insert(file.begin() + static_cast<std::ptrdiff_t>(place()), piece.begin(), piece.end());
  };
  static const std::string kPieces[] = {"{",
                                        "}",
                                        "[",
                                        "]",
                                        "\"",
                                        ",",
                                        ":",
                                        "-1",
                                        "1e9",
                                        "0",
                                        "\"F64\"",
                                        "\"dtype\"",
                                        "\"shape\":[0]",
                                        "null",
                                        "\\u0000",
                                        "\xff",
                                        "18446744073709551615"};
  if (file.empty()) return;
  switch (random() % 5) {
    case 0:
      file[place() % file.size()] ^= static_cast<std::byte>(1u << (random() % 8));
      break;
    case 1:
      file.resize(place());
      break;
    case 2:
      insert(to_bytes(kPieces[random() % std::size(kPieces)]));
      break;
    case 3: {  // a range, repeated elsewhere
      const auto begin = file.begin() + static_cast<std::ptrdiff_t>(place() % file.size());
      insert(Bytes(begin, begin + std::min<std::ptrdiff_t>(file.end() - begin, random() % 40)));
      break;
    }
    default:  // a digit
      for (int tries = 0; tries < 50; ++tries) {
        std::byte& candidate = file[place() % file.size()];
        if (candidate < std::byte{'0'} || candidate > std::byte{'9'}) continue;
        candidate = static_cast<std::byte>('0' + random() % 10);
        break;
      }
  }
}

// Repairs the header's length; most mutants would otherwise fail on it alone.
void repair_length(Bytes& file, std::size_t data_bytes) {
  if (file.size() < 8 + data_bytes) return;
  const std::string prefix = length_prefix(file.size() - 8 - data_bytes);
  std::memcpy(file.data(), prefix.data(), 8);
}

TEST(Safetensors, MutatedFilesAreRefusedOrReadInsideTheirBytes) {
  const Bytes legal = make_file(
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
      R"("b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},"c":{"dtype":"U16","shape":[0],"data_offsets":[32,32]}})",
      32);
  std::mt19937_64 random(20240607);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(3);
  int accepted = 0;
  for (int i = 0; i < 100000 && std::chrono::steady_clock::now() < end; ++i) {
    Bytes file = legal;
    for (std::uint64_t count = 1 + random() % 4; count > 0; --count) mutate(file, random);
    if (random() % 2 == 0) repair_length(file, 32);
    StoredTensors tensors;
    try {
      tensors = parse_safetensors(file, "in.safetensors");
    } catch (const InvalidArgument&) {
      continue;
    }
    ++accepted;
    for (const auto& [name, tensor] : tensors) {
      ASSERT_GE(tensor.data.data(), file.data());
      ASSERT_LE(tensor.data.data() + tensor.data.size(), file.data() + file.size());
      if (!tensor.dtype) continue;
      std::size_t bytes = size_of(*tensor.dtype);
      for (const std::int64_t size : tensor.shape) bytes *= static_cast<std::size_t>(size);
      ASSERT_EQ(tensor.data.size(), bytes) << name;
    }
  }
  EXPECT_GT(accepted, 0) << "every mutant was refused: the test reaches nothing behind the first check";
}

}  // namespace
}  // namespace eaves::cli
