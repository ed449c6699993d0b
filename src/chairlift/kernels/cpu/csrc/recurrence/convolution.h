// Causal depthwise convolutions of the tokens of sequences.
#pragma once

#include <cstdint>
#include <vector>

#include "recurrence/recurrence_loops.h"
#include "recurrence/state_step.h"

namespace chairlift {

// The rows of the tokens of a step, with the distance between rows in floats.
struct StepRows {
  float* at;
  int64_t stride;

  float* row(int64_t i) const { return at + i * stride; }
  StepRows columns(int64_t first) const { return {at + first, stride}; }
};

// A convolution of consecutive columns, computed in the memory of its inputs. Its state is the last width - 1 inputs of
// a sequence: [slots][width - 1][channels], the oldest first.
class Convolution {
 public:
  // Consecutive channels that are computed together. Their results in a row are divided by the square root of their sum
  // of squares and multiplied by `scale`, unless it is 0.
  struct Unit {
    int64_t channels;
    float scale;
  };

  // weight [width][channels], bias [channels] or empty. Throws std::invalid_argument if they do not fit together, or if
  // the width is not supported.
  Convolution(std::vector<float> weight, std::vector<float> bias, int64_t width, bool has_silu);

  // Throws std::invalid_argument if the units do not have all channels.
  void set_units(const std::vector<Unit>& units);

  int64_t num_channels() const { return num_channels_; }

  // The tasks of a step, which may run at the same time: blocks of units of one sequence.
  struct Tasks {
    int64_t count, blocks, units_per_block;
  };
  Tasks divide(const StateStep& step, int num_threads) const;

  struct Block {
    int64_t sequence, first_unit, last_unit;
    int64_t first_channel, num_channels;
  };
  Block block(const Tasks& tasks, int64_t task) const;

  // Computes a block in the rows of the step, whose first column is the first channel, and writes the states.
  void compute(const Block& block, const StepRows& rows, float* states, const StateStep& step, int worker) const;

 private:
  std::vector<float> weight_, bias_;
  int64_t width_, num_channels_;
  bool has_silu_;
  std::vector<int64_t> firsts_;  // [units + 1]
  std::vector<float> scales_;
};

}  // namespace chairlift
