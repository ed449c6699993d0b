// Compiled for instruction sets with tiles: products of weights with scales of groups, with many rows.
//
// Stripes are unpacked for some inputs at a time, in the first-level cache, and multiplied with all rows of a task. If the
// scales of groups are factors, a sum is that of a super-block. Otherwise it is that of a group, which is scaled and added by
// the operations of linear_grouped.inl. Both have the bits that a row has in a step with few rows, which has no tiles.
//
// Sums pass through memory from tiles to vectors. A load of a line that a tile was stored to shortly before waits for the
// store, which waits for the product, which waits for its operands. So other products are between the steps of one.
#pragma once

#include <utility>

#include "linear/linear_amx.inl"
#include "linear/linear_grouped.inl"

namespace chairlift::CHAIRLIFT_ISA {

constexpr int kMinGroupedRows = 64;  // without factors: 16 rows are not faster than with vectors in all formats (docs/adr/0033)
constexpr int kTileGroups = kTileRowBytes / kGroup;      // groups of a tile of inputs
constexpr int kPartTiles = kSuperBlock / kTileRowBytes;  // tiles of inputs that are unpacked at a time
constexpr int kLead = 8;                                 // a multiple of kTileGroups, for constant tile registers
static_assert(kTileGroups == 2);

// --- scales that are integers ---------------------------------------------------------------------------------------

// The weights of a super-block as multiples of its scale: products of factors and codes, of 16 bits, whose high and low bytes
// are two operands of signed bytes. The factors of minimums are pairs of words, of two groups.
constexpr int kMostPairs = kSuperBlock / 16 / 2;
struct alignas(64) SuperWeights {
  uint8_t planes[kTiledStripes][2][kPartTiles][kTileBytes];
  float scales[kTiledStripes][kStripe], minimums[kTiledStripes][kStripe];
  int32_t pairs[kTiledStripes][kMostPairs][kStripe];
};

// The products of both planes with the rows of a block.
struct alignas(64) PlaneSums {
  uint8_t bytes[2][kTiledBlockRows][kTileRowBytes];
};

// The words of two vectors whose lanes have 16 bits.
static CHAIRLIFT_INLINE I pair_words(I first, I second) {
  return ior(iand(first, iset1(0xffff)), shift_left(second, 16));
}

// Writes both planes of the quads of a group that has one factor.
template <WeightFormat kFormat, int kQuads>
static CHAIRLIFT_INLINE void unpack_quads(const PackedWeights<kFormat>& weights, int stripe, int64_t g, int first_quad,
                                          uint8_t* high, uint8_t* low) {
  constexpr int kCenter = group_format(kFormat).center();
  const int64_t group = kQuads == 4 ? 2 * g + first_quad / 4 : g;
  const I factor = weights.factors(stripe, group).scale, factors = pair_words(factor, factor);
  const I start = mul_words(factors, iset1(static_cast<int32_t>(static_cast<uint16_t>(-kCenter) * 0x10001u)));
  const I rounded = add_words(start, iset1(0x00800080)), even_bytes = iset1(0x00ff00ff);
#pragma GCC unroll 8
  for (int q = first_quad; q < first_quad + kQuads; ++q) {
    const I codes = weights.codes(stripe, g, q);
    const I even = mul_words(factors, iand(codes, even_bytes)), odd = mul_words(factors, shift_words_right(codes, 8));
    istore(low + q * kTileRowBytes, ior(iand(add_words(even, start), even_bytes), shift_words_left(add_words(odd, start), 8)));
    const I odd_high = shift_words_left(shift_words_right(add_words(odd, rounded), 8), 8);
    istore(high + q * kTileRowBytes, ior(shift_words_right(add_words(even, rounded), 8), odd_high));
  }
}

template <WeightFormat kFormat>
__attribute__((noinline)) static void unpack_super(const StripeTask& task, int64_t super, SuperWeights& to) {
  constexpr GroupFormat f = group_format(kFormat);
  const PackedWeights<kFormat> weights(task.stripe, task.stripe_bytes, task.padded_inputs);
  for (int s = 0; s < task.num_stripes; ++s) {
    for (int g = 0; g < kSuperGroups; ++g)
#pragma GCC unroll 2
      for (int quad = 0; quad < kGroup / 4; quad += f.group / 4)
        unpack_quads<kFormat, f.group / 4>(weights, s, super * kSuperGroups + g, quad,
                                           to.planes[s][0][0] + g * kGroup * kStripe,
                                           to.planes[s][1][0] + g * kGroup * kStripe);
    const GroupScale scale = weights.super_scale(s, super);
    store(to.scales[s], scale.scale);
    if (!f.has_minimum) continue;
    store(to.minimums[s], scale.minimum);
    constexpr int kGroups = kSuperBlock / f.group;
    for (int i = 0; i < kGroups; i += 2)
      istore(to.pairs[s][i / 2], pair_words(weights.factors(s, super * kGroups + i).minimum,
                                            weights.factors(s, super * kGroups + i + 1).minimum));
  }
}

// Minus the sums of the inputs of a super-block, in pairs of words of two groups.
struct alignas(64) SumPairs {
  int32_t words[kMostPairs][kTiledBlockRows];
};

template <int kPairs>
static void pair_sums(const int32_t* corrections, SumPairs& to) {
  for (int i = 0; i < kPairs; ++i, corrections += 2 * kTiledBlockRows)
    for (int m = 0; m < kTiledBlockRows; m += kLanes)
      istore(to.words[i] + m, pair_words(iload(corrections + m), iload(corrections + kTiledBlockRows + m)));
}

// A block and a stripe whose products have been stored, which are added to outputs during the products of the next ones.
struct StoredProducts {
  const PlaneSums* sums = nullptr;
  const SumPairs* pairs;
  const ActivationBlock* block;
  const float* start;  // of the rows
  int stripe, num_rows;
  uint8_t (*outputs)[kTileRowBytes];
};

// Adds the products of part `part` of kPartTiles of the rows. Weights: see scale_super; kPairs: of groups with minimums.
template <typename Weights, int kPairs>
static CHAIRLIFT_INLINE void add_stored(const StoredProducts& stored, const SuperWeights& weights, bool is_first, int part) {
  constexpr int kRows = kTiledBlockRows / kPartTiles;
  const int first = part * kRows;
  if (first >= stored.num_rows) return;
  const int s = stored.stripe;
  const GroupScale super = {load(weights.scales[s]), Weights::kHasMinimum ? load(weights.minimums[s]) : zero()};
  I factors[kPairs];
#pragma GCC unroll 8
  for (int i = 0; Weights::kHasMinimum && i < kPairs; ++i) factors[i] = iload(weights.pairs[s][i]);
#pragma GCC unroll 8
  for (int m = first; m < first + kRows; ++m) {
    const I total = iadd(shift_left(iload(stored.sums->bytes[0][m]), 8), iload(stored.sums->bytes[1][m]));
    I minimums = izero();
#pragma GCC unroll 8
    for (int i = 0; Weights::kHasMinimum && i < kPairs; ++i)
      minimums = dot_words(minimums, factors[i], iset1(stored.pairs->words[i][m]));
    auto* const y = reinterpret_cast<float*>(stored.outputs[m]);
    const F sum = scale_super<Weights>(total, to_float(minimums), super);
    store(y, fma(sum, scale_of_start(*stored.block, stored.start + m), is_first ? zero() : load(y)));
  }
}

// Multiplies a block with both planes of a stripe, and calls between(i) after each tile of inputs.
template <bool kBothHalves, typename Between>
static CHAIRLIFT_INLINE void multiply_planes(const uint8_t* x, const uint8_t (&planes)[2][kPartTiles][kTileBytes],
                                             PlaneSums& sums, const Between& between) {
  zero_sums<kBothHalves, true>();
#pragma GCC unroll 4
  for (int i = 0; i < kPartTiles; ++i) {
    Tiles::load<6>(planes[0][i]);
    Tiles::load<4>(x + i * kBlockTileBytes);
    if constexpr (kBothHalves) Tiles::load<5>(x + i * kBlockTileBytes + kTileBytes);
    Tiles::load<7>(planes[1][i]);
    Tiles::dot_s8s8<0, 4, 6>();
    if constexpr (kBothHalves) Tiles::dot_s8s8<1, 5, 6>();
    Tiles::dot_s8s8<2, 4, 7>();
    if constexpr (kBothHalves) Tiles::dot_s8s8<3, 5, 7>();
    between(i);
  }
  Tiles::store<0>(sums.bytes[0]);
  if constexpr (kBothHalves) Tiles::store<1>(sums.bytes[0][kTileRows]);
  Tiles::store<2>(sums.bytes[1]);
  if constexpr (kBothHalves) Tiles::store<3>(sums.bytes[1][kTileRows]);
}

// Adds the products of a super-block of inputs to `outputs`.
template <typename Weights>
static void multiply_super(const StripeTask& task, const SuperWeights& weights, int64_t super, Ahead& ahead,
                           TileSums* outputs) {
  constexpr int kPairs = kSuperBlock / Weights::kInputs / 2;
  PlaneSums sums[2];
  SumPairs pairs[2];
  StoredProducts stored;
  const auto add_part = [&](int part) CHAIRLIFT_ALWAYS {
    if (stored.sums) add_stored<Weights, kPairs>(stored, weights, super == 0, part);
  };
  int slot = 0;
  for (int b = 0; b < task.num_blocks; ++b) {
    const ActivationBlock& block = task.blocks[b];
    const int left = task.num_rows - b * kTiledBlockRows, num_rows = left < kTiledBlockRows ? left : kTiledBlockRows;
    const auto* const x = static_cast<const uint8_t*>(block.values) + super * kPartTiles * kBlockTileBytes;
    if (Weights::kHasMinimum)
      pair_sums<kPairs>(corrections<Weights>(block) + super * 2 * kPairs * kTiledBlockRows, pairs[b % 2]);
    for (int s = 0; s < task.num_stripes; ++s, slot ^= 1) {
      const auto between = [&](int i) CHAIRLIFT_ALWAYS {
        if (s == 0)
          for (int g = 0; g < kTileRowBytes / kGroup; ++g) ahead.prefetch_part();
        add_part(i);
      };
      if (num_rows > kTileRows) multiply_planes<true>(x, weights.planes[s], sums[slot], between);
      else multiply_planes<false>(x, weights.planes[s], sums[slot], between);
      stored = {&sums[slot], &pairs[b % 2], &block, block.start + super * kSuperGroups * kTiledBlockRows, s, num_rows,
                outputs[b].bytes[s]};
    }
  }
  for (int part = 0; part < kPartTiles; ++part) add_part(part);
}

// --- scales that are floats -----------------------------------------------------------------------------------------
//
// Operands are loaded kLead groups before their sum is scaled, multiplied one group later, and the sum is stored after another
// one.

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
      const float* start_of_rows = block.start + first_tile * kTileGroups * kTiledBlockRows + first;
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
          y[m] = add_scaled<kMinimum>(iadd(iload(of_rows[m]), broadcast4(start_of_rows + m)), of_group, start_of_rows[m],
                                      set1(kMinimum ? sum[m] : 0), y[m]);
        start_of_rows += kTiledBlockRows;
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

// --- kernels --------------------------------------------------------------------------------------------------------

// Writes the outputs.
static void finish_grouped(const StripeTask& task, const TileSums* outputs) {
  for (int row = 0; row < task.num_rows; ++row) {
    const int block = row / kTiledBlockRows, m = row % kTiledBlockRows;
    const F scale = set1(task.blocks[block].scale[m]);
    for (int s = 0; s < task.num_stripes; ++s)
      put(task, row, s * kStripe, mul(load(reinterpret_cast<const float*>(outputs[block].bytes[s][m])), scale));
  }
}

template <WeightFormat kFormat>
static void multiply_parts(const StripeTask& task, Ahead& ahead, TileSums* outputs) {
  const int64_t num_groups = task.padded_inputs / kGroup;
  WeightPart part;
  Tiles::configure(kGroup);
  for (int64_t first = 0, end; first < num_groups; first = end) {
    end = first + kSuperGroups < num_groups ? first + kSuperGroups : num_groups;
    unpack_part<kFormat>(task, first, end, part);
    multiply_part<group_format(kFormat).has_minimum>(task, part, first / kTileGroups, static_cast<int>(end - first), ahead,
                                                     outputs);
  }
}

template <WeightFormat kFormat>
static void multiply_supers(const StripeTask& task, Ahead& ahead, TileSums* outputs) {
  SuperWeights weights;
  Tiles::configure();
  for (int64_t super = 0; super < task.padded_inputs / kSuperBlock; ++super) {
    unpack_super<kFormat>(task, super, weights);
    multiply_super<PackedWeights<kFormat>>(task, weights, super, ahead, outputs);
  }
}

template <WeightFormat kFormat>
static void multiply_tiled_grouped(const StripeTask& task) {
  TileSums outputs[kMostSharingBlocks];
  Ahead ahead(task);
  if constexpr (PackedWeights<kFormat>::kHasFactors) multiply_supers<kFormat>(task, ahead, outputs);
  else multiply_parts<kFormat>(task, ahead, outputs);
  Tiles::release();
  finish_grouped(task, outputs);
}

// Whether products of few rows are those of this instruction set: all matrices of a layer divide rows and stripes in the same
// way, and the base of emulated tiles divides them in another one.
template <WeightFormat kFormat>
static constexpr bool has_own_vectors() {
#ifdef CHAIRLIFT_EMULATED_TILES
  return true;
#else
  return PackedWeights<kFormat>::kHasFactors;
#endif
}

template <WeightFormat kFormat>
static void set_tiled_kernel(LinearTiles& tiles) {
  if constexpr (is_grouped(kFormat)) {
    ProductKernel& kernel = tiles.of_many_rows[static_cast<int>(kFormat)];
    kernel = {kTiledBlockRows, kTiledStripes, ActivationLayout::byte_tiles, multiply_tiled_grouped<kFormat>};
    kernel.add_outliers = add_outliers<kFormat, kTiledStripes>;
    kernel.min_rows = PackedWeights<kFormat>::kHasFactors ? kMinManyRows : kMinGroupedRows;
    share_tiles(kernel);
    if constexpr (has_own_vectors<kFormat>()) tiles.products[static_cast<int>(kFormat)] = grouped_kernel<kFormat>();
  }
}

template <int... kFormats>
static void set_tiled_kernels(LinearTiles& tiles, std::integer_sequence<int, kFormats...>) {
  constexpr auto kInt8 = static_cast<int>(WeightFormat::int8), kBf16 = static_cast<int>(WeightFormat::bf16);
  (set_tiled_kernel<static_cast<WeightFormat>(kFormats)>(tiles), ...);
  tiles.shares_super_scales = kSharesSuperScales;
  tiles.of_many_rows[kInt8] = tiles.of_many_rows[kBf16] = {};  // those of the base would be preferred to tiles
  tiles.products[kInt8] = tiled_kernel(ActivationLayout::byte_tiles, multiply_tiled_int8);
  tiles.products[kBf16] = tiled_kernel(ActivationLayout::bf16_tiles, multiply_tiled_bf16);
}

}  // namespace chairlift::CHAIRLIFT_ISA
