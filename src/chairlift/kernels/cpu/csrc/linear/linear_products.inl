// Compiled for each instruction set: products of packed weights and activations.
//
// The order of the floating point operations of one output is the same for any number of rows and stripes. Products of
// integers are exact. Each group of inputs ends in one fma, in ascending order; then each outlier of the row is one fma,
// in ascending order of inputs. With int8 weights, all inputs are two sums of integers: one of outliers, one of the rest.
#pragma once

#include "linear/linear_tiles.h"
#include "runtime/prefetch.h"
#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA {

// The rows and stripes of one tile in registers, which hold the integer sums, the float sums, weights and one
// activation. Each activation is loaded once for all stripes, and each weight once for all rows.
constexpr int kBlockRows = 4;
constexpr int kTileStripes = kLanes == 16 ? 3 : 1;

template <int kRows, int kStripes>
struct Sums {
  F of[kStripes][kRows];
};

static inline I broadcast4(const void* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return iset1(four);
}

// Prefetches the weights `ahead` of a task, a part with each group of inputs.
struct Ahead {
  explicit Ahead(const StripeTask& task) : at(task.ahead), end(at + task.ahead_bytes), step(task.ahead_step) {}

  inline void prefetch_part() {
    const uint8_t* const stop = end - at < step ? end : at + step;
    for (; at < stop; at += 64) __builtin_prefetch(at, 0, kSecondLevel);
  }

  const uint8_t* at;
  const uint8_t* end;
  int64_t step;
};

// Prefetches the outputs of a task before the product, because another core may have used them last.
template <int kRows, int kStripes>
static inline void prefetch_outputs(const StripeTask& task) {
  for (int m = 0; m < kRows; ++m)
    for (int s = 0; s < kStripes; ++s) __builtin_prefetch(task.out + m * task.out_stride + s * kStripe, 1);
}

// The places of activations in the layout `bytes`: the distances of rows and of quads.
struct Interleaved {
  static constexpr int64_t kRow = 4, kQuad = kBlockRows * 4;
};

// kIsSmall: whether weights are below 128.
template <typename Layout = Interleaved, bool kIsSmall = false, int kStripes, int kRows>
static inline void dot(I (&acc)[kStripes][kRows], const I (&weights)[kStripes], const int8_t* quad) {
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    const I x = broadcast4(quad + Layout::kRow * m);
#pragma GCC unroll 4
    for (int s = 0; s < kStripes; ++s)
      acc[s][m] = kIsSmall ? dot_u7s8(acc[s][m], weights[s], x) : dot_u8s8(acc[s][m], weights[s], x);
  }
}

template <int kStripes, int kRows>
static inline void start(I (&acc)[kStripes][kRows], const int32_t* correction) {
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
    for (int s = 0; s < kStripes; ++s) acc[s][m] = iset1(correction[m]);
}

// Adds the products of one group of inputs in bytes.
template <typename Layout = Interleaved, int kRows, int kStripes>
static inline void dot_bytes(const StripeTask& task, const uint8_t* w, const int8_t* x, I (&acc)[kStripes][kRows]) {
#pragma GCC unroll 8
  for (int64_t k = 0; k < kGroup; k += 4, w += kStripe * 4, x += Layout::kQuad) {
    I weights[kStripes];
#pragma GCC unroll 4
    for (int s = 0; s < kStripes; ++s) weights[s] = iload(w + s * task.stripe_bytes);
    dot<Layout>(acc, weights, x);
  }
}

// Computes the sums of the multiples of 128 of the outliers of row m. w: the weights of the first stripe.
template <int kStripes>
static inline void sum_outliers(const StripeTask& task, const ActivationBlock& block, const uint8_t* w, int m,
                                I (&acc)[kStripes]) {
  const StoredOutliers outliers(block.outlier_lists + m * outlier_list_ints(task.padded_inputs), task.padded_inputs);
  for (int s = 0; s < kStripes; ++s) acc[s] = iset1(static_cast<const int32_t*>(block.sum)[m]);
  for (int32_t i = 0; i < outliers.count; ++i) {
    const I quad = iset1(static_cast<int32_t>(outliers.values[i]));
    const uint8_t* const at = w + outliers.entries[i] * (kStripe * 4);
#pragma GCC unroll 4
    for (int s = 0; s < kStripes; ++s) acc[s] = dot_u8s8(acc[s], iload(at + s * task.stripe_bytes), quad);
  }
}

// The sum of all inputs, from the sum of outliers and the sum of the rest.
static inline F scale_sum(I outliers, I rest, float scale) {
  return mul(fma(to_float(outliers), set1(128.0f), to_float(rest)), set1(scale));
}

template <int kRows, int kStripes>
static inline void multiply_int8(const StripeTask& task, int column, Ahead& ahead, Sums<kRows, kStripes>& y) {
  const uint8_t* w = task.stripe + column * 4;
  const int8_t* x = static_cast<const int8_t*>(task.block().values);
  I acc[kStripes][kRows];
  start(acc, task.block().correction);
  for (int64_t k = 0; k < task.padded_inputs; k += kGroup) {
    ahead.prefetch_part();
    dot_bytes(task, w + k * kStripe, x + k * kBlockRows, acc);
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    I outliers[kStripes];
    sum_outliers(task, task.block(), w, m, outliers);
#pragma GCC unroll 4
    for (int s = 0; s < kStripes; ++s) y.of[s][m] = scale_sum(outliers[s], acc[s][m], task.block().scale[m]);
  }
}

static inline F load_weights(const float* p) { return load(p); }
static inline F load_weights(const uint16_t* p) { return load_f16(p); }

// Adds the products of one input.
template <int kRows, int kStripes>
static inline void add_products(const F (&weights)[kStripes], const float* x, Sums<kRows, kStripes>& y) {
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    const F value = set1(x[m]);
#pragma GCC unroll 4
    for (int s = 0; s < kStripes; ++s) y.of[s][m] = fma(weights[s], value, y.of[s][m]);
  }
}

template <typename Weight, int kRows, int kStripes>
static inline void multiply_floats(const StripeTask& task, int column, Ahead& ahead, Sums<kRows, kStripes>& y) {
  const uint8_t* w = task.stripe + column * sizeof(Weight);
  const float* x = static_cast<const float*>(task.block().values);
  for (int64_t k = 0; k < task.padded_inputs; ++k, w += kStripe * sizeof(Weight), x += kBlockRows) {
    if (k % kGroup == 0) ahead.prefetch_part();
    F weights[kStripes];
#pragma GCC unroll 4
    for (int s = 0; s < kStripes; ++s)
      weights[s] = load_weights(reinterpret_cast<const Weight*>(w + s * task.stripe_bytes));
    add_products(weights, x, y);
  }
}

template <int kRows, int kStripes>
static inline void multiply_f8(const StripeTask& task, int column, Ahead& ahead, Sums<kRows, kStripes>& y) {
  const uint8_t* w = task.stripe + column;
  const auto* scale = reinterpret_cast<const float*>(task.stripe + task.padded_inputs * kStripe) + column;
  const float* x = static_cast<const float*>(task.block().values);
  F scales[kStripes];
  for (int64_t k = 0; k < task.padded_inputs; ++k, w += kStripe, x += kBlockRows) {
    if (k % kGroup == 0) ahead.prefetch_part();
    if (k % kFloatGroup == 0) {
#pragma GCC unroll 4
      for (int s = 0; s < kStripes; ++s)
        scales[s] = load(reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(scale) + s * task.stripe_bytes));
      scale += kStripe;
    }
    F weights[kStripes];
#pragma GCC unroll 4
    for (int s = 0; s < kStripes; ++s) weights[s] = mul(load_e4m3(w + s * task.stripe_bytes), scales[s]);
    add_products(weights, x, y);
  }
}

template <int kRows, int kStripes>
static inline void multiply_bf16(const StripeTask& task, int column, Ahead& ahead, Sums<kRows, kStripes>& y) {
  const uint8_t* w = task.stripe + column * 4;
  const float* x = static_cast<const float*>(task.block().values);
  for (int64_t k = 0; k < task.padded_inputs; k += 2, w += kStripe * 4, x += 2 * kBlockRows) {
    if (k % kGroup == 0) ahead.prefetch_part();
    F even[kStripes], odd[kStripes];
#pragma GCC unroll 4
    for (int s = 0; s < kStripes; ++s) {
      const I pairs = iload(w + s * task.stripe_bytes);
      even[s] = even_bf16(pairs);
      odd[s] = odd_bf16(pairs);
    }
    add_products(even, x, y);
    add_products(odd, x + kBlockRows, y);
  }
}

// Rounds `count` values, a multiple of kStripe, to bfloat16.
static inline void round_bf16(const float* y, int64_t count, void* out) {
  for (int64_t i = 0; i < count; i += kLanes) store_bf16(static_cast<uint16_t*>(out) + i, load(y + i));
}

static inline void put(const StripeTask& task, int row, int column, F y) {
  const int count = task.num_columns - column < kLanes ? task.num_columns - column : kLanes;
  if (count <= 0) return;
  float* out = task.out + row * task.out_stride + column;
  if (task.bias) y = add(y, load(task.bias + column));
  if (count == kLanes) {
    store(out, task.add ? add(load(out), y) : y);
  } else {
    store_n(out, task.add ? add(load_n(out, count), y) : y, count);
  }
}

template <WeightFormat kFormat, int kRows, int kStripes>
static inline void finish(const StripeTask& task, int column, const Sums<kRows, kStripes>& y) {
#pragma GCC unroll 4
  for (int s = 0; s < kStripes; ++s) {
    F scale = set1(1.0f);
    if constexpr (kFormat == WeightFormat::int8)
      scale = load(reinterpret_cast<const float*>(task.stripe + s * task.stripe_bytes + task.padded_inputs * kStripe) +
                   column);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
      put(task, m, s * kStripe + column, kFormat == WeightFormat::int8 ? mul(y.of[s][m], scale) : y.of[s][m]);
  }
}

template <WeightFormat kFormat, int kRows, int kStripes>
static void multiply_tile(const StripeTask& task) {
  Ahead ahead(task);
  prefetch_outputs<kRows, kStripes>(task);
  for (int column = 0; column < kStripe; column += kLanes) {
    Sums<kRows, kStripes> y;
    for (int s = 0; s < kStripes; ++s)
      for (int m = 0; m < kRows; ++m) y.of[s][m] = zero();
    if constexpr (kFormat == WeightFormat::int8) multiply_int8(task, column, ahead, y);
    if constexpr (kFormat == WeightFormat::f8_e4m3) multiply_f8(task, column, ahead, y);
    if constexpr (kFormat == WeightFormat::bf16) multiply_bf16(task, column, ahead, y);
    if constexpr (kFormat == WeightFormat::f16) multiply_floats<uint16_t>(task, column, ahead, y);
    if constexpr (kFormat == WeightFormat::f32) multiply_floats<float>(task, column, ahead, y);
    finish<kFormat>(task, column, y);
  }
}

template <WeightFormat kFormat, int kStripes>
static inline void multiply_stripes(const StripeTask& task) {
  switch (task.num_rows) {
    case 1: return multiply_tile<kFormat, 1, kStripes>(task);
    case 2: return multiply_tile<kFormat, 2, kStripes>(task);
    case 3: return multiply_tile<kFormat, 3, kStripes>(task);
    default: return multiply_tile<kFormat, 4, kStripes>(task);
  }
}

template <WeightFormat kFormat>
static void multiply(const StripeTask& task) {
  if (task.num_stripes == 1) return multiply_stripes<kFormat, 1>(task);
  multiply_stripes<kFormat, kTileStripes>(task);
}

}  // namespace chairlift::CHAIRLIFT_ISA
