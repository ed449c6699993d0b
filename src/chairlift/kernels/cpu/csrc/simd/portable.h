// The vector layer in plain C++: vectors of eight floats (or CHAIRLIFT_LANES), which compilers map to the instructions of the
// machine.
//
// The other headers of this folder define the same names. F is a vector of kLanes floats, I of kLanes int32, M the
// result of a comparison. Functions that end in _n access the first n lanes only; memory beyond them is neither read
// nor written, and the other lanes are zero. Each function is one operation on every instruction set, so kernels have
// one order of operations.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace chairlift::CHAIRLIFT_ISA {

#ifdef CHAIRLIFT_LANES
constexpr int kLanes = CHAIRLIFT_LANES;
#else
constexpr int kLanes = 8;
#endif
struct F {
  float v[kLanes];
};
struct I {
  int32_t v[kLanes];
};
struct M {
  bool v[kLanes];
};

template <typename Op>
static inline F lanes(Op op) {
  F r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = op(i);
  return r;
}
template <typename Op>
static inline I ilanes(Op op) {
  I r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = op(i);
  return r;
}

static inline float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
static inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
static inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
  if (exponent == 31) return bits_to_float(sign | 0x7f800000 | fraction << 13);
  if (exponent) return bits_to_float(sign | (exponent + 112) << 23 | fraction << 13);
  const float tiny = static_cast<float>(fraction) * 0x1p-24f;
  return sign ? -tiny : tiny;
}
static inline uint16_t float_to_bf16(float x) {
  const uint32_t bits = float_to_bits(x);
  if (x != x) return static_cast<uint16_t>((bits | 0x400000) >> 16);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline F zero() { return lanes([](int) { return 0.0f; }); }
static inline F set1(float x) { return lanes([=](int) { return x; }); }
static inline F load(const float* p) { return lanes([=](int i) { return p[i]; }); }
static inline F load_n(const float* p, int n) { return lanes([=](int i) { return i < n ? p[i] : 0.0f; }); }
static inline void store_n(float* p, F x, int n) {
  for (int i = 0; i < n; ++i) p[i] = x.v[i];
}
static inline void store(float* p, F x) { store_n(p, x, kLanes); }

static inline F add(F a, F b) { return lanes([&](int i) { return a.v[i] + b.v[i]; }); }
static inline F sub(F a, F b) { return lanes([&](int i) { return a.v[i] - b.v[i]; }); }
static inline F mul(F a, F b) { return lanes([&](int i) { return a.v[i] * b.v[i]; }); }
static inline F div(F a, F b) { return lanes([&](int i) { return a.v[i] / b.v[i]; }); }
// As the x86 instructions, the result is the second operand if either is NaN.
static inline F max(F a, F b) { return lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
static inline F min(F a, F b) { return lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
#ifdef __FMA__
static inline F fma(F a, F b, F c) { return lanes([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); }); }
#else
// Rounds twice, because fmaf would call the C library on machines without this instruction.
static inline F fma(F a, F b, F c) { return lanes([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
#endif
static inline F sqrt(F a) { return lanes([&](int i) { return std::sqrt(a.v[i]); }); }
static inline F neg(F a) { return lanes([&](int i) { return -a.v[i]; }); }
static inline F abs(F a) { return lanes([&](int i) { return std::fabs(a.v[i]); }); }
static inline F iota() { return lanes([](int i) { return static_cast<float>(i); }); }

static inline M less(F a, F b) {
  M r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = a.v[i] < b.v[i];
  return r;
}
static inline F select(M m, F a, F b) { return lanes([&](int i) { return m.v[i] ? a.v[i] : b.v[i]; }); }
static inline unsigned mask_bits(M m) {
  unsigned bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<unsigned>(m.v[i]) << i;
  return bits;
}

// Reduces as a tree: halves of the vector are combined until one lane is left.
static inline float reduce_add(F x) {
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) x.v[i] = x.v[i] + x.v[i + half];
  return x.v[0];
}
static inline float reduce_max(F x) {
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) x.v[i] = x.v[i] > x.v[i + half] ? x.v[i] : x.v[i + half];
  return x.v[0];
}

// Lane i of the result is op over the lanes of x[i], in the order of the other vector layers: pairs within 128 bits, then
// across.
template <typename Op>
static inline F reduce_each(const F (&x)[kLanes], Op op) {
  return lanes([&](int i) {
    F all = x[i];
    for (const int distance : {2, 1, 4, 8})
      if (distance < kLanes) all = op(all, lanes([&](int j) { return all.v[(j + distance) % kLanes]; }));
    return all.v[0];
  });
}

static inline F load_bf16_n(const uint16_t* p, int n) {
  return lanes([=](int i) { return i < n ? bits_to_float(static_cast<uint32_t>(p[i]) << 16) : 0.0f; });
}
static inline F load_bf16(const uint16_t* p) { return load_bf16_n(p, kLanes); }
// The even or odd ones of 2 * kLanes values.
static inline F even_bf16(I x) {
  return lanes([&](int i) { return bits_to_float(static_cast<uint32_t>(x.v[i]) << 16); });
}
static inline F odd_bf16(I x) {
  return lanes([&](int i) { return bits_to_float(static_cast<uint32_t>(x.v[i]) & 0xffff0000); });
}
// Pairs of values that are exact in bfloat16.
static inline I pair_bf16(F even, F odd) {
  return ilanes([&](int i) { return static_cast<int32_t>(float_to_bits(even.v[i]) >> 16 | float_to_bits(odd.v[i])); });
}
// Rounds to nearest, ties to even; NaN stays NaN.
static inline void store_bf16_n(uint16_t* p, F x, int n) {
  for (int i = 0; i < n; ++i) p[i] = float_to_bf16(x.v[i]);
}
static inline void store_bf16(uint16_t* p, F x) { store_bf16_n(p, x, kLanes); }
static inline F load_f16_n(const uint16_t* p, int n) {
  return lanes([=](int i) { return i < n ? half_to_float(p[i]) : 0.0f; });
}
static inline F load_f16(const uint16_t* p) { return load_f16_n(p, kLanes); }
// Floats of 8 bits (E4M3) times 2^-8: float16 has the same bits, with a larger bias of the exponent. NaN becomes a number.
static inline F load_e4m3(const uint8_t* p) {
  return lanes([=](int i) { return half_to_float(static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7)); });
}
static inline F load_s8_n(const int8_t* p, int n) {
  return lanes([=](int i) { return i < n ? static_cast<float>(p[i]) : 0.0f; });
}
static inline F load_s8(const int8_t* p) { return load_s8_n(p, kLanes); }

static inline I izero() { return ilanes([](int) { return 0; }); }
static inline I iset1(int32_t x) { return ilanes([=](int) { return x; }); }
static inline I iload(const void* p) {
  I r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
static inline void istore(void* p, I x) { std::memcpy(p, x.v, sizeof x.v); }
static inline I iadd(I a, I b) { return ilanes([&](int i) { return a.v[i] + b.v[i]; }); }
static inline I iand(I a, I b) { return ilanes([&](int i) { return a.v[i] & b.v[i]; }); }
static inline I ior(I a, I b) { return ilanes([&](int i) { return a.v[i] | b.v[i]; }); }
static inline I shift_left(I x, int n) {
  return ilanes([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(x.v[i]) << n); });
}
// Shifts zeros in.
static inline I shift_right(I x, int n) {
  return ilanes([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(x.v[i]) >> n); });
}
static inline I ibytes(uint8_t x) { return ilanes([&](int) { return static_cast<int32_t>(x * 0x01010101u); }); }
static inline I load_u8(const uint8_t* p) { return ilanes([&](int i) { return static_cast<int32_t>(p[i]); }); }
// A table of sixteen bytes for `lookup`, and the entries of the table for bytes up to 15.
static inline const uint8_t* load_table(const uint8_t* p) { return p; }
static inline I lookup(const uint8_t* table, I nibbles) {
  return ilanes([&](int i) {
    uint32_t bytes = 0;
    for (int j = 0; j < 32; j += 8) bytes |= static_cast<uint32_t>(table[nibbles.v[i] >> j & 15]) << j;
    return static_cast<int32_t>(bytes);
  });
}
// (x >> shift) & mask, lane by lane.
static inline I bits_at(I x, int shift, int32_t mask) {
  return ilanes([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(x.v[i]) >> shift) & mask; });
}
static inline F to_float(I x) { return lanes([&](int i) { return static_cast<float>(x.v[i]); }); }
// Rounds to nearest, ties to even; the value must fit.
static inline I to_int(F x) { return ilanes([&](int i) { return static_cast<int32_t>(std::nearbyint(x.v[i])); }); }
static inline int32_t ireduce_add(I x) {
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += x.v[i];
  return sum;
}
static inline int8_t saturate_s8(int32_t x) { return static_cast<int8_t>(x > 127 ? 127 : x < -128 ? -128 : x); }
static inline void store_s8_n(int8_t* p, I x, int n) {
  for (int i = 0; i < n; ++i) p[i] = saturate_s8(x.v[i]);
}
static inline void store_s8(int8_t* p, I x) { store_s8_n(p, x, kLanes); }

// 2^n for integral n in [-126, 127].
static inline F pow2i(F n) {
  return lanes([&](int i) { return bits_to_float(static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23); });
}
static inline F round_even(F x) { return lanes([&](int i) { return std::nearbyint(x.v[i]); }); }

// acc + the sum of four products of unsigned and signed bytes, lane by lane; exact.
static inline I dot_u8s8(I acc, I u, I s) {
  uint8_t a[4 * kLanes];
  int8_t b[4 * kLanes];
  std::memcpy(a, u.v, sizeof a);
  std::memcpy(b, s.v, sizeof b);
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < 4; ++j) acc.v[i] += static_cast<int32_t>(a[4 * i + j]) * b[4 * i + j];
  return acc;
}
// The same for unsigned bytes up to 127.
static inline I dot_u7s8(I acc, I u, I s) { return dot_u8s8(acc, u, s); }

}  // namespace chairlift::CHAIRLIFT_ISA

#include "simd/common.h"
