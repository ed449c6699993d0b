// Compiled for instruction sets with tiles: attention with products in tile registers.
//
// The weights of a row are relative to its reference: the largest score of its first tile of keys. A tile of keys whose
// weights are so large that a sum exceeds kMostWeights raises the reference to its own largest score, so outputs are rarely
// rescaled. Scores add 32 dimensions at a time, and outputs 32 keys. Up to kPassRows rows compute all tiles of a split before
// the next rows, so that their scores, weights and outputs remain in the first-level cache; few rows compute all heads of
// a tile of keys, which is the order of KV memory. Both compute a row with the same operations.
#pragma once

#include <utility>

#include "attention/attention_bf16.inl"
#include "simd/simd.h"
#include "simd/tiles.h"

namespace chairlift::CHAIRLIFT_ISA::attention {

constexpr int kSplitTiles = kSplit / kKeyTile;
constexpr int kPassRows = 2 * kTileRows;
constexpr int kRowWeightBytes = kKeyParts * kTileBytes;  // of the weights of 16 rows
constexpr float kHidden = -1e38f;                        // the score of a hidden key
constexpr float kUnseen = -1e30f;                        // a reference so low that any visible key raises it
constexpr float kMostWeights = 256.0f;                   // of a row, in one lane of a tile of keys
constexpr float kLog2E = 1.44269504088896341f;

// c[row][column] = the sum over parts of a[row] * b[column], for kTiles * 16 rows and 16 columns; added to c if kAdds.
struct GroupProduct {
  const uint8_t* a;
  int64_t a_tile_bytes, a_part_bytes;
  const uint8_t* b;  // tiles [parts]
  int num_parts;
  float* c;
  int64_t c_stride;
};

// The sums are in tiles kFirst and kFirst + 1: 0 and 2 alternate, so that a product does not wait for the stores of the last.
template <int kTiles, bool kAdds, int kFirst>
static CHAIRLIFT_INLINE void multiply_group(const GroupProduct& p) {
  constexpr int kRight = 6 + kFirst / 2;
  const int64_t row_bytes = p.c_stride * static_cast<int64_t>(sizeof(float));
  float* const second = p.c + p.c_stride * kTileRows;
  if constexpr (kAdds) {
    Tiles::load<kFirst>(p.c, row_bytes);
    if constexpr (kTiles == 2) Tiles::load<kFirst + 1>(second, row_bytes);
  } else {
    Tiles::zero<kFirst>();
    if constexpr (kTiles == 2) Tiles::zero<kFirst + 1>();
  }
  const uint8_t* a = p.a;
  for (int part = 0; part < p.num_parts; ++part, a += p.a_part_bytes) {
    Tiles::load<kRight>(p.b + part * kTileBytes);
    Tiles::load<4>(a);
    Tiles::dot_bf16<kFirst, 4, kRight>();
    if constexpr (kTiles == 2) {
      Tiles::load<5>(a + p.a_tile_bytes);
      Tiles::dot_bf16<kFirst + 1, 5, kRight>();
    }
  }
  Tiles::store<kFirst>(p.c, row_bytes);
  if constexpr (kTiles == 2) Tiles::store<kFirst + 1>(second, row_bytes);
}

// Computes groups of 16 columns, whose operands are b_bytes apart.
template <int kTiles, bool kAdds>
static CHAIRLIFT_INLINE void multiply_groups(GroupProduct p, int num_groups, int64_t b_bytes) {
  for (int group = 0; group < num_groups; ++group, p.b += b_bytes, p.c += kTileRows) {
    if (group % 2) multiply_group<kTiles, kAdds, 2>(p);
    else multiply_group<kTiles, kAdds, 0>(p);
  }
}

// Scores [kTiles * 16][kKeyTile] of a tile of keys.
template <int kTiles>
static CHAIRLIFT_INLINE void multiply_keys(const Operands& operands, int first_row, const uint8_t* keys, float* scores) {
  multiply_groups<kTiles, false>({operands.query + first_row * kTileRowBytes, kTileBytes, operands.part_bytes, keys,
                                  operands.num_parts, scores, kKeyTile},
                                 kMaxGroups, static_cast<int64_t>(operands.num_parts) * kTileBytes);
}

// Adds a tile of keys to the outputs [kTiles * 16][out_stride].
template <int kTiles, bool kAdds>
static CHAIRLIFT_INLINE void multiply_values(const Work& work, const uint8_t* weights, const uint8_t* values, float* out,
                                             int64_t out_stride) {
  multiply_groups<kTiles, kAdds>({weights, kRowWeightBytes, kTileBytes, values, kKeyParts, out, out_stride},
                                 work.stride / kTileRows, kKeyParts * kTileBytes);
}

// c[key][query] = the sum over parts of keys[key] * queries[query], for groups of 16 keys, `row_bytes` apart, and for 16
// queries, some of which may be those of other products: as multiply_keys with its operands exchanged, with the same bits.
template <int... g>
static inline void multiply_key_rows(const Operands& operands, const uint8_t* const* keys, int64_t row_bytes,
                                     const uint8_t* query, int64_t line_bytes, float* c, std::integer_sequence<int, g...>) {
  (Tiles::zero<g>(), ...);
  for (int part = 0; part < operands.num_parts; ++part) {
    Tiles::load<6>(query + part * operands.part_bytes, line_bytes);
    ((Tiles::load<4 + g % 2>(keys[g] + part * kTileRowBytes, row_bytes), Tiles::dot_bf16<g, 4 + g % 2, 6>()), ...);
  }
  (Tiles::store<g>(c + g * kTileRows * kTileRows), ...);
}

// The product of the keys of a tile, as they are in KV memory, and the queries of a head.
static inline void multiply_read_keys(const Work& work, const Operands& operands, const TileWork& tile, float* transposed) {
  const TileRows& at = *tile.tile.rows;
  const int64_t row_bytes = static_cast<int64_t>(work.shape.head_dim) * value_bytes(KVType::bf16);
  // A group of 16 keys is in one block. Keys that no query sees are read as well, and may be unwritten: masks replace their
  // scores. Groups that no query sees have the address of the first group.
  const int first = at.begin / kTileRows * kTileRows;
  const uint8_t* keys[kMaxGroups];
  for (int key = 0; key < kKeyTile; key += kTileRows)
    keys[key / kTileRows] = key > first && key < at.end ? tile.tile.key(key)
                                                        : tile.tile.key(at.begin) - (at.begin - first) * row_bytes;
  multiply_key_rows(operands, keys, row_bytes, operands.query + tile.head * work.rows_per_head * kPairBytes,
                    static_cast<int64_t>(work.num_rows) * kPairBytes, transposed,
                    std::make_integer_sequence<int, kMaxGroups>());
}

// Writes scores [rows][kKeyTile] from transposed ones [keys][kTileRows].
static inline void transpose_scores(const float* transposed, int num_rows, float* scores) {
  typedef int32_t FourWords __attribute__((vector_size(16)));
  for (int v = 0; v < kKeyTile / kLanes; ++v, transposed += kLanes * kTileRows) {
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

// Rows first to first + num_rows of a head over one tile of keys, with their state so far.
struct TileRange {
  const Work& work;
  const TileWork& tile;
  int first, num_rows;
  float* scores;     // [num_rows][kKeyTile]
  uint8_t* weights;  // tiles [rows / 16][kKeyParts]
  float* reference;  // [num_rows]; -inf: no key seen
  float* lane_sums;  // [num_rows][16]
  float* out;        // [num_rows][out_stride]
  int64_t out_stride;

  float* scores_of(int row) const { return scores + row * kKeyTile; }
  uint8_t* weights_of(int row) const {
    return weights + row / kTileRows * kRowWeightBytes + row % kTileRows * kTileRowBytes;
  }
  F largest_score(int row) const {
    const float* const s = scores_of(row);
    return max(max(load(s), load(s + kLanes)), max(load(s + 2 * kLanes), load(s + 3 * kLanes)));
  }
};
static_assert(kKeyTile == 4 * kTileRows, "a row has four vectors of scores");

// Scales, caps and masks scores.
template <KVType type>
static __attribute__((noinline)) void adjust_scores(const TileRange& range) {
  const Work& work = range.work;
  const int64_t first_key = range.tile.first_key;
  if (type == KVType::int8) scale_rows(range.scores, range.tile.scales.key, range.num_rows, kKeyTile / kLanes);
  if (work.shape.soft_cap > 0) cap_scores(range.scores, work.shape.soft_cap, range.num_rows, kKeyTile / kLanes);
  for (int r = 0; r < range.num_rows; ++r) {
    const int begin = within_tile(work.first_key[range.first + r] - first_key);
    const int end = within_tile(work.end_key[range.first + r] - first_key);
    for (int k = 0; k < kKeyTile; k += kLanes) {
      if (begin <= k && end >= k + kLanes) continue;
      float* const score = range.scores_of(r) + k;
      const F key = add(iota(), set1(static_cast<float>(k))), hidden = set1(kHidden);
      const F x = select(less(key, set1(static_cast<float>(begin))), hidden, load(score));
      store(score, select(less(key, set1(static_cast<float>(end))), x, hidden));
    }
  }
}

// Sets the references of rows that have seen no key.
static void start_references(const TileRange& range) {
  for (int first = 0; first < range.num_rows; first += kLanes) {
    const int n = lanes_left(first, range.num_rows);
    F found[kLanes];
    for (int r = 0; r < kLanes; ++r) found[r] = r < n ? range.largest_score(first + r) : zero();
    const F known = load_n(range.reference + first, n);
    F largest = reduce_each(found, [](F a, F b) { return max(a, b); });
    largest = select(less(set1(kUnseen), largest), largest, set1(-__builtin_inff()));
    store_n(range.reference + first, select(less(set1(kUnseen), known), known, largest), n);
  }
}

// 2^x for results that are rounded to bfloat16: a relative error below 1e-4, and 0 below -150. p(r) is a minimax polynomial
// of degree 3 for r in [0, 1).
static CHAIRLIFT_INLINE F exp2_to_bf16(F x) {
  const F r = fraction(x);
  F p = set1(7.802452319e-2f);
  p = fma(p, r, set1(2.260671581e-1f));
  p = fma(p, r, set1(6.958335376e-1f));
  p = fma(p, r, set1(9.999252191e-1f));
  return times_pow2_floor(p, x);
}

// The exponent of the weight of the score 0.
static inline float exponent_of(float reference) { return (reference > kUnseen ? reference : kUnseen) * -kLog2E; }

// Writes the weights of a row and returns their sums, lane by lane.
template <KVType type>
static CHAIRLIFT_INLINE F weigh_row(const TileRange& range, int row) {
  const float* const s = range.scores_of(row);
  const F exponent = set1(exponent_of(range.reference[row]));
  F w[4];
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) w[v] = exp2_to_bf16(fma(load(s + v * kLanes), set1(kLog2E), exponent));
  const F sums = add(add(w[0], w[1]), add(w[2], w[3]));
  auto* const to = reinterpret_cast<uint16_t*>(range.weights_of(row));
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v)
    if (type == KVType::int8) w[v] = mul(w[v], load(range.tile.scales.value + v * kLanes));
  store_bf16(to, w[0], w[1]);
  store_bf16(to + kTileBytes / 2, w[2], w[3]);
  return sums;
}

// Raises the reference of a row to its largest score.
template <KVType type>
static __attribute__((noinline)) F weigh_again(const TileRange& range, int row) {
  const float before = range.reference[row], raised = reduce_max(range.largest_score(row));
  range.reference[row] = raised;
  if (before > kUnseen) {
    const F factor = exp(set1(before - raised));
    float *const sums = range.lane_sums + row * kLanes, *const out = range.out + row * range.out_stride;
    store(sums, mul(load(sums), factor));
    for (int i = 0; i < range.work.stride; i += kLanes) store(out + i, mul(load(out + i), factor));
  }
  return weigh_row<type>(range, row);
}

// Computes the weights of a tile from its scores.
template <KVType type>
static CHAIRLIFT_INLINE void weigh_tile(const TileRange& range) {
  const RowRange rows = {range.first, range.num_rows, 0, 0, 0};
  if (type == KVType::int8 || range.work.shape.soft_cap > 0 || !rows.all_see(range.work, range.tile, kKeyTile))
    adjust_scores<type>(range);
  if (!(range.reference[0] > kUnseen)) start_references(range);
#pragma GCC unroll 2
  for (int row = 0; row < range.num_rows; ++row) {
    F sums = weigh_row<type>(range, row);
    if (__builtin_expect(mask_bits(less(set1(kMostWeights), sums)) != 0, 0)) sums = weigh_again<type>(range, row);
    float* const so_far = range.lane_sums + row * kLanes;
    store(so_far, add(load(so_far), sums));
  }
}

// Products in tile registers.
struct TileRegisters {
  TileRegisters(const Work& work, float*& memory)
      : operands(lay_out_operands(work, can_read_keys(work), is_few(work) ? 1 : kSplitTiles, memory)),
        scores(take(memory, kPassRows * kKeyTile)),
        weights(take_bytes(memory, kPassRows / kTileRows * kRowWeightBytes)),
        out(take(memory, kPassRows * work.stride)) {}

  template <KVType type>
  void attend(const Work& work, const SplitRange& splits, const SplitRange* next) const {
    Tiles::configure();
    if (is_few(work)) attend_few<type>(work, splits, next);
    else attend_many<type>(work, splits, next);
    Tiles::release();
  }

  Operands operands;
  float* scores;     // [kPassRows][kKeyTile]
  uint8_t* weights;  // tiles [kPassRows / 16][kKeyParts]
  float* out;        // [kPassRows][stride]

 private:
  static bool is_few(const Work& work) { return work.rows_per_head <= kTileRows; }
  // Few scores are transposed faster than their keys.
  static bool can_read_keys(const Work& work) {
    return work.shape.kv_type == KVType::bf16 && is_few(work) && work.kv.block_size % kTileRows == 0 &&
           work.shape.head_dim % kTileBf16Inputs == 0;
  }

  template <KVType type>
  void attend_few(const Work& work, const SplitRange& splits, const SplitRange* next) const {
    const int num_rows = work.rows_per_head;
    alignas(64) float transposed[kKeyTile * kTileRows];
    attend_splits<type>(work, splits, next, [&](const State& state, const TileWork& tile) {
      const int row = tile.head * num_rows;
      Ahead& ahead = tile.ahead;
      const int num_ahead = operands.reads_keys ? 2 : 1;
      if (operands.reads_keys) {
        multiply_read_keys(work, operands, tile, transposed);
      } else {
        load_tiled_keys<type>(work, operands.num_parts, tile.tile, ahead, operands.keys);
        multiply_keys<1>(operands, row, operands.keys, scores);
      }
      load_tiled_values<type>(work, tile.tile, ahead, num_ahead, operands.values);
      if (operands.reads_keys) transpose_scores(transposed, num_rows, scores);
      ahead.prefetch_rows(num_ahead * kPrefetchedRows);
      float* const of_rows = state.out + static_cast<int64_t>(row) * work.stride;
      weigh_tile<type>({work, tile, 0, num_rows, scores, weights, state.max + row, work.lane_sums + row * kLanes, of_rows,
                        work.stride});
      ahead.prefetch_rows(2 * num_ahead * kPrefetchedRows);
      std::memcpy(out, of_rows, static_cast<size_t>(num_rows * work.stride) * sizeof(float));
      multiply_values<1, true>(work, weights, operands.values, out, work.stride);
      std::memcpy(of_rows, out, static_cast<size_t>(num_rows * work.stride) * sizeof(float));
      ahead.prefetch_rows(num_ahead * kPrefetchedRows);
    });
  }

  // The tiles of a split, and the scales of int8 tiles.
  struct SplitTiles {
    TileRows rows[kSplitTiles];
    TileScales scales[kSplitTiles];
  };

  template <KVType type>
  void attend_many(const Work& work, const SplitRange& splits, const SplitRange* next) const {
    const int64_t head_bytes = static_cast<int64_t>(work.kv.block_size) * work.shape.head_dim * value_bytes(type);
    const int num_heads = work.block.num_kv_heads;
    SplitTiles tiles[2];
    SplitTiles *current = &tiles[0], *ahead = &tiles[1];
    find_split<type>(work, work.block, splits.first_split, *current);
    attend_each_split(work, splits, [&](const State& state, int split) {
      const bool is_last = split + 1 == splits.end_split;
      if (!is_last) find_split<type>(work, work.block, split + 1, *ahead);
      else if (next) find_split<type>(work, next->block, next->first_split, *ahead);
      else *ahead = *current;
      for (int head = 0; head < num_heads; ++head) {
        const bool is_last_head = head + 1 == num_heads;
        const SplitTiles& after = is_last_head ? *ahead : *current;
        Ahead next_rows;
        const auto tile_of = [&](int t) {
          return TileWork{static_cast<int64_t>(split) * kSplit + t * kKeyTile, head,
                          tile_at(current->rows[t], work.kv, head_bytes, head), next_rows, current->scales[t]};
        };
        for (int t = 0; t < kSplitTiles; ++t) {
          if (current->rows[t].begin >= current->rows[t].end) continue;
          const Tile next_tile = tile_at(after.rows[t], work.kv, head_bytes, is_last_head ? 0 : head + 1);
          next_rows = {after.rows[t], next_tile, head_bytes / work.kv.block_size, head_bytes, 1};
          load_tile<type>(work, tile_of(t), t, current->scales[t]);
        }
        for (int first = 0; first < work.rows_per_head; first += kPassRows) {
          const int left = work.rows_per_head - first;
          const bool continues = split == splits.first_split && continues_state(splits);
          attend_pass<type>(work, state, head, first, left < kPassRows ? left : kPassRows, continues, tile_of);
        }
      }
      std::swap(current, ahead);
    });
  }

  template <KVType type>
  static void find_split(const Work& work, const QueryBlock& block, int split, SplitTiles& tiles) {
    for (int t = 0; t < kSplitTiles; ++t)
      find_tile<type>(work.shape, work.kv, block, static_cast<int64_t>(split) * kSplit + t * kKeyTile, tiles.rows[t]);
  }

  template <KVType type>
  void load_tile(const Work& work, const TileWork& tile, int t, TileScales& scales) const {
    load_tiled_keys<type>(work, operands.num_parts, tile.tile, tile.ahead, operands.keys + t * operands.key_bytes);
    load_tiled_values<type>(work, tile.tile, tile.ahead, 1, operands.values + t * operands.value_bytes);
    tile.ahead.prefetch_rest();
    if (type == KVType::int8) find_scales(work, tile.first_key, tile.head, *tile.tile.rows, scales);
  }

  // Up to kPassRows rows over the tiles of a split.
  template <KVType type, typename TileOf>
  __attribute__((noinline)) void attend_pass(const Work& work, const State& state, int head, int first, int num_rows,
                                             bool continues, const TileOf& tile_of) const {
    const int row = head * work.rows_per_head + first;
    const bool is_whole = num_rows == kPassRows;
    float* const of_rows = state.out + static_cast<int64_t>(row) * work.stride;
    float* const sums = is_whole ? of_rows : out;
    const size_t out_bytes = static_cast<size_t>(num_rows * work.stride) * sizeof(float);
    if (continues && !is_whole) std::memcpy(out, of_rows, out_bytes);
    bool is_first = !continues;
    for (int t = 0; t < kSplitTiles; ++t) {
      const TileWork tile = tile_of(t);
      const RowRange rows = rows_from(work, tile, first, num_rows);
      if (rows.begin >= rows.end) continue;
      multiply_keys<2>(operands, row, operands.keys + t * operands.key_bytes, scores);
      weigh_tile<type>({work, tile, first, num_rows, scores, weights, state.max + row, work.lane_sums + row * kLanes, sums,
                        work.stride});
      const uint8_t* const values = operands.values + t * operands.value_bytes;
      if (is_first) multiply_values<2, false>(work, weights, values, sums, work.stride);
      else multiply_values<2, true>(work, weights, values, sums, work.stride);
      is_first = false;
    }
    if (!is_whole && !is_first) std::memcpy(of_rows, out, out_bytes);
  }
};

}  // namespace chairlift::CHAIRLIFT_ISA::attention
