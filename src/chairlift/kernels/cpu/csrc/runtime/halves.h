// Conversions of single numbers, for packing and tests.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace chairlift {

inline float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 1023;
  if (exponent == 31) return float_of_bits(sign | 0x7f800000 | fraction << 13);
  if (exponent) return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
  const float tiny = static_cast<float>(fraction) * 0x1p-24f;
  return sign ? -tiny : tiny;
}

// Rounds to nearest, ties to even.
inline uint16_t float_to_half(float x) {
  const uint32_t bits = bits_of_float(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 0x38800000)  // below 2^-14: in units of 2^-24
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(float_of_bits(magnitude) * 0x1p24f)));
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | (rounded - 0x38000000) >> 13);
}

inline float read_half(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  return half_to_float(half);
}

inline void write_half(uint8_t* p, float x) {
  const uint16_t half = float_to_half(x);
  std::memcpy(p, &half, 2);
}

inline float brain_to_float(uint16_t brain) { return float_of_bits(static_cast<uint32_t>(brain) << 16); }

inline float read_brain(const uint8_t* p) {
  uint16_t brain;
  std::memcpy(&brain, p, 2);
  return brain_to_float(brain);
}

inline uint16_t float_to_brain(float x) {
  const uint32_t bits = bits_of_float(x);
  if (x != x) return static_cast<uint16_t>((bits | 0x400000) >> 16);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Rounds |x| <= 127 to nearest, ties to even, without a call: the sum with 1.5 * 2^23 has the integer in its low bits.
inline uint8_t rounded_byte(float x) { return static_cast<uint8_t>(bits_of_float(x + 0x1.8p23f)); }

}  // namespace chairlift
