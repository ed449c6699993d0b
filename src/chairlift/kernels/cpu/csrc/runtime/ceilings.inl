// Compiled for each instruction set.
#pragma once

#include "runtime/ceilings.h"
#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA {

// The number of independent sums: enough to hide the latency of two units, few enough for the registers.
constexpr int kChains = kLanes == 16 ? 10 : 8;

// Makes the compiler assume that `x` has changed, so that it does not hoist or merge computations with it.
template <typename Vector>
static inline void touch(Vector& x) {
  __asm__ volatile("" : "+m"(x));
}

template <int kCount>
static inline int32_t keep(I (&sums)[kCount]) {
#pragma GCC unroll 16
  for (int i = 1; i < kCount; ++i) sums[0] = iadd(sums[0], sums[i]);
  int32_t lanes[kLanes];
  istore(lanes, sums[0]);
  return lanes[0];
}

// add: adds products of `bytes`, which it touches, to the sums.
template <typename Add>
static inline int32_t dot_rounds(int64_t rounds, Add add) {
  I sums[kChains], factors[kChains], bytes = iset1(0x04030201);
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) {
    sums[i] = izero();
    factors[i] = iset1(0x01010101 * (i + 1));
  }
#pragma GCC unroll 4
  for (int64_t round = 0; round < rounds; ++round) add(sums, bytes, factors);
  return keep(sums);
}

static int32_t dot_s8s8_rounds(int64_t rounds) {
  return dot_rounds(rounds, [](I (&sums)[kChains], I& bytes, const I (&factors)[kChains]) {
    touch(bytes);
    const I weights = weight_bytes(bytes);
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) sums[i] = dot_weights(sums[i], weights, factors[i]);
  });
}

constexpr int kCodeQuads = quads_at_once(15);

static int32_t dot_u4s8_rounds(int64_t rounds) {
  return dot_rounds(rounds, [](I (&sums)[kChains], I& bytes, const I (&factors)[kChains]) {
    I of_codes[kChains];
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) of_codes[i] = begin_sum(sums[i]);
#pragma GCC unroll 8
    for (int quad = 0; quad < kCodeQuads; ++quad) {
      touch(bytes);
#pragma GCC unroll 16
      for (int i = 0; i < kChains; ++i) of_codes[i] = add_codes(of_codes[i], bytes, factors[i]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) sums[i] = end_sum(sums[i], of_codes[i]);
  });
}

// Converges to 2, far from infinities and denormals.
static int32_t fma_rounds(int64_t rounds) {
  F sums[kChains];
  F half = set1(0.5f), one = set1(1.0f);
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) sums[i] = set1(static_cast<float>(i));
  touch(half);
  touch(one);
  const F factor = half, term = one;
#pragma GCC unroll 4
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) sums[i] = fma(sums[i], factor, term);
  }
#pragma GCC unroll 16
  for (int i = 1; i < kChains; ++i) sums[0] = add(sums[0], sums[i]);
  float lanes[kLanes];
  store(lanes, sums[0]);
  return static_cast<int32_t>(lanes[0]);
}

static int32_t read_bytes(const uint8_t* data, int64_t num_bytes) {
  constexpr int kSums = 4, kVector = kLanes * 4;
  I sums[kSums];
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) sums[i] = izero();
  for (int64_t at = 0; at < num_bytes; at += kReadStride) {
#pragma GCC unroll 16
    for (int i = 0; i < kReadStride / kVector; ++i)
      sums[i % kSums] = iadd(sums[i % kSums], iload(data + at + i * kVector));
  }
  return keep(sums);
}

static constexpr CeilingLoops ceiling_loops() {
  constexpr int64_t kDot = kChains * kLanes * 4 * 2, kFma = kChains * kLanes * 2;
  return {{{"dot_s8s8", kDot, dot_s8s8_rounds},
           {"dot_u4s8", kDot * kCodeQuads, dot_u4s8_rounds},
           {"fma", kFma, fma_rounds},
           {"tile_s8", 0, nullptr},
           {"tile_bf16", 0, nullptr},
           {"dot_bf16", 0, nullptr}},
          read_bytes};
}

}  // namespace chairlift::CHAIRLIFT_ISA
