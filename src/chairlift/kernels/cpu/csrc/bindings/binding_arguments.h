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
  if (name == "none") return Prologue::none;
  if (name == "rms_norm") return Prologue::rms_norm;
  if (name == "layer_norm") return Prologue::layer_norm;
  if (name == "silu_and_mul") return Prologue::silu_and_mul;
  if (name == "gelu_tanh_and_mul") return Prologue::gelu_tanh_and_mul;
  if (name == "swigluoai_and_mul") return Prologue::swigluoai_and_mul;
  if (name == "relu") return Prologue::relu;
  if (name == "relu2") return Prologue::relu2;
  const char* const known =
      "none, rms_norm, layer_norm, silu_and_mul, gelu_tanh_and_mul, swigluoai_and_mul, relu, relu2";
  throw nanobind::value_error((std::string("prologue must be one of ") + known + ", got '" + name + "'").c_str());
}

}  // namespace chairlift
