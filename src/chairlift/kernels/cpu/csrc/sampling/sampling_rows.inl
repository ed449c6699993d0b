// Compiled for each instruction set: passes over one row of logits.
#pragma once

#include "sampling/sampling_rows.h"
#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA {

constexpr int64_t kSamplingGroup = kGroupVectors * kLanes;

// Loads kLanes values from p on; those from n on are -inf.
static inline F load_logits(const float* p, int64_t n) {
  if (n >= kLanes) return load(p);
  const int count = static_cast<int>(n);
  return select(less(iota(), set1(static_cast<float>(count))), load_n(p, count), set1(-__builtin_inff()));
}

static inline int64_t first_nan(const float* row, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if (row[i] != row[i]) return i;
  return -1;
}

static Largest largest_of_row(const float* row, int64_t n, float* maxima) {
  Largest best = {-__builtin_inff(), 0};
  int64_t best_group = 0;
  F check = zero();  // becomes NaN if the row contains NaN or infinities of both signs
  for (int64_t start = 0; start < n; start += kSamplingGroup) {
    const int64_t end = start + kSamplingGroup < n ? start + kSamplingGroup : n;
    F top = set1(-__builtin_inff());
    for (int64_t i = start; i < end; i += kLanes) {
      const F x = load_logits(row + i, end - i);
      top = max(x, top);
      check = add(check, x);
    }
    if (maxima) store(maxima + start / kGroupVectors, top);
    const float value = reduce_max(top);
    if (value > best.value) best.value = value, best_group = start;
  }
  const float checked = reduce_add(check);
  if (checked != checked) {
    const int64_t at = first_nan(row, n);
    if (at >= 0) return {row[at], at};
  }
  best.index = best_group;
  while (row[best.index] != best.value) ++best.index;
  return best;
}

static inline double sum_in_double(const float* values, int64_t n) {
  double lanes[16] = {};
  for (int64_t i = 0; i < n; i += 16)
    for (int l = 0; l < 16; ++l) lanes[l] += static_cast<double>(values[i + l]);
  for (int half = 8; half; half /= 2)
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  return lanes[0];
}

static void weights_of_row(const float* row, int64_t n, float largest, float temperature, float* out, double* sums) {
  const F top = set1(largest), divisor = set1(temperature);
  for (int64_t start = 0, group = 0; start < n; start += kSamplingGroup, ++group) {
    const int64_t end = start + kSamplingGroup < n ? start + kSamplingGroup : n;
    int64_t i = start;
    for (; i < end; i += kLanes) store(out + i, exp(div(sub(load_logits(row + i, end - i), top), divisor)));
    for (; i % 16; i += kLanes) store(out + i, zero());
    sums[group] = sum_in_double(out + start, i - start);
  }
}

static int64_t gather_row(const float* row, int64_t n, float cut, float* values, int32_t* index) {
  constexpr unsigned kAll = static_cast<unsigned>((uint64_t{1} << kLanes) - 1);
  const F threshold = set1(cut);
  int64_t count = 0, i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (unsigned kept = ~mask_bits(less(load(row + i), threshold)) & kAll; kept; kept &= kept - 1) {
      const int64_t at = i + __builtin_ctz(kept);
      values[count] = row[at];
      index[count++] = static_cast<int32_t>(at);
    }
  }
  for (; i < n; ++i) {
    if (row[i] < cut) continue;
    values[count] = row[i];
    index[count++] = static_cast<int32_t>(i);
  }
  return count;
}

static int64_t count_above(const float* row, int64_t n, float value) {
  const F threshold = set1(value);
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kLanes)
    count += __builtin_popcount(mask_bits(less(threshold, load_logits(row + i, n - i))));
  return count;
}

static constexpr SamplingRows sampling_rows() {
  return {kLanes, largest_of_row, weights_of_row, gather_row, count_above};
}

}  // namespace chairlift::CHAIRLIFT_ISA
