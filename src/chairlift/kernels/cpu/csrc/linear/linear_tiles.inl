// Compiled for each instruction set: the functions of linear layers.
#pragma once

#include <utility>

#include "linear/linear_grouped.inl"
#include "linear/linear_prepare.inl"
#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA {

template <WeightFormat kFormat>
static constexpr ProductKernel product_kernel() {
  if constexpr (is_grouped(kFormat)) return grouped_kernel<kFormat>();
  if (is_integer(kFormat)) return {kBlockRows, kTileStripes, ActivationLayout::bytes, multiply<kFormat>};
  return {kBlockRows, kTileStripes, ActivationLayout::floats, multiply<kFormat>, copy_floats};
}

template <int... kFormats>
static constexpr void set_products(LinearTiles& tiles, std::integer_sequence<int, kFormats...>) {
  ((tiles.products[kFormats] = product_kernel<static_cast<WeightFormat>(kFormats)>()), ...);
}

static constexpr LinearTiles linear_tiles() {
  LinearTiles tiles = {{}, prologue, add_branch, multiply_by_gate, quantize_groups, quantize_row, interleave_words};
  set_products(tiles, std::make_integer_sequence<int, kNumWeightFormats>());
  return tiles;
}

}  // namespace chairlift::CHAIRLIFT_ISA
