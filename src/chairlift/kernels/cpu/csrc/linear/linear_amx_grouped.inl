// Compiled for instruction sets with tiles: products of grouped weights with many rows.
//
// Weights are unpacked once for all rows of a task. The sum of each group of inputs is a product of tiles whose operands
// have the inputs of one group. It is scaled and added by the operations of linear_grouped.inl, so a row has the bits that
// it has in a step with few rows, which has no tiles.
#pragma once

#include <utility>

#include "linear/linear_amx.inl"
#include "linear/linear_grouped.inl"

namespace chairlift::CHAIRLIFT_ISA {

// The sums of the groups of a tile of inputs: [groups][rows][16].
struct alignas(64) GroupSums {
  uint8_t bytes[kMaxGroups][kTileRows][kTileRowBytes];
};

// Computes the sums of the first `count` groups of a tile of inputs. Tile i has the sums of group i.
template <int kInputs, int... i>
static inline void sum_groups(const uint8_t* x, const uint8_t* codes, int64_t count, GroupSums& to,
                              std::integer_sequence<int, i...>) {
  const auto dot = [&](auto group) {
    constexpr int g = group;
    if (g >= count) return;
    Tiles::zero<g>();
    Tiles::load<6 + g % 2>(codes + g * kInputs * kStripe);
    Tiles::load<4 + g % 2>(x + g * kInputs);
    Tiles::dot_s8u8<g, 4 + g % 2, 6 + g % 2>();
  };
  (dot(std::integral_constant<int, i>{}), ...);
  ((i < count ? Tiles::store<i>(to.bytes[i]) : void()), ...);
}

// The product of a stripe and 16 rows of a block. While the sums of one tile of inputs are scaled, those of the next one are
// computed.
template <typename Weights>
static void multiply_grouped_half(const StripeTask& task, int b, int half, int s, Ahead& ahead) {
  constexpr int kInputs = Weights::kInputs, kGroups = kTileRowBytes / kInputs;
  const ActivationBlock& block = task.blocks[b];
  const Weights weights(task.stripe + s * task.stripe_bytes, task.stripe_bytes, task.padded_inputs, 0);
  const int64_t num_groups = task.padded_inputs / kInputs, num_tiles = (num_groups + kGroups - 1) / kGroups;
  const auto* const x = static_cast<const uint8_t*>(block.values) + half * kTileBytes;
  const int first = half * kTileRows;
  GroupSums sums[2];
  const auto sum_tile = [&](int64_t tile) {
    if (half == 0 && s == 0)
      for (int64_t i = 0; i < kTileRowBytes / kGroup; ++i) ahead.prefetch_part();
    sum_groups<kInputs>(x + tile * kBlockTileBytes, weights.stripe + tile * kTileRowBytes * kStripe,
                        num_groups - tile * kGroups, sums[tile % 2], std::make_integer_sequence<int, kGroups>());
  };
  Sums<kTileRows, 1> y;
#pragma GCC unroll 16
  for (int m = 0; m < kTileRows; ++m) y.of[0][m] = zero();
  sum_tile(0);
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    if (tile + 1 < num_tiles) sum_tile(tile + 1);
    for (int64_t group = tile * kGroups; group < (tile + 1) * kGroups && group < num_groups; ++group) {
      const GroupScale of_group = weights.scale(0, group);
      const int64_t at = group * kInputs / kGroup * kTiledBlockRows + first;
      const int32_t* const correction =
          kInputs == kGroup ? block.correction + at : block.half_correction + group * kTiledBlockRows + first;
      const auto* const sum = static_cast<const float*>(block.sum) + at;
#pragma GCC unroll 16
      for (int m = 0; m < kTileRows; ++m) {
        const I acc = iadd(iload(sums[tile % 2].bytes[group % kGroups][m]), start_of_group<Weights>(correction[m]));
        y.of[0][m] = add_scaled<Weights>(acc, of_group, block.scale[at + m], correction[m], sum[m], y.of[0][m]);
      }
    }
  }
  add_outliers<Weights, kTiledBlockRows>(block, weights, y, first);
  const int row = b * kTiledBlockRows + first;
#pragma GCC unroll 16
  for (int m = 0; m < kTileRows; ++m)
    if (row + m < task.num_rows) put(task, row + m, s * kStripe, y.of[0][m]);
}

template <typename Weights>
static void multiply_tiled_grouped(const StripeTask& task) {
  Ahead ahead(task);
  Tiles::configure(Weights::kInputs);
  for (int b = 0; b < task.num_blocks; ++b)
    for (int half = 0; half < 2 && b * kTiledBlockRows + half * kTileRows < task.num_rows; ++half)
      for (int s = 0; s < task.num_stripes; ++s) multiply_grouped_half<Weights>(task, b, half, s, ahead);
  Tiles::release();
}

template <WeightFormat kFormat>
static void set_tiled_kernel(LinearTiles& tiles) {
  if constexpr (is_grouped(kFormat)) {
    ProductKernel& kernel = tiles.of_many_rows[static_cast<int>(kFormat)];
    kernel = {kTiledBlockRows, kTiledStripes, ActivationLayout::byte_tiles, nullptr};
    share_tiles(kernel);
    kernel.unpack = unpack<kFormat>;
    kernel.multiply_unpacked = multiply_tiled_grouped<Unpacked<kFormat>>;
  }
}

template <int... kFormats>
static void set_tiled_kernels(LinearTiles& tiles, std::integer_sequence<int, kFormats...>) {
  for (ProductKernel& kernel : tiles.of_many_rows) kernel = {};  // those of the base would be preferred to tiles
  (set_tiled_kernel<static_cast<WeightFormat>(kFormats)>(tiles), ...);
  tiles.products[static_cast<int>(WeightFormat::int8)] = tiled_kernel(ActivationLayout::byte_tiles, multiply_tiled_int8);
  tiles.products[static_cast<int>(WeightFormat::bf16)] = tiled_kernel(ActivationLayout::bf16_tiles, multiply_tiled_bf16);
}

}  // namespace chairlift::CHAIRLIFT_ISA
