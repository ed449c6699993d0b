#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "runtime/tape.h"

namespace nb = nanobind;

namespace chairlift {
namespace {

template <typename T, size_t dimensions>
using Array = nb::ndarray<const T, nb::ndim<dimensions>, nb::c_contig, nb::device::cpu>;

template <typename Values>
auto to_vector(const Values& values) {
  return std::vector<std::remove_const_t<typename Values::Scalar>>(values.data(), values.data() + values.size());
}

KVType kv_type_of(const std::string& name) {
  if (name == "f32") return KVType::f32;
  if (name == "bf16") return KVType::bf16;
  if (name == "int8") return KVType::int8;
  throw nb::value_error(("kv_dtype must be one of f32, bf16, int8, got '" + name + "'").c_str());
}

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

AttentionShape make_shape(int num_heads, int num_kv_heads, int head_dim, float scale, const std::string& kv_dtype,
                          float soft_cap) {
  if (num_kv_heads < 1 || num_heads < num_kv_heads || num_heads % num_kv_heads != 0)
    throw nb::value_error(("num_heads must be a multiple of num_kv_heads=" + std::to_string(num_kv_heads) + ", got " +
                           std::to_string(num_heads)).c_str());
  if (head_dim < 4 || head_dim > kMaxHeadDim || head_dim % 4 != 0)
    throw nb::value_error(("head_dim must be a multiple of 4 from 4 to " + std::to_string(kMaxHeadDim) + ", got " +
                           std::to_string(head_dim)).c_str());
  if (!(soft_cap >= 0 && soft_cap < 1e30f))
    throw nb::value_error(("soft_cap must be 0 or a positive number, got " + std::to_string(soft_cap)).c_str());
  return {num_heads, num_kv_heads, head_dim, scale, kv_type_of(kv_dtype), nullptr, nullptr, 0.0f, 0, soft_cap};
}

void forward(const AttentionShape& attention, uintptr_t qkv, AttentionStep& step, uintptr_t q_norm, uintptr_t k_norm,
             float norm_eps, bool norms_values, bool norms_rotated, int kv_projections, uintptr_t positions,
             uintptr_t cos_sin_cache, int rotary_dim, uintptr_t query_scales, uintptr_t key, uintptr_t value,
             uintptr_t key_scale, uintptr_t value_scale, int64_t window, uintptr_t sinks, uintptr_t out) {
  if (kv_projections < 0 || kv_projections > 2)
    throw nb::value_error(("kv_projections must be 0, 1 or 2, got " + std::to_string(kv_projections)).c_str());
  AttentionShape shape = attention;
  shape.norms_values = norms_values;
  shape.norms_rotated = norms_rotated;
  shape.kv_projections = kv_projections;
  shape.q_norm = pointer<const float>(q_norm);
  shape.k_norm = pointer<const float>(k_norm);
  shape.norm_eps = norm_eps;
  shape.rotary_dim = rotary_dim;
  shape.sinks = pointer<const float>(sinks);
  const PagedKV kv = {pointer<void>(key), pointer<void>(value), pointer<float>(key_scale), pointer<float>(value_scale),
                      step.shape().block_size};
  const LayerCall call = {kv, pointer<float>(qkv), nullptr, pointer<const float>(cos_sin_cache),
                          pointer<const float>(query_scales), window, pointer<float>(out)};
  const auto attend = [shape, call, has_positions = positions != 0](AttentionStep& now, const int64_t* at) {
    LayerCall layer = call;
    if (has_positions) layer.positions = at;
    attention_forward(shape, now, layer);
  };
  attend(step, pointer<const int64_t>(positions));
  if (Tape* tape = Tape::recording()) tape->add_attention(step, attend);
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<AttentionStep>(m, "AttentionStep",
                            R"(The sequences, block tables and slots of one step, copied from its metadata.

The work is divided among threads when a layer first uses the step, once for each sliding window.

Args:
    query_start_loc: int32 [num_seqs + 1], ascending from 0 to num_tokens.
    seq_lens: int32 [num_seqs], the keys of each sequence once those of the step are written.
    block_tables: int32 [num_seqs, max_blocks], block ids.
    slot_mapping: int64 [num_tokens], the slot of each token's K and V; -1 writes nothing.
    block_size: Slots per block.

Raises:
    ValueError: The arrays do not fit together.)")
      .def("__init__",
           [](AttentionStep* self, const Array<int32_t, 1>& query_start_loc, const Array<int32_t, 1>& seq_lens,
              const Array<int32_t, 2>& block_tables, const Array<int64_t, 1>& slot_mapping, int block_size) {
             new (self) AttentionStep({to_vector(query_start_loc), to_vector(seq_lens), to_vector(block_tables),
                                       to_vector(slot_mapping), static_cast<int64_t>(block_tables.shape(1)),
                                       block_size});
           },
           nb::arg("query_start_loc"), nb::arg("seq_lens"), nb::arg("block_tables"), nb::arg("slot_mapping"),
           nb::arg("block_size"))
      .def_prop_ro("shared_keys", &AttentionStep::shared_keys,
                   "The number of first keys of each sequence that layers without a window compute with other sequences.");
  m.def("set_shares_keys",
        [](bool shares_keys, int64_t most) { AttentionStep::set_most_shared_floats(shares_keys ? most : 0); },
        nb::arg("shares_keys"), nb::arg("most_state_floats") = kMostStateFloats,
        "Whether later steps compute keys that sequences share once for all of them, as long as their states have at most so many "
        "floats. It changes no result; for tests and measurements. The default is True.");
  nb::class_<AttentionShape>(m, "PagedAttention",
                             R"(Norm, rotary embedding, KV writes and attention of the layers of a model.

Args:
    num_heads: Query heads, a multiple of num_kv_heads.
    num_kv_heads: Heads of K and V.
    head_dim: Values per head: a multiple of 4, at most 576.
    scale: The factor of the dot products.
    kv_dtype: The type of K and V in memory: "f32", "bf16" or "int8".
    soft_cap: c where a score s becomes c * tanh(s / c) before the softmax; 0 leaves scores as they are.

Raises:
    ValueError: A number is out of range, or the type is unknown.)")
      .def("__init__",
           [](AttentionShape* self, int num_heads, int num_kv_heads, int head_dim, float scale,
              const std::string& kv_dtype, float soft_cap) {
             new (self) AttentionShape(make_shape(num_heads, num_kv_heads, head_dim, scale, kv_dtype, soft_cap));
           },
           nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("scale"), nb::arg("kv_dtype"),
           nb::arg("soft_cap") = 0.0f)
      .def("forward", &forward,
           nb::arg("qkv_ptr"), nb::arg("step"), nb::arg("q_norm_ptr"), nb::arg("k_norm_ptr"), nb::arg("norm_eps"),
           nb::arg("norms_values"), nb::arg("norms_rotated"), nb::arg("kv_projections"), nb::arg("positions_ptr"),
           nb::arg("cos_sin_cache_ptr"), nb::arg("rotary_dim"), nb::arg("query_scales_ptr"), nb::arg("key_ptr"),
           nb::arg("value_ptr"), nb::arg("key_scale_ptr"), nb::arg("value_scale_ptr"), nb::arg("window"),
           nb::arg("sinks_ptr"), nb::arg("out_ptr"),
           nb::call_guard<nb::gil_scoped_release>(), R"(Compute one layer for all tokens of a step.

Addresses may be 0 only where stated.

Args:
    qkv_ptr: float32 [num_tokens, (num_heads + kv_projections * num_kv_heads) * head_dim], overwritten.
    step: The step; its tokens are the rows of qkv.
    q_norm_ptr, k_norm_ptr: float32 [head_dim], weights of RMSNorm over each head; 0 for no norm.
    norm_eps: The constant that RMSNorm adds to the mean square.
    norms_values: Whether each head of V has an RMSNorm, without a weight.
    norms_rotated: Whether the norms of query and key follow the rotary embedding, instead of preceding it.
    kv_projections: 2 for keys and values; 1 if the projected keys are the values as well; 0 if another layer has
        written K and V of this step.
    positions_ptr: int64 [num_tokens]; 0 without rotary embedding.
    cos_sin_cache_ptr: float32 [max_position, rotary_dim], the cosines of each position, then its sines; 0 without
        rotary embedding.
    rotary_dim: The number of first dimensions of each head that are rotated: even, at most head_dim.
    query_scales_ptr: float32 [max_position], a factor of the scores of the query at each position; 0 for no factors.
        It requires positions_ptr.
    key_ptr, value_ptr: [num_blocks + 1, num_kv_heads, block_size, head_dim], of the type of K and V. If they are
        equal, the keys after their norm and rotation are the values.
    key_scale_ptr, value_scale_ptr: float32 [num_blocks + 1, num_kv_heads, block_size]; 0 unless the type is int8.
    window: Keys that a query sees, including its own; 0 for all up to its own.
    sinks_ptr: float32 [num_heads], a score of each head that is part of its softmax, but has no value; 0 for none.
    out_ptr: float32 [num_tokens, num_heads * head_dim], overwritten.)");
}

}  // namespace chairlift
