// Compiled for instruction sets with dot products of bytes, see isa_*vnni.cpp: the table of CHAIRLIFT_BASE, with other
// products of integers.
#pragma once

#include <type_traits>
#include <utility>

#include "linear/linear_grouped.inl"
#include "linear/linear_wide.inl"
#include "runtime/ceilings.inl"
#include "runtime/isa_table.h"
#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA {

template <int... kFormats>
static void set_integer_products(LinearTiles& tiles, std::integer_sequence<int, kFormats...>) {
  const auto set_grouped = [&](auto format) {
    constexpr auto kFormat = static_cast<WeightFormat>(format());
    if constexpr (is_grouped(kFormat)) tiles.products[format] = grouped_kernel<kFormat>();
  };
  (set_grouped(std::integral_constant<int, kFormats>{}), ...);
  constexpr auto kInt8 = static_cast<int>(WeightFormat::int8);
  set_ungrouped_kernels<WeightFormat::int8>(tiles);
  if constexpr (kLanes == kStripe) tiles.of_many_rows[kInt8] = wide_kernel<WideInt8>(ActivationLayout::bytes);
}

const IsaTable& table() {
  static const IsaTable table = [] {
    IsaTable changed = CHAIRLIFT_BASE;
    changed.name = CHAIRLIFT_ISA_NAME;
    set_integer_products(changed.linear, std::make_integer_sequence<int, kNumWeightFormats>());
    changed.ceilings = ceiling_loops();
    return changed;
  }();
  return table;
}

}  // namespace chairlift::CHAIRLIFT_ISA
