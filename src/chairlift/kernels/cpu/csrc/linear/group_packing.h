// Conversion between rows of blocks and stripes of grouped weights (see linear_tiles.h).
#pragma once

#include <cstdint>

#include "linear/ggml_blocks.h"

namespace chairlift {

// Writes one row of a stripe.
void pack_group_row(WeightFormat format, int64_t padded_inputs, const BlockRow& row, int64_t lane, uint8_t* stripe);

// Writes the weights of one row to out [inputs], each with the roundings of ggml's dequantization.
void unpack_group_row(WeightFormat format, int64_t padded_inputs, int64_t lane, const uint8_t* stripe, int64_t inputs,
                      float* out);

}  // namespace chairlift
