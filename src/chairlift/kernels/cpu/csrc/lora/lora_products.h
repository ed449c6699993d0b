// The small products of LoRA adapters: the functions that are compiled for each instruction set.
#pragma once

#include <cstdint>

namespace chairlift {

// The rows that are multiplied at a time. The result of a row does not depend on the others.
constexpr int kLoraRows = 4;

struct LoraProducts {
  // Computes h[r][j], the product of y[r] and row j of a [rank][inputs]. Rows of y are `inputs` apart, rows of h `rank`.
  void (*shrink)(const float* y, int rows, const float* a, int64_t inputs, int rank, float* h);
  // Adds to out[r] the sum of h[r][j] times row j of b [rank][outputs]. Rows of h are `rank` apart.
  void (*expand)(const float* h, int rows, const float* b, int64_t outputs, int rank, float* const* out);
};

}  // namespace chairlift
