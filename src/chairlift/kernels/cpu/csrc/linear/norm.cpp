#include "linear/norm.h"

#include <stdexcept>
#include <utility>

namespace chairlift {

Norm::Norm(Prologue kind, std::vector<float> weight, std::vector<float> bias, float eps)
    : kind_(kind), weights_(std::make_shared<const Weights>(Weights{std::move(weight), std::move(bias)})), eps_(eps) {
  const size_t size = weights_->weight.size();
  if (kind != Prologue::none && !is_norm(kind)) throw std::invalid_argument("kind must be a norm or none");
  if (is_norm(kind) == (size == 0)) throw std::invalid_argument("weight must have values for norms, and only for them");
  if (weights_->bias.size() != (kind == Prologue::layer_norm ? size : 0))
    throw std::invalid_argument("bias must have as many values as weight for layer_norm, and none otherwise");
}

}  // namespace chairlift
