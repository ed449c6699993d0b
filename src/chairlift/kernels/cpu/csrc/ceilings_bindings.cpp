#include <nanobind/nanobind.h>

#include "ceilings.h"

namespace nb = nanobind;

namespace chairlift {

void bind_ceilings(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  m.def("measure_dot_u8s8", &measure_dot_u8s8, nb::arg("seconds"), Release(),
        R"(Measure dot products of unsigned by signed bytes on all threads.

Args:
    seconds: How long to repeat samples; the best one counts. 0 takes one sample, about ten milliseconds.

Returns:
    Additions and multiplications per second.)");
  m.def("measure_dot_u4s8", &measure_dot_u4s8, nb::arg("seconds"), Release(),
        "Measure the same as `measure_dot_u8s8` where the unsigned bytes are below 16.");
  m.def("measure_fma", &measure_fma, nb::arg("seconds"), Release(),
        "Measure fused multiply-adds of float32 on all threads: additions and multiplications per second.");
  nb::class_<ReadBuffer>(m, "ReadBuffer", R"(A buffer that all threads read, to measure the bandwidth of memory.

Args:
    num_bytes: The size; larger than the caches to measure memory.)")
      .def(nb::init<int64_t>(), nb::arg("num_bytes"), Release())
      .def("measure", &ReadBuffer::measure, nb::arg("seconds"), Release(),
           "Measure reads of the whole buffer on all threads: bytes per second.");
}

}  // namespace chairlift
