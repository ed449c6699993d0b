#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "linear.h"
#include "tape.h"

namespace nb = nanobind;

namespace chairlift {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check_rows(const PackedMatrix& matrix, int64_t first_row, int64_t num_rows) {
  if (first_row < 0 || num_rows < 0 || first_row + num_rows > matrix.out_features())
    throw nb::value_error("rows lie outside of the matrix");
}

void pack_blocks(PackedMatrix& matrix, int64_t first_row, const Bytes& rows) {
  const auto num_rows = static_cast<int64_t>(rows.shape(0)), num_bytes = static_cast<int64_t>(rows.shape(1));
  check_rows(matrix, first_row, num_rows);
  if (num_bytes == 0 || num_bytes != matrix.source_row_bytes())
    throw nb::value_error("a row has another number of bytes than this format and width ask for");
  const nb::gil_scoped_release release;
  matrix.pack_blocks(first_row, num_rows, rows.data(), num_bytes);
}

void pack_floats(PackedMatrix& matrix, int64_t first_row, const Floats& rows) {
  const auto num_rows = static_cast<int64_t>(rows.shape(0)), width = static_cast<int64_t>(rows.shape(1));
  check_rows(matrix, first_row, num_rows);
  if (width != matrix.in_features()) throw nb::value_error("a row must have in_features values");
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

std::vector<float> to_vector(const std::optional<Vector>& values) {
  if (!values) return {};
  return {values->data(), values->data() + values->shape(0)};
}

Prologue parse_prologue(const std::string& name) {
  if (name == "none") return Prologue::none;
  if (name == "rms_norm") return Prologue::rms_norm;
  if (name == "layer_norm") return Prologue::layer_norm;
  if (name == "silu_and_mul") return Prologue::silu_and_mul;
  if (name == "relu") return Prologue::relu;
  throw nb::value_error("prologue must be one of none, rms_norm, layer_norm, silu_and_mul, relu");
}

void call(const Linear& linear, uintptr_t x, int64_t x_stride, int64_t rows, uintptr_t out, int64_t out_stride,
          bool add) {
  const auto multiply = [&linear, x = reinterpret_cast<const float*>(x), x_stride, rows,
                         out = reinterpret_cast<float*>(out), out_stride,
                         add](const Linear* next) { linear(x, x_stride, rows, out, out_stride, add, next); };
  multiply(nullptr);
  if (Tape* tape = Tape::recording()) tape->add_linear(linear, multiply);
}

}  // namespace

void bind_linear(nb::module_& m) {
  nb::class_<PackedMatrix>(m, "PackedMatrix", "A weight matrix [out_features, in_features] in a kernel's own layout.")
      .def("__init__",
           [](PackedMatrix* self, const std::string& format, int64_t out_features, int64_t in_features) {
             new (self) PackedMatrix(parse_weight_format(format), out_features, in_features);
           },
           nb::arg("format"), nb::arg("out_features"), nb::arg("in_features"))
      .def("pack_blocks", &pack_blocks, nb::arg("first_row"), nb::arg("rows"),
           "Rows from the bytes of a file in this format: uint8 [rows, bytes].")
      .def("pack_floats", &pack_floats, nb::arg("first_row"), nb::arg("rows"),
           "Rows from float32 [rows, in_features], rounded to the format.")
      .def("unpack", &unpack, nb::arg("first_row"), nb::arg("num_rows"),
           "The values that products use: float32 [num_rows, in_features].")
      .def("gather",
           [](const PackedMatrix& self, uintptr_t ids, int64_t n, uintptr_t out) {
             self.gather(reinterpret_cast<const int64_t*>(ids), n, reinterpret_cast<float*>(out));
           },
           nb::arg("ids"), nb::arg("n"), nb::arg("out"), nb::call_guard<nb::gil_scoped_release>(),
           "Rows by int64 id, addresses of both: out is float32 [n, in_features]. Ids are not checked.")
      .def_prop_ro("format", [](const PackedMatrix& self) { return std::string(name_of(self.format())); })
      .def_prop_ro("out_features", &PackedMatrix::out_features)
      .def_prop_ro("in_features", &PackedMatrix::in_features)
      .def_prop_ro("row_bytes", &PackedMatrix::source_row_bytes, "Bytes of a row for pack_blocks; 0: there is none.")
      .def_prop_ro("num_bytes", &PackedMatrix::num_bytes);

  nb::class_<Linear>(m, "Linear", "out = [out +] prologue(x) @ matrix.T + bias, rows of float32.")
      .def("__init__",
           [](Linear* self, std::shared_ptr<PackedMatrix> matrix, const std::optional<Vector>& bias,
              const std::string& prologue, const std::optional<Vector>& norm_weight,
              const std::optional<Vector>& norm_bias, float eps) {
             new (self) Linear(std::move(matrix), to_vector(bias), parse_prologue(prologue), to_vector(norm_weight),
                               to_vector(norm_bias), eps);
           },
           nb::arg("matrix"), nb::arg("bias").none() = nb::none(), nb::arg("prologue") = "none",
           nb::arg("norm_weight").none() = nb::none(), nb::arg("norm_bias").none() = nb::none(), nb::arg("eps") = 0.0f)
      .def("__call__", &call,
           nb::arg("x"), nb::arg("x_stride"), nb::arg("rows"), nb::arg("out"), nb::arg("out_stride"), nb::arg("add"),
           nb::call_guard<nb::gil_scoped_release>(), "Addresses of the first rows; strides in floats.");
}

}  // namespace chairlift
