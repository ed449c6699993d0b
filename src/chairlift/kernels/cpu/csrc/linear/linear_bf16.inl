// Compiled for instruction sets with AVX-512 BF16: products of bfloat16 weights.
//
// An instruction adds the products of a pair of inputs to the sums of 16 outputs, one input after the other, with
// denormal operands and results as zero (VDPBF16PS, Intel 64 and IA-32 Architectures Software Developer's Manual, volume
// 2). All pairs of an output are one chain in ascending order, so a row has the same bits in any batch.
#pragma once

#include "linear/linear_wide.inl"
#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA {

static inline F dot_bf16(F sums, I weights, I pairs) {
  return _mm512_dpbf16_ps(sums, (__m512bh)weights, (__m512bh)pairs);
}

struct WidePairs {
  using Sum = F;
  static constexpr int kWordInputs = 2;

  static inline F start(const ActivationBlock&, int) { return zero(); }
  static inline F dot(F sums, I weights, I inputs) { return dot_bf16(sums, weights, inputs); }

  template <int kStripes>
  static inline void finish(const StripeTask& task, const ActivationBlock&, const WideSums<WidePairs, kStripes>& sums, int m,
                            int row) {
#pragma GCC unroll 4
    for (int s = 0; s < kStripes; ++s) put(task, row, s * kStripe, sums.of[s][m]);
  }
};

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
