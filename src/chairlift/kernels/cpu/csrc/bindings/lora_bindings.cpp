#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "lora/lora.h"
#include "runtime/tape.h"

namespace nb = nanobind;

namespace chairlift {
namespace {

using PartAddresses = std::tuple<uintptr_t, uintptr_t, uintptr_t, int64_t>;

void construct(LoraLinear* self, const std::shared_ptr<LoraBatch>& batch, const std::shared_ptr<Linear>& base,
               int64_t max_rank, const std::vector<PartAddresses>& addresses) {
  std::vector<LoraLinear::Part> parts;
  for (const auto& [a, b, ranks, outputs] : addresses)
    parts.push_back({reinterpret_cast<const float*>(a), reinterpret_cast<const float*>(b),
                     reinterpret_cast<const int32_t*>(ranks), outputs});
  new (self) LoraLinear(batch, base, max_rank, std::move(parts));
}

void call(const LoraLinear& lora, uintptr_t x, int64_t x_stride, int64_t rows, uintptr_t out, int64_t out_stride) {
  const auto add = [&lora, x = reinterpret_cast<const float*>(x), x_stride, rows, out = reinterpret_cast<float*>(out),
                    out_stride] { lora(x, x_stride, rows, out, out_stride); };
  add();
  if (Tape* tape = Tape::recording()) tape->add([add](const Tape::Step&) { add(); });
}

}  // namespace

void bind_lora(nb::module_& m) {
  nb::class_<LoraBatch>(m, "LoraBatch", "The LoRA adapters of the rows of a step.")
      .def(nb::init<>())
      .def("set_slots",
           [](LoraBatch& self, uintptr_t slots, int64_t num_rows) {
             self.set_slots(reinterpret_cast<const int64_t*>(slots), num_rows);
           },
           nb::arg("slots_ptr"), nb::arg("num_rows"), R"(Set the adapters of the rows of the next calls.

Args:
    slots_ptr: int64 [num_rows], the adapter slot of each row, or -1 for none.
    num_rows: The number of rows.)");
  nb::class_<LoraLinear>(m, "LoraLinear",
                         R"(The LoRA adapters of a linear layer: out += (prologue(x) @ a.T) @ b for rows with an adapter.

Args:
    batch: The adapters of the rows.
    base: The layer, whose prologue this one has too.
    max_rank: The number of rows of a and b of each adapter slot.
    parts: For consecutive outputs of the layer the addresses of a, float32 [slots, max_rank, in_features], of b, float32
        [slots, max_rank, outputs], and of the ranks, int32 [slots]; and the number of outputs. A rank of 0 adds nothing.
        The caller keeps the arrays alive.

Raises:
    ValueError: The outputs of the parts are not those of the layer.)")
      .def("__init__", &construct, nb::arg("batch"), nb::arg("base"), nb::arg("max_rank"), nb::arg("parts"))
      .def("__call__", &call, nb::arg("x_ptr"), nb::arg("x_stride"), nb::arg("num_rows"), nb::arg("out_ptr"),
           nb::arg("out_stride"), nb::call_guard<nb::gil_scoped_release>(), R"(Add the products of the adapters.

Args:
    x_ptr: The input of the base layer, float32.
    x_stride: The distance between rows of x, in floats.
    num_rows: The number of rows, that of the batch.
    out_ptr: float32 [num_rows, out_features], the result of the base layer.
    out_stride: The distance between rows of out, in floats.

Raises:
    ValueError: The batch has adapters and another number of rows.)");
}

}  // namespace chairlift
