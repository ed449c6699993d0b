"""Gemma 4 (Google DeepMind, 2026), without images and audio.

Gemma 3 with norms of V, attention scores without a factor, and a factor for the output of each layer. Layers with full
attention have heads of another size and number, of which a part is rotated, and K may be V as well. The last layers of
small models read K and V of earlier layers, and every layer has a branch that reads an embedding of the token for this
layer. Other models have a mixture of experts beside each feed-forward network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from chairlift.kernels.routing import ExpertRouting
from chairlift.models.architectures.gemma import NORMS, read_soft_cap
from chairlift.models.architectures.llama import LlamaConfigReader
from chairlift.models.declaration.feed_forward_spec import ParallelExpertsSpec
from chairlift.models.declaration.layer_spec import BranchNorms, LayerSpec, PerLayerBranchSpec
from chairlift.models.declaration.matrix_spec import PER_LAYER_EMBEDDING, PER_LAYER_INPUTS, MatrixSpec, NormSpec
from chairlift.models.declaration.model_config import ModelConfig, PerLayerInputsSpec
from chairlift.models.reading.architecture import Architecture
from chairlift.models.reading.config_fields import REQUIRED, ConfigFields, exact_quotient
from chairlift.models.reading.expert_fields import read_experts
from chairlift.models.reading.gguf_header import POST_NORM_NAMES, GGUFHeader
from chairlift.models.reading.layer_fields import read_windows
from chairlift.models.reading.llama_sizes import ExpertNames, ExpertSizes, LlamaSizes
from chairlift.models.reading.rope_fields import WHOLE_HEAD, read_layer_ropes, read_type_ropes

DEFAULT_ROPES: Final[dict[str, dict[str, Any]]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
"""The rotary embeddings of files without rope_parameters."""

EXPERT_NAMES: Final = ExpertNames("router.proj", ("experts.{}.gate_up_proj",), "experts.{}.down_proj")
DIVIDED_EXPERT_NAMES: Final = ExpertNames(
    "router.proj", ("experts.{}.gate_proj", "experts.{}.up_proj"), "experts.{}.down_proj"
)
"""The names for GGUF files that hold gate and up projections in two tensors."""

UNNEEDED_MODULES: Final = ("k_proj", "v_proj", "k_norm", "v_norm")
"""The modules that published files contain for layers that read K and V of another layer."""

# -- declaration -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The properties in which layers of one model differ.

    Attributes:
        kv_source: see AttentionSpec.
        has_values: whether the layer has a projection of values; otherwise they are the projected keys.
    """

    head_dim: int
    num_kv_heads: int
    intermediate_size: int
    kv_source: int | None
    has_values: bool


def declare_gemma4(
    sizes: LlamaSizes, layers: Sequence[LayerShape], input_size: int, input_vocab_size: int
) -> ModelConfig:
    """Return the declaration of a model.

    Args:
        sizes: the sizes that all layers have in common, the windows and the rotary embeddings. If there are experts,
            they are beside the feed-forward networks.
        input_size: the number of values in the embedding of a token for a layer; 0 for none.
        input_vocab_size: the number of tokens that have these embeddings.
    """
    declared = tuple(_declare_layer(sizes, index, layer, input_size) for index, layer in enumerate(layers))
    inputs = _per_layer_inputs(sizes, input_size, input_vocab_size) if input_size else None
    shared = (index for index, layer in enumerate(layers) if layer.kv_source is not None)
    unneeded = tuple(f"model.layers.{index}.self_attn.{name}" for index in shared for name in UNNEEDED_MODULES)
    return replace(sizes.declare(), layers=declared, per_layer_inputs=inputs, unneeded_modules=unneeded)


def _declare_layer(sizes: LlamaSizes, index: int, own: LayerShape, input_size: int) -> LayerSpec:
    experts = sizes.experts
    sizes = replace(
        sizes,
        head_dim=own.head_dim,
        num_kv_heads=own.num_kv_heads,
        intermediate_size=own.intermediate_size,
        experts=None,
    )
    is_shared, prefix = own.kv_source is not None, f"model.layers.{index}"
    attention = sizes.declare_attention(f"{prefix}.self_attn", index)
    norm = attention.head_norm
    assert norm is not None, "queries and keys have norms"
    parts = attention.qkv.parts[: 1 if is_shared else 3 if own.has_values else 2]
    return replace(
        sizes.declare_layer(index),
        parallel_experts=None if experts is None else _parallel_experts(sizes, experts, prefix, index),
        attention=replace(
            attention,
            qkv=replace(attention.qkv, parts=parts),
            head_norm=replace(norm, key=None if is_shared else norm.key, norms_values=not is_shared),
            kv_source=own.kv_source,
        ),
        per_layer_branch=_per_layer_branch(sizes, prefix, input_size) if input_size else None,
        output_scale=f"{prefix}.layer_scalar",
    )


def _parallel_experts(sizes: LlamaSizes, experts: ExpertSizes, prefix: str, index: int) -> ParallelExpertsSpec:
    """The input of the router has a separate norm, and is divided by the root of hidden_size."""
    hidden, eps = sizes.hidden_size, sizes.norm_eps
    mixture = replace(sizes, experts=experts).declare_feed_forward(prefix, index)
    router_norm = NormSpec("rms_norm", f"{prefix}.router.norm", hidden, eps, weight_multiplier=hidden**-0.5)
    assert mixture.router is not None, "all layers have experts"
    router = replace(mixture.router, norm=router_norm, expert_scales=f"{prefix}.router.per_expert_scale")
    before, after, after_dense = (
        NormSpec("rms_norm", f"{prefix}.{name}", hidden, eps)
        for name in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2", "post_feedforward_layernorm_1")
    )
    return ParallelExpertsSpec(replace(mixture, router=router), before, after, after_dense)


def _per_layer_branch(sizes: LlamaSizes, prefix: str, input_size: int) -> PerLayerBranchSpec:
    gate, projection = (
        (f"{prefix}.per_layer_{name}", size)
        for name, size in (("input_gate", input_size), ("projection", sizes.hidden_size))
    )
    norm = NormSpec("rms_norm", f"{prefix}.post_per_layer_input_norm", sizes.hidden_size, sizes.norm_eps)
    return PerLayerBranchSpec(
        gate=MatrixSpec(PER_LAYER_INPUTS, "per_layer_gate", (gate,), sizes.hidden_size),
        projection=MatrixSpec(PER_LAYER_INPUTS, "per_layer_projection", (projection,), input_size),
        activation=sizes.activation,
        norms=BranchNorms(after=norm),
    )


def _per_layer_inputs(sizes: LlamaSizes, input_size: int, vocab_size: int) -> PerLayerInputsSpec:
    """The reference divides the projection by the root of hidden_size, which is the same as another eps of its norm."""
    width, eps = sizes.num_layers * input_size, sizes.norm_eps * sizes.hidden_size
    projection = (("model.per_layer_model_projection", width),)
    return PerLayerInputsSpec(
        size=input_size,
        table=MatrixSpec(
            PER_LAYER_EMBEDDING, "per_layer_embedding", (("model.embed_tokens_per_layer", vocab_size),), width
        ),
        projection=MatrixSpec(PER_LAYER_INPUTS, "per_layer_inputs", projection, sizes.hidden_size),
        norm=NormSpec("rms_norm", "model.per_layer_projection_norm", input_size, eps),
        table_multiplier=math.sqrt(input_size),
        multiplier=math.sqrt(0.5),
    )


# -- config.json -----------------------------------------------------------------------------------------------------


DEFAULTS: Final[dict[str, Any]] = {
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_size": 2304,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 9216,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_hidden_layers": 30,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "vocab_size": 262_144,
}
"""The values of fields that the file does not contain, as in transformers."""


class Gemma4ConfigReader(LlamaConfigReader):
    """The reader of the `config.json` of a Gemma 4 model without images (`Gemma4ForCausalLM`)."""

    def __call__(self, fields: ConfigFields) -> ModelConfig:
        _check_unsupported(fields)
        sizes = self.read_sizes(fields)
        layers = _read_layers(fields, sizes.sliding_windows)
        head_dims = [layer.head_dim for layer in layers]
        sizes = replace(sizes, ropes=read_type_ropes(fields, sizes.sliding_windows, head_dims, DEFAULT_ROPES))
        is_null = fields.is_null("hidden_size_per_layer_input")
        input_size = 0 if is_null else fields.integer("hidden_size_per_layer_input", low=0)
        return declare_gemma4(sizes, layers, input_size, _read_input_vocab_size(fields, sizes, input_size))

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        sizes = super().read_sizes(fields)
        soft_cap, factor = read_soft_cap(fields, "final_logit_softcapping", None), math.sqrt(sizes.hidden_size)
        return replace(sizes, attention_scale=1.0, embedding_multiplier=factor, logits_soft_cap=soft_cap)

    def _number_of_layers(self, fields: ConfigFields, key: str, default: Any = REQUIRED) -> int:
        """Read the number of the first layer, because layers differ."""
        value = fields.get(key, default)
        return fields.as_integer(key, value[0] if isinstance(value, list) and value else value)

    def _activation(self, fields: ConfigFields) -> str:
        fields.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
        return "gelu_tanh"


class UnifiedConfigReader(Gemma4ConfigReader):
    """The same of the text model of a model without encoders (gemma-4-12B), which has other defaults, and no inputs for
    each layer."""

    def __call__(self, fields: ConfigFields) -> ModelConfig:
        fields.allow_only("hidden_size_per_layer_input", 0, "the reference implementation has no inputs for each layer")
        fields.allow_only("enable_moe_block", False, "the reference implementation has no experts")
        return super().__call__(fields)


def _check_unsupported(fields: ConfigFields) -> None:
    fields.allow_only("attn_logit_softcapping", None, "the reference implementation of Gemma 4 ignores it")
    if fields.get("use_bidirectional_attention") not in (None, "vision"):
        raise fields.error(
            "use_bidirectional_attention",
            f"is {fields.get('use_bidirectional_attention')!r}, which is not supported: attention must be causal",
        )


def _read_experts(fields: ConfigFields, sizes: LlamaSizes) -> ExpertSizes | None:
    if isinstance(fields, GGUFHeader):
        is_divided = "blk.0.ffn_gate_exps.weight" in fields.tensor_names
        names = DIVIDED_EXPERT_NAMES if is_divided else EXPERT_NAMES
        return read_experts(fields, "chosen", names=names) if fields.get("num_experts", 0) else None
    if not fields.flag("enable_moe_block", False):
        fields.ignore("num_experts", "top_k_experts", "moe_intermediate_size")  # No effect without experts.
        return None
    count = fields.integer("num_experts")
    routing = ExpertRouting(fields.integer("top_k_experts", high=count), "chosen")
    return ExpertSizes(count, fields.integer("moe_intermediate_size"), routing, names=EXPERT_NAMES)


def _read_windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    windows = read_windows(fields, layers, pattern=6)
    if isinstance(fields, GGUFHeader):
        return windows
    if (types := fields.get("layer_types")) is None:
        return (*windows[:-1], None)
    if windows[-1] is not None:
        raise fields.error("layer_types", f"must end with full_attention, got {types[-1]!r}")
    return windows


def _read_layers(fields: ConfigFields, windows: Sequence[int | None]) -> list[LayerShape]:
    num_shared = fields.integer("num_kv_shared_layers", 0, low=0, high=len(windows) - 1)
    sources = find_kv_sources(fields, "num_kv_shared_layers", windows, num_shared)
    keys_are_values = fields.flag("attention_k_eq_v", False)
    inner = fields.integer("intermediate_size")
    shared_inner = inner * (2 if fields.flag("use_double_wide_mlp", False) else 1)
    found = [
        LayerShape(
            head_dim,
            num_kv_heads,
            inner if source is None else shared_inner,
            source,
            has_values=window is not None or not keys_are_values,
        )
        for window, source, (head_dim, num_kv_heads) in zip(
            windows, sources, _read_heads(fields, windows, keys_are_values), strict=True
        )
    ]
    check_shared_heads(fields, "num_kv_shared_layers", found)
    return found


def check_shared_heads(fields: ConfigFields, key: str, layers: Sequence[LayerShape]) -> None:
    """Check that each layer has the KV heads of the layer whose K and V it reads.

    Args:
        key: the field that makes layers share K and V, for messages.
    """
    for index, layer in enumerate(layers):
        if layer.kv_source is None:
            continue
        source = layers[layer.kv_source]
        heads, wanted = (layer.num_kv_heads, layer.head_dim), (source.num_kv_heads, source.head_dim)
        if heads != wanted:
            raise fields.error(
                key,
                f"makes layer {index} read the K and V of layer {layer.kv_source}, which has {wanted[0]} KV heads of "
                f"{wanted[1]}, but layer {index} has {heads[0]} of {heads[1]}: use the configuration of the weights",
            )


def find_kv_sources(fields: ConfigFields, key: str, windows: Sequence[int | None], num_shared: int) -> list[int | None]:
    """Return the layer whose K and V each of the last `num_shared` layers reads: the last one before all of them of the
    same type. The other layers have None.

    Args:
        key: the field that contains `num_shared`, for messages.
    """
    first = len(windows) - num_shared
    last = {window: index for index, window in enumerate(windows[:first])}
    if missing := [index for index in range(first, len(windows)) if windows[index] not in last]:
        raise fields.error(
            key,
            f"is {num_shared}, but no layer before layer {first} has the type of layer {missing[0]}, so there are no K "
            "and V for it: use the configuration of the weights",
        )
    return [*([None] * first), *(last[window] for window in windows[first:])]


def _read_heads(fields: ConfigFields, windows: Sequence[int | None], keys_are_values: bool) -> list[tuple[int, int]]:
    """Read head size and number of KV heads of each layer. transformers 5 writes those that differ to
    `per_layer_config`; published files list the layers with full attention in it."""
    heads = fields.integer("num_attention_heads")
    local = fields.integer("head_dim", high=4096), fields.integer("num_key_value_heads")
    whole = fields.integer("global_head_dim", high=4096), fields.integer("num_global_key_value_heads", local[1])
    if (changed := fields.mapping("per_layer_config")) is None:
        whole = whole if keys_are_values else (whole[0], local[1])
        found = [whole if window is None else local for window in windows]
    else:
        found = [_read_changed_heads(changed.mapping(str(index)), local) for index in range(len(windows))]
    for head_dim, num_kv_heads in found:
        exact_quotient(fields, "num_attention_heads", heads, "num_key_value_heads", num_kv_heads)
        exact_quotient(fields, "head_dim", head_dim, "the dimensions of a rotated pair", 2)
    return found


def _read_changed_heads(changed: ConfigFields | None, heads: tuple[int, int]) -> tuple[int, int]:
    if changed is None:
        return heads
    return changed.integer("head_dim", heads[0], high=4096), changed.integer("num_key_value_heads", heads[1])


def _read_input_vocab_size(fields: ConfigFields, sizes: LlamaSizes, input_size: int) -> int:
    found = fields.integer("vocab_size_per_layer_input", 262_144)
    if input_size and found < sizes.vocab_size:
        raise fields.error(
            "vocab_size_per_layer_input",
            f"must be at least vocab_size={sizes.vocab_size}, got {found}: use the configuration of the weights",
        )
    return found


# -- GGUF ------------------------------------------------------------------------------------------------------------


def read_gemma4_gguf(header: GGUFHeader) -> ModelConfig:
    """Read the metadata of a GGUF file of Gemma 4."""
    sizes = _READER.read_sizes(header)
    layers = _read_gguf_layers(header, sizes.sliding_windows)
    theta = DEFAULT_ROPES["sliding_attention"]["rope_theta"]
    sizes = sizes.with_layer_ropes(*read_layer_ropes(header, theta, theta))
    input_size = header.integer("embedding_length_per_layer_input", 0, low=0)
    return declare_gemma4(sizes, layers, input_size, sizes.vocab_size)


def _read_gguf_layers(header: GGUFHeader, windows: Sequence[int | None]) -> list[LayerShape]:
    key = "attention.shared_kv_layers"
    num_shared = header.integer(key, 0, low=0, high=len(windows) - 1)
    heads, head_dims = header.uniform("num_attention_heads"), _read_gguf_head_dims(header)
    layers = zip(
        windows,
        find_kv_sources(header, key, windows, num_shared),
        _read_of_layers(header, "num_key_value_heads", len(windows)),
        _read_of_layers(header, "intermediate_size", len(windows)),
        strict=True,
    )
    found = []
    for index, (window, source, num_kv_heads, inner) in enumerate(layers):
        exact_quotient(header, "num_attention_heads", heads, "num_key_value_heads", num_kv_heads)
        has_values = not header.tensor_names or f"blk.{index}.attn_v.weight" in header.tensor_names
        found.append(LayerShape(head_dims[window is None], num_kv_heads, inner, source, has_values))
    check_shared_heads(header, key, found)
    return found


def _read_gguf_head_dims(fields: ConfigFields) -> tuple[int, int]:
    """Read the head sizes of layers with a window and of the others. V and the rotation have the same width."""
    whole = fields.integer("attention.key_length", high=4096)
    local = fields.integer("attention.key_length_swa", whole, high=4096)
    for end, head_dim in (("", whole), ("_swa", local)):
        fields.allow_only(f"attention.value_length{end}", head_dim, "K and V must have the same width")
        fields.allow_only(f"rope.dimension_count{end}", head_dim, WHOLE_HEAD)
        exact_quotient(fields, f"attention.key_length{end}", head_dim, "the dimensions of a rotated pair", 2)
    return local, whole


def _read_of_layers(fields: ConfigFields, key: str, layers: int) -> list[int]:
    """Read a number of each layer, or one for all of them."""
    value = fields.get(key, REQUIRED)
    if not isinstance(value, list):
        return [fields.integer(key)] * layers
    if len(value) != layers:
        raise fields.error(key, f"must hold {layers} numbers, got {value!r}")
    return [fields.as_integer(key, item) for item in value]


# -- names -----------------------------------------------------------------------------------------------------------

_READER: Final = Gemma4ConfigReader(
    "gemma4", _read_windows, norms=NORMS, qk_norm="heads", reads_rope=False, experts=_read_experts, defaults=DEFAULTS
)
_UNIFIED: Final = UnifiedConfigReader(
    "gemma4",
    _read_windows,
    norms=NORMS,
    qk_norm="heads",
    reads_rope=False,
    experts=_read_experts,
    defaults=DEFAULTS | {"hidden_size_per_layer_input": 0, "max_position_embeddings": 262_144, "sliding_window": 1024},
)

GEMMA4: Final = Architecture(
    name="gemma4",
    hf_readers={"Gemma4ForCausalLM": _READER, "Gemma4UnifiedForCausalLM": _UNIFIED},
    gguf_readers={"gemma4": read_gemma4_gguf},
    gguf_names={
        **POST_NORM_NAMES,
        "model.embed_tokens_per_layer": "per_layer_token_embd",
        "model.per_layer_model_projection": "per_layer_model_proj",
        "model.per_layer_projection_norm": "per_layer_proj_norm",
        "model.layers.{}.per_layer_input_gate": "blk.{}.inp_gate",
        "model.layers.{}.per_layer_projection": "blk.{}.proj",
        "model.layers.{}.post_per_layer_input_norm": "blk.{}.post_norm",
        "model.layers.{}.layer_scalar": "blk.{}.layer_output_scale.weight",
        "model.layers.{}.pre_feedforward_layernorm_2": "blk.{}.pre_ffw_norm_2",
        "model.layers.{}.post_feedforward_layernorm_1": "blk.{}.post_ffw_norm_1",
        "model.layers.{}.post_feedforward_layernorm_2": "blk.{}.post_ffw_norm_2",
        "model.layers.{}.router.norm.weight": "blk.{}.ffn_gate_inp.scale",
        "model.layers.{}.router.per_expert_scale": "blk.{}.ffn_down_exps.scale",
        "model.layers.{}.router.proj": "blk.{}.ffn_gate_inp",
        "model.layers.{}.experts.{}.gate_up_proj": "blk.{}.ffn_gate_up_exps",
        "model.layers.{}.experts.{}.gate_proj": "blk.{}.ffn_gate_exps",
        "model.layers.{}.experts.{}.up_proj": "blk.{}.ffn_up_exps",
        "model.layers.{}.experts.{}.down_proj": "blk.{}.ffn_down_exps",
    },
    stacked_names={
        "model.layers.{}.router.norm.weight": "model.layers.{}.router.scale",
        "model.layers.{}.experts.{}.gate_up_proj.weight": "model.layers.{}.experts.gate_up_proj",
        "model.layers.{}.experts.{}.down_proj.weight": "model.layers.{}.experts.down_proj",
    },
)
