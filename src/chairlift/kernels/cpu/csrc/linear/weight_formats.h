// The formats of weights, and the parameters of those with scales for groups of inputs.
#pragma once

#include <cstdint>

namespace chairlift {

enum class WeightFormat {
  q2_k, q3_k, q4_0, q4_1, q4_k, q5_0, q5_1, q5_k, q6_k, q8_0, iq4_nl, iq4_xs, mxfp4,  // integers with scales of groups
  u4_g32, u4_g128, u8_g32,  // the same with integer zero points
  int8,  // integers with one scale for each output
  f8_e4m3,  // floats of 8 bits with scales of kFloatGroup inputs
  bf16, f16, f32
};
constexpr int kNumWeightFormats = 21;
constexpr bool is_grouped(WeightFormat format) { return format <= WeightFormat::u8_g32; }
constexpr bool is_integer(WeightFormat format) { return format <= WeightFormat::int8; }

constexpr int kStripe = 16;         // outputs whose values are interleaved
constexpr int kStripeMultiple = 3;  // grouped matrices have a multiple of it: the stripes of a tile with AVX-512
constexpr int kGroup = 32;          // the number of inputs is padded to a multiple of this number
constexpr int kSuperBlock = 256;    // inputs with one super-scale
constexpr int kFloatGroup = 128;    // inputs with one scale in f8_e4m3

// How the scale of a group is stored: as a float16, as an integer of up to 8 bits that is multiplied by the super-scale
// of 256 inputs (a float16), as the exponent of a power of two, or as a float16 with a zero point of 8 bits.
enum class ScaleKind { direct, factor, power, zero_point };

// A weight is scale * (code - center), plus a minimum in formats with minimums. The minimum of a group with a zero point
// is scale * (center - zero point), which is exact in float32.
//
//   number   the low_bits + high_bits bits that are stored
//   code     the number, or its entry in a table; 0 to 255
//   scale    of a group of `group` inputs, of which one is stored for each `scale_inputs` inputs
struct GroupFormat {
  int low_bits, high_bits, group, center_bits;  // center = 1 << center_bits, or 0 if center_bits is 0
  ScaleKind scales;
  bool has_minimum;
  int scale_inputs = group;

  constexpr int center() const { return center_bits ? 1 << center_bits : 0; }
  constexpr int64_t value_bytes(int64_t inputs) const { return inputs * kStripe * (low_bits + high_bits) / 8; }
  // Whether the factors of scale and minimum are the low and high bits of one byte.
  constexpr bool shares_bytes() const { return has_minimum && group == 16; }
  // The bytes of the scales, and minimums or zero points, of scale_inputs inputs of a stripe.
  constexpr int64_t scale_bytes() const {
    if (scales == ScaleKind::zero_point) return kStripe * 3;
    return kStripe * (scales == ScaleKind::direct ? 2 : 1) * (has_minimum && !shares_bytes() ? 2 : 1);
  }
  constexpr int64_t super_bytes() const {
    return scales == ScaleKind::factor ? kStripe * 2 * (has_minimum ? 2 : 1) : 0;
  }
  // The offsets of scales and super-scales in a stripe.
  constexpr int64_t scales_at(int64_t padded_inputs) const { return value_bytes(padded_inputs); }
  constexpr int64_t supers_at(int64_t padded_inputs) const {
    return scales_at(padded_inputs) + padded_inputs / scale_inputs * scale_bytes();
  }
  constexpr int64_t stripe_bytes(int64_t padded_inputs) const {
    return supers_at(padded_inputs) + padded_inputs / kSuperBlock * super_bytes();
  }
  // The bytes of a stripe of codes, and scales and super-scales of four bytes.
  constexpr int64_t unpacked_bytes(int64_t padded_inputs) const {
    const int64_t supers = scales == ScaleKind::factor ? padded_inputs / kSuperBlock : 0;
    return padded_inputs * kStripe + (padded_inputs / group + supers) * kStripe * 4 * (has_minimum ? 2 : 1);
  }
};

constexpr GroupFormat group_format(WeightFormat format) {
  constexpr ScaleKind direct = ScaleKind::direct, factor = ScaleKind::factor;
  switch (format) {
    case WeightFormat::q2_k: return {2, 0, 16, 0, factor, true};
    case WeightFormat::q3_k: return {2, 1, 16, 2, factor, false};
    case WeightFormat::q4_0: return {4, 0, 32, 3, direct, false};
    case WeightFormat::q4_1: return {4, 0, 32, 0, direct, true};
    case WeightFormat::q4_k: return {4, 0, 32, 0, factor, true};
    case WeightFormat::q5_0: return {4, 1, 32, 4, direct, false};
    case WeightFormat::q5_1: return {4, 1, 32, 0, direct, true};
    case WeightFormat::q5_k: return {4, 1, 32, 0, factor, true};
    case WeightFormat::q6_k: return {4, 2, 16, 5, factor, false};
    case WeightFormat::iq4_nl: return {4, 0, 32, 7, direct, false};
    case WeightFormat::iq4_xs: return {4, 0, 32, 7, factor, false};
    case WeightFormat::mxfp4: return {4, 0, 32, 4, ScaleKind::power, false};
    case WeightFormat::q8_0: return {8, 0, 32, 7, direct, false};
    case WeightFormat::u4_g32: return {4, 0, 32, 0, ScaleKind::zero_point, true};
    case WeightFormat::u4_g128: return {4, 0, 32, 0, ScaleKind::zero_point, true, 128};
    case WeightFormat::u8_g32: return {8, 0, 32, 7, ScaleKind::zero_point, true};
    default: return {};
  }
}

// The codes of the sixteen numbers of 4 bits in formats with a table; the center is subtracted from them.
// Sources: kvalues_iq4nl and kvalues_mxfp4 of ggml. MXFP4's are twice the values of E2M1 (OCP Microscaling, 2023).
constexpr bool has_table(WeightFormat format) {
  return format == WeightFormat::iq4_nl || format == WeightFormat::iq4_xs || format == WeightFormat::mxfp4;
}
constexpr uint8_t kIq4Codes[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kMxfp4Codes[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
constexpr const uint8_t* table_of(WeightFormat format) {
  return format == WeightFormat::mxfp4 ? kMxfp4Codes : kIq4Codes;
}
constexpr int largest_code(WeightFormat format) {
  if (has_table(format)) return format == WeightFormat::mxfp4 ? 28 : 241;
  return (1 << (group_format(format).low_bits + group_format(format).high_bits)) - 1;
}

// The place of the bits of quad q (inputs 4q to 4q + 3 of a group, a byte each) among the planes of a group that have
// this number of bits of each input. A plane is [16 rows][4 bytes].
struct QuadPlace {
  int plane, position;
};
constexpr QuadPlace place_of_quad(int bits, int q) {
  if (bits == 4) return {q % 4, q / 4 * 4};
  return {q / (8 / bits), q % (8 / bits) * bits};
}

}  // namespace chairlift
