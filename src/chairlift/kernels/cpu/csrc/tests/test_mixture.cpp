#include <algorithm>
#include <cmath>
#include <numeric>

#include "linear/mixture.h"
#include "runtime/pool.h"
#include "tests/check.h"

namespace chairlift::test {
namespace {

constexpr int64_t kInputs = 33, kInner = 20, kRouted = 27;

// A layer of floats with its values.
struct Layer {
  Layer(int64_t outputs, int64_t inputs, Prologue prologue, Random& random)
      : inputs(inputs), values(random.normals(outputs * inputs, 0.3f)) {
    auto matrix = std::make_shared<PackedMatrix>(WeightFormat::f32, outputs, inputs);
    matrix->pack_floats(0, outputs, values.data(), inputs);
    linear = std::make_shared<Linear>(std::vector<std::shared_ptr<const PackedMatrix>>{matrix}, std::vector<float>{},
                                      prologue, std::vector<float>{}, std::vector<float>{}, 0.0f);
  }

  std::vector<double> of(const std::vector<double>& x) const {
    std::vector<double> y(values.size() / static_cast<size_t>(inputs));
    for (size_t o = 0; o < y.size(); ++o)
      for (size_t i = 0; i < x.size(); ++i) y[o] += values[o * x.size() + i] * x[i];
    return y;
  }

  int64_t inputs;
  std::vector<float> values;
  std::shared_ptr<Linear> linear;
};

std::vector<double> silu_and_mul(const std::vector<double>& rows) {
  std::vector<double> y(rows.size() / 2);
  for (size_t i = 0; i < y.size(); ++i) y[i] = rows[i] / (1 + std::exp(-rows[i])) * rows[y.size() + i];
  return y;
}

struct Experts {
  Experts(int64_t count, Random& random) : router(count, kRouted, Prologue::none, random) {
    for (int64_t i = 0; i < count; ++i) {
      up.emplace_back(2 * kInner, kInputs, Prologue::none, random);
      down.emplace_back(kInputs, kInner, Prologue::silu_and_mul, random);
    }
  }

  Mixture mixture(const Routing& routing) const {
    std::vector<Mixture::Expert> experts;
    for (size_t i = 0; i < up.size(); ++i) experts.push_back({up[i].linear, down[i].linear});
    return {router.linear, experts, routing};
  }

  // Moves the experts of closed groups behind the others. A group is open if few groups have a larger score.
  template <typename Rank>
  void close_groups(std::vector<size_t>& order, const Rank& rank, const Routing& routing) const {
    const size_t size = up.size() / static_cast<size_t>(routing.num_groups);
    std::vector<double> scores;
    for (size_t first = 0; first < up.size(); first += size) {
      std::vector<double> ranks;
      for (size_t expert = first; expert < first + size; ++expert) ranks.push_back(rank(expert));
      std::sort(ranks.rbegin(), ranks.rend());
      scores.push_back(ranks[0] + (routing.has_sigmoid && size > 1 ? ranks[1] : 0));
    }
    const auto is_open = [&](size_t expert) {
      const double own = scores[expert / size];
      return std::count_if(scores.begin(), scores.end(), [&](double s) { return s > own; }) < routing.groups_per_token;
    };
    std::stable_partition(order.begin(), order.end(), is_open);
  }

  std::vector<double> of(const std::vector<double>& routed, const std::vector<double>& x, const Routing& routing) const {
    std::vector<double> scores = router.of(routed);
    double all = 0;
    for (const double score : scores) all += std::exp(score);
    for (double& score : scores) score = routing.has_sigmoid ? 1 / (1 + std::exp(-score)) : std::exp(score) / all;
    const auto rank = [&](size_t expert) {
      return scores[expert] + (routing.selection_bias.empty() ? 0 : routing.selection_bias[expert]);
    };
    std::vector<size_t> order(scores.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return rank(a) > rank(b); });
    close_groups(order, rank, routing);
    const auto chosen = static_cast<size_t>(routing.experts_per_token);
    double total = routing.sum_eps;
    for (size_t i = 0; i < chosen; ++i) total += scores[order[i]];
    total = routing.of_chosen ? std::max<double>(total, routing.sum_min) : 1;
    std::vector<double> sum(x.size());
    for (size_t i = 0; i < chosen; ++i) {
      const std::vector<double> y = down[order[i]].of(silu_and_mul(up[order[i]].of(x)));
      for (size_t k = 0; k < y.size(); ++k) sum[k] += routing.scale * scores[order[i]] / total * y[k];
    }
    return sum;
  }

  Layer router;
  std::vector<Layer> up, down;
};

void check_case(int64_t num_experts, const Routing& routing, int64_t rows, Random& random) {
  subject() = "mixture of " + std::to_string(num_experts) + " experts, " + std::to_string(rows) + " rows";
  const Experts experts(num_experts, random);
  const Mixture mixture = experts.mixture(routing);
  const int64_t stride = kInputs + 3;
  const std::vector<float> x = random.normals(rows * stride);
  const std::vector<float> routed = random.normals(rows * (kRouted + 1));
  std::vector<float> out(static_cast<size_t>(rows * stride), 7.0f);
  mixture(routed.data(), kRouted + 1, x.data(), stride, rows, out.data(), stride);
  for (int64_t row = 0; row < rows; ++row) {
    const float* const own = x.data() + row * stride;
    const float* const own_routed = routed.data() + row * (kRouted + 1);
    const std::vector<double> expected = experts.of({own_routed, own_routed + kRouted}, {own, own + kInputs}, routing);
    for (int64_t i = 0; i < kInputs; ++i)
      CHECK(near(out[static_cast<size_t>(row * stride + i)], expected[static_cast<size_t>(i)], 1e-4));
    for (int64_t i = kInputs; i < stride; ++i) CHECK(out[static_cast<size_t>(row * stride + i)] == 7.0f);
    std::vector<float> alone(kInputs);
    mixture(own_routed, kRouted, own, kInputs, 1, alone.data(), kInputs);
    CHECK(std::equal(alone.begin(), alone.end(), out.begin() + row * stride));
  }
}

}  // namespace

void test_mixture() {
  Random random(5);
  for (const int64_t rows : sizes({1, 5, 9, 40}, {9, 40}))
    for (const int64_t num_experts : sizes({1, 3, 7}, {7}))
      for (const int64_t chosen : {int64_t{1}, num_experts})
        for (const bool of_chosen : {false, true}) {
          Pool::get().set_num_threads(static_cast<int>(rows % 3 + 1));
          check_case(num_experts, {chosen, of_chosen}, rows, random);
          const std::vector<float> bias = random.normals(num_experts, 0.5f);
          for (const bool has_sigmoid : {false, true})
            for (const float least : {0.0f, 0.7f})
              check_case(num_experts, {chosen, of_chosen, has_sigmoid, 0.1f, least, 2.5f, {}, bias}, rows, random);
          const std::vector<float> biases = random.normals(12, 0.5f);
          check_case(12, {std::min<int64_t>(chosen, 6), of_chosen, true, 0.0f, 0.0f, 1.0f, {}, biases, 4, 2}, rows, random);
          check_case(12, {std::min<int64_t>(chosen, 3), of_chosen, false, 0.0f, 0.0f, 1.0f, {}, {}, 4, 1}, rows, random);
        }
  Pool::get().set_num_threads(3);
}

}  // namespace chairlift::test
