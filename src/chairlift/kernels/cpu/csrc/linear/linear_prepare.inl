// Compiled for each instruction set: the prologue of a row, and its conversion to the layout that products read.
#pragma once

#include "linear/linear_products.inl"
#include "linear/linear_tiles.h"
#include "simd/rows.h"
#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA {

// --- prologues ------------------------------------------------------------------------------------------------------

// A row of inputs. Reading a part of it prefetches the same part of the next row, which another core may have written.
struct Row {
  inline F part(int64_t i, int count) const {
    __builtin_prefetch(next + i);
    return CHAIRLIFT_ISA::part(at + i, count);
  }

  const float* at;
  const float* next;
};

static void rms_norm(const PrologueArgs& args, Row x, int64_t n, float* y) {
  const F scale = set1(inverse_root(sum_of_squares(x.at, n, zero()) / static_cast<float>(n), args.eps));
  each(n, y, [&](int64_t i, int count) { return mul(mul(x.part(i, count), scale), part(args.weight + i, count)); });
}

static void layer_norm(const PrologueArgs& args, Row x, int64_t n, float* y) {
  const F mean = set1(sum_of(x.at, n) / static_cast<float>(n));
  const F scale = set1(inverse_root(sum_of_squares(x.at, n, mean) / static_cast<float>(n), args.eps));
  each(n, y, [&](int64_t i, int count) {
    return fma(mul(sub(x.part(i, count), mean), scale), part(args.weight + i, count), part(args.bias + i, count));
  });
}

// The tanh approximation of GELU (Hendrycks and Gimpel, 2016) is x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x^3)).
static inline F gelu_tanh(F x) {
  constexpr float kFactor = 1.5957691216057308f;
  const F inner = mul(x, fma(mul(x, x), set1(0.044715f * kFactor), set1(kFactor)));
  return div(x, add(set1(1.0f), exp(neg(inner))));
}

// max(x, 0)^2 (So et al., 2021).
static inline F squared_relu(F x) {
  const F positive = max(x, zero());
  return mul(positive, positive);
}

// function(x), or function(factor * gate) * up, where the gate is the first half of the row.
template <typename Function>
static void activate(const PrologueArgs& args, Row x, int64_t n, float* y, Function function) {
  if (!is_gated(args.kind)) return each(n, y, [&](int64_t i, int count) { return function(x.part(i, count)); });
  const F factor = set1(args.parameters ? args.parameters[0] : 1.0f);
  each(n, y, [&](int64_t i, int count) {
    const F gate = mul(x.part(i, count), factor), up = x.part(n + i, count);
    return mul(function(gate), up);
  });
}

// gate * sigmoid(1.702 * gate) * (up + 1), where the gate is at most 7 and up is from -7 to 7 (gpt-oss).
static void clamped_gate_and_mul(const PrologueArgs& args, Row x, int64_t n, float* y) {
  const F limit = set1(7.0f), one = set1(1.0f), factor = set1(args.parameters ? args.parameters[0] : 1.0f);
  each(n, y, [&](int64_t i, int count) {
    const F gate = min(mul(x.part(i, count), factor), limit), up = max(min(x.part(n + i, count), limit), neg(limit));
    return mul(div(gate, add(one, exp(mul(gate, set1(-1.702f))))), add(up, one));
  });
}

// xIELU (Huang and Schlag, 2024).
static void xielu(const PrologueArgs& args, Row x, int64_t n, float* y) {
  const F beta = set1(args.parameters[2]), eps = set1(args.parameters[3]);
  const F positive = softplus(set1(args.parameters[0])), negative = add(beta, softplus(set1(args.parameters[1])));
  each(n, y, [&](int64_t i, int count) {
    const F value = x.part(i, count);
    const F below = mul(negative, sub(expm1(min(value, eps)), value)), above = mul(positive, mul(value, value));
    return fma(beta, value, select(less(zero(), value), above, below));
  });
}

static void prologue(const PrologueArgs& args, const float* at, const float* next, int64_t n, float* y) {
  const Row x = {at, next};
  switch (args.kind) {
    case Prologue::rms_norm: return rms_norm(args, x, n, y);
    case Prologue::layer_norm: return layer_norm(args, x, n, y);
    case Prologue::silu:
    case Prologue::silu_and_mul: return activate(args, x, n, y, [](F value) { return silu(value); });
    case Prologue::gelu:
    case Prologue::gelu_and_mul: return activate(args, x, n, y, [](F value) { return gelu(value); });
    case Prologue::gelu_tanh:
    case Prologue::gelu_tanh_and_mul: return activate(args, x, n, y, [](F value) { return gelu_tanh(value); });
    case Prologue::relu:
    case Prologue::relu_and_mul: return activate(args, x, n, y, [](F value) { return max(value, zero()); });
    case Prologue::relu2:
    case Prologue::relu2_and_mul: return activate(args, x, n, y, [](F value) { return squared_relu(value); });
    case Prologue::xielu: return xielu(args, x, n, y);
    case Prologue::swigluoai_and_mul: return clamped_gate_and_mul(args, x, n, y);
    case Prologue::none: return each(n, y, [&](int64_t i, int count) { return x.part(i, count); });
  }
}

static void add_branch(const ResidualArgs& args, float* branch, int64_t n, float* stream) {
  if (branch) {
    prologue(args.after, branch, branch, n, branch);
    const F multiplier = set1(args.multiplier);
    each(n, stream, [&](int64_t i, int count) {
      return fma(part(branch + i, count), multiplier, part(stream + i, count));
    });
  }
  if (args.of_sum.kind != Prologue::none) prologue(args.of_sum, stream, stream, n, stream);
  if (args.scale == 1) return;
  each(n, stream, [&](int64_t i, int count) { return mul(part(stream + i, count), set1(args.scale)); });
}

// x * activation(gate) in the memory of x [gates * shared].
template <typename Activation>
static void multiply_by_activation(const float* gate, int64_t gates, int64_t shared, float* x, Activation activation) {
  if (shared == 1)
    return each(gates, x,
                [&](int64_t i, int count) { return mul(part(x + i, count), activation(part(gate + i, count))); });
  for (int64_t g = 0; g < gates; ++g, x += shared) {
    const F factor = activation(set1(gate[g]));
    each(shared, x, [&](int64_t i, int count) { return mul(part(x + i, count), factor); });
  }
}

static void multiply_by_gates(GateActivation activation, const float* gate, int64_t gates, int64_t shared, float* x) {
  if (activation == GateActivation::sigmoid)
    multiply_by_activation(gate, gates, shared, x, [](F logit) { return sigmoid(logit); });
  else
    multiply_by_activation(gate, gates, shared, x, [](F logit) { return softplus(logit); });
}

// --- activations ----------------------------------------------------------------------------------------------------

// The number of groups of one row that are processed together: one per lane of a vector.
constexpr int kManyGroups = kLanes;

// Replaces the values of the groups of each super-block by their reduction with `op`, times factor(number of groups).
template <typename Op, typename Factor>
static inline void share_in_supers(float* values, int count, Op op, Factor factor) {
  constexpr int kSuperGroups = kSuperBlock / kGroup;
  static_assert(kManyGroups % kSuperGroups == 0);
  for (int first = 0; first < count; first += kSuperGroups) {
    const int end = count - first < kSuperGroups ? count : first + kSuperGroups;
    float all = values[first];
    for (int g = first + 1; g < end; ++g) all = op(all, values[g]);
    for (int g = first; g < end; ++g) values[g] = all * factor(end - first);
  }
}

// Finds for `count` groups the largest magnitude, and the largest one that is not above `outlier` times the mean of the group.
// has_supers: whether the groups of a super-block share both the mean and the latter. Returns zeros, and NaN in the lanes of
// groups that have a NaN or an infinity.
static inline F measure(const float* y, int count, float outlier, bool has_supers, float* largest_of_groups, float* top) {
  F sums[kManyGroups], largest[kManyGroups];
  for (int g = count; g < kManyGroups; ++g) sums[g] = largest[g] = zero();
  for (int g = 0; g < count; ++g) {
    sums[g] = largest[g] = abs(load(y + g * kGroup));
#pragma GCC unroll 16
    for (int i = kLanes; i < kGroup; i += kLanes) {
      const F size = abs(load(y + g * kGroup + i));
      sums[g] = add(sums[g], size);
      largest[g] = max(largest[g], size);
    }
  }
  alignas(64) float limit[kManyGroups];
  const F limits = mul(reduce_each(sums, [](F a, F b) { return add(a, b); }), set1(outlier / kGroup));
  store(limit, limits);
  if (has_supers)
    share_in_supers(limit, count, [](float a, float b) { return a + b; },
                    [](int groups) { return 1 / static_cast<float>(groups); });
  const F all = reduce_each(largest, [](F a, F b) { return max(a, b); });
  store(largest_of_groups, all);
  store(top, all);
  for (unsigned bits = mask_bits(less(load(limit), all)); bits; bits &= bits - 1) {
    const int g = __builtin_ctz(bits);
    F inliers = zero();
#pragma GCC unroll 16
    for (int i = 0; i < kGroup; i += kLanes) {
      const F size = abs(load(y + g * kGroup + i));
      inliers = max(inliers, select(less(set1(limit[g]), size), zero(), size));
    }
    top[g] = reduce_max(inliers);
  }
  if (has_supers)
    share_in_supers(top, count, [](float a, float b) { return a > b ? a : b; }, [](int) { return 1.0f; });
  return mul(limits, zero());
}

// The scales of groups.
struct GroupSteps {
  alignas(64) float inverse[kManyGroups];  // 1 / scale
  alignas(64) float start[kManyGroups];    // see ActivationBlock
  alignas(64) float limit[kManyGroups];    // 127 times the scale: magnitudes above it are outliers
  F part;                                  // of the scale of the row: 2^-k unless has_powers is false
};

// top: the largest magnitudes of groups that count; most: that of the row, and more than 0, or NaN if no value is an outlier;
// inverse: 1 / the scale of the row.
static inline GroupSteps steps_of_groups(const float* top, float most, float inverse, bool has_powers) {
  constexpr float kLeast = 0x1p-24f;
  constexpr int32_t kExponent = 0x7f800000;
  GroupSteps found;
  alignas(64) float ratio[kManyGroups];
  store(ratio, div(set1(most), max(load(top), set1(most * kLeast))));
  const F inverse_part = has_powers ? floats_of_bits(iand(iload(ratio), iset1(kExponent))) : load(ratio);
  found.part = div(set1(1.0f), inverse_part);
  store(found.inverse, mul(inverse_part, set1(inverse)));
  store(found.start, has_powers ? mul(found.part, set1(kIntegerStart)) : found.part);
  store(found.limit, max(load(top), mul(found.part, set1(most))));  // 1 / (1 / part) may be less
  return found;
}

static inline void note_outliers(const float* y, int64_t k, unsigned bits, OutlierList& outliers) {
  for (; bits; bits &= bits - 1) {
    uint32_t value;
    __builtin_memcpy(&value, y + k + __builtin_ctz(bits), 4);
    outliers.append(k + __builtin_ctz(bits), value);
  }
}

struct HalfSums {
  I of[2];
};

// Rounds the inputs of one group, from k on, to multiples of its scale. Returns the sums of its halves, lane by lane.
template <bool kHasOutliers>
static inline HalfSums round_group(const float* y, int64_t k, F limit, F inverse, int8_t* steps,
                                   const RowTarget& target) {
  HalfSums sums = {{izero(), izero()}};
#pragma GCC unroll 16
  for (int i = 0; i < kGroup; i += kLanes) {
    F values = load(y + k + i);
    if constexpr (kHasOutliers) {
      const M is_outlier = less(limit, abs(values));
      values = select(is_outlier, zero(), values);
      note_outliers(y, k + i, mask_bits(is_outlier), *target.outliers);
    }
    const I rounded = to_int(mul(values, inverse));
    I& sum = sums.of[i * 2 / kGroup];
    sum = iadd(sum, rounded);
    store_s8(steps + k + i, rounded);
  }
  return sums;
}

// The reduction of each group to minus its sum, which is a whole number and exact.
static inline F negative_sums(const F (&sums)[kManyGroups]) {
  return neg(reduce_each(sums, [](F a, F b) { return add(a, b); }));
}

// Quantizes each group, or super-block, symmetrically to -127..127. The scale of the row is its largest magnitude without
// those far above the mean of their group / 127, and 0 if all of these are zero. Values that the scale of their group does not
// reach are outliers. A row with a NaN or an infinity has a scale of NaN, and no outliers.
static void quantize_groups(const float* y, int64_t padded_inputs, int8_t* steps, const RowTarget& target) {
  const int64_t num_groups = padded_inputs / kGroup;
  float *const largest = target.magnitudes, *const tops = largest + (num_groups + kManyGroups - 1) / kManyGroups * kManyGroups;
  const auto each_part = [&](auto op) {  // op(first group, number of groups)
    for (int64_t first = 0; first < num_groups; first += kManyGroups)
      op(first, static_cast<int>(num_groups - first < kManyGroups ? num_groups - first : kManyGroups));
  };
  F top_of_lanes = zero(), not_finite = zero();
  each_part([&](int64_t first, int count) {
    not_finite = add(not_finite, measure(y + first * kGroup, count, target.outlier, target.has_supers, largest + first,
                                         tops + first));
    top_of_lanes = max(top_of_lanes, load(tops + first));
  });
  constexpr float kLeast = 1e-29f;  // 127 / kLeast * 2^24 is finite
  const float most = reduce_max(top_of_lanes) + reduce_add(not_finite);
  const float inverse = most > kLeast ? 127.0f / most : 0;
  target.scale[target.row] = most * (1.0f / 127.0f);
  alignas(64) float totals[kManyGroups];
  alignas(64) int32_t corrections[kManyGroups], halves[kManyGroups];
  auto* const sum = static_cast<float*>(target.sum);
  int64_t at = target.row;
  each_part([&](int64_t first, int count) {
    const GroupSteps found = steps_of_groups(tops + first, most < kLeast ? kLeast : most, inverse, target.has_powers);
    F sums[kManyGroups], first_halves[kManyGroups];
    for (int g = count; g < kManyGroups; ++g) sums[g] = first_halves[g] = zero();
    for (int g = 0; g < count; ++g) {
      const int64_t k = (first + g) * kGroup;
      const F limit = set1(found.limit[g]), inverse_scale = set1(found.inverse[g]);
      const HalfSums rounded = found.limit[g] < largest[first + g]
                                   ? round_group<true>(y, k, limit, inverse_scale, steps, target)
                                   : round_group<false>(y, k, limit, inverse_scale, steps, target);
      sums[g] = to_float(iadd(rounded.of[0], rounded.of[1]));
      first_halves[g] = to_float(rounded.of[0]);
    }
    const F negative = negative_sums(sums);
    store(totals, mul(neg(negative), found.part));
    istore(corrections, to_int(negative));
    if (target.half_correction) istore(halves, to_int(negative_sums(first_halves)));
    for (int g = 0; g < count; ++g, at += target.block_rows) {
      target.start[at] = found.start[g];
      target.correction[at] = corrections[g];
      sum[at] = totals[g];
      if (!target.half_correction) continue;
      int32_t* const half = target.half_correction + 2 * at - target.row;
      half[0] = halves[g];
      half[target.block_rows] = corrections[g] - halves[g];
    }
  });
}

// Calls op(k, load(y + k)) for each vector of a row, in ascending order.
template <typename Op>
static inline void each_vector(const float* y, int64_t padded_inputs, Op op) {
  for (int64_t k = 0; k < padded_inputs; k += kLanes) op(k, load(y + k));
}

// The magnitude that corresponds to the step 127 of a row: the largest one without outliers, or more if the largest
// outlier would have more than kLargestStep steps.
static inline float top_of_row(const float* y, int64_t padded_inputs, float outlier) {
  F sum = zero(), largest = zero(), top = zero();
  each_vector(y, padded_inputs, [&](int64_t, F x) {
    sum = add(sum, abs(x));
    largest = max(largest, abs(x));
  });
  const F limit = set1(reduce_add(sum) * (outlier / static_cast<float>(padded_inputs)));
  each_vector(y, padded_inputs, [&](int64_t, F x) {
    const F size = abs(x);
    top = max(top, select(less(limit, size), zero(), size));
  });
  const float least = reduce_max(largest) * (127.0f / kLargestStep), inlier = reduce_max(top);
  return inlier > least ? inlier : least;
}

// Appends the multiples of 128 of outliers, which are lanes of `bits`, from input k on. Entries are quads.
static inline void note_outlier_steps(F multiples, int64_t k, unsigned bits, OutlierList& outliers) {
  alignas(64) int8_t steps[kLanes];
  store_s8(steps, to_int(multiples));
  for (int lane = 0; lane < kLanes; lane += 4) {
    if (!(bits >> lane & 15)) continue;
    uint32_t four;
    __builtin_memcpy(&four, steps + lane, 4);
    outliers.append((k + lane) / 4, four);
  }
}

// The sums of the steps of a row, lane by lane.
struct StepSums {
  I rest, multiples;  // of 128
};

// Rounds the values of a row times `inverse` to steps, and appends the multiples of 128 of outliers. A template, so that
// the overload below, which is no template, is preferred with AVX-512.
template <typename Vector>
static inline void round_row(const float* y, int64_t padded_inputs, Vector inverse, int8_t* steps, StepSums& sums,
                             const RowTarget& target) {
  each_vector(y, padded_inputs, [&](int64_t k, F x) {
    __builtin_prefetch(target.next + k, 0, kSecondLevel);
    const F rounded = round_even(mul(x, inverse));
    const M is_outlier = less(set1(127.0f), abs(rounded));
    const unsigned bits = mask_bits(is_outlier);
    F rest = rounded;
    if (__builtin_expect(bits != 0, 0)) {
      const F multiples = select(is_outlier, round_even(mul(rounded, set1(1.0f / 128))), zero());
      rest = fma(multiples, set1(-128.0f), rounded);
      sums.multiples = iadd(sums.multiples, to_int(multiples));
      note_outlier_steps(multiples, k, bits, *target.outliers);
    }
    const I low = to_int(rest);
    sums.rest = iadd(sums.rest, low);
    store_s8(steps + k, low);
  });
}

#ifdef __AVX512BW__
// The same for 32 values at a time in 16 bits, without branches: many groups of inputs have an outlier.
static inline void round_row(const float* y, int64_t padded_inputs, F inverse, int8_t* steps, StepSums& sums,
                             const RowTarget& target) {
  const I in_order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0), ones = _mm512_set1_epi16(1), most = _mm512_set1_epi16(127);
  const I half = _mm512_set1_epi16(63);
  __m256i quads = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
  OutlierList& outliers = *target.outliers;
  int32_t count = outliers.count;
  for (int64_t k = 0; k < padded_inputs; k += 32, quads = _mm256_add_epi32(quads, _mm256_set1_epi32(8))) {
    __builtin_prefetch(target.next + k, 0, kSecondLevel);
    __builtin_prefetch(target.next + k + 16, 0, kSecondLevel);
    const I first = to_int(mul(load(y + k), inverse)), second = to_int(mul(load(y + k + 16), inverse));
    const I rounded = _mm512_permutexvar_epi64(in_order, _mm512_packs_epi32(first, second));
    // The nearest multiple of 128; of two that are equally near, the even one.
    const I up = _mm512_add_epi16(_mm512_add_epi16(rounded, half), _mm512_and_si512(_mm512_srai_epi16(rounded, 7), ones));
    const __mmask32 is_outlier = _mm512_cmpgt_epi16_mask(_mm512_abs_epi16(rounded), most);
    const I multiples = _mm512_maskz_srai_epi16(is_outlier, up, 7);
    const I rest = _mm512_sub_epi16(rounded, _mm512_slli_epi16(multiples, 7));
    sums.multiples = iadd(sums.multiples, _mm512_madd_epi16(multiples, ones));
    sums.rest = iadd(sums.rest, _mm512_madd_epi16(rest, ones));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(steps + k), _mm512_cvtepi16_epi8(rest));
    const __m256i words = _mm512_cvtepi16_epi8(multiples);
    const __mmask8 has_outlier = _mm256_test_epi32_mask(words, words);
    // No masked stores: where they store nothing to a page that has no memory yet, they take a hundred times as long.
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(outliers.entries + count), _mm256_maskz_compress_epi32(has_outlier, quads));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(outliers.values + count), _mm256_maskz_compress_epi32(has_outlier, words));
    count += __builtin_popcount(has_outlier);
  }
  outliers.count = count;
}
#endif

// Rounds a row to whole multiples of its scale: -127..127, and up to kLargestStep for outliers, whose multiples of 128
// are stored apart.
static void quantize_row(const float* y, int64_t padded_inputs, int8_t* steps, const RowTarget& target) {
  constexpr int kShift = 128;  // of int8 weights
  const float top = top_of_row(y, padded_inputs, target.outlier);
  StepSums sums = {izero(), izero()};
  round_row(y, padded_inputs, set1(top > 1e-30f ? 127.0f / top : 0.0f), steps, sums, target);
  target.scale[target.row] = top * (1.0f / 127.0f);
  target.correction[target.row] = -kShift * ireduce_add(sums.rest);
  static_cast<int32_t*>(target.sum)[target.row] = -kShift * ireduce_add(sums.multiples);
}

typedef int32_t FourWords __attribute__((vector_size(16)));

// Copies four words of kRows rows, which are two or four, to four lines of a block, `step` bytes apart.
template <int kRows>
static inline void transpose_words(const uint8_t* rows, int64_t row_bytes, int64_t step, uint8_t* lines) {
  FourWords of[4] = {};
  for (int r = 0; r < kRows; ++r) __builtin_memcpy(&of[r], rows + r * row_bytes, 16);
  const FourWords a = __builtin_shufflevector(of[0], of[1], 0, 4, 1, 5), b = __builtin_shufflevector(of[2], of[3], 0, 4, 1, 5);
  const FourWords c = __builtin_shufflevector(of[0], of[1], 2, 6, 3, 7), d = __builtin_shufflevector(of[2], of[3], 2, 6, 3, 7);
  of[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
  of[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
  of[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
  of[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
  for (int i = 0; i < 4; ++i) __builtin_memcpy(lines + i * step, &of[i], 4 * kRows);
}

static void interleave_words(const uint8_t* rows, int64_t row_bytes, int num_rows, int64_t num_words, int block_rows,
                             uint8_t* values) {
  const int64_t step = block_rows * int64_t{4};
  for (int64_t k = 0; k < num_words; k += 4, rows += 16, values += 4 * step)
    for (int r = 0; r < num_rows; r += 4) {
      if (num_rows - r <= 2) transpose_words<2>(rows + r * row_bytes, row_bytes, step, values + 4 * r);
      else transpose_words<4>(rows + r * row_bytes, row_bytes, step, values + 4 * r);
    }
}

}  // namespace chairlift::CHAIRLIFT_ISA
