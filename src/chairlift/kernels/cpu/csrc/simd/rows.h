// Loops over the values of a row, whose number need not be a multiple of kLanes.
#pragma once

#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA {

static inline float sum_of_squares(const float* x, int64_t n, F shift) {
  F sum = zero();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const F v = sub(load(x + i), shift);
    sum = fma(v, v, sum);
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    const F v = select(less(iota(), set1(static_cast<float>(rest))), sub(load_n(x + i, rest), shift), zero());
    sum = fma(v, v, sum);
  }
  return reduce_add(sum);
}

static inline float sum_of(const float* x, int64_t n) {
  F sum = zero();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) sum = add(sum, load(x + i));
  if (i < n) sum = add(sum, load_n(x + i, static_cast<int>(n - i)));
  return reduce_add(sum);
}

// Computes y = op(i, lanes) for i = 0, kLanes, ...; the last call may have fewer lanes.
template <typename Op>
static inline void each(int64_t n, float* y, Op op) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(y + i, op(i, kLanes));
  if (i < n) store_n(y + i, op(i, static_cast<int>(n - i)), static_cast<int>(n - i));
}
static inline F part(const float* p, int count) { return count == kLanes ? load(p) : load_n(p, count); }

static inline float inverse_root(float mean, float eps) { return 1.0f / __builtin_sqrtf(mean + eps); }

}  // namespace chairlift::CHAIRLIFT_ISA
