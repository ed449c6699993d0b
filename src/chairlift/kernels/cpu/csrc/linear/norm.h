// A norm of rows and its weights.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "linear/linear_tiles.h"

namespace chairlift {

// A norm of rows, or none. Copies share the weights.
class Norm {
 public:
  // weight [size], bias [size] for layer_norm; throws std::invalid_argument if they do not fit, or if kind is no norm.
  Norm(Prologue kind, std::vector<float> weight, std::vector<float> bias, float eps);

  Prologue kind() const { return kind_; }
  PrologueArgs args() const { return {kind_, weights_->weight.data(), weights_->bias.data(), eps_}; }
  bool fits(int64_t size) const { return !is_norm(kind_) || static_cast<int64_t>(weights_->weight.size()) == size; }

 private:
  struct Weights {
    std::vector<float> weight, bias;
  };

  Prologue kind_;
  std::shared_ptr<const Weights> weights_;
  float eps_;
};

}  // namespace chairlift
