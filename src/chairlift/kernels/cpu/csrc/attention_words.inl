// Sixteen (or eight) rows of KV memory to columns of floats, so that keys become lanes.
//
// Rows are read as 32-bit words and the words transposed. A word holds one float, two bf16 or four int8 of consecutive
// dimensions, which come apart only then: the narrower the type, the fewer shuffles.
#include <cstdint>
#include <cstring>
#include <utility>

#include "attention_tiles.h"

namespace chairlift::CHAIRLIFT_ISA::attention {

typedef int32_t Words __attribute__((vector_size(4 * kLanes)));
typedef float Floats __attribute__((vector_size(4 * kLanes)));

constexpr int values_a_word(KVType type) { return type == KVType::f32 ? 1 : type == KVType::bf16 ? 2 : 4; }
constexpr int value_bytes(KVType type) { return 4 / values_a_word(type); }

template <int... i>
static inline void interleave(const Words& a, const Words& b, Words& low, Words& high,
                              std::integer_sequence<int, i...>) {
  low = __builtin_shufflevector(a, b, (i / 2 + i % 2 * kLanes)...);
  high = __builtin_shufflevector(a, b, (i / 2 + i % 2 * kLanes + kLanes / 2)...);
}

// A perfect shuffle of rows i and i + kLanes / 2 rotates the bits of (row, column) by one; log2(kLanes) of them swap
// row and column.
static inline void transpose(Words (&m)[kLanes]) {
  Words t[kLanes];
#pragma GCC unroll 4
  for (int round = 1; round < kLanes; round *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i)
      interleave(m[i], m[i + kLanes / 2], t[2 * i], t[2 * i + 1], std::make_integer_sequence<int, kLanes>());
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) m[i] = t[i];
  }
}

// The dimension `part` of each word, scaled if it is an int8.
template <KVType type>
static inline void unpack(const Words& words, int part, const Floats& scale, Floats& x) {
  if (type == KVType::f32) x = reinterpret_cast<const Floats&>(words);
  if (type == KVType::bf16) x = reinterpret_cast<Floats>(part == 0 ? words << 16 : words & -65536);
  if (type == KVType::int8) x = __builtin_convertvector((words << (24 - 8 * part)) >> 24, Floats) * scale;
}

// Up to kLanes words at each of kLanes rows, to that many columns of kKeyTile keys. Asks for the first line of rows
// `later` meanwhile.
template <KVType type, bool whole>
static inline void transpose_words(const uint8_t* const* rows, const uint8_t* const* later, int64_t first_word,
                                   int count, const Floats& scale, float* columns) {
  constexpr int kParts = values_a_word(type);
  Words m[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    const float* row = reinterpret_cast<const float*>(rows[i] + 4 * first_word);
    const F words = whole ? load(row) : load_n(row, count);
    std::memcpy(&m[i], &words, sizeof words);
    if (first_word == 0) __builtin_prefetch(later[i]);
  }
  transpose(m);
  float* column = columns + first_word * kParts * kKeyTile;
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (!whole && i == count) break;
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      Floats x;
      unpack<type>(m[i], part, scale, x);
      std::memcpy(column + (i * kParts + part) * kKeyTile, &x, sizeof x);
    }
  }
}

// kLanes rows of head_dim values, to [head_dim][kKeyTile]: their first column is the first key's.
template <KVType type>
static inline void transpose_rows(const uint8_t* const* rows, const uint8_t* const* later, const float* scales,
                                  int head_dim, float* columns) {
  Floats scale = {};
  if (type == KVType::int8) std::memcpy(&scale, scales, sizeof scale);
  const int num_words = head_dim / values_a_word(type);
  int word = 0;
  for (; word + kLanes <= num_words; word += kLanes)
    transpose_words<type, true>(rows, later, word, kLanes, scale, columns);
  if (word < num_words) transpose_words<type, false>(rows, later, word, num_words - word, scale, columns);
}

}  // namespace chairlift::CHAIRLIFT_ISA::attention
