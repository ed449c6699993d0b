#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "attention/attention.h"
#include "runtime/halves.h"
#include "runtime/isa.h"
#include "runtime/pool.h"
#include "tests/check.h"

#define CHAIRLIFT_ISA portable_vectors
#define CHAIRLIFT_SIMD "simd/portable.h"
#include "simd/simd.h"

namespace chairlift::test {
namespace {

struct Sequence {
  int num_queries;  // the number of its last tokens that are in this step
  int seq_len;
};

struct Case {
  AttentionShape shape;
  std::vector<Sequence> sequences;
  int block_size;
  int64_t window;
  bool rotates, norms;
  bool scales_queries = false, has_sinks = false, keys_are_values = false;
  int64_t num_shared = 0;  // the first keys of all sequences, which are in the blocks of the first one: a multiple of block_size

  std::string name() const {
    std::string text = std::to_string(shape.num_heads) + "/" + std::to_string(shape.num_kv_heads) + " heads of " +
                       std::to_string(shape.head_dim) + ", kv " + std::to_string(static_cast<int>(shape.kv_type)) +
                       ", blocks of " + std::to_string(block_size) + ", window " + std::to_string(window) + ":";
    for (const Sequence& s : sequences) text += " " + std::to_string(s.num_queries) + "@" + std::to_string(s.seq_len);
    return text;
  }
};

// The KV memory of one layer. Unwritten values (scales for int8) are NaN, so that reading one changes the result.
struct Memory {
  Memory(const Case& c, int64_t num_blocks) : shape(c.shape), block_size(c.block_size), keys_are_values(c.keys_are_values) {
    const int64_t rows = num_blocks * shape.num_kv_heads * block_size;
    const int64_t value_bytes = shape.kv_type == KVType::f32 ? 4 : shape.kv_type == KVType::bf16 ? 2 : 1;
    key.assign(static_cast<size_t>(rows * shape.head_dim * value_bytes), 0xff);
    value = key;
    const float nan = std::numeric_limits<float>::quiet_NaN();
    key_scale.assign(static_cast<size_t>(shape.kv_type == KVType::int8 ? rows : 0), nan);
    value_scale = key_scale;
  }

  PagedKV paged() {
    if (keys_are_values) return {key.data(), key.data(), key_scale.data(), key_scale.data(), block_size};
    return {key.data(), value.data(), key_scale.data(), value_scale.data(), block_size};
  }

  int64_t row(int64_t slot, int head) const {
    return (slot / block_size * shape.num_kv_heads + head) * block_size + slot % block_size;
  }

  float at(const std::vector<uint8_t>& values, const std::vector<float>& scales, int64_t row, int i) const {
    const auto index = static_cast<size_t>(row * shape.head_dim + i);
    if (shape.kv_type == KVType::int8)
      return static_cast<float>(static_cast<int8_t>(values[index])) * scales[static_cast<size_t>(row)];
    if (shape.kv_type == KVType::f32) {
      float x;
      std::memcpy(&x, values.data() + 4 * index, 4);
      return x;
    }
    uint16_t brain;
    std::memcpy(&brain, values.data() + 2 * index, 2);
    return brain_to_float(brain);
  }
  float key_at(int64_t slot, int head, int i) const { return at(key, key_scale, row(slot, head), i); }
  float value_at(int64_t slot, int head, int i) const {
    return keys_are_values ? key_at(slot, head, i) : at(value, value_scale, row(slot, head), i);
  }

  AttentionShape shape;
  int block_size;
  bool keys_are_values;
  std::vector<uint8_t> key, value;
  std::vector<float> key_scale, value_scale;
};

// y += factor * x.
UNCHECKED void add_scaled(double factor, const double* x, int64_t n, double* y) {
  for (int64_t i = 0; i < n; ++i) y[i] += factor * x[i];
}

// One layer of a model: its inputs, its memory and its block tables.
class Layer {
 public:
  Layer(const Case& c, Random& random) : case_(c), memory_(c, count_blocks(c)) {
    const int64_t num_blocks = count_blocks(c);
    blocks_.resize(static_cast<size_t>(num_blocks));
    std::iota(blocks_.begin(), blocks_.end(), 0);
    for (int64_t i = num_blocks - 1; i > 0; --i)
      std::swap(blocks_[static_cast<size_t>(i)], blocks_[static_cast<size_t>(random.below(i + 1))]);
    int64_t longest = 0, first_block = 0;
    for (const Sequence& s : c.sequences) {
      longest = std::max<int64_t>(longest, s.seq_len);
      first_block_.push_back(first_block);
      first_block += (s.seq_len + c.block_size - 1) / c.block_size;
      tokens_.push_back(random.normals(s.seq_len * c.shape.qkv_width()));
      if (tokens_.size() > 1) std::copy_n(tokens_[0].begin(), c.num_shared * c.shape.qkv_width(), tokens_.back().begin());
    }
    cos_sin_.resize(static_cast<size_t>(longest * c.shape.rotary_dim));
    const int half = c.shape.rotary_dim / 2;
    for (int64_t p = 0; p < longest; ++p) {
      for (int i = 0; i < half; ++i) {
        const double angle = static_cast<double>(p) * std::pow(100.0, -i / static_cast<double>(half));
        cos_sin_[static_cast<size_t>(p * c.shape.rotary_dim + i)] = static_cast<float>(std::cos(angle));
        cos_sin_[static_cast<size_t>(p * c.shape.rotary_dim + half + i)] = static_cast<float>(std::sin(angle));
      }
    }
    for (int64_t p = 0; p < longest; ++p) query_scales_.push_back(1.0f + 0.01f * static_cast<float>(p / 7));
    q_norm_ = random.normals(c.norms ? c.shape.head_dim : 0);
    k_norm_ = random.normals(c.norms ? c.shape.head_dim : 0);
    sinks_ = random.normals(c.shape.num_heads, 3.0f);
  }

  // Computes tokens first[i] to end[i] of each sequence as one step: [tokens][num_heads * head_dim].
  std::vector<float> step(const std::vector<int>& first, const std::vector<int>& end, int64_t window) {
    StepShape shape;
    shape.block_size = case_.block_size;
    shape.query_start_loc = {0};
    std::vector<float> qkv;
    std::vector<int64_t> positions;
    for (size_t i = 0; i < case_.sequences.size(); ++i) {
      shape.max_blocks = std::max<int64_t>(shape.max_blocks, (end[i] + case_.block_size - 1) / case_.block_size);
      for (int token = first[i]; token < end[i]; ++token) {
        const float* own = tokens_[i].data() + token * case_.shape.qkv_width();
        qkv.insert(qkv.end(), own, own + case_.shape.qkv_width());
        positions.push_back(token);
        shape.slot_mapping.push_back(i > 0 && token < case_.num_shared ? -1 : slot(i, token));
      }
      shape.query_start_loc.push_back(static_cast<int32_t>(positions.size()));
      shape.seq_lens.push_back(end[i]);
    }
    for (size_t i = 0; i < case_.sequences.size(); ++i)
      for (int64_t b = 0; b < shape.max_blocks; ++b)
        shape.block_tables.push_back(b * case_.block_size < end[i] ? block(i, b) : -1);
    qkv.shrink_to_fit();
    AttentionShape attention = case_.shape;
    attention.q_norm = case_.norms ? q_norm_.data() : nullptr;
    attention.k_norm = case_.norms ? k_norm_.data() : nullptr;
    attention.norm_eps = 1e-6f;
    attention.sinks = case_.has_sinks ? sinks_.data() : nullptr;
    const auto out_width = static_cast<size_t>(attention.num_heads * attention.head_dim);
    std::vector<float> out(positions.size() * out_width, std::numeric_limits<float>::quiet_NaN());
    AttentionStep step(std::move(shape));
    attention_forward(attention, step, {memory_.paged(), qkv.data(), positions.data(),
                                        case_.rotates ? cos_sin_.data() : nullptr,
                                        case_.scales_queries ? query_scales_.data() : nullptr, window,
                                        out.data()});
    return out;
  }

  // A head of a token after norm and rotary embedding, in double. Heads are ordered: queries, keys, values.
  std::vector<double> head(size_t sequence, int token, int head) const {
    const AttentionShape& shape = case_.shape;
    const auto n = static_cast<size_t>(shape.head_dim);
    const float* x = tokens_[sequence].data() + token * shape.qkv_width() + head * shape.head_dim;
    std::vector<double> y(x, x + n);
    if (head >= shape.num_heads + shape.num_kv_heads) return y;
    const auto norm = [&] {
      double squares = 1e-6;
      for (const double value : y) squares += value * value / static_cast<double>(n);
      const std::vector<float>& weight = head < shape.num_heads ? q_norm_ : k_norm_;
      for (size_t i = 0; i < n; ++i) y[i] *= weight[i] / std::sqrt(squares);
    };
    if (case_.norms && !shape.norms_rotated) norm();
    if (case_.rotates) {
      const auto half = static_cast<size_t>(shape.rotary_dim) / 2;
      const float* turn = cos_sin_.data() + static_cast<size_t>(token) * 2 * half;
      for (size_t i = 0; i < half; ++i) {
        const double a = y[i], b = y[half + i];
        y[i] = a * turn[i] - b * turn[half + i];
        y[half + i] = b * turn[i] + a * turn[half + i];
      }
    }
    if (case_.norms && shape.norms_rotated) norm();
    return y;
  }

  // The keys or values of a sequence in memory: [seq_len][head_dim].
  std::vector<double> keys_of(size_t sequence, int kv_head) const {
    return in_memory(sequence, [&](int64_t slot, int i) { return memory_.key_at(slot, kv_head, i); });
  }
  std::vector<double> values_of(size_t sequence, int kv_head) const {
    return in_memory(sequence, [&](int64_t slot, int i) { return memory_.value_at(slot, kv_head, i); });
  }

  // Softmax attention of one head of a token over the keys and values in memory.
  std::vector<double> attended(size_t sequence, int token, int head, const std::vector<double>& keys,
                               const std::vector<double>& values) const {
    const AttentionShape& shape = case_.shape;
    const std::vector<double> query = this->head(sequence, token, head);
    const int first = case_.window ? std::max<int>(0, token - static_cast<int>(case_.window) + 1) : 0;
    std::vector<double> scores, out(static_cast<size_t>(shape.head_dim), 0.0);
    for (int key = first; key <= token; ++key) {
      double score = dot(query.data(), keys.data() + key * shape.head_dim, shape.head_dim);
      score *= shape.scale * (case_.scales_queries ? query_scales_[static_cast<size_t>(token)] : 1.0f);
      scores.push_back(shape.soft_cap > 0 ? shape.soft_cap * std::tanh(score / shape.soft_cap) : score);
    }
    const double largest = *std::max_element(scores.begin(), scores.end());
    double sum = case_.has_sinks ? std::exp(sinks_[static_cast<size_t>(head)] - largest) : 0;
    for (double& score : scores) sum += score = std::exp(score - largest);
    for (int key = first; key <= token; ++key)
      add_scaled(scores[static_cast<size_t>(key - first)] / sum, values.data() + key * shape.head_dim, shape.head_dim, out.data());
    return out;
  }

  int64_t slot(size_t sequence, int token) const {
    return static_cast<int64_t>(block(sequence, token / case_.block_size)) * case_.block_size +
           token % case_.block_size;
  }
  const Memory& memory() const { return memory_; }

 private:
  template <typename At>
  std::vector<double> in_memory(size_t sequence, const At& at) const {
    std::vector<double> found;
    for (int token = 0; token < case_.sequences[sequence].seq_len; ++token)
      for (int i = 0; i < case_.shape.head_dim; ++i) found.push_back(at(slot(sequence, token), i));
    return found;
  }
  static int64_t count_blocks(const Case& c) {
    int64_t count = 0;
    for (const Sequence& s : c.sequences) count += (s.seq_len + c.block_size - 1) / c.block_size;
    return count;
  }
  int32_t block(size_t sequence, int64_t index) const {
    const bool is_shared = index * case_.block_size < case_.num_shared;
    return blocks_[static_cast<size_t>(first_block_[is_shared ? 0 : sequence] + index)];
  }

  Case case_;
  Memory memory_;
  std::vector<int32_t> blocks_;
  std::vector<int64_t> first_block_;
  std::vector<std::vector<float>> tokens_;  // one per sequence: [seq_len][qkv_width]
  std::vector<float> cos_sin_, query_scales_, q_norm_, k_norm_, sinks_;
};

// Checks the written keys and values, up to the rounding of their type.
void check_memory(const Case& c, const Layer& layer) {
  const AttentionShape& shape = c.shape;
  for (size_t i = 0; i < c.sequences.size(); ++i) {
    for (int token = 0; token < c.sequences[i].seq_len; token += 3) {
      for (int h = 0; h < shape.num_kv_heads; ++h) {
        const std::vector<double> key = layer.head(i, token, shape.num_heads + h);
        const std::vector<double> value =
            c.keys_are_values ? key : layer.head(i, token, shape.num_heads + shape.num_kv_heads + h);
        double top = 0;
        for (size_t d = 0; d < key.size(); ++d) top = std::max({top, std::fabs(key[d]), std::fabs(value[d])});
        const double rounding = shape.kv_type == KVType::f32 ? 1e-5 : 1.0 / 250;
        for (int d = 0; d < shape.head_dim; ++d) {
          CHECK(near(layer.memory().key_at(layer.slot(i, token), h, d), key[static_cast<size_t>(d)], rounding * top));
          CHECK(near(layer.memory().value_at(layer.slot(i, token), h, d), value[static_cast<size_t>(d)],
                     rounding * top));
        }
      }
    }
  }
}

void check_case(const Case& c, Random& random) {
  subject() = c.name();
  Layer layer(c, random);
  std::vector<int> none(c.sequences.size(), 0), first, end;
  for (const Sequence& s : c.sequences) {
    first.push_back(s.seq_len - s.num_queries);
    end.push_back(s.seq_len);
  }
  // Writes the tokens before those of the step, whose outputs are not used.
  layer.step(none, first, 1);
  const std::vector<float> out = layer.step(first, end, c.window);
  check_memory(c, layer);
  const bool is_bf16_isa = chairlift::is_bf16(isa().linear.products[static_cast<int>(WeightFormat::bf16)].layout);
  const bool uses_tiles = is_bf16_isa && c.shape.kv_type != KVType::f32;
  // Queries and weights in bfloat16 change outputs by about 1 %, and large scores by more.
  const double tolerance = (uses_tiles ? 3e-2 : 3e-5) * std::max(1.0, c.shape.scale / 0.2);
  const int out_width = c.shape.num_heads * c.shape.head_dim;
  const float* rows = out.data();
  for (size_t i = 0; i < c.sequences.size(); rows += (end[i] - first[i]) * out_width, ++i) {
    for (int kv_head = 0; kv_head < c.shape.num_kv_heads; ++kv_head) {
      const std::vector<double> keys = layer.keys_of(i, kv_head), values = layer.values_of(i, kv_head);
      for (int token = first[i]; token < end[i]; ++token) {
        if (token + 20 < end[i] && token % 5 != 0) continue;
        for (int head = kv_head * c.shape.group(); head < (kv_head + 1) * c.shape.group(); ++head) {
          const std::vector<double> expected = layer.attended(i, token, head, keys, values);
          const float* const row = rows + (token - first[i]) * out_width + head * c.shape.head_dim;
          for (int d = 0; d < c.shape.head_dim; ++d) CHECK(near(row[d], expected[static_cast<size_t>(d)], tolerance));
        }
      }
    }
  }
  // Another number of threads divides the work differently, and so does a step with more tokens.
  Pool& pool = Pool::get();
  pool.set_num_threads(pool.num_threads() % 3 + 1);
  pool.set_tile_order(static_cast<uint64_t>(random.between(1, 1000)));
  CHECK(layer.step(first, end, c.window) == out);
  std::vector<int> earlier;
  for (const int token : first) earlier.push_back(std::max(0, token - 40));
  const std::vector<float> longer = layer.step(earlier, end, c.window);
  pool.set_tile_order(0);
  const float* of_longer = longer.data();
  const float* of_step = out.data();
  for (size_t i = 0; i < c.sequences.size(); ++i) {
    const auto count = static_cast<size_t>(c.sequences[i].num_queries * out_width);
    of_longer += (first[i] - earlier[i]) * out_width;
    CHECK(std::memcmp(of_longer, of_step, count * sizeof(float)) == 0);
    of_longer += count;
    of_step += count;
  }
}

// The exponential of weights that are rounded to bfloat16.
void check_exponential() {
  subject() = "exponential";
  namespace vectors = portable_vectors;
  const auto exp_of = [](float x) {
    float lanes[vectors::kLanes];
    vectors::store(lanes, vectors::exp_to_bf16(vectors::set1(x)));
    return static_cast<double>(lanes[0]);
  };
  for (float x = -87.25f; x < 0; x += 0.0078125f) CHECK(std::fabs(exp_of(x) / std::exp(static_cast<double>(x)) - 1) < 1e-5);
  CHECK(exp_of(0.0f) == 1);
  CHECK(exp_of(-88.0f) == 0);
  CHECK(exp_of(-std::numeric_limits<float>::infinity()) == 0);
}

// Checks that rows before their sequence see no key, and that slot -1 writes nothing.
void check_padding() {
  subject() = "padding";
  const AttentionShape shape = {2, 1, 8, 1.0f, KVType::f32, nullptr, nullptr, 0.0f};
  std::vector<float> key(4 * 8, 1.0f), value = key, qkv(3 * 4 * 8, 2.0f), out(3 * 2 * 8, 5.0f);
  std::vector<float> kept = key;
  std::fill_n(kept.begin() + 8, 8, 2.0f);
  AttentionStep step({{0, 3}, {1}, {0}, {-1, -1, 1}, 1, 4});
  // The only token is at position 0, and its slot is not the one that it reads.
  attention_forward(shape, step, {{key.data(), value.data(), nullptr, nullptr, 4}, qkv.data(), nullptr, nullptr, nullptr,
                                  0, out.data()});
  CHECK(key == kept && value == kept);
  for (size_t i = 0; i < 2 * 2 * 8; ++i) CHECK(out[i] == 0.0f);
  for (size_t i = 2 * 2 * 8; i < out.size(); ++i) CHECK(out[i] == 1.0f);
}

}  // namespace

void test_attention() {
  check_exponential();
  check_padding();
  Random random(2);
  const std::vector<std::pair<int, int>> heads = {{1, 1}, {3, 1}, {4, 2}, {9, 3}, {16, 1}}, few_heads = {{1, 1}, {3, 1}, {4, 2}};
  const std::vector<std::vector<Sequence>> batches = {
      {{1, 1}},
      {{1, 63}, {1, 64}, {1, 65}},
      {{5, 5}, {1, 130}, {33, 70}},
      {{1, 511}, {1, 513}},
      {{70, 600}},
      {{1, 2}, {1, 1}, {2, 3}, {1, 40}, {1, 17}, {1, 90}, {1, 33}, {1, 8}, {1, 9}, {1, 10}, {1, 11}, {1, 12}},
  };
  for (const KVType type : {KVType::f32, KVType::bf16, KVType::int8}) {
    for (const std::vector<Sequence>& batch : batches) {
      const bool is_long = batch[0].seq_len > 500;
      for (int repetition = 0; repetition < (kOnlyRaces || is_long ? 1 : 2); ++repetition) {
        const int head_dim = is_long ? 32 : random.among<int>({4, 20, 32, 64});
        const auto [num_heads, num_kv_heads] = random.among(is_long ? few_heads : heads);
        Case c = {{num_heads, num_kv_heads, head_dim, 0.2f, type, nullptr, nullptr, 0.0f}, batch, 16, 0, false, false};
        c.block_size = random.among(std::vector<int>{1, 4, 16, 32});
        c.window = random.among(std::vector<int64_t>{0, 0, 1, 30, 520});
        c.rotates = random.below(2) == 1;
        c.norms = random.below(2) == 0;
        c.shape.norms_rotated = random.below(2) == 0;
        c.scales_queries = random.below(3) == 0;
        c.has_sinks = random.below(2) == 0;
        c.shape.rotary_dim = random.below(3) == 0 ? head_dim / 2 : head_dim;
        c.shape.soft_cap = random.among(std::vector<float>{0, 0, 2});
        check_case(c, random);
      }
    }
    for (const auto& [num_heads, num_kv_heads] : {std::pair{16, 1}, std::pair{9, 3}, std::pair{17, 1}})
      for (const int64_t window : sizes({0, 30}, {0}))
        check_case({{num_heads, num_kv_heads, 64, 0.2f, type, nullptr, nullptr, 0.0f}, {{1, 130}, {1, 65}}, 16, window, true, false}, random);
    // Scores so different that weights relative to those of earlier keys are large.
    check_case({{4, 2, 32, 2.0f, type, nullptr, nullptr, 0.0f}, {{70, 600}, {1, 200}}, 16, 0, false, false}, random);
    for (const int64_t num_shared : sizes({640, 512}, {640})) {
      Case shared = {{4, 2, 32, 0.2f, type, nullptr, nullptr, 0.0f}, {{1, 720}, {2, 700}, {1, 660}}, 16, 0, false, false};
      shared.num_shared = num_shared;
      check_case(shared, random);
    }
    Case latent = {{5, 1, kMaxHeadDim, 0.03f, type, nullptr, nullptr, 0.0f, 64}, {{1, 66}, {9, 20}}, 16, 0, true, false};
    latent.shape.kv_projections = 1;
    latent.keys_are_values = true;
    check_case(latent, random);
  }
}

}  // namespace chairlift::test
