#include "linear/mixture.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "runtime/isa.h"
#include "runtime/pool.h"
#include "runtime/reusable_memory.h"

namespace chairlift {
namespace {

// Few rows take less time than the threads need to meet.
constexpr int64_t kRowsPerTask = 8;

// Calls body(row) for each row, on all threads if there are many.
template <typename Body>
void each_row(int64_t rows, const Body& body) {
  const auto run_task = [&](int64_t task, int) {
    for (int64_t row = task * kRowsPerTask; row < std::min((task + 1) * kRowsPerTask, rows); ++row) body(row);
  };
  if (rows <= kRowsPerTask)
    run_task(0, 0);
  else
    Pool::get().run(divide_up(rows, kRowsPerTask), run_task);
}

}  // namespace

// One expert of a row: first with its score, then with its weight.
struct Mixture::Choice {
  int32_t expert;
  float weight;
};

// The rows of each expert, in ascending order: those of expert e are at first[e] to first[e + 1] - 1.
struct Mixture::Groups {
  static size_t num_bytes(int64_t num_choices, int64_t num_experts) {
    return static_cast<size_t>(num_choices) * (sizeof(int32_t) + sizeof(float)) +
           static_cast<size_t>(num_experts + 1) * sizeof(int32_t);
  }
  Groups(void* memory, int64_t num_choices)
      : rows(static_cast<int32_t*>(memory)),
        weights(reinterpret_cast<float*>(rows + num_choices)),
        first(reinterpret_cast<int32_t*>(weights + num_choices)) {}
  int64_t num_rows(int64_t expert) const { return first[expert + 1] - first[expert]; }

  int32_t* rows;
  float* weights;
  int32_t* first;
};

Mixture::Mixture(std::shared_ptr<const Linear> router, std::vector<Expert> experts, Routing routing)
    : router_(std::move(router)), experts_(std::move(experts)), routing_(std::move(routing)) {
  const auto num_experts = static_cast<int64_t>(experts_.size());
  if (router_->out_features() != num_experts || num_experts == 0)
    throw std::invalid_argument("the router must have one output for each expert");
  for (const auto& [name, values] : {std::pair("expert_scales", &routing_.expert_scales),
                                     std::pair("selection_bias", &routing_.selection_bias)})
    if (!values->empty() && values->size() != experts_.size())
      throw std::invalid_argument(std::string(name) + " must have one value for each expert");
  if (routing_.experts_per_token < 1 || routing_.experts_per_token > num_experts)
    throw std::invalid_argument("experts_per_token must be from 1 to " + std::to_string(num_experts) + ", got " +
                                std::to_string(routing_.experts_per_token));
  if (routing_.num_groups < 1 || num_experts % routing_.num_groups || routing_.groups_per_token < 1 ||
      routing_.groups_per_token > routing_.num_groups ||
      routing_.groups_per_token * (num_experts / routing_.num_groups) < routing_.experts_per_token)
    throw std::invalid_argument("num_groups must divide the number of experts, and groups_per_token of them must hold "
                                "experts_per_token experts, got num_groups " + std::to_string(routing_.num_groups) +
                                ", groups_per_token " + std::to_string(routing_.groups_per_token) +
                                ", experts_per_token " + std::to_string(routing_.experts_per_token) + " and " +
                                std::to_string(num_experts) + " experts");
  size_ = experts_[0].up->in_features();
  inner_size_ = experts_[0].up->out_features();
  for (const Expert& expert : experts_)
    if (expert.up->in_features() != size_ || expert.down->out_features() != size_ ||
        expert.up->out_features() != inner_size_ || expert.down->input_width() != inner_size_)
      throw std::invalid_argument("all experts must have equal input, inner and output sizes");
}

// The score of an expert for its choice.
float Mixture::rank(const float* scores, size_t expert) const {
  return scores[expert] + (routing_.selection_bias.empty() ? 0.0f : routing_.selection_bias[expert]);
}

// Whether the experts of each group may be chosen. Of groups with equal scores the first is open.
std::vector<bool> Mixture::open_groups(const float* scores) const {
  const auto num_groups = static_cast<size_t>(routing_.num_groups), size = experts_.size() / num_groups;
  std::vector<std::pair<float, size_t>> ordered;
  for (size_t group = 0; group < num_groups; ++group) {
    float best = -std::numeric_limits<float>::infinity(), second = best;
    for (size_t expert = group * size; expert < (group + 1) * size; ++expert) {
      const float score = rank(scores, expert);
      second = std::max(second, std::min(best, score));
      best = std::max(best, score);
    }
    ordered.emplace_back(routing_.has_sigmoid && size > 1 ? best + second : best, group);
  }
  std::stable_sort(ordered.begin(), ordered.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<bool> open(num_groups);
  for (size_t i = 0; i < static_cast<size_t>(routing_.groups_per_token); ++i) open[ordered[i].second] = true;
  return open;
}

// Writes the experts of a row with the largest scores, and their weights. Of equal scores the first is chosen. The logits
// are overwritten by scores.
void Mixture::choose(float* logits, Choice* choices) const {
  const auto num_experts = static_cast<int32_t>(experts_.size());
  const int64_t most = routing_.experts_per_token;
  int64_t count = 0;
  if (routing_.has_scores()) to_scores(logits);
  const bool has_groups = routing_.groups_per_token < routing_.num_groups;
  const std::vector<bool> open = has_groups ? open_groups(logits) : std::vector<bool>{};
  for (int32_t expert = 0; expert < num_experts; ++expert) {
    if (has_groups && !open[static_cast<size_t>(expert * routing_.num_groups / num_experts)]) continue;
    const float score = rank(logits, static_cast<size_t>(expert));
    if (count == most && !(score > choices[most - 1].weight)) continue;
    int64_t at = count < most ? count++ : most - 1;
    for (; at > 0 && score > choices[at - 1].weight; --at) choices[at] = choices[at - 1];
    choices[at] = {expert, score};
  }
  for (int64_t i = 0; i < most; ++i) choices[i].weight = logits[choices[i].expert];
  const bool has_scores = routing_.has_scores();
  if (!has_scores) to_exponentials(logits, choices);
  float sum = has_scores ? routing_.sum_eps : 0.0f;
  if (routing_.of_chosen)
    for (int64_t i = 0; i < most; ++i) sum += choices[i].weight;
  else if (has_scores)
    sum = 1.0f;
  else
    for (int32_t expert = 0; expert < num_experts; ++expert) sum += logits[expert];
  if (has_scores && routing_.of_chosen) sum = std::max(sum, routing_.sum_min);
  for (int64_t i = 0; i < most; ++i) {
    choices[i].weight = choices[i].weight / sum * routing_.scale;
    if (!routing_.expert_scales.empty())
      choices[i].weight *= routing_.expert_scales[static_cast<size_t>(choices[i].expert)];
  }
}

// Replaces the logits of a row by their sigmoids or their softmax.
void Mixture::to_scores(float* logits) const {
  float* const end = logits + experts_.size();
  if (routing_.has_sigmoid) {
    for (float* score = logits; score < end; ++score) *score = 1.0f / (1.0f + std::exp(-*score));
    return;
  }
  const float top = *std::max_element(logits, end);
  float sum = 0.0f;
  for (float* score = logits; score < end; ++score) sum += *score = std::exp(*score - top);
  for (float* score = logits; score < end; ++score) *score /= sum;
}

// Replaces the logits of a row, and those of its choices, by exp(logit - largest logit).
void Mixture::to_exponentials(float* logits, Choice* choices) const {
  const float top = *std::max_element(logits, logits + experts_.size());
  for (int64_t i = 0; i < routing_.experts_per_token; ++i) choices[i].weight = std::exp(choices[i].weight - top);
  if (routing_.of_chosen) return;
  for (size_t expert = 0; expert < experts_.size(); ++expert) logits[expert] = std::exp(logits[expert] - top);
}

Mixture::Groups Mixture::group(const Choice* choices, int64_t rows, void* memory) const {
  const int64_t num_choices = rows * routing_.experts_per_token;
  const Groups groups(memory, num_choices);
  std::fill_n(groups.first, experts_.size() + 1, 0);
  for (int64_t i = 0; i < num_choices; ++i) ++groups.first[choices[i].expert];
  int32_t end = 0;
  for (size_t expert = 0; expert <= experts_.size(); ++expert) end = groups.first[expert] += end;
  for (int64_t i = num_choices - 1; i >= 0; --i) {  // from the last, so that `first` ends at the first rows
    const int32_t at = --groups.first[choices[i].expert];
    groups.rows[at] = static_cast<int32_t>(i / routing_.experts_per_token);
    groups.weights[at] = choices[i].weight;
  }
  return groups;
}

// The layer that is computed after an expert, or null.
const Linear* Mixture::next_layer(const Groups& groups, int64_t expert) const {
  for (auto next = static_cast<size_t>(expert) + 1; next < experts_.size(); ++next)
    if (groups.num_rows(static_cast<int64_t>(next))) return experts_[next].up.get();
  return nullptr;
}

void Mixture::operator()(const float* routed, int64_t routed_stride, const float* x, int64_t x_stride, int64_t rows,
                         float* out, int64_t out_stride) const {
  thread_local ReusableMemory routing_memory, group_memory, row_memory;
  if (rows <= 0) return;
  const auto num_experts = static_cast<int64_t>(experts_.size());
  const int64_t num_choices = rows * routing_.experts_per_token;
  auto* const choices = static_cast<Choice*>(
      routing_memory.get(static_cast<size_t>(num_choices) * sizeof(Choice) +
                         static_cast<size_t>(rows * num_experts) * sizeof(float)));
  auto* const logits = reinterpret_cast<float*>(choices + num_choices);
  (*router_)(routed, routed_stride, rows, logits, num_experts, false);
  each_row(rows, [&](int64_t row) {
    choose(logits + row * num_experts, choices + row * routing_.experts_per_token);
    std::fill_n(out + row * out_stride, size_, 0.0f);
  });
  const Groups groups = group(choices, rows, group_memory.get(Groups::num_bytes(num_choices, num_experts)));
  int64_t most_rows = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) most_rows = std::max(most_rows, groups.num_rows(expert));
  auto* const inner = static_cast<float*>(
      row_memory.get(static_cast<size_t>(most_rows * (inner_size_ + size_)) * sizeof(float)));
  float* const outer = inner + most_rows * inner_size_;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const int64_t count = groups.num_rows(expert), first = groups.first[expert];
    if (count == 0) continue;
    const Expert& layers = experts_[static_cast<size_t>(expert)];
    if (layers.up->can_feed(*layers.down)) {
      layers.up->feed(*layers.down, x, x_stride, count, inner, inner_size_, outer, size_, false,
                      next_layer(groups, expert), groups.rows + first);
    } else {
      (*layers.up)(x, x_stride, count, inner, inner_size_, false, layers.down.get(), groups.rows + first);
      (*layers.down)(inner, inner_size_, count, outer, size_, false, next_layer(groups, expert));
    }
    each_row(count, [&](int64_t row) {
      const PrologueArgs none = {Prologue::none, nullptr, nullptr, 0};
      isa().linear.add_branch({none, none, groups.weights[first + row]}, outer + row * size_, size_,
                              out + groups.rows[first + row] * out_stride);
    });
  }
}

}  // namespace chairlift
