// The vector layer in plain C++: vectors of eight floats (or CHAIRLIFT_LANES), which GCC and Clang map to the instructions
// of the machine.
//
// The other headers of this folder define the same names. F is a vector of kLanes floats, I of kLanes int32, M the
// result of a comparison. Functions that end in _n access the first n lanes only; memory beyond them is neither read
// nor written, and the other lanes are zero. Each function is one operation on every instruction set, so kernels have
// one order of operations.
#pragma once

#ifdef __SSE2__
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>
#include <utility>

namespace chairlift::CHAIRLIFT_ISA {

#ifdef CHAIRLIFT_LANES
constexpr int kLanes = CHAIRLIFT_LANES;
#else
constexpr int kLanes = 8;
#endif
// The rows of a product whose sums fill the registers.
#ifdef __aarch64__
constexpr int kProductRows = 6;
#else
constexpr int kProductRows = 4;
#endif
constexpr bool kPairsStripes = false;

// A vector is an array of parts of four lanes, because compilers keep types that are wider than the registers of the
// machine in memory, and take minutes to combine the lanes of arrays of floats into vectors.
typedef float FloatPart __attribute__((vector_size(16)));
typedef int32_t IntPart __attribute__((vector_size(16)));
typedef uint32_t BitsPart __attribute__((vector_size(16)));
typedef int16_t ShortPart __attribute__((vector_size(16)));
typedef uint16_t HalfPart __attribute__((vector_size(8)));
typedef int8_t SignedBytePart __attribute__((vector_size(4)));
typedef uint8_t BytePart __attribute__((vector_size(4)));
constexpr int kVectorParts = kLanes / 4;

struct F {
  FloatPart v[kVectorParts];
};
struct I {
  IntPart v[kVectorParts];
};
struct M {
  IntPart v[kVectorParts];
};

template <typename Vector, typename Op, int... i>
static inline Vector parts_of(Op op, std::integer_sequence<int, i...>) {
  return {{op(i)...}};
}
// The vector with part op(i) for each i.
template <typename Vector, typename Op>
static inline Vector parts(Op op) {
  return parts_of<Vector>(op, std::make_integer_sequence<int, kVectorParts>());
}

static inline FloatPart floats_of(BitsPart x) { return reinterpret_cast<FloatPart>(x); }
static inline BitsPart bits_of(FloatPart x) { return reinterpret_cast<BitsPart>(x); }
static inline BitsPart bits_of(IntPart x) { return reinterpret_cast<BitsPart>(x); }
static inline IntPart ints_of(BitsPart x) { return reinterpret_cast<IntPart>(x); }
// Sums wrap, as those of instructions do. The sanitizer of undefined behaviour would check the lanes of signed sums one by one.
static inline IntPart add(IntPart a, IntPart b) { return ints_of(bits_of(a) + bits_of(b)); }
static inline FloatPart all_of(float x) { return FloatPart{x, x, x, x}; }

template <typename Part>
static inline Part read(const void* p) {
  Part x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
// The first n values from p on, and zeros.
template <typename T>
struct FirstLanes {
  FirstLanes(const T* p, int n) { std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(T)); }
  T lanes[kLanes] = {};
};

// The float16 in the lower half of each lane.
static inline FloatPart floats_of_halves(BitsPart h) {
  const BitsPart sign = (h & 0x8000) << 16, magnitude = (h & 0x7fff) << 13, exponent = h & 0x7c00;
  const FloatPart tiny = __builtin_convertvector(ints_of(h & 1023), FloatPart) * 0x1p-24f;
  const BitsPart finite = exponent == 0 ? bits_of(tiny) : magnitude + (112u << 23);
  return floats_of(sign | (exponent == 0x7c00 ? magnitude | 0x7f800000 : finite));
}
static inline HalfPart round_to_bf16(FloatPart x) {
  const BitsPart bits = bits_of(x), rounded = bits + 0x7fff + (bits >> 16 & 1);
  return __builtin_convertvector((x != x ? bits | 0x400000 : rounded) >> 16, HalfPart);
}
// Rounds to nearest, ties to even: the sum with 2^23 has no bits for a fraction.
static inline FloatPart round_part(FloatPart x) {
  const BitsPart sign = bits_of(x) & 0x80000000;
  const FloatPart large = floats_of(sign | bits_of(all_of(0x1p23f)));
  const FloatPart rounded = floats_of(bits_of(x + large - large) | sign);
  return floats_of(bits_of(x) & 0x7fffffff) < 0x1p23f ? rounded : x;
}

// Keeps x in a register, where a header of an instruction set does.
template <typename Vector>
static inline void hold(Vector&) {}

static inline F zero() { return {}; }
static inline F set1(float x) {
  return parts<F>([=](int) { return all_of(x); });
}
static inline F load(const float* p) {
  return parts<F>([=](int i) { return read<FloatPart>(p + 4 * i); });
}
static inline F load_n(const float* p, int n) { return load(FirstLanes<float>(p, n).lanes); }
static inline void store(float* p, F x) { std::memcpy(p, x.v, sizeof x.v); }
static inline void store_n(float* p, F x, int n) { std::memcpy(p, x.v, static_cast<size_t>(n) * sizeof(float)); }

static inline F add(F a, F b) {
  return parts<F>([&](int i) { return a.v[i] + b.v[i]; });
}
static inline F sub(F a, F b) {
  return parts<F>([&](int i) { return a.v[i] - b.v[i]; });
}
static inline F mul(F a, F b) {
  return parts<F>([&](int i) { return a.v[i] * b.v[i]; });
}
static inline F div(F a, F b) {
  return parts<F>([&](int i) { return a.v[i] / b.v[i]; });
}
// As the x86 instructions, the result is the second operand if either is NaN.
static inline FloatPart max(FloatPart a, FloatPart b) { return a > b ? a : b; }
static inline F max(F a, F b) {
  return parts<F>([&](int i) { return max(a.v[i], b.v[i]); });
}
static inline F min(F a, F b) {
  return parts<F>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
#ifdef __FMA__
static inline F fma(F a, F b, F c) {
  return parts<F>([&](int i) { return _mm_fmadd_ps(a.v[i], b.v[i], c.v[i]); });
}
#else
// Rounds twice, because fmaf would call the C library on machines without this instruction.
static inline F fma(F a, F b, F c) {
  return parts<F>([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
#endif
static inline F sqrt(F a) {
  const auto root = [&](int lane) { return __builtin_sqrtf(a.v[lane / 4][lane % 4]); };
  return parts<F>([&](int i) { return FloatPart{root(4 * i), root(4 * i + 1), root(4 * i + 2), root(4 * i + 3)}; });
}
static inline F neg(F a) {
  return parts<F>([&](int i) { return -a.v[i]; });
}
static inline F abs(F a) {
  return parts<F>([&](int i) { return floats_of(bits_of(a.v[i]) & 0x7fffffff); });
}
static inline F iota() {
  return parts<F>([](int i) { return FloatPart{0, 1, 2, 3} + static_cast<float>(4 * i); });
}

static inline M less(F a, F b) {
  return parts<M>([&](int i) { return a.v[i] < b.v[i]; });
}
static inline F select(M m, F a, F b) {
  return parts<F>([&](int i) { return m.v[i] ? a.v[i] : b.v[i]; });
}
static inline unsigned mask_bits(M m) {
  const I bits = parts<I>([&](int i) { return m.v[i] & IntPart{1 << 4 * i, 2 << 4 * i, 4 << 4 * i, 8 << 4 * i}; });
  IntPart all = {};
  for (const IntPart& part : bits.v) all |= part;
  return static_cast<unsigned>(all[0] | all[1] | all[2] | all[3]);
}

// Reduces as a tree: halves of the vector are combined until one lane is left.
template <typename Op>
static inline float reduce(F x, Op op) {
  if constexpr (kVectorParts == 4) x.v[0] = op(x.v[0], x.v[2]), x.v[1] = op(x.v[1], x.v[3]);
  const FloatPart four = op(x.v[0], x.v[1]);
  const FloatPart two = op(four, __builtin_shufflevector(four, four, 2, 3, 2, 3));
  return op(two, __builtin_shufflevector(two, two, 1, 1, 1, 1))[0];
}
static inline float reduce_add(F x) {
  return reduce(x, [](FloatPart a, FloatPart b) { return a + b; });
}
static inline float reduce_max(F x) {
  return reduce(x, [](FloatPart a, FloatPart b) { return max(a, b); });
}

// The lanes of a and b with the given numbers, in each part.
template <int... lanes>
static inline F shuffle(F a, F b) {
  return parts<F>([&](int i) { return __builtin_shufflevector(a.v[i], b.v[i], lanes...); });
}
// Lane i of the result is op over the lanes of x[i], in the order of the other vector layers: pairs within 128 bits, then
// across.
template <typename Op>
static inline F reduce_each(const F (&x)[kLanes], Op op) {
  F fours[kVectorParts];  // part j of fours[i] has the reductions of parts j of x[4 * i] to x[4 * i + 3]
#pragma GCC unroll 4
  for (int i = 0; i < kVectorParts; ++i) {
    const F *const y = x + 4 * i, a = op(shuffle<0, 4, 1, 5>(y[0], y[1]), shuffle<2, 6, 3, 7>(y[0], y[1])),
            b = op(shuffle<0, 4, 1, 5>(y[2], y[3]), shuffle<2, 6, 3, 7>(y[2], y[3]));
    fours[i] = op(shuffle<0, 1, 4, 5>(a, b), shuffle<2, 3, 6, 7>(a, b));
  }
  const auto parts_at = [&](int j) { return parts<F>([&](int i) { return fours[i].v[j]; }); };
  if constexpr (kVectorParts == 4) return op(op(parts_at(0), parts_at(1)), op(parts_at(2), parts_at(3)));
  return op(parts_at(0), parts_at(1));
}

static inline F load_bf16(const uint16_t* p) {
  return parts<F>([=](int i) { return floats_of(__builtin_convertvector(read<HalfPart>(p + 4 * i), BitsPart) << 16); });
}
static inline F load_bf16_n(const uint16_t* p, int n) { return load_bf16(FirstLanes<uint16_t>(p, n).lanes); }
// The even or odd ones of 2 * kLanes values.
static inline F even_bf16(I x) {
  return parts<F>([&](int i) { return floats_of(bits_of(x.v[i]) << 16); });
}
static inline F odd_bf16(I x) {
  return parts<F>([&](int i) { return floats_of(bits_of(x.v[i]) & 0xffff0000); });
}
// Pairs of values that are exact in bfloat16.
static inline I pair_bf16(F even, F odd) {
  return parts<I>([&](int i) { return ints_of(bits_of(even.v[i]) >> 16 | bits_of(odd.v[i])); });
}
// Rounds to nearest, ties to even; NaN stays NaN.
static inline void store_bf16_n(uint16_t* p, F x, int n) {
  HalfPart rounded[kVectorParts];
  for (int i = 0; i < kVectorParts; ++i) rounded[i] = round_to_bf16(x.v[i]);
  std::memcpy(p, rounded, static_cast<size_t>(n) * sizeof(uint16_t));
}
static inline void store_bf16(uint16_t* p, F x) { store_bf16_n(p, x, kLanes); }
static inline void store_bf16(uint16_t* p, F a, F b) { store_bf16(p, a), store_bf16(p + kLanes, b); }
static inline F load_f16(const uint16_t* p) {
  return parts<F>([=](int i) { return floats_of_halves(__builtin_convertvector(read<HalfPart>(p + 4 * i), BitsPart)); });
}
static inline F load_f16_n(const uint16_t* p, int n) { return load_f16(FirstLanes<uint16_t>(p, n).lanes); }
// Floats of 8 bits (E4M3) times 2^-8: float16 has the same bits, with a larger bias of the exponent. NaN becomes a number.
static inline F load_e4m3(const uint8_t* p) {
  return parts<F>([=](int i) {
    const BitsPart bits = __builtin_convertvector(read<BytePart>(p + 4 * i), BitsPart);
    return floats_of_halves((bits & 0x80) << 8 | (bits & 0x7f) << 7);
  });
}
static inline I iload_s8(const int8_t* p) {
  return parts<I>([=](int i) { return __builtin_convertvector(read<SignedBytePart>(p + 4 * i), IntPart); });
}
static inline F load_s8(const int8_t* p) {
  return parts<F>([=](int i) { return __builtin_convertvector(read<SignedBytePart>(p + 4 * i), FloatPart); });
}
static inline F load_s8_n(const int8_t* p, int n) { return load_s8(FirstLanes<int8_t>(p, n).lanes); }

static inline I izero() { return {}; }
static inline I iset1(int32_t x) {
  return parts<I>([=](int) { return IntPart{x, x, x, x}; });
}
static inline I iload(const void* p) {
  return parts<I>([=](int i) { return read<IntPart>(static_cast<const uint8_t*>(p) + 16 * i); });
}
static inline void istore(void* p, I x) { std::memcpy(p, x.v, sizeof x.v); }
static inline I iadd(I a, I b) {
  return parts<I>([&](int i) { return add(a.v[i], b.v[i]); });
}
static inline I imul(I a, I b) {
  return parts<I>([&](int i) { return ints_of(bits_of(a.v[i]) * bits_of(b.v[i])); });
}
static inline I isub_bytes(I a, I b) {
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  return parts<I>([&](int i) { return (IntPart)((Bytes)a.v[i] - (Bytes)b.v[i]); });
}
static inline I iand(I a, I b) {
  return parts<I>([&](int i) { return a.v[i] & b.v[i]; });
}
static inline I ior(I a, I b) {
  return parts<I>([&](int i) { return a.v[i] | b.v[i]; });
}
static inline I shift_left(I x, int n) {
  return parts<I>([&](int i) { return ints_of(bits_of(x.v[i]) << n); });
}
// Shifts zeros in.
static inline I shift_right(I x, int n) {
  return parts<I>([&](int i) { return ints_of(bits_of(x.v[i]) >> n); });
}
// The operations on words of 16 bits.
typedef uint16_t WordPart __attribute__((vector_size(16)));
static inline WordPart words_of(IntPart x) { return reinterpret_cast<WordPart>(x); }
static inline I add_words(I a, I b) {
  return parts<I>([&](int i) { return reinterpret_cast<IntPart>(words_of(a.v[i]) + words_of(b.v[i])); });
}
static inline I mul_words(I a, I b) {
  return parts<I>([&](int i) { return reinterpret_cast<IntPart>(words_of(a.v[i]) * words_of(b.v[i])); });
}
static inline I shift_words_left(I x, int n) {
  return parts<I>([&](int i) { return reinterpret_cast<IntPart>(words_of(x.v[i]) << n); });
}
static inline I shift_words_right(I x, int n) {
  return parts<I>([&](int i) { return reinterpret_cast<IntPart>(words_of(x.v[i]) >> n); });
}
static inline I ibytes(uint8_t x) { return iset1(static_cast<int32_t>(x * 0x01010101u)); }
static inline I load_u8(const uint8_t* p) {
  return parts<I>([=](int i) { return __builtin_convertvector(read<BytePart>(p + 4 * i), IntPart); });
}
// A table of sixteen bytes for `lookup`, and the entries of the table for bytes up to 15.
static inline const uint8_t* load_table(const uint8_t* p) { return p; }
static inline I lookup(const uint8_t* table, I nibbles) {
  uint8_t bytes[4 * kLanes];
  istore(bytes, nibbles);
  for (uint8_t& byte : bytes) byte = table[byte & 15];
  return iload(bytes);
}
// (x >> shift) & mask, lane by lane.
static inline I bits_at(I x, int shift, int32_t mask) {
  return parts<I>([&](int i) { return ints_of(bits_of(x.v[i]) >> shift) & mask; });
}
static inline F to_float(I x) {
  return parts<F>([&](int i) { return __builtin_convertvector(x.v[i], FloatPart); });
}
static inline F floats_of_bits(I x) {
  return parts<F>([&](int i) { return floats_of(bits_of(x.v[i])); });
}
// Rounds to nearest, ties to even; the value must fit.
static inline I to_int(F x) {
  return parts<I>([&](int i) { return __builtin_convertvector(round_part(x.v[i]), IntPart); });
}
static inline int32_t ireduce_add(I x) {
  IntPart sum = {};
  for (const IntPart& part : x.v) sum = add(sum, part);
  return sum[0] + sum[1] + sum[2] + sum[3];
}
static inline void store_s8_n(int8_t* p, I x, int n) {
  SignedBytePart bytes[kVectorParts];
  for (int i = 0; i < kVectorParts; ++i) {
    const IntPart at_most = x.v[i] > 127 ? IntPart{127, 127, 127, 127} : x.v[i];
    bytes[i] = __builtin_convertvector(at_most < -128 ? IntPart{-128, -128, -128, -128} : at_most, SignedBytePart);
  }
  std::memcpy(p, bytes, static_cast<size_t>(n));
}
static inline void store_s8(int8_t* p, I x) { store_s8_n(p, x, kLanes); }

// 2^n for integral n in [-126, 127].
static inline F pow2i(F n) {
  return parts<F>([&](int i) { return floats_of(bits_of(__builtin_convertvector(n.v[i], IntPart) + 127) << 23); });
}
// x * 2^n.
static inline F times_pow2i(F x, F n) { return mul(x, pow2i(n)); }
static inline F round_even(F x) {
  return parts<F>([&](int i) { return round_part(x.v[i]); });
}

static inline F floor(F x) {
  const F n = round_even(x);
  return sub(n, select(less(x, n), set1(1.0f), zero()));
}
// x - floor(x), rounded down as by the instruction of AVX-512, and x * 2^floor(n), which is 0 below -126 and finite for finite
// x.
static inline F fraction(F x) {
  const F n = floor(x);
  return parts<F>([&](int i) {
    const FloatPart nearest = x.v[i] - n.v[i];
    const IntPart is_above = nearest + n.v[i] > x.v[i];  // -1 or 0
    return floats_of(bits_of(nearest) + bits_of(is_above));
  });
}
static inline F times_pow2_floor(F x, F n) {
  const F power = floor(n), lowest = set1(-126.0f);
  return select(less(power, lowest), zero(), times_pow2i(x, max(min(power, set1(127.0f)), lowest)));
}

// acc + the sum of four products of unsigned and signed bytes, lane by lane; exact. Products fit in 16 bits.
static inline IntPart add_pairs(IntPart acc, ShortPart u, ShortPart s) {
#ifdef __SSE2__
  return add(acc, reinterpret_cast<IntPart>(_mm_madd_epi16(reinterpret_cast<__m128i>(u), reinterpret_cast<__m128i>(s))));
#else
  const IntPart products = reinterpret_cast<IntPart>(u * s);
  return add(acc, add(products >> 16, ints_of(bits_of(products) << 16) >> 16));
#endif
}
// acc + the sum of two products of signed words, lane by lane.
static inline I dot_words(I acc, I a, I b) {
  const auto low = [](IntPart x) { return ints_of(bits_of(x) << 16) >> 16; };
  return parts<I>([&](int i) {
    return add(acc.v[i], add(low(a.v[i]) * low(b.v[i]), (a.v[i] >> 16) * (b.v[i] >> 16)));
  });
}
static inline I dot_u8s8(I acc, I u, I s) {
  return parts<I>([&](int i) {
    const IntPart even = u.v[i] & 0x00ff00ff, odd = ints_of(bits_of(u.v[i]) >> 8) & 0x00ff00ff;
    const auto signs = reinterpret_cast<ShortPart>(s.v[i]);
    const ShortPart even_signs = (signs << 8) >> 8;
    const IntPart sum = add_pairs(acc.v[i], reinterpret_cast<ShortPart>(even), even_signs);
    return add_pairs(sum, reinterpret_cast<ShortPart>(odd), signs >> 8);
  });
}

}  // namespace chairlift::CHAIRLIFT_ISA

#include "simd/byte_products.h"
#include "simd/common.h"
