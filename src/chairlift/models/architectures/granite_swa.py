"""Granite-SWA and Granite-MoE-SWA (IBM, 2026): Granite with windows in most layers, sinks, and a rotary base by layer.

Some layers have no rotary embedding. Safetensors files hold the experts of a layer in two tensors.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from chairlift.models.architectures.granite import NAMES, GraniteConfigReader, read_shared_experts
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.reading.architecture import Architecture, renamed_in_layers
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.gguf_header import GGUF_NAMES, GGUFHeader
from chairlift.models.reading.layer_fields import read_windows
from chairlift.models.reading.llama_sizes import ExpertNames, ExpertSizes, LlamaSizes

WINDOWS: Final = partial(read_windows, pattern=4, default=128, is_full=lambda layer, layers: layer % 4 == 0)

SWA_NAMES: Final = replace(
    NAMES,
    router="block_sparse_moe.router",
    up=("block_sparse_moe.experts.{}.gate_up_proj",),
    down="block_sparse_moe.experts.{}.down_proj",
)
FUSED_UP: Final = ("mlp.experts.{}.gate_up_proj",)
FUSED_SHARED: Final = ("mlp.shared_experts.gate_up_proj",)


class GraniteSwaConfigReader(GraniteConfigReader):
    """The reader of Granite-SWA, with experts or without."""

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        sizes = replace(super().read_sizes(fields), attention_sinks=True)
        return replace(sizes, ropes=_read_ropes(fields, sizes))


def _read_ropes(fields: ConfigFields, sizes: LlamaSizes) -> list[RopeConfig | None]:
    """Read the rotary embedding of each layer: its base, or in a GGUF file whether there is one."""
    is_gguf = isinstance(fields, GGUFHeader)
    key, layers = "attention.rope_pattern" if is_gguf else "layer_rope_theta", sizes.num_layers
    bases = fields.get(key, [sizes.rope.theta] * layers)
    if (
        not isinstance(bases, list)
        or len(bases) != layers
        or not all(isinstance(base, int | float) and base >= 0 for base in bases)
        or (not is_gguf and any(isinstance(base, bool) for base in bases))
    ):
        raise fields.error(key, f"must hold a number of at least 0 for each of {layers} layers, got {bases!r:.80}")
    return [replace(sizes.rope, theta=sizes.rope.theta if is_gguf else float(base)) if base else None for base in bases]


def _read_gguf_experts(header: ConfigFields, sizes: LlamaSizes) -> ExpertSizes | None:
    """Read the experts of a GGUF file. The matrices of the gate may be in one tensor with those of up."""
    if header.get("num_experts", 0) == 0:
        return None
    is_fused = isinstance(header, GGUFHeader) and "blk.0.ffn_gate_up_exps.weight" in header.tensor_names
    names = ExpertNames(up=FUSED_UP if is_fused else ExpertNames().up, shared_up=FUSED_SHARED)
    return read_shared_experts(header, sizes, names)


GRANITE_SWA: Final = Architecture(
    name="granite_swa",
    hf_readers={
        "GraniteSWAForCausalLM": GraniteSwaConfigReader(
            "granite_swa", WINDOWS, reads_mlp_bias=True, defaults={"tie_word_embeddings": True}
        ),
        "GraniteMoeSWAForCausalLM": GraniteSwaConfigReader(
            "granitemoe_swa", WINDOWS, experts=partial(read_shared_experts, names=SWA_NAMES)
        ),
    },
    gguf_readers={"granite_swa": GraniteSwaConfigReader("granite_swa", WINDOWS, experts=_read_gguf_experts)},
    gguf_names={**GGUF_NAMES, "model.layers.{}.mlp.shared_experts.gate_up_proj": "blk.{}.ffn_up_shexp"},
    gguf_interleaved=frozenset(("granite_swa",)),
    stacked_names=renamed_in_layers(
        {
            "self_attn.sinks.weight": "self_attn.sinks",
            "block_sparse_moe.experts.{}.gate_up_proj.weight": "block_sparse_moe.experts.gate_up_proj",
            "block_sparse_moe.experts.{}.down_proj.weight": "block_sparse_moe.experts.down_proj",
            # GGUF files have other names than adapters.
            "mlp.shared_experts.gate_up_proj": "shared_mlp.input_linear",
            "mlp.shared_experts.down_proj": "shared_mlp.output_linear",
        }
    ),
)
