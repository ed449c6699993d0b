// Tiles of KV memory: the addresses of their rows, and loads into registers and scratch memory.
#pragma once

#include "attention/attention_words.inl"
#include "attention/attention_work.inl"
#include "runtime/prefetch.h"
#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA::attention {

// The addresses of the keys of a tile in KV memory, at the first head of the block. Keys that the block does not see
// have the address of the first key that it sees; their results are masked.
struct TileRows {
  int64_t at[kKeyTile];  // offset in bytes from the first key, or the first value, of the memory
  int begin, end;        // the keys that the block sees, relative to the first key of the tile
};

// A tile at one head.
struct Tile {
  const TileRows* rows;
  const uint8_t* keys;
  const uint8_t* values;
  const uint8_t* key(int k) const { return keys + rows->at[k]; }
  const uint8_t* value(int k) const { return values + rows->at[k]; }
};

// The scales of an int8 tile.
struct TileScales {
  alignas(64) float key[kKeyTile];
  alignas(64) float value[kKeyTile];
};

static inline int within_tile(int64_t key) { return static_cast<int>(key < 0 ? 0 : key < kKeyTile ? key : kKeyTile); }

// Calls visit(key, count, row) for each run of consecutive rows of KV memory, at the first head of the block.
template <typename Visit>
static CHAIRLIFT_INLINE void each_run(const QueryBlock& block, const AttentionShape& shape, int block_size,
                                      int64_t tile_key, int begin, int end, Visit visit) {
  int64_t column = (tile_key + begin) / block_size, offset = (tile_key + begin) % block_size;
  for (int k = begin; k < end; ++column, offset = 0) {
    const int64_t head = static_cast<int64_t>(block.block_table[column]) * shape.num_kv_heads + block.first_kv_head;
    const int64_t left = block_size - offset;
    const int count = left < end - k ? static_cast<int>(left) : end - k;
    visit(k, count, head * block_size + offset);
    k += count;
  }
}

static inline void find_rows(const QueryBlock& block, const AttentionShape& shape, const PagedKV& kv, int64_t row_bytes,
                             int64_t tile_key, TileRows& rows) {
  rows.begin = within_tile(block.first_key(0) - tile_key);
  rows.end = within_tile(block.end_key(block.num_tokens - 1) - tile_key);
  each_run(block, shape, kv.block_size, tile_key, rows.begin, rows.end, [&](int k, int count, int64_t row) {
    int64_t at = row * row_bytes;
    for (int i = 0; i < count; ++i, at += row_bytes) rows.at[k + i] = at;
  });
  const int64_t elsewhere = rows.begin < rows.end ? rows.at[rows.begin] : 0;
  for (int k = 0; k < rows.begin; ++k) rows.at[k] = elsewhere;
  for (int k = rows.end; k < kKeyTile; ++k) rows.at[k] = elsewhere;
}

// Keys that the block does not see have the scale 0.
static inline void find_scales(const Work& work, int64_t tile_key, int head, const TileRows& rows, TileScales& scales) {
  for (int k = 0; k < kKeyTile; ++k) scales.key[k] = scales.value[k] = 0.0f;
  each_run(work.block, work.shape, work.kv.block_size, tile_key, rows.begin, rows.end,
           [&](int k, int count, int64_t row) {
             row += static_cast<int64_t>(head) * work.kv.block_size;
             for (int i = 0; i < count; ++i) {
               scales.key[k + i] = work.kv.key_scale[row + i];
               scales.value[k + i] = work.kv.value_scale[row + i];
             }
           });
}

static inline Tile tile_at(const TileRows& rows, const PagedKV& kv, int64_t head_bytes, int head) {
  return {&rows, static_cast<const uint8_t*>(kv.key) + head * head_bytes,
          static_cast<const uint8_t*>(kv.value) + head * head_bytes};
}

static CHAIRLIFT_INLINE void prefetch(const uint8_t* data, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(data + i, 0, kSecondLevel);
}

// Prefetches the keys and then the values of a tile at some heads, distributed over the computation of the tile before it,
// because the CPU has few pending loads and stalls on more. Rows are in the order of their addresses, all heads of a block one
// after the other, because memory is up to 1.4 times faster then.
class Ahead {
 public:
  Ahead() = default;  // nothing
  Ahead(const TileRows& rows, const Tile& first_head, int64_t row_bytes, int64_t head_bytes, int num_heads)
      : rows_(&rows), base_(first_head.keys), values_(first_head.values), row_bytes_(row_bytes), head_bytes_(head_bytes),
        num_heads_(num_heads) {
    start(rows.begin);
  }

  CHAIRLIFT_INLINE void prefetch_rows(int count) {
    for (; count > 0 && left_ > 0; --count) {
      prefetch(at_, row_bytes_);
      at_ += row_bytes_;
      if (--left_ == 0) next_head();
    }
  }
  void prefetch_rest() {
    while (left_ > 0) prefetch_rows(left_);
  }

 private:
  // The rows of `key` and the keys behind it in memory, at the first head.
  void start(int key) {
    key_ = key;
    head_ = 0;
    count_ = 0;
    if (key >= rows_->end) {
      left_ = 0;
      return;
    }
    for (count_ = 1; key + count_ < rows_->end && rows_->at[key + count_] == rows_->at[key] + count_ * row_bytes_;) ++count_;
    at_ = base_ + rows_->at[key];
    left_ = count_;
  }
  __attribute__((noinline)) void next_head() {
    if (++head_ < num_heads_) {
      at_ = base_ + rows_->at[key_] + head_ * head_bytes_;
      left_ = count_;
      return;
    }
    start(key_ + count_);
    if (left_ > 0 || base_ == values_) return;
    base_ = values_;
    start(rows_->begin);
  }

  const TileRows* rows_ = nullptr;
  const uint8_t *base_ = nullptr, *values_ = nullptr, *at_ = nullptr;
  int64_t row_bytes_ = 0, head_bytes_ = 0;
  int num_heads_ = 0, head_ = 0, key_ = 0, count_ = 0;
  int left_ = 0;  // rows of the current piece
};

// Prefetches one line of every 16 keys, a whole tile ahead, because translating the address of a page is the slow part.
static CHAIRLIFT_INLINE void prefetch_pages(const PagedKV& kv, const TileRows& rows) {
  for (int k = rows.begin; k < rows.end; k += 16) {
    prefetch(static_cast<const uint8_t*>(kv.key) + rows.at[k], 64);
    prefetch(static_cast<const uint8_t*>(kv.value) + rows.at[k], 64);
  }
}

// Prefetches the scales of a tile, at all heads of the block.
static inline void prefetch_scales(const QueryBlock& block, const AttentionShape& shape, const PagedKV& kv,
                                   int64_t tile_key, const TileRows& rows) {
  const int64_t others = (block.num_kv_heads - 1) * static_cast<int64_t>(kv.block_size);
  each_run(block, shape, kv.block_size, tile_key, rows.begin, rows.end, [&](int, int count, int64_t row) {
    prefetch(reinterpret_cast<const uint8_t*>(kv.key_scale + row), (others + count) * 4);
    prefetch(reinterpret_cast<const uint8_t*>(kv.value_scale + row), (others + count) * 4);
  });
}

// The rows whose words are as many as one load of words has.
static inline int rows_per_load(int num_words) { return (kLanes * kWords + num_words - 1) / num_words; }

// Loads words `word` to `word` + kWords of kLanes keys, transposed. Where a row has fewer words left, zeros follow.
template <bool whole>
static CHAIRLIFT_INLINE void load_words(const Tile& tile, int first_key, int word, int num_words, Words (&m)[kWords]) {
  const int64_t byte = 4 * static_cast<int64_t>(word);
  if (whole) {
    load_transposed([&](int i) CHAIRLIFT_ALWAYS { return tile.key(first_key + i) + byte; }, m);
    return;
  }
  alignas(64) uint8_t rows[kLanes][4 * kWords] = {};
  for (int i = 0; i < kLanes; ++i)
    std::memcpy(rows[i], tile.key(first_key + i) + byte, 4 * static_cast<size_t>(num_words - word));
  load_transposed([&](int i) CHAIRLIFT_ALWAYS { return static_cast<const uint8_t*>(rows[i]); }, m);
}

// Writes words of kLanes keys to columns of kKeyTile floats.
template <KVType type, bool whole>
static void load_columns(const Work& work, const Tile& tile, int first_key, int word) {
  constexpr int kParts = values_per_word(type);
  const int num_words = work.shape.head_dim / kParts;
  Words m[kWords];
  load_words<whole>(tile, first_key, word, num_words, m);
  float* column = work.keys + first_key + static_cast<int64_t>(word) * kParts * kKeyTile;
#pragma GCC unroll 8
  for (int i = 0; i < kWords; ++i) {
    if (!whole && word + i == num_words) break;
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part)
      store(column + (i * kParts + part) * kKeyTile, unpack<type>(m[i], part));
  }
}

// Writes the keys of a tile to [head_dim][kKeyTile].
template <KVType type>
static void load_keys(const Work& work, const Tile& tile, Ahead& ahead) {
  const int num_words = work.shape.head_dim / values_per_word(type);
  for (int first = tile.rows->begin / kLanes * kLanes; first < tile.rows->end; first += kLanes) {
    ahead.prefetch_rows(kLanes);
    int word = 0;
    for (; word + kWords <= num_words; word += kWords) load_columns<type, true>(work, tile, first, word);
    if (word < num_words) load_columns<type, false>(work, tile, first, word);
  }
}

// Loads dimensions i to i + kLanes of a row of KV memory, or the first n of them; int8 values are not scaled.
template <KVType type>
static inline F load_values(const uint8_t* row, int i) {
  if (type == KVType::f32) return load(reinterpret_cast<const float*>(row) + i);
  if (type == KVType::bf16) return load_bf16(reinterpret_cast<const uint16_t*>(row) + i);
  return load_s8(reinterpret_cast<const int8_t*>(row) + i);
}
template <KVType type>
static inline F load_values_n(const uint8_t* row, int i, int n) {
  if (type == KVType::f32) return load_n(reinterpret_cast<const float*>(row) + i, n);
  if (type == KVType::bf16) return load_bf16_n(reinterpret_cast<const uint16_t*>(row) + i, n);
  return load_s8_n(reinterpret_cast<const int8_t*>(row) + i, n);
}

// Writes the values of the keys that the block sees to [kKeyTile][stride].
template <KVType type>
static void load_values(const Work& work, const Tile& tile, Ahead& ahead) {
  const int head_dim = work.shape.head_dim;
  for (int k = tile.rows->begin; k < tile.rows->end; ++k) {
    ahead.prefetch_rows(1);
    const uint8_t* row = tile.value(k);
    float* to = work.values + k * work.stride;
    int i = 0;
    for (; i + kLanes <= head_dim; i += kLanes) store(to + i, load_values<type>(row, i));
    if (i < head_dim) store(to + i, load_values_n<type>(row, i, head_dim - i));
  }
}

}  // namespace chairlift::CHAIRLIFT_ISA::attention
