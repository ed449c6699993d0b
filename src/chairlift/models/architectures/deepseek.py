"""DeepSeek-V2 and V3, GLM-4.7-Flash and Youtu: `LlamaSizes` with multi-head latent attention (DeepSeek-AI, 2024).

Youtu (Tencent, 2025) has no experts. The others choose them as DeepSeek-V2 (softmax) or V3 (sigmoids with a bias), from
some of their groups. Shared experts are a dense network beside them. Layers that predict further tokens (MTP) are not
loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from chairlift.models.architectures.llama import ExpertsReader, LlamaConfigReader
from chairlift.models.declaration.attention_spec import AttentionSpec, LatentSpec, RopeConfig
from chairlift.models.declaration.matrix_spec import ATTENTION, MatrixSpec, NormSpec, StoredRows
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.architecture import Architecture, renamed_in_layers, stacked_experts
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.expert_fields import read_routed_experts
from chairlift.models.reading.gguf_header import GGUF_NAMES, GGUFHeader, names_in_layers
from chairlift.models.reading.llama_sizes import LlamaSizes
from chairlift.models.reading.rope_fields import (
    read_gguf_rope,
    rope_parameters,
    with_query_scale,
    yarn_attention_factor,
)

LATENT_EPS: Final = 1e-6
"""The epsilon of the norms of latents in transformers, whatever the field of the other norms is."""


@dataclass(frozen=True, slots=True)
class DeepseekSizes:
    """The sizes of a model in addition to Llama's.

    Attributes:
        query_rank: the size of the latent of queries, or None.
        key_rank: the size of the latent of keys and values.
        plain_dim, rotary_dim: the sizes of the two parts of a query head.
        value_dim: the size of a head of values.
        is_interleaved: whether the two dimensions of a rotated pair are in adjacent rows.
        has_split_heads: whether files have the matrices of keys and values apart, and the matrices of keys transposed.
    """

    sizes: LlamaSizes
    query_rank: int | None
    key_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    is_interleaved: bool = True
    has_split_heads: bool = False

    def declare(self) -> ModelConfig:
        config = self.sizes.declare()
        layers = (
            replace(layer, attention=self._attention(f"model.layers.{index}.self_attn"))
            for index, layer in enumerate(config.layers)
        )
        return replace(config, layers=tuple(layers))

    def _attention(self, prefix: str) -> AttentionSpec:
        sizes, matrix = self.sizes, partial(MatrixSpec, ATTENTION)
        heads, hidden, rank, rotary = sizes.num_heads, sizes.hidden_size, self.key_rank, self.rotary_dim
        query, inner = ("q", hidden) if self.query_rank is None else ("q_b", self.query_rank)
        rotated = f"{prefix}.heads.{{}}.{query}_rotated"
        names = ("k_b", "v_b") if self.has_split_heads else ("kv_b_keys", "kv_b_values")
        keys, values = (f"{prefix}.heads.{{}}.{name}" for name in names)
        key_parts = (f"{prefix}.kv_a_rotated", rotary), (f"{prefix}.kv_a_latent", rank)
        has_latent_query = self.query_rank is not None
        latent = LatentSpec(
            queries=matrix("queries", ((f"{prefix}.{query}_plain", heads * self.plain_dim),), inner),
            rotated_queries=matrix("rotated_queries", ((rotated, rotary),), inner),
            keys=matrix("latent_keys", ((keys, rank),), self.plain_dim),
            values=matrix("latent_values", ((values, self.value_dim),), rank),
            key_norm=NormSpec("rms_norm", f"{prefix}.kv_a_layernorm", rank, LATENT_EPS),
            query_in=matrix("query_in", ((f"{prefix}.q_a_proj", inner),), hidden) if has_latent_query else None,
            query_norm=NormSpec("rms_norm", f"{prefix}.q_a_layernorm", inner, LATENT_EPS) if has_latent_query else None,
            stored=self._stored_rows(prefix, query),
        )
        return AttentionSpec(
            qkv=matrix("latent_in", key_parts, hidden),
            output=matrix("output", ((f"{prefix}.o_proj", hidden),), heads * self.value_dim),
            num_heads=heads,
            num_kv_heads=1,
            head_dim=rotary + rank,
            scale=sizes.attention_scale or (self.plain_dim + rotary) ** -0.5,
            rope=replace(sizes.rope, rotary_dim=rotary),
            latent=latent,
        )

    def _stored_rows(self, prefix: str, query: str) -> dict[str, StoredRows]:
        """The rows of the parameters that files have in one matrix for all heads, or for key and latent."""
        heads, plain, rotary, rank = self.sizes.num_heads, self.plain_dim, self.rotary_dim, self.key_rank
        pairs = [*range(0, rotary, 2), *range(1, rotary, 2)] if self.is_interleaved else range(rotary)
        size, both = plain + rotary, plain + self.value_dim
        all_plain = [head * size + row for head in range(heads) for row in range(plain)]
        stored = {
            f"{prefix}.{query}_plain": StoredRows(heads * size, tuple(all_plain)),
            f"{prefix}.kv_a_rotated": StoredRows(rank + rotary, tuple(rank + row for row in pairs)),
            f"{prefix}.kv_a_latent": StoredRows(rank + rotary, range(rank)),
        }
        for head in range(heads):
            own = f"{prefix}.heads.{head}"
            rotated = tuple(head * size + plain + row for row in pairs)
            stored[f"{own}.{query}_rotated"] = StoredRows(heads * size, rotated)
            if self.has_split_heads:
                for name, width in (("k_b", rank), ("v_b", self.value_dim)):
                    stored[f"{own}.{name}"] = StoredRows(heads * width, range(head * width, (head + 1) * width))
            else:
                first = head * both
                keys, values = range(first, first + plain), range(first + plain, first + both)
                stored[f"{own}.kv_b_keys"] = StoredRows(heads * both, keys, is_transposed=True)
                stored[f"{own}.kv_b_values"] = StoredRows(heads * both, values)
        return stored


def _yarn_scale(rope: RopeConfig, log_multiplier: float) -> float:
    """The factor of scores in a context that YaRN has made longer: the square of its attention factor."""
    return 1.0 if rope.scaling != "yarn" else yarn_attention_factor(rope.factor, log_multiplier) ** 2


@dataclass(frozen=True)
class DeepseekConfigReader(LlamaConfigReader):
    """The reader of one model type.

    Attributes:
        rotates_part: whether `head_dim` is the size of both parts of a head, of which a share is rotated (Mistral 4).
        has_head_size: whether the size of a head in files has a meaning. That of Kimi Linear has none.
    """

    has_latent: bool = True
    qkv_bias: bool | None = False
    experts: ExpertsReader | None = read_routed_experts
    rotates_part: bool = False
    has_head_size: bool = True

    def __call__(self, fields: ConfigFields) -> ModelConfig:
        if isinstance(fields, GGUFHeader):
            return self._read_gguf(fields)
        rotary, plain = (fields.integer(f"qk_{part}_head_dim", high=2048) for part in ("rope", "nope"))
        head_dim = plain + rotary if self.rotates_part else rotary
        fields.set_defaults({"head_dim": head_dim})
        sizes = self.read_sizes(fields)
        for key, only in (
            ("num_key_value_heads", sizes.num_heads),
            ("head_dim", head_dim if self.has_head_size else fields.get("head_dim")),
            ("qk_head_dim", plain + rotary),
        ):
            fields.allow_only(key, only, f"the other fields of latent attention require {only}")
        scaling = rope_parameters(fields)
        multiplier = None if scaling is None else scaling.get("mscale_all_dim")
        factor = 1.0 if scaling is None or not multiplier else _yarn_scale(sizes.rope, scaling.number("mscale_all_dim"))
        return DeepseekSizes(
            replace(sizes, attention_scale=factor * (plain + rotary) ** -0.5),
            query_rank=fields.optional_integer("q_lora_rank"),
            key_rank=fields.integer("kv_lora_rank"),
            plain_dim=plain,
            rotary_dim=rotary,
            value_dim=fields.integer("v_head_dim"),
            is_interleaved=fields.flag("rope_interleave", True),
        ).declare()

    def _read_gguf(self, header: GGUFHeader) -> ModelConfig:
        """Read the metadata of a GGUF file. Newer files have the sizes of heads in keys that end in `_mla`."""
        sizes = self.read_sizes(header)
        suffix = "_mla" if header.get("attention.key_length_mla") is not None else ""
        rotary, rank = header.integer("rope.dimension_count"), header.integer("attention.kv_lora_rank")
        plain = header.integer(f"attention.key_length{suffix}", low=rotary + 1) - rotary
        if suffix and self.has_head_size:
            for key, size in (("attention.key_length", rank + rotary), ("attention.value_length", rank)):
                header.allow_only(key, size, f"attention.kv_lora_rank and rope.dimension_count require {size}")
        scale, rope = (plain + rotary) ** -0.5, sizes.rope
        if rope.scaling == "yarn" and header.get("rope.scaling.yarn_log_multiplier"):
            # The converter to GGUF multiplies by 0.1 in this architecture only, as llama.cpp's deepseek2.cpp says.
            scale *= _yarn_scale(rope, 10 * header.number("rope.scaling.yarn_log_multiplier"))
            rope = replace(rope, attention_factor=1.0)
        return DeepseekSizes(
            replace(sizes, rope=rope, attention_scale=scale),
            query_rank=header.integer("attention.q_lora_rank", 0, low=0) or None,
            key_rank=rank,
            plain_dim=plain,
            rotary_dim=rotary,
            value_dim=header.integer(f"attention.value_length{suffix}"),
            is_interleaved=header.flag("rope_interleave", True),
            has_split_heads=any(name.endswith(".attn_k_b.weight") for name in header.tensor_names),
        ).declare()

    def _rope(self, fields: ConfigFields) -> RopeConfig:
        if not isinstance(fields, GGUFHeader):
            return super()._rope(fields)
        length = fields.get("attention.temperature_length")  # Of queries; in files from Mistral's own format.
        if length is not None:
            fields.allow_only("original_max_position_embeddings", length, f"attention.temperature_length is {length}")
        return with_query_scale(fields, read_gguf_rope(fields, is_partial=True))


_STORED: Final = {
    "q_plain": ("q_proj", "attn_q"),
    "heads.{}.q_rotated": ("q_proj", "attn_q"),
    "q_b_plain": ("q_b_proj", "attn_q_b"),
    "heads.{}.q_b_rotated": ("q_b_proj", "attn_q_b"),
    "kv_a_rotated": ("kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    "kv_a_latent": ("kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    "heads.{}.kv_b_keys": ("kv_b_proj", "attn_kv_b"),
    "heads.{}.kv_b_values": ("kv_b_proj", "attn_kv_b"),
}
"""Declared name of a parameter -> the larger matrix in safetensors files, and that in GGUF files."""

DEEPSEEK_GGUF_NAMES: Final = {
    **GGUF_NAMES,
    **names_in_layers("self_attn", {name: tensor for name, (_, tensor) in _STORED.items()}),
    **names_in_layers("self_attn", {"q_a_proj": "attn_q_a", "q_a_layernorm": "attn_q_a_norm"}),
    "model.layers.{}.self_attn.kv_a_layernorm": "blk.{}.attn_kv_a_norm",
    **names_in_layers("self_attn.heads.{}", {"k_b": "attn_k_b", "v_b": "attn_v_b"}),
}

DEEPSEEK_STACKED_NAMES: Final = renamed_in_layers(
    {f"self_attn.{name}": f"self_attn.{matrix}" for name, (matrix, _) in _STORED.items()}
)

DEEPSEEK: Final = Architecture(
    name="deepseek",
    hf_readers={
        "DeepseekV2ForCausalLM": DeepseekConfigReader(
            "deepseek_v2",
            experts=partial(read_routed_experts, has_sigmoid=False),
            defaults={"n_shared_experts": 2, "q_lora_rank": 1536, "topk_method": "greedy"},
        ),
        "DeepseekV3ForCausalLM": DeepseekConfigReader(
            "deepseek_v3",
            defaults={
                "first_k_dense_replace": 3,
                "n_shared_experts": 1,
                "q_lora_rank": 1536,
                "routed_scaling_factor": 2.5,
            },
        ),
        "YoutuForCausalLM": DeepseekConfigReader(
            "youtu", experts=None, defaults={"q_lora_rank": 1536, "tie_word_embeddings": True}
        ),
        "Glm4MoeLiteForCausalLM": DeepseekConfigReader(
            "glm4_moe_lite",
            defaults={
                "first_k_dense_replace": 1,
                "n_shared_experts": 1,
                "q_lora_rank": 768,
                "routed_scaling_factor": 1.8,
            },
        ),
    },
    gguf_readers={"deepseek2": DeepseekConfigReader("deepseek2", gguf_defaults={"norm_topk_prob": False})},
    gguf_names=DEEPSEEK_GGUF_NAMES,
    stacked_names={**stacked_experts(), **DEEPSEEK_STACKED_NAMES},
)
