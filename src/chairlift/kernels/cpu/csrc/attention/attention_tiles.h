// Attention over paged KV memory: the functions that are compiled for each instruction set.
//
// The keys of a sequence are divided at absolute positions into tiles of kKeyTile, and into splits of kSplit. A query
// row is computed with the same operations in the same order for any batch, any chunk of its prompt and any thread:
//
//   score of a key         one chain of fma over head_dim, ascending; times the scale of an int8 key; then the soft cap
//   softmax in a split     online, tile after tile (Milakov and Gimelshein, 2018)
//   output in a split      one chain of fma over keys, ascending; weights times the scales of int8 values first
//   splits                 merged ascending (as in Flash-Decoding: Dao et al., 2023)
//   sink of a head         its exponential is added to the sum of exponentials after the last split
//
// A hidden key has the weight 0 exactly, and a tile without a visible key changes nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace chairlift {

constexpr int kKeyTile = 64;
constexpr int kSplit = 512;
constexpr int kMaxHeadDim = 576;  // the latent and the rotated part of a key of DeepSeek

enum class KVType { f32, bf16, int8 };

struct AttentionShape {
  int num_heads;
  int num_kv_heads;
  int head_dim;  // a multiple of 4, at most kMaxHeadDim
  float scale;
  KVType kv_type;
  const float* q_norm;  // [head_dim] or null: no norm on query and key
  const float* k_norm;
  float norm_eps;
  int rotary_dim = 0;  // the first dimensions of each head, which are rotated
  float soft_cap = 0;  // scores become soft_cap * tanh(score / soft_cap); 0: they do not change
  int kv_projections = 2;  // 1: the projected keys are the values as well; 0: another layer has written K and V
  bool norms_values = false;  // each head of V has an RMSNorm without a weight
  bool norms_rotated = false;  // the norm of query and key follows their rotation
  const float* sinks = nullptr;  // [num_heads], a score of each head without a value; null: none

  int group() const { return num_heads / num_kv_heads; }
  // The number of floats of query, key and value of one token.
  int64_t qkv_width() const {
    return static_cast<int64_t>(num_heads + kv_projections * num_kv_heads) * head_dim;
  }
  // The distance between rows of outputs in scratch memory, in floats.
  int row_stride() const { return (head_dim + 15) / 16 * 16; }
};

// The KV memory of one layer: key and value [blocks][num_kv_heads][block_size][head_dim]; scales lack the last
// dimension. If both are the same memory, the keys after their norm and rotation are the values.
struct PagedKV {
  void* key;
  void* value;
  float* key_scale;  // int8 only
  float* value_scale;
  int block_size;
};

// The tokens of a step: qkv [tokens][qkv_width()].
struct TokenRows {
  const float* qkv;
  const int64_t* slots;       // -1: K and V are not written
  const int64_t* positions;   // for rotary embedding and query_scales
  const float* cos_sin;       // [max_position][rotary_dim]: cosines of the angles, then sines; null: no rotary embedding
  const float* query_scales;  // [max_position]: a factor of the scores of a query; null: no factor
};

// Consecutive tokens of one sequence at consecutive KV heads, or tokens of several sequences that read the same keys. The
// rows are ordered by KV head, token, head of the group.
struct QueryBlock {
  int64_t first_row;    // the row of its first token in the step
  const int64_t* rows;  // of several sequences: the rows of their tokens, which see keys up to first_position; null: of one
  float* out;         // the output of the first token and head; tokens are num_heads * head_dim apart
  int num_tokens;
  bool writes_kv;  // the task of the last split writes K and V of the only token into their slot
  int64_t first_position;
  int64_t window;     // keys that a token sees, including its own; 0: all keys up to its own
  int64_t begin_key;  // keys before it are computed by other tasks; a multiple of kKeyTile, and 0 with a window
  int first_kv_head;
  int num_kv_heads;
  const int32_t* block_table;

  int64_t first_key(int64_t token) const {
    const int64_t first = first_position + token - window + 1;
    return window == 0 || first < 0 ? begin_key : first;
  }
  int64_t end_key(int64_t token) const { return first_position + (rows ? 0 : token) + 1; }
  int64_t row_of(int64_t token) const { return rows ? rows[token] : first_row + token; }
  int first_split() const { return static_cast<int>(first_key(0) / kSplit); }
  int end_split() const { return static_cast<int>((end_key(num_tokens - 1) - 1) / kSplit) + 1; }
};

// The work of one task: some splits of a block. Without `states` these are all splits, and the task writes the output;
// otherwise it writes one state per split.
struct SplitRange {
  QueryBlock block;
  int first_split, end_split;
  float* states;
  // Sums of exponentials [rows][16], lane by lane; null: none. A block of several sequences writes those of its last
  // split. Another block reads those of its first split, whose state contains the keys before begin_key.
  float* lane_sums;
};

// The softmax state of each row over some keys: the largest score, or with tiles the reference of the row, the sum of exponentials relative to it, and the
// output times that sum. They are contiguous: max [rows], sum [rows], out [rows][row_stride()].
constexpr int64_t state_floats(int64_t rows, int row_stride) { return (2 + row_stride) * ((rows + 15) / 16 * 16); }

struct AttentionTiles {
  // Normalizes and rotates keys, and writes K and V into their slots.
  void (*prepare)(const AttentionShape&, const PagedKV&, const TokenRows&, int64_t first_token, int64_t end_token);
  // Normalizes, rotates and scales queries, and computes attention. Prefetches the first tile of `next` unless it is
  // null.
  void (*attend)(const AttentionShape&, const PagedKV&, const TokenRows&, const SplitRange&, const SplitRange* next,
                 void* scratch);
  // Prefetches the first tile, for a task that was not the `next` of an earlier call.
  void (*prefetch)(const AttentionShape&, const PagedKV&, const SplitRange&);
  // Computes the output from the states of all splits of the block.
  void (*merge)(const AttentionShape&, const QueryBlock&, const float* states, void* scratch);
};

// The bytes of scratch memory for blocks with the given number of rows; aligned to 64 bytes.
size_t attention_scratch_bytes(const AttentionShape& shape, int64_t rows);

}  // namespace chairlift
