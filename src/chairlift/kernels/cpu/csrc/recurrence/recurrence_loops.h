// The inner loops of layers with recurrent state: the functions that are compiled for each instruction set.
#pragma once

#include <cstdint>

namespace chairlift {

// A causal depthwise convolution: out = function(bias + sum of weight * input), and function is SiLU or the identity.
struct ConvolutionArgs {
  const float* weight;  // [width] for the inputs from the oldest to the newest, weight_stride apart
  int64_t weight_stride;
  const float* bias;  // or null
  int width;
  bool has_silu;
};

constexpr int kMaxConvolutionWidth = 7;

// How the gates of a token become the coefficients of a step.
//
//   gated delta   decay = exp(rate * softplus(gate + bias)), factor = factor_scale * sigmoid(factor gate)
//   Mamba-2       factor = min(max(softplus(gate + bias), low), high), decay = exp(rate * factor)
struct GateArgs {
  const float* rate;  // negative
  const float* bias;
  float factor_scale, low, high;
};

// y * gate(z) after, before or without an RMSNorm; gate is SiLU or the sigmoid.
struct GatedNormArgs {
  const float* weight;  // null for no norm
  float eps;
  bool gates_first;  // norm(y * gate(z)) instead of norm(y) * gate(z)
  bool has_sigmoid;
};

// How the state changes.
enum class StateRule { add, delta, channel_delta };

// The recurrence of consecutive tokens over some columns of the state of a head, state [keys][columns]:
//
//   state = decay * state + k (x) change, out = q . state
//   add             change = factor * v, and out is increased by skip * v
//   delta           change = factor * (v - decay * (k . state)) with the state before
//   channel_delta   change = factor * (v - (decay * k) . state), where each row of the state has its own decay
//
// A column is computed with the same operations in the same order for any division of columns and of tokens. The first
// token reads `from`, and all write `to`, which may be the same memory.
struct ScanTask {
  const float* from;
  int64_t from_stride;
  float* to;
  int64_t to_stride;
  int64_t keys;
  int columns;
  int64_t tokens;
  const float* q;  // [keys] of the first token; the rows of q, k and v are row_stride apart
  const float* k;
  float* v;  // [columns], overwritten with the output
  int64_t row_stride;
  const float* decay;  // of the first token; [keys] for channel_delta
  int64_t decay_stride;
  const float* factor;
  int64_t factor_stride;
  float skip;
  StateRule rule;
  const float* ahead;  // a state that is read next, to be prefetched; or null
  int64_t ahead_stride;
};

struct RecurrenceLoops {
  // out = a * b; out may be a or b.
  void (*multiply)(const float* a, const float* b, int64_t n, float* out);
  // The convolution of one token from the inputs of `width` tokens, the oldest first; out may be the newest.
  void (*convolve)(const ConvolutionArgs& args, const float* const* inputs, int64_t channels, float* out);
  // x = scale * x / sqrt(sum of squares + 1e-6)
  void (*normalize)(float* x, int64_t n, float scale);
  // The coefficients of the heads of one token; decay may be gate. factor_gate is null for Mamba-2, where heads have one
  // decay each.
  void (*gates)(const GateArgs& args, const float* gate, const float* factor_gate, int64_t heads, int64_t decays,
                float* decay, float* factor);
  void (*scan)(const ScanTask& task);
  // The gated norm of one group of values.
  void (*gated_norm)(const GatedNormArgs& args, const float* y, const float* z, int64_t n, float* out);
  int lanes;  // of a vector
};

}  // namespace chairlift
