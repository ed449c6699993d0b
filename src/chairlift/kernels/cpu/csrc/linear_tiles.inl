// Compiled once for every instruction set. The order of floating point operations of one output is the same for any
// number of rows: products of integers are exact, each group of inputs ends in one fma, groups ascending, and each of the
// row's outliers is one fma, inputs ascending.
#include "linear_tiles.h"

namespace chairlift::CHAIRLIFT_ISA {

constexpr int kBlockRows = kLanes == 16 ? 8 : 4;

static inline I broadcast4(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return iset1(four);
}

static inline void put(const StripeTask& task, int row, int column, F y) {
  const int count = task.num_columns - column < kLanes ? task.num_columns - column : kLanes;
  if (count <= 0) return;
  float* out = task.out + row * task.out_stride + column;
  if (task.bias) y = add(y, load(task.bias + column));
  if (count == kLanes) {
    store(out, task.add ? add(load(out), y) : y);
  } else {
    store_n(out, task.add ? add(load_n(out, count), y) : y, count);
  }
}

// The sum over one group of 32 inputs of nibbles times activations, for kRows rows.
template <int kRows>
static inline void dot_nibbles(const uint8_t* planes, const int8_t* x, I (&acc)[kRows]) {
  I more[kRows];
  for (int m = 0; m < kRows; ++m) more[m] = izero();
#pragma GCC unroll 4
  for (int p = 0; p < 4; ++p) {
    const I packed = iload(planes + p * kStripe * 4);
    const I low = low_nibbles(packed), high = high_nibbles(packed);
    const int8_t* x_low = x + p * kBlockRows * 4;
    const int8_t* x_high = x_low + 4 * kBlockRows * 4;
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) acc[m] = dot_u4s8(acc[m], low, broadcast4(x_low + 4 * m));
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      if (kRows <= 4) {
        more[m] = dot_u4s8(more[m], high, broadcast4(x_high + 4 * m));
      } else {
        acc[m] = dot_u4s8(acc[m], high, broadcast4(x_high + 4 * m));
      }
    }
  }
  if (kRows <= 4)
    for (int m = 0; m < kRows; ++m) acc[m] = iadd(acc[m], more[m]);
}

// Weights come once, in order, faster than the hardware looks ahead.
constexpr int64_t kAhead = 8192;
static inline void prefetch(const uint8_t* p, int num_bytes) {
  for (int i = 0; i < num_bytes; i += 64) __builtin_prefetch(p + kAhead + i);
}

template <int kRows, typename Column>
static inline void add_outliers(const ActivationBlock& block, F* y, Column column) {
  const int32_t num_inputs = *block.num_outlier_inputs;
  for (int32_t i = 0; i < num_inputs; ++i) {
    const F weights = column(static_cast<uint32_t>(block.outlier_inputs[i]));
    int32_t at = block.outlier_starts[i];
    const int32_t end = block.outlier_starts[i + 1];
    if (end - at == kRows) {
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) y[m] = fma(weights, set1(block.outlier_values[at + m]), y[m]);
      continue;
    }
    for (; at < end; ++at) {
      F& sum = y[block.outlier_rows[at]];
      sum = fma(weights, set1(block.outlier_values[at]), sum);
    }
  }
}

template <bool kHasMinimum, int kRows>
static void multiply_q4(const StripeTask& task, int column) {
  const int64_t groups = task.padded_inputs / kGroup;
  const uint8_t* planes = task.stripe + column * 4;
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(task.stripe + groups * kGroup * kStripe / 2) + column;
  const uint16_t* minimums = scales + groups * kStripe;
  const int8_t* x = static_cast<const int8_t*>(task.block.values);
  F y[kRows];
  for (int m = 0; m < kRows; ++m) y[m] = zero();
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t at = g * kBlockRows;
    I acc[kRows];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) acc[m] = kHasMinimum ? izero() : iset1(task.block.correction[at + m]);
    if (column == 0) prefetch(planes + g * kGroup * kStripe / 2, kGroup * kStripe / 2);
    dot_nibbles<kRows>(planes + g * kGroup * kStripe / 2, x + at * kGroup, acc);
    const F scale = load_f16(scales + g * kStripe);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) y[m] = fma(mul(to_float(acc[m]), scale), set1(task.block.scale[at + m]), y[m]);
    if (kHasMinimum) {
      const F minimum = load_f16(minimums + g * kStripe);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) y[m] = fma(minimum, set1(task.block.sum[at + m]), y[m]);
    }
  }
  add_outliers<kRows>(task.block, y, [&](uint32_t k) {
    const uint32_t g = k / kGroup, within = k % kGroup;
    const I plane = iload(planes + g * kGroup * kStripe / 2 + within % 16 / 4 * kStripe * 4);
    const F value = to_float(bits_at(plane, static_cast<int>(within % 4 * 8 + within / 16 * 4), 15));
    const F scale = load_f16(scales + g * kStripe);
    return kHasMinimum ? fma(value, scale, load_f16(minimums + g * kStripe)) : mul(sub(value, set1(8.0f)), scale);
  });
  for (int m = 0; m < kRows; ++m) put(task, m, column, y[m]);
}

// The sum over one group of 32 inputs of bytes times activations, for kRows rows. Few rows use several chains of sums.
template <int kRows>
static inline void dot_bytes(const uint8_t* w, const int8_t* x, I (&acc)[kRows]) {
  constexpr int kChains = kRows == 1 ? 4 : kRows <= 4 ? 2 : 1;
  I more[kChains][kRows];
  for (int c = 1; c < kChains; ++c)
    for (int m = 0; m < kRows; ++m) more[c][m] = izero();
  for (int k = 0; k < kGroup / 4; k += kChains) {
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) {
      const I weights = iload(w + (k + c) * kStripe * 4);
      const int8_t* quad = x + (k + c) * kBlockRows * 4;
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        I& sum = c == 0 ? acc[m] : more[c][m];
        sum = dot_u8s8(sum, weights, broadcast4(quad + 4 * m));
      }
    }
  }
  for (int c = 1; c < kChains; ++c)
    for (int m = 0; m < kRows; ++m) acc[m] = iadd(acc[m], more[c][m]);
}

// The weights of one input, where they are stored as bytes above 128.
static inline F byte_column(const uint8_t* w, uint32_t k) {
  const I bytes = bits_at(iload(w + k / 4 * kStripe * 4), static_cast<int>(k % 4 * 8), 255);
  return sub(to_float(bytes), set1(128.0f));
}

template <int kRows>
static void multiply_q8_0(const StripeTask& task, int column) {
  const int64_t groups = task.padded_inputs / kGroup;
  const uint8_t* w = task.stripe + column * 4;
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(task.stripe + task.padded_inputs * kStripe) + column;
  const int8_t* x = static_cast<const int8_t*>(task.block.values);
  F y[kRows];
  for (int m = 0; m < kRows; ++m) y[m] = zero();
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t at = g * kBlockRows;
    I acc[kRows];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) acc[m] = iset1(task.block.correction[at + m]);
    dot_bytes<kRows>(w + g * kGroup * kStripe, x + at * kGroup, acc);
    const F scale = load_f16(scales + g * kStripe);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) y[m] = fma(mul(to_float(acc[m]), scale), set1(task.block.scale[at + m]), y[m]);
  }
  add_outliers<kRows>(task.block, y,
               [&](uint32_t k) { return mul(byte_column(w, k), load_f16(scales + k / kGroup * kStripe)); });
  for (int m = 0; m < kRows; ++m) put(task, m, column, y[m]);
}

template <int kRows>
static void multiply_int8(const StripeTask& task, int column) {
  const int64_t groups = task.padded_inputs / kGroup;
  const uint8_t* w = task.stripe + column * 4;
  const F scale = load(reinterpret_cast<const float*>(task.stripe + task.padded_inputs * kStripe) + column);
  const int8_t* x = static_cast<const int8_t*>(task.block.values);
  F y[kRows];
  for (int m = 0; m < kRows; ++m) y[m] = zero();
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t at = g * kBlockRows;
    I acc[kRows];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) acc[m] = iset1(task.block.correction[at + m]);
    dot_bytes<kRows>(w + g * kGroup * kStripe, x + at * kGroup, acc);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) y[m] = fma(to_float(acc[m]), set1(task.block.scale[at + m]), y[m]);
  }
  add_outliers<kRows>(task.block, y, [&](uint32_t k) { return byte_column(w, k); });
  for (int m = 0; m < kRows; ++m) put(task, m, column, mul(y[m], scale));
}

static inline F load_weights(const float* p) { return load(p); }
struct Half { uint16_t bits; };
struct Brain { uint16_t bits; };
static inline F load_weights(const Half* p) { return load_f16(&p->bits); }
static inline F load_weights(const Brain* p) { return load_bf16(&p->bits); }

template <typename Weight, int kRows>
static void multiply_floats(const StripeTask& task, int column) {
  const Weight* w = reinterpret_cast<const Weight*>(task.stripe) + column;
  const float* x = static_cast<const float*>(task.block.values);
  F y[kRows];
  for (int m = 0; m < kRows; ++m) y[m] = zero();
  for (int64_t k = 0; k < task.padded_inputs; ++k) {
    const F weights = load_weights(w + k * kStripe);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) y[m] = fma(weights, set1(x[k * kBlockRows + m]), y[m]);
  }
  for (int m = 0; m < kRows; ++m) put(task, m, column, y[m]);
}

template <WeightFormat kFormat, int kRows>
static inline void multiply_rows(const StripeTask& task, int column) {
  if constexpr (kFormat == WeightFormat::q4_0) multiply_q4<false, kRows>(task, column);
  if constexpr (kFormat == WeightFormat::q4_1) multiply_q4<true, kRows>(task, column);
  if constexpr (kFormat == WeightFormat::q8_0) multiply_q8_0<kRows>(task, column);
  if constexpr (kFormat == WeightFormat::int8) multiply_int8<kRows>(task, column);
  if constexpr (kFormat == WeightFormat::bf16) multiply_floats<Brain, kRows>(task, column);
  if constexpr (kFormat == WeightFormat::f16) multiply_floats<Half, kRows>(task, column);
  if constexpr (kFormat == WeightFormat::f32) multiply_floats<float, kRows>(task, column);
}

template <WeightFormat kFormat>
static void multiply(const StripeTask& task) {
  for (int column = 0; column < kStripe; column += kLanes) {
    switch (task.num_rows) {
      case 1: multiply_rows<kFormat, 1>(task, column); break;
      case 2: multiply_rows<kFormat, 2>(task, column); break;
      case 3: multiply_rows<kFormat, 3>(task, column); break;
      case 4: multiply_rows<kFormat, 4>(task, column); break;
      case 5: multiply_rows<kFormat, kBlockRows < 5 ? 1 : 5>(task, column); break;
      case 6: multiply_rows<kFormat, kBlockRows < 6 ? 1 : 6>(task, column); break;
      case 7: multiply_rows<kFormat, kBlockRows < 7 ? 1 : 7>(task, column); break;
      default: multiply_rows<kFormat, kBlockRows>(task, column);
    }
  }
}

// --- prologues ------------------------------------------------------------------------------------------------------

static inline float sum_of_squares(const float* x, int64_t n, F shift) {
  F sum = zero();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const F v = sub(load(x + i), shift);
    sum = fma(v, v, sum);
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    const F v = select(less(iota(), set1(static_cast<float>(rest))), sub(load_n(x + i, rest), shift), zero());
    sum = fma(v, v, sum);
  }
  return reduce_add(sum);
}

static inline float sum_of(const float* x, int64_t n) {
  F sum = zero();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) sum = add(sum, load(x + i));
  if (i < n) sum = add(sum, load_n(x + i, static_cast<int>(n - i)));
  return reduce_add(sum);
}

// y = op(i, lanes) for i = 0, kLanes, ..., the last with fewer lanes.
template <typename Op>
static inline void each(int64_t n, float* y, Op op) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(y + i, op(i, kLanes));
  if (i < n) store_n(y + i, op(i, static_cast<int>(n - i)), static_cast<int>(n - i));
}
static inline F part(const float* p, int count) { return count == kLanes ? load(p) : load_n(p, count); }

static inline float inverse_root(float mean, float eps) { return 1.0f / __builtin_sqrtf(mean + eps); }

static void rms_norm(const PrologueArgs& args, const float* x, int64_t n, float* y) {
  const F scale = set1(inverse_root(sum_of_squares(x, n, zero()) / static_cast<float>(n), args.eps));
  each(n, y, [&](int64_t i, int count) { return mul(mul(part(x + i, count), scale), part(args.weight + i, count)); });
}

static void layer_norm(const PrologueArgs& args, const float* x, int64_t n, float* y) {
  const F mean = set1(sum_of(x, n) / static_cast<float>(n));
  const F scale = set1(inverse_root(sum_of_squares(x, n, mean) / static_cast<float>(n), args.eps));
  each(n, y, [&](int64_t i, int count) {
    return fma(mul(sub(part(x + i, count), mean), scale), part(args.weight + i, count), part(args.bias + i, count));
  });
}

static void silu_and_mul(const float* x, int64_t n, float* y) {
  each(n, y, [&](int64_t i, int count) {
    const F gate = part(x + i, count), up = part(x + n + i, count);
    return mul(div(gate, add(set1(1.0f), exp(neg(gate)))), up);
  });
}

static void prologue(const PrologueArgs& args, const float* x, int64_t n, float* y) {
  switch (args.kind) {
    case Prologue::rms_norm: return rms_norm(args, x, n, y);
    case Prologue::layer_norm: return layer_norm(args, x, n, y);
    case Prologue::silu_and_mul: return silu_and_mul(x, n, y);
    case Prologue::relu: return each(n, y, [&](int64_t i, int count) { return max(part(x + i, count), zero()); });
    case Prologue::none: return each(n, y, [&](int64_t i, int count) { return part(x + i, count); });
  }
}

// --- activations ----------------------------------------------------------------------------------------------------

constexpr int kMaxGroups = 64;  // that are quantized in one go: their limits and scales stand on the stack

// Limits above which an input is an outlier, and the largest magnitude of the others, by group. No branches: the chains
// of neighbouring groups overlap.
static inline void measure_groups(const float* y, int count, float outlier, float* limits, float* tops) {
  for (int g = 0; g < count; ++g) {
    const float* group = y + g * kGroup;
    F sum = zero();
    for (int i = 0; i < kGroup; i += kLanes) sum = add(sum, abs(load(group + i)));
    limits[g] = reduce_add(sum) * (outlier / kGroup);
    const F limit = set1(limits[g]);
    F top = zero();
    for (int i = 0; i < kGroup; i += kLanes) {
      const F magnitude = abs(load(group + i));
      top = max(select(less(limit, magnitude), zero(), magnitude), top);
    }
    tops[g] = reduce_max(top);
  }
}

static inline void note_outliers(const float* y, int64_t k, unsigned bits, const RowTarget& target) {
  for (; bits; bits &= bits - 1) {
    const int64_t at = k + __builtin_ctz(bits);
    target.outlier_rows[at] = static_cast<uint8_t>(target.outlier_rows[at] | 1u << target.row);
    target.outlier_values[at * kBlockRows + target.row] = y[at];
  }
}

// Symmetric, to -127..127: a group's scale is its largest magnitude over 127. A group of zeros has scale 0.
static void quantize(const float* y, int64_t padded_inputs, int shift, int8_t* scratch, const RowTarget& target) {
  const int64_t groups = padded_inputs / kGroup;
  float limits[kMaxGroups], tops[kMaxGroups];
  for (int64_t first = 0; first < groups; first += kMaxGroups) {
    const int count = static_cast<int>(groups - first < kMaxGroups ? groups - first : kMaxGroups);
    measure_groups(y + first * kGroup, count, target.outlier, limits, tops);
    for (int g = 0; g < count; ++g) {
      const F limit = set1(limits[g]), inverse = set1(tops[g] > 1e-30f ? 127.0f / tops[g] : 0.0f);
      const int64_t k = (first + g) * kGroup;
      I sum = izero();
      for (int i = 0; i < kGroup; i += kLanes) {
        const F values = load(y + k + i);
        const M is_outlier = less(limit, abs(values));
        const I q = to_int(mul(select(is_outlier, zero(), values), inverse));
        sum = iadd(sum, q);
        store_s8(scratch + k + i, q);
        const unsigned bits = mask_bits(is_outlier);
        if (__builtin_expect(bits != 0, 0)) note_outliers(y, k + i, bits, target);
      }
      const int32_t total = ireduce_add(sum);
      const int64_t at = (first + g) * kBlockRows + target.row;
      const float scale = tops[g] / 127.0f;
      target.scale[at] = scale;
      target.correction[at] = -shift * total;
      target.sum[at] = scale * static_cast<float>(total);
    }
  }
  int8_t* out = static_cast<int8_t*>(target.values) + 4 * target.row;
  for (int64_t k = 0; k < padded_inputs; k += 4) __builtin_memcpy(out + k * kBlockRows, scratch + k, 4);
}

static void interleave(const float* y, int64_t padded_inputs, const RowTarget& target) {
  float* out = static_cast<float*>(target.values) + target.row;
  for (int64_t k = 0; k < padded_inputs; ++k) out[k * kBlockRows] = y[k];
}

static constexpr LinearTiles linear_tiles() {
  return {kBlockRows,
          {multiply<WeightFormat::q4_0>, multiply<WeightFormat::q4_1>, multiply<WeightFormat::q8_0>,
           multiply<WeightFormat::int8>, multiply<WeightFormat::bf16>, multiply<WeightFormat::f16>,
           multiply<WeightFormat::f32>},
          prologue,
          quantize,
          interleave};
}

}  // namespace chairlift::CHAIRLIFT_ISA
