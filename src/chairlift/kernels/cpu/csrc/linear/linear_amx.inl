// Compiled for instruction sets with tiles: products of blocks of 32 rows, which are two tiles, and two stripes.
//
// A stripe of int8 or bfloat16 weights is a sequence of tiles, and so are the activations. Rows are independent of each
// other, and their inputs are added in ascending order, so a row has the same bits in any batch. int8 sums are exact and
// converted as in linear_products.inl: fewer than kMinTiledRows rows are multiplied there.
#pragma once

#include <type_traits>

#include "linear/linear_products.inl"
#include "simd/simd.h"
#include "simd/tiles.h"

namespace chairlift::CHAIRLIFT_ISA {

constexpr int kTiledBlockRows = 2 * kTileRows;
constexpr int kTiledStripes = 2;
constexpr int kMinTiledRows = 4;
constexpr int64_t kTileInputs = kTileRowBytes;  // int8 inputs of a tile
constexpr int64_t kBlockBytes = kTiledBlockRows * kTileRowBytes;

// The places of activations in the layout `byte_tiles`.
struct Tiled {
  static constexpr int64_t kRow = kTileRowBytes, kQuad = 4;
  static int64_t group(int64_t k) { return k / kTileInputs * kBlockBytes + k % kTileInputs; }
  static int64_t entry(int64_t i) { return i / kTileRows * kBlockBytes + i % kTileRows * 4; }
};

// The sums of a block: [stripes][rows][16].
struct TileSums {
  alignas(64) uint8_t bytes[kTiledStripes][kTiledBlockRows][kTileRowBytes];
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

// Adds the products of one tile of inputs.
template <bool kIsBf16, bool kBothHalves, bool kBothStripes>
static inline void add_tile(const uint8_t* x, const uint8_t* first, const uint8_t* second) {
  Tiles::load<6>(first);
  Tiles::load<4>(x);
  dot_tiles<kIsBf16, 0, 4, 6>();
  if constexpr (kBothHalves) {
    Tiles::load<5>(x + kTileBytes);
    dot_tiles<kIsBf16, 1, 5, 6>();
  }
  if constexpr (kBothStripes) {
    Tiles::load<7>(second);
    dot_tiles<kIsBf16, 2, 4, 7>();
    if constexpr (kBothHalves) dot_tiles<kIsBf16, 3, 5, 7>();
  }
}

// Copies lines of weights to a tile, with zeros behind them. `line_of(i)` is the place of line i.
template <typename LineOf>
static inline void gather_lines(int count, uint8_t* tile, LineOf line_of) {
  for (int i = 0; i < kTileRows; ++i) istore(tile + i * kTileRowBytes, i < count ? iload(line_of(i)) : izero());
}

// Adds the products of all inputs of a stripe of `num_lines` lines of 64 bytes.
template <bool kIsBf16, bool kBothHalves, bool kBothStripes>
static inline void add_all_tiles(const StripeTask& task, int64_t num_lines, Ahead& ahead) {
  const auto* x = static_cast<const uint8_t*>(task.block.values);
  const uint8_t* w = task.stripe;
  for (; num_lines >= kTileRows; num_lines -= kTileRows, x += kBlockBytes, w += kTileBytes) {
    for (int groups = kIsBf16 ? 1 : 2; groups; --groups) ahead.prefetch_part();
    add_tile<kIsBf16, kBothHalves, kBothStripes>(x, w, w + task.stripe_bytes);
  }
  if (num_lines == 0) return;
  alignas(64) uint8_t rest[kTiledStripes][kTileBytes];
  ahead.prefetch_part();
  for (int s = 0; s < (kBothStripes ? 2 : 1); ++s)
    gather_lines(static_cast<int>(num_lines), rest[s],
                 [&](int i) { return w + s * task.stripe_bytes + i * kTileRowBytes; });
  add_tile<kIsBf16, kBothHalves, kBothStripes>(x, rest[0], rest[1]);
}

// Adds the products of the quads with outliers, whose weights are gathered first.
template <bool kBothHalves, bool kBothStripes>
static inline void add_outlier_tiles(const StripeTask& task) {
  const auto* x = static_cast<const uint8_t*>(task.block.outlier_values);
  const int32_t num_quads = *task.block.num_outliers;
  alignas(64) uint8_t weights[kTiledStripes][kTileBytes];
  for (int32_t first = 0; first < num_quads; first += kTileRows, x += kBlockBytes) {
    const int count = num_quads - first < kTileRows ? num_quads - first : kTileRows;
    const int32_t* quads = task.block.outliers + first;
    for (int s = 0; s < (kBothStripes ? 2 : 1); ++s)
      gather_lines(count, weights[s],
                   [&](int i) { return task.stripe + s * task.stripe_bytes + quads[i] * kTileRowBytes; });
    add_tile<false, kBothHalves, kBothStripes>(x, weights[0], weights[1]);
  }
}

static inline void finish_int8(const StripeTask& task, const TileSums& sums, const TileSums& outliers) {
  const bool has_outliers = *task.block.num_outliers != 0;
  for (int s = 0; s < task.num_stripes; ++s) {
    const F scale = load(reinterpret_cast<const float*>(task.stripe + s * task.stripe_bytes +
                                                        task.padded_inputs * kStripe));
    for (int m = 0; m < task.num_rows; ++m) {
      F y = to_float(iadd(iload(sums.bytes[s][m]), iset1(task.block.correction[m])));
      if (has_outliers) {
        const I correction = iset1(static_cast<const int32_t*>(task.block.sum)[m]);
        y = fma(to_float(iadd(iload(outliers.bytes[s][m]), correction)), set1(128.0f), y);
      }
      put(task, m, s * kStripe, mul(mul(y, set1(task.block.scale[m])), scale));
    }
  }
}

template <bool kBothHalves, bool kBothStripes>
static void multiply_int8_tiles(const StripeTask& task) {
  TileSums sums, outliers;
  Ahead ahead(task);
  Tiles::configure();
  zero_sums<kBothHalves, kBothStripes>();
  add_all_tiles<false, kBothHalves, kBothStripes>(task, task.padded_inputs / 4, ahead);
  store_sums<kBothHalves, kBothStripes>(sums);
  if (*task.block.num_outliers) {
    zero_sums<kBothHalves, kBothStripes>();
    add_outlier_tiles<kBothHalves, kBothStripes>(task);
    store_sums<kBothHalves, kBothStripes>(outliers);
  }
  Tiles::release();
  finish_int8(task, sums, outliers);
}

template <bool kBothHalves, bool kBothStripes>
static void multiply_bf16_tiles(const StripeTask& task) {
  TileSums sums;
  Ahead ahead(task);
  Tiles::configure();
  zero_sums<kBothHalves, kBothStripes>();
  add_all_tiles<true, kBothHalves, kBothStripes>(task, task.padded_inputs / 2, ahead);
  store_sums<kBothHalves, kBothStripes>(sums);
  Tiles::release();
  for (int s = 0; s < task.num_stripes; ++s)
    for (int m = 0; m < task.num_rows; ++m)
      put(task, m, s * kStripe, load(reinterpret_cast<const float*>(sums.bytes[s][m])));
}

// Calls the function for the number of halves and stripes of a task.
template <typename Multiply>
static inline void by_size(const StripeTask& task, Multiply multiply) {
  const bool both_halves = task.num_rows > kTileRows, both_stripes = task.num_stripes > 1;
  if (both_halves && both_stripes) return multiply(std::true_type{}, std::true_type{});
  if (both_halves) return multiply(std::true_type{}, std::false_type{});
  if (both_stripes) return multiply(std::false_type{}, std::true_type{});
  multiply(std::false_type{}, std::false_type{});
}

static void multiply_tiled_int8(const StripeTask& task) {
  if (task.num_rows >= kMinTiledRows)
    return by_size(task, [&](auto halves, auto stripes) { multiply_int8_tiles<halves, stripes>(task); });
  if (task.num_stripes == 1) return multiply_stripes<WeightFormat::int8, 1, Tiled>(task);
  multiply_stripes<WeightFormat::int8, kTiledStripes, Tiled>(task);
}

static void multiply_tiled_bf16(const StripeTask& task) {
  by_size(task, [&](auto halves, auto stripes) { multiply_bf16_tiles<halves, stripes>(task); });
}

// Rounds a row to bfloat16 in the layout `bf16_tiles`.
static void interleave_bf16(const float* y, int64_t padded_inputs, const RowTarget& target) {
  constexpr int64_t kInputs = kTileRowBytes / 2;
  auto* out = static_cast<uint16_t*>(target.values) + target.row * kInputs;
  for (int64_t k = 0; k < padded_inputs; k += kInputs, out += kBlockBytes / 2)
    for (int64_t i = 0; i < kInputs; i += kLanes) store_bf16(out + i, load(y + k + i));
}

}  // namespace chairlift::CHAIRLIFT_ISA
