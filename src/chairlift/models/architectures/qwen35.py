"""Qwen3-Next, Qwen3.5, 3.6 and 3.8 (Yang et al., 2025): `LlamaSizes` with the gated delta rule in most layers.

The other layers multiply attention by the sigmoid of a projection, whose rows share a tensor with the query rows.
MoE models have a shared expert beside the others, which a sigmoid multiplies too. The layers of images have no part in
the text model. Files of Qwen3-Next have other projections of the gated delta rule, whose rows are grouped by key head.

The predictor (MTP) has attention. It reads hidden states after the final norm, and the embedding comes first: vLLM's
`qwen3_next_mtp.py` and `qwen3_next.py`, and llama.cpp since #24025, where the acceptance of Qwen3.6 rose by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader
from chairlift.models.declaration.matrix_spec import PROJECTIONS, MatrixSpec, NormSpec
from chairlift.models.declaration.model_config import ModelConfig, PredictorSpec
from chairlift.models.declaration.recurrence_spec import RecurrenceSpec
from chairlift.models.reading.architecture import Architecture, StoredName, stacked_experts
from chairlift.models.reading.config_fields import ConfigFields, exact_quotient
from chairlift.models.reading.delta_sizes import DeltaSizes, read_delta_sizes
from chairlift.models.reading.expert_fields import QWEN_NAMES, read_dense_layers, read_experts, read_softmax
from chairlift.models.reading.gguf_header import POST_NORM_NAMES, GGUFHeader, names_in_layers
from chairlift.models.reading.layer_fields import DELTA_LAYERS, check_recurrent_layers
from chairlift.models.reading.llama_sizes import AttentionGate, LlamaSizes

SEPARATE: Final = ("qkv", "z", "b", "a")
GROUPED: Final = ("qkvz", "ba")
GROUPED_GATES: Final = ("qkv", "z", "ba")
"""The projections of the gated delta rule in files of Qwen3.5, in folders of Qwen3-Next, and in its GGUF files."""


def _declare_delta(delta: DeltaSizes, inputs: Sequence[str], sizes: LlamaSizes, index: int) -> RecurrenceSpec:
    """Return the declaration of the gated delta rule of one layer.

    Args:
        inputs: the names of the matrices of the input: SEPARATE, GROUPED or GROUPED_GATES.
    """
    prefix, values, heads = f"model.layers.{index}.linear_attn", delta.out_features, delta.num_heads
    channels, shared = 2 * delta.num_keys + values, heads // delta.num_key_heads
    widths = {"qkv": channels, "z": values, "b": heads, "a": heads, "qkvz": channels + values, "ba": 2 * heads}
    groups = {"qkvz": (delta.key_dim,) * 2 + (shared * delta.value_dim,) * 2, "ba": (shared, shared)}
    return delta.declare(
        prefix,
        sizes.hidden_size,
        NormSpec("rms_norm", f"{prefix}.norm", delta.value_dim, sizes.norm_eps),
        [(f"in_proj_{name}", widths[name]) for name in inputs],
        "out_proj",
        grouped_rows=tuple((f"in_proj_{name}", groups[name]) for name in inputs if name in groups),
    )


@dataclass(frozen=True, slots=True)
class PredictorNames:
    """The names of the parameters of a predictor: the prefix of its layer, and the names of the others."""

    layer: str
    projection: str
    embedding_norm: str
    hidden_norm: str
    norm: str


HF_PREDICTOR: Final = PredictorNames(
    "mtp.layers.0", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"
)


@dataclass(frozen=True, slots=True)
class Qwen35Sizes:
    """The sizes of a Qwen3.5 model.

    Attributes:
        recurrent: whether each layer has the gated delta rule in place of attention.
        inputs: see `_declare_delta`.
        predictor: the names of the parameters of its predictor; None if it has none.
    """

    sizes: LlamaSizes
    delta: DeltaSizes
    recurrent: Sequence[bool]
    inputs: tuple[str, ...] = SEPARATE
    predictor: PredictorNames | None = None

    def declare(self) -> ModelConfig:
        predictor = None if self.predictor is None else self._declare_predictor(self.predictor)
        config = replace(self.sizes.declare(), predictor=predictor)
        declare = partial(_declare_delta, self.delta, self.inputs, self.sizes)
        return config.with_recurrences(self.recurrent, declare)

    def _declare_predictor(self, names: PredictorNames) -> PredictorSpec:
        def norm(name: str) -> NormSpec:
            return NormSpec("rms_norm", name, hidden, self.sizes.norm_eps, self.sizes.norm_weight_offset)

        hidden = self.sizes.hidden_size
        return PredictorSpec(
            layer=self.sizes.declare_layer(self.sizes.num_layers, names.layer),
            projection=MatrixSpec(PROJECTIONS, "predictor_in", ((names.projection, hidden),), 2 * hidden),
            embedding_norm=norm(names.embedding_norm),
            hidden_norm=norm(names.hidden_norm),
            norm=norm(names.norm),
        )


class Qwen35ConfigReader(LlamaConfigReader):
    """The reader of a text model. GGUF files have complete norms and another order of value heads."""

    def __call__(self, fields: ConfigFields) -> ModelConfig:
        fields.ignore("mlp_only_layers", "output_gate_type")  # No effect, unless a model has experts.
        fields.allow_only("attn_output_gate", True, "attention of Qwen3.5 has a gate")
        sizes = replace(self.read_sizes(fields), qk_norm="heads")
        if self.name != "qwen3_5":
            fields.ignore("intermediate_size")  # Has no effect, unless layers without experts have this size.
            is_next = self.name == "qwen3_next"
            experts = read_experts(fields, read_softmax(fields) if is_next else "chosen", names=QWEN_NAMES)
            experts = replace(experts, shared_size=fields.integer("shared_expert_intermediate_size"))
            if is_next:
                experts = replace(experts, dense_layers=read_dense_layers(fields, sizes.num_layers))
            sizes = replace(sizes, experts=experts)
        if isinstance(fields, GGUFHeader):
            return _read_gguf(fields, sizes)
        sizes = replace(sizes, norm_weight_offset=1.0)
        layers, predictor = _read_layers(fields, sizes.num_layers), _read_predictor(fields)
        inputs = GROUPED if self.name == "qwen3_next" else SEPARATE
        return Qwen35Sizes(sizes, read_delta_sizes(fields), layers, inputs, predictor).declare()

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        sizes = super().read_sizes(fields)
        dtype = "dtype" if fields.get("dtype") is not None else "torch_dtype"
        gate = AttentionGate("q_gate", sizes.qkv_bias)
        return replace(sizes, dtype=fields.get(dtype, "float32"), attention_gate=gate)


def _read_predictor(fields: ConfigFields) -> PredictorNames | None:
    """The names of the predictor. One with several layers or with separate embeddings is not supported."""
    has_embeddings = fields.get("mtp_use_dedicated_embeddings")
    return HF_PREDICTOR if fields.integer("mtp_num_hidden_layers", 0, low=0) == 1 and not has_embeddings else None


def _read_layers(fields: ConfigFields, layers: int, further: int = 0) -> list[bool]:
    """Read whether each layer has recurrent state. Of GGUF files, only newer ones have the list, which contains the
    `further` layers behind the model's layers."""
    key, known = "layer_types", DELTA_LAYERS
    if isinstance(fields, GGUFHeader):
        key, known = "attention.recurrent_layers", {True: True, False: False}
    interval = fields.integer("full_attention_interval", 4)
    if (listed := fields.get(key)) is not None:
        return check_recurrent_layers(fields, key, listed, layers + further, known)[:layers]
    recurrent = [bool((index + 1) % interval) for index in range(layers)]
    if all(recurrent):
        raise fields.error("full_attention_interval", f"({interval}) leaves no layer with attention")
    return recurrent


def _read_gguf(header: GGUFHeader, sizes: LlamaSizes) -> ModelConfig:
    """Read the properties of a GGUF file that a `config.json` does not have."""
    header.ignore("expert_weights_scale")
    further = header.integer("nextn_predict_layers", 0, low=0)
    heads, inner = header.integer("linear_num_value_heads"), header.integer("ssm.inner_size")
    value_dim = exact_quotient(header, "ssm.inner_size", inner, "linear_num_value_heads", heads)
    header.set_defaults({"linear_value_head_dim": value_dim})
    delta = replace(read_delta_sizes(header), has_tiled_keys=header.name != "qwen3next")
    inputs = GROUPED_GATES if header.name == "qwen3next" else SEPARATE
    recurrent = _read_layers(header, sizes.num_layers, further)
    predictor, prefix = None, f"model.layers.{sizes.num_layers}"
    if further == 1 and f"blk.{sizes.num_layers}.nextn.embed_tokens.weight" not in header.tensor_names:
        names = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
        predictor = PredictorNames(prefix, *(f"{prefix}.{name}" for name in names))
    return Qwen35Sizes(sizes, delta, recurrent, inputs, predictor).declare()


def _query_and_gate(layer: str, tensor: str) -> dict[str, StoredName]:
    """The places of query and gate, whose heads alternate in one tensor."""
    place = StoredName(tensor, row_step=2, block="head")
    return {f"{layer}.self_attn.q_proj": place, f"{layer}.self_attn.q_gate": place._replace(first_row=1)}


def _stacked(layer: str) -> dict[str, str | StoredName]:
    """The places of projections in safetensors files."""
    return {**_query_and_gate(layer, f"{layer}.self_attn.q_proj"), **stacked_experts(layer=layer)}


_GGUF_NAMES: Final[Mapping[str, str | StoredName]] = {
    **POST_NORM_NAMES,
    **_query_and_gate("model.layers.{}", "blk.{}.attn_q"),
    **names_in_layers(
        "linear_attn",
        {
            "in_proj_qkv": "attn_qkv",
            "in_proj_z": "attn_gate",
            "in_proj_b": "ssm_beta",
            "in_proj_a": "ssm_alpha",
            "in_proj_ba": "ssm_ba",
            "conv1d": "ssm_conv1d",
            "dt_bias": "ssm_dt.bias",
            "A_log": "ssm_a",
            "norm": "ssm_norm",
            "out_proj": "ssm_out",
        },
    ),
    **{f"model.layers.{{}}.{name}": f"blk.{{}}.nextn.{name}" for name in ("eh_proj", "enorm", "hnorm")},
    "model.layers.{}.shared_head.norm": "blk.{}.nextn.shared_head_norm",
}

DENSE: Final = Qwen35ConfigReader("qwen3_5", has_recurrence=True, rotated_share=0.25)
MOE: Final = replace(DENSE, name="qwen3_5_moe", inner_key="moe_intermediate_size")
NEXT: Final = replace(DENSE, name="qwen3_next", defaults={"norm_topk_prob": True})

QWEN35: Final = Architecture(
    name="qwen3.5",
    hf_readers={"Qwen3_5ForCausalLM": DENSE, "Qwen3_5MoeForCausalLM": MOE, "Qwen3NextForCausalLM": NEXT},
    gguf_readers={"qwen35": DENSE, "qwen35moe": MOE, "qwen3next": NEXT},
    gguf_names=_GGUF_NAMES,
    stacked_names={**_stacked("model.layers.{}"), **_stacked("mtp.layers.{}")},
    unread_prefixes=("mtp.",),
)
