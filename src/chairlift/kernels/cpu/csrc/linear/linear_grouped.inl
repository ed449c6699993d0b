// Compiled for each instruction set: products of grouped weights (see weight_formats.h).
//
// A format is the codes of a quad, and the scale and minimum of a group, in front of the same product. Weights are
// unpacked in registers, or once for many rows (`unpack`); both have the same codes and scales, hence the same bits.
//
// With tiles, if the scales of groups are factors of a super-scale, the inputs of a super-block share a scale too, and their
// products are one sum of integers. Vectors alone take longer for such sums (docs/experiments.md).
#pragma once

#include "linear/linear_products.inl"
#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA {

#ifdef CHAIRLIFT_TILES
constexpr bool kSharesSuperScales = true;
#else
constexpr bool kSharesSuperScales = false;
#endif

// The scales and minimums of a group of sixteen outputs, or as many as a vector has.
struct GroupScale {
  F scale, minimum;
};
// The same as factors of the super-scales.
struct GroupFactors {
  I scale, minimum;
};
constexpr int kSuperGroups = kSuperBlock / kGroup;

// The scale and minimum of a group. super: those of its super-block, whose minimums are subtracted.
template <bool kMinimum>
static inline GroupScale scale_of(const GroupFactors& factors, const GroupScale& super) {
  return {mul(super.scale, to_float(factors.scale)),
          kMinimum ? neg(mul(super.minimum, to_float(factors.minimum))) : zero()};
}

// The bits of quad q in the planes of kBits bits of one group, moved to the bits from `to` on.
template <int kBits>
static inline I bits_of_quad(const uint8_t* planes, int q, int to) {
  const QuadPlace place = place_of_quad(kBits, q);
  const I plane = iload(planes + place.plane * kStripe * 4);
  if (kBits == 8) return plane;
  const int left = to - place.position;
  const I moved = left < 0 ? shift_right(plane, -left) : shift_left(plane, left);
  return iand(moved, ibytes(static_cast<uint8_t>(((1 << kBits) - 1) << to)));
}

// The weights of a tile in their format.
template <WeightFormat kFormat>
struct PackedWeights {
  static constexpr GroupFormat f = group_format(kFormat);
  static constexpr int kInputs = f.group, kCenterBits = f.center_bits;
  static constexpr bool kHasMinimum = f.has_minimum;
  static constexpr bool kHasFactors = kSharesSuperScales && f.scales == ScaleKind::factor;
  static constexpr int kQuadsAtOnce = quads_at_once(largest_code(kFormat));

  PackedWeights(const uint8_t* stripe, int64_t stripe_bytes, int64_t padded_inputs)
      : stripe(stripe),
        stripe_bytes(stripe_bytes),
        scales_at(f.scales_at(padded_inputs)),
        supers_at(f.supers_at(padded_inputs)) {}

  // The codes of quad q of a group of 32 inputs, in bytes. v: the vector of outputs.
  I codes(int v, int64_t group_of_32, int q) const {
    const uint8_t* const groups = stripe + f.value_bytes(group_of_32 * kGroup);
    const auto* const low = reinterpret_cast<const uint8_t*>(vector_of<int32_t>(groups, stripe_bytes, v));
    I numbers = bits_of_quad<f.low_bits>(low, q, 0);
    if constexpr (f.high_bits != 0)
      numbers = ior(numbers, bits_of_quad<f.high_bits>(low + f.low_bits * kStripe * 4, q, f.low_bits));
    if constexpr (has_table(kFormat)) numbers = lookup(load_table(table_of(kFormat)), numbers);
    return numbers;
  }

  // The scale and minimum of a group of kInputs inputs.
  GroupScale scale(int v, int64_t group) const {
    const uint8_t* const own = stripe + v / kStripeVectors * stripe_bytes;
    const int column = v % kStripeVectors * kLanes;
    const uint8_t* const at = own + scales_at + group / (f.scale_inputs / f.group) * f.scale_bytes();
    if constexpr (f.scales == ScaleKind::power)  // 2^-127 and less is 0
      return {pow2i(max(sub(to_float(load_u8(at + column)), set1(128.0f)), set1(-127.0f))), zero()};
    const auto half_at = [&](const uint8_t* p) { return load_f16(reinterpret_cast<const uint16_t*>(p) + column); };
    if constexpr (f.scales == ScaleKind::zero_point) {
      const F scale = half_at(at), zero_point = to_float(load_u8(at + kStripe * 2 + column));
      return {scale, mul(scale, sub(set1(static_cast<float>(f.center())), zero_point))};
    }
    if constexpr (f.scales == ScaleKind::direct)
      return {half_at(at), f.has_minimum ? half_at(at + kStripe * 2) : zero()};
    if constexpr (f.scales == ScaleKind::factor)
      return scale_of<f.has_minimum>(factors(v, group), super_scale(v, group / (kSuperBlock / f.group)));
  }

  GroupFactors factors(int v, int64_t group) const {
    const uint8_t* const at = stripe + v / kStripeVectors * stripe_bytes + scales_at + group * f.scale_bytes() +
                              v % kStripeVectors * kLanes;
    if constexpr (!f.has_minimum) return {iload_s8(reinterpret_cast<const int8_t*>(at)), izero()};
    const I bytes = load_u8(at);
    if constexpr (f.shares_bytes()) return {bits_at(bytes, 0, 15), bits_at(bytes, 4, 15)};
    return {bytes, load_u8(at + kStripe)};
  }

  // The super-scale, and that of minimums, which are subtracted.
  GroupScale super_scale(int v, int64_t super) const {
    const auto* const at = reinterpret_cast<const uint16_t*>(stripe + v / kStripeVectors * stripe_bytes + supers_at +
                                                             super * f.super_bytes()) +
                           v % kStripeVectors * kLanes;
    return {load_f16(at), f.has_minimum ? load_f16(at + kStripe) : zero()};
  }

  const uint8_t* stripe;
  int64_t stripe_bytes, scales_at, supers_at;
};

// The weights of a tile that `unpack` has written. Formats that agree in the parameters share code.
template <int kGroupInputs, int kBits, bool kMinimum, bool kFactors, int kQuads>
struct UnpackedWeights {
  static constexpr int kInputs = kGroupInputs, kCenterBits = kBits;
  static constexpr bool kHasMinimum = kMinimum, kHasFactors = kFactors;
  static constexpr int kQuadsAtOnce = kQuads;
  static constexpr int64_t kScaleBytes = kStripe * 4 * (kMinimum ? 2 : 1);

  UnpackedWeights(const uint8_t* stripe, int64_t stripe_bytes, int64_t padded_inputs)
      : stripe(stripe),
        stripe_bytes(stripe_bytes),
        scales_at(padded_inputs * kStripe),
        supers_at(scales_at + padded_inputs / kInputs * kScaleBytes) {}

  I codes(int v, int64_t group_of_32, int q) const {
    return iload(vector_of<int32_t>(stripe + (group_of_32 * kGroup + q * 4) * kStripe, stripe_bytes, v));
  }
  GroupScale floats(int v, int64_t at) const {
    const float* const scale = vector_of<float>(stripe + at, stripe_bytes, v);
    return {load(scale), kHasMinimum ? load(scale + kStripe) : zero()};
  }
  GroupScale scale(int v, int64_t group) const {
    if constexpr (kHasFactors)
      return scale_of<kHasMinimum>(factors(v, group), super_scale(v, group / (kSuperBlock / kInputs)));
    else return floats(v, scales_at + group * kScaleBytes);
  }
  GroupScale super_scale(int v, int64_t super) const { return floats(v, supers_at + super * kScaleBytes); }
  GroupFactors factors(int v, int64_t group) const {
    const int32_t* const at = vector_of<int32_t>(stripe + scales_at + group * kScaleBytes, stripe_bytes, v);
    return {iload(at), kHasMinimum ? iload(at + kStripe) : izero()};
  }

  const uint8_t* stripe;
  int64_t stripe_bytes, scales_at, supers_at;
};

template <WeightFormat kFormat>
using Unpacked =
    UnpackedWeights<group_format(kFormat).group, group_format(kFormat).center_bits, group_format(kFormat).has_minimum,
                    PackedWeights<kFormat>::kHasFactors, quads_at_once(largest_code(kFormat))>;

template <WeightFormat kFormat>
static void unpack(const uint8_t* stripe, int64_t padded_inputs, uint8_t* unpacked) {
  using Target = Unpacked<kFormat>;
  const PackedWeights<kFormat> weights(stripe, 0, padded_inputs);
  for (int v = 0; v < kStripeVectors; ++v) {
    uint8_t* to = unpacked + v * kLanes * 4;
    const auto put_floats = [&](const GroupScale& found) {
      store(reinterpret_cast<float*>(to), found.scale);
      if (Target::kHasMinimum) store(reinterpret_cast<float*>(to) + kStripe, found.minimum);
      to += Target::kScaleBytes;
    };
    for (int64_t g = 0; g < padded_inputs / kGroup; ++g)
#pragma GCC unroll 8
      for (int q = 0; q < kGroup / 4; ++q, to += kStripe * 4) istore(to, weights.codes(v, g, q));
    if constexpr (!Target::kHasFactors) {
      for (int64_t g = 0; g < padded_inputs / Target::kInputs; ++g) put_floats(weights.scale(v, g));
    } else {
      for (int64_t g = 0; g < padded_inputs / Target::kInputs; ++g, to += Target::kScaleBytes) {
        const GroupFactors found = weights.factors(v, g);
        istore(to, found.scale);
        if (Target::kHasMinimum) istore(to + kStripe * 4, found.minimum);
      }
      for (int64_t super = 0; super < padded_inputs / kSuperBlock; ++super) put_floats(weights.super_scale(v, super));
    }
  }
}

// The sum of a group before its products: minus the sum of the inputs times the center of the codes, added to the bits of the
// start unless weights have factors.
template <typename Weights>
static inline I start_of_group(const float* start, int32_t correction) {
  const I bits = Weights::kHasFactors ? izero() : broadcast4(start);
  if (Weights::kCenterBits == 0 || (Weights::kCenterBits == 7 && kWeightOffset == 0)) return bits;
  return iadd(bits, shift_left(iset1(correction), Weights::kCenterBits));
}

// The scale of a group as a part of that of the row: the 2^-k of a start, unless this is the scale.
static inline F scale_of_start(const ActivationBlock& block, const float* start) {
  constexpr int32_t kBitsOfStart = 0x4b400000, kBitsOfOne = 0x3f800000;
  const I bits = broadcast4(start);
  return floats_of_bits(block.has_powers ? iadd(bits, iset1(kBitsOfOne - kBitsOfStart)) : bits);
}

// The sums of a super-block of weights with factors.
template <int kRows, int kVectors>
struct SuperSums {
  I of[kVectors][kRows];
};

// Adds the product of a group to an output. acc: the sum of the products of codes, added to the bits of start; sum: of the
// inputs, times the same power of two.
template <bool kMinimum>
static inline F add_scaled(I acc, const GroupScale& of_group, float start, F sum, F y) {
  y = fma(sub(floats_of_bits(acc), set1(start)), of_group.scale, y);
  return kMinimum ? fma(of_group.minimum, sum, y) : y;
}

// The sum of a super-block as a float. minimums: the sum of the factors of minimums times minus the sums of inputs, which is
// exact in integers and in floats.
template <typename Weights>
static inline F scale_super(I total, F minimums, const GroupScale& super) {
  if constexpr (Weights::kHasMinimum) return fma(to_float(total), super.scale, mul(minimums, super.minimum));
  return mul(to_float(total), super.scale);
}

// Adds the products of kQuads quads of a group of 32 inputs, from first_quad on, to the sums of a group.
template <typename Weights, int kQuads, int kRows, int kVectors>
static inline void add_quads(const Weights& weights, int64_t g, int first_quad, const int8_t* x, I (&acc)[kVectors][kRows]) {
  constexpr bool kIsHalf = Weights::kInputs == 16, kHasOffset = Weights::kCenterBits == 7;
  constexpr int kAtOnce = kHasOffset ? kQuads : Weights::kQuadsAtOnce < kQuads ? Weights::kQuadsAtOnce : kQuads;
#pragma GCC unroll 8
  for (int first = 0; first < kQuads; first += kAtOnce) {
    I sums[kVectors][kRows];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) sums[v][m] = kHasOffset ? acc[v][m] : begin_sum(acc[v][m]);
#pragma GCC unroll 8
    for (int i = first; i < first + kAtOnce; ++i) {
      const int q = kIsHalf ? first_quad + i : i / 2 + i % 2 * 4;  // q and q + 4 are in the same plane of four bits
      I codes[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        codes[v] = kHasOffset ? weight_bytes(weights.codes(v, g, q)) : weights.codes(v, g, q);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        const I four = broadcast4(x + (q * kBlockRows + m) * 4);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          sums[v][m] = kHasOffset ? dot_weights(sums[v][m], codes[v], four) : add_codes(sums[v][m], codes[v], four);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) acc[v][m] = kHasOffset ? sums[v][m] : end_sum(acc[v][m], sums[v][m]);
  }
}

// Minus the sums of the inputs of groups, in the order of the groups of the weights.
template <typename Weights>
static inline const int32_t* corrections(const ActivationBlock& block) {
  return Weights::kInputs == 16 ? block.half_correction : block.correction;
}

// Adds the products of a group: quads first_quad and following of a group of 32 inputs. totals: SuperSums if the weights have
// factors, or else Sums.
template <typename Weights, int kRows, int kVectors, template <int, int> typename Totals>
static inline void add_group(const ActivationBlock& block, const Weights& weights, int64_t g, int first_quad,
                             Totals<kRows, kVectors>& totals) {
  const int64_t group = Weights::kInputs == 16 ? 2 * g + first_quad / 4 : g;
  const int32_t* const correction = corrections<Weights>(block) + group * kBlockRows;
  const float* const start = block.start + g * kBlockRows;
  I acc[kVectors][kRows];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    const I first = start_of_group<Weights>(start + m, correction[m]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) acc[v][m] = first;
  }
  const int8_t* const x = static_cast<const int8_t*>(block.values) + g * kGroup * kBlockRows;
  add_quads<Weights, Weights::kInputs / 4>(weights, g, first_quad, x, acc);
  const float* const sum = static_cast<const float*>(block.sum) + g * kBlockRows;
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (Weights::kHasFactors) {
      const I factor = weights.factors(v, group).scale;
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) totals.of[v][m] = iadd(totals.of[v][m], imul(acc[v][m], factor));
    } else {
      const GroupScale of_group = weights.scale(v, group);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        F of_inputs = set1(sum[m]);
        if (Weights::kHasMinimum && Weights::kInputs == 16)
          of_inputs = mul(to_float(iset1(-correction[m])), scale_of_start(block, start + m));
        totals.of[v][m] = add_scaled<Weights::kHasMinimum>(acc[v][m], of_group, start[m], of_inputs, totals.of[v][m]);
      }
    }
  }
}

// Adds the sums of a super-block to the outputs.
template <typename Weights, int kRows, int kVectors>
static inline void add_super(const ActivationBlock& block, const Weights& weights, int64_t super,
                             const SuperSums<kRows, kVectors>& totals, Sums<kRows, kVectors>& y) {
  constexpr int kGroups = kSuperBlock / Weights::kInputs;
  const float* const start = block.start + super * kSuperGroups * kBlockRows;
  const int32_t* const correction = corrections<Weights>(block) + super * kGroups * kBlockRows;
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    F minimums[kRows];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) minimums[m] = zero();
    for (int i = 0; Weights::kHasMinimum && i < kGroups; ++i) {
      const F factor = to_float(weights.factors(v, super * kGroups + i).minimum);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m)
        minimums[m] = fma(factor, to_float(iset1(correction[i * kBlockRows + m])), minimums[m]);
    }
    const GroupScale of_super = weights.super_scale(v, super);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
      y.of[v][m] = fma(scale_super<Weights>(totals.of[v][m], minimums[m], of_super), scale_of_start(block, start + m),
                       y.of[v][m]);
  }
}

template <typename Weights, int kRows>
static void multiply_grouped_rows(const StripeTask& task) {
  constexpr int kVectors = kTileStripes * kStripeVectors;
  Ahead ahead(task);
  prefetch_outputs<kRows, kVectors>(task);
  const Weights weights(task.stripe, task.stripe_bytes, task.padded_inputs);
  Sums<kRows, kVectors> y;
  for (int v = 0; v < kVectors; ++v)
    for (int m = 0; m < kRows; ++m) y.of[v][m] = zero();
  const auto add_groups = [&](int64_t first, int64_t end, auto& totals) {
    for (int64_t g = first; g < end; ++g) {
      ahead.prefetch_part();
#pragma GCC unroll 2
      for (int quad = 0; quad < kGroup / 4; quad += Weights::kInputs / 4) add_group(task.block(), weights, g, quad, totals);
    }
  };
  if constexpr (Weights::kHasFactors) {
    for (int64_t super = 0; super < task.padded_inputs / kSuperBlock; ++super) {
      SuperSums<kRows, kVectors> totals = {};
      add_groups(super * kSuperGroups, (super + 1) * kSuperGroups, totals);
      add_super(task.block(), weights, super, totals, y);
    }
  } else {
    add_groups(0, task.padded_inputs / kGroup, y);
  }
  for (int v = 0; v < kVectors; ++v)
    for (int m = 0; m < kRows; ++m) y.of[v][m] = mul(y.of[v][m], set1(task.block().scale[m]));
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
      if (m < task.num_rows) put(task, m, v * kLanes, y.of[v][m]);
}

// With blocks of six rows, three and five rows are computed as four and six, and the last one is not stored: fewer variants
// take less time to compile.
template <WeightFormat kFormat, int kRows = kBlockRows>
static void multiply_grouped(const StripeTask& task) {
  constexpr int kFewer = kBlockRows == 6 && kRows > 2 ? kRows - 2 : kRows - 1;
  if constexpr (kFewer > 0)
    if (task.num_rows <= kFewer) return multiply_grouped<kFormat, kFewer>(task);
  multiply_grouped_rows<PackedWeights<kFormat>, kRows>(task);
}

// The weights of an input for some outputs.
template <WeightFormat kFormat, int kVectors>
static inline void decode_input(const PackedWeights<kFormat>& weights, uint32_t input, float* decoded) {
  using Weights = PackedWeights<kFormat>;
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const GroupScale found = weights.scale(v, input / Weights::kInputs);
    const I quad = weights.codes(v, input / kGroup, static_cast<int>(input % kGroup / 4));
    const F codes = sub(to_float(bits_at(quad, static_cast<int>(input % 4 * 8), 255)),
                        set1(static_cast<float>(group_format(kFormat).center())));
    store(decoded + v * kLanes,
          Weights::kHasMinimum ? fma(codes, found.scale, found.minimum) : mul(codes, found.scale));
  }
}

// Adds the products of the outliers of all rows of a task to its outputs. Most rows have outliers at the same inputs, so their
// decoded weights are kept.
template <WeightFormat kFormat, int kStripes>
static void add_outliers(const StripeTask& task) {
  if constexpr (kStripes > 1)
    if (task.num_stripes == 1) return add_outliers<kFormat, 1>(task);
  constexpr int kVectors = kStripes * kStripeVectors, kDecoded = 64;
  const PackedWeights<kFormat> weights(task.stripe, task.stripe_bytes, task.padded_inputs);
  alignas(64) float decoded[kDecoded][kVectors * kLanes];
  int32_t inputs[kDecoded];
  for (int32_t& input : inputs) input = -1;
  const int32_t* list = task.block().outlier_lists;
  for (int row = 0; row < task.num_rows; ++row, list += outlier_list_ints(task.padded_inputs)) {
    const StoredOutliers outliers(list, task.padded_inputs);
    if (outliers.count == 0) continue;
    float* const out = task.out + row * task.out_stride;
    F y[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) y[v] = load_columns(task, out, v);
    for (int32_t i = 0; i < outliers.count; ++i) {
      const int32_t input = outliers.entries[i], place = input % kDecoded;
      if (inputs[place] != input) decode_input<kFormat, kVectors>(weights, static_cast<uint32_t>(input), decoded[place]);
      inputs[place] = input;
      const F value = floats_of_bits(broadcast4(outliers.values + i));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) y[v] = fma(load(decoded[place] + v * kLanes), value, y[v]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store_columns(task, out, v, y[v]);
  }
}

template <WeightFormat kFormat>
static constexpr ProductKernel grouped_kernel() {
  ProductKernel kernel = {kBlockRows, kTileStripes, ActivationLayout::bytes, multiply_grouped<kFormat>};
  kernel.add_outliers = add_outliers<kFormat, kTileStripes>;
  constexpr GroupFormat f = group_format(kFormat);
  if constexpr (f.scales != ScaleKind::direct || f.high_bits != 0 || has_table(kFormat)) {
    kernel.min_unpacked_blocks = 5;  // measured: even at 16 rows, faster at 64 (docs/experiments.md)
    kernel.unpack = unpack<kFormat>;
    kernel.multiply_unpacked = multiply_grouped_rows<Unpacked<kFormat>, kBlockRows>;
  }
  return kernel;
}

}  // namespace chairlift::CHAIRLIFT_ISA
