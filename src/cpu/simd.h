// Loads and stores of vectors of float32 or float64, from and to memory of any floating-point type, with Highway. The
// one idea is the Pack: four vectors that are loaded, computed on and stored together. A loop over packs passes the
// rest of a row through the same body in a small padded buffer, so no operator has a second loop for the rest.
//
// The order of a pack's elements in its lanes depends on their type and on the machine. A shift and a mask unpack
// 16-bit types into the even and the odd elements, which is cheaper than keeping their order; sums and elementwise
// functions work in any order. element_of_lane() gives the order.
//
// This file is compiled once per level of vector instructions, hence the guard that toggles. Include it after
// hwy/foreach_target.h, in a file that HWY_TARGET_INCLUDE names; see stream.cpp.
#include <hwy/highway.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/numeric.h"

#if defined(EAVES_CPU_SIMD_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EAVES_CPU_SIMD_H_
#undef EAVES_CPU_SIMD_H_
#else
#define EAVES_CPU_SIMD_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// The Highway tag of the vectors for computing with T, and the type of such a vector.
template <typename T>
using Tag = hn::ScalableTag<Accumulator<T>>;
template <typename T>
using VectorOf = hn::Vec<Tag<T>>;

#undef EAVES_X86_MINMAX
#undef EAVES_HARDWARE_FLOAT16
// x86's minimum and maximum return the second operand if either is a NaN; Highway leaves the result open.
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
#define EAVES_X86_MINMAX 1
#else
#define EAVES_X86_MINMAX 0
#endif
// AVX2 and better levels convert a whole vector of float16 in one instruction, correctly rounded. A better level has a
// lower number in Highway, and newer versions have more levels above AVX3 than a list here could name.
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
#define EAVES_HARDWARE_FLOAT16 1
#else
#define EAVES_HARDWARE_FLOAT16 0
#endif

/// The larger of x and `best`; `best` if x is a NaN.
template <typename D, typename V = hn::Vec<D>>
HWY_INLINE V max_ignoring_nan(D, V x, V best) {
#if EAVES_X86_MINMAX
  return hn::Max(x, best);
#else
  return hn::IfThenElse(hn::Gt(x, best), x, best);
#endif
}

/// x limited to [low, high]; a NaN stays a NaN.
template <typename D, typename V = hn::Vec<D>>
HWY_INLINE V clamp_keeping_nan(D, V x, V low, V high) {
#if EAVES_X86_MINMAX
  return hn::Min(high, hn::Max(low, x));
#else
  return hn::IfThenElse(hn::Gt(x, high), high, hn::IfThenElse(hn::Lt(x, low), low, x));
#endif
}

// ------------------------------------------------------------------------------------------------------ conversions

using FloatTag = Tag<float>;
using Float = VectorOf<float>;
using WordTag = hn::RebindToUnsigned<FloatTag>;
using Word = hn::Vec<WordTag>;

/// Rounds each value to bfloat16, to nearest even, in the upper half of its word; the lower half is left over. A NaN
/// must be quieted() first.
HWY_INLINE Word round_to_upper_half(Float value) {
  const WordTag d;
  const Word bits = hn::BitCast(d, value);
  // Rounding adds 0x7fff, and 1 more if the upper half is odd. That 1 decides only a tie, a lower half of 0x8000. The
  // lowest bit of a tie is 0, so an "or" may add the 1.
  return hn::Add(hn::OrAnd(bits, hn::ShiftRight<16>(bits), hn::Set(d, 1u)), hn::Set(d, 0x7fffu));
}

/// Clears the lower half of a NaN, from which rounding could carry into its exponent. Other values stay.
HWY_INLINE Float quieted(Float value) {
  const FloatTag d;
  const WordTag dw;
  const Word quiet = hn::And(hn::Or(hn::BitCast(dw, value), hn::Set(dw, 0x400000u)), hn::Set(dw, 0xffff0000u));
  return hn::IfThenElse(hn::IsNaN(value), hn::BitCast(d, quiet), value);
}

/// to_float() and to_float16() of numeric.h, lane by lane, for levels without an instruction for them.
HWY_INLINE Float float_from_float16_bits(Word bits) {
  const WordTag d;
  const FloatTag df;
  const Word magnitude = hn::And(bits, hn::Set(d, 0x7fffu));
  const Word sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(d, 0x8000u)));
  const Word shifted = hn::ShiftLeft<13>(magnitude);
  const Word finite = hn::BitCast(d, hn::Mul(hn::BitCast(df, shifted), hn::Set(df, 0x1p112f)));
  const Word special = hn::Or(shifted, hn::Set(d, 0x7f800000u));
  const auto is_special = hn::Gt(magnitude, hn::Set(d, 0x7bffu));
  return hn::BitCast(df, hn::Or(hn::IfThenElse(is_special, special, finite), sign));
}

HWY_INLINE Word float16_bits(Float value) {
  const WordTag d;
  const FloatTag df;
  const Word bits = hn::BitCast(d, value);
  const Word sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(d, 0x8000u));
  const Word magnitude = hn::And(bits, hn::Set(d, 0x7fffffffu));
  const Word subnormal =
      hn::Sub(hn::BitCast(d, hn::Add(hn::BitCast(df, magnitude), hn::Set(df, 0.5f))), hn::Set(d, 0x3f000000u));
  const Word odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d, 1u));
  const Word normal =
      hn::ShiftRight<13>(hn::Sub(hn::Add(hn::Add(magnitude, hn::Set(d, 0xfffu)), odd), hn::Set(d, 0x38000000u)));
  Word result = hn::IfThenElse(hn::Gt(hn::Set(d, 0x38800000u), magnitude), subnormal, normal);
  result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(d, 0x477fefffu)), hn::Set(d, 0x7c00u), result);
  result = hn::IfThenElse(hn::RebindMask(d, hn::IsNaN(value)), hn::Set(d, 0x7e00u), result);
  return hn::Or(result, sign);
}

// ------------------------------------------------------------------------------------------------------------ packs

/// Four vectors of elements.
template <typename T>
struct Pack {
  VectorOf<T> v0, v1, v2, v3;
};

template <typename T>
HWY_INLINE std::size_t pack_size() {
  return 4 * hn::Lanes(Tag<T>());
}

/// The largest possible pack, in elements; Highway's largest vectors have 2048 bits.
template <typename T>
inline constexpr std::size_t kMaxPackSize = 4 * hn::MaxLanes(Tag<T>());

template <typename T>
inline constexpr bool kIsUnpackedIntoEvenAndOdd = std::is_same_v<T, bfloat16> ||
                                                  (std::is_same_v<T, float16> && !EAVES_HARDWARE_FLOAT16);

/// The index in memory of the element in lane `lane` of a pack's vector `vector`.
template <typename T>
HWY_INLINE std::size_t element_of_lane(std::size_t vector, std::size_t lane) {
  const std::size_t lanes = hn::Lanes(Tag<T>());
  if constexpr (kIsUnpackedIntoEvenAndOdd<T>) return vector / 2 * 2 * lanes + 2 * lane + vector % 2;
  return vector * lanes + lane;
}

/// Loads a pair of 16-bit elements into each word.
template <typename T>
HWY_INLINE Word load_words(const T* from) {
  const WordTag d;
#if HWY_TARGET == HWY_SCALAR  // its vectors have one lane, not two of 16 bits
  std::uint32_t word;
  std::memcpy(&word, from, sizeof(word));
  return hn::Set(d, word);
#else
  const hn::Repartition<std::uint16_t, WordTag> d16;
  return hn::BitCast(d, hn::LoadU(d16, &from->bits));
#endif
}

template <bool kNonTemporal, typename T>
HWY_INLINE void store_words(Word words, T* to) {
#if HWY_TARGET == HWY_SCALAR
  const std::uint32_t word = hn::GetLane(words);
  std::memcpy(to, &word, sizeof(word));
#else
  const hn::Repartition<std::uint16_t, WordTag> d16;
  if constexpr (kNonTemporal) {
    hn::Stream(hn::BitCast(d16, words), d16, &to->bits);
  } else {
    hn::StoreU(hn::BitCast(d16, words), d16, &to->bits);
  }
#endif
}

template <typename T>
HWY_INLINE Float even_elements(Word words) {
  const FloatTag df;
  if constexpr (std::is_same_v<T, bfloat16>) return hn::BitCast(df, hn::ShiftLeft<16>(words));
  return float_from_float16_bits(hn::And(words, hn::Set(WordTag(), 0xffffu)));
}

template <typename T>
HWY_INLINE Float odd_elements(Word words) {
  const FloatTag df;
  if constexpr (std::is_same_v<T, bfloat16>) return hn::BitCast(df, hn::And(words, hn::Set(WordTag(), 0xffff0000u)));
  return float_from_float16_bits(hn::ShiftRight<16>(words));
}

template <typename T>
HWY_INLINE Word words_of(Float even, Float odd) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    return hn::OrAnd(hn::ShiftRight<16>(round_to_upper_half(even)), round_to_upper_half(odd),
                     hn::Set(WordTag(), 0xffff0000u));
  }
  return hn::Or(float16_bits(even), hn::ShiftLeft<16>(float16_bits(odd)));
}

template <typename T>
HWY_INLINE Pack<T> load_pack(const T* from) {
  const Tag<T> d;
  const std::size_t n = hn::Lanes(d);
  if constexpr (kIsUnpackedIntoEvenAndOdd<T>) {
    const Word first = load_words(from);
    const Word second = load_words(from + 2 * n);
    return {even_elements<T>(first), odd_elements<T>(first), even_elements<T>(second), odd_elements<T>(second)};
#if EAVES_HARDWARE_FLOAT16
  } else if constexpr (std::is_same_v<T, float16>) {
    const hn::Rebind<hwy::float16_t, FloatTag> d16;
    const auto* half = reinterpret_cast<const hwy::float16_t*>(from);
    return {hn::PromoteTo(d, hn::LoadU(d16, half)), hn::PromoteTo(d, hn::LoadU(d16, half + n)),
            hn::PromoteTo(d, hn::LoadU(d16, half + 2 * n)), hn::PromoteTo(d, hn::LoadU(d16, half + 3 * n))};
#endif
  } else {
    return {hn::LoadU(d, from), hn::LoadU(d, from + n), hn::LoadU(d, from + 2 * n), hn::LoadU(d, from + 3 * n)};
  }
}

/// Rounds to T, to nearest even, and stores. Non-temporal stores need `to` aligned to a vector, and a call of
/// hwy::FlushStream() before another thread reads.
template <bool kNonTemporal = false, typename T>
HWY_INLINE void store_pack(Pack<T> pack, T* to) {
  const Tag<T> d;
  const std::size_t n = hn::Lanes(d);
  if constexpr (kIsUnpackedIntoEvenAndOdd<T>) {
    if constexpr (std::is_same_v<T, bfloat16>) {
      // A NaN in any of the vectors makes their sum a NaN, so one comparison finds it instead of four.
      const auto sum = hn::Add(hn::Add(pack.v0, pack.v1), hn::Add(pack.v2, pack.v3));
      if (HWY_UNLIKELY(!hn::AllFalse(d, hn::IsNaN(sum)))) {
        pack = {quieted(pack.v0), quieted(pack.v1), quieted(pack.v2), quieted(pack.v3)};
      }
    }
    store_words<kNonTemporal>(words_of<T>(pack.v0, pack.v1), to);
    store_words<kNonTemporal>(words_of<T>(pack.v2, pack.v3), to + 2 * n);
  } else {
    const auto store = [&](VectorOf<T> value, T* place) HWY_ATTR {
#if EAVES_HARDWARE_FLOAT16
      if constexpr (std::is_same_v<T, float16>) {
        const hn::Rebind<hwy::float16_t, FloatTag> d16;
        auto* half = reinterpret_cast<hwy::float16_t*>(place);
        if constexpr (kNonTemporal) {
          hn::Stream(hn::DemoteTo(d16, value), d16, half);
        } else {
          hn::StoreU(hn::DemoteTo(d16, value), d16, half);
        }
        return;
      }
#endif
      if constexpr (!std::is_same_v<T, float16>) {
        if constexpr (kNonTemporal) {
          hn::Stream(value, d, place);
        } else {
          hn::StoreU(value, d, place);
        }
      }
    };
    store(pack.v0, to);
    store(pack.v1, to + n);
    store(pack.v2, to + 2 * n);
    store(pack.v3, to + 3 * n);
  }
}

/// Stores a pack to accumulators in the order of its elements, whatever the order of its lanes; load_in_order() loads
/// it.
template <typename T>
HWY_INLINE void store_in_order(const Pack<T>& pack, Accumulator<T>* to) {
  const Tag<T> d;
  const std::size_t n = hn::Lanes(d);
  if constexpr (kIsUnpackedIntoEvenAndOdd<T>) {
    hn::StoreInterleaved2(pack.v0, pack.v1, d, to);
    hn::StoreInterleaved2(pack.v2, pack.v3, d, to + 2 * n);
  } else {
    hn::StoreU(pack.v0, d, to);
    hn::StoreU(pack.v1, d, to + n);
    hn::StoreU(pack.v2, d, to + 2 * n);
    hn::StoreU(pack.v3, d, to + 3 * n);
  }
}

template <typename T>
HWY_INLINE Pack<T> load_in_order(const Accumulator<T>* from) {
  const Tag<T> d;
  const std::size_t n = hn::Lanes(d);
  if constexpr (kIsUnpackedIntoEvenAndOdd<T>) {
    // Not the members of a Pack: GCC would compile its implicit constructor without the level's instructions, and then
    // refuses to inline the constructor of Highway's NEON vectors there.
    VectorOf<T> v0, v1, v2, v3;
    hn::LoadInterleaved2(d, from, v0, v1);
    hn::LoadInterleaved2(d, from + 2 * n, v2, v3);
    return {v0, v1, v2, v3};
  } else {
    return {hn::LoadU(d, from), hn::LoadU(d, from + n), hn::LoadU(d, from + 2 * n), hn::LoadU(d, from + 3 * n)};
  }
}

/// Loads the first `count` elements of a pack; the rest is `fill`.
template <typename T>
HWY_INLINE Pack<T> load_first(const T* from, std::size_t count, T fill) {
  HWY_ALIGN T padded[kMaxPackSize<T>];
  for (std::size_t i = count; i < pack_size<T>(); ++i) padded[i] = fill;
  std::memcpy(padded, from, count * sizeof(T));
  return load_pack(padded);
}

/// Loads a whole pack if `count`, the number of elements left, is enough for one; else load_first().
template <typename T>
HWY_INLINE Pack<T> load_some(const T* from, std::int64_t count, T fill) {
  if (count >= static_cast<std::int64_t>(pack_size<T>())) return load_pack(from);
  return load_first(from, static_cast<std::size_t>(count), fill);
}

template <typename T>
HWY_INLINE void store_first(const Pack<T>& pack, T* to, std::size_t count) {
  HWY_ALIGN T padded[kMaxPackSize<T>];
  store_pack(pack, padded);
  std::memcpy(to, padded, count * sizeof(T));
}

/// Stores a whole pack or its first elements, as load_some() loads them.
template <typename T>
HWY_INLINE void store_some(const Pack<T>& pack, T* to, std::int64_t count) {
  if (count >= static_cast<std::int64_t>(pack_size<T>())) {
    store_pack(pack, to);
  } else {
    store_first(pack, to, static_cast<std::size_t>(count));
  }
}

/// Calls `body(pack)` for the elements [from, from + count); the last pack is filled up with `fill`.
template <typename T, typename Body>
HWY_INLINE void for_each_pack(const T* from, std::size_t count, T fill, Body&& body) {
  const std::size_t step = pack_size<T>();
  std::size_t i = 0;
  for (; i + step <= count; i += step) body(load_pack(from + i));
  if (i < count) body(load_first(from + i, count - i, fill));
}

/// Writes [to, to + count). `make(i, n)` returns a pack, and its first `n` elements go to `to + i`; `n` is a whole pack
/// except at the ends.
template <bool kNonTemporal, typename T, typename Make>
HWY_INLINE void write_packs(T* to, std::size_t count, Make&& make) {
  const std::size_t step = pack_size<T>();
  std::size_t i = 0;
  if constexpr (kNonTemporal) {
    // Ordinary stores up to the first cache line that begins in `to`: non-temporal stores should write whole lines.
    constexpr std::uintptr_t kLine = 64;
    const std::uintptr_t misalignment = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
    for (const std::size_t head = misalignment / sizeof(T); i < head && i < count;) {
      std::size_t n = head - i < step ? head - i : step;
      n = n < count - i ? n : count - i;
      store_first(make(i, n), to + i, n);
      i += n;
    }
  }
  for (; i + step <= count; i += step) store_pack<kNonTemporal>(make(i, step), to + i);
  if (i < count) store_first(make(i, count - i), to + i, count - i);
}

/// to[i] = body(from[i]). `body` maps a vector to a vector, with the elements in any order.
template <bool kNonTemporal = false, typename T, typename Body>
HWY_INLINE void transform(const T* from, T* to, std::size_t count, Body&& body) {
  write_packs<kNonTemporal>(to, count, [&](std::size_t i, std::size_t n) HWY_ATTR {
    const Pack<T> x = n == pack_size<T>() ? load_pack(from + i) : load_first(from + i, n, T{});
    return Pack<T>{body(x.v0), body(x.v1), body(x.v2), body(x.v3)};
  });
}

/// The same from accumulators to the narrower T, rounded. `to` may begin at `from`: each pack is read before it is
/// written, and a write ends before the elements that are still to be read.
template <bool kNonTemporal = false, typename T, typename Body>
requires(sizeof(T) < sizeof(Accumulator<T>)) HWY_INLINE
    void transform(const Accumulator<T>* from, T* to, std::size_t count, Body&& body) {
  HWY_ALIGN Accumulator<T> padded[kMaxPackSize<T>] = {};
  write_packs<kNonTemporal>(to, count, [&](std::size_t i, std::size_t n) HWY_ATTR {
    const Accumulator<T>* elements = from + i;
    if (n < pack_size<T>()) {
      std::memcpy(padded, elements, n * sizeof(Accumulator<T>));
      elements = padded;
    }
    const Pack<T> x = load_in_order<T>(elements);
    return Pack<T>{body(x.v0), body(x.v1), body(x.v2), body(x.v3)};
  });
}

template <bool kNonTemporal, typename T>
void fill(T* to, std::int64_t count, Accumulator<T> value) {
  const auto v = hn::Set(Tag<T>(), value);
  write_packs<kNonTemporal>(to, static_cast<std::size_t>(count), [&](std::size_t, std::size_t) HWY_ATTR {
    return Pack<T>{v, v, v, v};
  });
}

/// Converts elements to accumulators, in order. Writes whole packs: `to` has room for `count` rounded up to a pack.
template <typename T>
void widen(const T* from, std::int64_t count, Accumulator<T>* to) {
  const auto step = static_cast<std::int64_t>(pack_size<T>());
  for (std::int64_t i = 0; i < count; i += step) store_in_order(load_some(from + i, count - i, T{}), to + i);
}

/// The inverse of widen(), rounded. Reads whole packs: `from` has `count` elements rounded up to a pack.
template <bool kNonTemporal, typename T>
void narrow(const Accumulator<T>* from, T* to, std::int64_t count) {
  write_packs<kNonTemporal>(to, static_cast<std::size_t>(count),
                            [&](std::size_t i, std::size_t) HWY_ATTR { return load_in_order<T>(from + i); });
}

// ----------------------------------------------------------------------------------------------------------- blocks

/// The packs of a block, which an operator works on at a time. With 64 terms for each accumulator the float32 sum of a
/// block is right to a few units in the last place, and the horizontal sum at its end costs little. With AVX-512 a
/// block has 4096 elements, which fit L1.
inline constexpr std::int64_t kPacksPerBlock = 64;
template <typename T>
std::int64_t block_size() {
  return kPacksPerBlock * static_cast<std::int64_t>(pack_size<T>());
}

/// Memory for a block.
template <typename A>
struct Block {
  HWY_ALIGN A elements[kPacksPerBlock * kMaxPackSize<A>];
};

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();
#endif  // per target
