// Passes over one row of logits: what is compiled for each instruction set.
#pragma once

#include <cstdint>

namespace chairlift {

// The largest value of a row and where it first occurs. A NaN is larger than everything, as in torch.
struct Largest {
  float value;
  int64_t index;
};

// A row is read in groups of kGroupVectors vectors. The largest value of each lane of a group is a group maximum: the
// k-th largest of them is a lower bound of the k-th largest value of the row.
constexpr int64_t kGroupVectors = 64;

struct SamplingRows {
  int lanes;
  // maxima: [ceil(n / group)][lanes], or null.
  Largest (*largest)(const float* row, int64_t n, float* maxima);
  // out[i] = exp((row[i] - largest) / temperature), zero from n up to a multiple of 16. sums: [ceil(n / group)], the sum
  // of each group's weights in double.
  void (*weights)(const float* row, int64_t n, float largest, float temperature, float* out, double* sums);
  // Values of at least `cut`, and where they stand, in order; returns how many. At most n are written.
  int64_t (*gather)(const float* row, int64_t n, float cut, float* values, int32_t* index);
  // How many values are larger.
  int64_t (*count_above)(const float* row, int64_t n, float value);
};

}  // namespace chairlift
