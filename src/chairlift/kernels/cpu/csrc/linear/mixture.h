// A mixture of experts.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "linear/linear.h"

namespace chairlift {

// How the logits of a router become the experts of a row and their weights.
struct Routing {
  int64_t experts_per_token;
  bool of_chosen;            // whether weights are shares of the sum over the chosen experts, or over all
  bool has_sigmoid = false;  // a score is the sigmoid of a logit, or its softmax; without of_chosen it is the weight
  // Without sigmoids and without a selection bias both are ignored, because the sum is never small.
  float sum_eps = 0.0f;  // is added to the sum of the scores of the chosen experts
  float sum_min = 0.0f;  // the least number by which they are divided
  float scale = 1.0f;        // the factor of all weights
  std::vector<float> expert_scales = {};   // the factors of the weights of experts, or empty
  std::vector<float> selection_bias = {};  // is added to the scores for the choice only, or empty
  bool has_scores() const { return has_sigmoid || !selection_bias.empty(); }  // otherwise logits have the same order
  // Experts are chosen from the groups_per_token groups of consecutive experts with the largest scores: that of the best
  // expert, or with has_sigmoid the sum of those of the best two.
  int64_t num_groups = 1, groups_per_token = 1;
};

// A router chooses some experts for each row, and the result is the weighted sum of their outputs. The rows of a call are
// grouped by expert, so that each expert is read once. Experts are added in ascending order, and no output of a row
// depends on the other rows.
class Mixture {
 public:
  struct Expert {
    std::shared_ptr<const Linear> up, down;
  };

  // Throws std::invalid_argument if the layers do not fit.
  Mixture(std::shared_ptr<const Linear> router, std::vector<Expert> experts, Routing routing);

  // routed [rows, in_features of the router]; x [rows, in_features of the experts], which may be the same; out [rows,
  // in_features of the experts], overwritten, without overlap with x. Strides are in floats.
  void operator()(const float* routed, int64_t routed_stride, const float* x, int64_t x_stride, int64_t rows, float* out,
                  int64_t out_stride) const;

  const Linear& router() const { return *router_; }

 private:
  struct Choice;
  struct Groups;
  void choose(float* logits, Choice* choices) const;
  float rank(const float* scores, size_t expert) const;
  std::vector<bool> open_groups(const float* scores) const;
  void to_scores(float* logits) const;
  void to_exponentials(float* logits, Choice* choices) const;
  Groups group(const Choice* choices, int64_t rows, void* memory) const;
  const Linear* next_layer(const Groups& groups, int64_t expert) const;

  std::shared_ptr<const Linear> router_;
  std::vector<Expert> experts_;
  int64_t size_, inner_size_;
  Routing routing_;
};

}  // namespace chairlift
