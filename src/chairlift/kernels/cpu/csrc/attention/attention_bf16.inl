// Compiled for instruction sets with products of bfloat16: attention over keys and values in bfloat16 or int8. `Products`
// computes rows from the operands that are laid out here, in the layouts of tile_products.h.
//
// Queries and weights are rounded to bfloat16, and int8 keys and values are exact in it. Rows do not depend on each other,
// inputs are at the same places of a tile for any block, and hidden keys have the weight 0, so a row has the same bits in any
// block. float32 keys use the products of CHAIRLIFT_BASE.
#pragma once

#include "attention/attention_walk.inl"
#include "runtime/isa_table.h"
#include "simd/simd.h"
#include "simd/tile_products.h"

namespace chairlift::CHAIRLIFT_ISA::attention {

constexpr int kKeyParts = kKeyTile / kTileBf16Inputs;  // tiles of inputs of an output
constexpr int kPrefetchedRows = 8;                     // rows that are prefetched at once
constexpr int kPairBytes = 4;                          // of two inputs
static_assert(kProductColumns == kKeyTile, "scores of one tile of keys are one product");

// The operands of a query block, in scratch memory.
struct Operands {
  int num_parts;        // tiles of inputs of a score
  bool reads_keys;      // keys are left operands in KV memory, and queries right ones
  int64_t part_bytes;   // of query
  int64_t key_bytes;    // of a tile of keys
  int64_t value_bytes;  // of the values of a tile of keys
  uint8_t* query;       // [parts][rows + 31][32], because the last tiles are read whole; right: [parts][16 pairs][rows]
  uint8_t* keys;        // tiles [tiles of keys][groups of 16 keys][parts]
  uint8_t* values;      // tiles [tiles of keys][groups of 16 dimensions][kKeyParts]
};

static inline uint8_t* take_bytes(float*& memory, int64_t num_bytes) {
  return reinterpret_cast<uint8_t*>(take(memory, num_bytes / 4));
}

static Operands lay_out_operands(const Work& work, bool reads_keys, int num_tiles, float*& memory) {
  Operands operands = {};
  operands.num_parts = (work.shape.head_dim + kTileBf16Inputs - 1) / kTileBf16Inputs;
  operands.reads_keys = reads_keys;
  operands.part_bytes = static_cast<int64_t>(work.num_rows + (reads_keys ? 0 : 2 * kTileRows - 1)) * kTileRowBytes;
  operands.key_bytes = static_cast<int64_t>(kMaxGroups) * operands.num_parts * kTileBytes;
  operands.value_bytes = static_cast<int64_t>(work.stride) / kTileRows * kKeyParts * kTileBytes;
  // The last line of pairs is read whole as well.
  operands.query = take_bytes(memory, operands.num_parts * operands.part_bytes + (reads_keys ? kTileRowBytes : 0));
  operands.keys = take_bytes(memory, num_tiles * operands.key_bytes);
  operands.values = take_bytes(memory, num_tiles * operands.value_bytes);
  // Dimensions behind head_dim are zero.
  if (work.shape.head_dim % kTileBf16Inputs)
    std::memset(operands.keys, 0, static_cast<size_t>(num_tiles * operands.key_bytes));
  return operands;
}

static void gather_tiled_queries(const Work& work, const TokenRows& tokens, const Operands& operands) {
  alignas(64) float query[kMaxHeadDim] = {};
  alignas(64) uint8_t part[kTileRowBytes];
  for (int r = 0; r < work.num_rows; ++r) {
    gather_query(work, tokens, r, query);
    for (int p = 0; p < operands.num_parts; ++p) {
      uint8_t* const to = operands.query + p * operands.part_bytes;
      uint8_t* const line = operands.reads_keys ? part : to + r * kTileRowBytes;
      for (int i = 0; i < kTileBf16Inputs; i += kLanes)
        store_bf16(reinterpret_cast<uint16_t*>(line) + i, load(query + p * kTileBf16Inputs + i));
      for (int pair = 0; operands.reads_keys && pair < kTileRows; ++pair)
        std::memcpy(to + (pair * work.num_rows + r) * kPairBytes, part + pair * kPairBytes, kPairBytes);
    }
  }
}

// Writes eight words of 16 keys: a line of a tile is a pair of dimensions of 16 keys.
template <KVType type, bool whole>
static void load_key_words(const Tile& tile, Ahead& ahead, int num_ahead, int first_key, int word, int num_words,
                           uint8_t* group) {
  Words m[kWords];
  ahead.prefetch_rows(num_ahead);
  load_words<whole>(tile, first_key, word, num_words, m);
  constexpr int kLines = values_per_word(type) / 2;
#pragma GCC unroll 8
  for (int i = 0; i < kWords; ++i) {
#pragma GCC unroll 2
    for (int line = 0; line < kLines; ++line) {
      I pairs;
      if (type == KVType::bf16) std::memcpy(&pairs, &m[i], sizeof pairs);
      else pairs = pair_bf16(unpack<type>(m[i], 2 * line), unpack<type>(m[i], 2 * line + 1));
      istore(group + ((word + i) * kLines + line) * kTileRowBytes, pairs);
    }
  }
}

template <KVType type>
static void load_tiled_keys(const Work& work, int num_parts, const Tile& tile, Ahead& ahead, uint8_t* keys) {
  const int num_words = work.shape.head_dim / values_per_word(type), num_ahead = rows_per_load(num_words);
  for (int key = tile.rows->begin / kLanes * kLanes; key < tile.rows->end; key += kLanes) {
    uint8_t* const group = keys + static_cast<int64_t>(key / kLanes) * num_parts * kTileBytes;
    int word = 0;
    for (; word + kWords <= num_words; word += kWords)
      load_key_words<type, true>(tile, ahead, num_ahead, key, word, num_words, group);
    if (word < num_words) load_key_words<type, false>(tile, ahead, num_ahead, key, word, num_words, group);
  }
}

// Writes pairs of 32 values of two rows, those of the first 16 and those of the others.
static CHAIRLIFT_INLINE void store_interleaved(const uint8_t* even, const uint8_t* odd, uint8_t* first, uint8_t* second) {
  typedef int16_t Halves __attribute__((vector_size(64)));
  Halves a, b;
  std::memcpy(&a, even, sizeof a);
  std::memcpy(&b, odd, sizeof b);
  const Halves low = __builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42,
                                             11, 43, 12, 44, 13, 45, 14, 46, 15, 47);
  const Halves high = __builtin_shufflevector(a, b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57,
                                              26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
  std::memcpy(first, &low, sizeof low);
  std::memcpy(second, &high, sizeof high);
}

// Writes the values of a tile: a line of a tile is a pair of keys in 16 dimensions. Hidden keys have the values of a key
// that the block sees, because they are multiplied by 0. Prefetches `num_ahead` rows for each pair.
template <KVType type>
static void load_tiled_values(const Work& work, const Tile& tile, Ahead& ahead, int num_ahead, uint8_t* values) {
  const int head_dim = work.shape.head_dim;
  const auto load_part = [&](const uint8_t* row, int i) {
    return i + kLanes <= head_dim ? load_values<type>(row, i) : load_values_n<type>(row, i, head_dim - i);
  };
  constexpr int64_t kGroupBytes = kKeyParts * kTileBytes;
  for (int k = 0; k < kKeyTile; k += 2) {
    const uint8_t *even = tile.value(k), *odd = tile.value(k + 1);
    ahead.prefetch_rows(num_ahead);
    uint8_t* line = values + k / 2 * kTileRowBytes;
    int i = 0;
    for (; type == KVType::bf16 && i + 2 * kLanes <= head_dim; i += 2 * kLanes, line += 2 * kGroupBytes)
      store_interleaved(even + 2 * i, odd + 2 * i, line, line + kGroupBytes);
    for (; i < head_dim; i += kLanes, line += kGroupBytes) istore(line, pair_bf16(load_part(even, i), load_part(odd, i)));
  }
}

// Writes K and V of prompts with the functions that write those of decoded tokens, so that they have the same bits.
static void prepare_tiled(const AttentionShape& shape, const PagedKV& kv, const TokenRows& tokens, int64_t first_token,
                          int64_t end_token) {
  if (shape.kv_type == KVType::f32) return CHAIRLIFT_BASE.attention.prepare(shape, kv, tokens, first_token, end_token);
  prepare(shape, kv, tokens, first_token, end_token);
}

template <typename Products>
static void attend_tiled(const AttentionShape& shape, const PagedKV& kv, const TokenRows& tokens,
                         const SplitRange& splits, const SplitRange* next, void* scratch) {
  if (shape.kv_type == KVType::f32)
    return CHAIRLIFT_BASE.attention.attend(shape, kv, tokens, splits, next, scratch);
  float* memory = static_cast<float*>(scratch);
  const Work work = lay_out(shape, kv, splits.block, memory);
  const Products products(work, memory);
  gather_tiled_queries(work, tokens, products.operands);
  write_decoded(work, tokens, splits);
  if (shape.kv_type == KVType::bf16) products.template attend<KVType::bf16>(work, splits, next);
  else products.template attend<KVType::int8>(work, splits, next);
}

}  // namespace chairlift::CHAIRLIFT_ISA::attention
