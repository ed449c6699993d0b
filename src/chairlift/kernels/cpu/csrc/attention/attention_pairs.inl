// Compiled for AVX-512 BF16: the products of attention, with all pairs of inputs in one chain in ascending order.
#pragma once

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

// Products by instructions that add a pair of inputs.
struct PairInstructions {
  static constexpr bool kReadsKeys = false;
  static void start() {}
  static void end() {}
  static void multiply(const TileProduct& p, int num_groups) {
    multiply_each(p, num_groups, [&](int row, int group, F sums) CHAIRLIFT_ALWAYS {
      store(p.c + row * kProductColumns + group * kTileRows, sums);
    });
  }
  template <typename Put>
  static void multiply_each(const TileProduct& p, int num_groups, const Put& put) {
    switch (num_groups) {
      case 1: return multiply_groups<1>(p, put);
      case 2: return multiply_groups<2>(p, put);
      case 3: return multiply_groups<3>(p, put);
      default: return multiply_groups<kMaxGroups>(p, put);
    }
  }
};

}  // namespace chairlift::CHAIRLIFT_ISA::attention
