// The sum of the residual stream and a branch of a layer.
#pragma once

#include <cstdint>
#include <vector>

#include "linear_tiles.h"

namespace chairlift {

// A norm of rows, or none, with its own copy of the weights.
class Norm {
 public:
  // weight [size], bias [size] for layer_norm; throws std::invalid_argument if they do not fit, or if kind is no norm.
  Norm(Prologue kind, std::vector<float> weight, std::vector<float> bias, float eps);

  PrologueArgs args() const { return {kind_, weight_.data(), bias_.data(), eps_}; }
  bool fits(int64_t size) const { return !is_norm(kind_) || static_cast<int64_t>(weight_.size()) == size; }

 private:
  Prologue kind_;
  std::vector<float> weight_, bias_;
  float eps_;
};

// of_sum(stream + multiplier * after(branch)), computed in the memory of the stream.
class ResidualSum {
 public:
  ResidualSum(Norm after, Norm of_sum, float multiplier);

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
  float multiplier_;
};

}  // namespace chairlift
