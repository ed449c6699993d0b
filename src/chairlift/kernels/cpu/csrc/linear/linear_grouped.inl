// Compiled for each instruction set: products of grouped weights (see weight_formats.h).
//
// A format is the codes of a quad, and the scale and minimum of a group, in front of the same product. Weights are
// unpacked in registers, or once for many rows (`unpack`); both have the same codes and scales, hence the same bits.
#pragma once

#include "linear/linear_products.inl"
#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA {

// The scales and minimums of a group of sixteen outputs, or as many as a vector has.
struct GroupScale {
  F scale, minimum;
};

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

  PackedWeights(const uint8_t* stripe, int64_t stripe_bytes, int64_t padded_inputs, int column)
      : stripe(stripe),
        stripe_bytes(stripe_bytes),
        scales_at(f.scales_at(padded_inputs)),
        supers_at(f.supers_at(padded_inputs)),
        column(column) {}

  const uint8_t* planes(int s, int64_t group_of_32) const {
    return stripe + s * stripe_bytes + f.value_bytes(group_of_32 * kGroup) + column * 4;
  }

  // The codes of quad q of a group of 32 inputs, in bytes.
  I codes(int s, int64_t group_of_32, int q) const {
    const uint8_t* const low = planes(s, group_of_32);
    I numbers = bits_of_quad<f.low_bits>(low, q, 0);
    if constexpr (f.high_bits != 0)
      numbers = ior(numbers, bits_of_quad<f.high_bits>(low + f.low_bits * kStripe * 4, q, f.low_bits));
    if constexpr (has_table(kFormat)) numbers = lookup(load_table(table_of(kFormat)), numbers);
    return numbers;
  }

  // The scale and minimum of a group of kInputs inputs.
  GroupScale scale(int s, int64_t group) const {
    const uint8_t* const own = stripe + s * stripe_bytes;
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
    const uint8_t* const super = own + supers_at + group / (kSuperBlock / f.group) * f.super_bytes();
    if constexpr (!f.has_minimum)
      return {mul(half_at(super), load_s8(reinterpret_cast<const int8_t*>(at) + column)), zero()};
    const I factors = load_u8(at + column);
    const I factor = f.shares_bytes() ? bits_at(factors, 0, 15) : factors;
    const I minimum = f.shares_bytes() ? bits_at(factors, 4, 15) : load_u8(at + kStripe + column);
    return {mul(half_at(super), to_float(factor)), neg(mul(half_at(super + kStripe * 2), to_float(minimum)))};
  }

  const uint8_t* stripe;
  int64_t stripe_bytes, scales_at, supers_at;
  int column;
};

// The weights of a tile that `unpack` has written. Formats that agree in the parameters share code.
template <int kGroupInputs, int kBits, bool kMinimum>
struct UnpackedWeights {
  static constexpr int kInputs = kGroupInputs, kCenterBits = kBits;
  static constexpr bool kHasMinimum = kMinimum;
  static constexpr int64_t kScaleBytes = kStripe * 4 * (kMinimum ? 2 : 1);

  UnpackedWeights(const uint8_t* stripe, int64_t stripe_bytes, int64_t padded_inputs, int column)
      : stripe(stripe + column * 4), stripe_bytes(stripe_bytes), scales_at(padded_inputs * kStripe) {}

  I codes(int s, int64_t group_of_32, int q) const {
    return iload(stripe + s * stripe_bytes + (group_of_32 * kGroup + q * 4) * kStripe);
  }
  GroupScale scale(int s, int64_t group) const {
    const auto* at = reinterpret_cast<const float*>(stripe + s * stripe_bytes + scales_at + group * kScaleBytes);
    return {load(at), kHasMinimum ? load(at + kStripe) : zero()};
  }

  const uint8_t* stripe;
  int64_t stripe_bytes, scales_at;
};

template <WeightFormat kFormat>
using Unpacked = UnpackedWeights<group_format(kFormat).group, group_format(kFormat).center_bits,
                                 group_format(kFormat).has_minimum>;

template <WeightFormat kFormat>
static void unpack(const uint8_t* stripe, int64_t padded_inputs, uint8_t* unpacked) {
  using Target = Unpacked<kFormat>;
  for (int column = 0; column < kStripe; column += kLanes) {
    const PackedWeights<kFormat> weights(stripe, 0, padded_inputs, column);
    uint8_t* to = unpacked + column * 4;
    for (int64_t g = 0; g < padded_inputs / kGroup; ++g)
#pragma GCC unroll 8
      for (int q = 0; q < kGroup / 4; ++q, to += kStripe * 4) istore(to, weights.codes(0, g, q));
    for (int64_t g = 0; g < padded_inputs / Target::kInputs; ++g, to += Target::kScaleBytes) {
      const GroupScale found = weights.scale(0, g);
      store(reinterpret_cast<float*>(to), found.scale);
      if (Target::kHasMinimum) store(reinterpret_cast<float*>(to) + kStripe, found.minimum);
    }
  }
}

// The sum of a group before its products: minus the sum of the inputs times the center of the codes.
template <typename Weights>
static inline I start_of_group(int32_t correction) {
  return Weights::kCenterBits ? shift_left(iset1(correction), Weights::kCenterBits) : izero();
}

// Adds the product of a group to an output. acc: the sum of the products of codes; the other values are those of the row.
template <typename Weights>
static inline F add_scaled(I acc, const GroupScale& of_group, float scale, int32_t correction, float sum, F y) {
  const F x_scale = set1(scale);
  y = fma(mul(to_float(acc), of_group.scale), x_scale, y);
  if constexpr (Weights::kHasMinimum) {
    const F x_sum = Weights::kInputs == 16 ? mul(x_scale, to_float(iset1(-correction))) : set1(sum);
    y = fma(of_group.minimum, x_sum, y);
  }
  return y;
}

// Adds the products of a group: quads first_quad and following of a group of 32 inputs.
template <typename Weights, int kRows, int kStripes>
static inline void add_group(const ActivationBlock& block, const Weights& weights, int64_t g, int first_quad,
                             Sums<kRows, kStripes>& y) {
  constexpr bool kIsHalf = Weights::kInputs == 16;
  const int64_t group = kIsHalf ? 2 * g + first_quad / 4 : g;
  const int32_t* const correction = (kIsHalf ? block.half_correction : block.correction) + group * kBlockRows;
  const int8_t* const x = static_cast<const int8_t*>(block.values) + g * kGroup * kBlockRows;
  I acc[kStripes][kRows];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    const I first = start_of_group<Weights>(correction[m]);
#pragma GCC unroll 4
    for (int s = 0; s < kStripes; ++s) acc[s][m] = first;
  }
#pragma GCC unroll 8
  for (int i = 0; i < Weights::kInputs / 4; ++i) {
    const int q = kIsHalf ? first_quad + i : i / 2 + i % 2 * 4;  // q and q + 4 are in the same plane of four bits
    I codes[kStripes];
#pragma GCC unroll 4
    for (int s = 0; s < kStripes; ++s) codes[s] = weights.codes(s, g, q);
    dot<Interleaved, Weights::kCenterBits != 7>(acc, codes, x + q * kBlockRows * 4);
  }
  const float* const scale = block.scale + g * kBlockRows;
  const float* const sum = static_cast<const float*>(block.sum) + g * kBlockRows;
#pragma GCC unroll 4
  for (int s = 0; s < kStripes; ++s) {
    const GroupScale of_group = weights.scale(s, group);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
      y.of[s][m] = add_scaled<Weights>(acc[s][m], of_group, scale[m], correction[m], sum[m], y.of[s][m]);
  }
}

// Adds the products of outliers. The value of a row without an outlier at this input is 0, which changes no sum if the
// weights are finite. first: the first row of a block of kBlock rows.
template <typename Weights, int kBlock = kBlockRows, int kRows, int kStripes>
static inline void add_outliers(const ActivationBlock& block, const Weights& weights, Sums<kRows, kStripes>& y,
                                int first = 0) {
  constexpr auto kCenter = static_cast<float>(Weights::kCenterBits ? 1 << Weights::kCenterBits : 0);
  const float* values = static_cast<const float*>(block.outlier_values) + first;
  for (int32_t i = 0; i < *block.num_outliers; ++i, values += kBlock) {
    const auto input = static_cast<uint32_t>(block.outliers[i]);
#pragma GCC unroll 4
    for (int s = 0; s < kStripes; ++s) {
      const GroupScale found = weights.scale(s, input / Weights::kInputs);
      const I quad = weights.codes(s, input / kGroup, static_cast<int>(input % kGroup / 4));
      const F codes = sub(to_float(bits_at(quad, static_cast<int>(input % 4 * 8), 255)), set1(kCenter));
      const F weight = Weights::kHasMinimum ? fma(codes, found.scale, found.minimum) : mul(codes, found.scale);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) y.of[s][m] = fma(weight, set1(values[m]), y.of[s][m]);
    }
  }
}

template <typename Weights, int kRows>
static void multiply_grouped_rows(const StripeTask& task) {
  Ahead ahead(task);
  prefetch_outputs<kRows, kTileStripes>(task);
  for (int column = 0; column < kStripe; column += kLanes) {
    const Weights weights(task.stripe, task.stripe_bytes, task.padded_inputs, column);
    Sums<kRows, kTileStripes> y;
    for (int s = 0; s < kTileStripes; ++s)
      for (int m = 0; m < kRows; ++m) y.of[s][m] = zero();
    for (int64_t g = 0; g < task.padded_inputs / kGroup; ++g) {
      ahead.prefetch_part();
#pragma GCC unroll 2
      for (int quad = 0; quad < kGroup / 4; quad += Weights::kInputs / 4) add_group(task.block(), weights, g, quad, y);
    }
    add_outliers(task.block(), weights, y);
#pragma GCC unroll 4
    for (int s = 0; s < kTileStripes; ++s)
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m)
        if (m < task.num_rows) put(task, m, s * kStripe + column, y.of[s][m]);
  }
}

template <WeightFormat kFormat>
static void multiply_grouped(const StripeTask& task) {
  using Weights = PackedWeights<kFormat>;
  switch (task.num_rows) {
    case 1: return multiply_grouped_rows<Weights, 1>(task);
    case 2: return multiply_grouped_rows<Weights, 2>(task);
    case 3: return multiply_grouped_rows<Weights, 3>(task);
    default: return multiply_grouped_rows<Weights, 4>(task);
  }
}

template <WeightFormat kFormat>
static constexpr ProductKernel grouped_kernel() {
  ProductKernel kernel = {kBlockRows, kTileStripes, ActivationLayout::bytes, multiply_grouped<kFormat>};
  constexpr GroupFormat f = group_format(kFormat);
  if constexpr (f.scales != ScaleKind::direct || f.high_bits != 0 || has_table(kFormat)) {
    kernel.min_unpacked_blocks = 5;  // measured: even at 16 rows, faster at 64 (docs/experiments.md)
    kernel.unpack = unpack<kFormat>;
    kernel.multiply_unpacked = multiply_grouped_rows<Unpacked<kFormat>, kBlockRows>;
  }
  return kernel;
}

}  // namespace chairlift::CHAIRLIFT_ISA
