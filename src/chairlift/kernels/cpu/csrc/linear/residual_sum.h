// The sum of the residual stream and a branch of a layer.
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

}  // namespace chairlift
