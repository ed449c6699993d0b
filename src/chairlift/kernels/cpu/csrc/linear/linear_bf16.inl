// Compiled for instruction sets with AVX-512 BF16: products of bfloat16 weights with blocks of eight rows and three stripes.
//
// An instruction adds the products of a pair of inputs to the sums of 16 outputs, one input after the other, with
// denormal operands and results as zero (VDPBF16PS, Intel 64 and IA-32 Architectures Software Developer's Manual, volume
// 2). All pairs of an output are one chain in ascending order, so a row has the same bits in any batch.
#pragma once

#include "linear/linear_products.inl"
#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA {

constexpr int kPairBlockRows = 8;
constexpr int64_t kPairBytes = 4;
constexpr int64_t kBlockPairBytes = kPairBlockRows * kPairBytes;

static inline F dot_bf16(F sums, I weights, I pairs) {
  return _mm512_dpbf16_ps(sums, (__m512bh)weights, (__m512bh)pairs);
}

static inline I broadcast_pair(const uint8_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, kPairBytes);
  return iset1(pair);
}

// Adds the products of one pair of inputs.
template <int kRows, int kStripes>
static inline void add_pair(const StripeTask& task, const uint8_t* w, const uint8_t* x, Sums<kRows, kStripes>& y) {
  I weights[kStripes];
#pragma GCC unroll 4
  for (int s = 0; s < kStripes; ++s) weights[s] = iload(w + s * task.stripe_bytes);
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    const I pair = broadcast_pair(x + m * kPairBytes);
#pragma GCC unroll 4
    for (int s = 0; s < kStripes; ++s) y.of[s][m] = dot_bf16(y.of[s][m], weights[s], pair);
  }
}

template <int kRows, int kStripes>
static void multiply_pairs(const StripeTask& task) {
  Ahead ahead(task);
  prefetch_outputs<kRows, kStripes>(task);
  Sums<kRows, kStripes> y;
#pragma GCC unroll 4
  for (int s = 0; s < kStripes; ++s)
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) y.of[s][m] = zero();
  const uint8_t* w = task.stripe;
  const auto* x = static_cast<const uint8_t*>(task.block().values);
  for (int64_t k = 0; k < task.padded_inputs; k += kGroup) {
    ahead.prefetch_part();
#pragma GCC unroll 4
    for (int pair = 0; pair < kGroup / 2; ++pair, w += kStripe * kPairBytes, x += kBlockPairBytes)
      add_pair(task, w, x, y);
  }
  finish<WeightFormat::bf16>(task, 0, y);
}

template <int kStripes, int kRows = kPairBlockRows>
static inline void multiply_pair_rows(const StripeTask& task) {
  if constexpr (kRows > 1)
    if (task.num_rows < kRows) return multiply_pair_rows<kStripes, kRows - 1>(task);
  multiply_pairs<kRows, kStripes>(task);
}

static void multiply_bf16_pairs(const StripeTask& task) {
  if (task.num_stripes == 1) return multiply_pair_rows<1>(task);
  multiply_pair_rows<kTileStripes>(task);
}

// Rounds a row to bfloat16 in the layout `bf16_pairs`.
static void interleave_pairs(const float* y, int64_t padded_inputs, const RowTarget& target) {
  auto* out = static_cast<uint8_t*>(target.values) + target.row * kPairBytes;
  for (int64_t k = 0; k < padded_inputs; k += kGroup) {
    uint16_t rounded[kGroup];
    for (int i = 0; i < kGroup; i += kLanes) store_bf16(rounded + i, load(y + k + i));
    for (int i = 0; i < kGroup; i += 2, out += kBlockPairBytes) __builtin_memcpy(out, rounded + i, kPairBytes);
  }
}

constexpr int kChains = 10;  // enough to hide the latency

static int32_t dot_bf16_rounds(int64_t rounds) {
  F sums[kChains];
  I ones = iset1(0x3f803f80), halves = iset1(0x3f003f00);
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) sums[i] = set1(static_cast<float>(i));  // different, or they are merged
  __asm__ volatile("" : "+m"(ones), "+m"(halves));
  const I weights = ones, pairs = halves;
#pragma GCC unroll 4
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) sums[i] = dot_bf16(sums[i], weights, pairs);
  }
#pragma GCC unroll 16
  for (int i = 1; i < kChains; ++i) sums[0] = add(sums[0], sums[i]);
  return static_cast<int32_t>(reduce_add(sums[0]) * 0x1p-32f);
}

}  // namespace chairlift::CHAIRLIFT_ISA
