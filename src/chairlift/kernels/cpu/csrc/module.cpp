#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "isa.h"
#include "pool.h"

namespace nb = nanobind;

namespace chairlift {

void bind_linear(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_sampling(nb::module_& m);
void bind_ceilings(nb::module_& m);
void bind_tape(nb::module_& m);

static void set_num_threads(int num_threads) {
  if (num_threads < 1 || num_threads > Pool::kMaxThreads)
    throw nb::value_error("num_threads must be between 1 and 256");
  Pool::get().set_num_threads(num_threads);
}

static void bind_process(nb::module_& m) {
  m.def("isa", [] { return std::string(isa().name); }, "The instruction set in use.");
  m.def("available_isas", &available_isas, "Instruction sets of this CPU, best first.");
  m.def("set_isa", &set_isa, "Change the instruction set of this process (tests, benchmarks).");
  m.def("set_num_threads", &set_num_threads, "Threads that work, the calling one included.");
  m.def("num_threads", [] { return Pool::get().num_threads(); });
  m.def("set_tile_order", [](uint64_t seed) { Pool::get().set_tile_order(seed); },
        "Tests: hand tiles out in an order that depends on the seed; 0 is ascending.");
}

}  // namespace chairlift

NB_MODULE(_native, m) {
  m.doc() = "Native CPU kernels.";
  nb::set_leak_warnings(false);  // a process that ends with a model loaded has not leaked it
  chairlift::bind_process(m);
  chairlift::bind_linear(m);
  chairlift::bind_attention(m);
  chairlift::bind_sampling(m);
  chairlift::bind_ceilings(m);
  chairlift::bind_tape(m);
}
