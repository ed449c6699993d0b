#include "recurrence/recurrence.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include "linear/packed_matrix.h"
#include "runtime/isa.h"
#include "runtime/pool.h"
#include "runtime/reusable_memory.h"

namespace chairlift {
namespace {

// Fewer values take less time than the threads need to meet.
constexpr int64_t kValuesPerTask = 4096;
constexpr int64_t kChannelsPerUnit = 64;

void check_slots(const RecurrentState& state, const StateStep& step) {
  if (step.num_slots() > state.num_slots)
    throw std::invalid_argument("the step has slots up to " + std::to_string(step.num_slots() - 1) +
                                ", and the state has " + std::to_string(state.num_slots));
}

void append_units(int64_t channels, int64_t size, float scale, std::vector<Convolution::Unit>& units) {
  for (int64_t at = 0; at < channels; at += size) units.push_back({std::min(size, channels - at), scale});
}

// Calls body(index) from 0 to count - 1, where each takes about as long as `values` values.
template <typename Body>
void each_index(int64_t count, int64_t values, const Body& body) {
  const int64_t per_task = divide_up(kValuesPerTask, values);
  const auto run_task = [&](int64_t task, int) {
    for (int64_t i = task * per_task; i < std::min((task + 1) * per_task, count); ++i) body(i);
  };
  if (count <= per_task)
    run_task(0, 0);
  else
    Pool::get().run(divide_up(count, per_task), run_task);
}

// Columns of the state of a head, which stay in the first-level cache: 16 KiB, or two vectors if that is more.
int64_t slab_columns(int64_t keys) {
  constexpr int64_t kValues = 4096;
  const int64_t lanes = isa().recurrence.lanes;
  return std::clamp(kValues / keys / (2 * lanes), int64_t{1}, int64_t{2}) * 2 * lanes;
}

void copy_columns(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i) std::copy_n(from + i * from_stride, columns, to + i * to_stride);
}

}  // namespace

ShortConvolution::ShortConvolution(Convolution convolution) : convolution_(std::move(convolution)) {
  std::vector<Convolution::Unit> units;
  append_units(convolution_.num_channels(), kChannelsPerUnit, 0, units);
  convolution_.set_units(units);
}

void ShortConvolution::operator()(const StepRows& rows, const RecurrentState& state, const StateStep& step,
                                  const StepRows& out) const {
  check_slots(state, step);
  const int64_t channels = convolution_.num_channels();
  Pool& pool = Pool::get();
  const Convolution::Tasks tasks = convolution_.divide(step, pool.num_threads());
  pool.run(tasks.count, [&](int64_t task, int worker) {
    const RecurrenceLoops& loops = isa().recurrence;
    const Convolution::Block block = convolution_.block(tasks, task);
    const StateSpan& span = step.spans()[static_cast<size_t>(block.sequence)];
    const StepRows b = rows.columns(block.first_channel), c = b.columns(channels), x = c.columns(channels);
    for (int64_t token = span.begin; token < span.end; ++token)
      loops.multiply(b.row(token), x.row(token), block.num_channels, x.row(token));
    convolution_.compute(block, rows.columns(2 * channels), state.convolution, step, worker);
    const StepRows results = out.columns(block.first_channel);
    for (int64_t token = span.begin; token < span.end; ++token)
      loops.multiply(c.row(token), x.row(token), block.num_channels, results.row(token));
  });
}

// One call, with the coefficients of all tokens: the decays [tokens][decays] and the factors [tokens][heads]. Decays of
// channels are in the memory of their gates.
struct MatrixRecurrence::Call {
  StepRows rows;
  RecurrentState state;
  const StateStep& step;
  StepRows out, decays, factors;
};

// Columns of the state of one head of a sequence.
struct MatrixRecurrence::Slab {
  const StateSpan& span;
  int64_t head, first, count;
};

MatrixRecurrence::Columns MatrixRecurrence::columns_of(const Sizes& sizes) {
  const int64_t keys = sizes.key_heads * sizes.key_size, values = sizes.heads * sizes.value_size;
  const int64_t channels = 2 * keys + values;
  if (sizes.rule() == StateRule::channel_delta) {
    const int64_t z = sizes.decays(), q = z + values, b = q + channels;
    return {q, q, q + keys, q + 2 * keys, z, b, 0, b + sizes.heads};
  }
  if (sizes.is_delta) {
    const int64_t b = channels + values, a = b + sizes.heads;
    return {0, 0, keys, 2 * keys, channels, b, a, a + sizes.heads};
  }
  return {values, 2 * values + keys, 2 * values, values, 0, 0, values + channels, values + channels + sizes.heads};
}

MatrixRecurrence::MatrixRecurrence(const Sizes& sizes, Convolution convolution, Parameters parameters)
    : sizes_(sizes),
      columns_(columns_of(sizes)),
      convolution_(std::move(convolution)),
      parameters_(std::move(parameters)) {
  check();
  std::vector<Convolution::Unit> units;
  const int64_t keys = sizes.key_heads * sizes.key_size, values = sizes.heads * sizes.value_size;
  if (sizes.is_delta) {
    append_units(keys, sizes.key_size, 1.0f / std::sqrt(static_cast<float>(sizes.key_size)), units);
    append_units(keys, sizes.key_size, 1, units);
    append_units(values, kChannelsPerUnit, 0, units);
  } else {
    append_units(values + 2 * keys, kChannelsPerUnit, 0, units);
  }
  convolution_.set_units(units);
}

void MatrixRecurrence::check() const {
  const Sizes& sizes = sizes_;
  if (sizes.heads < 1 || sizes.key_heads < 1 || sizes.heads % sizes.key_heads != 0 || sizes.key_size < 1 ||
      sizes.value_size < 1)
    throw std::invalid_argument("heads must be a multiple of key_heads, and all sizes at least 1");
  const int64_t outputs = sizes.heads * sizes.value_size;
  const auto has = [](const std::vector<float>& values, int64_t count) {
    return static_cast<int64_t>(values.size()) == count;
  };
  const Parameters& given = parameters_;
  if (!has(given.rate, sizes.decays()) || !has(given.bias, sizes.decays()) ||
      (!given.skip.empty() && !has(given.skip, sizes.heads)))
    throw std::invalid_argument("rate and bias must have one value for each decay, and skip one for each head");
  if (sizes.norm_group < 1 || outputs % sizes.norm_group != 0)
    throw std::invalid_argument("norm_group must divide heads * value_size");
  if (!given.norm_weight.empty() && !has(given.norm_weight, outputs) && !has(given.norm_weight, sizes.norm_group))
    throw std::invalid_argument("norm_weight must have heads * value_size or norm_group values");
  if (!given.row_scales.empty() && !has(given.row_scales, columns_.width))
    throw std::invalid_argument("row_scales must have " + std::to_string(columns_.width) + " values");
}

void MatrixRecurrence::operator()(const StepRows& rows, const RecurrentState& state, const StateStep& step,
                                  const StepRows& out) const {
  thread_local ReusableMemory memory;
  check_slots(state, step);
  const int64_t stride = 2 * sizes_.heads;
  const auto num_bytes = static_cast<size_t>((step.num_tokens() + 1) * stride) * sizeof(float);
  const StepRows factors = {static_cast<float*>(memory.get(num_bytes)), stride};
  const bool by_channel = sizes_.rule() == StateRule::channel_delta;
  const Call call = {rows, state, step, out, by_channel ? rows.columns(columns_.gate) : factors.columns(sizes_.heads),
                     factors};
  prepare(call);
  scan(call);
  finish(call);
}

// The convolution and the coefficients of all tokens, and the factors of the rows.
void MatrixRecurrence::prepare(const Call& call) const {
  Pool& pool = Pool::get();
  const Convolution::Tasks tasks = convolution_.divide(call.step, pool.num_threads());
  const int64_t tokens = call.step.num_tokens(), per_task = divide_up(kValuesPerTask / 4, sizes_.heads + sizes_.decays());
  pool.run(tasks.count + divide_up(tokens, per_task), [&](int64_t task, int worker) {
    if (task < tasks.count) {
      const Convolution::Block block = convolution_.block(tasks, task);
      const StateSpan& span = call.step.spans()[static_cast<size_t>(block.sequence)];
      const int64_t first = columns_.convolution + block.first_channel;
      for (int64_t token = span.begin; token < span.end; ++token)
        scale_columns(call, token, first, first + block.num_channels);
      return convolution_.compute(block, call.rows.columns(columns_.convolution), call.state.convolution, call.step,
                                  worker);
    }
    const int64_t first = (task - tasks.count) * per_task;
    for (int64_t token = first; token < std::min(first + per_task, tokens); ++token) compute_gates(call, token);
  });
}

void MatrixRecurrence::compute_gates(const Call& call, int64_t token) const {
  scale_columns(call, token, 0, columns_.convolution);
  scale_columns(call, token, columns_.convolution + convolution_.num_channels(), columns_.width);
  const float* const row = call.rows.row(token);
  const GateArgs args = {parameters_.rate.data(), parameters_.bias.data(), parameters_.factor_scale, parameters_.low,
                         parameters_.high};
  isa().recurrence.gates(args, row + columns_.gate, sizes_.is_delta ? row + columns_.factor : nullptr, sizes_.heads,
                         sizes_.decays(), call.decays.row(token), call.factors.row(token));
}

void MatrixRecurrence::scale_columns(const Call& call, int64_t token, int64_t first, int64_t last) const {
  if (parameters_.row_scales.empty()) return;
  float* const values = call.rows.row(token) + first;
  isa().recurrence.multiply(values, parameters_.row_scales.data() + first, last - first, values);
}

// Threads have consecutive slabs, because states are read from memory once.
void MatrixRecurrence::scan(const Call& call) const {
  const int64_t width = slab_columns(sizes_.key_size), slabs = divide_up(sizes_.value_size, width);
  const int64_t num_tasks = call.step.num_sequences() * sizes_.heads * slabs;
  const auto slab_of = [&](int64_t task) {
    const int64_t head = task / slabs, first = task % slabs * width;
    return Slab{call.step.spans()[static_cast<size_t>(head / sizes_.heads)], head % sizes_.heads, first,
                std::min(width, sizes_.value_size - first)};
  };
  Pool& pool = Pool::get();
  Ranges ranges(pool, num_tasks);
  pool.run(ranges.count(), [&](int64_t range, int worker) {
    ranges.take(range, [&](int64_t task, int64_t, bool is_last) {
      const Slab next = slab_of(std::min(task + 1, num_tasks - 1));
      const bool reads_ahead = !is_last && next.span.source >= 0;
      scan_slab(call, slab_of(task), reads_ahead ? state_of(call, next, next.span.source) : nullptr, worker);
    });
  });
}

float* MatrixRecurrence::state_of(const Call& call, const Slab& slab, int32_t slot) const {
  return call.state.matrix + (slot * sizes_.heads + slab.head) * sizes_.key_size * sizes_.value_size + slab.first;
}

// A single token reads and writes the memory of the states. Several tokens write a copy, which stays in the cache.
void MatrixRecurrence::scan_slab(const Call& call, const Slab& slab, const float* ahead, int worker) const {
  const StateSpan& span = slab.span;
  const int64_t keys = sizes_.key_size, stride = sizes_.value_size;
  auto* const copy = static_cast<float*>(
      Pool::get().scratch(worker, static_cast<size_t>(keys * slab.count) * sizeof(float)));
  const bool in_place = span.num_tokens() == 1 && span.slot >= 0;
  ScanTask task = {};
  task.from = span.source >= 0 ? state_of(call, slab, span.source) : copy;
  task.from_stride = span.source >= 0 ? stride : slab.count;
  if (span.source < 0) std::fill_n(copy, keys * slab.count, 0.0f);
  task.to = in_place ? state_of(call, slab, span.slot) : copy;
  task.to_stride = in_place ? stride : slab.count;
  task.keys = keys;
  task.columns = static_cast<int>(slab.count);
  task.row_stride = call.rows.stride;
  task.decay_stride = call.decays.stride;
  task.factor_stride = call.factors.stride;
  task.skip = parameters_.skip.empty() ? 0 : parameters_.skip[static_cast<size_t>(slab.head)];
  task.rule = sizes_.rule();
  task.ahead = ahead;
  task.ahead_stride = stride;
  const int64_t key_heads = sizes_.key_heads, shared = sizes_.heads / key_heads;
  const int64_t key = (sizes_.has_tiled_keys ? slab.head % key_heads : slab.head / shared) * keys;
  int64_t done = 0;
  const auto advance = [&](int64_t count) {
    if (count == done) return;
    float* const row = call.rows.row(span.begin + done);
    task.tokens = count - done;
    task.q = row + columns_.q + key;
    task.k = row + columns_.k + key;
    task.v = row + columns_.v + slab.head * sizes_.value_size + slab.first;
    task.decay = call.decays.row(span.begin + done) + slab.head * (sizes_.decays() / sizes_.heads);
    task.factor = call.factors.row(span.begin + done) + slab.head;
    isa().recurrence.scan(task);
    task.from = task.to;
    task.from_stride = task.to_stride;
    task.ahead = nullptr;
    done = count;
  };
  call.step.each_write(span, [&](int64_t count, int32_t slot) {
    advance(count);
    float* const kept = state_of(call, slab, slot);
    if (kept != task.from) copy_columns(task.from, task.from_stride, kept, stride, keys, slab.count);
  });
  advance(span.num_tokens());
}

void MatrixRecurrence::finish(const Call& call) const {
  const int64_t size = sizes_.norm_group, groups = sizes_.heads * sizes_.value_size / size;
  each_index(call.step.num_tokens() * groups, size, [&](int64_t index) {
    const int64_t token = index / groups, first = index % groups * size;
    const std::vector<float>& weights = parameters_.norm_weight;
    const float* const weight = weights.empty() ? nullptr : weights.data() + first % static_cast<int64_t>(weights.size());
    const float* const row = call.rows.row(token) + first;
    const GatedNormArgs args = {weight, parameters_.norm_eps, parameters_.gates_first, parameters_.has_sigmoid_gate};
    isa().recurrence.gated_norm(args, row + columns_.v, row + columns_.z, size, call.out.row(token) + first);
  });
}

}  // namespace chairlift
