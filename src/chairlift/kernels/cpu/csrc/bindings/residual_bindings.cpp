#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "bindings/binding_arguments.h"
#include "linear/residual_sum.h"
#include "runtime/tape.h"

namespace nb = nanobind;

namespace chairlift {
namespace {

void call(const ResidualSum& sum, uintptr_t stream, int64_t stream_stride, uintptr_t branch, int64_t branch_stride,
          int64_t num_rows, int64_t size) {
  const ResidualSum::Rows rows = {reinterpret_cast<float*>(stream), stream_stride, reinterpret_cast<float*>(branch),
                                  branch_stride, num_rows, size};
  sum(rows);
  if (Tape* tape = Tape::recording()) tape->add([&sum, rows](const Tape::Step&) { sum(rows); });
}

void gate(uintptr_t x, int64_t x_stride, uintptr_t logits, int64_t logits_stride, int64_t num_rows, int64_t size,
          int64_t num_gates, const std::string& activation) {
  if (activation != "sigmoid" && activation != "softplus")
    throw std::invalid_argument("activation must be sigmoid or softplus, got '" + activation + "'");
  const GatedRows rows = {reinterpret_cast<float*>(x), x_stride, reinterpret_cast<const float*>(logits),
                          logits_stride, num_rows, size, num_gates,
                          activation == "sigmoid" ? GateActivation::sigmoid : GateActivation::softplus};
  multiply_by_gates(rows);
  if (Tape* tape = Tape::recording()) tape->add([rows](const Tape::Step&) { multiply_by_gates(rows); });
}

}  // namespace

void bind_residual(nb::module_& m) {
  nb::class_<Norm>(m, "Norm", R"(A norm of rows, or none.

Args:
    kind: "none", "rms_norm" or "layer_norm".
    weight: float32 [size], copied; None for "none".
    bias: float32 [size], copied; for "layer_norm".
    eps: The constant that both norms add to the variance.

Raises:
    ValueError: The kind is unknown or no norm, or a vector is missing or has another length.)")
      .def("__init__",
           [](Norm* self, const std::string& kind, const std::optional<Vector>& weight,
              const std::optional<Vector>& bias, float eps) {
             new (self) Norm(parse_prologue(kind), to_vector(weight), to_vector(bias), eps);
           },
           nb::arg("kind"), nb::arg("weight").none() = nb::none(), nb::arg("bias").none() = nb::none(),
           nb::arg("eps") = 0.0f);
  nb::class_<ResidualSum>(m, "ResidualSum",
                          R"(The sum of the residual stream and a branch.

It is scale * of_sum(stream + multiplier * after(branch)).

Args:
    after: The norm of the branch; copied.
    of_sum: The norm of the sum; copied.
    multiplier: The factor of the branch.
    scale: The factor of the result.)")
      .def(nb::init<const Norm&, const Norm&, float, float>(), nb::arg("after"), nb::arg("of_sum"),
           nb::arg("multiplier"), nb::arg("scale") = 1.0f)
      .def("__call__", &call, nb::arg("stream_ptr"), nb::arg("stream_stride"), nb::arg("branch_ptr"),
           nb::arg("branch_stride"), nb::arg("num_rows"), nb::arg("size"), nb::call_guard<nb::gil_scoped_release>(),
           R"(Compute the sum for all rows, in the memory of the stream.

Args:
    stream_ptr: float32 [num_rows, size], overwritten with the result.
    stream_stride, branch_stride: The distance between rows, in floats.
    branch_ptr: float32 [num_rows, size], whose values are lost; 0 adds nothing.
    num_rows: The number of rows.
    size: The values of a row.

Raises:
    ValueError: The weights of a norm have another size.)");
  m.def("gate", &gate, nb::arg("x_ptr"), nb::arg("x_stride"), nb::arg("logits_ptr"), nb::arg("logits_stride"),
        nb::arg("num_rows"), nb::arg("size"), nb::arg("num_gates"), nb::arg("activation"),
        nb::call_guard<nb::gil_scoped_release>(), R"(Multiply rows by activation(logits), in their memory.

Args:
    x_ptr: float32 [num_rows, size], overwritten with the product.
    x_stride, logits_stride: The distance between rows, in floats.
    logits_ptr: float32 [num_rows, num_gates]. Each logit is that of size / num_gates consecutive values.
    num_rows: The number of rows.
    size: The values of a row.
    num_gates: The number of logits of a row.
    activation: "sigmoid" or "softplus".

Raises:
    ValueError: The activation is unknown, or num_gates does not divide size.)");
}

}  // namespace chairlift
