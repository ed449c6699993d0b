#include "linear.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#include "halves.h"
#include "isa.h"
#include "kept_memory.h"
#include "pool.h"

namespace chairlift {
namespace {

constexpr const char* kNames[kNumWeightFormats] = {"q4_0", "q4_1", "q8_0", "int8", "bf16", "f16", "f32"};

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

bool is_q4(WeightFormat format) { return format == WeightFormat::q4_0 || format == WeightFormat::q4_1; }
bool is_grouped(WeightFormat format) { return format <= WeightFormat::q8_0; }

int64_t value_bytes(WeightFormat format) { return format == WeightFormat::f32 ? 4 : 2; }

// Bytes of a stripe's values, without its scales.
int64_t values_bytes(WeightFormat format, int64_t padded_inputs) {
  if (is_q4(format)) return padded_inputs * kStripe / 2;
  if (is_integer(format)) return padded_inputs * kStripe;
  return padded_inputs * kStripe * value_bytes(format);
}

int64_t scales_bytes(WeightFormat format, int64_t padded_inputs) {
  if (format == WeightFormat::int8) return kStripe * 4;
  if (!is_grouped(format)) return 0;
  return padded_inputs / kGroup * kStripe * 2 * (format == WeightFormat::q4_1 ? 2 : 1);
}

int shift_of(WeightFormat format) {
  if (format == WeightFormat::q4_0) return 8;
  return format == WeightFormat::q4_1 ? 0 : 128;
}

uint16_t read_half(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return bits;
}

float largest_magnitude(const float* x, int64_t n) {
  float top = 0;
  for (int64_t i = 0; i < n; ++i) top = std::max(top, std::fabs(x[i]));
  return top;
}

int to_byte(float x) { return std::clamp(static_cast<int>(std::nearbyint(x)), -127, 127); }

// One group of 32 floats as the bytes of a GGUF block; rounding as ggml's reference does it.
void round_q4_0(const float* x, uint8_t* block) {
  float extreme = 0;
  for (int i = 0; i < kGroup; ++i)
    if (std::fabs(x[i]) > std::fabs(extreme)) extreme = x[i];
  const float scale = extreme / -8, inverse = scale != 0 ? 1 / scale : 0;
  const uint16_t half = float_to_half(scale);
  std::memcpy(block, &half, 2);
  for (int i = 0; i < 16; ++i) {
    const int low = std::min(15, static_cast<int>(x[i] * inverse + 8.5f));
    const int high = std::min(15, static_cast<int>(x[i + 16] * inverse + 8.5f));
    block[2 + i] = static_cast<uint8_t>(low | high << 4);
  }
}

void round_q4_1(const float* x, uint8_t* block) {
  const auto [low_end, high_end] = std::minmax_element(x, x + kGroup);
  const float scale = (*high_end - *low_end) / 15, inverse = scale != 0 ? 1 / scale : 0, minimum = *low_end;
  const uint16_t halves[2] = {float_to_half(scale), float_to_half(minimum)};
  std::memcpy(block, halves, 4);
  for (int i = 0; i < 16; ++i) {
    const int low = std::min(15, static_cast<int>((x[i] - minimum) * inverse + 0.5f));
    const int high = std::min(15, static_cast<int>((x[i + 16] - minimum) * inverse + 0.5f));
    block[4 + i] = static_cast<uint8_t>(low | high << 4);
  }
}

void round_q8_0(const float* x, uint8_t* block) {
  const float scale = largest_magnitude(x, kGroup) / 127, inverse = scale != 0 ? 1 / scale : 0;
  const uint16_t half = float_to_half(scale);
  std::memcpy(block, &half, 2);
  for (int i = 0; i < kGroup; ++i) block[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(to_byte(x[i] * inverse)));
}

int64_t block_bytes(WeightFormat format) {
  switch (format) {
    case WeightFormat::q4_0: return 18;
    case WeightFormat::q4_1: return 20;
    default: return 34;
  }
}

}  // namespace

WeightFormat parse_weight_format(const std::string& name) {
  for (int i = 0; i < kNumWeightFormats; ++i)
    if (name == kNames[i]) return static_cast<WeightFormat>(i);
  throw std::invalid_argument("format must be one of q4_0, q4_1, q8_0, int8, bf16, f16, f32, got '" + name + "'");
}

const char* name_of(WeightFormat format) { return kNames[static_cast<int>(format)]; }

PackedMatrix::PackedMatrix(WeightFormat format, int64_t out_features, int64_t in_features)
    : format_(format),
      out_features_(out_features),
      in_features_(in_features),
      padded_inputs_(round_up(in_features, kGroup)),
      stripe_bytes_(round_up(values_bytes(format, padded_inputs_) + scales_bytes(format, padded_inputs_), 64)) {
  if (out_features < 1 || in_features < 1)
    throw std::invalid_argument("a matrix needs at least one row and one column");
  data_ = static_cast<uint8_t*>(std::aligned_alloc(64, static_cast<size_t>(num_bytes())));
  if (!data_) throw std::bad_alloc();
  // A byte of 128 stands for zero where bytes are shifted; what scales are zero for may hold anything.
  std::memset(data_, 0, static_cast<size_t>(num_bytes()));
  if (format == WeightFormat::int8)
    for (int64_t s = 0; s < num_stripes(); ++s)
      std::memset(data_ + s * stripe_bytes_, 128, static_cast<size_t>(values_bytes(format, padded_inputs_)));
}

PackedMatrix::~PackedMatrix() { std::free(data_); }

int64_t PackedMatrix::source_row_bytes() const {
  if (format_ == WeightFormat::int8) return 0;
  if (is_grouped(format_)) return padded_inputs_ / kGroup * block_bytes(format_);
  return in_features_ * value_bytes(format_);
}

void PackedMatrix::pack_row_blocks(int64_t row, const uint8_t* source) {
  const int64_t lane = row % kStripe, groups = padded_inputs_ / kGroup;
  uint8_t* stripe = stripe_of(row);
  if (!is_integer(format_)) {
    const int64_t size = value_bytes(format_);
    for (int64_t k = 0; k < in_features_; ++k)
      std::memcpy(stripe + (k * kStripe + lane) * size, source + k * size, static_cast<size_t>(size));
    return;
  }
  uint8_t* scales = stripe + values_bytes(format_, padded_inputs_) + lane * 2;
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* block = source + g * block_bytes(format_);
    std::memcpy(scales + g * kStripe * 2, block, 2);
    if (format_ == WeightFormat::q4_1) std::memcpy(scales + (groups + g) * kStripe * 2, block + 2, 2);
    if (is_q4(format_)) {
      const uint8_t* nibbles = block + (format_ == WeightFormat::q4_1 ? 4 : 2);
      uint8_t* planes = stripe + g * kGroup * kStripe / 2 + lane * 4;
      for (int p = 0; p < 4; ++p) std::memcpy(planes + p * kStripe * 4, nibbles + p * 4, 4);
    } else {
      uint8_t* quads = stripe + g * kGroup * kStripe + lane * 4;
      for (int i = 0; i < kGroup; ++i) quads[i / 4 * kStripe * 4 + i % 4] = block[2 + i] ^ 0x80;
    }
  }
}

void PackedMatrix::pack_row_floats(int64_t row, const float* source) {
  if (format_ == WeightFormat::int8) {
    uint8_t* stripe = stripe_of(row);
    const int64_t lane = row % kStripe;
    const float scale = largest_magnitude(source, in_features_) / 127, inverse = scale != 0 ? 1 / scale : 0;
    std::memcpy(stripe + padded_inputs_ * kStripe + lane * 4, &scale, 4);
    for (int64_t k = 0; k < in_features_; ++k)
      stripe[(k / 4 * kStripe + lane) * 4 + k % 4] = static_cast<uint8_t>(to_byte(source[k] * inverse) + 128);
    return;
  }
  std::vector<uint8_t> bytes(static_cast<size_t>(source_row_bytes()));
  if (is_grouped(format_)) {
    std::vector<float> padded(static_cast<size_t>(padded_inputs_), 0.0f);
    std::copy_n(source, in_features_, padded.begin());
    const auto round =
        format_ == WeightFormat::q4_0 ? round_q4_0 : format_ == WeightFormat::q4_1 ? round_q4_1 : round_q8_0;
    for (int64_t g = 0; g < padded_inputs_ / kGroup; ++g)
      round(padded.data() + g * kGroup, bytes.data() + g * block_bytes(format_));
  } else if (format_ == WeightFormat::f32) {
    std::memcpy(bytes.data(), source, bytes.size());
  } else {
    for (int64_t k = 0; k < in_features_; ++k) {
      const uint16_t half = format_ == WeightFormat::f16 ? float_to_half(source[k]) : float_to_brain(source[k]);
      std::memcpy(bytes.data() + 2 * k, &half, 2);
    }
  }
  pack_row_blocks(row, bytes.data());
}

void PackedMatrix::unpack_row(int64_t row, float* out) const {
  const int64_t lane = row % kStripe, groups = padded_inputs_ / kGroup;
  const uint8_t* stripe = this->stripe(row / kStripe);
  if (!is_integer(format_)) {
    const int64_t size = value_bytes(format_);
    for (int64_t k = 0; k < in_features_; ++k) {
      const uint8_t* value = stripe + (k * kStripe + lane) * size;
      if (format_ == WeightFormat::f32)
        std::memcpy(out + k, value, 4);
      else
        out[k] = format_ == WeightFormat::f16 ? half_to_float(read_half(value)) : brain_to_float(read_half(value));
    }
    return;
  }
  const uint8_t* scales = stripe + values_bytes(format_, padded_inputs_);
  float row_scale = 0;
  if (format_ == WeightFormat::int8) std::memcpy(&row_scale, scales + lane * 4, 4);
  for (int64_t g = 0; g < groups; ++g) {
    const float scale = is_grouped(format_) ? half_to_float(read_half(scales + (g * kStripe + lane) * 2)) : row_scale;
    const bool has_minimum = format_ == WeightFormat::q4_1;
    const float minimum = has_minimum ? half_to_float(read_half(scales + ((groups + g) * kStripe + lane) * 2)) : 0;
    const int count = static_cast<int>(std::min<int64_t>(kGroup, in_features_ - g * kGroup));
    for (int i = 0; i < count; ++i) {
      int value;
      if (is_q4(format_)) {
        const uint8_t byte = stripe[g * kGroup * kStripe / 2 + i % 16 / 4 * kStripe * 4 + lane * 4 + i % 4];
        value = i < 16 ? byte & 15 : byte >> 4;
      } else {
        value = stripe[g * kGroup * kStripe + i / 4 * kStripe * 4 + lane * 4 + i % 4];
      }
      out[g * kGroup + i] = scale * static_cast<float>(value - shift_of(format_)) + minimum;
    }
  }
}

void PackedMatrix::pack_blocks(int64_t first_row, int64_t num_rows, const uint8_t* source, int64_t row_stride) {
  Pool::get().run(num_rows, [&](int64_t i, int) { pack_row_blocks(first_row + i, source + i * row_stride); });
}

void PackedMatrix::pack_floats(int64_t first_row, int64_t num_rows, const float* source, int64_t row_stride) {
  Pool::get().run(num_rows, [&](int64_t i, int) { pack_row_floats(first_row + i, source + i * row_stride); });
}

void PackedMatrix::unpack(int64_t first_row, int64_t num_rows, float* out) const {
  Pool::get().run(num_rows, [&](int64_t i, int) { unpack_row(first_row + i, out + i * in_features_); });
}

void PackedMatrix::gather(const int64_t* ids, int64_t n, float* out) const {
  Pool::get().run(n, [&](int64_t i, int) { unpack_row(ids[i], out + i * in_features_); });
}

// --- Linear ---------------------------------------------------------------------------------------------------------

// Activations of all rows, block by block, in memory of the calling thread. The outliers of a block come after all
// blocks: they have room for the most there can be, and touch little of it.
struct Linear::Activations {
  Activations(const PackedMatrix& matrix, int64_t rows)
      : tiles(isa().linear),
        shift(shift_of(matrix.format())),
        integer(is_integer(matrix.format())),
        num_blocks((rows + tiles.block_rows - 1) / tiles.block_rows) {
    const int64_t values = matrix.padded_inputs() * tiles.block_rows;
    group = activation_group(matrix.format());
    const int64_t groups = (matrix.padded_inputs() + group - 1) / group;
    values_bytes = integer ? values : values * 4;
    scales_bytes = integer ? groups * tiles.block_rows * 4 : 0;
    max_outliers = std::min(matrix.padded_inputs() / kMinOutlier * tiles.block_rows, matrix.padded_inputs());
    block_bytes = round_up(values_bytes + 3 * scales_bytes, 64);
    outlier_bytes = integer ? round_up(4 * (1 + (1 + tiles.block_rows) * max_outliers), 64) : 0;
    data = memory(static_cast<size_t>(num_blocks * (block_bytes + outlier_bytes)));
  }

  ActivationBlock block(int64_t index) const {
    uint8_t* at = data + index * block_bytes;
    uint8_t* scale = at + values_bytes;
    auto* outliers = reinterpret_cast<int32_t*>(data + num_blocks * block_bytes + index * outlier_bytes);
    return {at,       reinterpret_cast<float*>(scale), reinterpret_cast<int32_t*>(scale + scales_bytes),
            reinterpret_cast<float*>(scale + 2 * scales_bytes), outliers, outliers + 1,
            reinterpret_cast<float*>(outliers + 1 + max_outliers)};
  }

  static uint8_t* memory(size_t num_bytes) {
    thread_local KeptMemory kept;
    return static_cast<uint8_t*>(kept.get(num_bytes));
  }

  const LinearTiles& tiles;
  int shift, group;
  bool integer;
  int64_t num_blocks, values_bytes, scales_bytes, max_outliers, block_bytes, outlier_bytes;
  uint8_t* data;
};

Linear::Linear(std::shared_ptr<const PackedMatrix> matrix, std::vector<float> bias, Prologue prologue,
               std::vector<float> norm_weight, std::vector<float> norm_bias, float eps)
    : matrix_(std::move(matrix)),
      bias_(std::move(bias)),
      prologue_(prologue),
      norm_weight_(std::move(norm_weight)),
      norm_bias_(std::move(norm_bias)),
      eps_(eps) {
  const auto in = static_cast<size_t>(matrix_->in_features()), out = static_cast<size_t>(matrix_->out_features());
  const bool has_norm = prologue == Prologue::rms_norm || prologue == Prologue::layer_norm;
  if (!bias_.empty() && bias_.size() != out) throw std::invalid_argument("bias must have out_features values");
  if (norm_weight_.size() != (has_norm ? in : 0)) throw std::invalid_argument("norm_weight must have in_features values");
  if (norm_bias_.size() != (prologue == Prologue::layer_norm ? in : 0))
    throw std::invalid_argument("norm_bias must have in_features values");
  if (!bias_.empty()) bias_.resize(static_cast<size_t>(matrix_->num_stripes() * kStripe), 0.0f);
}

namespace {

// How far above its group's mean magnitude an input must be to be an outlier: kMinOutlier or more. Behind a norm a few
// channels are always large, and every product of the layer sees what rounding does to their neighbours. What a gated
// activation gives has many large values, and each of them costs. docs/adr/0014 has the measurements.
float outlier_after(Prologue prologue) {
  switch (prologue) {
    case Prologue::rms_norm:
    case Prologue::layer_norm: return kMinOutlier;
    case Prologue::none: return 8;
    default: return 12;
  }
}

// What one thread needs to prepare a block: a row, all rows in bytes, and the block's outliers before they are gathered.
// `padded_inputs` are whole activation groups.
struct PrepareScratch {
  PrepareScratch(uint8_t* memory, int64_t padded_inputs, int64_t block_rows)
      : row(reinterpret_cast<float*>(memory)),
        outlier_values(row + padded_inputs),
        bytes(reinterpret_cast<int8_t*>(outlier_values + padded_inputs * block_rows)),
        outlier_rows(reinterpret_cast<uint8_t*>(bytes + padded_inputs * block_rows)) {}

  static size_t num_bytes(int64_t padded_inputs, int64_t block_rows) {
    return static_cast<size_t>(padded_inputs * (4 + 5 * block_rows + 1));
  }

  float* row;
  float* outlier_values;
  int8_t* bytes;
  uint8_t* outlier_rows;
};

void gather_outliers(const PrepareScratch& scratch, int64_t padded_inputs, int64_t block_rows,
                     const ActivationBlock& to) {
  auto* inputs = const_cast<int32_t*>(to.outlier_inputs);
  auto* values = const_cast<float*>(to.outlier_values);
  int32_t count = 0;
  for (int64_t word = 0; word < padded_inputs; word += 8) {
    uint64_t eight;
    std::memcpy(&eight, scratch.outlier_rows + word, 8);
    if (!eight) continue;
    for (int64_t k = word; k < word + 8; ++k) {
      const unsigned rows = scratch.outlier_rows[k];
      if (!rows) continue;
      inputs[count] = static_cast<int32_t>(k);
      for (int64_t r = 0; r < block_rows; ++r)
        values[count * block_rows + r] = rows >> r & 1 ? scratch.outlier_values[k * block_rows + r] : 0;
      ++count;
    }
  }
  *const_cast<int32_t*>(to.num_outlier_inputs) = count;
}

}  // namespace

// One block of rows through the prologue and into the layout that tiles read.
void Linear::prepare(const Activations& activations, int64_t block, const float* x, int64_t x_stride, int64_t rows,
                     uint8_t* memory) const {
  const LinearTiles& tiles = activations.tiles;
  const int64_t inputs = matrix_->in_features(), padded = matrix_->padded_inputs();
  const ActivationBlock to = activations.block(block);
  const PrologueArgs args = {prologue_, norm_weight_.data(), norm_bias_.data(), eps_};
  const int64_t first = block * tiles.block_rows, last = std::min<int64_t>(first + tiles.block_rows, rows);
  const int64_t whole_groups = round_up(padded, activations.group);
  const PrepareScratch scratch(memory, whole_groups, tiles.block_rows);
  if (activations.integer) std::memset(scratch.outlier_rows, 0, static_cast<size_t>(padded));
  for (int64_t r = first; r < last; ++r) {
    tiles.prologue(args, x + r * x_stride, inputs, scratch.row);
    for (int64_t i = inputs; i < whole_groups; ++i) scratch.row[i] = 0;
    const RowTarget target = {const_cast<void*>(to.values),         const_cast<float*>(to.scale),
                              const_cast<int32_t*>(to.correction),  const_cast<float*>(to.sum),
                              static_cast<int>(r - first),          activations.group,
                              outlier_after(prologue_),            scratch.outlier_rows,
                              scratch.outlier_values};
    if (activations.integer)
      tiles.quantize(scratch.row, padded, activations.shift, scratch.bytes + (r - first) * whole_groups, target);
    else
      tiles.interleave(scratch.row, padded, target);
  }
  if (!activations.integer) return;
  tiles.interleave_steps(scratch.bytes, whole_groups, padded, static_cast<int8_t*>(const_cast<void*>(to.values)));
  gather_outliers(scratch, padded, tiles.block_rows, to);
}

void Linear::operator()(const float* x, int64_t x_stride, int64_t rows, float* out, int64_t out_stride,
                        bool add) const {
  if (rows <= 0) return;
  Pool& pool = Pool::get();
  const Activations activations(*matrix_, rows);
  const int64_t padded = matrix_->padded_inputs(), block_rows = activations.tiles.block_rows;
  const size_t scratch_bytes = PrepareScratch::num_bytes(round_up(padded, activations.group), block_rows);
  const auto prepare_block = [&](int64_t block, int worker) {
    prepare(activations, block, x, x_stride, rows, static_cast<uint8_t*>(pool.scratch(worker, scratch_bytes)));
  };
  if (activations.num_blocks == 1)
    prepare_block(0, 0);
  else
    pool.run(activations.num_blocks, prepare_block);

  // A tile of the pool is some stripes times some blocks of rows. Blocks are what fits the second-level cache; then as
  // many stripes as give every thread several tiles. Few rows of formats that fetch ahead take one stripe after the
  // other: they wait for memory, which reads best in order.
  constexpr int64_t kActivationBytes = 256 << 10;
  constexpr int64_t kTilesPerThread = 12;
  constexpr int64_t kFewRows = 2;
  const int64_t per_tile = std::clamp<int64_t>(kActivationBytes / activations.block_bytes, 1, activations.num_blocks);
  const int64_t row_tiles = (activations.num_blocks + per_tile - 1) / per_tile;
  const bool fetches = !is_q4(matrix_->format());
  const int64_t stripes = matrix_->num_stripes();
  const int64_t at_once = fetches && rows <= kFewRows ? 1 : activations.tiles.tile_stripes;
  const int64_t wanted = std::max<int64_t>(1, pool.num_threads() * kTilesPerThread / row_tiles);
  const int64_t stripes_per_tile = std::max<int64_t>(1, stripes / at_once / wanted) * at_once;
  const int64_t stripe_tiles = (stripes + stripes_per_tile - 1) / stripes_per_tile;
  const auto multiply = activations.tiles.multiply[static_cast<int>(matrix_->format())];

  pool.run(row_tiles * stripe_tiles, [&](int64_t tile, int) {
    const int64_t first_stripe = tile % stripe_tiles * stripes_per_tile, first_block = tile / stripe_tiles * per_tile;
    const int64_t last_stripe = std::min(first_stripe + stripes_per_tile, stripes);
    const int64_t last_block = std::min(first_block + per_tile, activations.num_blocks);
    for (int64_t s = first_stripe, count; s < last_stripe; s += count) {
      count = last_stripe - s < at_once ? 1 : at_once;
      const int64_t column = s * kStripe;
      for (int64_t b = first_block; b < last_block; ++b) {
        const int64_t row = b * block_rows;
        multiply({matrix_->stripe(s), matrix_->stripe_bytes(), static_cast<int>(count),
                  fetches && b == first_block, padded, activations.block(b),
                  static_cast<int>(std::min(block_rows, rows - row)),
                  bias_.empty() ? nullptr : bias_.data() + column, out + row * out_stride + column, out_stride,
                  static_cast<int>(std::min<int64_t>(count * kStripe, matrix_->out_features() - column)), add});
      }
    }
  });
}

}  // namespace chairlift
