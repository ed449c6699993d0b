// Compiled for AVX-512 BF16: the products of attention, with all pairs of inputs in one chain in ascending order.
#pragma once

#include "attention/attention_bf16.inl"
#include "linear/linear_bf16.inl"
#include "simd/simd.h"
#include "simd/tile_products.h"

namespace chairlift::CHAIRLIFT_ISA::attention {

constexpr int kRowsAtOnce = 4;

// Rows `row` to `row` + kRows.
template <int kRows, int kGroups, typename Put>
static CHAIRLIFT_INLINE void multiply_rows(const TileProduct& p, int row, const Put& put) {
  F c[kRows][kGroups];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) c[r][g] = zero();
  for (int part = 0; part < p.num_parts; ++part) {
    const uint8_t* a = p.a + part * p.a_bytes + row * kTileRowBytes;
    const uint8_t* b = p.b + part * kTileBytes;
#pragma GCC unroll 4
    for (int line = 0; line < kTileRows; ++line, a += kWordBytes, b += kTileRowBytes) {
      I columns[kGroups];
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) columns[g] = iload(b + g * p.b_bytes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const I pair = broadcast4(a + r * kTileRowBytes);
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g) c[r][g] = dot_bf16(c[r][g], columns[g], pair);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) put(row + r, g, c[r][g]);
}

template <int kGroups, typename Put>
static inline void multiply_groups(const TileProduct& p, const Put& put) {
  int row = 0;
  for (; row + kRowsAtOnce <= p.num_rows; row += kRowsAtOnce) multiply_rows<kRowsAtOnce, kGroups>(p, row, put);
  switch (p.num_rows - row) {
    case 1: return multiply_rows<1, kGroups>(p, row, put);
    case 2: return multiply_rows<2, kGroups>(p, row, put);
    case 3: return multiply_rows<3, kGroups>(p, row, put);
    default: return;
  }
}

// Calls put(row, group, sums) for the rows of a product.
template <typename Put>
static inline void multiply_each(const TileProduct& p, int num_groups, const Put& put) {
  switch (num_groups) {
    case 1: return multiply_groups<1>(p, put);
    case 2: return multiply_groups<2>(p, put);
    case 3: return multiply_groups<3>(p, put);
    default: return multiply_groups<kMaxGroups>(p, put);
  }
}

static inline void multiply(const TileProduct& p, int num_groups) {
  multiply_each(p, num_groups, [&](int row, int group, F sums) CHAIRLIFT_ALWAYS {
    store(p.c + row * kProductColumns + group * kTileRows, sums);
  });
}

// Adds one tile of keys to the outputs. Rows that see none of its keys do not change.
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
      multiply_each(product, num_groups, add);
      continue;
    }
    multiply(product, num_groups);
    for (int r = 0; r < rows.num_rows; ++r) {
      if (work.first_key[rows.first + r] >= tile.first_key + kKeyTile) continue;
      if (work.end_key[rows.first + r] <= tile.first_key) continue;
      for (int g = 0; g < num_groups; ++g) add(r, g, load(sums + r * kProductColumns + g * kLanes));
    }
  }
}

// Attention of up to 16 rows to a tile.
template <KVType type>
static void attend_paired_rows(const Work& work, const Operands& operands, const State& state, const TileWork& tile,
                               const RowRange& rows) {
  if (rows.begin >= rows.end) return;
  alignas(64) float factor[kTileRows], scores[kTileRows * kKeyTile];
  const int num_vectors = rows.num_vectors();
  const int64_t key_bytes = static_cast<int64_t>(operands.num_parts) * kTileBytes;
  multiply({operands.query + rows.first_row * kTileRowBytes, operands.part_bytes, operands.keys, key_bytes,
            operands.num_parts, rows.num_rows, scores},
           num_vectors);
  tile.ahead.prefetch_rows(kPrefetchedRows);
  alignas(64) uint16_t weights[kKeyParts][kTileRows][kTileBf16Inputs];
  const auto put = [&](int r, int v, F x) CHAIRLIFT_ALWAYS { store_bf16(weights[v / 2][r] + v % 2 * kLanes, x); };
  weigh_rows<type>(work, state, tile, rows, scores, factor, exp_to_bf16, put);
  if (num_vectors % 2)  // the last part of the inputs is read whole
    for (int r = 0; r < rows.num_rows; ++r) put(r, num_vectors, zero());
  tile.ahead.prefetch_rows(2 * kPrefetchedRows);
  add_outputs(work, operands, state, tile, rows, reinterpret_cast<const uint8_t*>(weights), factor);
  tile.ahead.prefetch_rows(kPrefetchedRows);
}

// Products by instructions that add a pair of inputs. The sum of the products of one tile of keys is added to the output by
// one fma.
struct PairInstructions {
  PairInstructions(const Work& work, float*& memory) : operands(lay_out_operands(work, false, 1, memory)) {}

  template <KVType type>
  void attend(const Work& work, const SplitRange& splits, const SplitRange* next) const {
    attend_splits<type>(work, splits, next, [&](const State& state, const TileWork& tile) {
      load_tiled_keys<type>(work, operands.num_parts, tile.tile, tile.ahead, operands.keys);
      load_tiled_values<type>(work, tile.tile, tile.ahead, 1, operands.values);
      for (int first = 0; first < work.rows_per_head; first += kTileRows) {
        const int left = work.rows_per_head - first;
        const RowRange rows = rows_from(work, tile, first, left < kTileRows ? left : kTileRows);
        attend_paired_rows<type>(work, operands, state, tile, rows);
      }
    });
  }

  Operands operands;
};

}  // namespace chairlift::CHAIRLIFT_ISA::attention
