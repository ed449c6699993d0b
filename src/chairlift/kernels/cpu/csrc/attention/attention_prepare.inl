// Query, key and value before attention: norm, rotary embedding, and writes to KV memory.
#pragma once

#include "attention/attention_tiles.h"
#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA::attention {

static inline int lanes_left(int i, int end) { return end - i < kLanes ? end - i : kLanes; }

// Loads and stores of the first n lanes. Whole vectors have no mask, because a masked store is not forwarded to a load.
static inline F load_some(const float* p, int n) { return n == kLanes ? load(p) : load_n(p, n); }
static inline void store_some(float* p, F x, int n) {
  if (n == kLanes) store(p, x);
  else store_n(p, x, n);
}

// RMSNorm of one head, in place (Zhang and Sennrich, 2019). A weight of null stands for ones.
static inline void norm_head(float* x, int head_dim, const float* weight, float eps) {
  F squares = zero();
  for (int i = 0; i < head_dim; i += kLanes) {
    const F v = load_some(x + i, lanes_left(i, head_dim));
    squares = fma(v, v, squares);
  }
  const F mean = set1(reduce_add(squares) / static_cast<float>(head_dim) + eps);
  const F factor = div(set1(1.0f), sqrt(mean));
  for (int i = 0; i < head_dim; i += kLanes) {
    const int n = lanes_left(i, head_dim);
    const F normed = mul(load_some(x + i, n), factor);
    store_some(x + i, weight ? mul(normed, load_some(weight + i, n)) : normed, n);
  }
}

// Dimensions i and i + rotary_dim / 2 are a pair, rotated by the angle whose cosine is cos_sin[i] (Su et al., 2021).
static inline void rotate_head(float* x, int rotary_dim, const float* cos_sin) {
  const int half = rotary_dim / 2;
  for (int i = 0; i < half; i += kLanes) {
    const int n = lanes_left(i, half);
    const F a = load_some(x + i, n), b = load_some(x + half + i, n);
    const F c = load_some(cos_sin + i, n), s = load_some(cos_sin + half + i, n);
    store_some(x + i, fma(a, c, neg(mul(b, s))), n);
    store_some(x + half + i, fma(b, c, mul(a, s)), n);
  }
}

static inline void scale_head(float* x, int head_dim, float scale) {
  for (int i = 0; i < head_dim; i += kLanes) {
    const int n = lanes_left(i, head_dim);
    store_some(x + i, mul(load_some(x + i, n), set1(scale)), n);
  }
}

// Symmetric quantization; the largest magnitude becomes 127. Returns the scale.
static inline float quantize_head(const float* x, int head_dim, int8_t* out) {
  F largest = zero();
  for (int i = 0; i < head_dim; i += kLanes) largest = max(largest, abs(load_some(x + i, lanes_left(i, head_dim))));
  const float scale = reduce_max(largest) / 127.0f;
  const F divisor = set1(scale > 0.0f ? scale : 1.0f), limit = set1(127.0f);
  for (int i = 0; i < head_dim; i += kLanes) {
    const int n = lanes_left(i, head_dim);
    const I rounded = to_int(max(min(div(load_some(x + i, n), divisor), limit), neg(limit)));
    if (n == kLanes) store_s8(out + i, rounded);
    else store_s8_n(out + i, rounded, n);
  }
  return scale;
}

// Writes one head of one token to `row` of KV memory, viewed as [rows][head_dim].
static inline void write_head(const AttentionShape& shape, const float* x, void* memory, float* scales, int64_t row) {
  const int head_dim = shape.head_dim;
  const int64_t first = row * head_dim;
  if (shape.kv_type == KVType::int8) {
    scales[row] = quantize_head(x, head_dim, static_cast<int8_t*>(memory) + first);
    return;
  }
  for (int i = 0; i < head_dim; i += kLanes) {
    const int n = lanes_left(i, head_dim);
    const F v = load_some(x + i, n);
    uint16_t* const brain = static_cast<uint16_t*>(memory) + first + i;
    if (shape.kv_type == KVType::f32) store_some(static_cast<float*>(memory) + first + i, v, n);
    else if (n == kLanes) store_bf16(brain, v);
    else store_bf16_n(brain, v, n);
  }
}

// Normalizes and rotates one head of query or key, or rotates it first.
static inline void norm_and_rotate_head(const AttentionShape& shape, const float* norm, const float* cos_sin,
                                        float* x) {
  if (norm && !shape.norms_rotated) norm_head(x, shape.head_dim, norm, shape.norm_eps);
  if (cos_sin) rotate_head(x, shape.rotary_dim, cos_sin);
  if (norm && shape.norms_rotated) norm_head(x, shape.head_dim, norm, shape.norm_eps);
}

static inline const float* angles(const AttentionShape& shape, const TokenRows& tokens, int64_t token) {
  return tokens.cos_sin ? tokens.cos_sin + tokens.positions[token] * shape.rotary_dim : nullptr;
}

static inline void copy_head(const float* from, int head_dim, float* to) {
  for (int i = 0; i < head_dim; i += kLanes) {
    const int n = lanes_left(i, head_dim);
    store_some(to + i, load_some(from + i, n), n);
  }
}

// Writes K and V of one token at the given KV heads, unless another layer has written them.
static void write_token(const AttentionShape& shape, const PagedKV& kv, const TokenRows& tokens, int64_t token,
                       int first_head, int end_head) {
  const int head_dim = shape.head_dim;
  const int64_t slot = tokens.slots[token];
  if (slot < 0 || shape.kv_projections == 0) return;
  const int64_t block = slot / kv.block_size, offset = slot % kv.block_size;
  const float* keys = tokens.qkv + token * shape.qkv_width() + shape.num_heads * head_dim;
  const float* values = shape.kv_projections == 1 ? keys : keys + shape.num_kv_heads * head_dim;
  const float* cos_sin = angles(shape, tokens, token);
  for (int h = first_head; h < end_head; ++h) {
    alignas(64) float head[kMaxHeadDim];
    const int64_t row = (block * shape.num_kv_heads + h) * kv.block_size + offset;
    copy_head(keys + h * head_dim, head_dim, head);
    norm_and_rotate_head(shape, shape.k_norm, cos_sin, head);
    write_head(shape, head, kv.key, kv.key_scale, row);
    if (kv.value == kv.key) continue;
    const float* value = values + h * head_dim;
    if (shape.norms_values) {
      copy_head(value, head_dim, head);
      norm_head(head, head_dim, nullptr, shape.norm_eps);
      value = head;
    }
    write_head(shape, value, kv.value, kv.value_scale, row);
  }
}

static inline void prepare(const AttentionShape& shape, const PagedKV& kv, const TokenRows& tokens,
                           int64_t first_token, int64_t end_token) {
  for (int64_t t = first_token; t < end_token; ++t) write_token(shape, kv, tokens, t, 0, shape.num_kv_heads);
}

}  // namespace chairlift::CHAIRLIFT_ISA::attention
