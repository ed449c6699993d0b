// Compiled for instruction sets with tiles: the products of attention.
#pragma once

#include <utility>

#include "simd/simd.h"
#include "simd/tiles.h"

namespace chairlift::CHAIRLIFT_ISA::attention {

template <int... g>
static inline void multiply_groups(const TileProduct& p, std::integer_sequence<int, g...>) {
  (Tiles::zero<g>(), ...);
  for (int part = 0; part < p.num_parts; ++part) {
    Tiles::load<4>(p.a + part * p.a_bytes);
    ((Tiles::load<5 + g % 3>(p.b + g * p.b_bytes + part * kTileBytes), Tiles::dot_bf16<g, 4, 5 + g % 3>()), ...);
  }
  (Tiles::store<g>(p.c + g * kTileRows, kProductColumns * sizeof(float)), ...);
}

// Products in tile registers.
struct TileRegisters {
  static void start() { Tiles::configure(); }
  static void end() { Tiles::release(); }
  static void multiply(const TileProduct& product, int num_groups);
  template <typename Put>
  static void multiply_each(const TileProduct& p, int num_groups, const Put& put) {
    multiply(p, num_groups);
    for (int row = 0; row < p.num_rows; ++row)
      for (int group = 0; group < num_groups; ++group)
        put(row, group, load(p.c + row * kProductColumns + group * kTileRows));
  }
};

inline void TileRegisters::multiply(const TileProduct& product, int num_groups) {
  switch (num_groups) {
    case 1: return multiply_groups(product, std::make_integer_sequence<int, 1>());
    case 2: return multiply_groups(product, std::make_integer_sequence<int, 2>());
    case 3: return multiply_groups(product, std::make_integer_sequence<int, 3>());
    default: return multiply_groups(product, std::make_integer_sequence<int, kMaxGroups>());
  }
}

}  // namespace chairlift::CHAIRLIFT_ISA::attention
