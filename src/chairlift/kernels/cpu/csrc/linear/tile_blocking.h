// The blocks of rows that share weights in products with tiles, by the sizes of the caches.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd/tile_products.h"

namespace chairlift {

constexpr int kTiledBlockRows = 2 * kTileRows;  // rows of a block of activations
constexpr int kTiledStripes = 2;                // stripes that are multiplied at once
constexpr int64_t kBlockTileBytes = kTiledBlockRows * kTileRowBytes;  // of a block, for a tile of inputs
constexpr int kLeastSharingBlocks = 4;  // if fewer have their rows in the cache, kMostSharingBlocks share weights
constexpr int kMostSharingBlocks = 8;

// The number of blocks of rows that are multiplied with two stripes, whose weights remain in the caches meanwhile: as many as
// have their rows in half of the second-level cache, or if that is fewer than kLeastSharingBlocks, eight. Of 4, 8 and 16 blocks
// these took the least time on a CPU with caches of 2 MiB, except that 16 took as long as 8 beyond the cache.
//
// block_bytes: of the values of a block.
inline int64_t tile_blocks(int64_t block_bytes, int64_t second_level_cache) {
  const int64_t resident = second_level_cache / 2 / block_bytes;
  return resident < kLeastSharingBlocks ? kMostSharingBlocks : std::min<int64_t>(resident, kMostSharingBlocks);
}

}  // namespace chairlift
