// Compiled once for every instruction set: attention of a block of query rows over its keys, tile after tile.
#include "attention_tiles.h"

#include "attention_prepare.inl"
#include "attention_words.inl"

namespace chairlift::CHAIRLIFT_ISA::attention {

constexpr int kBlockRows = 6;  // rows and vectors of one product in registers
constexpr int kBlockVectors = kLanes == 16 ? 4 : 2;
constexpr float kLowest = -3.4e38f;

struct State {
  float* max;  // [rows]
  float* sum;  // [rows]
  float* out;  // [rows][row_stride]
};

static inline State state_at(float* memory, int num_rows) {
  const int padded = (num_rows + 15) / 16 * 16;
  return {memory, memory + padded, memory + 2 * padded};
}

static inline void clear_state(const State& state, int num_rows, int stride) {
  for (int r = 0; r < num_rows; ++r) state.max[r] = -__builtin_inff(), state.sum[r] = 0.0f;
  for (int i = 0; i < num_rows * stride; i += kLanes) store(state.out + i, zero());
}

// total and part become one softmax, in `total`. A part that saw nothing changes nothing.
static void merge_state(const State& total, const State& part, int num_rows, int stride) {
  for (int r = 0; r < num_rows; ++r) {
    if (!(part.max[r] > kLowest)) continue;
    const float largest = total.max[r] > part.max[r] ? total.max[r] : part.max[r];
    const F keep = exp(set1(total.max[r] - largest)), gain = exp(set1(part.max[r] - largest));
    alignas(64) float sum[kLanes];
    store(sum, fma(set1(part.sum[r]), gain, mul(set1(total.sum[r]), keep)));
    total.max[r] = largest;
    total.sum[r] = sum[0];
    for (int i = r * stride; i < (r + 1) * stride; i += kLanes)
      store(total.out + i, fma(load(part.out + i), gain, mul(load(total.out + i), keep)));
  }
}

// One block at work: its rows, and the scratch memory of a worker.
struct Work {
  const AttentionShape& shape;
  const PagedKV& kv;
  const QueryBlock& block;
  int group, rows_a_head, num_rows, stride;
  float* query;        // [rows][stride]
  float* keys;         // [head_dim][kKeyTile]
  float* values;       // [kKeyTile][stride]; null: few rows, which read values where they are
  float* lane_sums;    // [rows][16], of the running split
  float* running;      // state of one split
  float* total;        // state of all splits so far
  int64_t* first_key;  // [rows_a_head], what each row sees
  int64_t* end_key;
};

static inline float* take(float*& memory, int64_t num_floats) {
  float* taken = memory;
  memory += (num_floats + 15) / 16 * 16;
  return taken;
}

static Work lay_out(const AttentionShape& shape, const PagedKV& kv, const QueryBlock& block, void* scratch) {
  const int group = shape.group(), stride = shape.row_stride();
  const int rows_a_head = group * block.num_tokens, num_rows = rows_a_head * block.num_kv_heads;
  float* memory = static_cast<float*>(scratch);
  Work work = {shape, kv, block, group, rows_a_head, num_rows, stride, {}, {}, {}, {}, {}, {}, {}, {}};
  work.query = take(memory, static_cast<int64_t>(num_rows) * stride);
  work.keys = take(memory, static_cast<int64_t>(shape.head_dim) * kKeyTile);
  if (rows_a_head > kBlockRows || shape.head_dim % (kBlockVectors * kLanes) != 0)
    work.values = take(memory, static_cast<int64_t>(kKeyTile) * stride);
  work.lane_sums = take(memory, static_cast<int64_t>(num_rows) * 16);
  work.running = take(memory, state_floats(num_rows, stride));
  work.total = take(memory, state_floats(num_rows, stride));
  work.first_key = reinterpret_cast<int64_t*>(take(memory, 2 * rows_a_head));
  work.end_key = reinterpret_cast<int64_t*>(take(memory, 2 * rows_a_head));
  return work;
}

// Where a row's head is in the vectors of its token, from the block's first head on.
static inline int64_t head_offset(const AttentionShape& shape, int rows_a_head, int row) {
  const int group = shape.group();
  return static_cast<int64_t>(row / rows_a_head * group + row % group) * shape.head_dim;
}

static void gather_queries(const Work& work) {
  const int head_dim = work.shape.head_dim;
  for (int r = 0; r < work.num_rows; ++r) {
    const int token = r % work.rows_a_head / work.group;
    const float* from =
        work.block.query + token * work.shape.qkv_width() + head_offset(work.shape, work.rows_a_head, r);
    for (int i = 0; i < head_dim; i += kLanes) {
      const int n = lanes_left(i, head_dim);
      store_n(work.query + r * work.stride + i, load_n(from + i, n), n);
    }
    if (r >= work.rows_a_head) continue;
    work.first_key[r] = work.block.first_key(token);
    work.end_key[r] = work.block.end_key(token);
  }
}

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

// c[row][column] = factor[row] * c[row][column] + the sum over k, ascending, of a[row][k] * b[k][column], one fma each;
// without factors c starts at zero. What b is, the product is told apart.
struct Product {
  const float* a;
  int64_t a_stride;
  int first_k, end_k;
  float* c;
  int64_t c_stride;
  const float* factor;
};

// b in scratch memory. Asks for bytes 64 to `bytes` of some rows of KV memory meanwhile.
struct Scratch {
  const float* b;
  int64_t stride;
  const uint8_t* const* rows;  // [kKeyTile]
  int64_t bytes;
  F at(int k, int column) const { return load(b + k * stride + column); }
  CHAIRLIFT_INLINE void meanwhile(int k, int column) const {
    if (column == 0 && k < kKeyTile) ask(rows[k], 64, bytes);
  }
};

// b is values where they are in KV memory. Asks for the next tile's keys meanwhile.
template <KVType type>
struct Values {
  const TileRows& rows;
  const TileRows& next;
  F at(int k, int column) const { return load_values<type>(rows.value[k], column, rows.value_scale[k]); }
  CHAIRLIFT_INLINE void meanwhile(int k, int column) const {
    ask(next.key[k], column * value_bytes(type), (column + kBlockVectors * kLanes) * value_bytes(type));
  }
};

// Keeps x in a register: compilers would rather load it again for each row, and loads are what there is least of.
static inline void hold(F& x) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(x));
#elif defined(__AVX2__)
  __asm__("" : "+x"(x));
#else
  (void)x;
#endif
}

// Columns `column` to `column` + kVectors * kLanes.
template <int kRows, int kVectors, typename Source>
static void multiply(const Product& product, const Source& source, int column) {
  const Product p = product;
  const Source b_at = source;
  float* out = p.c + column;
  F c[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      c[r][v] = p.factor ? mul(load(out + r * p.c_stride + v * kLanes), set1(p.factor[r])) : zero();
  }
  for (int k = p.first_k; k < p.end_k; ++k) {
    F b[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) hold(b[v] = b_at.at(k, column + v * kLanes));
    b_at.meanwhile(k, column);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F a = set1(p.a[r * p.a_stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) c[r][v] = fma(a, b[v], c[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(out + r * p.c_stride + v * kLanes, c[r][v]);
  }
}

template <int kRows>
static void multiply_scratch(const Product& p, const Scratch& b, int num_vectors) {
  const int pieces = (num_vectors + kBlockVectors - 1) / kBlockVectors;
  for (int piece = 0; piece < pieces; ++piece) {
    const int first = num_vectors * piece / pieces, count = num_vectors * (piece + 1) / pieces - first;
    if (count == 1) multiply<kRows, 1>(p, b, first * kLanes);
    if (count == 2) multiply<kRows, 2>(p, b, first * kLanes);
    if (kBlockVectors > 2 && count == 3) multiply<kRows, kBlockVectors - 1>(p, b, first * kLanes);
    if (kBlockVectors > 2 && count == 4) multiply<kRows, kBlockVectors>(p, b, first * kLanes);
  }
}

// Scores [kKeyTile] of one row: keys outside of begin..end become -inf. Returns the largest.
static inline float mask_scores(float* scores, int begin, int end, int num_vectors) {
  const F never = set1(-__builtin_inff());
  F largest = never;
  for (int v = 0; v < num_vectors; ++v) {
    F x = load(scores + v * kLanes);
    const int first = v * kLanes;
    if (begin > first || end < first + kLanes) {
      const F key = add(iota(), set1(static_cast<float>(first)));
      x = select(less(key, set1(static_cast<float>(begin))), never, x);
      x = select(less(key, set1(static_cast<float>(end))), x, never);
      store(scores + v * kLanes, x);
    }
    largest = max(largest, x);
  }
  return reduce_max(largest);
}

// Scores become weights exp(score - reference); their sum is added to the row's, lane by lane.
static inline void weigh(float* scores, int num_vectors, float reference, float factor, float* lane_sums) {
  F sum = zero();
  for (int v = 0; v < num_vectors; ++v) {
    const F weight = exp(sub(load(scores + v * kLanes), set1(reference)));
    store(scores + v * kLanes, weight);
    sum = add(sum, weight);
  }
  store(lane_sums, fma(load(lane_sums), set1(factor), sum));
}

// What a tile is attended with: the rows of one head, and where the tile and the one after it are.
struct TileWork {
  int64_t first_key;
  int head;
  const TileRows& rows;
  const TileRows& next;
};

// Rows first to first + kRows of a head.
template <KVType type, int kRows>
static void attend_rows(const Work& work, const State& state, const TileWork& tile, int first) {
  const int begin = within_tile(work.first_key[first] - tile.first_key);
  const int end = within_tile(work.end_key[first + kRows - 1] - tile.first_key);
  if (begin >= end) return;
  const int first_row = tile.head * work.rows_a_head + first;
  alignas(64) float scores[kRows * kKeyTile];
  const int num_vectors = (end + kLanes - 1) / kLanes;
  const float* query = work.query + first_row * work.stride;
  multiply_scratch<kRows>({query, work.stride, 0, work.shape.head_dim, scores, kKeyTile, nullptr},
                          {work.keys, kKeyTile, tile.rows.value, work.shape.head_dim * value_bytes(type)}, num_vectors);

  alignas(64) float largest[16], reference[16], factor[16];
  for (int r = 0; r < kRows; ++r) {
    const int row_begin = within_tile(work.first_key[first + r] - tile.first_key);
    const int row_end = within_tile(work.end_key[first + r] - tile.first_key);
    const float found = mask_scores(scores + r * kKeyTile, row_begin, row_end, num_vectors);
    const float known = state.max[first_row + r];
    largest[r] = found > known ? found : known;
  }
  // A row that has seen nothing yet keeps -inf; the reference stays finite, so that its weights are 0 and not NaN.
  for (int r = 0; r < kRows; r += kLanes) {
    const int n = lanes_left(r, kRows);
    const F finite = max(load_n(largest + r, n), set1(kLowest));
    store_n(reference + r, finite, n);
    store_n(factor + r, exp(sub(load_n(state.max + first_row + r, n), finite)), n);
    store_n(state.max + first_row + r, load_n(largest + r, n), n);
  }
  for (int r = 0; r < kRows; ++r)
    weigh(scores + r * kKeyTile, num_vectors, reference[r], factor[r], work.lane_sums + (first_row + r) * 16);

  float* const out = state.out + first_row * work.stride;
  const Product product = {scores, kKeyTile, begin, end, out, work.stride, factor};
  if (work.values) {
    const int out_vectors = (work.shape.head_dim + kLanes - 1) / kLanes;
    multiply_scratch<kRows>(product, {work.values, work.stride, tile.rows.value, 0}, out_vectors);
  } else {
    for (int column = 0; column < work.shape.head_dim; column += kBlockVectors * kLanes)
      multiply<kRows, kBlockVectors>(product, Values<type>{tile.rows, tile.next}, column);
  }
}

template <KVType type>
static void attend_tile(const Work& work, const State& state, const TileWork& tile) {
  const int pieces = (work.rows_a_head + kBlockRows - 1) / kBlockRows;
  for (int piece = 0; piece < pieces; ++piece) {
    const int first = work.rows_a_head * piece / pieces;
    const int end = work.rows_a_head * (piece + 1) / pieces;
    switch (end - first) {
      case 1: attend_rows<type, 1>(work, state, tile, first); break;
      case 2: attend_rows<type, 2>(work, state, tile, first); break;
      case 3: attend_rows<type, 3>(work, state, tile, first); break;
      case 4: attend_rows<type, 4>(work, state, tile, first); break;
      case 5: attend_rows<type, 5>(work, state, tile, first); break;
      default: attend_rows<type, 6>(work, state, tile, first); break;
    }
  }
}

// The tiles of a split, at all heads of the block: tile after tile, and head after head in each.
template <KVType type>
static void attend_tiles(const Work& work, const State& state, int64_t first_key, int64_t end_key) {
  const int64_t bytes = static_cast<int64_t>(work.shape.head_dim) * value_bytes(type);
  TileRows found[2];
  TileRows *rows = &found[0], *next = &found[1];
  find_rows<type>(work, first_key, 0, *rows);
  for (int k = rows->begin; k < rows->end; ++k) ask(rows->key[k], 0, bytes);
  for (int64_t tile_key = first_key; tile_key < end_key; tile_key += kKeyTile)
    for (int head = 0; head < work.block.num_kv_heads; ++head) {
      const bool is_last = head + 1 == work.block.num_kv_heads;
      find_rows<type>(work, is_last ? tile_key + kKeyTile : tile_key, is_last ? 0 : head + 1, *next);
      load_keys<type>(work, *rows);
      if (work.values) load_values<type>(work, *rows, *next);
      attend_tile<type>(work, state, {tile_key, head, *rows, *next});
      TileRows* const done = rows;
      rows = next;
      next = done;
    }
}

template <KVType type>
static void attend_split(const Work& work, const State& state, int split) {
  clear_state(state, work.num_rows, work.stride);
  for (int i = 0; i < work.num_rows * 16; i += kLanes) store(work.lane_sums + i, zero());
  const int64_t first_key = work.block.first_key(0) / kKeyTile * kKeyTile;
  const int64_t end_key = work.block.end_key(work.block.num_tokens - 1);
  const int64_t split_key = static_cast<int64_t>(split) * kSplit;
  attend_tiles<type>(work, state, split_key > first_key ? split_key : first_key,
                     split_key + kSplit < end_key ? split_key + kSplit : end_key);
  for (int r = 0; r < work.num_rows; ++r) state.sum[r] = reduce_add(load(work.lane_sums + r * 16));
}

static void write_out(const AttentionShape& shape, const QueryBlock& block, const State& state) {
  const int head_dim = shape.head_dim, stride = shape.row_stride(), rows_a_head = shape.group() * block.num_tokens;
  for (int r = 0; r < rows_a_head * block.num_kv_heads; ++r) {
    const int64_t token = r % rows_a_head / shape.group();
    float* to = block.out + token * shape.num_heads * head_dim + head_offset(shape, rows_a_head, r);
    const F sum = set1(state.sum[r]);
    for (int i = 0; i < head_dim; i += kLanes) {
      const int n = lanes_left(i, head_dim);
      store_n(to + i, div(load_n(state.out + r * stride + i, n), sum), n);
    }
  }
}

template <KVType type>
static void attend_splits(const Work& work, int first_split, int end_split, float* states) {
  const int num_rows = work.num_rows, stride = work.stride;
  if (states) {
    const int64_t size = state_floats(num_rows, stride);
    for (int split = first_split; split < end_split; ++split, states += size)
      attend_split<type>(work, state_at(states, num_rows), split);
    return;
  }
  const State running = state_at(work.running, num_rows), total = state_at(work.total, num_rows);
  clear_state(total, num_rows, stride);
  for (int split = first_split; split < end_split; ++split) {
    attend_split<type>(work, running, split);
    merge_state(total, running, num_rows, stride);
  }
  write_out(work.shape, work.block, total);
}

static void attend(const AttentionShape& shape, const PagedKV& kv, const QueryBlock& block, int first_split,
                   int end_split, float* states, void* scratch) {
  const Work work = lay_out(shape, kv, block, scratch);
  gather_queries(work);
  if (shape.kv_type == KVType::f32) attend_splits<KVType::f32>(work, first_split, end_split, states);
  if (shape.kv_type == KVType::bf16) attend_splits<KVType::bf16>(work, first_split, end_split, states);
  if (shape.kv_type == KVType::int8) attend_splits<KVType::int8>(work, first_split, end_split, states);
}

static void merge(const AttentionShape& shape, const QueryBlock& block, const float* states, void* scratch) {
  const int num_rows = shape.group() * block.num_tokens * block.num_kv_heads, stride = shape.row_stride();
  const State total = state_at(static_cast<float*>(scratch), num_rows);
  clear_state(total, num_rows, stride);
  for (int split = block.first_split(); split < block.end_split(); ++split) {
    const int64_t at = (split - block.first_split()) * state_floats(num_rows, stride);
    merge_state(total, state_at(const_cast<float*>(states) + at, num_rows), num_rows, stride);
  }
  write_out(shape, block, total);
}

#undef CHAIRLIFT_INLINE

}  // namespace chairlift::CHAIRLIFT_ISA::attention

namespace chairlift::CHAIRLIFT_ISA {

static AttentionTiles attention_tiles() { return {&attention::prepare, &attention::attend, &attention::merge}; }

}  // namespace chairlift::CHAIRLIFT_ISA
