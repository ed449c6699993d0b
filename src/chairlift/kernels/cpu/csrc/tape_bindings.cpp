#include <nanobind/nanobind.h>

#include "attention.h"
#include "tape.h"

namespace nb = nanobind;

namespace chairlift {

void bind_tape(nb::module_& m) {
  nb::class_<Tape>(m, "Tape",
                   R"(A recording of calls of FusedLinear and PagedAttention.forward, to be repeated in other steps.

Everything that the recorded calls read or write must outlive the tape.)")
      .def(nb::init<>())
      .def("start", [](Tape& self) { Tape::recording() = &self; },
           "Record the calls of this thread from now on, on this tape instead of any other.")
      .def_static("stop", [] { Tape::recording() = nullptr; }, "Stop recording the calls of this thread.")
      .def("__len__", &Tape::size, "Return the number of recorded calls.")
      .def("replay",
           [](const Tape& self, AttentionStep* step, uintptr_t positions) {
             if (!step && self.needs_step())
               throw nb::value_error("step must not be None: the tape contains attention");
             const nb::gil_scoped_release release;
             self.replay({step, reinterpret_cast<const int64_t*>(positions)});
           },
           nb::arg("step").none(), nb::arg("positions_ptr"), R"(Repeat the recorded calls in their order.

Args:
    step: The step for attention; None if the tape contains no attention.
    positions_ptr: int64 [num_tokens], the positions for rotary embedding.

Raises:
    ValueError: step is None and the tape contains attention.)");
}

}  // namespace chairlift
