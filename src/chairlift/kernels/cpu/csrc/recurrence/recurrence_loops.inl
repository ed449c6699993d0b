// Compiled for each instruction set: convolutions, gates, recurrences and gated norms.
#pragma once

#include "recurrence/recurrence_loops.h"
#include "runtime/prefetch.h"
#include "simd/rows.h"
#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA {

static void multiply_rows(const float* a, const float* b, int64_t n, float* out) {
  each(n, out, [&](int64_t i, int count) { return mul(part(a + i, count), part(b + i, count)); });
}

template <int kWidth, bool kSilu>
static void convolve_width(const ConvolutionArgs& args, const float* const* inputs, int64_t channels, float* out) {
  each(channels, out, [&](int64_t i, int count) {
    F sum = args.bias ? part(args.bias + i, count) : zero();
    for (int j = 0; j < kWidth; ++j)
      sum = fma(part(args.weight + j * args.weight_stride + i, count), part(inputs[j] + i, count), sum);
    return kSilu ? silu(sum) : sum;
  });
}

static void convolve(const ConvolutionArgs& args, const float* const* inputs, int64_t channels, float* out) {
  switch (args.width) {
    case 2: return (args.has_silu ? convolve_width<2, true> : convolve_width<2, false>)(args, inputs, channels, out);
    case 3: return (args.has_silu ? convolve_width<3, true> : convolve_width<3, false>)(args, inputs, channels, out);
    case 4: return (args.has_silu ? convolve_width<4, true> : convolve_width<4, false>)(args, inputs, channels, out);
    case 5: return (args.has_silu ? convolve_width<5, true> : convolve_width<5, false>)(args, inputs, channels, out);
    case 6: return (args.has_silu ? convolve_width<6, true> : convolve_width<6, false>)(args, inputs, channels, out);
    default: return (args.has_silu ? convolve_width<7, true> : convolve_width<7, false>)(args, inputs, channels, out);
  }
}

static void normalize(float* x, int64_t n, float scale) {
  const F factor = set1(scale * inverse_root(sum_of_squares(x, n, zero()), 1e-6f));
  each(n, x, [&](int64_t i, int count) { return mul(part(x + i, count), factor); });
}

static void gates(const GateArgs& args, const float* gate, const float* factor_gate, int64_t heads, int64_t decays,
                  float* decay, float* factor) {
  const F scale = set1(args.factor_scale), low = set1(args.low), high = set1(args.high);
  each(heads, factor, [&](int64_t i, int count) {
    if (factor_gate) return mul(scale, sigmoid(part(factor_gate + i, count)));
    return min(max(softplus(add(part(gate + i, count), part(args.bias + i, count))), low), high);
  });
  each(decays, decay, [&](int64_t i, int count) {
    const F time = factor_gate ? softplus(add(part(gate + i, count), part(args.bias + i, count)))
                               : part(factor + i, count);
    return exp(mul(part(args.rate + i, count), time));
  });
}

template <bool kSigmoid>
static void norm_and_gate(const GatedNormArgs& args, const float* y, const float* z, int64_t n, float* out) {
  const auto gate = [&](F x) { return kSigmoid ? sigmoid(x) : silu(x); };
  const auto gated = [&](int64_t i, int count) { return mul(part(y + i, count), gate(part(z + i, count))); };
  if (!args.weight) return each(n, out, gated);
  if (args.gates_first) each(n, out, gated);
  const float* const normed = args.gates_first ? out : y;
  const F scale = set1(inverse_root(sum_of_squares(normed, n, zero()) / static_cast<float>(n), args.eps));
  each(n, out, [&](int64_t i, int count) {
    const F value = mul(mul(part(normed + i, count), scale), part(args.weight + i, count));
    return args.gates_first ? value : mul(value, gate(part(z + i, count)));
  });
}

static void gated_norm(const GatedNormArgs& args, const float* y, const float* z, int64_t n, float* out) {
  (args.has_sigmoid ? norm_and_gate<true> : norm_and_gate<false>)(args, y, z, n, out);
}

// --- scan -----------------------------------------------------------------------------------------------------------

// kVectors vectors of columns, or fewer than kLanes columns if it is not kWhole.
template <int kVectors, bool kWhole>
struct Slab {
  F load(const float* p, int v) const { return kWhole ? CHAIRLIFT_ISA::load(p + v * kLanes) : load_n(p, columns); }
  void store(float* p, int v, F x) const {
    if (kWhole)
      CHAIRLIFT_ISA::store(p + v * kLanes, x);
    else
      store_n(p, x, columns);
  }
  static constexpr int kCount = kVectors;
  int columns;
};

// What the state is multiplied by for the change of a token: k, or decay * k if each channel has its decay.
template <StateRule kRule>
static CHAIRLIFT_INLINE F read_key(const float* k, const float* decay, int64_t i) {
  return kRule == StateRule::channel_delta ? mul(set1(decay[i]), set1(k[i])) : set1(k[i]);
}

// dots = read_key . state
template <StateRule kRule, typename Slab>
static CHAIRLIFT_INLINE void dot_state(const Slab& slab, const float* k, const float* decay, const float* state,
                                       int64_t stride, int64_t keys, F (&dots)[Slab::kCount]) {
  for (int v = 0; v < Slab::kCount; ++v) dots[v] = zero();
  for (int64_t i = 0; i < keys; ++i, state += stride) {
    const F key = read_key<kRule>(k, decay, i);
    for (int v = 0; v < Slab::kCount; ++v) dots[v] = fma(key, slab.load(state, v), dots[v]);
  }
}

struct StateRows {
  const float* from;
  int64_t from_stride;
  float* to;
  int64_t to_stride;
  int64_t keys;
  const float* ahead;
  int64_t ahead_stride;
};

// state = decay * state + k (x) change, out = q . state, and with kDots the dots of the next token, which are
// row_stride and decay_stride further.
template <StateRule kRule, bool kDots, typename Slab>
static CHAIRLIFT_INLINE void update_state(const Slab& slab, StateRows rows, const ScanTask& task, const float* decays,
                                          const float* q, const float* k, const F (&change)[Slab::kCount],
                                          F (&out)[Slab::kCount], F (&dots)[Slab::kCount]) {
  constexpr bool kByChannel = kRule == StateRule::channel_delta;
  const F head_decay = set1(decays[0]);
  const float* const next = kDots ? k + task.row_stride : k;
  const float* const next_decays = kDots ? decays + task.decay_stride : decays;
  for (int v = 0; v < Slab::kCount; ++v) out[v] = dots[v] = zero();
  for (int64_t i = 0; i < rows.keys; ++i) {
    const F decay = kByChannel ? set1(decays[i]) : head_decay;
    const F query = set1(q[i]), key = set1(k[i]), next_key = kDots ? read_key<kRule>(next, next_decays, i) : zero();
    if (rows.ahead) {
      for (int v = 0; v < Slab::kCount; v += 16 / kLanes)
        __builtin_prefetch(rows.ahead + i * rows.ahead_stride + v * kLanes, 0, kSecondLevel);
    }
    for (int v = 0; v < Slab::kCount; ++v) {
      const F state = fma(decay, slab.load(rows.from, v), mul(key, change[v]));
      slab.store(rows.to, v, state);
      out[v] = fma(query, state, out[v]);
      if (kDots) dots[v] = fma(next_key, state, dots[v]);
    }
    rows.from += rows.from_stride;
    rows.to += rows.to_stride;
  }
}

static inline void prefetch_row(const float* row, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(row + i);
}

template <StateRule kRule, typename Slab>
static void scan_slab(const ScanTask& task, const Slab& slab, int64_t first) {
  constexpr int kVectors = Slab::kCount;
  constexpr bool kDelta = kRule != StateRule::add;
  StateRows rows = {task.from + first, task.from_stride, task.to + first, task.to_stride, task.keys,
                    task.ahead ? task.ahead + first : nullptr, task.ahead_stride};
  const F skip = set1(task.skip);
  F dots[kVectors], change[kVectors], out[kVectors];
  if (kDelta) dot_state<kRule>(slab, task.k, task.decay, rows.from, rows.from_stride, task.keys, dots);
  for (int64_t token = 0; token < task.tokens; ++token) {
    const float* const q = task.q + token * task.row_stride;
    const float* const k = task.k + token * task.row_stride;
    float* const value = task.v + token * task.row_stride + first;
    const float* const decays = task.decay + token * task.decay_stride;
    const F decay = set1(decays[0]), factor = set1(task.factor[token * task.factor_stride]);
    const bool is_last = token + 1 == task.tokens;
    for (int v = 0; v < kVectors; ++v) {
      const F x = slab.load(value, v);
      const F known = kRule == StateRule::delta ? mul(decay, dots[v]) : dots[v];
      change[v] = mul(factor, kDelta ? sub(x, known) : x);
    }
    if (!is_last) {
      prefetch_row(q + task.row_stride, task.keys);
      prefetch_row(k + (kDelta ? 2 : 1) * task.row_stride, task.keys);
    }
    if (kDelta && !is_last)
      update_state<kRule, true>(slab, rows, task, decays, q, k, change, out, dots);
    else
      update_state<kRule, false>(slab, rows, task, decays, q, k, change, out, dots);
    for (int v = 0; v < kVectors; ++v)
      slab.store(value, v, kDelta ? out[v] : fma(skip, slab.load(value, v), out[v]));
    rows = {task.to + first, task.to_stride, task.to + first, task.to_stride, task.keys, nullptr, 0};
  }
}

template <StateRule kRule>
static void scan_columns(const ScanTask& task) {
  int64_t at = 0;
  for (; at + 4 * kLanes <= task.columns; at += 4 * kLanes) scan_slab<kRule>(task, Slab<4, true>{kLanes}, at);
  for (; at + 2 * kLanes <= task.columns; at += 2 * kLanes) scan_slab<kRule>(task, Slab<2, true>{kLanes}, at);
  for (; at + kLanes <= task.columns; at += kLanes) scan_slab<kRule>(task, Slab<1, true>{kLanes}, at);
  if (const int rest = static_cast<int>(task.columns - at)) scan_slab<kRule>(task, Slab<1, false>{rest}, at);
}

static void scan(const ScanTask& task) {
  switch (task.rule) {
    case StateRule::add: return scan_columns<StateRule::add>(task);
    case StateRule::delta: return scan_columns<StateRule::delta>(task);
    case StateRule::channel_delta: return scan_columns<StateRule::channel_delta>(task);
  }
}

constexpr RecurrenceLoops recurrence_loops() {
  return {multiply_rows, convolve, normalize, gates, scan, gated_norm, kLanes};
}

}  // namespace chairlift::CHAIRLIFT_ISA
