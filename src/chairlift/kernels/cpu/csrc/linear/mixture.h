// A mixture of experts.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "linear/linear.h"

namespace chairlift {

// A router chooses some experts for each row, and the result is the weighted sum of their outputs. The rows of a call are
// grouped by expert, so that each expert is read once. Experts are added in ascending order, and no output of a row
// depends on the other rows.
class Mixture {
 public:
  struct Expert {
    std::shared_ptr<const Linear> up, down;
  };

  // softmax_of_chosen: whether weights are the softmax over the logits of the chosen experts, or over those of all.
  // expert_scales: the factors of the weights of experts, or empty.
  // Throws std::invalid_argument if the layers do not fit.
  Mixture(std::shared_ptr<const Linear> router, std::vector<Expert> experts, int64_t experts_per_token,
          bool softmax_of_chosen, std::vector<float> expert_scales = {});

  // x [rows, in_features]; out [rows, in_features], overwritten, without overlap with x. Strides are in floats.
  void operator()(const float* x, int64_t x_stride, int64_t rows, float* out, int64_t out_stride) const;

  const Linear& router() const { return *router_; }

 private:
  struct Choice;
  struct Groups;
  void choose(const float* logits, Choice* choices) const;
  Groups group(const Choice* choices, int64_t rows, void* memory) const;
  const Linear* next_layer(const Groups& groups, int64_t expert) const;

  std::shared_ptr<const Linear> router_;
  std::vector<Expert> experts_;
  int64_t experts_per_token_, inner_size_;
  bool softmax_of_chosen_;
  std::vector<float> expert_scales_;
};

}  // namespace chairlift
