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
  m.def("measure_read", &measure_read, nb::arg("num_bytes"), nb::arg("seconds"), Release(),
        "Bytes a second that all threads read from a buffer of so many bytes.");
}

}  // namespace chairlift
