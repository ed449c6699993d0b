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

template <int... g>
static inline void multiply_key_groups(const KeyProduct& p, std::integer_sequence<int, g...>) {
  (Tiles::zero<g>(), ...);
  for (int part = 0; part < p.num_parts; ++part) {
    Tiles::load<6>(p.queries + part * p.part_bytes, p.line_bytes);
    ((Tiles::load<4 + g % 2>(p.keys[g] + part * kTileRowBytes, p.row_bytes), Tiles::dot_bf16<g, 4 + g % 2, 6>()), ...);
  }
  (Tiles::store<g>(p.c + g * kTileRows * kTileRows), ...);
}

// Calls body(groups) with the constants from 0 to num_groups.
template <typename Body>
static CHAIRLIFT_INLINE void with_groups(int num_groups, const Body& body) {
  switch (num_groups) {
    case 1: return body(std::make_integer_sequence<int, 1>());
    case 2: return body(std::make_integer_sequence<int, 2>());
    case 3: return body(std::make_integer_sequence<int, 3>());
    default: return body(std::make_integer_sequence<int, kMaxGroups>());
  }
}

// Products in tile registers.
struct TileRegisters {
  static constexpr bool kReadsKeys = true;
  static void start() { Tiles::configure(); }
  static void end() { Tiles::release(); }
  static void multiply(const TileProduct& product, int num_groups) {
    with_groups(num_groups, [&](auto groups) CHAIRLIFT_ALWAYS { multiply_groups(product, groups); });
  }
  static void multiply_keys(const KeyProduct& product, int num_groups) {
    with_groups(num_groups, [&](auto groups) CHAIRLIFT_ALWAYS { multiply_key_groups(product, groups); });
  }
  template <typename Put>
  static void multiply_each(const TileProduct& p, int num_groups, const Put& put) {
    multiply(p, num_groups);
    for (int row = 0; row < p.num_rows; ++row)
      for (int group = 0; group < num_groups; ++group)
        put(row, group, load(p.c + row * kProductColumns + group * kTileRows));
  }
};

}  // namespace chairlift::CHAIRLIFT_ISA::attention
