#include "attention/attention.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "runtime/isa.h"
#include "runtime/pool.h"

namespace chairlift {
namespace {

constexpr int kTargetRows = 96;         // rows of a query block, to amortize loading a tile of keys
constexpr int kManyRows = 512;          // the same, where enough items remain for all threads
constexpr int kItemsPerThread = 6;      // so that threads finish at about the same time
constexpr int64_t kTileLoadRows = 8;    // the cost of loading a tile, in rows computed over it
constexpr int64_t kPrepareRows = 16;    // tokens of a prompt whose K and V one task writes
constexpr int64_t kSharedQueries = 8;   // the most tokens of a sequence that shares keys; more use a tile well alone
constexpr int64_t kSharedRows = 48;     // the least rows of a task of shared keys that is cut for more threads

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(std::string("AttentionStep: ") + what);
}

int64_t split_cost(const QueryBlock& keys, int64_t rows, int split) {
  const int64_t begin = std::max(keys.first_key(0), static_cast<int64_t>(split) * kSplit);
  const int64_t end = std::min<int64_t>(keys.end_key(keys.num_tokens - 1), static_cast<int64_t>(split + 1) * kSplit);
  return (end - begin) * (rows + kTileLoadRows * keys.num_kv_heads);
}

int64_t num_rows(const BlockPlan& block, const AttentionShape& attention) {
  return static_cast<int64_t>(block.num_tokens) * block.num_kv_heads * attention.group();
}

// The part of a query block that determines which keys it sees.
QueryBlock seen_by(const BlockPlan& block, int64_t window) {
  QueryBlock keys = {};
  keys.num_tokens = block.num_tokens;
  keys.first_position = block.first_position;
  keys.first_kv_head = block.first_kv_head;
  keys.num_kv_heads = block.num_kv_heads;
  keys.window = window;
  keys.begin_key = block.begin_key;
  return keys;
}

// The first split whose state the block merges.
int first_merged_split(const BlockPlan& block, int64_t window) {
  return block.begin_key ? 0 : seen_by(block, window).first_split();
}

int64_t merged_floats(const BlockPlan& block, const AttentionShape& attention, int64_t window) {
  return (seen_by(block, window).end_split() - first_merged_split(block, window)) *
         state_floats(num_rows(block, attention), attention.row_stride());
}

int64_t block_cost(const BlockPlan& block, const AttentionShape& attention, int64_t window) {
  const QueryBlock keys = seen_by(block, window);
  int64_t cost = 0;
  for (int split = keys.first_split(); split < keys.end_split(); ++split)
    cost += split_cost(keys, num_rows(block, attention), split);
  return cost;
}

// Divides the splits of one block into items with a cost of about `target` each.
void cut_items(StepPlan& plan, int32_t index, const AttentionShape& attention, int64_t target) {
  BlockPlan& block = plan.blocks[static_cast<size_t>(index)];
  const QueryBlock keys = seen_by(block, plan.window);
  const int64_t rows = num_rows(block, attention);
  ItemPlan item = {index, keys.first_split(), keys.first_split(), 0};
  block.num_items = 0;
  for (int split = keys.first_split(); split < keys.end_split(); ++split) {
    item.end_split = split + 1;
    item.cost += split_cost(keys, rows, split);
    if (item.cost < target && split + 1 < keys.end_split()) continue;
    plan.items.push_back(item);
    ++block.num_items;
    item = {index, split + 1, split + 1, 0};
  }
}

void cut(StepPlan& plan, const AttentionShape& attention) {
  int64_t total = 0;
  for (const BlockPlan& block : plan.blocks) total += block_cost(block, attention, plan.window);
  const int64_t target = std::max<int64_t>(1, total / (Pool::get().num_threads() * kItemsPerThread));
  int64_t num_states = 0;
  for (size_t i = 0; i < plan.blocks.size(); ++i) {
    BlockPlan& block = plan.blocks[i];
    const int64_t rows = num_rows(block, attention), cost = block_cost(block, attention, plan.window);
    const int64_t states = merged_floats(block, attention, plan.window);
    // A block with more than half of the work of a thread is cut all the same.
    const bool is_whole = num_states + states > kMostStateFloats && cost <= target * kItemsPerThread / 2;
    cut_items(plan, static_cast<int32_t>(i), attention, is_whole ? cost : target);
    plan.max_rows = std::max(plan.max_rows, rows);
    block.states = -1;
    if (block.num_items == 1 && !block.begin_key) continue;
    block.states = num_states;
    num_states += states + (block.begin_key % kSplit ? rows * 16 : 0);
  }
  for (const SharedItem& item : plan.shared_items)
    plan.max_rows = std::max<int64_t>(plan.max_rows, item.num_tokens * attention.group());
  std::stable_sort(plan.items.begin(), plan.items.end(),
                   [](const ItemPlan& a, const ItemPlan& b) { return a.cost > b.cost; });
  plan.states.resize(static_cast<size_t>(num_states));
  plan.unfinished = std::make_unique<std::atomic<int32_t>[]>(plan.blocks.size());
  for (size_t i = 0; i < plan.blocks.size(); ++i) plan.unfinished[i] = plan.blocks[i].num_items;
  plan.num_lanes = Pool::get().num_threads();
  plan.lanes = std::make_unique<Lane[]>(static_cast<size_t>(plan.num_lanes));
}

// Copies the state of `count` rows from one state to another.
void copy_rows(const float* from, int64_t from_rows, int64_t first, float* to, int64_t to_rows, int64_t row,
               int64_t count, int64_t stride) {
  const auto padded = [](int64_t rows) { return (rows + 15) / 16 * 16; };
  for (int part = 0; part < 2; ++part)
    std::copy_n(from + part * padded(from_rows) + first, count, to + part * padded(to_rows) + row);
  std::copy_n(from + 2 * padded(from_rows) + first * stride, count * stride, to + 2 * padded(to_rows) + row * stride);
}

// The computation of one layer of a step.
class LayerRun {
 public:
  LayerRun(const AttentionShape& shape, const AttentionStep& step, const LayerCall& call, StepPlan& plan)
      : shape_(shape), step_(step), call_(call), plan_(plan),
        tokens_{call.qkv, step.shape().slot_mapping.data(), call.positions, call.cos_sin, call.query_scales},
        scratch_bytes_(attention_scratch_bytes(shape, plan.max_rows)) {}

  void write_prompts() const;
  void attend_shared() const;
  void attend_all() const;

 private:
  void work_through(int64_t lane, int worker) const;
  int64_t take(int64_t lane) const;
  int64_t take_any(int64_t lane) const;
  void distribute(const SharedItem& item, const float* states, const float* lane_sums) const;
  SplitRange splits_of(int64_t item) const;
  void merge(int32_t index, const QueryBlock& queries, void* scratch) const;

  const AttentionShape& shape_;
  const AttentionStep& step_;
  const LayerCall& call_;
  StepPlan& plan_;
  TokenRows tokens_;
  size_t scratch_bytes_;
};

void LayerRun::write_prompts() const {
  if (shape_.kv_projections == 0) return;
  for (const auto& [first, end] : step_.prompt_rows()) {
    const int64_t begin = first, count = end - first;
    Pool::get().run((count + kPrepareRows - 1) / kPrepareRows, [&](int64_t task, int) {
      const int64_t row = begin + task * kPrepareRows;
      isa().attention.prepare(shape_, call_.kv, tokens_, row, std::min(begin + count, row + kPrepareRows));
    });
  }
}

// Computes the states of shared keys. Items of one sequence compute its other keys, and merge all.
void LayerRun::attend_shared() const {
  const auto num_items = static_cast<int64_t>(plan_.shared_items.size());
  Pool& pool = Pool::get();
  pool.run(num_items, [&](int64_t task, int worker) {
    const SharedItem& item = plan_.shared_items[static_cast<size_t>(task)];
    const int64_t rows = item.num_tokens * shape_.group(), state = state_floats(rows, shape_.row_stride());
    const size_t state_bytes = static_cast<size_t>(state + rows * 16) * sizeof(float);
    auto* const states = static_cast<float*>(pool.scratch(worker, state_bytes + scratch_bytes_));
    float *const lane_sums = states + state, *const scratch = lane_sums + rows * 16;
    QueryBlock block = {};
    block.rows = plan_.shared_rows.data() + item.first_token;
    block.num_tokens = item.num_tokens;
    block.first_position = item.end_key - 1;
    block.begin_key = item.first_key;
    block.first_kv_head = item.kv_head;
    block.num_kv_heads = 1;
    block.block_table = step_.shape().block_tables.data() + item.sequence * step_.shape().max_blocks;
    const SplitRange splits = {block, block.first_split(), block.end_split(), states, lane_sums};
    isa().attention.prefetch(shape_, call_.kv, splits);
    isa().attention.attend(shape_, call_.kv, tokens_, splits, nullptr, scratch);
    distribute(item, states, lane_sums);
  });
}

// Copies the states of tokens to those of their sequences.
void LayerRun::distribute(const SharedItem& item, const float* states, const float* lane_sums) const {
  const int64_t group = shape_.group(), stride = shape_.row_stride();
  for (int64_t t = 0; t < item.num_tokens; ++t) {
    const SharedToken& token = plan_.shared_tokens[static_cast<size_t>(item.first_token + t)];
    const int32_t heads = plan_.blocks[static_cast<size_t>(token.block)].num_kv_heads;
    const BlockPlan& block = plan_.blocks[static_cast<size_t>(token.block + item.kv_head / heads)];
    const int64_t rows = num_rows(block, shape_), floats = state_floats(rows, stride);
    const int64_t row = (item.kv_head % heads * block.num_tokens + token.place) * group;
    float* const to = plan_.states.data() + block.states;
    copy_rows(states, item.num_tokens * group, t * group, to + item.first_key / kSplit * floats, rows, row, group,
              stride);
    if (item.end_key == block.begin_key && item.end_key % kSplit)
      std::copy_n(lane_sums + t * group * 16, group * 16, to + merged_floats(block, shape_, plan_.window) + row * 16);
  }
}

void LayerRun::attend_all() const {
  for (int64_t lane = 0; lane < plan_.num_lanes; ++lane)
    plan_.lanes[static_cast<size_t>(lane)].next.store(lane, std::memory_order_relaxed);
  const int64_t num_items = static_cast<int64_t>(plan_.items.size());
  Pool::get().run(std::min(num_items, plan_.num_lanes), [&](int64_t lane, int worker) { work_through(lane, worker); });
}

// Takes the next item of a lane; -1 if none is left.
int64_t LayerRun::take(int64_t lane) const {
  std::atomic<int64_t>& next = plan_.lanes[static_cast<size_t>(lane)].next;
  const int64_t item = next.fetch_add(plan_.num_lanes, std::memory_order_relaxed);
  return item < static_cast<int64_t>(plan_.items.size()) ? item : -1;
}

int64_t LayerRun::take_any(int64_t lane) const {
  int64_t item = take(lane);
  for (int64_t i = 1; item < 0 && i < plan_.num_lanes; ++i) item = take((lane + i) % plan_.num_lanes);
  return item;
}

// A thread usually continues with the next item of its lane, so the first tile of that item is prefetched.
void LayerRun::work_through(int64_t lane, int worker) const {
  const AttentionTiles& tiles = isa().attention;
  Pool& pool = Pool::get();
  void* const scratch = pool.scratch(worker, scratch_bytes_);
  const int64_t num_items = static_cast<int64_t>(plan_.items.size());
  int64_t expected = -1;
  for (int64_t item = take_any(lane); item >= 0; item = take_any(lane)) {
    const int64_t place = pool.place_of(item, num_items);
    const SplitRange splits = splits_of(place);
    if (item != expected) tiles.prefetch(shape_, call_.kv, splits);
    expected = item + plan_.num_lanes;
    const SplitRange next = expected < num_items ? splits_of(pool.place_of(expected, num_items)) : SplitRange{};
    tiles.attend(shape_, call_.kv, tokens_, splits, expected < num_items ? &next : nullptr, scratch);
    if (splits.states) merge(plan_.items[static_cast<size_t>(place)].block, splits.block, scratch);
  }
}

SplitRange LayerRun::splits_of(int64_t index) const {
  const ItemPlan& item = plan_.items[static_cast<size_t>(index)];
  const BlockPlan& plan = plan_.blocks[static_cast<size_t>(item.block)];
  QueryBlock block = seen_by(plan, plan_.window);
  const int64_t first_head = static_cast<int64_t>(plan.first_kv_head) * shape_.group() * shape_.head_dim;
  block.first_row = plan.first_row;
  block.writes_kv = plan.writes_kv;
  block.out = call_.out + plan.first_row * shape_.num_heads * shape_.head_dim + first_head;
  block.block_table = step_.shape().block_tables.data() + plan.sequence * step_.shape().max_blocks;
  if (plan.states < 0) return {block, item.first_split, item.end_split, nullptr, nullptr};
  float* const states = plan_.states.data() + plan.states;
  const int64_t place = item.first_split - first_merged_split(plan, plan_.window);
  const bool continues = plan.begin_key % kSplit && item.first_split == plan.begin_key / kSplit;
  return {block, item.first_split, item.end_split,
          states + place * state_floats(num_rows(plan, shape_), shape_.row_stride()),
          continues ? states + merged_floats(plan, shape_, plan_.window) : nullptr};
}

// Merges the splits of a block once its last item is finished.
void LayerRun::merge(int32_t index, const QueryBlock& queries, void* scratch) const {
  const BlockPlan& block = plan_.blocks[static_cast<size_t>(index)];
  std::atomic<int32_t>& unfinished = plan_.unfinished[static_cast<size_t>(index)];
  if (unfinished.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  unfinished.store(block.num_items, std::memory_order_relaxed);
  QueryBlock whole = queries;
  whole.begin_key = 0;
  isa().attention.merge(shape_, whole, plan_.states.data() + block.states, scratch);
}

}  // namespace

// Enough for products in tile registers, which need the most: keys and values of a split in bfloat16, and the scores, weights
// and outputs of 32 rows.
size_t attention_scratch_bytes(const AttentionShape& shape, int64_t rows) {
  const int64_t stride = shape.row_stride(), padded = (rows + 15) / 16 * 16 + 32;
  const int64_t tiles = kSplit * (stride + 32) + 32 * (stride + 64 + 32);
  const int64_t per_row = stride + 16 + 2 + 2;  // query, sums by lane, first and last key
  return static_cast<size_t>(tiles + padded * per_row + 2 * state_floats(rows, stride)) * sizeof(float);
}

AttentionStep::AttentionStep(StepShape shape) : shape_(std::move(shape)) {
  const size_t count = shape_.seq_lens.size();
  require(shape_.query_start_loc.size() == count + 1, "query_start_loc must have one entry more than seq_lens");
  require(shape_.block_size > 0, "block_size must be positive");
  require(shape_.block_tables.size() == count * static_cast<size_t>(shape_.max_blocks),
          "block_tables must have one row for each of seq_lens");
  require(shape_.query_start_loc.front() == 0 && shape_.query_start_loc.back() == num_tokens(),
          "query_start_loc must go from 0 to the number of slots");
  for (size_t i = 0; i < count; ++i) {
    const int64_t first = shape_.query_start_loc[i], end = shape_.query_start_loc[i + 1];
    const int64_t seq_len = shape_.seq_lens[i];
    require(first <= end, "query_start_loc must be ascending");
    require(seq_len >= 0 && seq_len <= shape_.max_blocks * shape_.block_size,
            "seq_lens must fit into the block tables");
    longest_ = std::max(longest_, seq_len);
    if (end - first > seq_len) padding_rows_.emplace_back(first, end - seq_len);
    if (end == first || is_decode(i)) continue;
    if (prompt_rows_.empty() || prompt_rows_.back().second < first) prompt_rows_.emplace_back(first, end);
    prompt_rows_.back().second = end;
  }
  find_shared();
}

// Finds the keys that sequences with few queries share, because those with many read K and V once for all of them.
void AttentionStep::find_shared() {
  const size_t count = shape_.seq_lens.size();
  std::vector<int64_t> seen(count);
  for (size_t i = 0; i < count; ++i)
    if (num_queries(i) > 0 && num_queries(i) <= kSharedQueries) seen[i] = shape_.seq_lens[i] - num_queries(i);
  if (most_shared_floats_ > 0) shared_ = find_shared_keys(shape_, seen);
  begin_key_.resize(count);
  for (const SharedKeys& keys : shared_)
    for (const int32_t sequence : keys.sequences) begin_key_[static_cast<size_t>(sequence)] = keys.end_key;
}

int64_t AttentionStep::num_queries(size_t sequence) const {
  const int64_t rows = shape_.query_start_loc[sequence + 1] - shape_.query_start_loc[sequence];
  return std::min<int64_t>(rows, shape_.seq_lens[sequence]);
}

bool AttentionStep::is_decode(size_t sequence) const {
  return shape_.query_start_loc[sequence + 1] - shape_.query_start_loc[sequence] == 1 && num_queries(sequence) == 1;
}

int64_t AttentionStep::count_own_keys(size_t sequence, int64_t window) const {
  const int64_t seq_len = shape_.seq_lens[sequence];
  return window == 0 ? seq_len - begin_key_[sequence] : std::min(window, seq_len);
}

// The number of KV heads in a block of one token: more than one where enough blocks remain for all threads, because the
// memory of the heads of one KV block is contiguous.
int AttentionStep::heads_per_block(const AttentionShape& attention, int64_t window) const {
  int64_t num_splits = 0;
  for (size_t i = 0; i < shape_.seq_lens.size(); ++i) {
    if (num_queries(i) == 0) continue;
    num_splits += (count_own_keys(i, window) + kSplit - 1) / kSplit;
  }
  const int64_t min_blocks = static_cast<int64_t>(Pool::get().num_threads()) * kItemsPerThread;
  for (int heads = attention.num_kv_heads; heads > 1; --heads)
    if (attention.num_kv_heads % heads == 0 && num_splits * (attention.num_kv_heads / heads) >= min_blocks) return heads;
  return 1;
}

int AttentionStep::tokens_per_block(const AttentionShape& attention, int64_t window, size_t sequence) const {
  const int64_t seen = count_own_keys(sequence, window);
  const int few = std::max(1, kTargetRows / attention.group()), many = std::max(1, kManyRows / attention.group());
  const int64_t num_blocks = (num_queries(sequence) + many - 1) / many * attention.num_kv_heads;
  const int64_t min_items = static_cast<int64_t>(Pool::get().num_threads()) * kItemsPerThread;
  return num_blocks * ((seen + kSplit - 1) / kSplit) >= min_items ? many : few;
}

void AttentionStep::cut_blocks(const AttentionShape& attention, StepPlan& plan) const {
  const int many_heads = heads_per_block(attention, plan.window);
  int64_t num_shared_floats = 0;
  std::vector<size_t> first_block;  // of each sequence
  for (size_t i = 0; i < shape_.seq_lens.size(); ++i) {
    first_block.push_back(plan.blocks.size());
    const int64_t end = shape_.query_start_loc[i + 1], seq_len = shape_.seq_lens[i], count = num_queries(i);
    const int num_tokens = tokens_per_block(attention, plan.window, i);
    for (int64_t t = 0; t < count; t += num_tokens) {
      BlockPlan block = {};
      block.sequence = static_cast<int32_t>(i);
      block.first_row = end - count + t;
      block.first_position = seq_len - count + t;
      block.num_tokens = static_cast<int32_t>(std::min<int64_t>(num_tokens, count - t));
      block.num_kv_heads = count == 1 ? many_heads : 1;
      block.writes_kv = is_decode(i);
      block.begin_key = plan.window == 0 ? begin_key_[i] : 0;
      for (int head = 0; head < attention.num_kv_heads; head += block.num_kv_heads) {
        block.first_kv_head = head;
        plan.blocks.push_back(block);
      }
    }
    num_shared_floats += limit_shared(attention, first_block.back(), most_shared_floats_ - num_shared_floats, plan);
  }
  if (plan.window != 0) return;
  for (const SharedKeys& keys : shared_) cut_shared(attention, keys, first_block, plan);
}

// Lets a sequence compute all keys alone if the states of its blocks, those from `first` on, have more floats than allowed.
// Returns the floats of the states that it merges with those of shared keys.
int64_t AttentionStep::limit_shared(const AttentionShape& attention, size_t first, int64_t most_floats, StepPlan& plan) const {
  int64_t floats = 0;
  for (size_t i = first; i < plan.blocks.size(); ++i)
    if (plan.blocks[i].begin_key)
      floats += merged_floats(plan.blocks[i], attention, plan.window) + num_rows(plan.blocks[i], attention) * 16;
  if (floats <= most_floats) return floats;
  for (size_t i = first; i < plan.blocks.size(); ++i) plan.blocks[i].begin_key = 0;
  return 0;
}

// Divides shared keys into items of one KV head, whose tokens are divided too where the items are too few for all threads.
void AttentionStep::cut_shared(const AttentionShape& attention, const SharedKeys& keys, const std::vector<size_t>& first_block,
                               StepPlan& plan) const {
  const int64_t num_heads = attention.num_kv_heads, begin = static_cast<int64_t>(plan.shared_tokens.size());
  for (const int32_t sequence : keys.sequences) {
    const size_t at = first_block[static_cast<size_t>(sequence)];
    const BlockPlan first = plan.blocks[at];
    if (!first.begin_key) continue;
    for (int32_t t = 0; t < num_queries(static_cast<size_t>(sequence)); ++t) {
      const auto block = static_cast<int64_t>(at) + t / first.num_tokens * (num_heads / first.num_kv_heads);
      plan.shared_tokens.push_back({static_cast<int32_t>(block), t % first.num_tokens});
      plan.shared_rows.push_back(first.first_row + t);
    }
  }
  const int64_t count = static_cast<int64_t>(plan.shared_tokens.size()) - begin, rows = count * attention.group();
  if (count == 0) return;
  const int64_t num_whole = static_cast<int64_t>(shared_.size()) * num_heads;
  const int64_t least_items = static_cast<int64_t>(Pool::get().num_threads()) * kItemsPerThread;
  const int64_t wanted = std::min((least_items + num_whole - 1) / num_whole, rows / kSharedRows);
  const int64_t chunks = std::min(count, std::max({int64_t{1}, wanted, (rows + kManyRows - 1) / kManyRows}));
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t first = begin + count * chunk / chunks, end = begin + count * (chunk + 1) / chunks;
    for (int32_t head = 0; head < attention.num_kv_heads; ++head)
      plan.shared_items.push_back({keys.first_key, keys.end_key, head, keys.sequences[0], static_cast<int32_t>(first),
                                   static_cast<int32_t>(end - first)});
  }
}

StepPlan& AttentionStep::plan(const AttentionShape& attention, int64_t window) {
  if (window >= longest_) window = 0;
  for (const auto& plan : plans_)
    if (plan->window == window) return *plan;
  auto plan = std::make_unique<StepPlan>();
  plan->window = window;
  cut_blocks(attention, *plan);
  cut(*plan, attention);
  plans_.push_back(std::move(plan));
  return *plans_.back();
}

void attention_forward(const AttentionShape& shape, AttentionStep& step, const LayerCall& call) {
  StepPlan& plan = step.plan(shape, call.window);
  const int64_t out_width = static_cast<int64_t>(shape.num_heads) * shape.head_dim;
  for (const auto& [first, end] : step.padding_rows())
    std::memset(call.out + first * out_width, 0, static_cast<size_t>((end - first) * out_width) * sizeof(float));
  const LayerRun run(shape, step, call, plan);
  run.write_prompts();
  run.attend_shared();
  run.attend_all();
}

}  // namespace chairlift
