// Compiled for each instruction set: the functions of linear layers.
#include "linear_products.inl"
#include "linear_prepare.inl"

namespace chairlift::CHAIRLIFT_ISA {

static constexpr LinearTiles linear_tiles() {
  return {kBlockRows,
          kTileStripes,
          {multiply<WeightFormat::q4_0>, multiply<WeightFormat::q4_1>, multiply<WeightFormat::q8_0>,
           multiply<WeightFormat::int8>, multiply<WeightFormat::bf16>, multiply<WeightFormat::f16>,
           multiply<WeightFormat::f32>},
          prologue,
          quantize_groups,
          quantize_row,
          interleave_steps,
          interleave};
}

}  // namespace chairlift::CHAIRLIFT_ISA
