#include "packed_matrix.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <vector>

#include "halves.h"
#include "pool.h"

namespace chairlift {
namespace {

constexpr const char* kNames[kNumWeightFormats] = {"q4_0", "q4_1", "q8_0", "int8", "bf16", "f16", "f32"};

bool is_q4(WeightFormat format) { return format == WeightFormat::q4_0 || format == WeightFormat::q4_1; }
bool is_grouped(WeightFormat format) { return format <= WeightFormat::q8_0; }

// The offset of the value of input k of the first row of a stripe of floats, in values.
int64_t input_offset(WeightFormat format, int64_t k) {
  return format == WeightFormat::bf16 ? k / 2 * 2 * kStripe + k % 2 : k * kStripe;
}

// The distance of rows of a stripe of floats, in values.
int64_t row_distance(WeightFormat format) { return format == WeightFormat::bf16 ? 2 : 1; }

int64_t value_bytes(WeightFormat format) { return format == WeightFormat::f32 ? 4 : 2; }

// The bytes of the values of a stripe, without its scales.
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

// Writes one group of 32 floats as a GGUF block, rounded like the reference of ggml.
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

int shift_of(WeightFormat format) {
  if (format == WeightFormat::q4_0) return 8;
  return format == WeightFormat::q4_1 ? 0 : 128;
}

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
    throw std::invalid_argument("a matrix needs at least one row and one column, got " + std::to_string(out_features) +
                                " x " + std::to_string(in_features));
  data_ = static_cast<uint8_t*>(std::aligned_alloc(64, static_cast<size_t>(num_bytes())));
  if (!data_) throw std::bad_alloc();
  // A byte of 128 means zero where bytes are shifted. Values with a zero scale may be anything.
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
      std::memcpy(stripe + (input_offset(format_, k) + lane * row_distance(format_)) * size, source + k * size, static_cast<size_t>(size));
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
      const uint8_t* value = stripe + (input_offset(format_, k) + lane * row_distance(format_)) * size;
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

}  // namespace chairlift
