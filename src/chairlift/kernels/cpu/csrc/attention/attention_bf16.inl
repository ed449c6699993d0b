// Compiled for instruction sets with products of bfloat16: attention over keys and values in bfloat16 or int8. `Products`
// are the products of tiles, as in tile_products.h.
//
// Queries and weights are rounded to bfloat16, and int8 keys and values are exact in it. A product of tiles has 16 rows and
// 32 inputs: dimensions for scores, and keys for outputs. The sum of the products of one tile of keys is added to the
// output by one fma. Rows do not depend on each other, inputs are at the same places of a tile for any block, and hidden
// keys have the weight 0, so a row has the same bits in any block. float32 keys use the products of
// CHAIRLIFT_BASE.
#pragma once

#include "attention/attention_walk.inl"
#include "runtime/isa_table.h"
#include "simd/simd.h"
#include "simd/tile_products.h"

namespace chairlift::CHAIRLIFT_ISA::attention {

constexpr int kKeyParts = kKeyTile / kTileBf16Inputs;      // tiles of inputs of an output
constexpr int kPrefetchedRows = 8;                     // rows of the next tile that are prefetched at once
constexpr int kPairBytes = 4;                          // of two inputs
static_assert(kProductColumns == kKeyTile, "scores of one tile of keys are one product");

// The operands of a query block, in scratch memory.
struct Operands {
  int num_parts;        // tiles of inputs of a score
  bool reads_keys;      // keys are left operands in KV memory, and queries right ones
  int64_t part_bytes;   // of query
  uint8_t* query;       // [parts][rows + 15][32], because the last tile is read whole; right: [parts][16 pairs][rows]
  uint8_t* keys;        // tiles [groups of 16 keys][parts]
  uint8_t* values;      // tiles [groups of 16 dimensions][kKeyParts]
};

static inline uint8_t* take_bytes(float*& memory, int64_t num_bytes) {
  return reinterpret_cast<uint8_t*>(take(memory, num_bytes / 4));
}

static Operands lay_out_operands(const Work& work, bool reads_keys, float* memory) {
  const int num_parts = (work.shape.head_dim + kTileBf16Inputs - 1) / kTileBf16Inputs;
  const int64_t part_bytes = static_cast<int64_t>(work.num_rows + (reads_keys ? 0 : kTileRows - 1)) * kTileRowBytes;
  // The last line of pairs is read whole as well.
  uint8_t* const query = take_bytes(memory, num_parts * part_bytes + (reads_keys ? kTileRowBytes : 0));
  Operands operands = {num_parts, reads_keys, part_bytes, query, nullptr, nullptr};
  const int64_t key_bytes = static_cast<int64_t>(kMaxGroups) * num_parts * kTileBytes;
  operands.keys = take_bytes(memory, key_bytes);
  operands.values = take_bytes(memory, static_cast<int64_t>(work.stride) / kTileRows * kKeyParts * kTileBytes);
  // Dimensions behind head_dim are zero.
  if (work.shape.head_dim % kTileBf16Inputs) std::memset(operands.keys, 0, static_cast<size_t>(key_bytes));
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
static void load_key_words(const Tile& tile, const Tile& next, int first_key, int word, int num_words, uint8_t* group) {
  Words m[kWords];
  load_words<whole>(tile, next, first_key, word, num_words, m);
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
static void load_tiled_keys(const Work& work, const Operands& operands, const Tile& tile, const Tile& next) {
  const int num_words = work.shape.head_dim / values_per_word(type);
  for (int key = tile.rows->begin / kLanes * kLanes; key < tile.rows->end; key += kLanes) {
    uint8_t* const group = operands.keys + static_cast<int64_t>(key / kLanes) * operands.num_parts * kTileBytes;
    int word = 0;
    for (; word + kWords <= num_words; word += kWords)
      load_key_words<type, true>(tile, next, key, word, num_words, group);
    if (word < num_words) load_key_words<type, false>(tile, next, key, word, num_words, group);
  }
}

// The prefetching of the values of the next tile, and of its keys where those of this one are not loaded. Half of them are
// prefetched while the values of this one are loaded, and the others between the products of the first rows, because the
// CPU has few pending loads.
struct NextRows {
  const Tile& next;
  int64_t row_bytes;
  bool has_keys;
  int key;
  void prefetch_rows(int count) {
    for (; count > 0 && key < kKeyTile; --count, ++key) {
      prefetch(next.value(key), row_bytes);
      if (has_keys) prefetch(next.key(key), row_bytes);
    }
  }
};

// Writes the values of whole parts: a line of a tile is a pair of keys in 16 dimensions. Hidden keys have the values of a
// key that the block sees, because they are multiplied by 0.
template <KVType type>
static void load_tiled_values(const Work& work, const Operands& operands, const Tile& tile, NextRows& ahead) {
  const int head_dim = work.shape.head_dim;
  const int end = (tile.rows->end + kTileBf16Inputs - 1) / kTileBf16Inputs * kTileBf16Inputs;
  const auto load_part = [&](const uint8_t* row, int i) {
    return i + kLanes <= head_dim ? load_values<type>(row, i) : load_values_n<type>(row, i, head_dim - i);
  };
  for (int k = 0; k < end; k += 2) {
    const uint8_t *even = tile.value(k), *odd = tile.value(k + 1);
    ahead.prefetch_rows(1);
    uint8_t* line = operands.values + k / 2 * kTileRowBytes;
    for (int i = 0; i < head_dim; i += kLanes, line += kKeyParts * kTileBytes)
      istore(line, pair_bf16(load_part(even, i), load_part(odd, i)));
  }
}

// Adds one tile of keys to the outputs. Rows that see none of its keys do not change.
template <typename Products>
static void add_outputs(const Work& work, const Operands& operands, const State& state, const TileWork& tile,
                        const RowRange& rows, const uint8_t* weights, const float* factor) {
  const int num_parts = (rows.end + kTileBf16Inputs - 1) / kTileBf16Inputs;
  alignas(64) float sums[kTileRows * kProductColumns];
  for (int column = 0; column < work.stride; column += kProductColumns) {
    const int left = (work.stride - column) / kLanes, num_groups = left < kMaxGroups ? left : kMaxGroups;
    const uint8_t* const values = operands.values + static_cast<int64_t>(column) / kLanes * kKeyParts * kTileBytes;
    const TileProduct product = {weights, kTileBytes, values, kKeyParts * kTileBytes, num_parts, rows.num_rows, sums};
    float* const out = state.out + static_cast<int64_t>(rows.first_row) * work.stride + column;
    const auto add = [&](int r, int group, F sum) CHAIRLIFT_ALWAYS {
      float* const at = out + static_cast<int64_t>(r) * work.stride + group * kLanes;
      store(at, fma(load(at), set1(factor[r]), sum));
    };
    if (rows.all_see(work, tile)) {
      Products::multiply_each(product, num_groups, add);
      continue;
    }
    Products::multiply(product, num_groups);
    for (int r = 0; r < rows.num_rows; ++r) {
      if (work.first_key[rows.first + r] >= tile.first_key + kKeyTile) continue;
      if (work.end_key[rows.first + r] <= tile.first_key) continue;
      for (int g = 0; g < num_groups; ++g) add(r, g, load(sums + r * kProductColumns + g * kLanes));
    }
  }
}

// Attention of up to 16 rows to a tile. The caller has written `scores` if operands.reads_keys.
template <typename Products, KVType type>
static void attend_tiled_rows(const Work& work, const Operands& operands, const State& state, const TileWork& tile,
                              const RowRange& rows, float* scores, NextRows& ahead) {
  if (rows.begin >= rows.end) return;
  alignas(64) float factor[kTileRows];
  const int num_vectors = rows.num_vectors();
  const int64_t key_bytes = static_cast<int64_t>(operands.num_parts) * kTileBytes;
  if (!operands.reads_keys)
    Products::multiply({operands.query + rows.first_row * kTileRowBytes, operands.part_bytes, operands.keys, key_bytes,
                        operands.num_parts, rows.num_rows, scores},
                       num_vectors);
  ahead.prefetch_rows(kPrefetchedRows);
  alignas(64) uint16_t weights[kKeyParts][kTileRows][kTileBf16Inputs];
  const auto put = [&](int r, int v, F x) CHAIRLIFT_ALWAYS { store_bf16(weights[v / 2][r] + v % 2 * kLanes, x); };
  weigh_rows<type>(work, state, tile, rows, scores, factor, exp_to_bf16, put);
  if (num_vectors % 2)  // the last part of the inputs is read whole
    for (int r = 0; r < rows.num_rows; ++r) put(r, num_vectors, zero());
  ahead.prefetch_rows(2 * kPrefetchedRows);
  add_outputs<Products>(work, operands, state, tile, rows, reinterpret_cast<const uint8_t*>(weights), factor);
  ahead.prefetch_rows(kPrefetchedRows);
}

// The product of the keys of a tile, as they are in KV memory, and the queries of a head.
static inline KeyProduct key_product(const Work& work, const Operands& operands, const TileWork& tile, float* transposed) {
  const TileRows& at = *tile.tile.rows;
  const int64_t row_bytes = static_cast<int64_t>(work.shape.head_dim) * value_bytes(KVType::bf16);
  KeyProduct product = {{}, row_bytes, operands.query + tile.head * work.rows_per_head * kPairBytes, operands.part_bytes,
                        static_cast<int64_t>(work.num_rows) * kPairBytes, operands.num_parts, transposed};
  // A group of 16 keys is in one block. Keys that no query sees are read as well, and may be unwritten: masks replace their
  // scores.
  const int first = at.begin / kTileRows * kTileRows;
  for (int key = 0; key < kKeyTile; key += kTileRows)
    product.keys[key / kTileRows] =
        key > first ? tile.tile.key(key) : tile.tile.key(at.begin) - (at.begin - first) * row_bytes;
  return product;
}

// Writes scores [rows][kKeyTile] from transposed ones [keys][kTileRows].
static inline void transpose_scores(const float* transposed, int num_rows, int num_vectors, float* scores) {
  typedef int32_t FourWords __attribute__((vector_size(16)));
  for (int v = 0; v < num_vectors; ++v, transposed += kLanes * kTileRows) {
    for (int row = 0; row < num_rows; row += 4) {
      Words m[kWords];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        FourWords part[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) std::memcpy(&part[j], transposed + (4 * j + i) * kTileRows + row, sizeof part[j]);
        const EightWords lower = __builtin_shufflevector(part[0], part[1], 0, 1, 2, 3, 4, 5, 6, 7);
        const EightWords upper = __builtin_shufflevector(part[2], part[3], 0, 1, 2, 3, 4, 5, 6, 7);
        m[i] = __builtin_shufflevector(lower, upper, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      }
      transpose_quarters(m, 0);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
        if (row + i < num_rows) std::memcpy(scores + (row + i) * kKeyTile + v * kLanes, &m[i], sizeof m[i]);
    }
  }
}

template <typename Products, KVType type>
static void attend_all_tiled(const Work& work, const Operands& operands, const SplitRange& splits,
                             const SplitRange* next) {
  alignas(64) float scores[kTileRows * kKeyTile], transposed[kKeyTile * kTileRows];
  attend_splits<type>(work, splits, next, [&](const State& state, const TileWork& tile) {
    const int num_vectors = (tile.tile.rows->end + kLanes - 1) / kLanes;
    NextRows ahead = {tile.next, static_cast<int64_t>(work.shape.head_dim) * value_bytes(type), operands.reads_keys, 0};
    if constexpr (Products::kReadsKeys)
      if (operands.reads_keys) Products::multiply_keys(key_product(work, operands, tile, transposed), num_vectors);
    if (!operands.reads_keys) load_tiled_keys<type>(work, operands, tile.tile, tile.next);
    load_tiled_values<type>(work, operands, tile.tile, ahead);
    if (operands.reads_keys) transpose_scores(transposed, work.rows_per_head, num_vectors, scores);
    for (int first = 0; first < work.rows_per_head; first += kTileRows) {
      const int left = work.rows_per_head - first;
      const RowRange rows = rows_from(work, tile, first, left < kTileRows ? left : kTileRows);
      attend_tiled_rows<Products, type>(work, operands, state, tile, rows, scores, ahead);
    }
  });
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
  // Few scores are transposed faster than their keys.
  const bool reads_keys = Products::kReadsKeys && shape.kv_type == KVType::bf16 && work.rows_per_head <= kTileRows &&
                          kv.block_size % kTileRows == 0 && shape.head_dim % kTileBf16Inputs == 0;
  const Operands operands = lay_out_operands(work, reads_keys, memory);
  gather_tiled_queries(work, tokens, operands);
  write_decoded(work, tokens, splits);
  Products::start();
  if (shape.kv_type == KVType::bf16) attend_all_tiled<Products, KVType::bf16>(work, operands, splits, next);
  else attend_all_tiled<Products, KVType::int8>(work, operands, splits, next);
  Products::end();
}

}  // namespace chairlift::CHAIRLIFT_ISA::attention
