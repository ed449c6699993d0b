// Attention of a block of query rows over its keys, tile after tile: everything but the products.
#pragma once

#include <type_traits>

#include "attention/attention_memory.inl"
#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA::attention {

// Sets the scores [kKeyTile] of one row to -inf for keys outside begin..end. Returns the largest scores, lane by lane.
static CHAIRLIFT_INLINE F mask_scores(float* scores, int begin, int end, int num_vectors) {
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
  return largest;
}

// The scale of an int8 key is the same in all dimensions, so its scores are scaled, not its values.
static CHAIRLIFT_INLINE void scale_rows(float* scores, const float* scales, int num_rows, int num_vectors) {
  for (int v = 0; v < num_vectors; ++v) {
    const F scale = load(scales + v * kLanes);
    for (int r = 0; r < num_rows; ++r) {
      float* const score = scores + r * kKeyTile + v * kLanes;
      store(score, mul(load(score), scale));
    }
  }
}

// tanh(x) is 1 - 2 / (1 + exp(2 * x)).
static inline void cap_scores(float* scores, float soft_cap, int num_rows, int num_vectors) {
  const F cap = set1(soft_cap), twice_inverse = set1(2.0f / soft_cap), one = set1(1.0f), two = set1(2.0f);
  for (int r = 0; r < num_rows; ++r)
    for (int v = 0; v < num_vectors; ++v) {
      float* const score = scores + r * kKeyTile + v * kLanes;
      const F growth = exp(mul(load(score), twice_inverse));
      store(score, mul(cap, sub(one, div(two, add(one, growth)))));
    }
}

// One tile at one head of the block.
struct TileWork {
  int64_t first_key;
  int head;
  Tile tile;
  Ahead& ahead;  // what is prefetched during its computation
  const TileScales& scales;
};

// Rows first to first + num_rows of a head, and the keys of the tile that any of them sees.
struct RowRange {
  int first, num_rows;
  int first_row;   // of the rows of the block
  int begin, end;  // the first and last key, relative to the tile
  int num_vectors() const { return (end + kLanes - 1) / kLanes; }
  // Whether every row sees a key (count 1) or all keys (count kKeyTile) of the tile.
  bool all_see(const Work& work, const TileWork& tile, int count = 1) const {
    const int64_t last_first = work.first_key[first + num_rows - 1], first_end = work.end_key[first];
    return last_first <= tile.first_key + kKeyTile - count && first_end >= tile.first_key + count;
  }
};

static inline RowRange rows_from(const Work& work, const TileWork& tile, int first, int num_rows) {
  return {first, num_rows, tile.head * work.rows_per_head + first,
          within_tile(work.first_key[first] - tile.first_key),
          within_tile(work.end_key[first + num_rows - 1] - tile.first_key)};
}

// Scales and masks the scores [rows][kKeyTile], writes the factors [rows] of the outputs so far, and adds the weights
// exp_of(score - largest score) to the sums of the rows, lane by lane. Calls put(row, vector, weights), which for int8 are
// multiplied by the scales of the values.
template <KVType type, typename Exp, typename Put>
static CHAIRLIFT_INLINE void weigh_rows(const Work& work, const State& state, const TileWork& tile, const RowRange& rows,
                                        float* scores, float* factor, Exp exp_of, Put put) {
  const int num_rows = rows.num_rows, num_vectors = rows.num_vectors();
  if (type == KVType::int8) scale_rows(scores, tile.scales.key, num_rows, num_vectors);
  if (work.shape.soft_cap > 0) cap_scores(scores, work.shape.soft_cap, num_rows, num_vectors);
  const bool is_whole = rows.all_see(work, tile, kKeyTile);
  alignas(64) float reference[16];
  for (int first = 0; first < num_rows; first += kLanes) {
    const int n = lanes_left(first, num_rows);
    F found[kLanes];
    for (int r = 0; r < n; ++r) {
      const int row = rows.first + first + r;
      float* const of_row = scores + (first + r) * kKeyTile;
      found[r] = is_whole ? mask_scores(of_row, 0, kKeyTile, kKeyTile / kLanes)
                          : mask_scores(of_row, within_tile(work.first_key[row] - tile.first_key),
                                        within_tile(work.end_key[row] - tile.first_key), num_vectors);
    }
    for (int r = n; r < kLanes; ++r) found[r] = zero();
    float* const known = state.max + rows.first_row + first;
    const F largest = max(reduce_each(found, [](F a, F b) { return max(a, b); }), load_n(known, n));
    // A row that has seen no key yet keeps -inf. The reference is finite, so that its weights are 0 and not NaN.
    const F finite = max(largest, set1(kLowest));
    store_n(reference + first, finite, n);
    store_n(factor + first, exp(sub(load_n(known, n), finite)), n);
    store_n(known, largest, n);
  }
  const auto weigh = [&](int r, auto count) CHAIRLIFT_ALWAYS {
    F sum = zero();
    for (int v = 0; v < count; ++v) {
      const F weight = exp_of(sub(load(scores + r * kKeyTile + v * kLanes), set1(reference[r])));
      sum = add(sum, weight);
      put(r, v, type == KVType::int8 ? mul(weight, load(tile.scales.value + v * kLanes)) : weight);
    }
    float* const lane_sums = work.lane_sums + (rows.first_row + r) * 16;
    store(lane_sums, fma(load(lane_sums), set1(factor[r]), sum));
  };
  for (int r = 0; r < num_rows; ++r) {
    if (is_whole) weigh(r, std::integral_constant<int, kKeyTile / kLanes>());
    else weigh(r, num_vectors);
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
template <KVType type, typename AttendTile>
static void attend_tiles(const Work& work, const State& state, int split, const QueryBlock* next, int64_t next_key,
                         Walk& walk, AttendTile attend_tile) {
  const int num_heads = work.block.num_kv_heads;
  const int64_t row_bytes = static_cast<int64_t>(work.shape.head_dim) * value_bytes(type);
  const int64_t head_bytes = work.kv.block_size * row_bytes, end = end_key(work.block, split);
  TileScales scales;
  for (int64_t tile_key = first_tile(work.block, split); tile_key < end; tile_key += kKeyTile) {
    const bool is_last = tile_key + kKeyTile >= end;
    if (!is_last) find_tile<type>(work.shape, work.kv, work.block, tile_key + kKeyTile, *walk.next);
    else if (next) find_tile<type>(work.shape, work.kv, *next, next_key, *walk.next);
    Ahead ahead;
    if (!is_last || next)
      ahead = {*walk.next, tile_at(*walk.next, work.kv, 0, 0), row_bytes, head_bytes,
               is_last ? next->num_kv_heads : num_heads};
    for (int head = 0; head < num_heads; ++head) {
      if (type == KVType::int8) find_scales(work, tile_key, head, *walk.current, scales);
      attend_tile(state, TileWork{tile_key, head, tile_at(*walk.current, work.kv, head_bytes, head), ahead, scales});
    }
    ahead.prefetch_rest();
    TileRows* const done = walk.current;
    walk.current = walk.next;
    walk.next = done;
  }
}

// The sum of exponentials of a row, with that of the sink of its head. A sink far above all scores makes the sum so
// large that the output is zero.
static inline F with_sink(const AttentionShape& shape, const QueryBlock& block, const State& state, int row) {
  const F sum = set1(state.sum[row]);
  if (!shape.sinks) return sum;
  const int group = shape.group(), head = block.first_kv_head * group + row / (group * block.num_tokens) * group;
  return add(sum, exp(set1(shape.sinks[head + row % group] - state.max[row])));
}

static void write_out(const AttentionShape& shape, const QueryBlock& block, const State& state) {
  const int head_dim = shape.head_dim, stride = shape.row_stride(), rows_per_head = shape.group() * block.num_tokens;
  for (int r = 0; r < rows_per_head * block.num_kv_heads; ++r) {
    const int64_t token = r % rows_per_head / shape.group();
    float* to = block.out + token * shape.num_heads * head_dim + head_offset(shape, rows_per_head, r);
    const F sum = with_sink(shape, block, state, r);
    for (int i = 0; i < head_dim; i += kLanes) {
      const int n = lanes_left(i, head_dim);
      store_some(to + i, div(load_some(state.out + r * stride + i, n), sum), n);
    }
  }
}

// Whether the state of the first split contains keys that another task has computed.
static inline bool continues_state(const SplitRange& splits) { return splits.lane_sums && !splits.block.rows; }

// Calls attend_split(state, split) for each split, which starts with an empty state unless it continues one, and writes the
// outputs of the block or the states of the splits.
template <typename AttendSplit>
static CHAIRLIFT_INLINE void attend_each_split(const Work& work, const SplitRange& splits, AttendSplit attend_split) {
  const int num_rows = work.num_rows, stride = work.stride;
  const State running = state_at(work.running, num_rows), total = state_at(work.total, num_rows);
  float* states = splits.states;
  if (!states) clear_state(total, num_rows, stride);
  for (int split = splits.first_split; split < splits.end_split; ++split) {
    const State state = states ? state_at(states, num_rows) : running;
    const bool continues = split == splits.first_split && continues_state(splits);
    if (!continues) clear_state(state, num_rows, stride);
    for (int i = 0; i < num_rows * 16; i += kLanes) store(work.lane_sums + i, continues ? load(splits.lane_sums + i) : zero());
    attend_split(state, split);
    for (int r = 0; r < num_rows; ++r) state.sum[r] = reduce_add(load(work.lane_sums + r * 16));
    if (states) states += state_floats(num_rows, stride);
    else merge_state(total, running, num_rows, stride);
  }
  if (!states) write_out(work.shape, work.block, total);
  if (splits.lane_sums && splits.block.rows)
    std::memcpy(splits.lane_sums, work.lane_sums, static_cast<size_t>(num_rows) * 16 * sizeof(float));
}

// Calls attend_tile(state, tile) for each tile and head.
template <KVType type, typename AttendTile>
static void attend_splits(const Work& work, const SplitRange& splits, const SplitRange* next, AttendTile attend_tile) {
  Walk walk;
  find_tile<type>(work.shape, work.kv, work.block, first_tile(work.block, splits.first_split), *walk.current);
  attend_each_split(work, splits, [&](const State& state, int split) CHAIRLIFT_ALWAYS {
    const bool is_last = split + 1 == splits.end_split;
    const QueryBlock* const block = !is_last ? &work.block : next ? &next->block : nullptr;
    const int64_t next_key = block ? first_tile(*block, is_last ? next->first_split : split + 1) : 0;
    attend_tiles<type>(work, state, split, block, next_key, walk, attend_tile);
  });
}

}  // namespace chairlift::CHAIRLIFT_ISA::attention
