// The reader of safetensors files against what it may meet: every rule of the format broken once, and a legal file
// mutated at random.
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
  // Padded with spaces, as writers do; the tensor that comes first in the header lies second; one is empty, one has no
  // axes, and the bytes of "b" begin at an odd address.
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
}

TEST(Safetensors, FileWithoutTensorsIsLegal) {
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
  const Case cases[] = {
      {{}, "has 0 bytes, too few"},
      {to_bytes("1234567"), "has 7 bytes, too few"},
      {to_bytes(length_prefix(100) + "{}"), "the header length is 100, but only 2 bytes follow"},
      {to_bytes(length_prefix(~0ull) + "{}"), "the header length is 18446744073709551615, expected at most 100000000"},
      {to_bytes(length_prefix(100000001) + "{}"), "the header length is 100000001, expected at most"},
      {make_file("", 0), "the header does not begin with {"},
      {make_file("[]", 0), "the header does not begin with {"},
      {make_file(" {}", 0), "the header does not begin with {"},
      {make_file("{", 0), "the header is not valid JSON (byte 1 of 1)"},
      {make_file("{} x", 0), "the header is not valid JSON"},
      {make_file("{'x':1}", 0), "the header is not valid JSON"},
      {make_file(std::string("{}\0junk", 7), 0), "the header is not valid JSON (byte 2 is zero)"},
      {make_file("{\"\xff\":{}}", 0), "the header is not valid UTF-8 (byte 2)"},
      {make_file("{\"\xc0\xaf\":{}}", 0), "the header is not valid UTF-8 (byte 2)"},      // an overlong slash
      {make_file("{\"\xed\xa0\x80\":{}}", 0), "the header is not valid UTF-8 (byte 2)"},  // half a surrogate pair
      // Deep enough to end a recursive parser's stack.
      {make_file("{\"x\":" + repeated("[", 1000000), 0), "\"x\" is an array, expected an object"},
      {make_file(one_tensor("\"shape\":" + repeated("[", 1000000)), 0), "\"x\" has an array in its shape"},
      {make_file(repeated("{\"x\":", 1000000), 0), "\"x\" has a field \"x\", expected dtype, shape and data_offsets"},
      {make_file("{\"x\":null}", 0), "\"x\" is null, expected an object"},
      {make_file("{\"x\":3}", 0), "\"x\" is 3, expected an object"},
      {make_file("{\"__metadata__\":{\"a\":1}}", 0), "\"__metadata__\" has 1, expected strings"},
      {make_file("{\"__metadata__\":{\"a\":{}}}", 0), "\"__metadata__\" has an object, expected strings"},
      {make_file("{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", 0), "\"__metadata__\" has \"a\" twice"},
      {make_file("{\"x\":{" + f32 + pair + eight + "},\"x\":{" + f32 + pair + eight + "}}", 8),
       "the header names \"x\" twice"},
      {make_file(one_tensor(f32 + f32 + pair + eight), 8), "\"x\" has \"dtype\" twice"},
      {make_file(one_tensor(f32 + pair + eight + ",\"more\":1"), 8), "\"x\" has a field \"more\""},
      {make_file(one_tensor(pair + eight), 8), "\"x\" has no dtype"},
      {make_file(one_tensor(f32 + eight), 8), "\"x\" has no shape"},
      {make_file(one_tensor(f32 + R"("shape":[2])"), 8), "\"x\" has no pair of data_offsets"},
      {make_file(one_tensor(f32 + pair + R"("data_offsets":[0])"), 8), "\"x\" has no pair of data_offsets"},
      {make_file(one_tensor(f32 + pair + R"("data_offsets":[0,8,9])"), 8), "\"x\" has more than two data_offsets"},
      {make_file(one_tensor(R"("dtype":"F33",)" + pair + eight), 8), "\"x\" has the unknown dtype \"F33\""},
      {make_file(one_tensor(R"("dtype":4,)" + pair + eight), 8), "\"x\" has 4 as its dtype, expected a string"},
      {make_file(one_tensor(f32 + R"("shape":"2",)" + eight), 8), "\"x\" has \"2\" as its shape, expected an array"},
      {make_file(one_tensor(f32 + R"("shape":[-2],)" + eight), 8), "\"x\" has -2 in its shape"},
      {make_file(one_tensor(f32 + R"("shape":[2.0],)" + eight), 8), "\"x\" has \"2.0\" in its shape"},
      {make_file(one_tensor(f32 + R"("shape":["2"],)" + eight), 8), "\"x\" has \"2\" in its shape"},
      {make_file(one_tensor(f32 + R"("shape":[9223372036854775808],)" + eight), 8),
       "\"x\" has 9223372036854775808 in its shape, expected numbers from 0 to 2^63 - 1"},
      {make_file(one_tensor(f32 + R"("shape":[99999999999999999999],)" + eight), 8),
       "\"x\" has \"99999999999999999999\" in its shape"},
      {make_file(one_tensor(f32 + R"("shape":[1e999],)" + eight), 8), "the header is not valid JSON"},
      {make_file(one_tensor(f32 + R"("shape":[4294967296,4294967296],)" + eight), 8),
       "the shape of \"x\" has more elements than 64 bits can count"},
      {make_file(one_tensor(f32 + R"("shape":[4611686018427387904],)" + eight), 8), "than 64 bits can count"},
      {make_file(one_tensor(f32 + "\"shape\":[" + repeated("1,", 16) + "1]," + eight), 8),
       "\"x\" has more than 16 axes"},
      {make_file(one_tensor(R"("dtype":"F4","shape":[3],"data_offsets":[0,2])"), 2), "does not end on a whole byte"},
      {make_file(one_tensor(f32 + R"("shape":[3],)" + eight), 8), "\"x\" has 8 bytes, expected 12 for its shape"},
      {make_file(one_tensor(f32 + pair + R"("data_offsets":[-8,0])"), 8), "\"x\" has -8 in its data_offsets"},
      {make_file(one_tensor(f32 + pair + R"("data_offsets":[8,0])"), 8), "which end before they begin"},
      {make_file(one_tensor(f32 + pair + R"("data_offsets":[0,18446744073709551615])"), 8),
       "ends at byte 18446744073709551615 of the data, but the file has only 8"},
      {make_file(one_tensor(f32 + pair + eight), 7), "ends at byte 8 of the data, but the file has only 7"},
      {make_file(one_tensor(f32 + pair + eight), 9), "1 bytes at the end belong to no tensor"},
      {make_file(one_tensor(f32 + pair + R"("data_offsets":[1,9])"), 9), "1 bytes before \"x\" belong to no tensor"},
      {make_file("{\"x\":{" + f32 + pair + eight + "},\"y\":{" + f32 + pair + R"("data_offsets":[4,12]}})", 12),
       "\"y\" overlaps the tensor before it (begins at byte 4, expected 8)"},
      // What a terminal could act on does not reach it.
      {make_file("{\"\\u001b[2J\xc2\x9b\":3}", 0), "\"?[2J\xc2\xbf\" is 3"},
      {make_file("{\"" + std::string(200, 'n') + "\":3}", 0), "nnnn...\" is 3"},
  };
  for (const Case& broken : cases) {
    const std::string message = refusal(broken.file);
    EXPECT_NE(message.find(broken.sentence), std::string::npos)
        << "expected: " << broken.sentence << "\nactual:   " << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
}

// Mutations that keep most of the structure, since random bytes would end at the first check.
void mutate(Bytes& file, std::mt19937_64& random) {
  const auto place = [&] { return static_cast<std::size_t>(random() % (file.size() + 1)); };
  static const std::string kPieces[] = {"{",         "}",
                                        "[",         "]",
                                        "\"",        ",",
                                        ":",         "-1",
                                        "1e9",       "18446744073709551615",
                                        "0",         "\"F64\"",
                                        "\"dtype\"", "\"shape\":[0]",
                                        "null",      "\\u0000",
                                        "\xff"};
  switch (random() % 5) {
    case 0:  // a bit
      if (!file.empty()) file[place() % file.size()] ^= static_cast<std::byte>(1u << (random() % 8));
      break;
    case 1:  // cut short
      file.resize(place());
      break;
    case 2: {  // a token too many
      const Bytes piece = to_bytes(kPieces[random() % std::size(kPieces)]);
      file.insert(file.begin() + static_cast<std::ptrdiff_t>(place()), piece.begin(), piece.end());
      break;
    }
    case 3: {  // a range again, elsewhere
      if (file.empty()) break;
      const std::size_t begin = place() % file.size();
      const std::size_t length = std::min<std::size_t>(file.size() - begin, random() % 40);
      const Bytes range(file.begin() + static_cast<std::ptrdiff_t>(begin),
                        file.begin() + static_cast<std::ptrdiff_t>(begin + length));
      file.insert(file.begin() + static_cast<std::ptrdiff_t>(place()), range.begin(), range.end());
      break;
    }
    default:  // a digit
      for (int tries = 0; tries < 50 && !file.empty(); ++tries) {
        std::byte& candidate = file[place() % file.size()];
        if (candidate < std::byte{'0'} || candidate > std::byte{'9'}) continue;
        candidate = static_cast<std::byte>('0' + random() % 10);
        break;
      }
  }
}

// Otherwise most mutants would only say that the header's length is wrong.
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
