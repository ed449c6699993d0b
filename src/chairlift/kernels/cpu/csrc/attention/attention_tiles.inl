// Compiled for each instruction set: attention of a block of query rows over its keys, tile after tile.
#pragma once

#include "attention/attention_product.inl"
#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA::attention {

// Computes rows first to first + kRows of a head.
template <KVType type, int kRows>
static void attend_rows(const Work& work, const State& state, const TileWork& tile, int first) {
  const RowRange rows = rows_from(work, tile, first, kRows);
  if (rows.begin >= rows.end) return;
  alignas(64) float scores[kRows * kKeyTile], factor[16];
  const float* query = work.query + rows.first_row * work.stride;
  if (work.keys)
    multiply_scratch<kRows>({query, work.stride, 0, work.shape.head_dim, scores, kKeyTile, nullptr},
                            {work.keys, kKeyTile}, rows.num_vectors());
  else
    score<type, kRows>(work, query, tile.tile, tile.ahead, scores);
  weigh_rows<type>(work, state, tile, rows, scores, factor, exp,
                   [&](int r, int v, F weights) CHAIRLIFT_ALWAYS { store(scores + r * kKeyTile + v * kLanes, weights); });

  float* const out = state.out + rows.first_row * work.stride;
  const Product product = {scores, kKeyTile, rows.begin, rows.end, out, work.stride, factor};
  if (work.values) {
    const int out_vectors = (work.shape.head_dim + kLanes - 1) / kLanes;
    multiply_scratch<kRows>(product, {work.values, work.stride}, out_vectors);
  } else {
    for (int column = 0; column < work.shape.head_dim; column += kBlockVectors * kLanes)
      multiply<kRows, kBlockVectors>(product, Values<type>{tile.tile, tile.ahead}, column);
  }
}

template <KVType type>
static void attend_tile(const Work& work, const State& state, const TileWork& tile) {
  if (work.keys) {
    load_keys<type>(work, tile.tile, tile.ahead);
    load_values<type>(work, tile.tile, tile.ahead);
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

template <KVType type>
static void attend_all(const Work& work, const SplitRange& splits, const SplitRange* next) {
  attend_splits<type>(work, splits, next,
                      [&](const State& state, const TileWork& tile) { attend_tile<type>(work, state, tile); });
}

static void attend(const AttentionShape& shape, const PagedKV& kv, const TokenRows& tokens, const SplitRange& splits,
                   const SplitRange* next, void* scratch) {
  float* memory = static_cast<float*>(scratch);
  Work work = lay_out(shape, kv, splits.block, memory);
  lay_out_products(work, memory);
  for (int r = 0; r < work.num_rows; ++r) gather_query(work, tokens, r, work.query + r * work.stride);
  write_decoded(work, tokens, splits);
  if (shape.kv_type == KVType::f32) attend_all<KVType::f32>(work, splits, next);
  if (shape.kv_type == KVType::bf16) attend_all<KVType::bf16>(work, splits, next);
  if (shape.kv_type == KVType::int8) attend_all<KVType::int8>(work, splits, next);
}

template <KVType type>
static void prefetch_first_tile(const AttentionShape& shape, const PagedKV& kv, const SplitRange& splits) {
  const int64_t row_bytes = static_cast<int64_t>(shape.head_dim) * value_bytes(type);
  TileRows rows;
  find_tile<type>(shape, kv, splits.block, first_tile(splits.block, splits.first_split), rows);
  Ahead(rows, tile_at(rows, kv, 0, 0), row_bytes, 0, 1).prefetch_rest();
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

}  // namespace chairlift::CHAIRLIFT_ISA::attention

namespace chairlift::CHAIRLIFT_ISA {

static constexpr AttentionTiles attention_tiles() {
  return {&attention::prepare, &attention::attend, &attention::prefetch, &attention::merge};
}

}  // namespace chairlift::CHAIRLIFT_ISA
