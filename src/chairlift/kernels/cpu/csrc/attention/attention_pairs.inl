// Compiled for AVX-512 BF16: the products of attention, with all pairs of inputs in one chain in ascending order.
#pragma once

#include "linear/linear_bf16.inl"
#include "simd/simd.h"
#include "simd/tile_products.h"

namespace chairlift::CHAIRLIFT_ISA::attention {

constexpr int kRowsAtOnce = 4;

// Rows `row` to `row` + kRows.
template <int kRows, int kGroups>
static inline void multiply_rows(const TileProduct& p, int row) {
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
    for (int g = 0; g < kGroups; ++g) store(p.c + (row + r) * kProductColumns + g * kTileRows, c[r][g]);
}

template <int kGroups>
static inline void multiply_groups(const TileProduct& p) {
  int row = 0;
  for (; row + kRowsAtOnce <= p.num_rows; row += kRowsAtOnce) multiply_rows<kRowsAtOnce, kGroups>(p, row);
  switch (p.num_rows - row) {
    case 1: return multiply_rows<1, kGroups>(p, row);
    case 2: return multiply_rows<2, kGroups>(p, row);
    case 3: return multiply_rows<3, kGroups>(p, row);
    default: return;
  }
}

// Products by instructions that add a pair of inputs.
struct PairInstructions {
  static void start() {}
  static void end() {}
  static void multiply(const TileProduct& product, int num_groups);
};

inline void PairInstructions::multiply(const TileProduct& product, int num_groups) {
  switch (num_groups) {
    case 1: return multiply_groups<1>(product);
    case 2: return multiply_groups<2>(product);
    case 3: return multiply_groups<3>(product);
    default: return multiply_groups<kMaxGroups>(product);
  }
}

}  // namespace chairlift::CHAIRLIFT_ISA::attention
