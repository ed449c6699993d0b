// Attention over paged KV memory: what is compiled for each instruction set.
//
// A sequence's keys are cut at absolute positions into tiles of kKeyTile, and into splits of kSplit. Whoever computes
// a query row, alone or in a crowd, in a chunk or not, does the same operations in the same order:
//
//   score of a key         one chain of fma over head_dim, ascending; times the factor of an int8 key
//   softmax in a split     online, tile after tile (Milakov and Gimelshein, 2018)
//   output in a split      one chain of fma over keys, ascending; weights times the factors of int8 values first
//   splits                 merged ascending (as in Flash-Decoding: Dao et al., 2023)
//
// What a row must not see has the weight 0 exactly, and a tile without a visible key changes nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace chairlift {

constexpr int kKeyTile = 64;
constexpr int kSplit = 512;
constexpr int kMaxHeadDim = 512;

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

  int group() const { return num_heads / num_kv_heads; }
  // Floats of one token's query, key and value.
  int64_t qkv_width() const { return static_cast<int64_t>(num_heads + 2 * num_kv_heads) * head_dim; }
  // Floats from one row of outputs in scratch memory to the next.
  int row_stride() const { return (head_dim + 15) / 16 * 16; }
};

// KV memory of one layer: key, value [blocks][num_kv_heads][block_size][head_dim]; scales without the last dimension.
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
  const int64_t* slots;      // -1: K and V are not kept
  const int64_t* positions;  // of the rotation
  const float* cos_sin;      // [max_position][head_dim]: cosines of the angles, then sines; null: no rotation
};

// Consecutive tokens of one sequence at consecutive kv heads. Its rows are (kv head, token, head of the group).
struct QueryBlock {
  int64_t first_row;  // of its first token in the step
  float* out;         // of the first token and head; tokens are num_heads * head_dim apart
  int num_tokens;
  bool keeps;  // its one token's K and V are put into their slots by who attends the last split
  int64_t first_position;
  int64_t window;  // keys that a token sees, itself included; 0: all up to itself
  int first_kv_head;
  int num_kv_heads;
  const int32_t* block_table;

  int64_t first_key(int64_t token) const {
    const int64_t first = first_position + token - window + 1;
    return window == 0 || first < 0 ? 0 : first;
  }
  int64_t end_key(int64_t token) const { return first_position + token + 1; }
  int first_split() const { return static_cast<int>(first_key(0) / kSplit); }
  int end_split() const { return static_cast<int>((end_key(num_tokens - 1) - 1) / kSplit) + 1; }
};

// What one task computes: some splits of a block. Without `states` these are all of them, and the output is written;
// else one state a split is.
struct SplitRange {
  QueryBlock block;
  int first_split, end_split;
  float* states;
};

// Softmax of each row over some keys: the largest score, the sum of exponentials less it, and the output times that
// sum. In one piece of memory: max [rows], sum [rows], out [rows][row_stride()].
constexpr int64_t state_floats(int64_t rows, int row_stride) { return (2 + row_stride) * ((rows + 15) / 16 * 16); }

struct AttentionTiles {
  // Norm and rotate keys, put K and V into their slots.
  void (*prepare)(const AttentionShape&, const PagedKV&, const TokenRows&, int64_t first_token, int64_t end_token);
  // Norm, rotate and scale queries, and attend. Asks for the first tile of `next` at the end; null: there is none.
  void (*attend)(const AttentionShape&, const PagedKV&, const TokenRows&, const SplitRange&, const SplitRange* next,
                 void* scratch);
  // Asks for the first tile, where nobody has attended a task with this one as its next.
  void (*ask)(const AttentionShape&, const PagedKV&, const SplitRange&);
  // The output, from the states of all splits of the block.
  void (*merge)(const AttentionShape&, const QueryBlock&, const float* states, void* scratch);
};

// Bytes of scratch for blocks of so many rows; 64-byte aligned.
size_t attention_scratch_bytes(const AttentionShape& shape, int64_t rows);

}  // namespace chairlift
