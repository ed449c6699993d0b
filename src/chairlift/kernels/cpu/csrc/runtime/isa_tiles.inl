// Compiled for instruction sets with tiles, see isa_amx*.cpp: the table of CHAIRLIFT_BASE, with other products.
#pragma once

#include "attention/attention_amx.inl"
#include "linear/linear_amx_grouped.inl"
#include "runtime/isa_table.h"
#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA {

#ifndef CHAIRLIFT_EMULATED_TILES
constexpr int64_t kTilePeriod = 16;  // rounds for each four products of tiles, so that they take about as long as others

template <bool kIsBf16>
static int32_t tile_rounds(int64_t rounds) {
  alignas(64) uint8_t sums[kTileBytes] = {};
  Tiles::configure();
  zero_sums<true, true>();
  Tiles::load<4>(sums);
  Tiles::load<5>(sums);
  Tiles::load<6>(sums);
  Tiles::load<7>(sums);
  for (int64_t round = 0; round < rounds; round += kTilePeriod) {
    dot_tiles<kIsBf16, 0, 4, 6>();
    dot_tiles<kIsBf16, 1, 5, 6>();
    dot_tiles<kIsBf16, 2, 4, 7>();
    dot_tiles<kIsBf16, 3, 5, 7>();
  }
  Tiles::store<0>(sums);
  Tiles::release();
  return sums[0];
}
#endif

static IsaTable with_tiles(IsaTable table) {
  table.name = CHAIRLIFT_ISA_NAME;
  set_tiled_kernels(table.linear, std::make_integer_sequence<int, kNumWeightFormats>());
  table.attention.prepare = attention::prepare_tiled;
  table.attention.attend = attention::attend_tiled<attention::TileRegisters>;
#ifndef CHAIRLIFT_EMULATED_TILES
  constexpr int64_t kTile = 4 * 16 * 16 * 64 * 2 / kTilePeriod;
  table.ceilings.products[3] = {"tile_s8", kTile, tile_rounds<false>};
  table.ceilings.products[4] = {"tile_bf16", kTile / 2, tile_rounds<true>};
#endif
  return table;
}

const IsaTable& table() {
  static const IsaTable table = with_tiles(CHAIRLIFT_BASE);
  return table;
}

}  // namespace chairlift::CHAIRLIFT_ISA
