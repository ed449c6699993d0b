// Products of packed weights and rows of activations: what is compiled for each instruction set.
#pragma once

#include <cstdint>

namespace chairlift {

enum class WeightFormat { q4_0, q4_1, q8_0, int8, bf16, f16, f32 };
constexpr int kNumWeightFormats = 7;
constexpr bool is_integer(WeightFormat format) { return format <= WeightFormat::int8; }

// A stripe: sixteen output rows, interleaved so that one vector load gives the same inputs of all of them.
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
// Inputs that share one scale of the activations: where weights have a scale a group anyway, a group. Sums over more
// inputs cost less to scale.
constexpr int kWideGroup = 128;
constexpr int activation_group(WeightFormat format) { return format == WeightFormat::int8 ? kWideGroup : kGroup; }

// Activations, in blocks of kBlockRows rows (a constant of the instruction set), interleaved likewise:
//
//   integer formats   values [inputs / 4][block rows][4] int8; for each activation group, [groups][block rows] of scale
//                     (f32), correction (int32: minus the sum of the values times what weights are shifted by) and sum
//                     (f32: scale times the sum of the values)
//   float formats     values [inputs][block rows] f32
//
// Outliers: inputs that are several times the mean magnitude of their group would take all of its eight bits for
// themselves. They are zero in `values` and stand beside them as floats: for each input that is one in any of the block's
// rows, ascending, [block rows] of its values, 0 where it is none.
struct ActivationBlock {
  const void* values;
  const float* scale;
  const int32_t* correction;
  const float* sum;
  const int32_t* num_outlier_inputs;
  const int32_t* outlier_inputs;
  const float* outlier_values;
};
// Of n values fewer than n / kMinOutlier can be more than kMinOutlier times their mean.
constexpr int kMinOutlier = 5;

// One stripe, or as many as a tile has, times one block of rows. Columns are outputs.
struct StripeTask {
  const uint8_t* stripe;
  int64_t stripe_bytes;  // from one stripe to the next
  int num_stripes;       // 1 or LinearTiles::tile_stripes
  const uint8_t* ahead;  // weights that are wanted later, to be fetched
  int64_t ahead_bytes;
  int64_t ahead_step;  // with each group of inputs
  int64_t padded_inputs;
  ActivationBlock block;
  int num_rows;
  const float* bias;  // [16] a stripe, or null
  float* out;         // of the first row and column
  int64_t out_stride;
  int num_columns;
  bool add;  // out += instead of out =
};

enum class Prologue { none, rms_norm, layer_norm, silu_and_mul, relu };

// What happens to a row before it is multiplied.
struct PrologueArgs {
  Prologue kind;
  const float* weight;
  const float* bias;
  float eps;
};

// Where a row's activations go: the block's arrays (`values` of float formats only), and the row's place in it.
struct RowTarget {
  void* values;
  float* scale;
  int32_t* correction;
  float* sum;
  int row;
  int group;              // inputs that share a scale
  float outlier;          // times the mean magnitude of its group: what is larger is an outlier
  uint8_t* outlier_rows;  // [padded_inputs]: one bit a row
  float* outlier_values;  // [padded_inputs][block rows]
};

struct LinearTiles {
  int block_rows, tile_stripes;
  void (*multiply[kNumWeightFormats])(const StripeTask& task);
  // x [inputs], or [2 * inputs] for silu_and_mul, to y [inputs]; y may be x. next: a row to be fetched meanwhile.
  void (*prologue)(const PrologueArgs& args, const float* x, const float* next, int64_t inputs, float* y);
  // y [inputs], zero up to the end of the last activation group. shift: what stored weights are above their true values.
  // steps: a byte for each of them.
  void (*quantize)(const float* y, int64_t padded_inputs, int shift, int8_t* steps, const RowTarget& target);
  // The steps of block_rows rows, `stride` apart, to the values of a block.
  void (*interleave_steps)(const int8_t* steps, int64_t stride, int64_t padded_inputs, int8_t* values);
  void (*interleave)(const float* y, int64_t padded_inputs, const RowTarget& target);
};

}  // namespace chairlift
