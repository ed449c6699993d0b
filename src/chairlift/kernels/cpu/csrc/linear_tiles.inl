// Compiled for each instruction set: the functions of linear layers.
#include "linear_products.inl"
#include "linear_prepare.inl"

namespace chairlift::CHAIRLIFT_ISA {

template <WeightFormat kFormat>
static constexpr ProductKernel product_kernel() {
  if (is_integer(kFormat)) return {kBlockRows, kTileStripes, ActivationLayout::bytes, multiply<kFormat>, nullptr};
  return {kBlockRows, kTileStripes, ActivationLayout::floats, multiply<kFormat>, interleave};
}

static constexpr LinearTiles linear_tiles() {
  return {{product_kernel<WeightFormat::q4_0>(), product_kernel<WeightFormat::q4_1>(),
           product_kernel<WeightFormat::q8_0>(), product_kernel<WeightFormat::int8>(),
           product_kernel<WeightFormat::bf16>(), product_kernel<WeightFormat::f16>(),
           product_kernel<WeightFormat::f32>()},
          prologue,
          quantize_groups,
          quantize_row,
          interleave_steps};
}

}  // namespace chairlift::CHAIRLIFT_ISA
