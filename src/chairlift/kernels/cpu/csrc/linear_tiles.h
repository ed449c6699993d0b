// Products of packed weights and rows of activations: the functions that are compiled for each instruction set.
#pragma once

#include <cstdint>

namespace chairlift {

enum class WeightFormat { q4_0, q4_1, q8_0, int8, bf16, f16, f32 };
constexpr int kNumWeightFormats = 7;
constexpr bool is_integer(WeightFormat format) { return format <= WeightFormat::int8; }

// A stripe is sixteen output rows, interleaved so that one vector load reads the same inputs of all of them.
//
//   q4_0, q4_1   [groups of 32][4 planes][16 rows][4 bytes]   byte i of plane p: inputs 4p + i (low), 16 + 4p + i (high)
//                then [groups][16] f16 scales; q4_1: then [groups][16] f16 minimums
//   q8_0         [groups of 32][8][16 rows][4 bytes], each value plus 128; then [groups][16] f16 scales
//   int8         [inputs / 4][16 rows][4 bytes], each value plus 128; then [16] f32 scales
//   bf16 .. f32  [inputs][16 rows]
//
// Rows beyond the matrix are zero, and so are inputs up to the next multiple of 32.
constexpr int kStripe = 16;
constexpr int kGroup = 32;

// Activations of eight bits have one scale for each group of 32 inputs if the weights have scales of groups too. With
// int8 weights they have one scale for each row, so that one sum of integers runs over all inputs.
constexpr bool has_row_scale(WeightFormat format) { return format == WeightFormat::int8; }

// Activations are interleaved in the same way, in blocks of kBlockRows rows (a constant of the instruction set):
//
//   q4_0, q4_1, q8_0   values [inputs / 4][block rows][4] int8; for each group, [groups][block rows] of scale (f32),
//                      correction (int32: minus the sum of the values times the shift of the weights) and sum (f32:
//                      scale times the sum of the values)
//   int8               the same values; [block rows] of scale, correction and outlier correction (int32, in `sum`)
//   bf16, f16, f32     values [inputs][block rows] f32
//
// Outliers are inputs of several times the mean magnitude of their group or row, which would leave too few of the eight
// bits for the other inputs. They are stored for each entry that has an outlier in any row of the block, in ascending
// order, with zeros for the other rows:
//
//   q4_0, q4_1, q8_0   entries are inputs, [block rows] f32; `values` has zeros there
//   int8               entries are quads of four inputs, [block rows][4] int8. Activation / scale is an integer of up to
//                      15 bits, of which these are the multiples of 128, and `values` has the rest
struct ActivationBlock {
  const void* values;
  const float* scale;
  const int32_t* correction;
  const void* sum;
  const int32_t* num_outliers;
  const int32_t* outliers;  // the index of each entry
  const void* outlier_values;
};
// Fewer than n / kMinOutlier of n values can exceed kMinOutlier times their mean.
constexpr int kMinOutlier = 4;
// The largest activation / scale of int8: 127 * 128 plus a rest that rounds down.
constexpr int kLargestStep = 127 * 128 + 63;

// The product of one stripe, or all stripes of a tile, with one block of rows. Columns are outputs.
struct StripeTask {
  const uint8_t* stripe;
  int64_t stripe_bytes;  // the distance between stripes
  int num_stripes;       // 1 or LinearTiles::tile_stripes
  const uint8_t* ahead;  // weights to be prefetched
  int64_t ahead_bytes;
  int64_t ahead_step;  // bytes to be prefetched with each group of inputs
  int64_t padded_inputs;
  ActivationBlock block;
  int num_rows;
  const float* bias;  // [16] per stripe, or null
  float* out;         // the output of the first row and column
  int64_t out_stride;
  int num_columns;
  bool add;  // out += instead of out =
};

enum class Prologue { none, rms_norm, layer_norm, silu_and_mul, relu };

// The function of a row before the product.
struct PrologueArgs {
  Prologue kind;
  const float* weight;
  const float* bias;
  float eps;
};

// The destination of the activations of a row: the arrays of its block (`values` for float formats only), and its
// index.
struct RowTarget {
  void* values;
  float* scale;
  int32_t* correction;
  void* sum;
  int row;
  float outlier;          // the threshold of outliers, in multiples of the mean magnitude of their group or row
  uint8_t* outlier_rows;  // [entries]: one bit per row
  void* outlier_values;   // [entries][block rows], each of four bytes
};

struct LinearTiles {
  int block_rows, tile_stripes;
  void (*multiply[kNumWeightFormats])(const StripeTask& task);
  // Computes y [inputs] from x [inputs], or x [2 * inputs] for silu_and_mul; y may be x. next: a row to be prefetched.
  void (*prologue)(const PrologueArgs& args, const float* x, const float* next, int64_t inputs, float* y);
  // Quantizes y [padded_inputs] to one byte of `steps` per input. shift: the difference between stored and true weights.
  void (*quantize_groups)(const float* y, int64_t padded_inputs, int shift, int8_t* steps, const RowTarget& target);
  void (*quantize_row)(const float* y, int64_t padded_inputs, int shift, int8_t* steps, const RowTarget& target);
  // Copies the steps of block_rows rows, `stride` apart, to the values of a block.
  void (*interleave_steps)(const int8_t* steps, int64_t stride, int64_t padded_inputs, int8_t* values);
  void (*interleave)(const float* y, int64_t padded_inputs, const RowTarget& target);
};

}  // namespace chairlift
