// Compiled for instruction sets with tiles: products of weights with groups of 32 inputs, with many rows.
//
// Stripes are unpacked for some inputs at a time, to signed codes and float scales in the first-level cache, and multiplied with
// all rows of a task. The sum of each group of inputs is a product of tiles whose operands have the inputs of one group. It is
// scaled and added by the operations of linear_grouped.inl, so a row has the bits that it has in a step with few rows, which
// has no tiles.
//
// Sums pass through memory from tiles to vectors. A load of a line that a tile was stored to shortly before waits for the
// store, which waits for the product, which waits for its operands. So other groups are between the steps of a group:
// operands are loaded kLead groups before their sum is scaled, multiplied one group later, and the sum is stored after
// another one.
#pragma once

#include <utility>

#include "linear/linear_amx.inl"
#include "linear/linear_grouped.inl"

namespace chairlift::CHAIRLIFT_ISA {

constexpr int kMinGroupedRows = 64;                  // 16 rows are not faster than with vectors in all formats (docs/adr/0033)
constexpr int kTileGroups = kTileRowBytes / kGroup;  // groups of a tile of inputs
constexpr int kPartTiles = 4;                        // tiles of inputs that are unpacked at a time
constexpr int kLead = 8;                             // a multiple of kTileGroups, for constant tile registers
static_assert(kTileGroups == 2);

// The weights of a part of the inputs. The center is subtracted from codes.
struct alignas(64) WeightPart {
  uint8_t codes[kTiledStripes][kPartTiles][kTileBytes];
  float scales[kTiledStripes][kPartTiles * kTileGroups][kStripe];
  float minimums[kTiledStripes][kPartTiles * kTileGroups][kStripe];
};

// The sums of groups between the store of a tile and its use.
struct alignas(64) GroupSums {
  uint8_t bytes[kLead][kTileRows][kTileRowBytes];
};

// The codes of groups after `unpack_part`.
template <bool kMinimum>
struct SignedGroups {
  static constexpr int kInputs = kGroup, kCenterBits = 0;
  static constexpr bool kHasMinimum = kMinimum;
};

// Unpacks the groups from `first` to `end`.
template <WeightFormat kFormat>
__attribute__((noinline)) static void unpack_part(const StripeTask& task, int64_t first, int64_t end, WeightPart& to) {
  constexpr GroupFormat f = group_format(kFormat);
  const PackedWeights<kFormat> weights(task.stripe, task.stripe_bytes, task.padded_inputs);
  for (int s = 0; s < task.num_stripes; ++s)
    for (int64_t g = first; g < end; ++g) {
      uint8_t* const codes = to.codes[s][0] + (g - first) * kGroup * kStripe;
#pragma GCC unroll 8
      for (int q = 0; q < kGroup / 4; ++q)
        istore(codes + q * kStripe * 4, isub_bytes(weights.codes(s, g, q), ibytes(static_cast<uint8_t>(f.center()))));
      const GroupScale found = weights.scale(s, g);
      store(to.scales[s][g - first], found.scale);
      if (f.has_minimum) store(to.minimums[s][g - first], found.minimum);
    }
}

// The order of the products of a part: halves of blocks, stripes, tiles of inputs. After the last one the first one follows.
struct TileOrder {
  TileOrder(const StripeTask& task, const WeightPart& part, int64_t first_tile, int num_tiles)
      : task(task), part(part), first_tile(first_tile), num_tiles(num_tiles) {
    begin_stripe();
  }

  void advance() {
    x += kBlockTileBytes;
    w += kTileBytes;
    if (++tile < num_tiles) return;
    tile = 0;
    if (++stripe == task.num_stripes) {
      stripe = 0;
      half = (half + 1) * kTileRows < task.num_rows ? half + 1 : 0;
    }
    begin_stripe();
  }

  void begin_stripe() {
    const auto* const values = static_cast<const uint8_t*>(task.blocks[half / 2].values);
    x = values + first_tile * kBlockTileBytes + half % 2 * kTileBytes;
    w = part.codes[stripe][0];
  }

  const StripeTask& task;
  const WeightPart& part;
  int64_t first_tile;
  int num_tiles, half = 0, stripe = 0, tile = 0;
  const uint8_t* x;
  const uint8_t* w;
};

// Loads the operands of group g of tile `next`, multiplies those of the group before, and stores the sums of the one before
// that. Tiles 0 and 1 are the sums of even and odd groups, 4 and 5 their activations, and 6 and 7 their weights.
template <int g>
static CHAIRLIFT_INLINE void start_group(const TileOrder& next, unsigned slot, GroupSums& sums) {
  constexpr int kBefore = 1 - g;
  Tiles::store<g>(sums.bytes[(slot + kLead - 2) % kLead]);
  Tiles::zero<kBefore>();
  Tiles::dot_s8s8<kBefore, 4 + kBefore, 6 + kBefore>();
  Tiles::load<6 + g>(next.w + g * kGroup * kStripe);
  Tiles::load<4 + g>(next.x + g * kGroup);
}

// Adds the products of a part of the inputs to `outputs`.
template <bool kMinimum>
static void multiply_part(const StripeTask& task, const WeightPart& part, int64_t first_tile, int num_groups, Ahead& ahead,
                          TileSums* outputs) {
  const int num_tiles = (num_groups + kTileGroups - 1) / kTileGroups;
  GroupSums sums;
  TileOrder next(task, part, first_tile, num_tiles);
  unsigned slot = 0;
  const auto start = [&](auto index) CHAIRLIFT_ALWAYS {
    start_group<index>(next, slot++, sums);
    if (index == kTileGroups - 1) next.advance();
  };
  const std::integral_constant<int, 0> even;
  const std::integral_constant<int, 1> odd;
  for (int tile = 0; tile < kLead / kTileGroups; ++tile) {
    start(even);
    start(odd);
  }
  for (int row = 0; row < task.num_rows; row += kTileRows) {
    const ActivationBlock& block = task.blocks[row / kTiledBlockRows];
    const int first = row % kTiledBlockRows;
    for (int s = 0; s < task.num_stripes; ++s) {
      const float* scale = block.scale + first_tile * kTileGroups * kTiledBlockRows + first;
      const float* sum = static_cast<const float*>(block.sum) + first_tile * kTileGroups * kTiledBlockRows + first;
      auto* const output = outputs[row / kTiledBlockRows].bytes[s] + first;
      F y[kTileRows];
#pragma GCC unroll 16
      for (int m = 0; m < kTileRows; ++m) y[m] = first_tile ? load(reinterpret_cast<const float*>(output[m])) : zero();
      const auto add_group = [&](int g, auto index) CHAIRLIFT_ALWAYS {
        const auto& of_rows = sums.bytes[slot % kLead];
        start(index);
        if (g >= num_groups) return;
        const GroupScale of_group = {load(part.scales[s][g]), kMinimum ? load(part.minimums[s][g]) : zero()};
#pragma GCC unroll 16
        for (int m = 0; m < kTileRows; ++m)
          y[m] = add_scaled<SignedGroups<kMinimum>>(iload(of_rows[m]), of_group, scale[m], 0, kMinimum ? sum[m] : 0, y[m]);
        scale += kTiledBlockRows;
        sum += kTiledBlockRows;
      };
      for (int g = 0; g < num_tiles * kTileGroups; g += kTileGroups) {
        if (first == 0 && s == 0)
          for (int i = 0; i < kTileGroups; ++i) ahead.prefetch_part();
        add_group(g, even);
        add_group(g + 1, odd);
      }
#pragma GCC unroll 16
      for (int m = 0; m < kTileRows; ++m) store(reinterpret_cast<float*>(output[m]), y[m]);
    }
  }
}

// Adds the products of outliers, and writes the outputs.
template <WeightFormat kFormat>
static void finish_grouped(const StripeTask& task, const TileSums* outputs) {
  for (int row = 0; row < task.num_rows; row += kTileRows) {
    const ActivationBlock& block = task.blocks[row / kTiledBlockRows];
    const int first = row % kTiledBlockRows;
    for (int s = 0; s < task.num_stripes; ++s) {
      const PackedWeights<kFormat> weights(task.stripe + s * task.stripe_bytes, task.stripe_bytes, task.padded_inputs);
      const auto* const output = outputs[row / kTiledBlockRows].bytes[s] + first;
      Sums<kTileRows, 1> y;
#pragma GCC unroll 16
      for (int m = 0; m < kTileRows; ++m) y.of[0][m] = load(reinterpret_cast<const float*>(output[m]));
      add_outliers<PackedWeights<kFormat>, kTiledBlockRows>(block, weights, y, first);
#pragma GCC unroll 16
      for (int m = 0; m < kTileRows; ++m)
        if (row + m < task.num_rows) put(task, row + m, s * kStripe, y.of[0][m]);
    }
  }
}

template <WeightFormat kFormat>
static void multiply_tiled_grouped(const StripeTask& task) {
  const int64_t num_groups = task.padded_inputs / kGroup;
  WeightPart part;
  TileSums outputs[kMostSharingBlocks];
  Ahead ahead(task);
  Tiles::configure(kGroup);
  for (int64_t first = 0, end; first < num_groups; first = end) {
    end = first + kPartTiles * kTileGroups < num_groups ? first + kPartTiles * kTileGroups : num_groups;
    unpack_part<kFormat>(task, first, end, part);
    multiply_part<group_format(kFormat).has_minimum>(task, part, first / kTileGroups, static_cast<int>(end - first), ahead,
                                                     outputs);
  }
  Tiles::release();
  finish_grouped<kFormat>(task, outputs);
}

// Groups of 16 inputs have no kernel, because their products are faster with vectors.
template <WeightFormat kFormat>
static void set_tiled_kernel(LinearTiles& tiles) {
  if constexpr (is_grouped(kFormat) && group_format(kFormat).group == kGroup) {
    ProductKernel& kernel = tiles.of_many_rows[static_cast<int>(kFormat)];
    kernel = {kTiledBlockRows, kTiledStripes, ActivationLayout::byte_tiles, multiply_tiled_grouped<kFormat>};
    kernel.min_rows = kMinGroupedRows;
    share_tiles(kernel);
  }
}

template <int... kFormats>
static void set_tiled_kernels(LinearTiles& tiles, std::integer_sequence<int, kFormats...>) {
  constexpr auto kInt8 = static_cast<int>(WeightFormat::int8), kBf16 = static_cast<int>(WeightFormat::bf16);
  (set_tiled_kernel<static_cast<WeightFormat>(kFormats)>(tiles), ...);
  tiles.of_many_rows[kInt8] = tiles.of_many_rows[kBf16] = {};  // those of the base would be preferred to tiles
  tiles.products[kInt8] = tiled_kernel(ActivationLayout::byte_tiles, multiply_tiled_int8);
  tiles.products[kBf16] = tiled_kernel(ActivationLayout::bf16_tiles, multiply_tiled_bf16);
}

}  // namespace chairlift::CHAIRLIFT_ISA
