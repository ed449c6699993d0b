// Layers with recurrent state: short convolutions, the gated delta rule and Mamba-2.
#pragma once

#include <cstdint>
#include <vector>

#include "recurrence/convolution.h"
#include "recurrence/recurrence_loops.h"
#include "recurrence/state_step.h"

namespace chairlift {

// The states of a layer: convolution [slots][width - 1][channels], matrix [slots][heads][key_size][value_size] or null.
struct RecurrentState {
  float* convolution;
  float* matrix;
  int64_t num_slots;
};

// c * convolution(b * x) of rows [b | c | x] (LFM2).
class ShortConvolution {
 public:
  explicit ShortConvolution(Convolution convolution);

  // rows [tokens][3 * channels], overwritten; out [tokens][channels]. Throws std::invalid_argument if the state has too
  // few slots.
  void operator()(const StepRows& rows, const RecurrentState& state, const StateStep& step,
                  const StepRows& out) const;

 private:
  Convolution convolution_;
};

// A state [key_size][value_size] for each head, see ScanTask, behind a convolution and in front of a gated norm.
//
//   gated delta   rows [q | k | v | z | b | a], of which the convolution has q, k and v; b is the gate of the factor.
//                 With a decay of each channel of the key, rows [a | z | q | k | v | b]
//   Mamba-2       rows [z | x | B | C | dt], of which the convolution has x, B and C; v = x, k = B and q = C
//
// Head h reads q and k of head h / (heads / key_heads), or h % key_heads with tiled keys.
class MatrixRecurrence {
 public:
  struct Sizes {
    bool is_delta;
    int64_t heads, key_heads, key_size, value_size;
    bool has_tiled_keys;
    int64_t norm_group;  // the number of values that are normed together
    bool has_channel_decay;  // for the gated delta rule

    StateRule rule() const {
      return !is_delta ? StateRule::add : has_channel_decay ? StateRule::channel_delta : StateRule::delta;
    }
    int64_t decays() const { return heads * (rule() == StateRule::channel_delta ? key_size : 1); }
  };
  // rate and bias [decays]; skip [heads]; norm_weight [heads * value_size], or [norm_group] for all groups; row_scales
  // [width], the factors of a row. The last three may be empty.
  struct Parameters {
    std::vector<float> rate, bias, skip, norm_weight, row_scales;
    float factor_scale, low, high, norm_eps;
    bool gates_first, has_sigmoid_gate;
  };

  // Throws std::invalid_argument if sizes and parameters do not fit together.
  MatrixRecurrence(const Sizes& sizes, Convolution convolution, Parameters parameters);

  // rows [tokens][width], overwritten; out [tokens][heads * value_size]. Throws std::invalid_argument if the state has
  // too few slots.
  void operator()(const StepRows& rows, const RecurrentState& state, const StateStep& step,
                  const StepRows& out) const;

 private:
  // The first columns of the parts of a row, and its width.
  struct Columns {
    int64_t convolution, q, k, v, z, factor, gate, width;
  };
  struct Call;
  struct Slab;
  static Columns columns_of(const Sizes& sizes);
  void check() const;
  void prepare(const Call& call) const;
  void compute_gates(const Call& call, int64_t token) const;
  void scale_columns(const Call& call, int64_t token, int64_t first, int64_t last) const;
  void scan(const Call& call) const;
  void scan_slab(const Call& call, const Slab& slab, const float* ahead, int worker) const;
  float* state_of(const Call& call, const Slab& slab, int32_t slot) const;
  void finish(const Call& call) const;

  Sizes sizes_;
  Columns columns_;
  Convolution convolution_;
  Parameters parameters_;
};

}  // namespace chairlift
