// The header is read by a parser that calls back for every token (nlohmann's SAX interface): it sees duplicated names,
// which a tree of values would have merged, keeps no memory of what is refused, and does not recurse, so that a
// thousand brackets cost no stack. The layout of the data is checked afterwards, over the tensors sorted by place.
#include "cli/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>

#include "eaves/error.h"

namespace eaves::cli {
namespace {

// That of the format's reference implementation.
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
constexpr std::size_t kLengthBytes = 8;

struct StoredType {
  const char* name;
  int bits;
  std::optional<DType> dtype;
};

// Every element type that the format has.
constexpr StoredType kStoredTypes[] = {
    {"BOOL", 8, DType::boolean},  {"U8", 8, DType::uint8},       {"I8", 8, DType::int8},
    {"I16", 16, DType::int16},    {"I32", 32, DType::int32},     {"I64", 64, DType::int64},
    {"F16", 16, DType::float16},  {"BF16", 16, DType::bfloat16}, {"F32", 32, DType::float32},
    {"F64", 64, DType::float64},  {"U16", 16, std::nullopt},     {"U32", 32, std::nullopt},
    {"U64", 64, std::nullopt},    {"F8_E4M3", 8, std::nullopt},  {"F8_E5M2", 8, std::nullopt},
    {"F8_E8M0", 8, std::nullopt}, {"F6_E2M3", 6, std::nullopt},  {"F6_E3M2", 6, std::nullopt},
    {"F4", 4, std::nullopt},      {"C64", 64, std::nullopt},
};

const StoredType* find_type(std::string_view name) {
  const auto* found = std::find_if(std::begin(kStoredTypes), std::end(kStoredTypes),
                                   [name](const StoredType& type) { return name == type.name; });
  return found == std::end(kStoredTypes) ? nullptr : found;
}

// Where the first ill-formed UTF-8 sequence begins; nothing where the text is well formed (RFC 3629: no overlong
// forms, no surrogates, nothing beyond U+10FFFF).
std::optional<std::size_t> first_invalid_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto byte = [&](std::size_t k) { return static_cast<unsigned char>(text[i + k]); };
    const unsigned char lead = byte(0);
    const std::size_t length = lead < 0x80   ? 1
                               : lead < 0xc2 ? 0
                               : lead < 0xe0 ? 2
                               : lead < 0xf0 ? 3
                               : lead < 0xf5 ? 4
                                             : 0;
    if (length == 0 || i + length > text.size()) return i;
    for (std::size_t k = 1; k < length; ++k) {
      if ((byte(k) & 0xc0) != 0x80) return i;
    }
    if ((lead == 0xe0 && byte(1) < 0xa0) || (lead == 0xed && byte(1) > 0x9f) || (lead == 0xf0 && byte(1) < 0x90) ||
        (lead == 0xf4 && byte(1) > 0x8f)) {
      return i;
    }
    i += length;
  }
  return std::nullopt;
}

// A tensor as the header describes it, each part present or not yet.
struct Description {
  std::string name;
  const StoredType* type = nullptr;
  bool has_shape = false;
  Dims shape;
  int offset_count = -1;  // -1: no "data_offsets" yet
  std::array<std::uint64_t, 2> offsets{};
};

// The tokens of the header. A legal header is an object of objects: names of tensors to {dtype, shape, data_offsets},
// and "__metadata__" to strings. Every function returns true to go on or throws.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(std::string label, std::size_t header_bytes) : label_(std::move(label)), header_bytes_(header_bytes) {}

  std::map<std::string, Description> take_descriptions() { return std::move(descriptions_); }

  bool null() override { refuse_value("null"); }
  bool boolean(bool) override { refuse_value("true or false"); }
  bool binary(binary_t&) override { refuse_value("binary data"); }

  // Negative: other whole numbers that fit 64 bits arrive as unsigned.
  bool number_integer(number_integer_t value) override { refuse_value(std::to_string(value)); }
  // The parser calls whole numbers beyond 64 bits floats too.
  bool number_float(number_float_t, const string_t& text) override { refuse_value(in_quotes(text)); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ == Place::shape) {
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
        refuse_value(std::to_string(value));
      if (tensor_.shape.size() == kMaxRank) fail(fmt::format("has more than {} axes", kMaxRank));
      tensor_.shape.push_back(static_cast<std::int64_t>(value));
    } else if (place_ == Place::offsets) {
      if (tensor_.offset_count == 2) fail("has more than two data_offsets");
      tensor_.offsets[static_cast<std::size_t>(tensor_.offset_count++)] = value;
    } else {
      refuse_value(std::to_string(value));
    }
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::metadata && has_key_) return true;
    if (place_ != Place::tensor || field_ != "dtype") refuse_value(in_quotes(value));
    tensor_.type = find_type(value);
    if (tensor_.type == nullptr) fail(fmt::format("has the unknown dtype {}", in_quotes(value)));
    return true;
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::outside) {
      place_ = Place::header;
    } else if (place_ == Place::header) {
      place_ = tensor_.name == kMetadata ? Place::metadata : Place::tensor;
      metadata_keys_.clear();
      fields_.clear();
      has_key_ = false;
    } else {
      refuse_value("an object");
    }
    return true;
  }

  bool key(string_t& name) override {
    has_key_ = true;
    if (place_ == Place::header) {
      if (!names_.insert({name, true}).second) {
        throw InvalidArgument(fmt::format("{}: the header names {} twice", label_, in_quotes(name)));
      }
      tensor_ = Description{};
      tensor_.name = name;
    } else if (place_ == Place::metadata) {
      if (!metadata_keys_.insert({name, true}).second) fail(fmt::format("has {} twice", in_quotes(name)));
    } else {
      if (name != "dtype" && name != "shape" && name != "data_offsets") {
        fail(fmt::format("has a field {}, expected dtype, shape and data_offsets", in_quotes(name)));
      }
      if (!fields_.insert({name, true}).second) fail(fmt::format("has {} twice", in_quotes(name)));
      field_ = name;
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::tensor) {
      if (tensor_.type == nullptr) fail("has no dtype");
      if (!tensor_.has_shape) fail("has no shape");
      if (tensor_.offset_count != 2) fail("has no pair of data_offsets");
      descriptions_.insert({tensor_.name, tensor_});
    }
    place_ = place_ == Place::header ? Place::outside : Place::header;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ == Place::tensor && field_ == "shape") {
      place_ = Place::shape;
      tensor_.has_shape = true;
    } else if (place_ == Place::tensor && field_ == "data_offsets") {
      place_ = Place::offsets;
      tensor_.offset_count = 0;
    } else {
      refuse_value("an array");
    }
    return true;
  }

  bool end_array() override {
    place_ = Place::tensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    throw InvalidArgument(fmt::format("{}: the header is not valid JSON (byte {} of {})", label_,
                                      std::min(position, header_bytes_), header_bytes_));
  }

 private:
  enum class Place { outside, header, metadata, tensor, shape, offsets };
  static constexpr const char* kMetadata = "__metadata__";

  [[noreturn]] void fail(const std::string& what) const {
    throw InvalidArgument(fmt::format("{}: {} {} in the header", label_, in_quotes(tensor_.name), what));
  }

  [[noreturn]] void refuse_value(const std::string& what) const {
    switch (place_) {
      case Place::outside:
        throw InvalidArgument(fmt::format("{}: the header is {}, expected an object", label_, what));
      case Place::header:
        fail(fmt::format("is {}, expected an object", what));
      case Place::metadata:
        fail(fmt::format("has {}, expected strings", what));
      case Place::tensor:
        fail(fmt::format("has {} as its {}, expected {}", what, field_, field_ == "dtype" ? "a string" : "an array"));
      case Place::shape:
        fail(fmt::format("has {} in its shape, expected numbers from 0 to 2^63 - 1", what));
      case Place::offsets:
        break;
    }
    fail(fmt::format("has {} in its data_offsets, expected two numbers from 0 to 2^64 - 1", what));
  }

  std::string label_;
  std::size_t header_bytes_;
  Place place_ = Place::outside;
  bool has_key_ = false;
  std::string field_;
  Description tensor_;
  std::map<std::string, bool> names_, metadata_keys_, fields_;
  std::map<std::string, Description> descriptions_;
};

// Shape times size of an element, refused where it does not fit 64 bits.
std::uint64_t expected_bytes(const Description& tensor, const std::string& label) {
  std::uint64_t bits = static_cast<std::uint64_t>(tensor.type->bits);
  for (const std::int64_t size : tensor.shape) {
    if (__builtin_mul_overflow(bits, static_cast<std::uint64_t>(size), &bits)) {
      throw InvalidArgument(
          fmt::format("{}: the shape of {} has more elements than 64 bits can count", label, in_quotes(tensor.name)));
    }
  }
  if (bits % 8 != 0) {
    throw InvalidArgument(fmt::format("{}: {} does not end on a whole byte", label, in_quotes(tensor.name)));
  }
  return bits / 8;
}

// Each tensor as large as its shape says, and one after the other from the first byte of the data to the last.
void check_layout(const std::map<std::string, Description>& descriptions, std::uint64_t data_bytes,
                  const std::string& label) {
  std::vector<const Description*> by_place;
  for (const auto& [name, tensor] : descriptions) by_place.push_back(&tensor);
  std::sort(by_place.begin(), by_place.end(),
            [](const Description* a, const Description* b) { return a->offsets < b->offsets; });
  std::uint64_t next = 0;
  for (const Description* tensor : by_place) {
    const auto [begin, end] = tensor->offsets;
    const std::string name = in_quotes(tensor->name);
    if (begin > end) {
      throw InvalidArgument(
          fmt::format("{}: {} has data_offsets [{}, {}], which end before they begin", label, name, begin, end));
    }
    if (end > data_bytes) {
      throw InvalidArgument(
          fmt::format("{}: {} ends at byte {} of the data, but the file has only {} (is it cut short?)", label, name,
                      end, data_bytes));
    }
    if (const std::uint64_t expected = expected_bytes(*tensor, label); expected != end - begin) {
      throw InvalidArgument(
          fmt::format("{}: {} has {} bytes, expected {} for its shape and dtype", label, name, end - begin, expected));
    }
    if (begin < next) {
      throw InvalidArgument(fmt::format("{}: {} overlaps the tensor before it (begins at byte {}, expected {})", label,
                                        name, begin, next));
    }
    if (begin > next) {
      throw InvalidArgument(fmt::format("{}: {} bytes before {} belong to no tensor", label, begin - next, name));
    }
    next = end;
  }
  if (next != data_bytes) {
    throw InvalidArgument(fmt::format("{}: {} bytes at the end belong to no tensor", label, data_bytes - next));
  }
}

std::uint64_t little_endian_u64(std::span<const std::byte> bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) value |= std::to_integer<std::uint64_t>(bytes[i]) << (8 * i);
  return value;
}

// The header as text, its length and its characters checked.
std::string_view header_text(std::span<const std::byte> file, const std::string& label) {
  if (file.size() < kLengthBytes) {
    throw InvalidArgument(
        fmt::format("{}: has {} bytes, too few for a safetensors file, which begins with 8 bytes of "
                    "header length",
                    label, file.size()));
  }
  const std::uint64_t length = little_endian_u64(file);
  if (length > kMaxHeaderBytes) {
    throw InvalidArgument(fmt::format("{}: the header length is {}, expected at most {} (is it a safetensors file?)",
                                      label, length, kMaxHeaderBytes));
  }
  if (length > file.size() - kLengthBytes) {
    throw InvalidArgument(fmt::format("{}: the header length is {}, but only {} bytes follow (is it cut short?)", label,
                                      length, file.size() - kLengthBytes));
  }
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + kLengthBytes, length);
  if (text.empty() || text.front() != '{') {
    throw InvalidArgument(fmt::format("{}: the header does not begin with {{", label));
  }
  if (const auto position = first_invalid_utf8(text)) {
    throw InvalidArgument(fmt::format("{}: the header is not valid UTF-8 (byte {})", label, *position));
  }
  // nlohmann's parser takes a zero byte for the end of the text and would never look behind it.
  if (const std::size_t position = text.find('\0'); position != text.npos) {
    throw InvalidArgument(fmt::format("{}: the header is not valid JSON (byte {} is zero)", label, position));
  }
  return text;
}

}  // namespace

std::string in_quotes(std::string_view text) {
  std::size_t shown_bytes = std::min<std::size_t>(text.size(), 60);
  while (shown_bytes < text.size() && shown_bytes > 0 && (text[shown_bytes] & 0xc0) == 0x80) --shown_bytes;
  std::string shown(text.substr(0, shown_bytes));
  for (std::size_t i = 0; i < shown.size(); ++i) {
    const auto byte = static_cast<unsigned char>(shown[i]);
    const auto previous = static_cast<unsigned char>(i > 0 ? shown[i - 1] : 0);
    // C1 controls are c2 80 to c2 9f in UTF-8; made c2 bf, an inverted question mark.
    if (previous == 0xc2 && byte < 0xa0) shown[i] = '\xbf';
    if (byte < 0x20 || byte == 0x7f) shown[i] = '?';
  }
  return fmt::format("\"{}{}\"", shown, shown_bytes < text.size() ? "..." : "");
}

StoredTensors parse_safetensors(std::span<const std::byte> file, const std::string& label) {
  const std::string_view text = header_text(file, label);
  HeaderReader reader(label, text.size());
  nlohmann::json::sax_parse(text.begin(), text.end(), &reader);
  const auto descriptions = reader.take_descriptions();
  const std::span<const std::byte> data = file.subspan(kLengthBytes + text.size());
  check_layout(descriptions, data.size(), label);

  StoredTensors tensors;
  for (const auto& [name, description] : descriptions) {
    const auto [begin, end] = description.offsets;
    tensors[name] = {description.type->name, description.type->dtype, description.shape,
                     data.subspan(begin, end - begin)};
  }
  return tensors;
}

void write_safetensors(AtomicFile& file, std::vector<NamedTensor> tensors) {
  // Wide elements first: then each tensor begins at a multiple of its element size without gaps, which the format
  // forbids.
  std::stable_sort(tensors.begin(), tensors.end(), [](const NamedTensor& a, const NamedTensor& b) {
    return size_of(a.view.dtype) > size_of(b.view.dtype);
  });
  const auto bytes_of = [](const TensorView& view) {
    return static_cast<std::size_t>(view.element_count()) * size_of(view.dtype);
  };
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  std::size_t offset = 0;
  for (const NamedTensor& tensor : tensors) {
    const auto* type = std::find_if(std::begin(kStoredTypes), std::end(kStoredTypes),
                                    [&](const StoredType& known) { return known.dtype == tensor.view.dtype; });
    const std::size_t end = offset + bytes_of(tensor.view);
    nlohmann::ordered_json shape = nlohmann::ordered_json::array();
    for (const std::int64_t size : tensor.view.shape) shape.push_back(size);
    header[tensor.name] = {{"dtype", type->name}, {"shape", shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the format pads with spaces, so that the data begins aligned
  std::array<unsigned char, kLengthBytes> length{};
  for (std::size_t i = 0; i < kLengthBytes; ++i) length[i] = static_cast<unsigned char>(text.size() >> (8 * i));
  file.write(length.data(), length.size());
  file.write(text.data(), text.size());
  for (const NamedTensor& tensor : tensors) file.write(tensor.view.data, bytes_of(tensor.view));
}

}  // namespace eaves::cli
