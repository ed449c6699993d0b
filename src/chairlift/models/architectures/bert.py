"""BERT (Devlin et al., 2019), RoBERTa and XLM-RoBERTa: encoders with learned positions and norms after the additions.

    x = norm(x + attention(x)), then x = norm(x + down(gelu(up(x))))

bge, e5, MiniLM and most cross-encoders have these architectures.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from chairlift.models.declaration.attention_spec import declare_attention
from chairlift.models.declaration.feed_forward_spec import declare_network
from chairlift.models.declaration.layer_spec import BranchNorms, LayerSpec
from chairlift.models.declaration.matrix_spec import EMBEDDING, LM_HEAD, MatrixSpec, NormSpec
from chairlift.models.declaration.model_config import ClassifierSpec, EncoderSpec, ModelConfig, PositionTableSpec
from chairlift.models.reading.architecture import Architecture, HFReader
from chairlift.models.reading.config_fields import ConfigFields, exact_quotient
from chairlift.models.reading.layer_fields import check_single_score

ACTIVATIONS: Final = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
"""The value of `hidden_act` -> the activation."""

ROBERTA_OFFSET: Final = 2
"""The row of the position table for position 0, which is the id of the padding token plus 1."""


def _read(fields: ConfigFields, name: str, offset: int, classifier: ClassifierSpec | None = None) -> ModelConfig:
    """Read the `config.json` of a model of a family.

    Args:
        offset: the first row of positions.
        classifier: the head of a cross-encoder; None if `architectures` names none.
    """
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    exact_quotient(fields, "hidden_size", hidden, "num_attention_heads", heads)
    fields.allow_only("position_embedding_type", "absolute", "positions are learned")
    fields.allow_only("is_decoder", False, "attention is not causal")
    if offset:
        fields.integer("pad_token_id", ROBERTA_OFFSET - 1, low=ROBERTA_OFFSET - 1, high=ROBERTA_OFFSET - 1)
    if classifier is not None:
        check_single_score(fields)
    fields.ignore("tie_word_embeddings")  # concerns the head of masked language models
    inner, eps = fields.integer("intermediate_size"), fields.number("layer_norm_eps", 1e-12)
    count, num_positions = fields.integer("num_hidden_layers", high=4096), fields.integer("max_position_embeddings")
    tables = "embeddings"
    words = ((f"{tables}.word_embeddings", fields.integer("vocab_size")),)
    activation = ACTIVATIONS[fields.choice("hidden_act", ACTIVATIONS, "gelu")]

    def norm(module: str) -> NormSpec:
        return NormSpec("layer_norm", f"{module}.LayerNorm", hidden, eps)

    def layer(root: str) -> LayerSpec:
        qkv = tuple((f"{root}.attention.self.{part}", hidden) for part in ("query", "key", "value"))
        up = ((f"{root}.intermediate.dense", inner),)
        return LayerSpec(
            declare_attention(qkv, f"{root}.attention.output.dense", hidden, heads, bias=True),
            BranchNorms(of_sum=norm(f"{root}.attention.output")),
            declare_network(up, f"{root}.output.dense", hidden, activation, gated=False, has_bias=True),
            BranchNorms(of_sum=norm(f"{root}.output")),
        )

    types = PositionTableSpec(f"{tables}.token_type_embeddings", fields.integer("type_vocab_size", 2), hidden, 0)
    return ModelConfig(
        name=name,
        hidden_size=hidden,
        max_position_embeddings=num_positions - offset,
        embedding=MatrixSpec(EMBEDDING, EMBEDDING, words, hidden),
        positions=PositionTableSpec(f"{tables}.position_embeddings", num_positions, hidden, offset),
        layers=tuple(layer(f"encoder.layer.{index}") for index in range(count)),
        final_norm=None,
        head=MatrixSpec(LM_HEAD, LM_HEAD, words, hidden),
        tie_word_embeddings=True,
        unneeded_modules=("pooler.dense",) if classifier is None else (),
        embedding_norm=norm(tables),
        encoder=EncoderSpec(types, classifier),
    )


def _readers(prefix: str, name: str, offset: int, dense: str, output: str) -> dict[str, HFReader]:
    """Return the readers of a family, whose entries of `architectures` begin with `prefix`."""
    encoder = partial(_read, name=name, offset=offset)
    ranking = partial(encoder, classifier=ClassifierSpec(dense, output, "tanh"))
    readers = {"Model": encoder, "ForMaskedLM": encoder, "ForSequenceClassification": ranking}
    return {f"{prefix}{end}": reader for end, reader in readers.items()}


BERT: Final = Architecture(
    name="bert",
    hf_readers={
        **_readers("Bert", "bert", 0, "pooler.dense", "classifier"),
        **_readers("Roberta", "roberta", ROBERTA_OFFSET, "classifier.dense", "classifier.out_proj"),
        **_readers("XLMRoberta", "xlm-roberta", ROBERTA_OFFSET, "classifier.dense", "classifier.out_proj"),
    },
    other_prefixes=tuple(
        (part, f"{prefix}.{part}") for prefix in ("bert", "roberta") for part in ("embeddings.", "encoder.", "pooler.")
    ),
    unread_prefixes=("cls.", "lm_head."),
)
