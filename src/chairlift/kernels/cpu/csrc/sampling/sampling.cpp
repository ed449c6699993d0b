#include "sampling/sampling.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

#include "runtime/isa.h"

namespace chairlift {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Four bits as four lanes: all ones where the bit is set. A word of a mask with both values is applied in groups of
// four.
struct Lanes {
  uint32_t lane[4];
};

constexpr Lanes lanes(uint32_t bits) {
  return {{bits & 1 ? ~0u : 0, bits & 2 ? ~0u : 0, bits & 4 ? ~0u : 0, bits & 8 ? ~0u : 0}};
}

constexpr Lanes kLanes[16] = {lanes(0), lanes(1), lanes(2),  lanes(3),  lanes(4),  lanes(5),  lanes(6),  lanes(7),
                              lanes(8), lanes(9), lanes(10), lanes(11), lanes(12), lanes(13), lanes(14), lanes(15)};

void mask_four(float* values, const Lanes& allowed) {
  constexpr uint32_t kMinusInfinity = 0xff800000;
  uint32_t bits[4];
  std::memcpy(bits, values, sizeof bits);
  for (int i = 0; i < 4; ++i) bits[i] = (bits[i] & allowed.lane[i]) | (kMinusInfinity & ~allowed.lane[i]);
  std::memcpy(values, bits, sizeof bits);
}

struct Candidate {
  float value;
  int32_t id;
};

int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }
int64_t num_groups(int64_t n, int lanes) { return (n + kGroupVectors * lanes - 1) / (kGroupVectors * lanes); }

// The arrays of one row, in the scratch memory of a worker.
struct Buffers {
  Buffers(void* scratch, int64_t n) : num_maxima(num_groups(n, isa().sampling.lanes) * isa().sampling.lanes) {
    sums = static_cast<double*>(scratch);
    maxima = reinterpret_cast<float*>(sums + padded(num_maxima));
    values = maxima + padded(num_maxima);
    weights = values + padded(n);
    kept = weights + padded(n);
    ids = reinterpret_cast<int32_t*>(kept + padded(n));
    kept_ids = ids + padded(n);
  }

  int64_t num_maxima;
  double* sums;
  float *maxima, *values, *weights, *kept;
  int32_t *ids, *kept_ids;
};

float median(float a, float b, float c) { return std::max(std::min(a, b), std::min(std::max(a, b), c)); }

// The largest t such that amount(value), summed over the values that are at least t, reaches `target`; the smallest
// value if no t does. Quickselect by three-way partition, without branches that depend on a value. values, spare: [n],
// n > 0; both are overwritten. target > 0.
template <typename Amount>
float threshold(float* values, float* spare, int64_t n, double target, Amount amount) {
  for (double above = 0.0;;) {
    const float pivot = median(values[0], values[n / 2], values[n - 1]);
    int64_t num_above = 0, num_below = 0;
    double of_above = 0.0, of_equal = 0.0;
    for (int64_t i = 0; i < n; ++i) {
      const float x = values[i];
      spare[num_above] = x;
      values[num_below] = x;
      num_above += x > pivot;
      num_below += x < pivot;
      of_above += x > pivot ? amount(x) : 0.0;
      of_equal += x == pivot ? amount(x) : 0.0;
    }
    if (above + of_above >= target) {
      std::swap(values, spare);
      n = num_above;
    } else {
      above += of_above + of_equal;
      if (above >= target || !num_below) return pivot;
      n = num_below;
    }
  }
}

constexpr int kBinShift = 19;  // the weights of a bin share the exponent and four bits of the fraction
constexpr int kNumBins = (0x3f800000 >> kBinShift) + 1;
constexpr int64_t kFewWeights = 512;

uint32_t bin_of(float weight) {
  uint32_t bits;
  std::memcpy(&bits, &weight, sizeof bits);
  return bits >> kBinShift;
}

// `threshold` of weights in [0, 1]: a histogram determines the bin that contains it, and only this bin is partitioned.
template <typename Amount>
float weight_threshold(float* weights, float* spare, int64_t n, double target, Amount amount) {
  if (n <= kFewWeights) return threshold(weights, spare, n, target, amount);
  double amounts[kNumBins] = {};
  for (int64_t i = 0; i < n; ++i) amounts[bin_of(weights[i])] += amount(weights[i]);
  uint32_t bin = kNumBins - 1, lowest = 0;
  while (!(amounts[lowest] > 0)) ++lowest;
  double above = 0.0;
  while (bin > lowest && above + amounts[bin] < target) above += amounts[bin--];
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    spare[count] = weights[i];
    count += bin_of(weights[i]) == bin;
  }
  return threshold(spare, weights, count, target - above, amount);
}

double unit_amount(float) { return 1.0; }
double weight_amount(float weight) { return static_cast<double>(weight); }

// A lower bound of the k-th largest value of the row; -inf if the group maxima do not give one.
// Overwrites the maxima and `values`.
float kth_bound(const Buffers& at, int64_t k) {
  if (k > at.num_maxima) return -kInfinity;
  return threshold(at.maxima, at.values, at.num_maxima, static_cast<double>(k), unit_amount);
}

// A logit below those of all tokens that top_k and min_p may keep, with a margin for the rounding of weights.
float logit_cut(const Buffers& at, const DrawParams& params, float largest) {
  float cut = params.top_k ? kth_bound(at, params.top_k) : -kInfinity;
  if (params.min_p > 0) cut = std::max(cut, largest + params.temperature * std::log(params.min_p));
  return cut - (1e-4f * params.temperature + 1e-6f * (std::fabs(cut) + std::fabs(largest)));
}

// The n candidates of a draw; the token of weights[i] is ids[i], or i if ids is null.
struct Choice {
  int64_t n;
  const int32_t* ids;
  int64_t token(int64_t i) const { return ids ? ids[i] : i; }
};

Choice weigh(const float* logits, int64_t n, const DrawParams& params, float largest, const Buffers& at) {
  const SamplingRows& rows = isa().sampling;
  const float cut = params.top_k || params.min_p > 0 ? logit_cut(at, params, largest) : -kInfinity;
  if (!(cut > -kInfinity)) {
    rows.weights(logits, n, largest, params.temperature, at.weights, at.sums);
    return {n, nullptr};
  }
  const int64_t count = rows.gather(logits, n, cut, at.values, at.ids);
  rows.weights(at.values, count, largest, params.temperature, at.weights, at.sums);
  return {count, at.ids};
}

double sum(const float* values, int64_t n) {
  double total = 0.0;
  for (int64_t i = 0; i < n; ++i) total += static_cast<double>(values[i]);
  return total;
}

double sum_of_groups(const Buffers& at, int64_t n) {
  double total = 0.0;
  for (int64_t group = 0; group < num_groups(n, isa().sampling.lanes); ++group) total += at.sums[group];
  return total;
}

// The tokens that a draw keeps: those with at least the weight `floor`, of which the last ones have exactly this weight
// and are as few as needed to reach `target`; 0 keeps all of them.
struct Kept {
  float floor;
  double target;
};

// The smallest set of tokens with a share of top_p of the weight of all tokens of at least `floor`.
Kept nucleus(const Buffers& at, int64_t n, double top_p, float floor) {
  const SamplingRows& rows = isa().sampling;
  const int64_t count = floor > 0 ? rows.gather(at.weights, n, floor, at.kept, at.kept_ids) : n;
  const double total = floor > 0 ? sum(at.kept, count) : sum_of_groups(at, n);
  // The tokens below this weight have less than half of 1 - top_p in total, so none of them is in the nucleus.
  const double cut = top_p < 1 - 1e-9 ? 0.5 * (1 - top_p) * total / static_cast<double>(n) : 0.0;
  const float lowest = std::max({floor, static_cast<float>(cut) * 0.99f, FLT_MIN});
  const int64_t left = rows.gather(at.weights, n, lowest, at.kept, at.kept_ids);
  return {std::max(floor, weight_threshold(at.kept, at.values, left, top_p * total, weight_amount)), top_p * total};
}

// Removes the last of the tokens with the weight `floor` that are not needed to reach `target`; returns how many tokens
// are left. A share that is a whole number of tokens is not raised by its rounding.
int64_t without_extra_ties(const Buffers& at, int64_t n, Kept kept) {
  double above = 0.0;
  int64_t num_ties = 0, count = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (at.kept[i] > kept.floor) above += static_cast<double>(at.kept[i]);
    else ++num_ties;
  }
  const double share = (kept.target - above) / static_cast<double>(kept.floor);
  int64_t needed = std::max<int64_t>(1, static_cast<int64_t>(std::ceil(share * (1 - 1e-9))));
  if (needed >= num_ties) return n;
  for (int64_t i = 0; i < n; ++i) {
    if (at.kept[i] > kept.floor || needed-- > 0) {
      at.kept[count] = at.kept[i];
      at.kept_ids[count++] = at.kept_ids[i];
    }
  }
  return count;
}

Kept kept_tokens(const DrawParams& params, const Buffers& at, int64_t n) {
  float floor = params.min_p;
  if (params.top_k && params.top_k < n) {
    std::copy_n(at.weights, n, at.kept);
    floor = std::max(floor, weight_threshold(at.kept, at.values, n, static_cast<double>(params.top_k), unit_amount));
  }
  return params.top_p < 1 ? nucleus(at, n, params.top_p, floor) : Kept{floor, 0.0};
}

// The first of n weights at which the running sum exceeds `target`; the last positive one if rounding prevents that.
int64_t find(const float* weights, int64_t n, double target) {
  double running = 0.0;
  int64_t last = 0;
  for (int64_t i = 0; i < n; ++i) {
    running += static_cast<double>(weights[i]);
    if (running > target) return i;
    if (weights[i] > 0) last = i;
  }
  return last;
}

// The same as `find` for uniform * total, searching the sums of groups first.
int64_t find_by_groups(const Buffers& at, int64_t n, double uniform) {
  const int64_t groups = num_groups(n, isa().sampling.lanes), size = kGroupVectors * isa().sampling.lanes;
  const double target = uniform * sum_of_groups(at, n);
  double before = 0.0;
  int64_t group = 0;
  while (group < groups - 1 && !(before + at.sums[group] > target)) before += at.sums[group++];
  const int64_t start = group * size;
  return start + find(at.weights + start, std::min(size, n - start), target - before);
}

}  // namespace

double uniform_at(uint64_t key, int64_t position) {
  const uint64_t counter = (static_cast<uint64_t>(position) + 1) * 0x9E3779B97F4A7C15u;
  return static_cast<double>(mix(key + counter) >> 12) * 0x1p-52;
}

void mask_tokens(float* logits, int64_t n, const uint32_t* mask) {
  for (int64_t start = 0; start < n; start += 32) {
    const uint32_t allowed = mask[start / 32];
    float* const at = logits + start;
    const int64_t count = std::min<int64_t>(32, n - start);
    if (!allowed) {
      std::fill_n(at, count, -kInfinity);
    } else if (count < 32) {
      for (int64_t i = 0; i < count; ++i) at[i] = (allowed >> i) & 1 ? at[i] : -kInfinity;
    } else if (~allowed) {
      for (int i = 0; i < 32; i += 4) mask_four(at + i, kLanes[(allowed >> i) & 15]);
    }
  }
}

size_t sampling_scratch_bytes(int64_t n) {
  const int lanes = isa().sampling.lanes;
  const int64_t maxima = padded(num_groups(n, lanes) * lanes);
  const int64_t four_byte_arrays = 5 * padded(n) + maxima;
  return static_cast<size_t>(maxima) * sizeof(double) + static_cast<size_t>(four_byte_arrays) * sizeof(float);
}

int64_t argmax_token(const float* logits, int64_t n) { return isa().sampling.largest(logits, n, nullptr).index; }

// min_p, top_k and top_p are thresholds, in this order, so tokens with equal logits are kept or removed together, except
// that top_p keeps no more of them than it needs. Where the first two give a lower bound of the logits, only the tokens above it are processed further.
//
//     logits --bound--> few candidates --exp--> weights --thresholds--> kept --running sum--> token
//
// A row whose largest logit is not finite has no distribution; its result is the last token, as in torch_sampling.py.
int64_t draw_token(const float* logits, int64_t n, const DrawParams& params, void* scratch) {
  const SamplingRows& rows = isa().sampling;
  const Buffers at(scratch, n);
  const float largest = rows.largest(logits, n, params.top_k ? at.maxima : nullptr).value;
  if (!std::isfinite(largest)) return n - 1;
  const Choice choice = weigh(logits, n, params, largest, at);
  const Kept kept = kept_tokens(params, at, choice.n);
  if (!(kept.floor > 0)) return choice.token(find_by_groups(at, choice.n, params.uniform));
  int64_t left = rows.gather(at.weights, choice.n, kept.floor, at.kept, at.kept_ids);
  if (kept.target > 0) left = without_extra_ties(at, left, kept);
  return choice.token(at.kept_ids[find(at.kept, left, params.uniform * sum(at.kept, left))]);
}

void token_logprobs(const float* logits, int64_t n, int64_t token, int64_t num_top, int64_t* ids, float* logprobs,
                    int64_t* ranks, void* scratch) {
  const SamplingRows& rows = isa().sampling;
  const Buffers at(scratch, n);
  const float largest = rows.largest(logits, n, at.maxima).value;
  double log_sum = largest;
  if (std::isfinite(largest)) {
    rows.weights(logits, n, largest, 1.0f, at.weights, at.sums);
    log_sum += std::log(sum_of_groups(at, n));
  }
  ids[0] = token;
  logprobs[0] = static_cast<float>(static_cast<double>(logits[token]) - log_sum);
  ranks[0] = 1 + rows.count_above(logits, n, logits[token]);
  if (!num_top) return;
  const float cut = std::isnan(largest) ? -kInfinity : kth_bound(at, num_top);
  const int64_t count = rows.gather(logits, n, cut, at.values, at.ids);
  Candidate* const candidates = reinterpret_cast<Candidate*>(at.weights);
  for (int64_t i = 0; i < count; ++i)
    candidates[i] = {std::isnan(at.values[i]) ? kInfinity : at.values[i], at.ids[i]};
  std::partial_sort(candidates, candidates + num_top, candidates + count, [](Candidate a, Candidate b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
  });
  for (int64_t i = 0; i < num_top; ++i) {
    const Candidate& top = candidates[i];
    ids[1 + i] = top.id;
    logprobs[1 + i] = static_cast<float>(static_cast<double>(logits[top.id]) - log_sum);
    ranks[1 + i] = i && top.value == candidates[i - 1].value ? ranks[i] : 1 + i;
  }
}

}  // namespace chairlift
