#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <optional>
#include <utility>
#include <vector>

#include "bindings/binding_arguments.h"
#include "recurrence/recurrence.h"
#include "runtime/tape.h"

namespace nb = nanobind;

namespace chairlift {
namespace {

using Int32Vector = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Snapshots = nb::ndarray<const int32_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void construct_step(StateStep* self, const Int32Vector& query_start_loc, const Int32Vector& sources,
                    const Int32Vector& slots, const Snapshots& snapshots) {
  std::vector<StateStep::Snapshot> copied;
  for (size_t i = 0; i < snapshots.shape(0); ++i) {
    const int32_t* const row = snapshots.data() + 3 * i;
    copied.push_back({row[0], row[1], row[2]});
  }
  const auto values = [](const Int32Vector& from) {
    return std::vector<int32_t>(from.data(), from.data() + from.size());
  };
  new (self) StateStep(values(query_start_loc), values(sources), values(slots), std::move(copied));
}

Convolution make_convolution(const Matrix& weight, const std::optional<Vector>& bias, bool has_silu) {
  return {{weight.data(), weight.data() + weight.size()}, to_vector(bias), static_cast<int64_t>(weight.shape(0)),
          has_silu};
}

template <typename Recurrence>
void call(const Recurrence& recurrence, uintptr_t rows, int64_t row_stride, uintptr_t convolution, uintptr_t matrix,
          int64_t num_slots, const StateStep& step, uintptr_t out, int64_t out_stride) {
  const auto compute = [&recurrence, rows = StepRows{reinterpret_cast<float*>(rows), row_stride},
                        state = RecurrentState{reinterpret_cast<float*>(convolution), reinterpret_cast<float*>(matrix),
                                               num_slots},
                        out = StepRows{reinterpret_cast<float*>(out), out_stride}](const StateStep& now) {
    recurrence(rows, state, now, out);
  };
  compute(step);
  if (Tape* tape = Tape::recording()) tape->add_recurrence(compute);
}

template <typename Class>
void bind_call(Class& bound) {
  bound.def("__call__", &call<typename Class::Type>, nb::arg("rows_ptr"), nb::arg("row_stride"),
            nb::arg("convolution_ptr"), nb::arg("matrix_ptr"), nb::arg("num_slots"), nb::arg("step"),
            nb::arg("out_ptr"), nb::arg("out_stride"), nb::call_guard<nb::gil_scoped_release>(),
            R"(Compute the sequences of a step, and write their states.

Args:
    rows_ptr: float32 [num_tokens, width], overwritten; there may be more rows than tokens of the step.
    row_stride, out_stride: The distance between rows, in floats.
    convolution_ptr: float32 [num_slots, width of the convolution - 1, channels], the last inputs of the convolution,
        the oldest first.
    matrix_ptr: float32 [num_slots, heads, key_size, value_size]; 0 for ShortConvolution.
    num_slots: The number of slots of the states.
    step: The sequences and their slots.
    out_ptr: float32 [num_tokens, outputs], overwritten, without overlap with rows.

Raises:
    ValueError: The step has a slot that the states do not have.)");
}

void construct_recurrence(MatrixRecurrence* self, bool is_delta, int64_t heads, int64_t key_heads, int64_t key_size,
                          int64_t value_size, bool has_tiled_keys, const Matrix& convolution_weight,
                          const std::optional<Vector>& convolution_bias, const Vector& rate, const Vector& bias,
                          const std::optional<Vector>& skip, float factor_scale, float low, float high,
                          int64_t norm_group, const std::optional<Vector>& norm_weight, float norm_eps,
                          bool gates_first, const std::optional<Vector>& row_scales, bool has_channel_decay,
                          bool has_sigmoid_gate) {
  new (self) MatrixRecurrence({is_delta, heads, key_heads, key_size, value_size, has_tiled_keys, norm_group,
                               has_channel_decay},
                              make_convolution(convolution_weight, convolution_bias, true),
                              {to_vector(rate), to_vector(bias), to_vector(skip), to_vector(norm_weight),
                               to_vector(row_scales), factor_scale, low, high, norm_eps, gates_first, has_sigmoid_gate});
}

}  // namespace

void bind_recurrence(nb::module_& m) {
  nb::class_<StateStep>(m, "StateStep", R"(The recurrent states that the sequences of one step read and write, copied.

Args:
    query_start_loc: int32 [num_seqs + 1], ascending from 0: the rows of each sequence.
    sources: int32 [num_seqs], the slot of the state before the first token; -1 for zeros.
    slots: int32 [num_seqs], the slot of the state after the last token; -1 writes nothing.
    snapshots: int32 [num_snapshots, 3], (sequence, number of its tokens, slot): the state after so many tokens is written
        to the slot as well. Ascending by sequence and number.

Raises:
    ValueError: The arrays do not fit together, or a slot that a sequence writes is read or written by another one.)")
      .def("__init__", &construct_step, nb::arg("query_start_loc"), nb::arg("sources"), nb::arg("slots"),
           nb::arg("snapshots"))
      .def_prop_ro("num_tokens", &StateStep::num_tokens, "The number of tokens of all sequences.");
  nb::class_<ShortConvolution> short_convolution(m, "ShortConvolution",
                                                 R"(c * convolution(b * x) of rows [b | c | x].

Args:
    weight: float32 [width, channels] for the inputs from the oldest to the newest; a width of 2 to 7. Copied.
    bias: float32 [channels], copied.

Raises:
    ValueError: The arrays do not fit together.)");
  short_convolution.def(
      "__init__",
      [](ShortConvolution* self, const Matrix& weight, const std::optional<Vector>& bias) {
        new (self) ShortConvolution(make_convolution(weight, bias, false));
      },
      nb::arg("weight"), nb::arg("bias").none() = nb::none());
  bind_call(short_convolution);
  nb::class_<MatrixRecurrence> matrix_recurrence(m, "MatrixRecurrence",
                                                 R"(The gated delta rule or Mamba-2, with a state for each head.

    state = decay * state + k (x) change, y = q . state + skip * v

The gated delta rule has rows [q | k | v | z | b | a] and decay = exp(rate * softplus(a + bias)). q and k are divided by
the square root of their sum of squares plus 1e-6, and q by that of key_size. Then change = factor_scale * sigmoid(b) *
(v - k . (decay * state)). With has_channel_decay each channel of k has its own decay, and rows are
[a | z | q | k | v | b]. Mamba-2 has rows [z | v | k | q | dt], t = min(max(softplus(dt + bias), low), high),
decay = exp(rate * t) and change = t * v. q, k and v pass through a convolution and SiLU first.

Args:
    is_delta: Whether it is the gated delta rule.
    heads: The heads of v.
    key_heads: The heads of q and k, a divisor of heads.
    key_size, value_size: Values per head of k and v.
    has_tiled_keys: Whether head h reads q and k of head h % key_heads instead of h // (heads // key_heads).
    convolution_weight, convolution_bias: As for ShortConvolution.
    rate, bias: float32 [heads], or [heads * key_size] with has_channel_decay, copied.
    skip: float32 [heads], copied, or None.
    factor_scale: For the gated delta rule.
    low, high: For Mamba-2.
    norm_group: The number of values that are normed together.
    norm_weight: float32 [heads * value_size], or [norm_group] for all groups, copied; None for no norm.
    norm_eps: The constant that the norm adds to the mean square.
    gates_first: Whether the result is norm(y * gate(z)) instead of norm(y) * gate(z).
    row_scales: float32 [width], the factors of a row, copied; or None.
    has_channel_decay: Whether each channel of a key has its own decay, for the gated delta rule.
    has_sigmoid_gate: Whether gate is the sigmoid instead of SiLU.

Raises:
    ValueError: The arrays and sizes do not fit together.)");
  matrix_recurrence.def("__init__", &construct_recurrence, nb::kw_only(), nb::arg("is_delta"), nb::arg("heads"),
                        nb::arg("key_heads"), nb::arg("key_size"), nb::arg("value_size"),
                        nb::arg("has_tiled_keys"), nb::arg("convolution_weight"), nb::arg("convolution_bias").none(), nb::arg("rate"),
                        nb::arg("bias"), nb::arg("skip").none(), nb::arg("factor_scale"), nb::arg("low"),
                        nb::arg("high"), nb::arg("norm_group"), nb::arg("norm_weight").none(), nb::arg("norm_eps"),
                        nb::arg("gates_first"), nb::arg("row_scales").none(), nb::arg("has_channel_decay"),
                        nb::arg("has_sigmoid_gate"));
  bind_call(matrix_recurrence);
}

}  // namespace chairlift
