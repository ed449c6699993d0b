// The vector layer on AVX2, FMA and F16C: eight floats. See portable.h for the definitions of the functions.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace chairlift::CHAIRLIFT_ISA {

using F = __m256;
using I = __m256i;
using M = __m256;
constexpr int kLanes = 8;
constexpr int kProductRows = 6;  // the rows of a product whose sums fill the registers
constexpr bool kPairsStripes = true;  // whether one or two rows are multiplied with two stripes at once

alignas(32) static const int32_t kLaneMasks[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
static inline __m256i first_lanes(int n) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kLaneMasks + 8 - n));
}

// Keeps x in a register: compilers would load it again, or reorder sums so that their terms do not fit the registers.
template <typename Vector>
static inline void hold(Vector& x) {
  __asm__("" : "+x"(x));
}

static inline F zero() { return _mm256_setzero_ps(); }
static inline F set1(float x) { return _mm256_set1_ps(x); }
static inline F load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
#ifdef __SANITIZE_THREAD__  // It does not see instructions with masks.
static inline F load_n(const float* p, int n) {
  float lanes[kLanes] = {};
  std::memcpy(lanes, p, n * sizeof(float));
  return load(lanes);
}
static inline void store_n(float* p, F x, int n) {
  float lanes[kLanes];
  store(lanes, x);
  std::memcpy(p, lanes, n * sizeof(float));
}
#else
static inline F load_n(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
static inline void store_n(float* p, F x, int n) { _mm256_maskstore_ps(p, first_lanes(n), x); }
#endif

static inline F add(F a, F b) { return _mm256_add_ps(a, b); }
static inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
static inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
static inline F div(F a, F b) { return _mm256_div_ps(a, b); }
static inline F max(F a, F b) { return _mm256_max_ps(a, b); }
static inline F min(F a, F b) { return _mm256_min_ps(a, b); }
static inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
static inline F sqrt(F a) { return _mm256_sqrt_ps(a); }
static inline F neg(F a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
static inline F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static inline F iota() { return _mm256_set_ps(7, 6, 5, 4, 3, 2, 1, 0); }

static inline M less(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
static inline F select(M m, F a, F b) { return _mm256_blendv_ps(b, a, m); }
static inline unsigned mask_bits(M m) { return static_cast<unsigned>(_mm256_movemask_ps(m)); }

static inline float reduce_add(F x) {
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
static inline float reduce_max(F x) {
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

static inline __m128i load_u16_n(const uint16_t* p, int n) {
  alignas(16) uint16_t lanes[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return _mm_load_si128(reinterpret_cast<const __m128i*>(lanes));
}
// Lane i of the result is op over the lanes of x[i]: pairs within 128 bits, then across.
template <typename Op>
static inline F reduce_each(const F (&x)[8], Op op) {
  F t[4], u[2];
  for (int i = 0; i < 4; ++i)
    t[i] = op(_mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]));
  for (int i = 0; i < 2; ++i) {
    const __m256d a = _mm256_castps_pd(t[2 * i]), b = _mm256_castps_pd(t[2 * i + 1]);
    u[i] = op(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
  }
  return op(_mm256_permute2f128_ps(u[0], u[1], 0x20), _mm256_permute2f128_ps(u[0], u[1], 0x31));
}

static inline F widen_bf16(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
static inline F load_bf16(const uint16_t* p) {
  return widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline F load_bf16_n(const uint16_t* p, int n) { return widen_bf16(load_u16_n(p, n)); }
// The even or odd ones of 16 values.
static inline F even_bf16(I x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
static inline F odd_bf16(I x) {
  return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int32_t>(0xffff0000))));
}
static inline __m128i narrow_bf16(F x) {
  const I bits = _mm256_castps_si256(x);
  const I odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const I rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const I quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const I nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const I high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}
static inline void store_bf16(uint16_t* p, F x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_bf16(x)); }
static inline void store_bf16_n(uint16_t* p, F x, int n) {
  alignas(16) uint16_t lanes[8];
  _mm_store_si128(reinterpret_cast<__m128i*>(lanes), narrow_bf16(x));
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}
static inline F load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline F load_f16_n(const uint16_t* p, int n) { return _mm256_cvtph_ps(load_u16_n(p, n)); }
// Floats of 8 bits (E4M3) times 2^-8: float16 has the same bits, with a larger bias of the exponent. NaN becomes a number.
static inline F load_e4m3(const uint8_t* p) {
  const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i sign = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8);
  const __m128i rest = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f)), 7);
  return _mm256_cvtph_ps(_mm_or_si128(sign, rest));
}
static inline I iload_s8(const int8_t* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
static inline F load_s8(const int8_t* p) { return _mm256_cvtepi32_ps(iload_s8(p)); }
static inline F load_s8_n(const int8_t* p, int n) {
  alignas(8) int8_t lanes[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load_s8(lanes);
}

static inline I izero() { return _mm256_setzero_si256(); }
static inline I iset1(int32_t x) { return _mm256_set1_epi32(x); }
static inline I iload(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
static inline void istore(void* p, I x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
static inline I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
static inline I imul(I a, I b) { return _mm256_mullo_epi32(a, b); }
static inline I iand(I a, I b) { return _mm256_and_si256(a, b); }
static inline I ior(I a, I b) { return _mm256_or_si256(a, b); }
static inline I ixor(I a, I b) { return _mm256_xor_si256(a, b); }
static inline I shift_left(I x, int n) { return _mm256_slli_epi32(x, n); }
static inline I shift_right(I x, int n) { return _mm256_srli_epi32(x, n); }
static inline I ibytes(uint8_t x) { return _mm256_set1_epi8(static_cast<char>(x)); }
static inline I load_u8(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
static inline I load_table(const uint8_t* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline I lookup(I table, I nibbles) { return _mm256_shuffle_epi8(table, nibbles); }
static inline I low_nibbles(I x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
static inline I high_nibbles(I x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
static inline I bits_at(I x, int shift, int32_t mask) {
  return _mm256_and_si256(_mm256_srl_epi32(x, _mm_cvtsi32_si128(shift)), _mm256_set1_epi32(mask));
}
static inline F to_float(I x) { return _mm256_cvtepi32_ps(x); }
static inline F floats_of_bits(I x) { return _mm256_castsi256_ps(x); }
static inline I to_int(F x) { return _mm256_cvtps_epi32(x); }
static inline int32_t ireduce_add(I x) {
  const __m128i a = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  const __m128i b = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}
static inline __m128i narrow_s8(I x) {
  const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  return _mm_packs_epi16(pairs, pairs);
}
static inline void store_s8(int8_t* p, I x) { _mm_storel_epi64(reinterpret_cast<__m128i*>(p), narrow_s8(x)); }
static inline void store_s8_n(int8_t* p, I x, int n) {
  int8_t lanes[8];
  store_s8(lanes, x);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

static inline F pow2i(F n) { return _mm256_castsi256_ps(_mm256_slli_epi32(to_int(add(n, set1(127.0f))), 23)); }
static inline F times_pow2i(F x, F n) { return mul(x, pow2i(n)); }
static inline F round_even(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

#ifdef CHAIRLIFT_VNNI
static inline I dot_u8s8(I acc, I u, I s) { return _mm256_dpbusd_avx_epi32(acc, u, s); }
#else
#define CHAIRLIFT_PAIRS
static inline I abs_s8(I x) { return _mm256_abs_epi8(x); }
// x times the sign of w, byte by byte, except where w is 0.
static inline I with_sign(I x, I w) { return _mm256_sign_epi8(x, w); }
// The sums of two products of unsigned and signed bytes each, in 16 bits; their sums; and the sums of two of them each.
static inline I pairs_u8s8(I u, I s) { return _mm256_maddubs_epi16(u, s); }
static inline I add_pairs(I a, I b) { return _mm256_add_epi16(a, b); }
static inline I sum_pairs(I x) { return _mm256_madd_epi16(x, _mm256_set1_epi16(1)); }
#endif

}  // namespace chairlift::CHAIRLIFT_ISA

#include "simd/byte_products.h"
#include "simd/common.h"
