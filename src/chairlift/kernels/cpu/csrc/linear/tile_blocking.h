// The order of the loops of products with tiles, by the sizes of the caches.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear/linear_tiles.h"
#include "runtime/caches.h"
#include "simd/tile_products.h"

namespace chairlift {

constexpr int kTiledBlockRows = 2 * kTileRows;  // rows of a block of activations
constexpr int kTiledStripes = 2;                // stripes that are multiplied at once
constexpr int64_t kBlockTileBytes = kTiledBlockRows * kTileRowBytes;                  // of a block, for a tile of inputs
constexpr int64_t kBlockSumBytes = kTiledStripes * kTiledBlockRows * kTileRowBytes;  // of the sums of a block
constexpr int kLeastSharingBlocks = 4;  // fewer blocks do not share the weights of a part of the inputs

// Two stripes are multiplied with `row_blocks` blocks of rows, `input_tiles` tiles of inputs at a time. The sums of a
// block are kept in memory between them.
struct TileBlocking {
  int64_t input_tiles, row_blocks;
};

// The best order of loops that was measured on one CPU (docs/adr/0033), expressed by the sizes of its caches (48 KiB
// and 2 MiB). `num_tiles`: the tiles of inputs of a row.
//
//   Weights of a third of the first-level cache are used by as many blocks as have their sums in two thirds of it, if the
//   rows of these blocks fit into half of the second-level cache.
//   Otherwise all inputs of four or more blocks that fit there are added at once.
//   Otherwise rows are read from beyond it, so that weights in the first-level cache are used by twice as many blocks.
inline TileBlocking tile_blocking(int64_t num_tiles, const CacheSizes& caches) {
  const auto at_most = [](int64_t blocks) { return std::clamp<int64_t>(blocks, 1, kMaxBlocks); };
  const int64_t tiles = std::clamp<int64_t>(caches.first / 3 / (kTiledStripes * kTileBytes), 1, num_tiles);
  const int64_t sums = at_most(caches.first * 2 / 3 / kBlockSumBytes);
  const int64_t resident = caches.second / 2 / (num_tiles * kBlockTileBytes);
  if (resident >= sums) return {tiles, sums};
  if (resident >= kLeastSharingBlocks) return {num_tiles, at_most(resident)};
  return {tiles, at_most(2 * sums)};
}

}  // namespace chairlift
