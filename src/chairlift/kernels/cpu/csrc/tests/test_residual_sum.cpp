#include <algorithm>
#include <cmath>

#include "linear/residual_sum.h"
#include "tests/check.h"

namespace chairlift::test {
namespace {

constexpr float kEps = 1e-3f;
constexpr Prologue kKinds[] = {Prologue::none, Prologue::rms_norm, Prologue::layer_norm};

struct NormCase {
  NormCase(Prologue kind, int64_t size, Random& random)
      : kind(kind), weight(random.normals(is_norm(kind) ? size : 0)),
        bias(random.normals(kind == Prologue::layer_norm ? size : 0)) {}

  Norm norm() const { return {kind, weight, bias, kEps}; }

  // The norm of a row, in double.
  std::vector<double> of(std::vector<double> x) const {
    if (kind == Prologue::none) return x;
    const auto n = static_cast<double>(x.size());
    double mean = 0, squares = 0;
    if (kind == Prologue::layer_norm)
      for (const double value : x) mean += value / n;
    for (const double value : x) squares += (value - mean) * (value - mean) / n;
    for (size_t i = 0; i < x.size(); ++i)
      x[i] = (x[i] - mean) / std::sqrt(squares + kEps) * weight[i] + (bias.empty() ? 0.0f : bias[i]);
    return x;
  }

  Prologue kind;
  std::vector<float> weight, bias;
};

void check_case(const NormCase& after, const NormCase& of_sum, int64_t rows, int64_t size, Random& random) {
  subject() = "residual sum of " + std::to_string(rows) + " x " + std::to_string(size);
  constexpr float kMultiplier = 0.3f;
  const int64_t stride = size + 3;
  std::vector<float> stream = random.normals(rows * stride), branch = random.normals(rows * size);
  const std::vector<float> stream_before = stream, branch_before = branch;
  ResidualSum(after.norm(), of_sum.norm(), kMultiplier)({stream.data(), stride, branch.data(), size, rows, size});
  for (int64_t row = 0; row < rows; ++row) {
    const float* const own = branch_before.data() + row * size;
    std::vector<double> sum = after.of({own, own + size});
    for (int64_t i = 0; i < size; ++i)
      sum[static_cast<size_t>(i)] =
          sum[static_cast<size_t>(i)] * kMultiplier + stream_before[static_cast<size_t>(row * stride + i)];
    const std::vector<double> expected = of_sum.of(sum);
    for (int64_t i = 0; i < size; ++i)
      CHECK(near(stream[static_cast<size_t>(row * stride + i)], expected[static_cast<size_t>(i)], 1e-4));
    for (int64_t i = size; i < stride; ++i) {
      const auto at = static_cast<size_t>(row * stride + i);
      CHECK(stream[at] == stream_before[at]);
    }
  }
}

void check_gates(GateActivation activation, int64_t num_gates, int64_t shared, int64_t rows, Random& random) {
  const int64_t size = num_gates * shared, stride = size + 3, width = num_gates + 2;
  subject() = std::to_string(num_gates) + " gates of " + std::to_string(rows) + " x " + std::to_string(size);
  std::vector<float> x = random.normals(rows * stride), gates = random.normals(rows * width);
  for (float& logit : gates) logit *= 12;  // softplus is linear above 20
  const std::vector<float> before = x;
  multiply_by_gates({x.data(), stride, gates.data(), width, rows, size, num_gates, activation});
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < stride; ++i) {
      const auto at = static_cast<size_t>(row * stride + i);
      const double logit = gates[static_cast<size_t>(row * width + std::min(i, size - 1) / shared)];
      const double factor =
          activation == GateActivation::sigmoid ? 1 / (1 + std::exp(-logit)) : std::log1p(std::exp(logit));
      CHECK(i < size ? near(x[at], before[at] * factor, 1e-5) : x[at] == before[at]);
    }
}

}  // namespace

void test_residual_sum() {
  Random random(5);
  for (const Prologue after : kKinds)
    for (const Prologue of_sum : kKinds)
      for (const int64_t rows : sizes({1, 8, 9, 40}, {9, 40}))
        for (const int64_t size : sizes({1, 5, 16, 33, 100}, {33})) {
          // A variance near zero would amplify the rounding of floats.
          if (size == 1 && (after == Prologue::layer_norm || of_sum == Prologue::layer_norm)) continue;
          check_case({after, size, random}, {of_sum, size, random}, rows, size, random);
        }
  for (const GateActivation activation : {GateActivation::sigmoid, GateActivation::softplus})
    for (const int64_t rows : sizes({1, 9, 40}, {40}))
      for (const int64_t gates : sizes({1, 5, 16, 33}, {5}))
        for (const int64_t shared : sizes({1, 4, 33}, {33})) check_gates(activation, gates, shared, rows, random);
}

}  // namespace chairlift::test
