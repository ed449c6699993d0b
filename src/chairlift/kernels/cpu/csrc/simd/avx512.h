// The vector layer on AVX-512 (F, BW, DQ, VL): sixteen floats. See portable.h for the definitions of the functions.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace chairlift::CHAIRLIFT_ISA {

using F = __m512;
using I = __m512i;
using M = __mmask16;
constexpr int kLanes = 16;
constexpr int kProductRows = 4;  // the rows of a product whose sums fill the registers
constexpr bool kPairsStripes = false;

static inline M first_lanes(int n) { return static_cast<M>((1u << n) - 1u); }

// Keeps x in a register: compilers would load it again, or reorder sums so that their terms do not fit the registers.
template <typename Vector>
static inline void hold(Vector& x) {
  __asm__("" : "+v"(x));
}

static inline F zero() { return _mm512_setzero_ps(); }
static inline F set1(float x) { return _mm512_set1_ps(x); }
static inline F load(const float* p) { return _mm512_loadu_ps(p); }
static inline F load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
static inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
static inline void store_n(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }

static inline F add(F a, F b) { return _mm512_add_ps(a, b); }
static inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
static inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
static inline F div(F a, F b) { return _mm512_div_ps(a, b); }
static inline F max(F a, F b) { return _mm512_max_ps(a, b); }
static inline F min(F a, F b) { return _mm512_min_ps(a, b); }
static inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
static inline F sqrt(F a) { return _mm512_sqrt_ps(a); }
static inline F neg(F a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
static inline F abs(F a) { return _mm512_abs_ps(a); }
static inline F iota() { return _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }

static inline M less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
static inline F select(M m, F a, F b) { return _mm512_mask_blend_ps(m, b, a); }
static inline unsigned mask_bits(M m) { return m; }

static inline float reduce_add(F x) {
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
static inline float reduce_max(F x) {
  const __m256 a = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

// Lane i of the result is op over the lanes of x[i]: pairs within 128 bits, then across.
template <typename Op>
static inline F reduce_each(const F (&x)[16], Op op) {
  F t[8], u[4], v[2];
  for (int i = 0; i < 8; ++i)
    t[i] = op(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(t[2 * i]), b = _mm512_castps_pd(t[2 * i + 1]);
    u[i] = op(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  for (int i = 0; i < 2; ++i)
    v[i] = op(_mm512_shuffle_f32x4(u[2 * i], u[2 * i + 1], 0x88), _mm512_shuffle_f32x4(u[2 * i], u[2 * i + 1], 0xdd));
  return op(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
}

static inline F widen_bf16(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
static inline F load_bf16(const uint16_t* p) {
  return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline F load_bf16_n(const uint16_t* p, int n) {
  return widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
// The even or odd ones of 32 values.
static inline F even_bf16(I x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
static inline F odd_bf16(I x) {
  return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000))));
}
static inline I pair_bf16(F even, F odd) {
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd));
}
#ifdef CHAIRLIFT_BF16  // denormals become zero, as in products of bfloat16
static inline __m256i narrow_bf16(F x) { return (__m256i)_mm512_cvtneps_pbh(x); }
#else
static inline __m256i narrow_bf16(F x) {
  const I bits = _mm512_castps_si512(x);
  const I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const I rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const I quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const M nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16));
}
#endif
static inline void store_bf16(uint16_t* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(x));
}
static inline void store_bf16_n(uint16_t* p, F x, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_bf16(x));
}
#ifdef CHAIRLIFT_BF16
static inline void store_bf16(uint16_t* p, F a, F b) { _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b, a)); }
#endif
static inline F load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline F load_f16_n(const uint16_t* p, int n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
// Floats of 8 bits (E4M3) times 2^-8: float16 has the same bits, with a larger bias of the exponent. NaN becomes a number.
static inline F load_e4m3(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
  const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7);
  return _mm512_cvtph_ps(_mm256_or_si256(sign, rest));
}
static inline I iload_s8(const int8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline F load_s8(const int8_t* p) { return _mm512_cvtepi32_ps(iload_s8(p)); }
static inline F load_s8_n(const int8_t* p, int n) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first_lanes(n), p)));
}

static inline I izero() { return _mm512_setzero_si512(); }
static inline I iset1(int32_t x) { return _mm512_set1_epi32(x); }
static inline I iload(const void* p) { return _mm512_loadu_si512(p); }
static inline void istore(void* p, I x) { _mm512_storeu_si512(p, x); }
static inline I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
static inline I imul(I a, I b) { return _mm512_mullo_epi32(a, b); }
static inline I isub_bytes(I a, I b) { return _mm512_sub_epi8(a, b); }
static inline I iand(I a, I b) { return _mm512_and_si512(a, b); }
static inline I ior(I a, I b) { return _mm512_or_si512(a, b); }
static inline I ixor(I a, I b) { return _mm512_xor_si512(a, b); }
static inline I shift_left(I x, int n) { return _mm512_slli_epi32(x, static_cast<unsigned>(n)); }
static inline I shift_right(I x, int n) { return _mm512_srli_epi32(x, static_cast<unsigned>(n)); }
static inline I ibytes(uint8_t x) { return _mm512_set1_epi8(static_cast<char>(x)); }
static inline I load_u8(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline I load_table(const uint8_t* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline I lookup(I table, I nibbles) { return _mm512_shuffle_epi8(table, nibbles); }
static inline I low_nibbles(I x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
static inline I high_nibbles(I x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
static inline I bits_at(I x, int shift, int32_t mask) {
  return _mm512_and_si512(_mm512_srl_epi32(x, _mm_cvtsi32_si128(shift)), _mm512_set1_epi32(mask));
}
static inline F to_float(I x) { return _mm512_cvtepi32_ps(x); }
static inline F floats_of_bits(I x) { return _mm512_castsi512_ps(x); }
static inline I to_int(F x) { return _mm512_cvtps_epi32(x); }
static inline int32_t ireduce_add(I x) { return _mm512_reduce_add_epi32(x); }
static inline void store_s8(int8_t* p, I x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x));
}
static inline void store_s8_n(int8_t* p, I x, int n) {
  _mm_mask_storeu_epi8(p, first_lanes(n), _mm512_cvtsepi32_epi8(x));
}

// 2^n for integral n in [-126, 127], as the exponent field.
static inline F pow2i(F n) { return _mm512_castsi512_ps(_mm512_slli_epi32(to_int(add(n, set1(127.0f))), 23)); }
// x - floor(x), and x * 2^floor(n), which is 0 or denormal below -126.
static inline F fraction(F x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
static inline F times_pow2_floor(F x, F n) { return _mm512_scalef_ps(x, n); }
static inline F times_pow2i(F x, F n) { return _mm512_scalef_ps(x, n); }
static inline F round_even(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// The same in each 16 bits.
static inline I add_words(I a, I b) { return _mm512_add_epi16(a, b); }
static inline I mul_words(I a, I b) { return _mm512_mullo_epi16(a, b); }
static inline I shift_words_left(I x, int n) { return _mm512_slli_epi16(x, static_cast<unsigned>(n)); }
static inline I shift_words_right(I x, int n) { return _mm512_srli_epi16(x, static_cast<unsigned>(n)); }

#ifdef CHAIRLIFT_VNNI
static inline I dot_u8s8(I acc, I u, I s) { return _mm512_dpbusd_epi32(acc, u, s); }
static inline I dot_words(I acc, I a, I b) { return _mm512_dpwssd_epi32(acc, a, b); }
#else
#define CHAIRLIFT_PAIRS
static inline I abs_s8(I x) { return _mm512_abs_epi8(x); }
// x times the sign of w, byte by byte, except where w is 0.
static inline I with_sign(I x, I w) { return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x); }
// The sums of two products of unsigned and signed bytes each, in 16 bits; their sums; and the sums of two of them each.
static inline I pairs_u8s8(I u, I s) { return _mm512_maddubs_epi16(u, s); }
static inline I add_pairs(I a, I b) { return _mm512_add_epi16(a, b); }
static inline I sum_pairs(I x) { return _mm512_madd_epi16(x, _mm512_set1_epi16(1)); }
#endif

}  // namespace chairlift::CHAIRLIFT_ISA

#include "simd/byte_products.h"
#include "simd/common.h"
