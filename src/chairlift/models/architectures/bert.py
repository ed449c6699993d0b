"""BERT (Devlin et al., 2019), RoBERTa and XLM-RoBERTa: encoders with learned positions and norms after the additions.

    x = norm(x + attention(x)), then x = norm(x + down(gelu(up(x))))

bge, e5, MiniLM and most cross-encoders have these architectures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from chairlift.models.declaration import (
    ATTENTION,
    EMBEDDING,
    LM_HEAD,
    MLP,
    AttentionSpec,
    BranchNorms,
    ClassifierSpec,
    EncoderSpec,
    FeedForwardSpec,
    LayerSpec,
    MatrixSpec,
    ModelConfig,
    NormSpec,
    PositionTableSpec,
)
from chairlift.models.reading.architecture import Architecture, HFReader
from chairlift.models.reading.config_fields import ConfigFields, exact_quotient

ACTIVATIONS: Final = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
"""The value of `hidden_act` -> the activation."""

ROBERTA_OFFSET: Final = 2
"""The row of the position table for position 0, which is the id of the padding token plus 1."""


@dataclass(frozen=True, slots=True)
class _Family:
    """What distinguishes the families: the first row of positions, and the head of cross-encoders.

    Attributes:
        classifier: the head; None if `architectures` names none.
    """

    name: str
    offset: int
    classifier: ClassifierSpec | None = None


def _reader(family: _Family) -> HFReader:
    return lambda fields: _read_sizes(fields, family).declare()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """The sizes of a model, with the names of its parameters."""

    family: _Family
    vocab_size: int
    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    num_positions: int
    num_types: int
    activation: str
    eps: float

    def declare(self) -> ModelConfig:
        """Return the declaration of the model with these sizes."""
        size, family, tables = self.hidden_size, self.family, "embeddings"
        words = ((f"{tables}.word_embeddings", self.vocab_size),)
        types = PositionTableSpec(f"{tables}.token_type_embeddings", self.num_types, size, 0)
        return ModelConfig(
            architecture="bert",
            name=family.name,
            hidden_size=size,
            max_position_embeddings=self.num_positions - family.offset,
            embedding=MatrixSpec(EMBEDDING, EMBEDDING, words, size),
            positions=PositionTableSpec(f"{tables}.position_embeddings", self.num_positions, size, family.offset),
            layers=tuple(self._layer(f"encoder.layer.{index}") for index in range(self.num_layers)),
            final_norm=None,
            head=MatrixSpec(LM_HEAD, LM_HEAD, words, size),
            tie_word_embeddings=True,
            unneeded_modules=("pooler.dense", f"{tables}.position_ids") if family.classifier is None else (),
            encoder=EncoderSpec(self._norm(f"{tables}.LayerNorm"), types, family.classifier),
        )

    def _layer(self, root: str) -> LayerSpec:
        return LayerSpec(
            self._attention(f"{root}.attention"),
            BranchNorms(of_sum=self._norm(f"{root}.attention.output.LayerNorm")),
            self._feed_forward(root),
            BranchNorms(of_sum=self._norm(f"{root}.output.LayerNorm")),
        )

    def _attention(self, root: str) -> AttentionSpec:
        size, head_dim = self.hidden_size, self.hidden_size // self.num_heads
        qkv = tuple((f"{root}.self.{part}", size) for part in ("query", "key", "value"))
        return AttentionSpec(
            qkv=MatrixSpec(ATTENTION, "qkv", qkv, size, has_bias=True),
            output=MatrixSpec(ATTENTION, "output", ((f"{root}.output.dense", size),), size, has_bias=True),
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
        )

    def _feed_forward(self, root: str) -> FeedForwardSpec:
        size, inner = self.hidden_size, self.inner_size
        return FeedForwardSpec(
            up=MatrixSpec(MLP, "up", ((f"{root}.intermediate.dense", inner),), size, has_bias=True),
            down=MatrixSpec(MLP, "down", ((f"{root}.output.dense", size),), inner, has_bias=True),
            activation=self.activation,
            gated=False,
        )

    def _norm(self, name: str) -> NormSpec:
        return NormSpec("layer_norm", name, self.hidden_size, self.eps)


def _read_sizes(fields: ConfigFields, family: _Family) -> _Sizes:
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    exact_quotient(fields, "hidden_size", hidden, "num_attention_heads", heads)
    fields.allow_only("position_embedding_type", "absolute", "positions are learned")
    fields.allow_only("is_decoder", False, "attention is not causal")
    if family.offset:
        fields.integer("pad_token_id", ROBERTA_OFFSET - 1, low=ROBERTA_OFFSET - 1, high=ROBERTA_OFFSET - 1)
    if family.classifier is not None:
        _check_single_score(fields)
    fields.get("tie_word_embeddings")  # concerns the head of masked language models
    return _Sizes(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        inner_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers", high=4096),
        num_heads=heads,
        num_positions=fields.integer("max_position_embeddings"),
        num_types=fields.integer("type_vocab_size", 2),
        activation=ACTIVATIONS[fields.choice("hidden_act", ACTIVATIONS, "gelu")],
        eps=fields.number("layer_norm_eps", 1e-12),
    )


def _check_single_score(fields: ConfigFields) -> None:
    """A cross-encoder has one score; other classifiers have several, which nothing here could use."""
    labels = fields.get("id2label")
    count = len(labels) if isinstance(labels, dict) else fields.get("num_labels", 2)
    if count != 1:
        raise fields.error("id2label", f"must have one label, as cross-encoders do, got {count}")


BERT: Final = Architecture(
    name="bert",
    hf_readers={
        "BertModel": _reader(_Family("bert", 0)),
        "BertForMaskedLM": _reader(_Family("bert", 0)),
        "BertForSequenceClassification": _reader(
            _Family("bert", 0, ClassifierSpec("pooler.dense", "classifier", "tanh"))
        ),
        **{
            name: _reader(_Family("xlm-roberta" if name.startswith("XLM") else "roberta", ROBERTA_OFFSET))
            for name in ("RobertaModel", "XLMRobertaModel", "RobertaForMaskedLM", "XLMRobertaForMaskedLM")
        },
        **{
            name: _reader(
                _Family(
                    "xlm-roberta" if name.startswith("XLM") else "roberta",
                    ROBERTA_OFFSET,
                    ClassifierSpec("classifier.dense", "classifier.out_proj", "tanh"),
                )
            )
            for name in ("RobertaForSequenceClassification", "XLMRobertaForSequenceClassification")
        },
    },
    other_prefixes=tuple(
        (part, f"{prefix}.{part}") for prefix in ("bert", "roberta") for part in ("embeddings.", "encoder.", "pooler.")
    ),
    unread_prefixes=("cls.", "lm_head."),
)
