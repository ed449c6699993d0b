#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/binding_arguments.h"
#include "linear/ggml_blocks.h"
#include "linear/linear.h"
#include "runtime/tape.h"

namespace nb = nanobind;

namespace chairlift {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using BrainBits = nb::ndarray<const uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

nb::builtin_exception value_error(const std::string& message) { return nb::value_error(message.c_str()); }

void check_rows(const PackedMatrix& matrix, int64_t first_row, int64_t num_rows) {
  if (first_row < 0 || num_rows < 0 || first_row + num_rows > matrix.out_features())
    throw value_error("rows " + std::to_string(first_row) + " to " + std::to_string(first_row + num_rows - 1) +
                      " are outside the matrix, which has " + std::to_string(matrix.out_features()) + " rows");
}

void pack_blocks(PackedMatrix& matrix, int64_t first_row, const Bytes& rows) {
  const auto num_rows = static_cast<int64_t>(rows.shape(0)), num_bytes = static_cast<int64_t>(rows.shape(1));
  check_rows(matrix, first_row, num_rows);
  const int64_t row_bytes = matrix.source_row_bytes();
  if (num_bytes != row_bytes)
    throw value_error("rows must have row_bytes=" + std::to_string(row_bytes) + " bytes each, got " +
                      std::to_string(num_bytes));
  const nb::gil_scoped_release release;
  matrix.pack_blocks(first_row, num_rows, rows.data(), num_bytes);
}

template <typename Rows>
void pack_floats(PackedMatrix& matrix, int64_t first_row, const Rows& rows) {
  const auto num_rows = static_cast<int64_t>(rows.shape(0)), width = static_cast<int64_t>(rows.shape(1));
  check_rows(matrix, first_row, num_rows);
  if (width != matrix.in_features())
    throw value_error("rows must have in_features=" + std::to_string(matrix.in_features()) + " values each, got " +
                      std::to_string(width));
  if (matrix.format() == WeightFormat::f8_e4m3 || (is_grouped(matrix.format()) && !can_round(matrix.format())))
    throw value_error(std::string("floats cannot be rounded to ") + name_of(matrix.format()) +
                      ": use pack_blocks, or one of q4_0, q4_1, q8_0, int8, bf16, f16, f32");
  const nb::gil_scoped_release release;
  matrix.pack_floats(first_row, num_rows, rows.data(), width);
}

auto unpack(const PackedMatrix& matrix, int64_t first_row, int64_t num_rows) {
  check_rows(matrix, first_row, num_rows);
  const auto width = static_cast<size_t>(matrix.in_features());
  auto* values = new float[static_cast<size_t>(num_rows) * width];
  nb::capsule owner(values, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  {
    const nb::gil_scoped_release release;
    matrix.unpack(first_row, num_rows, values);
  }
  return nb::ndarray<nb::numpy, float, nb::ndim<2>>(values, {static_cast<size_t>(num_rows), width}, owner);
}

// Computes multiply(next layer or null), and records it.
template <typename Multiply>
void record(const Linear& linear, Multiply multiply) {
  multiply(nullptr);
  if (Tape* tape = Tape::recording()) tape->add_linear(linear, multiply);
}

void call(const Linear& linear, uintptr_t x, int64_t x_stride, int64_t rows, uintptr_t out, int64_t out_stride,
          bool add) {
  record(linear, [&linear, x = reinterpret_cast<const float*>(x), x_stride, rows, out = reinterpret_cast<float*>(out),
                  out_stride, add](const Linear* next) { linear(x, x_stride, rows, out, out_stride, add, next); });
}

void feed(const Linear& up, const Linear& down, uintptr_t x, int64_t x_stride, int64_t rows, uintptr_t inner,
          int64_t inner_stride, uintptr_t out, int64_t out_stride, bool add) {
  record(up, [&up, &down, x = reinterpret_cast<const float*>(x), x_stride, rows, inner = reinterpret_cast<float*>(inner),
              inner_stride, out = reinterpret_cast<float*>(out), out_stride, add](const Linear* next) {
    up.feed(down, x, x_stride, rows, inner, inner_stride, out, out_stride, add, next);
  });
}

using Rows = std::pair<uintptr_t, int64_t>;  // an address and the distance between rows

void each(const std::vector<const Linear*>& layers, const std::vector<Rows>& inputs, const std::vector<Rows>& outputs,
          int64_t num_rows) {
  if (layers.empty() || inputs.size() != layers.size() || outputs.size() != layers.size())
    throw std::invalid_argument("layers, inputs and outputs must have the same number of entries, at least one");
  std::vector<Linear::Part> parts;
  for (size_t i = 0; i < layers.size(); ++i)
    parts.push_back({layers[i], reinterpret_cast<const float*>(inputs[i].first), inputs[i].second,
                     reinterpret_cast<float*>(outputs[i].first), outputs[i].second});
  Linear::each(parts, num_rows);
  if (Tape* tape = Tape::recording())
    tape->add_products(*layers[0], [parts, num_rows](const Tape::Step&) { Linear::each(parts, num_rows); });
}

}  // namespace

void bind_linear(nb::module_& m) {
  nb::class_<PackedMatrix>(m, "PackedMatrix",
                           R"(A weight matrix [out_features, in_features] in the layout that products read.

Args:
    format: The storage format: "int8", "f8_e4m3", "bf16", "f16", "f32", a block type of ggml in lower case ("q4_0",
        "q4_1", "q5_0", "q5_1", "q8_0", "q2_k" to "q6_k", "iq4_nl", "iq4_xs" or "mxfp4"), or "u4_g32", "u4_g128" or
        "u8_g32" with integer zero points.
    out_features, in_features: The shape.

Raises:
    ValueError: The format is unknown, the shape has no rows or no columns, or the format has blocks of 128 or 256 inputs and
        in_features is not a multiple.)")
      .def("__init__",
           [](PackedMatrix* self, const std::string& format, int64_t out_features, int64_t in_features) {
             new (self) PackedMatrix(parse_weight_format(format), out_features, in_features);
           },
           nb::arg("format"), nb::arg("out_features"), nb::arg("in_features"))
      .def("pack_blocks", &pack_blocks, nb::arg("first_row"), nb::arg("rows"),
           R"(Write rows from the bytes of a file in this format.

Args:
    first_row: The first row of the matrix that is written.
    rows: uint8 [num_rows, row_bytes]: blocks as in GGUF files, or plain values; in "int8" signed bytes and the scale
        of the row, in "f8_e4m3" bytes and the scale of each 128 inputs, in float32. A block with a zero point is the
        scale in float16, the zero point in a byte, and the values, of which each 32 of four bits are stored as in q4_0.

Raises:
    ValueError: The rows are outside the matrix, or do not have row_bytes bytes each.)")
      .def("pack_floats", &pack_floats<Floats>, nb::arg("first_row"), nb::arg("rows"),
           R"(Write rows from floats, rounded to the format.

Args:
    first_row: The first row of the matrix that is written.
    rows: float32 [num_rows, in_features].

Raises:
    ValueError: The rows are outside the matrix, do not have in_features values each, or cannot be rounded to the
        format.)")
      .def("pack_bfloat16", &pack_floats<BrainBits>, nb::arg("first_row"), nb::arg("rows").noconvert(),
           R"(Write rows from bfloat16, rounded to the format.

Args:
    first_row: The first row of the matrix that is written.
    rows: uint16 [num_rows, in_features], the bits of bfloat16.

Raises:
    ValueError: The rows are outside the matrix, do not have in_features values each, or cannot be rounded to the
        format.)")
      .def("set_input_order",
           [](PackedMatrix& self, const std::vector<int32_t>& order) { self.set_input_order(order); }, nb::arg("order"),
           R"(Set the order of the columns as they were packed.

Args:
    order: For each packed column the input that it multiplies, in_features distinct numbers.

Raises:
    ValueError: A number is missing, repeated or out of range.)")
      .def("unpack", &unpack, nb::arg("first_row"), nb::arg("num_rows"),
           R"(Return the values of rows as products use them: float32 [num_rows, in_features].

Raises:
    ValueError: The rows are outside the matrix.)")
      .def("gather",
           [](const PackedMatrix& self, uintptr_t ids, int64_t num_ids, uintptr_t out) {
             self.gather(reinterpret_cast<const int64_t*>(ids), num_ids, reinterpret_cast<float*>(out));
           },
           nb::arg("ids_ptr"), nb::arg("num_ids"), nb::arg("out_ptr"), nb::call_guard<nb::gil_scoped_release>(),
           R"(Copy rows by id, as floats.

Args:
    ids_ptr: int64 [num_ids], each from 0 to out_features - 1; not checked.
    num_ids: The number of ids.
    out_ptr: float32 [num_ids, in_features], overwritten.)")
      .def_prop_ro("format", [](const PackedMatrix& self) { return std::string(name_of(self.format())); },
                   "The storage format.")
      .def_prop_ro("out_features", &PackedMatrix::out_features, "The number of rows.")
      .def_prop_ro("in_features", &PackedMatrix::in_features, "The number of columns.")
      .def_prop_ro("row_bytes", &PackedMatrix::source_row_bytes,
                   "Bytes of one row for `pack_blocks`.")
      .def_prop_ro("num_bytes", &PackedMatrix::num_bytes, "Bytes of the matrix in memory, including padding.");

  nb::class_<Linear>(m, "FusedLinear",
                     R"(A linear layer over rows of float32: out = [out +] prologue(x) @ matrix.T + bias.

Args:
    parts: Matrices with the same input in the same order, whose outputs follow each other; the layer keeps them alive.
        Their formats are equal, or all of them have blocks.
    bias: float32 [out_features], copied; None adds nothing.
    prologue: The function of each row before the product: "none", "rms_norm", "layer_norm", "silu", "gelu",
        "gelu_tanh", "relu", "relu2", "xielu", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "relu_and_mul",
        "relu2_and_mul" or "swigluoai_and_mul".
    norm_weight: float32 [in_features], copied; for "rms_norm" and "layer_norm".
    norm_bias: float32 [in_features], copied; for "layer_norm".
    eps: The constant that both norms add to the variance.
    parameters: The factor of the gate of a gated prologue, or nothing; alpha_p, alpha_n, beta and eps of "xielu".

Raises:
    ValueError: The prologue is unknown, a vector is missing or has another length, or the matrices do not fit.)")
      .def("__init__",
           [](Linear* self, const std::vector<std::shared_ptr<PackedMatrix>>& parts, const std::optional<Vector>& bias,
              const std::string& prologue, const std::optional<Vector>& norm_weight,
              const std::optional<Vector>& norm_bias, float eps, const std::vector<float>& parameters) {
             new (self) Linear({parts.begin(), parts.end()}, to_vector(bias), parse_prologue(prologue), to_vector(norm_weight),
                               to_vector(norm_bias), eps, parameters);
           },
           nb::arg("parts"), nb::arg("bias").none() = nb::none(), nb::arg("prologue") = "none",
           nb::arg("norm_weight").none() = nb::none(), nb::arg("norm_bias").none() = nb::none(), nb::arg("eps") = 0.0f,
           nb::arg("parameters") = std::vector<float>())
      .def("__init__",
           [](Linear* self, const std::vector<std::shared_ptr<PackedMatrix>>& parts, const std::optional<Vector>& bias,
              const Norm& norm) {
             new (self) Linear({parts.begin(), parts.end()}, to_vector(bias), norm);
           },
           nb::arg("parts"), nb::arg("bias").none(), nb::arg("norm"),
           "The same with a norm, or none, whose weights are shared with other layers.")
      .def("__call__", &call,
           nb::arg("x_ptr"), nb::arg("x_stride"), nb::arg("num_rows"), nb::arg("out_ptr"), nb::arg("out_stride"),
           nb::arg("add"), nb::call_guard<nb::gil_scoped_release>(), R"(Compute the layer for all rows.

Args:
    x_ptr: float32 [num_rows, in_features], or [num_rows, 2 * in_features] for prologues whose names end in "_and_mul".
    x_stride: The distance between rows of x, in floats.
    num_rows: The number of rows.
    out_ptr: float32 [num_rows, out_features], without overlap with x.
    out_stride: The distance between rows of out, in floats.
    add: Whether the result is added to the values in out, instead of replacing them.)")
      .def("can_feed", &Linear::can_feed, nb::arg("down"),
           R"(Return whether `feed` can compute this layer and then `down`.

The prologue of `down` must be gated, and this layer must have its gate and up values as outputs, as multiples of 16.)")
      .def("feed", &feed, nb::arg("down"), nb::arg("x_ptr"), nb::arg("x_stride"), nb::arg("num_rows"), nb::arg("inner_ptr"),
           nb::arg("inner_stride"), nb::arg("out_ptr"), nb::arg("out_stride"), nb::arg("add"),
           nb::call_guard<nb::gil_scoped_release>(),
           R"(Compute this layer and then `down`, with the bits of two calls.

The gated prologue of `down` is computed with the outputs of this layer while they are in the caches.

Args:
    down: The layer that follows.
    x_ptr: float32 [num_rows, in_features] of this layer.
    x_stride: The distance between rows of x, in floats.
    num_rows: The number of rows.
    inner_ptr: float32 [num_rows, in_features of down], which may be overwritten.
    inner_stride: The distance between rows of inner, in floats.
    out_ptr: float32 [num_rows, out_features of down], without overlap with the others.
    out_stride: The distance between rows of out, in floats.
    add: Whether the result is added to the values in out, instead of replacing them.

Raises:
    ValueError: The layers do not fit, see `can_feed`.)");
  m.def("multiply_each", &each, nb::arg("layers"), nb::arg("inputs"), nb::arg("outputs"), nb::arg("num_rows"),
        nb::call_guard<nb::gil_scoped_release>(),
        R"(Compute layers that do not depend on each other, each on one thread if that leaves no thread idle.

Args:
    layers: One or more layers.
    inputs: For each layer the address of x, as in `FusedLinear`, and the distance between its rows in floats.
    outputs: The same of out, which is overwritten.
    num_rows: The number of rows of every layer.

Raises:
    ValueError: The numbers of layers, inputs and outputs differ, or are zero.)");
}

}  // namespace chairlift
