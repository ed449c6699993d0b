#include <nanobind/nanobind.h>

#include "attention.h"
#include "tape.h"

namespace nb = nanobind;

namespace chairlift {

void bind_tape(nb::module_& m) {
  nb::class_<Tape>(m, "Tape", "Calls of Linear and Attention.forward, which see the same memory in every step.")
      .def(nb::init<>())
      .def("start", [](Tape& self) { Tape::recording() = &self; }, "Record what this thread calls from now on.")
      .def_static("stop", [] { Tape::recording() = nullptr; })
      .def("__len__", &Tape::size)
      .def("replay",
           [](const Tape& self, AttentionStep* step, uintptr_t positions) {
             if (!step && self.needs_step()) throw nb::value_error("there is attention on the tape: give its step");
             const nb::gil_scoped_release release;
             self.replay({step, reinterpret_cast<const int64_t*>(positions)});
           },
           nb::arg("step").none(), nb::arg("positions"),
           "Make the calls again, in their order, with this step and the address of its positions. None: no attention "
           "is on the tape.");
}

}  // namespace chairlift
