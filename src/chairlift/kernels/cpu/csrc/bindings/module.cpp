#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "runtime/isa.h"
#include "runtime/pool.h"

namespace nb = nanobind;

namespace chairlift {

void bind_linear(nb::module_& m);
void bind_residual(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_sampling(nb::module_& m);
void bind_ceilings(nb::module_& m);
void bind_mixture(nb::module_& m);
void bind_lora(nb::module_& m);
void bind_recurrence(nb::module_& m);
void bind_tape(nb::module_& m);

static void set_num_threads(int num_threads) {
  if (num_threads < 1 || num_threads > Pool::kMaxThreads)
    throw nb::value_error(("num_threads must be from 1 to 256, got " + std::to_string(num_threads)).c_str());
  Pool::get().set_num_threads(num_threads);
}

static void bind_process(nb::module_& m) {
  m.def("isa", [] { return std::string(isa().name); }, R"(Return the name of the instruction set in use.

Raises:
    RuntimeError: CHAIRLIFT_CPU_ISA names an instruction set that this CPU does not have.)");
  m.def("available_isas", &available_isas, "Return the instruction sets of this CPU that have kernels, best first.");
  m.def("set_isa", &set_isa, nb::arg("name"), R"(Change the instruction set of this process, in tests and benchmarks.

Raises:
    RuntimeError: This CPU does not have the instruction set.)");
  m.def("set_num_threads", &set_num_threads, nb::arg("num_threads"),
        R"(Set how many threads compute, from 1 to 256, including the calling thread.

Raises:
    ValueError: The number is out of range.)");
  m.def("num_threads", [] { return Pool::get().num_threads(); },
        "Return how many threads compute, including the calling thread.");
  m.def("set_tile_order", [](uint64_t seed) { Pool::get().set_tile_order(seed); }, nb::arg("seed"),
        "Distribute tiles to threads in a random order that depends on the seed, in tests; 0 is the ascending order.");
}

}  // namespace chairlift

NB_MODULE(_native, m) {
  m.doc() = R"(Native kernels for the CPU: linear layers, attention over paged KV memory, recurrences, and sampling.

A parameter whose name ends in `_ptr` is the address of the first element of an array in host memory. The caller
guarantees its shape and dtype, which are not checked, and keeps the array alive until the call returns. All other arrays
are NumPy arrays in C order, whose shape and dtype are checked.)";
  nb::set_leak_warnings(false);  // a process that ends with a model loaded has not leaked it
  chairlift::bind_process(m);
  chairlift::bind_linear(m);
  chairlift::bind_residual(m);
  chairlift::bind_mixture(m);
  chairlift::bind_lora(m);
  chairlift::bind_attention(m);
  chairlift::bind_sampling(m);
  chairlift::bind_ceilings(m);
  chairlift::bind_recurrence(m);
  chairlift::bind_tape(m);
}
