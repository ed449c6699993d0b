// Passes over one row of logits: the functions that are compiled for each instruction set.
#pragma once

#include <cstdint>

namespace chairlift {

// The largest value of a row and the index of its first occurrence. NaN is larger than any other value, as in torch.
struct Largest {
  float value;
  int64_t index;
};

// A row is read in groups of kGroupVectors vectors. The largest value of each lane of a group is a group maximum. The
// k-th largest group maximum is a lower bound of the k-th largest value of the row.
constexpr int64_t kGroupVectors = 64;

struct SamplingRows {
  int lanes;
  // maxima: [ceil(n / group)][lanes], or null.
  Largest (*largest)(const float* row, int64_t n, float* maxima);
  // Computes out[i] = exp((row[i] - largest) / temperature), zero from n up to a multiple of 16, and sums
  // [ceil(n / group)], the sum of the weights of each group in double.
  void (*weights)(const float* row, int64_t n, float largest, float temperature, float* out, double* sums);
  // Copies values of at least `cut` and their indices, in order, and returns their number.
  int64_t (*gather)(const float* row, int64_t n, float cut, float* values, int32_t* index);
  // The number of values that are larger.
  int64_t (*count_above)(const float* row, int64_t n, float value);
};

}  // namespace chairlift
