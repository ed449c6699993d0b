"""Nemotron-H (NVIDIA, 2025): each layer is Mamba-2, attention without positions, a network, or one beside experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, Literal

from chairlift.kernels.routing import ExpertRouting
from chairlift.models.declaration import (
    ATTENTION,
    EMBEDDING,
    EXPERTS,
    LM_HEAD,
    MLP,
    ROUTER,
    AttentionSpec,
    BranchNorms,
    FeedForwardSpec,
    LayerSpec,
    MatrixSpec,
    ModelConfig,
    NormSpec,
    ParallelExpertsSpec,
    RouterSpec,
)
from chairlift.models.reading.architecture import Architecture, GGUFHeader
from chairlift.models.reading.config_fields import ConfigFields, exact_quotient
from chairlift.models.reading.expert_fields import SIGMOID_GATING
from chairlift.models.reading.gguf_sizes import read_uniform, read_vocab_size
from chairlift.models.reading.layer_fields import MAX_LAYERS
from chairlift.models.reading.mamba_sizes import (
    MAX_WIDTH,
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

SUM_EPS: Final = 1e-20
"""Is added to the sum of the scores by which those of the chosen experts are divided."""

FIELDS_WITHOUT_EFFECT: Final = (
    "chunk_size",
    "expand",
    "moe_shared_expert_overlap",
    "mtp_layers_block_type",
    "num_logits_to_keep",
    "output_router_logits",
    "residual_in_fp32",
    "time_step_floor",
    "time_step_max",
    "time_step_min",
)
"""The fields of initialization and of training, and those whose value follows from others."""

EXPERT_FIELDS: Final = (
    "moe_intermediate_size",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "topk_group",
)
"""The fields of experts, which have no effect in a model without them."""


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
        self._fields = fields

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
        if kind == "mlp":
            return LayerSpec(None, none, self._network(mixer, self._inner), norms)
        shared = self._network(f"{mixer}.shared_experts", self._fields.integer("moe_shared_expert_intermediate_size"))
        assert norms.before is not None, "every layer has a norm"
        return LayerSpec(
            None, none, shared, norms, parallel_experts=ParallelExpertsSpec(self._experts(mixer), norms.before)
        )

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

    def _network(self, prefix: str, inner: int, group: str = MLP) -> FeedForwardSpec:
        up, down = ((f"{prefix}.up_proj", inner),), ((f"{prefix}.down_proj", self.hidden_size),)
        return FeedForwardSpec(
            MatrixSpec(group, "up", up, self.hidden_size, self._mlp_bias),
            MatrixSpec(group, "down", down, inner, self._mlp_bias),
            self._activation,
            gated=False,
        )

    def _experts(self, prefix: str) -> FeedForwardSpec:
        """The experts, which are chosen as in DeepSeek-V3, from one group."""
        fields, why = self._fields, "experts in groups or of another width are not supported"
        for key, only in (("n_group", 1), ("topk_group", 1), ("n_shared_experts", 1), ("moe_latent_size", None)):
            fields.allow_only(key, only, why)
        fields.allow_only("mlp_bias", False, "experts have no biases")
        count = fields.integer("n_routed_experts")
        routing = ExpertRouting(
            fields.integer("num_experts_per_tok", high=count),
            "chosen" if fields.flag("norm_topk_prob", True) else "all",
            has_sigmoid=True,
            sum_eps=SUM_EPS,
            scale=fields.number("routed_scaling_factor", 1.0),
        )
        matrix = MatrixSpec(ROUTER, ROUTER, ((f"{prefix}.gate", count),), self.hidden_size)
        router = RouterSpec(matrix, routing, selection_bias=f"{prefix}.gate.e_score_correction_bias")
        inner = fields.integer("moe_intermediate_size")
        return replace(self._network(f"{prefix}.experts.{{}}", inner, EXPERTS), router=router)


def read_nemotron_h(fields: ConfigFields) -> ModelConfig:
    """Read the `config.json` of a Nemotron-H model."""
    kinds = _read_kinds(fields)
    for key in FIELDS_WITHOUT_EFFECT + (() if "moe" in kinds else EXPERT_FIELDS):
        fields.get(key)
    fields.allow_only("sliding_window", None, "this architecture has no sliding window")
    fields.allow_only("tie_word_embeddings", False, "transformers has an LM head of its own in this architecture")
    fields.allow_only("num_nextn_predict_layers", 0, "heads that predict several tokens are not supported")
    reader = _Reader(fields)
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
        if not isinstance(kind, str) or kind not in KINDS:
            raise fields.error(key, f"contains {kind!r:.80}, which is not supported; supported: {', '.join(KINDS)}")
    if fields.get("num_hidden_layers") is not None:
        fields.allow_only("num_hidden_layers", len(types), f"{key} has {len(types)} layers")
    found = [KINDS[kind] for kind in types]
    if "attention" not in found:
        raise fields.error(key, "has no layer with attention, which is not supported")
    return found


# -- GGUF ------------------------------------------------------------------------------------------------------------


def read_nemotron_h_gguf(header: GGUFHeader) -> ModelConfig:
    """Read the metadata of a GGUF file, as those of the `config.json` of the same model."""
    fields, has_experts = header.fields, header.name == "nemotron_h_moe"
    layers = fields.integer("block_count", high=MAX_LAYERS)
    fields.allow_only("nextn_predict_layers", 0, "heads that predict several tokens are not supported")
    for key in GGUF_FIELDS_WITHOUT_EFFECT:
        fields.get(key)
    eps_key = "attention.layer_norm_epsilon"
    eps = fields.number("attention.layer_norm_rms_epsilon", fields.get(eps_key), high=1.0)
    mamba = read_gguf_mamba_sizes(header, eps)
    head_dim = fields.integer("attention.key_length", high=4096)
    fields.allow_only("attention.value_length", head_dim, "K and V must have the same width")
    values: dict[str, Any] = {
        "hidden_size": fields.integer("embedding_length"),
        "layer_norm_epsilon": eps,
        "num_attention_heads": read_uniform(fields, "attention.head_count", ignores_zeros=True),
        "num_key_value_heads": read_uniform(fields, "attention.head_count_kv", ignores_zeros=True),
        "head_dim": head_dim,
        "intermediate_size": read_uniform(fields, "feed_forward_length", ignores_zeros=True),
        "vocab_size": read_vocab_size(fields, header.tokens),
        "max_position_embeddings": fields.integer("context_length"),
        "layers_block_type": _read_gguf_kinds(fields, layers, "moe" if has_experts else "mlp"),
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in header.tensor_names),
        "mamba_num_heads": mamba.num_heads,
        "mamba_head_dim": mamba.head_dim,
        "n_groups": mamba.num_groups,
        "ssm_state_size": mamba.state_size,
        "conv_kernel": mamba.width,
        "use_conv_bias": mamba.conv_bias,
        "mamba_proj_bias": mamba.input_bias,
        "use_bias": mamba.output_bias,
    }
    if has_experts:
        values |= {
            "n_routed_experts": fields.integer("expert_count"),
            "num_experts_per_tok": fields.integer("expert_used_count"),
            "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": fields.integer("expert_shared_feed_forward_length"),
            "n_shared_experts": fields.integer("expert_shared_count", 1),
            "norm_topk_prob": fields.flag("expert_weights_norm", True),
            "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
            "n_group": fields.integer("expert_group_count", 1),
            "moe_latent_size": fields.get("moe_latent_size"),
        }
        fields.allow_only("expert_gating_func", SIGMOID_GATING, "the architecture determines this property")
    return replace(read_nemotron_h(ConfigFields(values, fields.source)), name=header.name)


def _read_gguf_kinds(fields: ConfigFields, layers: int, network: LayerKind) -> list[LayerKind]:
    """Read the kind of each layer: attention has KV heads, a network an inner size, and Mamba-2 has neither."""
    found = []
    for key in ("attention.head_count_kv", "feed_forward_length"):
        numbers = fields.get(key)
        if not isinstance(numbers, list) or len(numbers) != layers:
            raise fields.error(key, f"must hold a number for each of {layers} layers, got {numbers!r:.80}")
        found.append(numbers)
    return ["attention" if heads else network if inner else "mamba" for heads, inner in zip(*found, strict=True)]


GGUF_FIELDS_WITHOUT_EFFECT: Final = ("rope.dimension_count", "rope.freq_base")
"""There are no rotary embeddings."""

NEMOTRON_H_GGUF_NAMES: Final = {
    "model.embeddings": "token_embd",
    "model.norm_f": "output_norm",
    "lm_head": "output",
    "model.layers.{}.norm": "blk.{}.attn_norm",
    **mamba_gguf_names("mixer"),
    **{
        f"model.layers.{{}}.mixer.{name}": f"blk.{{}}.{other}"
        for name, other in (
            ("q_proj", "attn_q"),
            ("k_proj", "attn_k"),
            ("v_proj", "attn_v"),
            ("o_proj", "attn_output"),
            ("up_proj", "ffn_up"),
            ("down_proj", "ffn_down"),
            ("gate", "ffn_gate_inp"),
            ("gate.e_score_correction_bias", "exp_probs_b.bias"),
            ("experts.{}.up_proj", "ffn_up_exps"),
            ("experts.{}.down_proj", "ffn_down_exps"),
            ("shared_experts.up_proj", "ffn_up_shexp"),
            ("shared_experts.down_proj", "ffn_down_shexp"),
        )
    },
}

NEMOTRON_H: Final = Architecture(
    name="nemotron_h",
    hf_readers={"NemotronHForCausalLM": read_nemotron_h},
    gguf_readers=dict.fromkeys(("nemotron_h", "nemotron_h_moe"), read_nemotron_h_gguf),
    gguf_names=NEMOTRON_H_GGUF_NAMES,
    other_prefixes=(("model.", "backbone."),),
)
