"""Nemotron-H without experts (NVIDIA, 2025): each layer is Mamba-2, attention without positions, or a network."""

from __future__ import annotations

from typing import Final, Literal

from chairlift.models.declaration import (
    ATTENTION,
    EMBEDDING,
    LM_HEAD,
    MLP,
    AttentionSpec,
    BranchNorms,
    FeedForwardSpec,
    LayerSpec,
    MatrixSpec,
    ModelConfig,
    NormSpec,
)
from chairlift.models.reading.architecture import Architecture
from chairlift.models.reading.config_fields import ConfigFields, exact_quotient
from chairlift.models.reading.layer_fields import MAX_LAYERS
from chairlift.models.reading.mamba_sizes import MAX_WIDTH, MambaSizes, read_dt_limits, read_group_count

LayerKind = Literal["mamba", "attention", "mlp"]

KINDS: Final[dict[str, LayerKind]] = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
}
"""The types of layers: letters of `hybrid_override_pattern`, and names of transformers 4 and 5."""

NO_EXPERTS: Final = "layers with experts are not supported: choose a model of the family without them"

FIELDS_WITHOUT_EFFECT: Final = (
    "chunk_size",
    "expand",
    "moe_intermediate_size",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_overlap",
    "mtp_layers_block_type",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "num_logits_to_keep",
    "output_router_logits",
    "residual_in_fp32",
    "routed_scaling_factor",
    "time_step_floor",
    "time_step_max",
    "time_step_min",
    "topk_group",
)
"""The fields of experts and of initialization, and those whose value follows from others."""


class _Reader:
    """Reads the properties that layers share, and declares layers."""

    def __init__(self, fields: ConfigFields) -> None:
        self.hidden_size = fields.integer("hidden_size")
        self.eps = fields.number("layer_norm_epsilon", 1e-5, high=1.0)
        self._heads = fields.integer("num_attention_heads")
        self._kv_heads = fields.integer("num_key_value_heads", self._heads)
        exact_quotient(fields, "num_attention_heads", self._heads, "num_key_value_heads", self._kv_heads)
        self._head_dim = fields.integer("head_dim", 128, high=4096)
        fields.allow_only("attention_bias", False, "transformers has no such biases in this architecture")
        self._inner = fields.integer("intermediate_size")
        self._mlp_bias = fields.flag("mlp_bias", False)
        self._activation = fields.choice("mlp_hidden_act", ("relu2",), "relu2")
        self._mamba = self._read_mamba(fields)

    def _read_mamba(self, fields: ConfigFields) -> MambaSizes:
        heads = fields.integer("mamba_num_heads")
        groups = read_group_count(fields, "n_groups", "mamba_num_heads", heads)
        fields.choice("mamba_hidden_act", ("silu",), "silu")
        return MambaSizes(
            num_heads=heads,
            head_dim=fields.integer("mamba_head_dim"),
            num_groups=groups,
            state_size=fields.integer("ssm_state_size"),
            width=fields.integer("conv_kernel", 4, low=2, high=MAX_WIDTH),
            conv_bias=fields.flag("use_conv_bias", True),
            input_bias=fields.flag("mamba_proj_bias", False) or fields.flag("use_bias", False),
            output_bias=fields.flag("use_bias", False),
            norm_eps=self.eps,
            norm_groups=groups,
            dt_limits=read_dt_limits(fields),
        )

    def declare(self, index: int, kind: LayerKind) -> LayerSpec:
        """Return the declaration of one layer."""
        prefix = f"model.layers.{index}"
        norms = BranchNorms(NormSpec("rms_norm", f"{prefix}.norm", self.hidden_size, self.eps))
        mixer, none = f"{prefix}.mixer", BranchNorms()
        if kind == "mamba":
            return LayerSpec(None, none, None, none, self._mamba.declare(mixer, self.hidden_size), norms)
        if kind == "attention":
            return LayerSpec(self._attention(mixer), norms, None, none)
        return LayerSpec(None, none, self._network(mixer), norms)

    def _attention(self, prefix: str) -> AttentionSpec:
        queries, keys = self._heads * self._head_dim, self._kv_heads * self._head_dim
        parts = ((f"{prefix}.q_proj", queries), (f"{prefix}.k_proj", keys), (f"{prefix}.v_proj", keys))
        output = ((f"{prefix}.o_proj", self.hidden_size),)
        return AttentionSpec(
            MatrixSpec(ATTENTION, "qkv", parts, self.hidden_size),
            MatrixSpec(ATTENTION, "output", output, queries),
            self._heads,
            self._kv_heads,
            self._head_dim,
            self._head_dim**-0.5,
        )

    def _network(self, prefix: str) -> FeedForwardSpec:
        up, down = ((f"{prefix}.up_proj", self._inner),), ((f"{prefix}.down_proj", self.hidden_size),)
        return FeedForwardSpec(
            MatrixSpec(MLP, "up", up, self.hidden_size, self._mlp_bias),
            MatrixSpec(MLP, "down", down, self._inner, self._mlp_bias),
            self._activation,
            gated=False,
        )


def read_nemotron_h(fields: ConfigFields) -> ModelConfig:
    """Read the `config.json` of a Nemotron-H model."""
    for key in FIELDS_WITHOUT_EFFECT:
        fields.get(key)
    fields.allow_only("sliding_window", None, "this architecture has no sliding window")
    fields.allow_only("tie_word_embeddings", False, "transformers has an LM head of its own in this architecture")
    fields.allow_only("num_nextn_predict_layers", 0, "heads that predict several tokens are not supported")
    reader, kinds = _Reader(fields), _read_kinds(fields)
    embedding = (("model.embeddings", fields.integer("vocab_size")),)
    head = (("lm_head", fields.integer("vocab_size")),)
    return ModelConfig(
        architecture="nemotron_h",
        name="nemotron_h",
        hidden_size=reader.hidden_size,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        embedding=MatrixSpec(EMBEDDING, EMBEDDING, embedding, reader.hidden_size),
        layers=tuple(reader.declare(index, kind) for index, kind in enumerate(kinds)),
        head=MatrixSpec(LM_HEAD, LM_HEAD, head, reader.hidden_size),
        final_norm=NormSpec("rms_norm", "model.norm_f", reader.hidden_size, reader.eps),
    )


def _read_kinds(fields: ConfigFields) -> list[LayerKind]:
    """Read the kind of each layer."""
    keys = ("layer_types", "layers_block_type", "hybrid_override_pattern")
    key = next((each for each in keys if fields.get(each) is not None), keys[0])
    types = fields.get(key)
    if not isinstance(types, list | str) or not 0 < len(types) <= MAX_LAYERS:
        raise fields.error(key, f"must hold the type of each layer, got {types!r:.80}")
    for kind in types:
        if kind in ("E", "moe"):
            raise fields.error(key, f"contains {kind!r}: {NO_EXPERTS}")
        if not isinstance(kind, str) or kind not in KINDS:
            raise fields.error(key, f"contains {kind!r:.80}, which is not supported; supported: {', '.join(KINDS)}")
    if fields.get("num_hidden_layers") is not None:
        fields.allow_only("num_hidden_layers", len(types), f"{key} has {len(types)} layers")
    found = [KINDS[kind] for kind in types]
    if "attention" not in found:
        raise fields.error(key, "has no layer with attention, which is not supported")
    return found


NEMOTRON_H: Final = Architecture(
    name="nemotron_h",
    hf_readers={"NemotronHForCausalLM": read_nemotron_h},
    other_prefixes=(("model.", "backbone."),),
)
