// Compiled for each instruction set: the functions of linear layers.
#pragma once

#include <utility>

#include "linear/linear_grouped.inl"
#include "linear/linear_prepare.inl"
#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA {

template <WeightFormat kFormat>
static constexpr void set_product(LinearTiles& tiles) {
  if constexpr (is_grouped(kFormat)) tiles.products[static_cast<int>(kFormat)] = grouped_kernel<kFormat>();
  else set_ungrouped_kernels<kFormat>(tiles);
}

template <int... kFormats>
static constexpr void set_products(LinearTiles& tiles, std::integer_sequence<int, kFormats...>) {
  (set_product<static_cast<WeightFormat>(kFormats)>(tiles), ...);
}

static constexpr LinearTiles linear_tiles() {
  LinearTiles tiles = {{}, prologue, add_branch, multiply_by_gates, quantize_groups, quantize_row, interleave_words};
  set_products(tiles, std::make_integer_sequence<int, kNumWeightFormats>());
  return tiles;
}

}  // namespace chairlift::CHAIRLIFT_ISA
