// Products of packed weights and rows of activations: the functions that are compiled for each instruction set.
#pragma once

#include <cstdint>

#include "linear/weight_formats.h"

namespace chairlift {

// A stripe is sixteen output rows, interleaved so that one vector load reads the same inputs of all of them.
//
//   grouped      [groups of 32][low bits, then high bits] in planes of [16 rows][4 bytes], see place_of_quad;
//                then for each group [16] scales and [16] minimums or zero points; then for each 256 inputs the same
//                super-scales
//   int8         [inputs / 4][16 rows][4 bytes], each value plus 128; then [16] f32 scales
//   f8_e4m3      [inputs][16 rows][1]; then for each 128 inputs [16] f32 scales, times 256 (see load_e4m3)
//   bf16         [inputs / 2][16 rows][2]
//   f16, f32     [inputs][16 rows]
//
// Rows beyond the matrix are zero, and so are inputs up to the next multiple of 32.
//
// Stripes of grouped weights that many blocks of rows multiply are unpacked to [inputs / 4][16 rows][4] codes, then for
// each group [16] f32 scales and, in formats with minimums, [16] f32 minimums. With tiles, scales that are factors are int32,
// and for each 256 inputs the f32 super-scales follow.

// Activations of eight bits have one scale for each row. If the weights have scales of groups too, the activations of a group
// of 32 inputs have a 2^k-th of it, the smallest that fits them, down to 2^-24. A group has no product with this 2^-k: its
// integers are added to the bits of the float 3 * 2^(22 - k), whose last bit is 2^-k.
//
// If the scales of weights are factors in any matrix of the layer and the instruction set has tiles, the activations of 256
// inputs have the same scale, so one sum of integers runs over all of them; if they are in every matrix, it needs no power of two.
constexpr bool has_row_scale(WeightFormat format) { return format == WeightFormat::int8; }

// The layout of the activations of a block of rows; the number of rows is a constant of layout and instruction set.
//
//   bytes        values [inputs / 4][block rows][4] int8
//   byte_tiles   values [inputs / 64][block rows][64] int8, zero beyond the last input
//   floats       values [inputs][block rows] f32
//   bf16_pairs   values [inputs / 2][block rows][2] bf16
//   bf16_tiles   values [inputs / 32][block rows][32] bf16
//
// Bytes have [block rows] of scale (f32). With grouped weights there are, for each group of 32, [groups][block rows] of start
// (f32: 3 * 2^(22 - k), as above, or where every matrix has factors its scale, as a part of the row's), correction (int32: minus
// the sum of the values) and sum (f32: the sum of the values times 2^-k); and if weights have groups of 16, [groups of 16][block
// rows] of the same correction. With int8 there are [block rows] of correction (minus the sum of the values times the 128 of the
// weights) and outlier correction (int32, in `sum`).
//
// Outliers are inputs that their scale does not reach, because several times the mean magnitude of its inputs would leave too few
// of the eight bits for the others. Each row has a list of them (see OutlierList):
//
//   grouped   entries are inputs, values are f32; `values` has zeros there
//   int8      entries are quads of four inputs, values [4] int8. Activation / scale is an integer of up to 15 bits, of
//             which these are the multiples of 128, and `values` has the rest
//
// In the layout `byte_tiles` of int8, inputs that are outliers in many rows of the step are no part of the lists. They are
// the entries of all blocks, at most one tile of them, values [block rows][64] int8.
enum class ActivationLayout { bytes, byte_tiles, floats, bf16_pairs, bf16_tiles };

// Whether activations are rounded to bfloat16.
constexpr bool is_bf16(ActivationLayout layout) {
  return layout == ActivationLayout::bf16_pairs || layout == ActivationLayout::bf16_tiles;
}
// Whether a row of a block is lines of 64 bytes. In other layouts it is words of four bytes.
constexpr bool has_lines(ActivationLayout layout) {
  return layout == ActivationLayout::byte_tiles || layout == ActivationLayout::bf16_tiles;
}

struct ActivationBlock {
  const void* values;
  const float* scale;
  const float* start;  // of groups
  bool has_powers;     // whether these are floats whose last bit is a power of two
  const int32_t* correction;
  const void* sum;
  const int32_t* half_correction;  // of groups of 16; null if no weights have them
  const int32_t* outlier_lists;  // of the rows, outlier_list_ints apart
  const int32_t* num_outliers;  // of all blocks, if some inputs are no part of the lists
  const int32_t* outliers;  // these inputs
  const void* outlier_values;
};
// The float whose last bit is 1, and which has the same last bit after the addition of an integer of up to 22 bits.
constexpr float kIntegerStart = 0x1.8p23f;
// Fewer than n / kMinOutlier of n values can exceed kMinOutlier times their mean.
constexpr int kMinOutlier = 3;
// The largest activation / scale of int8: 127 * 128 plus a rest that rounds down.
constexpr int kLargestStep = 127 * 128 + 63;

// The product of one stripe, or all stripes of a tile, with some blocks of rows. Columns are outputs.
struct StripeTask {
  const ActivationBlock& block() const { return *blocks; }  // the only one

  const uint8_t* stripe;
  int64_t stripe_bytes;  // the distance between stripes
  int num_stripes;       // 1 or ProductKernel::tile_stripes
  const uint8_t* ahead;  // weights that the task prefetches, unless it leaves that to the CPU
  int64_t ahead_bytes;
  int64_t ahead_step;  // bytes to be prefetched with each group of inputs of each block
  int64_t padded_inputs;
  const ActivationBlock* blocks;
  int num_blocks;  // 1 to ProductKernel::max_blocks
  int num_rows;    // of all blocks, or of a tile
  const float* bias;  // [16] per stripe, or null
  float* out;         // the output of the first row and column
  int64_t out_stride;
  int num_columns;
  bool add;  // out += instead of out =
  // If a range of the inputs is multiplied: its tiles of inputs, and the sums of the blocks before and after it.
  int64_t first_tile = 0, end_tile = 0;
  uint8_t* sums = nullptr;
};

enum class Prologue {
  none, rms_norm, layer_norm, silu, gelu, gelu_tanh, relu, relu2, xielu,
  silu_and_mul, gelu_and_mul, gelu_tanh_and_mul, relu_and_mul, relu2_and_mul, swigluoai_and_mul,
};

constexpr bool is_norm(Prologue kind) { return kind == Prologue::rms_norm || kind == Prologue::layer_norm; }
constexpr bool is_gated(Prologue kind) { return kind >= Prologue::silu_and_mul; }

// The function of a row before the product.
struct PrologueArgs {
  Prologue kind;
  const float* weight;
  const float* bias;
  float eps;
  // The factor of the gate of a gated activation, or null for 1; alpha_p, alpha_n, beta and eps of xielu.
  const float* parameters = nullptr;
};

// The sum of the residual stream and a branch: of_sum(stream + multiplier * after(branch)).
struct ResidualArgs {
  PrologueArgs after, of_sum;  // norms or none
  float multiplier;
  float scale = 1;  // the factor of the result
};

// The function of the logits of gates.
enum class GateActivation { sigmoid, softplus };

// The outliers of a row in memory are their number, the entries and the values, with space for the largest possible number and
// the vector that is stored last.
constexpr int64_t max_row_outliers(int64_t padded_inputs) { return padded_inputs / kMinOutlier + 8; }
constexpr int64_t outlier_list_ints(int64_t padded_inputs) { return 1 + 2 * max_row_outliers(padded_inputs); }

struct StoredOutliers {
  StoredOutliers(const int32_t* list, int64_t padded_inputs)
      : count(*list),
        entries(list + 1),
        values(reinterpret_cast<const uint32_t*>(entries + max_row_outliers(padded_inputs))) {}

  int32_t count;
  const int32_t* entries;
  const uint32_t* values;
};

// The outliers of a row while they are written, in ascending order of their entries.
struct OutlierList {
  void append(int64_t entry, uint32_t value) {
    entries[count] = static_cast<int32_t>(entry);
    values[count++] = value;
  }

  int32_t count = 0;
  int32_t* entries;
  uint32_t* values;  // the four bytes of a float, or of a quad
};

// The destination of the scales of a row of integers: the arrays of its block, its index and its outliers.
struct RowTarget {
  float* scale;
  float* start;
  int32_t* correction;
  void* sum;
  int32_t* half_correction;
  float* magnitudes;  // memory for two numbers of each group of a row, or of as many more as fill a vector
  int row, block_rows;
  float outlier;  // the threshold of outliers, in multiples of the mean magnitude of the inputs that share their scale
  bool has_supers;  // whether the groups of a super-block share a scale
  bool has_powers;  // whether scales of groups are powers of two times the scale of the row
  OutlierList* outliers;
  const float* next;  // a row to be prefetched
};

constexpr int kMaxBlocks = 16;  // of rows that share weights in the caches
constexpr int kMinManyRows = 16;  // rows of a call from which `of_many_rows` is used, if its kernel has no other number

// The product with weights of one format, and the layout of its activations.
struct ProductKernel {
  int block_rows, tile_stripes;
  ActivationLayout layout;
  void (*multiply)(const StripeTask& task);
  // Converts values of a row to those of the layout; null where these are bytes, which have scales.
  void (*convert)(const float* y, int64_t count, void* out) = nullptr;
  // The same product from unpacked stripes, for tiles of at least min_unpacked_blocks blocks of rows. Null if stripes of
  // this format are never unpacked.
  int min_unpacked_blocks = 0;
  void (*unpack)(const uint8_t* stripe, int64_t padded_inputs, uint8_t* unpacked) = nullptr;
  void (*multiply_unpacked)(const StripeTask& task) = nullptr;
  // Adds the products of outliers to all rows and stripes of a tile, after `multiply`; null where that does it.
  void (*add_outliers)(const StripeTask& task) = nullptr;
  // The blocks of rows of a task, at most: kMaxBlocks or fewer, which share the weights in the caches.
  int max_blocks = 1;
  // The rows of a call from which a kernel of `of_many_rows` is used.
  int min_rows = kMinManyRows;
  // The number of blocks of a tile, by the bytes of the values of a block. Null: see Linear::Tiling.
  int64_t (*row_blocks)(int64_t block_bytes) = nullptr;
  // The tiles of inputs that are multiplied at a time, by the same bytes and the number of blocks; null: all of them. Then the
  // bytes of the sums of a block.
  int64_t (*tiles_at_once)(int64_t block_bytes, int64_t num_blocks) = nullptr;
  int64_t sum_bytes = 0;
  // Called by each thread before the first task and after the last one of a job, or null.
  void (*begin)() = nullptr;
  void (*end)() = nullptr;
};

struct LinearTiles {
  ProductKernel products[kNumWeightFormats];
  // Computes y [inputs] from x [inputs], or x [2 * inputs] if it is gated; y may be x. next: a row to be prefetched.
  void (*prologue)(const PrologueArgs& args, const float* x, const float* next, int64_t inputs, float* y);
  // Computes the sum of a row of the residual stream and a branch [n] in `stream`, and overwrites `branch`. Null adds
  // nothing.
  void (*add_branch)(const ResidualArgs& args, float* branch, int64_t n, float* stream);
  // Multiplies each `shared` consecutive values of x [gates * shared] by activation(their gate).
  void (*multiply_by_gates)(GateActivation activation, const float* gate, int64_t gates, int64_t shared, float* x);
  // Quantizes y [padded_inputs] to one byte of `steps` per input, with scales for groups or one for the row.
  void (*quantize_groups)(const float* y, int64_t padded_inputs, int8_t* steps, const RowTarget& target);
  void (*quantize_row)(const float* y, int64_t padded_inputs, int8_t* steps, const RowTarget& target);
  // Copies words of rows, row_bytes apart, to `values`, the place of the first one in a block. num_words: a multiple of four.
  // num_rows: rounded up to an even number, and from three to a multiple of four.
  void (*interleave_words)(const uint8_t* rows, int64_t row_bytes, int num_rows, int64_t num_words, int block_rows,
                           uint8_t* values);
  // Products with the same bits for calls with min_rows rows or more, or kernels without functions. A layer uses them if
  // all of its matrices have one.
  ProductKernel of_many_rows[kNumWeightFormats] = {};
  // Whether the inputs of a super-block share a scale in front of weights whose scales are factors.
  bool shares_super_scales = false;
};

}  // namespace chairlift
