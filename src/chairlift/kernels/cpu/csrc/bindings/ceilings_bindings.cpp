#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "runtime/ceilings.h"

namespace nb = nanobind;

namespace chairlift {

void bind_ceilings(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  m.def("measure_products", &measure_products, nb::arg("unit"), nb::arg("seconds"), Release(),
        R"(Measure the products of one unit on all threads.

Args:
    unit: "dot_s8s8" (bytes of weights and activations), "dot_u4s8" (the same with weights of four bits), "fma"
        (float32), "tile_s8" or "tile_bf16" (tile instructions), or "dot_bf16" (AVX-512 BF16).
    seconds: How long to repeat samples; the best one counts. 0 takes one sample, about ten milliseconds.

Returns:
    Additions and multiplications per second; 0 where the instruction set has no such products.

Raises:
    ValueError: The unit is unknown.)");
  m.def("measure_barrier", &measure_barrier, nb::arg("seconds"), Release(),
        R"(Measure the least time of a job in which all threads meet once, and which computes nothing.

Args:
    seconds: How long to repeat samples; the best one counts. 0 takes one sample, less than ten milliseconds.

Returns:
    Seconds of one job.)");
  nb::class_<ReadBuffer>(m, "ReadBuffer", R"(A buffer that all threads read, to measure the bandwidth of memory.

Args:
    num_bytes: The size; larger than the caches to measure memory.)")
      .def(nb::init<int64_t>(), nb::arg("num_bytes"), Release())
      .def("measure", &ReadBuffer::measure, nb::arg("seconds"), Release(),
           "Measure reads of the whole buffer on all threads: bytes per second.");
}

}  // namespace chairlift
