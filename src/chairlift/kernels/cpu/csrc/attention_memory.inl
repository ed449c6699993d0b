// A tile of KV memory: where its rows are, and the way from there into registers and scratch memory.
#include "attention_words.inl"
#include "attention_work.inl"

namespace chairlift::CHAIRLIFT_ISA::attention {

alignas(64) static const float kZeroRow[kMaxHeadDim] = {};

// Where a tile is in KV memory, and the scales of an int8 one. Keys that the block does not see are rows of zeros.
struct TileRows {
  const uint8_t* key[kKeyTile];
  const uint8_t* value[kKeyTile];
  alignas(64) float key_scale[kKeyTile];
  alignas(64) float value_scale[kKeyTile];
  int begin, end;  // the keys that the block sees, less the tile's first
};

static inline int within_tile(int64_t key) { return static_cast<int>(key < 0 ? 0 : key < kKeyTile ? key : kKeyTile); }

static inline void hide_rows(TileRows& rows, int first, int end) {
  for (int k = first; k < end; ++k) {
    rows.key[k] = rows.value[k] = reinterpret_cast<const uint8_t*>(kZeroRow);
    rows.key_scale[k] = rows.value_scale[k] = 0.0f;
  }
}

// Head: of the block.
template <KVType type>
static inline void find_rows(const Work& work, int64_t tile_key, int head, TileRows& rows) {
  const QueryBlock& block = work.block;
  const PagedKV& kv = work.kv;
  rows.begin = within_tile(block.first_key(0) - tile_key);
  rows.end = within_tile(block.end_key(block.num_tokens - 1) - tile_key);
  hide_rows(rows, 0, rows.begin);
  hide_rows(rows, rows.end, kKeyTile);
  const int64_t bytes = static_cast<int64_t>(work.shape.head_dim) * value_bytes(type);
  int64_t column = (tile_key + rows.begin) / kv.block_size;
  int offset = static_cast<int>((tile_key + rows.begin) % kv.block_size);
  for (int k = rows.begin; k < rows.end; ++column, offset = 0) {
    const int64_t first_head = static_cast<int64_t>(block.block_table[column]) * work.shape.num_kv_heads;
    int64_t row = (first_head + block.first_kv_head + head) * kv.block_size + offset;
    for (; k < rows.end && offset < kv.block_size; ++k, ++offset, ++row) {
      rows.key[k] = static_cast<const uint8_t*>(kv.key) + row * bytes;
      rows.value[k] = static_cast<const uint8_t*>(kv.value) + row * bytes;
      if (type != KVType::int8) continue;
      rows.key_scale[k] = kv.key_scale[row];
      rows.value_scale[k] = kv.value_scale[row];
    }
  }
}

// GCC deletes calls of functions that only prefetch, as without effect; what is inlined stays.
#define CHAIRLIFT_INLINE inline __attribute__((always_inline))

// Asks for bytes begin to end of a row of KV memory. Requests are spread over all that is computed: the CPU keeps only
// so many under way, and stalls on more.
static CHAIRLIFT_INLINE void ask(const uint8_t* row, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += 64) __builtin_prefetch(row + i);
}

// Keys of a tile to [head_dim][kKeyTile]. Asks for the first line of its values meanwhile.
template <KVType type>
static void load_keys(const Work& work, const TileRows& rows) {
  for (int first = rows.begin / kLanes * kLanes; first < rows.end; first += kLanes)
    transpose_rows<type>(rows.key + first, rows.value + first, rows.key_scale + first, work.shape.head_dim,
                         work.keys + first);
}

// Dimensions i to i + kLanes of a row of KV memory, or the first n of them.
template <KVType type>
static inline F load_values(const uint8_t* row, int i, float scale) {
  if (type == KVType::f32) return load(reinterpret_cast<const float*>(row) + i);
  if (type == KVType::bf16) return load_bf16(reinterpret_cast<const uint16_t*>(row) + i);
  return mul(load_s8(reinterpret_cast<const int8_t*>(row) + i), set1(scale));
}
template <KVType type>
static inline F load_values_n(const uint8_t* row, int i, float scale, int n) {
  if (type == KVType::f32) return load_n(reinterpret_cast<const float*>(row) + i, n);
  if (type == KVType::bf16) return load_bf16_n(reinterpret_cast<const uint16_t*>(row) + i, n);
  return mul(load_s8_n(reinterpret_cast<const int8_t*>(row) + i, n), set1(scale));
}

// Values of the keys that the block sees, to [kKeyTile][stride]. Asks for the next tile's keys meanwhile.
template <KVType type>
static void load_values(const Work& work, const TileRows& rows, const TileRows& next) {
  const int head_dim = work.shape.head_dim;
  for (int k = rows.begin; k < rows.end; ++k) {
    ask(next.key[k], 0, static_cast<int64_t>(head_dim) * value_bytes(type));
    const uint8_t* row = rows.value[k];
    const float scale = rows.value_scale[k];
    float* to = work.values + k * work.stride;
    int i = 0;
    for (; i + kLanes <= head_dim; i += kLanes) store(to + i, load_values<type>(row, i, scale));
    if (i < head_dim) store(to + i, load_values_n<type>(row, i, scale, head_dim - i));
  }
}

}  // namespace chairlift::CHAIRLIFT_ISA::attention
