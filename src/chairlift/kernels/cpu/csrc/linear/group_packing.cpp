#include "linear/group_packing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "runtime/halves.h"

namespace chairlift {
namespace {

constexpr int kQuads = kGroup / 4;

// The bytes of a group of one row: a word for each quad.
struct GroupBytes {
  uint32_t words[kQuads];
};

constexpr uint32_t in_each_byte(int bits) { return 0x01010101u * ((1u << bits) - 1); }

template <int kBits>
void put_bits(const GroupBytes& group, int from, int64_t lane, uint8_t* planes) {
  uint32_t words[kBits] = {};
  for (int q = 0; q < kQuads; ++q) {
    const QuadPlace place = place_of_quad(kBits, q);
    words[place.plane] |= (group.words[q] >> from & in_each_byte(kBits)) << place.position;
  }
  for (int p = 0; p < kBits; ++p) std::memcpy(planes + (p * kStripe + lane) * 4, words + p, 4);
}

// Writes bits `from` to `from + bits` of all bytes to the planes of a group.
void put_bits(const GroupBytes& group, int from, int bits, int64_t lane, uint8_t* planes) {
  switch (bits) {
    case 1: return put_bits<1>(group, from, lane, planes);
    case 2: return put_bits<2>(group, from, lane, planes);
    case 4: return put_bits<4>(group, from, lane, planes);
    case 8: return put_bits<8>(group, from, lane, planes);
    default: throw std::logic_error("planes have 1, 2, 4 or 8 bits");
  }
}

// The inverse of put_bits.
void get_bits(const uint8_t* planes, int from, int bits, int64_t lane, GroupBytes& group) {
  for (int q = 0; q < kQuads; ++q) {
    const QuadPlace place = place_of_quad(bits, q);
    uint32_t word;
    std::memcpy(&word, planes + (place.plane * kStripe + lane) * 4, 4);
    group.words[q] |= (word >> place.position & in_each_byte(bits)) << from;
  }
}

void put_factors(const GroupFormat& f, const BlockRow& row, int64_t lane, uint8_t* scales) {
  for (size_t g = 0; g < row.factors.size(); ++g, scales += f.scale_bytes()) {
    const int minimum = f.has_minimum ? row.minimum_factors[g] : 0;
    scales[lane] = static_cast<uint8_t>(row.factors[g] | (f.shares_bytes() ? minimum << 4 : 0));
    if (f.has_minimum && !f.shares_bytes()) scales[kStripe + lane] = static_cast<uint8_t>(minimum);
  }
}

// Writes scales, or super-scales, which are `bytes` apart.
void put_halves(const GroupFormat& f, const BlockRow& row, int64_t lane, int64_t bytes, uint8_t* at) {
  for (size_t i = 0; i < row.scales.size(); ++i, at += bytes) {
    std::memcpy(at + lane * 2, &row.scales[i], 2);
    if (f.scales == ScaleKind::zero_point) at[kStripe * 2 + lane] = row.zero_points[i];
    else if (f.has_minimum) std::memcpy(at + (kStripe + lane) * 2, &row.minimums[i], 2);
  }
}

struct Affine {
  float scale, minimum;
};

Affine scale_of_group(const GroupFormat& f, int64_t padded_inputs, int64_t g, int64_t lane, const uint8_t* stripe) {
  const uint8_t* const at = stripe + f.scales_at(padded_inputs) + g * f.group / f.scale_inputs * f.scale_bytes();
  if (f.scales == ScaleKind::power) return {at[lane] < 2 ? 0 : std::ldexp(1.0f, at[lane] - 128), 0};  // as in products
  if (f.scales == ScaleKind::zero_point) {
    const float scale = read_half(at + lane * 2);
    return {scale, scale * static_cast<float>(f.center() - at[kStripe * 2 + lane])};
  }
  if (f.scales == ScaleKind::direct)
    return {read_half(at + lane * 2), f.has_minimum ? read_half(at + (kStripe + lane) * 2) : 0};
  const uint8_t* const super = stripe + f.supers_at(padded_inputs) + g * f.group / kSuperBlock * f.super_bytes();
  const float scale = read_half(super + lane * 2);
  if (!f.has_minimum) return {scale * static_cast<float>(static_cast<int8_t>(at[lane])), 0};
  const int factor = f.shares_bytes() ? at[lane] & 15 : at[lane];
  const int minimum = f.shares_bytes() ? at[lane] >> 4 : at[kStripe + lane];
  return {scale * static_cast<float>(factor), -read_half(super + (kStripe + lane) * 2) * static_cast<float>(minimum)};
}

}  // namespace

void pack_group_row(WeightFormat format, int64_t padded_inputs, const BlockRow& row, int64_t lane, uint8_t* stripe) {
  const GroupFormat f = group_format(format);
  const bool has_factors = f.scales == ScaleKind::factor;
  put_factors(f, row, lane, stripe + f.scales_at(padded_inputs));
  put_halves(f, row, lane, has_factors ? f.super_bytes() : f.scale_bytes(),
             stripe + (has_factors ? f.supers_at(padded_inputs) : f.scales_at(padded_inputs)));
  for (size_t k = 0; k < row.numbers.size(); k += kGroup) {
    uint8_t* const planes = stripe + f.value_bytes(static_cast<int64_t>(k));
    GroupBytes group;
    std::memcpy(group.words, row.numbers.data() + k, kGroup);
    put_bits(group, 0, f.low_bits, lane, planes);
    if (f.high_bits) put_bits(group, f.low_bits, f.high_bits, lane, planes + f.low_bits * kStripe * 4);
  }
}

void unpack_group_row(WeightFormat format, int64_t padded_inputs, int64_t lane, const uint8_t* stripe, int64_t inputs,
                      float* out) {
  const GroupFormat f = group_format(format);
  const uint8_t* const table = has_table(format) ? table_of(format) : nullptr;
  for (int64_t k = 0; k < inputs; k += kGroup) {
    const uint8_t* const planes = stripe + f.value_bytes(k);
    GroupBytes group = {};
    get_bits(planes, 0, f.low_bits, lane, group);
    if (f.high_bits) get_bits(planes + f.low_bits * kStripe * 4, f.low_bits, f.high_bits, lane, group);
    uint8_t numbers[kGroup];
    std::memcpy(numbers, group.words, kGroup);
    Affine affine = {};
    for (int64_t i = k; i < std::min<int64_t>(k + kGroup, inputs); ++i) {
      if (i % f.group == 0) affine = scale_of_group(f, padded_inputs, i / f.group, lane, stripe);
      const int code = table ? table[numbers[i - k]] : numbers[i - k];
      out[i] = affine.scale * static_cast<float>(code - f.center()) + affine.minimum;
    }
  }
}

}  // namespace chairlift
