// Compiled for each instruction set: products of packed weights and activations.
//
// The order of the floating point operations of one output is the same for any number of rows and stripes. Products of
// integers are exact. Each group or super-block of inputs ends in one fma, in ascending order; the sum is multiplied by the scale
// of the row, and bias and the output before are added; then each outlier of the row is one fma, in ascending order of inputs.
// With int8 weights, all inputs are two sums of integers: one of outliers, one of the rest.
#pragma once

#include "linear/linear_tiles.h"
#include "runtime/prefetch.h"
#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA {

// The rows and vectors of one tile, whose sums fill the registers beside the weights and one activation. Each activation
// is loaded once for all vectors, and each weight once for all rows.
constexpr int kBlockRows = kProductRows;
constexpr int kTileStripes = kLanes == 16 ? 3 : 1;
constexpr int kStripeVectors = kStripe / kLanes;
// The stripes of a tile of up to kPairedRows rows. If they are pairs, their weights are not prefetched: the hardware reads two
// sequences faster than instructions prefetch one (docs/experiments.md).
constexpr int kPairedRows = 2, kFewStripes = kPairsStripes ? 2 : kTileStripes;

template <int kRows, int kVectors>
struct Sums {
  F of[kVectors][kRows];
};

// The elements of vector v of consecutive stripes. stripes: those of the first stripe.
template <typename Element>
static inline const Element* vector_of(const uint8_t* stripes, int64_t stripe_bytes, int v) {
  return reinterpret_cast<const Element*>(stripes + v / kStripeVectors * stripe_bytes) + v % kStripeVectors * kLanes;
}

// Prefetches the weights `ahead` of a task, a part with each group of inputs.
struct Ahead {
  explicit Ahead(const StripeTask& task, bool prefetches = true)
      : at(task.ahead), end(at + (prefetches ? task.ahead_bytes : 0)), step(task.ahead_step) {}

  inline void prefetch_part() {
    const uint8_t* const stop = end - at < step ? end : at + step;
    for (; at < stop; at += 64) __builtin_prefetch(at, 0, kSecondLevel);
  }

  const uint8_t* at;
  const uint8_t* end;
  int64_t step;
};

// Prefetches the outputs of a task before the product, because another core may have used them last.
template <int kRows, int kVectors>
static inline void prefetch_outputs(const StripeTask& task) {
  for (int m = 0; m < kRows; ++m)
    for (int v = 0; v < kVectors; v += kStripeVectors) __builtin_prefetch(task.out + m * task.out_stride + v * kLanes, 1);
}

// The places of activations in the layout `bytes`: the distances of rows and of quads.
struct Interleaved {
  static constexpr int64_t kRow = 4, kQuad = kBlockRows * 4;
};

// Sums of products with int8 weights start at the correction of their row, if the offset of the weights is in them.
static inline I start_of_row(int32_t correction) { return kWeightOffset ? iset1(correction) : izero(); }

// Adds the products of one group of inputs in bytes.
template <typename Layout = Interleaved, int kRows, int kVectors>
static inline void dot_bytes(const StripeTask& task, const uint8_t* w, const int8_t* x, I (&acc)[kVectors][kRows]) {
#pragma GCC unroll 8
  for (int64_t k = 0; k < kGroup; k += 4, w += kStripe * 4, x += Layout::kQuad) {
    I weights[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) weights[v] = weight_bytes(iload(vector_of<int32_t>(w, task.stripe_bytes, v)));
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const I four = broadcast4(x + Layout::kRow * m);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[v][m] = dot_weights(acc[v][m], weights[v], four);
    }
  }
}

// Computes the sums of the multiples of 128 of the outliers of row m. w: the weights of the first stripe. Entries have kChains
// independent sums, because each product waits for the one before it.
template <int kVectors>
static inline void sum_outliers(const StripeTask& task, const ActivationBlock& block, const uint8_t* w, int m,
                                I (&acc)[kVectors]) {
  constexpr int kChains = 4;
  const StoredOutliers outliers(block.outlier_lists + m * outlier_list_ints(task.padded_inputs), task.padded_inputs);
  I sums[kChains][kVectors];
#pragma GCC unroll 4
  for (int c = 0; c < kChains; ++c)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[c][v] = c ? izero() : start_of_row(static_cast<const int32_t*>(block.sum)[m]);
  const auto add_entry = [&](int32_t i, int c) CHAIRLIFT_ALWAYS {
    const I quad = iset1(static_cast<int32_t>(outliers.values[i]));
    const uint8_t* const at = w + static_cast<int64_t>(outliers.entries[i]) * (kStripe * 4);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      sums[c][v] = dot_weights(sums[c][v], weight_bytes(iload(vector_of<int32_t>(at, task.stripe_bytes, v))), quad);
  };
  int32_t i = 0;
  for (; i + kChains <= outliers.count; i += kChains)
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) add_entry(i + c, c);
  for (; i < outliers.count; ++i) add_entry(i, 0);
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) acc[v] = iadd(iadd(sums[0][v], sums[1][v]), iadd(sums[2][v], sums[3][v]));
}

// The sum of all inputs, from the sum of outliers and the sum of the rest.
static inline F scale_sum(I outliers, I rest, float scale) {
  return mul(fma(to_float(outliers), set1(128.0f), to_float(rest)), set1(scale));
}

template <int kRows, int kVectors>
static inline void multiply_int8(const StripeTask& task, Ahead& ahead, Sums<kRows, kVectors>& y) {
  const int8_t* x = static_cast<const int8_t*>(task.block().values);
  I acc[kVectors][kRows];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) acc[v][m] = start_of_row(task.block().correction[m]);
  for (int64_t k = 0; k < task.padded_inputs; k += kGroup) {
    ahead.prefetch_part();
    dot_bytes(task, task.stripe + k * kStripe, x + k * kBlockRows, acc);
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    I outliers[kVectors];
    sum_outliers(task, task.block(), task.stripe, m, outliers);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) y.of[v][m] = scale_sum(outliers[v], acc[v][m], task.block().scale[m]);
  }
}

static inline F load_weights(const float* p) { return load(p); }
static inline F load_weights(const uint16_t* p) { return load_f16(p); }

// Adds the products of one input.
template <int kRows, int kVectors>
static inline void add_products(const F (&weights)[kVectors], const float* x, Sums<kRows, kVectors>& y) {
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    const F value = set1(x[m]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) hold(y.of[v][m] = fma(weights[v], value, y.of[v][m]));
  }
}

template <typename Weight, int kRows, int kVectors>
static inline void multiply_floats(const StripeTask& task, Ahead& ahead, Sums<kRows, kVectors>& y) {
  const uint8_t* w = task.stripe;
  const float* x = static_cast<const float*>(task.block().values);
  for (int64_t k = 0; k < task.padded_inputs; ++k, w += kStripe * sizeof(Weight), x += kBlockRows) {
    if (k % kGroup == 0) ahead.prefetch_part();
    F weights[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) weights[v] = load_weights(vector_of<Weight>(w, task.stripe_bytes, v));
    add_products(weights, x, y);
  }
}

template <int kRows, int kVectors>
static inline void multiply_f8(const StripeTask& task, Ahead& ahead, Sums<kRows, kVectors>& y) {
  const uint8_t *w = task.stripe, *scale = task.stripe + task.padded_inputs * kStripe;
  const float* x = static_cast<const float*>(task.block().values);
  F scales[kVectors];
  for (int64_t k = 0; k < task.padded_inputs; ++k, w += kStripe, x += kBlockRows) {
    if (k % kGroup == 0) ahead.prefetch_part();
    if (k % kFloatGroup == 0) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) scales[v] = load(vector_of<float>(scale, task.stripe_bytes, v));
      scale += kStripe * 4;
    }
    F weights[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      weights[v] = mul(load_e4m3(vector_of<uint8_t>(w, task.stripe_bytes, v)), scales[v]);
    add_products(weights, x, y);
  }
}

template <int kRows, int kVectors>
static inline void multiply_bf16(const StripeTask& task, Ahead& ahead, Sums<kRows, kVectors>& y) {
  const uint8_t* w = task.stripe;
  const float* x = static_cast<const float*>(task.block().values);
  for (int64_t k = 0; k < task.padded_inputs; k += 2, w += kStripe * 4, x += 2 * kBlockRows) {
    if (k % kGroup == 0) ahead.prefetch_part();
    F even[kVectors], odd[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const I pairs = iload(vector_of<int32_t>(w, task.stripe_bytes, v));
      even[v] = even_bf16(pairs);
      odd[v] = odd_bf16(pairs);
    }
    add_products(even, x, y);
    add_products(odd, x + kBlockRows, y);
  }
}

// Rounds `count` values, a multiple of kStripe, to bfloat16.
static inline void round_bf16(const float* y, int64_t count, void* out) {
  for (int64_t i = 0; i < count; i += kLanes) store_bf16(static_cast<uint16_t*>(out) + i, load(y + i));
}

static inline void copy_floats(const float* y, int64_t count, void* out) {
  __builtin_memcpy(out, y, static_cast<size_t>(count) * 4);
}

// Loads and stores vector v of a row of outputs, of which the last may have fewer columns, or none.
static inline F load_columns(const StripeTask& task, const float* row, int v) {
  const int column = v * kLanes, left = task.num_columns - column;
  return left >= kLanes ? load(row + column) : left > 0 ? load_n(row + column, left) : zero();
}
static inline void store_columns(const StripeTask& task, float* row, int v, F y) {
  const int column = v * kLanes, left = task.num_columns - column;
  if (left >= kLanes) store(row + column, y);
  else if (left > 0) store_n(row + column, y, left);
}

static inline void put(const StripeTask& task, int row, int column, F y) {
  if (column >= task.num_columns) return;
  float* const out = task.out + row * task.out_stride;
  if (task.bias) y = add(y, load(task.bias + column));
  store_columns(task, out, column / kLanes, task.add ? add(load_columns(task, out, column / kLanes), y) : y);
}

template <WeightFormat kFormat, int kRows, int kVectors>
static inline void finish(const StripeTask& task, const Sums<kRows, kVectors>& y) {
  const uint8_t* const scales = task.stripe + task.padded_inputs * kStripe;
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    F scale = set1(1.0f);
    if constexpr (kFormat == WeightFormat::int8) scale = load(vector_of<float>(scales, task.stripe_bytes, v));
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
      put(task, m, v * kLanes, kFormat == WeightFormat::int8 ? mul(y.of[v][m], scale) : y.of[v][m]);
  }
}

template <WeightFormat kFormat, int kRows, int kVectors>
static void multiply_tile(const StripeTask& task) {
  Ahead ahead(task, kVectors <= kTileStripes * kStripeVectors);
  prefetch_outputs<kRows, kVectors>(task);
  Sums<kRows, kVectors> y;
  for (int v = 0; v < kVectors; ++v)
    for (int m = 0; m < kRows; ++m) y.of[v][m] = zero();
  if constexpr (kFormat == WeightFormat::int8) multiply_int8(task, ahead, y);
  if constexpr (kFormat == WeightFormat::f8_e4m3) multiply_f8(task, ahead, y);
  if constexpr (kFormat == WeightFormat::bf16) multiply_bf16(task, ahead, y);
  if constexpr (kFormat == WeightFormat::f16) multiply_floats<uint16_t>(task, ahead, y);
  if constexpr (kFormat == WeightFormat::f32) multiply_floats<float>(task, ahead, y);
  finish<kFormat>(task, y);
}

template <WeightFormat kFormat, int kVectors, int kRows = kBlockRows>
static inline void multiply_rows(const StripeTask& task) {
  if constexpr (kRows > 1)
    if (task.num_rows < kRows) return multiply_rows<kFormat, kVectors, kRows - 1>(task);
  multiply_tile<kFormat, kRows, kVectors>(task);
}

template <WeightFormat kFormat, int kStripes = kTileStripes, int kRows = kBlockRows>
static void multiply(const StripeTask& task) {
  if (task.num_stripes == 1) return multiply_rows<kFormat, kStripeVectors, kRows>(task);
  multiply_rows<kFormat, kStripes * kStripeVectors, kRows>(task);
}

template <WeightFormat kFormat>
static constexpr void set_ungrouped_kernels(LinearTiles& tiles) {
  ProductKernel& kernel = tiles.products[static_cast<int>(kFormat)];
  if (is_integer(kFormat)) kernel = {kBlockRows, kTileStripes, ActivationLayout::bytes, multiply<kFormat>};
  else kernel = {kBlockRows, kTileStripes, ActivationLayout::floats, multiply<kFormat>, copy_floats};
  if constexpr (kFewStripes != kTileStripes) {
    ProductKernel& of_many = tiles.of_many_rows[static_cast<int>(kFormat)] = kernel;
    of_many.min_rows = kPairedRows + 1;
    kernel.tile_stripes = kFewStripes;
    kernel.multiply = multiply<kFormat, kFewStripes, kPairedRows>;
  }
}

}  // namespace chairlift::CHAIRLIFT_ISA
