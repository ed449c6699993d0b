// Used by instruction sets with AVX-512: products with blocks of eight rows and three stripes, whose sums fill the
// registers.
//
// Up to kMaxBlocks blocks share the weights of some inputs in the second-level cache. Their sums are kept in memory
// meanwhile, so that the inputs of an output are added in ascending order.
#pragma once

#include "linear/linear_products.inl"
#include "runtime/caches.h"
#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA {

constexpr int kWideRows = 8;
constexpr int64_t kWordBytes = 4;  // a word is the inputs of a row and an output that one instruction multiplies
constexpr int64_t kWideWordBytes = kWideRows * kWordBytes;
constexpr int64_t kStripeWordBytes = kStripe * kWordBytes;

// The parts of equal size whose weights fill a quarter of the second-level cache. block_bytes: of the inputs of a block.
static inline int64_t num_wide_parts(int64_t block_bytes) {
  const int64_t weight_bytes = block_bytes / kWideRows * kTileStripes * kStripe, most = second_level_cache() / 4;
  return most > 0 ? (weight_bytes + most - 1) / most : 1;
}

template <typename Product, int kStripes>
struct alignas(64) WideSums {
  typename Product::Sum of[kStripes][kWideRows];
};

// Adds the words from `first` to `end`.
template <typename Product, int kRows, int kStripes>
static inline void add_words(const StripeTask& task, const ActivationBlock& block, int64_t first, int64_t end, Ahead& ahead,
                             WideSums<Product, kStripes>& sums) {
  constexpr int kGroupWords = kGroup / Product::kWordInputs;
  typename Product::Sum acc[kStripes][kRows];
#pragma GCC unroll 4
  for (int s = 0; s < kStripes; ++s)
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) acc[s][m] = first == 0 ? Product::start(block, m) : sums.of[s][m];
  const uint8_t* w = task.stripe + first * kStripeWordBytes;
  const auto* x = static_cast<const uint8_t*>(block.values) + first * kWideWordBytes;
  for (int64_t word = first; word < end; word += kGroupWords) {
    ahead.prefetch_part();
#pragma GCC unroll 4
    for (int i = 0; i < kGroupWords; ++i, w += kStripeWordBytes, x += kWideWordBytes) {
      I weights[kStripes];
#pragma GCC unroll 4
      for (int s = 0; s < kStripes; ++s) weights[s] = iload(w + s * task.stripe_bytes);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        const I inputs = broadcast4(x + m * kWordBytes);
#pragma GCC unroll 4
        for (int s = 0; s < kStripes; ++s) acc[s][m] = Product::dot(acc[s][m], weights[s], inputs);
      }
    }
  }
#pragma GCC unroll 4
  for (int s = 0; s < kStripes; ++s)
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) sums.of[s][m] = acc[s][m];
}

template <typename Product, int kStripes, int kRows = kWideRows>
static inline void add_words_of_rows(const StripeTask& task, int num_rows, const ActivationBlock& block, int64_t first,
                                     int64_t end, Ahead& ahead, WideSums<Product, kStripes>& sums) {
  if constexpr (kRows > 1)
    if (num_rows < kRows)
      return add_words_of_rows<Product, kStripes, kRows - 1>(task, num_rows, block, first, end, ahead, sums);
  add_words<Product, kRows>(task, block, first, end, ahead, sums);
}

template <typename Product, int kStripes>
static void multiply_wide_stripes(const StripeTask& task) {
  WideSums<Product, kStripes> sums[kMaxBlocks];
  Ahead ahead(task);
  const int64_t num_words = task.padded_inputs / Product::kWordInputs, num_groups = task.padded_inputs / kGroup;
  const int64_t parts = task.num_blocks == 1 ? 1 : num_wide_parts(num_words * kWideWordBytes);
  const int64_t at_once = (num_groups + parts - 1) / parts * (kGroup / Product::kWordInputs);
  for (int64_t first = 0; first < num_words; first += at_once) {
    const int64_t end = first + at_once < num_words ? first + at_once : num_words;
    for (int b = 0, row = 0; b < task.num_blocks; ++b, row += kWideRows) {
      const int num_rows = task.num_rows - row < kWideRows ? task.num_rows - row : kWideRows;
      add_words_of_rows<Product>(task, num_rows, task.blocks[b], first, end, ahead, sums[b]);
      if (end < num_words) continue;
      for (int m = 0; m < num_rows; ++m) Product::finish(task, task.blocks[b], sums[b], m, row + m);
    }
  }
}

template <typename Product>
static void multiply_wide(const StripeTask& task) {
  task.num_stripes == 1 ? multiply_wide_stripes<Product, 1>(task) : multiply_wide_stripes<Product, kTileStripes>(task);
}

template <typename Product>
static ProductKernel wide_kernel(ActivationLayout layout) {
  ProductKernel kernel = {kWideRows, kTileStripes, layout, multiply_wide<Product>};
  kernel.max_blocks = kMaxBlocks;
  kernel.row_blocks = [](int64_t block_bytes) {  // their rows fill half of the cache, a part of the inputs at a time
    const int64_t blocks = second_level_cache() / 2 * num_wide_parts(block_bytes) / block_bytes;
    return blocks < 1 ? 1 : blocks < kMaxBlocks ? blocks : kMaxBlocks;
  };
  return kernel;
}

struct WideInt8 {
  using Sum = I;
  static constexpr int kWordInputs = 4;

  static inline I start(const ActivationBlock& block, int m) { return iset1(block.correction[m]); }
  static inline I dot(I sums, I weights, I inputs) { return dot_u8s8(sums, weights, inputs); }

  template <int kStripes>
  static inline void finish(const StripeTask& task, const ActivationBlock& block, const WideSums<WideInt8, kStripes>& sums,
                            int m, int row) {
    I outliers[kStripes];
    sum_outliers(task, block, task.stripe, m, outliers);
    const uint8_t* const scales = task.stripe + task.padded_inputs * kStripe;
#pragma GCC unroll 4
    for (int s = 0; s < kStripes; ++s) {
      const F y = scale_sum(outliers[s], sums.of[s][m], block.scale[m]);
      put(task, row, s * kStripe, mul(y, load(reinterpret_cast<const float*>(scales + s * task.stripe_bytes))));
    }
  }
};

}  // namespace chairlift::CHAIRLIFT_ISA
