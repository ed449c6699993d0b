"""BERT (Devlin et al., 2019), RoBERTa and XLM-RoBERTa: encoders with learned positions and norms after the additions.

    x = norm(x + attention(x)), then x = norm(x + down(gelu(up(x))))

bge, e5, MiniLM and most cross-encoders have these architectures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from chairlift.models.architecture import Architecture, HFReader
from chairlift.models.config_fields import ConfigFields, exact_quotient
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
    def read(fields: ConfigFields) -> ModelConfig:
        return _read(fields, family)

    return read


def _read(fields: ConfigFields, family: _Family) -> ModelConfig:
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    exact_quotient(fields, "hidden_size", hidden, "num_attention_heads", heads)
    fields.allow_only("position_embedding_type", "absolute", "positions are learned")
    if family.offset:
        fields.integer("pad_token_id", ROBERTA_OFFSET - 1, low=ROBERTA_OFFSET - 1, high=ROBERTA_OFFSET - 1)
    if family.classifier is not None:
        _check_single_score(fields)
    fields.get("tie_word_embeddings")  # concerns the head of masked language models
    inner = fields.integer("intermediate_size")
    activation = ACTIVATIONS[fields.choice("hidden_act", ACTIVATIONS, "gelu")]
    eps, vocab = fields.number("layer_norm_eps", 1e-12), fields.integer("vocab_size")
    rows = fields.integer("max_position_embeddings")
    types = fields.integer("type_vocab_size", 2)

    def norm(name: str) -> NormSpec:
        return NormSpec("layer_norm", name, hidden, eps)

    def matrix(group: str, kernel: str, names: tuple[str, ...], out: int, inputs: int) -> MatrixSpec:
        return MatrixSpec(group, kernel, tuple((name, out) for name in names), inputs, has_bias=True)

    def layer(index: int) -> LayerSpec:
        root = f"encoder.layer.{index}"
        own = f"{root}.attention.self"
        attention = AttentionSpec(
            qkv=matrix(ATTENTION, "qkv", (f"{own}.query", f"{own}.key", f"{own}.value"), hidden, hidden),
            output=matrix(ATTENTION, "output", (f"{root}.attention.output.dense",), hidden, hidden),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            scale=(hidden // heads) ** -0.5,
        )
        feed_forward = FeedForwardSpec(
            up=matrix(MLP, "up", (f"{root}.intermediate.dense",), inner, hidden),
            down=matrix(MLP, "down", (f"{root}.output.dense",), hidden, inner),
            activation=activation,
            gated=False,
        )
        return LayerSpec(
            attention,
            BranchNorms(of_sum=norm(f"{root}.attention.output.LayerNorm")),
            feed_forward,
            BranchNorms(of_sum=norm(f"{root}.output.LayerNorm")),
        )

    return ModelConfig(
        architecture="bert",
        name=family.name,
        hidden_size=hidden,
        max_position_embeddings=rows - family.offset,
        embedding=MatrixSpec(EMBEDDING, EMBEDDING, (("embeddings.word_embeddings", vocab),), hidden),
        positions=PositionTableSpec("embeddings.position_embeddings", rows, hidden, family.offset),
        layers=tuple(layer(index) for index in range(fields.integer("num_hidden_layers", high=4096))),
        final_norm=None,
        head=MatrixSpec(LM_HEAD, LM_HEAD, (("embeddings.word_embeddings", vocab),), hidden),
        tie_word_embeddings=True,
        unneeded_modules=("pooler.dense", "embeddings.position_ids") if family.classifier is None else (),
        encoder=EncoderSpec(
            norm("embeddings.LayerNorm"),
            PositionTableSpec("embeddings.token_type_embeddings", types, hidden, 0) if types else None,
            family.classifier,
        ),
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
