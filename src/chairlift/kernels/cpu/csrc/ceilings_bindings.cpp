#include <nanobind/nanobind.h>

#include "ceilings.h"

namespace nb = nanobind;

namespace chairlift {

void bind_ceilings(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  m.def("measure_dot_u8s8", &measure_dot_u8s8, nb::arg("seconds"), Release(),
        "Additions and multiplications a second of byte dot products, on all threads.");
  m.def("measure_dot_u4s8", &measure_dot_u4s8, nb::arg("seconds"), Release(),
        "The same where the unsigned bytes are below 16.");
  m.def("measure_fma", &measure_fma, nb::arg("seconds"), Release(), "float32 operations a second, on all threads.");
  nb::class_<ReadBuffer>(m, "ReadBuffer", "So many bytes that all threads read.")
      .def(nb::init<int64_t>(), nb::arg("num_bytes"), Release())
      .def("measure", &ReadBuffer::measure, nb::arg("seconds"), Release(), "Bytes a second.");
}

}  // namespace chairlift
