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
  int group, num_rows, stride;
  float* query;         // [rows][stride]
  float* keys;          // [head_dim][kKeyTile]
  float* values;        // [kKeyTile][stride]
  float* lane_sums;     // [rows][16], of the running split
  float* running;       // state of one split
  float* total;         // state of all splits so far
  int64_t* first_key;   // [rows], what each row sees
  int64_t* end_key;
};

static inline float* take(float*& memory, int64_t num_floats) {
  float* taken = memory;
  memory += (num_floats + 15) / 16 * 16;
  return taken;
}

static Work lay_out(const AttentionShape& shape, const PagedKV& kv, const QueryBlock& block, void* scratch) {
  const int group = shape.group(), num_rows = group * block.num_tokens, stride = shape.row_stride();
  float* memory = static_cast<float*>(scratch);
  Work work = {shape, kv, block, group, num_rows, stride, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
  work.query = take(memory, static_cast<int64_t>(num_rows) * stride);
  work.keys = take(memory, static_cast<int64_t>(shape.head_dim) * kKeyTile);
  work.values = take(memory, static_cast<int64_t>(kKeyTile) * stride);
  work.lane_sums = take(memory, static_cast<int64_t>(num_rows) * 16);
  work.running = take(memory, state_floats(num_rows, stride));
  work.total = take(memory, state_floats(num_rows, stride));
  work.first_key = reinterpret_cast<int64_t*>(take(memory, 2 * num_rows));
  work.end_key = reinterpret_cast<int64_t*>(take(memory, 2 * num_rows));
  return work;
}

static void gather_queries(const Work& work) {
  const int head_dim = work.shape.head_dim;
  for (int r = 0; r < work.num_rows; ++r) {
    const int token = r / work.group;
    const float* from = work.block.query + token * work.shape.qkv_width() + r % work.group * head_dim;
    for (int i = 0; i < head_dim; i += kLanes) {
      const int n = lanes_left(i, head_dim);
      store_n(work.query + r * work.stride + i, load_n(from + i, n), n);
    }
    work.first_key[r] = work.block.first_key(token);
    work.end_key[r] = work.block.end_key(token);
  }
}

// KV memory of one head seen as rows: where the keys of a tile are.
struct TileRows {
  int64_t row[kKeyTile];
  int begin, end;  // the keys that the block sees, less the tile's first
};

static inline void find_rows(const Work& work, int64_t tile_key, TileRows& rows) {
  const QueryBlock& block = work.block;
  const int64_t first = block.first_key(0) - tile_key, end = block.end_key(block.num_tokens - 1) - tile_key;
  rows.begin = static_cast<int>(first < 0 ? 0 : first);
  rows.end = static_cast<int>(end < kKeyTile ? end : kKeyTile);
  const int block_size = work.kv.block_size;
  int64_t column = (tile_key + rows.begin) / block_size;
  int offset = static_cast<int>((tile_key + rows.begin) % block_size);
  for (int k = rows.begin; k < rows.end; ++column, offset = 0) {
    const int64_t row =
        (static_cast<int64_t>(block.block_table[column]) * work.shape.num_kv_heads + block.kv_head) * block_size;
    for (; k < rows.end && offset < block_size; ++k, ++offset) rows.row[k] = row + offset;
  }
}

alignas(64) static const float kZeroRow[kMaxHeadDim] = {};

// Keys of a tile to [head_dim][kKeyTile]; a column that the block does not see is zero.
template <KVType type>
static void load_keys(const Work& work, const TileRows& rows) {
  const int head_dim = work.shape.head_dim;
  const int64_t bytes = static_cast<int64_t>(head_dim) * value_bytes(type);
  const uint8_t* memory = static_cast<const uint8_t*>(work.kv.key);
  for (int first = rows.begin / kLanes * kLanes; first < rows.end; first += kLanes) {
    const uint8_t* keys[kLanes];
    alignas(64) float scales[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int k = first + i;
      const bool seen = k >= rows.begin && k < rows.end;
      keys[i] = seen ? memory + rows.row[k] * bytes : reinterpret_cast<const uint8_t*>(kZeroRow);
      scales[i] = type == KVType::int8 && seen ? work.kv.key_scale[rows.row[k]] : 0.0f;
    }
    transpose_rows<type>(keys, scales, head_dim, work.keys + first);
  }
}

template <KVType type>
static inline F load_value(const void* memory, int64_t at, int n) {
  if (type == KVType::f32) return load_n(static_cast<const float*>(memory) + at, n);
  if (type == KVType::bf16) return load_bf16_n(static_cast<const uint16_t*>(memory) + at, n);
  return load_s8_n(static_cast<const int8_t*>(memory) + at, n);
}

template <KVType type>
static inline F load_value(const void* memory, int64_t at) {
  if (type == KVType::f32) return load(static_cast<const float*>(memory) + at);
  if (type == KVType::bf16) return load_bf16(static_cast<const uint16_t*>(memory) + at);
  return load_s8(static_cast<const int8_t*>(memory) + at);
}

// Values of the keys that the block sees, to [kKeyTile][stride].
template <KVType type>
static void load_values(const Work& work, const TileRows& rows) {
  const int head_dim = work.shape.head_dim;
  for (int k = rows.begin; k < rows.end; ++k) {
    const int64_t row = rows.row[k], from = row * head_dim;
    float* to = work.values + k * work.stride;
    const F scale = set1(type == KVType::int8 ? work.kv.value_scale[row] : 1.0f);
    int i = 0;
    for (; i + kLanes <= head_dim; i += kLanes) {
      const F x = load_value<type>(work.kv.value, from + i);
      store(to + i, type == KVType::int8 ? mul(x, scale) : x);
    }
    if (i < head_dim) {
      const F x = load_value<type>(work.kv.value, from + i, head_dim - i);
      store(to + i, type == KVType::int8 ? mul(x, scale) : x);
    }
  }
}

// c[row][column] = factor[row] * c[row][column] + the sum over k, ascending, of a[row][k] * b[k][column], one fma each;
// without factors c starts at zero. Columns are those of kVectors vectors.
struct Product {
  const float* a;
  int64_t a_stride;
  const float* b;
  int64_t b_stride;
  int first_k, end_k;
  float* c;
  int64_t c_stride;
  const float* factor;
};

template <int kRows, int kVectors>
static void multiply(const Product& p) {
  F c[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      c[r][v] = p.factor ? mul(load(p.c + r * p.c_stride + v * kLanes), set1(p.factor[r])) : zero();
  }
  for (int k = p.first_k; k < p.end_k; ++k) {
    F b[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) b[v] = load(p.b + k * p.b_stride + v * kLanes);
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
    for (int v = 0; v < kVectors; ++v) store(p.c + r * p.c_stride + v * kLanes, c[r][v]);
  }
}

template <int kRows>
static void multiply_vectors(Product p, int num_vectors) {
  const int pieces = (num_vectors + kBlockVectors - 1) / kBlockVectors;
  for (int piece = 0; piece < pieces; ++piece) {
    const int count = num_vectors * (piece + 1) / pieces - num_vectors * piece / pieces;
    if (count == 1) multiply<kRows, 1>(p);
    if (count == 2) multiply<kRows, 2>(p);
    if (kBlockVectors > 2 && count == 3) multiply<kRows, kBlockVectors - 1>(p);
    if (kBlockVectors > 2 && count == 4) multiply<kRows, kBlockVectors>(p);
    p.b += count * kLanes;
    p.c += count * kLanes;
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

// Rows first to first + kRows over the tile that begins at tile_key.
template <int kRows>
static void attend_rows(const Work& work, const State& state, int64_t tile_key, int first) {
  const int last = first + kRows - 1;
  const int64_t low = work.first_key[first] - tile_key, high = work.end_key[last] - tile_key;
  const int begin = static_cast<int>(low < 0 ? 0 : low), end = static_cast<int>(high < kKeyTile ? high : kKeyTile);
  if (begin >= end) return;
  alignas(64) float scores[kRows * kKeyTile];
  const int num_vectors = (end + kLanes - 1) / kLanes;
  const float* query = work.query + first * work.stride;
  multiply_vectors<kRows>(
      {query, work.stride, work.keys, kKeyTile, 0, work.shape.head_dim, scores, kKeyTile, nullptr}, num_vectors);

  alignas(64) float largest[16], reference[16], factor[16];
  for (int r = 0; r < kRows; ++r) {
    const int64_t row_begin = work.first_key[first + r] - tile_key, row_end = work.end_key[first + r] - tile_key;
    const float found = mask_scores(scores + r * kKeyTile, static_cast<int>(row_begin < 0 ? 0 : row_begin),
                                    static_cast<int>(row_end < kKeyTile ? row_end : kKeyTile), num_vectors);
    largest[r] = found > state.max[first + r] ? found : state.max[first + r];
  }
  // A row that has seen nothing yet keeps -inf; the reference stays finite, so that its weights are 0 and not NaN.
  for (int r = 0; r < kRows; r += kLanes) {
    const int n = lanes_left(r, kRows);
    const F finite = max(load_n(largest + r, n), set1(kLowest));
    store_n(reference + r, finite, n);
    store_n(factor + r, exp(sub(load_n(state.max + first + r, n), finite)), n);
    store_n(state.max + first + r, load_n(largest + r, n), n);
  }
  for (int r = 0; r < kRows; ++r)
    weigh(scores + r * kKeyTile, num_vectors, reference[r], factor[r], work.lane_sums + (first + r) * 16);

  const int out_vectors = (work.shape.head_dim + kLanes - 1) / kLanes;
  multiply_vectors<kRows>({scores, kKeyTile, work.values, work.stride, begin, end, state.out + first * work.stride,
                           work.stride, factor}, out_vectors);
}

static void attend_tile(const Work& work, const State& state, int64_t tile_key) {
  const int pieces = (work.num_rows + kBlockRows - 1) / kBlockRows;
  for (int piece = 0; piece < pieces; ++piece) {
    const int first = static_cast<int>(static_cast<int64_t>(work.num_rows) * piece / pieces);
    const int end = static_cast<int>(static_cast<int64_t>(work.num_rows) * (piece + 1) / pieces);
    switch (end - first) {
      case 1: attend_rows<1>(work, state, tile_key, first); break;
      case 2: attend_rows<2>(work, state, tile_key, first); break;
      case 3: attend_rows<3>(work, state, tile_key, first); break;
      case 4: attend_rows<4>(work, state, tile_key, first); break;
      case 5: attend_rows<5>(work, state, tile_key, first); break;
      default: attend_rows<6>(work, state, tile_key, first); break;
    }
  }
}

template <KVType type>
static void attend_split(const Work& work, const State& state, int split) {
  clear_state(state, work.num_rows, work.stride);
  for (int i = 0; i < work.num_rows * 16; i += kLanes) store(work.lane_sums + i, zero());
  const int64_t first_key = work.block.first_key(0), end_key = work.block.end_key(work.block.num_tokens - 1);
  const int64_t split_key = static_cast<int64_t>(split) * kSplit;
  for (int64_t tile_key = split_key; tile_key < split_key + kSplit; tile_key += kKeyTile) {
    if (tile_key + kKeyTile <= first_key || tile_key >= end_key) continue;
    TileRows rows;
    find_rows(work, tile_key, rows);
    load_keys<type>(work, rows);
    load_values<type>(work, rows);
    attend_tile(work, state, tile_key);
  }
  for (int r = 0; r < work.num_rows; ++r) state.sum[r] = reduce_add(load(work.lane_sums + r * 16));
}

static void write_out(const AttentionShape& shape, const QueryBlock& block, const State& state) {
  const int head_dim = shape.head_dim, group = shape.group(), stride = shape.row_stride();
  for (int r = 0; r < group * block.num_tokens; ++r) {
    float* to = block.out + static_cast<int64_t>(r / group) * shape.num_heads * head_dim + r % group * head_dim;
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
  const int num_rows = shape.group() * block.num_tokens, stride = shape.row_stride();
  const State total = state_at(static_cast<float*>(scratch), num_rows);
  clear_state(total, num_rows, stride);
  for (int split = block.first_split(); split < block.end_split(); ++split) {
    const int64_t at = (split - block.first_split()) * state_floats(num_rows, stride);
    merge_state(total, state_at(const_cast<float*>(states) + at, num_rows), num_rows, stride);
  }
  write_out(shape, block, total);
}

}  // namespace chairlift::CHAIRLIFT_ISA::attention

namespace chairlift::CHAIRLIFT_ISA {

static AttentionTiles attention_tiles() { return {&attention::prepare, &attention::attend, &attention::merge}; }

}  // namespace chairlift::CHAIRLIFT_ISA
