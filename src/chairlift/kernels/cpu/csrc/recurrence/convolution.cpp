#include "recurrence/convolution.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "linear/packed_matrix.h"
#include "runtime/isa.h"
#include "runtime/pool.h"

namespace chairlift {
namespace {

constexpr int64_t kTasksPerThread = 4;

}  // namespace

Convolution::Convolution(std::vector<float> weight, std::vector<float> bias, int64_t width, bool has_silu)
    : weight_(std::move(weight)), bias_(std::move(bias)), width_(width), has_silu_(has_silu) {
  if (width < 2 || width > kMaxConvolutionWidth)
    throw std::invalid_argument("the width of a convolution must be from 2 to 7, got " + std::to_string(width));
  num_channels_ = static_cast<int64_t>(weight_.size()) / width;
  if (num_channels_ < 1 || num_channels_ * width != static_cast<int64_t>(weight_.size()))
    throw std::invalid_argument("weight must have width values for each channel");
  if (!bias_.empty() && static_cast<int64_t>(bias_.size()) != num_channels_)
    throw std::invalid_argument("bias must have one value for each channel");
}

void Convolution::set_units(const std::vector<Unit>& units) {
  firsts_ = {0};
  scales_.clear();
  for (const Unit& unit : units) {
    firsts_.push_back(firsts_.back() + unit.channels);
    scales_.push_back(unit.scale);
  }
  if (firsts_.back() != num_channels_)
    throw std::invalid_argument("the convolution must have " + std::to_string(firsts_.back()) + " channels, got " +
                                std::to_string(num_channels_));
}

Convolution::Tasks Convolution::divide(const StateStep& step, int num_threads) const {
  const auto num_units = static_cast<int64_t>(scales_.size());
  const int64_t wanted = divide_up(kTasksPerThread * num_threads, step.num_sequences());
  const int64_t units = divide_up(num_units, std::min(wanted, num_units));
  const int64_t blocks = divide_up(num_units, units);
  return {blocks * step.num_sequences(), blocks, units};
}

Convolution::Block Convolution::block(const Tasks& tasks, int64_t task) const {
  const int64_t first = task % tasks.blocks * tasks.units_per_block;
  const int64_t last = std::min(first + tasks.units_per_block, static_cast<int64_t>(scales_.size()));
  const int64_t channel = firsts_[static_cast<size_t>(first)];
  return {task / tasks.blocks, first, last, channel, firsts_[static_cast<size_t>(last)] - channel};
}

// The states are written first, because the results replace the inputs, from the last token to the first.
void Convolution::compute(const Block& block, const StepRows& rows, float* states, const StateStep& step,
                          int worker) const {
  const StateSpan& span = step.spans()[static_cast<size_t>(block.sequence)];
  const int64_t kept = width_ - 1, channels = block.num_channels;
  const auto state = [&](int32_t slot, int64_t i) {
    return states + (slot * kept + i) * num_channels_ + block.first_channel;
  };
  auto* const before = static_cast<float*>(
      Pool::get().scratch(worker, static_cast<size_t>(kept * channels) * sizeof(float)));
  for (int64_t i = 0; i < kept; ++i) {
    if (span.source >= 0)
      std::copy_n(state(span.source, i), channels, before + i * channels);
    else
      std::fill_n(before + i * channels, channels, 0.0f);
  }
  const StepRows own = rows.columns(block.first_channel);
  // The input of a token, also of those before the first one.
  const auto input = [&](int64_t token) {
    return token < 0 ? before + (kept + token) * channels : own.row(span.begin + token);
  };
  step.each_write(span, [&](int64_t count, int32_t slot) {
    for (int64_t i = 0; i < kept; ++i) std::copy_n(input(count - kept + i), channels, state(slot, i));
  });
  const ConvolutionArgs args = {weight_.data() + block.first_channel, num_channels_,
                                bias_.empty() ? nullptr : bias_.data() + block.first_channel,
                                static_cast<int>(width_), has_silu_};
  const RecurrenceLoops& loops = isa().recurrence;
  for (int64_t token = span.num_tokens() - 1; token >= 0; --token) {
    const float* inputs[kMaxConvolutionWidth];
    for (int64_t i = 0; i < width_; ++i) inputs[i] = input(token - kept + i);
    float* const out = input(token);
    loops.convolve(args, inputs, channels, out);
    for (auto unit = static_cast<size_t>(block.first_unit); unit < static_cast<size_t>(block.last_unit); ++unit)
      if (scales_[unit] != 0)
        loops.normalize(out + firsts_[unit] - block.first_channel, firsts_[unit + 1] - firsts_[unit], scales_[unit]);
  }
}

}  // namespace chairlift
