// Products of weights and activations in bytes, summed in 32 bits: four in each lane.
//
// Where one instruction multiplies unsigned by signed bytes (dot_u8s8), int8 weights are multiplied as they are stored, plus
// 128. Elsewhere an instruction adds pairs of products in 16 bits (CHAIRLIFT_PAIRS): magnitudes of weights, which are at
// most 128, by activations from -127 to 127 with the signs of the weights fit; and so do several pairs with small codes.
#pragma once

namespace chairlift::CHAIRLIFT_ISA {

#ifdef CHAIRLIFT_PAIRS
constexpr int kWeightOffset = 0;  // of int8 weights in products, which a correction of the sum removes
static inline I weight_bytes(I stored) { return ixor(stored, ibytes(128)); }
static inline I dot_weights(I sum, I weights, I s) {
  sum = iadd(sum, sum_pairs(pairs_u8s8(abs_s8(weights), with_sign(s, weights))));
  hold(sum);
  return sum;
}

// The number of quads of codes, a power of two up to 8, whose products can be added before end_sum.
constexpr int quads_at_once(int largest_code) {
  int quads = 8;
  while (quads > 1 && quads * 2 * 128 * largest_code > 32767) quads /= 2;
  return quads;
}
// A sum of products of codes, which end_sum adds to `acc`.
static inline I begin_sum(I) { return izero(); }
static inline I add_codes(I sum, I codes, I s) {
  sum = add_pairs(sum, pairs_u8s8(codes, s));
  hold(sum);
  return sum;
}
static inline I end_sum(I acc, I sum) { return iadd(acc, sum_pairs(sum)); }
#else
constexpr int kWeightOffset = 128;
static inline I weight_bytes(I stored) { return stored; }
static inline I dot_weights(I sum, I weights, I s) { return dot_u8s8(sum, weights, s); }

constexpr int quads_at_once(int) { return 8; }
static inline I begin_sum(I acc) { return acc; }
static inline I add_codes(I sum, I codes, I s) { return dot_u8s8(sum, codes, s); }
static inline I end_sum(I, I sum) { return sum; }
#endif

}  // namespace chairlift::CHAIRLIFT_ISA
