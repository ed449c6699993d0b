// The arguments that linear layers and residual sums have in common, from Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <optional>
#include <string>
#include <vector>

#include "linear/linear_tiles.h"

namespace chairlift {

using Vector = nanobind::ndarray<const float, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

inline std::vector<float> to_vector(const std::optional<Vector>& values) {
  if (!values) return {};
  return {values->data(), values->data() + values->shape(0)};
}

inline Prologue parse_prologue(const std::string& name) {
  static constexpr const char* kNames[] = {"none", "rms_norm", "layer_norm", "silu", "gelu", "gelu_tanh", "relu", "relu2",
                                           "xielu", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "relu_and_mul",
                                           "relu2_and_mul", "swigluoai_and_mul"};
  std::string known;
  for (const char* const& each : kNames) {
    if (name == each) return static_cast<Prologue>(&each - kNames);
    known += (known.empty() ? "" : ", ") + std::string(each);
  }
  throw nanobind::value_error(("prologue must be one of " + known + ", got '" + name + "'").c_str());
}

}  // namespace chairlift
