"""Llama with experts that are chosen by a softmax: Mixtral (Jiang et al., 2024), Qwen2-MoE and Qwen3-MoE (Yang et al.,
2024 and 2025) and OLMoE (Muennighoff et al., 2024).

Mixtral is Mistral with experts in every layer; its GGUF files are of the architecture llama. Qwen2-MoE and Qwen3-MoE
are Qwen2 and Qwen3 with experts in all layers, or in some of them, and Qwen2-MoE has a shared expert with a gate. OLMoE
has experts in every layer, and norms of query and key across heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from chairlift.models.architectures.llama import (
    LlamaConfigReader,
    no_windows,
    qwen_windows,
    uniform_windows,
)
from chairlift.models.reading.architecture import Architecture, stacked_experts
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.expert_fields import (
    QWEN_GGUF_NAMES,
    QWEN_NAMES,
    read_dense_layers,
    read_experts,
    read_softmax,
)
from chairlift.models.reading.gguf_header import GGUF_NAMES
from chairlift.models.reading.llama_sizes import ExpertNames, ExpertSizes, LlamaSizes

MIXTRAL_NAMES: Final = ExpertNames(
    router="block_sparse_moe.gate",
    up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    down="block_sparse_moe.experts.{}.w2",
)


def _read_mixtral(fields: ConfigFields, sizes: LlamaSizes) -> ExpertSizes:
    return read_experts(fields, "chosen", sizes.intermediate_size, MIXTRAL_NAMES)


def _read_qwen2(fields: ConfigFields, sizes: LlamaSizes) -> ExpertSizes:
    fields.allow_only("qkv_bias", True, "query, key and value must have biases")
    size = fields.integer("shared_expert_intermediate_size")
    return replace(_read_qwen3(fields, sizes), names=QWEN_NAMES, shared_size=size)


def _read_qwen3(fields: ConfigFields, sizes: LlamaSizes) -> ExpertSizes:
    experts = read_experts(fields, read_softmax(fields))
    return replace(experts, dense_layers=read_dense_layers(fields, sizes.num_layers))


def _read_olmoe(fields: ConfigFields, sizes: LlamaSizes) -> ExpertSizes:
    fields.allow_only("clip_qkv", None, "query, key and value are not clipped")
    return read_experts(fields, read_softmax(fields), sizes.intermediate_size)


def _qwen3_windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    fields.ignore("max_window_layers")  # transformers ignores it in this architecture.
    if not fields.flag("use_sliding_window", False):
        fields.ignore("sliding_window")  # Has no effect.
        return ()
    return (fields.integer("sliding_window"),) * layers


_MIXTRAL: Final = LlamaConfigReader(
    "mixtral", uniform_windows, qkv_bias=False, experts=_read_mixtral, default_theta=1e6
)
_QWEN2: Final = LlamaConfigReader(
    "qwen2moe",
    partial(qwen_windows, is_paired=True),
    qkv_bias=True,
    experts=_read_qwen2,
    defaults={"max_window_layers": 28},
    gguf_defaults={"norm_topk_prob": False},
)
_QWEN3: Final = LlamaConfigReader("qwen3moe", _qwen3_windows, qk_norm="heads", experts=_read_qwen3)
_OLMOE: Final = LlamaConfigReader(
    "olmoe", no_windows, qk_norm="rows", experts=_read_olmoe, gguf_defaults={"norm_topk_prob": False}
)

MIXTRAL: Final = Architecture(
    name="mixtral",
    hf_readers={"MixtralForCausalLM": _MIXTRAL},
    stacked_names={
        **stacked_experts(MIXTRAL_NAMES),
        "model.layers.{}.block_sparse_moe.gate": "model.layers.{}.mlp.gate",
    },
)
QWEN2_MOE: Final = Architecture(
    name="qwen2-moe",
    hf_readers={"Qwen2MoeForCausalLM": _QWEN2},
    gguf_readers={"qwen2moe": replace(_QWEN2, windows=no_windows)},
    gguf_names=QWEN_GGUF_NAMES,
    stacked_names=stacked_experts(),
)
QWEN3_MOE: Final = Architecture(
    name="qwen3-moe",
    hf_readers={"Qwen3MoeForCausalLM": _QWEN3},
    gguf_readers=dict.fromkeys(("qwen3moe", "qwen3vlmoe"), replace(_QWEN3, windows=uniform_windows)),
    gguf_names=GGUF_NAMES,
    stacked_names=stacked_experts(),
)
OLMOE: Final = Architecture(
    name="olmoe",
    hf_readers={"OlmoeForCausalLM": _OLMOE},
    gguf_readers={"olmoe": _OLMOE},
    gguf_names=GGUF_NAMES,
    stacked_names=stacked_experts(),
)
