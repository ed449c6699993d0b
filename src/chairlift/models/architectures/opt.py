"""OPT (Zhang et al., 2022): learned positions, LayerNorm, an ungated feed-forward network, biases in all projections.

    x + attention(norm(x)), then x + fc2(relu(fc1(norm(x))))

opt-350m has its norms after the additions: norm(x + attention(x)), then norm(x + fc2(relu(fc1(x)))).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from chairlift.models.declaration.attention_spec import AttentionSpec, declare_attention
from chairlift.models.declaration.feed_forward_spec import declare_network
from chairlift.models.declaration.layer_spec import BranchNorms, LayerSpec
from chairlift.models.declaration.matrix_spec import EMBEDDING, LM_HEAD, PROJECTIONS, MatrixSpec, NormSpec
from chairlift.models.declaration.model_config import ModelConfig, PositionTableSpec
from chairlift.models.reading.architecture import Architecture
from chairlift.models.reading.config_fields import ConfigFields, exact_quotient

POSITION_OFFSET: Final = 2
"""The row of the position table for position 0."""

NORM_EPS: Final = 1e-5

ROOT: Final = "model.decoder"


@dataclass(frozen=True, slots=True, kw_only=True)
class OPTSizes:
    """The sizes and switches of an OPT model, 125m to 66b.

    Attributes:
        num_kv_heads: the number of KV heads, or None for num_heads as in every OPT model. Falcon has the same matrices
            and fewer KV heads.
        has_biases: whether all projections and the feed-forward network have biases.
        word_embed_proj_dim: the width of a word vector, or None for hidden_size.
        norm_before: whether LayerNorm precedes each branch; otherwise it follows each addition.
        final_norm: whether LayerNorm precedes the head.
        dtype: see ModelConfig.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    max_position_embeddings: int
    activation: str = "relu"
    tie_word_embeddings: bool = True
    has_biases: bool = True
    word_embed_proj_dim: int | None = None
    norm_before: bool = True
    final_norm: bool = True
    dtype: str = "float32"

    def declare(self) -> ModelConfig:
        """Return the declaration of the model with these sizes."""
        size, word = self.hidden_size, self.word_embed_proj_dim or self.hidden_size
        rows = self.max_position_embeddings + POSITION_OFFSET
        has_norm, has_projections = self.norm_before and self.final_norm, word != size
        return ModelConfig(
            architecture="opt",
            name="opt",
            hidden_size=size,
            max_position_embeddings=self.max_position_embeddings,
            embedding=MatrixSpec(EMBEDDING, EMBEDDING, ((f"{ROOT}.embed_tokens", self.vocab_size),), word),
            positions=PositionTableSpec(f"{ROOT}.embed_positions", rows, size, POSITION_OFFSET),
            project_in=_projection("project_in", size, word) if has_projections else None,
            layers=tuple(self._layer(f"{ROOT}.layers.{index}") for index in range(self.num_layers)),
            final_norm=self._norm(f"{ROOT}.final_layer_norm") if has_norm else None,
            project_out=_projection("project_out", word, size) if has_projections else None,
            head=MatrixSpec(LM_HEAD, LM_HEAD, (("lm_head", self.vocab_size),), word),
            tie_word_embeddings=self.tie_word_embeddings,
            dtype=self.dtype,
        )

    def _layer(self, prefix: str) -> LayerSpec:
        up, down, bias = ((f"{prefix}.fc1", self.intermediate_size),), f"{prefix}.fc2", self.has_biases
        return LayerSpec(
            attention=self._attention(f"{prefix}.self_attn"),
            attention_norms=self._norms(f"{prefix}.self_attn_layer_norm"),
            feed_forward=declare_network(up, down, self.hidden_size, self.activation, gated=False, has_bias=bias),
            feed_forward_norms=self._norms(f"{prefix}.final_layer_norm"),
        )

    def _norms(self, name: str) -> BranchNorms:
        norm = self._norm(name)
        return BranchNorms(before=norm) if self.norm_before else BranchNorms(of_sum=norm)

    def _attention(self, prefix: str) -> AttentionSpec:
        size, kv_heads = self.hidden_size, self.num_kv_heads or self.num_heads
        keys = kv_heads * (size // self.num_heads)
        qkv = tuple((f"{prefix}.{part}_proj", out) for part, out in zip("qkv", (size, keys, keys), strict=True))
        output = f"{prefix}.out_proj"
        return declare_attention(qkv, output, size, self.num_heads, self.has_biases, num_kv_heads=kv_heads)

    def _norm(self, name: str) -> NormSpec:
        return NormSpec("layer_norm", name, self.hidden_size, NORM_EPS)


def _projection(name: str, out_features: int, in_features: int) -> MatrixSpec:
    return MatrixSpec(PROJECTIONS, name, ((f"{ROOT}.{name}", out_features),), in_features)


def read_opt(fields: ConfigFields) -> ModelConfig:
    """Read the `config.json` of an OPT model."""
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    exact_quotient(fields, "hidden_size", hidden, "num_attention_heads", heads)
    fields.allow_only("layer_norm_elementwise_affine", True, "layer norms must have weights")
    norm_before = fields.flag("do_layer_norm_before", True)
    projection = fields.integer("word_embed_proj_dim", hidden)
    return OPTSizes(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("ffn_dim"),
        num_layers=fields.integer("num_hidden_layers", high=4096),
        num_heads=heads,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        activation=fields.choice("activation_function", ("relu",), "relu"),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        has_biases=fields.flag("enable_bias", True),
        word_embed_proj_dim=None if projection == hidden else projection,
        norm_before=norm_before,
        final_norm=not fields.flag("_remove_final_layer_norm", False) and norm_before,
    ).declare()


OPT: Final = Architecture(name="opt", hf_readers={"OPTForCausalLM": read_opt})
