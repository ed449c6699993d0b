// Operations on rows between products: the sum of the residual stream and a branch of a layer, and gates.
#pragma once

#include <cstdint>

#include "linear/norm.h"

namespace chairlift {

// scale * of_sum(stream + multiplier * after(branch)), computed in the memory of the stream.
class ResidualSum {
 public:
  ResidualSum(Norm after, Norm of_sum, float multiplier, float scale = 1);

  // The rows of a step: stream, branch [rows][size], with strides in floats. A branch of null adds nothing.
  struct Rows {
    float* stream;
    int64_t stream_stride;
    float* branch;
    int64_t branch_stride;
    int64_t rows, size;
  };
  // Overwrites the values of both. Throws std::invalid_argument if a norm has another size.
  void operator()(const Rows& x) const;

 private:
  Norm after_, of_sum_;
  float multiplier_, scale_;
};

// Rows x [rows][size], which are multiplied by activation(gate) of the gates [rows][num_gates]. Each gate is that of
// size / num_gates consecutive values.
struct GatedRows {
  float* x;
  int64_t x_stride;
  const float* gate;
  int64_t gate_stride;
  int64_t rows, size, num_gates;
  GateActivation activation;
};
// Throws std::invalid_argument if num_gates does not divide the size.
void multiply_by_gates(const GatedRows& rows);

}  // namespace chairlift
