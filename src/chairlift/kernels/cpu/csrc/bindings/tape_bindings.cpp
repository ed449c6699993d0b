#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "recurrence/state_step.h"
#include "runtime/tape.h"

namespace nb = nanobind;

namespace chairlift {

void bind_tape(nb::module_& m) {
  nb::class_<Tape>(m, "Tape",
                   R"(A recording of calls of layers, to be repeated in other steps.

Everything that the recorded calls read or write must outlive the tape.)")
      .def(nb::init<>())
      .def("start", &Tape::start, nb::arg("steps"),
           R"(Record the calls of this thread from now on, on this tape instead of any other.

Args:
    steps: The steps that the recorded calls of attention use.)")
      .def_static("stop", [] { Tape::recording() = nullptr; }, "Stop recording the calls of this thread.")
      .def("__len__", &Tape::size, "Return the number of recorded calls.")
      .def("replay",
           [](const Tape& self, std::vector<AttentionStep*> steps, uintptr_t positions, const StateStep* states) {
             if (steps.size() != self.num_steps())
               throw nb::value_error(("steps must have " + std::to_string(self.num_steps()) +
                                      " items, as recorded, got " + std::to_string(steps.size())).c_str());
             if (self.reads_states() && !states)
               throw nb::value_error("states must not be None, because recurrences were recorded");
             const nb::gil_scoped_release release;
             self.replay({std::move(steps), reinterpret_cast<const int64_t*>(positions), states});
           },
           nb::arg("steps"), nb::arg("positions_ptr"), nb::arg("states").none() = nb::none(), R"(Repeat the recorded calls in their order.

Args:
    steps: The steps that take the places of the recorded ones.
    positions_ptr: int64 [num_tokens], the positions for rotary embedding.
    states: The recurrent states of the step; None if no recurrence was recorded.

Raises:
    ValueError: The number of steps is not that of the recorded ones, or states is missing.)");
}

}  // namespace chairlift
