#include "lora/lora.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "tests/check.h"

namespace chairlift::test {
namespace {

constexpr int64_t kMaxRank = 9;
const std::vector<std::vector<int32_t>> kRanks = {{9, 0, 3}, {1, 4, 8}};  // by part and slot

// The matrices of three adapters for consecutive outputs of a layer.
struct Matrices {
  Matrices(int64_t inputs, int64_t outputs, const std::vector<int32_t>& ranks, Random& random)
      : outputs(outputs),
        ranks(ranks),
        a(random.normals(3 * kMaxRank * inputs, 0.3f)),
        b(random.normals(3 * kMaxRank * outputs, 0.3f)) {}

  LoraLinear::Part part() const { return {a.data(), b.data(), ranks.data(), outputs}; }

  // The value that is added to output o of a row y of the inputs.
  double of(const std::vector<double>& y, int64_t slot, int64_t o) const {
    const auto inputs = static_cast<int64_t>(y.size());
    double sum = 0;
    for (int64_t j = 0; j < ranks[static_cast<size_t>(slot)]; ++j) {
      double h = 0;
      for (int64_t i = 0; i < inputs; ++i)
        h += a[static_cast<size_t>((slot * kMaxRank + j) * inputs + i)] * y[static_cast<size_t>(i)];
      sum += h * b[static_cast<size_t>((slot * kMaxRank + j) * outputs + o)];
    }
    return sum;
  }

  int64_t outputs;
  std::vector<int32_t> ranks;
  std::vector<float> a, b;
};

void check_case(Prologue prologue, int64_t rows, int64_t inputs, int64_t outputs, Random& random) {
  subject() = "lora, rows=" + std::to_string(rows) + ", inputs=" + std::to_string(inputs) +
              ", outputs=" + std::to_string(outputs);
  const bool gated = is_gated(prologue);
  auto matrix = std::make_shared<PackedMatrix>(WeightFormat::f32, 2 * outputs, inputs);
  auto base = std::make_shared<Linear>(std::vector<std::shared_ptr<const PackedMatrix>>{matrix}, std::vector<float>{},
                                       prologue, std::vector<float>{}, std::vector<float>{}, 0.0f);
  const std::vector<Matrices> parts = {{inputs, outputs, kRanks[0], random}, {inputs, outputs, kRanks[1], random}};
  auto batch = std::make_shared<LoraBatch>();
  const LoraLinear lora(batch, base, kMaxRank, {parts[0].part(), parts[1].part()});
  const int64_t width = gated ? 2 * inputs : inputs, stride = 2 * outputs + 3;
  const std::vector<float> x = random.normals(rows * width), before = random.normals(rows * stride);
  std::vector<int64_t> slots(static_cast<size_t>(rows));
  for (int64_t& slot : slots) slot = random.between(-1, 2);
  std::vector<float> out = before;
  batch->set_slots(slots.data(), rows);
  lora(x.data(), width, rows, out.data(), stride);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t slot = slots[static_cast<size_t>(row)];
    const float* const own = x.data() + row * width;
    std::vector<double> y(own, own + inputs);
    if (gated)
      for (int64_t i = 0; i < inputs; ++i) {
        const double gate = own[i];
        y[static_cast<size_t>(i)] = gate / (1 + std::exp(-gate)) * own[inputs + i];
      }
    for (int64_t column = 0; column < stride; ++column) {
      const auto at = static_cast<size_t>(row * stride + column);
      const bool is_output = slot >= 0 && column < 2 * outputs;
      const double added = is_output ? parts[static_cast<size_t>(column / outputs)].of(y, slot, column % outputs) : 0;
      CHECK(is_output ? near(out[at], before[at] + added, 1e-3) : out[at] == before[at]);
    }
    // The bits of a row do not depend on the others.
    std::vector<float> alone(before.begin() + row * stride, before.begin() + (row + 1) * stride);
    LoraBatch single;
    single.set_slots(&slots[static_cast<size_t>(row)], 1);
    *batch = single;
    lora(own, width, 1, alone.data(), stride);
    CHECK(std::equal(alone.begin(), alone.end(), out.begin() + row * stride));
  }
}

}  // namespace

void test_lora() {
  Random random(7);
  for (const Prologue prologue : {Prologue::none, Prologue::silu_and_mul})
    for (const int64_t rows : sizes({1, 3, 8, 30}, {3, 30}))
      for (const int64_t inputs : sizes({1, 16, 33, 72}, {33}))
        for (const int64_t outputs : sizes({1, 16, 31, 50}, {50})) check_case(prologue, rows, inputs, outputs, random);
}

}  // namespace chairlift::test
