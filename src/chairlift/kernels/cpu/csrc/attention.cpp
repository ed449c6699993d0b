#include "attention.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "isa.h"
#include "pool.h"

namespace chairlift {
namespace {

constexpr int kTargetRows = 96;         // of a query block: what makes loading a tile of keys cheap
constexpr int kItemsPerThread = 6;      // so that threads end together
constexpr int64_t kTileLoadRows = 8;    // loading a tile costs as much as so many rows over it
constexpr int64_t kPrepareFloats = 1 << 14;  // a task's share of norm and rotation

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(std::string("AttentionStep: ") + what);
}

int64_t split_cost(const QueryBlock& keys, int64_t rows, int split) {
  const int64_t begin = std::max<int64_t>(keys.first_key(0), static_cast<int64_t>(split) * kSplit);
  const int64_t end = std::min<int64_t>(keys.end_key(keys.num_tokens - 1), static_cast<int64_t>(split + 1) * kSplit);
  return (end - begin) * (rows + kTileLoadRows);
}

// The part of a query block that says which keys it sees.
QueryBlock seen_by(const BlockPlan& block, int64_t window) {
  QueryBlock keys = {};
  keys.num_tokens = block.num_tokens;
  keys.first_position = block.first_position;
  keys.window = window;
  return keys;
}

int64_t block_cost(const BlockPlan& block, int group, int64_t window) {
  const QueryBlock keys = seen_by(block, window);
  int64_t cost = 0;
  for (int split = keys.first_split(); split < keys.end_split(); ++split)
    cost += split_cost(keys, static_cast<int64_t>(block.num_tokens) * group, split);
  return cost;
}

// Splits of one block to items of about `target` each.
void cut_items(StepPlan& plan, int32_t index, int group, int64_t target) {
  BlockPlan& block = plan.blocks[static_cast<size_t>(index)];
  const QueryBlock keys = seen_by(block, plan.window);
  const int64_t rows = static_cast<int64_t>(block.num_tokens) * group;
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
  const int group = attention.group();
  int64_t total = 0;
  for (const BlockPlan& block : plan.blocks) total += block_cost(block, group, plan.window);
  const int64_t target = std::max<int64_t>(1, total / (Pool::get().num_threads() * kItemsPerThread));
  int64_t num_states = 0;
  for (size_t i = 0; i < plan.blocks.size(); ++i) {
    BlockPlan& block = plan.blocks[i];
    cut_items(plan, static_cast<int32_t>(i), group, target);
    const int64_t rows = static_cast<int64_t>(block.num_tokens) * group;
    plan.max_rows = std::max(plan.max_rows, rows);
    if (block.num_items == 1) continue;
    const QueryBlock keys = seen_by(block, plan.window);
    block.states = num_states;
    num_states += (keys.end_split() - keys.first_split()) * state_floats(rows, attention.row_stride());
  }
  std::stable_sort(plan.items.begin(), plan.items.end(),
                   [](const ItemPlan& a, const ItemPlan& b) { return a.cost > b.cost; });
  plan.states.resize(static_cast<size_t>(num_states));
  plan.unfinished = std::make_unique<std::atomic<int32_t>[]>(plan.blocks.size());
  for (size_t i = 0; i < plan.blocks.size(); ++i) plan.unfinished[i] = plan.blocks[i].num_items;
}

QueryBlock query_block(const AttentionShape& shape, const AttentionStep& step, const LayerCall& call,
                       const BlockPlan& plan, int64_t window) {
  QueryBlock block = seen_by(plan, window);
  const int64_t first_head = static_cast<int64_t>(plan.kv_head) * shape.group() * shape.head_dim;
  block.query = call.qkv + plan.first_row * shape.qkv_width() + first_head;
  block.out = call.out + plan.first_row * shape.num_heads * shape.head_dim + first_head;
  block.kv_head = plan.kv_head;
  block.block_table = step.shape().block_tables.data() + plan.sequence * step.shape().max_blocks;
  return block;
}

void run_item(const AttentionShape& shape, const AttentionStep& step, const LayerCall& call, StepPlan& plan,
              const ItemPlan& item, void* scratch) {
  const AttentionTiles& tiles = isa().attention;
  const auto index = static_cast<size_t>(item.block);
  const BlockPlan& block = plan.blocks[index];
  const QueryBlock queries = query_block(shape, step, call, block, plan.window);
  if (block.num_items == 1) {
    tiles.attend(shape, call.kv, queries, item.first_split, item.end_split, nullptr, scratch);
    return;
  }
  const int64_t size = state_floats(static_cast<int64_t>(block.num_tokens) * shape.group(), shape.row_stride());
  float* states = plan.states.data() + block.states;
  tiles.attend(shape, call.kv, queries, item.first_split, item.end_split,
               states + (item.first_split - queries.first_split()) * size, scratch);
  if (plan.unfinished[index].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  plan.unfinished[index].store(block.num_items, std::memory_order_relaxed);
  tiles.merge(shape, queries, states, scratch);
}

void prepare_all(const AttentionShape& shape, const AttentionStep& step, const LayerCall& call) {
  const TokenRows tokens = {call.qkv, step.shape().slot_mapping.data(), call.positions, call.cos_sin};
  const int64_t a_task = std::max<int64_t>(1, kPrepareFloats / shape.qkv_width());
  const int64_t num_tasks = (step.num_tokens() + a_task - 1) / a_task;
  Pool::get().run(num_tasks, [&](int64_t task, int) {
    const int64_t end = std::min(step.num_tokens(), (task + 1) * a_task);
    isa().attention.prepare(shape, call.kv, tokens, task * a_task, end);
  });
}

}  // namespace

size_t attention_scratch_bytes(const AttentionShape& shape, int64_t rows) {
  const int64_t stride = shape.row_stride(), padded = (rows + 15) / 16 * 16;
  const int64_t tiles = kKeyTile * (shape.head_dim + stride);
  const int64_t per_row = stride + 16 + 2 + 2;  // query, sums by lane, first and last key
  return static_cast<size_t>(tiles + padded * per_row + 2 * state_floats(rows, shape.row_stride())) * sizeof(float);
}

AttentionStep::AttentionStep(StepShape shape) : shape_(std::move(shape)) {
  const size_t count = shape_.seq_lens.size();
  require(shape_.query_start_loc.size() == count + 1, "query_start_loc has one entry more than seq_lens");
  require(shape_.block_size > 0, "block_size is positive");
  require(shape_.block_tables.size() == count * static_cast<size_t>(shape_.max_blocks), "one block table a sequence");
  require(shape_.query_start_loc.front() == 0 && shape_.query_start_loc.back() == num_tokens(),
          "query_start_loc goes from 0 to the number of slots");
  for (size_t i = 0; i < count; ++i) {
    const int64_t first = shape_.query_start_loc[i], end = shape_.query_start_loc[i + 1];
    const int64_t seq_len = shape_.seq_lens[i];
    require(first <= end, "query_start_loc ascends");
    require(seq_len >= 0 && seq_len <= shape_.max_blocks * shape_.block_size, "a sequence fits its block table");
    longest_ = std::max(longest_, seq_len);
    if (end - first > seq_len) blind_rows_.emplace_back(first, end - seq_len);
  }
}

void AttentionStep::cut_blocks(const AttentionShape& attention, StepPlan& plan) const {
  const int a_block = std::max(1, kTargetRows / attention.group());
  for (size_t i = 0; i < shape_.seq_lens.size(); ++i) {
    const int64_t end = shape_.query_start_loc[i + 1], seq_len = shape_.seq_lens[i];
    const int64_t num_queries = std::min<int64_t>(end - shape_.query_start_loc[i], seq_len);
    for (int64_t t = 0; t < num_queries; t += a_block) {
      BlockPlan block = {};
      block.sequence = static_cast<int32_t>(i);
      block.first_row = end - num_queries + t;
      block.first_position = seq_len - num_queries + t;
      block.num_tokens = static_cast<int32_t>(std::min<int64_t>(a_block, num_queries - t));
      for (block.kv_head = 0; block.kv_head < attention.num_kv_heads; ++block.kv_head) plan.blocks.push_back(block);
    }
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
  for (const auto& [first, end] : step.blind_rows())
    std::memset(call.out + first * out_width, 0, static_cast<size_t>((end - first) * out_width) * sizeof(float));
  prepare_all(shape, step, call);
  const size_t scratch_bytes = attention_scratch_bytes(shape, plan.max_rows);
  Pool& pool = Pool::get();
  pool.run(static_cast<int64_t>(plan.items.size()), [&](int64_t task, int worker) {
    run_item(shape, step, call, plan, plan.items[static_cast<size_t>(task)], pool.scratch(worker, scratch_bytes));
  });
}

}  // namespace chairlift
