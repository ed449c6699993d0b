// Compiled for each instruction set: attention of a block of query rows over its keys, tile after tile.
#include "attention_product.inl"

namespace chairlift::CHAIRLIFT_ISA::attention {

// Sets the scores [kKeyTile] of one row to -inf for keys outside begin..end. Returns the largest score.
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

// Turns scores into weights exp(score - reference), and adds them to the sums of the row, lane by lane.
static inline void weigh(float* scores, int num_vectors, float reference, float factor, float* lane_sums) {
  F sum = zero();
  for (int v = 0; v < num_vectors; ++v) {
    const F weight = exp(sub(load(scores + v * kLanes), set1(reference)));
    store(scores + v * kLanes, weight);
    sum = add(sum, weight);
  }
  store(lane_sums, fma(load(lane_sums), set1(factor), sum));
}

// The scale of an int8 key or value is the same in all dimensions, so scores and weights are scaled, not each value.
template <int kRows>
static inline void scale_rows(float* scores, const float* scales, int num_vectors) {
  for (int v = 0; v < num_vectors; ++v) {
    const F scale = load(scales + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      float* const score = scores + r * kKeyTile + v * kLanes;
      store(score, mul(load(score), scale));
    }
  }
}

// One tile at one head of the block. The next tile is prefetched during its computation.
struct TileWork {
  int64_t first_key;
  int head;
  Tile tile;
  Tile next;
  const TileScales& scales;
};

// Computes rows first to first + kRows of a head.
template <KVType type, int kRows>
static void attend_rows(const Work& work, const State& state, const TileWork& tile, int first) {
  const int begin = within_tile(work.first_key[first] - tile.first_key);
  const int end = within_tile(work.end_key[first + kRows - 1] - tile.first_key);
  if (begin >= end) return;
  const int first_row = tile.head * work.rows_per_head + first;
  alignas(64) float scores[kRows * kKeyTile];
  const int num_vectors = (end + kLanes - 1) / kLanes;
  const float* query = work.query + first_row * work.stride;
  if (work.keys)
    multiply_scratch<kRows>({query, work.stride, 0, work.shape.head_dim, scores, kKeyTile, nullptr},
                            {work.keys, kKeyTile}, num_vectors);
  else
    score<type, kRows>(work, query, tile.tile, tile.next, scores);
  if (type == KVType::int8) scale_rows<kRows>(scores, tile.scales.key, num_vectors);

  alignas(64) float largest[16], reference[16], factor[16];
  for (int r = 0; r < kRows; ++r) {
    const int row_begin = within_tile(work.first_key[first + r] - tile.first_key);
    const int row_end = within_tile(work.end_key[first + r] - tile.first_key);
    const float found = mask_scores(scores + r * kKeyTile, row_begin, row_end, num_vectors);
    const float known = state.max[first_row + r];
    largest[r] = found > known ? found : known;
  }
  // A row that has seen no key yet keeps -inf. The reference is finite, so that its weights are 0 and not NaN.
  for (int r = 0; r < kRows; r += kLanes) {
    const int n = lanes_left(r, kRows);
    const F finite = max(load_n(largest + r, n), set1(kLowest));
    store_n(reference + r, finite, n);
    store_n(factor + r, exp(sub(load_n(state.max + first_row + r, n), finite)), n);
    store_n(state.max + first_row + r, load_n(largest + r, n), n);
  }
  for (int r = 0; r < kRows; ++r)
    weigh(scores + r * kKeyTile, num_vectors, reference[r], factor[r], work.lane_sums + (first_row + r) * 16);
  if (type == KVType::int8) scale_rows<kRows>(scores, tile.scales.value, num_vectors);

  float* const out = state.out + first_row * work.stride;
  const Product product = {scores, kKeyTile, begin, end, out, work.stride, factor};
  if (work.values) {
    const int out_vectors = (work.shape.head_dim + kLanes - 1) / kLanes;
    multiply_scratch<kRows>(product, {work.values, work.stride}, out_vectors);
  } else {
    for (int column = 0; column < work.shape.head_dim; column += kBlockVectors * kLanes)
      multiply<kRows, kBlockVectors>(product, Values<type>{tile.tile, tile.next}, column);
  }
}

template <KVType type>
static void attend_tile(const Work& work, const State& state, const TileWork& tile) {
  if (work.keys) {
    load_keys<type>(work, tile.tile, tile.next);
    load_values<type>(work, tile.tile, tile.next);
  }
  const int pieces = (work.rows_per_head + kBlockRows - 1) / kBlockRows;
  for (int piece = 0; piece < pieces; ++piece) {
    const int first = work.rows_per_head * piece / pieces;
    const int end = work.rows_per_head * (piece + 1) / pieces;
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

// Prefetches the rows of a tile that the tile before it did not prefetch: those outside its own range of keys.
static CHAIRLIFT_INLINE void prefetch_rest(const Tile& next, const TileRows& done, int64_t row_bytes) {
  for (int k = next.rows->begin; k < next.rows->end; ++k) {
    if (k >= done.begin && k < done.end) continue;
    prefetch(next.key(k), row_bytes);
    prefetch(next.value(k), row_bytes);
  }
}

// The current and the next tile of a walk, which ends with the first tile of the next task.
struct Walk {
  TileRows rows[2];
  TileRows* current = &rows[0];
  TileRows* next = &rows[1];
};

static inline int64_t first_tile(const QueryBlock& block, int split) {
  const int64_t first_key = block.first_key(0) / kKeyTile * kKeyTile, split_key = static_cast<int64_t>(split) * kSplit;
  return split_key > first_key ? split_key : first_key;
}

static inline int64_t end_key(const QueryBlock& block, int split) {
  const int64_t end = block.end_key(block.num_tokens - 1), split_end = static_cast<int64_t>(split + 1) * kSplit;
  return split_end < end ? split_end : end;
}

template <KVType type>
static inline void find_tile(const AttentionShape& shape, const PagedKV& kv, const QueryBlock& block, int64_t tile_key,
                             TileRows& rows) {
  find_rows(block, shape, kv, static_cast<int64_t>(shape.head_dim) * value_bytes(type), tile_key, rows);
  prefetch_pages(kv, rows);
  if (type == KVType::int8) prefetch_scales(block, shape, kv, tile_key, rows);
}

// Computes the tiles of a split, and in each tile all heads of the block. `walk.current` is the first tile; afterwards
// it is the first tile of `next` unless `next` is null.
template <KVType type>
static void attend_tiles(const Work& work, const State& state, int split, const QueryBlock* next, int64_t next_key,
                         Walk& walk) {
  const int num_heads = work.block.num_kv_heads;
  const int64_t row_bytes = static_cast<int64_t>(work.shape.head_dim) * value_bytes(type);
  const int64_t head_bytes = work.kv.block_size * row_bytes, end = end_key(work.block, split);
  TileScales scales;
  for (int64_t tile_key = first_tile(work.block, split); tile_key < end; tile_key += kKeyTile) {
    const bool is_last = tile_key + kKeyTile >= end;
    if (!is_last) find_tile<type>(work.shape, work.kv, work.block, tile_key + kKeyTile, *walk.next);
    else if (next) find_tile<type>(work.shape, work.kv, *next, next_key, *walk.next);
    else *walk.next = *walk.current;
    for (int head = 0; head < num_heads; ++head) {
      const bool is_last_head = head + 1 == num_heads;
      const Tile tile = tile_at(*walk.current, work.kv, head_bytes, head);
      const Tile ahead = is_last_head ? tile_at(*walk.next, work.kv, head_bytes, 0)
                               : tile_at(*walk.current, work.kv, head_bytes, head + 1);
      if (type == KVType::int8) find_scales(work, tile_key, head, *walk.current, scales);
      attend_tile<type>(work, state, {tile_key, head, tile, ahead, scales});
      if (is_last_head) prefetch_rest(ahead, *walk.current, row_bytes);
    }
    TileRows* const done = walk.current;
    walk.current = walk.next;
    walk.next = done;
  }
}

template <KVType type>
static void attend_split(const Work& work, const State& state, int split, const QueryBlock* next, int64_t next_key,
                         Walk& walk) {
  clear_state(state, work.num_rows, work.stride);
  for (int i = 0; i < work.num_rows * 16; i += kLanes) store(work.lane_sums + i, zero());
  attend_tiles<type>(work, state, split, next, next_key, walk);
  for (int r = 0; r < work.num_rows; ++r) state.sum[r] = reduce_add(load(work.lane_sums + r * 16));
}

static void write_out(const AttentionShape& shape, const QueryBlock& block, const State& state) {
  const int head_dim = shape.head_dim, stride = shape.row_stride(), rows_per_head = shape.group() * block.num_tokens;
  for (int r = 0; r < rows_per_head * block.num_kv_heads; ++r) {
    const int64_t token = r % rows_per_head / shape.group();
    float* to = block.out + token * shape.num_heads * head_dim + head_offset(shape, rows_per_head, r);
    const F sum = set1(state.sum[r]);
    for (int i = 0; i < head_dim; i += kLanes) {
      const int n = lanes_left(i, head_dim);
      store_some(to + i, div(load_some(state.out + r * stride + i, n), sum), n);
    }
  }
}

template <KVType type>
static void attend_splits(const Work& work, const SplitRange& splits, const SplitRange* next) {
  const int num_rows = work.num_rows, stride = work.stride;
  const State running = state_at(work.running, num_rows), total = state_at(work.total, num_rows);
  float* states = splits.states;
  if (!states) clear_state(total, num_rows, stride);
  Walk walk;
  find_tile<type>(work.shape, work.kv, work.block, first_tile(work.block, splits.first_split), *walk.current);
  for (int split = splits.first_split; split < splits.end_split; ++split) {
    const bool is_last = split + 1 == splits.end_split;
    const QueryBlock* const block = !is_last ? &work.block : next ? &next->block : nullptr;
    const int64_t next_key = block ? first_tile(*block, is_last ? next->first_split : split + 1) : 0;
    attend_split<type>(work, states ? state_at(states, num_rows) : running, split, block, next_key, walk);
    if (states) states += state_floats(num_rows, stride);
    else merge_state(total, running, num_rows, stride);
  }
  if (!states) write_out(work.shape, work.block, total);
}

static void attend(const AttentionShape& shape, const PagedKV& kv, const TokenRows& tokens, const SplitRange& splits,
                   const SplitRange* next, void* scratch) {
  const QueryBlock& block = splits.block;
  const Work work = lay_out(shape, kv, block, scratch);
  gather_queries(work, tokens);
  if (block.writes_kv && splits.end_split == block.end_split())
    write_token(shape, kv, tokens, block.first_row, block.first_kv_head, block.first_kv_head + block.num_kv_heads);
  if (shape.kv_type == KVType::f32) attend_splits<KVType::f32>(work, splits, next);
  if (shape.kv_type == KVType::bf16) attend_splits<KVType::bf16>(work, splits, next);
  if (shape.kv_type == KVType::int8) attend_splits<KVType::int8>(work, splits, next);
}

template <KVType type>
static void prefetch_first_tile(const AttentionShape& shape, const PagedKV& kv, const SplitRange& splits) {
  const int64_t row_bytes = static_cast<int64_t>(shape.head_dim) * value_bytes(type);
  TileRows rows;
  find_tile<type>(shape, kv, splits.block, first_tile(splits.block, splits.first_split), rows);
  prefetch_rest(tile_at(rows, kv, 0, 0), {{}, 0, 0}, row_bytes);
}

static void prefetch(const AttentionShape& shape, const PagedKV& kv, const SplitRange& splits) {
  if (shape.kv_type == KVType::f32) prefetch_first_tile<KVType::f32>(shape, kv, splits);
  if (shape.kv_type == KVType::bf16) prefetch_first_tile<KVType::bf16>(shape, kv, splits);
  if (shape.kv_type == KVType::int8) prefetch_first_tile<KVType::int8>(shape, kv, splits);
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
#undef CHAIRLIFT_ALWAYS

}  // namespace chairlift::CHAIRLIFT_ISA::attention

namespace chairlift::CHAIRLIFT_ISA {

static constexpr AttentionTiles attention_tiles() {
  return {&attention::prepare, &attention::attend, &attention::prefetch, &attention::merge};
}

}  // namespace chairlift::CHAIRLIFT_ISA
