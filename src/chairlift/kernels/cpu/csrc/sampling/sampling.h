// Sampling: argmax, filtered draws and logprobs of one row of logits. The result of a row depends on this row alone.
#pragma once

#include <cstddef>
#include <cstdint>

namespace chairlift {

// The sampling parameters of one row; top_k 0, top_p 1 and min_p 0 keep every token.
struct DrawParams {
  float temperature;
  int64_t top_k;
  double top_p;
  float min_p;
  double uniform;  // in [0, 1)
};

// The uniform number of (stream key, position): SplitMix64's finalizer (Steele, Lea and Flood, OOPSLA'14, figure 17),
// as in worker/random_stream.py.
double uniform_at(uint64_t key, int64_t position);

// Sets every logit whose bit is 0 to -infinity; bit i of the mask is bit i % 32 of its word i / 32.
void mask_tokens(float* logits, int64_t n, const uint32_t* mask);

// The bytes of scratch memory that the functions below need for a row of n logits.
size_t sampling_scratch_bytes(int64_t n);

int64_t argmax_token(const float* logits, int64_t n);

// Inverse transform sampling over the tokens that pass min_p, top_k and top_p; see `draw_token` in sampling.cpp.
int64_t draw_token(const float* logits, int64_t n, const DrawParams& params, void* scratch);

// Writes logprob and rank of `token`, then those of the num_top <= n likeliest tokens: 1 + num_top entries per array.
void token_logprobs(const float* logits, int64_t n, int64_t token, int64_t num_top, int64_t* ids, float* logprobs,
                    int64_t* ranks, void* scratch);

}  // namespace chairlift
