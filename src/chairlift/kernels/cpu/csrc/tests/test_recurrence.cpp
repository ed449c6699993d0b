#include "recurrence/recurrence.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/pool.h"
#include "tests/check.h"

namespace chairlift::test {
namespace {

constexpr int64_t kSlots = 9;
constexpr double kTolerance = 2e-4;
using Values = std::vector<double>;

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double silu(double x) { return x * sigmoid(x); }
double softplus(double x) { return std::log1p(std::exp(x)); }

struct ConvolutionCase {
  ConvolutionCase(int64_t channels, int64_t width, bool has_bias, bool has_silu, Random& random)
      : channels(channels), width(width), has_silu(has_silu), weight(random.normals(channels * width, 0.5f)),
        bias(random.normals(has_bias ? channels : 0)) {}

  Convolution kernel() const { return {weight, bias, width, has_silu}; }

  // The result of one token; `before` [width - 1][channels] receives its inputs.
  Values of(const Values& inputs, float* before) const {
    Values out(inputs.size());
    const int64_t kept = width - 1;
    for (int64_t c = 0; c < channels; ++c) {
      double sum = bias.empty() ? 0 : bias[static_cast<size_t>(c)];
      for (int64_t i = 0; i < kept; ++i) sum += double(weight[static_cast<size_t>(i * channels + c)]) * before[i * channels + c];
      sum += weight[static_cast<size_t>(kept * channels + c)] * inputs[static_cast<size_t>(c)];
      out[static_cast<size_t>(c)] = has_silu ? silu(sum) : sum;
      for (int64_t i = 0; i + 1 < kept; ++i) before[i * channels + c] = before[(i + 1) * channels + c];
      before[(kept - 1) * channels + c] = static_cast<float>(inputs[static_cast<size_t>(c)]);
    }
    return out;
  }

  int64_t channels, width;
  bool has_silu;
  std::vector<float> weight, bias;
};

// The states of a layer, with one vector for each part, so that the address sanitizer detects accesses beyond it.
struct States {
  RecurrentState memory() {
    return {convolution.data(), matrix.empty() ? nullptr : matrix.data(), kSlots};
  }
  float* tail(int64_t slot) { return convolution.data() + slot * static_cast<int64_t>(convolution.size()) / kSlots; }
  float* state(int64_t slot) { return matrix.data() + slot * static_cast<int64_t>(matrix.size()) / kSlots; }

  std::vector<float> convolution, matrix;
};

// A layer, and its definition for one token in double.
class Layer {
 public:
  Layer(int64_t width, int64_t outputs, ConvolutionCase convolution, int64_t matrix_values)
      : width(width), outputs(outputs), convolution(std::move(convolution)), matrix_values(matrix_values) {}
  virtual ~Layer() = default;
  virtual void run(const StepRows& rows, const RecurrentState& state, const StateStep& step,
                   const StepRows& out) const = 0;
  virtual Values of(const float* row, float* tail, float* state) const = 0;

  States random_states(Random& random) const {
    return {random.normals(kSlots * (convolution.width - 1) * convolution.channels),
            random.normals(kSlots * matrix_values, 0.3f)};
  }

  int64_t width, outputs;
  ConvolutionCase convolution;
  int64_t matrix_values;
};

class ShortLayer final : public Layer {
 public:
  ShortLayer(int64_t channels, int64_t taps, bool has_bias, Random& random)
      : Layer(3 * channels, channels, {channels, taps, has_bias, false, random}, 0), kernel_(convolution.kernel()) {}

  void run(const StepRows& rows, const RecurrentState& state, const StateStep& step,
           const StepRows& out) const override {
    kernel_(rows, state, step, out);
  }
  Values of(const float* row, float* tail, float*) const override {
    Values inputs;
    for (int64_t i = 0; i < outputs; ++i) inputs.push_back(double(row[i]) * row[2 * outputs + i]);
    Values out = convolution.of(inputs, tail);
    for (int64_t i = 0; i < outputs; ++i) out[static_cast<size_t>(i)] *= row[outputs + i];
    return out;
  }

 private:
  ShortConvolution kernel_;
};

enum class NormKind { none, before_gate, after_gate };

class MatrixLayer final : public Layer {
 public:
  using Sizes = MatrixRecurrence::Sizes;

  MatrixLayer(const Sizes& sizes, int64_t taps, NormKind norm, bool has_scales, Random& random)
      : Layer(width_of(sizes), sizes.heads * sizes.value_size, {channels_of(sizes), taps, has_scales, true, random},
              sizes.heads * sizes.key_size * sizes.value_size),
        sizes_(sizes), norm_(norm), parameters_(make(has_scales, random)),
        kernel_(sizes, convolution.kernel(), parameters_) {}

  void run(const StepRows& rows, const RecurrentState& state, const StateStep& step,
           const StepRows& out) const override {
    kernel_(rows, state, step, out);
  }

  Values of(const float* row, float* tail, float* state) const override {
    Values x(row, row + width);
    if (!parameters_.row_scales.empty())
      for (int64_t i = 0; i < width; ++i) x[static_cast<size_t>(i)] *= parameters_.row_scales[static_cast<size_t>(i)];
    const int64_t keys = sizes_.key_heads * sizes_.key_size, decays = sizes_.decays();
    const bool by_channel = sizes_.has_channel_decay;
    const auto first = x.begin() + (by_channel ? decays + outputs : sizes_.is_delta ? 0 : outputs);
    const Values mixed = convolution.of({first, first + convolution.channels}, tail);
    const auto gate = x.begin() + (by_channel ? decays : sizes_.is_delta ? convolution.channels : 0);
    const Values z(gate, gate + outputs);
    Values y;
    for (int64_t head = 0; head < sizes_.heads; ++head) {
      const int64_t shared = sizes_.heads / sizes_.key_heads;
      const int64_t key = (sizes_.has_tiled_keys ? head % sizes_.key_heads : head / shared) * sizes_.key_size;
      const auto part = [&](int64_t at, int64_t size) {
        return Values(mixed.begin() + at, mixed.begin() + at + size);
      };
      Values q = part((sizes_.is_delta ? 0 : outputs + keys) + key, sizes_.key_size);
      Values k = part((sizes_.is_delta ? keys : outputs) + key, sizes_.key_size);
      const Values v = part((sizes_.is_delta ? 2 * keys : 0) + head * sizes_.value_size, sizes_.value_size);
      if (sizes_.is_delta) {
        normalize(q, 1 / std::sqrt(double(sizes_.key_size)));
        normalize(k, 1);
      }
      add_head(head, x, q, k, v, state, y);
    }
    return gated_norm(y, z);
  }

 private:
  static int64_t channels_of(const Sizes& sizes) {
    return 2 * sizes.key_heads * sizes.key_size + sizes.heads * sizes.value_size;
  }
  static int64_t width_of(const Sizes& sizes) {
    return channels_of(sizes) + sizes.heads * (sizes.value_size + (sizes.is_delta ? 1 : 0)) + sizes.decays();
  }

  MatrixRecurrence::Parameters make(bool has_scales, Random& random) const {
    MatrixRecurrence::Parameters made;
    made.rate = random.normals(sizes_.decays());
    for (float& rate : made.rate) rate = -std::fabs(rate);
    made.bias = random.normals(sizes_.decays());
    if (!sizes_.is_delta) made.skip = random.normals(sizes_.heads);
    if (norm_ != NormKind::none) made.norm_weight = random.normals(sizes_.is_delta ? sizes_.norm_group : outputs);
    if (has_scales) made.row_scales = random.normals(width);
    made.factor_scale = has_scales ? 2.0f : 1.0f;
    made.low = 0.1f;
    made.high = 2.0f;
    made.norm_eps = 1e-3f;
    made.gates_first = norm_ == NormKind::after_gate;
    made.has_sigmoid_gate = sizes_.has_channel_decay;
    return made;
  }

  static void normalize(Values& x, double scale) {
    double sum = 1e-6;
    for (const double value : x) sum += value * value;
    for (double& value : x) value *= scale / std::sqrt(sum);
  }

  // Appends the outputs of a head, and replaces its state.
  void add_head(int64_t head, const Values& x, const Values& q, const Values& k, const Values& v, float* state,
                Values& y) const {
    const auto h = static_cast<size_t>(head), heads = static_cast<size_t>(sizes_.heads);
    const bool by_channel = sizes_.has_channel_decay;
    double time = 0;
    Values decay(static_cast<size_t>(sizes_.key_size));
    for (size_t i = 0; i < decay.size(); ++i) {
      const size_t at = by_channel ? h * decay.size() + i : h;
      time = softplus(x[by_channel ? at : x.size() - heads + h] + parameters_.bias[at]);
      if (!sizes_.is_delta) time = std::min(std::max(time, double(parameters_.low)), double(parameters_.high));
      decay[i] = std::exp(parameters_.rate[at] * time);
    }
    const double beta = parameters_.factor_scale * sigmoid(x[x.size() - (by_channel ? 1 : 2) * heads + h]);
    for (int64_t column = 0; column < sizes_.value_size; ++column) {
      const auto at = [&](int64_t i) -> float& {
        return state[(head * sizes_.key_size + i) * sizes_.value_size + column];
      };
      const double value = v[static_cast<size_t>(column)];
      double dot = 0, out = 0;
      for (int64_t i = 0; i < sizes_.key_size; ++i) dot += k[static_cast<size_t>(i)] * decay[static_cast<size_t>(i)] * at(i);
      const double change = sizes_.is_delta ? beta * (value - dot) : time * value;
      for (int64_t i = 0; i < sizes_.key_size; ++i) {
        at(i) = static_cast<float>(decay[static_cast<size_t>(i)] * at(i) + k[static_cast<size_t>(i)] * change);
        out += q[static_cast<size_t>(i)] * at(i);
      }
      y.push_back(out + (sizes_.is_delta ? 0 : parameters_.skip[h] * value));
    }
  }

  Values gated_norm(Values y, const Values& z) const {
    const auto gate = [this](double x) { return parameters_.has_sigmoid_gate ? sigmoid(x) : silu(x); };
    if (norm_ != NormKind::before_gate)
      for (size_t i = 0; i < y.size(); ++i) y[i] *= gate(z[i]);
    if (norm_ == NormKind::none) return y;
    const auto group = static_cast<size_t>(sizes_.norm_group);
    for (size_t first = 0; first < y.size(); first += group) {
      double sum = 0;
      for (size_t i = first; i < first + group; ++i) sum += y[i] * y[i] / static_cast<double>(group);
      for (size_t i = first; i < first + group; ++i)
        y[i] *= parameters_.norm_weight[i % parameters_.norm_weight.size()] / std::sqrt(sum + parameters_.norm_eps) *
                (norm_ == NormKind::before_gate ? gate(z[i]) : 1);
    }
    return y;
  }

  Sizes sizes_;
  NormKind norm_;
  MatrixRecurrence::Parameters parameters_;
  MatrixRecurrence kernel_;
};

struct Sequence {
  int64_t tokens;
  int32_t source, slot;
  std::vector<StateStep::Snapshot> snapshots;
};

// Runs the sequences in one step; rows [tokens][width] -> [tokens][outputs].
std::vector<float> run(const Layer& layer, const std::vector<Sequence>& sequences, std::vector<float> rows,
                       States& states) {
  std::vector<int32_t> starts = {0}, sources, slots;
  std::vector<StateStep::Snapshot> snapshots;
  for (const Sequence& sequence : sequences) {
    starts.push_back(starts.back() + static_cast<int32_t>(sequence.tokens));
    for (StateStep::Snapshot snapshot : sequence.snapshots) {
      snapshot.sequence = static_cast<int32_t>(sources.size());
      snapshots.push_back(snapshot);
    }
    sources.push_back(sequence.source);
    slots.push_back(sequence.slot);
  }
  std::vector<float> out(static_cast<size_t>(starts.back() * layer.outputs));
  layer.run({rows.data(), layer.width}, states.memory(), StateStep(starts, sources, slots, snapshots),
            {out.data(), layer.outputs});
  return out;
}

void copy_slot(const Layer& layer, States& states, int64_t from, int64_t to) {
  const int64_t tail = (layer.convolution.width - 1) * layer.convolution.channels;
  if (from < 0) {
    std::fill_n(states.tail(to), tail, 0.0f);
    std::fill_n(states.state(to), layer.matrix_values, 0.0f);
  } else if (from != to) {
    std::copy_n(states.tail(from), tail, states.tail(to));
    std::copy_n(states.state(from), layer.matrix_values, states.state(to));
  }
}

bool near_all(const std::vector<float>& got, const std::vector<float>& expected) {
  for (size_t i = 0; i < got.size(); ++i)
    if (!near(got[i], expected[i], kTolerance * (1 + std::fabs(expected[i])))) return false;
  return true;
}

void check_layer(const Layer& layer, Random& random) {
  // Slot 8 is read by two sequences, and slot 7 by none.
  const std::vector<Sequence> sequences = {
      {1, 0, 0, {{0, 1, 5}}}, {6, -1, 1, {}}, {1, 8, 2, {}}, {9, 8, 3, {{0, 2, 4}, {0, 9, 6}}}, {1, -1, -1, {}}};
  int64_t tokens = 0;
  for (const Sequence& sequence : sequences) tokens += sequence.tokens;
  const std::vector<float> rows = random.normals(tokens * layer.width);
  const States before = layer.random_states(random);
  States crowd = before, expected = before;
  Pool::get().set_num_threads(3);
  Pool::get().set_tile_order(7);
  const std::vector<float> out = run(layer, sequences, rows, crowd);
  Pool::get().set_num_threads(1);
  Pool::get().set_tile_order(0);
  int64_t row = 0;
  for (const Sequence& sequence : sequences) {
    // The definition in slot 7, and the kernel token by token alone in the same slot of other states.
    States alone = before;
    copy_slot(layer, expected, sequence.source, 7);
    for (int64_t token = 0; token < sequence.tokens; ++token, ++row) {
      const float* const own = rows.data() + row * layer.width;
      const Values wanted = layer.of(own, expected.tail(7), expected.state(7));
      const std::vector<float> single = run(layer, {{1, token == 0 ? sequence.source : 7, 7, {}}},
                                            {own, own + layer.width}, alone);
      for (int64_t i = 0; i < layer.outputs; ++i) {
        const auto at = static_cast<size_t>(row * layer.outputs + i);
        CHECK(near(out[at], wanted[static_cast<size_t>(i)], kTolerance * (1 + std::fabs(wanted[static_cast<size_t>(i)]))));
        CHECK(single[static_cast<size_t>(i)] == out[at]);
      }
      for (const StateStep::Snapshot& snapshot : sequence.snapshots)
        if (snapshot.count == token + 1) copy_slot(layer, expected, 7, snapshot.slot);
    }
    if (sequence.slot < 0) continue;
    copy_slot(layer, expected, 7, sequence.slot);
    CHECK(std::equal(alone.tail(7), alone.tail(8), crowd.tail(sequence.slot)));
    CHECK(std::equal(alone.state(7), alone.state(8), crowd.state(sequence.slot)));
  }
  copy_slot(layer, expected, 8, 7);
  copy_slot(layer, crowd, 8, 7);
  CHECK(near_all(crowd.convolution, expected.convolution));
  CHECK(near_all(crowd.matrix, expected.matrix));
  for (const int64_t slot : {8}) {
    States copy = before;
    CHECK(std::equal(copy.tail(slot), copy.tail(slot + 1), crowd.tail(slot)));
    CHECK(std::equal(copy.state(slot), copy.state(slot + 1), crowd.state(slot)));
  }
}

template <typename Body>
bool throws(const Body& body) {
  try {
    body();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

void check_errors() {
  using Snapshots = std::vector<StateStep::Snapshot>;
  const auto step = [](std::vector<int32_t> starts, std::vector<int32_t> sources, std::vector<int32_t> slots,
                       Snapshots snapshots) { return StateStep(starts, sources, slots, std::move(snapshots)); };
  CHECK(!throws([&] { step({0, 1, 3}, {0, 4}, {0, 1}, {{1, 1, 2}, {1, 2, 3}}); }));
  CHECK(throws([&] { step({0}, {}, {}, {}); }));
  CHECK(throws([&] { step({0, 1}, {0, 1}, {0, 1}, {}); }));
  CHECK(throws([&] { step({0, 2, 1}, {0, 1}, {0, 1}, {}); }));
  CHECK(throws([&] { step({0, 1, 2}, {0, 0}, {0, 1}, {}); }));
  CHECK(throws([&] { step({0, 1, 2}, {0, 1}, {1, 1}, {}); }));
  CHECK(throws([&] { step({0, 1, 2}, {0, 1}, {0, 1}, {{0, 1, 1}}); }));
  CHECK(throws([&] { step({0, 1, 2}, {0, 1}, {0, 1}, {{0, 2, 2}}); }));
  CHECK(throws([&] { step({0, 1, 2}, {0, 1}, {0, 1}, {{1, 1, 2}, {0, 1, 3}}); }));
  CHECK(throws([&] { step({0, 1}, {0}, {0}, {{0, 1, -1}}); }));
  CHECK(throws([&] { step({0, 1}, {-2}, {0}, {}); }));
  CHECK(throws([] { Convolution(std::vector<float>(16), {}, 8, false); }));
  CHECK(throws([] { Convolution(std::vector<float>(7), {}, 2, false); }));
  Random random(1);
  const ShortLayer layer(4, 3, false, random);
  States states = layer.random_states(random);
  CHECK(throws([&] { run(layer, {{1, 0, kSlots, {}}}, random.normals(layer.width), states); }));
}

}  // namespace

void test_recurrence() {
  subject() = "errors of recurrences";
  check_errors();
  Random random(11);
  for (const int64_t channels : sizes({5, 64, 200}, {200}))
    for (const int64_t taps : sizes({2, 3, 4, 5, 6, 7}, {3, 7})) {
      subject() = "short convolution, channels=" + std::to_string(channels) + ", width=" + std::to_string(taps);
      check_layer(ShortLayer(channels, taps, taps == 3, random), random);
    }
  struct Shape {
    int64_t heads, key_heads, key_size, value_size;
  };
  int64_t taps = 2;
  for (const Shape& s : {Shape{4, 2, 16, 24}, {2, 2, 128, 64}, {3, 1, 7, 5}, {6, 2, 8, 40}, {1, 1, 256, 33}, {2, 1, 64, 152}})
    for (const NormKind norm : {NormKind::before_gate, NormKind::after_gate, NormKind::none}) {
      if (kOnlyRaces && norm != NormKind::before_gate) break;
      for (const StateRule rule : {StateRule::add, StateRule::delta, StateRule::channel_delta}) {
        subject() = "recurrence, heads=" + std::to_string(s.heads) + ", key_size=" + std::to_string(s.key_size) +
                    ", value_size=" + std::to_string(s.value_size) + ", rule=" + std::to_string(static_cast<int>(rule));
        const bool is_delta = rule != StateRule::add;
        const int64_t group = is_delta ? s.value_size : s.heads * s.value_size;
        const MatrixRecurrence::Sizes sizes = {is_delta, s.heads, s.key_heads, s.key_size, s.value_size,
                                               norm == NormKind::none, group, rule == StateRule::channel_delta};
        check_layer(MatrixLayer(sizes, taps, norm, norm == NormKind::after_gate, random), random);
        taps = taps == 4 ? 2 : taps + 1;
      }
    }
  Pool::get().set_num_threads(3);
}

}  // namespace chairlift::test
