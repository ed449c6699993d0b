// Products in registers: scores are queries times keys, and outputs are weights times values.
#pragma once

#include "attention/attention_walk.inl"
#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA::attention {

// Lays out the operands of products in registers.
static inline void lay_out_products(Work& work, float* memory) {
  work.query = take(memory, static_cast<int64_t>(work.num_rows) * work.stride);
  if (work.rows_per_head > kBlockRows || work.shape.head_dim % (kBlockVectors * kLanes) != 0) {
    work.keys = take(memory, static_cast<int64_t>(work.shape.head_dim) * kKeyTile);
    work.values = take(memory, static_cast<int64_t>(kKeyTile) * work.stride);
  }
}

// c[row][column] = factor[row] * c[row][column] + the sum over k, ascending, of a[row][k] * b[k][column], one fma each;
// without factors c starts at zero. b is an argument of the product.
struct Product {
  const float* a;
  int64_t a_stride;
  int first_k, end_k;
  float* c;
  int64_t c_stride;
  const float* factor;
};

// b in scratch memory.
struct Scratch {
  const float* b;
  int64_t stride;
  F at(int k, int column) const { return load(b + k * stride + column); }
  CHAIRLIFT_INLINE void prefetch_row(int) const {}
};

// b is the values in KV memory.
template <KVType type>
struct Values {
  const Tile& tile;
  Ahead& ahead;
  F at(int k, int column) const { return load_values<type>(tile.value(k), column); }
  CHAIRLIFT_INLINE void prefetch_row(int column) const {
    if (column == 0) ahead.prefetch_rows(1);
  }
};

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
    for (int v = 0; v < kVectors; ++v) hold(b[v] = b_at.at(k, column + v * kLanes));  // loads are the bottleneck
    b_at.prefetch_row(column);
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

// Multiplies words `word` and following of kGroups * kLanes keys with kRows queries, and adds to the scores so far.
template <KVType type, int kRows, int kGroups, bool whole>
static void multiply_words(const Work& work, const float* query, const Tile& tile, Ahead& ahead, int num_ahead,
                           int first_key, int word, float* scores) {
  constexpr int kParts = values_per_word(type);
  const int num_words = work.shape.head_dim / kParts;
  Words m[kGroups][kWords];
  F c[kGroups][kRows];
#pragma GCC unroll 2
  for (int g = 0; g < kGroups; ++g) {
    const int key = first_key + g * kLanes;
    ahead.prefetch_rows(num_ahead);
    load_words<whole>(tile, key, word, num_words, m[g]);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) c[g][r] = word ? load(scores + r * kKeyTile + key) : zero();
  }
  const float* a = query + static_cast<int64_t>(word) * kParts;
#pragma GCC unroll 8
  for (int i = 0; i < kWords; ++i) {
    if (!whole && word + i == num_words) break;
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      F b[kGroups];
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; ++g) b[g] = unpack<type>(m[g][i], part);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const F x = set1(a[r * work.stride + i * kParts + part]);
#pragma GCC unroll 2
        for (int g = 0; g < kGroups; ++g) c[g][r] = fma(x, b[g], c[g][r]);
      }
    }
  }
#pragma GCC unroll 2
  for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) store(scores + r * kKeyTile + first_key + g * kLanes, c[g][r]);
  }
}

// Computes scores [kRows][kKeyTile] from the keys in KV memory. Two groups of keys at once hide the latency of fma, which
// one chain per row would not.
template <KVType type, int kRows>
static void score(const Work& work, const float* query, const Tile& tile, Ahead& ahead, float* scores) {
  constexpr int kGroups = kLanes == 16 && kRows <= 4 ? 2 : 1, kKeys = kGroups * kLanes;
  const int num_words = work.shape.head_dim / values_per_word(type), end = tile.rows->end;
  const int num_ahead = rows_per_load(num_words);
  for (int key = tile.rows->begin / kKeys * kKeys; key < end; key += kKeys) {
    int word = 0;
    for (; word + kWords <= num_words; word += kWords)
      multiply_words<type, kRows, kGroups, true>(work, query, tile, ahead, num_ahead, key, word, scores);
    if (word < num_words)
      multiply_words<type, kRows, kGroups, false>(work, query, tile, ahead, num_ahead, key, word, scores);
  }
}

}  // namespace chairlift::CHAIRLIFT_ISA::attention
