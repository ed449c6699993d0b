// Compiled for instruction sets with tiles: products of blocks of 32 rows, which are two tiles, and two stripes.
//
// A stripe of int8 or bfloat16 weights is a sequence of tiles, and so are the activations. Rows are independent of each
// other, and their inputs are added in ascending order, so a row has the same bits in any batch. int8 sums are exact and
// converted as in linear_products.inl.
#pragma once

#include <type_traits>

#include "linear/linear_products.inl"
#include "linear/outlier_channels.h"
#include "linear/tile_blocking.h"
#include "runtime/caches.h"
#include "simd/simd.h"
#include "simd/tiles.h"

namespace chairlift::CHAIRLIFT_ISA {

static_assert(kLanes == kTileRows, "a vector is a line of sums");
constexpr int kMinTiledRows = 4;  // fewer rows of int8 are multiplied by vectors (docs/experiments.md)

// The sums of a block.
struct alignas(64) TileSums {
  uint8_t bytes[kTiledStripes][kTiledBlockRows][kTileRowBytes];
};

// Tiles 0 to 3 are the sums of (stripe, half of the rows) in the order (0, 0), (0, 1), (1, 0), (1, 1); 4 and 5 are the
// activations of both halves, 6 and 7 the weights of both stripes.
template <bool kBothHalves, bool kBothStripes>
static inline void zero_sums() {
  Tiles::zero<0>();
  if (kBothHalves) Tiles::zero<1>();
  if (kBothStripes) Tiles::zero<2>();
  if (kBothHalves && kBothStripes) Tiles::zero<3>();
}

template <bool kBothHalves, bool kBothStripes>
static inline void store_sums(TileSums& sums) {
  Tiles::store<0>(sums.bytes[0]);
  if (kBothHalves) Tiles::store<1>(sums.bytes[0][kTileRows]);
  if (kBothStripes) Tiles::store<2>(sums.bytes[1]);
  if (kBothHalves && kBothStripes) Tiles::store<3>(sums.bytes[1][kTileRows]);
}

template <bool kIsBf16, int kC, int kA, int kB>
static inline void dot_tiles() {
  if constexpr (kIsBf16) Tiles::dot_bf16<kC, kA, kB>();
  else Tiles::dot_s8u8<kC, kA, kB>();
}

// Prefetches the outputs of a block while it is multiplied: a store to a line beyond the caches would hold up those that follow.
struct OutputsAhead {
  OutputsAhead(const StripeTask& task, int first, int num_rows, int64_t num_tiles)
      : at(task.out + first * task.out_stride),
        stride(task.out_stride),
        left(num_rows),
        step(static_cast<int>((num_rows + num_tiles - 1) / num_tiles)) {}

  CHAIRLIFT_INLINE void prefetch_part() {
    for (int i = 0; i < step && left > 0; ++i, --left, at += stride) {
      __builtin_prefetch(at, 1);
      __builtin_prefetch(at + kStripe, 1);
    }
  }

  const float* at;
  int64_t stride;
  int left, step;
};

// Prefetches half a tile to the first-level cache.
static CHAIRLIFT_INLINE void prefetch_half_tile(const uint8_t* p) {
#pragma GCC unroll 8
  for (int i = 0; i < kTileBytes / 2; i += kTileRowBytes) __builtin_prefetch(p + i);
}

// Adds the products of one tile of inputs. Meanwhile the rows and weights of the tile after the next one are prefetched.
template <bool kIsBf16, bool kBothHalves, bool kBothStripes>
static inline void add_tile(const uint8_t* x, const uint8_t* first, const uint8_t* second) {
  constexpr int64_t kAhead = 2;
  const auto prefetch_part = [&](int part) CHAIRLIFT_ALWAYS {
    if (kBothHalves || part < 2) prefetch_half_tile(x + kAhead * kBlockTileBytes + part * kTileBytes / 2);
    if (kBothStripes || part < 2)
      prefetch_half_tile((part < 2 ? first : second) + kAhead * kTileBytes + part % 2 * kTileBytes / 2);
  };
  Tiles::load<6>(first);
  Tiles::load<4>(x);
  if constexpr (kBothHalves) Tiles::load<5>(x + kTileBytes);
  if constexpr (kBothStripes) Tiles::load<7>(second);
  dot_tiles<kIsBf16, 0, 4, 6>();
  prefetch_part(0);
  if constexpr (kBothHalves) dot_tiles<kIsBf16, 1, 5, 6>();
  prefetch_part(1);
  if constexpr (kBothStripes) dot_tiles<kIsBf16, 2, 4, 7>();
  prefetch_part(2);
  if constexpr (kBothHalves && kBothStripes) dot_tiles<kIsBf16, 3, 5, 7>();
  prefetch_part(3);
}

template <bool kBothHalves, bool kBothStripes>
static inline void load_sums(const TileSums& sums) {
  Tiles::load<0>(sums.bytes[0]);
  if (kBothHalves) Tiles::load<1>(sums.bytes[0][kTileRows]);
  if (kBothStripes) Tiles::load<2>(sums.bytes[1]);
  if (kBothHalves && kBothStripes) Tiles::load<3>(sums.bytes[1][kTileRows]);
}

// Computes the sums of all blocks, and calls finish(block, sums, first_row, num_rows) for each of which the last inputs have
// been added. Values behind the last input are zero, so that the weights there may be anything.
template <bool kIsBf16, bool kBothStripes, typename Finish>
static inline void sum_blocks(const StripeTask& task, const Finish& finish) {
  constexpr int64_t kInputs = kTileRowBytes / (kIsBf16 ? 2 : 1);
  const int64_t num_tiles = (task.padded_inputs + kInputs - 1) / kInputs;
  const int64_t first_tile = task.first_tile, end_tile = task.sums ? task.end_tile : num_tiles;
  TileSums own;
  Ahead ahead(task);
  for (int b = 0; b < task.num_blocks; ++b) {
    const int left = task.num_rows - b * kTiledBlockRows, num_rows = left < kTiledBlockRows ? left : kTiledBlockRows;
    const auto* const x = static_cast<const uint8_t*>(task.blocks[b].values);
    TileSums& sums = task.sums ? reinterpret_cast<TileSums*>(task.sums)[b] : own;
    const auto add_tiles = [&](auto both_halves) {
      OutputsAhead outputs(task, b * kTiledBlockRows, num_rows, end_tile - first_tile);
      if (first_tile == 0) zero_sums<both_halves, kBothStripes>();
      else load_sums<both_halves, kBothStripes>(sums);
      for (int64_t i = first_tile; i < end_tile; ++i) {
        for (int groups = kIsBf16 ? 1 : 2; groups; --groups) ahead.prefetch_part();
        outputs.prefetch_part();
        const uint8_t* const w = task.stripe + i * kTileBytes;
        add_tile<kIsBf16, both_halves, kBothStripes>(x + i * kBlockTileBytes, w, w + task.stripe_bytes);
      }
      store_sums<both_halves, kBothStripes>(sums);
    };
    if (num_rows > kTileRows) add_tiles(std::true_type{});
    else add_tiles(std::false_type{});
    if (end_tile == num_tiles) finish(task.blocks[b], sums, b * kTiledBlockRows, num_rows);
  }
}

// --- bfloat16 -------------------------------------------------------------------------------------------------------

template <int kStripes>
static void put_sums(const StripeTask& task, const TileSums& sums, int first, int num_rows) {
  for (int m = 0; m < num_rows; ++m)
    for (int s = 0; s < kStripes; ++s)
      put(task, first + m, s * kStripe, load(reinterpret_cast<const float*>(sums.bytes[s][m])));
}

template <int kStripes>
static void multiply_bf16_tiles(const StripeTask& task) {
  sum_blocks<true, kStripes == 2>(task, [&](const ActivationBlock&, const TileSums& sums, int first, int num_rows) {
    put_sums<kStripes>(task, sums, first, num_rows);
  });
}

// --- int8 -----------------------------------------------------------------------------------------------------------

// The weights of the inputs that are outliers in many rows, as a tile of each stripe.
struct alignas(64) OutlierWeights {
  uint8_t tiles[kTiledStripes][kTileBytes];
};

static void gather_outlier_weights(const StripeTask& task, OutlierWeights& to) {
  const int count = *task.blocks->num_outliers;
  const int32_t* const inputs = task.blocks->outliers;
  for (int s = 0; s < task.num_stripes; ++s)
    for (int i = 0; i < OutlierChannels::kMost; i += 4) {
      I four = izero();
      for (int j = 0; j < 4 && i + j < count; ++j) {
        const uint8_t* const quad = task.stripe + s * task.stripe_bytes + inputs[i + j] / 4 * (kStripe * 4);
        four = ior(four, shift_left(bits_at(iload(quad), inputs[i + j] % 4 * 8, 255), 8 * j));
      }
      istore(to.tiles[s] + i / 4 * kTileRowBytes, four);
    }
}

// Converts the sums of the rows of a block. `dense`: the sums of their outliers at chosen inputs, or null. kIsWhole: whether
// all columns are stored as they are.
template <int kStripes, bool kIsWhole>
static inline void finish_int8_rows(const StripeTask& task, const ActivationBlock& block, const TileSums& sums,
                                    const TileSums* dense, int first, int num_rows) {
  const int64_t list_ints = outlier_list_ints(task.padded_inputs);
  F scales[kStripes];
  for (int s = 0; s < kStripes; ++s)
    scales[s] = load(reinterpret_cast<const float*>(task.stripe + s * task.stripe_bytes + task.padded_inputs * kStripe));
  for (int m = 0; m < num_rows; ++m) {
    const bool has_list = block.outlier_lists[m * list_ints] != 0;
    I multiples[kStripes];
    if (has_list) sum_outliers(task, block, task.stripe, m, multiples);
    else for (int s = 0; s < kStripes; ++s) multiples[s] = iset1(static_cast<const int32_t*>(block.sum)[m]);
#pragma GCC unroll 2
    for (int s = 0; s < kStripes; ++s) {
      if (dense) multiples[s] = iadd(multiples[s], iload(dense->bytes[s][m]));
      const I rest = iadd(iload(sums.bytes[s][m]), iset1(block.correction[m]));
      const F y = mul(scale_sum(multiples[s], rest, block.scale[m]), scales[s]);
      if (kIsWhole) store(task.out + (first + m) * task.out_stride + s * kStripe, y);
      else put(task, first + m, s * kStripe, y);
    }
  }
}

template <int kStripes>
static inline void finish_int8(const StripeTask& task, const ActivationBlock& block, const TileSums& sums,
                               const TileSums* dense, int first, int num_rows) {
  const bool is_whole = !task.add && !task.bias && task.num_columns >= kStripes * kStripe;
  if (is_whole) finish_int8_rows<kStripes, true>(task, block, sums, dense, first, num_rows);
  else finish_int8_rows<kStripes, false>(task, block, sums, dense, first, num_rows);
}

template <int kStripes>
static void multiply_int8_tiles(const StripeTask& task) {
  constexpr bool kBothStripes = kStripes == 2;
  OutlierWeights weights;
  const bool has_dense = *task.blocks->num_outliers != 0;
  if (has_dense) gather_outlier_weights(task, weights);
  sum_blocks<false, kBothStripes>(
      task, [&](const ActivationBlock& block, const TileSums& sums, int first, int num_rows) {
        TileSums dense;
        if (has_dense) {
          zero_sums<true, kBothStripes>();
          add_tile<false, true, kBothStripes>(static_cast<const uint8_t*>(block.outlier_values), weights.tiles[0],
                                              weights.tiles[1]);
          store_sums<true, kBothStripes>(dense);
        }
        finish_int8<kStripes>(task, block, sums, has_dense ? &dense : nullptr, first, num_rows);
      });
}

// The places of activations in the layout `byte_tiles`.
struct Tiled {
  static constexpr int64_t kRow = kTileRowBytes, kQuad = 4;
};

// The product of fewer than kMinTiledRows rows, without chosen inputs.
template <int kRows, int kStripes>
static void multiply_few_int8(const StripeTask& task) {
  const auto* const x = static_cast<const int8_t*>(task.blocks->values);
  Ahead ahead(task);
  TileSums sums;
  I acc[kStripes][kRows];
  for (int s = 0; s < kStripes; ++s)
    for (int m = 0; m < kRows; ++m) acc[s][m] = izero();
  for (int64_t k = 0; k < task.padded_inputs; k += kGroup) {
    ahead.prefetch_part();
    dot_bytes<Tiled>(task, task.stripe + k * kStripe, x + k / kTileRowBytes * kBlockTileBytes + k % kTileRowBytes, acc);
  }
  for (int s = 0; s < kStripes; ++s)
    for (int m = 0; m < kRows; ++m) istore(sums.bytes[s][m], acc[s][m]);
  finish_int8<kStripes>(task, *task.blocks, sums, nullptr, 0, kRows);
}

template <int kStripes>
static void multiply_int8_rows(const StripeTask& task) {
  static_assert(kMinTiledRows == 4);
  switch (task.sums || *task.blocks->num_outliers ? kMinTiledRows : task.num_rows) {
    case 1: return multiply_few_int8<1, kStripes>(task);
    case 2: return multiply_few_int8<2, kStripes>(task);
    case 3: return multiply_few_int8<3, kStripes>(task);
    default: return multiply_int8_tiles<kStripes>(task);
  }
}

// --- kernels --------------------------------------------------------------------------------------------------------

static void multiply_tiled_int8(const StripeTask& task) {
  task.num_stripes == 1 ? multiply_int8_rows<1>(task) : multiply_int8_rows<kTiledStripes>(task);
}

static void multiply_tiled_bf16(const StripeTask& task) {
  task.num_stripes == 1 ? multiply_bf16_tiles<1>(task) : multiply_bf16_tiles<kTiledStripes>(task);
}

// Lets blocks of rows share the weights in the caches.
static void share_tiles(ProductKernel& kernel) {
  kernel.max_blocks = kMostSharingBlocks;
  kernel.row_blocks = [](int64_t block_bytes) { return tile_blocks(block_bytes, second_level_cache()); };
}

static ProductKernel tiled_kernel(ActivationLayout layout, void (*multiply)(const StripeTask&)) {
  ProductKernel kernel = {kTiledBlockRows, kTiledStripes, layout, multiply};
  share_tiles(kernel);
  kernel.tiles_at_once = [](int64_t block_bytes, int64_t num_blocks) {
    return tiles_at_once(block_bytes, num_blocks, second_level_cache());
  };
  kernel.sum_bytes = sizeof(TileSums);
  kernel.begin = [] { Tiles::configure(); };
  kernel.end = Tiles::release;
  if (layout == ActivationLayout::bf16_tiles) kernel.convert = round_bf16;
  return kernel;
}

}  // namespace chairlift::CHAIRLIFT_ISA
