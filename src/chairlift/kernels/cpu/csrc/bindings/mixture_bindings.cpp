#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "bindings/binding_arguments.h"
#include "linear/mixture.h"
#include "runtime/tape.h"

namespace nb = nanobind;

namespace chairlift {
namespace {

using Layers = std::vector<std::shared_ptr<Linear>>;

void construct(Mixture* self, const std::shared_ptr<Linear>& router, const Layers& up, const Layers& down,
               int64_t experts_per_token, bool of_chosen, const std::optional<Vector>& expert_scales, bool has_sigmoid,
               float sum_eps, float sum_min, float scale, const std::optional<Vector>& selection_bias, int64_t num_groups,
               int64_t groups_per_token) {
  if (up.size() != down.size()) throw std::invalid_argument("up and down must have as many layers");
  std::vector<Mixture::Expert> experts;
  for (size_t i = 0; i < up.size(); ++i) experts.push_back({up[i], down[i]});
  new (self) Mixture(router, std::move(experts),
                     {experts_per_token, of_chosen, has_sigmoid, sum_eps, sum_min, scale, to_vector(expert_scales),
                      to_vector(selection_bias), num_groups, groups_per_token});
}

void call(const Mixture& mixture, uintptr_t routed, int64_t routed_stride, uintptr_t x, int64_t x_stride, int64_t rows,
          uintptr_t out, int64_t out_stride) {
  const auto compute = [&mixture, routed = reinterpret_cast<const float*>(routed), routed_stride,
                        x = reinterpret_cast<const float*>(x), x_stride, rows, out = reinterpret_cast<float*>(out),
                        out_stride] { mixture(routed, routed_stride, x, x_stride, rows, out, out_stride); };
  compute();
  if (Tape* tape = Tape::recording()) tape->add_products(mixture.router(), [compute](const Tape::Step&) { compute(); });
}

}  // namespace

void bind_mixture(nb::module_& m) {
  nb::class_<Mixture>(m, "ExpertMixture",
                      R"(A mixture of experts: out = the sum of weight * down(up(x)) over the chosen experts of a row.

Args:
    router: The layer of the logits, with one output for each expert.
    up, down: The layers of each expert, kept alive. The prologue of `up` is usually a norm, and that of `down` the
        activation.
    experts_per_token: The number of experts with the largest scores that compute a row.
    of_chosen: Whether weights are the scores of the chosen experts divided by their sum, or the scores.
    expert_scales: float32 [num_experts], copied, the factors of the weights; None for no factors.
    has_sigmoid: Whether a score is the sigmoid of a logit instead of the softmax over all logits.
    sum_eps: Is added to the sum of the scores of the chosen experts, unless it is a softmax without selection_bias.
    sum_min: The least number by which such scores are divided.
    scale: The factor of all weights.
    selection_bias: float32 [num_experts], copied, is added to the scores for the choice only; None for no bias.
    num_groups: The number of equal groups of consecutive experts.
    groups_per_token: The number of groups with the largest scores, from which the experts of a row are chosen. The
        score of a group is that of its best expert, or with `has_sigmoid` the sum of those of its best two.

Raises:
    ValueError: The layers or groups do not fit, or there are fewer experts than experts_per_token.)")
      .def("__init__", &construct, nb::arg("router"), nb::arg("up"), nb::arg("down"), nb::arg("experts_per_token"),
           nb::arg("of_chosen"), nb::arg("expert_scales").none() = nb::none(), nb::arg("has_sigmoid") = false,
           nb::arg("sum_eps") = 0.0f, nb::arg("sum_min") = 0.0f, nb::arg("scale") = 1.0f,
           nb::arg("selection_bias").none() = nb::none(),
           nb::arg("num_groups") = 1, nb::arg("groups_per_token") = 1)
      .def("__call__", &call, nb::arg("routed_ptr"), nb::arg("routed_stride"), nb::arg("x_ptr"), nb::arg("x_stride"),
           nb::arg("num_rows"), nb::arg("out_ptr"), nb::arg("out_stride"), nb::call_guard<nb::gil_scoped_release>(),
           R"(Compute the mixture for all rows.

Args:
    routed_ptr: float32 [num_rows, in_features of the router].
    routed_stride: The distance between rows of routed, in floats.
    x_ptr: float32 [num_rows, in_features of the experts], which may be the same.
    x_stride: The distance between rows of x, in floats.
    num_rows: The number of rows.
    out_ptr: float32 [num_rows, in_features of the experts], overwritten, without overlap with x.
    out_stride: The distance between rows of out, in floats.)");
}

}  // namespace chairlift
