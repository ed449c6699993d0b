// The blocks of rows that share weights in products with tiles, by the sizes of the caches.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd/tile_products.h"

namespace chairlift {

constexpr int kTiledBlockRows = 2 * kTileRows;  // rows of a block of activations
constexpr int kTiledStripes = 2;                // stripes that are multiplied at once
constexpr int64_t kBlockTileBytes = kTiledBlockRows * kTileRowBytes;  // of a block, for a tile of inputs
constexpr int kLeastSharingBlocks = 4;  // if fewer have their rows in the cache, they have a part of their inputs there
constexpr int kMostSharingBlocks = 8;

// The number of blocks of rows that are multiplied with two stripes, whose weights remain in the caches meanwhile: as many as
// have their rows in half of the second-level cache, at least kLeastSharingBlocks. Of 4, 8 and 16 blocks these took the least
// time on a CPU with caches of 2 MiB.
//
// block_bytes: of the values of a block.
inline int64_t tile_blocks(int64_t block_bytes, int64_t second_level_cache) {
  return std::clamp<int64_t>(second_level_cache / 2 / block_bytes, kLeastSharingBlocks, kMostSharingBlocks);
}

// The tiles of inputs that are multiplied at a time, so that all blocks, or kLeastSharingBlocks of them, have them in half of the
// cache. More than one part took less time for 512 rows of bfloat16 with 8,192 inputs (docs/experiments.md).
inline int64_t tiles_at_once(int64_t block_bytes, int64_t num_blocks, int64_t second_level_cache) {
  const int64_t tiles = block_bytes / kBlockTileBytes, sharing = std::min<int64_t>(num_blocks, kLeastSharingBlocks);
  const int64_t most = std::max<int64_t>(second_level_cache / 2 / (sharing * kBlockTileBytes), 1);
  const int64_t parts = (tiles + most - 1) / most;
  return (tiles + parts - 1) / parts;
}

}  // namespace chairlift
