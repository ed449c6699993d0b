// Compiled once for every instruction set: attention of a block of query rows over its keys, tile after tile.
#include "attention_product.inl"

namespace chairlift::CHAIRLIFT_ISA::attention {

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
