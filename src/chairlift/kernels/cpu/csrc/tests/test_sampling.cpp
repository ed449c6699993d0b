#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>

#include "sampling/sampling.h"
#include "tests/check.h"

namespace chairlift::test {
namespace {

// Scratch memory of exactly the required size.
std::unique_ptr<uint8_t[]> scratch_for(int64_t n) {
  return std::unique_ptr<uint8_t[]>(new uint8_t[sampling_scratch_bytes(n)]);
}

std::vector<int64_t> by_logit(const std::vector<float>& logits) {
  std::vector<int64_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  return order;
}

// The weights of the tokens that may be drawn; the largest is 1. The filters are min_p, top_k and top_p, in this order,
// and keep or remove tokens with equal logits together, except that top_p keeps only the first ones that it needs.
std::vector<double> kept_weights(const std::vector<float>& logits, const DrawParams& params) {
  const std::vector<int64_t> order = by_logit(logits);
  const double largest = logits[static_cast<size_t>(order[0])];
  std::vector<double> weights;
  for (const float logit : logits) weights.push_back(std::exp((logit - largest) / params.temperature));
  double floor = params.min_p;
  if (params.top_k && params.top_k < static_cast<int64_t>(logits.size()))
    floor = std::max(floor, weights[static_cast<size_t>(order[static_cast<size_t>(params.top_k - 1)])]);
  double total = 0;
  for (double& weight : weights) total += weight = weight < floor * (1 - 1e-6) ? 0 : weight;
  if (params.top_p >= 1) return weights;
  double running = 0;
  for (const int64_t token : order) {
    double& weight = weights[static_cast<size_t>(token)];
    if (running >= params.top_p * total * (1 - 1e-9)) weight = 0;
    running += weight;
  }
  return weights;
}

// Checks that the drawn number is in the share of the token, up to rounding.
void check_draw(const std::vector<float>& logits, const DrawParams& params) {
  const auto n = static_cast<int64_t>(logits.size());
  const int64_t token = draw_token(logits.data(), n, params, scratch_for(n).get());
  CHECK(token >= 0 && token < n);
  const std::vector<double> weights = kept_weights(logits, params);
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  double before = 0;
  for (int64_t i = 0; i < token; ++i) before += weights[static_cast<size_t>(i)];
  const double own = weights[static_cast<size_t>(token)];
  CHECK(own > 0);
  CHECK(params.uniform * total >= before - 2e-3 * total);
  CHECK(params.uniform * total <= before + own + 2e-3 * total);
}

void check_logprobs(const std::vector<float>& logits, int64_t token, int64_t num_top) {
  const auto n = static_cast<int64_t>(logits.size());
  const auto columns = static_cast<size_t>(1 + num_top);
  std::vector<int64_t> ids(columns), ranks(columns);
  std::vector<float> logprobs(columns);
  token_logprobs(logits.data(), n, token, num_top, ids.data(), logprobs.data(), ranks.data(), scratch_for(n).get());
  const std::vector<int64_t> order = by_logit(logits);
  const double largest = logits[static_cast<size_t>(order[0])];
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - largest);
  CHECK(ids[0] == token);
  for (size_t i = 0; i < columns; ++i) {
    const float logit = logits[static_cast<size_t>(ids[i])];
    if (i > 0) CHECK(ids[i] == order[i - 1]);
    CHECK(near(logprobs[i], logit - largest - std::log(sum), 1e-4));
    CHECK(ranks[i] == 1 + std::count_if(logits.begin(), logits.end(), [&](float other) { return other > logit; }));
  }
}

void check_row(int64_t n, Random& random) {
  subject() = "a row of " + std::to_string(n) + " logits";
  std::vector<float> logits = random.normals(n, 3);
  if (random.below(2))  // ties
    for (float& logit : logits) logit = std::nearbyint(logit);
  CHECK(argmax_token(logits.data(), n) == by_logit(logits)[0]);
  for (int i = 0; i < 12; ++i) {
    DrawParams params = {1.0f, 0, 1.0, 0.0f, random.uniform()};
    params.temperature = random.among(std::vector<float>{0.3f, 1.0f, 5.0f});
    params.top_k = random.among(std::vector<int64_t>{0, 1, 2, 20, n, 2 * n});
    params.top_p = random.among(std::vector<double>{1.0, 0.9, 0.3, 1e-6});
    params.min_p = random.among(std::vector<float>{0.0f, 0.0f, 0.05f, 1.0f});
    check_draw(logits, params);
  }
  check_logprobs(logits, random.below(n), 0);
  check_logprobs(logits, random.below(n), std::min<int64_t>(n, 5));
  check_logprobs(logits, random.below(n), n);
}

// Checks rows without a distribution, and rows with a single allowed token.
void check_strange_rows() {
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const int64_t n : {1, 9, 100}) {
    for (const float strange : {infinity, -infinity, nan}) {
      subject() = std::to_string(n) + " logits of " + std::to_string(strange);
      const std::vector<float> logits(static_cast<size_t>(n), strange);
      CHECK(argmax_token(logits.data(), n) == 0);
      CHECK(draw_token(logits.data(), n, {1.0f, 3, 0.9, 0.1f, 0.5}, scratch_for(n).get()) == n - 1);
    }
  }
  subject() = "one token that is allowed";
  std::vector<float> logits(50, -infinity);
  logits[33] = -2.0f;
  for (const double uniform : {0.0, 0.5, 1.0 - 0x1p-52}) check_draw(logits, {1.0f, 5, 0.9, 0.1f, uniform});
}

void check_mask(int64_t n, int64_t percent, Random& random) {
  subject() = "a mask of " + std::to_string(n) + " tokens";
  const std::vector<float> logits = random.normals(n);
  std::vector<uint32_t> mask(static_cast<size_t>((n + 31) / 32));
  std::vector<uint8_t> allowed(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    allowed[i] = random.below(100) < percent;
    if (allowed[i]) mask[i / 32] |= 1u << (i % 32);
  }
  std::vector<float> masked = logits;
  mask_tokens(masked.data(), n, mask.data());
  for (int64_t i = 0; i < n; ++i)
    CHECK(masked[i] == (allowed[i] ? logits[i] : -std::numeric_limits<float>::infinity()));
}

}  // namespace

void test_sampling() {
  Random random(3);
  for (const int64_t n : {1, 2, 7, 8, 9, 15, 16, 17, 63, 500, 511, 513, 1023, 1025, 2049, 5003})
    for (int i = 0; i < 3; ++i) check_row(n, random);
  check_strange_rows();
  for (const int64_t n : {1, 31, 32, 33, 100, 1024, 1025})
    for (const int64_t percent : {0, 3, 50, 97, 100}) check_mask(n, percent, random);
}

}  // namespace chairlift::test
