// Attention over paged KV memory: the division of a step into tasks of the pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "attention/attention_tiles.h"
#include "attention/shared_keys.h"

namespace chairlift {

// The tokens of one step: B sequences, packed one after the other (`AttentionMetadata` in attention.py).
struct StepShape {
  std::vector<int32_t> query_start_loc;  // [B + 1]
  std::vector<int32_t> seq_lens;         // [B]
  std::vector<int32_t> block_tables;     // [B][max_blocks]
  std::vector<int64_t> slot_mapping;     // [tokens]
  int64_t max_blocks = 0;
  int block_size = 0;
};

// A query block of a step, without the pointers, which differ between layers.
struct BlockPlan {
  int64_t first_row;  // the row of its first token in the packed step
  int64_t first_position;
  int32_t sequence;
  int32_t num_tokens;
  bool writes_kv;
  int32_t first_kv_head;
  int32_t num_kv_heads;
  int32_t num_items;
  int64_t begin_key;  // keys before it are computed by shared items
  // The offset of the states of its splits, in floats, which the sums of exponentials follow where begin_key is within a
  // split; -1: one item computes all splits.
  int64_t states;
};

// The work of one task: some splits of a block.
struct ItemPlan {
  int32_t block;
  int32_t first_split;
  int32_t end_split;
  int64_t cost;
};

// Keys of one split at a KV head, for tokens of several sequences, which have them in the same blocks.
struct SharedItem {
  int64_t first_key, end_key;
  int32_t kv_head, sequence, first_token, num_tokens;
};

// A token that sees shared keys: its block at the first KV head, and its place there.
struct SharedToken {
  int32_t block, place;
};

// The items that one thread starts with: every num_lanes-th. A thread that has finished its lane takes items of others.
struct alignas(64) Lane {
  std::atomic<int64_t> next{0};
};

// The division of a step for layers with one sliding window. It never changes a result.
struct StepPlan {
  int64_t window;
  int64_t max_rows;
  std::vector<BlockPlan> blocks;
  std::vector<ItemPlan> items;  // the most expensive first
  std::vector<SharedItem> shared_items;  // computed before the others
  std::vector<int64_t> shared_rows;      // of the tokens of shared items
  std::vector<SharedToken> shared_tokens;
  std::vector<float> states;
  std::unique_ptr<std::atomic<int32_t>[]> unfinished;  // the unfinished items of each block, reset after each layer
  int64_t num_lanes = 1;
  std::unique_ptr<Lane[]> lanes;
};

// The states of a step, 128 MiB, above which blocks are no longer cut only to divide the work equally, and no further sequence
// shares keys. A chunk of 512 tokens at 32,768 tokens of context would have up to 1.6 GB for 16 threads.
constexpr int64_t kMostStateFloats = 32 << 20;

// The sequences of one step, and their division into tasks for each sliding window.
class AttentionStep {
 public:
  // Throws std::invalid_argument if the arrays do not fit together.
  explicit AttentionStep(StepShape shape);
  AttentionStep(const AttentionStep&) = delete;

  const StepShape& shape() const { return shape_; }
  int64_t num_tokens() const { return static_cast<int64_t>(shape_.slot_mapping.size()); }
  // Rows before the start of their sequence, which see no key: pairs of first row and end.
  const std::vector<std::pair<int64_t, int64_t>>& padding_rows() const { return padding_rows_; }
  // Rows whose K and V are written before attention, because other rows of the step may see them: the same pairs.
  const std::vector<std::pair<int64_t, int64_t>>& prompt_rows() const { return prompt_rows_; }
  // The number of first keys of each sequence that are computed with other sequences, as far as their states are allowed.
  const std::vector<int64_t>& shared_keys() const { return begin_key_; }
  StepPlan& plan(const AttentionShape& attention, int64_t window);
  // The most floats of the states of sequences that share keys in a later step, 0: each computes its keys alone. It changes no
  // result; for tests and measurements.
  static void set_most_shared_floats(int64_t most) { most_shared_floats_ = most; }

 private:
  void find_shared();
  void cut_blocks(const AttentionShape& attention, StepPlan& plan) const;
  void cut_shared(const AttentionShape& attention, const SharedKeys& keys, const std::vector<size_t>& first_block,
                  StepPlan& plan) const;
  int64_t limit_shared(const AttentionShape& attention, size_t first, int64_t most_floats, StepPlan& plan) const;
  int64_t count_own_keys(size_t sequence, int64_t window) const;
  int heads_per_block(const AttentionShape& attention, int64_t window) const;
  int tokens_per_block(const AttentionShape& attention, int64_t window, size_t sequence) const;
  int64_t num_queries(size_t sequence) const;
  bool is_decode(size_t sequence) const;

  static inline std::atomic<int64_t> most_shared_floats_{kMostStateFloats};

  StepShape shape_;
  int64_t longest_ = 0;
  std::vector<SharedKeys> shared_;
  std::vector<int64_t> begin_key_;  // the end of the shared keys of each sequence
  std::vector<std::pair<int64_t, int64_t>> padding_rows_;
  std::vector<std::pair<int64_t, int64_t>> prompt_rows_;
  std::vector<std::unique_ptr<StepPlan>> plans_;
};

// The arguments of one layer.
struct LayerCall {
  PagedKV kv;
  const float* qkv;
  const int64_t* positions;
  const float* cos_sin;       // null: no rotation
  const float* query_scales;  // null: no factors
  int64_t window;             // 0: none
  float* out;                 // [tokens][num_heads * head_dim]
};

void attention_forward(const AttentionShape& shape, AttentionStep& step, const LayerCall& call);

}  // namespace chairlift
