// The blocks of grouped weights: those of ggml, in which GGUF files store quantized matrices (ggml-common.h and
// ggml-quants.c of ggml), and blocks with zero points, to which loaders convert other files.
#pragma once

#include <cstdint>
#include <vector>

#include "linear/weight_formats.h"

namespace chairlift {

// A row of blocks. The weight of an input is scale * code + minimum in formats with minimums, otherwise scale * (code -
// center), plus scale * (center - zero point) in formats with zero points. A code is the entry of the number in the table of
// the format, or the number itself.
struct BlockRow {
  std::vector<uint8_t> numbers;  // [inputs]
  // direct: of each group. factor: of each 256 inputs, and factors of each group. power: no scales.
  std::vector<uint16_t> scales, minimums;  // the bits of float16
  std::vector<int> factors, minimum_factors;  // power: factors are exponents, 128 more than those of the scales
  std::vector<uint8_t> zero_points;
};

int64_t block_inputs(WeightFormat format);  // 32, 128 or 256
int64_t block_bytes(WeightFormat format);

// inputs: a multiple of block_inputs.
BlockRow read_blocks(WeightFormat format, const uint8_t* source, int64_t inputs);

// Whether floats can be rounded to the format.
constexpr bool can_round(WeightFormat format) {
  return format == WeightFormat::q4_0 || format == WeightFormat::q4_1 || format == WeightFormat::q8_0;
}
// Writes x [32] as a block, rounded like the reference of ggml.
void round_block(WeightFormat format, const float* x, uint8_t* block);

}  // namespace chairlift
