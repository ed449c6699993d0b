#include "linear/packed_matrix.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <vector>

#include "linear/group_packing.h"
#include "runtime/halves.h"
#include "runtime/pool.h"

namespace chairlift {
namespace {

constexpr const char* kNames[kNumWeightFormats] = {
    "q2_k", "q3_k", "q4_0", "q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0", "iq4_nl",
    "iq4_xs", "mxfp4", "u4_g32", "u4_g128", "u8_g32", "int8", "f8_e4m3", "bf16", "f16", "f32"};

// The offset of the value of input k of the first row of a stripe of floats, in values.
int64_t input_offset(WeightFormat format, int64_t k) {
  return format == WeightFormat::bf16 ? k / 2 * 2 * kStripe + k % 2 : k * kStripe;
}

// The distance of rows of a stripe of floats, in values.
int64_t row_distance(WeightFormat format) { return format == WeightFormat::bf16 ? 2 : 1; }

int64_t value_bytes(WeightFormat format) { return format == WeightFormat::f32 ? 4 : 2; }

int64_t num_float_groups(int64_t inputs) { return divide_up(inputs, kFloatGroup); }

constexpr int64_t kAlignment = 64;  // of stripes

// The factor of the scales of f8_e4m3 in memory, see load_e4m3.
constexpr float kFloatFactor = 256;

// The bytes of a stripe, without padding.
int64_t unpadded_bytes(WeightFormat format, int64_t padded_inputs) {
  if (is_grouped(format)) return group_format(format).stripe_bytes(padded_inputs);
  if (format == WeightFormat::int8) return padded_inputs * kStripe + kStripe * 4;
  if (format == WeightFormat::f8_e4m3) return padded_inputs * kStripe + num_float_groups(padded_inputs) * kStripe * 4;
  return padded_inputs * kStripe * value_bytes(format);
}

// Magnitudes are compared as integers, which have the same order, because maximums of floats are compiled to vectors only
// where NaN may be ignored. NaN is the largest.
float largest_magnitude(const float* x, int64_t n) {
  int32_t top = 0;
  for (int64_t i = 0; i < n; ++i) top = std::max(top, static_cast<int32_t>(bits_of_float(x[i]) & 0x7fffffff));
  return float_of_bits(static_cast<uint32_t>(top));
}

// Writes a row of int8 as in a file: bytes, then the scale.
void round_int8(const float* x, int64_t n, uint8_t* row) {
  const float scale = largest_magnitude(x, n) / 127, inverse = scale != 0 ? 1 / scale : 0;
  for (int64_t k = 0; k < n; ++k) row[k] = rounded_byte(x[k] * inverse);
  std::memcpy(row + n, &scale, 4);
}

// Copies a row to a stripe, which has units of this number of bytes of each row in turn.
template <int64_t kUnit>
void interleave(const uint8_t* row, int64_t num_bytes, int64_t lane, uint8_t* stripe) {
  stripe += lane * kUnit;
  for (const uint8_t* const end = row + num_bytes / kUnit * kUnit; row != end; row += kUnit, stripe += kStripe * kUnit)
    std::memcpy(stripe, row, kUnit);
  std::memcpy(stripe, row, static_cast<size_t>(num_bytes) % kUnit);
}

}  // namespace

WeightFormat parse_weight_format(const std::string& name) {
  for (int i = 0; i < kNumWeightFormats; ++i)
    if (name == kNames[i]) return static_cast<WeightFormat>(i);
  std::string names;
  for (const char* const known : kNames) names += std::string(names.empty() ? "" : ", ") + known;
  throw std::invalid_argument("format must be one of " + names + ", got '" + name + "'");
}

const char* name_of(WeightFormat format) { return kNames[static_cast<int>(format)]; }

PackedMatrix::PackedMatrix(WeightFormat format, int64_t out_features, int64_t in_features)
    : format_(format),
      out_features_(out_features),
      in_features_(in_features),
      padded_inputs_(round_up(in_features, kGroup)),
      stripe_bytes_(round_up(unpadded_bytes(format, padded_inputs_), kAlignment)),
      memory_(nullptr, std::free) {
  if (out_features < 1 || in_features < 1)
    throw std::invalid_argument("a matrix needs at least one row and one column, got " + std::to_string(out_features) +
                                " x " + std::to_string(in_features));
  if (is_grouped(format) && in_features % block_inputs(format) != 0 && !can_round(format))
    throw std::invalid_argument("in_features must be a multiple of " + std::to_string(block_inputs(format)) +
                                " in format " + name_of(format) + ", got " + std::to_string(in_features));
  // Tiles read weights for a multiple of 64 inputs, which are multiplied by zero beyond the last one.
  constexpr int64_t kReadBeyond = (64 - kGroup) * kStripe;
  // Zero, because values with a zero scale may be anything. calloc leaves new pages to the threads that pack rows. What
  // alignment skips is in front, so that the address sanitizer detects reads far beyond the end.
  memory_.reset(std::calloc(static_cast<size_t>(data_bytes() + kReadBeyond + kAlignment), 1));
  if (!memory_) throw std::bad_alloc();
  data_ = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<intptr_t>(memory_.get()) + 1, kAlignment));
}

int64_t PackedMatrix::source_row_bytes() const {
  if (format_ == WeightFormat::int8) return in_features_ + 4;
  if (format_ == WeightFormat::f8_e4m3) return in_features_ + num_float_groups(in_features_) * 4;
  if (is_grouped(format_)) return divide_up(in_features_, block_inputs(format_)) * block_bytes(format_);
  return in_features_ * value_bytes(format_);
}

void PackedMatrix::pack_row_blocks(int64_t row, const uint8_t* source) {
  const int64_t lane = row % kStripe;
  uint8_t* const stripe = stripe_of(row);
  if (is_grouped(format_))
    return pack_group_row(format_, padded_inputs_, read_blocks(format_, source, padded_inputs_), lane, stripe);
  if (format_ == WeightFormat::f16) return interleave<2>(source, in_features_ * 2, lane, stripe);
  if (format_ == WeightFormat::bf16 || format_ == WeightFormat::f32)
    return interleave<4>(source, in_features_ * value_bytes(format_), lane, stripe);
  // Bytes, followed by scales in float32.
  uint8_t* const scales = stripe + padded_inputs_ * kStripe + lane * 4;
  if (format_ == WeightFormat::int8) {
    std::vector<uint8_t> numbers(static_cast<size_t>(padded_inputs_), 128);
    for (int64_t k = 0; k < in_features_; ++k) numbers[static_cast<size_t>(k)] = source[k] ^ 0x80;
    interleave<4>(numbers.data(), padded_inputs_, lane, stripe);
    std::memcpy(scales, source + in_features_, 4);
    return;
  }
  interleave<1>(source, in_features_, lane, stripe);
  for (int64_t g = 0; g < num_float_groups(in_features_); ++g) {
    float scale;
    std::memcpy(&scale, source + in_features_ + g * 4, 4);
    scale *= kFloatFactor;
    std::memcpy(scales + g * kStripe * 4, &scale, 4);
  }
}

void PackedMatrix::pack_row_floats(int64_t row, const float* source) {
  std::vector<uint8_t> bytes(static_cast<size_t>(source_row_bytes()));
  if (is_grouped(format_)) {
    std::vector<float> padded(static_cast<size_t>(padded_inputs_), 0.0f);
    std::copy_n(source, in_features_, padded.begin());
    for (int64_t g = 0; g < padded_inputs_ / kGroup; ++g)
      round_block(format_, padded.data() + g * kGroup, bytes.data() + g * block_bytes(format_));
  } else if (format_ == WeightFormat::int8) {
    round_int8(source, in_features_, bytes.data());
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

void PackedMatrix::set_input_order(std::vector<int32_t> order) {
  std::vector<bool> found(static_cast<size_t>(in_features_));
  for (const int32_t input : order)
    if (input >= 0 && input < in_features_) found[static_cast<size_t>(input)] = true;
  if (static_cast<int64_t>(order.size()) != in_features_ || std::count(found.begin(), found.end(), true) != in_features_)
    throw std::invalid_argument("order must contain each of 0 to " + std::to_string(in_features_ - 1) + " once");
  input_order_ = std::move(order);
}

void PackedMatrix::unpack_row(int64_t row, float* out) const {
  if (input_order_.empty()) return unpack_stored_row(row, out);
  std::vector<float> stored(static_cast<size_t>(in_features_));
  unpack_stored_row(row, stored.data());
  for (size_t k = 0; k < stored.size(); ++k) out[input_order_[k]] = stored[k];
}

void PackedMatrix::unpack_stored_row(int64_t row, float* out) const {
  const int64_t lane = row % kStripe;
  const uint8_t* stripe = this->stripe(row / kStripe);
  if (is_grouped(format_)) return unpack_group_row(format_, padded_inputs_, lane, stripe, in_features_, out);
  if (format_ == WeightFormat::int8) {
    float scale;
    std::memcpy(&scale, stripe + padded_inputs_ * kStripe + lane * 4, 4);
    for (int64_t k = 0; k < in_features_; ++k)
      out[k] = scale * static_cast<float>(stripe[(k / 4 * kStripe + lane) * 4 + k % 4] - 128);
    return;
  }
  if (format_ == WeightFormat::f8_e4m3) {
    float scale = 0;
    for (int64_t k = 0; k < in_features_; ++k) {
      if (k % kFloatGroup == 0)
        std::memcpy(&scale, stripe + (padded_inputs_ + k / kFloatGroup * 4) * kStripe + lane * 4, 4);
      const int code = stripe[k * kStripe + lane];
      out[k] = half_to_float(static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7)) * scale;
    }
    return;
  }
  const int64_t size = value_bytes(format_);
  for (int64_t k = 0; k < in_features_; ++k) {
    const uint8_t* value = stripe + (input_offset(format_, k) + lane * row_distance(format_)) * size;
    if (format_ == WeightFormat::f32)
      std::memcpy(out + k, value, 4);
    else
      out[k] = format_ == WeightFormat::f16 ? read_half(value) : read_brain(value);
  }
}

template <typename Pack>
void PackedMatrix::pack_rows(int64_t first_row, int64_t num_rows, const Pack& pack) {
  const int64_t first_stripe = first_row / kStripe, end = first_row + num_rows;
  Pool::get().run(divide_up(end, kStripe) - first_stripe, [&](int64_t i, int) {
    const int64_t row = (first_stripe + i) * kStripe;
    for (int64_t r = std::max(first_row, row); r < std::min(end, row + kStripe); ++r) pack(r, r - first_row);
  });
}

void PackedMatrix::pack_blocks(int64_t first_row, int64_t num_rows, const uint8_t* source, int64_t row_stride) {
  pack_rows(first_row, num_rows, [&](int64_t row, int64_t i) { pack_row_blocks(row, source + i * row_stride); });
}

void PackedMatrix::pack_floats(int64_t first_row, int64_t num_rows, const float* source, int64_t row_stride) {
  pack_rows(first_row, num_rows, [&](int64_t row, int64_t i) { pack_row_floats(row, source + i * row_stride); });
}

void PackedMatrix::pack_floats(int64_t first_row, int64_t num_rows, const uint16_t* source, int64_t row_stride) {
  pack_rows(first_row, num_rows, [&](int64_t row, int64_t i) {
    std::vector<float> floats(static_cast<size_t>(in_features_));
    std::transform(source + i * row_stride, source + i * row_stride + in_features_, floats.begin(), brain_to_float);
    pack_row_floats(row, floats.data());
  });
}

void PackedMatrix::unpack(int64_t first_row, int64_t num_rows, float* out) const {
  Pool::get().run(num_rows, [&](int64_t i, int) { unpack_row(first_row + i, out + i * in_features_); });
}

void PackedMatrix::gather(const int64_t* ids, int64_t n, float* out) const {
  Pool::get().run(n, [&](int64_t i, int) { unpack_row(ids[i], out + i * in_features_); });
}

}  // namespace chairlift
