// Buffers for benchmarks, filled with normal random numbers so fast that a benchmark does not wait for 1 GiB of them. A
// block of about a million numbers is drawn once, each from its own counter, so that the number of threads changes
// nothing. The tensor is then filled with pieces of the block that start at different places.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <numbers>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "core/numeric.h"
#include "cpu/parallel.h"
#include "eaves/cross_entropy.h"
#include "eaves/error.h"
#include "runtime/runtime.h"
#include "testing/benchmark.h"
#include "testing/dispatch.h"

namespace eaves::bench {
namespace {

// The block has to be larger than the part of a tensor that a kernel takes at a time, and so small that it is drawn in
// some milliseconds.
constexpr std::int64_t kBlockElements = std::int64_t{1} << 20;
constexpr std::int64_t kPieceElements = kBlockElements / 2;

// The output function of SplitMix64 (Steele, Lea, Flood 2014): consecutive counters give independent-looking bits.
std::uint64_t random_bits(std::uint64_t counter) {
  std::uint64_t z = counter * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

struct NormalPair {
  float first, second;
};

// Box and Muller: one draw of 64 bits gives two uniform numbers, and these give two normal ones.
NormalPair normal_pair(std::uint64_t bits) {
  const float uniform = (static_cast<float>(bits >> 40) + 0.5f) * 0x1p-24f;  // never 0: its logarithm is taken
  const float angle = static_cast<float>(bits & 0xffffffu) * 0x1p-24f * 2.0f * std::numbers::pi_v<float>;
  const float radius = std::sqrt(-2.0f * std::log(uniform));
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

template <typename T>
std::vector<T> draw_block(std::int64_t elements, std::uint64_t seed, float deviation) {
  std::vector<T> block(static_cast<std::size_t>(elements + 1));  // the last pair may have one number too many
  const std::uint64_t first_counter = random_bits(seed + 1);
  cpu::parallel_for({}, (elements + 1) / 2, cpu::grain_for(4), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const NormalPair pair = normal_pair(random_bits(first_counter + static_cast<std::uint64_t>(i)));
      block[static_cast<std::size_t>(2 * i)] = round_to<T>(deviation * pair.first);
      block[static_cast<std::size_t>(2 * i) + 1] = round_to<T>(deviation * pair.second);
    }
  });
  return block;
}

// Pieces are copied on the device of the block, so that on a GPU 1 GiB does not cross the bus.
void tile(Device device, const std::byte* block, std::int64_t block_elements, std::byte* destination,
          std::int64_t elements, std::size_t element_bytes, std::uint64_t seed) {
  const std::int64_t piece_elements = std::min(block_elements, kPieceElements);
  const std::int64_t pieces = (elements + piece_elements - 1) / piece_elements;
  const auto offsets = static_cast<std::uint64_t>(block_elements - piece_elements + 1);
  const auto copy_pieces = [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t piece = first; piece < last; ++piece) {
      const std::int64_t begin = piece * piece_elements;
      const std::int64_t count = std::min(piece_elements, elements - begin);
      const std::uint64_t offset = random_bits(seed ^ static_cast<std::uint64_t>(piece)) % offsets;
      runtime::copy(destination + static_cast<std::size_t>(begin) * element_bytes, device,
                    block + offset * element_bytes, device, static_cast<std::size_t>(count) * element_bytes);
    }
  };
  if (device.type == DeviceType::cpu) {
    cpu::parallel_for({}, pieces, 1, copy_pieces);
  } else {
    copy_pieces(0, pieces);  // may throw, which a body of parallel_for must not
  }
}

template <typename T>
void fill_normal(Device device, void* destination, std::int64_t elements, std::uint64_t seed, float deviation) {
  const std::int64_t block_elements = std::min(elements, kBlockElements);
  const std::vector<T> block = draw_block<T>(block_elements, seed, deviation);
  const std::size_t block_bytes = static_cast<std::size_t>(block_elements) * sizeof(T);
  if (device.type == DeviceType::cpu) {
    tile(device, reinterpret_cast<const std::byte*>(block.data()), block_elements, static_cast<std::byte*>(destination),
         elements, sizeof(T), seed);
    return;
  }
  if (elements <= kBlockElements) {
    runtime::copy(destination, device, block.data(), kCpu, block_bytes);
    return;
  }
  Arena staging(device);
  void* device_block = staging.allocate(block_bytes);
  runtime::copy(device_block, device, block.data(), kCpu, block_bytes);
  tile(device, static_cast<const std::byte*>(device_block), block_elements, static_cast<std::byte*>(destination),
       elements, sizeof(T), seed);
}

// The bytes of each number, rounded to T, one after another.
template <typename T>
std::vector<std::byte> bytes_of(std::span<const double> numbers) {
  std::vector<std::byte> bytes(numbers.size() * sizeof(T));
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    T element;
    if constexpr (kIsFloatingPoint<T>) {
      element = round_to<T>(static_cast<Accumulator<T>>(numbers[i]));
    } else if constexpr (std::is_same_v<T, boolean>) {
      element = {static_cast<std::uint8_t>(numbers[i] != 0.0)};
    } else {
      element = static_cast<T>(numbers[i]);
    }
    std::memcpy(&bytes[i * sizeof(T)], &element, sizeof(T));
  }
  return bytes;
}

}  // namespace

Arena::~Arena() {
  for (void* block : blocks_) runtime::deallocate(device_, block);
}

void* Arena::allocate(std::size_t bytes) {
  blocks_.reserve(blocks_.size() + 1);  // so that nothing can be thrown between taking the memory and noting it
  blocks_.push_back(runtime::allocate(device_, bytes));
  bytes_ += static_cast<std::int64_t>(bytes);
  return blocks_.back();
}

TensorView Arena::normal(DType dtype, const Dims& shape, std::uint64_t seed, double deviation) {
  if (!is_floating_point(dtype)) {
    throw InvalidArgument(std::string("Arena::normal: dtype is ") + name_of(dtype) +
                          ", expected a floating-point type");
  }
  TensorView tensor = TensorView::contiguous(static_cast<void*>(nullptr), dtype, shape, device_);
  const std::int64_t elements = tensor.element_count();
  tensor.data = allocate(static_cast<std::size_t>(elements) * size_of(dtype));
  if (elements == 0) return tensor;
  const auto factor = static_cast<float>(deviation);
  switch (dtype) {
    case DType::bfloat16:
      fill_normal<bfloat16>(device_, tensor.data, elements, seed, factor);
      break;
    case DType::float16:
      fill_normal<float16>(device_, tensor.data, elements, seed, factor);
      break;
    case DType::float64:
      fill_normal<double>(device_, tensor.data, elements, seed, factor);
      break;
    default:
      fill_normal<float>(device_, tensor.data, elements, seed, factor);
  }
  return tensor;
}

TensorView Arena::filled(DType dtype, const Dims& shape, std::span<const double> numbers) {
  TensorView tensor = TensorView::contiguous(static_cast<void*>(nullptr), dtype, shape, device_);
  const std::size_t bytes = static_cast<std::size_t>(tensor.element_count()) * size_of(dtype);
  if (bytes > 0 && numbers.empty()) throw InvalidArgument("Arena::filled: numbers is empty, expected at least one");
  tensor.data = allocate(bytes);
  if (bytes == 0) return tensor;
  const std::vector<std::byte> host = dispatch_any(dtype, [&]<typename T>() { return bytes_of<T>(numbers); });
  auto* data = static_cast<std::byte*>(tensor.data);
  std::size_t filled = std::min(bytes, host.size());
  runtime::copy(data, device_, host.data(), kCpu, filled);
  // Each copy doubles the filled part on the device, so that on a GPU only the first copy crosses the bus.
  while (filled < bytes) {
    const std::size_t count = std::min(filled, bytes - filled);
    runtime::copy(data + filled, device_, data, device_, count);
    filled += count;
  }
  return tensor;
}

TensorView Arena::output(DType dtype, const Dims& shape) {
  TensorView tensor = TensorView::contiguous(static_cast<void*>(nullptr), dtype, shape, device_);
  const std::size_t bytes = static_cast<std::size_t>(tensor.element_count()) * size_of(dtype);
  tensor.data = allocate(bytes);
  // Touched here, so that the first measured call does not pay for the page faults.
  runtime::fill_bytes(device_, tensor.data, 0, bytes);
  return tensor;
}

TensorView class_targets(Arena& arena, const Dims& shape, std::int64_t classes, bool half_is_ignored) {
  constexpr std::int64_t kRunOfIgnoredRows = 32;
  const std::int64_t rows = elements_of(shape);
  std::mt19937_64 random(3);
  std::vector<double> targets;
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto target = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(classes));
    const bool is_ignored = half_is_ignored && row / kRunOfIgnoredRows % 2 == 0;
    targets.push_back(static_cast<double>(is_ignored ? CrossEntropyOptions{}.ignore_index : target));
  }
  return arena.filled(DType::int64, shape, targets);
}

}  // namespace eaves::bench
