// The transposition of rows of KV memory to columns of floats, so that keys become lanes.
//
// Rows are read as 32-bit words, and eight words of kLanes keys are transposed at once. A word contains one float, two
// bf16 or four int8 of consecutive dimensions, which are unpacked after that: the narrower the type, the fewer
// shuffles.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "attention/attention_tiles.h"
#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA::attention {

typedef int32_t Words __attribute__((vector_size(4 * kLanes)));
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t EightWords __attribute__((vector_size(32)));
constexpr int kWords = 8;

constexpr int values_per_word(KVType type) { return type == KVType::f32 ? 1 : type == KVType::bf16 ? 2 : 4; }
constexpr int value_bytes(KVType type) { return 4 / values_per_word(type); }

// Interleaves groups of `width` words of a and b in each 128 bits, from the lower or the upper half.
template <int width, int upper, int... i>
static CHAIRLIFT_INLINE void unpack_words(const Words& a, const Words& b, Words& out,
                                          std::integer_sequence<int, i...>) {
  out = __builtin_shufflevector(
      a, b, (i / 4 * 4 + upper * 2 + (width == 1 ? i % 4 / 2 : i % 2) + (width == 1 ? i % 2 : i % 4 / 2) * kLanes)...);
}

// The 128-bit parts of a and then of b, either the even or the odd ones.
template <int odd, int... i>
static CHAIRLIFT_INLINE void unpack_quarters(const Words& a, const Words& b, Words& out,
                                             std::integer_sequence<int, i...>) {
  constexpr int kHalf = kLanes / 2;
  out = __builtin_shufflevector(a, b, (i % kHalf / 4 * 8 + odd * 4 + i % 4 + i / kHalf * kLanes)...);
}

// Transposes four rows of four words in each 128 bits.
static CHAIRLIFT_INLINE void transpose_quarters(Words (&m)[kWords], int first) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
  Words a, b, c, d;
  unpack_words<1, 0>(m[first], m[first + 1], a, lanes);
  unpack_words<1, 1>(m[first], m[first + 1], b, lanes);
  unpack_words<1, 0>(m[first + 2], m[first + 3], c, lanes);
  unpack_words<1, 1>(m[first + 2], m[first + 3], d, lanes);
  unpack_words<2, 0>(a, c, m[first], lanes);
  unpack_words<2, 1>(a, c, m[first + 1], lanes);
  unpack_words<2, 0>(b, d, m[first + 2], lanes);
  unpack_words<2, 1>(b, d, m[first + 3], lanes);
}

// The key whose words are in the lower half of m[i]. An upper half has the words of the fourth key after it.
constexpr int lower_key(int i) { return kLanes == 16 && i >= 4 ? i + 4 : i; }

// Loads eight words of kLanes keys; m[i] becomes word i of all of these keys.
template <typename RowOf>
static CHAIRLIFT_INLINE void load_transposed(RowOf row_of, Words (&m)[kWords]) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
#pragma GCC unroll 8
  for (int i = 0; i < kWords; ++i) {
    EightWords lower, upper;
    std::memcpy(&lower, row_of(lower_key(i)), sizeof lower);
    if constexpr (kLanes == 16) {
      std::memcpy(&upper, row_of(lower_key(i) + 4), sizeof upper);
      m[i] = __builtin_shufflevector(lower, upper, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    } else {
      m[i] = lower;
    }
  }
  transpose_quarters(m, 0);
  transpose_quarters(m, 4);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Words a = m[i], b = m[i + 4];
    unpack_quarters<0>(a, b, m[i], lanes);
    unpack_quarters<1>(a, b, m[i + 4], lanes);
  }
}

// Unpacks dimension `part` of each word; int8 values are not scaled.
template <KVType type>
static CHAIRLIFT_INLINE F unpack(const Words& words, int part) {
  Floats x;
  if (type == KVType::f32) x = reinterpret_cast<const Floats&>(words);
  if (type == KVType::bf16) x = reinterpret_cast<Floats>(part == 0 ? words << 16 : words & -65536);
  if (type == KVType::int8) x = __builtin_convertvector((words << (24 - 8 * part)) >> 24, Floats);
  F y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

}  // namespace chairlift::CHAIRLIFT_ISA::attention
