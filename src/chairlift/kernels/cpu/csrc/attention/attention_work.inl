// The state of a query block on a worker: its rows, their softmax so far, and scratch memory.
#pragma once

#include "attention/attention_tiles.h"
#include "simd/simd.h"

#include "attention/attention_prepare.inl"

namespace chairlift::CHAIRLIFT_ISA::attention {

constexpr int kBlockRows = 6;  // rows and vectors of one product in registers
constexpr int kBlockVectors = kLanes == 16 ? 4 : 2;
constexpr float kLowest = -3.4e38f;

struct State {
  float* max;  // [rows]
  float* sum;  // [rows]
  float* out;  // [rows][row_stride]
};

static inline State state_at(float* memory, int num_rows) {
  const int padded = (num_rows + 15) / 16 * 16;
  return {memory, memory + padded, memory + 2 * padded};
}

static inline void clear_state(const State& state, int num_rows, int stride) {
  for (int r = 0; r < num_rows; ++r) state.max[r] = -__builtin_inff(), state.sum[r] = 0.0f;
  for (int i = 0; i < num_rows * stride; i += kLanes) store(state.out + i, zero());
}

// Merges the softmax of `part` into `total`. A part without visible keys changes nothing.
static void merge_state(const State& total, const State& part, int num_rows, int stride) {
  for (int r = 0; r < num_rows; ++r) {
    if (!(part.max[r] > kLowest)) continue;
    const float largest = total.max[r] > part.max[r] ? total.max[r] : part.max[r];
    const F keep = exp(set1(total.max[r] - largest)), gain = exp(set1(part.max[r] - largest));
    alignas(64) float sum[kLanes];
    store(sum, fma(set1(part.sum[r]), gain, mul(set1(total.sum[r]), keep)));
    total.max[r] = largest;
    total.sum[r] = sum[0];
    for (int i = r * stride; i < (r + 1) * stride; i += kLanes)
      store(total.out + i, fma(load(part.out + i), gain, mul(load(total.out + i), keep)));
  }
}

// The rows of one block, in the scratch memory of a worker.
struct Work {
  const AttentionShape& shape;
  const PagedKV& kv;
  const QueryBlock& block;
  int group, rows_per_head, num_rows, stride;
  float* query;        // [rows][stride]
  float* keys;         // [head_dim][kKeyTile]; null for few rows, which read KV memory directly
  float* values;       // [kKeyTile][stride], or null
  float* lane_sums;    // [rows][16], for the current split
  float* running;      // the state of one split
  float* total;        // the state of all splits so far
  int64_t* first_key;  // [rows_per_head], the keys that each row sees
  int64_t* end_key;
};

static inline float* take(float*& memory, int64_t num_floats) {
  float* taken = memory;
  memory += (num_floats + 15) / 16 * 16;
  return taken;
}

// The keys that each row sees, and memory that any product needs; the operands of products follow.
static Work lay_out(const AttentionShape& shape, const PagedKV& kv, const QueryBlock& block, float*& memory) {
  const int group = shape.group(), stride = shape.row_stride();
  const int rows_per_head = group * block.num_tokens, num_rows = rows_per_head * block.num_kv_heads;
  Work work = {shape, kv, block, group, rows_per_head, num_rows, stride, {}, {}, {}, {}, {}, {}, {}, {}};
  work.lane_sums = take(memory, static_cast<int64_t>(num_rows) * 16);
  work.running = take(memory, state_floats(num_rows, stride));
  work.total = take(memory, state_floats(num_rows, stride));
  work.first_key = reinterpret_cast<int64_t*>(take(memory, 2 * rows_per_head));
  work.end_key = reinterpret_cast<int64_t*>(take(memory, 2 * rows_per_head));
  for (int r = 0; r < rows_per_head; ++r) {
    work.first_key[r] = block.first_key(r / group);
    work.end_key[r] = block.end_key(r / group);
  }
  return work;
}

// The offset of the head of a row in the vector of its token, relative to the first head of the block.
static inline int64_t head_offset(const AttentionShape& shape, int rows_per_head, int row) {
  const int group = shape.group();
  return static_cast<int64_t>(row / rows_per_head * group + row % group) * shape.head_dim;
}

// Writes the normalized, rotated and scaled query of a row.
static inline void gather_query(const Work& work, const TokenRows& tokens, int row, float* query) {
  const AttentionShape& shape = work.shape;
  const int64_t first_head = static_cast<int64_t>(work.block.first_kv_head) * work.group * shape.head_dim;
  const int64_t step_row = work.block.row_of(row % work.rows_per_head / work.group);
  copy_head(tokens.qkv + step_row * shape.qkv_width() + first_head + head_offset(shape, work.rows_per_head, row),
            shape.head_dim, query);
  norm_and_rotate_head(shape, shape.q_norm, angles(shape, tokens, step_row), query);
  const float factor = tokens.query_scales ? tokens.query_scales[tokens.positions[step_row]] : 1.0f;
  scale_head(query, shape.head_dim, shape.scale * factor);
}

// Writes K and V of a decoding token, if this is the task of its last split.
static inline void write_decoded(const Work& work, const TokenRows& tokens, const SplitRange& splits) {
  const QueryBlock& block = work.block;
  if (!block.writes_kv || splits.end_split != block.end_split()) return;
  write_token(work.shape, work.kv, tokens, block.first_row, block.first_kv_head,
              block.first_kv_head + block.num_kv_heads);
}

}  // namespace chairlift::CHAIRLIFT_ISA::attention
