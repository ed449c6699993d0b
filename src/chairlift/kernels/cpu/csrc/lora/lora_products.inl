// Compiled for each instruction set: the products of a few rows with the matrices of one LoRA adapter.
#pragma once

#include "lora/lora_products.h"
#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA {

// The products of rows of y with kRanks rows of a. Each sum runs over the inputs in order, in kLanes parts.
template <int kRows, int kRanks>
static inline void shrink_block(const float* y, const float* a, int64_t inputs, int rank, float* h) {
  F sums[kRows][kRanks];
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kRanks; ++j) sums[r][j] = zero();
  int64_t k = 0;
  for (; k + kLanes <= inputs; k += kLanes) {
    F weights[kRanks];
    for (int j = 0; j < kRanks; ++j) weights[j] = load(a + j * inputs + k);
    for (int r = 0; r < kRows; ++r) {
      const F x = load(y + r * inputs + k);
      for (int j = 0; j < kRanks; ++j) sums[r][j] = fma(x, weights[j], sums[r][j]);
    }
  }
  if (const int left = static_cast<int>(inputs - k))
    for (int r = 0; r < kRows; ++r)
      for (int j = 0; j < kRanks; ++j)
        sums[r][j] = fma(load_n(y + r * inputs + k, left), load_n(a + j * inputs + k, left), sums[r][j]);
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kRanks; ++j) h[r * rank + j] = reduce_add(sums[r][j]);
}

template <int kRows>
static void shrink_rows(const float* y, const float* a, int64_t inputs, int rank, float* h) {
  constexpr int kRanks = kLanes == 16 ? 4 : 2;  // as many sums as there are registers
  int j = 0;
  for (; j + kRanks <= rank; j += kRanks) shrink_block<kRows, kRanks>(y, a + j * inputs, inputs, rank, h + j);
  for (; j < rank; ++j) shrink_block<kRows, 1>(y, a + j * inputs, inputs, rank, h + j);
}

static void lora_shrink(const float* y, int rows, const float* a, int64_t inputs, int rank, float* h) {
  switch (rows) {
    case 1: return shrink_rows<1>(y, a, inputs, rank, h);
    case 2: return shrink_rows<2>(y, a, inputs, rank, h);
    case 3: return shrink_rows<3>(y, a, inputs, rank, h);
    default: return shrink_rows<kLoraRows>(y, a, inputs, rank, h);
  }
}

template <int kRows, int kVectors>
static inline void expand_block(const float* h, const float* b, int64_t outputs, int rank, float* const* out,
                                int64_t at) {
  F sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = zero();
  for (int j = 0; j < rank; ++j) {
    F weights[kVectors];
    for (int v = 0; v < kVectors; ++v) weights[v] = load(b + j * outputs + at + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const F x = set1(h[r * rank + j]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(x, weights[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) {
      float* const to = out[r] + at + v * kLanes;
      store(to, add(load(to), sums[r][v]));
    }
}

template <int kRows>
static void expand_rows(const float* h, const float* b, int64_t outputs, int rank, float* const* out) {
  constexpr int kVectors = 2;
  int64_t at = 0;
  for (; at + kVectors * kLanes <= outputs; at += kVectors * kLanes)
    expand_block<kRows, kVectors>(h, b, outputs, rank, out, at);
  for (; at + kLanes <= outputs; at += kLanes) expand_block<kRows, 1>(h, b, outputs, rank, out, at);
  const int left = static_cast<int>(outputs - at);
  if (!left) return;
  for (int r = 0; r < kRows; ++r) {
    F sum = zero();
    for (int j = 0; j < rank; ++j) sum = fma(set1(h[r * rank + j]), load_n(b + j * outputs + at, left), sum);
    store_n(out[r] + at, add(load_n(out[r] + at, left), sum), left);
  }
}

static void lora_expand(const float* h, int rows, const float* b, int64_t outputs, int rank, float* const* out) {
  switch (rows) {
    case 1: return expand_rows<1>(h, b, outputs, rank, out);
    case 2: return expand_rows<2>(h, b, outputs, rank, out);
    case 3: return expand_rows<3>(h, b, outputs, rank, out);
    default: return expand_rows<kLoraRows>(h, b, outputs, rank, out);
  }
}

constexpr LoraProducts lora_products() { return {lora_shrink, lora_expand}; }

}  // namespace chairlift::CHAIRLIFT_ISA
