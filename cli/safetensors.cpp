// nlohmann's parser reads the header into a tree. It checks JSON and UTF-8, and does not recurse. Names given twice,
// which a tree cannot show, are refused during parsing, and so are deep nesting and long lists, which would only take
// memory.
#include "cli/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "eaves/error.h"

namespace eaves::cli {
namespace {

using nlohmann::json;

// The limit of the format's reference implementation.
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
constexpr std::size_t kLengthBytes = 8;

struct StoredType {
  const char* name;
  int bits;
  std::optional<DType> dtype;
};

// All element types of the format.
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

// A tensor as the header describes it.
struct Description {
  std::string name;
  const StoredType* type = nullptr;
  Dims shape;
  std::uint64_t begin = 0, end = 0;
};

// Objects of objects of lists. A deeper level is refused when it opens.
constexpr int kMaxDepth = 3;

// An object or a list that has begun and not ended.
struct Open {
  bool is_list = false;
  std::set<std::string> names = {};  // of an object
  int values = 0;                    // of a list: at most as many as a shape may have axes
};

json parse_header(std::string_view text, const std::string& label) {
  std::vector<Open> open;
  const json::parser_callback_t check = [&](int depth, json::parse_event_t event, json& parsed) {
    const bool opens = event == json::parse_event_t::object_start || event == json::parse_event_t::array_start;
    const bool closes = event == json::parse_event_t::object_end || event == json::parse_event_t::array_end;
    if (opens && depth >= kMaxDepth) throw InvalidArgument(fmt::format("{}: the header is nested too deeply", label));
    if ((opens || event == json::parse_event_t::value) && !open.empty() && open.back().is_list &&
        ++open.back().values > kMaxRank) {
      throw InvalidArgument(fmt::format("{}: the header has a list of more than {} values", label, kMaxRank));
    }
    if (opens) open.push_back({.is_list = event == json::parse_event_t::array_start});
    if (closes) open.pop_back();
    if (event == json::parse_event_t::key && !open.back().names.insert(parsed.get<std::string>()).second) {
      throw InvalidArgument(
          fmt::format("{}: the header names {} twice in one object", label, in_quotes(parsed.get<std::string>())));
    }
    return true;
  };
  try {
    return json::parse(text, check);
  } catch (const json::exception&) {  // its message repeats bytes of the file, which may be anything
    throw InvalidArgument(fmt::format("{}: the header is not valid JSON in UTF-8", label));
  }
}

Description read_description(const std::string& name, const json& fields, const std::string& label) {
  const auto check = [&](bool is_right, const char* expected) {
    if (!is_right) {
      throw InvalidArgument(fmt::format("{}: the header's entry {} is not {}", label, in_quotes(name), expected));
    }
  };
  check(fields.is_object() && fields.size() == 3 && fields.contains("dtype") && fields.contains("shape") &&
            fields.contains("data_offsets"),
        "an object with dtype, shape and data_offsets");
  const json& dtype = fields["dtype"];
  const json& shape = fields["shape"];
  const json& offsets = fields["data_offsets"];
  Description tensor{.name = name};
  tensor.type = dtype.is_string() ? find_type(dtype.get<std::string>()) : nullptr;
  check(tensor.type != nullptr, "a tensor of a known dtype");
  check(shape.is_array(), "a tensor of at most 16 axes");
  constexpr std::uint64_t kMaxSize = std::numeric_limits<std::int64_t>::max();
  for (const json& size : shape) {
    check(size.is_number_unsigned() && size.get<std::uint64_t>() <= kMaxSize, "a tensor with sizes from 0 to 2^63 - 1");
    tensor.shape.push_back(size.get<std::int64_t>());
  }
  check(offsets.is_array() && offsets.size() == 2 && offsets[0].is_number_unsigned() && offsets[1].is_number_unsigned(),
        "a tensor with two data_offsets from 0 to 2^64 - 1");
  tensor.begin = offsets[0].get<std::uint64_t>();
  tensor.end = offsets[1].get<std::uint64_t>();
  return tensor;
}

// The bytes of a tensor by its shape and type; nothing if they exceed 64 bits or do not end on a whole byte.
std::optional<std::uint64_t> expected_bytes(const Description& tensor) {
  std::uint64_t bits = static_cast<std::uint64_t>(tensor.type->bits);
  for (const std::int64_t size : tensor.shape) {
    if (__builtin_mul_overflow(bits, static_cast<std::uint64_t>(size), &bits)) return std::nullopt;
  }
  return bits % 8 == 0 ? std::optional(bits / 8) : std::nullopt;
}

// Checks that each tensor has its shape's bytes, and that the tensors follow each other from the first byte of the data
// to the last.
void check_layout(std::vector<Description>& tensors, std::uint64_t data_bytes, const std::string& label) {
  std::sort(tensors.begin(), tensors.end(), [](const Description& a, const Description& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  std::uint64_t next = 0;
  for (const Description& tensor : tensors) {
    const std::string name = in_quotes(tensor.name);
    if (tensor.begin > tensor.end || tensor.end > data_bytes) {
      throw InvalidArgument(
          fmt::format("{}: {} has data_offsets [{}, {}], but the file has {} bytes of data (is the file cut short?)",
                      label, name, tensor.begin, tensor.end, data_bytes));
    }
    if (expected_bytes(tensor) != tensor.end - tensor.begin) {
      throw InvalidArgument(fmt::format("{}: {} has {} bytes, which do not match its shape and dtype", label, name,
                                        tensor.end - tensor.begin));
    }
    if (tensor.begin != next) {
      throw InvalidArgument(fmt::format("{}: {} begins at byte {}, expected byte {}, right behind the tensor before it",
                                        label, name, tensor.begin, next));
    }
    next = tensor.end;
  }
  if (next != data_bytes) {
    throw InvalidArgument(fmt::format("{}: the last {} bytes belong to no tensor", label, data_bytes - next));
  }
}

// Returns the header as text, after a check of its length.
std::string_view header_text(std::span<const std::byte> file, const std::string& label) {
  if (file.size() < kLengthBytes) {
    throw InvalidArgument(
        fmt::format("{}: has {} bytes, too few for a safetensors file, which begins with 8 bytes that "
                    "hold the header's length",
                    label, file.size()));
  }
  std::uint64_t length = 0;  // little-endian
  for (std::size_t i = 0; i < kLengthBytes; ++i) length |= std::to_integer<std::uint64_t>(file[i]) << (8 * i);
  if (length > kMaxHeaderBytes) {
    throw InvalidArgument(
        fmt::format("{}: the header length is {}, expected at most {} (is the file a safetensors file?)", label, length,
                    kMaxHeaderBytes));
  }
  if (length > file.size() - kLengthBytes) {
    throw InvalidArgument(fmt::format("{}: the header length is {}, but only {} bytes follow (is the file cut short?)",
                                      label, length, file.size() - kLengthBytes));
  }
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + kLengthBytes, length);
  if (text.empty() || text.front() != '{') {
    throw InvalidArgument(fmt::format("{}: the header does not begin with {{", label));
  }
  // The parser takes a zero byte for the end of the text and would never look behind it.
  if (text.find('\0') != text.npos) throw InvalidArgument(fmt::format("{}: the header has a zero byte", label));
  return text;
}

}  // namespace

std::string in_quotes(std::string_view text) {
  constexpr std::size_t kShown = 60;
  const std::string dumped = json(text).dump(-1, ' ', false, json::error_handler_t::replace);
  // A terminal also acts on U+007F to U+009F, which JSON does not escape. In UTF-8, U+0080 to U+009F are 0xC2 and a
  // byte of that value.
  std::string shown;
  for (std::size_t i = 0; i < dumped.size(); ++i) {
    const bool is_pair = dumped[i] == '\xC2' && static_cast<unsigned char>(dumped[i + 1]) < 0xA0;
    if (is_pair) ++i;
    if (is_pair || dumped[i] == '\x7F') {
      shown += fmt::format("\\u{:04x}", static_cast<unsigned char>(dumped[i]));
    } else {
      shown += dumped[i];
    }
  }
  if (shown.size() > kShown) {
    std::size_t end = kShown;
    while ((static_cast<unsigned char>(shown[end]) & 0xC0) == 0x80) --end;  // not inside a character
    shown.replace(end, shown.npos, "...\"");
  }
  return shown;
}

StoredTensors parse_safetensors(std::span<const std::byte> file, const std::string& label) {
  const std::string_view text = header_text(file, label);
  const json header = parse_header(text, label);
  std::vector<Description> descriptions;
  for (const auto& [name, fields] : header.items()) {
    if (name != "__metadata__") {
      descriptions.push_back(read_description(name, fields, label));
    } else if (!fields.is_object() || !std::all_of(fields.begin(), fields.end(), std::mem_fn(&json::is_string))) {
      throw InvalidArgument(fmt::format("{}: the header's \"__metadata__\" is not an object of strings", label));
    }
  }
  const std::span<const std::byte> data = file.subspan(kLengthBytes + text.size());
  check_layout(descriptions, data.size(), label);

  StoredTensors tensors;
  for (const Description& tensor : descriptions) {
    tensors[tensor.name] = {tensor.type->name, tensor.type->dtype, tensor.shape,
                            data.subspan(tensor.begin, tensor.end - tensor.begin)};
  }
  return tensors;
}

void write_safetensors(AtomicFile& file, std::vector<NamedTensor> tensors) {
  // Wide elements first: each tensor then begins at a multiple of its element size without a gap, which the format
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
