"""Nemotron-H (NVIDIA, 2025): each layer is Mamba-2, attention without positions, a network, or one beside experts.

The experts of Nemotron 3 Super work in a narrower space, between two projections of all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal

from chairlift.models.architectures.llama import LlamaConfigReader
from chairlift.models.declaration.feed_forward_spec import FeedForwardSpec, RouterSpec, declare_network
from chairlift.models.declaration.layer_spec import BranchNorms, LayerSpec
from chairlift.models.declaration.matrix_spec import EXPERTS, MLP, ROUTER, MatrixSpec, NormSpec
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.architecture import Architecture
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.expert_fields import SIGMOID_GATING, read_routing
from chairlift.models.reading.gguf_header import GGUF_NAMES, GGUFHeader
from chairlift.models.reading.layer_fields import MAX_LAYERS, read_width, without_attention
from chairlift.models.reading.mamba_sizes import (
    MambaSizes,
    mamba_gguf_names,
    read_dt_limits,
    read_gguf_mamba_sizes,
    read_group_count,
)

LayerKind = Literal["mamba", "attention", "mlp", "moe"]

KINDS: Final[dict[str, LayerKind]] = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}
"""The types of layers: letters of `hybrid_override_pattern`, and names of transformers 4 and 5."""

_EXPERT_FIELDS: Final = """
    moe_intermediate_size moe_latent_size moe_shared_expert_intermediate_size n_group n_routed_experts n_shared_experts
    norm_topk_prob num_experts_per_tok routed_scaling_factor topk_group
"""
"""The fields of experts, which have no effect in a model without them."""


class NemotronHConfigReader(LlamaConfigReader):
    """The reader of the properties that layers share."""

    def _activation(self, fields: ConfigFields) -> str:
        return fields.choice("mlp_hidden_act", ("relu2",), "relu2")

    def _biases(self, fields: ConfigFields) -> tuple[bool, bool, bool]:
        if isinstance(fields, GGUFHeader):  # The first layer may have no network.
            return False, False, any(name.endswith("ffn_up.bias") for name in fields.tensor_names)
        return super()._biases(fields)


_READER: Final = NemotronHConfigReader(
    "nemotron_h",
    qkv_bias=False,
    reads_mlp_bias=True,
    reads_rope=False,
    eps_key="layer_norm_epsilon",
    ignored=("norm_eps", "partial_rotary_factor", "rope_theta"),  # Of published files; transformers does not read them.
    defaults={"head_dim": 128, "layer_norm_epsilon": 1e-5},
    has_recurrence=True,
)


def _read_mamba(fields: ConfigFields, eps: float) -> MambaSizes:
    if isinstance(fields, GGUFHeader):
        return read_gguf_mamba_sizes(fields, eps)
    heads = fields.integer("mamba_num_heads")
    groups = read_group_count(fields, "n_groups", "mamba_num_heads", heads)
    fields.choice("mamba_hidden_act", ("silu",), "silu")
    return MambaSizes(
        num_heads=heads,
        head_dim=fields.integer("mamba_head_dim"),
        num_groups=groups,
        state_size=fields.integer("ssm_state_size"),
        width=read_width(fields, "conv_kernel", 4),
        conv_bias=fields.flag("use_conv_bias", True),
        input_bias=fields.flag("mamba_proj_bias", False) or fields.flag("use_bias", False),
        output_bias=fields.flag("use_bias", False),
        norm_eps=eps,
        dt_limits=read_dt_limits(fields),
    )


class _Layers:
    """Declares the layers of a model."""

    def __init__(self, fields: ConfigFields) -> None:
        self._fields = fields
        self.sizes = _READER.read_sizes(fields).without_rope()
        self._mamba = _read_mamba(fields, self.sizes.norm_eps)

    def declare(self, index: int, kind: LayerKind) -> LayerSpec:
        """Return the declaration of one layer."""
        prefix, sizes = f"model.layers.{index}", self.sizes
        norms = BranchNorms(NormSpec("rms_norm", f"{prefix}.norm", sizes.hidden_size, sizes.norm_eps))
        mixer, none = f"{prefix}.mixer", BranchNorms()
        if kind == "mamba":
            return LayerSpec(None, none, None, none, self._mamba.declare(mixer, sizes.hidden_size), norms)
        if kind == "attention":
            return LayerSpec(sizes.declare_attention(mixer, index), norms, None, none)
        if kind == "mlp":
            return LayerSpec(None, none, self._network(mixer, sizes.intermediate_size), norms)
        shared = self._network(f"{mixer}.shared_experts", self._fields.integer("moe_shared_expert_intermediate_size"))
        return LayerSpec(None, none, shared, norms).beside_experts(self._experts(mixer))

    def _network(self, prefix: str, inner: int, group: str = MLP, width: int | None = None) -> FeedForwardSpec:
        up, down, sizes = ((f"{prefix}.up_proj", inner),), f"{prefix}.down_proj", self.sizes
        return declare_network(
            up, down, width or sizes.hidden_size, sizes.activation, gated=False, has_bias=sizes.mlp_bias, group=group
        )

    def _experts(self, prefix: str) -> FeedForwardSpec:
        """The experts, which are chosen as in DeepSeek-V3, from one group."""
        fields, hidden = self._fields, self.sizes.hidden_size
        for key in ("n_group", "topk_group", "n_shared_experts"):
            fields.allow_only(key, 1, "experts in groups and several shared experts are not supported")
        fields.allow_only("mlp_bias", False, "experts have no biases")
        fields.allow_only("expert_gating_func", SIGMOID_GATING, f"the architecture requires {SIGMOID_GATING}")
        count = fields.integer("n_routed_experts")
        routing = read_routing(fields, count, has_sigmoid=True)
        matrix = MatrixSpec(ROUTER, ROUTER, ((f"{prefix}.gate", count),), hidden)
        router = RouterSpec(matrix, routing, selection_bias=f"{prefix}.gate.e_score_correction_bias")
        inner, latent, width = fields.integer("moe_intermediate_size"), None, hidden
        if fields.get("moe_latent_size") is not None:
            width = fields.integer("moe_latent_size")
            first, last = ((f"{prefix}.fc1_latent_proj", width),), ((f"{prefix}.fc2_latent_proj", hidden),)
            latent = MatrixSpec(MLP, "latent_in", first, hidden), MatrixSpec(MLP, "latent_out", last, width)
        network = self._network(f"{prefix}.experts.{{}}", inner, EXPERTS, width)
        return replace(network, router=router, latent=latent)


def read_nemotron_h(fields: ConfigFields) -> ModelConfig:
    """Read the `config.json` of a Nemotron-H model."""
    fields.ignore("num_nextn_predict_layers", "mtp_hybrid_override_pattern")  # Their layers are not read.
    return _declare(fields, _read_kinds(fields))


def _declare(fields: ConfigFields, kinds: Sequence[LayerKind]) -> ModelConfig:
    if "moe" not in kinds:
        fields.ignore(*_EXPERT_FIELDS.split())
    fields.allow_only("tie_word_embeddings", False, "transformers has a separate LM head in this architecture")
    fields.set_defaults({"num_hidden_layers": len(kinds)})
    found = _Layers(fields)
    layers = tuple(found.declare(index, kind) for index, kind in enumerate(kinds))
    return replace(found.sizes.declare(), layers=layers)


def _read_kinds(fields: ConfigFields) -> list[LayerKind]:
    """Read the kind of each layer."""
    keys = ("layer_types", "layers_block_type", "hybrid_override_pattern")
    key = next((each for each in keys if fields.get(each) is not None), keys[0])
    types = fields.get(key)
    if not isinstance(types, list | str) or not 0 < len(types) <= MAX_LAYERS:
        raise fields.error(key, f"must hold the type of each layer, got {types!r:.80}")
    for kind in types:
        if not isinstance(kind, str) or kind not in KINDS:
            raise fields.error(key, f"contains {kind!r:.80}, which is not supported; supported: {', '.join(KINDS)}")
    if fields.get("num_hidden_layers") is not None:
        fields.allow_only("num_hidden_layers", len(types), f"{key} has {len(types)} layers")
    found = [KINDS[kind] for kind in types]
    if "attention" not in found:
        raise without_attention(fields, key, len(found))
    return found


def read_nemotron_h_gguf(header: GGUFHeader) -> ModelConfig:
    """Read the metadata of a GGUF file."""
    header.ignore("rope.dimension_count", "rope.freq_base")  # There are no rotary embeddings.
    kinds = _read_gguf_kinds(header, header.integer("num_hidden_layers", high=MAX_LAYERS))
    eps = header.get("attention.layer_norm_epsilon")
    header.set_defaults({"layer_norm_epsilon": eps, "tie_word_embeddings": False})
    return _declare(header, kinds)


def _read_gguf_kinds(header: GGUFHeader, layers: int) -> list[LayerKind]:
    """Read the kind of each layer: attention has KV heads, a network an inner size, and Mamba-2 has neither."""
    found = []
    for key in ("num_key_value_heads", "intermediate_size"):
        numbers = header.get(key)
        if not isinstance(numbers, list) or len(numbers) != layers:
            raise header.error(key, f"must hold a number for each of {layers} layers, got {numbers!r:.80}")
        found.append(numbers)
    network: LayerKind = "moe" if header.name == "nemotron_h_moe" else "mlp"
    kinds = ["attention" if heads else network if inner else "mamba" for heads, inner in zip(*found, strict=True)]
    further = header.integer("num_nextn_predict_layers", 0, low=0, high=layers - 1)
    return kinds[: layers - further]


NEMOTRON_H: Final = Architecture(
    name="nemotron_h",
    hf_readers={"NemotronHForCausalLM": read_nemotron_h},
    gguf_readers=dict.fromkeys(("nemotron_h", "nemotron_h_moe"), read_nemotron_h_gguf),
    gguf_names={
        **GGUF_NAMES,
        **{
            name.replace(part, "mixer"): other
            for part in ("self_attn", "mlp")
            for name, other in GGUF_NAMES.items()
            if part in name
        },
        **mamba_gguf_names("mixer"),
        "model.layers.{}.norm": "blk.{}.attn_norm",
        "model.layers.{}.mixer.fc1_latent_proj": "blk.{}.ffn_latent_down",
        "model.layers.{}.mixer.fc2_latent_proj": "blk.{}.ffn_latent_up",
    },
    stacked_names={"model.embed_tokens": "model.embeddings", "model.norm": "model.norm_f"},
    other_prefixes=(("model.", "backbone."),),
    unread_prefixes=("mtp.",),
)
